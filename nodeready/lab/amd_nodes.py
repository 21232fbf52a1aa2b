"""Nodes with AMD Instinct accelerators: modelled on 8-way MI300X (OAM) platforms."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from nodeready.lab import adapters, amd_smi, infiniband
from nodeready.lab.hardware import SERVER, File, Hardware, PciDevice, pci_trees

_VENDOR = "0x1002"

# The answers of the tool are in a program of their own, where a fault can put others.
_ANSWERS = "/.lab/amd-smi"
_TOOL = f'#!/bin/sh\n# A stand-in: prints what was recorded.\nexec {_ANSWERS} "$@"\n'


def make(
    *,
    gpus: Mapping[int, Mapping[str, Any]] = {},
    missing: Collection[int] = (),
    ports: Mapping[str, Mapping[str, Any]] = {},
    numa_balancing: int = 0,
    log: Mapping[int, str] = {},
) -> Hardware:
    """A node with eight MI300X, with what differs from a healthy one.

    gpus:    index -> fields of `amd_smi.Mi300x` that it has instead
    missing: GPUs that amd-smi does not show
    log:     GPU -> what the kernel's log says of it
    ports:   RDMA device -> fields of `infiniband.Device` that it has instead
    """
    devices = [replace(one, **ports.get(one.name, {})) for one in infiniband.mi300x()]
    nics = adapters.interfaces(devices)
    functions = [*SERVER, *_gpus(gpus), *adapters.pci(devices, nics)]
    return Hardware(
        trees={
            **pci_trees(*functions),
            **adapters.trees(devices, nics),
            "/sys/module/amdgpu": {"version": "6.12.12\n", "initstate": "live\n"},
        },
        files={
            "/usr/bin/amd-smi": File(_TOOL, 0o755),
            _ANSWERS: File(amd_smi.stand_in(amd_smi.outputs(gpus, missing)), 0o755),
        },
        devices={
            "/dev/kfd": 0o666,
            **{f"/dev/dri/renderD{128 + at}": 0o666 for at in range(len(amd_smi.BUSES))},
            **adapters.device_files(devices),
        },
        sysctls={"kernel/numa_balancing": str(numa_balancing)},
        kernel_log=(
            (11.201544, "[drm] amdgpu kernel modesetting enabled."),
            *(
                (4711.083342, f"amdgpu 0000:{amd_smi.BUSES[at]}:00.0: amdgpu: {text}")
                for at, text in log.items()
            ),
        ),
    )


def _gpus(gpus: Mapping[int, Mapping[str, Any]]) -> list[PciDevice]:
    speed = "32.0 GT/s PCIe"
    links = [
        (speed, gpus.get(at, {}).get("pcie_width", 16), speed, 16)
        for at in range(len(amd_smi.BUSES))
    ]
    # Class 0x1200: processing accelerator, the one that Instinct boards bear.
    return [
        PciDevice(f"0000:{bus}:00.0", _VENDOR, "0x74a1", "0x120000", at // 4, "amdgpu", links[at])
        for at, bus in enumerate(amd_smi.BUSES)
    ]

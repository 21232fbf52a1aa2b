"""Nodes with AMD Instinct accelerators: modelled on 8-way MI300X (OAM) platforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nodeready.lab import adapters, infiniband
from nodeready.lab.hardware import SERVER, Hardware, PciDevice, pci_trees

_VENDOR = "0x1002"

# Bus numbers of the eight accelerators, four per socket.
BUSES = ("05", "29", "49", "65", "85", "a5", "c5", "e5")


def make(
    *,
    gpus: Mapping[int, Mapping[str, Any] | None] = {},
    ports: Mapping[str, Mapping[str, Any]] = {},
    numa_balancing: int = 0,
    kernel_log: Sequence[tuple[float, str]] = (),
) -> Hardware:
    """A node with eight MI300X, with what differs from a healthy one."""
    devices = [replace(one, **ports.get(one.name, {})) for one in infiniband.mi300x()]
    nics = adapters.interfaces(devices)
    functions = [*SERVER, *_gpus(), *adapters.pci(devices, nics)]
    return Hardware(
        trees={**pci_trees(*functions), **adapters.trees(devices, nics)},
        devices={
            "/dev/kfd": 0o666,
            **{f"/dev/dri/renderD{128 + at}": 0o666 for at in range(len(BUSES))},
            **adapters.device_files(devices),
        },
        sysctls={"kernel/numa_balancing": str(numa_balancing)},
        kernel_log=((11.201544, "[drm] amdgpu kernel modesetting enabled."), *kernel_log),
    )


def _gpus() -> list[PciDevice]:
    link = ("32.0 GT/s PCIe", 16, "32.0 GT/s PCIe", 16)
    # Class 0x1200: processing accelerator, the one that Instinct boards bear.
    return [
        PciDevice(f"0000:{bus}:00.0", _VENDOR, "0x74a1", "0x120000", at // 4, "amdgpu", link)
        for at, bus in enumerate(BUSES)
    ]

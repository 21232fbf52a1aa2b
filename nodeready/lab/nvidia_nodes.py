"""Nodes with NVIDIA GPUs: modelled on DGX H100 and DGX A100.

PCI addresses are those of NVIDIA's user guides of these systems; PCI ids are those of pci.ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nodeready.lab import adapters, infiniband, nvidia_smi, nvidia_tool
from nodeready.lab.hardware import SERVER, File, Hardware, PciDevice, pci_trees
from nodeready.lab.infiniband import Device

_VENDOR = "0x10de"

# The fabric manager is a service that never ends; its name is what a look recognises it by.
_FABRIC_MANAGER = "/usr/bin/nv-fabricmanager"
_FABRIC_MANAGER_SCRIPT = """\
#!/bin/sh
# A stand-in: only its name matters.
while :; do sleep 86400; done
"""
_START = f"{_FABRIC_MANAGER} >/dev/null 2>&1 </dev/null &\n"


@dataclass(frozen=True)
class System:
    """A server: where its GPUs and NVSwitches are, and its RDMA devices."""

    model: str
    gpu: str
    gpus: tuple[str, ...]
    switch: str
    switches: tuple[str, ...]
    pcie: str
    ports: Callable[[], tuple[Device, ...]]


SYSTEMS = {
    "h100": System(
        "h100",
        "0x2330",
        ("1b", "43", "52", "61", "9d", "c3", "d1", "df"),
        "0x22a3",
        ("05", "06", "07", "08"),
        "32.0 GT/s PCIe",
        infiniband.h100,
    ),
    "a100": System(
        "a100",
        "0x20b2",
        ("07", "0f", "47", "4e", "87", "90", "b7", "bd"),
        "0x1af1",
        ("c4", "c5", "c6", "c7", "c8", "c9"),
        "16.0 GT/s PCIe",
        infiniband.a100,
    ),
}


def make(
    model: str,
    *,
    gpus: Mapping[int, Mapping[str, Any] | None] = {},
    ports: Mapping[str, Mapping[str, Any]] = {},
    cut: Collection[str] = (),
    inactive: Collection[tuple[int, int]] = (),
    tool: str = "ok",
    fabric_manager: bool = True,
    xids: Mapping[int, tuple[int, str]] = {},
) -> Hardware:
    """A node of this model, with what differs from a healthy one.

    gpus:     index -> what nvidia-smi shows of it instead (`nvidia_smi.CHANGES`); None: nothing
    ports:    RDMA device -> fields of `infiniband.Device` that it has instead
    cut:      interfaces without a link
    inactive: NVLinks that are down, as (GPU, link)
    tool:     what nvidia-smi does (`nvidia_tool.BEFORE`)
    xids:     GPU -> code and text of an Xid in the kernel's log
    """
    system = SYSTEMS[model]
    # Without its manager the fabric stays as it is after a boot.
    fabric = {} if fabric_manager else {"fabric_state": "In Progress", "fabric_status": "N/A"}
    shown = {
        at: {"address": f"0000:{bus}:00.0", **fabric, **(gpus.get(at) or {})}
        for at, bus in enumerate(system.gpus)
        if gpus.get(at, {}) is not None
    }
    devices = [replace(one, **ports.get(one.name, {})) for one in system.ports()]
    nics = [
        replace(nic, up=nic.name not in cut and nic.up) for nic in adapters.interfaces(devices)
    ]
    functions = [
        *SERVER,
        *_gpus(system, gpus),
        *(
            PciDevice(
                f"0000:{bus}:00.0", _VENDOR, system.switch, "0x068000", driver="nvidia-nvswitch"
            )
            for bus in system.switches
        ),
        *adapters.pci(devices, nics),
    ]
    return Hardware(
        trees={
            **pci_trees(*functions),
            **adapters.trees(devices, nics),
            "/sys/module/nvidia": {"version": f"{nvidia_smi.DRIVER}\n", "initstate": "live\n"},
            "/proc/driver": {"nvidia/version": _version()},
        },
        files={
            **nvidia_tool.files(shown, model, inactive, tool),
            _FABRIC_MANAGER: File(_FABRIC_MANAGER_SCRIPT, 0o755),
        },
        devices={
            **{f"/dev/nvidia{at}": 0o666 for at in range(len(system.gpus))},
            **{f"/dev/nvidia{name}": 0o666 for name in ("ctl", "-uvm", "-uvm-tools")},
            **{f"/dev/nvidia-nvswitch{at}": 0o666 for at in range(len(system.switches))},
            **adapters.device_files(devices),
        },
        kernel_log=(
            (
                12.440917,
                "nvidia-nvlink: Nvlink Core is being initialized, major device number 511",
            ),
            (12.912003, f"NVRM: loading NVIDIA UNIX x86_64 Kernel Module  {nvidia_smi.DRIVER}"),
            *_log(system, xids),
        ),
        start=_START if fabric_manager else "",
    )


def _gpus(system: System, gpus: Mapping[int, Mapping[str, Any] | None]) -> list[PciDevice]:
    made = []
    for at, bus in enumerate(system.gpus):
        width = (gpus.get(at) or {}).get("pcie_width", 16)
        link = (system.pcie, width, system.pcie, 16)
        made.append(
            PciDevice(f"0000:{bus}:00.0", _VENDOR, system.gpu, "0x030200", at // 4, "nvidia", link)
        )
    return made


def _log(system: System, xids: Mapping[int, tuple[int, str]]) -> Iterator[tuple[float, str]]:
    for at, (code, text) in xids.items():
        where = f"PCI:0000:{system.gpus[at]}:00"
        yield 4711.083342 + at, f"NVRM: Xid ({where}): {code}, {text}"


def _version() -> str:
    return (
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {nvidia_smi.DRIVER}"
        "  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  gcc version 12.3.0 (Ubuntu)\n"
    )

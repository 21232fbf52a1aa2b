"""Nodes with AMD Instinct accelerators: modelled on 8-way MI300X (OAM) platforms."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nodeready.lab import adapters
from nodeready.lab.hardware import SERVER, File, Hardware, accelerators, log_lines, pci_trees

# --- The output of amd-smi with AMD Instinct MI300X, and a stand-in that prints it.
#
#     outputs()                                  # 8 healthy GPUs
#     outputs(changes={3: {"uncorrectable": 2}}) # GPU 3 has two uncorrectable errors
#     outputs(missing=(5,))                      # the driver has lost GPU 5
#     stand_in(outputs())                        # the text of /usr/bin/amd-smi
#
# The format is that of amd-smi 25 and 26 (ROCm 6.4 and 7): ROCm/amdsmi, amdsmi_commands.py.

#: Bus numbers of the eight accelerators of an 8-way MI300X (OAM) platform, four per socket.
BUSES = ("05", "29", "49", "65", "85", "a5", "c5", "e5")


@dataclass(frozen=True)
class Mi300x:
    """The values that may differ between two MI300X; the defaults are a healthy, idle GPU."""

    model: str = "AMD Instinct MI300X"
    vbios: str = "113-M3000100-103"
    correctable: int = 0
    uncorrectable: int = 0
    deferred: int = 0
    ecc: str = "ENABLED"
    pcie_width: int = 16
    pcie_speed: int = 32
    xgmi_uncorrectable: int = 0  # errors of its links that RAS counts
    down: tuple[int, ...] = ()  # the GPUs to which its link is down
    hotspot_celsius: int = 45
    memory_celsius: int = 38
    used_mb: int = 283
    violation: str = ""  # ``prochot``, ``socket_thermal``, ``vr_thermal`` or ``hbm_thermal``
    # other values of these subcommands, at any depth
    static: Mapping[str, Any] = field(default_factory=dict)
    metric: Mapping[str, Any] = field(default_factory=dict)  # likewise


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with these changes at any depth."""
    merged = dict(values)
    for name, value in changes.items():
        is_deep = isinstance(value, Mapping) and isinstance(values.get(name), Mapping)
        merged[name] = _merged(values[name], value) if is_deep else value
    return merged


def _value(value: float | str, unit: str) -> dict[str, Any]:
    return {"value": value, "unit": unit}


def _static(index: int, bus: str, gpu: Mi300x) -> dict[str, Any]:
    blocks = ("UMC", "SDMA", "GFX", "MMHUB", "PCIE_BIF", "HDP", "XGMI_WAFL")
    return {
        "gpu": index,
        "asic": {
            "market_name": gpu.model,
            "vendor_id": "0x1002",
            "device_id": "0x74a1",
            "rev_id": "0x00",
            "asic_serial": f"0x{0x5F1CC6AB32BB1B80 + index:X}",
            "oam_id": index,
            "target_graphics_version": "gfx942",
        },
        "bus": {
            "bdf": f"0000:{bus}:00.0",
            "max_pcie_width": 16,
            "max_pcie_speed": _value(32, "GT/s"),
            "pcie_interface_version": "Gen 5",
            "slot_type": "OAM",
        },
        "vbios": {
            "name": "AMD MI300X_HW_SRIOV_CVS_1VF",
            "build_date": "2025/03/05 22:28",
            "part_number": gpu.vbios,
            "version": "022.040.003.043.000001",
        },
        "limit": {
            "max_power": _value(750, "W"),
            "slowdown_edge_temperature": "N/A",
            "slowdown_hotspot_temperature": _value(100, "C"),
            "slowdown_vram_temperature": _value(105, "C"),
            "shutdown_hotspot_temperature": _value(110, "C"),
        },
        "driver": {"name": "amdgpu", "version": "6.12.12"},
        "board": {"product_serial": f"69232000{index:04}", "product_name": gpu.model},
        "ras": {
            "eeprom_version": "0x30000",
            "bad_page_threshold": 256,
            "ecc_block_state": dict.fromkeys(blocks, gpu.ecc),
        },
        "partition": {
            "accelerator_partition": "SPX",
            "memory_partition": "NPS1",
            "partition_id": "0",
        },
        "numa": {"node": index // 4, "affinity": index // 4},
        "vram": {"type": "HBM", "size": _value(196592, "MB")},
    }


def _metric(index: int, gpu: Mi300x) -> dict[str, Any]:
    none = {"correctable_count": 0, "uncorrectable_count": 0, "deferred_count": 0}
    umc = {
        "correctable_count": gpu.correctable,
        "uncorrectable_count": gpu.uncorrectable,
        "deferred_count": gpu.deferred,
    }
    kinds = ("prochot", "ppt", "socket_thermal", "vr_thermal", "hbm_thermal")
    return {
        "gpu": index,
        "usage": {"gfx_activity": _value(0, "%"), "umc_activity": _value(0, "%")},
        "power": {"socket_power": _value(138, "W"), "throttle_status": "N/A"},
        "temperature": {
            "edge": "N/A",
            "hotspot": _value(gpu.hotspot_celsius, "C"),
            "mem": _value(gpu.memory_celsius, "C"),
        },
        "pcie": {
            "width": gpu.pcie_width,
            "speed": _value(gpu.pcie_speed, "GT/s"),
            "replay_count": 0,
        },
        "ecc": {
            "total_correctable_count": gpu.correctable,
            "total_uncorrectable_count": gpu.uncorrectable + gpu.xgmi_uncorrectable,
            "total_deferred_count": gpu.deferred,
        },
        "ecc_blocks": {
            "UMC": umc,
            "GFX": none,
            "XGMI_WAFL": {**none, "uncorrectable_count": gpu.xgmi_uncorrectable},
        },
        "perf_level": "AMDSMI_DEV_PERF_LEVEL_AUTO",
        "xgmi_err": "N/A",
        "mem_usage": {"total_vram": _value(196592, "MB"), "used_vram": _value(gpu.used_mb, "MB")},
        "throttle": {
            f"{kind}_violation_status": "ACTIVE" if kind == gpu.violation else "NOT ACTIVE"
            for kind in kinds
        },
    }


def outputs(
    changes: Mapping[int, Mapping[str, Any]] | None = None,
    missing: Collection[int] = (),
    buses: Sequence[str] = BUSES,
) -> dict[str, str]:
    """The output of ``amd-smi static``, ``metric`` and ``xgmi`` with ``--json``, by subcommand.

    changes: number of a GPU -> fields of Mi300x that differ
    missing: GPUs that the driver does not have; the tool numbers the remaining ones from 0
    """
    changed = changes or {}
    present = [slot for slot in range(len(buses)) if slot not in missing]
    static, metric, table, status = [], [], [], []
    for index, slot in enumerate(present):
        gpu, address = replace(Mi300x(), **changed.get(slot, {})), f"0000:{buses[slot]}:00.0"
        static.append(_merged(_static(index, buses[slot], gpu), gpu.static))
        metric.append(_merged(_metric(index, gpu), gpu.metric))
        words = ["X" if peer == slot else "D" if peer in gpu.down else "U" for peer in present]
        table.append({"gpu": index, "bdf": address, "link_metrics": {"link_type": "XGMI"}})
        status.append({"gpu": index, "bdf": address, "link_status": words})
    return {
        "static": json.dumps({"gpu_data": static}, indent=1),
        "metric": json.dumps({"gpu_data": metric}, indent=1),
        "xgmi": f"{json.dumps(table, indent=1)}\n{json.dumps(status, indent=1)}",
    }


def stand_in(printed: Mapping[str, str], before: str = "") -> str:
    """The text of a program that prints the output of its subcommand.

    printed: the output, by subcommand
    before:  shell text that it runs first
    """
    cases = [f"{name})\ncat <<'END'\n{text}\nEND\n;;" for name, text in printed.items()]
    body = "\n".join(cases)
    return (
        f"#!/bin/sh\n# A stand-in for amd-smi.\n{before}case $1 in\n{body}\n"
        '*)\necho "amd-smi: unknown command $1" >&2\nexit 2\n;;\nesac\n'
    )


# The tool runs a second program with the answers, which a fault can replace.
_ANSWERS = "/.lab/amd-smi"
_TOOL = f'#!/bin/sh\n# A stand-in: prints recorded answers.\nexec {_ANSWERS} "$@"\n'


def make(
    *,
    gpus: Mapping[int, Mapping[str, Any]] = {},
    missing: Collection[int] = (),
    unbound: Collection[int] = (),
    unplugged: Collection[int] = (),
    ports: Mapping[str, Mapping[str, Any]] = {},
    nics: Mapping[str, Mapping[str, Any]] = {},
    tool: str = "",
    numa_balancing: int = 0,
    log: Sequence[str] = (),
) -> Hardware:
    """A node with eight MI300X, with its differences from a healthy one.

    gpus:      index -> fields of `Mi300x`
    missing:   GPUs that amd-smi does not show
    unbound:   GPUs that have no driver: amd-smi does not show them either
    unplugged: GPUs that are not on the PCI bus
    ports:     RDMA device -> fields of `adapters.Device`
    nics:      interface -> fields of `adapters.NetDevice`
    tool:      shell text that amd-smi runs first
    log:       further lines of the kernel's log; {gpu[3]} is the address of GPU 3
    """
    devices, interfaces = adapters.adapters(adapters.mi300x(), ports, nics)
    hidden = {*missing, *unbound, *unplugged}
    widths = {index: gpu["pcie_width"] for index, gpu in gpus.items() if "pcie_width" in gpu}
    # Class 0x1200 is "processing accelerator", the class of Instinct boards.
    cards = accelerators(
        BUSES,
        vendor="0x1002",
        device="0x74a1",
        pci_class="0x120000",
        driver="amdgpu",
        speed="32.0 GT/s PCIe",
        widths=widths,
        unbound=unbound,
        unplugged=unplugged,
    )
    functions = [*SERVER, *cards, *adapters.pci(devices, interfaces)]
    return Hardware(
        trees={
            **pci_trees(*functions),
            **adapters.trees(devices, interfaces),
            "/sys/module/amdgpu": {"version": "6.12.12\n", "initstate": "live\n"},
        },
        files={
            "/usr/bin/amd-smi": File(_TOOL, 0o755),
            _ANSWERS: File(stand_in(outputs(gpus, hidden), tool), 0o755),
        },
        devices={
            "/dev/kfd": 0o666,
            **{f"/dev/dri/renderD{128 + index}": 0o666 for index in range(len(BUSES))},
            **adapters.device_files(devices),
        },
        sysctls={"kernel/numa_balancing": str(numa_balancing)},
        kernel_log=(
            (11.201544, "[drm] amdgpu kernel modesetting enabled."),
            *log_lines(log, BUSES),
        ),
    )

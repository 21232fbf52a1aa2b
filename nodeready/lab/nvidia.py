"""Nodes with NVIDIA GPUs: modelled on DGX A100, H100, H200 and B200, and a server with L40S cards.

PCI addresses are those of NVIDIA's user guides of these systems; PCI ids are those of pci.ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from nodeready.lab import adapters
from nodeready.lab.adapters import Device
from nodeready.lab.hardware import (
    SERVER,
    File,
    Hardware,
    PciDevice,
    accelerators,
    log_lines,
    pci_trees,
)

# --- The output of nvidia-smi, of healthy H100 or A100 GPUs and of faulty ones.
#
#     query([{"address": "0000:1b:00.0"}, {"address": "0000:43:00.0", "ecc_uncorrectable": 2}])
#     nvlink_status(8, "a100", inactive={(3, 11)})
#
# The form is that of driver 535 (schema v12), or of driver 570 (v13) where `Board.xml` is `_V13`.
# `CHANGES` has the keys that a GPU of the list may have beside its address.

DRIVER = "535.129.03"
CUDA = "12.2"
_GEN5 = "32.0 GT/s PCIe"
_HOPPER_BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")


@dataclass(frozen=True, kw_only=True)
class Board:
    """A model of GPU, and the server with it."""

    product: str
    architecture: str
    vbios: str
    device_id: str
    memory_mib: int
    ports: Callable[[], tuple[Device, ...]]
    buses: tuple[str, ...] = _HOPPER_BUSES  # PCI buses of the GPUs
    switch_id: str = ""
    switches: tuple[str, ...] = ()  # PCI buses of the NVSwitches that the server shows
    generation: int = 5  # of PCIe
    speed: str = _GEN5
    links: int = 18  # NVLinks of a GPU
    link_gbps: str = "26.562"  # GB/s of an NVLink
    rows: int  # spare rows of memory ("bank(s)" in the output)
    # nvidia-smi shows the degrees up to the limit (Hopper), not the limits (Ampere)
    tlimit: bool = True
    fabric: bool = True
    fabric_manager: bool = True  # the server has a fabric manager
    driver: str = DRIVER
    cuda: str = CUDA
    # further elements of its driver's output, and other values, as in `CHANGES`
    xml: Mapping[str, str | None] = field(default_factory=dict)


# As driver 570 shows a B200 on an HGX board.
_V13: Mapping[str, str | None] = {
    "gpu_reset_status": None,
    "gpu_recovery_action": "None",
    "ecc_errors/aggregate/sram_threshold_exceeded": "No",
    "ecc_errors/channel_repair_pending": "No",
    "ecc_errors/tpc_repair_pending": "No",
    "fabric/cliqueId": "0",
    "fabric/clusterUuid": "00000000-0000-0000-0000-000000000000",
    "fabric/health/summary": "Healthy",
    "fabric/health/bandwidth": "N/A",
    "fabric/health/route_recovery_in_progress": "N/A",
    "fabric/health/route_unhealthy": "N/A",
    "fabric/health/access_timeout_recovery": "False",
    "fabric/health/incorrect_configuration": "N/A",
}

_SWITCHES: dict[str, Any] = {"switch_id": "0x22a3", "switches": ("05", "06", "07", "08")}
_GEN4: dict[str, Any] = {"generation": 4, "speed": "16.0 GT/s PCIe", "fabric": False}

BOARDS = {
    "h100": Board(
        product="NVIDIA H100 80GB HBM3", architecture="Hopper", vbios="96.00.89.00.01",
        device_id="2330", memory_mib=81559, rows=2560, ports=adapters.h100, **_SWITCHES,
    ),
    "h200": Board(
        product="NVIDIA H200", architecture="Hopper", vbios="96.00.BC.00.01",
        device_id="2335", memory_mib=143771, rows=3072, ports=adapters.h100, **_SWITCHES,
    ),
    # The switches of a B200 are behind their own adapters.
    "b200": Board(
        product="NVIDIA B200", architecture="Blackwell", vbios="97.00.9A.00.0F",
        device_id="2901", memory_mib=183359, rows=6144, ports=adapters.h100,
        link_gbps="53.125", driver="570.133.20", cuda="12.8", xml=_V13,
    ),
    "a100": Board(
        product="NVIDIA A100-SXM4-80GB", architecture="Ampere", vbios="92.00.45.00.03",
        device_id="20B2", memory_mib=81920, rows=640, ports=adapters.a100,
        buses=("07", "0f", "47", "4e", "87", "90", "b7", "bd"),
        switch_id="0x1af1", switches=("c4", "c5", "c6", "c7", "c8", "c9"),
        links=12, link_gbps="25", tlimit=False, **_GEN4,
    ),
    "l40s": Board(
        product="NVIDIA L40S", architecture="Ada Lovelace", vbios="95.02.66.00.02",
        device_id="26B9", memory_mib=46068, rows=192, ports=adapters.l40s,
        buses=_HOPPER_BUSES[:4], links=0, fabric_manager=False, **_GEN4,
    ),
}  # fmt: skip

#: The values that may differ between two GPUs; these are a healthy GPU's.
CHANGES: Mapping[str, Any] = {
    "product": "",  # "": the board's
    "vbios": "",
    "persistence": "on",
    "mig": "off",
    "ecc": "on",
    "ecc_uncorrectable": 0,
    "ecc_correctable": 0,
    "ecc_uncorrectable_aggregate": 0,
    "remap_pending": False,
    "remap_failed": False,
    "retired_pending": False,
    "reset_required": False,
    "pcie_generation": 0,  # 0: the greatest
    "pcie_width": 16,
    "temperature_c": 31,
    "throttle": (),  # of "hw_slowdown", "hw_thermal_slowdown", …
    "fabric_state": "Completed",
    "fabric_status": "Success",
    "processes": (),  # (pid, name, MiB)
    "xml": {},  # path below <gpu> -> its text; None: no such element
}

_SWITCH = {"on": "Enabled", "off": "Disabled"}
_REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "display_clocks_setting",
)


def uuid(index: int) -> str:
    """The UUID of the GPU with this index, the same in all answers of the tool."""
    return f"GPU-{0x5269B708 + index:08x}-678a-b1a8-60f0-c904064{index:05x}"


def _yes(value: object) -> str:
    return "Yes" if value else "No"


def _temperature(board: Board, gpu_c: int) -> dict[str, str]:
    if board.tlimit:
        memory, kind = gpu_c + 8, "_tlimit_threshold"
        limit, maximum, slow, gpu, memory_maximum = f"{86 - gpu_c} C", -8, -2, 0, 0
    else:
        memory, kind = gpu_c + 6, "_threshold"
        limit, maximum, slow, gpu, memory_maximum = "N/A", 92, 89, 85, 95
    return {
        "gpu_temp": f"{gpu_c} C",
        "gpu_temp_tlimit": limit,
        f"gpu_temp_max{kind}": f"{maximum} C",
        f"gpu_temp_slow{kind}": f"{slow} C",
        f"gpu_temp_max_gpu{kind}": f"{gpu} C",
        "gpu_target_temperature": "N/A",
        "memory_temp": f"{memory} C",
        f"gpu_temp_max_mem{kind}": f"{memory_maximum} C",
    }


def _process(pid: int, name: str, mib: int) -> str:
    values = {
        "gpu_instance_id": "N/A",
        "compute_instance_id": "N/A",
        "pid": pid,
        "type": "C",
        "process_name": escape(name),
        "used_memory": f"{mib} MiB",
    }
    return _element("process_info", values, 3)


def _counters(is_on: bool, correctable: int, uncorrectable: int) -> dict[str, object]:
    values = {
        "sram_correctable": 0,
        "sram_uncorrectable": 0,
        "dram_correctable": correctable,
        "dram_uncorrectable": uncorrectable,
    }
    return {name: value if is_on else "N/A" for name, value in values.items()}


def _gpu(index: int, address: str, board: Board, changes: Mapping[str, Any]) -> str:
    """One ``<gpu>`` element. Raises KeyError for a change that is not in `CHANGES`."""
    if unknown := set(changes) - set(CHANGES):
        raise KeyError(f"nvidia-smi shows no {', '.join(sorted(unknown))}")
    gpu = {**CHANGES, **changes}
    domain, bus, device = address.upper().split(":")
    pci = f"{int(domain, 16):08X}:{bus}:{device}"
    ecc, mig = _SWITCH[gpu["ecc"]], _SWITCH[gpu["mig"]]
    is_on = gpu["ecc"] == "on"
    retired = "Yes" if gpu["retired_pending"] else "N/A"
    used = sum(mib for _, _, mib in gpu["processes"])
    active = gpu["throttle"] or ("gpu_idle",)
    values: dict[str, Any] = {
        "product_name": gpu["product"] or board.product,
        "product_brand": "NVIDIA",
        "product_architecture": board.architecture,
        "persistence_mode": _SWITCH[gpu["persistence"]],
        "mig_mode": {"current_mig": mig, "pending_mig": mig},
        "mig_devices": "\n\t\t\tNone\n\t\t",
        "serial": 1650522003820 + index,
        "uuid": uuid(index),
        "minor_number": index,
        "vbios_version": gpu["vbios"] or board.vbios,
        "gpu_virtualization_mode": {"virtualization_mode": "None", "host_vgpu_mode": "N/A"},
        "gpu_reset_status": {
            "reset_required": _yes(gpu["reset_required"]),
            "drain_and_reset_recommended": "No",
        },
        "pci": {
            "pci_bus": bus,
            "pci_device": device.partition(".")[0],
            "pci_domain": domain,
            "pci_device_id": f"{board.device_id}10DE",
            "pci_bus_id": pci,
            "pci_gpu_link_info": {
                "pcie_gen": {
                    "max_link_gen": board.generation,
                    "current_link_gen": gpu["pcie_generation"] or board.generation,
                    "max_device_link_gen": board.generation,
                    "max_host_link_gen": board.generation,
                },
                "link_widths": {
                    "max_link_width": "16x",
                    "current_link_width": f"{gpu['pcie_width']}x",
                },
            },
            "replay_counter": 0,
        },
        "fan_speed": "N/A",
        "performance_state": "P0",
        "clocks_event_reasons": {
            f"clocks_event_reason_{name}": "Active" if name in active else "Not Active"
            for name in _REASONS
        },
        "fb_memory_usage": {
            "total": f"{board.memory_mib} MiB",
            "reserved": "551 MiB",
            "used": f"{used} MiB",
            "free": f"{board.memory_mib - 551 - used} MiB",
        },
        "compute_mode": "Default",
        "ecc_mode": {"current_ecc": ecc, "pending_ecc": ecc},
        "ecc_errors": {
            "volatile": _counters(is_on, gpu["ecc_correctable"], gpu["ecc_uncorrectable"]),
            "aggregate": _counters(is_on, 0, gpu["ecc_uncorrectable_aggregate"]),
        },
        "retired_pages": {"pending_blacklist": retired, "pending_retirement": retired},
        "remapped_rows": {
            "remapped_row_corr": 0,
            "remapped_row_unc": int(gpu["remap_pending"]),
            "remapped_row_pending": _yes(gpu["remap_pending"]),
            "remapped_row_failure": _yes(gpu["remap_failed"]),
            "row_remapper_histogram": {"row_remapper_histogram_max": f"{board.rows} bank(s)"},
        },
        "temperature": _temperature(board, gpu["temperature_c"]),
        "gpu_power_readings": {
            "power_state": "P0",
            "power_draw": "69.03 W",
            "current_power_limit": "700.00 W",
        },
        "fabric": {
            "state": gpu["fabric_state"] if board.fabric else "N/A",
            "status": gpu["fabric_status"] if board.fabric else "N/A",
        },
        "processes": "".join(_process(*process) for process in gpu["processes"]) + "\n\t\t",
        "accounted_processes": {},
    }
    for path, text in {**board.xml, **gpu["xml"]}.items():
        *parents, name = path.split("/")
        parent = values
        for element in parents:
            parent = parent.setdefault(element, {})
        if text is None:
            del parent[name]
        else:
            parent[name] = text
    return _element("gpu", values, 1).replace("<gpu>", f'<gpu id="{pci}">', 1)


def _element(name: str, value: object, depth: int) -> str:
    """An XML element with a text, or with elements by their names."""
    indent = "\n" + depth * "\t"
    if isinstance(value, Mapping):
        parts = (_element(part, text, depth + 1) for part, text in value.items())
        value = f"{''.join(parts)}{indent}"
    return f"{indent}<{name}>{value}</{name}>"


def query(gpus: Iterable[Mapping[str, Any]], model: str = "h100") -> str:
    """``nvidia-smi -q -x`` of a node with these GPUs: each has its ``address`` and `CHANGES`."""
    board = BOARDS[model]
    shown = []
    for index, gpu in enumerate(gpus):
        changes = {name: value for name, value in gpu.items() if name != "address"}
        shown.append(_gpu(index, gpu["address"], board, changes))
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
\t<timestamp>Mon Jan  6 09:00:00 2025</timestamp>
\t<driver_version>{board.driver}</driver_version>
\t<cuda_version>{board.cuda}</cuda_version>
\t<attached_gpus>{len(shown)}</attached_gpus>{"".join(shown)}

</nvidia_smi_log>
"""


def nvlink_status(
    count: int, model: str = "h100", inactive: Collection[tuple[int, int]] = ()
) -> str:
    """``nvidia-smi nvlink --status`` of ``count`` GPUs; ``inactive``: (GPU, link) that are down.

    nvidia-smi prints one line for a GPU whose links are all inactive, and nothing without links.
    """
    board = BOARDS[model]
    if not board.links:
        return ""
    lines = []
    for gpu in range(count):
        lines.append(f"GPU {gpu}: {board.product} (UUID: {uuid(gpu)})")
        if all((gpu, link) in inactive for link in range(board.links)):
            lines.append(
                "\t NVML: Unable to retrieve NVLink information as all links are inActive"
            )
            continue
        for link in range(board.links):
            state = "<inactive>" if (gpu, link) in inactive else f"{board.link_gbps} GB/s"
            lines.append(f"\t Link {link}: {state}")
    return "\n".join(lines) + "\n"


# --- nvidia-smi on a node: a script that prints this output from files.
#
# The answers lie below `HOME`; a file `before` there is run first, for a tool that hangs or fails.

HOME = "/.lab/nvidia-smi"

_SCRIPT = f"""\
#!/bin/sh
# A stand-in: prints recorded answers.
cd {HOME} || exit
if [ -e before ]; then . ./before; fi
case " $* " in
*" nvlink "*) exec cat nvlink ;;
*" -q -x "* | *" -x -q "* | *" -qx "* | *" -xq "*) exec cat query.xml ;;
*" -L "* | *" --list-gpus "*) exec cat list ;;
"  ") exec cat list ;;
esac
printf 'Invalid combination of input arguments. Please run '\\''nvidia-smi -h'\\'' for help.\\n\\n'
exit 6
"""

#: Shell text that breaks the tool.
BEFORE = {
    "ok": "",
    "hangs": "trap '' TERM INT HUP\nwhile :; do sleep 86400; done\n",
    "fails": """\
echo 'Failed to initialize NVML: Driver/library version mismatch'
echo 'NVML library version: 550.54'
exit 18
""",
}


_VENDOR = "0x10de"

# The fabric manager is a service that never ends; a probe recognises it by its name.
_FABRIC_MANAGER = "/usr/bin/nv-fabricmanager"
_FABRIC_MANAGER_SCRIPT = """\
#!/bin/sh
# A stand-in: only its name matters.
while :; do sleep 86400; done
"""
_START = f"{_FABRIC_MANAGER} >/dev/null 2>&1 </dev/null &\n"


def make(
    model: str,
    *,
    gpus: Mapping[int, Mapping[str, Any]] = {},
    missing: Collection[int] = (),
    unbound: Collection[int] = (),
    unplugged: Collection[int] = (),
    ports: Mapping[str, Mapping[str, Any]] = {},
    nics: Mapping[str, Mapping[str, Any]] = {},
    inactive: Iterable[Sequence[int]] = (),
    links: str | None = None,
    tool: str = "ok",
    module: bool = True,
    fabric_manager: bool = True,
    xids: Mapping[int, Sequence[Any]] = {},
    log: Sequence[str] = (),
) -> Hardware:
    """A node of this model, with its differences from a healthy one.

    gpus:           index -> values that differ in nvidia-smi's output (`CHANGES`)
    missing:        GPUs that nvidia-smi does not show
    unbound:        GPUs that have no driver: nvidia-smi does not show them either
    unplugged:      GPUs that are not on the PCI bus
    ports:          RDMA device -> fields of `adapters.Device`
    nics:           interface -> fields of `adapters.NetDevice`
    inactive:       NVLinks that are down, as (GPU, link)
    links:          the output of `nvidia-smi nvlink --status`
    tool:           shell text that nvidia-smi runs first, or a key of `BEFORE`
    module:         the driver is loaded
    fabric_manager: the fabric manager runs
    xids:           GPU -> code and text of an Xid in the kernel's log
    log:            further lines of the kernel's log; {gpu[3]} is the address of GPU 3
    """
    board = BOARDS[model]
    hidden = {*missing, *unbound, *unplugged}
    # Without the fabric manager, the fabric stays in its state after a boot.
    fabric = {} if fabric_manager else {"fabric_state": "In Progress", "fabric_status": "N/A"}
    shown = [
        {"address": f"0000:{bus}:00.0", **fabric, **gpus.get(index, {})}
        for index, bus in enumerate(board.buses)
        if index not in hidden
    ]
    down = {(gpu, link) for gpu, link in inactive}
    listed = [
        f"GPU {index}: {board.product} (UUID: {uuid(index)})\n" for index in range(len(shown))
    ]
    answers = {
        "query.xml": query(shown, model),
        "nvlink": nvlink_status(len(shown), model, down) if links is None else links,
        "list": "".join(listed),
    }
    if before := BEFORE.get(tool, tool):
        answers["before"] = before
    devices, interfaces = adapters.adapters(board.ports(), ports, nics)
    widths = {index: gpu["pcie_width"] for index, gpu in gpus.items() if "pcie_width" in gpu}
    functions = [
        *SERVER,
        *accelerators(
            board.buses,
            vendor=_VENDOR,
            device=f"0x{board.device_id.lower()}",
            pci_class="0x030200",
            driver="nvidia" if module else "",
            speed=board.speed,
            widths=widths,
            unbound=unbound,
            unplugged=unplugged,
        ),
        *(
            PciDevice(
                f"0000:{bus}:00.0", _VENDOR, board.switch_id, "0x068000", driver="nvidia-nvswitch"
            )
            for bus in board.switches
        ),
        *adapters.pci(devices, interfaces),
    ]
    version = (
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {board.driver}"
        "  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  gcc version 12.3.0 (Ubuntu)\n"
    )
    loaded = {
        "/sys/module/nvidia": {"version": f"{board.driver}\n", "initstate": "live\n"},
        "/proc/driver": {"nvidia/version": version},
    }
    xid_lines = [
        f"NVRM: Xid (PCI:0000:{board.buses[index]}:00): {code}, {text}"
        for index, (code, text) in xids.items()
    ]
    manager = {_FABRIC_MANAGER: File(_FABRIC_MANAGER_SCRIPT, 0o755)}
    nvlink_log = "nvidia-nvlink: Nvlink Core is being initialized, major device number 511"
    return Hardware(
        trees={
            **pci_trees(*functions),
            **adapters.trees(devices, interfaces),
            **(loaded if module else {}),
        },
        files={
            "/usr/bin/nvidia-smi": File(_SCRIPT, 0o755),
            **{f"{HOME}/{name}": File(text) for name, text in answers.items()},
            **(manager if board.fabric_manager else {}),
        },
        devices={
            **{f"/dev/nvidia{index}": 0o666 for index in range(len(board.buses))},
            **{f"/dev/nvidia{name}": 0o666 for name in ("ctl", "-uvm", "-uvm-tools")},
            **{f"/dev/nvidia-nvswitch{index}": 0o666 for index in range(len(board.switches))},
            **adapters.device_files(devices),
        },
        kernel_log=(
            (12.440917, nvlink_log),
            (12.912003, f"NVRM: loading NVIDIA UNIX x86_64 Kernel Module  {board.driver}"),
            *log_lines([*xid_lines, *log], board.buses),
        ),
        start=_START if board.fabric_manager and fabric_manager else "",
    )

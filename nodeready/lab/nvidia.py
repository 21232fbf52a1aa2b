"""Nodes with NVIDIA GPUs: DGX A100, H100, H200 and B200, and a server with L40S cards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from nodeready.lab import hardware
from nodeready.lab.hardware import File, Hardware, PciDevice, read_text, read_toml

# --- The output of nvidia-smi, of healthy H100 or A100 GPUs and of faulty ones.
#
#     query([{"address": "0000:1b:00.0"}, {"address": "0000:43:00.0", "ecc_uncorrectable": 2}])
#     nvlink_status(8, "a100", inactive={(3, 11)})
#
# The form is that of driver 535 (schema v12), or of driver 570 (v13) where the board has `xml`.
# `CHANGES` has the keys that a GPU of the list may have beside its address.


@dataclass(frozen=True, kw_only=True)
class Board:
    """A model of GPU, and the server with it."""

    product: str
    architecture: str
    vbios: str
    device_id: str
    memory_mib: int
    # PCI buses of the GPUs
    buses: Sequence[str] = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
    switch_id: str = ""
    switches: Sequence[str] = ()  # PCI buses of the NVSwitches that the server shows
    generation: int = 5  # of PCIe
    speed: str = "32.0 GT/s PCIe"
    links: int = 18  # NVLinks of a GPU
    link_gbps: str = "26.562"  # GB/s of an NVLink
    rows: int  # spare rows of memory ("bank(s)" in the output)
    # nvidia-smi shows the degrees up to the limit (Hopper), not the limits (Ampere)
    tlimit: bool = True
    fabric: bool = True
    fabric_manager: bool = True  # the server has a fabric manager
    driver: str = "535.129.03"
    cuda: str = "12.2"
    # further elements of its driver's output, and other values, as in `CHANGES`
    xml: Mapping[str, Any] = field(default_factory=dict)


BOARDS = {name: Board(**row) for name, row in read_toml("boards").items()}

_DATA = read_toml("nvidia")
CHANGES: Mapping[str, Any] = _DATA["changes"]
BEFORE: Mapping[str, str] = _DATA["before"]
_PROCESS = _DATA["process"]

_SWITCH = {"on": "Enabled", "off": "Disabled"}
_REASONS = (
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown",
    "hw_thermal_slowdown", "hw_power_brake_slowdown", "sync_boost", "sw_thermal_slowdown",
    "display_clocks_setting",
)  # fmt: skip


def uuid(index: int) -> str:
    """The UUID of the GPU with this index, the same in all answers of the tool."""
    return f"GPU-{0x5269B708 + index:08x}-678a-b1a8-60f0-c904064{index:05x}"


_GPU = read_text("nvidia_gpu.xml")  # ``<gpu>`` of a GPU


def _gpu(index: int, address: str, board: Board, changes: Mapping[str, Any]) -> str:
    """One ``<gpu>`` element. Raises KeyError for a change that is not in `CHANGES`."""
    if unknown := set(changes) - set(CHANGES):
        raise KeyError(f"nvidia-smi shows no {', '.join(sorted(unknown))}")
    gpu = {**CHANGES, **changes}
    domain, bus, device = address.upper().split(":")
    used_mib = sum(mib for _, _, mib in gpu["processes"])
    active, celsius = gpu["throttle"] or ("gpu_idle",), gpu["temperature_c"]
    values = {
        **vars(board),
        **{
            name: {True: "Yes", False: "No"}[value] if isinstance(value, bool) else value
            for name, value in gpu.items()
        },
        "index": index,
        "pci": f"{int(domain, 16):08X}:{bus}:{device}",
        "domain": domain,
        "bus": bus,
        "device": device.partition(".")[0],
        "product": gpu["product"] or board.product,
        "vbios": gpu["vbios"] or board.vbios,
        **{name: _SWITCH[gpu[name]] for name in ("persistence", "mig", "ecc")},
        "serial": 1650522003820 + index,
        "uuid": uuid(index),
        "pcie_generation": gpu["pcie_generation"] or board.generation,
        "reasons": "".join(
            f"<clocks_event_reason_{name}>{'' if name in active else 'Not '}Active"
            f"</clocks_event_reason_{name}>"
            for name in _REASONS
        ),
        "used_mib": used_mib,
        "free_mib": board.memory_mib - 551 - used_mib,
        "no_errors": 0,
        "retired_pending": "Yes" if gpu["retired_pending"] else "N/A",
        "remapped": int(gpu["remap_pending"]),
        "tlimit": f"{86 - celsius} C" if board.tlimit else "N/A",
        "threshold": "_tlimit_threshold" if board.tlimit else "_threshold",
        "thresholds_c": (-8, -2, 0, 0) if board.tlimit else (92, 89, 85, 95),
        "memory_c": celsius + (8 if board.tlimit else 6),
        "processes": "".join(
            _PROCESS.format(pid, escape(name), mib) for pid, name, mib in gpu["processes"]
        ),
    }
    if gpu["ecc"] != "on":
        values |= {name: "N/A" for name in values if name.startswith(("ecc_", "no_errors"))}
    if not board.fabric:
        values |= {"fabric_state": "N/A", "fabric_status": "N/A"}
    element = ElementTree.fromstring(_GPU.format(**values))
    for path, text in {**board.xml, **gpu["xml"]}.items():
        _set(element, path, text)
    ElementTree.indent(element, "\t", 1)
    return "\n\t" + ElementTree.tostring(element, "unicode")


def _set(element: ElementTree.Element, path: str, text: str | bool | None) -> None:
    """Give the element at a path this text; None or False removes it."""
    *parents, name = path.split("/")
    for parent in parents:
        inner = element.find(parent)
        element = ElementTree.SubElement(element, parent) if inner is None else inner
    child = element.find(name)
    if not text and text != "":
        assert child is not None, path
        element.remove(child)
    else:
        (ElementTree.SubElement(element, name) if child is None else child).text = str(text)


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


def _gpu_line(index: int, board: Board) -> str:
    return f"GPU {index}: {board.product} (UUID: {uuid(index)})"


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
        lines.append(_gpu_line(gpu, board))
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


_VENDOR = "0x10de"

_FABRIC_MANAGER = "/usr/bin/nv-fabricmanager"
_START = f"{_FABRIC_MANAGER} >/dev/null 2>&1 </dev/null &\n"


def make(
    model: str,
    *,
    # index -> values that differ in nvidia-smi's output (`CHANGES`)
    gpus: Mapping[int, Mapping[str, Any]] = {},
    missing: Collection[int] = (),  # GPUs that nvidia-smi does not show
    unbound: Collection[int] = (),  # GPUs without a driver: nvidia-smi does not show them either
    unplugged: Collection[int] = (),  # GPUs that are not on the PCI bus
    ports: Mapping[str, Mapping[str, Any]] = {},  # RDMA device -> fields of `hardware.Device`
    nics: Mapping[str, Mapping[str, Any]] = {},  # interface -> fields of `hardware.NetDevice`
    inactive: Iterable[Sequence[int]] = (),  # NVLinks that are down, as (GPU, link)
    links: str | None = None,  # the output of `nvidia-smi nvlink --status`
    tool: str = "ok",  # shell text that nvidia-smi runs first, or a key of `BEFORE`
    module: bool = True,  # the driver is loaded
    fabric_manager: bool = True,  # the fabric manager runs
    xids: Mapping[int, Sequence[Any]] = {},  # GPU -> code and text of an Xid in the kernel's log
    log: Sequence[str] = (),  # further lines of it; {gpu[3]} is the address of GPU 3
) -> Hardware:
    """A node of this model, with its differences from a healthy one."""
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
    answers = {
        "query.xml": query(shown, model),
        "nvlink": nvlink_status(len(shown), model, down) if links is None else links,
        "list": "".join(f"{_gpu_line(index, board)}\n" for index in range(len(shown))),
    }
    if before := BEFORE.get(tool, tool):
        answers["before"] = before
    devices, interfaces = hardware.adapters(hardware.ports_of(model), ports, nics)
    driver, device = "nvidia" if module else "", f"0x{board.device_id.lower()}"
    link = (board.speed, 16, board.speed, 16)
    card = PciDevice("", _VENDOR, device, "0x030200", driver=driver, link=link)
    switch = PciDevice("", _VENDOR, board.switch_id, "0x068000", driver="nvidia-nvswitch")
    functions = [
        *hardware.SERVER,
        *hardware.accelerators(board.buses, card, gpus, unbound, unplugged),
        *(replace(switch, address=f"0000:{bus}:00.0") for bus in board.switches),
        *hardware.pci(devices, interfaces),
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
    manager = {_FABRIC_MANAGER: File(_DATA["fabric_manager"], 0o755)}
    nvlink_log = "nvidia-nvlink: Nvlink Core is being initialized, major device number 511"
    return Hardware(
        trees={
            **hardware.pci_trees(*functions),
            **hardware.trees(devices, interfaces),
            **(loaded if module else {}),
        },
        files={
            "/usr/bin/nvidia-smi": File(read_text("nvidia-smi.sh"), 0o755),
            **{f"{HOME}/{name}": File(text) for name, text in answers.items()},
            **(manager if board.fabric_manager else {}),
        },
        devices={
            **{f"/dev/nvidia{index}": 0o666 for index in range(len(board.buses))},
            **{f"/dev/nvidia{name}": 0o666 for name in ("ctl", "-uvm", "-uvm-tools")},
            **{f"/dev/nvidia-nvswitch{index}": 0o666 for index in range(len(board.switches))},
            **hardware.device_files(devices),
        },
        kernel_log=(
            (12.440917, nvlink_log),
            (12.912003, f"NVRM: loading NVIDIA UNIX x86_64 Kernel Module  {board.driver}"),
            *hardware.log_lines([*xid_lines, *log], board.buses),
        ),
        start=_START if board.fabric_manager and fabric_manager else "",
    )

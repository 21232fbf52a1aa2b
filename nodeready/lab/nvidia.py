"""Nodes with NVIDIA GPUs: modelled on DGX A100, H100, H200 and B200, and a server with L40S cards.

PCI addresses are those of NVIDIA's user guides of these systems; PCI ids are those of pci.ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from nodeready.lab import adapters
from nodeready.lab.adapters import Device
from nodeready.lab.hardware import SERVER, File, Hardware, PciDevice, pci_trees

# --- The output of nvidia-smi, of healthy H100 or A100 GPUs and of faulty ones.
#
#     query([{"address": "0000:1b:00.0"}, {"address": "0000:43:00.0", "ecc_uncorrectable": 2}])
#     nvlink_status(8, "a100", inactive={(3, 11)})
#
# The form is that of driver 535 (schema v12), and of driver 570 (v13) for the boards that need it.
# What a GPU of the list may have beside its address is in `CHANGES`.

DRIVER = "535.129.03"
CUDA = "12.2"


@dataclass(frozen=True)
class Board:
    """What the GPUs of one model have in common.

    tlimit: Hopper prints how many degrees are left; Ampere prints the thresholds themselves
    xml:    what its driver shows beside or instead (`CHANGES`)
    """

    product: str
    architecture: str
    vbios: str
    device_id: str
    memory_mib: int
    generation: int
    links: int
    link_gbps: str
    rows: int
    tlimit: bool
    fabric: bool
    driver: str = DRIVER
    cuda: str = CUDA
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

BOARDS = {
    "h100": Board(
        "NVIDIA H100 80GB HBM3", "Hopper", "96.00.89.00.01", "2330", 81559, 5, 18, "26.562",
        2560, True, True,
    ),
    "a100": Board(
        "NVIDIA A100-SXM4-80GB", "Ampere", "92.00.45.00.03", "20B2", 81920, 4, 12, "25",
        640, False, False,
    ),
    "h200": Board(
        "NVIDIA H200", "Hopper", "96.00.BC.00.01", "2335", 143771, 5, 18, "26.562",
        3072, True, True,
    ),
    "b200": Board(
        "NVIDIA B200", "Blackwell", "97.00.9A.00.0F", "2901", 183359, 5, 18, "53.125",
        6144, True, True, "570.133.20", "12.8", _V13,
    ),
    "l40s": Board(
        "NVIDIA L40S", "Ada Lovelace", "95.02.66.00.02", "26B9", 46068, 4, 0, "",
        192, True, False,
    ),
}  # fmt: skip

#: What a GPU can differ in, with the values of a healthy one.
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
    """The UUID of the GPU with this index: the same in both answers."""
    return f"GPU-{0x5269B708 + index:08x}-678a-b1a8-60f0-c904064{index:05x}"


def _yes(value: object) -> str:
    return "Yes" if value else "No"


def _temperature(board: Board, now: int) -> str:
    if board.tlimit:
        return f"""
\t\t\t<gpu_temp>{now} C</gpu_temp>
\t\t\t<gpu_temp_tlimit>{86 - now} C</gpu_temp_tlimit>
\t\t\t<gpu_temp_max_tlimit_threshold>-8 C</gpu_temp_max_tlimit_threshold>
\t\t\t<gpu_temp_slow_tlimit_threshold>-2 C</gpu_temp_slow_tlimit_threshold>
\t\t\t<gpu_temp_max_gpu_tlimit_threshold>0 C</gpu_temp_max_gpu_tlimit_threshold>
\t\t\t<gpu_target_temperature>N/A</gpu_target_temperature>
\t\t\t<memory_temp>{now + 8} C</memory_temp>
\t\t\t<gpu_temp_max_mem_tlimit_threshold>0 C</gpu_temp_max_mem_tlimit_threshold>"""
    return f"""
\t\t\t<gpu_temp>{now} C</gpu_temp>
\t\t\t<gpu_temp_tlimit>N/A</gpu_temp_tlimit>
\t\t\t<gpu_temp_max_threshold>92 C</gpu_temp_max_threshold>
\t\t\t<gpu_temp_slow_threshold>89 C</gpu_temp_slow_threshold>
\t\t\t<gpu_temp_max_gpu_threshold>85 C</gpu_temp_max_gpu_threshold>
\t\t\t<gpu_target_temperature>N/A</gpu_target_temperature>
\t\t\t<memory_temp>{now + 6} C</memory_temp>
\t\t\t<gpu_temp_max_mem_threshold>95 C</gpu_temp_max_mem_threshold>"""


def _reasons(active: Collection[str]) -> str:
    return "".join(
        f"\n\t\t\t<clocks_event_reason_{name}>{'Active' if name in active else 'Not Active'}"
        f"</clocks_event_reason_{name}>"
        for name in _REASONS
    )


def _process(pid: int, name: str, mib: int) -> str:
    return f"""
\t\t\t<process_info>
\t\t\t\t<gpu_instance_id>N/A</gpu_instance_id>
\t\t\t\t<compute_instance_id>N/A</compute_instance_id>
\t\t\t\t<pid>{pid}</pid>
\t\t\t\t<type>C</type>
\t\t\t\t<process_name>{escape(name)}</process_name>
\t\t\t\t<used_memory>{mib} MiB</used_memory>
\t\t\t</process_info>"""


def _counters(on: bool, correctable: int, uncorrectable: int) -> str:
    values = {
        "sram_correctable": 0,
        "sram_uncorrectable": 0,
        "dram_correctable": correctable,
        "dram_uncorrectable": uncorrectable,
    }
    return "".join(
        f"\n\t\t\t\t<{name}>{value if on else 'N/A'}</{name}>" for name, value in values.items()
    )


def _gpu(index: int, address: str, board: Board, changes: Mapping[str, Any]) -> str:
    """One ``<gpu>`` element. Raises KeyError for a change that is not in `CHANGES`."""
    unknown = set(changes) - set(CHANGES)
    if unknown:
        raise KeyError(f"nvidia-smi shows no {', '.join(sorted(unknown))}")
    gpu = {**CHANGES, **changes}
    domain, bus, device = address.upper().split(":")
    pci = f"{int(domain, 16):08X}:{bus}:{device}"
    ecc = _SWITCH[gpu["ecc"]]
    on = gpu["ecc"] == "on"
    fabric = (gpu["fabric_state"], gpu["fabric_status"]) if board.fabric else ("N/A", "N/A")
    used = sum(mib for _, _, mib in gpu["processes"])
    processes = "".join(_process(*process) for process in gpu["processes"])
    text = f"""
\t<gpu id="{pci}">
\t\t<product_name>{gpu["product"] or board.product}</product_name>
\t\t<product_brand>NVIDIA</product_brand>
\t\t<product_architecture>{board.architecture}</product_architecture>
\t\t<persistence_mode>{_SWITCH[gpu["persistence"]]}</persistence_mode>
\t\t<mig_mode>
\t\t\t<current_mig>{_SWITCH[gpu["mig"]]}</current_mig>
\t\t\t<pending_mig>{_SWITCH[gpu["mig"]]}</pending_mig>
\t\t</mig_mode>
\t\t<mig_devices>
\t\t\tNone
\t\t</mig_devices>
\t\t<serial>{1650522003820 + index}</serial>
\t\t<uuid>{uuid(index)}</uuid>
\t\t<minor_number>{index}</minor_number>
\t\t<vbios_version>{gpu["vbios"] or board.vbios}</vbios_version>
\t\t<gpu_virtualization_mode>
\t\t\t<virtualization_mode>None</virtualization_mode>
\t\t\t<host_vgpu_mode>N/A</host_vgpu_mode>
\t\t</gpu_virtualization_mode>
\t\t<gpu_reset_status>
\t\t\t<reset_required>{_yes(gpu["reset_required"])}</reset_required>
\t\t\t<drain_and_reset_recommended>No</drain_and_reset_recommended>
\t\t</gpu_reset_status>
\t\t<pci>
\t\t\t<pci_bus>{bus}</pci_bus>
\t\t\t<pci_device>{device.partition(".")[0]}</pci_device>
\t\t\t<pci_domain>{domain}</pci_domain>
\t\t\t<pci_device_id>{board.device_id}10DE</pci_device_id>
\t\t\t<pci_bus_id>{pci}</pci_bus_id>
\t\t\t<pci_gpu_link_info>
\t\t\t\t<pcie_gen>
\t\t\t\t\t<max_link_gen>{board.generation}</max_link_gen>
\t\t\t\t\t<current_link_gen>{gpu["pcie_generation"] or board.generation}</current_link_gen>
\t\t\t\t\t<max_device_link_gen>{board.generation}</max_device_link_gen>
\t\t\t\t\t<max_host_link_gen>{board.generation}</max_host_link_gen>
\t\t\t\t</pcie_gen>
\t\t\t\t<link_widths>
\t\t\t\t\t<max_link_width>16x</max_link_width>
\t\t\t\t\t<current_link_width>{gpu["pcie_width"]}x</current_link_width>
\t\t\t\t</link_widths>
\t\t\t</pci_gpu_link_info>
\t\t\t<replay_counter>0</replay_counter>
\t\t</pci>
\t\t<fan_speed>N/A</fan_speed>
\t\t<performance_state>P0</performance_state>
\t\t<clocks_event_reasons>{_reasons(gpu["throttle"] or ("gpu_idle",))}
\t\t</clocks_event_reasons>
\t\t<fb_memory_usage>
\t\t\t<total>{board.memory_mib} MiB</total>
\t\t\t<reserved>551 MiB</reserved>
\t\t\t<used>{used} MiB</used>
\t\t\t<free>{board.memory_mib - 551 - used} MiB</free>
\t\t</fb_memory_usage>
\t\t<compute_mode>Default</compute_mode>
\t\t<ecc_mode>
\t\t\t<current_ecc>{ecc}</current_ecc>
\t\t\t<pending_ecc>{ecc}</pending_ecc>
\t\t</ecc_mode>
\t\t<ecc_errors>
\t\t\t<volatile>{_counters(on, gpu["ecc_correctable"], gpu["ecc_uncorrectable"])}
\t\t\t</volatile>
\t\t\t<aggregate>{_counters(on, 0, gpu["ecc_uncorrectable_aggregate"])}
\t\t\t</aggregate>
\t\t</ecc_errors>
\t\t<retired_pages>
\t\t\t<pending_blacklist>{"Yes" if gpu["retired_pending"] else "N/A"}</pending_blacklist>
\t\t\t<pending_retirement>{"Yes" if gpu["retired_pending"] else "N/A"}</pending_retirement>
\t\t</retired_pages>
\t\t<remapped_rows>
\t\t\t<remapped_row_corr>0</remapped_row_corr>
\t\t\t<remapped_row_unc>{1 if gpu["remap_pending"] else 0}</remapped_row_unc>
\t\t\t<remapped_row_pending>{_yes(gpu["remap_pending"])}</remapped_row_pending>
\t\t\t<remapped_row_failure>{_yes(gpu["remap_failed"])}</remapped_row_failure>
\t\t\t<row_remapper_histogram>
\t\t\t\t<row_remapper_histogram_max>{board.rows} bank(s)</row_remapper_histogram_max>
\t\t\t</row_remapper_histogram>
\t\t</remapped_rows>
\t\t<temperature>{_temperature(board, gpu["temperature_c"])}
\t\t</temperature>
\t\t<gpu_power_readings>
\t\t\t<power_state>P0</power_state>
\t\t\t<power_draw>69.03 W</power_draw>
\t\t\t<current_power_limit>700.00 W</current_power_limit>
\t\t</gpu_power_readings>
\t\t<fabric>
\t\t\t<state>{fabric[0]}</state>
\t\t\t<status>{fabric[1]}</status>
\t\t</fabric>
\t\t<processes>{processes}
\t\t</processes>
\t\t<accounted_processes>
\t\t</accounted_processes>
\t</gpu>"""
    return _edited(text, {**board.xml, **gpu["xml"]})


def _edited(text: str, changes: Mapping[str, str | None]) -> str:
    """A ``<gpu>`` with these texts by their paths; elements that are missing are made."""
    if not changes:
        return text
    gpu = ElementTree.fromstring(text)
    for path, value in changes.items():
        above, at = gpu, gpu
        for name in path.split("/"):
            above, found = at, at.find(name)
            at = ElementTree.SubElement(at, name) if found is None else found
        if value is None:
            above.remove(at)
        else:
            at.text = value
    return f"\n\t{ElementTree.tostring(gpu, encoding='unicode').strip()}"


def query(gpus: Iterable[Mapping[str, Any]], model: str = "h100", driver: str = "") -> str:
    """``nvidia-smi -q -x`` of a node with these GPUs: each has its ``address`` and `CHANGES`."""
    board = BOARDS[model]
    driver = driver or board.driver
    shown = []
    for index, gpu in enumerate(gpus):
        changes = {name: value for name, value in gpu.items() if name != "address"}
        shown.append(_gpu(index, gpu["address"], board, changes))
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
\t<timestamp>Mon Jan  6 09:00:00 2025</timestamp>
\t<driver_version>{driver}</driver_version>
\t<cuda_version>{board.cuda}</cuda_version>
\t<attached_gpus>{len(shown)}</attached_gpus>{"".join(shown)}

</nvidia_smi_log>
"""


def nvlink_status(
    count: int, model: str = "h100", inactive: Collection[tuple[int, int]] = ()
) -> str:
    """``nvidia-smi nvlink --status`` of ``count`` GPUs; ``inactive``: (GPU, link) that are down.

    Of a GPU without one active link, nvidia-smi says so in one line; of one that has no links it
    says nothing.
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
# A stand-in: prints what was recorded.
cd {HOME} || exit
if [ -e before ]; then . ./before; fi
case " $* " in
*" nvlink "*) exec cat nvlink ;;
*" -q -x "* | *" -x -q "* | *" -qx "* | *" -xq "*) exec cat query.xml ;;
*" -L "* | *" --list-gpus "*) exec cat list ;;
"  ") exec cat plain ;;
esac
printf 'Invalid combination of input arguments. Please run '\\''nvidia-smi -h'\\'' for help.\\n\\n'
exit 6
"""

#: What can be wrong with the tool itself, as shell text.
BEFORE = {
    "ok": "",
    "hangs": "trap '' TERM INT HUP\nwhile :; do sleep 86400; done\n",
    "fails": """\
echo 'Failed to initialize NVML: Driver/library version mismatch'
echo 'NVML library version: 550.54'
exit 18
""",
}


def files(
    gpus: Mapping[int, Mapping[str, Any]],
    model: str,
    inactive: Collection[tuple[int, int]] = (),
    state: str = "ok",
    links: str | None = None,
) -> dict[str, File]:
    """The tool and its answers.

    gpus:  those that it shows, as in `query`
    state: what it does first: of `BEFORE`, or shell text
    links: what `nvidia-smi nvlink --status` says instead
    """
    board = BOARDS[model]
    listed = [f"GPU {at}: {board.product} (UUID: {uuid(at)})\n" for at in range(len(gpus))]
    answers = {
        "query.xml": query(gpus.values(), model),
        "nvlink": nvlink_status(len(gpus), model, inactive) if links is None else links,
        "list": "".join(listed),
        "plain": _plain(gpus, board),
    }
    if before := BEFORE.get(state, state):
        answers["before"] = before
    return {
        "/usr/bin/nvidia-smi": File(_SCRIPT, 0o755),
        **{f"{HOME}/{name}": File(text) for name, text in answers.items()},
    }


def _plain(gpus: Mapping[int, Mapping[str, Any]], board: Board) -> str:
    """The table that the tool prints without arguments, in short."""
    rule = f"+{'-' * 77}+\n"
    head = f"NVIDIA-SMI {board.driver}    Driver Version: {board.driver}"
    rows = [f"| {head:<56}CUDA Version: {board.cuda:<6}|\n"]
    for at, gpu in enumerate(gpus.values()):
        temperature = gpu.get("temperature_c", CHANGES["temperature_c"])
        address = f"0000{gpu['address'].upper()}"
        row = (
            f"{at:>3}  {board.product:<26} {address:<18} {temperature:>3}C  {board.memory_mib}MiB"
        )
        rows.append(f"| {row:<76}|\n")
    return rule + rule.join([rows[0], "".join(rows[1:])]) + rule


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
    """A server: where its GPUs and the NVSwitches that it shows are, and its RDMA devices.

    manager: whether it has a fabric manager: B200's switches are behind adapters of their own
    """

    model: str
    gpu: str
    gpus: tuple[str, ...]
    switch: str
    switches: tuple[str, ...]
    pcie: str
    ports: Callable[[], tuple[Device, ...]]
    manager: bool = True


_H100_BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
_SWITCH_BUSES = ("05", "06", "07", "08")
_GEN5 = "32.0 GT/s PCIe"

SYSTEMS = {
    "h100": System("h100", "0x2330", _H100_BUSES, "0x22a3", _SWITCH_BUSES, _GEN5, adapters.h100),
    "h200": System("h200", "0x2335", _H100_BUSES, "0x22a3", _SWITCH_BUSES, _GEN5, adapters.h100),
    "b200": System("b200", "0x2901", _H100_BUSES, "", (), _GEN5, adapters.h100),
    "l40s": System(
        "l40s", "0x26b9", _H100_BUSES[:4], "", (), "16.0 GT/s PCIe", adapters.l40s, manager=False
    ),
    "a100": System(
        "a100",
        "0x20b2",
        ("07", "0f", "47", "4e", "87", "90", "b7", "bd"),
        "0x1af1",
        ("c4", "c5", "c6", "c7", "c8", "c9"),
        "16.0 GT/s PCIe",
        adapters.a100,
    ),
}


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
    sysctls: Mapping[str, str] = {},
) -> Hardware:
    """A node of this model, with what differs from a healthy one.

    gpus:      index -> what nvidia-smi shows of it instead (`CHANGES`)
    missing:   GPUs that nvidia-smi does not show
    unbound:   GPUs that have no driver: nvidia-smi does not show them either
    unplugged: GPUs that are not even on the PCI bus
    ports:     RDMA device -> fields of `adapters.Device` that it has instead
    nics:      interface -> fields of `adapters.NetDevice` that it has instead
    inactive:  NVLinks that are down, as (GPU, link)
    links:     what `nvidia-smi nvlink --status` says instead
    tool:      what nvidia-smi does: of `BEFORE`, or shell text that it runs first
    module:    whether the driver is loaded
    xids:      GPU -> code and text of an Xid in the kernel's log
    log:       further lines of the kernel's log; {gpu[3]} is the address of GPU 3
    """
    system = SYSTEMS[model]
    board = BOARDS[system.model]
    hidden = {*missing, *unbound, *unplugged}
    # Without its manager the fabric stays as it is after a boot.
    fabric = {} if fabric_manager else {"fabric_state": "In Progress", "fabric_status": "N/A"}
    shown = {
        at: {"address": f"0000:{bus}:00.0", **fabric, **gpus.get(at, {})}
        for at, bus in enumerate(system.gpus)
        if at not in hidden
    }
    devices, interfaces = adapters.adapters(system.ports(), ports, nics)
    functions = [
        *SERVER,
        *_gpus(system, gpus, unbound, unplugged, module),
        *(
            PciDevice(
                f"0000:{bus}:00.0", _VENDOR, system.switch, "0x068000", driver="nvidia-nvswitch"
            )
            for bus in system.switches
        ),
        *adapters.pci(devices, interfaces),
    ]
    loaded = {
        "/sys/module/nvidia": {"version": f"{board.driver}\n", "initstate": "live\n"},
        "/proc/driver": {"nvidia/version": _version(board)},
    }
    down = {(gpu, link) for gpu, link in inactive}
    manager = system.manager and fabric_manager
    return Hardware(
        trees={
            **pci_trees(*functions),
            **adapters.trees(devices, interfaces),
            **(loaded if module else {}),
        },
        files={
            **files(shown, system.model, down, tool, links),
            **({_FABRIC_MANAGER: File(_FABRIC_MANAGER_SCRIPT, 0o755)} if system.manager else {}),
        },
        devices={
            **{f"/dev/nvidia{at}": 0o666 for at in range(len(system.gpus))},
            **{f"/dev/nvidia{name}": 0o666 for name in ("ctl", "-uvm", "-uvm-tools")},
            **{f"/dev/nvidia-nvswitch{at}": 0o666 for at in range(len(system.switches))},
            **adapters.device_files(devices),
        },
        sysctls=sysctls,
        kernel_log=(
            (
                12.440917,
                "nvidia-nvlink: Nvlink Core is being initialized, major device number 511",
            ),
            (12.912003, f"NVRM: loading NVIDIA UNIX x86_64 Kernel Module  {board.driver}"),
            *adapters.log_lines([*_xids(system, xids), *log], system.gpus),
        ),
        start=_START if manager else "",
    )


def _gpus(
    system: System,
    gpus: Mapping[int, Mapping[str, Any]],
    unbound: Collection[int],
    unplugged: Collection[int],
    module: bool,
) -> list[PciDevice]:
    made = []
    for at, bus in enumerate(system.gpus):
        width = gpus.get(at, {}).get("pcie_width", 16)
        link = (system.pcie, width, system.pcie, 16)
        driver = "nvidia" if module and at not in unbound else ""
        address = f"0000:{bus}:00.0"
        if at not in unplugged:
            made.append(PciDevice(address, _VENDOR, system.gpu, "0x030200", at // 4, driver, link))
    return made


def _xids(system: System, xids: Mapping[int, Sequence[Any]]) -> Iterator[str]:
    for at, (code, text) in xids.items():
        yield f"NVRM: Xid (PCI:0000:{system.gpus[at]}:00): {code}, {text}"


def _version(board: Board) -> str:
    return (
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {board.driver}"
        "  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  gcc version 12.3.0 (Ubuntu)\n"
    )

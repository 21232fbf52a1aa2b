"""A node with GPUs as its probe prints it: what is good stands here, a test says what differs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nodeready.lab import nvidia
from nodeready.policy import Policy
from nodeready.subjects.base import Output
from nodeready.subjects.gpus import checks
from nodeready.subjects.gpus import facts as gpus
from nodeready.subjects.gpus.gpu import Gpus
from nodeready.subjects.result import Result
from tests.builders.judging import by_name

ADDRESSES = tuple(f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df"))
POLICY = Policy()
SWITCHES = tuple(f"0000:{bus:02x}:00.0" for bus in (7, 8, 9, 10))
PREFIX = "nr_scanned=1\nnr_fabric_manager=4711\n"
DEVICES = "\n".join(
    f"crw-rw-rw- 1 0 0 195, {minor} Jan  6 09:00 /dev/nvidia{name}"
    for minor, name in ((0, "0"), (1, "1"), (255, "ctl"))
)
VERSION = (
    "/proc/driver/nvidia/version:NVRM version: NVIDIA UNIX x86_64 Kernel Module  "
    "535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
    "/proc/driver/nvidia/version:GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)


def pci(
    address: str,
    vendor: str = "0x10de",
    device: str = "0x2330",
    kind: str = "0x030200",
    *,
    driver: str = "nvidia",
    width: int = 16,
    most: int = 16,
) -> str:
    """What the section prints of one device."""
    uevent = [f"DRIVER={driver}"] if driver else []
    uevent += [f"PCI_CLASS={kind[2:].upper()}", f"PCI_SLOT_NAME={address}"]
    files = {
        "vendor": [vendor],
        "class": [kind],
        "device": [device],
        "uevent": uevent,
        "numa_node": ["0"],
        "current_link_width": [str(width)],
        "max_link_width": [str(most)],
        "current_link_speed": ["32.0 GT/s PCIe"],
    }
    return "".join(
        f"/sys/bus/pci/devices/{address}/{name}:{line}\n"
        for name, lines in files.items()
        for line in lines
    )


def switch(address: str) -> str:
    return pci(address, device="0x22a3", kind="0x068000", width=2)


BUS = "".join(map(pci, ADDRESSES))
SERVER = pci("0000:03:00.0", "0x1a03", "0x2000", "0x030000", driver="ast")


@dataclass(frozen=True)
class Node:
    """The answers of the sections; the default is a healthy HGX with eight H100."""

    bus: str = VERSION + "".join(map(pci, ADDRESSES)) + "".join(map(switch, SWITCHES)) + DEVICES
    smi: Output = Output(PREFIX + nvidia.query({"address": address} for address in ADDRESSES), 0)
    links: Output = Output(PREFIX + nvidia.nvlink_status(8), 0)
    amd: Output = Output("", 0)
    kernel_log: Output = Output("", 0)

    def observed(self, policy: Policy = POLICY) -> Gpus:
        """The observation."""
        outputs = {
            "pci_gpus": Output(self.bus, 0),
            "nvidia_smi": self.smi,
            "nvlink": self.links,
            "amd": self.amd,
            "kernel_log": self.kernel_log,
        }
        observed: Gpus = gpus.PROBE.parse(outputs, policy)
        return observed

    def judged(self, **settings: Any) -> dict[str, Result]:
        """The results by the names of the checks."""
        policy = Policy(**settings)
        return by_name(checks, self.observed(policy), policy)


def h100(changes: Mapping[int, Mapping[str, Any]] | None = None, **more: Any) -> Node:
    """An HGX of which the GPUs of ``changes`` differ; ``more``: other answers of it."""
    return replace(Node(), **{"smi": smi(ADDRESSES, changes or {}), **more})


def a100(changes: Mapping[int, Mapping[str, Any]] | None = None) -> Node:
    """The same with A100: Ampere has no fabric state and prints thresholds of temperature."""
    links = Output(PREFIX + nvidia.nvlink_status(8, "a100"), 0)
    return replace(Node(), smi=smi(ADDRESSES, changes or {}, "a100"), links=links)


def smi(
    addresses: Iterable[str], changes: Mapping[int, Mapping[str, Any]], model: str = "h100"
) -> Output:
    shown = [{"address": a, **changes.get(n, {})} for n, a in enumerate(addresses)]
    return Output(PREFIX + nvidia.query(shown, model), 0)


def statuses(results: Mapping[str, Result], status: str) -> set[str]:
    return {name for name, result in results.items() if result.status == status}


def verdict_of(results: Mapping[str, Result], name: str) -> tuple[str, str]:
    return results[name].status, results[name].actual


def judged(observed: Gpus, **settings: Any) -> dict[str, Result]:
    """The results for an observation, by the names of the checks."""
    return by_name(checks, observed, Policy(**settings))


def bad(results: Mapping[str, Result]) -> dict[str, str]:
    return {name: result.actual for name, result in results.items() if result.bad}


# --- Other parts and drivers: what nvidia-smi prints of a healthy node, composed for each.
#
# The form of each generation of the driver is that of recordings: 470 (GT 1030), 515 (A10G, T4),
# 535 (A100), 550 and 580 (H100, B200, GB200), 595 (L40S, RTX 3080), 615 (Rubin).

Tree = Mapping[str, Any]

#: Driver -> the name of its schema.
DRIVERS = {
    "450.80.02": "nvsmi_device_v10.dtd",
    "470.256.02": "nvsmi_device_v11.dtd",
    "515.105.01": "nvsmi_device_v11.dtd",
    "525.147.05": "nvsmi_device_v11.dtd",
    "535.183.06": "nvsmi_device_v12.dtd",
    "550.163.01": "nvsmi_device_v12.dtd",
    "570.172.08": "nvsmi_device_v12.dtd",
    "575.57.08": "nvsmi_device_v12.dtd",
    "580.105.08": "nvsmi_device_v13.dtd",
    "595.58.03": "nvsmi_device_v13.dtd",
    "615.23": "nvsmi_device_v13.dtd",
}
_MOVED = "Requested functionality has been deprecated"


@dataclass(frozen=True)
class Part:
    """What the GPUs of one product have in common, and the node that they are in.

    since:  the first major version of the driver for it
    count:  how many a node has
    links:  active and inactive NVLinks; None: the command prints nothing of it
    gbps:   of a link
    memory: ``rows`` are remapped, ``pages`` are retired, ``none``: no ECC
    """

    name: str
    device: str
    since: int
    generation: int
    architecture: str = "Hopper"
    count: int = 8
    links: tuple[int, int] | None = (0, 0)
    gbps: str = "26.562"
    memory: str = "rows"
    tlimit: bool = True
    mig: bool = True
    fabric: bool = False
    peer: str = "N/A"
    switches: int = 0
    bank: bool = False
    state: str = "P0"
    lanes: int = 16
    card: int = 16
    virtual: str = "None"
    c2c: str = "N/A"


def _parts() -> dict[str, Part]:
    rows = json.loads(Path(__file__).with_name("gpus_nvidia.json").read_text())
    for row in rows:
        row["links"] = tuple(row["links"]) if row.get("links") else row.get("links", (0, 0))
    return {row["name"]: Part(**row) for row in rows}


PARTS = _parts()


def combinations() -> list[tuple[str, str]]:
    """Each part with each driver that it can have."""
    return [
        (name, driver)
        for name, part in PARTS.items()
        for driver in DRIVERS
        if int(driver.partition(".")[0]) >= part.since
    ]


def _ecc(part: Part, driver: int) -> Tree:
    count = "N/A" if part.memory == "none" else "0"
    yes = "No" if part.memory == "rows" else "N/A"
    if part.memory == "pages" and part.architecture != "Turing":
        names = ("device_memory", "register_file", "cbu", "total")
        kinds = ("single_bit", "double_bit")
        return {
            when: {kind: dict.fromkeys(names, count) for kind in kinds}
            for when in ("volatile", "aggregate")
        }
    parts = (
        ("uncorrectable_parity", "uncorrectable_secded") if driver >= 550 else ("uncorrectable",)
    )
    counts = {f"sram_{name}": count for name in ("correctable", *parts)}
    counts |= {"dram_correctable": count, "dram_uncorrectable": count}
    later: dict[str, Any] = {}
    if driver >= 570:
        later |= {"channel_repair_pending": "No", "tpc_repair_pending": "No"}
    if driver >= 590:
        later["unrepairable_memory"] = yes if driver >= 615 else "N/A"
    exceeded = {"sram_threshold_exceeded": yes} if driver >= 550 else {}
    return {"volatile": counts, "aggregate": {**counts, **exceeded}, **later}


def _rows(part: Part, driver: int) -> Any:
    if part.memory != "rows":
        return "N/A"
    names = ("high", "partial", "low", "none")
    histogram = {f"row_remapper_histogram_{name}": "0 bank(s)" for name in names}
    return {
        "remapped_row_corr": "0",
        "remapped_row_unc": "0",
        "remapped_row_pending": "No",
        "remapped_row_failure": "No",
        "row_remapper_histogram": {"row_remapper_histogram_max": "640 bank(s)", **histogram},
    }


def _fabric(part: Part, driver: int) -> Tree:
    def if_fabric(word: str) -> str:
        return word if part.fabric else "N/A"

    elements: dict[str, Any] = {"state": if_fabric("Completed"), "status": if_fabric("Success")}
    if driver >= 550:
        elements |= {
            "cliqueId": if_fabric("32766"),
            "clusterUuid": if_fabric("00000001-0000-0000-0000-000000000001"),
        }
        health = {
            "bandwidth": "Full",
            "route_recovery_in_progress": "False",
            "route_unhealthy": "False",
            "access_timeout_recovery": "False",
        }
        if driver >= 580:
            health |= {"summary": "Healthy", "incorrect_configuration": "None"}
        new = part.architecture != "Hopper"
        health = {name: if_fabric(text if new else "N/A") for name, text in health.items()}
        if driver >= 595:
            health["partition_assigned"] = if_fabric("True" if part.bank else "N/A")
        if driver >= 615:
            health["gfm_state"] = if_fabric("Connected")
        elements["health"] = health
    return elements


def _temperature(part: Part, driver: int) -> Tree:
    memory = {"memory_temp": "38 C" if part.memory == "rows" and not part.bank else "N/A"}
    if part.tlimit and driver >= 535:
        return {
            "gpu_temp": "31 C",
            "gpu_temp_tlimit": "55 C",
            "gpu_temp_max_tlimit_threshold": "-5 C",
            "gpu_temp_slow_tlimit_threshold": "-2 C",
            **memory,
            "gpu_temp_max_mem_tlimit_threshold": "N/A",
        }
    return {
        "gpu_temp": "31 C",
        **({"gpu_temp_tlimit": "N/A"} if driver >= 535 else {}),
        "gpu_temp_max_threshold": "96 C",
        "gpu_temp_slow_threshold": "93 C",
        **memory,
        "gpu_temp_max_mem_threshold": "95 C" if part.memory == "rows" else "N/A",
    }


def _recovery(driver: int) -> Tree:
    status = {"reset_required": "No", "drain_and_reset_recommended": "No"}
    moved = dict.fromkeys(status, _MOVED)
    if driver < 535:
        return {}
    if driver < 570:
        return {"gpu_reset_status": status}
    if driver < 580:
        return {"gpu_reset_status": moved, "gpu_recovery_action": "None"}
    return {"gpu_recovery_action": "None"}


def tree(part: Part, driver: str, index: int, address: str) -> dict[str, Any]:
    """One ``<gpu>``: element -> its text, or the elements in it."""
    major = int(driver.partition(".")[0])
    thor = part.name == "NVIDIA Thor"
    kind = "event" if major >= 535 else "throttle"
    idle = "Not Active" if part.state == "P2" else "Active"
    reasons = ["sw_power_cap", "hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown",
               "sync_boost", "sw_thermal_slowdown"]  # fmt: skip
    reasons += ["board_limit", "reliability"] if major >= 615 else []
    ecc = "N/A" if part.memory == "none" else "Enabled"
    mode = "Disabled" if part.mig else "N/A"
    pages = part.memory == "pages"
    retired = {
        "retired_count": "0" if pages else "N/A",
        "retired_pagelist": "" if pages else "N/A",
    }
    speed = part.generation if part.state == "P0" or part.bank else 1
    links: dict[str, Any] = {"max_link_gen": str(part.generation), "current_link_gen": str(speed)}
    if major >= 535:
        links |= {"max_device_link_gen": str(part.generation), "max_host_link_gen": "N/A"}
    widths = {"max_link_width": "16x", "current_link_width": f"{part.lanes}x"}
    limit = (
        {"current_power_limit": "700.00 W"} if major >= 535 else {"enforced_power_limit": "70 W"}
    )
    return {
        "product_name": part.name,
        "product_brand": "NVIDIA",
        "persistence_mode": "Enabled",
        "mig_mode": {"current_mig": mode, "pending_mig": mode},
        "serial": "N/A" if part.memory == "none" else f"165052200382{index}",
        "uuid": nvidia.uuid(index),
        "vbios_version": "N/A" if thor else "96.00.89.00.01",
        **({"platformInfo": {"chassis_serial_number": "", "peer_type": part.peer}}
           if major >= 570 else {}),
        **({"c2c_mode": part.c2c} if major >= 570 else {}),
        "gpu_virtualization_mode": {
            "virtualization_mode": part.virtual, "host_vgpu_mode": "N/A",
        },
        **_recovery(major),
        "pci": {
            "pci_bus_id": f"0000{address.upper()}",
            "pci_gpu_link_info": {"pcie_gen": links, "link_widths": widths},
            "replay_counter": "150",
        },
        "performance_state": part.state,
        f"clocks_{kind}_reasons": {
            f"clocks_{kind}_reason_gpu_idle": idle,
            **{f"clocks_{kind}_reason_{name}": "Not Active" for name in reasons},
        },
        "fb_memory_usage": dict.fromkeys(("total", "used"), "Not Supported" if thor else "0 MiB"),
        "compute_mode": "Default",
        "ecc_mode": {"current_ecc": ecc, "pending_ecc": ecc},
        "ecc_errors": _ecc(part, major),
        "retired_pages": {
            "multiple_single_bit_retirement": {**retired},
            "double_bit_retirement": {**retired},
            "pending_blacklist": "No" if pages else "N/A",
            "pending_retirement": "No" if pages else "N/A",
        },
        "remapped_rows": _rows(part, major),
        **({"remapped_banks": {
            "bank_remapper_active_remappings": "0",
            "bank_remapper_pending": "No",
            "bank_remapper_histogram": {
                "bank_remapper_histogram_max": "252 group(s)",
                "bank_remapper_histogram_none": "0 group(s)",
            },
        }} if part.bank else {}),
        "temperature": _temperature(part, major),
        "gpu_power_readings" if major >= 535 else "power_readings": {
            "power_state": part.state if major < 595 else _MOVED, **limit,
        },
        **({"power_smoothing": "Insufficient Permissions"} if major >= 575 else {}),
        **({"fabric": _fabric(part, major)} if major >= 535 else {}),
        "processes": "",
        "accounted_processes": "",
    }  # fmt: skip


def _xml(inside: Tree) -> str:
    return "".join(
        f"<{name}>{_xml(value) if isinstance(value, Mapping) else value}</{name}>\n"
        for name, value in inside.items()
    )


def answer(trees: Iterable[Tree], driver: str) -> str:
    """``nvidia-smi -q -x`` of these GPUs."""
    shown = [
        f'<gpu id="0000{address.upper()}">\n{_xml(gpu)}</gpu>\n'
        for address, gpu in zip(ADDRESSES, trees, strict=False)
    ]
    major = int(driver.partition(".")[0])
    newer = f"<kmd_version>{driver}</kmd_version>\n" if major >= 615 else ""
    return (
        f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "{DRIVERS[driver]}">\n'
        f"<nvidia_smi_log>\n<driver_version>{driver}</driver_version>\n"
        "<!-- driver_version will be removed -->\n"
        f"<cuda_version>12.4</cuda_version>\n{newer}<attached_gpus>{len(shown)}</attached_gpus>\n"
        f"{''.join(shown)}</nvidia_smi_log>\n"
    )


def nvlinks(part: Part, inactive: Mapping[int, Iterable[int]] | None = None) -> str:
    """``nvidia-smi nvlink --status`` of a node with this part; ``inactive``: what is down, too."""
    if part.links is None:
        return ""
    active, unused = part.links
    lines = []
    for index in range(part.count):
        down = {*range(active, active + unused), *(inactive or {}).get(index, ())}
        lines.append(f"GPU {index}: {part.name} (UUID: {nvidia.uuid(index)})")
        numbers = range(active + unused)
        if active + unused and len(down) == active + unused:
            lines.append(
                "\t NVML: Unable to retrieve NVLink information as all links are inActive"
            )
            continue
        lines += [
            f"\t Link {n}: " + ("<inactive>" if n in down else f"{part.gbps} GB/s")
            for n in numbers
        ]
    return "\n".join(lines) + "\n" if lines else ""


def trees_of(name: str, driver: str) -> list[dict[str, Any]]:
    """The healthy GPUs of a node with this part and driver."""
    part = PARTS[name]
    return [tree(part, driver, n, place) for n, place in enumerate(ADDRESSES[: part.count])]


def node(name: str, driver: str, trees: Sequence[Tree] | None = None, **more: Any) -> Node:
    """A node with this part and driver; ``trees``: of its GPUs, instead of healthy ones."""
    part = PARTS[name]
    trees = trees_of(name, driver) if trees is None else trees
    part = replace(part, count=len(trees))
    places = ADDRESSES[: part.count]
    bus = VERSION.replace("535.129.03", driver) + "".join(
        pci(place, device=f"0x{part.device}", width=part.lanes, most=part.card) for place in places
    )
    bus += "".join(map(switch, SWITCHES[: part.switches])) + DEVICES
    composed = Node(
        bus,
        smi=Output(PREFIX + answer(trees, driver), 0),
        links=Output("nr_scanned=1\n" + nvlinks(part), 0),
    )
    return replace(composed, **more)

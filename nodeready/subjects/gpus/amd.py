"""AMD's GPUs as amd-smi shows them, or rocm-smi where the node has no amd-smi.

In this order: the values of both tools' JSON, the kernel's own counts, amd-smi, rocm-smi, and the
section that asks one of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from nodeready.subjects.base import Output, Section
from nodeready.subjects.gpus.gpu import Gpu, GpuProcess, Link, PciGpu, Tool
from nodeready.subjects.iommu.facts import MODELS

if TYPE_CHECKING:
    from nodeready.policy import Policy

# --- The values in amd-smi's and rocm-smi's JSON: plain, "N/A", or with a unit.

Json = dict[str, Any]
_Value = TypeVar("_Value")

#: GT/s of each generation of PCI Express.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_MEGABYTES = {"B": 1 / (1 << 20), "KB": 1 / 1024, "MB": 1.0, "GB": 1024.0, "TB": 1024.0 * 1024}
#: A tool prints one or two documents; of other text that begins like one, so much is tried.
_MOST_DOCUMENTS = 40


def _whole(digits: str) -> int | None:
    """A whole number of at most 20 digits: no counter has more, and a million take minutes."""
    return int(digits) if len(digits) <= 20 else None


def documents(printed: str) -> Iterator[Any]:
    """The JSON documents in ``printed``, each from the start of a line; other text is skipped."""
    decoder = json.JSONDecoder(parse_int=_whole)
    position, tries = 0, 0
    for start in re.finditer(r"^[\[{]", printed, re.M):
        if start.start() < position:
            continue
        tries += 1
        if tries > _MOST_DOCUMENTS:
            return
        try:
            document, position = decoder.raw_decode(printed, start.start())
        except (ValueError, RecursionError):
            continue
        yield document


def entries(printed: str) -> Iterator[Json]:
    """The devices that amd-smi printed: the dictionaries that name a ``gpu``."""
    for document in documents(printed):
        lists = [document] if isinstance(document, list) else []
        if isinstance(document, dict):
            lists = [[document], *(item for item in document.values() if isinstance(item, list))]
        for items in lists:
            for item in items:
                if isinstance(item, dict) and whole(item.get("gpu")) is not None:
                    yield item


def at(entry: Json, *path: str) -> Any:
    """The value at the end of ``path``; None where there is none."""
    found: Any = entry
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def text(value: Any) -> str | None:
    """A word or a number as text; None for "N/A", nothing and lists."""
    if isinstance(value, dict):
        value = value.get("value")
    if value is None or isinstance(value, (list, dict)):
        return None
    found = str(value).strip()
    return None if found in ("", "N/A", "n/a", "None", "unknown", "0x0") else found[:200]


# What says that the device has no such value. All other words in the place of a value are errors:
# "AMDSMI_STATUS_NO_PERM - Permission Denied", "Failed to retrieve …", "None" (amdsmi_exception.py;
# rocm_smi.py: rsmi_ret_ok).
_ABSENT = re.compile(
    r"n/?a|-|not[ _]?(yet[ _])?(supported|implemented|applicable)"
    r"|.*\bnot[ _](yet[ _])?(supported|implemented|applicable)\b.*|unsupported|.*is unsupported.*"
    r"|amdsmi_status_not_(supported|yet_implemented)\b.*",
    re.I | re.S,
)


def error(value: Any) -> str:
    """The words of an error in the place of a value; "" for a value and for none."""
    if isinstance(value, dict):
        value = value.get("value")
    if not isinstance(value, str) or not value.strip():
        return ""
    said = value.strip()
    return "" if _ABSENT.fullmatch(said) else said[:80]


class Reader:
    """One device's answer, read field by field; ``unread``: what the tool could not tell."""

    def __init__(self, *entries: Json) -> None:
        self.entries = entries
        self.unread: list[tuple[str, str]] = []

    def raw(self, *paths: str) -> Any:
        """The value of the first path (``pcie/width``) that is there, or the error on its way."""
        said: Any = None
        for path in paths:
            for entry in self.entries:
                found: Any = entry
                for name in path.split("/"):
                    if not isinstance(found, dict):
                        break
                    found = found.get(name)
                if isinstance(found, dict) and "value" not in found:
                    continue
                if found is not None and (text(found) or error(found)):
                    return found
                said = found if said is None else said
        return said

    def note(self, field: str, value: Any) -> None:
        """Remember that the field has an error in its place; other words are none."""
        said = error(value)
        if said:
            self.unread.append((field, said))

    def get(self, field: str, read: Callable[[Any], _Value | None], *paths: str) -> _Value | None:
        """The field's value; None, and noted, where something else stands in its place."""
        value = self.raw(*paths)
        found = read(value)
        if found is None:
            self.missed(field, read, value)
        return found

    def missed(self, field: str, read: Callable[[Any], Any], value: Any) -> None:
        """Note words in the place of a value, and a number that the value cannot be.

        Some numbers say that the device has no such value: those of `_NONE`.
        """
        said = number(value)
        if said is None:
            self.note(field, value)
        elif read in _NONE and said not in _NONE[read]:
            self.unread.append((field, (text(value) or "")[:80]))


def number(value: Any) -> float | None:
    """A number, with or without its unit; None for anything else."""
    found = text(value)
    match = re.match(r"-?[0-9]{1,20}(\.[0-9]{1,9})?(?![0-9xa-fA-F])", found) if found else None
    result = float(match[0]) if match else None
    return result if result is not None and math.isfinite(result) else None


def whole(value: Any) -> int | None:
    """A count; None for anything else, and for less than nothing."""
    found = number(value)
    return int(found) if found is not None and found >= 0 else None


def count(value: Any) -> int | None:
    """A count of errors; None for all ones in 32 or 64 bits, which stand for no counter."""
    found = whole(value)
    return None if found in ((1 << 32) - 1, (1 << 64) - 1) or found == float(1 << 64) else found


def lanes(value: Any) -> int | None:
    """The lanes of a link; None for 0, a device without one, and for what no link has."""
    found = whole(value)
    return found if found is not None and 1 <= found <= 32 else None


def degrees(value: Any) -> int | None:
    """Degrees Celsius; None for 0 and 65535, which stand for no sensor, and beyond 200."""
    found = whole(value)
    return found if found is not None and 0 < found < 200 else None


def limit(value: Any) -> int | None:
    """Degrees Celsius of a limit; None for 0, a limit that is not set, and beyond 200."""
    return degrees(value)


def megabytes(value: Any) -> int | None:
    """An amount of memory in MiB: the tool's MB and GB are powers of 1024."""
    found = number(value)
    unit = value.get("unit") if isinstance(value, dict) else "MB"
    factor = _MEGABYTES.get(unit) if isinstance(unit, str) else None
    return None if found is None or factor is None else int(found * factor)


def generation(value: Any) -> int | None:
    """The generation of PCI Express that has this speed in GT/s, or in MT/s (23.1 and older)."""
    found = number(value)
    return None if found is None else _GENERATIONS.get(found if found < 1000 else found / 1000)


#: What reads a number -> the numbers that stand for no such value: 0 for no link and no sensor,
#: all ones for no counter and no sensor (Linux' kgd_pp_interface.h, gpu_metrics).
_NONE: Mapping[Callable[[Any], Any], tuple[float, ...]] = {
    lanes: (0.0,),
    generation: (0.0,),
    degrees: (0.0, 65535.0),
    limit: (0.0,),
    count: (float((1 << 32) - 1), float(1 << 64)),
}


def pci_address(value: Any) -> str:
    """A PCI address in lower case with a domain of four digits; "" for anything else."""
    match = re.fullmatch(
        r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])", text(value) or ""
    )
    return f"{(match[1] or '0000')[-4:]}:{match[2]}:{match[3]}.{match[4]}".lower() if match else ""


# --- What the kernel counts of AMD's GPUs: their processes, bad pages and RAS errors.
#
# ``/sys/class/kfd/kfd/proc/PID/vram_ID`` holds the bytes that a process has on the GPU with that
# id, and the topology gives the PCI address of each id (Linux' drivers/gpu/drm/amd/amdkfd).
# ``ras/gpu_vram_bad_pages`` lists bad pages as ``ADDRESS : SIZE : FLAG``: R is retired, P waits
# for its retirement, F could not be retired (Linux' amdgpu_ras.c). ``hwmon/hwmonN/tempM_crit`` is
# where a sensor slows the GPU down, in thousandths of a degree (Linux' amdgpu_pm.c).

_ROOT = "/sys/class/kfd/kfd"
_DRIVER = "/sys/bus/pci/drivers/amdgpu"

#: The script starts two programs, whatever the number of GPUs and processes.
_KFD_SCRIPT = rf"""
    if [ -d {_ROOT} ]; then
        grep -asHE '^([0-9]+|(location_id|domain) [0-9]+)$' {_ROOT}/topology/nodes/*/gpu_id \
            {_ROOT}/topology/nodes/*/properties {_ROOT}/proc/[0-9]*/vram_*
        grep -asHc ' : [PF]' {_DRIVER}/*/ras/gpu_vram_bad_pages
        for nr_file in {_ROOT}/proc/[0-9]*; do
            nr_pid=${{nr_file##*/}} nr_comm=
            {{ read -r nr_comm <"/proc/$nr_pid/comm"; }} 2>/dev/null || continue
            printf 'process=%s %s\n' "$nr_pid" "$nr_comm"
        done
    fi
"""


@dataclass(frozen=True)
class Kfd:
    """What the kernel counts, by the PCI address of the GPU (kfd: amdgpu's part for computing).

    devices:    the addresses of the GPUs that can compute
    processes:  address -> the processes with memory on the GPU
    unreserved: address -> whether a bad page is still in use
    ras:        address -> uncorrectable and correctable errors of all blocks
    limits:     address -> sensor (``edge``, ``junction``, ``mem``) -> where it slows the GPU down
    """

    devices: tuple[str, ...] = ()
    processes: Mapping[str, tuple[GpuProcess, ...]] = field(default_factory=dict)
    unreserved: Mapping[str, bool] = field(default_factory=dict)
    ras: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    limits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def _addresses(printed: str) -> dict[str, str]:
    """A GPU's id -> its PCI address; a node of the topology with id 0 is a processor."""
    nodes: dict[str, dict[str, str]] = {}
    for node, name, value in re.findall(
        rf"^{_ROOT}/topology/nodes/([0-9]+)/(?:gpu_id:|properties:(location_id|domain) )"
        r"([0-9]{1,10})$",
        printed,
        re.M,
    ):
        nodes.setdefault(node, {}).setdefault(name or "gpu_id", value)
    found = {}
    for node in nodes.values():
        if node.get("gpu_id", "0") != "0" and "location_id" in node:
            place, domain = int(node["location_id"]), int(node.get("domain", "0"))
            found[node["gpu_id"]] = (
                f"{domain & 0xFFFF:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 31:02x}.{place & 7}"
            )
    return found


_SENSORS = {"1": "edge", "2": "junction", "3": "mem"}


def _limits(printed: str) -> dict[str, dict[str, int]]:
    """Address -> sensor -> the degrees at which it slows the GPU down."""
    found: dict[str, dict[str, int]] = {}
    labels: dict[tuple[str, str], str] = {}
    crit: list[tuple[str, str, str]] = []
    for address, sensor, kind, value in re.findall(
        rf"^{_DRIVER}/([0-9a-f:.]+)/hwmon/hwmon[0-9]+/temp([1-9])_(label|crit):([a-z0-9]{{1,20}})$",
        printed,
        re.M,
    ):
        if kind == "label":
            labels[address, sensor] = value
        elif value.isdigit():
            crit.append((address, sensor, value))
    for address, sensor, value in crit:
        name = labels.get((address, sensor)) or _SENSORS.get(sensor)
        limit = degrees(int(value) // 1000)
        if name and limit is not None:
            found.setdefault(address, {})[name] = limit
    return found


def parse_kfd(printed: str) -> Kfd:
    """The GPUs in what _KFD_SCRIPT printed; other lines are passed over."""
    addresses = _addresses(printed)
    names = dict(re.findall(r"^process=([0-9]{1,9}) (.*)$", printed, re.M))
    processes: dict[str, list[GpuProcess]] = {}
    for pid, gpu, size in re.findall(
        rf"^{_ROOT}/proc/([0-9]{{1,9}})/vram_([0-9]+):([0-9]{{1,18}})$", printed, re.M
    ):
        # A process that opens the driver has a file for each GPU, with 0 for an unused one.
        if int(size) and gpu in addresses:
            process = GpuProcess(int(pid), names.get(pid, ""), int(size) >> 20)
            processes.setdefault(addresses[gpu], []).append(process)
    pages = re.findall(
        rf"^{_DRIVER}/([0-9a-f:.]+)/ras/gpu_vram_bad_pages:([0-9]{{1,9}})$", printed, re.M
    )
    ras: dict[str, tuple[int, int]] = {}
    for address, kind, count in re.findall(
        rf"^{_DRIVER}/([0-9a-f:.]+)/ras/[a-z0-9_]+_err_count:(ue|ce): ([0-9]{{1,18}})$",
        printed,
        re.M,
    ):
        bad, healed = ras.get(address, (0, 0))
        ras[address] = (bad + int(count), healed) if kind == "ue" else (bad, healed + int(count))
    return Kfd(
        tuple(addresses.values()),
        {address: tuple(found) for address, found in processes.items()},
        {address: int(count) > 0 for address, count in pages},
        ras,
        _limits(printed),
    )


def idle(seen: Kfd, address: str) -> bool | None:
    """Whether no process has memory on this GPU; None where the driver does not list the GPU."""
    return address not in seen.processes if address in seen.devices else None


# --- amd-smi's JSON: ``static``, ``metric`` and ``xgmi``.
#
# Formats: ROCm/amdsmi, amdsmi_cli/amdsmi_commands.py, versions 23 to 26. The first two print a
# list of devices, or since ROCm 6.4 ``{"gpu_data": […]}``; ``xgmi`` prints two documents one after
# the other.

# amd-smi's violation -> the reason for a lower clock, as `Gpu.throttle` names it. Power (ppt) is
# left out: under load, a GPU is meant to run at its power limit.
_THROTTLE = (
    ("prochot_violation_status", "hw_slowdown"),
    ("socket_thermal_violation_status", "hw_thermal_slowdown"),
    ("vr_thermal_violation_status", "hw_thermal_slowdown"),
    ("hbm_thermal_violation_status", "hw_thermal_slowdown"),
)
_XGMI = {"NO_ERRORS": 0, "ERROR": 1, "MULTIPLE_ERRORS": 2}


@dataclass(frozen=True)
class AmdGpu(Gpu):
    """One AMD device, with the values that only AMD's tools have.

    xgmi_errors:  errors of the links between GPUs: the uncorrectable ones that RAS counts, or
                  the status of the links (1: an error, 2: several), which MI300 does not have
    ecc_deferred: uncorrectable errors in data that no program has used so far
    partition:    how the device is divided: ``SPX/NPS1`` is one GPU with one memory
    """

    xgmi_errors: int | None = None
    ecc_deferred: int | None = None
    partition: str | None = None


#: Performance levels at which the GPU stays at its lowest clocks (Linux' amdgpu_pm.c).
_LOW = ("LOW", "PROFILE_MIN_SCLK", "PROFILE_MIN_MCLK", "STABLE_MIN_SCLK", "STABLE_MIN_MCLK")


def _level(value: Any) -> tuple[str, ...]:
    """The reason for a lower clock that an administrator has set, or none."""
    name = (text(value) or "").upper().replace("AMDSMI_DEV_PERF_LEVEL_", "")
    return (f"performance level {name.lower()}",) if name in _LOW else ()


def throttle_of(entry: Json) -> tuple[str, ...]:
    """The active reasons for a lower clock, of one device's ``metric``."""
    return _throttle(Reader(entry))[0] + _level(entry.get("perf_level"))


def _throttle(reader: Reader) -> tuple[tuple[str, ...], bool | None]:
    """The reasons for a lower clock that are active now, and whether the tool says all of them."""
    active, told = [], 0
    for key, reason in _THROTTLE:
        value = reader.raw(f"throttle/{key}")
        said = (text(value) or "").upper().replace("_", " ")
        if said in ("ACTIVE", "TRUE", "1", "NOT ACTIVE", "FALSE", "0"):
            told += 1
            active += [reason] if said in ("ACTIVE", "TRUE", "1") else []
            continue
        reader.note("throttle", value)
        # The share of the last moments in which it was active.
        share = number(reader.raw(f"throttle/{key.replace('_status', '_activity')}"))
        told += share is not None
        active += [reason] if share else []
    found = tuple(dict.fromkeys(active))
    return found, bool(found) if told == len(_THROTTLE) or found else None


#: Enabled, or what the block has found: amdsmi_ras_err_state_t.
_ON = ("ENABLED", "PARITY", "SING_C", "MULT_UC", "POISON")


def _ecc(reader: Reader, instinct: bool) -> str | None:
    """Whether memory has ECC, by the RAS of the memory controller; None: a board without RAS.

    The blocks are a dictionary, or in version 23 a list of ``{"block": …, "status": …}``.
    """
    state: Json | None = None
    for path in (("ras", "ecc_block_state"), ("ras",)):
        found = at(reader.entries[0], *path)
        if isinstance(found, list):
            found = {
                str(item.get("block")): item.get("status")
                for item in found
                if isinstance(item, dict)
            }
        if isinstance(found, dict) and "UMC" in found:
            state = found
            break
        if isinstance(found, str):
            reader.note("ecc", found)
    if state is None:
        return None
    said = text(state["UMC"])
    if said in _ON:
        return "on"
    if said != "DISABLED":
        reader.note("ecc", state["UMC"])
        return None
    any_block = any(text(value) == "ENABLED" for value in state.values())
    return "off" if any_block or instinct else None


def _blocks(metric: Json, word: str) -> int | None:
    """The sum of what the blocks of the device count; None where none does."""
    tables = (metric.get(name) for name in ("ecc_blocks", "ecc_block"))
    blocks: Json = next((table for table in tables if isinstance(table, dict) and table), {})
    found = [
        counted
        for block in blocks.values()
        if isinstance(block, dict)
        and (counted := count(block.get(f"{word}_count", block.get(word)))) is not None
    ]
    return sum(found) if found else None


def _errors(reader: Reader, metric: Json, word: str, instinct: bool) -> int | None:
    """The errors of this kind: of the device, or of all blocks where those count more.

    Radeon boards count errors that never were: all ones in registers of 16 bits.
    """
    paths = (f"total_{word}_count", f"total_{word}", f"{word}_count", word)
    total = reader.get(f"ecc_{word}", count, *(f"ecc/{path}" for path in paths))
    blocks = _blocks(metric, word)
    known = [counted for counted in (total, blocks) if counted is not None]
    found = max(known) if known else None
    return None if found and not instinct and found % 65535 == 0 else found


def _xgmi_errors(reader: Reader) -> int | None:
    """Errors of the device's links; None where neither RAS nor the status counts them."""
    counted = reader.get(
        "xgmi_errors",
        count,
        "ecc_blocks/XGMI_WAFL/uncorrectable_count",
        "ecc_block/XGMI_WAFL/uncorrectable",
    )
    raw = reader.raw("xgmi_err")
    said = (text(raw) or "").replace("AMDSMI_XGMI_STATUS_", "")
    status = _XGMI.get(said)
    if status is None and number(raw) in (0, 1, 2):
        status = whole(raw)
    if status is None:
        reader.note("xgmi_errors", raw)
    known = [found for found in (counted, status) if found is not None]
    return max(known) if known else None


def _links(printed: str) -> dict[str, tuple[Link, ...]]:
    """PCI address -> the links of that device. X (a device to itself) is no link.

    A word that is neither is an error: the state of such a link is unknown.
    """
    states = {"U": "active", "D": "inactive"}
    found = {}
    for entry in entries(printed):
        status = entry.get("link_status")
        if isinstance(status, list):
            found[pci_address(entry.get("bdf"))] = tuple(
                Link(index, states.get(word, "unknown"))
                for index, word in enumerate(status[:64])
                if isinstance(word, str) and word != "X" and (word in states or error(word))
            )
        elif error(status):
            found[pci_address(entry.get("bdf"))] = (Link(0, "unknown"),)
    return found


def _unread_links(gpu: Gpu) -> str:
    """Which links' states the tool could not tell, in words."""
    links = [str(link.index) for link in gpu.links if link.state == "unknown"]
    return f"no state of the links {', '.join(links)}" if links else ""


def _hottest(sensors: Iterable[tuple[int | None, int | None]]) -> tuple[int | None, int | None]:
    """The degrees of one sensor, and the degrees at which the GPU slows down for that sensor.

    One that is at its limit; else the first with a limit; else the first that says anything.
    """
    told = [(seen, limit) for seen, limit in sensors if seen is not None]
    limited = [(seen, limit) for seen, limit in told if limit is not None]
    hot = [(seen, limit) for seen, limit in limited if seen >= limit]
    return next(iter(hot or limited or told), (None, None))


def _sensor(reader: Reader, kind: str, old: str) -> tuple[int | None, int | None]:
    """The degrees of one sensor of amd-smi, and where that sensor slows the GPU down."""
    field = "memory_temperature_c" if kind == "mem" else "temperature_c"
    name = "vram" if kind == "mem" else kind
    return (
        reader.get(field, degrees, f"temperature/{kind}", f"temperature/{kind}_temperature"),
        reader.get(
            field.replace("_c", "_limit"),
            limit,
            f"limit/slowdown_{name}_temperature",
            f"limit/temperature_{old}",
        ),
    )


_COMPUTE_PARTITION = (
    "partition/accelerator_partition",
    "partition/compute_partition",
    "compute partition",
)


def _partition(reader: Reader) -> str | None:
    """``SPX/NPS1``: how compute units and memory are divided."""
    compute = text(reader.raw(*_COMPUTE_PARTITION))
    memory = text(reader.raw("partition/memory_partition", "memory partition"))
    words = [word for word in (compute, memory) if word and re.fullmatch("[A-Z]{2,4}[0-9]?", word)]
    return "/".join(words) or None


def _gpu(static: Json, metric: Json, more: Kfd, links: Mapping[str, Any]) -> AmdGpu:
    """One device of amd-smi."""
    reader = Reader(static, metric)
    address = pci_address(reader.raw("bus/bdf"))
    device = (text(reader.raw("asic/device_id")) or "").lower()
    instinct = server(device)
    temperature, slowdown = _hottest(
        (_sensor(reader, "hotspot", "junction"), _sensor(reader, "edge", "edge"))
    )
    memory, memory_max = _sensor(reader, "mem", "vram")
    throttle, throttled = _throttle(reader)
    width = reader.get(
        "pcie_width", lanes, *(f"pcie/{key}" for key in ("width", "current_lanes", "pcie_lanes"))
    )
    speed = reader.get(
        "pcie_generation",
        generation,
        *(f"pcie/{key}" for key in ("speed", "current_speed", "pcie_speed")),
    )
    return AmdGpu(
        index=whole(static.get("gpu")) or 0,
        vendor="amd",
        pci_address=address,
        model=reader.get("model", _name, "asic/market_name"),
        uuid=text(reader.raw("asic/asic_serial")),
        serial=text(reader.raw("board/product_serial")),
        vbios=reader.get(
            "vbios",
            _name,
            "vbios/part_number",
            "vbios/version",
            "ifwi/part_number",
            "ifwi/version",
        ),
        memory_total_mb=reader.get(
            "memory_total_mb", megabytes, "mem_usage/total_vram", "mem_usage/vram", "vram/size"
        ),
        memory_used_mb=reader.get("memory_used_mb", megabytes, "mem_usage/used_vram"),
        ecc=_ecc(reader, instinct),
        ecc_uncorrectable_volatile=_errors(reader, metric, "uncorrectable", instinct),
        ecc_correctable_volatile=_errors(reader, metric, "correctable", instinct),
        ecc_deferred=_errors(reader, metric, "deferred", instinct),
        retired_pending=more.unreserved.get(address),
        pcie_generation=speed,
        pcie_generation_max=reader.get(
            "pcie_generation_max", generation, "bus/max_pcie_speed", "bus/pcie_speed"
        ),
        pcie_width=width,
        pcie_width_max=reader.get(
            "pcie_width_max",
            lanes,
            *(f"bus/{key}" for key in ("max_pcie_width", "max_pcie_lanes", "pcie_lanes")),
        ),
        throttle=throttle + _level(reader.raw("perf_level")),
        throttled=True if _level(reader.raw("perf_level")) else throttled,
        temperature_c=temperature,
        temperature_slowdown_c=slowdown,
        memory_temperature_c=memory,
        memory_temperature_max_c=memory_max,
        processes=more.processes.get(address, ()),
        idle=idle(more, address),
        links=links.get(address, ()),
        xgmi_errors=_xgmi_errors(reader),
        partition=_partition(reader),
        power_limit_w=reader.get(
            "power_limit_w", whole, "limit/socket_power", "limit/current_power", "limit/power"
        ),
        virtual=device in MODELS and MODELS[device].virtual,
        unread=_unread(reader),
    )


#: Boards of the years before the list of Instincts: MI50 and MI60 (pci.ids).
_OLDER = ("0x66a0", "0x66a1")


def server(device: str) -> bool:
    """Whether this device (``0x74a1``) is a board for servers: RAS counts, and all its lanes."""
    return device in MODELS or device in _OLDER


#: The fields of `Gpu` on which verdicts rest, by what is read for them.
_FIELDS = {
    "ecc_uncorrectable": "ecc_uncorrectable_volatile",
    "ecc_correctable": "tool correctable",
    "memory_total_mb": "tool memory",
    "memory_used_mb": "tool memory",
    "power_limit_w": "tool power limit",
    "temperature_limit": "temperature_slowdown_c",
    "memory_temperature_limit": "memory_temperature_c",
}


def _unread(reader: Reader) -> tuple[tuple[str, str], ...]:
    """What the tool could not tell, by the fields of `Gpu`."""
    found = [(_FIELDS.get(name, name), said) for name, said in reader.unread]
    return tuple(dict.fromkeys(found))


def _name(value: Any) -> str | None:
    """A name; None for words of an error, too."""
    return None if _FAILED.match(text(value) or "") else text(value)


_FAILED = re.compile(
    r"AMDSMI_|RSMI_|(an? )?unknown error|err(or)?\b|failed|unable|insufficient|not supported"
    r"|get_\w+,",
    re.I,
)


def parse_amd_smi(
    static: str, metric: str, xgmi: str, more: Kfd, unlinked: str = ""
) -> Iterator[AmdGpu]:
    """The devices; of a partitioned GPU the first partition stands for the whole.

    unlinked: why the tool could not tell the links
    """
    metrics = {whole(entry.get("gpu")): entry for entry in entries(metric)}
    links = _links(xgmi)
    seen = set()
    for entry in entries(static):
        gpu = _gpu(entry, metrics.get(whole(entry.get("gpu")), {}), more, links)
        why = unlinked or _unread_links(gpu)
        if why:
            gpu = replace(gpu, unread=(*gpu.unread, ("links", why)))
        if gpu.pci_address in seen or whole(at(entry, "partition", "partition_id")):
            continue
        seen.add(gpu.pci_address)
        yield gpu


# --- rocm-smi's JSON (ROCm/rocm_smi_lib).
#
# The keys differ in case between versions, and warnings stand before and after the JSON. Counts of
# RAS come from sysfs: rocm-smi prints them only without ``--json``.


def cards(printed: str) -> dict[int, dict[str, Any]]:
    """Number -> that card of rocm-smi, with its keys in lower case."""
    found: dict[int, dict[str, Any]] = {}
    for document in documents(printed):
        for name, card in document.items() if isinstance(document, dict) else ():
            match = re.fullmatch(r"card([0-9]{1,3})", name)
            if match and isinstance(card, dict):
                found[int(match[1])] = {key.lower(): value for key, value in card.items()}
    return found


def parse_rocm_smi(printed: str, more: Kfd) -> Iterator[AmdGpu]:
    """The devices in what rocm-smi printed."""
    for index, card in sorted(cards(printed).items()):
        reader = Reader(card)
        address = pci_address(card.get("pci bus"))
        said = reader.raw("pcie clock level")
        link = re.search(r"\(([0-9.]+)GT/s x([0-9]+)\)", text(said) or "")
        speed, width = (link[1], link[2]) if link else (None, None)
        if link is None:
            reader.note("pcie_width", said)
        else:
            if generation(speed) is None:
                reader.missed("pcie_generation", generation, speed)
            if lanes(width) is None:
                reader.missed("pcie_width", lanes, width)
        total = reader.get("memory_total_mb", number, "vram total memory (b)")
        used = reader.get("memory_used_mb", number, "vram total used memory (b)")
        # ROCm 5 calls the device's id "GPU ID", which is another number since ROCm 6.
        device = (text(reader.raw("device id", "gpu id")) or "").lower()
        instinct = server(device)
        # Radeon boards count errors that never were, by the million.
        ras = more.ras.get(address) if instinct else None
        limits = more.limits.get(address, {})
        junction, edge, memory = (
            reader.get(field, degrees, f"temperature (sensor {kind}) (c)")
            for field, kind in (
                ("temperature_c", "junction"),
                ("temperature_c", "edge"),
                ("memory_temperature_c", "memory"),
            )
        )
        temperature, slowdown = _hottest(
            ((junction, limits.get("junction")), (edge, limits.get("edge")))
        )
        level = _level(reader.raw("performance level"))
        yield AmdGpu(
            index=index,
            vendor="amd",
            pci_address=address,
            model=reader.get("model", _name, "card series", "device name"),
            uuid=text(card.get("unique id")),
            serial=text(card.get("serial number")),
            vbios=reader.get("vbios", _name, "vbios version"),
            memory_total_mb=None if total is None else int(total) >> 20,
            memory_used_mb=None if used is None else int(used) >> 20,
            ecc_uncorrectable_volatile=ras[0] if ras else None,
            ecc_correctable_volatile=ras[1] if ras else None,
            retired_pending=more.unreserved.get(address),
            pcie_generation=generation(speed),
            pcie_width=lanes(width),
            throttle=level,
            throttled=True if level else None,
            temperature_c=temperature,
            temperature_slowdown_c=slowdown,
            memory_temperature_c=memory,
            memory_temperature_max_c=limits.get("mem"),
            processes=more.processes.get(address, ()),
            idle=idle(more, address),
            partition=_partition(reader),
            power_limit_w=reader.get("power_limit_w", whole, "max graphics package power (w)"),
            unread=_unread(reader),
        )


# --- The tool's word beside the bus's.

#: How the device ids of a processor's own graphics begin (Linux' amdgpu_drv.c, AMD_IS_APU). The
#: MI300A is a processor, too, and an accelerator.
_INTEGRATED = ("11", "13", "15", "16", "19", "98")


def integrated(device: str) -> bool:
    """Whether this PCI device (four hex digits) is the graphics of a processor."""
    return device[:2] in _INTEGRATED and f"0x{device}" not in MODELS


def beside(gpus: Iterable[AmdGpu], bus: Iterable[PciGpu]) -> tuple[AmdGpu, ...]:
    """The accelerators among the GPUs, with what the PCI bus says of their links.

    A processor's own graphics are none. rocm-smi prints no maximum of lanes, and no tool a link
    that has lost some behind it: of both, the bus and the tool, the smaller number counts. A
    Radeon lowers its lanes when it is idle, and has a link inside of the board: the numbers of its
    lanes are no fault.
    """
    known = {one.address: one for one in bus}
    found = []
    for gpu in gpus:
        one = known.get(gpu.pci_address)
        if one is None:
            found.append(gpu)
        elif not integrated(one.device):
            found.append(_beside(gpu, one))
    return tuple(found)


def _beside(gpu: AmdGpu, one: PciGpu) -> AmdGpu:
    if not server(f"0x{one.device}"):
        return replace(gpu, pcie_width_max=None, pcie_generation_max=None)
    most = gpu.pcie_width_max or one.pcie_width_max
    told = [width for width in (gpu.pcie_width, one.pcie_width) if width is not None]
    return replace(gpu, pcie_width=min(told, default=None), pcie_width_max=most)


# --- The section: one of the tools is asked, and how it fared.

_BIN = "/opt/rocm/bin"


def _script(policy: Policy) -> str:
    """Print the kernel's counts, then ask the tool, unless an earlier one hangs.

    A tool is a Python script, whose process has the name python3 when env started it.
    """
    return rf"""
    PATH=$PATH:{_BIN}
    nr_have amd-smi rocm-smi
    if [ ! -d /sys/module/amdgpu ]; then echo module=no; exit 0; fi
    nr_value version /sys/module/amdgpu/version
    {_KFD_SCRIPT}
    for nr_file in $(grep -alsE '\((amd-smi|rocm-smi|python[0-9.]*)\) D ' /proc/[0-9]*/stat); do
        # Any user can give a process such a name, and have it wait there.
        nr_is_roots "${{nr_file%/stat}}" || continue
        if grep -aqsE '/?(amd|rocm)[-_]smi' "${{nr_file%stat}}cmdline"; then
            nr_file=${{nr_file%/stat}}
            printf 'stuck=%s\n' "${{nr_file##*/}}"
            exit 0
        fi
    done
    nr_run() {{
        printf '\n@%s run %s\n' "$NR" "$1"
        shift
        nr_told "$@"
        printf '\n@%s ran %s\n' "$NR" "$nr_status"
        return $nr_status
    }}
    if command -v amd-smi >/dev/null; then
        nr_run static amd-smi static --json && nr_run metric amd-smi metric --json &&
            nr_run xgmi amd-smi xgmi --json
    else
        grep -asH '' {_DRIVER}/*/ras/*_err_count \
            {_DRIVER}/*/hwmon/hwmon*/temp[1-3]_crit {_DRIVER}/*/hwmon/hwmon*/temp[1-3]_label
        nr_run rocm rocm-smi -a --json
    fi
    exit 0
    """


# 64 devices of 8 partitioned GPUs print about 30 kB each.
SECTION = Section(
    "amd",
    _script,
    timeout_s=20,
    cap_bytes=3 << 20,
    beside=True,
    when="command -v amd-smi >/dev/null || command -v rocm-smi >/dev/null"
    f" || [ -x {_BIN}/amd-smi ] || [ -x {_BIN}/rocm-smi ]",
)


@dataclass(frozen=True)
class _ToolCall:
    """What one call of the tool printed; ``status`` is None when it did not end."""

    printed: str
    status: int | None

    @property
    def last_line(self) -> str:
        return (self.printed.strip().splitlines() or [""])[-1].strip()


def _runs(output: Output) -> dict[str, _ToolCall]:
    """The calls of the tool, by name."""
    mark = re.escape(f"@{output.nonce}")
    runs = {}
    for piece in re.split(rf"^{mark} run ", output.text, flags=re.M)[1:]:
        name, _, rest = piece.partition("\n")
        ended = re.search(rf"^{mark} ran ([0-9]{{1,3}})\s*\Z", rest, re.M)
        printed = rest[: ended.start()] if ended else rest
        runs[name] = _ToolCall(printed, int(ended[1]) if ended else None)
    return runs


def _call(name: str, call: str, run: _ToolCall | None, output: Output) -> Tool | None:
    """What is wrong with one call of the tool; None: nothing."""
    if run is None or run.status is None:
        if output.truncated:
            return Tool(name, "nonsense", "its output is too long")
        return Tool(name, "timed out", call)
    if run.status != 0 and not (call == "rocm" and run.status in (1, 2) and cards(run.printed)):
        # rocm-smi complains with its status of each value that a board has not, and goes on.
        return Tool(name, "failed", f"exit status {run.status}: {run.last_line}"[:160])
    devices = cards(run.printed) if call == "rocm" else list(entries(run.printed))
    return None if devices else Tool(name, "nonsense", run.printed.strip()[:160])


#: What a version says that has no such command, and a board that has no such links.
_NO_LINKS = re.compile(r"not supported|not_supported|invalid choice|unrecognized|usage:|N/A", re.I)


def _unlinked(runs: Mapping[str, _ToolCall], output: Output) -> str:
    """Why the tool could not tell the links; "" where it could, or where there are none."""
    run = runs.get("xgmi")
    if run is None or (run.status is None and list(entries(run.printed))):
        return ""
    if run.status is None:
        return "amd-smi xgmi timed out"
    if run.status == 0 or _NO_LINKS.search(run.printed):
        return ""
    return f"amd-smi xgmi: {run.last_line or f'exit status {run.status}'}"[:80]


def _tool(output: Output, before: str, runs: Mapping[str, _ToolCall]) -> Tool:
    """How the tool fared; a fault of ``xgmi`` alone does not count."""
    have = re.findall(r"^have=(amd-smi|rocm-smi)$", before, re.M)
    if not have:
        # Without its first line, the section was ended before it looked for a tool.
        unseen = output.rc is None and not output.truncated
        return Tool("amd-smi", "timed out" if unseen else "missing")
    name = have[0]
    stuck = re.search(r"^stuck=([0-9]+)$", before, re.M)
    if stuck:
        return Tool(name, "stuck", f"process {stuck[1]} hangs in the kernel")
    if re.search(r"^module=no$", before, re.M):
        return Tool(name, "failed", "the kernel module amdgpu is not loaded")
    for call in ("static", "metric") if name == "amd-smi" else ("rocm",):
        wrong = _call(name, call, runs.get(call), output)
        if wrong:
            return wrong
    return Tool(name, "ok")


def _driver(before: str) -> str | None:
    """The version of amdgpu when it comes from ROCm; "in-tree" when it is the kernel's own."""
    version = re.search(r"^version=(.+)$", before, re.M)
    if version:
        return version[1].strip()
    loaded = before.startswith("have=") and not re.search(r"^module=no$", before, re.M)
    return "in-tree" if loaded else None


def parse(output: Output) -> tuple[tuple[AmdGpu, ...], Tool, str | None]:
    """The devices, how the tool fared, and the driver's version."""
    before = re.split(rf"^@{re.escape(output.nonce)} run ", output.text, maxsplit=1, flags=re.M)[0]
    runs = _runs(output)
    tool = _tool(output, before, runs)
    more = parse_kfd(before)
    if "rocm" in runs:
        gpus = tuple(parse_rocm_smi(runs["rocm"].printed, more))
    else:
        static, metric, xgmi = (
            runs[call].printed if call in runs else "" for call in ("static", "metric", "xgmi")
        )
        gpus = tuple(parse_amd_smi(static, metric, xgmi, more, _unlinked(runs, output)))
    return gpus, tool, _driver(before)

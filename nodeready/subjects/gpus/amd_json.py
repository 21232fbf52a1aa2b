"""The values in amd-smi's and rocm-smi's JSON (plain, "N/A", or with a unit), and kfd's counts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nodeready.subjects.gpus.gpu import GpuProcess, pci_address

Json = dict[str, Any]
_Value = TypeVar("_Value")
#: GT/s of each generation of PCI Express.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_MEGABYTES = {"B": 1 / (1 << 20), "KB": 1 / 1024, "MB": 1.0, "GB": 1024.0, "TB": 1024.0 * 1024}
#: Maximum of lines that are tried as the start of a document; a tool prints one or two documents.
_MOST_DOCUMENTS = 40


def documents(printed: str) -> Iterator[Any]:
    """The JSON documents in ``printed``, each from the start of a line; other text is skipped."""
    # No counter has more than 20 digits, and a million take minutes.
    decoder = json.JSONDecoder(parse_int=lambda text: int(text) if len(text) <= 20 else None)
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
                if isinstance(item, dict) and whole_number(item.get("gpu")) is not None:
                    yield item


def value_at(entry: Json, *path: str) -> Any:
    """The value at the end of ``path``; None where the path ends early."""
    value: Any = entry
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def text(value: Any) -> str | None:
    """A word or a number as text; None for "N/A", nothing and lists."""
    if isinstance(value, dict):
        value = value.get("value")
    if value is None or isinstance(value, (list, dict)):
        return None
    words = str(value).strip()
    return None if words in ("", "N/A", "n/a", "None", "unknown", "0x0") else words[:200]


# The words for a value that the device does not have. All other words in the place of a value are
# errors: "AMDSMI_STATUS_NO_PERM - Permission Denied", "Failed to retrieve …", "None"
# (amdsmi_exception.py; rocm_smi.py: rsmi_ret_ok).
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
    words = value.strip()
    return "" if _ABSENT.fullmatch(words) else words[:80]


class Reader:
    """One device's answer, read field by field; ``unread``: fields with an error's text."""

    def __init__(self, *entries: Json) -> None:
        self.entries = entries
        self.unread: list[tuple[str, str]] = []

    def raw(self, *paths: str) -> Any:
        """The value of the first path (``pcie/width``) that exists, or the error in its place."""
        error_value: Any = None
        for path in paths:
            for entry in self.entries:
                value: Any = entry
                for name in path.split("/"):
                    if not isinstance(value, dict):
                        break
                    value = value.get(name)
                if isinstance(value, dict) and "value" not in value:
                    continue
                if value is not None and (text(value) or error(value)):
                    return value
                error_value = value if error_value is None else error_value
        return error_value

    def note_error(self, field: str, value: Any) -> None:
        """Remember the error in the field's place; words for a missing value are no error."""
        if words := error(value):
            self.unread.append((field, words))

    def get(self, field: str, read: Callable[[Any], _Value | None], *paths: str) -> _Value | None:
        """The field's value; None where it cannot be read, which is noted."""
        value = self.raw(*paths)
        if (parsed := read(value)) is None:
            self.note_unreadable(field, read, value)
        return parsed

    def note_unreadable(self, field: str, read: Callable[[Any], Any], value: Any) -> None:
        """Note an error in the place of a value, and a number that the value cannot have.

        The numbers of `_NONE` mean that the device has no such value.
        """
        if (measure := number(value)) is None:
            self.note_error(field, value)
        elif read in _NONE and measure not in _NONE[read]:
            self.unread.append((field, (text(value) or "")[:80]))


def number(value: Any) -> float | None:
    """A number, with or without its unit; None for anything else."""
    words = text(value)
    match = re.match(r"-?[0-9]{1,20}(\.[0-9]{1,9})?(?![0-9xa-fA-F])", words) if words else None
    result = float(match[0]) if match else None
    return result if result is not None and math.isfinite(result) else None


def whole_number(value: Any) -> int | None:
    """A whole number from 0 on; None for anything else."""
    parsed = number(value)
    return int(parsed) if parsed is not None and parsed >= 0 else None


def count(value: Any) -> int | None:
    """A count of errors; None for all ones in 32 or 64 bits, which stand for no counter."""
    parsed = whole_number(value)
    return None if parsed in ((1 << 32) - 1, (1 << 64) - 1) or parsed == float(1 << 64) else parsed


def _among(values: range) -> Callable[[Any], int | None]:
    def read(value: Any) -> int | None:
        parsed = whole_number(value)
        return parsed if parsed is not None and parsed in values else None

    return read


#: Lanes of a link; 0 is a device without one. Degrees Celsius, of a sensor and of a limit: 0 and
#: 65535 stand for no sensor, 0 for a limit that is not set.
lanes, degrees, limit = _among(range(1, 33)), _among(range(1, 200)), _among(range(1, 200))


def megabytes(value: Any) -> int | None:
    """An amount of memory in MiB: the tool's MB and GB are powers of 1024."""
    parsed = number(value)
    unit = value.get("unit") if isinstance(value, dict) else "MB"
    factor = _MEGABYTES.get(unit) if isinstance(unit, str) else None
    return None if parsed is None or factor is None else int(parsed * factor)


def generation(value: Any) -> int | None:
    """The generation of PCI Express that has this speed in GT/s, or in MT/s (23.1 and older)."""
    parsed = number(value)
    return None if parsed is None else _GENERATIONS.get(parsed if parsed < 1000 else parsed / 1000)


#: Reader of a number -> the numbers that mean "no such value": 0 for no link and no sensor, all
#: ones for no counter and no sensor (Linux' kgd_pp_interface.h, gpu_metrics).
_NONE: Mapping[Callable[[Any], Any], tuple[float, ...]] = {
    lanes: (0.0,),
    generation: (0.0,),
    degrees: (0.0, 65535.0),
    limit: (0.0,),
    count: (float((1 << 32) - 1), float(1 << 64)),
}


def address(value: Any) -> str:
    """A PCI address in the form of sysfs; "" for any other value."""
    return pci_address(text(value) or "") or ""


_FAILED = re.compile(
    r"AMDSMI_|RSMI_|(an? )?unknown error|err(or)?\b|failed|unable|insufficient|not supported"
    r"|get_\w+,",
    re.I,
)


def parse_name(value: Any) -> str | None:
    """A name; None for words of an error, too."""
    return None if _FAILED.match(text(value) or "") else text(value)


# --- The kernel's counts for AMD's GPUs: their processes, bad pages and RAS errors.
#
# ``/sys/class/kfd/kfd/proc/PID/vram_ID`` holds the bytes that a process has on the GPU with that
# id, and the topology gives the PCI address of each id (Linux' drivers/gpu/drm/amd/amdkfd).
# ``ras/gpu_vram_bad_pages`` lists bad pages as ``ADDRESS : SIZE : FLAG``: R is retired, P waits
# for its retirement, F could not be retired (Linux' amdgpu_ras.c). ``hwmon/hwmonN/tempM_crit`` is
# where a sensor slows the GPU down, in thousandths of a degree (Linux' amdgpu_pm.c).

_ROOT = "/sys/class/kfd/kfd"
_DRIVER = "/sys/bus/pci/drivers/amdgpu"


@dataclass(frozen=True)
class Kfd:
    """The kernel's counts by the PCI address of the GPU (kfd: amdgpu's part for computing)."""

    devices: tuple[str, ...] = ()  # the addresses of the GPUs that can compute
    # address -> the processes with memory on the GPU
    processes: Mapping[str, tuple[GpuProcess, ...]] = field(default_factory=dict)
    unreserved: Mapping[str, bool] = field(default_factory=dict)  # address -> a bad page is in use
    # address -> uncorrectable and correctable errors of all blocks
    ras: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # address -> sensor (``edge``, ``junction``, ``mem``) -> where it slows the GPU down
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
    addresses = {}
    for node in nodes.values():
        if node.get("gpu_id", "0") != "0" and "location_id" in node:
            location, domain = int(node["location_id"]), int(node.get("domain", "0")) & 0xFFFF
            bus, device, function = location >> 8 & 0xFF, location >> 3 & 31, location & 7
            addresses[node["gpu_id"]] = f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
    return addresses


_SENSORS = {"1": "edge", "2": "junction", "3": "mem"}


def _limits(printed: str) -> dict[str, dict[str, int]]:
    """Address -> sensor -> the degrees at which it slows the GPU down."""
    limits_by_address: dict[str, dict[str, int]] = {}
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
            limits_by_address.setdefault(address, {})[name] = limit
    return limits_by_address


def parse_kfd(printed: str) -> Kfd:
    """The GPUs in what sh/amd_smi.sh printed; other lines are passed over."""
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
        {address: tuple(gpu_processes) for address, gpu_processes in processes.items()},
        {address: int(count) > 0 for address, count in pages},
        ras,
        _limits(printed),
    )


def idle(observed: Kfd, address: str) -> bool | None:
    """Whether no process has memory on this GPU; None where the driver does not list the GPU."""
    return address not in observed.processes if address in observed.devices else None

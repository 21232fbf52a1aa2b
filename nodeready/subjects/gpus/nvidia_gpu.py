"""One NVIDIA GPU: the fields of a ``<gpu>`` in the output of ``nvidia-smi -q -x``.

The XML is read safely, and each of its values may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nodeready.subjects.gpus.gpu import Gpu, GpuProcess, pci_address

if TYPE_CHECKING:
    from xml.etree import ElementTree

# --- The XML and its values.

#: The words for a value that the device does not have (nvidia-smi(1)), with or without brackets.
ABSENT = ("n/a", "not supported")
#: The word in the place of a value that this driver shows under another name, or no longer.
_MOVED = "requested functionality has been deprecated"
#: Words in the place of any value that report a fault of the device or its driver
#: (nvmlErrorString). A missing permission is the caller's fault, and is not among them.
BROKEN = (
    "unknown error", "err!", "timeout", "inforom is corrupted",
    "driver/library version mismatch", "gpu access blocked by the operating system",
)  # fmt: skip

#: The words that are an error in the place of any value: none of them is a name.
ERRORS = (
    *BROKEN, "unknown", "error", "not found", "no data", "insufficient permissions",
    "gpu is lost", "gpu requires reset", "reset required", "function not found",
)  # fmt: skip

#: Introduced in an unknown driver release: absence means unsupported.
ANY_DRIVER = 10**6
SWITCH = {"enabled": "on", "disabled": "off"}
YES = {"yes": True, "no": False}
ACTIVE = {"active": True, "not active": False}
# A count with its unit: 31 C, 16x, 2560 bank(s), 700.00 W.
_NUMBER = re.compile(r"(-?[0-9]{1,15})(?:\.[0-9]{1,9})?(?: ?(?:C|x|W|MiB|(?:bank|group)\(s\)))?")
T = TypeVar("T")


def plain_word(text: str) -> str:
    return text.strip().lower().strip("[]")


def number(text: str) -> int | None:
    """The whole number of a count or a measure; None for any other text."""
    match = _NUMBER.fullmatch(text)
    return int(match[1]) if match else None


#: No counter is as high as this: all ones of 32 bits and more are the print of -1.
_MOST = (1 << 32) - 1
#: Lanes of a PCIe link (0: the tool's word for none), and its generations; the range of a chip's
#: sensor in C, and that of T.Limit. An unreadable register is all ones: 255, 65535, -1.
LANES = range(33)
GENERATIONS = range(8)
DEGREES = range(-60, 200)
DEGREES_LEFT = range(-200, 200)


def count(text: str) -> int | None:
    """A number of things; None for less than none, and for all ones."""
    return _among(range(_MOST))(text)


def _among(values: Container[int]) -> Callable[[str], int | None]:
    def read(text: str) -> int | None:
        parsed = number(text)
        # Python would search a range for None number by number.
        return parsed if parsed is not None and parsed in values else None

    return read


class Element:
    """An element of the XML: reads each value, and notes the values that cannot be read.

    Only this class turns the tool's words into values. None: the device does not have the value
    (N/A, Not Supported), or the driver is too old to show it. A value is unknown (None, and
    in ``unread``) if its text is empty or invalid, or if a driver of this version always prints
    the element and it is missing.

    driver: the driver's major version; None: not known
    """

    def __init__(self, node: ElementTree.Element, driver: int | None = None) -> None:
        self.node = node
        self.driver = driver
        self.unread: dict[str, str] = {}
        self.used: set[ElementTree.Element] = set()

    def _find(self, path: str) -> ElementTree.Element | None:
        """The element at the path, or its parent where that has only a text (N/A)."""
        node = self.node
        for name in path.split("/"):
            if (child := node.find(name)) is None:
                return node if node is not self.node and not len(node) else None
            node = child
        return node

    def text(self, *paths: str) -> str | None:
        """The text of the first path with a value, or None: for facts that no check reads."""
        for path in paths:
            text = (self.node.findtext(path) or "").strip()
            if plain_word(text) not in ("", "not found", *ABSENT, *BROKEN):
                return text[:200]
        return None

    def note_unread(self, name: str, path: str, text: str) -> None:
        """Note that the value ``name`` is unreadable, with the text in its place."""
        words = " ".join(text.split())[:60] or "no value"
        self.unread.setdefault(name, f"{path.rpartition('/')[2]}: {words}")

    def read(
        self,
        name: str,
        parse: Callable[[str], T | None],
        *paths: str,
        since: int = 0,
        needed: bool = False,
    ) -> T | None:
        """The first value of the paths: the names of one value in several schemas.

        since:  from this major version on, every driver shows the value
        needed: each device has the value, so that N/A is an error
        """
        result: T | None = None
        lacks, moved, bad_text = False, False, ""
        for path in paths:
            if (node := self._find(path)) is None:
                continue
            self.used.add(node)
            text = (node.text or "").strip()
            plain = plain_word(text)
            value = None if plain in ("", _MOVED, *ABSENT) else parse(text)
            result = value if result is None else result
            lacks = lacks or plain in ABSENT
            moved = moved or plain == _MOVED
            if value is None and plain not in (_MOVED, *ABSENT):
                bad_text = bad_text or text or "no value"
        if bad_text:
            self.note_unread(name, paths[0], bad_text)
        elif result is None and lacks and needed:
            self.note_unread(name, paths[0], "N/A")
        elif result is None and moved and not lacks:
            self.note_unread(name, paths[0], _MOVED)
        elif result is None and not lacks and (since == 0 or (self.driver or 0) >= since):
            self.note_unread(name, paths[0], "not shown")
        return result

    def word(self, name: str, words: Mapping[str, T], *paths: str, since: int = 0) -> T | None:
        return self.read(name, lambda text: words.get(plain_word(text)), *paths, since=since)

    def number(
        self, name: str, *paths: str, since: int = 0, among: Container[int] = range(_MOST)
    ) -> int | None:
        """The whole number with which the text begins, without its unit; a count, or ``among``."""
        return self.read(name, _among(among), *paths, since=since)

    def any(self, name: str, *paths: str, since: int = 0) -> bool | None:
        """True when one of the paths says yes, False when one says no; else None."""
        answers = [self.word(name, YES, path, since=since) for path in paths]
        return True if True in answers else False if False in answers else None

    def total(self, name: str, path: str, word: str, old: str) -> int | None:
        """The sum of the counters below ``path`` with ``word`` in their name.

        Schemas before v11, and boards before Ampere, count below ``old`` with a total.
        """
        counters = self._find(path)
        names = [] if counters is None else [child.tag for child in counters]
        if "single_bit" in names or "double_bit" in names:
            return self.number(name, f"{path}/{old}/total")
        names = [counter for counter in names if re.search(rf"(^|_){word}(_|$)", counter)]
        kinds = ("sram", "dram")
        names += [f"{kind}_{word}" for kind in kinds if not any(n.startswith(kind) for n in names)]
        return self.sum(name, [f"{path}/{counter}" for counter in names])

    def sum(self, name: str, paths: Iterable[str], since: int = 0) -> int | None:
        """The sum of these counters; None if the tool shows no counter."""
        counts = [self.number(name, path, since=since) for path in paths]
        readable = [count for count in counts if count is not None]
        return sum(readable) if readable else None


def _escaped(text: str) -> str:
    """The text with the processes' names escaped: a user can choose a name that breaks the XML.

    A name ends before the last element that follows a name in its process.
    """
    # Here: its table of entities is a hundredth of the start of every command.
    import html

    first, *sections = text.split("<process_info>")
    escaped = [first]
    for section in sections:
        processes = section.find("</processes>")
        tail = section.rfind("<used_memory>", 0, processes if processes >= 0 else len(section))
        start = section.find("<process_name>") + len("<process_name>")
        end = section.rfind("</process_name>", start, max(tail, 0))
        if start < len("<process_name>") or end < 0:
            escaped.append(section)
        else:
            name = html.escape(html.unescape(section[start:end]))
            escaped.append(section[:start] + name + section[end:])
    return "<process_info>".join(escaped)


def _without_processes(text: str) -> str:
    sections = []
    for section in text.split("<gpu id="):
        before, opening, remainder = section.partition("<processes>")
        _, closing, after = remainder.rpartition("</processes>")
        cut = f"{before}{opening}left out{closing}{after}"
        sections.append(cut if opening and closing else section)
    return "<gpu id=".join(sections)


def tree(text: str) -> ElementTree.Element | None:
    """The XML of the answer; None when the answer holds no whole XML.

    The text before the root is left out with its DOCTYPE: so no DTD is read and no entity can be
    declared, and the use of an entity is an error. Where a process's name imitates the tool's XML
    and breaks it, the processes are left out.
    """
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    if start < 0 or end < start:
        return None
    body = text[start : end + len("</nvidia_smi_log>")]
    clean = re.sub(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd]", "\ufffd", body)
    # Imported late: the import is slow, and many nodes that audit themselves have no XML to read.
    from xml.etree import ElementTree

    for xml in (_escaped(clean), _without_processes(clean)):
        try:
            return ElementTree.fromstring(xml)
        except (ElementTree.ParseError, ValueError):
            continue
    return None


def own_elements(gpu: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """The elements with the GPU's own values, without the processes, whose names users choose."""
    yield gpu
    for child in gpu:
        if child.tag not in ("processes", "accounted_processes"):
            yield from child.iter()


# --- The fields of one GPU.

_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")

_MAX_PROCESSES = 1024

#: The first major versions of the driver whose every answer has these parts, by recordings of 470
#: (MIG alone), 515 (rows) and 535 (fabric, reset).
_MIG, _ROWS, _FABRIC = 450, 515, 535
#: Whether the node is a virtual machine, by the words of its virtualization mode.
_VIRTUAL = {
    "none": False, "host vgpu": False, "host vsga": False, "pass-through": True, "vgpu": True,
    "vsga": True,
}  # fmt: skip

_COMPUTE_MODES = {
    name: name for name in ("default", "exclusive_process", "exclusive_thread", "prohibited")
}
_FABRIC_STATES = {name: name for name in ("completed", "in progress", "not started")}
_PAGES = [
    f"retired_pages/{kind}_bit_retirement/retired_count" for kind in ("multiple_single", "double")
]
#: Banks of memory without a spare row, and groups of banks without a spare bank.
_SPARELESS = [
    f"remapped_{kind}s/{kind}_remapper_histogram/{kind}_remapper_histogram_none"
    for kind in ("row", "bank")
]
#: The health of a GPU's attachment to its NVLink fabric (nvmlGpuFabricInfo_v3_t): element -> word
#: -> the fault, or "". NVML's constants name the conditions.
_HEALTH: Mapping[str, Mapping[str, str]] = {
    "summary": {
        "healthy": "", **{word: word for word in ("unhealthy", "degraded", "limited capacity")}
    },
    "bandwidth": {"full": "", "degraded": "bandwidth degraded"},
    "route_unhealthy": {"false": "", "true": "route unhealthy"},
    "route_recovery_in_progress": {"false": "", "true": "route recovery in progress"},
    "access_timeout_recovery": {"false": "", "true": "access timeout recovery"},
    "incorrect_configuration": {"none": ""},
    "partition_assigned": {"true": "", "false": "no partition assigned"},
    "gfm_state": {"connected": "", "disconnected": "global fabric manager disconnected"},
}  # fmt: skip


def _faults(gpu: Element) -> tuple[str, ...]:
    """The faults of the GPU's attachment to its fabric; an unknown word is unread."""
    faults = []
    for name, words in _HEALTH.items():

        def parse(text: str, name: str = name, words: Mapping[str, str] = words) -> str | None:
            plain = plain_word(text)
            if name == "incorrect_configuration" and plain not in (*words, *ERRORS):
                return f"incorrect configuration: {text.lower()}"
            return words.get(plain)

        text = gpu.read("fabric_faults", parse, f"fabric/health/{name}", since=ANY_DRIVER)
        faults += [text[:80]] if text else []
    return tuple(faults)


_PERFORMANCE_STATES = {f"P{level}": f"P{level}" for level in range(16)}


def _throttle(gpu: Element) -> tuple[tuple[str, ...], bool | None, bool | None]:
    """The active reasons for a slow-down, whether there is one, and whether the GPU is idle."""
    active = {}
    for name in ("gpu_idle", *_REASONS):
        paths = [
            f"clocks_{kind}_reasons/clocks_{kind}_reason_{name}" for kind in ("event", "throttle")
        ]
        field = "idle" if name == "gpu_idle" else "throttle"
        active[name] = gpu.word(field, ACTIVE, *paths)
    reasons = tuple(name for name in _REASONS if active[name])
    is_shown = any(active[name] is not None for name in _REASONS)
    return reasons, bool(reasons) if is_shown else None, active["gpu_idle"]


_LEFT = "temperature/gpu_temp_tlimit"


def _temperatures(gpu: Element) -> tuple[int | None, int | None]:
    """The degrees Celsius, and the degrees left to the limit, which only Ada and later print."""
    current = gpu.number("temperature_c", "temperature/gpu_temp", among=DEGREES)
    if gpu.node.find(_LEFT) is None:
        return current, None
    return current, gpu.number("temperature_left_c", _LEFT, among=DEGREES_LEFT)


def _slowdown(gpu: Element) -> int | None:
    """The temperature at which the GPU slows down.

    Ada and later print no such temperature. They print the degrees left to the limit, and the
    degrees left at which the slow-down begins, usually -2 (T.Limit; nvidia-smi(1)).
    """
    limit = "temperature/gpu_temp_slow_threshold"
    left_at_limit = "temperature/gpu_temp_slow_tlimit_threshold"
    name = "temperature_slowdown_c"
    if gpu.node.find(limit) is not None or gpu.node.find(left_at_limit) is None:
        return gpu.number(name, limit, among=DEGREES)
    begins = gpu.number(name, left_at_limit, among=DEGREES_LEFT)
    if gpu.node.find(_LEFT) is None:
        gpu.note_unread(name, "gpu_temp_tlimit", "not shown")
    current, degrees_left = _temperatures(gpu)
    if current is None or degrees_left is None or begins is None:
        return None
    return current + degrees_left - begins


def _recovery(gpu: Element) -> str | None:
    """The driver's recovery action: v13 names it, v12 tells whether a reset is needed."""
    if gpu.node.find("gpu_recovery_action") is not None:
        action = gpu.read(
            "recovery",
            lambda text: None if plain_word(text) in ERRORS else plain_word(text),
            "gpu_recovery_action",
        )
        return None if action is None else action.replace("gpu ", "")[:40]
    reset, drain = (
        gpu.word("recovery", YES, f"gpu_reset_status/{name}", since=_FABRIC)
        for name in ("reset_required", "drain_and_reset_recommended")
    )
    if reset:
        return "reset"
    return "drain and reset" if drain else None if reset is None else "none"


def _recovery_by_error(gpu: Element) -> str | None:
    """The action for a GPU with an error in place of its values (nvmlErrorString), or None."""
    words = {plain_word(node.text or "") for node in own_elements(gpu.node)}
    if "gpu is lost" in words:
        return "reboot"
    return "reset" if words & {"gpu requires reset", "reset required"} else None


def parse_processes(gpu: Element) -> Iterator[GpuProcess]:
    if (process_list := gpu.node.find("processes")) is None:
        gpu.note_unread("processes", "processes", "not shown")
    elif not len(process_list):
        text = process_list.text or ""
        if plain_word(text) not in ("", "none", *ABSENT):
            gpu.note_unread("processes", "processes", text)
    for index, node in enumerate(gpu.node.iterfind("processes/process_info")):
        process = Element(node)
        if (pid := process.read("pid", number, "pid", needed=True)) is None:
            gpu.note_unread("processes", "pid", node.findtext("pid") or "")
        elif index < _MAX_PROCESSES:
            name = " ".join((node.findtext("process_name") or "").split())[:200] or "?"
            memory = number((node.findtext("used_memory") or "").strip())
            yield GpuProcess(pid, name, memory, process.text("type", "process_type"))


def parse_name(text: str) -> str | None:
    """A name; None for words of an error, and for a damaged text."""
    is_name = re.search("[A-Za-z0-9]", text) and plain_word(text) not in (*ERRORS, "none")
    return text[:200] if is_name and text.isascii() and text.isprintable() else None


def _status(gpu: Element) -> str | None:
    """The outcome of the registration at the fabric.

    A failed registration has an error's text as its value (nvmlErrorString).
    """
    joined = plain_word(gpu.node.findtext("fabric/state") or "") not in ("", *ABSENT, *ERRORS)

    def parse(text: str) -> str | None:
        return None if not joined and plain_word(text) in ERRORS else text.lower()[:80]

    return gpu.read("fabric_status", parse, "fabric/status", since=_FABRIC)


def _uncorrectable(gpu: Element) -> int | None:
    """Uncorrectable errors of the GPU; in MIG mode also those of its instances."""
    name = "ecc_uncorrectable_volatile"
    gpu_errors = gpu.total(name, "ecc_errors/volatile", "uncorrectable", "double_bit")
    path = "ecc_error_count/volatile_count/sram_uncorrectable"
    parts = [count(instance.findtext(path) or "") or 0 for instance in gpu.node.iter("mig_device")]
    return gpu_errors if not any(parts) else max(gpu_errors or 0, sum(parts))


def _repairs(gpu: Element) -> bool | None:
    """Whether a repair waits for a reset: of a memory channel, a TPC or (Rubin) a bank."""
    parts = [f"ecc_errors/{part}_repair_pending" for part in ("channel", "tpc")]
    repairs = gpu.any("repair_pending", *parts, since=ANY_DRIVER)
    banks = gpu.word(
        "repair_pending", YES, "remapped_banks/bank_remapper_pending", since=ANY_DRIVER
    )
    return True if banks else repairs


class _Value(NamedTuple):
    """Where a field of `Gpu` is read, and by which words or reader."""

    read: Mapping[str, Any] | Callable[[str], Any]
    path: str
    since: int = 0  # as of `Element.read`; so is ``needed``
    needed: bool = False
    name: str = ""  # under which an unreadable value is noted; "": the field's


_LINK = "pci/pci_gpu_link_info"
#: Field of `Gpu` -> its value, or its reader; in the order in which unreadable ones are noted.
_VALUES: dict[str, _Value | Callable[[Element], Any]] = {
    "model": _Value(parse_name, "product_name", needed=True),
    "uuid": _Value(parse_name, "uuid", needed=True),
    "vbios": _Value(parse_name, "vbios_version"),
    "ecc": _Value(SWITCH, "ecc_mode/current_ecc"),
    "ecc_pending": _Value(SWITCH, "ecc_mode/pending_ecc"),
    "ecc_uncorrectable_volatile": _uncorrectable,
    "ecc_uncorrectable_aggregate": lambda gpu: gpu.total(
        "tool aggregate", "ecc_errors/aggregate", "uncorrectable", "double_bit"
    ),
    "ecc_correctable_volatile": lambda gpu: gpu.total(
        "tool correctable", "ecc_errors/volatile", "correctable", "single_bit"
    ),
    "remap_pending": _Value(YES, "remapped_rows/remapped_row_pending", _ROWS),
    "remap_failed": _Value(YES, "remapped_rows/remapped_row_failure", _ROWS),
    "retired_pending": lambda gpu: gpu.any(
        "retired_pending", "retired_pages/pending_retirement", "retired_pages/pending_blacklist"
    ),
    "pcie_generation": _Value(_among(GENERATIONS), f"{_LINK}/pcie_gen/current_link_gen"),
    "pcie_generation_max": _Value(_among(GENERATIONS), f"{_LINK}/pcie_gen/max_link_gen"),
    "pcie_width": _Value(_among(LANES), f"{_LINK}/link_widths/current_link_width"),
    "pcie_width_max": _Value(_among(LANES), f"{_LINK}/link_widths/max_link_width"),
    "temperature_slowdown_c": _slowdown,
    "memory_temperature_c": _Value(_among(DEGREES), "temperature/memory_temp"),
    "persistence": _Value(SWITCH, "persistence_mode"),
    "mig": _Value(SWITCH, "mig_mode/current_mig", _MIG),
    "processes": lambda gpu: tuple(parse_processes(gpu)),
    "performance_state": _Value(_PERFORMANCE_STATES.get, "performance_state"),
    "memory_temperature_max_c": _Value(
        *(_among(DEGREES), "temperature/gpu_temp_max_mem_threshold", ANY_DRIVER),
        name="memory_temperature_c",
    ),
    "mig_pending": _Value(SWITCH, "mig_mode/pending_mig", _MIG),
    "repair_pending": _repairs,
    "recovery": _recovery,
    "fabric_state": _Value(_FABRIC_STATES, "fabric/state", _FABRIC),
    "fabric_status": _status,
    "fabric_faults": _faults,
    "sram_exceeded": _Value(YES, "ecc_errors/aggregate/sram_threshold_exceeded", ANY_DRIVER),
    "unrepairable": _Value(YES, "ecc_errors/unrepairable_memory", ANY_DRIVER),
    "spareless_banks": lambda gpu: gpu.sum("spareless_banks", _SPARELESS, since=ANY_DRIVER),
    "retired_pages": lambda gpu: gpu.sum("retired_pages", _PAGES, since=ANY_DRIVER),
    "c2c": _Value(SWITCH, "c2c_mode", ANY_DRIVER, name="links"),
    "compute_mode": _Value(_COMPUTE_MODES, "compute_mode", ANY_DRIVER),
}


def _value(gpu: Element, field: str, row: _Value | Callable[[Element], Any]) -> Any:
    if not isinstance(row, _Value):
        return row(gpu)
    name, path = row.name or field, row.path
    if isinstance(row.read, Mapping):
        return gpu.word(name, row.read, path, since=row.since)
    return gpu.read(name, row.read, path, since=row.since, needed=row.needed)


def parse_gpu(index: int, gpu: Element) -> Gpu | None:
    """One ``<gpu>``; None when it has no PCI address."""
    address = pci_address(gpu.node.get("id", "")) or pci_address(gpu.text("pci/pci_bus_id") or "")
    if address is None:
        return None
    throttle, throttled, idle = _throttle(gpu)
    current, degrees_left = _temperatures(gpu)
    virtual = gpu.word("virtual", _VIRTUAL, "gpu_virtualization_mode/virtualization_mode")
    clique = gpu.read("fabric_clique", parse_name, "fabric/cliqueId", since=ANY_DRIVER)
    cluster = gpu.read("fabric_clique", parse_name, "fabric/clusterUuid", since=ANY_DRIVER)
    power = "gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit"
    values = {field: _value(gpu, field, row) for field, row in _VALUES.items()}
    for field in ("pcie_width", "pcie_generation"):
        if values[field] and values[f"{field}_max"] == 0:
            gpu.note_unread(f"{field}_max", f"{field}_max", "0")
    # Errors in the place of values that no check reads: the driver is at fault.
    for node in own_elements(gpu.node):
        if node not in gpu.used and plain_word(node.text or "") in BROKEN:
            gpu.note_unread(f"tool {node.tag}", node.tag, node.text or "")
    values["recovery"] = _recovery_by_error(gpu) or values["recovery"]
    return Gpu(
        **values,
        index=index,
        vendor="nvidia",
        pci_address=address,
        recovery_named=gpu.node.find("gpu_recovery_action") is not None,
        serial=gpu.text("serial"),
        memory_total_mb=number(gpu.text("fb_memory_usage/total") or ""),
        memory_used_mb=number(gpu.text("fb_memory_usage/used") or ""),
        remapped_uncorrectable=number(gpu.text("remapped_rows/remapped_row_unc") or ""),
        throttle=throttle,
        throttled=throttled,
        temperature_c=current,
        temperature_left_c=degrees_left,
        idle=idle,
        virtual=bool(virtual),
        fabric_clique=None if clique is None else f"{clique} of {cluster}",
        peer=(gpu.text("platformInfo/peer_type") or "").lower() or None,
        power_limit_w=number(gpu.text(*power) or ""),
        unread=tuple(gpu.unread.items()),
    )

"""NVIDIA's GPUs as nvidia-smi shows them: ``-q -x`` (schemas v11, v12 and v13), and their NVLinks.

The schemas differ in names (clocks_throttle_reasons became clocks_event_reasons) and in what they
leave out. So each value is looked up under all of its names, and a value that is missing is None.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from nodeready.subjects.base import Alike, Known, Output, Section, changed
from nodeready.subjects.gpus.gpu import Gpu, GpuProcess, Link, Tool

if TYPE_CHECKING:
    from xml.etree import ElementTree

    from nodeready.policy import Policy

# --- nvidia-smi's XML: made safe to read, and its values, any of which may be missing.

#: The words for a value that the device does not have (nvidia-smi(1)), with or without brackets.
_HAS_NONE = ("n/a", "not supported")
#: The word in the place of a value that this driver shows under another name, or no longer.
_MOVED = "requested functionality has been deprecated"
#: Words in the place of any value that say that the device or its driver is at fault
#: (nvmlErrorString); one without a permission is the caller's, and says nothing of the device.
_BROKEN = (
    "unknown error",
    "err!",
    "timeout",
    "inforom is corrupted",
    "driver/library version mismatch",
    "gpu access blocked by the operating system",
)
#: The words that are an error whatever the value is: a text that is one names nothing.
_ERRORS = (
    *_BROKEN,
    "unknown",
    "error",
    "not found",
    "no data",
    "insufficient permissions",
    "gpu is lost",
    "gpu requires reset",
    "reset required",
    "function not found",
)
#: Of a value that came with a driver we do not know: where it stands nowhere, it is none.
_LATER = 10**6
_SWITCH = {"enabled": "on", "disabled": "off"}
_YES = {"yes": True, "no": False}
_TRUE = {"true": True, "false": False}
_ACTIVE = {"active": True, "not active": False}
# A count, and in which unit: 31 C, 16x, 2560 bank(s), 700.00 W.
_NUMBER = re.compile(r"(-?[0-9]{1,15})(?:\.[0-9]{1,9})?(?: ?(?:C|x|W|MiB|(?:bank|group)\(s\)))?")

T = TypeVar("T")


def _plain(text: str) -> str:
    return text.strip().lower().strip("[]")


def number(text: str) -> int | None:
    """The whole number of a count or a measure; None for any other text."""
    match = _NUMBER.fullmatch(text)
    return int(match[1]) if match else None


#: What no counter shows, whatever it counts: all ones of 32 bits and more, as -1 is printed.
_MOST = (1 << 32) - 1
#: Lanes of a PCIe link (0: the tool's word for none), and its generations; what a sensor of a chip
#: can show in C, and what T.Limit can. A register that cannot be read is all ones: 255, 65535, -1.
_LANES = range(33)
_GENERATIONS = range(8)
_DEGREES = range(-60, 200)
_LEFT = range(-200, 200)


def count(text: str) -> int | None:
    """A number of things; None for less than none, and for all ones."""
    return _among(range(_MOST))(text)


def _among(values: Container[int]) -> Callable[[str], int | None]:
    """The reader of a number that is one of these."""

    def read(text: str) -> int | None:
        found = number(text)
        # Whether None is in a range, Python finds out number by number.
        return found if found is not None and found in values else None

    return read


class Element:
    """An element of the XML: each value is read here, and what cannot be told is kept.

    This is the one place where the tool's words become values. A value that the device does not
    have (N/A, Not Supported) is None, and so is one that the driver is too old to show. Any other
    text that is no value, none at all, and an element that a driver of this age always prints, is
    None too and stands in ``unread``: it is unknown, and neither absent nor good.

    driver: the driver's major version; None: not known
    """

    def __init__(self, node: ElementTree.Element, driver: int | None = None) -> None:
        self.node = node
        self.driver = driver
        self.unread: dict[str, str] = {}
        self.used: set[ElementTree.Element] = set()

    def _find(self, path: str) -> ElementTree.Element | None:
        """The element; where it should be part of one with a text alone (N/A), that one."""
        node = self.node
        for name in path.split("/"):
            child = node.find(name)
            if child is None:
                return node if node is not self.node and not len(node) else None
            node = child
        return node

    def text(self, *paths: str) -> str | None:
        """The text of the first path with a value, or None: for facts that are not judged."""
        for path in paths:
            text = (self.node.findtext(path) or "").strip()
            if _plain(text) not in ("", "not found", *_HAS_NONE, *_BROKEN):
                return text[:200]
        return None

    def miss(self, name: str, path: str, said: str) -> None:
        """Keep that the value ``name`` could not be told, and what stands in its place."""
        words = " ".join(said.split())[:60] or "no value"
        self.unread.setdefault(name, f"{path.rpartition('/')[2]}: {words}")

    def read(
        self,
        name: str,
        parse: Callable[[str], T | None],
        *paths: str,
        since: int = 0,
        needed: bool = False,
    ) -> T | None:
        """The first value of the paths, which are one value under the names of several schemas.

        since:  the driver's major version that shows it at the latest
        needed: each device has it, so that N/A is no answer
        """
        found: T | None = None
        lacks, moved, wrong = False, False, ""
        for path in paths:
            node = self._find(path)
            if node is None:
                continue
            self.used.add(node)
            text = (node.text or "").strip()
            plain = _plain(text)
            value = None if plain in ("", _MOVED, *_HAS_NONE) else parse(text)
            found = value if found is None else found
            lacks = lacks or plain in _HAS_NONE
            moved = moved or plain == _MOVED
            if value is None and plain not in (_MOVED, *_HAS_NONE):
                wrong = wrong or text or "no value"
        if wrong:
            self.miss(name, paths[0], wrong)
        elif found is None and lacks and needed:
            self.miss(name, paths[0], "N/A")
        elif found is None and moved and not lacks:
            self.miss(name, paths[0], _MOVED)
        elif found is None and not lacks and (since == 0 or (self.driver or 0) >= since):
            self.miss(name, paths[0], "not shown")
        return found

    def word(self, name: str, words: Mapping[str, T], *paths: str, since: int = 0) -> T | None:
        """The value that one of these words stands for."""
        return self.read(name, lambda text: words.get(_plain(text)), *paths, since=since)

    def number(
        self, name: str, *paths: str, since: int = 0, among: Container[int] = range(_MOST)
    ) -> int | None:
        """The whole number with which the text begins, without its unit; a count, or ``among``."""
        return self.read(name, _among(among), *paths, since=since)

    def any(self, name: str, *paths: str, since: int = 0) -> bool | None:
        """True when one of the paths says yes, False when one says no; else None."""
        said = [self.word(name, _YES, path, since=since) for path in paths]
        return True if True in said else False if False in said else None

    def total(self, name: str, path: str, word: str, old: str) -> int | None:
        """The sum of the counters below ``path`` with ``word`` in their name.

        Schemas before v11, and boards before Ampere, count below ``old`` with a total.
        """
        below = self._find(path)
        names = [] if below is None else [child.tag for child in below]
        if "single_bit" in names or "double_bit" in names:
            return self.number(name, f"{path}/{old}/total")
        names = [one for one in names if re.search(rf"(^|_){word}(_|$)", one)]
        kinds = ("sram", "dram")
        names += [f"{kind}_{word}" for kind in kinds if not any(n.startswith(kind) for n in names)]
        return self.sum(name, [f"{path}/{one}" for one in names])

    def sum(self, name: str, paths: Iterable[str], since: int = 0) -> int | None:
        """The sum of these counters; None where no one is told."""
        found = [self.number(name, path, since=since) for path in paths]
        told = [count for count in found if count is not None]
        return sum(told) if told else None


def _escaped(text: str) -> str:
    """The text with the processes' names escaped: any name may be chosen, and break the XML.

    A name ends before the last element that follows a name in its process.
    """
    first, *pieces = text.split("<process_info>")
    made = [first]
    for piece in pieces:
        processes = piece.find("</processes>")
        tail = piece.rfind("<used_memory>", 0, processes if processes >= 0 else len(piece))
        start = piece.find("<process_name>") + len("<process_name>")
        end = piece.rfind("</process_name>", start, max(tail, 0))
        if start < len("<process_name>") or end < 0:
            made.append(piece)
        else:
            name = html.escape(html.unescape(piece[start:end]))
            made.append(piece[:start] + name + piece[end:])
    return "<process_info>".join(made)


def _alone(text: str) -> str:
    """The text without its processes."""
    made = []
    for piece in text.split("<gpu id="):
        start, end = piece.find("<processes>") + len("<processes>"), piece.rfind("</processes>")
        cut = start >= len("<processes>") and end >= start
        made.append(f"{piece[:start]}left out{piece[end:]}" if cut else piece)
    return "<gpu id=".join(made)


def tree(text: str) -> ElementTree.Element | None:
    """The XML of the answer; None when the answer holds no whole XML.

    What stands before the root is left out, the DOCTYPE included: so no DTD is read and no entity
    can be declared, and an entity that is used is an error. Where a process's name imitates the
    tool, so that no whole XML is left, the processes are left out.
    """
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    if start < 0 or end < start:
        return None
    body = text[start : end + len("</nvidia_smi_log>")]
    clean = re.sub(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd]", "\ufffd", body)
    # The parser takes long to import, and many nodes that audit themselves have no XML to read.
    from xml.etree import ElementTree

    for made in (_escaped(clean), _alone(clean)):
        try:
            return ElementTree.fromstring(made)
        except (ElementTree.ParseError, ValueError):
            continue
    return None


# --- The GPUs: ``nvidia-smi -q -x``.

NAME = "nvidia-smi"
FABRIC_MANAGER = "nv-fabricmanager"
WHEN = "command -v nvidia-smi >/dev/null 2>&1"

#: A process in state D for longer than this is stuck: a healthy one waits there for moments.
STUCK_AFTER_S = 30

# Without the driver, nvidia-smi would make the kernel load it, and a look changes nothing. An
# nvidia-smi that hangs in the kernel holds a lock on which the next one would hang, too. Start
# times in /proc/PID/stat count hundredths of a second (USER_HZ of all Linux ports with such GPUs).
# Slurm lets a step open no GPUs but those that it gave to the step (cgroup.conf(5),
# ConstrainDevices): there, what nvidia-smi does not show is no fault of the node's.
PREPARE = rf"""
    if [ ! -e /proc/driver/nvidia/version ] && [ ! -d /sys/module/nvidia ] &&
        [ ! -d /sys/bus/pci/drivers/nvidia ]; then
        printf 'nr_driver=none\n'
        exit 0
    fi
    while read -r nr_line; do
        case $nr_line in *slurm*) nr_step=1 ;; esac
    done 2>/dev/null </proc/self/cgroup
    if [ -n "${{nr_step-}}" ]; then
        nr_hidden=0
        for nr_file in /dev/nvidia[0-9]*; do
            # Not every file can be opened: only the refusal of a permission counts.
            case $({{ : <"$nr_file"; }} 2>&1) in *ermi*) nr_hidden=$((nr_hidden + 1)) ;; esac
        done
        if [ "$nr_hidden" -gt 0 ]; then
            printf 'nr_hidden=%s\n' "$nr_hidden"
            exit 0
        fi
    fi
    nr_up=0
    {{ read -r nr_up nr_x </proc/uptime; }} 2>/dev/null
    nr_found=$(grep -lsxF -e nvidia-smi -e {FABRIC_MANAGER[:15]} /proc/[0-9]*/comm)
    # Above that the shell could not start it: too many processes for one command line.
    if [ $? -lt 126 ]; then printf 'nr_scanned=1\n'; fi
    for nr_file in $nr_found; do
        nr_stat=
        {{ IFS= read -r nr_stat <"${{nr_file%comm}}stat"; }} 2>/dev/null || continue
        nr_pid=${{nr_file#/proc/}}
        nr_pid=${{nr_pid%/comm}}
        # Any user can give a process these names, and have it wait in state D.
        nr_is_roots "${{nr_file%/comm}}" || continue
        case $nr_stat in
        *'({FABRIC_MANAGER[:15]})'*) printf 'nr_fabric_manager=%s\n' "$nr_pid" ;;
        *'(nvidia-smi) D '*)
            set -- ${{nr_stat##*) }}
            nr_age=$((${{nr_up%%.*}} - ${{20}} / 100))
            if [ "$nr_age" -gt {STUCK_AFTER_S} ]; then
                printf 'nr_stuck=%s %s\n' "$nr_pid" "$nr_age"
                exit 0
            fi
            ;;
        esac
    done
"""


def _script(policy: Policy) -> str:
    return f"{PREPARE}\n    nr_told nvidia-smi -q -x\n"


SECTION = Section("nvidia_smi", _script, 20, 1048576, beside=True, when=WHEN)

_REASONS = (
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sw_thermal_slowdown",
)
_MAX_GPUS = 256
_MAX_PROCESSES = 1024


@dataclass(frozen=True)
class NvidiaSmi:
    """What nvidia-smi showed.

    fabric_manager: whether the fabric manager's process runs; None: not looked for
    """

    gpus: tuple[Gpu, ...]
    tool: Tool
    driver: str | None = None
    cuda: str | None = None
    fabric_manager: bool | None = None


def address(text: str) -> str | None:
    """A PCI address in sysfs' form, from NVIDIA's eight-digit domain; None for another text."""
    match = re.fullmatch(
        r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", text.strip().lower()
    )
    if match is None:
        return None
    domain, bus, device = (int(match[n] or "0", 16) for n in (1, 2, 3))
    return f"{domain:04x}:{bus:02x}:{device:02x}.{match[4]}"


def message(text: str) -> str:
    """The first line of a tool's message, at most 160 characters, or ""."""
    for line in text.splitlines():
        words = line.strip()
        # Killed, Terminated: what the shell prints when the limit ends the tool.
        if words and not words.startswith(("<", "nr_")) and words not in ("Killed", "Terminated"):
            return words[:160]
    return ""


#: The major versions of the driver from which on each answer has these parts, as recordings of
#: 470 (no more than MIG), 515 (rows) and 535 (fabric, reset) show it.
_MIG, _ROWS, _FABRIC = 450, 515, 535

#: Whether the node is a virtual machine, by the words of its virtualization mode.
_VIRTUAL = {
    "none": False,
    "host vgpu": False,
    "host vsga": False,
    "pass-through": True,
    "vgpu": True,
    "vsga": True,
}
_COMPUTE = {
    name: name for name in ("default", "exclusive_process", "exclusive_thread", "prohibited")
}
_JOINED = {name: name for name in ("completed", "in progress", "not started")}
_PAGES = [
    f"retired_pages/{kind}_bit_retirement/retired_count" for kind in ("multiple_single", "double")
]
#: Banks of memory without a spare row, and groups of banks without a spare bank.
_SPARELESS = [
    f"remapped_{kind}s/{kind}_remapper_histogram/{kind}_remapper_histogram_none"
    for kind in ("row", "bank")
]

#: What the fabric's health (nvmlGpuFabricInfo_v3_t) says of a GPU's attachment to its NVLink
#: fabric: element -> word -> what is wrong, "" for nothing. NVML's constants name the conditions.
_HEALTH: Mapping[str, Mapping[str, str]] = {
    "summary": {
        "healthy": "",
        "unhealthy": "unhealthy",
        "degraded": "degraded",
        "limited capacity": "limited capacity",
    },
    "bandwidth": {"full": "", "degraded": "bandwidth degraded"},
    "route_unhealthy": {"false": "", "true": "route unhealthy"},
    "route_recovery_in_progress": {"false": "", "true": "route recovery in progress"},
    "access_timeout_recovery": {"false": "", "true": "access timeout recovery"},
    "incorrect_configuration": {"none": ""},
    "partition_assigned": {"true": "", "false": "no partition assigned"},
    "gfm_state": {"connected": "", "disconnected": "global fabric manager disconnected"},
}


def _faults(gpu: Element) -> tuple[str, ...]:
    """What is wrong with the GPU's attachment to its fabric; an unknown word is unread."""
    found = []
    for name, words in _HEALTH.items():

        def parse(text: str, name: str = name, words: Mapping[str, str] = words) -> str | None:
            plain = _plain(text)
            if name == "incorrect_configuration" and plain not in (*words, *_ERRORS):
                return f"incorrect configuration: {text.lower()}"
            return words.get(plain)

        text = gpu.read("fabric_faults", parse, f"fabric/health/{name}", since=_LATER)
        found += [text[:80]] if text else []
    return tuple(found)


def _throttle(gpu: Element) -> tuple[tuple[str, ...], bool | None, bool | None]:
    """The active reasons that slow hardware down, whether one is, and whether the GPU is idle."""
    active = {}
    for name in ("gpu_idle", *_REASONS):
        paths = [
            f"clocks_{kind}_reasons/clocks_{kind}_reason_{name}" for kind in ("event", "throttle")
        ]
        field = "idle" if name == "gpu_idle" else "throttle"
        active[name] = gpu.word(field, _ACTIVE, *paths)
    found = tuple(name for name in _REASONS if active[name])
    told = any(active[name] is not None for name in _REASONS)
    return found, bool(found) if told else None, active["gpu_idle"]


def _slowdown(gpu: Element, now: int | None, left: int | None) -> int | None:
    """The temperature at which the GPU slows down.

    Ada and later print no such temperature. They print how many degrees are left to the limit,
    and at how many degrees left the slow-down begins, usually -2 (T.Limit; nvidia-smi(1)).
    """
    slow, at = "temperature/gpu_temp_slow_threshold", "temperature/gpu_temp_slow_tlimit_threshold"
    name = "temperature_slowdown_c"
    if gpu.node.find(slow) is not None or gpu.node.find(at) is None:
        return gpu.number(name, slow, among=_DEGREES)
    begins = gpu.number(name, at, among=_LEFT)
    if left is None and gpu.node.find("temperature/gpu_temp_tlimit") is None:
        gpu.miss(name, "gpu_temp_tlimit", "not shown")
    return None if now is None or left is None or begins is None else now + left - begins


def _demand(text: str) -> str | None:
    return None if _plain(text) in _ERRORS else _plain(text)


def _recovery(gpu: Element) -> str | None:
    """What the driver asks for: v13 names the action, v12 says whether a reset is needed."""
    raw = gpu.node.find("gpu_recovery_action")
    if raw is not None:
        said = gpu.read("recovery", _demand, "gpu_recovery_action")
        return None if said is None else said.replace("gpu ", "")[:40]
    reset, drain = (
        gpu.word("recovery", _YES, f"gpu_reset_status/{name}", since=_FABRIC)
        for name in ("reset_required", "drain_and_reset_recommended")
    )
    if reset:
        return "reset"
    return "drain and reset" if drain else None if reset is None else "none"


def _lost(gpu: Element) -> str | None:
    """What a GPU needs that has an error in the place of its values (nvmlErrorString), or None."""
    said = {_plain(node.text or "") for node in _own(gpu.node)}
    if "gpu is lost" in said:
        return "reboot"
    return "reset" if said & {"gpu requires reset", "reset required"} else None


def _own(gpu: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """The elements with the GPU's own values: a process's name is its user's."""
    yield gpu
    for child in gpu:
        if child.tag not in ("processes", "accounted_processes"):
            yield from child.iter()


def _stray(gpu: Element) -> None:
    """Keep the errors in the place of values that no check reads: they are the driver's."""
    for node in _own(gpu.node):
        if node not in gpu.used and _plain(node.text or "") in _BROKEN:
            gpu.miss(f"tool {node.tag}", node.tag, node.text or "")


def _processes(gpu: Element) -> Iterator[GpuProcess]:
    below = gpu.node.find("processes")
    said = "" if below is None or len(below) else _plain(below.text or "")
    if below is None:
        gpu.miss("processes", "processes", "not shown")
    elif said not in ("", "none", *_HAS_NONE):
        gpu.miss("processes", "processes", below.text or "")
    for count, node in enumerate(gpu.node.iterfind("processes/process_info")):
        process = Element(node)
        pid = process.read("pid", number, "pid", needed=True)
        if pid is None:
            gpu.miss("processes", "pid", node.findtext("pid") or "")
        elif count < _MAX_PROCESSES:
            name = " ".join((node.findtext("process_name") or "").split())[:200] or "?"
            memory = number((node.findtext("used_memory") or "").strip())
            yield GpuProcess(pid, name, memory, process.text("type", "process_type"))


def _name(text: str) -> str | None:
    says = re.search("[A-Za-z0-9]", text) and _plain(text) not in (*_ERRORS, "none")
    return text[:200] if says else None


def _status(gpu: Element) -> str | None:
    """The outcome of the registration at the fabric.

    What went wrong is an error's text itself (nvmlErrorString): there it is the value.
    """
    joined = _plain(gpu.node.findtext("fabric/state") or "") not in ("", *_HAS_NONE, *_ERRORS)

    def parse(text: str) -> str | None:
        return None if not joined and _plain(text) in _ERRORS else text.lower()[:80]

    return gpu.read("fabric_status", parse, "fabric/status", since=_FABRIC)


def _uncorrectable(gpu: Element) -> int | None:
    """Uncorrectable errors of the GPU; in MIG mode, those that its instances count, too."""
    name = "ecc_uncorrectable_volatile"
    own = gpu.total(name, "ecc_errors/volatile", "uncorrectable", "double_bit")
    path = "ecc_error_count/volatile_count/sram_uncorrectable"
    parts = [count(one.findtext(path) or "") or 0 for one in gpu.node.iter("mig_device")]
    return own if not any(parts) else max(own or 0, sum(parts))


def _repairs(gpu: Element) -> bool | None:
    """Whether a repair waits for a reset: of a memory channel, a TPC or (Rubin) a bank."""
    parts = [f"ecc_errors/{part}_repair_pending" for part in ("channel", "tpc")]
    repairs = gpu.any("repair_pending", *parts, since=_LATER)
    banks = gpu.word("repair_pending", _YES, "remapped_banks/bank_remapper_pending", since=_LATER)
    return True if banks else repairs


def _gpu(index: int, gpu: Element) -> Gpu | None:
    """One ``<gpu>``; None when it has no PCI address."""
    where = address(gpu.node.get("id", "")) or address(gpu.text("pci/pci_bus_id") or "")
    if where is None:
        return None
    width, generation = "pci/pci_gpu_link_info/link_widths", "pci/pci_gpu_link_info/pcie_gen"
    throttle, throttled, idle = _throttle(gpu)
    now = gpu.number("temperature_c", "temperature/gpu_temp", among=_DEGREES)
    left = None
    if gpu.node.find("temperature/gpu_temp_tlimit") is not None:
        left = gpu.number("temperature_left_c", "temperature/gpu_temp_tlimit", among=_LEFT)
    virtual = gpu.word("virtual", _VIRTUAL, "gpu_virtualization_mode/virtualization_mode")
    clique = gpu.read("fabric_clique", _name, "fabric/cliqueId", since=_LATER)
    cluster = gpu.read("fabric_clique", _name, "fabric/clusterUuid", since=_LATER)
    power = "gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit"
    found = Gpu(
        index=index,
        vendor="nvidia",
        pci_address=where,
        recovery_named=gpu.node.find("gpu_recovery_action") is not None,
        model=gpu.read("model", _name, "product_name", needed=True),
        uuid=gpu.read("uuid", _name, "uuid", needed=True),
        serial=gpu.text("serial"),
        vbios=gpu.read("vbios", _name, "vbios_version"),
        memory_total_mb=number(gpu.text("fb_memory_usage/total") or ""),
        memory_used_mb=number(gpu.text("fb_memory_usage/used") or ""),
        ecc=gpu.word("ecc", _SWITCH, "ecc_mode/current_ecc"),
        ecc_pending=gpu.word("ecc_pending", _SWITCH, "ecc_mode/pending_ecc"),
        ecc_uncorrectable_volatile=_uncorrectable(gpu),
        ecc_uncorrectable_aggregate=gpu.total(
            "tool aggregate", "ecc_errors/aggregate", "uncorrectable", "double_bit"
        ),
        ecc_correctable_volatile=gpu.total(
            "tool correctable", "ecc_errors/volatile", "correctable", "single_bit"
        ),
        remap_pending=gpu.word(
            "remap_pending", _YES, "remapped_rows/remapped_row_pending", since=_ROWS
        ),
        remap_failed=gpu.word(
            "remap_failed", _YES, "remapped_rows/remapped_row_failure", since=_ROWS
        ),
        remapped_uncorrectable=number(gpu.text("remapped_rows/remapped_row_unc") or ""),
        retired_pending=gpu.any(
            "retired_pending",
            "retired_pages/pending_retirement",
            "retired_pages/pending_blacklist",
        ),
        pcie_generation=gpu.number(
            "pcie_generation", f"{generation}/current_link_gen", among=_GENERATIONS
        ),
        pcie_generation_max=gpu.number(
            "pcie_generation_max", f"{generation}/max_link_gen", among=_GENERATIONS
        ),
        pcie_width=gpu.number("pcie_width", f"{width}/current_link_width", among=_LANES),
        pcie_width_max=gpu.number("pcie_width_max", f"{width}/max_link_width", among=_LANES),
        throttle=throttle,
        throttled=throttled,
        temperature_c=now,
        temperature_left_c=left,
        temperature_slowdown_c=_slowdown(gpu, now, left),
        memory_temperature_c=gpu.number(
            "memory_temperature_c", "temperature/memory_temp", among=_DEGREES
        ),
        persistence=gpu.word("persistence", _SWITCH, "persistence_mode"),
        mig=gpu.word("mig", _SWITCH, "mig_mode/current_mig", since=_MIG),
        processes=tuple(_processes(gpu)),
        performance_state=gpu.read("performance_state", _state, "performance_state"),
        idle=idle,
        virtual=bool(virtual),
        memory_temperature_max_c=gpu.number(
            "memory_temperature_c",
            "temperature/gpu_temp_max_mem_threshold",
            since=_LATER,
            among=_DEGREES,
        ),
        mig_pending=gpu.word("mig_pending", _SWITCH, "mig_mode/pending_mig", since=_MIG),
        repair_pending=_repairs(gpu),
        recovery=_recovery(gpu),
        fabric_state=gpu.word("fabric_state", _JOINED, "fabric/state", since=_FABRIC),
        fabric_status=_status(gpu),
        fabric_faults=_faults(gpu),
        fabric_clique=None if clique is None else f"{clique} of {cluster}",
        peer=(gpu.text("platformInfo/peer_type") or "").lower() or None,
        sram_exceeded=gpu.word(
            "sram_exceeded", _YES, "ecc_errors/aggregate/sram_threshold_exceeded", since=_LATER
        ),
        unrepairable=gpu.word(
            "unrepairable", _YES, "ecc_errors/unrepairable_memory", since=_LATER
        ),
        spareless_banks=gpu.sum("spareless_banks", _SPARELESS, since=_LATER),
        retired_pages=gpu.sum("retired_pages", _PAGES, since=_LATER),
        c2c=gpu.word("links", _SWITCH, "c2c_mode", since=_LATER),
        compute_mode=gpu.word("compute_mode", _COMPUTE, "compute_mode", since=_LATER),
        power_limit_w=number(gpu.text(*power) or ""),
    )
    for name, now, most in (
        ("pcie_width_max", found.pcie_width, found.pcie_width_max),
        ("pcie_generation_max", found.pcie_generation, found.pcie_generation_max),
    ):
        if now and most == 0:
            gpu.miss(name, name, "0")
    _stray(gpu)
    return replace(found, recovery=_lost(gpu) or found.recovery, unread=tuple(gpu.unread.items()))


def _state(text: str) -> str | None:
    return text if re.fullmatch(r"P(1[0-5]|[0-9])", text) else None


def _version(text: str) -> str | None:
    return text[:40] if re.match("[0-9]+[.][0-9]", text) else None


def _genuine(root: ElementTree.Element, told: int | None) -> list[ElementTree.Element]:
    """The GPUs. More of them than the tool counts are part of a process's name: the shortest."""
    nodes = root.findall("gpu")[:_MAX_GPUS]
    if not told or told >= len(nodes):
        return nodes
    longest = sorted(nodes, key=lambda node: -sum(1 for _ in _own(node)))[:told]
    return [node for node in nodes if node in longest]


def _unasked(name: str, output: Output) -> Tool | None:
    """The tool that the node does not have, or could not ask for its GPUs; None: it was asked."""
    text = output.text
    if not text.strip() and output.rc == 0:
        return Tool(name, "missing")
    if text.startswith("nr_driver=none"):
        return Tool(name, "failed", "the driver is not loaded")
    hidden = re.match(r"nr_hidden=([0-9]{1,4})$", text, re.M)
    if hidden is None:
        return None
    step = "the step of Slurm's that looks (ConstrainDevices)"
    return Tool(name, "hidden", f"{hidden[1]} GPUs were not given to {step}")


@dataclass(frozen=True)
class _Head:
    """What stands above the GPUs. unread: what makes no sense of it, or ""."""

    driver: str | None
    cuda: str | None
    major: int | None
    told: int | None
    unread: str


def _head(root: ElementTree.Element) -> _Head:
    log = Element(root)
    driver, cuda = (
        log.read(name, _version, name, other)
        for name, other in (
            ("driver_version", "kmd_version"),
            ("cuda_version", "cuda_umd_version"),
        )
    )
    major = number((driver or "").partition(".")[0])
    told = log.number("attached_gpus", "attached_gpus", since=_LATER, among=range(_MAX_GPUS + 1))
    unread = log.unread.get("driver") or log.unread.get("attached_gpus") or ""
    return _Head(driver, cuda, major, told, unread)


def _whole(text: str) -> tuple[_Head, list[Gpu | None]] | None:
    """The head and the GPUs of an answer; None when it holds no whole XML."""
    root = tree(text)
    if root is None:
        return None
    head = _head(root)
    nodes = _genuine(root, head.told)
    return head, [_gpu(index, Element(node, head.major)) for index, node in enumerate(nodes)]


# --- The same, of a GPU whose like was read before.
#
# Reading the XML of eight GPUs takes 5 ms, and thousands of nodes have the same GPUs, which differ
# by their names and by what is measured. So the lines of a GPU are held against those of one that
# was read in full: where no other line differs than that of such a value, and that value is a
# plain one, only the fields that are made of it are made anew. Anything else is read in full.

#: Path of an element -> the plain values that it can have, and the field that is made of it; "":
#: none is. A number is within the bounds of its field.
_VARIES: Mapping[str, tuple[re.Pattern[str], str]] = {
    "uuid": (re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "uuid"),
    "serial": (re.compile(r"[0-9]{4,20}"), "serial"),
    "temperature/gpu_temp": (re.compile(r"1?[0-9]?[0-9] C"), "temperature_c"),
    "temperature/gpu_temp_tlimit": (re.compile(r"-?1?[0-9]?[0-9] C"), "temperature_left_c"),
    "temperature/memory_temp": (re.compile(r"1?[0-9]?[0-9] C"), "memory_temperature_c"),
    "fb_memory_usage/used": (re.compile(r"[0-9]{1,8} MiB"), "memory_used_mb"),
    **{
        path: (re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,3})? (?:W|MHz|MiB|%|KB/s|mV)"), "")
        for path in (
            *("fb_memory_usage/free", "bar1_memory_usage/used", "bar1_memory_usage/free"),
            *(f"gpu_power_readings/{one}power_draw" for one in ("", "average_", "instant_")),
            "power_readings/power_draw",
            *("pci/tx_util", "pci/rx_util", "voltage/graphics_volt"),
            *(f"clocks/{one}_clock" for one in ("graphics", "sm", "mem", "video")),
            *(
                f"utilization/{one}_util"
                for one in ("gpu", "memory", "encoder", "decoder", "jpeg", "ofa")
            ),
        )
    },
}
#: The processes of a GPU as the tool prints them, with names that are no markup.
_PLAIN_PROCESSES = re.compile(
    r"<processes>(?:\s*<process_info>"
    + "".join(
        rf"(?:\s*<{name}>[^<>&]{{0,200}}</{name}>)?"
        for name in (
            *("gpu_instance_id", "compute_instance_id"),
            *("pid", "type", "process_name", "used_memory"),
        )
    )
    + r"\s*</process_info>)+\s*</processes>"
)
_NO_PROCESSES = "<processes>\n\t\t</processes>"
_LEAF = re.compile(r"\s*<([a-z0-9_]+)>([^<>&]*)</\1>\s*")
_OPENING, _CLOSING = re.compile(r"\s*<([a-z0-9_]+)>\s*"), re.compile(r"\s*</([a-z0-9_]+)>\s*")
_STRANGE = re.compile(r"[^\t\n\x20-\x7e]")
_SLOWDOWN = "<gpu_temp_slow_threshold>"
#: GPUs in full, by place, driver and address: those of 64 nodes of eight GPUs.
_TEMPLATES: Known[Gpu] = Known(512)


def _like(template: Alike[Gpu], lines: list[str]) -> Gpu | None:
    """The GPU of these lines; None where they differ by more than plain values."""
    differing = template.differing(lines)
    if differing is None:
        return None
    fields: dict[str, Any] = {}
    for path, text in differing.items():
        plain, field = _VARIES[path]
        value = text[: text.find("<")]
        if text != f"{value}</{path.rpartition('/')[2]}>" or not plain.fullmatch(value):
            return None
        if field:
            fields[field] = value if field in ("uuid", "serial") else number(value)
    gpu = template.read
    now, left, slow = gpu.temperature_c, gpu.temperature_left_c, gpu.temperature_slowdown_c
    # Where the temperature of the slow-down is not printed, it follows from the degrees left.
    printed = _SLOWDOWN in template.context
    if now is not None and left is not None and slow is not None and not printed:
        later = fields.get("temperature_c", now) + fields.get("temperature_left_c", left)
        fields["temperature_slowdown_c"] = later - (now + left - slow)
    return changed(gpu, **fields)


def _varying(lines: list[str]) -> dict[int, tuple[str, str]]:
    """Number of a line with a value that may differ -> what stands before it, and its path.

    None where the form of the text is strange. Only the first element of a path is read. A value
    that was not plain here is read in full.
    """
    found: dict[int, tuple[str, str]] = {}
    inside: list[str] = []
    seen: set[str] = set()
    for at, line in enumerate(lines):
        leaf, opening, closing = (one.fullmatch(line) for one in (_LEAF, _OPENING, _CLOSING))
        if leaf:
            path = "/".join((*inside, leaf[1]))
            row = _VARIES.get(path)
            if row and path not in seen and row[0].fullmatch(leaf[2]):
                found[at] = (line[: leaf.start(2)], path)
            seen.add(path)
        elif opening:
            inside.append(opening[1])
            # Of two parents with one name, the first one is read.
            path = "/".join(inside)
            if path in seen:
                return {}
            seen.add(path)
        elif closing and inside and inside[-1] == closing[1]:
            inside.pop()
        elif "<" in line and at:
            return {}
    return found if not inside else {}


def _block(index: int, major: int | None, text: str) -> Gpu | None:
    """One GPU, of ``<gpu id=...>`` to what stands before ``</gpu>``. Raises ParseError."""
    from xml.etree import ElementTree

    processes: tuple[GpuProcess, ...] = ()
    if "<process_info>" in text:
        match = _PLAIN_PROCESSES.search(text)
        if match is None or text.count("<process_info>") != match[0].count("<process_info>"):
            raise ElementTree.ParseError
        below = Element(ElementTree.fromstring(f"<gpu>{match[0]}</gpu>"))
        processes = tuple(_processes(below))
        if below.unread:
            raise ElementTree.ParseError
        text = f"{text[: match.start()]}{_NO_PROCESSES}{text[match.end() :]}"
    lines = text.split("\n")
    context = (index, major, _SLOWDOWN if _SLOWDOWN in text else "")
    for template in _TEMPLATES.of(lines, *context):
        gpu = _like(template, lines)
        if gpu is not None:
            _TEMPLATES.used(template)
            return changed(gpu, processes=processes) if processes else gpu
    if _STRANGE.search(text):
        raise ElementTree.ParseError
    gpu = _gpu(index, Element(ElementTree.fromstring(f"{text}</gpu>"), major))
    if gpu is not None:
        _TEMPLATES.keep(Alike(tuple(lines), gpu, _varying(lines), context))
    return gpu if gpu is None or not processes else changed(gpu, processes=processes)


@lru_cache(maxsize=64)
def _known_head(text: str) -> _Head | None:
    from xml.etree import ElementTree

    if _STRANGE.search(text):
        return None
    try:
        root = ElementTree.fromstring(f"{text}</nvidia_smi_log>")
        return None if root.find("gpu") is not None else _head(root)
    except (ElementTree.ParseError, ValueError):
        return None


def _by_block(text: str) -> tuple[_Head, list[Gpu | None]] | None:
    """As `_whole`, GPU by GPU; None for whatever has to be read as a whole."""
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    if start < 0 or end < start:
        return None
    above, *blocks = text[start:end].split("<gpu id=")
    above = re.sub(r"<timestamp>[A-Za-z0-9: ]{0,40}</timestamp>", "<timestamp></timestamp>", above)
    head = _known_head(above)
    if head is None or len(blocks) > (head.told or _MAX_GPUS):
        return None
    from xml.etree import ElementTree

    found = []
    for index, block in enumerate(blocks):
        inner, ended, rest = block.partition("</gpu>")
        if not ended or rest.strip():
            return None
        try:
            found.append(_block(index, head.major, f"<gpu id={inner}"))
        except (ElementTree.ParseError, ValueError):
            return None
    return head, found


def parse(output: Output) -> NvidiaSmi:
    """The GPUs in what the section ``nvidia_smi`` printed; a tool that failed is a `Tool`."""
    text = output.text
    manager: bool | None = None
    # Our own lines stand before anything of the tool's.
    ours = text[: text.find("<")] if "<" in text else text
    if re.search("^nr_scanned=1$", ours, re.M):
        manager = re.search("^nr_fabric_manager=[0-9]", ours, re.M) is not None
    if unasked := _unasked(NAME, output):
        return NvidiaSmi((), unasked)
    stuck = re.search(r"^nr_stuck=([0-9]{1,9}) ([0-9]{1,9})$", ours, re.M)
    if stuck:
        words = f"pid {stuck[1]} hangs in the kernel for {stuck[2]} s"
        return NvidiaSmi((), Tool(NAME, "stuck", words), fabric_manager=manager)
    said = _by_block(text) or _whole(text)
    if said is None:
        # The values of an answer that was cut off are no message.
        words = message(re.split(r"<\?xml|<nvidia_smi_log", text, maxsplit=1)[0])
        if output.truncated:
            tool = Tool(NAME, "nonsense", "its answer was cut off")
        elif output.rc is None:
            tool = Tool(NAME, "timed out", words or f"after {SECTION.timeout_s} s")
        elif output.rc != 0 or words.startswith("No devices"):
            tool = Tool(NAME, "failed", words or f"exit status {output.rc}")
        else:
            tool = Tool(NAME, "nonsense", f"no whole XML: {text.strip()[:100]!r}")
        return NvidiaSmi((), tool, fabric_manager=manager)
    head, found = said
    driver = head.driver
    gpus = tuple(gpu for gpu in found if gpu is not None)
    tool = Tool(NAME, "ok", driver or "")
    if head.unread:
        tool = Tool(NAME, "nonsense", head.unread)
    if output.rc != 0 or len(gpus) < len(found):
        around = text[: text.find("<nvidia_smi_log")] + text[text.rfind("</nvidia_smi_log>") :]
        words = f"exit status {output.rc}"
        if output.rc == 0:
            words = f"{len(found) - len(gpus)} of {len(found)} GPUs without a PCI address"
        tool = Tool(NAME, "failed", message(around) or words)
        if output.rc is None:
            tool = Tool(NAME, "timed out", f"after {SECTION.timeout_s} s, its answer was whole")
    return NvidiaSmi(gpus, tool, driver, head.cuda, manager)


# --- The links between the GPUs: ``nvidia-smi nvlink --status``.

# Boards on which the links are connected by construction. The others are cards: a bridge between
# two of them is an option, and an NVL is a pair of cards (product names as recordings have them).
_BOARD = re.compile(r"\bSXM[0-9]?\b|\bHBM3\b|\bG?B[123]00\b|\bH(?:20|20-3e|100|200|800)\b")
_CARD = re.compile(r"\bPCIe\b|\bNVL\b|\bHBM2e\b")
_SWITCHED = re.compile(r"\bG?B[123]00\b")
_FABRIC_JOINED = ("completed", "in progress")


def on_board(gpu: Gpu) -> bool:
    """Whether the GPU's NVLinks are connected by construction: it is no card."""
    model = gpu.model or ""
    return switched(gpu) or (_BOARD.search(model) is not None and not _CARD.search(model))


def switched(gpu: Gpu) -> bool:
    """Whether each of the GPU's NVLinks leads to a switch, seen by the host or not."""
    model = gpu.model or ""
    return (
        gpu.fabric_state in _FABRIC_JOINED
        or gpu.peer == "switch connected"
        or (_SWITCHED.search(model) is not None and not _CARD.search(model))
    )


NVLINK = "nvidia-smi nvlink"

_MAX_LINKS = 64
_GPU = re.compile(r"GPU [0-9]{1,4}: [^(]{0,200}\(UUID: (\S{1,80})\)")
_LINK = re.compile(r"\s+Link ([0-9]{1,3}): (\S.{0,79})")
_SPEED = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) GB/s")
# Where no link of a GPU is active, and on a board without NVLink: one line that says so.
_NO_LINKS = re.compile("links are inactive|not supported", re.I)
#: A link that sleeps wakes when it is used (NVML_NVLINK_STATE_SLEEP).
_STATES = {"inactive": "inactive", "active": "active", "sleep": "active"}


def _nvlink_script(policy: Policy) -> str:
    return f"{PREPARE}\n    nr_told nvidia-smi nvlink --status\n"


# A section of its own: where the fabric is broken, this command hangs and ``-q`` does not.
NVLINK_SECTION = Section("nvlink", _nvlink_script, 20, 262144, beside=True, when=WHEN)


@dataclass(frozen=True)
class NvLinks:
    """What nvidia-smi nvlink showed.

    links:  UUID of a GPU -> its links
    unread: UUID of a GPU -> what stands in the place of its links' states
    """

    tool: Tool
    links: dict[str, tuple[Link, ...]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)


# The links of thousands of nodes are alike: each is kept once.
@lru_cache(maxsize=4096)
def _link(number: str, text: str) -> Link | None:
    """The link; None when its state cannot be told."""
    speed = _SPEED.fullmatch(text)
    if speed:
        return Link(int(number), "active", float(speed[1]))
    state = _STATES.get(text.strip("<>").lower())
    return None if state is None else Link(int(number), state)


@lru_cache(maxsize=256)
def _links(text: str) -> tuple[tuple[Link, ...], str, bool]:
    """The links of one GPU; the first whose state cannot be told; whether other lines are there.

    The GPUs of thousands of nodes have the same links.
    """
    found, unread, strange = [], "", False
    for line in text.splitlines():
        link = _LINK.match(line)
        if link:
            made = _link(link[1], link[2].strip())
            if made is not None:
                found.append(made)
            else:
                unread = unread or f"link {link[1]}: {link[2].strip()[:60]}"
        elif line.strip() and not line.startswith("nr_"):
            strange = True
            if line[:1].isspace() and not _NO_LINKS.search(line):
                unread = unread or line.strip()[:60]
    return tuple(found[:_MAX_LINKS]), unread, strange


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """The lines that begin with a GPU, each with the lines below it; the text above them first."""
    text = "\n".join(text.splitlines())
    above, *pieces = re.split(r"^(?=GPU [0-9])", text, flags=re.M)
    if above:
        yield "", above
    for piece in pieces:
        first, _, below = piece.partition("\n")
        yield first, below


def parse_nvlink(output: Output) -> NvLinks:
    """The links in what the section ``nvlink`` printed.

    A GPU whose links are all inactive has one line that says so. A GPU without NVLink has no line,
    or one that says that NVLink is not supported, or nothing is printed at all (an A10). All have
    no links here.
    """
    text = output.text
    if unasked := _unasked(NVLINK, output):
        return NvLinks(unasked)
    if re.search("^nr_stuck=", text, re.M):
        return NvLinks(Tool(NVLINK, "stuck", "an earlier nvidia-smi hangs in the kernel"))
    found: dict[str, tuple[Link, ...]] = {}
    unread: dict[str, str] = {}
    uuid, others = "", False
    for first, below in _pieces(text):
        match = _GPU.match(first)
        uuid = match[1] if match else uuid
        lines = below if match else f"{first}\n{below}"
        read = _links if len(lines) <= 4096 else _links.__wrapped__
        links, why, strange = read(lines)
        if uuid:
            found[uuid] = (*found[uuid], *links)[:_MAX_LINKS] if uuid in found else links
            if why:
                unread.setdefault(uuid, why)
        others = others or (bool(strange or links or why) and not uuid)
    tool = Tool(NVLINK, "ok")
    if output.truncated:
        tool = Tool(NVLINK, "nonsense", "its answer was cut off")
    elif output.rc is None:
        tool = Tool(NVLINK, "timed out", f"after {NVLINK_SECTION.timeout_s} s")
    elif not found and (output.rc != 0 or others):
        state = "nonsense" if output.rc == 0 else "failed"
        tool = Tool(NVLINK, state, message(text) or f"exit status {output.rc}")
    return NvLinks(tool, found, unread)

"""NVIDIA's GPUs as ``nvidia-smi -q -x`` shows them (schemas v11, v12 and v13).

The schemas differ in names (clocks_throttle_reasons became clocks_event_reasons) and in the values
that they leave out. So each value is read under all of its names, and may be missing (None).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from nodeready.core import shell
from nodeready.core.base import Output, Section
from nodeready.core.parsed_template import ParsedTemplate, TemplateCache, fast_replace
from nodeready.subjects.gpus import nvidia_gpu
from nodeready.subjects.gpus.gpu import Gpu, GpuLink, GpuProcess, Tool
from nodeready.subjects.gpus.nvidia_gpu import Element, number, own_elements, parse_gpu, tree

if TYPE_CHECKING:
    from xml.etree import ElementTree

NAME = "nvidia-smi"
FABRIC_MANAGER = "nv-fabricmanager"
WHEN = "command -v nvidia-smi >/dev/null 2>&1"

#: A process in state D for longer than this is stuck: a healthy one waits there for moments.
STUCK_AFTER_S = 30


def _script(command: str) -> str:
    """The shell text that runs nvidia-smi so, unless an earlier one hangs."""
    manager = FABRIC_MANAGER[:15]
    return shell.script(
        "nvidia_smi", COMMAND=command, FABRIC_MANAGER=manager, STUCK_AFTER_S=STUCK_AFTER_S
    )


SECTION = Section(
    "nvidia_smi", lambda policy: _script("-q -x"), 20, 1048576, parallel=True, when=WHEN
)

_MAX_GPUS = 256


@dataclass(frozen=True)
class NvidiaSmi:
    """The output of nvidia-smi."""

    gpus: tuple[Gpu, ...]
    tool: Tool
    driver: str | None = None
    cuda: str | None = None
    fabric_manager: bool | None = None  # the fabric manager's process runs; None: not looked for


def message(text: str) -> str:
    """The first line of a tool's message, at most 160 characters, or ""."""
    for line in text.splitlines():
        words = line.strip()
        # The shell prints Killed or Terminated when the limit ends the tool.
        if words and not words.startswith(("<", "nr_")) and words not in ("Killed", "Terminated"):
            return words[:160]
    return ""


def _version(text: str) -> str | None:
    return text[:40] if re.match("[0-9]+[.][0-9]", text) else None


def _real_gpus(root: ElementTree.Element, attached_count: int | None) -> list[ElementTree.Element]:
    """The GPUs, without the shortest where they are more than the tool counts: imitations."""
    nodes = root.findall("gpu")[:_MAX_GPUS]
    if not attached_count or attached_count >= len(nodes):
        return nodes
    longest = sorted(nodes, key=lambda node: -sum(1 for _ in own_elements(node)))[:attached_count]
    return [node for node in nodes if node in longest]


def unasked_tool(name: str, output: Output) -> Tool | None:
    """The tool, where it is missing or was not run; None: it ran."""
    text = output.text
    if not text.strip() and output.rc == 0:
        return Tool(name, "missing")
    if text.startswith("nr_driver=none"):
        return Tool(name, "failed", "the driver is not loaded")
    if (hidden := re.match(r"nr_hidden=([0-9]{1,4})$", text, re.M)) is None:
        return None
    step = "the step of Slurm's that looks (ConstrainDevices)"
    return Tool(name, "hidden", f"{hidden[1]} GPUs were not given to {step}")


@dataclass(frozen=True)
class _Head:
    """The values above the GPUs. unread: a value that makes no sense, or ""."""

    driver: str | None
    cuda: str | None
    major: int | None
    attached_count: int | None
    unread: str


def _head(root: ElementTree.Element) -> _Head:
    log = Element(root)
    driver = log.read("driver_version", _version, "driver_version", "kmd_version")
    cuda = log.read("cuda_version", _version, "cuda_version", "cuda_umd_version")
    major = number((driver or "").partition(".")[0])
    attached_count = log.number(
        "attached_gpus", "attached_gpus", since=nvidia_gpu.ANY_DRIVER, among=range(_MAX_GPUS + 1)
    )
    unread = log.unread.get("driver") or log.unread.get("attached_gpus") or ""
    return _Head(driver, cuda, major, attached_count, unread)


def _parse_whole(text: str) -> tuple[_Head, list[Gpu | None]] | None:
    """The head and the GPUs of an answer; None when it holds no whole XML."""
    if (root := tree(text)) is None:
        return None
    head = _head(root)
    nodes = _real_gpus(root, head.attached_count)
    return head, [parse_gpu(index, Element(node, head.major)) for index, node in enumerate(nodes)]


# --- The same for a GPU that resembles an earlier one.
#
# Reading the XML of eight GPUs takes 5 ms. Thousands of nodes have the same GPUs, which differ
# only in names and measurements. So the lines of a GPU are compared with those of a GPU that was
# read in full. Where only lines of names and measurements differ, and their values are plain, only
# the fields of these values are set. Any other GPU is read in full.

#: Path of an element -> the plain values that it can have, and the field that holds it; "": no
#: field does. A number is within the bounds of its field.
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
            *(f"gpu_power_readings/{name}power_draw" for name in ("", "average_", "instant_")),
            "power_readings/power_draw",
            *("pci/tx_util", "pci/rx_util", "voltage/graphics_volt"),
            *(f"clocks/{name}_clock" for name in ("graphics", "sm", "mem", "video")),
            *(
                f"utilization/{name}_util"
                for name in ("gpu", "memory", "encoder", "decoder", "jpeg", "ofa")
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
#: GPUs that were read in full, by place, driver and address: those of 64 nodes of eight GPUs.
_TEMPLATES: TemplateCache[Gpu] = TemplateCache(512)


def _with_values(gpu: Gpu, differing: Mapping[str, str], *, prints_slowdown: bool) -> Gpu | None:
    """The GPU with these values; None where one is not plain."""
    fields: dict[str, Any] = {}
    for path, text in differing.items():
        plain, field = _VARIES[path]
        value = text[: text.find("<")]
        if text != f"{value}</{path.rpartition('/')[2]}>" or not plain.fullmatch(value):
            return None
        if field:
            fields[field] = value if field in ("uuid", "serial") else number(value)
    # The slow-down temperature follows from the degrees left, where it is not printed.
    degrees = gpu.temperature_c, gpu.temperature_left_c, gpu.temperature_slowdown_c
    if None not in degrees and not prints_slowdown:
        fields["temperature_slowdown_c"] = (gpu.temperature_slowdown_c or 0) + sum(
            fields.get(field, getattr(gpu, field)) - getattr(gpu, field)
            for field in ("temperature_c", "temperature_left_c")
        )
    return fast_replace(gpu, **fields)


def _varying(lines: list[str]) -> dict[int, tuple[str, str]]:
    """Index of a line with a value that may differ -> the text before the value, and its path.

    {} where the form of the text is strange. Only the first element of a path is read. A line
    whose value is not plain here may not differ.
    """
    varying: dict[int, tuple[str, str]] = {}
    inside: list[str] = []
    observed: set[str] = set()
    for index, line in enumerate(lines):
        leaf, opening, closing = (
            pattern.fullmatch(line) for pattern in (_LEAF, _OPENING, _CLOSING)
        )
        if leaf:
            path = "/".join((*inside, leaf[1]))
            row = _VARIES.get(path)
            if row and path not in observed and row[0].fullmatch(leaf[2]):
                varying[index] = (line[: leaf.start(2)], path)
            observed.add(path)
        elif opening:
            inside.append(opening[1])
            # Of two parents with one name, the first one is read.
            path = "/".join(inside)
            if path in observed:
                return {}
            observed.add(path)
        elif closing and inside and inside[-1] == closing[1]:
            inside.pop()
        elif "<" in line and index:
            return {}
    return varying if not inside else {}


def _parse_block(index: int, major: int | None, text: str) -> Gpu | None:
    """One GPU from the text between ``<gpu id=`` and ``</gpu>``. Raises ParseError."""
    from xml.etree import ElementTree

    processes: tuple[GpuProcess, ...] = ()
    if "<process_info>" in text:
        match = _PLAIN_PROCESSES.search(text)
        if match is None or text.count("<process_info>") != match[0].count("<process_info>"):
            raise ElementTree.ParseError
        gpu_element = Element(ElementTree.fromstring(f"<gpu>{match[0]}</gpu>"))
        processes = tuple(nvidia_gpu.parse_processes(gpu_element))
        if gpu_element.unread:
            raise ElementTree.ParseError
        text = f"{text[: match.start()]}{_NO_PROCESSES}{text[match.end() :]}"
    lines = text.split("\n")
    context = (index, major, "<gpu_temp_slow_threshold>" in text)
    gpu = _TEMPLATES.adapted(partial(_with_values, prints_slowdown=context[2]), lines, *context)
    if gpu is None:
        if _STRANGE.search(text):
            raise ElementTree.ParseError
        gpu = parse_gpu(index, Element(ElementTree.fromstring(f"{text}</gpu>"), major))
        if gpu is not None:
            _TEMPLATES.keep(ParsedTemplate(tuple(lines), gpu, _varying(lines), context))
    return gpu if gpu is None or not processes else fast_replace(gpu, processes=processes)


@lru_cache(maxsize=64)
def _parse_head(text: str) -> _Head | None:
    from xml.etree import ElementTree

    if _STRANGE.search(text):
        return None
    try:
        root = ElementTree.fromstring(f"{text}</nvidia_smi_log>")
        return None if root.find("gpu") is not None else _head(root)
    except (ElementTree.ParseError, ValueError):
        return None


def _parse_blocks(text: str) -> tuple[_Head, list[Gpu | None]] | None:
    """The result of `_parse_whole`, read GPU by GPU; None where only that can read it."""
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    if start < 0 or end < start:
        return None
    head_text, *blocks = text[start:end].split("<gpu id=")
    head_text = re.sub(
        r"<timestamp>[A-Za-z0-9: ]{0,40}</timestamp>", "<timestamp></timestamp>", head_text
    )
    head = _parse_head(head_text)
    if head is None or len(blocks) > (head.attached_count or _MAX_GPUS):
        return None
    from xml.etree import ElementTree

    gpus = []
    for index, block in enumerate(blocks):
        inner, ended, tail = block.partition("</gpu>")
        if not ended or tail.strip():
            return None
        try:
            gpus.append(_parse_block(index, head.major, f"<gpu id={inner}"))
        except (ElementTree.ParseError, ValueError):
            return None
    return head, gpus


def parse(output: Output) -> NvidiaSmi:
    """The GPUs in what the section ``nvidia_smi`` printed; a tool that failed is a `Tool`."""
    text = output.text
    manager: bool | None = None
    # The script's own lines come before the tool's output.
    script_lines = text[: text.find("<")] if "<" in text else text
    if re.search("^nr_scanned=1$", script_lines, re.M):
        manager = re.search("^nr_fabric_manager=[0-9]", script_lines, re.M) is not None
    if unasked := unasked_tool(NAME, output):
        return NvidiaSmi((), unasked)
    if stuck := re.search(r"^nr_stuck=([0-9]{1,9}) ([0-9]{1,9})$", script_lines, re.M):
        words = f"pid {stuck[1]} hangs in the kernel for {stuck[2]} s"
        return NvidiaSmi((), Tool(NAME, "stuck", words), fabric_manager=manager)
    if (answer := _parse_blocks(text) or _parse_whole(text)) is None:
        # An answer that was cut off contains values, and no message.
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
    head, shown_gpus = answer
    gpus = tuple(gpu for gpu in shown_gpus if gpu is not None)
    tool = Tool(NAME, "ok", head.driver or "")
    if head.unread:
        tool = Tool(NAME, "nonsense", head.unread)
    if output.rc != 0 or len(gpus) < len(shown_gpus):
        around = text[: text.find("<nvidia_smi_log")] + text[text.rfind("</nvidia_smi_log>") :]
        words = f"exit status {output.rc}"
        if output.rc == 0:
            addressless = len(shown_gpus) - len(gpus)
            words = f"{addressless} of {len(shown_gpus)} GPUs without a PCI address"
        tool = Tool(NAME, "failed", message(around) or words)
        if output.rc is None:
            tool = Tool(NAME, "timed out", f"after {SECTION.timeout_s} s, its answer was whole")
    return NvidiaSmi(gpus, tool, head.driver, head.cuda, manager)


# --- The links between NVIDIA's GPUs: ``nvidia-smi nvlink --status``.

# Boards on which the links are connected by construction. On cards a bridge between two of them is
# an option, and an NVL is a pair of cards (product names of recorded output).
_BOARD = re.compile(r"\bSXM[0-9]?\b|\bHBM3\b|\bG?B[123]00\b|\bH(?:20|20-3e|100|200|800)\b")
_CARD = re.compile(r"\bPCIe\b|\bNVL\b|\bHBM2e\b")
_SWITCHED = re.compile(r"\bG?B[123]00\b")
FABRIC_JOINED = ("completed", "in progress")


def is_on_board(gpu: Gpu) -> bool:
    """Whether the GPU's NVLinks are connected by construction, unlike those of a card."""
    model = gpu.model or ""
    return is_switched(gpu) or (_BOARD.search(model) is not None and not _CARD.search(model))


def is_switched(gpu: Gpu) -> bool:
    """Whether each of the GPU's NVLinks leads to a switch, visible to the host or not."""
    model = gpu.model or ""
    return (
        gpu.fabric_state in FABRIC_JOINED
        or gpu.peer == "switch connected"
        or (_SWITCHED.search(model) is not None and not _CARD.search(model))
    )


NVLINK = "nvidia-smi nvlink"
_MAX_LINKS = 64
_GPU_LINE = re.compile(r"GPU [0-9]{1,4}: [^(]{0,200}\(UUID: (\S{1,80})\)")
_LINK = re.compile(r"\s+Link ([0-9]{1,3}): (\S.{0,79})")
_SPEED = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) GB/s")
# The line for a GPU without an active link, and for a board without NVLink.
_NO_LINKS = re.compile("links are inactive|not supported", re.I)
#: A link that sleeps wakes when it is used (NVML_NVLINK_STATE_SLEEP).
_STATES = {"inactive": "inactive", "active": "active", "sleep": "active"}


# A separate section: where the fabric is broken, this command hangs and ``-q`` does not.
NVLINK_SECTION = Section(
    "nvlink", lambda policy: _script("nvlink --status"), 20, parallel=True, when=WHEN
)


@dataclass(frozen=True)
class NvLinks:
    """The output of ``nvidia-smi nvlink``."""

    tool: Tool
    links: dict[str, tuple[GpuLink, ...]] = field(default_factory=dict)  # UUID -> its links
    unread: dict[str, str] = field(default_factory=dict)  # UUID -> the text in its links' place


# The GPUs of thousands of nodes have equal links.
@lru_cache(maxsize=256)
def _parse_links(text: str) -> tuple[tuple[GpuLink, ...], str, bool]:
    """The links of one GPU; the first unknown state; whether there are lines of another kind."""
    links, unread, strange = [], "", False
    for line in text.splitlines():
        if link := _LINK.match(line):
            text = link[2].strip()
            speed = _SPEED.fullmatch(text)
            state = "active" if speed else _STATES.get(text.strip("<>").lower())
            if state is None:
                unread = unread or f"link {link[1]}: {text[:60]}"
            else:
                links.append(GpuLink(int(link[1]), state, float(speed[1]) if speed else None))
        elif line.strip() and not line.startswith("nr_"):
            strange = True
            if line[:1].isspace() and not _NO_LINKS.search(line):
                unread = unread or line.strip()[:60]
    return tuple(links[:_MAX_LINKS]), unread, strange


def parse_nvlink(output: Output) -> NvLinks:
    """The links in what the section ``nvlink`` printed.

    A GPU with inactive links only has one line for all of them. A GPU without NVLink has no line,
    or the line "not supported", or the output is empty (an A10). None of these has links here.
    """
    text = output.text
    if unasked := unasked_tool(NVLINK, output):
        return NvLinks(unasked)
    if re.search("^nr_stuck=", text, re.M):
        return NvLinks(Tool(NVLINK, "stuck", "an earlier nvidia-smi hangs in the kernel"))
    links_by_uuid: dict[str, tuple[GpuLink, ...]] = {}
    unread: dict[str, str] = {}
    uuid, has_other_lines = "", False
    for block in re.split(r"^(?=GPU [0-9])", "\n".join(text.splitlines()), flags=re.M):
        first, _, body = block.partition("\n")
        match = _GPU_LINE.match(first)
        uuid = match[1] if match else uuid
        lines = body if match else block
        read = _parse_links if len(lines) <= 4096 else _parse_links.__wrapped__
        links, reason, strange = read(lines)
        if uuid:
            if earlier := links_by_uuid.get(uuid):
                links = (*earlier, *links)[:_MAX_LINKS]
            links_by_uuid[uuid] = links
            if reason:
                unread.setdefault(uuid, reason)
        has_other_lines = has_other_lines or (bool(strange or links or reason) and not uuid)
    tool = Tool(NVLINK, "ok")
    if output.truncated:
        tool = Tool(NVLINK, "nonsense", "its answer was cut off")
    elif output.rc is None:
        tool = Tool(NVLINK, "timed out", f"after {NVLINK_SECTION.timeout_s} s")
    elif not links_by_uuid and (output.rc != 0 or has_other_lines):
        state = "nonsense" if output.rc == 0 else "failed"
        tool = Tool(NVLINK, state, message(text) or f"exit status {output.rc}")
    return NvLinks(tool, links_by_uuid, unread)

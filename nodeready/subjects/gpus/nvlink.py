"""The links between NVIDIA's GPUs: ``nvidia-smi nvlink --status``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from nodeready.core.base import Output, Section
from nodeready.subjects.gpus.gpu import Gpu, GpuLink, Tool
from nodeready.subjects.gpus.nvidia import PREPARE, WHEN, message, unasked_tool

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
_GPU = re.compile(r"GPU [0-9]{1,4}: [^(]{0,200}\(UUID: (\S{1,80})\)")
_LINK = re.compile(r"\s+Link ([0-9]{1,3}): (\S.{0,79})")
_SPEED = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) GB/s")
# The line for a GPU without an active link, and for a board without NVLink.
_NO_LINKS = re.compile("links are inactive|not supported", re.I)
#: A link that sleeps wakes when it is used (NVML_NVLINK_STATE_SLEEP).
_STATES = {"inactive": "inactive", "active": "active", "sleep": "active"}


_SCRIPT = f"{PREPARE}\n    nr_answer nvidia-smi nvlink --status\n"
# A separate section: where the fabric is broken, this command hangs and ``-q`` does not.
NVLINK_SECTION = Section("nvlink", lambda policy: _SCRIPT, 20, 262144, parallel=True, when=WHEN)


@dataclass(frozen=True)
class NvLinks:
    """The output of ``nvidia-smi nvlink``."""

    tool: Tool
    # UUID of a GPU -> its links
    links: dict[str, tuple[GpuLink, ...]] = field(default_factory=dict)
    # UUID of a GPU -> the text in the place of its links' states
    unread: dict[str, str] = field(default_factory=dict)


# The GPUs of thousands of nodes have equal links: each is kept once.
@lru_cache(maxsize=4096)
def _link(number: str, text: str) -> GpuLink | None:
    """The link; None if its state is unknown."""
    speed = _SPEED.fullmatch(text)
    if speed:
        return GpuLink(int(number), "active", float(speed[1]))
    state = _STATES.get(text.strip("<>").lower())
    return None if state is None else GpuLink(int(number), state)


@lru_cache(maxsize=256)
def _links(text: str) -> tuple[tuple[GpuLink, ...], str, bool]:
    """The links of one GPU; the first unknown state; whether there are lines of another kind."""
    links, unread, strange = [], "", False
    for line in text.splitlines():
        link = _LINK.match(line)
        if link:
            parsed = _link(link[1], link[2].strip())
            if parsed is not None:
                links.append(parsed)
            else:
                unread = unread or f"link {link[1]}: {link[2].strip()[:60]}"
        elif line.strip() and not line.startswith("nr_"):
            strange = True
            if line[:1].isspace() and not _NO_LINKS.search(line):
                unread = unread or line.strip()[:60]
    return tuple(links[:_MAX_LINKS]), unread, strange


def _gpu_blocks(text: str) -> Iterator[tuple[str, str]]:
    """The text above the first GPU, then each GPU's line with the lines below it."""
    text = "\n".join(text.splitlines())
    preamble, *blocks = re.split(r"^(?=GPU [0-9])", text, flags=re.M)
    if preamble:
        yield "", preamble
    for block in blocks:
        first, _, body = block.partition("\n")
        yield first, body


def parse_nvlink(output: Output) -> NvLinks:
    """The links in what the section ``nvlink`` printed.

    A GPU with inactive links only has one line for all of them. A GPU without NVLink has no line,
    or the line "not supported", or the output is empty (an A10). None of these GPUs has links
    here.
    """
    text = output.text
    if unasked := unasked_tool(NVLINK, output):
        return NvLinks(unasked)
    if re.search("^nr_stuck=", text, re.M):
        return NvLinks(Tool(NVLINK, "stuck", "an earlier nvidia-smi hangs in the kernel"))
    links_by_uuid: dict[str, tuple[GpuLink, ...]] = {}
    unread: dict[str, str] = {}
    uuid, has_other_lines = "", False
    for first, body in _gpu_blocks(text):
        match = _GPU.match(first)
        uuid = match[1] if match else uuid
        lines = body if match else f"{first}\n{body}"
        read = _links if len(lines) <= 4096 else _links.__wrapped__
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

"""The NVLinks of NVIDIA's GPUs, as ``nvidia-smi nvlink --status`` shows them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from nodeready.policy import Policy
from nodeready.probes.base import Output, Section
from nodeready.probes.gpu import Link, Tool
from nodeready.probes.nvidia import PREPARE, WHEN, message

NAME = "nvidia-smi nvlink"

_MAX_LINKS = 64
_GPU = re.compile(r"GPU [0-9]{1,4}: [^(]{0,200}\(UUID: (\S{1,80})\)")
_LINK = re.compile(r"\s+Link ([0-9]{1,3}): (<inactive>|[0-9]{1,6}(?:\.[0-9]{1,6})? GB/s)")


def _script(policy: Policy) -> str:
    return f"{PREPARE}\n    nvidia-smi nvlink --status\n"


# A section of its own: where the fabric is broken this one hangs, and the rest is still seen.
SECTION = Section("nvlink", _script, 20, 262144, beside=True, when=WHEN)


@dataclass(frozen=True)
class NvLinks:
    """The links by the UUID of their GPU; a GPU that is not there was not shown."""

    tool: Tool
    links: dict[str, tuple[Link, ...]] = field(default_factory=dict)


# The links of thousands of nodes are alike: each is kept once.
@lru_cache(maxsize=4096)
def _link(number: str, text: str) -> Link:
    speed = None if text == "<inactive>" else float(text.partition(" ")[0])
    return Link(int(number), "inactive" if speed is None else "active", speed)


def parse(output: Output) -> NvLinks:
    """What the section ``nvlink`` printed.

    A GPU whose links are all inactive has one line that says so instead of them; one without
    NVLink has none, or one that says that it is not supported. Both have no links here.
    """
    text = output.text
    if not text.strip() and output.rc == 0:
        return NvLinks(Tool(NAME, "missing"))
    if text.startswith("nr_driver=none"):
        return NvLinks(Tool(NAME, "failed", "the driver is not loaded"))
    if re.search("^nr_stuck=", text, re.M):
        return NvLinks(Tool(NAME, "stuck", "an earlier nvidia-smi hangs in the kernel"))
    found: dict[str, list[Link]] = {}
    links: list[Link] = []
    for line in text.splitlines():
        link = _LINK.match(line)
        if link is None:
            gpu = _GPU.match(line)
            if gpu:
                links = found.setdefault(gpu[1], [])
        elif len(links) < _MAX_LINKS:
            links.append(_link(link[1], link[2]))
    tool = Tool(NAME, "ok")
    if output.truncated:
        tool = Tool(NAME, "nonsense", "its answer was cut off")
    elif output.rc is None:
        tool = Tool(NAME, "timed out", f"after {SECTION.timeout_s} s")
    elif not found:
        state = "nonsense" if output.rc == 0 else "failed"
        tool = Tool(NAME, state, message(text) or f"exit status {output.rc}")
    return NvLinks(tool, {uuid: tuple(links) for uuid, links in found.items()})

"""What a probe is: sections of shell that read a node, and the parser of what they print."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

from nodeready.policy import Policy

if TYPE_CHECKING:
    # The proofs, which travel to the nodes, take this module, and need no policy.
    from nodeready.policy import Policy


class ProbeError(Exception):
    """A section's output makes no sense. ``evidence`` holds its first bytes."""

    def __init__(self, reason: str, evidence: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.evidence = evidence[:200]


@dataclass(frozen=True)
class Unknown:
    """A subject that could not be observed on a node: why, and the first bytes of what came."""

    reason: str
    evidence: str = ""


@dataclass(frozen=True)
class Section:
    """One piece of the snapshot: a shell text that only reads, under its own limits.

    script:    the POSIX sh text for a policy; nr_value and the other helpers are at hand
    timeout_s: seconds after which it is ended; reading /etc takes milliseconds, but a home
               directory or a mount can hang
    cap_bytes: output beyond it is cut off on the node
    beside:    it starts a program that may be slow or hang for good (a vendor's tool, a mount):
               it runs beside the others, and what cannot be ended is left behind, not waited for
    when:      for a section that runs beside: a shell command that says whether there is anything
               to run (``command -v nvidia-smi >/dev/null``); when not, the section is empty
    """

    name: str
    script: Callable[[Policy], str]
    timeout_s: int = 5
    cap_bytes: int = 262144
    beside: bool = False
    when: str = ":"


_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True)
class Output:
    """What one section printed: its bytes as text (surrogateescape), exit status, and limits."""

    text: str
    rc: int | None
    truncated: bool = False
    nonce: str = ""

    def require(self) -> str:
        """The text of a section that ended well. Raises ProbeError for one that did not."""
        if self.truncated:
            raise ProbeError("output truncated", self.text)
        if self.rc is None:
            raise ProbeError("timed out", self.text)
        if self.rc != 0:
            raise ProbeError(f"failed with exit status {self.rc}", self.text)
        return self.text

    def values(self) -> dict[str, str]:
        """The ``NAME=VALUE`` lines; the first of a name counts."""
        found: dict[str, str] = {}
        for line in self.require().splitlines():
            name, equals, value = line.partition("=")
            if equals and name not in found and _NAME.match(name):
                found[name] = value
        return found

    def all(self, name: str) -> list[str]:
        """Every VALUE of the ``NAME=VALUE`` lines of this name, in order."""
        start = f"{name}="
        return [
            line[len(start) :] for line in self.require().splitlines() if line.startswith(start)
        ]

    def files(self) -> dict[str, bytes]:
        """The files that nr_exact printed, by path, with their bytes as they are on the node."""
        mark = re.escape(f"@{self.nonce}")
        found = re.finditer(
            rf"^{mark} file (/[^\n]*)\n(.*?)\n{mark} eof$", self.require(), re.M | re.S
        )
        return {match[1]: match[2].encode("utf-8", "surrogateescape") for match in found}


@dataclass(frozen=True)
class Line:
    """One line of a file on the node. ``text`` has no line end; ``where`` is ``/path:number``."""

    path: str
    number: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"


# The first number between colons ends the path, unless it is part of a PCI address (0000:52:00.0).
_FILE_LINE = re.compile(
    r"(/[^:]*(?::[^:]*)*?)"
    r":(?!(?<=/[0-9a-f]{4}:)[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])([0-9]{1,12}):(.*)",
    re.S,
)


def file_lines(text: str) -> Iterator[Line]:
    """The lines that nr_lines printed (``/path:number:text``); other lines are passed over.

    The path of a PCI device is told from a line's number; another path with a number between
    colons (``/etc/a:1:b.conf``) is not: its lines pass for those of ``/etc/a``.
    """
    for raw in text.split("\n"):
        match = _FILE_LINE.match(raw)
        if match:
            yield Line(match[1], int(match[2]), match[3])


@dataclass(frozen=True)
class Probe:
    """How one subject is observed: the sections it needs and the parser of their output."""

    subject: str
    sections: tuple[Section, ...]
    parse: Callable[[Mapping[str, Output], Policy], Any]


def number(text: str, what: str) -> int:
    """``text`` as a whole number. Raises ProbeError, with the text, when it is none."""
    try:
        return int(text.strip())
    except ValueError:
        raise ProbeError(f"{what} is no number", text) from None


# --- Directories in which the last file by name wins: can a file of ours be the last?
#
# Ours begin with as many z's as it takes (``name_after``). A few names sort behind any of those.

#: A file name has at most 255 bytes (limits.h, NAME_MAX); ours needs room behind its z's.
_MOST_ZS = 200


def beatable(name: str) -> bool:
    """Whether some number of z's sorts behind ``name``: not behind ``~x.conf``, ``zz{.conf``."""
    rest = name.lstrip("z")
    return len(name) - len(rest) < _MOST_ZS and rest[:1] <= "z"


# --- What an earlier look saw of counters that only ever grow.


@dataclass(frozen=True)
class Counters:
    """The counters of one subject at an earlier look at the same boot of the same node.

    A counter of an adapter runs from the last reset or load of its driver, so that a total
    says nothing about today: only the change between two looks does.
    """

    #: How long before the present look the earlier one was, in seconds.
    seconds: float
    #: Counter -> its value then; the names are the subject's own ("mlx5_0/1.link_downed").
    values: Mapping[str, int]


# --- The files of ours on a node, for diffs and so that a change knows what it replaces.


def _script(patterns: tuple[str, ...]) -> str:
    return rf"""
    set --
    for nr_file in {" ".join(patterns)}; do
        if [ -f "$nr_file" ]; then set -- "$@" "$nr_file"; fi
    done
    if [ $# != 0 ]; then nr_lines "$@"; fi
    """


def parse(outputs: Mapping[str, Output], policy: Policy) -> dict[str, bytes]:
    """The content of each file of ours, by path; they all end with a newline."""
    lines: dict[str, list[str]] = {}
    for line in file_lines(outputs["ours"].require()):
        lines.setdefault(line.path, []).append(line.text + "\n")
    return {path: "".join(text).encode("utf-8", "surrogateescape") for path, text in lines.items()}


def probe(patterns: Iterable[str]) -> Probe:
    """The probe that reads every file of these shell patterns: the files that we own outright."""
    text = _script(tuple(dict.fromkeys(patterns)))
    return Probe("ours", (Section("ours", lambda policy: text),), parse)

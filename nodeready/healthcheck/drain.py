"""Drain this node in Slurm when it is not ready, and undrain what nodeready drained, nothing else.

The decision is pure; `scontrol` is asked and told at the edge. A prolog that finds its node ready
calls nothing of this: a job of a thousand nodes would ask slurmctld a thousand times.
"""

from __future__ import annotations

import os
import re
import subprocess
import syslog
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nodeready.shell import search_path
from nodeready.text import sanitise

if TYPE_CHECKING:
    from nodeready.healthcheck.gate import Verdict

#: The first word of our reasons. A drain with another reason is never overwritten or taken back.
PREFIX = "nodeready:"
#: Characters of a reason: sinfo -R and mails show it in one line.
_REASON_LENGTH = 200
#: Seconds for one answer of slurmctld; Slurm's own MessageTimeout is 10 by default.
SCONTROL_S = 5.0
#: The beginnings of states in which a node gets no jobs already, for a reason that is not ours.
_TAKEN = ("DOWN", "FAIL", "FUTURE", "POWER", "REBOOT", "UNKNOWN")


class DrainError(Exception):
    """Slurm could not be asked or told; one line with what it said."""


@dataclass(frozen=True)
class SlurmNode:
    """What Slurm knows of a node: the words of its state (IDLE, DRAIN) and the reason, or ""."""

    states: tuple[str, ...]
    reason: str

    @property
    def drained(self) -> bool:
        return any(state.startswith("DRAIN") for state in self.states)

    @property
    def ours(self) -> bool:
        return self.reason.startswith(PREFIX)


def parse(text: str) -> SlurmNode:
    """The node in ``scontrol show node NAME``. Raises DrainError for a text without a state."""
    state = re.search(r"^ +State=(\S+)", text, re.M)
    if state is None:
        raise DrainError(f"scontrol show node makes no sense: {_line(text) or 'it said nothing'}")
    # Flags stand behind a word: DOWN*+DRAIN is DOWN and DRAIN.
    words = tuple(re.sub(r"[^A-Z_]", "", word) for word in state[1].upper().split("+"))
    reason = re.search(r"^ +Reason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])? *$", text, re.M)
    return SlurmNode(words, reason[1] if reason else "")


def reason_of(found: Sequence[str]) -> str:
    """The reason for these lines (``check: actual``), in one short line of ASCII."""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    text = sanitise(found[0]) if found else "not ready"
    text = "".join(char if " " <= char <= "~" else "?" for char in text)
    return f"{PREFIX} {text[: _REASON_LENGTH - len(PREFIX) - len(more) - 1]}{more}"


def _about(reason: str) -> tuple[str, ...]:
    """What a reason of ours is about: the check, and how many other reasons there are."""
    match = re.match(rf"{PREFIX} ([^:]*).*?(\(and \d+ more\))?$", reason)
    return (match[1], match[2] or "") if match else (reason,)


def decide(node: SlurmNode, reason: str) -> tuple[str, ...]:
    """What to tell Slurm about the node, as words of ``scontrol update``; () for nothing.

    reason: why the node is not ready; "": it is ready
    ``undrain`` clears the drain alone, where ``resume`` would also raise a node that is down.
    """
    if node.drained and not node.ours:
        return ()
    if not reason:
        return ("state=undrain",) if node.drained else ()
    if node.drained:
        # The text behind the check may hold a number that moves with every look.
        same = _about(node.reason) == _about(reason)
        return () if same else (f"reason={reason}",)
    if any(state.startswith(_TAKEN) for state in node.states):
        return ()
    return ("state=drain", f"reason={reason}")


def name_of(environment: Mapping[str, str], hostname: str) -> str:
    """This node's name in Slurm. Raises DrainError for one that could mean other nodes too."""
    name = environment.get("SLURMD_NODENAME") or hostname.partition(".")[0]
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name.upper() == "ALL":
        raise DrainError(f"{sanitise(name, 60)!r} is no name of one node in Slurm")
    return name


def _nothing() -> None:
    """What is done before a drain where nothing is."""


def settle(
    found: Sequence[str], go: bool, until: float, before: Callable[[], None] = _nothing
) -> str:
    """Tell Slurm whether this node gets jobs. Returns what was told, in a line for the log, or "".

    found: why the node is not ready
    until: time.monotonic() at which slurmctld must have answered
    before: called before the node is drained; not for a drain that is there already
    Raises DrainError.
    """
    name = name_of(os.environ, os.uname().nodename)
    node = parse(_scontrol(["show", "node", name], until))
    words = decide(node, "" if go else reason_of(found))
    if words:
        if "state=drain" in words:
            before()
        _scontrol(["update", f"nodename={name}", *words], until)
    return " ".join((name, *words)) if words else ""


def _scontrol(words: list[str], until: float) -> str:
    """What scontrol printed. Raises DrainError."""
    left = min(SCONTROL_S, until - time.monotonic())
    if left <= 0:
        raise DrainError(f"no time left for scontrol {words[0]}")
    try:
        done = subprocess.run(
            ["scontrol", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=left,
            check=False,
            cwd="/",
            env={**os.environ, "PATH": search_path(os.environ.get("PATH", "")), "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise DrainError(f"scontrol {words[0]} gave no answer in {left:.0f} s") from None
    except OSError as error:
        raise DrainError(f"scontrol: {error.strerror}") from None
    said = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        raise DrainError(f"scontrol {words[0]}: {_line(said) or f'status {done.returncode}'}")
    return said


def _line(text: str) -> str:
    """The first line that says something, safe to show."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return sanitise(lines[0], 160) if lines else ""


def tell(found: Verdict, until: float, before: Callable[[], None] = _nothing) -> str:
    """Have Slurm give this node jobs or not, by the verdict, and say so in the node's log.

    until:  time.monotonic() at which Slurm must have answered
    before: as for `settle`
    Returns why Slurm could not be told, or "".
    """
    try:
        told = settle(found.reasons, found.go, until, before)
    except DrainError as error:
        syslog.syslog(syslog.LOG_WARNING, f"nodeready: {error}")
        return str(error)
    if told:
        syslog.syslog(syslog.LOG_NOTICE, f"nodeready: scontrol update {told}")
    return ""

"""Take a core of a live process on one node: look what would be done, then do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from nodeready.capture import gcore
from nodeready.coring import NOT_DONE
from nodeready.policy import Policy
from nodeready.probes.base import ProbeError
from nodeready.transport.base import INTERRUPTED, UNREACHED, Asks
from nodeready.transport.program import nonce, nothing, request, rows

Seen = TypeVar("Seen")

#: Seconds to look, which starts gdb once for its version.
_LOOK_S = 30
#: Seconds that it may take at most, whatever its size.
_TAKE_S = 3600


class DumpError(Exception):
    """No core was taken: why, one line.

    kind: of the node's failure; "": it answered
    """

    def __init__(self, why: str, kind: str = "") -> None:
        super().__init__(why)
        self.unreachable = kind in UNREACHED
        self.interrupted = kind == INTERRUPTED


@dataclass(frozen=True)
class Dumping:
    """A core of a live process: first what would be done, then doing it.

    tag:    of the run
    node:   its name, and its policy
    into:   the directory, on this machine alone; "": the core directory
    """

    ask: Asks
    tag: str
    node: str
    policy: Policy
    pid: int
    into: str = ""

    def _ask(self, limit_s: int, started: int, kind: str, of: type[Seen]) -> Seen | gcore.Seen:
        """Raises DumpError when there is no answer."""
        name, policy = self.node, self.policy
        config = gcore.Config(
            nonce(),
            self.tag,
            limit_s,
            self.pid,
            policy.core_pattern if policy.core_handler == "path" else "",
            self.into,
            started,
        )
        answer = self.ask("gcore", {name: request(name, gcore.__name__, config)})[name]
        if answer.kind == INTERRUPTED:
            raise DumpError(f"{name}: {answer.error}", answer.kind)
        try:
            found = rows(answer, config, {kind: of, "seen": gcore.Seen})
        except ProbeError as problem:
            raise DumpError(f"{name}: {problem.reason}") from None
        if not found:
            raise DumpError(f"{name}: {nothing(answer, config, NOT_DONE)}", answer.kind)
        first: Seen | gcore.Seen = found[0]
        return first

    def look(self) -> gcore.Seen:
        """What would be done. Raises DumpError when it cannot be done, or nobody answers."""
        seen = self._ask(_LOOK_S, 0, "seen", gcore.Seen)
        if seen.refused:
            raise DumpError(seen.refused)
        return seen

    def take(self, seen: gcore.Seen) -> gcore.Taken:
        """Do it; slow disks take 50 MB a second. Raises DumpError as `look` does."""
        limit_s = min(_TAKE_S, 60 + seen.size_bytes // 50_000_000)
        taken = self._ask(limit_s, seen.started, "taken", gcore.Taken)
        if isinstance(taken, gcore.Seen):
            raise DumpError(taken.refused)
        return taken

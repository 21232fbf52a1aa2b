"""Take a core of a live process on one node: look what would be done, then do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from nodeready.asking import Nodes, Said, nonce, nothing, rows_of
from nodeready.capture import gcore
from nodeready.probes.base import ProbeError

Seen = TypeVar("Seen")

#: Seconds to look, which starts gdb once for its version.
_LOOK_S = 30
#: Seconds that it may take at most, whatever its size.
_TAKE_S = 3600


class DumpError(Exception):
    """No core was taken: why, one line.

    unreachable: the node could not be reached
    """

    def __init__(self, why: str, unreachable: bool = False) -> None:
        super().__init__(why)
        self.unreachable = unreachable


@dataclass(frozen=True)
class Dumping:
    """A core of a live process: first what would be done, then doing it.

    into: the directory, on this machine alone; "": the core directory
    """

    nodes: Nodes
    pid: int
    into: str = ""

    def _ask(self, limit_s: int, started: int, kind: str, of: type[Seen]) -> Seen | gcore.Seen:
        """Raises DumpError when there is no answer."""
        ((name, policy),) = self.nodes.policies().items()
        config = gcore.Config(
            nonce(),
            self.nodes.tag,
            limit_s,
            self.pid,
            policy.core_pattern if policy.core_handler == "path" else "",
            self.into,
            started,
        )
        said = self.nodes.ask("gcore", {name: (gcore.__name__, config)})
        answer = said.get(name, Said("", "interrupted"))
        try:
            rows = rows_of(answer, config, {kind: of, "seen": gcore.Seen})
        except ProbeError as problem:
            raise DumpError(f"{name}: {problem.reason}") from None
        if not rows:
            raise DumpError(f"{name}: {nothing(answer, config)}", answer.unreachable)
        found: Seen | gcore.Seen = rows[0]
        return found

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

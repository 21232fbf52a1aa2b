"""The last lines of all nodes' files, grouped: where every rank stands by its own words. Pure.

Files that were last written more than a minute before the others are a group of their own: who
stopped first is usually the culprit, and all others wait for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from nodeready import alike, log_ranks
from nodeready.capture.tail_seen import Tail as Seen
from nodeready.nodesets import natural

#: Seconds by which a file must be older than half of the others to have stopped before them.
BEHIND_S = 60

#: Kinds of groups, in the order of the report: nodes where no file matches; what could not be
#: read; files that stopped before the others; the others; what is no file for us (a directory).
KINDS = ("no-file", "unreadable", "stopped", "lines", "skipped")


@dataclass(frozen=True)
class File:
    """One file of one node.

    rank, local_rank: as its path tells, or None
    mtime_s:  when it was written last, in seconds since 1970; None for what was not read
    age_s:    how long ago that was, by the clock of the node; None for what was not read
    behind_s: how much longer ago than the median of all files
    matches:  of --grep, in the last 256 KB; None without one
    """

    node: str
    path: str
    rank: int | None
    local_rank: int | None
    size_bytes: int | None = None
    mtime_s: float | None = None
    age_s: float | None = None
    behind_s: float | None = None
    matches: int | None = None


@dataclass(frozen=True)
class Group:
    """Files with equal last lines, or that were not read for the same reason.

    kind:    no-file: nodes where no file matches; unreadable: what could not be read; stopped:
             files last written more than a minute before the others; lines: the others; skipped:
             what is no file to read, such as a directory
    nodes:   each once
    lines:   of the example, the oldest first
    example: NODE:PATH, or empty for no-file
    why:     why it was not read, or empty
    """

    kind: Annotated[str, {"enum": KINDS}]
    nodes: Annotated[tuple[str, ...], {"minItems": 1}]
    files: tuple[File, ...]
    lines: tuple[str, ...] = ()
    example: str = ""
    why: str = ""


@dataclass(frozen=True)
class Tail:
    """The document.

    started, finished: ISO 8601, UTC, with a Z
    left_out: files that match, too, on nodes that have more than --max-files
    notes:    node -> what is wrong with its whole answer
    unreachable, failed: node -> why it gave none
    complete: False when it was interrupted
    """

    started: str
    finished: str
    pattern: str
    grep: str
    groups: tuple[Group, ...]
    left_out: int
    notes: Mapping[str, str]
    unreachable: Mapping[str, str]
    failed: Mapping[str, str]
    complete: bool = True

    @property
    def files(self) -> int:
        """How many were read."""
        return sum(len(g.files) for g in self.groups if g.kind in ("stopped", "lines"))

    @property
    def whole(self) -> bool:
        """Whether every node has a file, and all could be read."""
        return not self.notes and not any(g.kind in ("no-file", "unreadable") for g in self.groups)


@dataclass
class _Shape:
    """All files whose lines are alike. Of the lines only the newest and the oldest are kept."""

    files: list[File] = field(default_factory=list)
    newest: tuple[File, tuple[str, ...]] | None = None
    oldest: tuple[File, tuple[str, ...]] | None = None

    def add(self, file: File, lines: tuple[str, ...]) -> None:
        self.files.append(file)
        if self.newest is None or _age(file) < _age(self.newest[0]):
            self.newest = file, lines
        if self.oldest is None or _age(file) > _age(self.oldest[0]):
            self.oldest = file, lines


class Grouping:
    """Takes the nodes' answers one by one."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self._unread: dict[tuple[str, str], list[File]] = {}
        self._without: dict[str, list[str]] = {}
        self._left_out = 0
        self.notes: dict[str, str] = {}

    def add(self, node: str, seen: Seen) -> None:
        """One node's answer."""
        names = alike.own_names(node, seen.host)
        if seen.error:
            self.notes[node] = seen.error
        for one in seen.files:
            ranks = log_ranks.of(one.path)
            file = File(
                *(node, one.path, *ranks, one.size_bytes, one.mtime_s, one.age_s),
                matches=one.matches,
            )
            shape = alike.shape(one.lines, names, ranks)
            self._shapes.setdefault(shape, _Shape()).add(file, one.lines)
        for other in seen.unread:
            kind = "unreadable" if other.fault else "skipped"
            file = File(node, other.path, *log_ranks.of(other.path))
            self._unread.setdefault((kind, other.why), []).append(file)
        faults = any(other.fault for other in seen.unread)
        if not (seen.files or faults or seen.error):
            why = "the files that match were written before" if seen.older else "no file matches"
            self._without.setdefault(why, []).append(node)
        self._left_out += max(0, seen.left_out)

    def done(
        self,
        *,
        started: str,
        finished: str,
        pattern: str,
        grep: str = "",
        unreachable: Mapping[str, str],
        failed: Mapping[str, str],
        complete: bool = True,
    ) -> Tail:
        """The document: within each kind, the smallest group first."""
        groups = [
            Group("no-file", tuple(sorted(nodes, key=natural)), (), why=why)
            for why, nodes in self._without.items()
        ]
        groups += [
            _group(kind, files, why=why, first=(files[0], ()))
            for (kind, why), files in self._unread.items()
        ]
        groups += self._of_lines()
        groups.sort(key=lambda group: (KINDS.index(group.kind), len(group.files or group.nodes)))
        return Tail(
            *(started, finished, pattern, grep, tuple(groups), self._left_out),
            notes=dict(self.notes),
            unreachable=dict(unreachable),
            failed=dict(failed),
            complete=complete,
        )

    def _of_lines(self) -> Iterable[Group]:
        ages = [_age(file) for shape in self._shapes.values() for file in shape.files]
        usual = statistics.median_low(ages) if ages else 0.0
        for shape in self._shapes.values():
            files = [_compared(file, usual) for file in shape.files]
            stopped = [file for file in files if (file.behind_s or 0) > BEHIND_S]
            others = [file for file in files if (file.behind_s or 0) <= BEHIND_S]
            if stopped and shape.oldest:
                yield _group("stopped", stopped, first=shape.oldest)
            if others and shape.newest:
                yield _group("lines", others, first=shape.newest)


def _age(file: File) -> float:
    return file.age_s or 0.0


def _compared(file: File, usual: float) -> File:
    known = {name: getattr(file, name) for name in file.__dataclass_fields__}
    return File(**{**known, "behind_s": round(_age(file) - usual, 3)})


def _group(
    kind: str, files: list[File], *, first: tuple[File, tuple[str, ...]], why: str = ""
) -> Group:
    files = sorted(files, key=_place)
    nodes = tuple(dict.fromkeys(sorted((file.node for file in files), key=natural)))
    example, lines = first
    return Group(kind, nodes, tuple(files), lines, f"{example.node}:{example.path}", why)


def _place(file: File) -> tuple[bool, int, object, str]:
    return file.rank is None, file.rank or 0, natural(file.node), file.path

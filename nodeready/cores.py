"""Cores: what every node's core files tell, each once, grouped. The document of the reports."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from typing import NamedTuple

from nodeready import backtraces
from nodeready.backtraces import Backtrace, Frame
from nodeready.capture.core_seen import Core, File, Listing


@dataclass(frozen=True)
class Found:
    """One file, however many nodes see it.

    reader: the node that is asked about it
    nodes:  all that see it
    host:   where it was written, when its name tells: the node's name, else the host's; else ""
    """

    file: File
    reader: str
    nodes: tuple[str, ...]
    host: str = ""


@dataclass(frozen=True)
class Crash:
    """One core with what was read from it.

    text: gdb's words; ""
    """

    found: Found
    core: Core
    text: str = ""

    @cached_property
    def backtrace(self) -> Backtrace:
        return backtraces.parse(self.text)

    @property
    def node(self) -> str:
        """Where it crashed, as far as anybody knows."""
        return self.found.host or self.found.reader

    @property
    def when(self) -> str:
        """When it was written: ISO 8601, UTC."""
        try:
            moment = datetime.fromtimestamp(self.found.file.modified_ns // 10**9, timezone.utc)
        except (OverflowError, ValueError, OSError):
            return ""
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

    @property
    def pid(self) -> int | None:
        """As the host numbered it, where the file's name has that."""
        return self.core.pid if self.found.file.pid is None else self.found.file.pid

    @property
    def signal(self) -> int | None:
        return self.found.file.signal if self.core.signal is None else self.core.signal

    @property
    def program(self) -> str:
        """The program's name, without its directory."""
        return self.core.program.rpartition("/")[2] or self.core.comm

    @property
    def truncated(self) -> bool:
        whole = self.core.whole_bytes
        return whole is not None and self.found.file.size_bytes < whole


class Group(NamedTuple):
    """Crashes of the same program by the same signal in the same place.

    crashes: the first to crash stands first
    """

    signal: int | None
    program: str
    frames: tuple[Frame, ...]
    crashes: tuple[Crash, ...]

    @property
    def signal_name(self) -> str:
        """``SIGSEGV``; see `signal_name`."""
        return signal_name(self.signal)

    @property
    def headline(self) -> Frame | None:
        return backtraces.headline(self.frames)


@dataclass(frozen=True)
class Cores:
    """What one look at the cores of all nodes showed.

    asked:    the nodes
    read:     cores with a backtrace; unread: those without, each with its reason
    errors:   node -> why it gave no answer; unreachable: which of these could not be reached
    notes:    node -> what kept it from looking somewhere
    more:     node -> how many older cores were not looked at
    complete: False when it was interrupted
    """

    started: str
    finished: str
    asked: tuple[str, ...]
    crashes: tuple[Crash, ...]
    errors: Mapping[str, str] = field(default_factory=dict)
    unreachable: frozenset[str] = frozenset()
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    more: Mapping[str, int] = field(default_factory=dict)
    complete: bool = True

    @cached_property
    def read(self) -> tuple[Crash, ...]:
        return tuple(crash for crash in self.crashes if not crash.core.unread)

    @cached_property
    def unread(self) -> tuple[Crash, ...]:
        return tuple(crash for crash in self.crashes if crash.core.unread)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        return grouped(self.read)

    @cached_property
    def file_names(self) -> tuple[str, ...]:
        """For each of the crashes the name of the file that holds its text; see `file_names`."""
        return tuple(file_names(self.crashes))


def signal_name(number: int | None) -> str:
    """``SIGSEGV``; what it was when it was no crash, or nobody says."""
    if number is None:
        return "signal?"
    if number == 0:
        return "live"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def grouped(crashes: Iterable[Crash]) -> tuple[Group, ...]:
    """Equal crashes together; the group that began first stands first: it may be the cause of the
    others, which lost their peer."""
    found: dict[tuple[object, ...], list[Crash]] = {}
    for crash in sorted(crashes, key=lambda crash: (crash.found.file.modified_ns, crash.node)):
        frames = backtraces.key(crash.backtrace.crashed)
        found.setdefault((crash.signal, crash.program, frames), []).append(crash)
    return tuple(
        Group(rows[0].signal, rows[0].program, rows[0].backtrace.crashed, tuple(rows))
        for rows in found.values()
    )


def _label(name: str) -> str:
    return name.partition(".")[0].lower()


def once(listings: Mapping[str, Listing]) -> list[Found]:
    """Every file once, the newest first, each with the node that shall read it.

    On a shared file system several nodes see the same one: path, inode, size and time are equal.
    It is read where it was written, if its name tells that, else where least is to be read.
    """
    seen: dict[tuple[str, int, int, int], list[tuple[str, File]]] = {}
    for node, listing in listings.items():
        for file in listing.files:
            known = (file.path, file.inode, file.modified_ns, file.size_bytes)
            seen.setdefault(known, []).append((node, file))
    by_label = {_label(node): node for node in listings}
    load = dict.fromkeys(listings, 0)
    found = []
    for rows in sorted(seen.values(), key=lambda rows: -rows[0][1].modified_ns):
        nodes, file = tuple(node for node, _ in rows), rows[0][1]
        home = by_label.get(_label(file.host), "") if file.host else ""
        reader = home if home in nodes else min(nodes, key=lambda node: load[node])
        load[reader] += 1
        file = next(one for node, one in rows if node == reader)
        found.append(Found(file, reader, nodes, home or file.host))
    return found


def file_names(crashes: Sequence[Crash]) -> list[str]:
    """A name for the text of each: ``NODE-PID.txt``; a second one of that name has a number."""
    names: list[str] = []
    for crash in crashes:
        node = "".join(c if c.isalnum() or c in ".-_" else "_" for c in crash.node).lstrip(".-")
        stem = f"{node[:200] or '_'}-{'unknown' if crash.pid is None else crash.pid}"
        name, number = stem, 1
        while f"{name}.txt" in names:
            number += 1
            name = f"{stem}-{number}"
        names.append(f"{name}.txt")
    return names

"""Look at the cores of all nodes, or take one of a live process: the way to the nodes and back.

Two rounds: what files there are, which only looks at names; then each core once, on the node that
wrote it, however many nodes see it.
"""

from __future__ import annotations

import base64
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from nodeready import carried, shell
from nodeready.audit import now
from nodeready.capture import core_program, gcore
from nodeready.capture.core_seen import Core, Done, Listing
from nodeready.cores import Cores, Crash, Found, once
from nodeready.local.child import Child, gather
from nodeready.policy import Policy
from nodeready.probes.base import ProbeError
from nodeready.proofs import wire
from nodeready.session import NodeRun, Session
from nodeready.transports.answer import SUDO

Seen = TypeVar("Seen")

#: Cores that are read on one node.
MOST = 20
#: Cores among which those of one job are looked for, on one node.
_AMONG = 60
#: Seconds to list them; a directory on a mount that hangs takes all of it.
_LIST_S = 30
#: Seconds to read one, beside the first, and all of a node's.
_READ_S, _FIRST_S, _ALL_S = 60, 20, 1200
#: Bytes of a backtrace that are unpacked: the node caps its text at 1 MiB of characters.
_TEXT_BYTES = 8 << 20


@dataclass(frozen=True)
class Said:
    """What one node's program printed, and why it printed no more; "": it came to its end."""

    text: str
    error: str = ""
    unreachable: bool = False


Progress = Callable[[str, Iterable[str]], AbstractContextManager[Callable[[str], None]]]


class Nodes(Protocol):
    """Where the programs run: other machines, or this one."""

    interrupted: bool

    @property
    def tag(self) -> str:
        """What marks this run's processes."""

    def policies(self) -> Mapping[str, Policy]:
        """Of every node, by name."""

    def ask(self, what: str, asked: Mapping[str, tuple[str, Any]]) -> Mapping[str, Said]:
        """Run a program on each of these nodes: name -> (module, its Config).

        what: for the progress. After an interrupt, what came until then.
        """


@dataclass
class Fleet:
    """The nodes of a session.

    password: asks for sudo's password, for these nodes, when somebody is there to answer
    """

    session: Session
    progress: Progress
    password: Callable[[list[str]], bool]
    interrupted: bool = False

    @property
    def tag(self) -> str:
        return self.session.tag

    def policies(self) -> Mapping[str, Policy]:
        return {node.name: node.policy for node in self.session.nodes}

    def ask(self, what: str, asked: Mapping[str, tuple[str, Any]]) -> Mapping[str, Said]:
        said: dict[str, Said] = {}

        def one(node: NodeRun) -> None:
            main, config = asked[node.name]
            if not self.session.connect(node):
                said[node.name] = Said("", node.error, node.unreachable)
                return
            limit_s = config.limit_s + 2
            line = shell.command(carried.script(main, config), limit_s, config.tag)
            answer = self.session.carry(node, line, limit_s)
            if answer.error:
                node.fail(answer)
            said[node.name] = Said(answer.stdout, answer.error, node.unreachable)

        chosen = [node for node in self.session.nodes if node.name in asked]
        self._each(one, chosen, what)
        wanting = [node for node in chosen if node.kind == SUDO]
        if wanting and not self.interrupted and self.password([node.name for node in wanting]):
            self._each(one, wanting, what)
        for node in chosen:
            if node.error and node.name not in said:
                said[node.name] = Said("", node.error, node.unreachable)
        return said

    def _each(self, work: Callable[[NodeRun], None], chosen: list[NodeRun], what: str) -> None:
        with self.progress(what, [node.name for node in chosen]) as done:
            try:
                self.session.each(work, chosen, done)
            except KeyboardInterrupt:
                self.interrupted = self.session.interrupted = True
                self.session.end_remote()


@dataclass
class Here:
    """This machine, without any connection."""

    policy: Policy
    interrupted: bool = False
    run: str = field(default_factory=lambda: secrets.token_hex(6))

    @property
    def tag(self) -> str:
        return f"nodeready:{self.run}"

    def policies(self) -> Mapping[str, Policy]:
        return {os.uname().nodename: self.policy}

    def ask(self, what: str, asked: Mapping[str, tuple[str, Any]]) -> Mapping[str, Said]:
        said = {}
        for name, (main, config) in asked.items():
            limit_s = config.limit_s + 2
            child = Child(shell.command(carried.script(main, config), limit_s, config.tag))
            try:
                gather([child], time.monotonic() + limit_s + 2 * shell.KILL_AFTER_S)
            except KeyboardInterrupt:
                self.interrupted = True
            finally:
                child.end()
            over = self.interrupted or child.whole
            said[name] = Said(child.text, "" if over else f"ended after {limit_s} s")
        return said


def _nonce() -> str:
    return f"nodeready-{secrets.token_hex(8)}"


def _rows(said: Said, config: Any, kinds: Mapping[str, type[Any]]) -> list[Any]:
    """What a node printed, as these dataclasses. Raises ProbeError when it makes no sense."""
    return [
        wire.decode(kinds[name], data)
        for name, data in wire.lines(said.text, config.nonce)
        if name in kinds
    ]


def _nothing(said: Said, config: Any) -> str:
    """Why a node's program printed nothing that we know."""
    if f"{config.nonce} {carried.NO_PYTHON}" in said.text:
        return f"{carried.NO_PYTHON}: cores cannot be looked at"
    return said.error or "no answer from the node's Python"


def look(nodes: Nodes, since_s: float = 0, job: str = "") -> Cores:
    """List the cores of these nodes, and read each once.

    since_s: only those of the last so many seconds; 0: all
    job:     only those of this job; "": all
    """
    started, policies = now(), nodes.policies()
    errors: dict[str, str] = {}
    asked = {name: _list_config(nodes, policy, since_s) for name, policy in policies.items()}
    said = nodes.ask("looking", {n: (core_program.__name__, c) for n, c in asked.items()})
    listings = {}
    for name, answer in said.items():
        try:
            rows = _rows(answer, asked[name], {"listing": Listing})
            listings[name] = rows[0] if rows else None
        except ProbeError as problem:
            errors[name] = problem.reason
            continue
        if listings[name] is None:
            errors[name] = _nothing(answer, asked[name])
    known = {name: listing for name, listing in listings.items() if listing is not None}
    more = {name: listing.more for name, listing in known.items()}
    reading: dict[str, list[Found]] = {}
    for found in once(known):
        reading.setdefault(found.reader, []).append(found)
    crashes: list[Crash] = []
    notes = {name: list(listing.notes) for name, listing in known.items()}
    if reading and not nodes.interrupted:
        crashes = _read(nodes, reading, job, more, notes)
    return Cores(
        started=started,
        finished=now(),
        asked=tuple(policies),
        crashes=tuple(crashes),
        errors=errors,
        unreachable=frozenset(n for n, a in said.items() if a.unreachable and n in errors),
        notes={name: tuple(rows) for name, rows in notes.items() if rows},
        more={name: number for name, number in more.items() if number},
        complete=not nodes.interrupted,
    )


def _list_config(nodes: Nodes, policy: Policy, since_s: float) -> core_program.Config:
    patterns = (policy.core_pattern,) if policy.core_handler == "path" else ()
    return core_program.Config(_nonce(), nodes.tag, _LIST_S, patterns, since_s)


def _read(
    nodes: Nodes,
    reading: Mapping[str, list[Found]],
    job: str,
    more: dict[str, int],
    notes: dict[str, list[str]],
) -> list[Crash]:
    """Every core with its backtrace; counts in ``more`` what is not read."""
    chosen = {name: rows[: _AMONG if job else MOST] for name, rows in reading.items()}
    asked = {}
    for name, rows in chosen.items():
        more[name] += len(reading[name]) - len(rows)
        limit_s = min(_ALL_S, _FIRST_S + _READ_S * min(len(rows), MOST))
        asked[name] = core_program.Config(
            _nonce(),
            nodes.tag,
            limit_s,
            wanted=tuple(
                (f.file.path, f.file.inode, f.file.modified_ns, f.file.size_bytes) for f in rows
            ),
            job=job,
            most=MOST,
        )
    said = nodes.ask("reading", {n: (core_program.__name__, c) for n, c in asked.items()})
    crashes = []
    for name, rows in chosen.items():
        answer = said.get(name, Said("", "interrupted"))
        try:
            seen = _rows(answer, asked[name], {"core": Core, "done": Done})
        except ProbeError as problem:
            seen, answer = [], Said("", problem.reason)
        told = {core.number: core for core in seen if isinstance(core, Core)}
        for end in (row for row in seen if isinstance(row, Done)):
            more[name] += end.left
            if end.unknown:
                notes.setdefault(name, []).append(f"{end.unknown} cores do not tell their job")
            break
        else:
            why = f"no answer: {_nothing(answer, asked[name])}"
            missing = (number for number in range(len(rows)) if number not in told)
            told |= {number: Core(number, unread=why) for number in missing}
        for number, core in told.items():
            if 0 <= number < len(rows):
                crashes.append(Crash(rows[number], core, _unpacked(core.text)))
    return crashes


def _unpacked(text: str) -> str:
    """gdb's words; "" for what makes no sense."""
    try:
        opened = zlib.decompressobj().decompress(base64.b64decode(text), _TEXT_BYTES)
    except (ValueError, zlib.error):
        return ""
    return opened.decode("utf-8", "replace")


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
            _nonce(),
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
            rows = _rows(answer, config, {kind: of, "seen": gcore.Seen})
        except ProbeError as problem:
            raise DumpError(f"{name}: {problem.reason}") from None
        if not rows:
            raise DumpError(f"{name}: {_nothing(answer, config)}", answer.unreachable)
        found: Seen | gcore.Seen = rows[0]
        return found

    def look(self) -> gcore.Seen:
        """What would be done. Raises DumpError when it cannot be done, or nobody answers."""
        seen = self._ask(_LIST_S, 0, "seen", gcore.Seen)
        if seen.refused:
            raise DumpError(seen.refused)
        return seen

    def take(self, seen: gcore.Seen) -> gcore.Taken:
        """Do it; slow disks take 50 MB a second. Raises DumpError as `look` does."""
        limit_s = min(3600, 60 + seen.size_bytes // 50_000_000)
        taken = self._ask(limit_s, seen.started, "taken", gcore.Taken)
        if isinstance(taken, gcore.Seen):
            raise DumpError(taken.refused)
        return taken


class DumpError(Exception):
    """No core was taken: why, one line.

    unreachable: the node could not be reached
    """

    def __init__(self, why: str, unreachable: bool = False) -> None:
        super().__init__(why)
        self.unreachable = unreachable

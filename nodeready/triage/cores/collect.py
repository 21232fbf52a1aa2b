"""Collect the cores of all nodes, or take one of a live process.

Two rounds: the nodes list their core files, by names alone; then each core is read once, on the
node that wrote it, however many nodes see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from nodeready.node.cores import gcore, program
from nodeready.node.cores.listing import Listing, by_turns
from nodeready.node.cores.program import Core, Done
from nodeready.policy import Policy
from nodeready.subjects import wire
from nodeready.subjects.base import ProbeError
from nodeready.text import now
from nodeready.transport.base import INTERRUPTED, UNREACHED, Answer, Asks, Failure
from nodeready.transport.program import new_nonce, no_answer_reason, request, rows
from nodeready.triage.cores.document import CoreFile, Cores, Crash, deduplicated

#: What is missing where there is no Python.
NOT_DONE = "cores cannot be looked at"
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


def collect_cores(
    ask: Asks, tag: str, policies: Mapping[str, Policy], since_s: float = 0, job: str = ""
) -> Cores:
    """List the cores of these nodes, and read each once.

    tag:     of the run
    since_s: only those of the last so many seconds; 0: all
    job:     only those of this job; "": all
    """
    started = now()
    errors: dict[str, str] = {}
    asked = {name: _list_config(tag, policy, since_s) for name, policy in policies.items()}
    said = _asked(ask, "looking", asked)
    complete = not any(answer.kind == INTERRUPTED for answer in said.values())
    listings = {}
    for name, answer in said.items():
        if answer.kind == INTERRUPTED:
            continue
        try:
            seen = rows(answer, asked[name], {"listing": Listing})
            listings[name] = seen[0] if seen else None
        except ProbeError as problem:
            errors[name] = problem.reason
            continue
        if listings[name] is None:
            errors[name] = no_answer_reason(answer, asked[name], NOT_DONE)
    known = {name: listing for name, listing in listings.items() if listing is not None}
    more = {name: listing.more for name, listing in known.items()}
    reading: dict[str, list[CoreFile]] = {}
    for found in deduplicated(known):
        reading.setdefault(found.reader, []).append(found)
    crashes: list[Crash] = []
    gone = {name for name, answer in said.items() if answer.kind in UNREACHED and name in errors}
    notes = {name: list(listing.notes) for name, listing in known.items()}
    if reading and complete:
        crashes, lost, complete = _read(ask, tag, reading, job, more=more, notes=notes)
        errors |= lost
        gone |= lost.keys()
    return Cores(
        started=started,
        finished=now(),
        asked=tuple(policies),
        crashes=tuple(crashes),
        errors=errors,
        unreachable=frozenset(gone),
        notes={name: tuple(told) for name, told in notes.items() if told},
        more={name: number for name, number in more.items() if number},
        complete=complete,
    )


def _asked(ask: Asks, what: str, configs: Mapping[str, program.Config]) -> Mapping[str, Answer]:
    return ask(what, {n: request(n, program.__name__, c) for n, c in configs.items()})


def _list_config(tag: str, policy: Policy, since_s: float) -> program.Config:
    patterns = (policy.core_pattern,) if policy.core_handler == "path" else ()
    return program.Config(new_nonce(), tag, _LIST_S, patterns, since_s)


def _read(
    ask: Asks,
    tag: str,
    reading: Mapping[str, list[CoreFile]],
    job: str,
    *,
    more: dict[str, int],
    notes: dict[str, list[str]],
) -> tuple[list[Crash], dict[str, str], bool]:
    """Every core with its backtrace; the nodes that were lost meanwhile, each with the reason; and
    whether it came to its end.

    Counts in ``more`` what is not read.
    """
    most = _AMONG if job else MOST
    chosen = {name: by_turns(files)[:most] for name, files in reading.items()}
    asked = {}
    for name, files in chosen.items():
        more[name] += len(reading[name]) - len(files)
        limit_s = min(_ALL_S, _FIRST_S + _READ_S * min(len(files), MOST))
        asked[name] = program.Config(
            new_nonce(),
            tag,
            limit_s,
            wanted=tuple(
                (f.file.path, f.file.inode, f.file.modified_ns, f.file.size_bytes) for f in files
            ),
            job=job,
            most=MOST,
        )
    said = _asked(ask, "reading", asked)
    crashes = []
    for name, files in chosen.items():
        answer, refused = said[name], list[str]()
        try:
            seen = rows(answer, asked[name], {"core": Core, "done": Done}, refused)
        except ProbeError as problem:
            seen, answer = [], Failure(error=problem.reason)
        told = {core.number: core for core in seen if isinstance(core, Core)}
        for end in (row for row in seen if isinstance(row, Done)):
            more[name] += end.left
            if end.unknown:
                notes.setdefault(name, []).append(f"{end.unknown} cores do not tell their job")
            break
        else:
            refused.append(f"no answer: {no_answer_reason(answer, asked[name], NOT_DONE)}")
        if refused:
            missing = (number for number in range(len(files)) if number not in told)
            told |= {number: Core(number, unread=refused[0]) for number in missing}
        for number, core in told.items():
            if 0 <= number < len(files):
                crashes.append(Crash(files[number], core, _unpacked(core.text)))
    lost = {name: answer.error for name, answer in said.items() if answer.kind in UNREACHED}
    return crashes, lost, not any(answer.kind == INTERRUPTED for answer in said.values())


def _unpacked(text: str) -> str:
    """gdb's words; "" for what makes no sense."""
    try:
        return wire.unpack(text, _TEXT_BYTES).decode("utf-8", "replace")
    except wire.DecodeError:
        return ""


# --- A core of a live process on one node: first what would be done, then doing it.

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

    def _ask(self, limit_s: int, started: int, kind: str, of: type[Seen]) -> Seen | gcore.Preview:
        """Raises DumpError when there is no answer."""
        name, policy = self.node, self.policy
        config = gcore.Config(
            new_nonce(),
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
            found = rows(answer, config, {kind: of, "seen": gcore.Preview})
        except ProbeError as problem:
            raise DumpError(f"{name}: {problem.reason}") from None
        if not found:
            raise DumpError(f"{name}: {no_answer_reason(answer, config, NOT_DONE)}", answer.kind)
        first: Seen | gcore.Preview = found[0]
        return first

    def look(self) -> gcore.Preview:
        """What would be done. Raises DumpError when it cannot be done, or nobody answers."""
        seen = self._ask(_LOOK_S, 0, "seen", gcore.Preview)
        if seen.refused:
            raise DumpError(seen.refused)
        return seen

    def take(self, seen: gcore.Preview) -> gcore.Taken:
        """Do it; slow disks take 50 MB a second. Raises DumpError as `look` does."""
        limit_s = min(_TAKE_S, 60 + seen.size_bytes // 50_000_000)
        taken = self._ask(limit_s, seen.started, "taken", gcore.Taken)
        if isinstance(taken, gcore.Preview):
            raise DumpError(taken.refused)
        return taken

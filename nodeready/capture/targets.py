"""One rank that is looked at: what was seen of it, and whether it may be looked into now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nodeready.capture.processes import Facts
from nodeready.capture.py_spy import HUNG, Dump
from nodeready.capture.ranks import Rank
from nodeready.capture.table import Table

ENDED = "ended while it was looked at"
NO_TIME = "no time left"
_MOST_COMMAND = 200


@dataclass
class Target:
    """A rank, its facts at each sample, and its dumps."""

    rank: Rank
    facts: list[Facts] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    dumps: list[Dump] = field(default_factory=list)
    native: Dump | None = None
    notes: list[str] = field(default_factory=list)
    user: str = ""

    def __post_init__(self) -> None:
        self.say(self.rank.note)

    @property
    def pid(self) -> int:
        """Its number."""
        return self.rank.process.pid

    def say(self, note: str) -> None:
        """Add what is to be known about it, once."""
        if note and note not in self.notes:
            # Whoever reads it looks for that at the beginning.
            self.notes.insert(0 if note == ENDED else len(self.notes), note)

    def stands(self, seen: Facts | None) -> None:
        """Take the facts of this moment. None: there is no such process."""
        if seen is None or seen.start_s != self.rank.process.start_s:
            self.say(ENDED)
            return
        self.facts.append(seen)
        if seen.state in "ZXx":
            self.say(ENDED)

    def refuses(self, euid: int, native: bool = False) -> str:
        """Why it is not to be looked into; "": nothing is in the way."""
        if ENDED in self.notes:
            return ENDED
        if not self.facts:
            return NO_TIME
        now = self.facts[-1]
        if now.tracer:
            return f"traced by process {now.tracer}: not looked into"
        if now.state in "Tt":
            return "stopped by a signal: not looked into"
        if native and now.state == "D":
            return "in state D: a native look would wait with it"
        if euid not in (0, now.uid):
            return "another user's: not permitted"
        if any(dump.error == HUNG for dump in self.dumps):
            return "not tried again: py-spy did not finish"
        return ""

    @property
    def settled(self) -> Facts | None:
        """The latest facts in which it did not wait for a disk or worse, or just the latest: every
        process is in state D for a moment now and then."""
        awake = [facts for facts in self.facts if facts.state != "D"]
        known = awake or self.facts
        return known[-1] if known else None

    def plain(self, table: Table, main: bool, threads: bool) -> dict[str, Any]:
        """Its part of the trace. main, threads: with these stacks."""
        who, process, now = self.rank.identity, self.rank.process, self.settled
        return {
            "pid": process.pid,
            "rank": who.rank,
            "local_rank": who.local_rank,
            "world_size": who.world_size,
            "job": who.job,
            "master": who.master,
            "user": self.user,
            "command": process.command[:_MOST_COMMAND] or process.name,
            "state": now.state if now else "",
            "wait_channel": now.wait_channel if now else "",
            "kernel_stack": now.kernel_stack if now else (),
            "tracer": now.tracer if now else 0,
            "threads": now.threads if now else 0,
            "start_s": process.start_s,
            "cpu_s": self.cpu_s,
            "samples": [_sample(dump, table, main, threads) for dump in self.dumps],
            "native": table.add(self.native.main) if self.native and self.native.main else None,
            "note": "; ".join(self.notes),
        }


def _sample(dump: Dump, table: Table, main: bool, threads: bool) -> dict[str, Any]:
    shown = dump.main if main else None
    return {
        "main": None if shown is None else table.add(shown),
        "threads": [(t.name, table.add(t.frames)) for t in dump.threads] if threads else [],
        "gil": dump.gil,
        "error": dump.error or ("" if main else "its stack is too large"),
    }

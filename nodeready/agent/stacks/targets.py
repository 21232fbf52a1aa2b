"""One process that is probed: its facts and dumps, and whether py-spy may read it now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nodeready.agent.stacks.processes import Facts
from nodeready.agent.stacks.py_spy import HUNG, Dump, Frame
from nodeready.agent.stacks.ranks import JobRank


class StackTable:
    """Numbers of frames and stacks; equal ones share a number."""

    def __init__(self) -> None:
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        #: Number of frames in all stacks.
        self.size = 0

    def add(self, frames: Sequence[Frame]) -> int:
        """The number of a stack, root to leaf."""
        key = tuple(self._frames.setdefault(frame, len(self._frames)) for frame in frames)
        if key not in self._stacks:
            self.size += len(key)
        return self._stacks.setdefault(key, len(self._stacks))

    @property
    def frames(self) -> list[Frame]:
        """All frames, in the order of their numbers."""
        return list(self._frames)

    @property
    def stacks(self) -> list[tuple[int, ...]]:
        """All stacks, in the order of their numbers."""
        return list(self._stacks)


#: The beginning of `StackTarget.waits_on` for a thread that waits for the interpreter's lock.
INTERPRETER_LOCK = "the interpreter's lock"
# Minimum wake-ups a second of a thread that asks for the lock: 200 by default, fewer under load.
_WAKEUPS_PER_S = 40
ENDED = "ended while it was looked at"
EXITING = "is exiting: the kernel takes its memory and its files down"
NO_TIME = "no time left"
OTHERS_TOOK = "no time left: its owner's other processes took it"
_MAX_COMMAND = 200


@dataclass
class StackTarget:
    """A process, its facts and its dumps, at each sample."""

    rank: JobRank
    facts: list[Facts] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    dumps: list[Dump] = field(default_factory=list)
    native: Dump | None = None
    notes: list[str] = field(default_factory=list)
    user: str = ""
    switches: list[int] = field(default_factory=list)  # of its main thread
    main_cpu_s: list[float] = field(default_factory=list)  # likewise
    # read and write calls of all its threads; None: not readable
    calls: list[int | None] = field(default_factory=list)
    waits_on: str = ""  # what its main thread waits for; "": not known
    timed_lock: bool = False  # `waits_on` is a lock, for a limited time
    descendants: list[StackTarget] = field(default_factory=list)
    # (thread, rank that it waits for), from `links.observe`
    waits_for: list[tuple[str, str]] = field(default_factory=list)
    # connections and listeners that other nodes' ranks may wait for, from `links.observe`
    ends: list[str] = field(default_factory=list)
    witnesses: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.add_note(self.rank.note)

    @property
    def pid(self) -> int:
        return self.rank.process.pid

    @property
    def thread(self) -> int:
        """The thread that is probed; 0: the main thread."""
        return next((dump.thread for dump in reversed(self.dumps) if dump.thread), 0)

    @property
    def owner(self) -> str:
        """The owner whose turn it takes."""
        return self.rank.turn

    def add_note(self, note: str) -> None:
        """Add a note about the rank, once."""
        if note and note not in self.notes:
            # Readers expect this note at the beginning.
            self.notes.insert(0 if note == ENDED else len(self.notes), note)

    def add_facts(self, facts: Facts | None) -> None:
        """Add the current facts; None: the process has ended."""
        if facts is None or facts.start_s != self.rank.process.start_s:
            self.add_note(ENDED)
            return
        self.facts.append(facts)
        if facts.state in "ZXx":
            self.add_note(ENDED)
        elif facts.exiting:
            self.add_note(EXITING)

    def note_interpreter_lock(self, seconds: float) -> None:
        """Set `waits_on` to the interpreter's lock and its holder if the main thread waits for it.

        A thread that waits for the lock wakes up every 5 ms (`sys.setswitchinterval`, take_gil of
        ceval_gil.c): it seems as busy as a thread that moves, but uses hardly any CPU time.
        seconds: between the first and the last sample
        """
        holders = {dump.gil for dump in self.dumps}
        if len(self.dumps) < 2 or len(holders) != 1 or not self.timed_lock or seconds <= 0:
            return
        holder = holders.pop()
        wakeups = self.switches[-1] - self.switches[0]
        if holder and not self.dumps[-1].holds_gil and wakeups > _WAKEUPS_PER_S * seconds:
            self.waits_on = f"{INTERPRETER_LOCK}, which thread {holder} holds"

    def refusal(self, euid: int, native: bool = False) -> str:
        """Why py-spy must not read the process now; "": it may."""
        if ENDED in self.notes:
            return ENDED
        if self.rank.stranger:
            return self.rank.note
        if not self.facts:
            return NO_TIME
        facts = self.facts[-1]
        if facts.exiting:
            return EXITING
        if facts.tracer:
            return f"traced by process {facts.tracer}: not looked into"
        if facts.state in "Tt":
            return "stopped by a signal: not looked into"
        if native and facts.state == "D":
            return "in state D: a native look would wait with it"
        if euid not in (0, facts.uid):
            return "another user's: only that user and root may look into it"
        if any(dump.error == HUNG for dump in self.dumps):
            return "not tried again: py-spy did not finish"
        return ""

    @property
    def lasting_facts(self) -> Facts | None:
        """The latest facts of a lasting state; None: no facts were read.

        Every process is in state D for moments. A rank that polls every few ms, such as the rank
        that serves the TCPStore, is often in state R.
        """
        if not self.facts:
            return None
        latest = self.facts[-1]
        for state in {"R": "S", "D": "SR"}.get(latest.state, ""):
            for facts in reversed(self.facts):
                if facts.state == state:
                    return facts
        return latest

    def plain(self, table: StackTable, main: bool, threads: bool) -> dict[str, Any]:
        """The rank's row in the trace. main, threads: include these stacks."""
        identity, process, facts = self.rank.identity, self.rank.process, self.lasting_facts
        return {
            "pid": process.pid,
            "rank": identity.rank,
            "local_rank": identity.local_rank,
            "world_size": identity.world_size,
            "job": identity.job,
            "master": identity.master,
            "user": self.user,
            "command": process.command[:_MAX_COMMAND] or process.name,
            "state": facts.state if facts else "",
            "wait_channel": facts.wait_channel if facts else "",
            "kernel_stack": facts.kernel_stack if facts else (),
            "tracer": facts.tracer if facts else 0,
            "threads": facts.threads if facts else 0,
            "start_s": process.start_s,
            "cpu_s": self.cpu_s,
            "samples": [_sample(dump, table, main, threads) for dump in self.dumps],
            "native": table.add(self.native.main) if self.native and self.native.main else None,
            "note": "; ".join(self.notes),
            "slurm_job": process.cgroup_job,
            "switches": self.switches,
            "main_cpu_s": self.main_cpu_s,
            "calls": [] if None in self.calls else self.calls,
            "waits_on": self.waits_on,
            "waits_for": self.waits_for,
            "ends": self.ends,
        }


def _sample(dump: Dump, table: StackTable, main: bool, threads: bool) -> dict[str, Any]:
    shown = dump.main if main else None
    return {
        "main": None if shown is None else table.add(shown),
        "threads": [(t.name, table.add(t.frames)) for t in dump.threads] if threads else [],
        "gil": dump.gil,
        "error": dump.error or ("" if main else "its stack is too large"),
    }

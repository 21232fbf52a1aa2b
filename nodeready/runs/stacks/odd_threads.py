"""The rank with a thread that waits as on no other rank: a possible cause, never a proof.

Ranks of one job have threads of the same names that wait alike. Pools differ in size, and a thread
that runs or moves may be anywhere: neither is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from nodeready.agent.stacks.threads import ThreadWait
from nodeready.runs.stacks.document import OddThread, Stacks

#: Name of the thread, state, system call, wait channel; a state of "" means that it moves.
Wait = tuple[str, str, str, str]
#: (rank, node, pid) of a process.
Owner = tuple["int | None", str, int]

#: Minimum other ranks for a comparison. A rank with more different names than that is of another
#: kind, and if more ranks are odd, the waits vary.
_MIN_PEERS, _MAX_NAMES, _MAX_OWNERS = 3, 3, 3
#: Maximum different sets of waits, and different waits, in a job: above it the waits vary.
_MAX_SETS = 4096
#: System calls in which a thread of a pool rests until it gets work.
_RESTING = frozenset(
    ("futex", "poll", "epoll", "select", "accept", "sleep", "pause", "signal", "read", "recv",
     "semop", "msgrcv", "io_getevents", "io_uring_enter", "")
)  # fmt: skip
_MAX_CALLS = 5  # of a stack in a sentence
#: Kinds of verdicts that name no rank for certain.
_OPEN_VERDICTS = ("unclear", "quiet", "disagree")


@dataclass
class ThreadTable:
    """The waits of the threads of all ranks of a job."""

    # equal sets of waits once, with the ranks that have them
    owners: dict[frozenset[Wait], list[Owner]] = field(default_factory=dict)
    sizes: dict[str, set[int]] = field(default_factory=dict)  # name -> threads on a rank
    first: dict[Wait, ThreadWait] = field(default_factory=dict)
    # the waits of the trace that is read, and the sets of its ranks
    thread_waits: Sequence[ThreadWait] = ()
    sets: dict[tuple[tuple[int, int], ...], frozenset[Wait]] = field(default_factory=dict)

    def read(
        self, owner: Owner, rows: tuple[tuple[int, int], ...], thread_waits: Sequence[ThreadWait]
    ) -> None:
        """Count a rank's threads. rows, thread_waits: see `trace.TracedProcess`"""
        if not rows or max(len(self.owners), len(self.first)) > _MAX_SETS:
            return
        if thread_waits is not self.thread_waits:
            self.thread_waits, self.sets = thread_waits, {}
        if rows not in self.sets:
            self.sets[rows] = self._set(rows)
        self.owners.setdefault(self.sets[rows], []).append(owner)

    def _set(self, rows: Iterable[tuple[int, int]]) -> frozenset[Wait]:
        """The waits of a rank, which are counted."""
        size_by_name: Counter[str] = Counter()
        waits = []
        for at, count in rows:
            row = self.thread_waits[at]
            wait = row.name, row.state, row.call, row.wait_channel
            waits.append(wait)
            self.first.setdefault(wait, row)
            size_by_name[row.name] += count
        for name, size in size_by_name.items():
            self.sizes.setdefault(name, set()).add(size)
        return frozenset(waits)

    def join(self, other: ThreadTable) -> None:
        for waits, owners in other.owners.items():
            self.owners.setdefault(waits, []).extend(owners)
        for name, sizes in other.sizes.items():
            self.sizes.setdefault(name, set()).update(sizes)
        self.first = {**other.first, **self.first}

    def odd_threads(self) -> tuple[OddThread, ...]:
        """The threads that wait differently on one rank; (): none, or the waits vary."""
        total = sum(map(len, self.owners.values()))
        if total <= _MIN_PEERS or max(len(self.owners), len(self.first)) > _MAX_SETS:
            return ()
        counts: Counter[Wait] = Counter()
        names: Counter[str] = Counter()
        for waits, owners in self.owners.items():
            counts.update(dict.fromkeys(waits, len(owners)))
            names.update(dict.fromkeys({wait[0] for wait in waits}, len(owners)))
        comparable = {
            name for name in names
            if names[name] == total and len(self.sizes[name]) == 1
            and not counts[name, "", "", ""]
        }  # fmt: skip
        differences = {
            owners[0]: _differences(waits, counts, total, comparable)
            for waits, owners in self.owners.items()
            if len(owners) == 1
        }
        odd = {owner: rows for owner, rows in differences.items() if 0 < len(rows) <= _MAX_NAMES}
        if len(odd) > _MAX_OWNERS:
            return ()
        return tuple(
            self._odd_thread(owner, name, odd_wait, usual_wait)
            for owner, rows in odd.items()
            for name, (odd_wait, usual_wait) in rows.items()
        )

    def _odd_thread(
        self, owner: Owner, name: str, odd_wait: Wait | None, usual_wait: Wait | None
    ) -> OddThread:
        row = self.first[odd_wait] if odd_wait else ThreadWait(name)
        texts = (_text(odd_wait) if odd_wait else "", _text(usual_wait) if usual_wait else "")
        return OddThread(*owner, name, row.number, *texts, row.kernel_stack, row.native)


def _differences(
    waits: frozenset[Wait], counts: Counter[Wait], total: int, comparable: set[str]
) -> dict[str, tuple[Wait | None, Wait | None]]:
    """Name -> the wait that only this rank has, and that it alone lacks; None: none. comparable:
    names with equally many threads, all at rest, in each rank
    """
    names = {wait[0] for wait in waits}
    moving = {wait[0] for wait in waits if not wait[1]}
    odd_waits = {
        wait[0]: wait
        for wait in sorted(waits)
        if wait[1] and counts[wait] == 1 and (wait[0] in comparable or not _rests(wait))
    }
    usual_waits = {
        wait[0]: wait
        for wait, count in sorted(counts.items())
        if wait[1] and count == total - 1 and wait not in waits and wait[0] not in moving
        if wait[0] in comparable or wait[0] not in names or not _rests(wait)
    }
    rows = sorted({*odd_waits, *usual_waits})
    return {name: (odd_waits.get(name), usual_waits.get(name)) for name in rows}


def _rests(wait: Wait) -> bool:
    """Whether a thread without work waits like that."""
    return wait[1] != "D" and wait[2] in _RESTING


def _text(wait: Wait) -> str:
    """A wait in words, as in ``ioctl (nv_wait, state D)``."""
    _, state, call, channel = wait
    details = [channel] * bool(channel and call) + [f"state {state}"] * (state != "S")
    text = call or channel or "the kernel"
    return f"{text} ({', '.join(details)})" if details else text


def sentences(stacks: Stacks) -> Iterator[str]:
    """The odd threads in words, where the verdict names no rank for certain."""
    if stacks.verdict and stacks.verdict.kind in _OPEN_VERDICTS:
        yield from map(_sentence, stacks.odd_threads)


def _sentence(odd: OddThread) -> str:
    place = f"rank {odd.rank} ({odd.node})" if odd.rank is not None else f"pid {odd.pid}"
    text = f"possible: {place}: a thread {odd.name} waits in {odd.wait}, as on no other rank"
    if odd.wait and odd.peers:
        text = f"possible: {place}: a thread {odd.name} waits in {odd.wait}, "
        text += f"on each other rank in {odd.peers}"
    elif odd.peers:
        text = f"possible: {place}: no thread {odd.name} waits in {odd.peers}, "
        text += "as on each other rank"
    text += _calls("kernel", odd.kernel_stack) + _calls("native", odd.native)
    if odd.native:
        return text
    command = f"`nodeready stacks INVENTORY --pid {odd.pid} --native` shows its calls"
    if odd.thread:
        command = f"`gdb -p {odd.thread} -batch -ex bt` there pauses this thread alone"
    return f"{text}; {command}"


def _calls(kind: str, functions: Iterable[str]) -> str:
    names = [*functions][:_MAX_CALLS]
    return f"; {kind}: {' < '.join(names)}" if len(names) > 1 else ""

"""The state of one process, from its samples: the number of its stack, and whether it moved.

Equal stacks of any nodes have one number, so that those of a hundred thousand ranks are compared
and classified once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from nodeready.agent.stacks.links import DESCENDANTS, STORE, WHOLE_PROCESS
from nodeready.agent.stacks.processes import FROZEN
from nodeready.agent.stacks.waits import OWN_LOCK
from nodeready.agent.witnesses.progress import LOG_COUNTS, LOOP_CHANGES
from nodeready.runs.stacks import hints
from nodeready.runs.stacks.document import Frame
from nodeready.runs.stacks.trace import StackSample, Trace, TracedProcess

# --- The ranks that a rank waits for, over all nodes: the opposite ends of its waits.

#: Maximum connections that are kept, over all nodes.
_MAX_ENDS = 1 << 20
#: Activities of hints where the main thread waits for a descendant; and where a library's threads
#: have the connections, or the main thread polls.
_CHILD_ACTIVITIES = frozenset({"data", "child"})
_PROCESS_ACTIVITIES = frozenset({"network", "sleep"})

#: Prefix of an end that several processes share.
_UNCERTAIN = "may "

#: Node and pid of a process.
Place = tuple[str, int]


class LinkEnds(NamedTuple):
    """The peers that a process waits for: `pid 55` of its node, or a connection's addresses."""

    direct: tuple[str, ...]  # of the classified thread
    child_ends: tuple[str, ...]  # of the descendants
    all_ends: tuple[str, ...]  # of any connection
    side_ends: tuple[tuple[str, str], ...] = ()  # of further threads, with their names


def ends(process: TracedProcess, thread: str) -> LinkEnds | None:
    """The waits of one process; None: not known. thread: the classified thread"""
    rows = process.waits_for
    # Another rank may wait for a connection to another node, too.
    far = [" ".join(reversed(end.split(" "))) for end in process.ends if " " in end]
    if not rows and not far:
        return None
    direct = [text for name, text in rows if name == thread]
    side = tuple(row for row in rows if row[0] not in (thread, DESCENDANTS, WHOLE_PROCESS))
    itself = f"pid {process.pid}"
    if set(direct) == {itself}:
        # Another thread of the process serves it and its peers, and waits for their requests.
        direct = [_UNCERTAIN + text for text in dict.fromkeys(text for _, text in side)]
    direct = [text for text in direct if not text.endswith(itself)]
    return LinkEnds(
        tuple(direct),
        tuple(text for name, text in rows if name == DESCENDANTS),
        (*(text for name, text in rows if name == WHOLE_PROCESS), *far),
        side,
    )


def hosts(link_ends: LinkEnds | None) -> tuple[str, ...]:
    """The peers without the numbers that differ between processes."""
    texts = link_ends.direct if link_ends else ()
    return tuple(sorted({text.rpartition(":")[0].partition(" ")[0] for text in texts}))


class Links:
    """The owners of the ends of connections."""

    def __init__(self) -> None:
        #: Own address and peer's, or the address of a listener -> process; None: several.
        self._owner: dict[str, Place | None] = {}

    def read(self, node: str, process: TracedProcess) -> None:
        for end in process.ends if len(self._owner) < _MAX_ENDS else ():
            place = node, process.pid
            self._owner[end] = place if self._owner.get(end, place) == place else None

    def owner(self, node: str, text: str) -> Place | None:
        """The process at the opposite end; None: not known, or no rank."""
        if text.startswith("pid "):
            return node, int(text[4:]) if text[4:].isdecimal() else 0
        return self._owner.get(text) or self._owner.get(text.partition(" ")[0])


class LinkWait(NamedTuple):
    """Processes of one group."""

    ranks: frozenset[int]
    activity: str  # of their hint
    ends: Mapping[Place, LinkEnds]  # node and pid -> the ends of that process
    processes: int
    awake: bool  # they woke up between the samples


def waited_for(
    groups: Sequence[LinkWait], links: Links, rank_of: Mapping[Place, int],
    waiting_activities: frozenset[str],
) -> list[tuple[int, ...]]:  # fmt: skip
    """For each group the ranks that all of its processes wait for; (): not all of them wait.
    waiting_activities: activities of hints in which a process waits for ranks. Of several ends
    only one may count: such a group waits if one of those ranks does not wait.
    """
    waited: list[tuple[int, ...]] = [()] * len(groups)
    idle_groups = (group for group in groups if group.activity in waiting_activities)
    waiting = {rank for group in idle_groups for rank in group.ranks}
    awake = {rank for group in groups if group.awake for rank in group.ranks}
    # The surest first: a rank that waits is not the awaited one of a group with several ends.
    for level in (_certain_ends, _direct, _all_ends):
        candidates: list[tuple[int, list[set[int]]]] = []
        for at, group in enumerate(groups):
            is_known = len(group.ends) >= group.processes
            if waited[at] or group.activity in waiting_activities or not is_known:
                continue
            sets = []
            for place, ends in group.ends.items():
                owners = [links.owner(place[0], end) for end in level(ends, group.activity)]
                ranks = {rank_of[owner] for owner in owners if owner and owner in rank_of}
                sets.append(ranks - {rank_of.get(place, -1)})
            candidates.append((at, sets))
        # Groups with one end wait for it; then groups with several wait for the remaining ranks.
        candidates.sort(key=lambda row: max(map(len, row[1]), default=0))
        for at, ends_of in candidates:
            # For an arbitrary connection it is only likely: an active rank may use it.
            excluded = {_certain_ends: set(), _direct: waiting, _all_ends: waiting | awake}[level]
            sets = [ranks - excluded for ranks in ends_of]
            is_certain = all(len(ranks) == 1 for ranks in sets)
            if all(sets) and (level is not _certain_ends or is_certain):
                waited[at] = tuple(sorted(set().union(*sets)))
                waiting |= groups[at].ranks
    return waited


def _certain_ends(ends: LinkEnds, activity: str) -> tuple[str, ...]:
    """The ends that the thread waits for and that only one process has."""
    texts = _waited(ends, activity)
    return () if any(text.startswith(_UNCERTAIN) for text in texts) else texts


def _direct(ends: LinkEnds, activity: str) -> tuple[str, ...]:
    """The ends that the thread waits for, including ends that several processes share."""
    return tuple(text.removeprefix(_UNCERTAIN) for text in _waited(ends, activity))


def _waited(ends: LinkEnds, activity: str) -> tuple[str, ...]:
    return ends.direct + (ends.child_ends if activity in _CHILD_ACTIVITIES else ())


def _all_ends(ends: LinkEnds, activity: str) -> tuple[str, ...]:
    """The ends of all connections, where the thread waits for no particular one."""
    return ends.all_ends if activity in _PROCESS_ACTIVITIES and not _direct(ends, activity) else ()


# --- The stacks of all nodes: each different one once, known by a number.

#: Native frames without a symbol, and offsets into one: address randomisation makes them differ.
_ADDRESS = re.compile(r"\+?\b0x[0-9a-fA-F]+\b")
#: The frame between the stack of a main thread and that of the thread that it waits for.
THREAD = Frame("(in another thread)", "", 0)
#: The same before the stack of the thread that holds Python's lock.
HOLDER = Frame("(in the thread that has Python's lock)", "", 0)


class StackReading(NamedTuple):
    """What the frames of one stack mean."""

    for_ranks: bool  # it ends at a known place that waits for other ranks
    starts: bool  # that place is a rendezvous, which polls a store
    # the lines of the user's calls: a rank that stands still at another line waits in another call
    site: tuple[int, ...]
    polls: int  # number of its frames that lead to a polling call; 0: none does
    delegates: bool  # it only waits for another thread of its process
    backward: bool  # that thread is one of autograd
    pooled: bool  # that thread, or this one, is of a pool
    serves: bool  # it is of a serving thread, for which no thread waits
    dispatched: bool  # it is of a thread that works on a request of another rank
    root: str  # the file of its outermost call
    lock: str  # the kind of lock that it waits for, whose holder a stack shows; "": none
    holds: frozenset[str]  # the kinds of such locks that it holds


def _read_stack(frames: tuple[Frame, ...]) -> StackReading:
    hint = hints.find(frames)
    for_ranks = hint is not None and hint.activity in hints.FOR_RANKS
    return StackReading(
        for_ranks, hint is not None and hint.activity == "start", hints.call_site(frames),
        hints.polls(frames), hints.delegates(frames),
        hint is not None and hint.activity == "backward", hints.pooled(frames),
        hints.serves(frames), hints.dispatched(frames), frames[0].file if frames else "",
        *hints.locks(frames),
    )  # fmt: skip


#: A frame of the interpreter, which calls of some classes have from Python 3.12 on, after many
#: calls (_Py_InitCleanup in Python/specialize.c).
_SHIM = ("__init__", "__init__", 0)


class StackNumbers:
    """Numbers of stacks; equal stacks of any nodes share one. Stacks with different lines have one
    path: ranks in the same functions are grouped together at any lines.
    """

    def __init__(self) -> None:
        self._frames: dict[tuple[str, str, int], int] = {}
        self._seen: list[Frame] = []
        self._function_of: list[int] = []
        self._functions: dict[tuple[str, str], int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._all: list[tuple[int, ...]] = []
        self._paths: dict[tuple[int, ...], int] = {}
        self._readings: dict[int, StackReading] = {}
        #: Stack -> its path.
        self.path_of: list[int] = []

    def _frame(self, frame: tuple[str, str, int]) -> int:
        if (number := self._frames.get(frame)) is None:
            function, file, line = frame
            if "0x" in function:
                function = _ADDRESS.sub("", function).strip() or "?"
            number = self._frames[frame] = len(self._seen)
            self._seen.append(Frame(function, file, line))
            functions = self._functions
            self._function_of.append(functions.setdefault((function, file), len(functions)))
        return number

    def _stack(self, frames: tuple[int, ...]) -> int:
        if (number := self._stacks.get(frames)) is None:
            number = self._stacks[frames] = len(self._all)
            self._all.append(frames)
            path = tuple(self._function_of[frame] for frame in frames)
            self.path_of.append(self._paths.setdefault(path, len(self._paths)))
        return number

    def numbers(self, trace: Trace) -> list[int]:
        frame, stack = self._frame, self._stack
        frames, rows = list(map(frame, trace.frames)), trace.stacks
        inner = self._frames.get(_SHIM)
        if inner in frames:
            rows = tuple(tuple(index for index in row if frames[index] != inner) for row in rows)
        return [stack(tuple([frames[index] for index in row])) for row in rows]

    def calls(self, stack: int) -> tuple[Frame, ...]:
        """The frames of one stack, root to leaf."""
        return tuple(self._seen[frame] for frame in self._all[stack])

    def joined(self, stack: int, other: int, between: Frame = THREAD) -> int:
        """The number of a stack followed by that of another thread."""
        mark = self._frame(between)
        return self._stack((*self._all[stack], mark, *self._all[other]))

    def reading(self, stack: int) -> StackReading:
        """What its frames mean, computed once."""
        if (reading := self._readings.get(stack)) is None:
            reading = self._readings[stack] = _read_stack(self.calls(stack))
        return reading

    def native_activity(self, stack: int) -> str:
        """The activity in native frames; "": not known."""
        hint = hints.of_native(self.calls(stack))
        return hint.activity if hint else ""

    def same(self, first: int, other: int) -> bool:
        """Whether a thread with both stacks has stayed at one place: only the last call's line may
        differ, as in a waiting loop, and the calls below a polling one.
        """
        if first == other:
            return True
        polls = self.reading(first).polls
        if polls and polls == self.reading(other).polls:
            # The line of a polling call changes with its current step.
            return self._all[first][: polls - 1] == self._all[other][: polls - 1]
        if self.path_of[first] != self.path_of[other]:
            return False
        return self._all[first][:-1] == self._all[other][:-1]

    def departs(self, first: int, other: int) -> bool:
        """Whether two stacks lead from one call to different calls of the program, or to further
        calls. A loop that polls leads to one call, or to a library's that make no further ones.
        """
        stacks = [self.calls(stack) for stack in (first, other)]
        pairs = enumerate(zip(*stacks, strict=False))
        at = next((at for at, (a, b) in pairs if a[:2] != b[:2]), None)
        users = {frame and frame[:2] for frame in map(hints.user_frame, stacks)}
        return at is not None and (len(users) > 1 or min(map(len, stacks)) > at + 1)

    def frames(self, stacks: Iterable[int]) -> tuple[Frame, ...]:
        """The frames of stacks with the same path; the line is 0 where they differ."""
        rows: Sequence[Sequence[Frame]] = [
            [self._seen[frame] for frame in self._all[stack]] for stack in stacks
        ]
        columns = zip(*rows, strict=True)
        return tuple(
            frame if all(other.line == frame.line for other in peers) else frame._replace(line=0)
            for frame, *peers in columns
        )


# --- The classification of one process: kind, verdict and reason, from its samples.

#: CPU seconds per second below which a process counts as waiting: heartbeats, watchdogs and
#: loaders of a hung process use some; a spinning loop uses a whole core.
IDLE = 0.05
#: ... from which a process in changing calls computes, also where ranks share cores.
_COMPUTES = 0.2
#: The kernel counts CPU time in ticks of 10 ms (USER_HZ): two ticks prove nothing.
_TICKS_S = 0.025
#: The error of `nodeready.agent.stacks.py_spy` for a process that has ended.
_GONE = "it has ended"
#: Voluntary context switches per second from which a main thread with equal stacks counts as
#: moving, if it uses little CPU time, and if it computes. A working thread switches dozens of
#: times (163 in 2 s at 88 steps a second), a hung one never. A polling loop switches as often; so
#: the first also needs a read or write per switch, as a step over the network or a file makes.
_MOVING_SWITCHES, _COMPUTING_SWITCHES = 20, 5
#: Where reads and writes are not known: CPU seconds per wakeup from which a thread has worked.
#: Python's wait for its lock, which wakes up every 5 ms (Python/ceval_gil.h), takes some 10 us, a
#: collective of gloo 50 to 110 us; but so does queue.get(timeout=0.01).
_WORK_S = 40e-6
#: Minimum wakeups a second of a thread that waits for Python's lock: sys.getswitchinterval.
_LOCK_WAKEUPS = 50
#: Kernel functions of a thread that sleeps for a time (kernel/time/hrtimer.c): a polling loop
#: wakes up there by itself, not by the action of another process.
_SLEEPS = "nanosleep"
#: py-spy's name of the main thread, which is threading's.
MAIN = "MainThread"


#: State -> the kind of a process in it, and why there is no stack to compare.
_STATES = {
    "Z": ("dead", "a zombie: it has ended, and its parent has not read its status"),
    **dict.fromkeys("Xx", ("dead", "")),
    "T": ("stopped", "stopped by a signal (SIGSTOP) or by the scheduler"),
    FROZEN: ("frozen", "its cgroup is frozen"),
    "t": ("traced", "another process traces it: a debugger, strace"),
}


class Classification(NamedTuple):
    """The state of one process."""

    kind: str  # as of a `document.Group`
    verdict: str | None  # likewise
    reason: str  # why there is no stack to compare; "": there is one
    # number of the main thread's last stack, with that of the awaited thread; None: no stack
    stack: int | None
    cpu_s: float | None
    # of the main thread between the first and the last sample; None: not known
    wakeups: int | None = None
    thread: str = MAIN  # name of the classified thread: the main one, or that for which it waits
    work: str = ""  # as of `TracedProcess`, or of the main thread itself


def classify(
    process: TracedProcess, stacks: Sequence[int], table: StackNumbers, interval_s: float
) -> Classification:
    """Classify one process by its samples: the last one with a stack gives the stack, all together
    tell whether it moves (`_verdict`). stacks: the numbers of the trace's stacks
    """
    used = _range(process.cpu_s)
    mains, thread, has_ended = _mains(process, stacks, table)
    delegated = thread != MAIN
    stack = mains[-1] if mains else None
    state, note = process.state[:1], process.note
    kind, reason = _STATES.get("t" if process.tracer and state not in _STATES else state, ("", ""))
    if note.startswith("ended") and kind != "dead":
        kind, reason = "dead", ""
    if kind:
        return Classification(kind, None, reason or note or _GONE, stack, used)
    verdict, wakeups, is_loop = None, None, process.work.startswith(LOOP_CHANGES)
    work = "" if is_loop else process.work
    seconds = interval_s * (len(process.cpu_s) - 1)
    if len(mains) > 1:
        if has_ended or not all(table.same(mains[0], main) for main in {*mains[1:]}):
            verdict = "progressing"
            computes = used is not None and used >= _COMPUTES * seconds
            if computes and not work and any(table.departs(mains[0], main) for main in mains[1:]):
                work = f"it used {used:.0f} s of CPU in {seconds:.0f} s, and its calls change"
        elif used is not None:
            # The state of the main thread says nothing about the thread for which it waits.
            switches = None if delegated else _range(process.switches)
            wakeups = None if switches is None else int(switches)
            cpu_range = None if delegated else _range(process.main_cpu_s)
            sleeps = _SLEEPS in process.wait_channel
            worked = used if cpu_range is None else cpu_range
            verdict = _verdict(worked, wakeups, sleeps, seconds, _range(process.calls))
            if verdict == "progressing" and table.reading(mains[-1]).starts:
                verdict = "unsure"
            holder = _holder(process, stacks) if verdict == "unsure" else None
            waits_for_lock = mains[0] == stack and wakeups and wakeups >= _LOCK_WAKEUPS * seconds
            if holder is not None and waits_for_lock:
                stack = table.joined(mains[-1], holder, HOLDER)
                wakeups, verdict = None, _verdict(used, None, False, seconds)
    has_woken = process.untimed and bool(_range(process.switches))
    # A log that counts shows that a rank has waited for its peers for a moment only.
    waits_for_ranks = mains and table.reading(mains[-1]).for_ranks
    has_work = work.startswith(LOG_COUNTS) or (work and not waits_for_ranks)
    if verdict is not None and (thread in process.received or has_woken or has_work):
        # It received data and waits again; or it or a descendant works.
        verdict = "progressing"
    # A process that has moved since was in state D for a moment only.
    if state == "D" and verdict in (None, "blocked", "unsure"):
        place = f", in {name}" if (name := in_kernel(process)) else ""
        reason = f"waits in the kernel (state D){place}"
        return Classification("uninterruptible", None, reason, stack, used)
    if stack is None:
        reason = _no_stack(process)
        return Classification("dead" if reason == _GONE else "no-data", None, reason, None, used)
    # A loop without an end may change a variable, too.
    work = process.work if is_loop and verdict == "spinning" else work
    return Classification("stack", verdict, "", stack, used, wakeups, thread, work)


def _verdict(
    used: float, wakeups: int | None, sleeps: bool, seconds: float, calls: float | None = None
) -> str:
    """Whether the main thread moved at the place where all samples show it.
    used:    CPU seconds of the main thread or, in traces of earlier versions, of the process, of
             which heartbeats and watchdogs use some
    wakeups: voluntary context switches; None: not known
    sleeps:  it only waited for a time to pass
    calls:   reads and writes of the process; None: not known
    """
    busy = used >= max(_TICKS_S, IDLE * seconds)
    if wakeups is None:
        return "spinning" if busy else "blocked"
    per_second = wakeups / seconds if seconds else 0.0
    if busy:
        return "progressing" if per_second >= _COMPUTING_SWITCHES else "spinning"
    works = used >= _WORK_S * wakeups if calls is None else calls >= wakeups
    if per_second >= _MOVING_SWITCHES and works and not sleeps:
        return "progressing"
    return "unsure" if wakeups else "blocked"


def _holder(process: TracedProcess, stacks: Sequence[int]) -> int | None:
    """The stack of another thread that held Python's lock, at the same place, in every sample."""
    if not process.samples[-1].gil:
        return None
    holders: set[tuple[str, int | None]] = set()
    for sample in process.samples:
        threads = dict(sample.threads)
        at = threads.get(sample.gil) if sample.gil != MAIN else None
        holders.add((sample.gil, None if at is None else stacks[at]))
    return holders.pop()[1] if len(holders) == 1 else None


def _range(values: Sequence[float]) -> float | None:
    """The last number less the first; None: fewer than two."""
    return round(max(0.0, values[-1] - values[0]), 4) if len(values) > 1 else None


def _mains(
    process: TracedProcess, stacks: Sequence[int], table: StackNumbers
) -> tuple[list[int], str, bool]:
    """The stacks of the main thread by sample, each followed by that of another thread of its
    process if it only waits for that thread; the name of the thread classified last; and whether
    the thread classified first has ended since, as one does that serves a request.
    """
    mains: list[int] = []
    thread, before, first = MAIN, None, ""
    waits = {name for name, end in process.waits_for if end != STORE}
    for sample in process.samples:
        if sample.main is None:
            continue
        # Hung processes repeat the same sample.
        if sample == before:
            mains.append(mains[-1])
            continue
        before = sample
        main, thread = stacks[sample.main], MAIN
        reading = table.reading(main)
        other = None
        if reading.delegates or reading.lock:
            other = _awaited(reading, sample, stacks, table, waits)
            # A connection to another rank says more than a thread that waits for a thread, too, or
            # than one that is of no pool: asyncio's loop waits for those alone.
            peer = table.reading(other[1]) if other and MAIN in waits else None
            if peer and (peer.delegates or not peer.pooled):
                other = None
        if other is None and (reading.for_ranks or reading.delegates or MAIN in waits):
            other = _dispatched(waits, sample, stacks, table)
        if other is not None:
            thread, stack = other
            main = table.joined(main, stack)
        mains.append(main)
        first = first or thread
    names = {name for name, _ in before.threads} if before else set()
    return mains, thread, first not in ("", MAIN, *names)


def main_stack(process: TracedProcess, stacks: Sequence[int], table: StackNumbers) -> int | None:
    """The last stack's number, as of `_mains`; None: no stack. stacks: as of `classify`"""
    mains, _, _ = _mains(process, stacks, table)
    return mains[-1] if mains else None


def _awaited(
    main: StackReading, sample: StackSample, stacks: Sequence[int], table: StackNumbers,
    waits: Collection[str],
) -> tuple[str, int] | None:  # fmt: skip
    """Name and stack of the only thread for which a main thread can wait; None: not known. waits:
    the threads that wait for other ranks by connections, pipes or locks
    """
    candidates: dict[int, str] = {}
    for name, at in sample.threads:
        reading = table.reading(stacks[at])
        python = reading.root.endswith("threading.py")
        follows = python != main.backward or main.lock in reading.holds
        if name != MAIN and not reading.serves and follows:
            candidates[stacks[at]] = name
    readings = {stack: table.reading(stack) for stack in candidates}
    if main.lock:
        # No other thread can release it.
        holders = [at for at in candidates if main.lock in readings[at].holds]
        candidates = {at: candidates[at] for at in holders}
    # Threads that work in the awaited pool; that wait for no other thread; that wait for ranks.
    preferences: list[Callable[[int], bool]] = [
        lambda stack: readings[stack].pooled == main.pooled,
        lambda stack: candidates[stack] in waits or not readings[stack].delegates,
        lambda stack: candidates[stack] in waits or readings[stack].for_ranks,
    ]
    for fits in preferences:
        if len(candidates) > 1:
            fitting = {stack: candidates[stack] for stack in candidates if fits(stack)}
            candidates = fitting or candidates
    # If several all wait for ranks, any of them shows what the main thread waits for.
    is_single = len(candidates) == 1 or all(readings[stack].for_ranks for stack in candidates)
    return next(((candidates[stack], stack) for stack in candidates), None) if is_single else None


def possible_holder(process: TracedProcess, stacks: Sequence[int], table: StackNumbers) -> str:
    """The only other thread of a process whose main thread waits for its lock; "": not known"""
    if not process.waits_on.endswith(OWN_LOCK) or not process.samples:
        return ""
    threads = [(name, stacks[at]) for name, at in process.samples[-1].threads if name != MAIN]
    threads = [(name, stack) for name, stack in threads if not table.reading(stack).serves]
    if len(threads) != 1:
        return ""
    ((name, stack),) = threads
    frame = hints.user_frame(table.calls(stack)) or table.calls(stack)[-1]
    file = frame.file.rpartition("/")[2]
    return f"thread {name}, in {frame.function} {file}:{frame.line}, may have the lock"


def _dispatched(
    waits: Collection[str], sample: StackSample, stacks: Sequence[int], table: StackNumbers
) -> tuple[str, int] | None:
    """Name and stack of a thread that serves another rank; None: none. waits: see `_awaited`"""
    threads = ((name, stacks[at]) for name, at in sample.threads if name not in waits)
    readings = ((row, table.reading(row[1])) for row in threads)
    return next((row for row, r in readings if r.dispatched and not r.for_ranks), None)


def in_kernel(process: TracedProcess) -> str:
    """The innermost kernel function in which a process waits; "": not known."""
    for text in (*process.kernel_stack[:1], process.wait_channel):
        name = text.partition("+")[0].strip()
        if name not in ("", "0", "-"):
            return name
    return ""


def _no_stack(process: TracedProcess) -> str:
    """Why a process has no stack, without its pid, so that equal reasons form one group."""
    errors = [sample.error for sample in process.samples if sample.error]
    reason = errors[-1] if errors else process.note or "no stack was taken"
    if "not python" in reason.lower():
        name = in_kernel(process)
        if process.state == "R":
            return "not Python: it runs"
        return f"not Python: it waits in {name}" if name else "not Python"
    pid = str(process.pid)
    return " ".join("PID" if word.strip("().,:;") == pid else word for word in reason.split())

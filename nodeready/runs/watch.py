"""Does the job still move? Cheap snapshots of its ranks, and when to take an incident.

`signs` to `judge` are pure: two snapshots make the signs of an interval, the intervals make the
judgement. `probe` takes one snapshot of the nodes (`nodeready.agent.witnesses.motion`).

A healthy job must never cause an incident. During an evaluation on one rank, a checkpoint or a
compilation at least one rank moves, so the job moves if any rank moves. A job that hangs may still
burn CPU: NCCL, MPI and CUDA poll. A polling rank does nothing else. So in a rank that uses one of
them, CPU time without a page fault, a switch or a byte is no sign in either direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from nodeready.agent.asking import Asks, new_nonce, no_answer, request, rows
from nodeready.agent.witnesses import motion
from nodeready.agent.witnesses.motion import Motion, MotionEnd, PortBytes
from nodeready.core.base import ProbeError
from nodeready.core.outcome import INTERRUPTED, INVALID, Gap
from nodeready.core.text import counted
from nodeready.fleet.inventory.nodeset import folded

# --- One snapshot, and what happened between two.

#: CPU seconds per second of a rank and its descendants: at most this is idle. PyTorch's watchdog
#: wakes up ten times a second and takes less than 0.01.
IDLE_CPU = 0.02
BUSY_CPU = 0.05  # the same: at least this is work, if nothing in the rank can poll
#: Voluntary switches of a main thread per second: at most this may be a wait that polls. A file
#: baton polls every 0.1 s and makes 10, the queue of a data loader makes one in 5 s.
POLL_SWITCHES = 12.0
#: CPU seconds of a main thread, per second and per wake-up: work takes more, a poll a tenth.
BUSY_MAIN_CPU, BUSY_WAKEUP_S = 0.001, 0.0005
#: Page faults, or switches, per second: at most this may be a wait that polls without a pause.
SPIN_RATE = 1.0
#: Bytes per second that a rank reads and writes: at least, when it moves; at most, when it rests.
MOVING_BYTES, RESTING_BYTES = 4096.0, 512.0
#: The same of a node's network or RDMA ports, which other programs use, too.
MOVING_PORT_BYTES, RESTING_PORT_BYTES = 1e6, 65536.0
#: The witness of `nodeready watch --progress`, whose lines are what the user calls progress.
PROGRESS = "progress"
MIN_WITNESSES = 2  # witnesses that must agree that nothing moves
#: Snapshots without any rank after which the job has ended: a launcher may be starting it again.
MIN_EMPTY_SNAPSHOTS = 2
#: The maximum part of the job's own timeout without a movement, because an incident takes time;
#: but at least these seconds.
TIMEOUT_PART, MIN_CONFIRM_S = 0.6, 15.0


class RankKey(NamedTuple):
    """A rank's process. The start time tells it from a later process with the same pid."""

    node: str
    pid: int
    start: float


@dataclass(frozen=True)
class JobSnapshot:
    taken_s: float  # by this machine's monotonic clock
    ranks: Mapping[RankKey, Motion] = field(default_factory=dict)  # by their process
    # node -> the counters of its ports
    ports: Mapping[str, PortBytes] = field(default_factory=dict)
    # node -> why it gave no answer, or only a part of it
    gaps: Mapping[str, Gap] = field(default_factory=dict)
    interrupted: bool = False  # some nodes were not asked
    asks_progress: bool = False  # lines of progress were asked for

    @property
    def users(self) -> list[int | None]:
        """The users of the ranks. A job has one user: of several, all but one are impostors.

        Where Slurm has put ranks into the job's cgroup, only their users count.
        """
        ranks = list(self.ranks.values())
        in_job = [rank for rank in ranks if rank.in_cgroup] or ranks
        return list(dict.fromkeys(rank.uid for rank in in_job))

    def of_user(self, user: int | None) -> JobSnapshot:
        """The snapshot with only this user's ranks and those in the job's cgroup."""
        ranks = {key: r for key, r in self.ranks.items() if r.in_cgroup or r.uid == user}
        return replace(self, ranks=ranks)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that have ranks."""
        return tuple(dict.fromkeys(key.node for key in self.ranks))


class Sign(NamedTuple):
    """What one witness reports about the time between two snapshots."""

    witness: str
    moves: bool | None  # whether the job moves; None: this witness cannot tell
    text: str  # what it saw, in a few words


@dataclass(frozen=True)
class Interval:
    seconds: float  # its length
    ranks: int  # the number of ranks at its end
    signs: tuple[Sign, ...]
    gone: bool = False  # no rank is left

    @property
    def kind(self) -> Literal["moves", "still", "unclear", "gone"]:
        """The conclusion from all witnesses; where lines of --progress match, from these alone."""
        if self.gone:
            return "gone"
        progress = [sign for sign in self.signs if sign.witness == PROGRESS]
        if progress and progress[0].moves is not None:
            return "moves" if progress[0].moves else "still"
        if any(sign.moves for sign in self.signs):
            return "moves"
        still = sum(sign.moves is False for sign in self.signs)
        return "still" if still >= MIN_WITNESSES else "unclear"


@dataclass(frozen=True)
class _RankStep:
    """What one rank did between two snapshots; rates are per second."""

    rank: str
    cpu: float
    main_cpu: float
    switches: float
    faults: float
    bytes: float | None
    log: bool | None  # whether its log grew; None: it has none
    watchdog: bool
    may_poll: bool

    @property
    def is_active(self) -> bool:
        """Whether it does anything but take CPU time."""
        return max(self.faults, self.switches) > SPIN_RATE or (self.bytes or 0) > MOVING_BYTES

    @property
    def is_computing(self) -> bool:
        """Whether its CPU time is work."""
        if self.cpu < IDLE_CPU:
            return False
        return self.is_active or (self.cpu >= BUSY_CPU and not self.may_poll)

    @property
    def is_main_working(self) -> bool:
        """Whether its main thread does more than wait or poll."""
        may_spin = self.may_poll and not self.is_active
        if self.main_cpu <= BUSY_MAIN_CPU or (self.main_cpu >= IDLE_CPU and may_spin):
            return False
        return self.main_cpu > BUSY_WAKEUP_S * self.switches


def _step(before: Motion, after: Motion, seconds: float) -> _RankStep | None:
    """What the rank did; None: its descendants changed, so its counters cannot be compared."""
    cpu, faults = after.cpu_s - before.cpu_s, after.faults - before.faults
    moved: float | None = None
    if before.moved_bytes is not None and after.moved_bytes is not None:
        moved = after.moved_bytes - before.moved_bytes
    if min(cpu, faults, moved or 0) < 0 or before.descendant_count != after.descendant_count:
        return None
    log: bool | None = None
    if after.log_bytes is not None and before.log_bytes is not None:
        is_fresh = after.log_age_s is not None and after.log_age_s < int(seconds)
        log = after.log_bytes != before.log_bytes or is_fresh
    rank = f"rank {after.rank}" if after.rank is not None else f"pid {after.pid}"
    main_cpu = max(0.0, after.main_cpu_s - before.main_cpu_s) / seconds
    switches = max(0, after.switches - before.switches) / seconds
    rates = cpu / seconds, main_cpu, switches, faults / seconds
    moved_rate = None if moved is None else moved / seconds
    return _RankStep(rank, *rates, moved_rate, log, after.watchdog, after.may_poll)


def interval(before: JobSnapshot, after: JobSnapshot) -> Interval:
    seconds = max(0.001, after.taken_s - before.taken_s)
    if not after.ranks and not (set(before.nodes) & after.gaps.keys()):
        return Interval(seconds, 0, (), gone=True)
    return Interval(seconds, len(after.ranks), signs(before, after, seconds))


def signs(before: JobSnapshot, after: JobSnapshot, seconds: float) -> tuple[Sign, ...]:
    nodes = set(before.nodes)
    changed = sum(key not in before.ranks and key.node in nodes for key in after.ranks)
    steps: list[_RankStep] = []
    for key in (key for key in after.ranks if key in before.ranks):
        step = _step(before.ranks[key], after.ranks[key], seconds)
        if step is None:
            changed += 1
        else:
            steps.append(step)
    signs = []
    if changed:
        text = f"processes of {counted(changed, 'rank')} came or went"
        signs.append(Sign("processes", True, text))
    if steps:
        signs += [_cpu(steps), _switches(steps), _bytes(steps), _log(steps)]
        if any(step.watchdog for step in steps):
            signs.append(Sign("watchdog", False, "its log has a timeout of PyTorch's watchdog"))
    signs.append(_ports(before, after, seconds))
    if after.asks_progress:
        signs.append(_progress(before, after))
    return tuple(signs)


def _progress(before: JobSnapshot, after: JobSnapshot) -> Sign:
    ends = {key: rank.progress for key, rank in after.ranks.items() if rank.progress is not None}
    old = {key: rank.progress for key, rank in before.ranks.items() if rank.progress is not None}
    if any(old.get(key) != end for key, end in ends.items()):
        return Sign(PROGRESS, True, "a new line of progress")
    if old:
        return Sign(PROGRESS, False, "no new line of progress")
    return Sign(PROGRESS, None, "no line of a log matches --progress")


def _busiest(steps: Iterable[_RankStep], value: str) -> _RankStep:
    return max(steps, key=lambda step: getattr(step, value) or 0)


def _cpu(steps: Sequence[_RankStep]) -> Sign:
    computing = [step for step in steps if step.is_computing]
    busiest = _busiest(computing or steps, "cpu")
    text = f"{busiest.rank} takes {100 * busiest.cpu:.0f} % of a core"
    if computing:
        return Sign("cpu", True, text)
    if busiest.cpu < IDLE_CPU:
        return Sign("cpu", False, "no CPU time")
    return Sign("cpu", None, f"{text} and does nothing else: it may poll")


def _switches(steps: Sequence[_RankStep]) -> Sign:
    working = [step for step in steps if step.is_main_working]
    if working:
        busiest = _busiest(working, "main_cpu")
        return Sign("switches", True, f"the main thread of {busiest.rank} works between its waits")
    waking = [step for step in steps if step.switches > POLL_SWITCHES]
    if not waking:
        return Sign("switches", False, "the main threads only wait")
    busiest = _busiest(waking, "switches")
    rate = f"{busiest.switches:.0f} times a second"
    return Sign("switches", None, f"the main thread of {busiest.rank} wakes up {rate}")


def _bytes(steps: Sequence[_RankStep]) -> Sign:
    measured = [step for step in steps if step.bytes is not None]
    if not measured:
        return Sign("bytes", None, "no permission to see what the ranks read and write")
    busiest = _busiest(measured, "bytes")
    rate = busiest.bytes or 0
    text = f"{busiest.rank} reads and writes {rate / 1024:.0f} KiB a second"
    if rate >= MOVING_BYTES:
        return Sign("bytes", True, text)
    if rate <= RESTING_BYTES and len(measured) == len(steps):
        return Sign("bytes", False, "the ranks read and write nothing")
    return Sign("bytes", None, text)


def _log(steps: Sequence[_RankStep]) -> Sign:
    measured = [step for step in steps if step.log is not None]
    if not measured:
        return Sign("log", None, "the ranks write into no file")
    grows = next((step for step in measured if step.log), None)
    if grows is None:
        return Sign("log", False, "no log grows")
    if any(step.watchdog for step in steps):
        # The new lines may be the watchdog's.
        return Sign("log", None, "a log grows, with a timeout in it")
    return Sign("log", True, f"the log of {grows.rank} grows")


def _ports(before: JobSnapshot, after: JobSnapshot, seconds: float) -> Sign:
    nodes = after.nodes
    if len(nodes) < 2:
        return Sign("ports", None, "the job is on one node")
    rates = []
    for name in nodes:
        none = PortBytes(None, None)
        old, new = before.ports.get(name, none), after.ports.get(name, none)
        counters = ((old.network, new.network), (old.rdma, new.rdma))
        moved = [max(0, b - a) for a, b in counters if a is not None and b is not None]
        if not moved:
            return Sign("ports", None, f"{name} reports no counters of its ports")
        rates.append((max(moved) / seconds, name))
    rate, name = max(rates)
    text = f"{rate / 1e6:.1f} MB a second through the ports of {name}"
    if rate >= MOVING_PORT_BYTES:
        return Sign("ports", True, text)
    return Sign("ports", False if rate <= RESTING_PORT_BYTES else None, text)


# --- The judgement.


@dataclass(frozen=True)
class Judgement:
    # "new": there is no interval yet; "moves", "still", "unclear"; "gone": the job is over
    kind: str
    still_s: float = 0.0  # seconds for which nothing has moved
    fire: bool = False  # take an incident now
    armed: bool = True  # the next hang is a new one


def judge(intervals: Sequence[Interval], confirm_s: float, armed: bool = True) -> Judgement:
    """What to do after these intervals, the oldest first.

    confirm_s: minimum seconds of a hang
    armed:     False: an incident of this hang was taken already; movement arms the watch again
    """
    if not intervals:
        return Judgement("new", armed=armed)
    last = intervals[-1].kind
    if last == "gone":
        is_gone = [interval.gone for interval in intervals[-MIN_EMPTY_SNAPSHOTS:]]
        has_ended = all(is_gone) and len(is_gone) == MIN_EMPTY_SNAPSHOTS
        return Judgement("gone" if has_ended else "unclear", armed=armed)
    if last == "moves":
        return Judgement("moves")
    still_s = 0.0
    for interval in reversed(intervals):
        if interval.kind != "still":
            break
        still_s += interval.seconds
    # Half a second of tolerance: three snapshots of a minute rarely make exactly 180 s.
    fire = armed and last == "still" and still_s >= confirm_s - 0.5
    return Judgement(last, still_s, fire, armed and not fire)


class Watch:
    """The last snapshot, the intervals that still count, and the judgement; see `add`."""

    def __init__(self, confirm_s: float) -> None:
        self.confirm_s = confirm_s
        self.snapshot: JobSnapshot | None = None
        self.intervals: list[Interval] = []
        self.judgement = Judgement("new")

    def add(self, snapshot: JobSnapshot) -> Judgement:
        timeouts = [rank.timeout_s for rank in snapshot.ranks.values() if rank.timeout_s]
        if timeouts:
            limit_s = max(MIN_CONFIRM_S, TIMEOUT_PART * min(timeouts))
            self.confirm_s = min(self.confirm_s, limit_s)
        if self.snapshot is not None:
            self.intervals.append(interval(self.snapshot, snapshot))
        if self.snapshot is None or snapshot.ranks or self.intervals[-1].gone:
            self.snapshot = snapshot
        count, seconds = 0, 0.0
        for earlier in reversed(self.intervals):
            count, seconds = count + 1, seconds + earlier.seconds
            if seconds > self.confirm_s + earlier.seconds and count >= MIN_EMPTY_SNAPSHOTS:
                break
        del self.intervals[:-count]
        self.judgement = judge(self.intervals, self.confirm_s, self.judgement.armed)
        return self.judgement

    @property
    def text(self) -> str:
        """The judgement and its reasons, in one line."""
        snapshot, judgement = self.snapshot, self.judgement
        if snapshot is None or judgement.kind == "gone":
            return "the job has ended (if it died: nodeready postmortem)"
        count = len(snapshot.ranks)
        ranks = f"{counted(count, 'rank')} on {folded(snapshot.nodes)}" if count else "no rank"
        lost = f"; no answer of {folded(snapshot.gaps)}" if snapshot.gaps else ""
        if judgement.kind == "new":
            return f"{ranks}{lost}"
        signs = self.intervals[-1].signs
        lost += "".join(f"; {s.text}" for s in signs if s.witness == PROGRESS and s.moves is None)
        if judgement.kind == "moves":
            return f"moves: {ranks}: {_reasons(signs, True)}{lost}"
        if judgement.kind == "still":
            return f"does not move: {ranks}: {_reasons(signs, False)}{lost}"
        return f"unclear whether it moves: {ranks}{lost}"


def _reasons(signs: Iterable[Sign], moves: bool) -> str:
    return "; ".join(sign.text for sign in signs if sign.moves is moves)


# --- Asking.

LIMIT_S = 20  # seconds for the snapshot of one node


def probe(
    ask: Asks, nodes: Iterable[str], config: motion.MotionConfig, taken_s: float
) -> JobSnapshot:
    """A snapshot of these nodes. config: without a nonce; taken_s: of the monotonic clock"""
    names = list(nodes)
    with_nonce = replace(config, nonce=new_nonce())
    answers = ask("watch", {name: request(name, motion.__name__, with_nonce) for name in names})
    ranks: dict[RankKey, Motion] = {}
    ports: dict[str, PortBytes] = {}
    gaps: dict[str, Gap] = {}
    interrupted = False
    for name, answer in answers.items():
        if answer.has_gap(INTERRUPTED):
            interrupted = True
            continue
        refused: list[str] = []
        try:
            received = rows(answer, with_nonce, motion.kinds(), refused)
        except ProbeError as problem:
            gaps[name] = Gap(INVALID, problem.reason, problem.evidence)
            continue
        ends = [row for row in received if isinstance(row, MotionEnd)]
        if not ends:
            gap = no_answer(answer, with_nonce)
            is_refused = refused and not gap.is_unreached
            gaps[name] = Gap(INVALID, refused[0]) if is_refused else gap
            continue
        if ends[0].error or refused:
            gaps[name] = Gap(INVALID, ends[0].error or refused[0])
        for row in received:
            if isinstance(row, Motion):
                ranks[RankKey(name, row.pid, row.start)] = row
            elif isinstance(row, PortBytes):
                ports[name] = row
    return JobSnapshot(taken_s, ranks, ports, gaps, interrupted, bool(config.progress))

"""Does the job still move? Cheap looks at its ranks, and when to take evidence.

`signs` to `judge` are pure: two looks make the signs of an interval, the intervals make the
judgement. `take` asks the nodes for one look (`nodeready.node.witnesses.motion`).

A healthy job must never fire: an evaluation on one rank, a checkpoint, a compilation move one rank
at least, so every rank counts, and one that moves is enough. A job that hangs may still burn CPU:
NCCL, MPI and CUDA poll. Such a rank does nothing else, so where one of these is at work, CPU time
without a page fault, a switch or a byte is no sign in either direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from nodeready.inventory.nodeset import folded
from nodeready.node.witnesses import motion
from nodeready.node.witnesses.motion import Motion, MotionEnd, PortBytes
from nodeready.subjects.base import ProbeError
from nodeready.text import counted, sanitise
from nodeready.transport.base import (
    INTERRUPTED,
    UNREACHED,
    Asks,
    new_nonce,
    no_answer_reason,
    request,
    rows,
)

# --- One look, and what happened between two.

#: CPU seconds per second up to which a rank with all below it rests: a watchdog that looks around
#: ten times a second, as PyTorch's does, takes less than 0.01.
RESTS = 0.02
#: The same, from which it works, if nothing in it can poll.
COMPUTES = 0.05
#: Voluntary switches of a main thread per second, up to which it may only look around: a wait that
#: polls every 0.1 s (a file baton) makes 10, the queue of a data loader one in 5 s.
LOOKS_AROUND = 12.0
#: CPU seconds of a main thread, per second and for each time that it wakes up, from which it works
#: and does more than to look around: a poll in Python takes a tenth of that.
WORKS, EACH_TIME_S = 0.001, 0.0005
#: Page faults, or switches, per second up to which CPU time may be a wait that polls without end.
PULSE = 1.0
#: Bytes per second that ranks read and write: at least as many move, at most as many rest.
BYTES_MOVE, BYTES_REST = 4096.0, 512.0
#: The same of a node's ports, which others use, too: of the network, and of RDMA.
PORTS_MOVE, PORTS_REST = 1e6, 65536.0
#: How many witnesses have to agree that nothing moves.
AGREE = 2
#: Looks without any rank after which the job has ended: a launcher may be starting it again.
GONE_LOOKS = 2


class RankKey(NamedTuple):
    """A rank's process: its number may be another's later."""

    node: str
    pid: int
    start: float


@dataclass(frozen=True)
class Look:
    """One look at all nodes.

    at:     of this machine's monotonic clock, in seconds
    ranks:  by their process
    ports:  node -> the counters of its ports
    errors: node -> why it gave no answer, one line
    unreached: of these, those to which there was no way
    interrupted: it is not whole
    """

    at: float
    ranks: Mapping[RankKey, Motion] = field(default_factory=dict)
    ports: Mapping[str, PortBytes] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    unreached: frozenset[str] = frozenset()
    interrupted: bool = False

    @property
    def users(self) -> list[int | None]:
        """Whose the ranks are; several: all of these claim the job, which is one user's.

        Where Slurm has put ranks into the job's cgroup, it is their user's.
        """
        ranks = list(self.ranks.values())
        in_job = [rank for rank in ranks if rank.in_cgroup] or ranks
        return list(dict.fromkeys(rank.uid for rank in in_job))

    def of(self, user: int | None) -> Look:
        """The same with the ranks of this user's job alone."""
        in_cgroup_ranks = {
            key: rank for key, rank in self.ranks.items() if rank.in_cgroup or rank.uid == user
        }
        return replace(self, ranks=in_cgroup_ranks)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those that have ranks."""
        return tuple(dict.fromkeys(key.node for key in self.ranks))


class Sign(NamedTuple):
    """What one witness says of the time between two looks.

    moves: the job moves; it does not; None: this witness cannot tell
    text:  what it saw, in a few words
    """

    witness: str
    moves: bool | None
    text: str


@dataclass(frozen=True)
class Interval:
    """The time between two looks.

    seconds: its length
    ranks:   how many there were at its end
    """

    seconds: float
    ranks: int
    signs: tuple[Sign, ...]
    gone: bool = False

    @property
    def kind(self) -> Literal["moves", "still", "unclear", "gone"]:
        """What its witnesses say together."""
        if self.gone:
            return "gone"
        if any(sign.moves for sign in self.signs):
            return "moves"
        still = sum(sign.moves is False for sign in self.signs)
        return "still" if still >= AGREE else "unclear"


@dataclass(frozen=True)
class _RankStep:
    """What one rank did between two looks; all by the second."""

    rank: str
    cpu: float
    main_cpu: float
    switches: float
    faults: float
    bytes: float | None
    log: bool | None
    watchdog: bool
    may_poll: bool

    @property
    def polls(self) -> bool:
        """Whether all of its CPU time may be a wait that polls."""
        return self.may_poll and not self.pulse

    @property
    def computes(self) -> bool:
        """Whether its CPU time is work."""
        if self.cpu < RESTS:
            return False
        return self.pulse or (self.cpu >= COMPUTES and not self.may_poll)

    @property
    def pulse(self) -> bool:
        """Whether it does anything but take CPU time."""
        return self.faults > PULSE or self.switches > PULSE or (self.bytes or 0) > BYTES_MOVE

    @property
    def works(self) -> bool:
        """Whether its main thread does more than to wait, to look around, or to poll."""
        if self.main_cpu <= WORKS or (self.main_cpu >= RESTS and self.polls):
            return False
        return self.main_cpu > EACH_TIME_S * self.switches


def _step(before: Motion, after: Motion, seconds: float) -> _RankStep | None:
    """None: processes below it came or went, and its counters with them."""
    cpu, faults = after.cpu_s - before.cpu_s, after.faults - before.faults
    moved: float | None = None
    if before.moved_bytes is not None and after.moved_bytes is not None:
        moved = after.moved_bytes - before.moved_bytes
    if cpu < 0 or faults < 0 or (moved or 0) < 0 or before.below != after.below:
        return None
    log: bool | None = None
    if after.log_bytes is not None and before.log_bytes is not None:
        younger = after.log_age_s is not None and after.log_age_s < int(seconds)
        log = after.log_bytes != before.log_bytes or younger
    return _RankStep(
        f"rank {after.rank}" if after.rank is not None else f"pid {after.pid}",
        cpu / seconds,
        max(0.0, after.main_cpu_s - before.main_cpu_s) / seconds,
        max(0, after.switches - before.switches) / seconds,
        faults / seconds,
        None if moved is None else moved / seconds,
        log,
        after.watchdog,
        after.may_poll,
    )


def interval(before: Look, after: Look) -> Interval:
    """What happened between two looks."""
    seconds = max(0.001, after.at - before.at)
    if not after.ranks and not (set(before.nodes) & after.errors.keys()):
        return Interval(seconds, 0, (), gone=True)
    return Interval(seconds, len(after.ranks), signs(before, after, seconds))


def signs(before: Look, after: Look, seconds: float) -> tuple[Sign, ...]:
    """What each witness says of the time between two looks."""
    fresh = [key for key in after.ranks if key not in before.ranks and key.node in before.nodes]
    steps: list[_RankStep] = []
    changed = len(fresh)
    for key, current in after.ranks.items():
        if key in before.ranks:
            step = _step(before.ranks[key], current, seconds)
            if step is None:
                changed += 1
            else:
                steps.append(step)
    signs = []
    if changed:
        signs.append(
            Sign("processes", True, f"processes of {counted(changed, 'rank')} came or went")
        )
    if steps:
        signs += [_cpu(steps), _switches(steps), _bytes(steps), _log(steps)]
        if any(step.watchdog for step in steps):
            signs.append(Sign("watchdog", False, "its log has a timeout of PyTorch's watchdog"))
    signs.append(_ports(before, after, seconds))
    return tuple(signs)


def _most_common(steps: Iterable[_RankStep], value: str) -> _RankStep:
    return max(steps, key=lambda step: getattr(step, value) or 0)


def _cpu(steps: Sequence[_RankStep]) -> Sign:
    computing = [step for step in steps if step.computes]
    busiest = _most_common(computing or steps, "cpu")
    words = f"{busiest.rank} takes {100 * busiest.cpu:.0f} % of a core"
    if computing:
        return Sign("cpu", True, words)
    if busiest.cpu < RESTS:
        return Sign("cpu", False, "no CPU time")
    return Sign("cpu", None, f"{words} and does nothing else: it may poll")


def _switches(steps: Sequence[_RankStep]) -> Sign:
    working = [step for step in steps if step.works]
    if working:
        busiest = _most_common(working, "main_cpu")
        return Sign(
            "switches", True, f"the main thread of {busiest.rank} works and waits by turns"
        )
    busy = [step for step in steps if step.switches > LOOKS_AROUND]
    if not busy:
        return Sign("switches", False, "the main threads only wait")
    busiest = _most_common(busy, "switches")
    return Sign(
        "switches",
        None,
        f"the main thread of {busiest.rank} looks around {busiest.switches:.0f} times a second",
    )


def _bytes(steps: Sequence[_RankStep]) -> Sign:
    measured = [step for step in steps if step.bytes is not None]
    if not measured:
        return Sign("bytes", None, "nobody may see what the ranks read and write")
    busiest = _most_common(measured, "bytes")
    rate = busiest.bytes or 0
    words = f"{busiest.rank} reads and writes {rate / 1024:.0f} KiB a second"
    if rate >= BYTES_MOVE:
        return Sign("bytes", True, words)
    if rate <= BYTES_REST and len(measured) == len(steps):
        return Sign("bytes", False, "the ranks read and write nothing")
    return Sign("bytes", None, words)


def _log(steps: Sequence[_RankStep]) -> Sign:
    measured = [step for step in steps if step.log is not None]
    if not measured:
        return Sign("log", None, "the ranks write into no file")
    grows = next((step for step in measured if step.log), None)
    if grows is None:
        return Sign("log", False, "no log grows")
    if any(step.watchdog for step in steps):
        # What grows may be the watchdog's own words.
        return Sign("log", None, "a log grows, with a timeout in it")
    return Sign("log", True, f"the log of {grows.rank} grows")


def _ports(before: Look, after: Look, seconds: float) -> Sign:
    nodes = after.nodes
    if len(nodes) < 2:
        return Sign("ports", None, "the job is on one node")
    rates = []
    for name in nodes:
        old, new = before.ports.get(name), after.ports.get(name)
        if old is None or new is None:
            return Sign("ports", None, f"{name} does not tell its ports")
        counters = ((old.network, new.network), (old.rdma, new.rdma))
        known = [max(0, b - a) / seconds for a, b in counters if a is not None and b is not None]
        if not known:
            return Sign("ports", None, f"{name} does not tell its ports")
        rates.append((max(known), name))
    rate, name = max(rates)
    words = f"{rate / 1e6:.1f} MB a second through the ports of {name}"
    if rate >= PORTS_MOVE:
        return Sign("ports", True, words)
    return Sign("ports", False if rate <= PORTS_REST else None, words)


# --- The judgement.


@dataclass(frozen=True)
class Judgement:
    """What all intervals say together.

    kind:    "new": there is no interval yet; "moves", "still", "unclear"; "gone": the job is over
    still_s: for how many seconds nothing has moved
    fire:    take an incident now
    armed:   the next hang is a new one
    """

    kind: str
    still_s: float = 0.0
    fire: bool = False
    armed: bool = True


def judge(intervals: Sequence[Interval], confirm_s: float, armed: bool = True) -> Judgement:
    """What to do after these intervals, the oldest first.

    confirm_s: seconds for which nothing must have moved
    armed:     False: an incident of this hang was taken already; a job that moves arms again
    """
    if not intervals:
        return Judgement("new", armed=armed)
    last = intervals[-1].kind
    if last == "gone":
        looks = 0
        for interval in reversed(intervals):
            if interval.kind != "gone":
                break
            looks += 1
        return Judgement("gone" if looks >= GONE_LOOKS else "unclear", armed=armed)
    if last == "moves":
        return Judgement("moves")
    still_s = 0.0
    for interval in reversed(intervals):
        if interval.kind != "still":
            break
        still_s += interval.seconds
    # A tick of the clock less, because looks are never exactly so far apart.
    fire = armed and last == "still" and still_s >= confirm_s - 0.5
    return Judgement(last, still_s, fire, armed and not fire)


class Watch:
    """The looks so far, as far as they count; see `add`."""

    def __init__(self, confirm_s: float) -> None:
        self.confirm_s = confirm_s
        self.look: Look | None = None
        self.intervals: list[Interval] = []
        self.judgement = Judgement("new")

    def add(self, look: Look) -> Judgement:
        """The judgement with one more look."""
        if self.look is not None:
            self.intervals.append(interval(self.look, look))
        if self.look is None or look.ranks or self.intervals[-1].gone:
            self.look = look
        count, seconds = 0, 0.0
        for one in reversed(self.intervals):
            count, seconds = count + 1, seconds + one.seconds
            if seconds > self.confirm_s + one.seconds and count >= GONE_LOOKS:
                break
        del self.intervals[:-count]
        self.judgement = judge(self.intervals, self.confirm_s, self.judgement.armed)
        return self.judgement

    @property
    def words(self) -> str:
        """What is seen, in one line; it changes when things change."""
        look, judgement = self.look, self.judgement
        if look is None or judgement.kind == "gone":
            return "the job has ended"
        ranks = (
            f"{counted(len(look.ranks), 'rank')} on {folded(look.nodes)}"
            if look.ranks
            else ("no rank")
        )
        lost = f"; no answer of {folded(look.errors)}" if look.errors else ""
        if judgement.kind == "new":
            return f"{ranks}{lost}"
        signs = self.intervals[-1].signs
        if judgement.kind == "moves":
            return f"moves: {ranks}: {_because(signs, True)}{lost}"
        if judgement.kind == "still":
            return f"does not move: {ranks}: {_because(signs, False)}{lost}"
        return f"cannot be told to move: {ranks}{lost}"


def _because(signs: Iterable[Sign], moves: bool) -> str:
    return "; ".join(sanitise(sign.text, 100) for sign in signs if sign.moves is moves)


# --- Asking.

#: Seconds for one node's look.
LIMIT_S = 20


def take(ask: Asks, nodes: Iterable[str], config: motion.MotionConfig, at: float) -> Look:
    """One look at these nodes.

    config: its nonce is set here; at: of this machine's monotonic clock
    """
    names = list(nodes)
    with_nonce = motion.MotionConfig(**{**vars(config), "nonce": new_nonce()})
    answers = ask("watch", {name: request(name, motion.__name__, with_nonce) for name in names})
    ranks: dict[RankKey, Motion] = {}
    ports: dict[str, PortBytes] = {}
    errors: dict[str, str] = {}
    unreached, interrupted = set(), False
    for name, answer in answers.items():
        if answer.kind == INTERRUPTED:
            interrupted = True
            continue
        refused: list[str] = []
        try:
            received = rows(answer, with_nonce, motion.kinds(), refused)
        except ProbeError as problem:
            errors[name] = problem.reason
            continue
        ends = [row for row in received if isinstance(row, MotionEnd)]
        if not ends:
            errors[name] = (
                refused[0]
                if refused
                else no_answer_reason(answer, with_nonce, "the job cannot be watched there")
            )
            if answer.kind in UNREACHED:
                unreached.add(name)
            continue
        if ends[0].error or refused:
            errors[name] = ends[0].error or refused[0]
        for row in received:
            if isinstance(row, Motion):
                ranks[RankKey(name, row.pid, row.start)] = row
            elif isinstance(row, PortBytes):
                ports[name] = row
    return Look(at, ranks, ports, errors, frozenset(unreached), interrupted)

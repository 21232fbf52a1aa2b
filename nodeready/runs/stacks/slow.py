"""The rank that its peers wait for in a job that makes steps: how often each rank waits. Pure.

In a job with one rank f times slower than its peers, the peers wait (f - 1) / f of the time longer
than that rank. So the parts of the time are compared, and no clocks of different nodes. A rank
must wait less than its peers in nearly every twelfth of the time and in each third: passing
slowness, and steps of random lengths, name no rank.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from nodeready.agent.stacks.glances import RUNS, UNREADABLE, NodeGlances, RankGlances
from nodeready.core import wire
from nodeready.core.text import counted
from nodeready.runs.stacks import causes, classify, hints
from nodeready.runs.stacks.document import Group, RankPace, Statement, Suspect, Verdict, say
from nodeready.runs.stacks.evidence import WitnessReport, ranks_of
from nodeready.runs.stacks.trace import Trace, TracedProcess

#: The number of blocks into which the time is divided.
_BLOCKS = 12
#: Minimum part of the time that the peers of a slow rank wait longer than it, and minimum factor
#: of its work: 1.2 times leaves at most 0.17, because data takes time to move.
_MIN_LAG, _MIN_FACTOR = 0.08, 1.1
#: Maximum factor that glances can tell.
_MAX_FACTOR = 20
#: Minimum of the mean over its standard error in the blocks: Student's t of 11 degrees of freedom
#: is above 4.5 once in 2,000.
_MIN_T = 4.5
#: Minimum steps, by the peers' waits: the slowest of 8 by chance in 5 of 5 steps is one of 4,096.
_MIN_STEPS = 5
#: Minimum glances; without them the stacks themselves are counted.
_MIN_GLANCES = 100
#: Minimum part of the time in which a rank's data is on its way, and times that of each peer.
_MIN_SENDING, _TIMES = 0.1, 2.0
#: Minimum faults a second more than the peers.
_MIN_FAULTS = 20
#: A counter of a node, its minimum difference from the median of its peers, and the sentence.
_NODE_CAUSES = (
    ("steal", 0.05, "a hypervisor takes {:.0%} of its node's CPU time"),
    ("memory_stall", 0.1, "its node is short of memory for {:.0%} of the time"),
    ("retransmits", 0.01, "its node sends {:.1%} of its TCP segments again"),
    ("frequency", 0.1, "the CPUs of its node run at {:.0%} of their clock, its peers' at {:.0%}"),
)
#: Minimum part of the waits in the GPU's calls from which stacks cannot tell ranks apart.
_ASYNCHRONOUS = 0.5
#: System calls that may wait for other ranks.
_WAITS = frozenset({"futex", "select", "poll", "epoll"})
#: How many of a rank's own stacks the stacks of all ranks in the same system call outweigh.
_PRIOR = 3
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, eq=False)
class Pace:
    """What was seen of one rank."""

    rank: int
    node: str
    role: str  # ranks of one program are compared
    waits: tuple[float, ...]  # by block: the part of the time in which it waits for ranks
    steps: int  # minimum number of steps
    looks: int  # stacks
    waiting_looks: int
    gpu_looks: int = 0  # of these, waits for its GPU
    in_pipeline: bool = False
    # its places outside waits for ranks, the most frequent first, with the number of looks
    work: tuple[tuple[str, int], ...] = ()
    # of these, with a system call on an object: `read of /data/shard-3 (nfs4)`
    calls: tuple[tuple[str, str], ...] = ()
    # part of the time in calls that may wait for ranks, and that no look has met
    unknown: float = 0.0
    glances: RankGlances | None = None

    @property
    def share(self) -> float:
        return fmean(self.waits)

    def part(self, name: str) -> float:
        """A counter in seconds as a part of the time."""
        glances = self.glances
        return float(getattr(glances, name)) / glances.seconds if glances else 0.0


# --- What the traces tell about each rank.


class _StackLook(NamedTuple):
    """One stack of a rank."""

    place: str  # of the glances before and after it; "": the rank moved
    waits: bool
    activity: str
    work: str  # "": it waits
    in_pipeline: bool


class _GlanceRow(NamedTuple):
    role: str  # as of a `Pace`
    glances: RankGlances
    looks: list[_StackLook]

    def verb(self, place: str) -> str:
        """The shown name of the system call at a place."""
        phrase = dict(self.glances.phrases).get(place, "")
        return RUNS if place == RUNS else phrase.partition(" ")[0]


class PaceReader:
    """Reads the glances and stacks of each trace, and keeps what tells how often a rank waits."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], _GlanceRow] = {}
        self.nodes: dict[str, NodeGlances] = {}

    def read(self, trace: Trace, numbers: Sequence[int], table: classify.StackNumbers) -> None:
        """Keep the ranks of one trace; invalid glances are no glances."""
        try:
            if "glances" in trace.witnesses:
                self.nodes[trace.node] = wire.decode(NodeGlances, trace.witnesses["glances"])
            for process in trace.processes:
                if "glances" in process.witnesses:
                    glances = wire.decode(RankGlances, process.witnesses["glances"])
                    looks = list(_looks(process, glances, numbers, table))
                    role = _DIGITS.sub("N", process.command)
                    self._rows[trace.node, process.pid] = _GlanceRow(role, glances, looks)
        except wire.DecodeError:
            return

    def paces(self, buckets: Iterable[Any], links: classify.Links) -> list[Pace]:
        """The ranks of a job. buckets: as of `nodeready.runs.stacks.group`"""
        ranks = {
            (process.node, process.pid): process.rank
            for bucket in buckets for process in bucket.processes
            if process.rank is not None
        }  # fmt: skip

        def is_rank(node: str, end: str) -> bool:
            return links.owner(node, end.removeprefix("may ")) in ranks

        rows = [(ranks[key], key[0], row) for key, row in self._rows.items() if key in ranks]
        usual: dict[str, list[bool]] = defaultdict(list)
        for _, _, row in rows:
            for look in row.looks:
                usual[row.verb(look.place)].append(look.waits)
        return [_pace(rank, node, row, is_rank, usual) for rank, node, row in rows]


def _looks(
    process: TracedProcess, glances: RankGlances, numbers: Sequence[int],
    table: classify.StackNumbers,
) -> Iterable[_StackLook]:  # fmt: skip
    for sample, place in zip(process.samples, glances.stack_places, strict=False):
        stack = classify.main_stack(replace(process, samples=(sample,)), numbers, table)
        if stack is not None:
            frames = table.calls(stack)
            hint = hints.find(frames)
            waits, activity = table.reading(stack).for_ranks, hint.activity if hint else ""
            # The sentence of a group that works there.
            frame = hints.user_frame(frames)
            group = Group("stack", None, (0,), (), frames, user_frame=frame, activity=activity)
            work = causes.cause_of(group).action
            yield _StackLook(place, waits, activity, work, hints.in_pipeline(frames))


def _pace(
    rank: int, node: str, row: _GlanceRow, is_rank: Callable[[str, str], bool],
    usual: Mapping[str, Sequence[bool]],
) -> Pace:  # fmt: skip
    """The pace of one rank. is_rank: whether an end that it waits for, on its node, is a rank's.
    usual: system call -> whether ranks waited for ranks there, by all stacks
    """
    glances, looks = row.glances, row.looks
    votes: dict[str, list[bool]] = defaultdict(list)
    for look in looks:
        votes[look.place].append(look.waits)
    # Python's own calls of sockets have no frame that tells what they wait for.
    ends = dict(glances.ends)
    certain = {place for place, end in glances.ends if is_rank(node, end)}
    unknown: set[str] = set()
    waiting = [look.waits or look.place in certain for look in looks]
    # Few stacks meet a rare place, so those of its peers in the same call count, too.
    parts: dict[str, float] = {}
    for place in {*glances.places} - {UNREADABLE}:
        own_votes, peer_votes = votes.get(place, []), usual.get(row.verb(place), ())
        prior = fmean(peer_votes) if peer_votes else 0.0
        parts[place] = (sum(own_votes) + _PRIOR * prior) / (len(own_votes) + _PRIOR)
        if place in certain:
            parts[place] = 1.0
        is_known = place in ends if row.verb(place) != "futex" else own_votes
        if not (parts[place] or is_known) and row.verb(place) in _WAITS:
            unknown.add(place)
    series = [parts[place] for place in glances.places if place in parts]
    if len(series) < _MIN_GLANCES:
        series = list(map(float, waiting)) or [0.0]
    mean = fmean(series)
    ended_waits = sum(before <= mean < after for before, after in itertools.pairwise(series))
    # Where the work is too short for a glance, the data of a step is seen.
    sent = sum(before < after for before, after in itertools.pairwise(glances.sent))
    objects = {place: phrase for place, phrase in glances.phrases if " of " in phrase}
    calls = {look.work: objects[look.place] for look in looks if look.place in objects}
    work = Counter(look.work for look, waits in zip(looks, waiting, strict=True) if not waits)
    return Pace(
        rank, node, row.role, _blocks(series), max(ended_waits, sent), len(looks), sum(waiting),
        sum(look.waits and look.activity == "gpu" for look in looks),
        any(look.in_pipeline for look in looks),
        tuple(work.most_common()),
        tuple(calls.items()),
        sum(place in unknown for place in glances.places) / max(1, len(series)),
        glances,
    )  # fmt: skip


def _blocks(values: Sequence[float]) -> tuple[float, ...]:
    """The mean of each twelfth of the values."""
    count = min(_BLOCKS, len(values))
    cuts = [len(values) * at // count for at in range(count + 1)]
    return tuple(fmean(values[low:end]) for low, end in itertools.pairwise(cuts))


# --- The verdict.


class _PaceLag(NamedTuple):
    """How much longer the peers of a rank wait than it does."""

    pace: Pace
    peers: list[Pace]
    blocks: list[float]

    @property
    def mean(self) -> float:
        return fmean(self.blocks)

    @property
    def factor(self) -> float:
        """How many times as long as its peers it works, at most `_MAX_FACTOR`."""
        usual = median(peer.share for peer in self.peers)
        return (1 - self.pace.share) / max(1 / _MAX_FACTOR, 1 - usual)

    @property
    def is_large(self) -> bool:
        return self.mean - self.pace.unknown >= _MIN_LAG and self.factor >= _MIN_FACTOR


def _is_lasting(blocks: Sequence[float]) -> bool:
    """Whether the values are high in each third of the time."""
    size = len(blocks) // 3
    thirds = (blocks[:size], blocks[size:-size], blocks[-size:]) if size else ((0.0,),)
    return min(map(fmean, thirds)) >= fmean(blocks) / 2 > 0


def _is_certain(blocks: Sequence[float]) -> bool:
    """Whether the values are high in each third, and their mean is no chance."""
    error = stdev(blocks) / len(blocks) ** 0.5 if len(blocks) > 1 else 0.0
    return _is_lasting(blocks) and fmean(blocks) >= _MIN_T * error


def _lags(paces: Sequence[Pace]) -> list[_PaceLag]:
    """Each rank that has peers of its program; the largest lag first."""
    by_role: dict[str, list[Pace]] = defaultdict(list)
    for pace in paces:
        by_role[pace.role].append(pace)
    rows = []
    for members in by_role.values():
        for pace in members if len(members) > 1 else ():
            peers = [peer for peer in members if peer is not pace]
            columns = zip(pace.waits, *(peer.waits for peer in peers), strict=False)
            blocks = [median(peer_parts) - part for part, *peer_parts in columns]
            rows.append(_PaceLag(pace, peers, blocks))
    return sorted(rows, key=lambda lag: -lag.mean)


def pace_rows(paces: Sequence[Pace]) -> tuple[RankPace, ...]:
    rows = [
        RankPace(lag.pace.rank, lag.pace.node, lag.pace.looks, lag.pace.waiting_looks,
                 round(100 * lag.pace.share, 1), round(100 * lag.mean, 1), round(lag.factor, 2))
        for lag in _lags(paces)
    ]  # fmt: skip
    return tuple(sorted(rows))


def judge(
    paces: Sequence[Pace], nodes: Mapping[str, NodeGlances], report: WitnessReport
) -> Verdict:
    """The verdict on a job that may be slow. nodes: by name; report: of the witnesses"""
    lags = _lags(paces)
    if not lags:
        return Verdict("unclear", "fewer than two ranks of one program could be looked at")
    if not any(pace.looks for pace in paces):
        return Verdict("unclear", "no stack could be read (is py-spy there?)")
    looks = counted(max(pace.looks for pace in paces), "look")
    seconds = max((pace.glances.seconds for pace in paces if pace.glances), default=0.0)
    span, longer = f"{looks} in {seconds:.0f} s", f"look longer (--slow {10 * round(seconds / 2)})"
    large = [lag for lag in lags if lag.is_large]
    slow = [lag for lag in large if _is_certain(lag.blocks)]
    slow = [lag for lag in slow if lag.mean >= slow[0].mean / 2]
    steps = int(median(pace.steps for pace in paces))
    first = (slow or lags)[0]
    name = ranks_of([first.pace.rank], [first.pace.node])
    rows = [(name.name, row) for name in report.witnesses for row in name.statements]
    evidence = _CauseFinder(nodes, rows)
    waits = sum(pace.waiting_looks for pace in paces)
    missing: tuple[str, ...] = ()
    if large and steps < _MIN_STEPS:
        text = f"{name} waits less than its peers, but only {counted(steps, 'step')} began in "
        text += f"{seconds:.0f} s: {longer}, or without --slow if the job hangs"
    elif slow and any(pace.in_pipeline for pace in paces):
        text = f"the stages of a pipeline are uneven by design; {name} waits least ({span})"
    elif slow:
        return _straggler(slow, evidence, span)
    elif waits and sum(pace.gpu_looks for pace in paces) >= _ASYNCHRONOUS * waits:
        text = f"all ranks wait for their GPUs alike: stacks cannot tell who is slow ({span})"
        missing = ("durations: TORCH_NCCL_ENABLE_TIMING=1 and --dump, or NCCL's Inspector",)
        signs = (f"{name}: {row.text}" for name, row in evidence.statements if row.weight)
        text = "; ".join([text, *itertools.islice(signs, 1)])
    elif len(senders := _slow_senders(paces)) == 1:
        peers = [pace for pace in paces if pace is not senders[0]]
        return _network(senders[0], peers, evidence, span)
    elif senders:
        ranks = ranks_of([pace.rank for pace in senders], [pace.node for pace in senders])
        text = f"all ranks wait alike, and data of {ranks} is long on its way: look at the network"
    elif large and _is_lasting(first.blocks):
        text = f"{name} waits less than its peers, but the steps differ too much: {longer}"
    else:
        passing = f"; {name} was slow for a part of the time only" if large else ""
        return Verdict("even", f"no rank is waited for more than its peers ({span}){passing}")
    return Verdict("unclear", text, (), missing)


def _straggler(slow: Sequence[_PaceLag], evidence: _CauseFinder, span: str) -> Verdict:
    suspects = []
    for lag in slow:
        pace, usual = lag.pace, median(peer.share for peer in lag.peers)
        share = f"waits {pace.share:.0%} of the time, its peers {usual:.0%}"
        causes_found = evidence.causes(pace, lag.peers, lag.mean)
        suspects.append(Suspect((pace.rank,), (pace.node,), (share, *causes_found), ()))
    share, *likely = suspects[0].for_
    ranks = ranks_of([lag.pace.rank for lag in slow], [lag.pace.node for lag in slow])
    first = f"rank {slow[0].pace.rank}" if slow[1:] else "it"
    text = say(
        "{who} {is|are} the {rank|ranks} that {its|their} peers wait for: {first} {share}, and "
        "its work takes {factor} times as long{likely} ({span})",
        len(slow), who=ranks, first=first, share=share, factor=f"{slow[0].factor:.1f}",
        likely=f"; likely: {likely[0]}" if likely else "", span=span,
    )  # fmt: skip
    return Verdict("straggler", text, tuple(suspects))


class _CauseFinder(NamedTuple):
    """What may have made a rank slow."""

    nodes: Mapping[str, NodeGlances]
    statements: Sequence[tuple[str, Statement]]  # of the witnesses, with their names

    def causes(self, pace: Pace, peers: Sequence[Pace], lag: float) -> list[str]:
        """Why a rank may be slow, the likeliest first. lag: see `_PaceLag.mean`"""
        names = "throttled_s", "queued_s", "faults"
        excess = {n: pace.part(n) - median(peer.part(n) for peer in peers) for n in names}
        texts = []
        if excess["throttled_s"] >= lag / 3:
            part = pace.part("throttled_s")
            texts += [f"its cgroup has too little CPU time (cpu.max): throttled for {part:.0%} of "
                      "the time"]  # fmt: skip
        texts += self.signs(pace, peers)
        if excess["queued_s"] >= lag / 2:
            text = f"it had no CPU for {pace.part('queued_s'):.0%} of the time although it was "
            node = self.nodes.get(pace.node)
            culprit = f"; {node.stranger} takes {node.stranger_cpus:.1f} CPUs" if node else ""
            texts += [f"{text}ready to run{culprit if node and node.stranger else ''}"]
        if excess["faults"] >= _MIN_FAULTS:
            faults = f"{pace.part('faults'):.0f} page faults a second"
            texts += [f"its memory comes from a disk: {faults}"]
        texts += self.of_node(pace)
        habits = Counter[str]()
        for peer in peers:
            habits.update(dict(peer.work))
        # Its places with more looks than its peers have on average.
        surplus = {text: count - habits[text] / len(peers) for text, count in pace.work}
        if surplus:
            place = max(surplus, key=lambda text: surplus[text])
            call = dict(pace.calls).get(place)
            texts += [f"it {place}" + (f", in {call}" if call else "")]
        cpu, usual = pace.part("cpu_s"), median(peer.part("cpu_s") for peer in peers)
        return [*texts, f"CPU: used {cpu:.0%} of a core, its peers {usual:.0%}"]

    def signs(self, pace: Pace, peers: Sequence[Pace]) -> list[str]:
        """The statements about a rank, or about its node but not all nodes."""
        nodes = {peer.node for peer in peers} - {pace.node}
        return [
            f"{name}: {row.text}"
            for name, row in self.statements
            if row.weight and not row.against and name != "environment"
            and (row.ranks == (pace.rank,) or (pace.node in row.nodes and nodes - {*row.nodes}))
        ]  # fmt: skip

    def of_node(self, pace: Pace) -> list[str]:
        """The counters in which a rank's node is worse than its peers, in sentences."""
        node = self.nodes.get(pace.node)
        other_nodes = [row for name, row in self.nodes.items() if name != pace.node]
        texts = []
        for name, least, text in _NODE_CAUSES if node and other_nodes else ():
            value, usual = getattr(node, name), median(getattr(row, name) for row in other_nodes)
            is_worse = value < usual - least if name == "frequency" else value > usual + least
            if is_worse and (value or name != "frequency"):
                texts.append(text.format(value, usual))
        return texts


# --- A rank whose data leaves slowly: all ranks wait, this one too.


def _sending(pace: Pace) -> tuple[float, ...]:
    """By block: the part of the time in which a rank's data was on its way."""
    marks = pace.glances.unsent if pace.glances else ""
    return _blocks([float(mark == "1") for mark in marks]) if marks else ()


def _slow_senders(paces: Sequence[Pace]) -> list[Pace]:
    """The ranks whose data is long on its way, and that send no more than their peers; the
    slowest first, alone if its data is on its way twice as long as that of each peer.
    """
    blocks = {pace: parts for pace in paces if (parts := _sending(pace))}
    if len(blocks) < 3:
        return []
    usual, sent = median(map(fmean, blocks.values())), median(map(_sent, blocks))
    least = max(_MIN_SENDING, _TIMES * usual)
    certain = [p for p, parts in blocks.items() if fmean(parts) >= least and _is_certain(parts)]
    senders = [pace for pace in certain if _sent(pace) <= _TIMES * sent]
    senders.sort(key=lambda pace: -sum(blocks[pace]))
    is_single = senders[1:] and sum(blocks[senders[0]]) >= _TIMES * sum(blocks[senders[1]])
    return senders[:1] if is_single else senders


def _sent(pace: Pace) -> int:
    """The bytes that a rank's connections have delivered."""
    return pace.glances.sent[-1] - pace.glances.sent[0] if pace.glances else 0


def _network(pace: Pace, peers: Sequence[Pace], evidence: _CauseFinder, span: str) -> Verdict:
    waits, usual = fmean(_sending(pace)), median(fmean(_sending(peer) or [0]) for peer in peers)
    share = f"its data was on its way for {waits:.0%} of the time, its peers' for {usual:.0%}"
    likely = [*evidence.signs(pace, peers), *evidence.of_node(pace)]
    text = f"{ranks_of([pace.rank], [pace.node])} is the rank that its peers wait for: {share}; "
    text += f"likely: {(*likely, 'its network')[0]} ({span})"
    return Verdict("straggler", text, (Suspect((pace.rank,), (pace.node,), (share, *likely), ()),))

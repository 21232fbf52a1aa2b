"""The tests of a search, their trials and retrials, and what they show so far. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeVar

from nodeready.agent.smoke.orders import RankNetwork
from nodeready.core.json_types import Count, Name
from nodeready.runs.ready import mesh

NODE, GPU, PAIR, SCALE = KINDS = ("node", "gpu", "pair", "scale")

ALONE, GROUP, HALF, CONFIRM = "alone", "group", "half", "confirm"  # the purposes of a test
MERGE, SWEEP, CONTROL = "merge", "sweep", "control"


@dataclass(frozen=True)
class Test:
    """One test. Tests of one round share no node. In a sweep a node may be in two tests of a
    round: once as the source and once as the target.
    """

    number: int  # unique in the run
    purpose: str  # one of ALONE … CONTROL
    nodes: tuple[str, ...]  # in the order of their ranks; of a sweep (source, target)
    # (node, numbers of its GPUs that take part); of other nodes, all GPUs of the run
    gpus: tuple[tuple[str, tuple[int, ...]], ...] = ()

    __test__ = False  # not a test of pytest's


@dataclass(frozen=True)
class SmokeOutcome:
    ok: bool  # every rank ended with the right results
    cause: str = ""  # why the test failed, in words that two tests of the same fault share
    ms: float = 0.0  # the slowest rank's; 0: unknown
    gbps: float = 0.0  # likewise
    lost: tuple[str, ...] = ()  # nodes whose connection ended: they are not tested again
    # nodes that another user keeps from the test: not tested again, not suspected
    barred: tuple[str, ...] = ()
    # nodes that report an own fault (a rank that died at start, a wrong sum, a missing GPU): the
    # search begins with them, and tests each of them
    culprits: tuple[str, ...] = ()
    retransmits: int = 0  # TCP segments that the source of a sweep sent again; 0: none, or unknown
    # (node, the network that its ranks used), where it is known
    networks: tuple[tuple[str, RankNetwork], ...] = ()


class Trial(NamedTuple):
    test: Test
    outcome: SmokeOutcome

    def peers_of(self, node: str) -> str:
        """The node's peers in this test, in words, with the number and the cause."""
        peers = [name for name in self.test.nodes if name != node]
        return f"{join_names(peers)} {cite([self.test])}{with_cause(self.outcome.cause)}"


@dataclass(frozen=True)
class SmokeSuspect:
    """A cause of failed tests."""

    # ``node``; ``gpu``: a GPU of a node; ``pair``: two nodes that pass with other nodes and fail
    # together; ``scale``: nodes that fail together, and no node is the cause
    kind: Annotated[str, {"enum": KINDS}]
    # in the inventory's order. Of kind scale: those of the smallest test that failed
    nodes: tuple[Name, ...]
    gpus: tuple[Count, ...]  # of kind gpu, the GPU's number on its node
    # a sentence for each piece, the strongest first, test numbers in brackets
    evidence: tuple[str, ...]

    @property
    def blamed(self) -> tuple[str, ...]:
        """Its nodes; of kind scale none: each of them passes among fewer."""
        return () if self.kind == SCALE else self.nodes

    def explains(self, test: Test) -> bool:
        """Whether this suspect is a reason for the failure of this test."""
        present = {*test.nodes}.intersection(self.nodes)
        if self.kind == PAIR:
            return len(present) == 2
        if self.kind == SCALE:
            return len(present) == len(test.nodes)
        return bool(present)


@dataclass(frozen=True)
class SearchResult:
    suspects: tuple[SmokeSuspect, ...]  # in the order of the inventory
    # nodes that passed with other nodes (or alone, where there is one node)
    passed: tuple[str, ...]
    tests: int  # collective tests of several nodes
    rounds: int  # rounds of all kinds
    untested: tuple[str, ...] = ()  # nodes without a result


def join_names(nodes: Sequence[str], limit: int = 4) -> str:
    """Nodes in a sentence.

    >>> join_names(["a", "b", "c"])
    'a, b and c'
    >>> join_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    if len(nodes) > limit:
        return f"{', '.join(nodes[: limit - 1])} and {len(nodes) - limit + 1} more"
    return " and ".join(filter(None, (", ".join(nodes[:-1]), *nodes[-1:])))


def cite(tests: Iterable[Test]) -> str:
    """The numbers of tests in a sentence, such as ``[3, 5 and 8]``."""
    numbers = sorted({test.number for test in tests})
    return f"[{join_names([str(number) for number in numbers], 12)}]"


def with_cause(cause: str) -> str:
    """The end of a sentence that names the cause."""
    return f": {cause}" if cause else ""


class Knowledge:
    """The results of a search so far; consistent at any moment, so that the search can be stopped.

    positions:   node -> its position in the inventory
    finished:    the tests with their outcomes
    doubts:      node that is suspected and not confirmed yet -> the reason
    lost:        nodes that are not tested again: their connection ended, or another user bars them
    is_complete: the search has ended by itself
    """

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}
        self.finished: list[Trial] = []
        self.rounds = 0
        self.suspects: list[SmokeSuspect] = []
        self.doubts: dict[str, str] = {}
        self.lost: set[str] = set()
        self.is_complete = False

    def sorted(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """These nodes in the inventory's order."""
        return tuple(sorted({*nodes}, key=self.positions.__getitem__))

    def collectives(self) -> list[Trial]:
        """The finished tests of several nodes, without the sweep."""
        return [t for t in self.finished if len(t.test.nodes) > 1 and t.test.purpose != SWEEP]

    def suspect(
        self, kind: str, nodes: Collection[str], *evidence: str, gpus: Sequence[int] = ()
    ) -> None:
        """Add a suspect, unless an earlier one explains it."""
        members = {*nodes}
        excluded = self.excluded()
        if kind != GPU and members <= excluded:
            return
        pairs = [suspect for suspect in self.suspects if suspect.kind == PAIR]
        is_known = any({*pair.nodes} == members for pair in pairs)
        if kind == PAIR and (is_known or members & excluded):
            return
        if kind == NODE:
            # A node that fails with all nodes explains its pairs.
            self.remove(pair for pair in pairs if members & {*pair.nodes})
        self.suspects.append(SmokeSuspect(kind, self.sorted(nodes), tuple(sorted(gpus)), evidence))
        for name in nodes:
            self.doubts.pop(name, None)

    def remove(self, suspects: Iterable[SmokeSuspect]) -> None:
        """Remove these suspects: the evidence has another cause."""
        removed = [*suspects]
        self.suspects = [suspect for suspect in self.suspects if suspect not in removed]

    def excluded(self) -> set[str]:
        """The nodes that are not tested again."""
        return {name for s in self.suspects if s.kind in (NODE, GPU) for name in s.nodes}

    def partners(self, name: str) -> set[str]:
        """The nodes that fail as a pair with this node."""
        pairs = (s.nodes for s in self.suspects if s.kind == PAIR and name in s.nodes)
        return {partner for pair in pairs for partner in pair if partner != name}

    def _unexplained(self) -> list[SmokeSuspect]:
        """A suspect of kind scale for the unexplained failures that share nodes: the smallest."""
        groups: list[tuple[set[str], list[Test], tuple[tuple[str, ...], str]]] = []
        failed = [
            (test, outcome.cause)
            for test, outcome in self.finished
            if not outcome.ok and not any(suspect.explains(test) for suspect in self.suspects)
        ]
        for test, cause in sorted(failed, key=lambda failure: len(failure[0].nodes)):
            nodes, tests, smallest = {*test.nodes}, [test], (test.nodes, cause)
            for group in [group for group in groups if group[0] & nodes][::-1]:
                groups.remove(group)
                nodes, tests, smallest = nodes | group[0], group[1] + tests, group[2]
            groups.append((nodes, tests, smallest))
        state = "could not be pinned down" if self.is_complete else "was not searched to the end"
        suspects = []
        for _, tests, (smallest_nodes, cause) in groups:
            names = self.sorted(smallest_nodes)
            failure = f"what failed {cite(tests)}{with_cause(cause)}, {state}"
            evidence = f"{failure}: among {join_names(names)}"
            suspects.append(SmokeSuspect(SCALE, names, (), (evidence,)))
        return suspects

    def result(self) -> SearchResult:
        doubted = [
            SmokeSuspect(NODE, (name,), (), (f"not confirmed: {reason}",))
            for name, reason in self.doubts.items()
        ]
        excluded = self.excluded()
        is_single = len(self.positions) - len(excluded) == 1
        passed = {
            name
            for test, outcome in self.finished
            if outcome.ok and (len(test.nodes) > 1 or is_single)
            for name in test.nodes
        } - (excluded | self.doubts.keys())
        suspects = [*self.suspects, *doubted, *self._unexplained()]
        covered = passed.union(*(suspect.nodes for suspect in suspects))
        suspects.sort(
            key=lambda s: ([self.positions[n] for n in s.nodes[:1]], KINDS.index(s.kind))
        )
        return SearchResult(
            tuple(suspects),
            self.sorted(passed),
            sum(test.purpose not in (ALONE, SWEEP) for test, _ in self.finished),
            self.rounds,
            self.sorted(self.positions.keys() - covered),
        )


# --- The requests of a search, their trials, and retrials.


T = TypeVar("T")

#: Report a node if all its retrials have at most this fraction of the bandwidth of the good
#: nodes' retrials, and the median at most the second fraction: half of a rate, with some noise. Of
#: 85 runs on 64 nodes that share one machine's memory, two nodes without a fault had at most 0.65
#: and 0.67.
REPORT_SHARE, _MEDIAN_SHARE = 0.7, 0.58
_CLEAR_SHARE = 0.4  # below this fraction, which is no noise, fewer retrials suffice
#: Report a latency only if it is this number of milliseconds above that of the good nodes.
NOISE_MS = 5.0
_FEW_RETRIALS, _RETRIALS = 3, 6  # retrials if the result is clear, and in general


@dataclass(frozen=True)
class TrialRequest:
    purpose: str
    nodes: tuple[str, ...]
    # the number of good nodes to add; as many as needed for two nodes in any case
    fillers: int = 0
    avoid: frozenset[str] = frozenset()  # nodes that must not be fillers
    gpus: tuple[int, ...] = ()  # the GPUs of the first node that take part; (): all


#: The trials of the requests; None: a node of the test is lost, or no filler remains.
Trials = list["Trial | None"]
Steps = Generator["list[TrialRequest]", Trials, T]
#: The search for one fault. Returns the hunts that continue it.
Hunt = Generator["list[TrialRequest]", Trials, "list[Hunt]"]


def is_failed(trial: Trial | None) -> bool:
    return trial is not None and not trial.outcome.ok


def cite_trials(trials: Iterable[Trial]) -> str:
    return cite(trial.test for trial in trials)


def take_turns(
    suspects: Sequence[tuple[str, ...]],
    good_nodes: tuple[str, ...],
    purpose: str,
    goes_on: Callable[[list[Trial], list[Trial]], bool],
) -> Steps[tuple[list[Trial], list[Trial]]]:
    """Test the suspect (in each of ``suspects`` beside another node) and good nodes in turns, with
    no other test beside them. Returns the trials of both; none if a node is lost.

    goes_on: whether there is another turn after these trials
    """
    suspected: list[Trial] = []
    good: list[Trial] = []
    control = TrialRequest(SWEEP if purpose == SWEEP else CONTROL, good_nodes)
    while not good or goes_on(suspected, good):
        request = TrialRequest(purpose, suspects[len(good) % len(suspects)])
        for turn, trials in ((request, suspected), (control, good)):
            (trial,) = yield [turn]
            if trial is None:
                return [], []
            trials.append(trial)
    return suspected, good


def retry_alternately(
    suspects: Sequence[tuple[str, ...]],
    good_nodes: tuple[str, ...],
    purpose: str,
    is_flaky: bool = False,
) -> Steps[str]:
    """The evidence of `take_turns` that the suspect is slow, or fails now and then; or ""."""

    def goes_on(suspected: list[Trial], good: list[Trial]) -> bool:
        if any(map(is_failed, good)):
            return False
        if not (is_flaky or slow_reason(suspected, good, REPORT_SHARE)):
            return False
        is_clear = len(good) == _FEW_RETRIALS and slow_reason(suspected, good, _CLEAR_SHARE)
        return not is_clear and len(good) < _RETRIALS

    suspected, good = yield from take_turns(suspects, good_nodes, purpose, goes_on)
    if not good or any(map(is_failed, good)):
        return ""
    failed = [trial for trial in suspected if is_failed(trial)]
    evidence = slow_reason(suspected, good, REPORT_SHARE)
    # A flaky suspect has to fail with each of its partners: else the partner may be the cause.
    if not evidence and len({trial.test.nodes for trial in failed}) == len(suspects) > 1:
        return (
            f"fails now and then, {len(failed)} of {len(suspected)} times "
            f"{cite_trials(failed)}{with_cause(failed[0].outcome.cause)}; "
            f"{join_names(good_nodes)} never {cite_trials(good)}"
        )
    return evidence


def slow_reason(suspected: Sequence[Trial], good: Sequence[Trial], share: float) -> str:
    """How much slower than good nodes a suspect always is, or "". share: of their bandwidth"""
    names = set(suspected[0].test.nodes).intersection(*(t.test.nodes for t in suspected))
    partner = "" if len(names) > 1 else " beside good nodes"
    subject = f"{join_names(sorted(names))}{partner}, in turns with "
    subject += f"{join_names(good[0].test.nodes)}:"
    tests = f"{cite_trials(suspected)} against {cite_trials(good)}"
    if not any(trial.outcome.ok for trial in suspected):
        cause = with_cause(suspected[0].outcome.cause)
        return f"{subject} fails each time {tests}{cause}"
    rates = [trial.outcome.gbps if trial.outcome.ok else 0.0 for trial in suspected]
    good_rates = [trial.outcome.gbps for trial in good]
    highest, lowest = max(rates), min(good_rates)
    has_low_median = statistics.median(rates) <= _MEDIAN_SHARE * statistics.median(good_rates)
    if 0 < highest <= share * lowest and has_low_median:
        return f"slow: {subject} at most {highest:.3g} against {lowest:.3g} Gbit/s {tests}"
    shortest = min(t.outcome.ms if t.outcome.ok else math.inf for t in suspected)
    longest = max(trial.outcome.ms for trial in good)
    if longest > 0 and shortest >= max(2.1 / share * longest, longest + NOISE_MS):
        return f"slow: {subject} at least {shortest:.3g} against {longest:.3g} ms {tests}"
    return ""


#: Investigate a test below this fraction of the 75th percentile of the bandwidth, or above this
#: multiple of the 25th percentile of the latency.
_INVESTIGATE_SHARE, _INVESTIGATE_TIMES = 0.55, 4.0


def quartile(values: Iterable[float], quarter: int) -> float:
    """The first or third quartile of the positive values; 0 if there are fewer than two.

    >>> quartile([4, 1, 3, 2], 1), quartile([4, 1, 3, 2], 3)
    (2, 3)
    """
    ordered = sorted(value for value in values if value > 0)
    if len(ordered) < 2:
        return 0.0
    if quarter == 1:
        return ordered[len(ordered) // 4]
    return ordered[math.ceil(0.75 * len(ordered)) - 1]


def looks_slow(outcome: SmokeOutcome, usual_gbps: float, usual_ms: float) -> bool:
    limit_ms = max(_INVESTIGATE_TIMES * usual_ms, usual_ms + NOISE_MS)
    is_late = usual_ms > 0 and outcome.ms > limit_ms
    return outcome.ok and (is_late or 0 < outcome.gbps < _INVESTIGATE_SHARE * usual_gbps)


# --- The groups and the sweep.

_ALL_PAIRS = 64  # up to this number of nodes, a sweep has all pairs


def split_groups(nodes: Sequence[str]) -> list[list[str]]:
    """Groups of about √N neighbours, each of two nodes or more.

    >>> split_groups(["a", "b", "c", "d"])
    [['a', 'b'], ['c', 'd']]
    """
    count = max(1, min(len(nodes) // 2, round(math.sqrt(len(nodes)))))
    ends = [len(nodes) * number // count for number in range(count + 1)]
    return [list(nodes[begin:end]) for begin, end in itertools.pairwise(ends)]


def sweep_offsets(count: int, full: bool) -> list[int]:
    """The offsets of the pairs of each round. full: all; else ring and skips, both ways"""
    if full or count <= _ALL_PAIRS:
        return [*mesh.full(count)]
    return [offset for skip in mesh.ring_and_skips(count) for offset in (skip, count - skip)]

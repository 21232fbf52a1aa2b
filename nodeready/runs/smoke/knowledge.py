"""The tests of a search, their trials and retrials, what they show so far; the sweep. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, TypeVar

from nodeready.agent.smoke.orders import RankNetwork
from nodeready.core.json_types import Count, Name
from nodeready.runs.ready import mesh, reach

NODE, GPU, PAIR, SCALE = KINDS = ("node", "gpu", "pair", "scale")

Purpose = Literal["alone", "group", "half", "confirm", "merge", "sweep", "control"]  # of a test


@dataclass(frozen=True)
class Test:
    """One test. Tests of one round share no node. In a sweep a node may be in two tests of a
    round: once as the source and once as the target.
    """

    number: int  # unique in the run
    purpose: Purpose
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
    barred: tuple[str, ...] = ()  # not tested again, not suspected: another user keeps them out
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
        return len(present) == len(test.nodes) if self.kind == SCALE else bool(present)


@dataclass(frozen=True)
class SearchResult:
    suspects: tuple[SmokeSuspect, ...]  # in the order of the inventory
    passed: tuple[str, ...]  # with other nodes, or alone where there is one node
    tests: int  # collective tests of several nodes
    rounds: int  # rounds of all kinds
    untested: tuple[str, ...] = ()  # nodes without a result


def join_names(items: Iterable[object], limit: int = 4) -> str:
    """Nodes or numbers in a sentence.

    >>> join_names(["a", "b", "c"])
    'a, b and c'
    >>> join_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    names = [*map(str, items)]
    if len(names) > limit:
        names[limit - 1 :] = [f"{len(names) - limit + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def cite(tests: Iterable[Test]) -> str:
    """The numbers of tests in a sentence, such as ``[3, 5 and 8]``."""
    return f"[{join_names(sorted({test.number for test in tests}), 12)}]"


def with_cause(cause: str) -> str:
    """The end of a sentence that names the cause."""
    return f": {cause}" if cause else ""


class Knowledge:
    """The results of a search so far, consistent at any moment: the search can be stopped."""

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}  # node -> its position in the inventory
        self.finished: list[Trial] = []
        self.rounds = 0
        self.suspects: list[SmokeSuspect] = []
        self.doubts: dict[str, str] = {}  # node that is suspected and not confirmed -> the reason
        # Nodes that are not tested again: their connection ended, or another user bars them.
        self.lost: set[str] = set()
        self.is_complete = False  # the search has ended by itself

    def sorted(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """These nodes in the inventory's order."""
        return tuple(sorted({*nodes}, key=self.positions.__getitem__))

    def collectives(self) -> list[Trial]:
        """The finished tests of several nodes, without the sweep."""
        return [t for t in self.finished if len(t.test.nodes) > 1 and t.test.purpose != "sweep"]

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
        tests = [t for t, outcome in self.finished if outcome.ok and (t.nodes[1:] or is_single)]
        passed = {name for test in tests for name in test.nodes} - excluded - self.doubts.keys()
        suspects = [*self.suspects, *doubted, *self._unexplained()]
        covered = passed.union(*(suspect.nodes for suspect in suspects))
        at = self.positions
        suspects.sort(key=lambda s: ([at[n] for n in s.nodes[:1]], KINDS.index(s.kind)))
        return SearchResult(
            tuple(suspects),
            self.sorted(passed),
            sum(test.purpose not in ("alone", "sweep") for test, _ in self.finished),
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
NOISE_MS = 5.0  # minimum milliseconds above the good nodes' latency to report it
_FEW_RETRIALS, _RETRIALS = 3, 6  # retrials if the result is clear, and in general


@dataclass(frozen=True)
class TrialRequest:
    purpose: Purpose
    nodes: tuple[str, ...]
    fillers: int = 0  # good nodes to add; in any case enough for two nodes
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
    purpose: Purpose,
    goes_on: Callable[[list[Trial], list[Trial]], bool],
) -> Steps[tuple[list[Trial], list[Trial]]]:
    """Test the suspect (in each of ``suspects`` beside another node) and good nodes in turns, with
    no other test beside them. Returns the trials of both; none if a node is lost.
    goes_on: whether there is another turn after these trials
    """
    suspected: list[Trial] = []
    good: list[Trial] = []
    control = TrialRequest("sweep" if purpose == "sweep" else "control", good_nodes)
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
    purpose: Purpose,
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
    return ordered[len(ordered) // 4 if quarter == 1 else math.ceil(0.75 * len(ordered)) - 1]


def looks_slow(outcome: SmokeOutcome, usual_gbps: float, usual_ms: float) -> bool:
    limit_ms = max(_INVESTIGATE_TIMES * usual_ms, usual_ms + NOISE_MS)
    is_late = usual_ms > 0 and outcome.ms > limit_ms
    return outcome.ok and (is_late or 0 < outcome.gbps < _INVESTIGATE_SHARE * usual_gbps)


# --- The groups; the sweep: tests of the plain paths between the remaining nodes.

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


#: A node loses packets if its sweeps send at least this number of segments again on average, and
#: at least this multiple of the median node's: with 5 of 100 packets lost, a sweep sends about
#: three again. This number of retrials with good nodes has to confirm it.
_RETRANSMITS, _RETRANSMITS_TIMES, _RETRANSMITS_RETRIALS = 1.0, 5.0, 4
_MAX_SLOW_PAIRS = 16  # maximum slow pairs that are retried

Edge = tuple[str, ...]


def _is_firm(trials: Sequence[Trial]) -> bool:
    return sum(map(is_failed, trials)) > 1


class Sweep:
    def __init__(self, knowledge: Knowledge, nodes: Sequence[str]) -> None:
        self.knowledge, self.nodes = knowledge, nodes

    def run(self, full: bool) -> Steps[None]:
        knowledge = self.knowledge
        pairs = {suspect.nodes for suspect in knowledge.suspects if suspect.kind == PAIR}
        trials: dict[Edge, list[Trial]] = {}
        for edges in mesh.rounds(self.nodes, sweep_offsets(len(self.nodes), full)):
            chosen = (edge for edge in edges if not {edge, edge[::-1]} & pairs)
            requests = [TrialRequest("sweep", edge) for edge in chosen]
            trials |= {trial.test.nodes: [trial] for trial in (yield requests) if trial}
        # A failed path is tried again, and a third time if it then passes.
        for _ in range(2):
            again = [edge for edge, of in trials.items() if is_failed(of[0]) and not _is_firm(of)]
            for trial in (yield [TrialRequest("sweep", edge) for edge in again]):
                if trial:
                    trials[trial.test.nodes].append(trial)
        trials = {edge: of for edge, of in trials.items() if not {*edge} & knowledge.lost}
        if trials and all(map(_is_firm, trials.values())):
            failed = [trial for of in trials.values() for trial in of]
            evidence = "they pass together, and no plain path works between any two of them "
            evidence += f"{cite_trials(failed)}{with_cause(failed[0].outcome.cause)}"
            knowledge.suspect(SCALE, self.nodes, evidence)
            return
        passed_once = [of[0] for of in trials.values() if any(t.outcome.ok for t in of)]
        yield from self._find_packet_loss(passed_once)
        excluded = knowledge.excluded()
        trials = {edge: of for edge, of in trials.items() if not {*edge} & excluded}
        unreached: dict[str, set[str]] = {}
        for finding in reach.attribute(
            reach.ReachAttempt(edge[0], edge[1], "", not _is_firm(of), of[0].outcome.cause)
            for edge, of in trials.items()
        ):
            if finding.kind != reach.PAIR:
                unreached[finding.node] = {*finding.peers}
            self._suspect_finding(finding, trials)
        yield from self._find_slow([of[0] for of in trials.values() if of[0].outcome.ok])
        # A node that failed to reach only faulty nodes is not suspected.
        faulty = knowledge.excluded() - unreached.keys()
        excused = {name for name, peers in unreached.items() if peers <= faulty}
        knowledge.remove(s for s in knowledge.suspects if {*s.nodes} <= excused)

    def _suspect_finding(
        self, finding: reach.ReachFinding, trials: Mapping[Edge, Sequence[Trial]]
    ) -> None:
        node, peers = finding.node, finding.peers
        edges = [edge for peer in peers for edge in ((peer, node), (node, peer))]
        failed = [trial for edge in edges for trial in trials.get(edge, ()) if is_failed(trial)]
        tests, cause = cite_trials(failed), with_cause(finding.cause)
        if finding.kind == reach.PAIR:
            (peer,) = peers
            back = {True: "; the way back works", False: "; nor the way back", None: ""}
            evidence = f"{node} does not reach {peer} {tests}{cause}{back[finding.back]}"
            self.knowledge.suspect(PAIR, (node, peer), evidence)
            return
        verb = {
            reach.TARGET: "is not reached by",
            reach.SOURCE: "does not reach",
            reach.BOTH: "neither reaches nor is reached by",
        }[finding.kind]
        evidence = f"{verb} {len(peers)} of {finding.tried} others: {join_names(peers)}"
        self.knowledge.suspect(NODE, [node], f"{evidence} {tests}{cause}")

    def _find_packet_loss(self, trials: Sequence[Trial]) -> Steps[None]:
        """Suspect nodes that lose packets, on the way from them or to them, by the sender's
        retransmits. Retrials with no other test beside them have to confirm it.
        """
        for place, direction in enumerate(("from", "to")):
            counts = defaultdict[str, list[int]](list)
            for trial in trials:
                counts[trial.test.nodes[place]].append(trial.outcome.retransmits)
            means = {name: statistics.fmean(of) for name, of in counts.items()}
            usual = statistics.median(means.values()) if means else 0.0
            lossy = [
                name
                for name, of in counts.items()
                if means[name] >= max(_RETRANSMITS, _RETRANSMITS_TIMES * usual)
                and 2 * sum(count > 0 for count in of) >= len(of)
            ]
            for name in sorted(lossy, key=lambda name: -means[name]):
                out = {*lossy} | self.knowledge.excluded() | self.knowledge.partners(name)
                peers = [peer for peer in counts if peer not in out][:2]
                if len(peers) == 2:
                    evidence = yield from self._confirm_loss(name, peers, place, direction)
                    if evidence:
                        self.knowledge.suspect(NODE, [name], evidence)

    def _confirm_loss(
        self, name: str, peers: Sequence[str], place: int, direction: str
    ) -> Steps[str]:
        """The evidence that this node loses packets, or ""."""
        edges = [(peer, name) if place else (name, peer) for peer in peers]
        suspected, good = yield from take_turns(
            edges, (peers[0], peers[1]), "sweep", lambda _, good: len(good) < _RETRANSMITS_RETRIALS
        )
        if not good:
            return ""
        count = sum(trial.outcome.retransmits for trial in suspected)
        usual = sum(trial.outcome.retransmits for trial in good)
        shown = sum(is_failed(trial) or trial.outcome.retransmits > 0 for trial in suspected)
        limit = max(len(suspected) * _RETRANSMITS, _RETRANSMITS_TIMES * usual)
        if 2 * shown <= len(suspected) or count < limit:
            return ""
        return (
            f"packets are lost on the way {direction} it: {count} TCP segments sent again in "
            f"{join_names(peers)}'s turns with it {cite_trials(suspected)}, {usual} between "
            f"these {cite_trials(good)}"
        )

    def _find_slow(self, trials: Sequence[Trial]) -> Steps[None]:
        """Suspect nodes, then pairs, with slow sweeps that retrials confirm."""
        knowledge, outcomes = self.knowledge, defaultdict[str, list[SmokeOutcome]](list)
        good = [trial for trial in trials if not {*trial.test.nodes} & knowledge.excluded()]
        for trial in good:
            for name in trial.test.nodes:
                outcomes[name].append(trial.outcome)
        median, medians = statistics.median, dict[str, SmokeOutcome]()
        for name, of in outcomes.items():
            ms, gbps = median(outcome.ms for outcome in of), median(outcome.gbps for outcome in of)
            medians[name] = SmokeOutcome(True, ms=ms, gbps=gbps)
        usual_gbps = quartile((trial.outcome.gbps for trial in good), 3)
        usual_ms = quartile((trial.outcome.ms for trial in good), 1)
        slow = [name for name in medians if looks_slow(medians[name], usual_gbps, usual_ms)]
        fast = [name for name in medians if name not in slow]
        for name in sorted(slow, key=lambda name: medians[name].gbps):
            peers = [peer for peer in fast if peer not in knowledge.partners(name)][:2]
            if len(peers) == 2:
                edges = [(name, peer) for peer in peers]
                if evidence := (yield from retry_alternately(edges, tuple(peers), "sweep")):
                    knowledge.suspect(NODE, [name], evidence)

        def is_slow_pair(trial: Trial | None) -> bool:
            if trial is None:
                return False
            ends = [medians[name] for name in trial.test.nodes]
            gbps, ms = min(end.gbps for end in ends), max(end.ms for end in ends)
            return looks_slow(trial.outcome, gbps, ms)

        excluded = knowledge.excluded()
        pairs = [t.test.nodes for t in good if not {*t.test.nodes} & excluded and is_slow_pair(t)]
        again = yield [TrialRequest("sweep", pair) for pair in pairs]
        for trial in [t for t in again if t and is_slow_pair(t)][:_MAX_SLOW_PAIRS]:
            pair = trial.test.nodes
            out = {*pair} | knowledge.excluded() | knowledge.partners(pair[1])
            able = (name for name in fast if name not in out and (name, pair[1]) not in pairs)
            if (peer := next(able, None)) is not None:
                evidence = yield from retry_alternately([pair], (peer, pair[1]), "sweep")
                if evidence:
                    knowledge.suspect(PAIR, pair, evidence)

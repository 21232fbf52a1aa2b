"""The search for the nodes, GPUs and pairs that make a collective fail. Pure.

First every node is tested alone, then groups of about √N nodes in parallel. The groups that passed
are merged: if that fails, two nodes of two groups are searched, and then the groups that pass with
most of the nodes. Every other group is halved, and each half is tested beside nodes that passed. A
candidate is confirmed beside two good nodes, which must pass without it. Then all remaining nodes
are tested together, and the plain paths between them.

A node is suspected when it fails beside nodes that pass without it; a pair, when each of the two
passes with good nodes; a slow node, after retrials in turns with good nodes, with no other test
beside them. Any other failure is reported with all nodes of its test.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, pairwise

from nodeready.runs.smoke.knowledge import (
    GPU,
    NODE,
    PAIR,
    SCALE,
    Hunt,
    Knowledge,
    SearchResult,
    SmokeOutcome,
    Steps,
    Sweep,
    Test,
    Trial,
    TrialRequest,
    Trials,
    cite,
    cite_trials,
    is_failed,
    looks_slow,
    quartile,
    retry_alternately,
    split_groups,
    with_cause,
)

#: Yields a round of tests, is sent their outcomes by number, returns the result.
Search = Generator["list[Test]", "Mapping[int, SmokeOutcome]", SearchResult]

#: The fault that a hunt looks for: a test that fails, is slow, or fails only now and then.
_BROKEN, _SLOW, _FLAKY = "broken", "slow", "flaky"
_REPEATS = 3  # the repetitions of a test that fails now and then
_MAX_FAULTS = 16  # maximum faults between groups that are searched
_MAX_BASES = 3  # maximum groups whose nodes are tested with every other group

_NO_THIRD = "there is no third node to tell which of them it is"


def _passes_without(controls: Iterable[Trial | None]) -> list[str]:
    """The evidence that the good nodes pass without the suspect."""
    trials = [*filter(None, controls)]
    return [f"without it these pass together {cite_trials(trials)}"] if trials else []


def _halves(nodes: Sequence[str], culprits: Collection[str]) -> list[list[str]]:
    """The nodes that reported a fault and the rest, if at most half reported one; else halves."""
    reported = [name for name in nodes if name in culprits]
    if 0 < len(reported) <= len(nodes) // 2:
        return [reported, [name for name in nodes if name not in culprits]]
    middle = (len(nodes) + 1) // 2
    return [half for half in (list(nodes[:middle]), list(nodes[middle:])) if half]


def _round_robin(nodes: Sequence[str], limit: int) -> Iterable[list[tuple[str, str]]]:
    """Rounds of pairs: in each round every node is paired with another node than before."""
    seats: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    half = len(seats) // 2
    for _ in range(min(len(seats) - 1, limit)):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(first, second) for first, second in pairs if first and second]
        seats = [seats[0], seats[-1], *seats[1:-1]]


@dataclass
class _FaultSearch:
    nodes: list[str]
    gpus: Mapping[str, Sequence[int]]
    full: bool
    knowledge: Knowledge
    tests_alone: bool
    good: list[str] = field(default_factory=list)  # passed together; others are tested beside
    # A good node -> the number of the group in which it passed.
    group_of: dict[str, int] = field(default_factory=dict)
    # The nodes of the largest group; the figures of a good group.
    group_size: int = 2
    usual_gbps: float = 0.0
    usual_ms: float = 0.0
    # Nodes that failed beside a good node -> that test; they have to be confirmed.
    candidates: dict[str, Trial] = field(default_factory=dict)
    # Nodes that were slow or flaky, with the test and the mode.
    retrials: list[tuple[str, Trial, str]] = field(default_factory=list)
    # Suspected nodes -> a test beside good nodes that failed.
    confirmed: dict[str, Trial] = field(default_factory=dict)
    # The node of each faulty pair that is not tested in larger groups.
    set_aside: set[str] = field(default_factory=set)
    # Groups that passed by themselves, and fail with most of the nodes.
    outside: list[list[str]] = field(default_factory=list)

    # --- Rounds.

    def run(self) -> Search:
        self.knowledge.positions = {name: index for index, name in enumerate(self.nodes)}
        steps = self._all_steps()
        try:
            requests = next(steps)
            while True:
                requests = steps.send((yield from self._rounds(requests)))
        except StopIteration:
            self.knowledge.is_complete = True
            return self.knowledge.result()

    def _rounds(
        self, requests: list[TrialRequest]
    ) -> Generator[list[Test], Mapping[int, SmokeOutcome], Trials]:
        """Run these tests in few rounds; a test that lost a node is repeated without that node."""
        knowledge = self.knowledge
        trials: Trials = [None] * len(requests)
        waiting = list(enumerate(requests))
        while waiting:
            tests, waiting = self._round(waiting)
            if not tests:
                break
            knowledge.rounds += 1
            outcomes = yield [test for _, _, test in tests]
            for index, request, test in tests:
                outcome = outcomes[test.number]
                if not outcome.barred:
                    knowledge.finished.append(Trial(test, outcome))
                lost = {name for name in outcome.lost if name in knowledge.positions}
                for name in lost - knowledge.lost:
                    knowledge.suspect(NODE, [name], f"its connection ended in test {test.number}")
                lost |= {*outcome.barred}
                knowledge.lost |= lost
                if not lost & {*test.nodes}:
                    trials[index] = Trial(test, outcome)
                elif test.purpose != "sweep":
                    nodes = tuple(name for name in test.nodes if name not in lost)
                    fillers = request.fillers and 1
                    waiting.append((index, replace(request, nodes=nodes, fillers=fillers)))
        return trials

    def _round(
        self, waiting: list[tuple[int, TrialRequest]]
    ) -> tuple[list[tuple[int, TrialRequest, Test]], list[tuple[int, TrialRequest]]]:
        """The tests of the next round, and the requests for later rounds."""
        knowledge = self.knowledge
        out = knowledge.excluded()
        out |= {name for _, request in waiting for name in request.nodes}
        # Each round begins with other fillers, so that no good node is in every test.
        start = 7 * knowledge.rounds % max(1, len(self.good))
        free = [name for name in self.good[start:] + self.good[:start] if name not in out]
        filling = sum(request.fillers > 0 for _, request in waiting)
        tests: list[tuple[int, TrialRequest, Test]] = []
        later: list[tuple[int, TrialRequest]] = []
        busy: set[object] = set()
        number = len(knowledge.finished)
        for index, request in waiting:
            nodes = [name for name in request.nodes if name not in self.knowledge.lost]
            is_sweep = request.purpose == "sweep"
            seats: set[object] = {*enumerate(nodes)} if is_sweep else {*nodes}
            minimum = 0 if request.purpose == "alone" else max(0, 2 - len(nodes))
            if not nodes or (minimum and not request.fillers):
                continue
            if busy & seats:
                later.append((index, request))
                continue
            fillers: list[str] = []
            if request.fillers:
                count = max(minimum, min(request.fillers, len(free) // filling))
                filling -= 1
                avoid = request.avoid.union(*(knowledge.partners(name) for name in nodes))
                fillers = [name for name in free if name not in avoid][:count]
                if len(fillers) < minimum:
                    later.append((index, request))
                    continue
                free = [name for name in free if name not in fillers]
            busy |= seats | {*fillers}
            number += 1
            gpus = ((nodes[0], request.gpus),) if request.gpus else ()
            test = Test(number, request.purpose, (*nodes, *fillers), gpus)
            tests.append((index, request, test))
        return tests, later

    def _together(self, hunts: Iterable[Hunt]) -> Steps[None]:
        """Run hunts in parallel, and the hunts that continue them."""
        ready: list[tuple[Hunt, Trials | None]] = [(hunt, None) for hunt in hunts]
        while ready:
            live: list[tuple[Hunt, list[TrialRequest]]] = []
            while ready:
                hunt, own_trials = ready.pop(0)
                try:
                    requests = next(hunt) if own_trials is None else hunt.send(own_trials)
                except StopIteration as end:
                    ready[:0] = [(following, None) for following in end.value]
                else:
                    live.append((hunt, requests))
            if live:
                trials = iter((yield [request for _, requests in live for request in requests]))
                ready = [(hunt, [*islice(trials, len(requests))]) for hunt, requests in live]

    def _all_steps(self) -> Steps[None]:
        trials = yield [TrialRequest("alone", (name,)) for name in self.nodes if self.tests_alone]
        failed = [trial for trial in trials if trial and not trial.outcome.ok]
        yield from self._together(self._faulty_gpus(t.test.nodes[0], t) for t in failed)
        live = self._live()
        if len(live) < 2:
            return
        yield from self._groups(live)
        yield from self._drop_majority()
        yield from self._retry()
        nodes = [node for node in self.confirmed if len(self.gpus.get(node, ())) > 1]
        yield from self._together(self._gpu_with_peers(node) for node in nodes)
        if self.good:
            yield from Sweep(self.knowledge, self._live()).run(self.full)

    def _live(self) -> list[str]:
        excluded = self.knowledge.excluded()
        return [name for name in self.nodes if name not in excluded]

    # --- A node alone.

    def _faulty_gpus(self, node: str, first: Trial) -> Hunt:
        """Suspect the GPUs of a node that fails alone, or the node."""
        knowledge, numbers = self.knowledge, self.gpus.get(node, ())
        count = len(numbers)
        chosen = [(gpu,) for gpu in numbers] if count > 1 else [()]
        trials = yield [TrialRequest("alone", (node,), gpus=gpus) for gpus in chosen]
        failed = [trial for trial in trials if trial and not trial.outcome.ok]
        if node in self.knowledge.lost or (count < 2 and not failed):
            return []
        if len(failed) == len(trials):
            evidence = f"alone it fails {cite([first.test])}{with_cause(first.outcome.cause)}; "
            again = (
                f"each of its {count} GPUs alone does as well" if count > 1 else "so it does again"
            )
            knowledge.suspect(NODE, [node], f"{evidence}{again} {cite_trials(failed)}")
            return []
        for trial in failed:
            (gpu,) = trial.test.gpus[0][1]
            evidence = f"GPU {gpu} of {node} fails alone {cite([trial.test])}"
            knowledge.suspect(GPU, [node], evidence + with_cause(trial.outcome.cause), gpus=[gpu])
        good = [t.test.gpus[0][1][0] for t in trials if t and t.outcome.ok]
        if len(good) > 1:
            (group,) = yield [TrialRequest("alone", (node,), gpus=tuple(good))]
            if group and is_failed(group):
                evidence = f"its GPUs pass alone, and {len(good)} of them together fail "
                evidence += f"{cite([group.test])}{with_cause(group.outcome.cause)}"
                knowledge.suspect(NODE, [node], evidence)
        return []

    # --- Groups, and their halves.

    def _groups(self, live: list[str]) -> Steps[None]:
        groups = split_groups(live)
        self.group_size = max(map(len, groups))
        trials = yield [TrialRequest("group", tuple(group)) for group in groups]
        passed = [trial for trial in trials if trial and trial.outcome.ok]
        self.usual_gbps = quartile((trial.outcome.gbps for trial in passed), 3)
        self.usual_ms = quartile((trial.outcome.ms for trial in passed), 1)
        slow = [trial for trial in passed if self._is_slow(trial)]
        slow_nodes = {name for trial in slow for name in trial.test.nodes}
        good = [[*trial.test.nodes] for trial in passed if not slow_nodes & {*trial.test.nodes}]
        failed = [trial for trial in trials if trial and not trial.outcome.ok]
        hunts = [
            self._halve([*trial.test.nodes], mode, trial.outcome.culprits)
            for mode, bad in ((_BROKEN, failed), (_SLOW, slow))
            for trial in bad
        ]
        if not good:
            good, unpaired = yield from self._any_pairs(live)
            if not good:
                return
            hunts = [self._halve([name], _BROKEN) for name in unpaired]
        yield from self._merge(good)
        if not self.good:
            return
        for _ in range(_REPEATS):
            hunts += [self._halve(group, _BROKEN) for group in self.outside]
            self.outside = []
            yield from self._together(hunts)
            yield from self._confirm()
            remaining = {*self._live()} - self.group_of.keys() - self.knowledge.doubts.keys()
            if remaining - self.set_aside:
                good_nodes = [name for name in self.good if name in self.group_of]
                singles = ([name] for name in self.knowledge.sorted(remaining))
                yield from self._merge([good_nodes, *singles])
            if not self.outside:
                break
            hunts = []

    def _is_slow(self, trial: Trial | None) -> bool:
        """Whether a test is slow for its size. A larger test takes longer without a fault."""
        if trial is None or len(trial.test.nodes) > 1.5 * self.group_size:
            return False
        return looks_slow(trial.outcome, self.usual_gbps, self.usual_ms)

    def _is_bad(self, trial: Trial | None) -> bool:
        return is_failed(trial) or self._is_slow(trial)

    def _any_pairs(self, live: list[str]) -> Steps[tuple[list[list[str]], list[str]]]:
        """No group passed: the pairs that pass, and the nodes in no pair."""
        trials: list[Trial] = []
        good: list[list[str]] = []
        unpaired = live
        # All pairs of a few nodes, until half of the nodes have passed with another node.
        for pairs in _round_robin(live, len(live) if len(live) <= 16 else 4):
            if 2 * len(unpaired) <= len(live):
                break
            requests = [TrialRequest("half", pair) for pair in pairs if {*pair} <= {*unpaired}]
            trials += [trial for trial in (yield requests) if trial]
            good = [[*trial.test.nodes] for trial in trials if trial.outcome.ok]
            paired = {name for pair in good for name in pair}
            unpaired = [name for name in self._live() if name not in paired]
        if good:
            return good, unpaired
        live = self._live()
        if trials and len(live) > 1:
            end = f"{cite_trials(trials)}{with_cause(trials[0].outcome.cause)}"
            if len(live) == 2:
                evidence = f"each passes alone, together they fail {end}"
                self.knowledge.suspect(PAIR, live, evidence, _NO_THIRD)
            else:
                self.knowledge.suspect(
                    SCALE, live, f"each passes alone, and no two of them together {end}"
                )
        return [], []

    def _halve(self, nodes: list[str], mode: str, culprits: Collection[str] = ()) -> Hunt:
        """Halve nodes that fail together, each half beside good nodes."""
        halves = _halves(nodes, culprits)
        # One good node suffices for one node. A slow test is compared with whole groups.
        fillers = [max(0, self.group_size - len(half)) for half in halves]
        if mode != _SLOW:
            fillers = [1 if len(h) == 1 else n for h, n in zip(halves, fillers, strict=True)]
        trials: Trials = []
        requests = [TrialRequest("half", (*h,), n) for h, n in zip(halves, fillers, strict=True)]
        for _ in range(_REPEATS if mode == _FLAKY else 1):
            trials = yield requests
            if any(map(self._is_bad, trials)):
                break
        hunts: list[Hunt] = []
        for half, trial in zip(halves, trials, strict=True):
            if trial is None:
                continue
            if self._is_bad(trial):
                state = mode if mode == _FLAKY else _SLOW if trial.outcome.ok else _BROKEN
                if len(half) > 1:
                    hunts.append(self._halve(half, state))
                    continue
                (node,) = half
                self.knowledge.doubts[node] = f"fails with {trial.peers_of(node)}"
                if state == _BROKEN:
                    self.candidates[node] = trial
                else:
                    self.retrials.append((node, trial, state))
            elif len(half) < len(trial.test.nodes) and len(self.good) < 2 * self.group_size:
                # It passed beside good nodes. Where these are few, more allow larger tests.
                self.good += [name for name in half if name not in self.good]
        return hunts

    def _confirm(self) -> Steps[None]:
        """Test each candidate beside a second good node, and these good nodes without it."""
        knowledge, firsts = self.knowledge, self.candidates
        seconds: dict[str, Trial | None] = {}
        for _ in range(_REPEATS):
            excluded = knowledge.excluded()
            firsts = {node: trial for node, trial in firsts.items() if node not in excluded}
            rows = ((node, frozenset(trial.test.nodes)) for node, trial in firsts.items())
            requests = [TrialRequest("confirm", (node,), 1, avoid) for node, avoid in rows]
            seconds = dict(zip(firsts, (yield requests), strict=True))
            all_peers = set[str]()
            for node, first in firsts.items():
                tests = [trial.test for trial in (first, seconds[node]) if trial]
                all_peers |= {name for test in tests for name in test.nodes} - {node}
            controls = yield [TrialRequest("control", knowledge.sorted(all_peers))]
            if not any(map(is_failed, controls)):
                break
            # A good node has become faulty: find it, and repeat the tests without it.
            yield from self._merge([[name] for name in self.good])
            again = yield [TrialRequest("confirm", (node,), 1) for node in firsts]
            firsts = {trial.test.nodes[0]: trial for trial in again if trial and is_failed(trial)}
        else:
            seconds = {}
        for node, first in firsts.items():
            second = seconds.get(node)
            if second and is_failed(second):
                evidence = f"fails with {first.peers_of(node)}, and with {second.peers_of(node)}"
                knowledge.suspect(NODE, [node], evidence, *_passes_without(controls))
                self.confirmed[node] = second
            else:
                # It fails with one node and passes with another.
                self.retrials.append((node, first, _FLAKY))
        self.candidates = {}
        waiting = {node for node, _, _ in self.retrials}
        knowledge.doubts = {n: reason for n, reason in knowledge.doubts.items() if n in waiting}

    def _drop_majority(self) -> Steps[None]:
        """Suspect none of the nodes that fail beside good nodes, if they are not fewer than these
        and two of them pass together: then the good nodes may be the faulty ones.
        """
        nodes = self.knowledge.sorted(self.confirmed.keys() - self.knowledge.lost)
        if len(nodes) < len(self.good):
            return
        trials = yield [TrialRequest("confirm", pair) for pair in pairwise(nodes)]
        if any(trial and trial.outcome.ok for trial in trials):
            suspects = self.knowledge.suspects
            self.knowledge.remove(s for s in suspects if s.kind == NODE and s.nodes[0] in nodes)
            self.confirmed = {}

    # --- The cause of a failure between good nodes: two nodes, or two sets of nodes.

    def _pin_down(self, order: Sequence[str], low: int) -> Steps[bool]:
        """Search two nodes that fail together; the first ``low`` pass. Whether it found them"""
        lost_before = len(self.knowledge.lost)
        low -= len(self.knowledge.lost.intersection(order[:low]))
        order = [name for name in order if name not in self.knowledge.lost]
        if len(order) < 2:
            return True
        # The shortest beginning that fails; its last node; then the same of that node's peers.
        end = yield from self._shortest(order, low)
        second, before = order[end - 1], order[: end - 1]
        first = before[(yield from self._shortest(before, 0, (second,))) - 1]
        (pair,) = yield [TrialRequest("confirm", (first, second))]
        if is_failed(pair):
            return (yield from self._explain_pair(first, second))
        # A node that was lost meanwhile may have been the cause.
        return len(self.knowledge.lost) > lost_before

    def _shortest(
        self, order: Sequence[str], low: int, following: tuple[str, ...] = ()
    ) -> Steps[int]:
        """Length of the shortest beginning that fails with these; the first ``low`` pass."""
        high = len(order)
        while high - low > 1:
            middle = (low + high) // 2
            (trial,) = yield [TrialRequest("confirm", (*order[:middle], *following))]
            low, high = (low, middle) if is_failed(trial) else (middle, high)
        return high

    def _majority(self, groups: list[list[str]]) -> Steps[list[list[str]]]:
        """The groups that pass with one of them, if they have most of the nodes; else none.

        Each group passed by itself: either part may be faulty, and only a minority is suspected.
        """
        remaining = groups
        for _ in range(_MAX_BASES):
            if not remaining:
                break
            base, *peers = remaining
            bases = cycle(base)
            trials = yield [TrialRequest("confirm", (next(bases), *group)) for group in peers]
            pairs = zip(peers, trials, strict=True)
            passed = [group for group, trial in pairs if trial and trial.outcome.ok]
            if 2 * sum(map(len, [base, *passed])) > sum(map(len, groups)):
                return [base, *passed]
            remaining = [group for group in peers if group not in passed]
        return []

    def _good_peers(self, *nodes: str) -> list[str]:
        """Two good nodes that are no partners of these nodes."""
        out = self.knowledge.excluded().union(nodes, *map(self.knowledge.partners, nodes))
        return [name for name in self.good if name not in out][:2]

    def _explain_pair(self, first: str, second: str) -> Steps[bool]:
        """Explain why two nodes fail together: suspect the pair, if each passes with good nodes;
        else the node that does not. Returns whether there is an explanation.
        """
        peers = self._good_peers(first, second)
        # Each keeps its position: it may fail only as the first, or only after another node.
        # Edges that share no node go into one round.
        pairs = zip(peers, peers[::-1], strict=True)
        edges = [edge for peer, other in pairs for edge in ((first, peer), (other, second))]
        pair, control, *trials = yield [
            TrialRequest("confirm", (first, second)),
            TrialRequest("control", tuple(peers)),
            *(TrialRequest("confirm", edge) for edge in edges),
        ]
        if {first, second} & self.knowledge.lost:
            return True
        if pair is None or pair.outcome.ok:
            return False
        failed = {
            end: [t for t in trials if t and is_failed(t) and end in t.test.nodes]
            for end in (first, second)
        }
        faulty = [end for end in failed if peers and len(failed[end]) == len(peers)]
        # Both passed in their groups: which of two sets is at fault, most of the nodes decide.
        if is_failed(control) or (faulty and {first, second} <= self.group_of.keys()):
            return False
        for end in faulty:
            evidence = " and ".join(trial.peers_of(end) for trial in [pair, *failed[end]])
            evidence = f"fails with {evidence}"
            self.knowledge.suspect(NODE, [end], evidence, *_passes_without([control]))
            self.confirmed[end] = failed[end][0]
        excluded = self.knowledge.excluded()
        doubted = [trial.test.nodes for trial in [*failed[first], *failed[second]]]
        again = [nodes for nodes in doubted if not {*nodes} & excluded]
        doubtful = yield [TrialRequest("confirm", nodes) for nodes in again]
        passed = [trial for trial in trials if trial and trial.outcome.ok]
        for trial in [pair, *doubtful]:
            if trial and is_failed(trial):
                ends = trial.test.nodes
                evidence = f"fail together {cite([trial.test])}{with_cause(trial.outcome.cause)}"
                good = [t.test for t in passed if {*ends} & {*t.test.nodes}]
                detail = f"each passes with others {cite(good)}" if good else _NO_THIRD
                self.knowledge.suspect(PAIR, ends, evidence, detail)
        return True

    def _merge(self, groups: list[list[str]]) -> Steps[None]:
        """Merge groups that passed: the nodes that pass together become the good nodes. Faults
        between the groups are searched one at a time.
        """
        knowledge = self.knowledge
        aside: set[str] = set()
        for _ in range(_MAX_FAULTS):
            nodes = {name for group in groups for name in group} - knowledge.excluded()
            for suspect in knowledge.suspects:
                if suspect.kind == PAIR and {*suspect.nodes} <= nodes - aside:
                    aside.add(suspect.nodes[1])
            nodes -= aside
            groups = [*filter(None, ([n for n in group if n in nodes] for group in groups))]
            self.group_of = {name: n for n, group in enumerate(groups) for name in group}
            self.good = [*knowledge.sorted(self.group_of)]
            if len(groups) < 2:
                break
            (trial,) = yield [TrialRequest("merge", tuple(self.good))]
            if trial is None or trial.outcome.ok:
                break
            order = trial.test.nodes
            (again,) = yield [TrialRequest("merge", order)]
            first_group = self.group_of[order[0]]
            beyond = (n for n, name in enumerate(order) if self.group_of[name] != first_group)
            low = next(beyond, 1)
            if is_failed(again):
                if (yield from self._pin_down(order, low)):
                    continue
                side = yield from self._majority(groups)
                if side != groups:
                    self.outside += [group for group in groups if group not in side]
                    groups = side
                    continue
            yield from self._together([self._halve([*order], _FLAKY)])
            break
        self.set_aside |= aside

    # --- A GPU of a node that fails only with other nodes: each GPU may have its own port.

    def _gpu_with_peers(self, node: str) -> Hunt:
        """Halve the node's GPUs beside good nodes, while exactly one half fails."""
        gpus, passed = list(self.gpus[node]), list[Trial]()
        last: Trial | None = None
        while len(gpus) > 1:
            middle = (len(gpus) + 1) // 2
            halves = [gpus[:middle], gpus[middle:]]
            trials = yield [TrialRequest("confirm", (node,), 1, gpus=tuple(h)) for h in halves]
            failed = [(half, t) for half, t in zip(halves, trials, strict=True) if is_failed(t)]
            if len(failed) != 1 or None in trials or node in self.knowledge.lost:
                return []
            ((gpus, last),) = failed
            passed += [trial for trial in trials if trial and trial.outcome.ok]
        suspects = self.knowledge.suspects
        node_suspects = [s for s in suspects if (s.kind, s.nodes) == (NODE, (node,))]
        if last is not None and node_suspects:
            self.knowledge.remove(node_suspects)
            evidence = f"GPU {gpus[0]} of {node} fails beside {last.peers_of(node)}"
            good = f"its others pass with good nodes {cite_trials(passed)}"
            earlier = [f"all of them: {text}" for s in node_suspects for text in s.evidence[:1]]
            self.knowledge.suspect(GPU, [node], evidence, good, *earlier, gpus=gpus)
        return []

    # --- Retrials.

    def _retry(self) -> Steps[None]:
        """Retry the nodes that were slow or flaky, in turns with good nodes."""
        knowledge = self.knowledge
        for node, first, mode in self.retrials:
            peers = self._good_peers(node)
            if node in knowledge.excluded() or knowledge.partners(node) or len(peers) < 2:
                knowledge.doubts.pop(node, None)
                continue
            pairs = [(node, peer) for peer in peers]
            evidence = yield from retry_alternately(pairs, tuple(peers), "confirm", mode == _FLAKY)
            knowledge.doubts.pop(node, None)
            if evidence:
                knowledge.suspect(NODE, [node], evidence, f"first seen {cite([first.test])}")


def search(
    nodes: Sequence[str],
    gpus: Mapping[str, Sequence[int]],
    *,
    full: bool = False,
    knowledge: Knowledge | None = None,
    tests_alone: bool = True,
) -> Search:
    """Search among these nodes, in the inventory's order.
    gpus:      node -> the numbers of its ranks' GPUs; none: ranks without GPUs
    full:      all pairs in the sweep, not only ring and skips
    knowledge: filled during the search, for a caller that stops before its end
    """
    return _FaultSearch([*nodes], gpus, full, knowledge or Knowledge(), tests_alone).run()

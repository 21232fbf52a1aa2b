"""Rounds of parallel tests over the nodes' open channels, each test with its deadline."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gevent
from gevent.queue import Empty, Queue

from nodeready.agent.runtime import bug_text
from nodeready.agent.smoke import orders
from nodeready.agent.smoke.orders import PAIRS
from nodeready.fleet.inventory.nodeset import folded
from nodeready.fleet.transport.channels import join_all
from nodeready.runs.smoke import participants
from nodeready.runs.smoke.knowledge import Knowledge, SmokeOutcome, Test
from nodeready.runs.smoke.outcomes import collective_outcome, pairs_outcome, port_holder
from nodeready.runs.smoke.participants import Kind, Numbers, Participants

#: Bytes of a collective with checked results, and of one with a measured bandwidth.
_SMALL = 4 << 10
_LARGE, _LARGE_GPU = 8 << 20, 256 << 20
_LARGE_SWEEP = 1 << 20  # of a pair's large message in a sweep: a path has to pass full packets
#: Seconds of a pair: its name (3 s), time-outs of three ports and a token (7.5 s), and the data.
#: The minimum covers the name and the ports, however fast other pairs are.
_PAIR_S, _MIN_PAIR_S = 14.0, 8.0

_MARGIN_S = 6.0  # seconds after a test's limit to end its ranks, and for the answer to arrive
_GRACE_S = 3.0  # seconds for the peers of a failed or lost node to report their silence
#: A straggler gets this multiple of the time of half of its round's tests, or of earlier like
#: tests, and at least these seconds; twice as long until most tests have passed.
STRAGGLER_TIMES, MIN_TEST_S = 5, 3.0
_AFTER_S = 8.0  # maximum seconds that are kept for the snapshots after the tests

#: A round's purpose in words.
_TITLES: dict[str, str] = {
    "alone": "alone", "group": "groups", "confirm": "confirming", "merge": "together",
    "sweep": "pairs", "control": "control",
}  # fmt: skip

_Order = orders.CollectiveOrder | orders.PairOrder
_Answer = (
    orders.CollectiveAnswer | orders.PairAnswer | str
)  # a node's answer, or the reason why it has none
#: Tests with the same engine, and with one node or with several, take as long with as many ranks.
_Likeness = tuple[Kind, bool]


@dataclass(frozen=True)
class _OrderedTest:
    test: Test
    likeness: _Likeness
    world: int
    limit_s: float  # the seconds that it may take
    is_cut: bool  # the budget allows less than the desired seconds
    orders: Mapping[str, Any]  # node -> its `_Order`
    # (source, target) of its pairs; (): it is a collective of an engine with ranks
    edges: tuple[tuple[str, str], ...] = ()


@dataclass
class _TestRound:
    total: int
    min_s: float  # minimum seconds of every test
    began: float = field(default_factory=time.monotonic)
    passed: int = 0
    half_s: float = 0.0  # the seconds until half of the tests had passed
    end_at: float = math.inf  # the moment at which the remaining tests are ended
    # each test's queue of (node, answer); a row without a node wakes the test
    queues: list[Queue[tuple[str, _Answer]]] = field(default_factory=list)

    def count_pass(self) -> None:
        """Count a test that passed. After half of them, and after most, the rest get a limit."""
        self.passed += 1
        if not 2 * self.passed >= self.total > 1:
            return
        self.half_s = self.half_s or time.monotonic() - self.began
        min_s = 2 * self.min_s if 2 * self.passed == self.total else self.min_s
        end_at = self.began + max(min_s, STRAGGLER_TIMES * self.half_s)
        if end_at < self.end_at:
            self.end_at = end_at
            for queue in self.queues:
                queue.put(("", ""))


def _ends_test(answer: _Answer) -> bool:
    """Whether the test fails for its remaining nodes, too. Pairs do not wait for each other."""
    if isinstance(answer, orders.CollectiveAnswer):
        return not all(rank.ok for rank in answer.ranks)
    return isinstance(answer, str)


class OutOfTime(Exception):
    """There is no time for another round."""


class TestRounds:
    """The rounds of one run."""

    __test__ = False

    def __init__(self, nodes: Participants, knowledge: Knowledge) -> None:
        self.nodes, self.task, self.channels = nodes, nodes.task, nodes.channels
        self.knowledge = knowledge
        self.stop_at = self.task.deadline - min(_AFTER_S, self.task.left_s / 6)
        self.count = self.last = 0  # of the rounds; the highest number of a test
        # The number of rounds in which all tests passed. It chooses the ports: a port that fails
        # stays while the search looks for the faulty node.
        self.turn = 0
        # Like tests -> ranks -> the seconds of the slowest that passed.
        self._durations: dict[_Likeness, dict[int, float]] = {}

    # --- One test.

    def _order(self, test: Test, kind: Kind, room_s: float) -> _OrderedTest:
        """The orders of a test. room_s: the seconds that the budget allows"""
        if test.purpose == "sweep" or kind[0] == PAIRS:
            return self._order_pairs(test, min(_PAIR_S, room_s), room_s < _PAIR_S)
        rows, world = self.ranks_of(test, kind)
        likeness = kind, len(rows) > 1
        large = _LARGE_GPU if kind[1] == "nccl" else _LARGE
        desired_s = self._desired_s(likeness, world, large)
        limit_s, head = min(desired_s, room_s), self._peer(test.nodes[0])
        ordered = {
            name: orders.CollectiveOrder(
                test.number, *kind, world=world, first=first, ranks=ranks, gpus=gpus, head=head,
                small=_SMALL, large=large, limit_s=limit_s,
            )
            for name, first, ranks, gpus in rows
        }  # fmt: skip
        return _OrderedTest(test, likeness, world, limit_s, room_s < desired_s, ordered)

    def _order_pairs(self, test: Test, limit_s: float, is_cut: bool) -> _OrderedTest:
        """A pair of the sweep; or a collective of pairs, a ring: each node sends to the next."""
        is_sweep = test.purpose == "sweep"
        targets = test.nodes[1:] if is_sweep else (*test.nodes[1:], test.nodes[0])
        edges = tuple(zip(test.nodes, targets, strict=False))
        sizes = _SMALL, _LARGE_SWEEP if is_sweep else _LARGE, limit_s
        pairs, ports = {}, self.nodes.ports
        for source, target in edges:
            peer = self._peer(target)
            pairs[source] = orders.PairOrder(test.number, peer, ports[target], *sizes)
        likeness = (PAIRS, "tcp"), True
        return _OrderedTest(test, likeness, len(edges), limit_s, is_cut, pairs, edges)

    def _desired_s(self, likeness: _Likeness, world: int, large: int) -> float:
        """The seconds that a test may take, by the time of like tests."""
        kind, durations = likeness[0], self._durations.get(likeness, {})
        # PyTorch itself is read before the node's hello; the libraries for its GPUs are not.
        is_first = not durations and kind[1] == "nccl"
        maximum_s = participants.limit_s(*kind, world, large, first=is_first)
        if not durations:
            return maximum_s
        # The slowest test with as many ranks or more; scaled if no test had as many.
        most_ranks = max(durations)
        comparable = [s for ranks, s in durations.items() if ranks >= min(world, most_ranks)]
        like_s = max(comparable) * max(1.0, world / most_ranks)
        return min(maximum_s, max(2 * MIN_TEST_S, STRAGGLER_TIMES * like_s))

    def ranks_of(self, test: Test, kind: Kind) -> tuple[list[tuple[str, int, int, Numbers]], int]:
        """Each node with its first rank, its number of ranks, and their GPUs; and all ranks."""
        chosen, world, rows = dict(test.gpus), 0, []
        for name in test.nodes:
            gpus = self.nodes.gpus.get(name, ()) if kind[1] == "nccl" else ()
            gpus = gpus and chosen.get(name, gpus)
            ranks = 1 if kind[0] == PAIRS else len(gpus) or self.task.options.ranks
            rows.append((name, world, ranks, gpus))
            world += ranks
        return rows, world

    def _peer(self, name: str) -> orders.SmokePeer:
        ports = self.nodes.ports[name]
        port = ports[self.turn % len(ports)]
        token = self.nodes.hellos[name].token
        return orders.SmokePeer(name, self.nodes.addresses[name], port, token)

    def _ask(self, name: str, order: _Order) -> _Answer:
        """Send the order, and wait for the answer. The test's own deadline comes first."""
        answer_type: type[orders.CollectiveAnswer | orders.PairAnswer]
        is_pair = isinstance(order, orders.PairOrder)
        answer_type = orders.PairAnswer if is_pair else orders.CollectiveAnswer
        limit_s = order.limit_s + 2 * _MARGIN_S
        try:
            self.channels.open[name].send_line(orders.line(order))
            if answer := self.channels.read(name, order.kind, answer_type, limit_s):
                if answer.number == order.number:
                    return answer
                self.channels.lose(name, "the answer makes no sense (another test)")
        except Exception as problem:  # noqa: BLE001 - a bug of nodeready costs this node alone
            self.channels.lose(name, bug_text(problem))
        lost = self.channels.lost
        return lost[name].reason if name in lost else "no answer in time"

    def _answers(
        self, ordered: _OrderedTest, test_round: _TestRound, done: Callable[[str], object]
    ) -> dict[str, Any]:
        """Order a test, and wait until each of its nodes has answered or is lost."""
        queue: Queue[tuple[str, _Answer]] = Queue()
        test_round.queues.append(queue)
        number = ordered.test.number

        def ask(name: str, order: _Order) -> None:
            queue.put((name, self._ask(name, order)))

        def end(name: str) -> None:
            if channel := self.channels.open.get(name):
                channel.send_line(orders.line(orders.EndOrder(number)))

        jobs = [gevent.spawn(ask, *order) for order in ordered.orders.items()]
        answers: dict[str, Any] = {}
        lost_at = test_round.began + ordered.limit_s + _MARGIN_S
        end_at, is_ended = math.inf, False
        try:
            while remaining := [name for name in ordered.orders if name not in answers]:
                now_s, end_at = time.monotonic(), min(end_at, test_round.end_at)
                if not is_ended and now_s >= end_at:
                    is_ended, lost_at = True, min(lost_at, now_s + _MARGIN_S)
                    self.channels.for_each(end, remaining)
                if now_s >= lost_at:
                    reason = f"no answer in {now_s - test_round.began:.0f} s, in test {number}"
                    self.channels.lose_all(remaining, reason)
                    return answers | dict.fromkeys(remaining, reason)
                until = lost_at if is_ended else min(end_at, lost_at)
                with contextlib.suppress(Empty):
                    name, answer = queue.get(timeout=max(0.0, until - now_s))
                    if name:
                        answers[name] = answer
                        done(name)
                        if _ends_test(answer):
                            end_at = min(end_at, time.monotonic() + _GRACE_S)
        finally:
            gevent.killall(jobs, block=False)
        return answers

    def _test(
        self, ordered: _OrderedTest, test_round: _TestRound, done: Callable[[str], object]
    ) -> SmokeOutcome | None:
        """Run one test. Returns None if the budget cut it off, so that it has no outcome."""
        test, nodes, began = ordered.test, self.nodes, time.monotonic()
        head = test.nodes[0]
        try:
            answers = self._answers(ordered, test_round, done)
            # Another user's process has rank 0's port: that is not the node's fault.
            for _ in nodes.ports[head][1:]:
                if not port_holder(answers[head]):
                    break
                self.turn += 1
                peer = self._peer(head)
                moved = {name: replace(order, head=peer) for name, order in ordered.orders.items()}
                ordered = replace(ordered, orders=moved)
                answers = self._answers(ordered, test_round, done)
            if reason := port_holder(answers[head]):
                nodes.excluded[head] = reason
                self.channels.lose(head, reason)
                return SmokeOutcome(False, f"{head}: {reason}", barred=(head,))
            if ordered.edges:
                outcome = pairs_outcome(test, ordered.edges, answers, nodes.owners, nodes.ports)
            else:
                outcome = collective_outcome(test, answers, ordered.orders)
        except Exception as problem:  # noqa: BLE001 - a bug of nodeready makes no suspect
            self.channels.lose_all(test.nodes, bug_text(problem))
            return SmokeOutcome(False, bug_text(problem), lost=test.nodes)
        seconds = time.monotonic() - began
        if outcome.ok:
            test_round.count_pass()
            durations = self._durations.setdefault(ordered.likeness, {})
            durations[ordered.world] = max(seconds, durations.get(ordered.world, 0.0))
        elif ordered.is_cut and seconds >= ordered.limit_s:
            return None
        return outcome

    # --- One round.

    def run(self, tests: Sequence[Test], kind: Kind | None = None) -> dict[int, SmokeOutcome]:
        """Run these tests in parallel. kind: None: that of the search. Raises OutOfTime."""
        choice, lost = self.nodes.choice, {*self.channels.lost}
        kinds = {True: kind or choice.single_node, False: kind or choice.kind}
        room_s = self.stop_at - time.monotonic() - _MARGIN_S
        ready = [
            self._order(test, kinds[len(test.nodes) == 1], max(room_s, 0.1))
            for test in tests
            if not lost & {*test.nodes}
        ]
        durations = [s for t in ready for s in self._durations.get(t.likeness, {}).values()]
        if room_s < max(MIN_TEST_S, 2 * max(durations, default=0.0)):
            raise OutOfTime
        purpose, title = tests[0].purpose, self._title(tests)
        has_pairs = any(ordered.edges for ordered in ready)
        test_round = _TestRound(len(ready), _MIN_PAIR_S if has_pairs else MIN_TEST_S)
        results: dict[int, SmokeOutcome | None] = {}

        def run_test(ordered: _OrderedTest) -> None:
            results[ordered.test.number] = self._test(ordered, test_round, done)

        with self.nodes.progress(title, {name for t in ready for name in t.orders}) as done:
            join_all([gevent.spawn(run_test, ordered) for ordered in ready])
        if purpose == "sweep" and not all(outcome and outcome.ok for outcome in results.values()):
            # A target gets no order, so its loss is not noticed yet.
            self.channels.drop_dead()
        self.count += 1
        self.last = max([self.last, *(test.number for test in tests)])
        self.nodes.report_excluded()
        outcomes, now_lost = {}, self.channels.lost.keys() - self.nodes.excluded.keys()
        for test in tests:
            names = tuple(name for name in test.nodes if name in now_lost)
            outcome = results.get(test.number, SmokeOutcome(False, f"{', '.join(names)} is lost"))
            if outcome is None:
                raise OutOfTime
            if names and not outcome.ok:
                outcome = replace(outcome, lost=names)
            outcomes[test.number] = outcome
        passed = sum(outcome.ok for outcome in outcomes.values())
        if passed < len(outcomes):
            self.nodes.tell(f"{title}: {passed} of {len(outcomes)} passed")
        elif purpose not in ("half", "confirm", "control"):
            self.turn += 1
        return outcomes

    def _title(self, tests: Sequence[Test]) -> str:
        if tests[0].purpose != "half":
            return _TITLES[tests[0].purpose]
        trials = self.knowledge.collectives()
        passed = {name for trial in trials if trial.outcome.ok for name in trial.test.nodes}
        names = [*dict.fromkeys(name for test in tests for name in test.nodes)]
        return f"halving {folded([n for n in names if n not in passed] or names, 40)}"

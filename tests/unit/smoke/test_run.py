"""The smoke test over simulated nodes: what is ordered, waited for, and said at the end.

The nodes are stand-ins in this process that take the orders and answer them, in simulated time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import gevent
import pytest
from gevent.queue import Empty, Queue

from nodeready.agent.asking import Conversation, NodeChannel, Request
from nodeready.agent.smoke import orders
from nodeready.agent.smoke.orders import (
    CollectiveAnswer,
    CollectiveOrder,
    EndOrder,
    Engine,
    Hello,
    PairAnswer,
    PairOrder,
    RankNetwork,
    RankResult,
    Try,
)
from nodeready.core.outcome import LOST, SUDO, UNREACHABLE, Gap, GapError
from nodeready.core.policy import Policy
from nodeready.runs.options import SmokeOptions
from nodeready.runs.smoke import document, participants, rounds
from nodeready.runs.smoke.participants import SmokeTask
from nodeready.runs.smoke.run import smoke
from nodeready.subjects.gpus.gpu import Gpu, GpuProcess, Gpus, Tool
from nodeready.subjects.snapshot import Snapshot
from tests.fake import Fake, says
from tests.unit.smoke.simulated_time import Clock, simulated_time

PAIRS = Engine("pairs", "tcp", "", "", "the path", "")
GLOO = Engine("torch", "gloo", "2.13.0", "", "PyTorch over TCP", "")
NCCL = replace(GLOO, backend="nccl", library="NCCL 2.28.3", proves="PyTorch over NCCL")
PORTS = (29500, 29501, 29502)


def named(count: int) -> list[str]:
    return [f"n{number:02}" for number in range(1, count + 1)]


@dataclass
class Cluster:
    names: list[str]
    broken: dict[str, str] = field(default_factory=dict)  # node -> what its ranks fail of
    hangs: list[set[str]] = field(default_factory=list)  # hang where all of them are in it
    spoilt: dict[str, list[set[str]]] = field(default_factory=dict)  # of an engine alone
    paths: set[tuple[str, str]] = field(default_factory=set)  # over which pairs time out
    frozen: dict[str, int] = field(default_factory=dict)  # after so many orders it is silent
    dead: dict[str, int] = field(default_factory=dict)  # or its connection ends
    silent: set[str] = field(default_factory=set)  # nodes that say no hello
    hellos: dict[str, dict[str, Any]] = field(default_factory=dict)  # node -> what differs
    lies: dict[str, str] = field(default_factory=dict)  # node -> in place of its answer
    engines: tuple[Engine, ...] = (GLOO, PAIRS)
    networks: dict[str, RankNetwork] = field(default_factory=dict)  # node -> what its ranks used
    taken: set[tuple[str, int]] = field(default_factory=set)  # node, port that somebody else has
    seconds: float = 1.0  # that a collective takes
    more_s: float = 0.0  # and one of several nodes in addition
    orders: list[tuple[str, Any, float]] = field(default_factory=list)  # node, order, moment
    nodes: dict[str, SimulatedNode] = field(default_factory=dict)
    tests: dict[int, dict[str, CollectiveOrder]] = field(default_factory=dict)
    faults: list[object] = field(default_factory=list)  # orders that a node got while it had one

    def of(self, kind: type[Any]) -> list[Any]:
        return [order for _, order, _ in self.orders if isinstance(order, kind)]

    def take(self, name: str, text: str, moment: float) -> None:
        order, node = orders.read(text), self.nodes[name]
        self.orders.append((name, order, moment))
        node.orders += 1
        if name in self.dead and node.orders > self.dead[name]:
            node.end("connection lost (it was rebooted)")
        elif name in self.frozen and node.orders > self.frozen[name]:
            node.mute = True
        elif isinstance(order, PairOrder):
            self.pair(name, order)
        elif isinstance(order, CollectiveOrder):
            self.collective(name, order)
        elif order.number in node.running:
            self.answer(name, node.running[order.number], "init", "did not finish in time")

    def collective(self, name: str, order: CollectiveOrder) -> None:
        node = self.nodes[name]
        if node.running:
            self.faults.append((name, order))
        node.running[order.number] = order
        together = self.tests.setdefault(order.number, {})
        together[name] = order
        if (name, order.head.port) in self.taken and name == order.head.name:
            self.answer(name, order, "init", "Address already in use")
            return
        if name in self.broken and order.engine == "torch":
            self.answer(name, order, "start", self.broken[name])
            return
        late = order.limit_s
        gevent.spawn_later(late, self.answer, name, order, "init", f"timed out after {late:g} s")
        if sum(part.ranks for part in together.values()) == order.world:
            seconds = self.seconds + self.more_s * (len(together) > 1)
            gevent.spawn_later(seconds, self.finish, order, {*together})

    def finish(self, order: CollectiveOrder, names: set[str]) -> None:
        stuck = [*self.hangs, *self.spoilt.get(order.engine, [])]
        stuck += [{name} for name in self.broken if order.engine == "torch"]
        stuck += [{name} for name in names if self.nodes[name].mute or self.nodes[name].error]
        if not any(together <= names for together in stuck):
            for name in names:
                self.answer(name, self.tests[order.number][name], "done", "")

    def answer(self, name: str, order: CollectiveOrder, phase: str, error: str) -> None:
        node = self.nodes[name]
        if node.running.pop(order.number, None) is None:
            return
        gbps = 10.0 if phase == "done" else 0.0
        ranks = tuple(
            RankResult(number, phase, "", error, 0.1, gbps, self.networks.get(name))
            for number in range(order.first, order.first + order.ranks)
        )
        lie = self.lies.get(name)
        if lie == "nonsense":
            node.lines.put(f"{node.nonce} collective {{}}")
        else:
            number = order.number + (lie == "another test")
            taken = f"port {order.head.port} is taken by mallory" if "in use" in error else ""
            node.say(
                "hello" if lie == "another row" else "collective",
                CollectiveAnswer(number, "", ranks, taken),
            )

    def pair(self, name: str, order: PairOrder) -> None:
        target, address = order.target.name, order.target.addresses[0]
        stuck = self.hangs if order.large > 1 << 20 else []
        dropped = (name, target) in self.paths or {name, target} in stuck
        tries = tuple(Try(port, "timeout" if dropped else "ok", 0.1, "") for port in order.ports)
        data = ("", 0.1, 0.0) if dropped else ("ok", 0.1, 1.0)
        paired = PairAnswer(order.number, target, (address,), "", address, tries, *data, 0)
        self.nodes[name].say("pair", paired)


class SimulatedNode(NodeChannel):
    def __init__(self, cluster: Cluster, clock: Clock, request: Request) -> None:
        self.cluster, self.clock = cluster, clock
        self.name, self.nonce, self.error = request.node, request.mark, ""
        self.lines: Queue[str | None] = Queue()
        self.orders, self.mute, self.closed = 0, False, False
        self.running: dict[int, CollectiveOrder] = {}

    def say(self, name: str, row: Any) -> None:
        if not (self.mute or self.error or self.closed):
            self.lines.put(f"{self.nonce} {name} {json.dumps(asdict(row))}")

    def end(self, error: str) -> None:
        self.error = error
        self.lines.put(None)

    def send_line(self, line: str) -> None:
        assert not self.closed
        self.cluster.take(self.name, line, self.clock.now)

    def read_line(self, limit_s: float) -> str | None:
        try:
            return self.lines.get(timeout=limit_s)
        except Empty:
            return None

    def close(self) -> None:
        self.closed = True


class Nodes(Fake):
    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        super().__init__(dict.fromkeys(cluster.names, says("")))
        self.cluster, self.clock = cluster, clock

    def open(self, request: Request) -> NodeChannel:
        name = request.node
        node = self.cluster.nodes[name] = SimulatedNode(self.cluster, self.clock, request)
        number = self.cluster.names.index(name) + 1
        hello = Hello(
            token=f"token-{name}", ports=PORTS, addresses=(f"10.0.0.{number}",),
            engines=self.cluster.engines, reason="",
        )  # fmt: skip
        if name not in self.cluster.silent:
            node.say("hello", replace(hello, **self.cluster.hellos.get(name, {})))
        return node


GPUS = Gpus(
    nvidia=tuple(Gpu(number, "nvidia", f"0000:0{number}:00.0") for number in range(4)),
    nvidia_tool=Tool("nvidia-smi", "ok"),
)


class Run:
    """One smoke test, what its user reads, and the rounds that the user sees.

    took_s: simulated seconds
    """

    def __init__(
        self, clock: Clock, cluster: Cluster, budget_s: int = 300,
        password: Any = lambda names: False, **task: Any,
    ) -> None:  # fmt: skip
        self.lines: list[str] = []
        self.rounds: list[tuple[str, set[str], set[str]]] = []
        self.nodes = Nodes(cluster, clock)
        policies = dict.fromkeys(cluster.names, Policy(port_range=(29500, 29502)))
        given = {"policies": policies, "deadline": clock.now + budget_s}
        given |= {
            name: task.pop(name) for name in ("policies", "inventory_addresses") if name in task
        }
        began = clock.now
        options = SmokeOptions(budget=budget_s, **task)
        self.task = SmokeTask(transport=self.nodes, options=options, **given)
        self.found = smoke(self.task, self.lines.append, self.progress, password)
        self.took_s = clock.now - began
        self.suspects = [(suspect.kind, suspect.nodes) for suspect in self.found.suspects]
        assert all(node.closed for node in cluster.nodes.values())
        assert not cluster.faults

    @contextmanager
    def progress(self, what: str, names: Iterable[str]) -> Iterator[Any]:
        done: set[str] = set()
        self.rounds.append((what, {*names}, done))
        yield done.add

    def of(self, *status: str) -> dict[str, str]:
        """The nodes of this status, with why."""
        return {node.name: node.absence for node in self.found.nodes if node.status in status}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    with simulated_time() as clock:
        # Its default is the real clock's function.
        plain = rounds._TestRound
        monkeypatch.setattr(rounds, "_TestRound", lambda *words: plain(*words, began=clock.now))
        yield clock


@pytest.fixture(autouse=True)
def replies(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """node -> the look at it, or the looks; without one, it shows no GPUs."""
    replies: dict[str, Any] = {}

    def take_snapshot(name: str, *_: Any, **how: Any) -> Conversation[Snapshot]:
        reply = replies.get(name, Snapshot({"gpus": Gpus()}))
        if isinstance(reply, list):
            reply = reply.pop(0)
        if isinstance(reply, Gap):
            raise GapError(reply)
        return reply
        yield  # type: ignore[unreachable]

    monkeypatch.setattr(participants, "take_snapshot", take_snapshot)
    return replies


# --- All is well.


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_nodes_that_are_well(clock, count):
    cluster = Cluster(named(count))
    done = Run(clock, cluster)
    assert done.suspects == []
    assert {*done.of("passed")} == {*cluster.names}
    assert (done.found.complete, done.found.stopped, done.found.control) == (True, "", "")
    assert (done.found.engine, done.found.proves) == ("torch 2.13.0 over gloo", "PyTorch over TCP")
    assert done.found.single_node_tests == count
    assert {(node.ranks, node.gpus, node.engine) for node in done.found.nodes} == {
        (2, (), "torch 2.13.0 over gloo")
    }
    (plan,) = done.lines
    assert plan.startswith(f"{count} node")
    assert plan.endswith("with 2 ranks each, torch 2.13.0 over gloo; budget 300 s")
    assert all(names == ended for _, names, ended in done.rounds)
    assert [what for what, *_ in done.rounds][:3] == ["looking", "starting", "alone"]
    # Alone, in groups, all together, a second each; nothing else takes time.
    assert done.took_s == pytest.approx(min(count, 3 if count > 3 else 2), abs=0.5)


@pytest.mark.parametrize(("count", "fault", "suspects"), [
    (2, {}, []),
    (12, {}, []),
    (12, {"paths": {("n02", "n07")}}, [("pair", ("n02", "n07"))]),
    (12, {"hangs": [{"n04", name} for name in named(12)]}, [("node", ("n04",))]),
    (12, {"frozen": {"n04": 1}}, [("node", ("n04",))]),
    (12, {"dead": {"n04": 1}}, [("node", ("n04",))]),
])  # fmt: skip
def test_without_pytorch_every_node_sends_to_the_next_one(clock, count, fault, suspects):
    cluster = Cluster(named(count), engines=(PAIRS,), **fault)
    done = Run(clock, cluster, engine="pairs")
    assert done.suspects == suspects
    assert (done.found.single_node_tests, cluster.of(CollectiveOrder)) == (0, [])
    assert done.found.engine == "pairs over tcp"
    assert {node.ranks for node in done.found.nodes} == {1}
    if not fault:
        assert {*done.of("passed")} == {*cluster.names}
        # All together; the rest are pairs of the sweep.
        last = max(order.number for order in cluster.of(PairOrder) if order.large > 1 << 20)
        targets = {
            name: order.target.name for name, order, _ in cluster.orders if order.number == last
        }
        assert targets == dict(zip(cluster.names, [*cluster.names[1:], "n01"], strict=True))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_who_takes_the_ports_of_a_good_node_has_it_not_suspected(clock, count):
    """Of its ports, so many are another user's whenever rank 0 is to have them."""
    cluster = Cluster(named(4), taken={("n02", port) for port in PORTS[:count]})
    done = Run(clock, cluster)
    assert done.suspects == []
    away = {"n02"} if count == len(PORTS) else set()
    told = done.of("untested")
    assert {*told} == away
    assert all("is taken by mallory" in why for why in told.values())
    assert {*done.of("passed")} == {*cluster.names} - away


def test_every_rank_has_one_number(clock):
    cluster = Cluster(named(5))
    Run(clock, cluster, ranks=3)
    for together in cluster.tests.values():
        parts = sorted(together.items(), key=lambda part: part[1].first)
        ranks = [order.first + index for _, order in parts for index in range(order.ranks)]
        assert ranks == [*range(3 * len(together))]
        assert {order.head.name for _, order in parts} == {parts[0][0]}
        for _, order in parts:
            peer = order.head
            assert peer.token == f"token-{peer.name}"
            assert peer.addresses == (f"10.0.0.{int(peer.name[1:])}",)
            assert peer.port in PORTS
            assert (order.small, order.large, order.engine) == (4096, 8 << 20, "torch")
            assert len(orders.line(order)) < 2000
    assert len({order.head.port for order in cluster.of(CollectiveOrder)}) > 1
    assert all(order.ports == PORTS for order in cluster.of(PairOrder))


# --- The culprit.


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 300), marks=pytest.mark.nightly)]
)
def test_the_culprit_is_named_and_nobody_else(clock, seeds):
    for seed in seeds:
        choose = random.Random(seed)
        names = named(choose.randint(4, 20))
        first, other = sorted(choose.sample(names, 2))
        fault, expected = choose.choice([
            ({}, []),
            ({"broken": {first: "no CUDA"}}, [("node", (first,))]),
            ({"hangs": [{first, other}]}, [("pair", (first, other))]),
            ({"spoilt": {"torch": [{first, other}]}}, [("pair", (first, other))]),
            ({"paths": {(first, other), (other, first)}}, [("pair", (first, other))]),
            ({"frozen": {first: choose.randint(1, 3)}}, [("node", (first,))]),
        ])  # fmt: skip
        done = Run(clock, Cluster(names, **fault))
        assert done.suspects == expected, (seed, fault)
        assert document.code(done.found) == (3 if expected else 0)
        assert done.took_s < 150, (seed, fault)


@pytest.mark.parametrize(("fault", "nodes", "sentence"), [
    ({"broken": {"n05": "no libcudart"}}, ["n05"], "alone it fails [5]: n05 local"),
    ({"hangs": [{"n02", "n07"}]}, ["n02", "n07"], "plain TCP fails on the same nodes, too: the"),
    ({"spoilt": {"torch": [{"n02", "n07"}]}}, ["n02", "n07"],
     "plain TCP passes on the same nodes: the path is good, PyTorch or its library is not"),
])  # fmt: skip
def test_the_evidence_tells_the_path_from_the_library(clock, fault, nodes, sentence):
    done = Run(clock, Cluster(named(8), **fault))
    assert done.of("suspect") == dict.fromkeys(nodes, "")
    assert len(done.of("passed")) == 8 - len(nodes)
    assert [why for why in done.found.suspects[0].evidence if why.startswith(sentence)]
    assert ("alone: 7 of 8 passed" in done.lines) == ("broken" in fault)
    assert (done.found.control == "pairs over tcp") == ("broken" not in fault)


def test_when_no_group_passes_the_other_engine_is_tried_once_with_all(clock):
    names = named(6)
    pairs = [{name, other} for name in names for other in names if name < other]
    cluster = Cluster(names, spoilt={"torch": pairs})
    done = Run(clock, cluster)
    controls = [order for order in cluster.of(PairOrder) if order.large > 1 << 20]
    assert len({order.number for order in controls}) == 1
    assert len(controls) == 6
    sentence = "plain TCP passes on the same nodes: the path is good"
    assert done.found.suspects
    for suspect in done.found.suspects:
        assert any(sentence in why for why in suspect.evidence)
    assert document.code(done.found) == 3


# --- Deadlines.


def test_a_test_that_hangs_ends_soon_after_most_others_have_passed(clock):
    cluster = Cluster(named(16), hangs=[{"n03", "n04"}])
    done = Run(clock, cluster)
    assert done.suspects == [("pair", ("n03", "n04"))]
    first = min(order.number for order in cluster.of(EndOrder))
    moments = [moment for _, order, moment in cluster.orders if order.number == first]
    assert max(moments) - min(moments) == pytest.approx(
        rounds.STRAGGLER_TIMES * cluster.seconds, abs=0.1
    )
    assert min(o.limit_s for o in cluster.of(CollectiveOrder) if o.number == first) > 8


def test_a_frozen_node_costs_one_deadline(clock):
    cluster = Cluster(named(9), frozen={"n04": 1})
    done = Run(clock, cluster)
    assert done.suspects == [("node", ("n04",))]
    (why,) = done.of("suspect").values()
    # 5 times the round's usual second, and the margin of an answer.
    assert why.startswith("lost: no answer in 11 s, in test ")
    assert done.found.suspects[0].evidence[0] == why
    assert any(line.startswith("n04: no answer in ") for line in done.lines)
    asked = [order for name, order, _ in cluster.orders if name == "n04"]
    assert len([order for order in asked if isinstance(order, CollectiveOrder)]) == 2
    assert len(done.of("passed")) == 8
    assert done.took_s < 25


def test_a_node_whose_connection_ends_is_lost_and_blames_nobody(clock):
    done = Run(clock, Cluster(named(9), dead={"n08": 2}))
    assert {*done.of("passed")} == {*named(9)} - {"n08"}
    assert done.suspects in ([("node", ("n08",))], [])
    assert done.of("suspect", "unreachable") == {"n08": "lost: connection lost (it was rebooted)"}


def test_when_the_budget_is_over_what_is_known_is_said(clock):
    endings = set()
    for budget_s in range(20, 90, 5):
        # n05 passes with no other node.
        names = named(16)
        alone = [{"n05", name} for name in names if name != "n05"]
        cluster = Cluster(names, hangs=alone, seconds=4.0)
        done = Run(clock, cluster, budget_s=budget_s)
        assert done.took_s <= budget_s
        ended = done.found.complete, done.found.control, document.code(done.found)
        assert ended == (True, "", 3)
        assert done.found.stopped in done.lines
        begin, _, end = done.found.stopped.partition(" was over in round ")
        assert begin == f"the budget of {budget_s} s"
        endings.add(end.partition(": ")[2])
    assert endings >= {"", "1 suspect was not confirmed"}, endings
    # A test that the budget cuts off tells nothing.
    done = Run(clock, Cluster(named(4), more_s=25.0), budget_s=25)
    assert done.suspects == []
    end = "was over in round 3: 4 nodes without a result"
    assert done.found.stopped == f"the budget of 25 s {end}"


@pytest.mark.parametrize("after_s", [0.5, 12.0])
def test_an_interrupt_ends_what_runs_and_keeps_what_is_known(clock, after_s):
    cluster = Cluster(named(8), broken={"n05": "no GPU"}, hangs=[{"n01", "n02"}])
    main = gevent.getcurrent()
    gevent.spawn_later(after_s, lambda: clock.run_callback(main.throw, KeyboardInterrupt()))
    done = Run(clock, cluster)
    assert done.took_s == after_s
    assert not done.found.complete
    assert done.found.stopped.startswith("interrupted in round ")
    assert document.code(done.found) == 130
    assert done.nodes.ended == 1
    if after_s > 10:
        assert ("node", ("n05",)) in done.suspects


# --- Who takes part.


def test_nodes_that_cannot_take_part_are_named_with_a_line_each(clock, replies):
    names = named(9)
    replies["n01"] = Gap(UNREACHABLE, "timed out")
    replies["n02"] = Gap(LOST, "connection lost while looking")
    replies["n03"] = Gap(SUDO, "sudo wants a password")
    cluster = Cluster(
        names,
        hellos={
            "n04": {"reason": "no session: exit status 1"},
            "n05": {"engines": (replace(GLOO, version="2.9.1"), PAIRS)},
            "n06": {"ports": (22,)},
        },
        silent={"n09"},
    )
    done = Run(clock, cluster)
    unreachable = {"n01": "timed out", "n02": "connection lost while looking"}
    assert done.of("unreachable") == unreachable
    assert done.of("untested") == {
        "n03": "sudo wants a password",
        "n04": "no session: exit status 1",
        "n05": "PyTorch 2.9.1 here, 2.13.0 on 2 nodes",
        "n06": "it listens on none of its ports",
        "n09": "did not start in 20 s",
    }
    assert done.of("passed") == {"n07": "", "n08": ""}
    assert sorted(line[:3] for line in done.lines if line[:1] == "n") == [*names[:6], "n09"]
    assert not {"n01", "n02", "n03"} & cluster.nodes.keys()


def test_no_node_can_take_part(clock):
    cluster = Cluster(named(2), hellos={name: {"reason": "no Python"} for name in named(2)})
    done = Run(clock, cluster)
    assert done.found.stopped == "no node could take part"
    assert done.of("untested") == dict.fromkeys(cluster.names, "no Python")
    assert not cluster.orders


def test_a_password_is_asked_for_once(clock, replies):
    fine = Snapshot({"gpus": Gpus()})
    replies["n02"] = [Gap(SUDO, "sudo wants a password"), fine, fine]
    asked: list[list[str]] = []
    done = Run(clock, Cluster(named(3)), password=lambda names: not asked.append(names))
    assert asked == [["n02"]]
    assert len(done.of("passed")) == 3


def test_gpus_are_ordered_by_their_numbers(clock, replies):
    names = named(3)
    busy = replace(GPUS.nvidia[1], processes=(GpuProcess(4711, "train", 100, "C"),))
    for name in names:
        replies[name] = Snapshot({"gpus": GPUS})
    gpus = (GPUS.nvidia[0], busy, *GPUS.nvidia[2:])
    replies["n02"] = Snapshot({"gpus": replace(GPUS, nvidia=gpus)})
    cluster = Cluster(names, engines=(NCCL, GLOO, PAIRS))
    done = Run(clock, cluster, gpus=(0, 2, 3))
    assert {*done.of("passed")} == {*names}
    assert {node.gpus for node in done.found.nodes} == {(0, 2, 3)}
    assert {node.slots for node in done.found.nodes} == {4}
    several = [order for order in cluster.of(CollectiveOrder) if order.world > 3]
    sizes = {(order.gpus, order.ranks, order.large) for order in several}
    assert sizes == {((0, 2, 3), 3, 256 << 20)}
    assert done.found.engine == "torch 2.13.0 over nccl"


def test_an_engine_that_is_missing_is_told_with_the_one_in_its_place(clock):
    done = Run(clock, Cluster(named(3), engines=(replace(GLOO, reason="no torch"), PAIRS)))
    assert done.lines[0] == "engine pairs over tcp: no PyTorch over gloo: no torch"


# --- Nodes that lie.


def test_a_node_cannot_send_others_to_an_address_that_is_not_its_own(clock):
    """n03 has none of its own: it is out."""
    lies = {"n03": ("10.0.0.1",), "n04": ("10.0.0.1", "10.0.0.4", "10.9.9.9")}
    hellos = {name: {"addresses": addresses} for name, addresses in lies.items()}
    cluster = Cluster(named(4), hellos=hellos)
    done = Run(clock, cluster, inventory_addresses={"10.0.0.1": "n01", "10.0.0.4": "n04"})
    why = "it has no address of its own (10.0.0.1: n01, n03, n04)"
    assert done.of("untested") == {"n03": why}
    assert {*done.of("passed")} == {"n01", "n02", "n04"}
    heads = {order.head.name: order.head.addresses for order in cluster.of(CollectiveOrder)}
    assert "10.0.0.1" not in heads["n04"]
    assert heads["n01"] == ("10.0.0.1",)


@pytest.mark.parametrize("lie", ["another test", "nonsense", "another row"])
def test_an_answer_that_makes_no_sense_costs_its_node_alone(clock, lie):
    done = Run(clock, Cluster(named(6), lies={"n03": lie}))
    assert {*done.of("passed")} == {*named(6)} - {"n03"}
    assert "makes no sense" in done.of("suspect", "unreachable")["n03"]


def test_below_the_policys_floor_is_no_go(clock):
    """However alike the nodes are: each is judged by its best test."""
    cluster = Cluster(named(3))
    policies = dict.fromkeys(cluster.names, Policy(port_range=(29500, 29502)))
    policies["n02"] = replace(policies["n02"], smoke_min_gbps=400)
    done = Run(clock, cluster, policies=policies)
    assert done.suspects == [("node", ("n02",))]
    assert "the policy wants 400 (smoke_min_gbps)" in done.found.suspects[0].evidence[0]
    assert document.code(done.found) == 3


def test_a_node_that_fell_back_to_sockets_is_a_warning_and_by_the_policy_no_go(clock):
    infiniband = RankNetwork("IB", "eth0", ("mlx5_0:1/IB",), gdr=True)
    socket = RankNetwork("Socket", "eth0", (), gdr=False, note="NCCL sees no RDMA device")
    networks = {"n01": infiniband, "n02": socket, "n03": infiniband}
    done = Run(clock, Cluster(named(3), networks=networks))
    assert done.of("warned") == {"n02": ""}
    node = done.found.nodes[1]
    assert (node.network, node.interface, node.gdr) == ("Socket", "eth0", False)
    (warning,) = node.warnings
    assert warning == "NCCL uses Socket over eth0, most nodes IB: NCCL sees no RDMA device"
    policies = dict.fromkeys(named(3), Policy(port_range=(29500, 29502), nccl_network="IB"))
    done = Run(clock, Cluster(named(3), networks=networks), policies=policies)
    assert done.suspects == [("node", ("n02",))]
    assert "the policy wants IB (nccl_network)" in done.found.suspects[0].evidence[0]
    assert (done.found.nodes[1].warnings, document.code(done.found)) == ((), 3)


def test_the_meaning_of_nccls_error_stands_behind_the_evidence(clock):
    error = (
        "NCCL error: remote process exited or there was a network error (NET/IB : Got completion "
        "from peer 10.0.0.1<47111> with status=12 opcode=0 len=0 vendor err 129 (Recv))"
    )
    done = Run(clock, Cluster(named(4), broken={"n02": error}, engines=(GLOO, PAIRS)))
    (suspect,) = done.found.suspects
    meanings = [text for text in suspect.evidence if text.endswith("[ib-retry]")]
    assert (suspect.nodes, len(meanings)) == (("n02",), 1)
    assert meanings[0].startswith("the peer's port does not answer")
    done = Run(clock, Cluster(named(4), broken={"n02": "Connection closed by peer"}))
    assert not [text for text in done.found.suspects[0].evidence if "closed]" in text]


def test_what_got_worse_is_a_warning(clock, replies):
    gpus = [replace(GPUS.nvidia[2], ecc_uncorrectable_volatile=errors) for errors in (0, 3)]
    replies["n02"] = [
        Snapshot({"gpus": replace(GPUS, nvidia=(*GPUS.nvidia[:2], gpu))}) for gpu in gpus
    ]
    done = Run(clock, Cluster(named(3)), gpus=0)
    assert done.of("warned") == {"n02": ""}
    warnings = {node.name: node.warnings for node in done.found.nodes}
    assert warnings["n02"] == ("GPU 2: 3 new uncorrected ECC errors during the test",)

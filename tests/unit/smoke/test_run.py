"""The smoke test over nodes that are not there: what is ordered, waited for, and said at the end.

The nodes are stand-ins in this process that take the orders and answer them; time is real, and
short.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import gevent
import pytest
from gevent.queue import Empty, Queue

from nodeready.node.smoke import orders
from nodeready.node.smoke.orders import (
    Collective,
    End,
    Engine,
    Hello,
    Pair,
    Paired,
    Ran,
    Rank,
    Try,
)
from nodeready.policy import Policy
from nodeready.smoke import document, run
from nodeready.smoke.run import Task, smoke
from nodeready.subjects.gpus.gpu import Gpu, GpuProcess, Gpus, Tool
from nodeready.subjects.snapshot import Snapshot
from nodeready.transport.base import LOST, SUDO, UNREACHABLE, Channel, Conversation, Request
from nodeready.transport.look import Look
from tests.fake import Fake, says

RING = Engine("ring", "tcp", "", "", "", "the path", "")
GLOO = Engine("torch", "gloo", "2.13.0", "", "/opt/bin/python", "PyTorch over TCP", "")
NCCL = replace(GLOO, backend="nccl", library="NCCL 2.28.3", proves="PyTorch over NCCL")
PORTS = (29500, 29501, 29502)
#: Of every test.
LIMIT_S = 2.0


def named(count: int) -> list[str]:
    return [f"n{number:02}" for number in range(1, count + 1)]


@dataclass
class Cluster:
    """The nodes, and what is wrong with them.

    broken:  node -> what its ranks fail of at their start
    hangs:   sets of nodes that cannot be in one test together: the test hangs
    paths:   (source, target) over which pairs time out
    frozen:  node -> the moment after which it says nothing, while its connection stays
    dead:    node -> the moment of its connection's end
    engines: of each node, without those of `spoilt`, which only ``spoilt`` fails over
    said:    every order, with the node and the moment
    """

    names: list[str]
    broken: dict[str, str] = field(default_factory=dict)
    hangs: list[set[str]] = field(default_factory=list)
    spoilt: dict[str, list[set[str]]] = field(default_factory=dict)
    paths: set[tuple[str, str]] = field(default_factory=set)
    frozen: dict[str, int] = field(default_factory=dict)
    dead: dict[str, int] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    hellos: dict[str, dict[str, Any]] = field(default_factory=dict)
    engines: tuple[Engine, ...] = (GLOO, RING)
    seconds: float = 0.01
    said: list[tuple[str, Any, float]] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    tests: dict[int, dict[str, Collective]] = field(default_factory=dict)

    def of(self, kind: type[Any]) -> list[Any]:
        return [order for _, order, _ in self.said if isinstance(order, kind)]

    def ordered(self, name: str, text: str) -> None:
        order = orders.read(text)
        self.said.append((name, order, time.monotonic()))
        node = self.nodes[name]
        node.orders += 1
        if name in self.dead and node.orders > self.dead[name]:
            node.end("connection lost (it was rebooted)")
        elif name in self.frozen and node.orders > self.frozen[name]:
            node.mute = True
        elif isinstance(order, Pair):
            gevent.spawn(self.pair, name, order)
        elif isinstance(order, Collective):
            self.collective(name, order)
        elif order.number in node.running:
            self.answer(name, node.running[order.number], "init", "did not finish in time")

    def collective(self, name: str, order: Collective) -> None:
        node = self.nodes[name]
        node.running[order.number] = order
        together = self.tests.setdefault(order.number, {})
        together[name] = order
        if name in self.broken and order.engine == "torch":
            self.answer(name, order, "start", self.broken[name])
            return
        late = order.limit_s
        gevent.spawn_later(late, self.answer, name, order, "init", f"timed out after {late:g} s")
        if sum(one.ranks for one in together.values()) == order.world:
            gevent.spawn_later(self.seconds, self.done, order.number, {*together})

    def done(self, number: int, names: set[str]) -> None:
        one = next(iter(self.tests[number].values()))
        stuck = [*self.hangs, *self.spoilt.get(one.engine, [])]
        stuck += [{name} for name in self.broken if one.engine == "torch"]
        stuck += [{name} for name in names if self.nodes[name].mute or self.nodes[name].error]
        if not any(together <= names for together in stuck):
            for name in names:
                self.answer(name, self.tests[number][name], "done", "")

    def answer(self, name: str, order: Collective, phase: str, said: str) -> None:
        if self.nodes[name].running.pop(order.number, None) is None:
            return
        ranks = tuple(
            Rank(rank, -1, phase, "", said, -1, 0.1, 10.0 if phase == "done" else 0.0, 0, 0.1)
            for rank in range(order.first, order.first + order.ranks)
        )
        self.nodes[name].say("ran", Ran(order.number, "", ranks))

    def pair(self, name: str, order: Pair) -> None:
        target = order.target.name
        bad = (name, target) in self.paths
        tries = tuple(Try(port, "timeout" if bad else "ok", 0.1, "") for port in order.ports)
        address = order.target.addresses[0]
        self.nodes[name].say(
            "paired",
            Paired(order.number, target, (address,), "", address, tries, "" if bad else "ok",
                   0.1, 0.0 if bad else 1.0, 0, 1),
        )  # fmt: skip


class Node(Channel):
    """One node's program."""

    def __init__(self, cluster: Cluster, name: str, nonce: str) -> None:
        self.cluster, self.name, self.nonce, self.error = cluster, name, nonce, ""
        self.lines: Queue[str | None] = Queue()
        self.orders, self.mute, self.closed = 0, False, False
        self.running: dict[int, Collective] = {}

    def say(self, name: str, seen: Any) -> None:
        if not (self.mute or self.error or self.closed):
            self.lines.put(f"{self.nonce} {name} {json.dumps(asdict(seen))}")

    def end(self, error: str) -> None:
        self.error = error
        self.lines.put(None)

    def send_line(self, line: str) -> None:
        assert not self.closed
        self.cluster.ordered(self.name, line)

    def read_line(self, limit_s: float) -> str | None:
        try:
            return self.lines.get(timeout=limit_s)
        except Empty:
            return None

    def close(self) -> None:
        self.closed = True


class Nodes(Fake):
    """Reaches the nodes of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(dict.fromkeys(cluster.names, says("")))
        self.cluster = cluster

    def open(self, request: Request) -> Channel:
        self.asked.append(request)
        name = request.node
        node = self.cluster.nodes[name] = Node(self.cluster, name, request.mark)
        number = self.cluster.names.index(name) + 1
        hello = Hello(
            host=name, user="ada", token=f"token-{name}", ports=PORTS, busy=(),
            addresses=(f"10.0.{number >> 8}.{number & 255}",), gpus=0,
            engines=self.cluster.engines, why="",
        )  # fmt: skip
        if name not in self.cluster.silent:
            node.say("hello", replace(hello, **self.cluster.hellos.get(name, {})))
        return node


GPUS = Gpus(
    nvidia=tuple(Gpu(number, "nvidia", f"0000:0{number}:00.0") for number in range(4)),
    nvidia_tool=Tool("nvidia-smi", "ok"),
)
#: What the look at each node sees: a Snapshot, or why there was none.
Seen = Mapping[str, "Snapshot | Look"]


class Told:
    """What a person is told, and the rounds that he sees."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.rounds: list[tuple[str, set[str], set[str]]] = []

    def tell(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def progress(self, what: str, names: Iterable[str]) -> Iterator[Any]:
        done: set[str] = set()
        self.rounds.append((what, {*names}, done))
        yield done.add


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The looks at the nodes; as nothing else is said, they see no GPUs."""
    seen: dict[str, Any] = {}

    def look_at(name: str, *_: Any, **how: Any) -> Conversation[Look]:
        found = seen.get(name, Snapshot({"gpus": Gpus()}))
        if isinstance(found, list):
            found = found.pop(0)
        return found if isinstance(found, Look) else Look(name, found)
        yield  # type: ignore[unreachable]

    monkeypatch.setattr(run, "look_at", look_at)
    for name in ("_MARGIN_S", "_GRACE_S", "_START_LEAST_S", "_LEAST_S", "_PAIR_LEAST_S"):
        monkeypatch.setattr(run, name, 0.3)
    monkeypatch.setattr(run.judge, "seconds", lambda *_, **__: LIMIT_S)
    return seen


def smoke_of(cluster: Cluster, budget_s: int = 60, **more: Any) -> tuple[document.Smoke, Told]:
    told, carrier = Told(), Nodes(cluster)
    policies = dict.fromkeys(cluster.names, Policy(port_range=(29500, 29502)))
    how = {"policies": policies, "deadline": time.monotonic() + budget_s, **more}
    found = smoke(Task(carrier=carrier, budget_s=budget_s, **how), told.tell, told.progress)
    assert all(node.closed for node in cluster.nodes.values())
    return found, told


def rows(found: document.Smoke, *status: str) -> dict[str, str]:
    return {one.name: one.why for one in found.nodes if one.status in status}


def suspects(found: document.Smoke) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.kind, one.nodes) for one in found.suspects]


# --- All is well.


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_nodes_that_are_well(count):
    cluster = Cluster(named(count))
    found, told = smoke_of(cluster)
    assert not found.suspects
    assert {*rows(found, "passed")} == {*cluster.names}
    assert (found.complete, found.stopped, found.control) == (True, "", "")
    assert (found.engine, found.proves) == ("torch 2.13.0 over gloo", "PyTorch over TCP")
    assert found.alone == count
    assert {(one.ranks, one.gpus, one.engine) for one in found.nodes} == {
        (2, (), "torch 2.13.0 over gloo")
    }
    (plan,) = told.lines
    assert plan.startswith(f"{count} node")
    assert "with 2 ranks each, torch 2.13.0 over gloo: each alone" in plan
    assert plan.endswith("s when all is well, budget 60 s")
    assert all(names == done for _, names, done in told.rounds)
    assert [what for what, *_ in told.rounds][:3] == ["looking", "starting", "alone"]


def test_every_rank_has_one_number_and_the_ring_goes_around():
    cluster = Cluster(named(5))
    smoke_of(cluster, ranks=3)
    for together in cluster.tests.values():
        ranks = [one.first + at for one in together.values() for at in range(one.ranks)]
        assert sorted(ranks) == [*range(3 * len(together))]
        by_rank = sorted(together, key=lambda name: together[name].first)
        following = [*by_rank[1:], by_rank[0]] if len(by_rank) > 1 else [None]
        assert [one.next.name if one.next else None for _, one in sorted(
            together.items(), key=lambda pair: pair[1].first)] == following  # fmt: skip
        assert {one.head.name for one in together.values()} == {by_rank[0]}
        for one in together.values():
            for peer in filter(None, (one.head, one.next)):
                assert peer.token == f"token-{peer.name}"
                assert peer.addresses == (f"10.0.0.{int(peer.name[1:])}",)
                assert peer.port in PORTS
            assert (one.small, one.large, one.engine) == (4096, 8 << 20, "torch")
    heads = {one.head.port for one in cluster.of(Collective)}
    assert len(heads) > 1
    assert all(one.ports == PORTS for one in cluster.of(Pair))


def test_no_node_has_two_orders_at_a_time():
    cluster = Cluster(named(9), hangs=[{"n03", "n07"}])
    smoke_of(cluster)
    numbers: dict[str, list[int]] = {}
    for name, order, _ in cluster.said:
        if not isinstance(order, End):
            numbers.setdefault(name, []).append(order.number)
    assert all(len({*one}) == len(one) for one in numbers.values())


# --- Who spoils it.


def test_a_node_whose_rank_dies_is_named_and_the_ring_shows_that_the_path_is_good():
    cluster = Cluster(named(8), broken={"n05": "ImportError: libcudart.so.12"})
    began = time.monotonic()
    found, told = smoke_of(cluster)
    assert suspects(found) == [("node", ("n05",))]
    assert "libcudart" in " ".join(found.suspects[0].evidence)
    assert rows(found, "suspect") == {"n05": ""}
    assert len(rows(found, "passed")) == 7
    assert "alone: 7 of 8 passed" in told.lines
    assert time.monotonic() - began < 20


def test_nodes_that_do_not_pass_together_are_a_pair():
    cluster = Cluster(named(8), hangs=[{"n02", "n07"}])
    found, _ = smoke_of(cluster)
    assert suspects(found) == [("pair", ("n02", "n07"))]
    assert len(rows(found, "passed")) == 6
    (evidence,) = [one for one in found.suspects[0].evidence if "the ring" in one]
    assert evidence.startswith("the ring fails on the same nodes, too: the path (")
    assert found.control == "ring over tcp"


def test_a_pair_that_only_the_library_separates():
    cluster = Cluster(named(8), spoilt={"torch": [{"n02", "n07"}]})
    found, _ = smoke_of(cluster)
    assert suspects(found) == [("pair", ("n02", "n07"))]
    assert (
        found.suspects[0]
        .evidence[-1]
        .startswith(
            "the ring passes on the same nodes: the path is good, PyTorch or its library is not ["
        )
    )


def test_when_no_group_passes_the_other_engine_is_tried_once_with_all():
    names = named(6)
    pairs = [{one, other} for one in names for other in names if one < other]
    cluster = Cluster(names, spoilt={"torch": pairs})
    found, _ = smoke_of(cluster)
    controls = {one.number for one in cluster.of(Collective) if one.engine == "ring"}
    assert len(controls) == 1
    assert {one.world for one in cluster.of(Collective) if one.engine == "ring"} == {6}
    sentence = "the ring passes on the same nodes: the path is good"
    assert found.suspects
    assert all(any(sentence in row for row in one.evidence) for one in found.suspects)
    assert document.code(found) == 3


def test_a_path_that_only_pairs_show():
    cluster = Cluster(named(6), paths={("n02", "n05"), ("n05", "n02")})
    found, _ = smoke_of(cluster)
    assert suspects(found) == [("pair", ("n02", "n05"))]


# --- Deadlines.


def test_a_test_that_hangs_ends_soon_after_most_others_have_passed():
    cluster = Cluster(named(16), hangs=[{"n03", "n04"}])
    found, _ = smoke_of(cluster)
    assert suspects(found) == [("pair", ("n03", "n04"))]
    limits = {one.number: one.limit_s for one in cluster.of(Collective)}
    ended = {one.number for one in cluster.of(End)}
    first = min(ended)
    began = min(at for _, order, at in cluster.said if order.number == first)
    told = min(at for _, order, at in cluster.said if order == End(first))
    assert told - began < 1.5 < limits[first]


def test_a_frozen_node_costs_one_deadline():
    cluster = Cluster(named(9), frozen={"n04": 1})
    began = time.monotonic()
    found, told = smoke_of(cluster)
    assert suspects(found) == [("node", ("n04",))]
    (why,) = rows(found, "suspect").values()
    assert why.startswith("lost: no answer in ")
    assert found.suspects[0].evidence[0] == why
    assert any(line.startswith("n04: no answer in ") for line in told.lines)
    silent = [order for name, order, _ in cluster.said if name == "n04"]
    assert len([order for order in silent if isinstance(order, Collective)]) == 2
    assert len(rows(found, "passed")) == 8
    assert time.monotonic() - began < 20


def test_a_node_whose_connection_ends_is_lost_and_blames_nobody():
    cluster = Cluster(named(9), dead={"n08": 2})
    found, _ = smoke_of(cluster)
    assert {*rows(found, "passed")} == {*named(9)} - {"n08"}
    assert [nodes for _, nodes in suspects(found)] in ([("n08",)], [])
    (node,) = [one for one in found.nodes if one.name == "n08"]
    assert node.why == "lost: connection lost (it was rebooted)"


def test_when_the_budget_is_over_what_is_known_is_said(monkeypatch):
    names = named(16)
    cluster = Cluster(names, hangs=[{"n01", "n16"}, {"n02", "n15"}], seconds=0.4)
    began = time.monotonic()
    found, told = smoke_of(cluster, budget_s=4)
    assert time.monotonic() - began < 10
    assert found.complete
    assert found.stopped.startswith("the budget of 4 s was over in round ")
    assert found.stopped in told.lines
    assert not found.control
    assert document.code(found) == 3


@pytest.mark.parametrize("after", [0.05, 1.0])
def test_an_interrupt_ends_what_runs_and_keeps_what_is_known(after):
    cluster = Cluster(named(8), broken={"n05": "no GPU"}, hangs=[{"n01", "n02"}], seconds=0.2)
    main = gevent.getcurrent()
    hub = gevent.get_hub().loop
    gevent.spawn_later(after, lambda: hub.run_callback(main.throw, KeyboardInterrupt()))
    carriers: list[Nodes] = []
    told = Told()
    carriers.append(Nodes(cluster))
    policies = dict.fromkeys(cluster.names, Policy(port_range=(29500, 29502)))
    task = Task(carriers[0], policies, time.monotonic() + 60, 60)
    began = time.monotonic()
    found = smoke(task, told.tell, told.progress)
    assert time.monotonic() - began < after + 2
    assert not found.complete
    assert found.stopped.startswith("interrupted in round ")
    assert document.code(found) == 130
    assert carriers[0].ended == 1
    assert all(node.closed for node in cluster.nodes.values())
    if after == 1.0:
        assert suspects(found)[0] == ("node", ("n05",))


# --- Who takes part.


def test_nodes_that_cannot_take_part_are_named_with_a_line_each(looks):
    names = named(8)
    looks["n01"] = Look("n01", error="timed out", kind=UNREACHABLE)
    looks["n02"] = Look("n02", error="connection lost while looking", kind=LOST)
    looks["n03"] = Look("n03", error="sudo wants a password", kind=SUDO)
    old = replace(GLOO, version="2.9.1")
    cluster = Cluster(
        names,
        hellos={
            "n04": {"why": "no session: exit status 1"},
            "n05": {"engines": (old, RING)},
            "n06": {"ports": (22,)},
        },
    )
    found, told = smoke_of(cluster)
    assert rows(found, "unreachable") == {
        "n01": "timed out", "n02": "connection lost while looking",
    }  # fmt: skip
    untested = rows(found, "untested")
    assert untested.pop("n05").startswith("PyTorch 2.9.1 here, 2.13.0 on 2 nodes")
    assert untested == {
        "n03": "sudo wants a password",
        "n04": "no session: exit status 1",
        "n06": "it listens on none of its ports",
    }
    assert rows(found, "passed") == {"n07": "", "n08": ""}
    lines = [line for line in told.lines if line[:1] == "n"]
    assert sorted(line[:3] for line in lines) == names[:6]
    assert not {"n01", "n02", "n03"} & cluster.nodes.keys()


def test_a_node_that_does_not_start_costs_no_more_than_most_show(monkeypatch):
    cluster = Cluster(named(5), silent={"n02"})
    began = time.monotonic()
    found, _ = smoke_of(cluster)
    assert rows(found, "untested")["n02"].startswith("did not start in ")
    assert {*rows(found, "passed")} == {"n01", "n03", "n04", "n05"}
    assert time.monotonic() - began < 20


def test_no_node_can_take_part():
    cluster = Cluster(named(2), hellos={name: {"why": "no Python"} for name in named(2)})
    found, _ = smoke_of(cluster)
    assert found.stopped == "no node could take part"
    assert rows(found, "untested") == dict.fromkeys(cluster.names, "no Python")
    assert not cluster.said


def test_a_password_is_asked_for_once(looks):
    cluster = Cluster(named(3))
    fine = Look("n02", Snapshot({"gpus": Gpus()}))
    looks["n02"] = [Look("n02", error="sudo wants a password", kind=SUDO), fine, fine]
    asked, told = [], Told()
    policies = dict.fromkeys(cluster.names, Policy(port_range=(29500, 29502)))
    task = Task(Nodes(cluster), policies, time.monotonic() + 60, 60)
    found = smoke(task, told.tell, told.progress, lambda names: not asked.append(names))
    assert asked == [["n02"]]
    assert len(rows(found, "passed")) == 3


def test_gpus_are_ordered_by_their_numbers(looks):
    names = named(3)
    busy = replace(GPUS.nvidia[1], processes=(GpuProcess(4711, "train", 100, "C"),))
    for name in names:
        looks[name] = Snapshot({"gpus": GPUS})
    looks["n02"] = Snapshot(
        {"gpus": replace(GPUS, nvidia=(GPUS.nvidia[0], busy, *GPUS.nvidia[2:]))}
    )
    cluster = Cluster(
        names, engines=(NCCL, GLOO, RING), hellos={name: {"gpus": 4} for name in names}
    )
    found, _ = smoke_of(cluster, gpus=(0, 2, 3))
    assert {*rows(found, "passed")} == {*names}
    assert {one.gpus for one in found.nodes} == {(0, 2, 3)}
    several = [one for one in cluster.of(Collective) if one.next]
    assert {(one.gpus, one.ranks, one.large) for one in several} == {((0, 2, 3), 3, 256 << 20)}
    assert found.engine == "torch 2.13.0 over nccl"


def test_only_the_wanted_engine_is_looked_for():
    cluster = Cluster(named(3), engines=(RING,))
    found, _ = smoke_of(cluster, engine="ring")
    assert found.engine == "ring over tcp"
    assert {(one.engine, one.ranks) for one in cluster.of(Collective)} == {("ring", 1)}
    assert {one.ranks for one in found.nodes} == {1}


# --- Nodes that lie.


def test_a_node_cannot_send_others_to_an_address_that_is_not_its_own():
    names = named(4)
    cluster = Cluster(names, hellos={"n04": {"addresses": ("10.0.0.1", "10.0.0.4", "10.9.9.9")}})
    given = {f"10.0.0.{number}": name for number, name in enumerate(names, 1)}
    found, _ = smoke_of(cluster, given=given)
    assert len(rows(found, "passed")) == 4
    for order in cluster.of(Collective):
        if order.head.name == "n04":
            assert "10.0.0.1" not in order.head.addresses
        if order.head.name == "n01":
            assert order.head.addresses == ("10.0.0.1",)


def test_a_node_with_no_address_of_its_own_is_out():
    cluster = Cluster(named(3), hellos={"n03": {"addresses": ("10.0.0.1",)}})
    found, _ = smoke_of(cluster, given={"10.0.0.1": "n01"})
    assert rows(found, "untested") == {"n03": "it has no address of its own (10.0.0.1: n01, n03)"}
    assert {*rows(found, "passed")} == {"n01", "n02"}


@pytest.mark.parametrize("lie", ["another test", "nonsense", "another row"])
def test_an_answer_that_makes_no_sense_costs_its_node_alone(lie, monkeypatch):
    cluster = Cluster(named(6))
    answer = cluster.answer

    def lies(name: str, order: Collective, phase: str, said: str) -> None:
        if name != "n03" or cluster.nodes[name].running.pop(order.number, None) is None:
            answer(name, order, phase, said)
        elif lie == "another test":
            cluster.nodes[name].say("ran", Ran(order.number + 1, "", ()))
        elif lie == "nonsense":
            cluster.nodes[name].lines.put(f"{cluster.nodes[name].nonce} ran {{}}")
        else:
            cluster.nodes[name].say("hello", Ran(order.number, "", ()))

    monkeypatch.setattr(cluster, "answer", lies)
    found, _ = smoke_of(cluster)
    assert {*rows(found, "passed")} == {*cluster.names} - {"n03"}
    (node,) = [one for one in found.nodes if one.name == "n03"]
    assert "makes no sense" in node.why


def test_below_the_policys_floor_is_no_go():
    """However alike the nodes are: each is judged by its best test."""
    cluster = Cluster(named(3))
    policies = dict.fromkeys(cluster.names, Policy(port_range=(29500, 29502)))
    policies["n02"] = replace(policies["n02"], smoke_min_gbps=400)
    found, _ = smoke_of(cluster, policies=policies)
    assert suspects(found) == [("node", ("n02",))]
    assert "the policy wants 400 (smoke_min_gbps)" in found.suspects[0].evidence[0]
    assert document.code(found) == 3


# --- Afterwards.


def test_what_got_worse_is_a_warning(looks):
    worn = replace(GPUS.nvidia[2], ecc_uncorrectable_volatile=3)
    fresh = replace(GPUS.nvidia[2], ecc_uncorrectable_volatile=0)
    looks["n02"] = [
        Snapshot({"gpus": replace(GPUS, nvidia=(*GPUS.nvidia[:2], one))}) for one in (fresh, worn)
    ]
    cluster = Cluster(named(3))
    found, _ = smoke_of(cluster, gpus=0)
    assert rows(found, "warned") == {"n02": ""}
    (node,) = [one for one in found.nodes if one.name == "n02"]
    assert node.warnings == ("GPU 2: 3 new uncorrected ECC errors during the test",)


def test_as_many_orders_as_nodes_and_tests():
    cluster = Cluster(named(64), seconds=0.0)
    began = time.monotonic()
    found, _ = smoke_of(cluster)
    assert not found.suspects
    assert time.monotonic() - began < 20
    assert all(len(orders.line(one)) < 2000 for one in cluster.of(Collective))

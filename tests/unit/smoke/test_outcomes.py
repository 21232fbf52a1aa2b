"""What answers and snapshots show: which rank failed by itself, which engine and GPUs a test may
have, what got worse. The cases are rows of outcomes.json.
"""

from dataclasses import replace
from typing import Any

import pytest

from nodeready.agent.proofs.mesh import Try
from nodeready.agent.smoke.orders import (
    CollectiveAnswer,
    CollectiveOrder,
    Engine,
    Hello,
    PairAnswer,
    RankResult,
    SmokePeer,
)
from nodeready.core.base import Unknown
from nodeready.core.outcome import FAILED, Gap, Outcome
from nodeready.core.policy import Policy
from nodeready.runs.ready.mesh import Owners
from nodeready.runs.smoke.document import LinkBandwidth, below_floor, links
from nodeready.runs.smoke.knowledge import SmokeOutcome, Test
from nodeready.runs.smoke.outcomes import collective_outcome, pair_outcome, pairs_outcome
from nodeready.runs.smoke.participants import choose, idle_gpus, limit_s
from nodeready.runs.smoke.run import regressions
from nodeready.subjects.gpus.gpu import Gpu, GpuProcess, Gpus, KernelFault, PciGpu, Tool
from nodeready.subjects.nics.facts import Nics
from nodeready.subjects.nics.nic import Nic
from nodeready.subjects.rdma.facts import Rdma, RdmaDevice, RdmaPort
from nodeready.subjects.snapshot import Snapshot
from tests.cases import cases


def rows(section: str) -> list[Any]:
    return cases(__file__, "outcomes.json", section)


# --- Tests of several ranks, two on each node.

NAMES = ("gpu01", "gpu02", "gpu03", "gpu04")
TEST = Test(7, "group", NAMES)
STUCK = {"phase": "all_reduce"}


def rank(number: int, phase: str = "done", **changed: Any) -> RankResult:
    passed = RankResult(number, phase, "", "", 1.0 + number, 90.0 - number)
    return replace(passed, **changed)


def orders(gpus: tuple[int, ...] = ()) -> dict[str, CollectiveOrder]:
    head = SmokePeer("", (), 1, "")
    return {
        name: CollectiveOrder(7, "torch", "gloo", 8, 2 * index, 2, gpus, head, 4096, 8 << 20, 20.0)
        for index, name in enumerate(NAMES)
    }


def answers(**changed: Any) -> dict[str, Any]:
    """The answers of all nodes. gpu02: that node's own, or its error; r3: what differs in rank 3,
    every: in all ranks.
    """
    ranks = [
        rank(number, **{**changed.get("every", {}), **changed.get(f"r{number}", {})})
        for number in range(8)
    ]
    found = {
        name: CollectiveAnswer(7, "", (ranks[2 * n], ranks[2 * n + 1]))
        for n, name in enumerate(NAMES)
    }
    for name in NAMES:
        answer = changed.get(name, found[name])
        found[name] = (
            CollectiveAnswer(7, answer["error"], ()) if isinstance(answer, dict) else answer
        )
    return found


def test_all_ranks_pass_and_the_slowest_counts():
    assert collective_outcome(TEST, answers(), orders()) == SmokeOutcome(True, ms=8.0, gbps=83.0)


@pytest.mark.parametrize("case", rows("ran"))
def test_what_fails_is_told_apart_from_what_waits(case):
    outcome = collective_outcome(TEST, answers(**case), orders())
    expected = SmokeOutcome(False, case["cause"], culprits=tuple(case.get("culprits", ())))
    assert outcome == expected


@pytest.mark.parametrize("case", rows("words"))
def test_words_of_a_library_tell_of_the_rank_itself_of_its_path_or_of_nothing(case):
    words = case["name"]
    outcome = collective_outcome(
        TEST, answers(every=STUCK, r4={**STUCK, "error": words}), orders()
    )
    cause = {"itself": f"gpu03 local rank 0: {words}", "path": words}
    assert outcome.cause == cause.get(case["tells_of"], "hangs in all_reduce")
    assert outcome.culprits == (("gpu03",) if case["tells_of"] == "itself" else ())


def test_a_rank_with_a_gpu_is_called_by_it_in_every_test():
    outcome = collective_outcome(
        TEST, answers(r5={"mismatch": "wrong product"}), orders(gpus=(3, 5))
    )
    assert outcome.cause == "gpu03 GPU 5: wrong product"
    order = replace(orders(gpus=(3, 5))["gpu03"], first=0, world=2)
    answer = CollectiveAnswer(7, "", (rank(0), rank(1, mismatch="wrong product")))
    outcome = collective_outcome(Test(7, "alone", ("gpu03",)), {"gpu03": answer}, {"gpu03": order})
    assert (outcome.cause, outcome.culprits) == ("gpu03 GPU 5: wrong product", ("gpu03",))


@pytest.mark.parametrize("case", rows("strange"))
def test_an_answer_that_cannot_be_costs_the_node_that_gave_it(case):
    ranks = [
        rank(row["rank"], **row) if isinstance(row, dict) else rank(row) for row in case["ranks"]
    ]
    answer = CollectiveAnswer(case.get("number", 7), "", tuple(ranks))
    outcome = collective_outcome(TEST, answers(gpu03=answer), orders())
    assert outcome == SmokeOutcome(False, f"gpu03 {case['cause']}", culprits=("gpu03",))


def test_a_node_without_an_answer_is_lost():
    every = {**STUCK, "error": "timed out"}
    outcome = collective_outcome(
        TEST, answers(every=every, gpu03="the connection ended"), orders()
    )
    cause = "gpu03 is lost: the connection ended; then it hangs in all_reduce"
    assert outcome == SmokeOutcome(False, cause, lost=("gpu03",))
    assert collective_outcome(TEST, answers(gpu03="bye"), orders()).cause == "gpu03 is lost: bye"


def test_the_cause_is_a_short_line_whatever_a_node_says():
    cause = collective_outcome(
        TEST, answers(r1={"phase": "start", "error": "a\n\x1b[2J" + "b" * 9000}), orders()
    ).cause
    assert not {"\n", "\x1b"} & {*cause}
    assert len(cause) < 260


# --- Pairs.

PAIR = Test(9, "sweep", ("gpu01", "gpu02"))
OWNERS = Owners({"gpu01": ["10.0.0.1"], "gpu02": ["10.0.0.2"], "gpu03": ["10.0.0.3"]}, {})


def tries(*outcomes: tuple[int, str]) -> tuple[Try, ...]:
    return tuple(Try(port, outcome, 0.1, "") for port, outcome in outcomes)


ALL_PORTS = tuple(range(29500, 29506))
OPEN = tries((29500, "ok"), (29501, "ok"))
PASSED = PairAnswer(9, "gpu02", ("10.0.0.2",), "", "10.0.0.2", OPEN, "ok", 0.2, 9.5, 0)


@pytest.mark.parametrize("case", rows("pair"))
def test_the_outcome_of_a_pair(case):
    changed = case["answer"]
    for name, read in (("tries", lambda value: tries(*value)), ("resolved", tuple)):
        if name in changed:
            changed = {**changed, name: read(changed[name])}
    outcome = pair_outcome(PAIR, replace(PASSED, **changed), OWNERS, ALL_PORTS)
    passed = not case["cause"]
    expected = SmokeOutcome(passed, case["cause"], culprits=tuple(case.get("culprits", ())))
    assert replace(outcome, ms=0.0, gbps=0.0) == expected


def test_a_pair_is_as_fast_as_its_source_says_and_a_source_without_an_answer_is_lost():
    assert pair_outcome(PAIR, replace(PASSED, retransmits=4), OWNERS, ALL_PORTS) == SmokeOutcome(
        True, ms=0.2, gbps=9.5, retransmits=4
    )
    lost = pair_outcome(PAIR, "no answer in 9 s", OWNERS, ALL_PORTS)
    assert lost == SmokeOutcome(False, "gpu01 is lost: no answer in 9 s", lost=("gpu01",))


def test_a_port_of_nobodys_order_is_no_failure():
    answer = replace(PASSED, tries=(*OPEN, *tries((22, "refused"))))
    assert pair_outcome(PAIR, answer, OWNERS, (29500, 29501)).ok


@pytest.mark.parametrize(("broken", "culprits"), [
    ("", ""), ("1", ""), ("3", ""), ("12", "gpu03"), ("23", "gpu04"), ("30", "gpu01"),
    ("0123", "gpu01 gpu02 gpu03 gpu04"),
])  # fmt: skip
def test_a_node_of_two_broken_pairs_is_a_hint_and_the_slowest_pair_counts(broken, culprits):
    edges = [*zip(NAMES, (*NAMES[1:], NAMES[0]), strict=True)]
    addresses = {name: f"10.0.0.{number}" for number, name in enumerate(NAMES, 1)}
    owners = Owners({name: [address] for name, address in addresses.items()}, {})
    answers = {
        source: replace(
            PASSED, number=7, target=target, address=addresses[target], ms=index + 1.0,
            gbps=index + 1.0, retransmits=index, outcome="small" if str(index) in broken else "ok",
        )
        for index, (source, target) in enumerate(edges)
    }  # fmt: skip
    outcome = pairs_outcome(TEST, edges, answers, owners, dict.fromkeys(NAMES, ALL_PORTS))
    if not broken:
        assert outcome == SmokeOutcome(True, ms=4.0, gbps=1.0, retransmits=6)
    else:
        target = edges[int(min(broken))][1]
        cause = f"{target}: the connection succeeds, and no data comes back"
        assert outcome == SmokeOutcome(False, cause, culprits=tuple(culprits.split()))
    answers["gpu02"] = "no answer in 9 s"
    outcome = pairs_outcome(TEST, edges, answers, owners, dict.fromkeys(NAMES, ALL_PORTS))
    assert (outcome.ok, outcome.lost) == (False, ("gpu02",))


# --- Engines.

GLOO = Engine("torch", "gloo", "2.13.0", "", "PyTorch works", "")
ENGINES = {
    "nccl": replace(GLOO, backend="nccl", library="NCCL 2.28.3"),
    "gloo": GLOO,
    "pairs": Engine("pairs", "tcp", "", "", "the path works", ""),
    "nccl-tests": Engine("nccl-tests", "nccl", "2.17", "NCCL 2.28.3", "", ""),
    "no-torch": replace(GLOO, version="", reason="No module named 'torch'"),
}


def engine(words: str) -> Engine:
    """``gloo``; ``gloo/2.12.1``: of that version; ``nccl//2.27.7``: with that NCCL."""
    name, *versions = words.split("/")
    made = ENGINES[name]
    if versions:
        made = replace(made, version=versions[0] or made.version)
    return replace(made, library=f"NCCL {versions[1]}") if versions[1:] else made


def hellos(groups: dict[str, list[Any]]) -> dict[str, Hello]:
    """{"n": [3, "gloo pairs"]} -> n00 to n02 with these engines; a third word is why a node takes
    no part.
    """
    return {
        f"{name}{number:02}": Hello(
            "t", (29500,), ("10.0.0.1",), tuple(map(engine, words.split())), *(why or [""]),
        )
        for name, (count, words, *why) in groups.items()
        for number in range(count)
    }  # fmt: skip


@pytest.mark.parametrize("case", rows("choose"))
def test_the_best_engine_that_most_nodes_have(case):
    choice = choose(hellos(case["hellos"]), case.get("wanted", ""), case.get("gpus", False))
    assert " ".join(choice.kind).strip() == case["engine"]
    assert " ".join(choice.control or ()) == case.get("control", "")
    assert choice.excluded == case.get("out", {})
    assert " ".join(choice.single_node) == case.get("alone", " ".join(choice.single_node))
    assert choice.fallback_reason == case.get("instead", choice.fallback_reason)


def test_a_node_with_many_versions_does_not_outvote_the_others():
    lies = hellos({"liar": [1, " ".join(f"gloo/9.{number}" for number in range(9)) + " pairs"]})
    assert choose({**lies, **hellos({"n": [2, "gloo pairs"]})}).excluded.keys() == {"liar00"}


# --- Idle GPUs.

WORKS = Tool("nvidia-smi", "ok", "580.1")
PROCESSES = {
    "C": GpuProcess(4711, "/opt/conda/bin/python", 1000, "C"),
    "G": GpuProcess(900, "/usr/lib/xorg/Xorg", 20, "G"),
}


def gpus(changed: dict[str, dict[str, Any]] | None = None, case: Any = (), count: int = 8) -> Gpus:
    """The GPUs of a node, by the rows of a case. hidden: the tool does not show these; tool: its
    state and why.
    """
    case, every = dict(case), []
    for index in range(count):
        more = dict((changed or {}).get(str(index), {}))
        for key in ("processes", "unread", "throttle"):
            values = [tuple(row) if isinstance(row, list) else row for row in more.pop(key, ())]
            more[key] = tuple(PROCESSES.get(value, value) for value in values)
        own = {"memory_total_mb": 81559, "memory_used_mb": 4, "mig": "off", **more}
        every.append(Gpu(index, "nvidia", f"0000:{index:02x}:00.0", **own))
    bus = [
        PciGpu(gpu.pci_address, gpu.vendor, "2330", "nvidia", pci_class="030200") for gpu in every
    ]
    if "aer" in case:
        bus[0] = replace(bus[0], aer=tuple(map(tuple, case["aer"])))
    tool = Tool("nvidia-smi", *case["tool"]) if "tool" in case else WORKS
    shown = (
        [] if tool.state != "ok" else [g for g in every if g.index not in case.get("hidden", ())]
    )
    return Gpus(pci=tuple(bus), nvidia=tuple(shown), nvidia_tool=tool)


def replies(**nodes: Any) -> dict[str, Outcome[Snapshot]]:
    return {name: Outcome(name, Snapshot({"gpus": seen})) for name, seen in nodes.items()}


ALL = tuple(range(8))


@pytest.mark.parametrize("case", rows("idle"))
def test_the_idle_gpus_of_a_node(case):
    seen = gpus(case.get("gpus"), case, case.get("count", 8))
    asked = case.get("asked")
    asked = tuple(asked) if isinstance(asked, list) else asked
    free, why = idle_gpus(replies(n=seen), asked, case.get("busy", False))
    assert free == ({} if case["numbers"] is None else {"n": tuple(case["numbers"])})
    assert why == ({"n": case["why"]} if case["why"] else {})


def test_amd_without_the_kernels_list_of_processes_may_be_busy():
    card = Gpu(0, "amd", "0000:05:00.0")
    bus = PciGpu("0000:05:00.0", "amd", "74a1", "amdgpu", pci_class="120000")
    seen = Gpus(pci=(bus,), amd=(card,), amd_tool=Tool("amd-smi", "ok"))
    assert "its tool does not show its processes" in idle_gpus(replies(n=seen))[1]["n"]
    assert idle_gpus(replies(n=replace(seen, amd=(replace(card, idle=True),))))[0] == {"n": (0,)}


def test_a_node_with_fewer_gpus_than_most_or_than_its_policy():
    most = {f"n{number:02}": gpus() for number in range(11)}
    free, why = idle_gpus(replies(**most, x=gpus(count=7)))
    assert why == {"x": "7 GPUs, 8 on 11 nodes"}
    assert {*free.values()} == {ALL}
    # Two kinds of nodes, as their policies say.
    assert not idle_gpus(replies(**most, x=gpus(count=7)), counts={"x": 7})[1]
    assert idle_gpus(replies(x=gpus(count=7)), counts={"x": 8})[1] == {
        "x": "7 GPUs, 8 in the policy"
    }
    assert not idle_gpus(replies(**most, x=gpus(count=7)), 4)[1]
    assert idle_gpus(replies(**most, x=gpus(count=0)))[1] == {"x": "no GPU, 8 on 11 nodes"}


def test_without_gpus_the_ranks_have_none():
    none = gpus(count=0)
    assert idle_gpus(replies(a=none, b=none)) == ({"a": (), "b": ()}, {})
    assert idle_gpus(replies(a=gpus()), 0) == ({"a": ()}, {})
    assert idle_gpus(replies(a=Unknown("timed out"))) == ({"a": ()}, {})
    assert idle_gpus(replies(a=none), counts={"a": 8})[1] == {"a": "no GPU, 8 in the policy"}


def test_a_node_without_a_snapshot_says_why():
    free, why = idle_gpus(
        {**replies(a=gpus(), b=Unknown("timed out")), "c": Outcome("c", gap=Gap(FAILED, "gone"))}
    )
    assert free == {"a": ALL}
    text = "its GPUs are not known: "
    assert why == {"b": f"{text}timed out", "c": f"{text}gone"}


# --- Limits.


def test_the_limit_grows_with_the_ranks_and_the_data():
    """Exactly: a start, 50 ms a rank, and 6 times the data around a ring at the lowest rate."""
    start = {name: limit_s(*name.split(), 0, 0) for name in (
        "torch gloo", "torch nccl", "nccl-tests nccl", "something else")}  # fmt: skip
    assert [*start.values()] == [20, 40, 60, 60]
    assert limit_s("torch", "gloo", 800, 0) == 20 + 40
    assert limit_s("torch", "gloo", 0, 0, first=True) == 20 + 40
    gigabit = 10**9 // 8
    assert limit_s("torch", "gloo", 0, gigabit) == 20 + 6 * 2 * 10
    assert limit_s("torch", "nccl", 0, gigabit) == 40 + 6 * 2


# --- What got worse.


def got_worse(subject: str, before: Any, after: Any) -> list[str]:
    return [*regressions(Snapshot({subject: before}), Snapshot({subject: after}))]


@pytest.mark.parametrize("case", rows("worse"))
def test_what_got_worse_on_the_gpus(case):
    assert got_worse("gpus", gpus(case["before"]), gpus(case["after"], case)) == case["words"]


def test_new_faults_in_the_kernels_log():
    xid = KernelFault("xid", 79, "0000:03:00.0", "NVRM: Xid 79", "RESET")
    ours = KernelFault("xid", 45, "0000:03:00.0", "NVRM: Xid 45", "APPLICATION")
    before = replace(gpus(), kernel_log=Tool("kernel log", "ok"), kernel_faults=(xid,))
    after = replace(before, kernel_faults=(replace(xid, count=3), ours))
    assert got_worse("gpus", before, after) == [
        "in the kernel's log during the test: Xid 79 GPU has fallen off the bus: "
        "gpu 3 (0000:03:00.0), 2 times"
    ]
    hidden = replace(after, kernel_log=Tool("kernel log", "denied"))
    assert got_worse("gpus", before, hidden) == got_worse("gpus", before, before) == []


@pytest.mark.parametrize("case", rows("ports"))
def test_what_got_worse_on_the_ports(case):
    def subject(counters: dict[str, int]) -> Rdma | Nics:
        if case["subject"] == "nics":
            return Nics({"eth0": Nic("eth0", "ethernet", **counters)}, {}, 0, (), False, None)
        port = RdmaPort("mlx5_3", 1, "ACTIVE", counters=counters)
        return Rdma({"mlx5_3": RdmaDevice("mlx5_3", "mlx5", ports=(port,))})

    sentences = got_worse(case["subject"], subject(case["before"]), subject(case["after"]))
    assert sorted(sentences) == sorted(case["words"])


def test_what_is_unknown_is_no_worse():
    assert got_worse("gpus", gpus(), Unknown("timed out")) == []
    assert regressions(Snapshot({}), Snapshot({"gpus": gpus()})) == ()


# --- Links.

OUTCOMES = [
    (Test(1, "alone", ("a",)), SmokeOutcome(True, gbps=1400.0)),
    (Test(2, "alone", ("b",)), SmokeOutcome(True, gbps=700.0)),
    (Test(3, "alone", ("c",)), SmokeOutcome(True)),
    (Test(4, "group", ("a", "b")), SmokeOutcome(True, gbps=300.0)),
    (Test(5, "group", ("a", "c")), SmokeOutcome(True, gbps=370.0)),
    (Test(6, "group", ("b", "c")), SmokeOutcome(False, gbps=1.0)),
    (Test(7, "sweep", ("a", "b")), SmokeOutcome(True, gbps=2.0)),
    (Test(8, "control", ("a", "b")), SmokeOutcome(True, gbps=2.0)),
]
FLOORS = dict.fromkeys("abc", Policy(smoke_min_gbps=370, smoke_min_node_gbps=1000))


def test_the_bandwidth_of_each_class_with_its_slowest_test():
    assert links(OUTCOMES, FLOORS) == (
        LinkBandwidth("inside", 2, 1050.0, 700.0, ("b",), 1000),
        LinkBandwidth("between", 2, 335.0, 300.0, ("a", "b"), 370),
    )
    assert links([], {}) == ()
    assert [link.floor_gbps for link in links(OUTCOMES, {})] == [0.0, 0.0]


def test_a_node_that_reaches_the_floor_in_no_test_is_below():
    assert below_floor(OUTCOMES, FLOORS) == {
        "b": (
            "at best 700 Gbit/s inside the node, the policy wants 1000 (smoke_min_node_gbps) [2]",
            "at best 300 Gbit/s between nodes, the policy wants 370 (smoke_min_gbps) [4]",
        )
    }
    assert below_floor(OUTCOMES, {}) == {}
    # A suspect's tests say nothing of the others.
    slow = [(Test(4, "group", ("a", "b")), SmokeOutcome(True, gbps=3.0))]
    assert {*below_floor(slow, FLOORS)} == {"a", "b"}
    assert below_floor(slow, FLOORS, without=["a"]) == {}

"""What tests and looks tell: who failed by itself, which engine, which GPUs, what got worse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nodeready.node.proofs.mesh import Try
from nodeready.node.smoke.orders import (
    Collective,
    Engine,
    Hello,
    Paired,
    Peer,
    Ran,
    Rank,
)
from nodeready.ready.mesh import Owners
from nodeready.smoke.document import Link
from nodeready.smoke.judge import (
    Floor,
    below,
    choose,
    idle,
    links,
    paired,
    ran,
    seconds,
    title,
    worse,
)
from nodeready.smoke.search import ALONE, CONTROL, GROUP, SWEEP, Outcome, Test
from nodeready.subjects.base import Unknown
from nodeready.subjects.gpus.gpu import Gpu, GpuProcess, Gpus, KernelFault, PciGpu, Tool
from nodeready.subjects.nics.facts import Nics
from nodeready.subjects.nics.nic import Nic
from nodeready.subjects.rdma.facts import Rdma, RdmaDevice, RdmaPort
from nodeready.subjects.snapshot import Snapshot
from nodeready.transport.look import Look

# --- Tests of several ranks.

NAMES = ("gpu01", "gpu02", "gpu03", "gpu04")
TEST = Test(7, GROUP, NAMES)
#: Two ranks on each node.
CLOSED = "[pair.cc:534] Connection closed by peer [10.0.0.3]:4242"


def rank(number: int, phase: str = "done", **more: Any) -> Rank:
    good = Rank(number, -1, phase, "", "", -1, 1.0 + number, 90.0 - number, 0, 2.5)
    return replace(good, **more)


def ordered(gpus: bool = False) -> dict[str, Collective]:
    return {
        name: Collective(
            7, "torch", "gloo", 8, 2 * at, 2, (3, 5) if gpus else (), Peer("", (), 1, ""), None,
            4096, 8 << 20, 20.0,
        )
        for at, name in enumerate(NAMES)
    }  # fmt: skip


def answered(**changed: Any) -> dict[str, Any]:
    """All nodes' answers; changed: a node -> its own answer, or r3 -> what rank 3 has instead."""
    found: dict[str, Any] = {}
    for at, name in enumerate(NAMES):
        ranks = []
        for number in (2 * at, 2 * at + 1):
            more = {**changed.get("every", {}), **changed.get(f"r{number}", {})}
            ranks.append(rank(number, **more))
        found[name] = changed.get(name, Ran(7, "", tuple(ranks)))
    return found


def test_all_ranks_at_the_end_pass_and_the_slowest_counts():
    assert ran(TEST, answered(), ordered()) == Outcome(True, ms=8.0, gbps=83.0)
    assert ran(TEST, answered()) == Outcome(True, ms=8.0, gbps=83.0)


#: what differs -> the cause, and who says that it is they.
STUCK = {"phase": "all_reduce"}
CASES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "a wrong sum on one node": (
        {"r5": {"wrong": "wrong sum in all_reduce: 28.5, not 28"}},
        "gpu03 local rank 1: wrong sum in all_reduce: 28.5, not 28",
        ("gpu03",),
    ),
    "a wrong sum that went around accuses nobody": (
        {"every": {"wrong": "wrong sum in all_reduce"}},
        "gpu01 local rank 0: wrong sum in all_reduce",
        (),
    ),
    "one dies at start and the others lose it": (
        {
            "every": {"phase": "init", "said": CLOSED},
            "r4": {"phase": "start", "said": "ImportError: libnccl.so.2"},
        },
        "gpu03 local rank 0: ImportError: libnccl.so.2",
        ("gpu03",),
    ),
    "one does not get beyond its own GPU": (
        {"every": {"phase": "init"}, "r1": {"phase": "compute"}},
        "gpu01 local rank 1: does not get beyond compute",
        ("gpu01",),
    ),
    "an error of its own in the middle": (
        {"every": {**STUCK, "said": CLOSED}, "r7": {**STUCK, "said": "CUDA error: ECC (214)"}},
        "gpu04 local rank 1: CUDA error: ECC (214)",
        ("gpu04",),
    ),
    "nobody got a rank started on one node": (
        {"every": {"phase": "init"}, "gpu02": Ran(7, "no memory for a process", ())},
        "gpu02: no memory for a process",
        ("gpu02",),
    ),
    "all wait for one that says nothing": (
        {
            "every": {**STUCK, "waits_for": 4},
            "r4": STUCK,
        },
        "hangs in all_reduce, waiting for gpu03",
        ("gpu03",),
    ),
    "they wait for one through each other": (
        {
            "r0": {**STUCK, "waits_for": 7},
            "r1": {**STUCK, "waits_for": 0},
            "r2": {**STUCK, "waits_for": 1},
            "r3": {**STUCK, "waits_for": 2},
            "r4": {**STUCK, "waits_for": 3},
            "r5": {**STUCK, "waits_for": 4},
            "r6": {**STUCK, "waits_for": 5},
            "r7": STUCK,
        },
        "hangs in all_reduce, waiting for gpu04",
        ("gpu04",),
    ),
    "who waits in a circle accuses nobody": (
        {f"r{at}": {**STUCK, "waits_for": (at - 1) % 8} for at in range(8)},
        "hangs in all_reduce",
        (),
    ),
    "one node alone accuses nobody": (
        {"every": {**STUCK, "said": "timed out"}, "r0": {**STUCK, "waits_for": 4}},
        "hangs in all_reduce",
        (),
    ),
    "a rank that waits for one that does not exist": (
        {"every": {**STUCK, "waits_for": 99}},
        "hangs in all_reduce",
        (),
    ),
    "the one that is behind all others": (
        {"every": STUCK, "r2": {"phase": "barrier"}},
        "hangs in all_reduce",
        ("gpu02",),
    ),
    "no way to one node": (
        {
            "every": {"phase": "init", "said": "no connection to gpu03 port 29501: timed out"},
            "r0": {"phase": "init", "said": "1/4 clients joined."},
        },
        "no connection to gpu03 port 29501: timed out",
        (),
    ),
    "NCCL waits for a peer": (
        {
            "every": {
                "phase": "large",
                "said": "NCCL error: remote process exited or there was a network error",
            }
        },
        "hangs in large",
        (),
    ),
    "all say whose number is missing": (
        {"every": {"wrong": "all_reduce of int64: as if rank 5 were missing"}},
        "gpu01 local rank 0: all_reduce of int64: as if gpu03 local rank 1 were missing",
        ("gpu03",),
    ),
    "one alone says whose number is missing": (
        {"r0": {"wrong": "what came is not what rank 5 gave"}},
        "gpu01 local rank 0: what came is not what gpu03 local rank 1 gave",
        ("gpu01",),
    ),
    "a node that did not run": (
        {
            "every": {**STUCK, "said": "rank 3 closed the connection in large", "waits_for": 3},
            "r4": {**STUCK, "said": "this node stood still for 5.0 s; not through after 9 s"},
        },
        "gpu03 local rank 0: this node stood still for 5.0 s; not through after 9 s",
        ("gpu03",),
    ),
    "full packets do not pass": (
        {
            "every": {"phase": "large", "said": "rank 2 closed the connection in large"},
            "r2": {"phase": "large", "said": "to gpu03 small messages pass, 64 KiB do not: MTU?"},
        },
        "to gpu03 small messages pass, 64 KiB do not: MTU?",
        (),
    ),
    "a rank is ended because another one of its node failed": (
        {
            "every": {"phase": "init", "said": "ended: others had ended long before"},
            "r4": {"phase": "init", "said": "ended: rank 5 had failed", "waits_for": 5},
            "r5": {"phase": "init", "said": "ended by SIGSEGV"},
        },
        "gpu03 local rank 1: ended by SIGSEGV",
        ("gpu03",),
    ),
    "the name of the head leads one node astray": (
        {
            "every": {"phase": "init", "said": "no end after 9.0 s"},
            "r6": {"phase": "init", "said": "gpu01 resolves to 10.0.0.9, which is not gpu01's"},
            "r7": {"phase": "init", "said": "gpu01 resolves to 10.0.0.9, which is not gpu01's"},
        },
        "gpu01 resolves to 10.0.0.9, which is not gpu01's",
        ("gpu04",),
    ),
    "an error after the end": (
        {"r0": {"said": "destroy_process_group: CUDA error"}},
        "gpu01 local rank 0: destroy_process_group: CUDA error",
        ("gpu01",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_fails_is_told_apart_from_what_waits(name):
    changed, cause, culprits = CASES[name]
    found = ran(TEST, answered(**changed), ordered())
    assert (found.ok, found.cause, found.culprits, found.lost) == (False, cause, culprits, ())
    assert (found.ms, found.gbps) == (0, 0)


#: What libraries print of a rank that only misses another one; the first ones were seen with
#: PyTorch 1.13 when a rank had died, stood still or never came.
MISSED = [
    "Socket Timeout",
    "Read error [127.0.0.1]:43937: Connection reset by peer",
    "Timed out waiting 5000ms for send operation to complete",
    "Timed out waiting 5000ms for recv operation to complete",
    "wait timeout after 300000ms, keys: /default_pg/0//cpu//0/rank_3",
    "failed to recv, got 0 bytes",
    "NCCL error: remote process exited or there was a network error, NCCL version 2.28.3",
    "socketProgress: Connection closed by remote peer gpu03<43210>",
    "NET/IB : Got completion from peer 10.0.0.3 with status=12 (transport retry exceeded)",
    "rank 3 closed the connection in all_reduce",
    "rank 3 sent nothing for 3.0 s in barrier",
    "not through in all_reduce after 9.7 s",
    "ended: others had ended long before",
    "no end after 9.0 s",
]
APART = [
    "The client socket has timed out after 5s while trying to connect to (10.0.0.1, 29501).",
    "Timed out after 6 seconds waiting for clients. 1/3 clients joined.",
    "no connection to gpu03 (10.0.0.3) port 29501: refused",
    "no end after 9.0 s; a connection is not answered",
    "connection to gpu03 in barrier: No route to host",
]
#: What a rank says of itself.
OWN = [
    "ended by SIGKILL",
    "ended with status 1: No module named 'numpy'",
    "CUDA error: an illegal memory access was encountered",
    "hangs in the kernel after SIGKILL (process 4711)",
    "this node stood still for 5.0 s; not through in large after 9.0 s",
]


@pytest.mark.parametrize("said", [*MISSED, *APART, *OWN])
def test_the_words_of_libraries(said):
    found = ran(TEST, answered(every=STUCK, r4={**STUCK, "said": said}), ordered())
    if said in OWN:
        assert (found.cause, found.culprits) == (f"gpu03 local rank 0: {said}", ("gpu03",))
    else:
        assert found.cause == (said if said in APART else "hangs in all_reduce")
        assert found.culprits == ()


def test_a_rank_with_a_gpu_is_called_by_it_in_every_test():
    changed = {"r5": {"wrong": "wrong product"}}
    found = ran(TEST, answered(**changed), ordered(gpus=True))
    assert found.cause == "gpu03 GPU 5: wrong product"
    alone = Test(7, ALONE, ("gpu03",))
    order = replace(ordered(gpus=True)["gpu03"], first=0, world=2)
    answer = Ran(7, "", (rank(0), rank(1, wrong="wrong product")))
    found = ran(alone, {"gpu03": answer}, {"gpu03": order})
    assert (found.cause, found.culprits) == ("gpu03 GPU 5: wrong product", ("gpu03",))


GOOD = answered()["gpu03"]
OTHERS = "gpu03 answers for ranks that are not its own"
PARTLY = "gpu03 does not answer for all of its ranks"
ABSURD = "gpu03 answers with figures that cannot be"


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (replace(GOOD, number=8), "gpu03 answers another test"),
        (replace(GOOD, ranks=(rank(4), rank(6))), OTHERS),
        (replace(GOOD, ranks=(rank(4), rank(5), rank(6))), OTHERS),
        (replace(GOOD, ranks=(rank(4), rank(4))), OTHERS),
        (replace(GOOD, ranks=(rank(4), rank(4), rank(5))), OTHERS),
        (replace(GOOD, ranks=(rank(4), rank(1 << 30))), OTHERS),
        (replace(GOOD, ranks=(rank(4),)), PARTLY),
        (replace(GOOD, ranks=()), PARTLY),
        (replace(GOOD, ranks=(rank(4), rank(5, gbps=1e300))), ABSURD),
        (replace(GOOD, ranks=(rank(4), rank(5, gbps=-1.0))), ABSURD),
        (replace(GOOD, ranks=(rank(4), rank(5, ms=1e19))), ABSURD),
        (replace(GOOD, ranks=(rank(4), rank(5, phase="\x1b[31mdone"))), ABSURD),
    ],
)
def test_an_answer_that_cannot_be_costs_the_node_that_gave_it(answer, cause):
    found = ran(TEST, answered(gpu03=answer), ordered())
    assert found == Outcome(False, cause, culprits=("gpu03",))


def test_without_orders_two_nodes_with_one_rank_are_both_looked_at():
    found = ran(TEST, answered(gpu03=replace(GOOD, ranks=(rank(3), rank(4)))))
    assert not found.ok
    assert found.culprits == ("gpu02", "gpu03")


def test_a_node_without_an_answer_is_lost_and_is_what_the_others_wait_for():
    every = {**STUCK, "waits_for": 4, "said": "timed out"}
    found = ran(TEST, answered(every=every, gpu03="the connection ended"), ordered())
    why = "gpu03 is lost: the connection ended"
    assert found.cause == f"{why}; then it hangs in all_reduce, waiting for gpu03"
    assert (found.lost, found.culprits) == (("gpu03",), ())
    assert ran(TEST, answered(gpu03="bye"), ordered()).cause == "gpu03 is lost: bye"
    missing = answered()
    del missing["gpu02"]
    found = ran(TEST, missing, ordered())
    assert (found.lost, found.cause) == (("gpu02",), "gpu02 is lost: no answer")


def test_what_a_node_says_is_one_short_line():
    found = ran(TEST, answered(r1={"phase": "start", "said": "a\n\x1b[2J" + "b" * 9000}))
    assert "\n" not in found.cause
    assert "\x1b" not in found.cause
    assert len(found.cause) < 260


def test_a_ring_of_thousands_that_waits_is_judged_at_once():
    names = tuple(f"n{at}" for at in range(8192))
    answers = {
        name: Ran(1, "", (rank(at, "barrier", waits_for=at - 1, ms=0.0, gbps=0.0),))
        for at, name in enumerate(names)
    }
    found = ran(Test(1, GROUP, names), answers)
    assert (found.cause, found.culprits) == ("hangs in barrier, waiting for n0", ("n0",))


# --- Pairs.

PAIR = Test(9, SWEEP, ("gpu01", "gpu02"))
OWNERS = Owners({"gpu01": ["10.0.0.1"], "gpu02": ["10.0.0.2"], "gpu03": ["10.0.0.3"]}, {})


def try_(port: int, outcome: str = "ok", said: str = "") -> Try:
    return Try(port, outcome, 0.1, said)


FINE = Paired(
    9, "gpu02", ("10.0.0.2",), "", "10.0.0.2", (try_(29500), try_(29501)), "ok", 0.2, 9.5, 0, 3
)
TIMEOUTS = tuple(try_(29500 + at, "timeout" if at < 3 else "skipped") for at in range(6))


@pytest.mark.parametrize(
    ("changed", "cause", "culprits"),
    [
        ({}, "", ()),
        (
            {"tries": (try_(29500), try_(29501, "timeout"))},
            "no connection to gpu02 port 29501: timed out: dropped",
            (),
        ),
        (
            {"tries": (try_(29500, "refused"), try_(29501, "refused"))},
            "no connection to gpu02 ports 29500-29501: refused: rejected on the way",
            (),
        ),
        (
            {"tries": TIMEOUTS, "outcome": ""},
            "no connection to gpu02 ports 29500-29505: timed out: dropped; the first 3 ports "
            "stand for all",
            (),
        ),
        (
            {"address": "", "resolved": ("10.0.0.3",), "tries": (), "outcome": ""},
            "on gpu01 gpu02 resolves to 10.0.0.3, which is gpu03's",
            (),
        ),
        (
            {"address": "", "resolved": ("127.0.1.1",), "tries": (), "outcome": ""},
            "on gpu01 gpu02 resolves to 127.0.1.1, which is loopback",
            (),
        ),
        (
            {"address": "", "resolved": (), "error": "Name or service not known", "outcome": ""},
            "on gpu01 gpu02 does not resolve (Name or service not known)",
            (),
        ),
        (
            {"outcome": "small"},
            "gpu02: it can be connected to, and then no data comes back",
            (),
        ),
        (
            {"outcome": "large"},
            "gpu02: small messages come back and large ones do not: full packets are dropped on "
            "the way (a smaller MTU there, and no ICMP that says so)",
            (),
        ),
        ({"tries": (), "outcome": ""}, "no connection to gpu02 was tried in time", ()),
        ({"number": 8}, "gpu01 answers another test", ("gpu01",)),
        ({"target": "gpu03"}, "gpu01 answers another test", ("gpu01",)),
        ({"gbps": 1e300}, "gpu01 answers with figures that cannot be", ("gpu01",)),
        ({"outcome": "great"}, "gpu01 answers with figures that cannot be", ("gpu01",)),
    ],
)
def test_a_pair(changed, cause, culprits):
    found = paired(PAIR, replace(FINE, **changed), OWNERS, (29500, 29501, *range(29502, 29506)))
    assert (found.ok, found.cause, found.culprits) == (not cause, cause, culprits)


def test_a_pair_is_as_fast_as_its_source_says_and_a_source_without_an_answer_is_lost():
    assert paired(PAIR, FINE, OWNERS) == Outcome(True, ms=0.2, gbps=9.5)
    lost = paired(PAIR, "no answer in 9 s", OWNERS)
    assert lost == Outcome(False, "gpu01 is lost: no answer in 9 s", lost=("gpu01",))


def test_a_port_that_nobody_asked_for_is_no_failure():
    more = replace(FINE, tries=(*FINE.tries, try_(22, "refused")))
    assert paired(PAIR, more, OWNERS, (29500, 29501)).ok


# --- Engines.

NCCL = Engine("torch", "nccl", "2.13.0", "NCCL 2.28.3", "/usr/bin/python3", "NCCL works", "")
GLOO = replace(NCCL, backend="gloo", library="", proves="PyTorch works")
RING = Engine("ring", "tcp", "", "", "", "the path works", "")
TESTS = Engine("nccl-tests", "nccl", "2.17", "NCCL 2.28.3", "/opt/all_reduce_perf", "", "")
NO_TORCH = replace(GLOO, version="", why="No module named 'torch'")


def hello(*engines: Engine, why: str = "") -> Hello:
    return Hello("h", "ada", "t", (29500,), (), ("10.0.0.1",), 8, engines, why)


def fleet(count: int, *engines: Engine, **others: Hello) -> dict[str, Hello]:
    return {**{f"n{at:02}": hello(*engines) for at in range(count)}, **others}


@pytest.mark.parametrize(
    ("hellos", "wanted", "gpus", "expected"),
    [
        (fleet(3, NCCL, GLOO, RING), "", True, ("torch", "nccl", ("torch", "gloo"), {})),
        (fleet(3, NCCL, GLOO, RING), "", False, ("torch", "gloo", ("ring", "tcp"), {})),
        (fleet(3, NO_TORCH, RING), "", False, ("ring", "tcp", None, {})),
        # The best that most have: not what one has, and not what only one lacks.
        (fleet(3, RING, x=hello(GLOO, RING)), "", False, ("ring", "tcp", None, {})),
        (
            fleet(3, GLOO, RING, x=hello(NO_TORCH, RING)),
            "",
            False,
            (
                "torch",
                "gloo",
                ("ring", "tcp"),
                {"x": "no PyTorch over gloo: No module named 'torch'"},
            ),
        ),
        # One version in one job.
        (
            fleet(11, GLOO, RING, x=hello(replace(GLOO, version="2.12.1"), RING)),
            "",
            False,
            ("torch", "gloo", ("ring", "tcp"), {"x": "PyTorch 2.12.1 here, 2.13.0 on 11 nodes"}),
        ),
        (
            fleet(3, NCCL, RING, x=hello(replace(NCCL, library="NCCL 2.27.7"), RING)),
            "torch",
            True,
            (
                "torch",
                "nccl",
                ("ring", "tcp"),
                {"x": "NCCL 2.27.7 here, NCCL 2.28.3 on 3 nodes"},
            ),
        ),
        # Asked for, and nobody has it.
        (
            fleet(1, NO_TORCH, RING, x=hello(RING)),
            "torch",
            False,
            (
                "",
                "",
                None,
                {
                    "n00": "no PyTorch over gloo: No module named 'torch'",
                    "x": "no PyTorch over gloo: it was not found",
                },
            ),
        ),
        (
            fleet(1, NCCL),
            "torch:nccl",
            False,
            ("", "", None, {"n00": "torch:nccl needs GPUs, and none takes part"}),
        ),
        (fleet(3, NCCL, GLOO, RING), "torch:gloo", True, ("torch", "gloo", ("ring", "tcp"), {})),
        (fleet(3, GLOO, RING), "ring", False, ("ring", "tcp", ("torch", "gloo"), {})),
        # A node that can do nothing at all.
        (
            fleet(2, RING, x=hello(RING, why="no rights to run as ada")),
            "",
            False,
            ("ring", "tcp", None, {"x": "no rights to run as ada"}),
        ),
        # nccl-tests want MPI between nodes.
        (fleet(1, TESTS, RING), "", True, ("nccl-tests", "nccl", ("ring", "tcp"), {})),
        (fleet(3, TESTS, RING), "", True, ("ring", "tcp", None, {})),
        (fleet(3, TESTS, RING), "nccl-tests", True, ("ring", "tcp", None, {})),
    ],
)
def test_the_best_engine_that_most_nodes_have(hellos, wanted, gpus, expected):
    found = choose(hellos, wanted, gpus)
    assert (found.engine, found.backend, found.control, dict(found.out)) == expected


def test_nccl_tests_test_each_node_alone_where_pytorch_is_not():
    assert choose(fleet(3, TESTS, RING), "", True).alone == ("nccl-tests", "nccl")
    assert choose(fleet(3, TESTS, RING), "nccl-tests", True).alone == ("nccl-tests", "nccl")
    assert choose(fleet(3, NCCL, TESTS, RING), "", True).alone == ("torch", "nccl")
    assert choose(fleet(3, TESTS, RING), "", False).alone == ("ring", "tcp")


@pytest.mark.parametrize(
    ("hellos", "wanted", "why"),
    [
        (fleet(3, NO_TORCH, RING), "", "no PyTorch over gloo: No module named 'torch'"),
        (fleet(3, NO_TORCH, RING), "ring", ""),
        (fleet(3, GLOO, RING), "", ""),
    ],
)
def test_why_a_better_engine_is_not_used(hellos, wanted, why):
    assert choose(hellos, wanted).instead == why


def test_an_engine_says_its_version_and_what_it_proves():
    found = choose(fleet(3, GLOO, RING))
    assert (found.name, found.proves) == ("torch 2.13.0 over gloo", "PyTorch works")
    assert title(RING) == "ring over tcp"


def test_one_node_cannot_give_most_nodes_another_version():
    lying = hello(*(replace(GLOO, version=f"9.{at}") for at in range(9)), RING)
    found = choose({"liar": lying, **fleet(2, GLOO, RING)})
    assert set(found.out) == {"liar"}


# --- Idle GPUs.

WORKS = Tool("nvidia-smi", "ok", "580.1")


def gpu(index: int, *processes: GpuProcess, **more: Any) -> Gpu:
    own = {"memory_total_mb": 81559, "memory_used_mb": 4, "mig": "off", "processes": processes}
    return Gpu(index, "nvidia", f"0000:{index:02x}:00.0", **{**own, **more})


def node(*gpus: Gpu, **more: Any) -> Gpus:
    bus = tuple(
        PciGpu(one.pci_address, one.vendor, "2330", "nvidia", pci_class="030200") for one in gpus
    )
    return Gpus(**{"pci": bus, "nvidia": gpus, "nvidia_tool": WORKS, **more})


def eight(**changed: Gpu) -> Gpus:
    return node(*(changed.get(f"g{at}", gpu(at)) for at in range(8)))


def looks(**nodes: Any) -> dict[str, Look]:
    return {name: Look(name, Snapshot({"gpus": seen})) for name, seen in nodes.items()}


PYTHON = GpuProcess(4711, "/opt/conda/bin/python", 1000, "C")
SCREEN = GpuProcess(900, "/usr/lib/xorg/Xorg", 20, "G")
TWO_BUSY = eight(g0=gpu(0, PYTHON), g3=gpu(3, PYTHON))
NO_TOOL = replace(eight(), nvidia=(), nvidia_tool=Tool("nvidia-smi", "missing"))
ALL = tuple(range(8))


@pytest.mark.parametrize(
    ("seen", "gpus", "busy", "numbers", "why"),
    [
        (eight(), None, False, ALL, ""),
        (eight(), 2, False, (0, 1), ""),
        (eight(), (0, 3), False, (0, 3), ""),
        (TWO_BUSY, 2, False, (1, 2), ""),
        (TWO_BUSY, (1, 2), False, (1, 2), ""),
        (TWO_BUSY, None, True, ALL, ""),
        (
            TWO_BUSY,
            None,
            False,
            None,
            "GPU 0 and 3 are busy (python, pid 4711); --busy tests beside them",
        ),
        (
            TWO_BUSY,
            (3, 4),
            False,
            None,
            "GPU 3 is busy (python, pid 4711); --busy tests beside them",
        ),
        (TWO_BUSY, 7, False, None, "GPU 0 and 3 are busy (python, pid 4711); --busy tests"),
        (eight(g1=gpu(1, SCREEN, memory_used_mb=20)), None, False, ALL, ""),
        (eight(), (7, 8), False, None, "no GPU 8: it has 8 GPUs"),
        (eight(), 9, False, None, "8 GPUs, 9 wanted"),
        (eight(g2=gpu(2, mig="on")), None, True, None, "GPU 2 is divided (MIG): a collective"),
        (eight(g2=gpu(2, mig="on")), 7, False, (0, 1, 3, 4, 5, 6, 7), ""),
        (eight(g2=gpu(2, compute_mode="prohibited")), None, True, None, "GPU 2 is closed to"),
        (
            eight(g2=gpu(2, unread=(("processes", "N/A"),))),
            None,
            False,
            None,
            "GPU 2 is busy (or not: its tool cannot tell its processes; N/A); --busy",
        ),
        (
            eight(g2=gpu(2, memory_used_mb=60000)),
            None,
            False,
            None,
            "GPU 2 is busy (60000 MiB in use, by nobody whom this node shows); --busy",
        ),
        (NO_TOOL, None, False, None, "nobody can tell which GPUs are idle: nvidia-smi missing"),
        (NO_TOOL, 2, True, (0, 1), ""),
        (
            replace(NO_TOOL, nvidia_tool=Tool("nvidia-smi", "stuck", "pid 77 hangs")),
            None,
            True,
            None,
            "nobody can tell which GPUs are idle: nvidia-smi stuck",
        ),
        (replace(eight(), nvidia=eight().nvidia[:7]), None, False, None, "7 GPUs: its tool does"),
        (node(), 2, False, None, "no GPU"),
    ],
)
def test_the_idle_gpus_of_a_node(seen, gpus, busy, numbers, why):
    found, whys = idle(looks(one=seen), gpus, busy)
    assert found.get("one") == numbers
    assert whys.get("one", "").startswith(why)
    assert bool(whys) == bool(why)


def test_amd_without_the_kernels_list_of_processes_may_be_busy():
    card = Gpu(0, "amd", "0000:05:00.0")
    seen = Gpus(
        pci=(PciGpu("0000:05:00.0", "amd", "74a1", "amdgpu", pci_class="120000"),),
        amd=(card,),
        amd_tool=Tool("amd-smi", "ok"),
    )
    assert "its tool cannot tell its processes" in idle(looks(one=seen))[1]["one"]
    known = replace(seen, amd=(replace(card, idle=True),))
    assert idle(looks(one=known))[0] == {"one": (0,)}


def test_a_node_with_fewer_gpus_than_most_or_than_its_policy():
    seven = node(*(gpu(at) for at in range(7)))
    nodes = {f"n{at:02}": eight() for at in range(11)}
    found, why = idle(looks(**nodes, x=seven))
    assert why == {"x": "7 GPUs, 8 on 11 nodes"}
    assert set(found.values()) == {ALL}
    # Two kinds of nodes, as their policies say.
    found, why = idle(looks(**nodes, x=seven), counts={"x": 7})
    assert not why
    assert idle(looks(x=seven), counts={"x": 8})[1] == {"x": "7 GPUs, 8 in the policy"}
    # So many as are asked for.
    assert not idle(looks(**nodes, x=seven), 4)[1]
    assert idle(looks(**nodes, x=node()))[1] == {"x": "no GPU, 8 on 11 nodes"}


def test_without_gpus_the_ranks_have_none():
    assert idle(looks(a=node(), b=node())) == ({"a": (), "b": ()}, {})
    assert idle(looks(a=eight()), 0) == ({"a": ()}, {})
    assert idle(looks(a=Unknown("timed out"))) == ({"a": ()}, {})
    # They should be there.
    assert idle(looks(a=node()), counts={"a": 8})[1] == {"a": "no GPU, 8 in the policy"}


def test_a_node_that_nobody_could_look_at_says_why():
    found, why = idle({**looks(a=eight(), b=Unknown("timed out")), "c": Look("c", error="gone")})
    assert found == {"a": ALL}
    assert why == {
        "b": "its GPUs are not known: timed out",
        "c": "its GPUs are not known: gone",
    }


# --- Limits.


def test_a_test_has_more_time_with_more_ranks_and_more_data_and_the_first_time():
    base = seconds("torch", "gloo", 8, 8 << 20)
    assert seconds("torch", "gloo", 800, 8 << 20) > base
    assert seconds("torch", "gloo", 8, 80 << 20) > base
    assert seconds("torch", "gloo", 8, 8 << 20, first=True) > base
    # The whole all_reduce fits in at the slowest rate that is waited for: 0.1 and 1 Gbit/s.
    assert seconds("ring", "tcp", 2, 1 << 30) > 2 * (8 << 30) / 0.1e9
    assert seconds("torch", "nccl", 2, 1 << 30) > 2 * (8 << 30) / 1e9
    assert seconds("something", "else", 2, 0) > 0


# --- What got worse.


def snapshot(**subjects: Any) -> Snapshot:
    return Snapshot(subjects)


def port(**counters: int) -> Rdma:
    one = RdmaPort("mlx5_3", 1, "ACTIVE", counters=counters)
    return Rdma({"mlx5_3": RdmaDevice("mlx5_3", "mlx5", ports=(one,))})


def interface(**counted: int) -> Nics:
    one = Nic("eth0", "ethernet", **counted)
    return Nics({"eth0": one}, {}, 0, (), False, None)


XID = KernelFault("xid", 79, "0000:03:00.0", "NVRM: Xid 79", "RESET")
MINE = KernelFault("xid", 45, "0000:03:00.0", "NVRM: Xid 45", "APPLICATION")
LOG = Tool("kernel log", "ok")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (eight(), eight(), []),
        (
            eight(g3=gpu(3, ecc_uncorrectable_volatile=1)),
            eight(g3=gpu(3, ecc_uncorrectable_volatile=3)),
            ["GPU 3: 2 new uncorrected ECC errors during the test"],
        ),
        (
            eight(g3=gpu(3, ecc_correctable_volatile=0, remapped_uncorrectable=1)),
            eight(
                g3=gpu(3, ecc_correctable_volatile=1, remapped_uncorrectable=2, remap_pending=True)
            ),
            [
                "GPU 3: 1 new corrected ECC error during the test",
                "GPU 3: 1 newly remapped memory row during the test",
                "GPU 3: a row of its memory waits to be remapped",
            ],
        ),
        # What was so before is not the test's.
        (
            eight(g3=gpu(3, remap_pending=True, throttle=("hw_slowdown",))),
            eight(g3=gpu(3, remap_pending=True, throttle=("hw_slowdown",))),
            [],
        ),
        # A counter that a driver does not tell is none.
        (eight(), eight(g3=gpu(3, ecc_uncorrectable_volatile=5)), []),
        (
            eight(g1=gpu(1, temperature_c=60, temperature_slowdown_c=90)),
            eight(
                g1=gpu(
                    1,
                    temperature_c=91,
                    temperature_slowdown_c=90,
                    throttle=("hw_thermal_slowdown",),
                )
            ),
            ["GPU 1: slows down (hw_thermal_slowdown)", "GPU 1: 91 C, its limit is 90 C"],
        ),
        (
            eight(),
            replace(eight(), nvidia=eight().nvidia[:7]),
            ["GPU 7: nvidia-smi does not show it any more"],
        ),
        (
            eight(),
            replace(eight(), nvidia=(), nvidia_tool=Tool("nvidia-smi", "stuck")),
            ["nvidia-smi stuck, which answered before the test"],
        ),
        (
            replace(eight(), kernel_log=LOG, kernel_faults=(XID,)),
            replace(eight(), kernel_log=LOG, kernel_faults=(replace(XID, count=3), MINE)),
            [
                "in the kernel's log during the test: Xid 79 GPU has fallen off the bus: "
                "gpu 3 (0000:03:00.0), 2 times"
            ],
        ),
        (
            node(gpu(0)),
            replace(node(gpu(0)), pci=(replace(node(gpu(0)).pci[0], aer=(("fatal", "DLP", 2),)),)),
            ["0000:00:00.0: 2 new uncorrected PCIe errors (DLP, fatal) during the test"],
        ),
    ],
)
def test_what_got_worse_on_the_gpus(before, after, words):
    assert list(worse(snapshot(gpus=before), snapshot(gpus=after))) == words


@pytest.mark.parametrize(
    ("subject", "before", "after", "words"),
    [
        (
            "rdma",
            port(symbol_error=3, link_downed=0),
            port(symbol_error=17, link_downed=1),
            [
                "mlx5_3 port 1: 14 new symbol errors during the test",
                "mlx5_3 port 1: 1 new link failure during the test",
            ],
        ),
        # It began anew.
        ("rdma", port(symbol_error=30), port(symbol_error=2), ["mlx5_3 port 1: 2 new symbol"]),
        ("rdma", port(symbol_error=3), port(symbol_error=3), []),
        ("rdma", port(), port(symbol_error=3), []),
        (
            "nics",
            interface(rx_crc_errors=0, carrier_changes=1, rx_errors=0),
            interface(rx_crc_errors=5, carrier_changes=3, rx_errors=120),
            ["eth0: 2 link changes during the test", "eth0: 5 new CRC errors during the test"],
        ),
        ("nics", interface(tx_errors=0), interface(tx_errors=121), ["eth0: 121 new send errors"]),
    ],
)
def test_what_got_worse_on_the_ports(subject, before, after, words):
    found = worse(snapshot(**{subject: before}), snapshot(**{subject: after}))
    assert len(found) == len(words)
    assert all(
        one.startswith(start) for one, start in zip(sorted(found), sorted(words), strict=True)
    )


def test_what_could_not_be_looked_at_is_no_worse():
    assert worse(snapshot(gpus=eight()), snapshot(gpus=Unknown("timed out"))) == ()
    assert worse(snapshot(), snapshot(gpus=eight())) == ()


# --- Links.

MADE = [
    (Test(1, ALONE, ("a",)), Outcome(True, gbps=1400.0)),
    (Test(2, ALONE, ("b",)), Outcome(True, gbps=700.0)),
    (Test(3, ALONE, ("c",)), Outcome(True)),
    (Test(4, GROUP, ("a", "b")), Outcome(True, gbps=300.0)),
    (Test(5, GROUP, ("a", "c")), Outcome(True, gbps=380.0)),
    (Test(6, GROUP, ("b", "c")), Outcome(False, gbps=1.0)),
    (Test(7, SWEEP, ("a", "b")), Outcome(True, gbps=2.0)),
    (Test(8, CONTROL, ("a", "b")), Outcome(True, gbps=2.0)),
]
FLOORS = {name: Floor(between=370, inside=1000) for name in "abc"}


def test_the_bandwidth_of_each_class_with_its_worst_test():
    assert links(MADE, FLOORS) == (
        Link("inside", 2, 1050.0, 700.0, ("b",), 1000),
        Link("between", 2, 340.0, 300.0, ("a", "b"), 370),
    )
    assert links([]) == ()
    assert [one.floor_gbps for one in links(MADE)] == [0.0, 0.0]


def test_a_node_that_reaches_the_floor_in_no_test_is_below():
    assert below(MADE, FLOORS) == {
        "b": (
            "at best 700 Gbit/s inside the node, the policy wants 1000 (smoke_min_node_gbps) [2]",
            "at best 300 Gbit/s between nodes, the policy wants 370 (smoke_min_gbps) [4]",
        )
    }
    assert below(MADE, {}) == {}
    # A suspect's tests say nothing of the others.
    slow = [(Test(4, GROUP, ("a", "b")), Outcome(True, gbps=3.0))]
    assert set(below(slow, FLOORS)) == {"a", "b"}
    assert below(slow, FLOORS, without=["a"]) == {}

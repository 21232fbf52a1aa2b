"""How many nodes a gate drains when one policy is wrong for all of them."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from nodeready.agent.gate import drain
from nodeready.agent.gate.drain import DrainError, SlurmNode
from nodeready.subjects.gate.facts import PENDING
from tests.builders.slurmctld import StandIn
from tests.cases import with_table

WHY = ("loses job, install: gpus.driver: 570.1",)
REASON = f"nodeready: {WHY[0]}"
NODES = [f"n{number:03d}" for number in range(200)]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], StandIn]:
    """Makes a Slurm that answers within these seconds."""

    def make(least_s: float, most_s: float) -> StandIn:
        (tmp_path / "nodes").mkdir()
        stand_in = StandIn(tmp_path / "nodes", (least_s, most_s))
        monkeypatch.setattr(drain, "_scontrol", stand_in.scontrol)
        return stand_in

    return make


def fail_at_once(names: Iterable[str], maximum: str, seed: int) -> Counter[int]:
    """The drain of each node as a process of its own. Returns exit status -> nodes: 0: drained;
    3: the share is filled; 4: Slurm did not answer in time.
    """
    pids = []
    for number, name in enumerate(names):
        pid = os.fork()
        if not pid:
            status = 5
            try:
                random.seed(seed * 1000 + number)
                os.environ["SLURMD_NODENAME"] = name
                status = _drain(maximum)
            finally:
                os._exit(status)
        pids.append(pid)
    return Counter(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


def _drain(maximum: str) -> int:
    try:
        drain.drain_or_undrain(WHY, False, maximum, time.monotonic() + 600)
    except DrainError as error:
        return 3 if error.nodes else 4
    return 0


def drained(nodes: Mapping[str, SlurmNode]) -> list[str]:
    """The nodes that nodeready has drained for good; none may be pending."""
    assert not any(node.is_pending for node in nodes.values())
    return [name for name, node in nodes.items() if node.is_drained and node.reason == REASON]


@pytest.mark.parametrize(("least_s", "most_s", "seed"), [
    (0.01, 0.3, 1),
    *(pytest.param(0.05, 2.0, seed, marks=pytest.mark.nightly) for seed in range(1, 6)),
])  # fmt: skip
def test_of_200_nodes_that_fail_at_once_exactly_the_share_is_drained(slurm, least_s, most_s, seed):
    """Beside 5 of nodeready's drains, 5 of an administrator, and 5 nodes that are down."""
    stand_in = slurm(least_s, most_s)
    stand_in.add(NODES[:5], "batch", "IDLE+DRAIN", f"{REASON} [root@2026-01-01T00:00:00]")
    stand_in.add(NODES[5:10], "batch", "IDLE+DRAIN", "disk swap [root@2026-01-01T00:00:00]")
    stand_in.add(NODES[10:15], "batch", "DOWN*", "no power [root@2026-01-01T00:00:00]")
    stand_in.add(NODES[15:], "batch")
    ended = fail_at_once(NODES, "10%", seed)
    nodes = stand_in.nodes()
    assert len(drained(nodes)) == 20
    assert set(NODES[:5]) < set(drained(nodes))
    assert Counter(node.reason for node in nodes.values()) == {
        **{REASON: 20, "": 170, "disk swap": 5, "no power": 5},
    }
    # 15 that are drained or down already, 15 drained now.
    assert ended == {0: 30, 3: 170}


def test_in_no_partition_of_a_node_more_than_its_share_is_drained(slurm):
    stand_in = slurm(0.01, 0.1)
    stand_in.add(NODES[:20], "all,small")
    stand_in.add(NODES[20:100], "all,large")
    stand_in.add(NODES[100:105], "")
    partitions = {"all": 100, "small": 20, "large": 80, "": 5}
    for seed in range(3):
        # A node that one partition holds back may keep its place in another: the next health check
        # fills it.
        fail_at_once(NODES[:105], "10%", seed)
        names = drained(nodes := stand_in.nodes())
        counts = {
            partition: sum(partition in nodes[name].partitions for name in names)
            for partition in partitions
        }
        assert all(counts[name] <= max(1, size // 10) for name, size in partitions.items()), counts
    assert (counts["all"], counts[""]) == (10, 1)


def test_a_drain_that_broke_off_counts_and_is_concluded_later(slurm, monkeypatch):
    stand_in = slurm(0.0, 0.02)
    stand_in.add(NODES[:20], "batch")
    # Two runs are killed before their second look.
    monkeypatch.setattr(drain, "_SECOND_LOOK_S", 600)
    for name in NODES[:2]:
        pid = os.fork()
        if not pid:
            os.environ["SLURMD_NODENAME"] = name
            _drain("2")
            os._exit(5)
        deadline = time.monotonic() + 30
        while not stand_in.nodes()[name].is_pending and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    monkeypatch.setattr(drain, "_SECOND_LOOK_S", 1.1)
    assert stand_in.nodes()[NODES[0]].reason == f"{PENDING}{WHY[0]}"
    assert fail_at_once(NODES[2:10], "2", 1) == {3: 8}
    # The policy allows less now: only the first one stays.
    assert fail_at_once(NODES[:2], "1", 2) == {0: 1, 3: 1}
    assert drained(stand_in.nodes()) == [NODES[0]]


def node(name: str, reason: str = "", since: str = "", state: str = "IDLE+DRAIN") -> SlurmNode:
    return SlurmNode(tuple(state.split("+")), reason, since, name, ("batch",))


@with_table("own, others, maximum, held")
def test_who_comes_before_a_node_keeps_it_in_service(own, others, maximum, held):
    """A node is a row of its name, reason, the time of the reason, and state."""
    own, *others = (node(*row) for row in (own, *others))
    problem = drain.excess(own, [own, *others], maximum)
    assert bool(problem) is held
    if problem is not None:
        assert f"of {problem.nodes} nodes of batch are drained by nodeready" in str(problem)


def test_a_person_who_decides_between_the_looks_is_right(slurm, monkeypatch):
    stand_in = slurm(0.0, 0.01)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    sleep = time.sleep
    for words, state, reason in (
        (["state=drain", "reason=disk swap"], ("IDLE", "DRAIN"), "disk swap"),
        (["state=undrain"], ("IDLE",), ""),
    ):
        stand_in.add(["n1"], "batch")

        def decide(seconds: float, words: list[str] = words) -> None:
            if seconds == drain._SECOND_LOOK_S:
                stand_in.scontrol(["update", "nodename=n1", *words], 0)
            sleep(seconds / 100)

        monkeypatch.setattr(time, "sleep", decide)
        assert drain.drain_or_undrain(WHY, False, "1", time.monotonic() + 30) == ""
        assert stand_in.nodes()["n1"].states == state
        assert stand_in.nodes()["n1"].reason == reason

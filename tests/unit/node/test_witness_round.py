"""The round of the witnesses beside the stacks: what fails or is late is absent, and no more."""

from __future__ import annotations

import os
import time

import pytest

from nodeready.node.runtime import Supervisor
from nodeready.node.stacks import beside, processes
from nodeready.node.stacks.py_spy import Dump
from nodeready.node.stacks.ranks import Identity, Rank, Target
from nodeready.node.witnesses import devices, flight_recorder, logs, nccl_ras
from nodeready.node.witnesses.devices import Gpus, Kernel, Network
from nodeready.node.witnesses.flight_recorder import Recording
from nodeready.node.witnesses.logs import Log
from nodeready.node.witnesses.nccl_ras import Ras
from nodeready.triage.stacks import trace as traces
from tests.builders.traces import REDUCE, process, trace


@pytest.fixture
def asked(monkeypatch):
    """Stand-ins for all witnesses; what the RAS port was asked."""
    questions: list[tuple[object, ...]] = []

    def ras(supervisor, ranks, environment, allow, limit_s, *, initialising=None):
        questions.append((ranks, allow, initialising))
        return Ras(version="2.29.3")

    stands_in = {
        (logs, "observe"): lambda pid, uid: Log(path=f"/log/{pid}/{uid}"),
        (flight_recorder, "observe"): lambda pid, uid, rank, values: Recording(path=f"/{rank}"),
        (flight_recorder, "ask_for_dump"): lambda pid, uid, rank, values: "no pipe",
        (nccl_ras, "observe"): ras,
        (nccl_ras, "makes_communicator"): lambda frames: ("init", "x.py") in frames,
        (devices, "counters"): lambda: {"eth0": 7},
        (devices, "network"): lambda before, after, seconds: Network(seconds=seconds),
        (devices, "gpus"): lambda supervisor, pids, since_s, limit_s: Gpus(f"no {pids}"),
        (devices, "kernel"): lambda supervisor, since_s, limit_s: Kernel(),
    }
    for (module, name), function in stands_in.items():
        monkeypatch.setattr(module, name, function)
    return questions


def targets(*ranks, stranger=False):
    """This very process, as so many ranks."""
    (own,), _ = processes.scan(time.monotonic() + 9, [os.getpid()])
    facts = processes.observe([own.pid], time.monotonic() + 9)[own.pid]
    identities = [Identity(rank, owner="uid 0") for rank in ranks]
    return [Target(Rank(own, identity, "", stranger), [facts]) for identity in identities]


def round_of(*ranks, ras=False, dump=False, limit_s=9):
    """What the node tells of itself."""
    with Supervisor("nodeready:test", limit_s) as supervisor:
        witnesses = beside.Witnesses(supervisor, ranks, ras=ras, dump=dump)
        witnesses.between()
        return witnesses.end()


def standing(function):
    return Dump(((function, "x.py", 1),))


def test_everybody_is_asked_once(asked):
    (rank,) = targets(0)
    node = round_of(rank)
    assert set(node) == {"gpus", "kernel", "nccl_ras", "network"}
    assert node["gpus"] == {"absent": f"no [{os.getpid()}]", "devices": []}
    assert node["network"]["absent"] == ""
    assert rank.witnesses["logs"]["path"] == f"/log/{os.getpid()}/{os.getuid()}"
    assert rank.witnesses["flight_recorder"]["path"] == "/0"
    assert asked == [([(os.getpid(), os.getuid(), 0)], False, None)]
    row = {**process(0, REDUCE), "witnesses": rank.witnesses}
    traces.read({**trace("n", row), "witnesses": node}, "n")


def test_only_the_node_of_rank_0_asks_the_port(asked):
    assert "nccl_ras" not in round_of(*targets(1))
    assert asked == []


def test_a_rank_that_makes_a_communicator_is_told_to_the_port(asked):
    (rank,) = targets(0)
    rank.dumps.append(standing("init"))
    round_of(rank, ras=True)
    assert asked[0][1:] == (True, True)


def test_a_stranger_and_the_dead_are_not_asked_about(asked):
    (stranger,) = targets(0, stranger=True)
    assert set(round_of(stranger)) == {"network"}
    assert stranger.witnesses == {}
    (dead,) = targets(0)
    dead.facts.clear()
    assert set(round_of(dead)) == {"network"}


def fails(*_, **__):
    raise ValueError("\x1b[31mno\nsuch" + "x" * 999)


def hangs(*_, **__):
    time.sleep(60)


WITNESSES = (
    (logs, "observe", "logs"),
    (flight_recorder, "observe", "flight_recorder"),
    (devices, "gpus", "gpus"),
    (devices, "kernel", "kernel"),
    (devices, "counters", "network"),
    (nccl_ras, "observe", "nccl_ras"),
    (nccl_ras, "makes_communicator", "nccl_ras"),
)
CASES = [(*witness, does) for witness in WITNESSES for does in (fails, hangs)]


# The last one compares two answers, and waits for nobody.
@pytest.mark.parametrize("case", [*CASES, (devices, "network", "network", fails)])
def test_a_witness_that_fails_or_is_late_is_absent_alone(asked, monkeypatch, case):
    module, name, key, does = case
    monkeypatch.setattr(module, name, does)
    if does is hangs:
        monkeypatch.setattr(beside, "_TOOL_S", 0.5)
        monkeypatch.setattr(processes, "_PATIENCE_S", 0.5)
    (rank,) = targets(0)
    rank.dumps.append(standing("step"))
    every = {**round_of(rank), **rank.witnesses}
    assert set(every) == {"gpus", "kernel", "nccl_ras", "network", "logs", "flight_recorder"}
    assert 0 < len(every.pop(key)["absent"]) <= 250
    assert not [name for name, said in every.items() if said["absent"] and name != "gpus"]


@pytest.mark.parametrize(
    ("lines", "answer"),
    [
        # A text that no answer can hold is made one that it can.
        (("\udcff\ud800",), ["??"]),
        (("x" * 9000,), ["x" * 4000]),
        (("x" * 3000,) * 100, None),
    ],
)
def test_an_odd_answer_is_made_one_that_travels_or_absent(asked, monkeypatch, lines, answer):
    monkeypatch.setattr(logs, "observe", lambda pid, uid: Log(lines=lines))
    (rank,) = targets(0)
    round_of(rank)
    if answer is None:
        assert rank.witnesses["logs"] == {"absent": "its answer is too large"}
    else:
        assert rank.witnesses["logs"]["lines"] == answer


def test_a_dump_is_asked_for_before_it_is_read(asked, monkeypatch, tmp_path):
    path = tmp_path / "dump"
    ask = lambda pid, uid, rank, values: path.write_text("x") and ""  # noqa: E731
    read = lambda pid, uid, rank, values: Recording(path=path.read_text())  # noqa: E731
    monkeypatch.setattr(flight_recorder, "ask_for_dump", ask)
    monkeypatch.setattr(flight_recorder, "observe", read)
    (rank,) = targets(0)
    round_of(rank, dump=True)
    assert rank.witnesses["flight_recorder"]["path"] == "x"
    assert rank.notes == []


def test_why_there_is_no_dump_is_a_note(asked):
    (rank,) = targets(0)
    round_of(rank, dump=True)
    assert rank.notes == ["no dump of its flight recorder: no pipe"]

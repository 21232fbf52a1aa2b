"""The round of the witnesses beside the stacks: what fails or is late is absent, and no more."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

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


@dataclass
class Asked:
    """Stand-ins for all witnesses, and what they were asked."""

    ras: tuple[object, ...] = ()
    counted: int = 0


@pytest.fixture
def asked(monkeypatch):
    seen = Asked()

    def counters():
        return {"eth0": 7}

    def ras(supervisor, ranks, environment, allow, limit_s, *, initialising=None):
        seen.ras = (ranks, dict(environment), allow, initialising)
        return Ras(version="2.29.3")

    stands_in = {
        (logs, "observe"): lambda pid, uid: Log(path=f"/log/{pid}/{uid}"),
        (flight_recorder, "observe"): lambda pid, uid, rank, values: Recording(path=f"/{rank}"),
        (flight_recorder, "ask_for_dump"): lambda pid, uid, rank, values: "no pipe",
        (nccl_ras, "observe"): ras,
        (nccl_ras, "makes_communicator"): lambda frames: ("init", "x.py") in frames,
        (devices, "counters"): counters,
        (devices, "network"): lambda before, after, seconds: Network(seconds=seconds),
        (devices, "gpus"): lambda supervisor, pids, since_s, limit_s: Gpus(f"no {pids}"),
        (devices, "kernel"): lambda supervisor, since_s, limit_s: Kernel(),
    }
    for (module, name), function in stands_in.items():
        monkeypatch.setattr(module, name, function, raising=False)
    return seen


def targets(*ranks, stranger=False):
    """This very process, as so many ranks."""
    (own,), _ = processes.scan(time.monotonic() + 9, [os.getpid()])
    seen = processes.observe([own.pid], time.monotonic() + 9)[own.pid]
    who = [Identity(rank, owner="uid 0") for rank in ranks]
    return [Target(Rank(own, one, "", stranger), [seen]) for one in who]


def round_of(found, *, ras=False, dump=False, limit_s=9):
    with Supervisor("nodeready:test", limit_s) as supervisor:
        asked_ = beside.Witnesses(supervisor, found, ras=ras, dump=dump)
        asked_.between()
        return asked_.end()


def test_everybody_is_asked_once(asked):
    (one,) = found = targets(0)
    node = round_of(found)
    assert set(node) == {"gpus", "kernel", "nccl_ras", "network"}
    assert node["gpus"] == {"absent": f"no [{os.getpid()}]", "devices": []}
    assert node["network"]["absent"] == ""
    assert one.witnesses["logs"]["path"] == f"/log/{os.getpid()}/{os.getuid()}"
    assert one.witnesses["flight_recorder"]["path"] == "/0"
    assert asked.ras[0] == [(os.getpid(), os.getuid(), 0)]
    assert asked.ras[2:] == (False, None)
    row = {**process(0, REDUCE), "witnesses": one.witnesses}
    traces.read({**trace("n", row), "witnesses": node}, "n")


def test_only_the_node_of_rank_0_asks_the_port(asked):
    assert "nccl_ras" not in round_of(targets(1))
    assert asked.ras == ()


def test_a_rank_that_makes_a_communicator_is_told(asked):
    (one,) = found = targets(0)
    one.dumps.append(standing("init"))
    round_of(found, ras=True)
    assert asked.ras[2:] == (True, True)


def standing(function):
    return Dump(((function, "x.py", 1),))


def test_a_stranger_and_the_dead_are_not_asked_about(asked):
    (stranger,) = found = targets(0, stranger=True)
    assert set(round_of(found)) == {"network"}
    assert stranger.witnesses == {}
    (dead,) = found = targets(0)
    dead.facts.clear()
    assert set(round_of(found)) == {"network"}


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
CASES = [(*one, does) for one in WITNESSES for does in (fails, hangs)]


# The last one compares two answers, and waits for nobody.
@pytest.mark.parametrize("case", [*CASES, (devices, "network", "network", fails)])
def test_one_that_fails_or_is_late_is_absent_alone(asked, monkeypatch, case):
    module, name, key, does = case
    monkeypatch.setattr(module, name, does)
    monkeypatch.setattr(beside, "_TOOL_S", 0.5)
    (one,) = found = targets(0)
    one.dumps.append(standing("step"))
    every = {**round_of(found), **one.witnesses}
    assert set(every) == {"gpus", "kernel", "nccl_ras", "network", "logs", "flight_recorder"}
    assert every[key]["absent"]
    assert len(every[key]["absent"]) <= 250
    others = {name: said for name, said in every.items() if name != key}
    assert not [name for name, said in others.items() if said["absent"] and name != "gpus"]


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (Log(lines=("\udcff\ud800",)), ["??"]),
        (Log(lines=("x" * 9000,)), ["x" * 4000]),
    ],
)
def test_a_text_that_no_answer_can_hold_is_made_one_that_it_can(asked, monkeypatch, said, kept):
    monkeypatch.setattr(logs, "observe", lambda pid, uid: said)
    (one,) = found = targets(0)
    round_of(found)
    assert one.witnesses["logs"]["lines"] == kept


def test_an_answer_that_is_too_large_is_absent(asked, monkeypatch):
    monkeypatch.setattr(logs, "observe", lambda pid, uid: Log(lines=("x" * 3000,) * 100))
    (one,) = found = targets(0)
    round_of(found)
    assert one.witnesses["logs"] == {"absent": "its answer is too large"}


def test_a_dump_is_asked_for_before_it_is_read(asked, monkeypatch, tmp_path):
    ask = lambda pid, uid, rank, values: (tmp_path / "dump").write_text("x") and ""  # noqa: E731
    monkeypatch.setattr(flight_recorder, "ask_for_dump", ask)
    monkeypatch.setattr(
        flight_recorder,
        "observe",
        lambda pid, uid, rank, values: Recording(path=(tmp_path / "dump").read_text()),
    )
    (one,) = found = targets(0)
    round_of(found, dump=True)
    assert one.witnesses["flight_recorder"]["path"] == "x"
    assert one.notes == []


def test_why_there_is_no_dump_is_a_note(asked):
    (one,) = found = targets(0)
    round_of(found, dump=True)
    assert one.notes == ["no dump of its flight recorder: no pipe"]

"""The round of the witnesses beside the stacks: what fails or is late is absent, and no more."""

import os
import time

import pytest

from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.stacks import ask_witnesses, processes
from nodeready.agent.stacks.descendants import StackTarget
from nodeready.agent.stacks.py_spy import Dump
from nodeready.agent.stacks.ranks import JobRank, RankIdentity
from nodeready.agent.witnesses import (
    environment,
    flight_recorder,
    gpus,
    kernel_log,
    logs,
    nccl_ras,
    ports,
)
from nodeready.agent.witnesses.flight_recorder import Recording
from nodeready.agent.witnesses.gpus import WitnessedGpus
from nodeready.agent.witnesses.kernel_log import KernelLog
from nodeready.agent.witnesses.logs import RankLog
from nodeready.agent.witnesses.nccl_ras import Ras
from nodeready.agent.witnesses.ports import Network
from nodeready.subjects.environment_table import EnvironmentFacts, RankVariables
from tests.builders.traces import REDUCE, process, trace


@pytest.fixture
def asked(monkeypatch):
    """Stand-ins for all witnesses; what the RAS port was asked."""
    questions: list[tuple[object, ...]] = []

    def ras(supervisor, ranks, environment, allow, limit_s, *, makes_communicator):
        questions.append((ranks, allow, makes_communicator))
        return Ras(version="2.29.3")

    stands_in = {
        (logs, "observe"): lambda pid, uid, *_: RankLog(path=f"/log/{pid}/{uid}"),
        (flight_recorder, "observe"): lambda pid, uid, rank, values: Recording(path=f"/{rank}"),
        (flight_recorder, "ask_for_dump"): lambda pid, uid, rank, values: "no pipe",
        (nccl_ras, "observe"): ras,
        (nccl_ras, "makes_communicator"): lambda frames: ("init", "x.py") in frames,
        (ports, "counters"): lambda: {"eth0": 7},
        (ports, "network"): lambda before, after, seconds: Network(seconds=seconds),
        (gpus, "witness_gpus"): lambda supervisor, pids, *seconds: WitnessedGpus(f"no {pids}"),
        (kernel_log, "witness_log"): lambda supervisor, since_s, limit_s: KernelLog(),
        (environment, "observe_node"): lambda pid, masters, deadline: EnvironmentFacts(cpus=pid),
        (environment, "observe_rank"): lambda pid, network: RankVariables(cpus=pid),
    }
    for (module, name), function in stands_in.items():
        monkeypatch.setattr(module, name, function)
    return questions


def targets(*ranks, stranger=False):
    """This very process, as so many ranks."""
    (own,), _ = processes.scan(time.monotonic() + 9, [os.getpid()])
    facts = processes.observe([own.pid], time.monotonic() + 9)[own.pid]
    identities = [RankIdentity(rank, owner="uid 0") for rank in ranks]
    return [StackTarget(JobRank(own, identity, "", stranger), [facts]) for identity in identities]


def round_of(*ranks, ras=False, dump=False, limit_s=9):
    with ProcessSupervisor("nodeready:test", limit_s) as supervisor:
        witnesses = ask_witnesses.Witnesses(supervisor, ranks, ras=ras, dump=dump)
        witnesses.ask()
        return witnesses.finish()


def standing(function):
    return Dump(((function, "x.py", 1),))


def test_everybody_is_asked_once(asked):
    (rank,) = targets(0)
    node = round_of(rank)
    assert set(node) == {"environment", "gpus", "kernel", "nccl_ras", "network"}
    assert node["environment"]["cpus"] == rank.witnesses["variables"]["cpus"] == os.getpid()
    assert node["gpus"] == {"absent": f"no [{os.getpid()}]", "devices": []}
    assert node["network"]["absent"] == ""
    assert rank.witnesses["logs"]["path"] == f"/log/{os.getpid()}/{os.getuid()}"
    assert rank.witnesses["flight_recorder"]["path"] == "/0"
    assert asked == [([(os.getpid(), os.getuid(), 0)], False, False)]
    row = {**process(0, REDUCE), "witnesses": rank.witnesses}
    trace("n", row, witnesses=node)


def test_only_the_node_of_rank_0_asks_the_port_and_says_who_makes_a_communicator(asked):
    assert "nccl_ras" not in round_of(*targets(1))
    (rank,) = targets(0)
    rank.dumps.append(standing("init"))
    round_of(rank, ras=True)
    assert [question[1:] for question in asked] == [(True, True)]


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


WITNESSES = {
    (logs, "observe"): "logs",
    (flight_recorder, "observe"): "flight_recorder",
    (gpus, "witness_gpus"): "gpus",
    (kernel_log, "witness_log"): "kernel",
    (environment, "observe_node"): "environment",
    (environment, "observe_rank"): "variables",
    **{(ports, name): "network" for name in ("counters", "network")},
    **{(nccl_ras, name): "nccl_ras" for name in ("observe", "makes_communicator")},
}


@pytest.mark.parametrize("does", [fails, hangs])
@pytest.mark.parametrize(("module", "name"), WITNESSES)
def test_a_witness_that_fails_or_is_late_is_absent_alone(asked, monkeypatch, module, name, does):
    # `network` compares two answers, and waits for nobody.
    monkeypatch.setattr(module, name, fails if name == "network" else does)
    if does is hangs:
        monkeypatch.setattr(ask_witnesses, "_TOOL_S", 0.5)
        monkeypatch.setattr(processes, "_PATIENCE_S", 0.5)
    (rank,) = targets(0)
    rank.dumps.append(standing("step"))
    every = {**round_of(rank), **rank.witnesses}
    assert set(every) == {
        "gpus", "kernel", "nccl_ras", "network", "logs", "flight_recorder", "environment",
        "variables",
    }  # fmt: skip
    assert 0 < len(every.pop(WITNESSES[module, name])["absent"]) <= 250
    assert not [name for name, said in every.items() if said["absent"] and name != "gpus"]


def test_an_odd_answer_is_made_one_that_travels_or_absent(asked, monkeypatch):
    for lines, answer in (
        # A text that no answer can hold is made one that it can.
        (("\udcff\ud800", "x" * 9000), {"lines": ["??", "x" * 4000], "absent": ""}),
        (("x" * 3000,) * 100, {"absent": "its answer is too large"}),
    ):
        monkeypatch.setattr(logs, "observe", lambda *_, lines=lines: RankLog(lines=lines))
        (rank,) = targets(0)
        round_of(rank)
        assert answer.items() <= rank.witnesses["logs"].items()


def test_a_dump_is_asked_for_before_it_is_read(asked, monkeypatch, tmp_path):
    (rank,) = targets(0)
    round_of(rank, dump=True)
    assert rank.notes == ["no dump of its flight recorder: no pipe"]
    path = tmp_path / "dump"
    monkeypatch.setattr(flight_recorder, "ask_for_dump", lambda *_: path.write_text("x") and "")
    monkeypatch.setattr(flight_recorder, "observe", lambda *_: Recording(path=path.read_text()))
    (rank,) = targets(0)
    round_of(rank, dump=True)
    assert (rank.witnesses["flight_recorder"]["path"], rank.notes) == ("x", [])

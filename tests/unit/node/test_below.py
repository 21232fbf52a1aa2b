"""The processes below a rank: which they are, what they are for, and how they are told."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from nodeready.node.runtime import Supervisor
from nodeready.node.stacks import below, processes, py_spy
from nodeready.node.stacks import program as answer
from nodeready.node.stacks.processes import Facts, Process
from nodeready.node.stacks.py_spy import Dump, Thread
from nodeready.node.stacks.ranks import (
    EXITING,
    INTERPRETER_LOCK,
    Identity,
    Rank,
    Target,
)
from nodeready.triage.stacks.trace import read

FACTS = Facts("S", "do_wait", (), 1.0, 1.0, 1, 0, 0)
RESOURCES = "python -c from multiprocessing.resource_tracker import main;main(5)"
SERVER = "python -B -c from multiprocessing.forkserver import main; main(6, 7, ['__main__'])"
SPAWN = "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)"
LOOP = (("_bootstrap", "multiprocessing/process.py", 3),)
WORKER = (*LOOP, ("_worker_loop", "torch/utils/data/_utils/worker.py", 300), ("read", "d.py", 1))


def process(pid, parent=10, command="python train.py", name="python3"):
    return Process(pid, parent, name, 1.0, 1.0, command, name, {}, uid=0)


@pytest.mark.parametrize(
    ("one", "stack", "kind"),
    [
        (process(1, name="pt_data_worker"), (), "loader worker"),
        (process(1), WORKER, "loader worker"),
        (process(1, command=SPAWN), WORKER, "loader worker"),
        (process(1, command="sh -c gcc x.c", name="sh"), (), "shell"),
        (process(1, command="/usr/bin/ninja -v", name="ninja"), (), "compiler"),
        (process(1, command="/usr/lib/gcc/x86_64-linux-gnu/12/cc1plus x", name="cc1plus"), (),
         "compiler"),
        (process(1, command="/usr/local/cuda/bin/nvcc -x", name="nvcc"), (), "compiler"),
        (process(1, command="python -m torch._inductor.compile_worker --workers=8"), (),
         "compiler"),
        (process(1, command="python /x/torch/_inductor/compile_worker/__main__.py"), (),
         "compiler"),
        (process(1, command=SPAWN), (("_checkpointing_subprocess", "x.py", 1),),
         "checkpoint writer"),
        (process(1, command="sleep 9", name="sleep"), (), "process"),
        (process(1), (("read_worker_loop", "mine.py", 1),), "process"),
    ],
)  # fmt: skip
def test_what_it_is_for(one, stack, kind):
    assert below.kind(one, Dump(stack) if stack else None) == kind


def target(pid, known=None, **more) -> Target:
    return Target(Rank(known or process(pid, 1), Identity(0, owner="uid 0")), [FACTS], **more)


@pytest.fixture
def tree(monkeypatch):
    """The processes of a node: pid -> (parent, command)."""

    def made(rows):
        known = [process(pid, parent, command) for pid, (parent, command) in rows.items()]
        children: dict[int, list[int]] = {}
        for one in known:
            children.setdefault(one.parent, []).append(one.pid)
        monkeypatch.setattr(processes, "children", lambda: children)
        monkeypatch.setattr(processes, "scan", lambda deadline, numbers: ([], 0))
        return known

    return made


def found(one):
    return [each.pid for each in one.below]


def test_descendants_without_other_ranks_and_trackers(tree):
    known = tree(
        {
            11: (10, "python train.py"),
            12: (10, RESOURCES),
            13: (10, SERVER),
            14: (13, SERVER),
            15: (14, "sh -c x"),
            20: (10, "python rank1.py"),
            21: (20, "python worker"),
            30: (10, "python ours"),
            40: (99, "python somebody"),
        }
    )
    ranks = target(10), target(20)
    below.find(ranks, known, {30}, time.monotonic() + 9)
    assert [found(one) for one in ranks] == [[11, 13, 14, 15], [21]]


def test_a_circle_of_parents_ends(tree):
    known = tree({11: (12, "x"), 12: (11, "x"), 10: (12, "x")})
    one = target(10)
    known += tree({11: (10, "x"), 10: (11, "x")})
    below.find([one], known, set(), time.monotonic() + 9)
    assert found(one) == [11]


def test_no_more_than_so_many_of_one_rank(tree):
    known = tree({100 + n: (10, "python w") for n in range(90)})
    one = target(10)
    below.find([one], known, set(), time.monotonic() + 9)
    assert len(one.below) == below.MOST
    assert one.notes == ["26 more processes below it are not looked at"]


def test_nobody_looks_below_a_stranger(tree):
    known = tree({11: (10, "python w")})
    one = target(10)
    one.rank = replace(one.rank, stranger=True)
    below.find([one], known, set(), time.monotonic() + 9)
    assert one.below == []


def test_what_differs_is_looked_at_first():
    one = target(10)
    for pid in range(20, 26):
        last = pid == 25
        waits = "read of /data/x (nfs4)" if last else f"poll of a pipe that pid {pid} (x) writes"
        one.below.append(Target(Rank(process(pid), Identity()), [FACTS], waits_on=waits))
    one.below.append(Target(Rank(process(26, command="gcc", name="gcc"), Identity()), [FACTS]))
    one.below.append(Target(Rank(process(27), Identity())))
    assert [each.pid for each in below.in_order([one])] == [20, 25, 21, 22, 23, 24]


def test_its_part_of_the_trace():
    one = target(10, dumps=[Dump(LOOP)])
    worker = Target(Rank(process(20), Identity()), [FACTS], cpu_s=[1.0, 2.0], dumps=[Dump(WORKER)])
    shell = Target(Rank(process(21, 20, "sh -c x", "sh"), Identity()), [FACTS])
    gone = Target(Rank(process(22), Identity()), dumps=[Dump(error="it has ended")])
    idle = (("main", "multiprocessing/forkserver.py", 2), ("select", "selectors.py", 9))
    server = Target(Rank(process(23), Identity()), [FACTS], dumps=[Dump(idle)])
    one.below = [worker, shell, gone, server]
    line = answer._packed({**HEAD}, [one], [])
    trace = read(answer.unpack(f"N {line}", "N"), "n")
    rows = trace["processes"][0]["below"]
    assert [(row["pid"], row["kind"], row["error"]) for row in rows] == [
        (20, "loader worker", ""),
        (21, "shell", "not Python"),
        (22, "process", "it has ended"),
    ]
    assert rows[0]["cpu_s"] == [1.0, 2.0]
    frames = [tuple(trace["frames"][index]) for index in trace["stacks"][rows[0]["main"]]]
    assert frames == list(WORKER)


HEAD = {
    "schema": answer.SCHEMA, "node": "n", "started": "", "interval_s": 2.0, "error": "",
    "frames": [], "stacks": [], "processes": [], "instead": [], "witnesses": {},
}  # fmt: skip


def test_what_is_beside_the_stacks_is_left_out_first():
    one = target(10, dumps=[Dump(LOOP, (Thread("t", LOOP),), locals=("a: b = 1",))])
    one.witnesses["logs"] = {"lines": [os.urandom(1000).hex() for _ in range(3000)]}
    trace = read(answer.unpack(f"N {answer._packed({**HEAD}, [one], [])}", "N"), "n")
    (process_,) = trace["processes"]
    assert (process_["witnesses"], process_["locals"], process_["below"]) == ({}, [], [])
    assert process_["samples"][0]["threads"]
    assert process_["note"] == "what is below and beside it is left out: there is too much"


@pytest.mark.parametrize(
    ("gil", "switches", "timed", "own", "told"),
    [
        (("holder", "holder"), (0, 390), True, False, True),
        # One that comes to hold it at times, a lock of the program's own, and itself.
        (("", "holder"), (0, 390), True, False, False),
        (("holder", "other"), (0, 390), True, False, False),
        (("holder", "holder"), (0, 3), True, False, False),
        (("holder", "holder"), (0, 390), False, False, False),
        (("MainThread", "MainThread"), (0, 390), True, True, False),
        (("holder",), (0,), True, False, False),
    ],
)
def test_who_holds_the_interpreters_lock(gil, switches, timed, own, told):
    one = target(10, dumps=[Dump(LOOP, gil=name, own=own) for name in gil])
    one.switches, one.timed_lock, one.waits_on = list(switches), timed, "futex"
    one.tell_interpreter_lock(2.0)
    said = f"{INTERPRETER_LOCK}, which thread holder holds"
    assert one.waits_on == (said if told else "futex")


def test_a_process_that_exits_is_not_looked_into():
    one = target(10)
    one.add_facts(replace(FACTS, exiting=True))
    assert one.refusal(0) == EXITING
    assert one.notes == [EXITING]


def test_a_new_child_is_found_with_what_it_runs():
    """One that came after the first look at all processes."""
    own, _ = processes.scan(time.monotonic() + 9, [os.getpid()])
    one = Target(Rank(own[0], Identity(0)), [FACTS])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            below.find([one], own, set(), time.monotonic() + 20)
            assert child.pid in found(one)
            (it,) = [each for each in one.below if each.pid == child.pid]
            assert "input()" in it.rank.process.command
        finally:
            child.kill()


# --- Ranks that no launcher has numbered.


def dumped(**rows):
    return lambda supervisor, path, pid, limit_s, how: rows.get(f"p{pid}", Dump(LOOP))


@pytest.fixture
def node(monkeypatch):
    monkeypatch.setattr(below, "_holds", lambda pid: pid < 100)
    monkeypatch.setattr(below, "_ends_here", lambda pid: True)
    monkeypatch.setattr(below, "_readable", lambda process: True)

    def find(rows, **dumps):
        monkeypatch.setattr(py_spy, "take", dumped(**dumps))
        known = [process(pid, parent, command) for pid, (parent, command) in rows.items()]
        with Supervisor("nodeready:test", 20) as supervisor:
            ranks = below.find_spawned(supervisor, "py-spy", known, ())
        return [(one.process.pid, one.identity.rank, one.identity.world_size) for one in ranks]

    return find


SPAWNS = {10: (1, "python t.py"), 11: (10, SPAWN), 12: (10, SPAWN), 13: (10, RESOURCES)}
PLACES = {"p10": Dump(LOOP, spawns=3), "p11": Dump(LOOP, spawned=2), "p12": Dump(LOOP, spawned=0)}


def test_ranks_of_torch_multiprocessing_by_their_places(node):
    """The second one has ended."""
    assert node(SPAWNS, **PLACES) == [(12, 0, 3), (11, 2, 3)]


def test_of_a_fork_server(node):
    rows = {10: (1, "python t.py"), 15: (10, SERVER), 11: (15, SERVER), 12: (15, SERVER)}
    assert node(rows, **PLACES) == [(12, 0, 3), (11, 2, 3)]


def test_on_several_nodes_a_place_is_no_rank(node, monkeypatch):
    monkeypatch.setattr(below, "_ends_here", lambda pid: False)
    assert node(SPAWNS, **PLACES) == [(12, None, None), (11, None, None)]


def test_a_training_alone_with_its_loader_is_no_job_of_ranks(node):
    assert node(SPAWNS) == []
    assert node({10: (1, "python t.py"), 20: (1, "python other.py")}) == []
    assert (
        node({10: (1, "python -m ipykernel_launcher"), 11: (1, "python -m ipykernel_launcher")})
        == []
    )


def test_what_somebody_started_by_hand(node):
    """As jax.distributed is: each with its number as an argument."""
    rows = {10: (1, "python j.py 0"), 11: (1, "python j.py 1"), 12: (11, "python j.py 1")}
    assert node(rows) == [(10, None, None), (11, None, None)]
    assert node({10: (1, "python j.py 0"), 200: (1, "python j.py 1")}) == []


RAY_LINE = (
    '{"asctime": "2026-11-23 02:23:25,246", "levelname": "DEBUG", "message": "Setting up process '
    'group for: env:// [rank=%d, world_size=%d]", "filename": "config.py", "lineno": 120}\n'
)
RAY_LOG = "ray-train-sys-worker-0f5880afd5f8ce488e716bb3.log"


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        (RAY_LOG, RAY_LINE % (1, 2), (1, 2)),
        (RAY_LOG, "{}\n" + RAY_LINE % (0, 4) + RAY_LINE % (3, 4), (3, 4)),
        (RAY_LOG, '{"message": "Killed"}\n', None),
        (RAY_LOG.replace("sys", "app"), RAY_LINE % (1, 2), None),
    ],
)
def test_a_worker_of_ray_train_writes_its_number_into_a_log(tmp_path, name, text, number):
    """The log is that which the process has open, whatever has its name now."""
    path = tmp_path / name
    with path.open("w") as log:
        log.write(text)
        log.flush()
        path.rename(tmp_path / f"moved-{name}")
        path.write_text(RAY_LINE % (7, 8))
        (tmp_path / f"moved-{name}").rename(path)
        assert below._number_in_ray(os.getpid(), os.getuid()) == number


def trained(pid, job="01000000"):
    worker = process(pid, command="ray::RayTrainWorker.execute")
    return Rank(worker, Identity(job=job, owner="uid 7"))


@pytest.mark.parametrize(
    ("told", "numbers"),
    [
        ({11: (1, 3), 12: (0, 3)}, [(12, 0, 3), (11, 1, 3), (13, None, None)]),
        ({11: (1, 3)}, [(11, None, None), (12, None, None), (13, None, None)]),
        ({11: (1, 3), 12: (1, 3)}, [(11, None, None), (12, None, None), (13, None, None)]),
        ({11: (1, 2), 12: (0, 3)}, [(11, None, None), (12, None, None), (13, None, None)]),
        ({11: (3, 3), 12: (0, 3)}, [(11, None, None), (12, None, None), (13, None, None)]),
    ],
)
def test_the_workers_of_a_job_of_ray_train_have_numbers_all_or_none(monkeypatch, told, numbers):
    monkeypatch.setattr(below, "_number_in_ray", lambda pid, uid: told.get(pid))
    ranks = [trained(11), trained(12), trained(13, "02000000")]
    found = below.numbered(ranks, time.monotonic() + 20)
    assert [
        (one.process.pid, one.identity.rank, one.identity.world_size) for one in found
    ] == numbers
    assert [one.identity.job for one in found if one.process.pid == 13] == ["02000000"]

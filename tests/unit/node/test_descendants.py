"""The processes below a rank: which they are, what they are for, and how an answer has them."""

import os
import subprocess
import time
from dataclasses import replace

import pytest

from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.stacks import descendants, processes, py_spy
from nodeready.agent.stacks import program as answer
from nodeready.agent.stacks.descendants import INTERPRETER_LOCK, StackTarget
from nodeready.agent.stacks.processes import Facts, ScannedProcess
from nodeready.agent.stacks.py_spy import Dump, PySpyThread
from nodeready.agent.stacks.ranks import JobRank, RankIdentity
from nodeready.agent.stacks.waits import WaitCall
from tests.builders.traces import checked
from tests.cases import with_table

FACTS = Facts("S", "do_wait", (), 1.0, 1.0, 1, 0, 0)
TRACKER = "python -c from multiprocessing.resource_tracker import main;main(5)"
SERVER = "python -B -c from multiprocessing.forkserver import main; main(6, 7, ['__main__'])"
SPAWN = "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)"
LOOP = (("_bootstrap", "multiprocessing/process.py", 3),)
WORKER = (*LOOP, ("_worker_loop", "torch/utils/data/_utils/worker.py", 300), ("read", "d.py", 1))


def process(pid, parent=10, command="python train.py", name="python3"):
    return ScannedProcess(pid, parent, name, 1.0, 1.0, command, name, {}, uid=0)


def processes_of(rows):
    """pid -> (parent, command)."""
    return [process(pid, parent, command) for pid, (parent, command) in rows.items()]


@with_table("command, name, stack, kind")
def test_the_kind_of_a_process(command, name, stack, kind):
    dump = Dump(stack) if stack else None
    assert descendants.kind(process(1, command=command, name=name), dump) == kind


def target(pid, known=None, **more) -> StackTarget:
    return StackTarget(
        JobRank(known or process(pid, 1), RankIdentity(0, owner="uid 0")), [FACTS], **more
    )


@pytest.fixture
def find(monkeypatch):
    """`descendants.find` on a node with these processes."""

    def found(rows, targets, own=()):
        children: dict[int, list[int]] = {}
        for pid, (parent, _) in rows.items():
            children.setdefault(parent, []).append(pid)
        monkeypatch.setattr(processes, "children", lambda: children)
        monkeypatch.setattr(processes, "scan", lambda deadline, numbers: ([], 0))
        descendants.find(targets, processes_of(rows), set(own), time.monotonic() + 9)
        return [[child.pid for child in target.descendants] for target in targets]

    return found


def test_descendants_without_other_ranks_and_trackers(find):
    rows = {
        **{11: (10, "python train.py"), 12: (10, TRACKER), 13: (10, SERVER), 14: (13, SERVER)},
        **{15: (14, "sh -c x"), 20: (10, "python rank1.py"), 21: (20, "python worker")},
        **{30: (10, "python ours"), 40: (99, "python somebody")},
    }
    stranger = target(40)
    stranger.rank = replace(stranger.rank, stranger=True)
    rows[41] = (40, "python w")
    found = find(rows, [target(10), target(20), stranger], {30})
    assert found == [[11, 13, 14, 15], [21], []]
    # A circle of parents ends.
    assert find({11: (10, "x"), 10: (11, "x")}, [target(10)]) == [[11]]


@pytest.mark.parametrize(("count", "notes"), [(0, []), (26, [26])])
def test_the_descendants_of_a_rank_are_bounded(find, count, notes):
    rank = target(10)
    find({100 + n: (10, "python w") for n in range(descendants.MAX_DESCENDANTS + count)}, [rank])
    assert len(rank.descendants) == descendants.MAX_DESCENDANTS
    assert rank.notes == [f"{n} more of its descendants are not looked at" for n in notes]


def test_a_new_child_is_found_with_what_it_runs():
    """One that came after the first look at all processes."""
    own, _ = processes.scan(time.monotonic() + 9, [os.getpid()])
    rank = StackTarget(JobRank(own[0], RankIdentity(0)), [FACTS])
    with subprocess.Popen(["sh", "-c", "read go; :"], stdin=subprocess.PIPE) as child:
        descendants.find([rank], own, set(), time.monotonic() + 20)
        child.kill()
    assert "read go" in {row.pid: row.rank.process.command for row in rank.descendants}[child.pid]


def test_the_odd_ones_are_looked_at_first():
    rank = target(10)
    waits = {pid: f"poll of a pipe that pid {pid} (x) writes" for pid in range(20, 25)}
    waits[25] = "read of /data/x (nfs4)"
    own = RankIdentity()
    rank.descendants = [
        StackTarget(JobRank(process(at), own), [FACTS], waits_on=waits[at]) for at in waits
    ]
    rank.descendants.append(
        StackTarget(JobRank(process(26, command="gcc", name="gcc"), own), [FACTS])
    )
    rank.descendants.append(StackTarget(JobRank(process(27), own)))
    assert [child.pid for child in descendants.dump_order([rank])] == [20, 25, 21, 22, 23, 24]


@with_table("command, used_s, awaited, work")
def test_whether_a_descendant_works(command, used_s, awaited, work):
    """A compiler, and what is waited for, and reads or writes."""
    rank = target(os.getpid())
    with subprocess.Popen(["bash", "-c", command], start_new_session=True) as child:
        try:
            time.sleep(0.2)
            rows, _ = processes.scan(time.monotonic() + 9)
            below = [row for row in rows if child.pid in (row.pid, row.parent)]
            rank.descendants = [
                StackTarget(JobRank(row, RankIdentity()), [FACTS], cpu_s=[0.0, used_s])
                for row in below
            ]
            call = WaitCall("wait", child=child.pid if awaited else 0)
            calls = {(rank.pid, rank.thread): call}
            descendants.set_work([rank], calls, 2.0, time.monotonic() + 9)
        finally:
            os.killpg(child.pid, 9)
    assert bool(rank.work) == bool(work)
    assert work in rank.work


@with_table("io, work")
def test_who_writes_or_reads_files_works(io, work):
    """A log grows also in a job that hangs."""
    rank, stat = target(os.getpid()), "7 (python) S" + " 0" * 49
    rank.facts = [processes.facts(stat, "", "", "", io=text, task_io=text) for text in io]
    descendants.set_work([rank], {}, 2.0, time.monotonic() + 9)
    assert rank.work == work


HEAD = {"schema": answer.SCHEMA, "node": "n", "started": "", "interval_s": 2.0, "error": ""}
HEAD |= dict.fromkeys(("frames", "stacks", "processes", "instead"), ()) | {"witnesses": {}}


def trace_of(rank):
    return checked(answer.unpack(f"N {answer._pack_within_limits({**HEAD}, [rank], [])}", "N"))


def test_the_part_of_the_trace():
    rank = target(10, dumps=[Dump(LOOP)])
    worker = StackTarget(
        JobRank(process(20), RankIdentity()), [FACTS], cpu_s=[1.0, 2.0], dumps=[Dump(WORKER)]
    )
    shell = StackTarget(JobRank(process(21, 20, "sh -c x", "sh"), RankIdentity()), [FACTS])
    gone = StackTarget(JobRank(process(22), RankIdentity()), dumps=[Dump(error="it has ended")])
    idle = (("main", "multiprocessing/forkserver.py", 2), ("select", "selectors.py", 9))
    server = StackTarget(JobRank(process(23), RankIdentity()), [FACTS], dumps=[Dump(idle)])
    rank.descendants = [worker, shell, gone, server]
    trace = trace_of(rank)
    rows = trace["processes"][0]["below"]
    assert [(row["pid"], row["kind"], row["error"], row["cpu_s"]) for row in rows] == [
        (20, "loader worker", "", [1.0, 2.0]),
        (21, "shell", "not Python", []),
        (22, "process", "it has ended", []),
    ]
    frames = [tuple(trace["frames"][index]) for index in trace["stacks"][rows[0]["main"]]]
    assert frames == list(WORKER)


def test_the_parts_beside_the_stacks_are_left_out_first(monkeypatch):
    monkeypatch.setattr(answer, "_MAX_ANSWER", 4 << 10)
    rank = target(10, dumps=[Dump(LOOP, (PySpyThread("t", LOOP),), locals=("a: b = 1",))])
    rank.witnesses["logs"] = {"lines": [os.urandom(1000).hex() for _ in range(3)]}
    (row,) = trace_of(rank)["processes"]
    assert (row["witnesses"], row["locals"], row["below"]) == ({}, [], [])
    assert row["samples"][0]["threads"]
    assert row["note"] == "its descendants and witnesses are left out: the answer is too large"


@with_table("gil, switches, timed, own, told")
def test_which_thread_holds_the_interpreters_lock(gil, switches, timed, own, told):
    rank = target(10, dumps=[Dump(LOOP, gil=name, holds_gil=own) for name in gil])
    rank.switches, rank.timed_lock, rank.waits_on = list(switches), timed, "futex"
    rank.note_interpreter_lock(2.0)
    phrase = f"{INTERPRETER_LOCK}, which thread holder holds"
    assert rank.waits_on == (phrase if told else "futex")


def numbers(ranks):
    return [(row.process.pid, row.identity.rank, row.identity.world_size) for row in ranks]


SPAWNED = {10: (1, "python t.py"), 11: (10, SPAWN), 12: (10, SPAWN), 13: (10, TRACKER)}
FORKED = {10: (1, "python t.py"), 15: (10, SERVER), 11: (15, SERVER), 12: (15, SERVER)}
#: The second one has ended.
PLACES = {10: Dump(LOOP, spawns=3), 11: Dump(LOOP, spawned=2), 12: Dump(LOOP, spawned=0)}
#: As jax.distributed is: each with its number as an argument.
BY_HAND = {10: (1, "python j.py 0"), 11: (1, "python j.py 1"), 12: (11, "python j.py 1")}
KERNELS = dict.fromkeys((10, 11), (1, "python -m ipykernel_launcher"))


@pytest.mark.parametrize(("rows", "dumps", "ends_here", "ranks"), [
    (SPAWNED, PLACES, True, [(12, 0, 3), (11, 2, 3)]),
    (FORKED, PLACES, True, [(12, 0, 3), (11, 2, 3)]),
    # On several nodes a place is no rank.
    (SPAWNED, PLACES, False, [(12, None, None), (11, None, None)]),
    # A training alone with its loader is no job of ranks.
    (SPAWNED, {}, True, []),
    (KERNELS, {}, True, []),
    (BY_HAND, {}, True, [(10, None, None), (11, None, None)]),
    ({10: (1, "python j.py 0"), 200: (1, "python j.py 1")}, {}, True, []),
])  # fmt: skip
def test_ranks_that_no_launcher_has_numbered(monkeypatch, rows, dumps, ends_here, ranks):
    """torch.multiprocessing, spawned and by a fork server, and what somebody started by hand."""
    monkeypatch.setattr(descendants, "_has_library", lambda pid: pid < 100)
    monkeypatch.setattr(descendants, "_ends_here", lambda pid: ends_here)
    monkeypatch.setattr(descendants, "_readable", lambda process: True)
    monkeypatch.setattr(py_spy, "take", lambda a, b, pid, *_: dumps.get(pid, Dump(LOOP)))
    with ProcessSupervisor("nodeready:test", 20) as supervisor:
        found = descendants.find_spawned(supervisor, "py-spy", processes_of(rows), ())
    assert numbers(found) == ranks


RAY_LINE = (
    '{"asctime": "2026-11-23 02:23:25,246", "levelname": "DEBUG", "message": "Setting up process '
    'group for: env:// [rank=%d, world_size=%d]", "filename": "config.py", "lineno": 120}\n'
)
RAY_LOG = "ray-train-sys-worker-0f5880afd5f8ce488e716bb3.log"


@with_table("name, text, number")
def test_a_worker_of_ray_train_writes_its_number_into_a_log(tmp_path, name, text, number):
    path = tmp_path / name
    with path.open("w") as log:
        log.write(text)
        log.flush()
        # What the process has open is meant, whatever has its name now.
        path.rename(tmp_path / "moved")
        path.write_text(RAY_LINE % (7, 8))
        (tmp_path / "moved").rename(path)
        assert descendants._number_in_ray(os.getpid(), os.getuid()) == number


@pytest.mark.parametrize(("told", "ranks"), [
    ({11: (1, 3), 12: (0, 3)}, [(12, 0, 3), (11, 1, 3)]),
    ({11: (1, 3)}, None),
    ({11: (1, 3), 12: (1, 3)}, None),
    ({11: (1, 2), 12: (0, 3)}, None),
    ({11: (3, 3), 12: (0, 3)}, None),
])  # fmt: skip
def test_the_workers_of_a_job_of_ray_train_have_numbers_all_or_none(monkeypatch, told, ranks):
    monkeypatch.setattr(descendants, "_number_in_ray", lambda pid, uid: told.get(pid))
    jobs = {11: "01000000", 12: "01000000", 13: "02000000"}
    workers = [
        JobRank(
            process(pid, command="ray::RayTrainWorker.execute"),
            RankIdentity(job=job, owner="uid 7"),
        )
        for pid, job in jobs.items()
    ]
    found = descendants.with_ray_ranks(workers, time.monotonic() + 20)
    expected = ranks or [(11, None, None), (12, None, None)]
    assert numbers(found) == [*expected, (13, None, None)]
    assert found[-1].identity.job == "02000000"

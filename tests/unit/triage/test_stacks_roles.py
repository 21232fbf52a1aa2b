"""Which rank waits for which, what moves, and what is known of each group beside its stack."""

from typing import Any

import pytest

from nodeready.runs.stacks import group as grouping
from nodeready.runs.stacks.document import Stacks, fold_ranks
from tests.builders.traces import C10D, LOAD, REDUCE, TRAIN, process, trace
from tests.cases import read_table

RECV = f"{TRAIN} > recv {C10D} 3697"
BACKWARD = f"{TRAIN} > _engine_run_backward torch/autograd/graph.py 865"
START = (
    f"<module> train.py 3 > init_process_group {C10D} 900 > f torch/distributed/rendezvous.py 9"
)
SLEEP = "<module> train.py 90 > train train.py 69 > load data.py 7"
OWN = "<module> train.py 90 > train train.py 71"
SYNC = f"{TRAIN} > synchronize torch/cuda/streams.py 227"
BATON = f"{TRAIN} > wait torch/utils/file_baton.py 50"
JOIN = "<module> train.py 9 > join threading.py 1112 > _wait_for_tstate_lock threading.py 1132"
BOOT = "_bootstrap threading.py 1002 > run threading.py 982"
NAP = {"wait_channel": "hrtimer_nanosleep"}


def look(*rows: dict[str, Any]) -> Stacks:
    """All on the same node."""
    return grouping.group([trace("a", *rows)], {})


def ranks(stack: str, *numbers: int, **more: Any) -> list[dict[str, Any]]:
    return [process(number, stack, stack, **more) for number in numbers]


def sleeps(*numbers: int) -> list[dict[str, Any]]:
    return ranks(SLEEP, *numbers, **NAP)


def brief(made: Stacks) -> dict[str, str | None]:
    return {fold_ranks(group.ranks): group.role for group in made.groups}


S, V = "suspect", "victim"


@pytest.mark.parametrize(("rows", "roles"), [
    ([*ranks(REDUCE, 0), *sleeps(1)], {"1": S, "0": V}),
    # The most of them are in I/O, and one waits for them.
    ([*sleeps(*range(7)), *ranks(REDUCE, 7)], {"0-6": S, "7": V}),
    ([*ranks(RECV, 1, 2, 3), *sleeps(0)], {"0": S, "1-3": V}),
    # A rank that spins in a collective waits; one that spins elsewhere does not.
    ([*ranks(REDUCE, 0, cpu=2.0), *ranks(SLEEP, 1, cpu=2.0)], {"1": S, "0": V}),
    ([*ranks(LOAD, 0), *ranks(REDUCE, 1)], {"0": S, "1": V}),
    ([*sleeps(0), *ranks(BACKWARD, 1)], {"0": S, "1": V}),
    ([*ranks(BACKWARD, 0, cpu=2.0), *ranks(REDUCE, 1)], {"0": S, "1": V}),
    ([*sleeps(0), *ranks(SYNC, 1, cpu=2.0)], {"0": S, "1": V}),
    ([*sleeps(0), *ranks(START, 1)], {"0": S, "1": V}),
    # Different collectives, or the same: nobody is accused.
    ([*ranks(RECV, 0), *ranks(REDUCE, 1, 2)], {"0": V, "1-2": V}),
    (ranks(REDUCE, 0, 1), {"0-1": V}),
    # Nobody waits for anybody.
    ([*ranks(SLEEP, 0, cpu=1.0), *ranks(OWN, 1, 2, 3, cpu=1.0)], {"0": None, "1-3": None}),
    (ranks(SLEEP, 0), {"0": None}),
    (ranks(REDUCE, 0), {"0": None}),
    # A call of C below the user's own code may wait for ranks, or not.
    ([*sleeps(0), *ranks(OWN, 1, 2, 3)], {"0": S, "1-3": None}),
    ([*ranks(OWN, 0), *ranks(REDUCE, 1)], {"0": None, "1": V}),
    ([*ranks(OWN, 0), *ranks(REDUCE, 1), *sleeps(2)], {"2": S, "0": None, "1": V}),
    # Without a stack.
    ([process(0, None, state="T"), *ranks(REDUCE, 1)], {"0": S, "1": V}),
    ([process(0, None, state="T"), process(1, SLEEP, OWN)], {"0": None, "1": None}),
    ([process(0, None), *sleeps(1), *ranks(REDUCE, 2)], {"1": S, "0": None, "2": V}),
    # The holder of the lock is more suspicious than those that wait for it.
    ([*ranks(BATON, 0), *sleeps(1, 2), *ranks(REDUCE, 3)], {"1-2": S, "0": S, "3": V}),
    # A rank that moves keeps those waiting that do not.
    ([process(0, SLEEP, OWN), *ranks(REDUCE, 1)], {"0": S, "1": V}),
    ([process(0, REDUCE, RECV), *ranks(REDUCE, 1)], {"0": None, "1": V}),
])  # fmt: skip
def test_a_suspect_is_a_rank_that_does_not_wait_for_others(rows, roles):
    made = look(*rows)
    assert list(brief(made).items()) == list(roles.items())
    assert all(bool(group.reason) for group in made.groups if group.role)


@pytest.mark.parametrize(
    ("switches", "main_cpu", "more", "verdict"),
    read_table(__file__, "no_main_thread_that_moves_is_called_blocked"),
)
def test_no_main_thread_that_moves_is_called_blocked(switches, main_cpu, more, verdict):
    (group,) = look(*ranks(REDUCE, 0, switches=switches, main_cpu_s=main_cpu, **more)).groups
    assert group.verdict == verdict


def test_a_doubt_says_what_it_rests_on_and_spreads_over_its_place():
    rows = [
        row
        for rank, woke in enumerate((0, 2, 3, 0))
        for row in ranks(REDUCE, rank, switches=[0, woke], main_cpu_s=[0.0, 0.0])
    ]
    (group,) = look(*rows).groups
    assert (group.verdict, group.ranks) == ("unsure", (0, 1, 2, 3))
    assert "woke up 0 to 3 times between the samples" in group.reason or "2 to 3" in group.reason


def test_a_loop_that_polls_stays_where_it_is_though_its_last_calls_differ():
    polls = f"{TRAIN} > acquire filelock/_api.py 1037"
    deeper = f"{polls} > _acquire filelock/_unix.py 60"
    row = process(0, polls, deeper, switches=[0, 40], main_cpu_s=[0.0, 0.01], **NAP)
    (group,) = look(row).groups
    assert (group.verdict, group.activity) == ("unsure", "file-lock")


LOOP = "<module> ray/w.py 1 > main_loop ray/_private/worker.py 1071"
REDUCES, WORKS = (f"{BOOT} > work mine.py 3{end}" for end in (f" > all_reduce {C10D} 9", ""))
IMPORT, LOG = "<frozen importlib._bootstrap>", "logging/__init__.py"
LOCKED_MODULE = f"{OWN} > _ModuleLock.acquire {IMPORT} 120"
IMPORTS = f"{BOOT} > _find_and_load_unlocked {IMPORT} 1149 > load mine.py 3"
LOCKED_LOG = f"{OWN} > Handler.handle {LOG} 968 > acquire {LOG} 922"
LOGS = f"{BOOT} > Handler.handle {LOG} 970 > emit mine.py 3"
CONDITION = "Condition.wait threading.py 320"
OUTER = f"{BOOT} > outer mine.py 5 > join threading.py 1112"
FUTURE = f"{OWN} > Future.result concurrent/futures/_base.py 451 > {CONDITION}"
IDLE_POOL = f"{BOOT} > _worker concurrent/futures/thread.py 81"
POOL = f"{IDLE_POOL} > _WorkItem.run concurrent/futures/thread.py 58 > fetch mine.py 9"
TQDM = f"{BOOT} > run tqdm/_monitor.py 60 > wait threading.py 3"
GRPC = f"{BOOT} > _serve grpc/_server.py 880"
HOOK = "apply torch/autograd/function.py 307 > backward mine.py 8"


@pytest.mark.parametrize(("main", "threads", "gil", "activity", "own"), [
    (JOIN, {"worker": REDUCES}, "", "collective", "work"),
    (JOIN, {"worker": WORKS}, "", "", "work"),
    ("_shutdown threading.py 1590", {"worker": WORKS}, "", "exit", "work"),
    (BACKWARD, {"worker": HOOK}, "", "hook", "backward"),
    (LOOP, {"worker": REDUCES}, "", "collective", "work"),
    (OWN, {"worker": WORKS}, "worker", "gil", "work"),
    # Of several threads the one that waits for ranks is followed, and no server.
    (JOIN, {"worker": WORKS, "reduce": REDUCES, "tqdm": TQDM}, "", "collective", "work"),
    (JOIN, {"worker": WORKS, "tqdm": TQDM}, "", "", "work"),
    # From Python 3.11 on a method has its class: what waits is followed all the same.
    (f"{OWN} > Event.wait threading.py 622 > {CONDITION}", {"worker": WORKS}, "", "", "work"),
    (f"{OWN} > Queue.get queue.py 171 > {CONDITION}", {"worker": WORKS}, "", "", "work"),
    (FUTURE, {"pool": POOL, "heartbeat": WORKS, "idle": IDLE_POOL}, "", "", "fetch"),
    (f"{OWN} > wait grpc/_common.py 150 > {CONDITION}", {"": GRPC, "pool": POOL}, "", "", "fetch"),
    # What holds a lock of Python's library is on its stack.
    (LOCKED_MODULE, {"bystander": WORKS, "warmup": IMPORTS}, "", "", "load"),
    (LOCKED_LOG, {"bystander": WORKS, "metrics": LOGS}, "", "", "emit"),
    # A thread that waits for another one is not the one that is waited for.
    (JOIN, {"worker": WORKS, "outer": OUTER}, "", "", "work"),
])  # fmt: skip
def test_a_main_thread_that_waits_for_a_thread_of_its_own_is_shown_with_it(
    main, threads, gil, activity, own
):
    (row,) = ranks(main, 0, threads_at=threads, switches=[0, 380], main_cpu_s=[0.0, 0.007])
    for sample in row["samples"]:
        sample["gil"] = gil
    (group,) = look(row).groups
    assert (group.activity, group.user_frame.function, group.verdict) == (activity, own, "blocked")
    assert gil or group.reason.startswith("it stands in thread ")


@pytest.mark.parametrize(("end", "activity"), [("store", "store"), ("10.0.0.9:1 10.0.0.1:2", "")])
def test_a_thread_at_the_store_waits_for_the_ranks_that_shall_set_its_key(end, activity):
    (row,) = ranks(JOIN, 0, threads_at={"worker": WORKS}, waits_for=[["worker", end]])
    assert [group.activity for group in look(row).groups] == [activity]


LOOP_RUNS = f"{OWN} > _run_once asyncio/base_events.py 1884 > select selectors.py 468"


@pytest.mark.parametrize(("thread", "activity"), [(WORKS, "rank"), (POOL, "")])
def test_asyncios_loop_waits_for_its_connection_or_its_pool_alone(thread, activity):
    waits = {"threads_at": {"t": thread}, "waits_for": [["MainThread", "pid 1000"]]}
    row = process(1, LOOP_RUNS, LOOP_RUNS, pid=1001, **waits)
    made = look(process(0, SLEEP, SLEEP, pid=1000, **NAP), row)
    assert [group.activity for group in made.groups if group.ranks == (1,)] == [activity]


@pytest.mark.parametrize(("threads", "reason"), [
    ({"t": WORKS, "tqdm": TQDM}, "thread t, in work mine.py:3, may have the lock"),
    ({"t": WORKS, "u": OUTER}, ""),
    ({}, ""),
])  # fmt: skip
def test_the_only_thread_beside_the_main_one_may_have_its_lock(threads, reason):
    lock = "futex of a lock of its own process"
    (group,) = look(*ranks(OWN, 0, threads_at=threads, waits_on=lock)).groups
    assert (group.activity, group.reason) == ("lock", reason)


WORKER = "_worker_loop torch/utils/data/_utils/worker.py 348"
BUSY = f"{WORKER} > fetch torch/utils/data/_utils/fetch.py 54 > __getitem__ mine.py 3"
IDLE = f"{WORKER} > get multiprocessing/queues.py 113"


def below(stack: int | None, **more: Any) -> dict[str, Any]:
    return {
        "pid": 7, "parent": 1, "kind": "loader worker", "command": "python train.py",
        "state": "S", "wait_channel": "hrtimer_nanosleep", "cpu_s": [0.1], "waits_on": "sleep",
        "main": stack, "error": "", **more,
    }  # fmt: skip


def test_equal_processes_below_the_ranks_are_there_once_and_idle_ones_last():
    # The builder numbers the stacks in the order in which it meets them: BUSY is 0, IDLE is 1.
    rows = [process(9, BUSY, IDLE, job="other")]
    for rank in (0, 1):
        spawn = f"spawn_main(tracker_fd=7, pipe_handle={rank})"
        waits_on = f"read of a pipe that pid {rank} writes"
        workers = [
            below(0, pid=10 + rank, command=spawn),
            below(1, pid=20 + rank, command=spawn, waits_on=waits_on),
            below(None, kind="process", command="sleep 9", error="not Python"),
        ]
        rows.append(process(rank, LOAD, LOAD, below=workers))
    (group,) = [group for group in look(*rows).groups if group.ranks == (0, 1)]
    kinds = sorted(
        (row.kind, row.processes, row.ranks, row.no_stack_reason) for row in group.children
    )
    worker = ("loader worker", 2, (0, 1), "")
    assert kinds == [worker, worker, ("process", 2, (0, 1), "not Python")]
    assert "asks for the next batch" not in group.children[0].hint
    assert group.children[-1].hint.startswith("is a data loader's worker that waits for its rank")
    assert group.children[-1].command == "spawn_main(tracker_fd=N, pipe_handle=N)"


def test_a_frame_of_the_interpreters_own_makes_no_difference():
    extra = REDUCE.replace("> step", "> __init__ __init__ 0 > step")
    assert brief(look(*ranks(REDUCE, 0), *ranks(extra, 1))) == {"0-1": V}


def test_states_and_what_is_waited_for_have_their_counts():
    waits = ranks(REDUCE, 0, 1, 2, waits_on="recv from 10.0.0.9:4711")
    (group,) = look(*waits, *ranks(REDUCE, 3, wait_channel="0", state="R")).groups
    assert group.states == ("S futex_wait_queue (3)", "R (1)")
    assert group.waits_on == ("recv from 10.0.0.9:4711 (3)",)


def test_a_variable_is_shown_once_with_the_ranks_of_each_value():
    rows = [
        row
        for rank in range(12)
        for row in ranks(REDUCE, rank, locals=[f"step: i = {4 + (rank == 3)}", f"f: n = {rank}"])
    ]
    (group,) = look(*rows).groups
    values = ", ".join(f"{number} (rank {number})" for number in range(8))
    assert group.locals == (
        "step: i = 4 (ranks 0-2,4-11), 5 (rank 3)", f"f: n = {values}, other values (ranks 8-11)"
    )  # fmt: skip


def test_what_one_rank_has_shown_is_its_own():
    native = "step train.py 4 > c10d::Work::wait libtorch_cpu.so 0"
    rows = [
        *ranks(REDUCE, 0, locals=["step: number = 7", "step: rank = 0"], native_at=native),
        *ranks(REDUCE, 1, 2, locals=["step: number = 7"]),
    ]
    (group,) = look(*rows).groups
    assert group.locals == ("step: number = 7", "step: rank = 0 (rank 0)")
    assert group.native
    assert "native frames are of rank 0 alone" in group.reason
    # Two of which native frames tell different things are no group; the third is of neither.
    other = ranks(OWN, 0, native_at=f"{OWN} > cudaStreamSynchronize libcudart.so 0")
    one = ranks(OWN, 1, native_at=f"{OWN} > c10d::Work::wait libtorch_cpu.so 0")
    assert {*brief(look(*other, *one, *ranks(OWN, 2)))} == {"0", "1", "2"}


MOVED = f"<module> train.py 93 > train train.py 73 > step train.py 43 > all_reduce {C10D} 2806"
CALL = REDUCE.replace("step train.py 40", "step train.py 44")


@pytest.mark.parametrize(("stacks", "size", "words"), [
    ((REDUCE, MOVED), 1, "different code on different nodes"),
    ((REDUCE, REDUCE, MOVED), 2, "different code on different nodes"),
    ((REDUCE, CALL), 2, "another call there, or another version"),
    # One rank of a node is always where all of that node are.
    ((REDUCE, CALL), 1, ""),
    ((REDUCE, REDUCE), 2, ""),
])  # fmt: skip
def test_different_code_on_different_nodes_is_in_the_advice(stacks, size, words):
    numbers = [range(size * node, size * node + size) for node in range(len(stacks))]
    traces = [
        trace(f"n{at[0]}", *ranks(one, *at)) for one, at in zip(stacks, numbers, strict=True)
    ]
    advice = [line for line in grouping.group(traces, {}).advice if "sha256sum" in line]
    assert bool(advice) == bool(words)
    assert all(words in line and "train.py:4" in line for line in advice)

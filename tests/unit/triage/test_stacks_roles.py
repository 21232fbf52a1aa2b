"""Who waits for whom, what moves, and what is known of each group beside its stack."""

from __future__ import annotations

from typing import Any

import pytest

from nodeready.triage.stacks import group as grouping
from nodeready.triage.stacks.document import Group, Stacks, fold_ranks
from tests.builders.traces import C10D, LOAD, REDUCE, TRAIN, process, trace

RECV = f"{TRAIN} > recv {C10D} 3697"
BACKWARD = f"{TRAIN} > _engine_run_backward torch/autograd/graph.py 865"
START = (
    f"<module> train.py 3 > init_process_group {C10D} 900 > f torch/distributed/rendezvous.py 9"
)
SLEEP = "<module> train.py 90 > train train.py 69 > load data.py 7"
OWN = "<module> train.py 90 > train train.py 71"
SYNC = f"{TRAIN} > synchronize torch/cuda/streams.py 227"
JOIN = "<module> train.py 9 > join threading.py 1112 > _wait_for_tstate_lock threading.py 1132"
BOOT = "_bootstrap threading.py 1002 > run threading.py 982"
SLEEPS = {"wait_channel": "hrtimer_nanosleep"}


def look(*rows: dict[str, Any], **more: Any) -> Stacks:
    """All on one node."""
    return grouping.group([trace("a", *rows, **more)], {})


def ranks(stack: str, *numbers: int, **more: Any) -> list[dict[str, Any]]:
    return [process(number, stack, stack, **more) for number in numbers]


def brief(made: Stacks) -> list[tuple[str, str | None]]:
    return [(fold_ranks(one.ranks), one.role) for one in made.groups]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # Two ranks: the one that does not wait, whatever its number.
        ([*ranks(REDUCE, 0), *ranks(SLEEP, 1, **SLEEPS)], [("1", "suspect"), ("0", "victim")]),
        ([*ranks(SLEEP, 0, **SLEEPS), *ranks(REDUCE, 1)], [("0", "suspect"), ("1", "victim")]),
        # The most of them are in I/O, and one waits for them.
        ([*ranks(SLEEP, *range(7)), *ranks(REDUCE, 7)], [("0-6", "suspect"), ("7", "victim")]),
        # Below a pipeline, at each stage.
        ([*ranks(RECV, 1, 2, 3), *ranks(SLEEP, 0, **SLEEPS)],
         [("0", "suspect"), ("1-3", "victim")]),
        # Who spins in a collective waits; who spins elsewhere does not.
        ([*ranks(REDUCE, 0, cpu=2.0), *ranks(SLEEP, 1, cpu=2.0)],
         [("1", "suspect"), ("0", "victim")]),
        ([*ranks(LOAD, 0), *ranks(REDUCE, 1)], [("0", "suspect"), ("1", "victim")]),
        ([*ranks(SLEEP, 0, **SLEEPS), *ranks(BACKWARD, 1)], [("0", "suspect"), ("1", "victim")]),
        ([*ranks(BACKWARD, 0, cpu=2.0), *ranks(REDUCE, 1)], [("0", "suspect"), ("1", "victim")]),
        ([*ranks(SLEEP, 0, **SLEEPS), *ranks(SYNC, 1, cpu=2.0)],
         [("0", "suspect"), ("1", "victim")]),
        ([*ranks(SLEEP, 0, **SLEEPS), *ranks(START, 1)], [("0", "suspect"), ("1", "victim")]),
        # Different collectives, or the same: nobody is accused.
        ([*ranks(RECV, 0), *ranks(REDUCE, 1, 2)], [("0", "victim"), ("1-2", "victim")]),
        (ranks(REDUCE, 0, 1), [("0-1", "victim")]),
        # Nobody waits for anybody.
        ([*ranks(SLEEP, 0, cpu=1.0), *ranks(OWN, 1, 2, 3, cpu=1.0)], [("0", None), ("1-3", None)]),
        (ranks(SLEEP, 0), [("0", None)]),
        (ranks(REDUCE, 0), [("0", None)]),
        # A call of C below the user's own code may wait for ranks, or not.
        ([*ranks(SLEEP, 0, **SLEEPS), *ranks(OWN, 1, 2, 3)], [("0", "suspect"), ("1-3", None)]),
        ([*ranks(OWN, 0), *ranks(REDUCE, 1)], [("0", "suspect"), ("1", "victim")]),
        ([*ranks(OWN, 0), *ranks(REDUCE, 1), *ranks(SLEEP, 2, **SLEEPS)],
         [("2", "suspect"), ("0", None), ("1", "victim")]),
        # Without a stack.
        ([process(0, None, state="T"), *ranks(REDUCE, 1)], [("0", "suspect"), ("1", "victim")]),
        ([process(0, None, state="T"), process(1, SLEEP, OWN)], [("0", None), ("1", None)]),
        ([process(0, None), *ranks(SLEEP, 1, **SLEEPS), *ranks(REDUCE, 2)],
         [("1", "suspect"), ("0", None), ("2", "victim")]),
        # Who holds the lock is more suspicious than who waits for it.
        ([*ranks(f"{TRAIN} > wait torch/utils/file_baton.py 50", 0), *ranks(SLEEP, 1, 2, **SLEEPS),
          *ranks(REDUCE, 3)], [("1-2", "suspect"), ("0", "suspect"), ("3", "victim")]),
        # Who moves keeps those waiting that do not.
        ([process(0, SLEEP, OWN), *ranks(REDUCE, 1)], [("0", "suspect"), ("1", "victim")]),
        ([process(0, REDUCE, RECV), *ranks(REDUCE, 1)], [("0", None), ("1", "victim")]),
    ],
)  # fmt: skip
def test_a_suspect_is_who_does_not_wait_for_other_ranks(rows, expected):
    made = look(*rows)
    assert brief(made) == expected
    assert all(bool(one.reason) for one in made.groups if one.role)


def test_when_all_wait_for_each_other_the_advice_says_that_nobody_is_accused():
    text = "\n".join(look(*ranks(RECV, 0), *ranks(REDUCE, 1, 2)).advice)
    assert "rank 0 in recv, called at train.py:40, ranks 1-2 in all_reduce" in text
    assert "accuse nobody" in text
    assert "suspect" not in text


@pytest.mark.parametrize(
    ("switches", "main_cpu", "more", "verdict"),
    [
        ([9, 9], [1.0, 1.0], {}, "blocked"),
        # The watchdog and the heartbeats of a process that hangs use CPU time.
        ([9, 9], [1.0, 1.0], {"cpu": 0.9}, "blocked"),
        ([0, 163], [1.0, 1.02], {}, "progressing"),
        ([0, 880], [1.0, 1.05], {}, "progressing"),
        ([0, 12], [1.0, 1.9], {}, "progressing"),
        ([0, 3], [1.0, 2.9], {}, "spinning"),
        ([0, 0], [1.0, 2.9], {}, "spinning"),
        ([0, 1], [1.0, 1.0], {}, "unsure"),
        ([0, 19], [1.0, 1.002], {}, "unsure"),
        # A loop that sleeps and looks again, as filelock's and NCCL's blocking wait.
        ([0, 40], [1.0, 1.01], SLEEPS, "unsure"),
        ([0, 1900], [1.0, 1.09], SLEEPS, "unsure"),
        # 1,500 steps a second, and queue.get(timeout=0.001) in a loop: they use the same time.
        ([0, 3068], [1.0, 1.09], {"calls": [0, 15000]}, "progressing"),
        ([0, 1830], [1.0, 1.08], {"calls": [70, 70]}, "unsure"),
        ([0, 200], [1.0, 1.02], {"calls": [70, 80]}, "unsure"),
        # A loop that sleeps, and reads a file each time.
        ([0, 40], [1.0, 1.01], {"calls": [70, 160], **SLEEPS}, "unsure"),
        # Waiting for Python's lock: it looks every 5 ms, and does nothing.
        ([0, 373], [1.0, 1.0077], {}, "unsure"),
        ([0, 2], [1.0, 1.0], {"state": "D"}, None),
        # Traces of earlier versions.
        ([], [], {}, "blocked"),
        ([], [], {"cpu": 0.9}, "spinning"),
        ([7], [1.0], {}, "blocked"),
        ([0, 163], [], {}, "progressing"),
    ],
)
def test_no_main_thread_that_moves_is_called_blocked(switches, main_cpu, more, verdict):
    if switches == [0, 163] and not main_cpu:
        more = {"cpu": 0.02}
    row = process(0, REDUCE, REDUCE, switches=switches, main_cpu_s=main_cpu, **more)
    (one,) = look(row).groups
    assert one.verdict == verdict


def test_a_doubt_says_what_it_rests_on_and_spreads_over_its_place():
    rows = [
        process(at, REDUCE, REDUCE, switches=[0, woke], main_cpu_s=[0.0, 0.0])
        for at, woke in enumerate((0, 2, 3, 0))
    ]
    (one,) = look(*rows).groups
    assert (one.verdict, one.ranks) == ("unsure", (0, 1, 2, 3))
    assert "woke up 0 to 3 times between the samples" in one.reason or "2 to 3" in one.reason


def test_a_loop_that_polls_stays_where_it_is_though_its_last_calls_differ():
    polls = f"{TRAIN} > acquire filelock/_api.py 1037"
    deeper = f"{polls} > _acquire filelock/_unix.py 60"
    row = process(0, polls, deeper, switches=[0, 40], main_cpu_s=[0.0, 0.01], **SLEEPS)
    (one,) = look(row).groups
    assert (one.verdict, one.about) == ("unsure", "file-lock")


@pytest.mark.parametrize(
    ("main", "thread", "gil", "about", "own"),
    [
        (JOIN, f"{BOOT} > work mine.py 3 > all_reduce {C10D} 9", "", "collective", "work"),
        (JOIN, f"{BOOT} > work mine.py 3", "", "", "work"),
        ("_shutdown threading.py 1590", f"{BOOT} > flush mine.py 3", "", "exit", "flush"),
        (BACKWARD, "apply torch/autograd/function.py 307 > backward mine.py 8", "", "hook",
         "backward"),
        ("<module> ray/w.py 1 > main_loop ray/_private/worker.py 1071",
         f"{BOOT} > loop mine.py 3 > all_reduce {C10D} 9", "", "collective", "loop"),
        (OWN, f"{BOOT} > hold mine.py 8", "worker", "gil", "hold"),
    ],
)  # fmt: skip
def test_a_main_thread_that_waits_for_one_of_its_own_is_shown_with_that_one(
    main, thread, gil, about, own
):
    row = process(0, main, main, threads_at={"worker": thread},
                  switches=[0, 380], main_cpu_s=[0.0, 0.007])  # fmt: skip
    for sample in row["samples"]:
        sample["gil"] = gil
    (one,) = look(row).groups
    assert (one.about, one.user_frame.function, one.verdict) == (about, own, "blocked")


def test_of_two_threads_the_one_that_waits_for_ranks_is_followed_and_servers_are_not():
    threads = {
        "a": f"{BOOT} > work mine.py 3 > all_reduce {C10D} 9",
        "b": f"{BOOT} > other mine.py 30",
        "tqdm": f"{BOOT} > run tqdm/_monitor.py 60 > wait threading.py 3",
    }
    (one,) = look(process(0, JOIN, JOIN, threads_at=threads)).groups
    assert one.about == "collective"
    del threads["a"]
    (one,) = look(process(0, JOIN, JOIN, threads_at=threads)).groups
    assert one.user_frame.function == "other"


def below(stack: str | None, **more: Any) -> dict[str, Any]:
    return {
        "pid": 7, "parent": 1, "kind": "loader worker", "command": "python train.py",
        "state": "S", "wait_channel": "hrtimer_nanosleep", "cpu_s": [0.1], "waits_on": "sleep",
        "main": stack, "error": "", **more,
    }  # fmt: skip


def test_processes_below_the_ranks_are_once_what_is_equal_and_idle_ones_last():
    worker = "_worker_loop torch/utils/data/_utils/worker.py 348"
    busy = f"{worker} > fetch torch/utils/data/_utils/fetch.py 54 > __getitem__ mine.py 3"
    idle = f"{worker} > get multiprocessing/queues.py 113"
    table = {busy: 0, idle: 1}
    rows = []
    for rank in (0, 1):
        found = [
            below(busy, pid=10 + rank, command=f"spawn_main(tracker_fd=7, pipe_handle={rank})"),
            below(idle, pid=20 + rank, waits_on=f"read of a pipe that pid {rank} writes",
                  command=f"spawn_main(tracker_fd=7, pipe_handle={rank})"),
            below(None, kind="process", command="sleep 9", error="not Python"),
        ]  # fmt: skip
        for one in found:
            one["main"] = table.get(one["main"])
        rows.append(process(rank, LOAD, LOAD, below=found))
    # The builder numbers the stacks in the order in which it meets them.
    rows = [process(9, busy, idle, job="other"), *rows]
    one = next(one for one in look(*rows).groups if one.ranks == (0, 1))
    kinds = [(row.kind, row.processes, row.ranks, row.why) for row in one.below]
    assert sorted(kinds) == [
        ("loader worker", 2, (0, 1), ""),
        ("loader worker", 2, (0, 1), ""),
        ("process", 2, (0, 1), "not Python"),
    ]
    assert "asks for the next batch" not in one.below[0].hint
    assert one.below[-1].hint.startswith("is a data loader's worker that waits for its rank")
    assert one.below[-1].command == "spawn_main(tracker_fd=N, pipe_handle=N)"


def test_a_frame_of_the_interpreters_own_makes_no_difference():
    extra = REDUCE.replace("> step", "> __init__ __init__ 0 > step")
    made = look(*ranks(REDUCE, 0), *ranks(extra, 1))
    assert brief(made) == [("0-1", "victim")]


def test_states_and_what_is_waited_for_have_their_counts():
    rows = ranks(REDUCE, 0, 1, 2, waits_on="recv from 10.0.0.9:4711")
    rows.append(process(3, REDUCE, REDUCE, wait_channel="0", state="R"))
    (one,) = look(*rows).groups
    assert one.states == ("S futex_wait_queue (3)", "R (1)")
    assert one.waits_on == ("recv from 10.0.0.9:4711 (3)",)


def told(lines: dict[str, str], size: int) -> list[str]:
    """The advice on code, of a job with so many ranks per node; node -> its stack."""
    made = grouping.group(
        [
            trace(node, *(process(size * at + n, stack, stack) for n in range(size)))
            for at, (node, stack) in enumerate(lines.items())
        ],
        {},
    )
    return [line for line in made.advice if "sha256sum" in line]


MOVED = f"<module> train.py 93 > train train.py 73 > step train.py 43 > all_reduce {C10D} 2806"
CALL = REDUCE.replace("step train.py 40", "step train.py 44")


@pytest.mark.parametrize(
    ("lines", "size", "word"),
    [
        ({"a": REDUCE, "b": MOVED}, 1, "different code on different nodes"),
        ({"a": REDUCE, "b": REDUCE, "c": MOVED}, 2, "different code on different nodes"),
        ({"a": REDUCE, "b": CALL}, 2, "another call there, or another version"),
        # One rank of a node is always where all of that node are.
        ({"a": REDUCE, "b": CALL}, 1, ""),
        ({"a": REDUCE, "b": REDUCE}, 2, ""),
    ],
)
def test_different_code_on_different_nodes_is_said(lines, size, word):
    said = told(lines, size)
    assert bool(said) == bool(word)
    assert all(word in line and "train.py:4" in line for line in said)


def test_a_role_costs_nothing_of_what_is_not_there():
    empty = Group("stack", None, (), (), processes=2)
    assert grouping.advise.with_roles([empty], 2)[0].role is None

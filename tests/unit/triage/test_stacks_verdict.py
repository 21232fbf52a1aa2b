"""The verdict, case by case: what is seen of eight ranks on two nodes, and who is accused of what."""

# A case is a row.
# ruff: noqa: E501

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from nodeready.agent.stacks.lock_files import LEFT
from nodeready.agent.stacks.py_spy import ENDED_INTERPRETER
from nodeready.agent.witnesses.flight_recorder import parse
from nodeready.agent.witnesses.logs import WatchdogReport
from nodeready.agent.witnesses.nccl_log import NcclError, NcclRank
from nodeready.core.outcome import UNREACHABLE, Gap
from nodeready.core.wire import plain
from nodeready.reports import json_report
from nodeready.runs.stacks import group as grouping
from nodeready.runs.stacks.document import VERDICT_KINDS, Stacks
from tests.builders.traces import C10D, LOAD, REDUCE, TRAIN, process, trace
from tests.builders.witnesses import (
    done,
    entry,
    gpu,
    gpus,
    kernel,
    log,
    network,
    no_recording,
    port,
    port_facts,
    process_group,
    ras,
    recording,
    status,
    timeout,
    variables,
    waits,
)
from tests.paths import ROOT, schema

VALID = jsonschema.Draft202012Validator(schema("stacks"))

GATHER = f"{TRAIN} > all_gather {C10D} 3300"
RECV = f"{TRAIN} > recv {C10D} 2300"
SLEEP = f"{TRAIN} > preprocess data.py 12"
ELSEWHERE = f"{TRAIN} > evaluate eval.py 30"
SAVE = f"{TRAIN} > save torch/serialization.py 900"
RPC = f"{TRAIN} > rpc_sync torch/distributed/rpc/api.py 809"
FUTURE = f"{TRAIN} > result concurrent/futures/_base.py 451 > wait threading.py 320"
START = "<module> train.py 90 > init_process_group torch/distributed/distributed_c10d.py 1700"
OTHER_PLACE = REDUCE.replace("train.py 40", "train.py 44")
CALLER = REDUCE.replace("> step", "> sync train.py 9 > step")
OTHER_SYNC = f"{TRAIN[:-2]}44 > synchronize torch/cuda/__init__.py 800"
BARRIER = f"{TRAIN} > barrier {C10D} 3152"
COUNTS = "its log counts: step 4, then step 5"
COMPILE = f"{TRAIN} > compile_fx torch/_inductor/compile_fx.py 9"
SYNC = f"{TRAIN} > synchronize torch/cuda/__init__.py 800"

Witnesses = Mapping[str, Any]


def job(
    stacks: Mapping[int, Any] | None = None,
    by_rank: Mapping[int, Witnesses] | None = None,
    by_node: Mapping[str, Witnesses] | None = None,
    *,
    usual: Any = (REDUCE, REDUCE),
    every: Witnesses | None = None,
    ranks: int = 8,
    world: int | None = None,
) -> list[Any]:
    """Ranks that all wait in one collective, four on a node.

    stacks:  rank -> its stacks, or a whole process; None: there is none
    by_rank: rank -> its witnesses, beside those that every rank has
    by_node: node -> its witnesses
    """
    traces = []
    for first in range(0, ranks, 4):
        name, rows = f"gpu{first // 4 + 1}", []
        for rank in range(first, min(first + 4, ranks)):
            own = (stacks or {}).get(rank, usual)
            if own is not None:
                more = OWN_CODE if own == BLOCKED else {}
                row = own if isinstance(own, dict) else process(rank, *own, **more)
                witnesses = {**(every or {}), **(by_rank or {}).get(rank, {})}
                size = world or ranks
                size = row["world_size"] or size
                rows.append({**row, "world_size": size, "local_rank": rank % 4,
                             "witnesses": witnesses})  # fmt: skip
        node = dict((by_node or {}).get(name, {}))
        if rows or node:
            traces.append(trace(name, *rows, witnesses=node))
    return traces


def judged(traces: Any, gaps: Mapping[str, Gap] | None = None) -> Stacks:
    made = grouping.group(traces, gaps or {})
    VALID.validate(json.loads("".join(json_report.render(made))))
    assert made.verdict.kind in VERDICT_KINDS
    assert "..." not in made.verdict.text
    assert "\n" not in made.verdict.text
    return made


def recorder(late: int, **more: Any) -> dict[int, Witnesses]:
    """All wait in all_reduce #42, and one has not called it."""
    return {rank: waits() if rank != late else done(**more) for rank in range(8)}


def behind(rank: int) -> dict[int, Witnesses]:
    """The watchdog's lines of eight logs."""
    return {
        other: log("[PG ID 0 PG GUID 0(default_pg) Rank 1] watchdog", path=f"/logs/{other}",
                   reports=[status(other, 41 if other == rank else 42, 41)])
        for other in range(8)
    }  # fmt: skip


SPINS = {
    "gpu1": gpus(*(gpu(1000 + r, 97, 0) for r in range(4))),
    "gpu2": gpus(*(gpu(1000 + r, 97, 0) for r in range(4, 8))),
}
QUIET = {name: network(port(0)) for name in ("gpu1", "gpu2")}
MOVING = {name: network(port(800_000_000)) for name in ("gpu1", "gpu2")}
OOM = ("oom", 312, 1003, "Out of memory: Killed process 1003 (python)")
BLOCKED = (SLEEP, SLEEP)
#: A call of C waits at memory of its process, which may be for another rank.
BELOW = [*BLOCKED]
#: It waits for nothing that another rank could have.
OWN_CODE = {"wait_channel": ""}


def worker(**more: Any) -> dict[str, Any]:
    return {
        "pid": 2000, "parent": 1003, "kind": "loader worker", "command": "python train.py",
        "state": "S", "wait_channel": "futex_wait_queue", "cpu_s": [1.0, 1.0], "waits_on": "",
        "main": None, "error": "not permitted", **more,
    }  # fmt: skip


def pair(rank: int, operation: str, **more: Any) -> Witnesses:
    return recording(process_group(None, None), entries=[entry(1, operation, is_p2p=True, **more)])


ASK = f"{TRAIN} > fetch net.py 8 > readinto socket.py 706"
THREAD = "_bootstrap threading.py 1002 > run threading.py 982"
HANDLE = f"{THREAD} > process_request_thread socketserver.py 683 > answer net.py 30"
SERVE = f"{TRAIN} > serve_forever socketserver.py 233 > select selectors.py 415"


def asks(rank: int, *ends: str, stack: str = ASK, thread: str = "MainThread", **more: Any) -> Any:
    """A rank that waits for what is at these other ends."""
    return process(rank, stack, stack, waits_for=[[thread, end] for end in ends], **more)


def polls(rank: int, stack: str, end: str = LEFT) -> Any:
    """A rank that looks again and again for a lock file."""
    more = {
        "wait_channel": "hrtimer_nanosleep",
        "switches": [0, 20],
        "waits_on": f"lock of {LOCK}{end}",
    }
    return process(rank, stack, stack, **more)


def naps(rank: int) -> Any:
    """A rank that looks again and again, for nothing that is known."""
    stack = f"{TRAIN} > wait_stage run.py 24"
    return process(rank, stack, stack, wait_channel="hrtimer_nanosleep", switches=[0, 20])


def opens(rank: int) -> Any:
    """A rank that opens a named pipe."""
    stack = f"{TRAIN} > open_output run.py {40 + rank}"
    return process(
        rank, stack, stack, wait_channel="wait_for_partner", waits_on=f"open of /f{rank}"
    )


def hub(*clients: int) -> Any:
    """Rank 0, a client of its own thread, which has a connection to each rank."""
    ends = [["MainThread", "pid 1000"], *(["hub", f"pid {1000 + rank}"] for rank in (0, *clients))]
    return process(0, ASK, ASK, waits_for=ends)


def of_rank_0() -> dict[int, Any]:
    """All wait for rank 0: on its node by its process, on the other one by both addresses."""
    return {
        rank: asks(rank, "pid 1000" if rank < 4 else f"10.0.0.1:5000 10.0.0.2:4{rank}")
        for rank in range(1, 8)
    }


def first(stack: str, **more: Any) -> Any:
    """Rank 0, which listens."""
    ends = ["10.0.0.1:5000", *(f"10.0.0.1:5000 10.0.0.2:4{rank}" for rank in range(4, 8))]
    return process(0, stack, stack, ends=ends, **more)


def below(state: str, command: str = "python train.py", **more: Any) -> dict[str, Any]:
    return {**worker(), "kind": "process", "command": command, "state": state, **more}


RUN = f"{TRAIN} > wait subprocess.py 1264"
CC, LOCK = "cc1plus used 1.9 s of CPU in 2 s", "/c/ext/fused_adam/lock"
BATON = (
    f"{TRAIN} > _jit_compile torch/utils/cpp_extension.py 1522 > wait torch/utils/file_baton.py 42"
)
FINALIZE = f"Finalize mpi.py 35 > barrier {C10D} 3152"
READS = f"{TRAIN} > load data.py 3 > read_text pathlib.py 1027"
ACCEPT = f"{TRAIN} > accept socket.py 294"
QUEUE = f"{TRAIN} > get queue.py 171 > wait threading.py 320"
ASYNCIO = f"{TRAIN} > run asyncio/runners.py 190 > _run_once asyncio/base_events.py 1905 > select selectors.py 468"
EXIT, UPLOAD = "_shutdown threading.py 1590", f"{THREAD} > upload train.py 3"
ENDED = dict.fromkeys(range(1, 8))
OTHER_REDUCE = f"{THREAD} > average train.py 12 > all_reduce {C10D} 2806"
LOADER_IDLE = (
    "_worker_loop torch/utils/data/_utils/worker.py 275 > get multiprocessing/queues.py 113"
)

#: name, traces, kind, ranks of the first suspect, words of the text, words that it must not have
CASES: list[tuple[str, Any, str, tuple[int, ...], tuple[str, ...], tuple[str, ...]]] = [
    # --- The stacks alone.
    ("one in its own code", job({3: BLOCKED}), "late", (3,), ("rank 3 (gpu1)", "preprocess data.py:12", "7 ranks wait", "may be slow"), ()),
    ("one in a loop", job({3: process(3, SLEEP, SLEEP, cpu=2.0)}), "unclear", (3,), ("slow, or in a loop",), ()),
    ("one that goes on", job({3: (SLEEP, ELSEWHERE)}), "unclear", (3,), ("rank 3", "works, in", "slow, or in a loop: look again"), ()),
    ("one in the data loader", job({3: (LOAD, LOAD)}), "loader", (3,), ("data loader", "may be slow"), ()),
    ("seven in the data loader", job(dict.fromkeys(range(7), (LOAD, LOAD))), "loader", tuple(range(7)), ("ranks 0-6", "1 rank waits"), ("rank 7",)),
    ("all in the data loader", job(usual=(LOAD, LOAD)), "loader", tuple(range(8)), ("all 8 ranks", "may be slow"), ()),
    ("two ranks, one culprit", job({1: BLOCKED}, ranks=2), "late", (1,), ("rank 1",), ()),

    ("one saves a checkpoint", job({0: (SAVE, SAVE)}), "storage", (0,), ("rank 0", "file"), ()),
    ("one in state D", job({5: process(5, SLEEP, SLEEP, state="D", wait_channel="nfs_wait_on_request")}), "storage", (5,), ("rank 5 (gpu2)", "state D", "nfs_wait_on_request"), ()),
    ("one stopped", job({5: process(5, None, state="T")}), "late", (5,), ("stopped by a signal", "kill -CONT"), ("may be slow",)),
    ("one frozen", job({5: process(5, REDUCE, REDUCE, state="F")}), "late", (5,), ("rank 5 (gpu2): frozen by its cgroup", "7 ranks wait for it"), ("may be slow", "mounts")),
    ("all frozen", job({r: process(r, REDUCE, REDUCE, state="F") for r in range(8)}), "late", tuple(range(8)), ("all 8 ranks: frozen by its cgroup",), ()),
    ("one traced", job({5: process(5, None, state="t", tracer=77)}), "late", (5,), ("tracer",), ()),
    ("one a zombie", job({5: process(5, None, state="Z")}), "gone", (5,), ("rank 5 (gpu2) has ended", "zombie"), ()),
    ("one has ended, and rank 0 waits for what is left of it", job({0: asks(0, "pid 1003"), 3: process(3, None, note="ended, and has left pid 1003, which may hold its connections")}), "gone", (3,), ("has left pid 1003", "7 ranks wait"), ()),
    ("one missing", job({5: None}), "gone", (5,), ("rank 5", "no node has it"), ()),
    ("all have ended, and one waits for its thread at its end", job({**ENDED, 0: process(0, EXIT, EXIT, threads_at={"Thread-1": UPLOAD})}), "late", (0,), ("rank 0 (gpu1)", "waits for its thread at upload train.py:3", "ranks 1-7 have ended"), ("no node has",)),
    ("... and one is in a handler of its end", job({**ENDED, 0: process(0, *["flush train.py 7"] * 2)}), "late", (0,), ("at the end of its program, and stands in flush train.py:7",), ()),
    ("... and one waits for its child at its end", job({**ENDED, 0: {**process(0, *["_exit_function multiprocessing/util.py 360 > join multiprocessing/process.py 149"] * 2), "below": [below("S", main=0, error="")]}}), "late", (0,), ("waits for its child process",), ()),
    ("... and one has no Python any more", job({**ENDED, 0: process(0, None, error=ENDED_INTERPRETER)}), "late", (0,), ("C or C++ on its way out",), ()),
    ("... and one waits in a thread for the others", job({**ENDED, 0: process(0, EXIT, EXIT, threads_at={"Thread-1": OTHER_REDUCE})}), "gone", tuple(range(1, 8)), ("no node has them",), ()),
    ("... and one is not at its end", job({**ENDED, 0: BLOCKED}), "gone", tuple(range(1, 8)), ("no node has them",), ()),
    ("... and one at its end was killed for memory", job({**ENDED, 0: process(0, EXIT, EXIT)}, by_node={"gpu1": kernel(OOM)}), "gone", tuple(range(1, 8)), ("killed for memory",), ()),
    ("all wait for a lock file that is left", job({r: polls(r, BATON) for r in range(8)}), "storage", tuple(range(8)), (LOCK, "remove the file"), ("slow", "file system")),
    ("... one does", job({0: polls(0, BATON)}), "storage", (0,), (LOCK, "remove the file", "7 ranks wait"), ("slow",)),
    ("... or for one that is held", job({r: polls(r, BATON, ", held by pid 7 (python3)") for r in range(8)}), "unclear", (), (LOCK, "held by pid"), ("remove",)),
    ("... or in a loop of their own", job({r: polls(r, SLEEP) for r in range(8)}), "unclear", (), (LOCK,), ("remove",)),
    ("one spins at one place", job({3: process(3, SLEEP, SLEEP, cpu_s=[1.0, 3.0])}), "unclear", (3,), ("slow, or in a loop",), ()),
    ("... and its loop changes a variable", job({3: process(3, SLEEP, SLEEP, cpu_s=[1.0, 3.0], work="its loop changes f: i")}), "unclear", (3,), ("its loop changes f: i", "slow, or in a loop"), ()),
    ("... which is no work of a rank that stands", job({3: process(3, SLEEP, SLEEP, work="its loop changes f: i", **OWN_CODE)}), "late", (3,), (), ("changes",)),
    ("one waits for its compiler, which works", job({0: process(0, RUN, RUN, work=CC)}), "moving", (), ("rank 0", CC, "7 ranks wait for it"), ()),
    ("... and its peers for its lock file", job({0: process(0, RUN, RUN, work=CC), 1: asks(1, "pid 1000", stack=BATON)}, ranks=2), "moving", (), (CC,), ()),
    ("... and another one stands", job({0: process(0, RUN, RUN, work=CC), 3: BLOCKED}), "late", (3,), ("preprocess",), ()),
    ("... of one that waits for others", job({0: process(0, REDUCE, REDUCE, work=CC), 3: BLOCKED}), "late", (3,), ("preprocess",), ()),
    ("... and the log of one that waits counts", job({0: process(0, REDUCE, REDUCE, work=COUNTS), 3: BLOCKED}), "moving", (), (COUNTS,), ()),
    ("a log that all write counts", job({3: {**process(3, *BLOCKED, **OWN_CODE), "work": COUNTS}}, usual=(REDUCE, LOAD)), "not-stuck", (), ("8 of 8", COUNTS), ()),
    ("the GPU of the late one computes", job({3: process(3, SLEEP, SLEEP, cpu=2.0)}, by_node={"gpu1": gpus(gpu(1003, 97, 60, 650))}), "moving", (), ("rank 3", "its GPU computes"), ()),
    ("the late one compiles", job({3: process(3, COMPILE, COMPILE, cpu=2.0)}), "moving", (), ("rank 3", "it compiles"), ()),
    ("the late one compiles without CPU time", job({3: (COMPILE, COMPILE)}), "late", (3,), ("compiles at",), ()),
    ("the late one computes in changing calls", job({3: process(3, SLEEP, f"{TRAIN} > score eval.py 9", cpu=2.0)}), "moving", (), ("rank 3", "2 s of CPU in 2 s, and its calls change"), ()),
    ("... and uses no CPU time", job({3: process(3, SLEEP, f"{TRAIN} > score eval.py 9")}), "unclear", (3,), (), ()),
    ("a long call of a library", job({3: process(3, f"{SLEEP} > eigh numpy/linalg/linalg.py 1451", f"{SLEEP} > eigh numpy/linalg/linalg.py 1451", state="R", cpu=4.0)}), "unclear", (3,), ("rank 3 (gpu1) works, in eigh",), ()),
    ("the late one polls files", job({3: process(3, f"{SLEEP} > exists genericpath.py 19", f"{SLEEP} > islink posixpath.py 167", cpu=2.0)}), "unclear", (3,), (), ()),
    ("one has raised, and waits at its end", job({0: (FINALIZE, FINALIZE)}, {0: log("ValueError: too dense", path="/l/0")}), "late", (0,), ("rank 0 (gpu1) raised ValueError: too dense", "barrier at Finalize mpi.py:35"), ()),
    ("... without an error", job({0: (FINALIZE, FINALIZE)}), "disagree", (), ("rank 0 (gpu1) waits in barrier at Finalize mpi.py:35, at the end of the program", "must agree"), ()),
    ("... and all are at their ends", job({0: (FINALIZE, FINALIZE)}, {0: log("ValueError: too dense", path="/l/0")}, usual=(f"flush x.py 7 > all_reduce {C10D} 2806",) * 2), "disagree", (), ("must agree",), ("end of the program",)),
    ("one process wide", job({5: BLOCKED, 6: BLOCKED}), "late", (5, 6), ("ranks 5-6",), ()),
    ("two places", job({5: BLOCKED, 2: process(2, ELSEWHERE, ELSEWHERE, **OWN_CODE)}), "late", (2,), ("1 other group",), ()),
    ("all wait at one place", job(), "quiet", (), ("all 8 ranks wait in all_reduce", "network"), ("rank 0 ",)),
    ("all wait in two places", job({3: (GATHER, GATHER)}), "disagree", (), ("rank 3", "all_gather", "all_reduce", "must agree"), ()),
    ("... of one collective", job(dict.fromkeys((1, 2), (OTHER_PLACE, OTHER_PLACE)), ranks=4), "disagree", (), ("ranks 0,3 (gpu1) wait in all_reduce at step train.py:40", "ranks 1-2 in all_reduce at step train.py:44", "order in several groups"), ("network",)),
    ("... which one function calls", job(dict.fromkeys((1, 2), (CALLER, CALLER)), ranks=4), "disagree", (), ("ranks 1-2", "ranks 0,3"), ("network",)),
    ("all wait for their GPUs at two places", job({3: (OTHER_SYNC, OTHER_SYNC)}, usual=(SYNC, SYNC)), "quiet", (), ("all 8 ranks wait in synchronize", "several groups"), ()),
    ("a handle that may be waited for, and a barrier", job({3: (BARRIER, BARRIER)}, usual=BELOW, ranks=4), "unclear", (), ("ranks 0-2 (gpu1) stand in preprocess data.py:12, and may wait", "rank 3 waits in barrier", "--native"), ("late",)),
    ("... of one, and a barrier of most", job({3: BELOW}, usual=(BARRIER, BARRIER)), "unclear", (), ("rank 3 (gpu1) stands in", "ranks 0-2,4-7 wait in barrier"), ()),
    ("... and the barrier is seen in native frames alone", job({r: process(r, SLEEP, SLEEP, native_at=f"{SLEEP} > c10d::Work::wait libtorch_cpu.so 0") for r in range(3)} | {3: (BARRIER, BARRIER)}, ranks=4), "disagree", (), ("rank 3 (gpu1) waits in barrier", "ranks 0-2 in preprocess data.py:12"), ()),
    ("a lock of its own process is nobody else's", job({3: process(3, SLEEP, SLEEP, waits_on="futex of a lock of its own process")}), "late", (3,), ("rank 3", "a lock or a thread at preprocess data.py:12"), ("futex",)),
    ("... unless a thread that waits for ranks may hold it", job({3: process(3, SLEEP, SLEEP, waits_on="futex of a lock of its own process", threads_at={"t": OTHER_REDUCE})}), "unclear", (), ("rank 3", "may wait"), ()),
    ("two threads in two collectives, in another order", job({3: process(3, GATHER, GATHER, threads_at={"t": OTHER_REDUCE})}), "unclear", (), ("all_gather", "all_reduce", "another order"), ("must agree",)),
    ("all but one receive", job({0: (BARRIER, BARRIER)}, usual=(RECV, RECV)), "unclear", (0,), ("rank 0 (gpu1) waits in barrier", "no rank sends to them"), ()),
    ("a receive among collectives", job({3: (RECV, RECV)}), "unclear", (), ("recv", "recorder would show"), ()),
    ("all wait, looked at once", job(usual=(REDUCE,)), "unclear", (), ("one look cannot tell",), ()),
    ("all at start", job(usual=(START, START)), "quiet", (), ("init_process_group",), ()),
    ("one not yet at start", job({3: BLOCKED}, usual=(START, START)), "late", (3,), ("rank 3",), ()),
    ("all go on", job(usual=(REDUCE, LOAD)), "not-stuck", (), ("not stuck", "8 of 8"), ()),
    ("most go on", job({3: (REDUCE, REDUCE)}, usual=(REDUCE, LOAD)), "not-stuck", (), ("7 of 8",), ("rank 3",)),
    ("most go on and one is in state D", job({3: process(3, SLEEP, SLEEP, state="D")}, usual=(REDUCE, LOAD)), "not-stuck", (), (), ("rank 3",)),
    ("all in their own code", job(usual=BLOCKED), "unclear", tuple(range(8)), ("all 8 ranks", "no rank waits for another"), ()),
    ("no stack of one", job({3: process(3, None)}), "unclear", (3,), ("not permitted", "its part is unclear"), ()),
    ("no stack of most", job(dict.fromkeys(range(7), None) | {r: process(r, None) for r in range(7)}), "unclear", (), ("not permitted",), ()),
    # --- Whoever has the other end.
    ("all wait for rank 0's connection, from two nodes", job(of_rank_0() | {0: first(SLEEP)}), "late", (0,), ("rank 0", "preprocess data.py:12", "7 ranks wait for it"), ()),
    ("... and it has not accepted any", job(of_rank_0() | {0: process(0, SLEEP, SLEEP, ends=["10.0.0.1:5000"])}), "late", (0,), ("rank 0",), ()),
    ("... and a thread of its answers", job(of_rank_0() | {0: first(SERVE, threads_at={"Thread-1": HANDLE})}), "late", (0,), ("rank 0", "answer net.py:30"), ()),
    ("... and it waits for rank 5 in turn", job(of_rank_0() | {0: asks(0, "10.0.0.2:45 10.0.0.1:5000", ends=first(SLEEP)["ends"]), 5: process(5, SLEEP, SLEEP, ends=["10.0.0.2:45 10.0.0.1:5000"])}), "late", (5,), ("rank 5", "7 ranks wait"), ()),
    ("a ring in which one is elsewhere", job({r: asks(r, f"pid {1000 + (r - 1) % 4}") for r in range(4)} | {2: BLOCKED}, ranks=4), "late", (2,), ("rank 2", "3 ranks wait"), ()),
    ("two wait for each other", job({0: asks(0, "pid 1001"), 1: asks(1, "pid 1000")}, ranks=2), "unclear", (), ("wait for each other",), ()),
    ("... and the others are in a collective", job({1: asks(1, "pid 1002"), 2: asks(2, "pid 1001")}, ranks=4), "unclear", (1, 2), ("wait for each other",), ()),
    ("one has the lock for which the others poll, and waits for one of them", job({2: asks(2, "pid 1000", stack=FUTURE), **{r: asks(r, "pid 1002", waits_on="lock of /t/tasks.db, held by pid 1002 (python3)") for r in (0, 1, 3)}}, ranks=4), "late", (2,), ("rank 2", "has the lock of /t/tasks.db", "ranks 0-1,3"), ()),
    ("one has the mutex of shared memory that the others wait for, and is in a collective", job({r: asks(r, "pid 1001", waits_on="mutex of shared memory, held by pid 1001 (python3)") for r in (0, 2, 3)} , ranks=4), "late", (1,), ("rank 1", "has the mutex of shared memory", "keeps ranks 0,2-3 waiting"), ()),
    ("two places, and no wait for a rank", job({r: process(r, *2 * (ELSEWHERE if r == 7 else SLEEP,), wait_channel="futex_do_wait", waits_on="futex") for r in range(8)}), "unclear", (), ("rank 7", "evaluate eval.py:30", "no stack is known to wait"), ()),
    ("one waits for a rank that waits for it in a collective", job({3: asks(3, "pid 1000")}, ranks=4), "unclear", (3,), ("rank 3 (gpu1) waits for rank 0 in", "rank 0 for it in all_reduce"), ()),
    ("... and whose thread waits for its requests", job({3: asks(3, "pid 1000"), 0: process(0, REDUCE, REDUCE, waits_for=[["Thread-4", "pid 1003"]])}, ranks=4), "late", (3,), ("rank 3 (gpu1) has not called all_reduce", "and rank 0's thread Thread-4 for it"), ()),
    ("... or whose thread waits for another rank", job({3: asks(3, "pid 1000"), 0: process(0, REDUCE, REDUCE, waits_for=[["Thread-4", "pid 1002"]])}, ranks=4), "unclear", (0,), ("rank 3 (gpu1) waits for rank 0",), ()),
    ("... or two ask that rank", job({r: asks(r, "pid 1000") for r in (2, 3)}, ranks=4), "unclear", (0,), ("ranks 2-3 (gpu1) wait for rank 0 in", "rank 0 for them in all_reduce"), ()),
    ("... or that of a process without a rank", job({3: asks(3, "pid 1000"), 0: process(0, REDUCE, REDUCE, waits_for=[["Thread-4", "pid 77"]])}, ranks=4), "unclear", (3,), (), ()),
    ("two have the locks that the other one waits for", job({1: asks(1, "pid 1002", waits_on="flock of /t/a (ext4), held by pid 1002 (python3)"), 2: asks(2, "pid 1001", stack=FUTURE, waits_on="flock of /t/b (ext4), held by pid 1001 (python3)")}, ranks=4), "late", (1, 2), ("ranks 1-2", "flock of /t/a", "flock of /t/b"), ()),
    ("... and one more waits for such a lock", job({1: asks(1, "pid 1002", waits_on="flock of /t/a, held by pid 1002 (python3)"), 3: asks(3, "pid 1001", stack=FUTURE, waits_on="flock of /t/b, held by pid 1001 (python3)")}, ranks=4), "late", (2,), ("rank 2", "keeps ranks 1,3 waiting"), ()),
    ("one waits for a server of nobody's", job({3: asks(3, "10.9.9.9:443 10.0.0.1:41")}), "late", (3,), ("rank 3", "7 ranks wait"), ()),
    ("ranks that ask one that is in a collective, for which another one is late", job({1: asks(1, "pid 1000"), 3: BLOCKED}), "late", (3,), ("rank 3", "7 ranks wait"), ()),
    ("a pipe that all have, and one waits at", job({3: asks(3, "may pid 1000", "may pid 1001")}), "late", (3,), ("rank 3",), ()),
    ("memory that all share, and one does not wait at", job({r: asks(r, *(f"may pid {1000 + other}" for other in range(4) if other != r)) for r in range(3)} | {3: BLOCKED}, ranks=4), "late", (3,), ("rank 3", "3 ranks wait"), ()),
    ("a server without a client", job({0: process(0, ACCEPT, ACCEPT, waits_on="accept of connections to 0.0.0.0:80")}), "unclear", (), ("rank 0 (gpu1) is idle", "(accept of connections to 0.0.0.0:80)", "7 ranks wait for it"), ()),
    ("... whose thread takes its clients", job({0: process(0, QUEUE, QUEUE, threads_at={"t": f"{THREAD} > take net.py 3 > accept socket.py 294"}, waits_on="futex")}), "unclear", (), ("is idle",), ("futex",)),
    ("... and another rank is elsewhere", job({0: process(0, ACCEPT, ACCEPT), 3: (READS, READS)}), "storage", (3,), ("rank 3", "6 ranks wait"), ()),
    ("... of which another rank is the client", job({**of_rank_0(), 0: first(ACCEPT), 3: (READS, READS)}), "storage", (3,), ("rank 3",), ()),
    ("servers without clients", job(usual=(ACCEPT, ACCEPT)), "unclear", (), ("ranks 0-7", "are idle"), ()),
    ("a loop of asyncio without a client", job({0: process(0, ASYNCIO, ASYNCIO, waits_on="epoll of a socket of this machine, connections to [::]:80")}), "unclear", (), ("is idle",), ()),
    ("a loop of asyncio, which may wait for anything", job({0: process(0, ASYNCIO, ASYNCIO, waits_on="epoll of a socket of this machine")}), "late", (0,), ("asyncio's loop",), ("idle",)),
    ("all but one wait for a thread of rank 0, which waits for that one", job({3: BLOCKED, 0: hub(1, 2, 3), **{r: asks(r, "pid 1000") for r in (1, 2)}}, ranks=4), "late", (3,), ("rank 3", "3 ranks wait"), ()),
    ("... and all wait for it", job({0: hub(1, 2, 3), **{r: asks(r, "pid 1000") for r in (1, 2, 3)}}, ranks=4), "unclear", (), ("all wait for each other",), ()),
    ("two open pipes that nobody else opens, and one waits for one of them", job({1: opens(1), 2: opens(2), **{r: asks(r, "pid 1001") for r in (0, 3)}}, ranks=4), "unclear", (1,), ("(and 1 other group)", "nobody has opened the other ends"), ("slow",)),
    ("all but one poll", job({**{r: naps(r) for r in range(8)}, 3: process(3, RUN, RUN, switches=[0, 0])}), "unclear", (3,), ("rank 3", "the others poll"), ()),
    ("a connection that two nodes claim", job({3: asks(3, "10.0.0.9:5 10.0.0.1:6"), 1: process(1, REDUCE, REDUCE, ends=["10.0.0.9:5"]), 5: process(5, REDUCE, REDUCE, ends=["10.0.0.9:5"])}), "late", (3,), ("rank 3",), ()),
    ("a thread of a pool waits for rank 0", job({r: asks(r, "pid 1000", stack=FUTURE, thread="pool", threads_at={"pool": f"{THREAD} > _worker concurrent/futures/thread.py 83 > run concurrent/futures/thread.py 58 > fetch net.py 8 > readinto socket.py 706"}) for r in range(1, 4)} | {0: BLOCKED}, ranks=4), "late", (0,), ("rank 0", "3 ranks wait"), ()),
    ("rank 0 has all connections and waits for any, and one rank does not wait", job({0: asks(0, "pid 1001", "pid 1002", "pid 1003", thread="(whole)"), **{r: asks(r, "pid 1000", thread="(whole)") for r in (1, 2)}, 3: BLOCKED}, ranks=4), "late", (3,), ("rank 3", "3 ranks wait"), ("other group",)),
    ("a loader's workers ask rank 0", job({3: asks(3, "pid 1000", stack=LOAD, thread="(below)"), 0: BLOCKED}, ranks=4), "late", (0,), ("rank 0", "3 ranks wait"), ()),
    ("callers of a rank whose thread answers", job({0: process(0, REDUCE, REDUCE, threads_at={"": "_run_function torch/distributed/rpc/internal.py 206 > answer net.py 30"})}, usual=(RPC, RPC)), "late", (0,), ("answer net.py:30", "7 ranks wait"), ()),
    ("calls of RPC need not agree", job({0: (REDUCE, REDUCE)}, usual=(RPC, RPC)), "unclear", (), ("wait for each other",), ("must agree",)),
    # --- Processes below a rank.
    ("a wrapper whose child is stopped", job({3: {**process(3, RUN, RUN), "below": [below("T")]}}), "late", (3,), ("a signal has stopped: python train.py", "7 ranks wait"), ()),
    ("a wrapper whose child is frozen", job({3: {**process(3, RUN, RUN), "below": [below("F")]}}), "late", (3,), ("its cgroup has frozen: python train.py",), ()),
    ("a wrapper whose child has ended", job({3: {**process(3, RUN, RUN), "below": [below("Z")]}}), "late", (3,), ("has ended", "7 ranks wait"), ()),
    ("wrappers of which one's child can be seen", job({0: {**process(0, RUN, RUN), "below": [below("S", main=0, error="")]}}, usual=(RUN, RUN), ranks=2), "unclear", (0, 1), ("its child process in step train.py:", "(rank 0)"), ()),
    ("a wrapper whose child is traced", job({3: {**process(3, RUN, RUN), "below": [below("t")]}}), "late", (3,), ("a tracer holds",), ()),
    ("loader workers that have nothing to do", job({3: process(3, LOAD, LOAD, threads_at={"x": LOADER_IDLE}, below=[worker(main=2, error="")])}), "loader", (3,), ("waits for its data loader",), ("1 loader worker",)),
    # --- A job that may only be slow.
    ("GPUs that compute", job(usual=(SYNC, SYNC), by_node={n: gpus(*(gpu(1000 + r, 97, 60, 650) for r in range(first_, first_ + 4))) for n, first_ in (("gpu1", 0), ("gpu2", 4))}), "moving", (), ("GPUs of 8 compute",), ("network",)),
    # --- Who ended first, and who was started otherwise.
    ("one has raised, and others have ended since", job({3: BLOCKED, 5: None, 6: None}, {3: log("ValueError: loss is NaN", path="/l/3"), 1: log("RuntimeError: Connection closed by peer [10.0.0.1]:4", path="/l/1")}), "gone", (3,), ("rank 3", "ValueError: loss is NaN", "ranks 5-6 have ended"), ("rank 1 ",)),
    ("few have another WORLD_SIZE", job({3: process(3, START, START, world_size=4)}, usual=(START, START)), "disagree", (3,), ("rank 3", "WORLD_SIZE 4, not 8"), ()),
    ("one runs under another MASTER_ADDR", job({3: process(3, START, START, job="10.9.9.9:1")}, usual=(START, START)), "disagree", (3,), ("rank 3", "started as part of 10.9.9.9:1, not 88"), ("no node has",)),
    ("another whole job of the user", [*job({3: None}), trace("gpu3", *(process(r, REDUCE, REDUCE, job="99", world_size=4) for r in range(4)))], "gone", (3,), ("no node has it",), ("started as",)),
    ("a node that was not asked", [replace(one, part="--limit") for one in job({3: BLOCKED})[:1]], "late", (3,), ("rank 3", "ranks 4-7 not looked at (--limit)"), ()),
    # --- The recorder.
    ("the recorder knows who has not called", job(by_rank=recorder(3)), "late", (3,), ("rank 3", "has not called all_reduce #42 of default_pg", "train.py:88 step", "7 ranks wait in"), ()),
    ("recorder and stack agree", job({3: BLOCKED}, recorder(3)), "late", (3,), ("has not called all_reduce #42", "preprocess data.py:12", "may be slow"), ()),
    ("a recorder that has not received yet that its last call ended", job({3: BLOCKED}, {r: waits(41 if r == 3 else 42) for r in range(8)}), "late", (3,), ("has not called all_reduce #42", "7 ranks wait in"), ()),

    ("a group without a name", job(by_rank={r: recording(process_group(41 if r == 3 else 42, 41, desc=""), entries=[entry(42)][r == 3 :]) for r in range(8)}), "late", (3,), ("#42 of group 0",), ()),
    ("calls of a group that is not listed", job(by_rank={r: recording(entries=[entry(42)]) for r in range(8)}), "quiet", (), ("all_reduce #42",), ()),
    ("... and nothing else speaks", job(by_rank={r: waits(41 if r == 3 else 42) for r in range(8)}), "late", (3,), ("has not called all_reduce #42",), ()),
    ("recorder and the loader's stack agree", job({3: (LOAD, LOAD)}, recorder(3)), "loader", (3,), ("#42", "data loader"), ()),
    ("recorder against a minority's stack", job({6: (SYNC, SYNC)}, recorder(3)), "late", (3,), ("rank 3",), ("rank 6",)),
    ("one in its own code has called all", job({6: BLOCKED}, recorder(3)), "late", (3,), ("rank 3",), ("rank 6",)),
    ("all have called the same", job(every=waits(ranks=range(8)), by_node=QUIET), "quiet", (), ("all_reduce #42 of default_pg", "no bytes move"), ()),
    ("all have called, one is already in its own code", job({6: BLOCKED}, every=waits(ranks=range(8))), "quiet", (), ("#42",), ("rank 6",)),
    ("another operation at the same number", job(by_rank={r: waits(operation="all_gather" if r == 2 else "all_reduce", site="eval.py:3 f" if r == 2 else "train.py:88 step") for r in range(8)}), "disagree", (2,), ("rank 2", "all_gather", "all_reduce #42"), ()),
    ("two ranks in two operations accuse both", job(ranks=2, by_rank={0: waits(operation="all_gather"), 1: waits()}), "disagree", (1,), ("all_gather", "all_reduce"), ()),
    ("a rank that a barrier names", job(by_rank={r: log("x", path=f"/l/{r}", reports=[WatchdogReport(5, "default_pg", "missing", None, "", None, None)] if r == 0 else []) for r in range(8)}), "late", (5,), ("rank 5",), ()),
    ("watchdogs of groups of one name and other ranks", job(by_rank={r: log("x", path=f"/l/{r}", reports=[status(r, 9 if r < 4 else 3, 8 if r < 4 else 2, "tp")]) for r in range(8)}), "quiet", (), (), ("rank 4", "ranks 4-7")),
    ("one log of all ranks", job(every=log("x", path="/l/all", reports=[status(r, 41 if r == 6 else 42, 41) for r in range(8)])), "late", (6,), ("rank 6", "#42"), ()),
    ("ports of one node say nothing of its ranks", job(ranks=4, by_node={"gpu1": network(port(900_000_000))}), "quiet", (), (), ("MB/s",)),
    ("one wakes up in a collective", job(usual=(REDUCE, REDUCE), stacks={r: process(r, REDUCE, REDUCE, switches=[5, 9]) for r in range(8)}), "unclear", (), ("slow, or hung",), ()),
    ("who is late waits in a group of which nobody else tells", job(ranks=4, by_rank={
        0: recording(process_group(3, 3), process_group(1, 0, (), "1", "tp"), entries=[entry(1, group="1", site="train.py:31 main")]),
        **{r: waits(4) for r in (1, 2, 3)},
    }), "disagree", (0,), ("rank 0", "all_reduce #1 of tp (train.py:31 main)", "all_reduce #4 of default_pg"), ()),
    ("who is late waits in a group that is stuck", job(ranks=4, by_rank={
        **{r: recording(process_group(3, 3), process_group(1, 0, (0, 1), "1", "tp"), entries=[entry(1, group="1")]) for r in (0, 1)},
        **{r: waits(4) for r in (2, 3)},
    }), "quiet", (), ("all_reduce #1 of tp",), ()),
    ("the logs name one that waits, and the stacks one that does not", job({3: BLOCKED}, behind(6)), "late", (3,), ("rank 3",), ("rank 6",)),
    ("a loader's worker in its own code", job({3: {**process(3, LOAD, LOAD), "below": [worker()]}}), "loader", (3,), ("rank 3", "loader worker"), ()),
    ("idle loader workers of one in its own code", job({3: {**process(3, SLEEP, SLEEP, **OWN_CODE), "below": [worker(), worker(pid=2001)]}}), "late", (3,), ("preprocess data.py:12",), ("loader",)),
    ("a loader's worker in state D", job({3: {**process(3, LOAD, LOAD), "below": [worker(state="D", wait_channel="rpc_wait_bit_killable")]}}), "storage", (3,), ("loader worker", "rpc_wait_bit_killable"), ()),
    ("another collective, behind one whose end is not recorded yet", job(by_rank={
        **{r: waits() for r in range(1, 8)},
        0: recording(process_group(42, 40), entries=[entry(41), entry(42)]),
        3: recording(process_group(42, 40), entries=[entry(41), entry(42, "broadcast")]),
    }), "disagree", (3,), ("broadcast",), ()),
    ("other sizes", job(by_rank={r: waits(sizes="[[8]]" if r == 2 else "[[9]]") for r in range(8)}), "disagree", (2,), ("sizes",), ()),
    ("other types are a sign", job(by_rank={r: waits(types="Half" if r == 2 else "Float") for r in range(8)}), "unclear", (2,), ("only sign", "types Half"), ()),
    ("uneven sizes are legitimate", job(by_rank={r: waits(operation="all_to_all", sizes=f"[[{r}]]") for r in range(8)}), "quiet", (), (), ("rank 2",)),
    ("a partial dump", job(by_rank=recorder(3, partial=True)), "unclear", (3,), ("only sign",), ()),
    ("a partial dump, and the stack agrees", job({3: BLOCKED}, recorder(3, partial=True)), "late", (3,), ("rank 3",), ()),
    ("an old dump of one", job(by_rank=recorder(3, age_s=900)), "unclear", (3,), ("only sign",), ()),
    ("dumps of an earlier run", job(every=no_recording("the dump is older than the process: /tmp/nccl_trace_rank_0")), "quiet", (), (), ("rank 3", "#42")),
    ("the recorder of a job that goes on", job(usual=(REDUCE, LOAD), by_rank=recorder(3)), "not-stuck", (), (), ("rank 3",)),
    ("who is late waits elsewhere", job(by_rank={
        **{r: recording(process_group(42, 41), entries=[entry(42)]) for r in (0, 1, 2, 4, 5, 6)},
        3: recording(process_group(41, 41), process_group(7, 6, (3, 7), "1", "tp"), entries=[entry(7, "all_gather", "1")]),
        7: recording(process_group(41, 41), process_group(6, 6, (3, 7), "1", "tp")),
    }), "late", (7,), ("rank 7",), ("rank 3 ",)),
    ("two wait for each other in two groups", job(ranks=2, by_rank={
        0: recording(process_group(5, 4, (0, 1), "1", "tp"), process_group(8, 8, (0, 1), "2", "dp"), entries=[entry(5, "all_reduce", "1")]),
        1: recording(process_group(4, 4, (0, 1), "1", "tp"), process_group(9, 8, (0, 1), "2", "dp"), entries=[entry(9, "all_gather", "2")]),
    }), "disagree", (1,), ("all_reduce #5 of tp", "all_gather #9 of dp", "order differs"), ()),
    ("groups of one name and other ranks", job(by_rank={
        r: recording(process_group(9 if r < 4 else 3, 8 if r < 4 else 2, (0, 1, 2, 3) if r < 4 else (4, 5, 6, 7), "5", "tp"), entries=[entry(9 if r < 4 else 3, "all_reduce", "5")])
        for r in range(8)
    }), "quiet", (), (), ("rank 4", "ranks 4-7")),
    ("a send nobody receives", job(usual=(SYNC, SYNC), ranks=2, by_rank={0: pair(0, "nccl:send 0->1"), 1: done(0)}), "late", (1,), ("rank 1", "recv from rank 0"), ()),
    ("send and receive are a pair", job(usual=(SYNC, SYNC), ranks=2, by_rank={0: pair(0, "send 0->1"), 1: pair(1, "recv 1<-0")}), "quiet", (), (), ("rank 1",)),
    ("a receive from anybody accuses nobody", job(usual=(RECV, RECV), ranks=2, by_rank={0: pair(0, "gloo:recv 0<-?"), 1: done(0)}), "disagree", (), ("no rank sends",), ("rank 1 ",)),
    ("no dump of one", job(by_rank={r: waits(ranks=range(8)) if r != 3 else no_recording() for r in range(8)}), "unclear", (3,), ("only sign: rank 3 (gpu1): has no record",), ("has not called",)),
    ("no dump of one whose stack is apart", job({3: BLOCKED}, {r: waits(ranks=range(8)) if r != 3 else no_recording() for r in range(8)}), "late", (3,), ("rank 3",), ()),
    ("the accused waits for one without a dump", job({5: BLOCKED}, {r: no_recording() if r == 5 else done() if r == 3 else waits() for r in range(8)}), "late", (5,), ("rank 5",), ()),
    ("nonsense for a dump", job({3: BLOCKED}, {2: {"flight_recorder": {"path": 7}}, 4: {"flight_recorder": {"age_s": "x"}, "logs": {"lines": 4}}}), "late", (3,), ("rank 3",), ()),
    # --- The logs.
    ("the watchdog's numbers", job(by_rank=behind(6)), "late", (6,), ("rank 6", "#42 of default_pg"), ()),
    ("watchdog and recorder name others", job(by_rank={r: {**recorder(3)[r], **behind(6)[r]} for r in range(8)}), "late", (3,), ("rank 3",), ("rank 6",)),
    ("all but one timed out", job(by_rank={r: log("x", path=f"/l/{r}", reports=[timeout(r, 42)]) for r in range(8) if r != 3}), "unclear", (3,), ("only sign: rank 3 (gpu1): has no record",), ()),
    ("all but one timed out, and its stack is apart", job({3: BLOCKED}, {r: log("x", path=f"/l/{r}", reports=[timeout(r, 42)]) for r in range(8) if r != 3}), "late", (3,), ("rank 3", "ALLREDUCE #42"), ()),
    ("reports of ranks that are no numbers of ranks", job(by_rank={r: {"logs": {**behind(6)[r]["logs"], "reports": [{**plain(status(r, 41 if r == 6 else 42, 41)), "rank": float(r)}]}} for r in range(8)}), "quiet", (), (), ("rank 6",)),
    ("a report of a rank that is none", job(by_rank={0: log("x", reports=[status(999_999, 1, 1), status(-5, 2, 0)])}), "quiet", (), (), ("999",)),
    ("one log ended early", job(by_rank={r: log("x", age_s=400 if r == 3 else 20, path=f"/l/{r}") for r in range(8)}), "unclear", (3,), ("only sign", "rank 3", "380 s before"), ()),
    ("one rank fell back to sockets", job(by_rank={r: log("x", path=f"/l/{r}", nccl=NcclRank(network="Socket" if r == 3 else "IB")) for r in range(8)}), "unclear", (3,), ("only sign", "rank 3", "NCCL: network Socket, its peers IB"), ()),
    ("one rank called another collective", job(by_rank={r: log("x", path=f"/l/{r}", nccl=NcclRank(calls=((7, 0, "AllReduce of 8 float32"), (8, 0, "AllReduce of 9 float32" if r == 3 else "AllReduce of 8 float32")), calls_size=8)) for r in range(8)}), "unclear", (3,), ("only sign", "rank 3", "NCCL: called AllReduce of 9 float32 as opCount 8, its peers AllReduce of 8 float32"), ()),
    ("the HCA of one rank's node failed", job(by_rank={r: log("x", path=f"/l/{r}", nccl=NcclRank(errors=(NcclError(*(("ib-device", "") if r == 3 else ("ib-retry", "", "10.0.0.3"))),))) for r in range(8)}), "unclear", (3,), ("only sign", "rank 3", "a NIC of this node failed; the kernel's log"), ()),
    ("all ranks lost a peer", job(by_rank={r: log("x", path=f"/l/{r}", nccl=NcclRank(errors=(NcclError("ib-retry", "", "10.0.0.3"),))) for r in range(8)}), "quiet", (), (), ("only sign",)),
    ("ranks write when they like", job(by_rank={r: log("x", age_s=100 * r, path=f"/l/{r}") for r in range(8)}), "quiet", (), (), ("only sign",)),
    ("only rank 0 writes", job(by_rank={r: log("x", age_s=5 if r == 0 else 4000, path=f"/l/{r}") for r in range(8)}), "quiet", (), (), ("rank 0",)),
    ("one log ends in an error", job(by_rank={3: log("RuntimeError: CUDA error: misaligned", path="/l/3")}), "unclear", (3,), ("only sign", "CUDA error"), ()),
    ("one rank's lines in the log of all end in an error", job(by_rank={r: log("ValueError: nan" if r == 3 else "step 4", is_own=True) for r in range(8)}), "unclear", (3,), ("only sign", "its log ends in an error: ValueError"), ()),
    ("the log of all ends in an error of no rank", job(by_rank={r: log("ValueError: nan") for r in range(8)}), "quiet", (), (), ("only sign",)),
    # --- NCCL's RAS.
    ("fewer launches", job(usual=(SYNC, SYNC), by_node={"gpu1": ras(*((f"gpu{1 + r // 4}", 1000 + r, 41 if r == 6 else 42) for r in range(8)))}), "late", (6,), ("rank 6", "AllReduce #42"), ()),
    ("fewer launches of a job that goes on", job(usual=(REDUCE, LOAD), by_node={"gpu1": ras(*((f"gpu{1 + r // 4}", 1000 + r, 41 if r == 6 else 42) for r in range(8)))}), "not-stuck", (), (), ("rank 6",)),
    ("launches of somebody else's processes", job(by_node={"gpu1": ras(*((f"gpu{1 + r // 4}", 9000 + r, r) for r in range(8)))}), "quiet", (), (), ("rank 0 ",)),
    ("dead for NCCL, and missing", job({6: None}, by_node={"gpu1": ras(("gpu1", 1000, 42), ("gpu1", 1001, 42), missing=[("gpu2", 1006, "dead")])}), "gone", (6,), ("rank 6", "dead for NCCL"), ()),
    # --- GPUs, network, kernel.
    ("GPUs that spin, bytes that stand", job(usual=(SYNC, SYNC), by_node={n: {**SPINS[n], **QUIET[n]} for n in SPINS}), "quiet", (), ("no bytes move",), ()),
    ("bytes move", job(by_node=MOVING), "moving", (), ("800 MB/s", "look again"), ()),
    ("bytes of no time", job(by_node={n: {"network": {**MOVING[n]["network"], "seconds": 1e7}} for n in MOVING}), "quiet", (), (), ("MB/s", "no bytes move")),
    ("a management port's bytes are not the job's", job(by_node={n: network(port(0), port(9_000_000, "eno1", kind="ethernet")) for n in QUIET}), "quiet", (), ("no bytes move",), ()),
    ("one GPU computes while the others spin", job(usual=(SYNC, SYNC), by_node={**SPINS, "gpu2": gpus(gpu(1004, 97, 0), gpu(1005, 99, 60, 650), gpu(1006, 97, 0), gpu(1007, 97, 0))}), "unclear", (5,), ("only sign", "computes"), ()),
    ("one GPU idle while the others spin", job(usual=(SYNC, SYNC), by_node={**SPINS, "gpu2": gpus(gpu(1004, 97, 0), gpu(1005, 0, 0, 90), gpu(1006, 97, 0), gpu(1007, 97, 0))}), "unclear", (5,), ("only sign", "idle"), ()),
    ("errors rise on one node", job(by_node={**QUIET, "gpu2": network(port(0, errors=[("symbol_error", 3)]))}), "unclear", (), ("only sign: gpu2", "symbol_error"), ()),
    ("errors rise and the link message agrees", job(by_node={**QUIET, "gpu2": {**network(port(0, errors=[("symbol_error", 3)])), **kernel(("link", 30, 0, "mlx5_0: Link down"))}}), "quiet", (), ("gpu2",), ("only sign",)),
    ("a link went down", job(by_node={**QUIET, "gpu2": network(port(0, errors=[("link_downed", 1)]))}), "quiet", (), ("gpu2", "link_downed"), ()),
    ("a port at half rate is one weak sign", job(ranks=12, by_node={**MOVING, "gpu3": network(port(400_000_000, gbps=200))}), "unclear", (), ("only sign: gpu3", "mlx5_0 runs at 200 Gb/s, and at 400 on 2 other nodes"), ()),
    ("half rate on one of two nodes says nothing", job(by_node={**MOVING, "gpu2": network(port(400_000_000, gbps=200))}), "moving", (), (), ("Gb/s, and at",)),
    ("a hot GPU behind a port at half rate", job(ranks=12, usual=(SYNC, SYNC), by_node={**MOVING, "gpu3": {**network(port(400_000_000, gbps=200)), **gpus(gpu(1008, 97, 0, throttle=["hw_thermal_slowdown"]))}}), "slow-node", (8,), ("gpu3", "slow"), ("only sign",)),
    ("a GPU of another job is hot", job(by_node={**MOVING, "gpu2": gpus(gpu(77, 97, 0, throttle=["hw_slowdown"]))}), "moving", (), (), ("slows a GPU",)),
    ("one node is slow", job(by_node={**MOVING, "gpu2": {**network(port(90_000_000, errors=[("symbol_error", 900)])), **kernel(("link", 30, 0, "mlx5_0: PCIe width x4"))}}), "slow-node", (), ("gpu2",), ()),
    ("an Xid of the device", job(by_node={"gpu2": kernel(("xid", 312, 0, "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', GPU has fallen off the bus."))}), "quiet", (), ("gpu2", "Xid 79"), ()),
    ("an Xid of the application", job(by_node={"gpu2": kernel(("xid", 312, 1005, "NVRM: Xid (PCI:0000:41:00): 31, pid=1005, MMU Fault"))}), "unclear", (5,), ("only sign", "Xid 31"), ()),
    ("killed for memory", job({3: None}, by_node={"gpu1": kernel(OOM)}), "gone", (3,), ("rank 3 (gpu1) is gone", "killed for memory (pid 1003)", "5 min ago"), ()),
    ("NFS does not answer", job({5: process(5, SLEEP, SLEEP, state="D", wait_channel="rpc_wait_bit_killable")}, by_node={"gpu2": kernel(("filesystem", 200, 0, "nfs: server store1 not responding"))}), "storage", (5,), ("state D",), ()),
    ("a start over loopback", job(usual=(START, START), every=variables(NCCL_SOCKET_IFNAME="lo")), "environment", (*range(8),), ("NCCL_SOCKET_IFNAME=lo leads to the node itself; nodeready env",), ()),
    ("loopback on one node, and NCCL's first collective", job(every=variables(), by_rank={rank: variables(NCCL_SOCKET_IFNAME="lo") for rank in range(4, 8)}), "environment", (4, 5, 6, 7), ("gpu2",), ()),
    ("a rank has ended, as it could not connect", job({5: None}, usual=(START, START), every=variables(GLOO_SOCKET_IFNAME="lo")), "environment", (0, 1, 2, 3, 4, 6, 7), ("GLOO_SOCKET_IFNAME=lo",), ("rank 5",)),
    ("all have ended while they were looked at, over loopback", job({r: {**process(r, START), "note": "ended while it was looked at"} for r in range(8)}, every=variables(GLOO_SOCKET_IFNAME="lo")), "environment", (*range(8),), ("GLOO_SOCKET_IFNAME=lo leads to the node itself",), ()),
    ("all have ended after they trained, Gloo over loopback", job({r: {**process(r, REDUCE), "note": "ended while it was looked at"} for r in range(8)}, every=variables(GLOO_SOCKET_IFNAME="lo")), "gone", (*range(8),), ("ranks 0-7", "have ended: nodeready postmortem shows who failed first"), ("GLOO",)),
    ("Gloo over loopback, after NCCL has trained", job(every=variables(GLOO_SOCKET_IFNAME="lo")), "quiet", (), (), ("GLOO",)),
    ("over loopback, but a rank loads data", job({3: BLOCKED}, every=variables(NCCL_SOCKET_IFNAME="lo")), "late", (3,), ("rank 3",), ("SOCKET",)),
    ("another user has the port", job({0: None}, usual=(START, START), every=variables(MASTER_ADDR="gpu1", MASTER_PORT="29500"), by_node={"gpu1": port_facts("gpu1", "29500", "port 29500 is taken by eve: python3, pid 7")}), "environment", (1, 2, 3), ("MASTER_PORT=29500 is not free: port 29500 is taken by eve",), ()),
    ("slow is no cause", job(every=variables(CUDA_LAUNCH_BLOCKING="1")), "quiet", (), (), ("CUDA",)),
    ("one rank differs", job(every=variables(), by_rank={5: variables(NCCL_MAX_NCHANNELS="1")}), "unclear", (5,), ("only sign", "NCCL_MAX_NCHANNELS=1 differs"), ()),
    ("variables that are none", job(usual=(START, START), every={"variables": {"variables": 3}}, by_node={"gpu1": {"environment": {"interfaces": {}}}}), "quiet", (), (), ()),
    ("numbers that are none", job({3: BLOCKED}, by_node={"gpu1": {**gpus(gpu(1001, "x", 0)), **network(port(0))}, "gpu2": {"network": {**network(port(0))["network"], "ports": [{**plain(port(0)), "sent": "x"}]}}}), "late", (3,), ("rank 3",), ("rank 6",)),
    ("nonsense from all witnesses of a node", job({3: BLOCKED}, by_node={"gpu1": {"gpus": {}, "network": {"ports": 3}, "kernel": {"absent": 5}, "nccl_ras": {"a": []}, "else": {}}, "gpu2": gpus(gpu(None, 97, 0))}), "late", (3,), ("rank 3",), ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("traces", "kind", "ranks", "words", "never"),
    [pytest.param(*case, id=name) for name, *case in CASES],
)
def test_the_verdict(traces, kind, ranks, words, never):
    made = judged(traces)
    verdict = made.verdict
    first = verdict.suspects[0].ranks if verdict.suspects else ()
    assert (verdict.kind, first) == (kind, ranks), verdict
    assert all(word in verdict.text for word in words), verdict
    assert not any(word in verdict.text for word in never), verdict
    # One screen names one culprit.
    if verdict.suspects and kind not in ("unclear", "disagree", "quiet", "slow-node"):
        assert set(made.groups[0].ranks) & set(first)


#: what a process names at length, and words that still follow the name
LONG = {
    "a function and a file": (process(3, *[f"{TRAIN} > {'f' * 4000} {'d' * 2000}/{'g' * 2000}.py 12"] * 2, **OWN_CODE), "...:12; 7 ranks wait"),
    "a child's command": ({**process(3, RUN, RUN), "below": [below("T", "c" * 4000)]}, "...; 7 ranks wait"),
    "a wait": (process(3, f"{TRAIN} > read data.py 12", f"{TRAIN} > read data.py 12", waits_on=f"a lock of {'w' * 4000}", **OWN_CODE), "...; 7 ranks wait"),
    "a channel in the kernel": (process(3, SLEEP, SLEEP, state="D", wait_channel="n" * 4000), "... at preprocess data.py:12; 7 ranks wait"),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_a_name_is_cut_before_the_words_that_follow(name):
    row, words = LONG[name]
    text = grouping.group(job({3: row}), {}).verdict.text
    assert text.startswith("rank 3 (gpu1)")
    assert words in text
    assert text.rpartition(": ")[2].startswith(("look", "find"))
    assert len(text) < 400


def test_how_far_a_rank_is_behind_is_among_its_reasons():
    made = judged(job(by_rank={rank: waits() if rank != 3 else done(40) for rank in range(8)}))
    assert made.verdict.suspects[0].for_[0].endswith("; 2 behind")


def test_a_node_that_gives_no_answer_is_where_its_ranks_are_gone():
    verdict = judged(
        job(ranks=4, world=8), {"gpu2": Gap(UNREACHABLE, "connection timed out")}
    ).verdict
    assert (verdict.kind, verdict.suspects[0].nodes) == ("gone", ("gpu2",))
    assert "connection timed out" in verdict.text


DUMPS = ROOT / "tests" / "unit" / "node" / "data" / "flight_recorder"


@pytest.mark.parametrize(("names", "kind", "ranks", "words"), [
    (("late_0", "late_1", "late_1", "late_3"), "late", (3,),
     ("has not called all_reduce #4 of default_pg (train.py:10 step)", "3 ranks")),
    (("late_0", "late_1", "types_2", "late_1"), "disagree", (2,), ("broadcast", "train.py:37")),
    (("late_0", "late_1", "late_1", "late_1"), "quiet", (), ("all_reduce #4",)),
    (("group_0", "group_1", "group_1", "group_1"), "disagree", (0,), ("all_reduce #1 of tp",)),
    (("late.json_0", "late.json_0", "late.json_0", "late.json_3"), "late", (3,), ("#4",)),
])  # fmt: skip
def test_what_a_real_recorder_wrote_leads_to_the_culprit(names, kind, ranks, words):
    recordings = [plain(parse((DUMPS / name).read_bytes())) for name in names]
    witnesses = {rank: {"flight_recorder": one} for rank, one in enumerate(recordings)}
    test_the_verdict(job(ranks=4, by_rank=witnesses), kind, ranks, words, ())

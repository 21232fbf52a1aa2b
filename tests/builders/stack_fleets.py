"""Stacks of jobs that nobody ran: one per outcome, for the golden files."""

from dataclasses import replace

from nodeready.core.outcome import UNREACHABLE, NodeGap
from nodeready.runs.stacks import document
from nodeready.runs.stacks.document import Frame, Group, Rank, Stacks
from tests.builders.fleets import FINISHED, HOSTILE, STARTED
from tests.builders.traces import frames


def _frames(text: str) -> tuple[Frame, ...]:
    return tuple(Frame(*row) for row in frames(text))


_TORCH = "torch/distributed/c10d_logger.py 83 > all_reduce torch/distributed/distributed_c10d.py"
_DATA = "torch/utils/data"
LOOP = _frames("<module> train.py 131 > main train.py 120 > train_epoch train.py 88")
REDUCE = (*LOOP, *_frames(f"step trainer.py 61 > wrapper {_TORCH} 2806"))
READ = (
    *LOOP,
    *_frames(f"__next__ {_DATA}/dataloader.py 701 > _next_data {_DATA}/dataloader.py 757"),
    *_frames(f"fetch {_DATA}/_utils/fetch.py 52 > __getitem__ dataset.py 40 > read shards.py 17"),
)
SAVE = (*LOOP[:2], Frame("save", "checkpoint.py", 33), Frame("fsync", "files.py", 9))
WAITS = "waits for the other ranks in all_reduce: look at the ranks that are not there"
READS = "reads data while the others wait for it: look at the storage of that node"


def name(number: int) -> str:
    return f"gpu{number:03}"


def job(*groups: tuple[Group, str], size: int | None, **more: object) -> Stacks:
    """A job with so many ranks per node; each group with the state of its processes."""
    processes = [
        Rank(group.nodes[0] if len(group.nodes) == 1 else name(1 + rank // 8), 4000 + rank % 8,
             rank, rank % 8, state, "futex_wait_queue" if state == "S" else "", 0.01, number)
        for number, (group, state) in enumerate(groups)
        if group.kind not in ("missing", "no-data")
        for rank in group.ranks
    ]  # fmt: skip
    whole = Stacks(
        STARTED, FINISHED, "88", size, tuple(group for group, _ in groups), tuple(processes), ()
    )
    return replace(whole, **more)  # type: ignore[arg-type]


def stack(
    calls: tuple[Frame, ...],
    ranks: list[int],
    fork: int | None = None,
    hint: str = "",
    verdict: str | None = "blocked",
) -> Group:
    nodes = tuple(dict.fromkeys(name(1 + rank // 8) for rank in ranks))
    return Group("stack", verdict, tuple(ranks), nodes, calls, hint,
                 fork=len(calls) if fork is None else fork,
                 processes=len(ranks))  # fmt: skip


def without(size: int, *apart: int) -> list[int]:
    return [rank for rank in range(size) if rank not in apart]


def one() -> Stacks:
    """One rank reads while the others wait."""
    return job(
        (stack(READ, [7], 3, READS), "S"),
        (stack(REDUCE, without(512, 7), hint=WAITS), "S"),
        size=512,
        advice=("rank 7 on gpu001 stands apart from 511 others: begin there",),
    )


def missing() -> Stacks:
    """Two ranks have no process, a node gives no answer, one process is in state D."""
    gone = Group(
        "missing", None, (12, 13), ("gpu002",), no_stack_reason="no process has these ranks"
    )
    away = Group("no-data", None, tuple(range(40, 48)), ("gpu006",),
                 no_stack_reason="10.1.0.6: no answer in 15 s")  # fmt: skip
    stuck = Group("uninterruptible", None, (3,), ("gpu001",), SAVE, "waits for a mount",
                  "in the kernel: nfs_wait_on_request", len(SAVE), 1)  # fmt: skip
    dead = Group(
        "dead",
        None,
        (20,),
        ("gpu003",),
        no_stack_reason="ended while it was looked at",
        processes=1,
    )
    rest = without(64, 3, 12, 13, 20, *range(40, 48))
    return job(
        (gone, ""), (away, ""), (dead, ""), (stuck, "D"), (stack(REDUCE, rest, hint=WAITS), "S"),
        size=64,
        gaps=(NodeGap("gpu006", UNREACHABLE, "10.1.0.6: no answer in 15 s"),),
        advice=(
            "2 ranks have no process: look for a core or an OOM kill on gpu002: dmesg",
            "nodeready cores shows what crashed",
        ),
    )  # fmt: skip


def same() -> Stacks:
    return job((stack(REDUCE, without(512), hint=WAITS), "S"), size=512,
               advice=("all ranks wait in one collective: look at the network",))  # fmt: skip


def prefix() -> Stacks:
    """One stands where the others have gone on from; one spins; native frames were taken."""
    native = (*LOOP, Frame("ncclGroupEnd", "libnccl.so.2", 0), Frame("poll", "libc.so.6", 0))
    spins = replace(stack(REDUCE, [1], 6, verdict="spinning"), native=native)
    return job(
        (stack(LOOP, [0], 3, verdict=None), "R"),
        (spins, "R"),
        (stack((*REDUCE, Frame("wait", "work.py", 0)), without(8, 0, 1)), "S"),
        size=None,
        complete=False,
    )


def hung() -> Stacks:
    """A rank's loader worker waits for storage; what the witnesses say, and the verdict."""
    wait = Frame("_next_data", "torch/utils/data/dataloader.py", 1501)
    worker = (Frame("_worker_loop", "torch/utils/data/_utils/worker.py", 348),
              Frame("__getitem__", "dataset.py", 40), Frame("read", "shards.py", 17))  # fmt: skip
    children = (
        document.ChildProcess("loader worker", "python train.py", 3, (7,), "D",
              "rpc_wait_bit_killable", "read of /data/shard-5 (nfs4)", worker, hint=READS),
        document.ChildProcess("process", "sleep 60", 1, (7,), "S", "hrtimer_nanosleep", "", (),
                       "not Python"),
    )  # fmt: skip
    late = replace(
        stack((*LOOP, wait), [7], 3, "waits for its data loader's workers"),
        role="suspect", reason="does not wait for other ranks, and 15 ranks wait",
        user_frame=LOOP[-1], states=("S futex_wait_queue",), children=children, activity="data",
        waits_on=("poll of a pipe that pids 71, 72 write",),
        locals=("train_epoch: step = 4711", "train_epoch: lr = 0.1"),
        system_calls=(document.SystemCall("poll", "pipe of pid 71", 412, 5.0, (7,)),),
    )  # fmt: skip
    rest = replace(
        stack(REDUCE, without(16, 7), hint=WAITS), role="victim", activity="collective",
        reason="waits for other ranks", user_frame=REDUCE[3], states=("S futex_wait_queue (15)",),
    )  # fmt: skip
    verdict = document.Verdict(
        "loader",
        "rank 7 (gpu001): waits for 3 loader workers in read shards.py:17; 15 ranks wait for it",
        (
            document.Suspect(
                (7,), ("gpu001",), (late.reason, "logs: last line: epoch 3"), ("few words",)
            ),
        ),
        ("flight_recorder: no dump has been written",),
    )
    witnesses = (
        document.Witness(
            "logs", (), (document.Statement("rank 7: last line 40 s ago", (7,), (), 1),)
        ),
        document.Witness("nccl_ras", ("not asked: version 2.26.2 may end the job",)),
    )
    return job((late, "S"), (rest, "S"), size=16, verdict=verdict, witnesses=witnesses)


def many(count: int = 40) -> Stacks:
    """Every rank but a few somewhere else."""
    groups = [
        (stack((*LOOP[: 1 + at % 3], Frame(f"stage_{at}", "pipeline.py", at)), [at], 1 + at % 3),
         "S")
        for at in range(1, count)
    ]  # fmt: skip
    rest = without(512, *range(1, count))
    return job(*groups, (stack(REDUCE, rest, hint=WAITS), "S"), size=512)


def stages(size: int = 131_072) -> Stacks:
    """Pipeline stages, each with every eighth rank, and a scattered minority."""
    odd = [rank for rank in range(0, size, 97) if rank % 8 == 3]
    groups = [(stack(READ, odd, 3), "S")]
    groups += [
        (stack((*LOOP, Frame("recv", f"stage{at}.py", 5)), [r for r in range(at, size, 8)
                if r not in set(odd)], 3), "S")
        for at in (0, 1)
    ]  # fmt: skip
    return job(*groups, size=size)


def nobody() -> Stacks:
    return job(
        (
            Group(
                "no-data",
                None,
                (),
                ("gpu002",),
                no_stack_reason="connection refused: is sshd running?",
            ),
            "",
        ),
        size=None,
        job="",
        gaps=(NodeGap("gpu002", UNREACHABLE, "connection refused: is sshd running?"),),
        advice=("gpu001: no rank; the busiest: python3 serve.py (pid 77, user bob)",),
    )


def hostile() -> Stacks:
    """Everything that a node may say is bad."""
    bad = HOSTILE + "</script></style><img src=x onerror=alert(1)>"
    frames = (LOOP[0], Frame(bad, bad, 3), Frame("x" * 5000, "y" * 5000, 2))
    group = Group("stack", "blocked", (0,), (bad,), frames, bad, bad, 1, 1, frames)
    away = Group("no-data", None, (), (bad, "gpu002"), no_stack_reason=bad)
    process = Rank(bad, 7, 0, 0, bad, bad, 0.5, 1, bad)
    normal = stack(REDUCE, [1, 2])
    return Stacks(
        STARTED,
        FINISHED,
        bad,
        3,
        (away, group, normal),
        (process,),
        (NodeGap(bad, UNREACHABLE, bad),),
        (bad,),
    )


FLEETS = {
    "hung": hung, "one": one, "missing": missing, "same": same, "prefix": prefix, "many": many,
    "nobody": nobody, "hostile": hostile,
}  # fmt: skip

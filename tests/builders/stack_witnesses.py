"""Stacks with roles, witnesses and a verdict, of jobs that nobody ran: for the page."""

from dataclasses import replace

from nodeready.runs.stacks import document
from nodeready.runs.stacks.document import Frame, Stacks, Statement, Verdict, Witness
from tests.builders.fleets import HOSTILE
from tests.builders.stack_fleets import LOOP, READ, REDUCE, WAITS, job, name, stack, without


def late(size: int = 64) -> Stacks:
    """One rank's loader hangs on a file system; the others wait for it; three witnesses agree."""
    reads = replace(
        stack(READ, [13], 3, "a loader worker waits for `/data`: look at the mount"),
        role="suspect",
        reason="it reads data, and waits for no other rank",
        user_frame=READ[2],
        states=("S in pipe_read: 1",),
        waits_on=("pipe:[88120] of its loader worker",),
        children=(
            document.ChildProcess("loader worker", "python train.py", 2, (13,), "D",
                  "fuse_request_wait", "/data/shard-088.tar", READ[3:],
                  hint="state D: `/data` does not answer"),
        ),
        locals=("train_epoch: step = 4711", "train_epoch: batch = None"),
    )  # fmt: skip
    waits = replace(
        stack(REDUCE, without(size, 13), hint=WAITS), role="victim",
        reason="it waits in all_reduce for the others", user_frame=LOOP[2],
        states=(f"S in futex_wait_queue: {size - 1}",), waits_on=("the other ranks",),
    )  # fmt: skip
    made = job((reads, "S"), (waits, "S"), size=size)
    return replace(
        made,
        processes=tuple(
            row._replace(wait_channel="pipe_read", pid=5013) if row.rank == 13 else row
            for row in made.processes
        ),
        advice=(f"rank 13 on {name(2)}: `ls /data` there, with a time limit",),
        verdict=Verdict(
            "late",
            f"rank 13 on {name(2)} has not called all_reduce 4711, which the others wait in: "
            "its loader waits for `/data`",
            (
                document.Suspect((13,), (name(2),), ("it waits for no other rank",
                        "flight recorder: 4710 is its last call, 4711 the others'"),
                        ("its GPU shows no error",)),
            ),
            ("NCCL RAS: the version in use must not be asked while ranks connect (`--ras` does)",),
        ),
        witnesses=(
            Witness("logs", (), (
                Statement("silent for 9 min, the others for 8", (13,), (name(2),), 1),
                Statement("last line: step 4710", (13,), (name(2),)),
            )),
            Witness("flight_recorder", (f"no dump on {name(7)}",), (
                Statement("has not called all_reduce 4711", (13,), (name(2),), 2),
                Statement("called all_reduce 4711", tuple(without(size, 13, *range(48, 56)))),
            )),
            Witness("nccl_ras", ("not asked: version 2.28.9 is not safe (see `--ras`)",)),
            Witness("gpu", (), (
                Statement("SM 96 %, memory 0 %: spins in a kernel", tuple(without(size, 13))),
                Statement("no error", (13,), (name(2),), 0, True),
            )),
            Witness("network", (), (Statement("no bytes in 2 s", (), (), 1),)),
            Witness("kernel", (), (
                Statement("fuse: /data: request timed out", (), (name(2),), 1),
            )),
        ),
    )  # fmt: skip


def uneven(size: int = 2000) -> Stacks:
    """No two neighbours of so many ranks have equal cells, in forty groups."""
    groups = []
    for number in range(40):
        frames = (*REDUCE, Frame(f"stage_{number}", "pipeline.py", number + 1))
        mine = list(range(number, size, 40))
        role = "suspect" if number < 2 else "victim"
        groups.append(replace(stack(frames, mine, 6, WAITS), role=role, reason="waits"))
    made = job(*((group, "S") for group in groups), size=size)
    statements = tuple(Statement(f"step {4000 + rank % 7}", (rank,)) for rank in range(size))
    return replace(
        made,
        processes=tuple(
            row._replace(pid=10_000 + (row.rank or 0), state="SR"[(row.rank or 0) // 40 % 2])
            for row in made.processes
        ),
        witnesses=(Witness("logs", (), statements),),
        verdict=Verdict("unclear", "no witness tells the ranks apart"),
    )


def hostile() -> Stacks:
    """Every text a node's own, and each tries to be markup, a path or a sequence of a terminal."""
    bad = HOSTILE + "`</script></style><img src=x onerror=alert(1)>` `"
    frames = (Frame(bad, bad, 1),)
    group = document.Group(
        "stack", "blocked", (0,), (bad,), frames, bad, bad, 1, 1, role="suspect", reason=bad,
        user_frame=frames[0], states=(bad,), waits_on=(bad,), locals=(bad,),
        children=(document.ChildProcess(bad, bad, 2, (0,), bad, bad, bad, frames, bad, bad),),
    )  # fmt: skip
    said = (Statement(f"`{bad}` ``{bad}", (0,), (bad,), 1), Statement(bad, (), (bad,), 0, True))
    return replace(
        job((group, bad), size=1),
        processes=(document.Rank(bad, 1, 0, 0, bad, bad, 0.0, 0, bad),),
        verdict=Verdict(
            "late", f"`{bad}`", (document.Suspect((0,), (bad,), (bad,), (bad,)),), (bad,)
        ),
        witnesses=(Witness("logs", (bad,), said),),
        advice=(f"`{bad}`",),
    )


FLEETS = {"late": late, "uneven": uneven, "hostile": hostile}

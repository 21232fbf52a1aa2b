"""When a watched job is said to hang: tables of what its ranks do between two snapshots."""

from dataclasses import replace
from typing import Any

import pytest

from nodeready.agent.asking import Answer
from nodeready.agent.witnesses import motion
from nodeready.agent.witnesses.motion import Motion, MotionEnd, PortBytes
from nodeready.core import wire
from nodeready.core.outcome import INVALID, LOST, UNREACHABLE, Gap
from nodeready.runs.watch import (
    Interval,
    JobSnapshot,
    RankKey,
    Sign,
    Watch,
    interval,
    judge,
    probe,
    signs,
)
from tests.cases import cases, with_table

MINUTE = 60.0
REST = Motion(100, 0, 5.0, "S", 50.0, 80.0, 1000, 5000, 10_000, 4, 2000, 300, False, False)


def later(rank: Motion, **changes: float) -> Motion:
    """The rank a minute later: counters that have grown by so much."""
    flags = {name: bool(changes.get(name)) for name in ("watchdog", "may_poll")}
    grown = {name: getattr(rank, name) + by for name, by in changes.items() if name not in flags}
    return replace(rank, **grown, **flags)


def pair(
    *steps: dict[str, float], nodes: int = 1, ports: float | None = None
) -> tuple[JobSnapshot, JobSnapshot]:
    """Two snapshots a minute apart. steps: each rank's changes; ports None: no counters"""
    keys = [RankKey(f"gpu{rank % nodes}", 100 + rank, 5.0) for rank in range(len(steps))]
    before = {key: replace(REST, pid=key.pid, rank=rank) for rank, key in enumerate(keys)}
    after = {key: later(before[key], **step) for key, step in zip(keys, steps, strict=True)}
    if ports is None:
        return JobSnapshot(0.0, before), JobSnapshot(MINUTE, after)
    names = [f"gpu{number}" for number in range(nodes)]
    moved = (dict.fromkeys(names, PortBytes(1000 + int(ports * at), None)) for at in (0, MINUTE))
    return JobSnapshot(0.0, before, next(moved)), JobSnapshot(MINUTE, after, next(moved))


#: What a rank does in a minute; a row of `watch.json` names it, or what it is like.
RANKS: dict[str, dict[str, float]] = {
    "nothing": {"log_age_s": 60},
    # A queue with a limit of 5 s (torch.utils.data, MP_STATUS_CHECK_INTERVAL), the watchdog.
    "polls": {"switches": 24, "cpu_s": 0.3, "main_cpu_s": 0.01, "log_age_s": 60},
    # A file baton: every 0.1 s (torch.utils.file_baton).
    "baton": {"switches": 600, "cpu_s": 0.3, "main_cpu_s": 0.05, "log_age_s": 60},
    # NCCL, MPI and CUDA poll.
    "spins": {"cpu_s": 60, "main_cpu_s": 60, "log_age_s": 60, "may_poll": 1},
    # A loop of small matrices: no page fault, no switch. Nothing in it polls.
    "computes": {"cpu_s": 60, "main_cpu_s": 60, "log_age_s": 60},
}
NOTHING = RANKS["nothing"]


def step(row: str | dict[str, Any]) -> dict[str, float]:
    if isinstance(row, str):
        return RANKS[row]
    own = dict(row)
    return {**RANKS.get(own.pop("like", ""), {}), **own}


@pytest.mark.parametrize("case", cases(__file__, "watch.json"))
def test_what_a_minute_tells(case):
    snapshots = pair(
        *map(step, case["ranks"]), nodes=case.get("nodes", 1), ports=case.get("ports")
    )
    assert interval(*snapshots).kind == case["kind"]


def test_where_witnesses_are_few_nobody_says_that_it_hangs():
    """A single witness convicts nobody: here no log and no bytes are known, and a rank polls."""
    snapshots = pair({**NOTHING, "switches": 6000, "cpu_s": 0.6})
    assert interval(*snapshots).kind == "still"
    blind = {"moved_bytes": None, "log_bytes": None, "log_age_s": None}
    before, after = (
        JobSnapshot(
            snapshot.taken_s, {key: replace(rank, **blind) for key, rank in snapshot.ranks.items()}
        )
        for snapshot in snapshots
    )
    assert interval(before, after).kind == "unclear"
    # Ranks that were started again move.
    fresh = {RankKey(key.node, key.pid + 7, 99.0): rank for key, rank in before.ranks.items()}
    minute = interval(before, JobSnapshot(MINUTE, fresh))
    assert (minute.kind, minute.signs[0].text) == ("moves", "processes of 1 rank came or went")


def test_with_progress_its_lines_alone_count():
    """No heartbeat, CPU time or byte is progress; before its first line all witnesses count."""
    busy = {"cpu_s": 60, "main_cpu_s": 30, "switches": 600, "moved_bytes": 6e6, "log_bytes": 99}
    ends = [(None, None, "moves"), (None, 700, "moves"), (700, 700, "still"), (700, 900, "moves")]
    for old, new, kind in [*ends, (700, None, "still"), (700, 90, "moves")]:
        snapshots = [
            replace(snapshot, asks_progress=True, ranks={
                key: replace(rank, progress=end if rank.rank else None)
                for key, rank in snapshot.ranks.items()
            })
            for snapshot, end in zip(pair(NOTHING, busy), (old, new), strict=True)
        ]  # fmt: skip
        assert interval(*snapshots).kind == kind


def test_every_sign_says_what_was_seen_and_of_whom():
    before, after = pair(NOTHING, {"cpu_s": 30, "faults": 900, "moved_bytes": 6e6, "log_bytes": 9})
    texts = {sign.witness: sign.text for sign in signs(before, after, MINUTE)}
    assert texts == {
        "cpu": "rank 1 takes 50 % of a core",
        "switches": "the main threads only wait",
        "bytes": "rank 1 reads and writes 98 KiB a second",
        "log": "the log of rank 1 grows",
        "ports": "the job is on one node",
    }


@with_table("witness, rate, moves")
def test_the_limits_of_a_sign(witness, rate, moves):
    changes = {"bytes": {"moved_bytes": 60 * rate}, "switches": {"switches": 60 * rate}}
    step = {**NOTHING, **changes.get(witness, {})}
    snapshots = pair(step, NOTHING, nodes=2, ports=rate if witness == "ports" else 0)
    (sign,) = [sign for sign in signs(*snapshots, MINUTE) if sign.witness == witness]
    assert sign.moves is moves


STILL = Interval(MINUTE, 2, (Sign("cpu", False, ""), Sign("log", False, "")))
MOVES = Interval(MINUTE, 2, (Sign("cpu", True, ""), Sign("log", False, "")))
UNCLEAR = Interval(MINUTE, 2, (Sign("cpu", None, ""), Sign("log", False, "")))
GONE = Interval(MINUTE, 0, (), gone=True)

#: The intervals so far, whether the next hang is a new one -> kind, seconds, fire, armed.
JUDGED = {
    "nothing is known yet": ([], True, ("new", 0, False, True)),
    "it moves": ([MOVES], True, ("moves", 0, False, True)),
    "a minute": ([MOVES, STILL], True, ("still", 60, False, True)),
    "two": ([STILL] * 2, True, ("still", 120, False, True)),
    "three are enough": ([MOVES, *[STILL] * 3], True, ("still", 180, True, False)),
    "once only": ([STILL] * 4, False, ("still", 240, False, False)),
    "it has moved between": ([STILL, STILL, MOVES, STILL], True, ("still", 60, False, True)),
    "a doubt between": ([STILL, STILL, UNCLEAR, STILL], True, ("still", 60, False, True)),
    "a doubt at last": ([*[STILL] * 5, UNCLEAR], True, ("unclear", 0, False, True)),
    "it moves again, and is armed again": ([MOVES], False, ("moves", 0, False, True)),
    "no rank in one snapshot": ([STILL, GONE], True, ("unclear", 0, False, True)),
    "none in two": ([MOVES, GONE, GONE], True, ("gone", 0, False, True)),
}


@pytest.mark.parametrize(("intervals", "armed", "wanted"), JUDGED.values(), ids=JUDGED)
def test_when_an_incident_is_taken(intervals, armed, wanted):
    judgement = judge(intervals, 180, armed)
    assert (judgement.kind, judgement.still_s, judgement.fire, judgement.armed) == wanted


def minutes(*steps: dict[str, float]) -> list[JobSnapshot]:
    """Snapshots a minute apart, of two ranks that both do this."""
    sequence = [pair(NOTHING, NOTHING)[0]]
    for number, step in enumerate(steps, 1):
        ranks = {key: later(rank, **step) for key, rank in sequence[-1].ranks.items()}
        sequence.append(JobSnapshot(number * MINUTE, ranks))
    return sequence


def watched(sequence: list[JobSnapshot]) -> tuple[list[str], list[int], Watch]:
    """The words after each snapshot, and the numbers of those that fire."""
    watch = Watch(180)
    rows = [(watch.add(snapshot).fire, watch.text) for snapshot in sequence]
    # What is kept of a long watch is bounded.
    assert len(watch.intervals) < 10
    return [words for _, words in rows], [n for n, (fires, _) in enumerate(rows) if fires], watch


def test_a_hang_fires_once_and_a_second_one_again():
    works = {"cpu_s": 50, "faults": 900, "switches": 5000}
    sequence = [works, *[NOTHING] * 6, works, *[NOTHING] * 4]
    words, fired, _ = watched(minutes(*sequence))
    assert fired == [4, 11]
    assert words[0] == "2 ranks on gpu0"
    assert words[1].startswith("moves: 2 ranks on gpu0: rank 0 takes 83 % of a core")
    assert words[2] == (
        "does not move: 2 ranks on gpu0: no CPU time; the main threads only wait; "
        "the ranks read and write nothing; no log grows"
    )


@pytest.mark.parametrize(("timeout_s", "confirm_s"), [(None, 180), (600, 180), (100, 60), (1, 15)])
def test_a_hang_is_one_before_the_jobs_own_timeout(timeout_s, confirm_s):
    before, _ = pair(NOTHING)
    ranks = {key: replace(rank, timeout_s=timeout_s) for key, rank in before.ranks.items()}
    watch = Watch(180)
    watch.add(replace(before, ranks=ranks))
    assert watch.confirm_s == confirm_s


def test_a_node_that_is_lost_does_not_hide_that_the_others_wait():
    trouble = {"gaps": {"gpu7": Gap(UNREACHABLE, "no answer")}}
    lost = [replace(snapshot, **trouble) for snapshot in minutes(*[NOTHING] * 4)]
    words, fired, _ = watched(lost)
    assert fired == [3]
    assert words[-1].endswith("; no answer of gpu7")


def test_a_node_without_an_answer_is_not_the_end_of_the_job():
    first, *_ = minutes(NOTHING)
    silent = [JobSnapshot(MINUTE * n, gaps={"gpu0": Gap(LOST, "no answer")}) for n in (1, 2, 3)]
    _, fired, watch = watched([first, *silent])
    assert (watch.judgement.kind, fired) == ("unclear", [])
    _, _, watch = watched([first, JobSnapshot(MINUTE), JobSnapshot(2 * MINUTE)])
    text = "the job has ended (if it died: nodeready postmortem)"
    assert (watch.judgement.kind, watch.text) == ("gone", text)


CONFIG = motion.MotionConfig("", "nodeready:test", 20, "4711")


def answering(*rows: object, text: str = ""):
    """Asks, which answers every node with these rows."""

    def answer(request):
        nonce = request.script.partition("nodeready-")[2][:16]
        lines = (wire.line(f"nodeready-{nonce}", kind, row) + "\n" for kind, row in rows)
        return Answer(stdout=text or "".join(lines))

    def ask(what, asked):
        assert what == "watch"
        return {name: answer(request) for name, request in asked.items()}

    return ask


def test_a_snapshot_has_every_rank_of_every_node():
    ask = answering(("motion", REST), ("ports", PortBytes(7, None)), ("found", MotionEnd(1)))
    snapshot = probe(ask, ["gpu0", "gpu1"], CONFIG, 3.0)
    assert snapshot.ranks == {RankKey("gpu0", 100, 5.0): REST, RankKey("gpu1", 100, 5.0): REST}
    assert snapshot.ports == {"gpu0": PortBytes(7, None), "gpu1": PortBytes(7, None)}
    assert (snapshot.taken_s, snapshot.gaps) == (3.0, {})


AWAY = {"gpu0": Answer(gap=Gap(UNREACHABLE, "connection refused"))}


@pytest.mark.parametrize(("rows", "users", "own"), [
    ([(1, False)], [1], 1),
    ([(1, False), (2, False)], [1, 2], 1),
    # Slurm's cgroup tells whose it is, and what that user has outside of it counts.
    ([(2, False), (1, True), (1, False)], [1], 2),
    ([], [], 0),
])  # fmt: skip
def test_a_job_has_one_user(rows, users, own):
    ranks = {
        RankKey("gpu0", number, 5.0): replace(REST, uid=uid, in_cgroup=in_cgroup)
        for number, (uid, in_cgroup) in enumerate(rows)
    }
    snapshot = JobSnapshot(0.0, ranks)
    assert (snapshot.users, len(snapshot.of_user(1).ranks)) == (users, own)


@pytest.mark.parametrize(("ask", "kind"), [
    (answering(("motion", REST)), INVALID),  # It is cut off.
    (answering(text="Welcome!\n"), INVALID),
    (answering(("motion", replace(REST, cpu_s="much")), ("found", MotionEnd(1))), INVALID),
    (lambda what, asked: AWAY, UNREACHABLE),
])  # fmt: skip
def test_what_makes_no_sense_costs_its_node_alone(ask, kind):
    snapshot = probe(ask, ["gpu0"], CONFIG, 0)
    assert {node: gap.kind for node, gap in snapshot.gaps.items()} == {"gpu0": kind}

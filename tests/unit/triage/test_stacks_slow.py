"""`stacks --slow`: the rank that its peers wait for, and no rank of an even job.

slow.json has the rows. waits: rank -> the part of the time in which it waits, by block; `*` are
all other ranks. Four ranks are on a node.
"""

import random

import pytest

from nodeready.agent.stacks.glances import NodeGlances, RankGlances
from nodeready.runs.stacks import group as grouping
from nodeready.runs.stacks import slow
from nodeready.runs.stacks.document import Statement, Witness
from nodeready.runs.stacks.evidence import WitnessReport
from tests.builders.traces import LOAD, REDUCE, process, trace
from tests.cases import cases

_RANK = {
    "seconds": 60.0, "places": "", "stack_places": (), "ends": (), "phrases": (),
    "sent": (0, 1000), "unsent": "", "cpu_s": 1.0, "queued_s": 0.0, "throttled_s": 0.0,
    "faults": 0,
}  # fmt: skip
_NODE = {
    "seconds": 60.0, "steal": 0.0, "frequency": 0.0, "memory_stall": 0.0,
    "retransmits": 0.0, "stranger": "", "stranger_cpus": 0.0,
}  # fmt: skip


def blocks(value):
    return tuple(map(float, value.split())) if isinstance(value, str) else (float(value),) * 12


def pace(rank, waits, steps=40, counters=(), **more):
    glances = RankGlances(**{**_RANK, **dict(counters)})
    row = {"role": "train.py", "looks": 15, "waiting_looks": 5, "glances": glances, **more}
    for name in ("work", "calls"):
        row[name] = tuple(map(tuple, row.get(name, ())))
    return slow.Pace(rank, f"gpu{rank // 4}", waits=blocks(waits), steps=steps, **row)


def of(table, rank, missing=None):
    return table.get(str(rank), table.get("*", missing))


@pytest.mark.parametrize("case", cases(__file__, "slow.json"))
def test_a_lasting_straggler_is_named_with_its_cause_and_no_other_rank(case):
    paces = []
    for rank in range(case.get("world", 8)):
        counters = {**of(case.get("counters", {}), rank, {})}
        counters["unsent"] = of(case.get("unsent", {}), rank, "")
        more = {**case.get("all", {}), **case.get("own", {}).get(str(rank), {})}
        steps = case.get("steps", 40)
        paces.append(pace(rank, of(case["waits"], rank), steps, counters, **more))
    says = case.get("says")
    statement = says and Statement(says[1], tuple(says[2]), tuple(says[3]), 1)
    report = WitnessReport((Witness(says[0], (), (statement,)),) if says else ())
    nodes = {
        name: NodeGlances(**{**_NODE, **case.get("nodes", {}).get(name, {})})
        for name in ("gpu0", "gpu1")
    }
    verdict = slow.judge(paces, nodes, report)
    words = " ".join((verdict.text, *(text for row in verdict.suspects for text in row.for_)))
    named = [rank for suspect in verdict.suspects for rank in suspect.ranks]
    assert (verdict.kind, named) == (case["kind"], case.get("ranks", [])), words
    assert case.get("text", "") in verdict.text
    assert case.get("missing", "") in " ".join(verdict.missing)
    assert "never" not in case or case["never"] not in words


def drawn_job(draw, factor=1.0):
    """The ranks of a job with steps of random lengths, of which rank 1 takes longer."""
    world, step_s, jitter = draw.choice((2, 4, 8)), draw.choice((0.1, 0.5, 1)), draw.random() / 5
    times = sorted(draw.uniform(0, 60) for _ in range(600))
    marks, now = [[] for _ in range(world)], 0.0
    while len(marks[0]) < len(times):
        works = [step_s * draw.lognormvariate(0, jitter) for _ in range(world)]
        works[1] *= factor
        end = now + max(works) + 0.1 * step_s
        for moment in [moment for moment in times if now <= moment < end]:
            for work, row in zip(works, marks, strict=True):
                row.append(float(moment >= now + work))
        now = end
    return [
        pace(rank, " ".join(f"{sum(row[at : at + 50]) / 50}" for at in range(0, 600, 50)))
        for rank, row in enumerate(marks)
    ]


def test_of_drawn_jobs_the_slow_rank_is_named_and_no_other():
    draw = random.Random(7)
    nodes = {"gpu0": NodeGlances(**_NODE), "gpu1": NodeGlances(**_NODE)}
    named = []
    for factor in (1.0, 1.25, 1.5, 3.0) * 25:
        verdict = slow.judge(drawn_job(draw, factor), nodes, WitnessReport())
        ranks = [rank for suspect in verdict.suspects for rank in suspect.ranks]
        assert ranks in ([], [1] if factor > 1 else []), (factor, verdict.text)
        named += [bool(ranks)] * (factor > 1)
    assert sum(named) >= 0.95 * len(named)


PHRASES = (("%", "futex"), ("&", "poll of a pipe"))


def glanced(rank, places, *stacks, ends=(("&", ""),), phrases=PHRASES, at=None, **more):
    """A rank with these glances. at: its places at the stacks"""
    glances = {**_RANK, "places": places, "stack_places": list(at or ["%", "&"]),
               "ends": list(ends), "phrases": list(phrases)}  # fmt: skip
    witnesses = {"glances": glances}
    return process(rank, *stacks, witnesses=witnesses, world_size=3, **more)


def grouped(*ranks):
    return grouping.group([trace("gpu0", *ranks, witnesses={"glances": _NODE})], {})


def test_a_glance_means_what_a_stack_at_that_place_has_shown():
    waiting = "%%%%&" * 60
    ranks = [glanced(rank, waiting, REDUCE, LOAD) for rank in (0, 1)]
    made = grouped(*ranks, glanced(2, "&&&&%" * 60, REDUCE, LOAD))
    assert [row.waits_percent for row in made.paces] == [80.0, 80.0, 20.0]
    assert (made.verdict.kind, made.verdict.suspects[0].ranks) == ("straggler", (2,))
    assert "waits for its data loader at step train.py:40, in poll of a pipe" in made.verdict.text
    assert made.groups[0].role == "suspect"
    assert not made.advice


def test_a_connection_to_a_rank_is_a_wait_whatever_the_stack_is():
    own = "<module> train.py 9 > receive train.py 4"
    ends = [("%", "pid 1002")]
    made = grouped(
        *(glanced(rank, "%%%%&" * 60, own, own, ends=ends) for rank in (0, 1)),
        glanced(2, "&&&&%" * 60, own, own, ends=[("%", "pid 1000"), ("&", "pid 5")]),
    )
    assert [row.waits_percent for row in made.paces] == [80.0, 80.0, 20.0]
    assert made.verdict.kind == "straggler"


def test_without_glances_the_stacks_are_counted():
    at = [""] * 20
    fast, late = [REDUCE, LOAD] * 10, [LOAD] * 20
    made = grouped(
        *(glanced(rank, "!" * 300, *fast, at=at) for rank in (0, 1)),
        glanced(2, "!" * 300, *late, at=at),
    )
    assert [row.waits_percent for row in made.paces] == [50.0, 50.0, 0.0]


def test_invalid_glances_are_none():
    row = process(0, REDUCE, REDUCE, witnesses={"glances": {"places": 7}})
    assert grouped(row).paces == ()

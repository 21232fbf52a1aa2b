"""Real hangs of torch.distributed: the rank that all wait for is the first group, exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import Tool
from tests.hang.job import RANKS, Job

Seen = dict[str, Any]


@pytest.fixture
def look(job: Job, tool: Tool, fleet: Callable[..., Path]) -> Callable[..., Seen]:
    """`nodeready stacks` over the job's nodes: its document, after nobody was touched."""

    def run(*options: str, status: int = 0) -> Seen:
        before = job.held()
        done = tool("stacks", fleet(job.nodes), "--format", "json", *options)
        assert done.status == status, done
        assert job.held() == before
        seen: Seen = json.loads(done.out)
        assert seen["world_size"] == len(RANKS)
        return seen

    return run


def groups(seen: Seen) -> list[tuple[str, str | None, list[int]]]:
    return [(one["kind"], one["verdict"], one["ranks"]) for one in seen["groups"]]


def leaf(group: Seen) -> str:
    function: str = group["frames"][-1]["function"]
    return function


def others(*culprits: int) -> list[int]:
    return [rank for rank in RANKS if rank not in culprits]


@pytest.mark.parametrize(
    ("kind", "verdicts", "function"),
    [
        ("checkpoint", ("blocked",), "save_checkpoint"),
        # It looks every 5 s whether its workers are alive (MP_STATUS_CHECK_INTERVAL), which may
        # be between the samples.
        ("loader", ("blocked", "unsure"), "_MultiProcessingDataLoaderIter._next_data"),
        ("spin", ("spinning",), "tokenize"),
    ],
)
def test_one_rank_is_elsewhere(
    job: Job, look: Callable[..., Seen], kind: str, verdicts: tuple[str, ...], function: str
) -> None:
    with job.fault(5, kind):
        seen = look()
        first, second = groups(seen)
        assert first in [("stack", verdict, [5]) for verdict in verdicts]
        assert second == ("stack", "blocked", others(5))
        culprit, rest = seen["groups"]
        assert function in [frame["function"] for frame in culprit["frames"]]
        assert ("data loader" in culprit["hint"]) == (kind == "loader")
        assert (leaf(rest), culprit["nodes"]) == ("all_reduce", [job.node(5).name])
        pids = {one["rank"]: one["pid"] for one in seen["processes"]}
        assert pids == {rank: stand.pid for rank, stand in job.stands().items()}
    assert not job.left()


def test_native_frames_in_the_table_pause_nobody_for_long(
    job: Job, tool: Tool, fleet: Callable[..., Path]
) -> None:
    with job.fault(5, "checkpoint"):
        done = tool("stacks", fleet(job.nodes), "--native")
        assert done.status == 0, done
        assert not job.held()
        first, rest = done.out.split("\nblocked ")[1:]
        assert first.split()[:4] == ["suspect", "rank", "5", job.node(5).name]
        assert "save_checkpoint" in first
        assert rest.split()[:3] == ["victim", "ranks", "0-4,6-7"]
        assert "c10d::Work::wait" in rest
    assert not job.left()


def test_one_rank_waits_for_storage_that_is_lost(job: Job, look: Callable[..., Seen]) -> None:
    with job.storage_lost(4):
        seen = look()
        assert groups(seen) == [("uninterruptible", None, [4]), ("stack", "blocked", others(4))]
    assert not job.left()


def test_one_rank_is_stopped(job: Job, look: Callable[..., Seen]) -> None:
    with job.stopped(2):
        seen = look(status=3)
        assert groups(seen) == [("stopped", None, [2]), ("stack", "blocked", others(2))]
    assert not job.left()


def test_a_node_is_cut_off(job: Job, look: Callable[..., Seen]) -> None:
    with job.cut_off(job.nodes[3]):
        seen = look(status=4)
        *lost, rest = seen["groups"]
        assert {one["kind"] for one in lost} == {"missing", "no-data"}
        assert [one["ranks"] for one in lost if one["kind"] == "missing"] == [[6, 7]]
        assert [one["nodes"] for one in lost if one["kind"] == "no-data"] == [[job.nodes[3].name]]
        assert (rest["verdict"], rest["ranks"], leaf(rest)) == (
            "blocked",
            others(6, 7),
            "all_reduce",
        )
    assert not job.left()


def test_the_training_ends_unharmed_and_then_a_rank_dies(
    job: Job, look: Callable[..., Seen]
) -> None:
    """torchrun ends the other rank of that node; the other nodes hear of nothing."""
    job.end(die=7)
    steps, total = set(job.done().values()).pop()
    assert total == steps * (steps - 1) / 2, "a step was lost or done twice"
    assert job.done() == dict.fromkeys(RANKS, (steps, total))
    seen = look(status=3)
    assert groups(seen) == [("missing", None, [6, 7]), ("stack", "blocked", others(6, 7))]
    rest = seen["groups"][1]
    assert "new_group" in [frame["function"] for frame in rest["frames"]]
    assert not job.left()

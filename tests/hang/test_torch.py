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
        words = ("--format", "json", "--interval", "2", *options)
        done = tool("stacks", fleet(job.nodes), *words)
        assert done.status == status, done
        assert job.held() == before
        seen: Seen = json.loads(done.out)
        assert seen["world_size"] == len(RANKS)
        return seen

    return run


def groups(seen: Seen) -> list[tuple[str, str | None, list[int]]]:
    return [(group["kind"], group["verdict"], group["ranks"]) for group in seen["groups"]]


def others(*culprits: int) -> list[int]:
    return [rank for rank in RANKS if rank not in culprits]


def test_one_rank_is_elsewhere_and_native_frames_pause_nobody_for_long(job, look, tool, fleet):
    with job.fault(5, "checkpoint"):
        seen = look()
        assert groups(seen) == [("stack", "blocked", [5]), ("stack", "blocked", others(5))]
        culprit, rest = seen["groups"]
        assert "save_checkpoint" in [frame["function"] for frame in culprit["frames"]]
        assert rest["frames"][-1]["function"] == "all_reduce"
        assert culprit["nodes"] == [job.node(5).name]
        pids = {process["rank"]: process["pid"] for process in seen["processes"]}
        assert pids == {rank: stand.pid for rank, stand in job.stands().items()}
        done = tool("stacks", fleet(job.nodes), "--native")
        assert done.status == 0, done
        assert not job.held()
        first, second = done.out.split("\nblocked ")[1:]
        assert first.split()[:4] == ["suspect", "rank", "5", job.node(5).name]
        assert "save_checkpoint" in first
        assert second.split()[:3] == ["victim", "ranks", "0-4,6-7"]
        assert "c10d::Work::wait" in second
    assert not job.left()


def test_a_node_is_cut_off(job, look):
    with job.cut_off(job.nodes[3]):
        seen = look(status=4)
        *lost, rest = seen["groups"]
        named = {group["kind"]: group for group in lost}
        assert {*named} == {"missing", "no-data"}
        assert named["missing"]["ranks"] == [6, 7]
        assert named["no-data"]["nodes"] == [job.nodes[3].name]
        assert (rest["verdict"], rest["ranks"]) == ("blocked", others(6, 7))
        assert rest["frames"][-1]["function"] == "all_reduce"
    assert not job.left()


def test_the_training_ends_unharmed_and_then_a_rank_dies(job, look):
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

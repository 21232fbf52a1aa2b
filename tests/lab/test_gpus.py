"""Nodes with NVIDIA's GPUs: a healthy one is ready, and each source can fail by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nodeready.lab import Node
from nodeready.lab.nvidia import BEFORE, HOME
from nodeready.policy import Policy
from nodeready.subjects.snapshot import judge
from tests.helpers import observe, on

POLICY = Policy(gpu_count=8, gpu_mig="off", gpu_idle=True)


def bad(node: Node) -> dict[str, str]:
    """The findings of a look at the node's GPUs."""
    seen = observe(on(node), POLICY, ("gpus",))
    results = judge(seen, POLICY)
    return {result.check: result.actual for result in results if result.bad}


@pytest.mark.parametrize("profile", ["h100", "a100"])
def test_a_healthy_node(fresh_nodes: Callable[..., list[Node]], profile: str) -> None:
    (node,) = fresh_nodes(1, profile=profile)
    assert bad(node) == {}


def test_a_node_without_gpus(fresh_node: Node) -> None:
    seen = observe(on(fresh_node), Policy(), ("gpus",))
    assert {result.status for result in judge(seen, Policy())} == {"na"}


def test_a_tool_that_fails(fresh_nodes: Callable[..., list[Node]]) -> None:
    (node,) = fresh_nodes(1, {f"{HOME}/before": BEFORE["fails"]}, "h100")
    found = bad(node)
    words = "Failed to initialize NVML: Driver/library version mismatch"
    assert found["gpus.tool"] == f"nvidia-smi failed: {words}"
    assert "gpus.driver" not in found


def test_links_that_hang_cost_only_themselves(fresh_nodes: Callable[..., list[Node]]) -> None:
    only_links = 'if [ "$1" = nvlink ]; then'
    hang = f"{only_links}\n{BEFORE['hangs']}fi\n"
    (node,) = fresh_nodes(1, {f"{HOME}/before": hang}, "h100")
    assert bad(node) == {"gpus.nvlink": "nvidia-smi nvlink timed out: after 20 s"}


def test_the_fabric_manager_that_died(fresh_nodes: Callable[..., list[Node]]) -> None:
    (node,) = fresh_nodes(1, profile="h100")
    node.run("kill $(pidof -x nv-fabricmanager || pgrep -x nv-fabricmanage)")
    assert set(bad(node)) == {"gpus.fabric_manager"}

"""Nodes with GPUs: a source that hangs costs only itself."""

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
    """What the checks of the node's GPUs complain of."""
    results = judge(observe(on(node), POLICY, ("gpus",)), POLICY)
    return {result.check: result.actual for result in results if result.bad}


@pytest.mark.nightly
def test_links_that_hang_cost_only_themselves(fresh_nodes: Callable[..., list[Node]]) -> None:
    hang = f'if [ "$1" = nvlink ]; then\n{BEFORE["hangs"]}fi\n'
    (node,) = fresh_nodes(1, {f"{HOME}/before": hang}, "h100")
    assert bad(node) == {"gpus.nvlink": "nvidia-smi nvlink timed out: after 20 s"}

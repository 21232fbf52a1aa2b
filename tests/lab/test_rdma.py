"""The RDMA devices of real nodes, seen by the whole look, and what changes between two looks."""

from __future__ import annotations

import time

from nodeready.lab import Node
from nodeready.policy import Policy
from nodeready.subjects.context import counted, with_counters
from nodeready.subjects.snapshot import Snapshot, judge
from tests.helpers import observe, on

POLICY = Policy()


def look(node: Node) -> Snapshot:
    return observe(on(node), POLICY, ("rdma", "host"))


def bad(snapshot: Snapshot) -> dict[str, str]:
    """Check -> status of what is neither ok nor na."""
    results = judge(snapshot, POLICY, ("rdma",))
    return {r.check: r.status for r in results if r.status not in ("ok", "na")}


def test_a_gpu_node_has_eight_ports_that_are_well(fresh_nodes):
    """tests/lab/faults has what can be wrong with them."""
    (node,) = fresh_nodes(1, profile="h100")
    seen = look(node)
    assert bad(seen) == {}
    assert seen["rdma"].without == ()
    assert seen["rdma"].nccl_ib_hca == tuple(f"mlx5_{index}" for index in range(8))


def test_a_link_that_went_down_between_two_looks(fresh_nodes):
    (node,) = fresh_nodes(1, profile="a100")
    first = look(node)
    kept = counted(first, time.time() - 60)
    assert kept is not None
    same = with_counters(look(node), kept, time.time())
    assert bad(same) == {}
    assert {r.status for r in judge(same, POLICY) if r.check == "rdma.errors"} == {"ok"}
    node.run("echo 2 >/sys/class/infiniband/mlx5_5/ports/1/counters/link_downed", check=True)
    later = with_counters(look(node), kept, time.time())
    (result,) = [r for r in judge(later, POLICY) if r.check == "rdma.errors"]
    assert "mlx5_5/1 link_downed +2" in result.actual
    node.reboot()
    rebooted = with_counters(look(node), kept, time.time())
    assert rebooted["rdma"].before is None
    assert rebooted["rdma"].devices

"""What a node's hardware tells beside the stacks, on nodes with GPUs, ports and a kernel's log."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nodeready.lab import Node
from tests.command import ours
from tests.lab.stacks_job import Job

QUICK = ("--interval", "0.5")


@pytest.fixture
def seen(tool, fleet, tmp_path):
    """Asks a node, and returns what its witnesses say, by the trace that is kept."""

    def ask(node: Node, *words: str) -> dict[str, Any]:
        kept = tmp_path / "kept"
        done = tool("stacks", fleet([node]), *QUICK, *words, "-o", kept)
        assert (kept / f"trace-{node.name}.json").exists(), done
        found: dict[str, Any] = json.loads((kept / f"trace-{node.name}.json").read_text())
        assert ours(node) == []
        return found["witnesses"]

    return ask


def test_a_node_with_gpus_and_infiniband(fresh_nodes, seen):
    (node,) = fresh_nodes(1, profile="h100")
    Job([node])
    xid = "NVRM: Xid (PCI:0000:1b:00): 79, pid=4711, name=python, GPU has fallen off the bus."
    old = "Out of memory: Killed process 12 (python) total-vm:1kB"
    script = (
        "read -r up rest </proc/uptime;"
        f'printf "[%s] %s\\n" "$up" "{xid}" >>/.lab/kernel.log;'
        f'sed -i "1a [    1.000000] {old}" /.lab/kernel.log'
    )
    node.run(script)
    found = seen(node)
    gpus = found["gpus"]
    assert gpus["absent"] == ""
    assert len(gpus["devices"]) == 8
    assert {one["name"] for one in gpus["devices"]} == {"NVIDIA H100 80GB HBM3"}
    assert gpus["devices"][0]["xids"] == [79], gpus["devices"][0]
    assert [one["xids"] for one in gpus["devices"][1:]] == [[]] * 7
    assert [(one["kind"], one["pid"]) for one in found["kernel"]["messages"]] == [("xid", 4711)]
    ports = {one["name"]: one for one in found["network"]["ports"]}
    assert ports["mlx5_0/1"]["state"] == "up"
    assert ports["mlx5_0/1"]["kind"] == "infiniband"
    assert found["nccl_ras"]["absent"]


def test_a_check_of_a_job_on_nodes(fresh_nodes, fleet, tool):
    nodes = fresh_nodes(2)
    Job(nodes)
    done = tool("stacks", fleet(nodes), "--check", "--format", "json")
    found = {one["item"]: one for one in json.loads(done.out)["findings"]}
    assert found["stack"]["result"] == "ok", done
    assert found["stack"]["ranks"] == [0, 1, 2, 3]
    assert found["recorder"]["found"] == "no PyTorch is loaded"
    assert found["log"]["result"] == "fail"
    assert done.status == 3
    assert all(ours(node) == [] for node in nodes)

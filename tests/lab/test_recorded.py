"""A fleet that answers by itself: what `record` left on nodes, read without asking them."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeready.lab import LabNode
from nodeready.subjects.gate import facts as gate
from tests.command import POLICY, wait_for
from tests.conftest import _lab_name, started_lab
from tests.helpers import nodeready, project

pytestmark = pytest.mark.xdist_group("recorded")

#: What a lab's nodes can be; each is well by it once it is deployed.
SETTINGS = {**POLICY, "clock": "any", "gate": True, "gate_directory": "/srv/nodeready"}


@pytest.fixture(scope="module")
def nodes(lab_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LabNode]]:
    path = tmp_path_factory.mktemp("inventory") / "inventory.py"
    with started_lab(_lab_name("recorded"), 3) as lab:
        path.write_text(f"lab = ({lab.inventory_data()!r}, {SETTINGS!r})\n")
        for node in lab.nodes:
            node.run("mkdir -p /srv/nodeready /var/lib/prometheus/node-exporter")
        deployed = nodeready("deploy", path, "--yes")
        assert deployed.returncode in (0, 3), deployed
        yield lab.nodes


@pytest.fixture
def gated(
    nodes: list[LabNode], inventory: Callable[..., Path]
) -> Iterator[tuple[list[LabNode], Path]]:
    """The nodes, which are as the policy wants them, and the inventory with their addresses."""
    yield nodes, inventory(nodes, **SETTINGS)
    nodes[1].run("sysctl -qw kernel.yama.ptrace_scope=0")


def judge(node: LabNode) -> str:
    """Have the node's timer do its work; what `record` says."""
    return node.run(f"env -i {gate.RECORD}").stdout.strip()


def audit(tool: Any, where: Path, place: object, **how: Any) -> tuple[Any, dict[str, Any]]:
    """(how the command ended, node -> its row)"""
    done = tool("audit", where, "--recorded", place, "--format", "json", **how)
    shown = done.document
    return done, {node["name"]: node for node in shown["nodes"]}


def found(row: dict[str, Any]) -> dict[str, str]:
    """Check -> status, of what is not well."""
    rows = {one["check"]: one["status"] for one in row["results"]}
    return {check: status for check, status in rows.items() if status not in ("ok", "na")}


def same(recorded: dict[str, Any], asked: dict[str, Any]) -> None:
    """What a verdict says is what the node itself answers, but for its gate."""
    told = {one["check"]: one for one in recorded["results"]}
    for one in asked["results"]:
        if one["status"] not in ("ok", "na") and not one["check"].startswith("gate."):
            for key in ("status", "expected", "actual", "source", "fix", "owner"):
                assert told[one["check"]][key] == one[key], (one, told[one["check"]])


def test_a_directory_tells_what_the_nodes_would_and_how_old_that_is(gated, tool, tmp_path):
    nodes, where = gated
    first, second, third = nodes
    place = tmp_path / "shared"
    place.mkdir()
    second.run("sysctl -w kernel.yama.ptrace_scope=1")
    for node in nodes:
        assert judge(node).startswith("nodeready: ")
        mode, owner = node.run("stat -c '%a %u' /srv/nodeready/*.json").stdout.split()
        assert (mode, owner) == ("644", "0")
    for node in (first, second):
        text = node.read(f"/srv/nodeready/{node.name}.json")
        assert text == node.read(gate.VERDICT)
        (place / f"{node.name}.json").write_text(text)
    done, rows = audit(tool, where, place)
    asked = tool("audit", where, "--format", "json").document
    for node, row in zip(asked["nodes"][:2], list(rows.values())[:2], strict=True):
        same(row, node)
    assert done.status == 3, done
    assert "gate.policy" not in found(rows[first.name])
    assert found(rows[second.name])["ptrace.scope"] == "fail"
    assert found(rows[third.name]) == {"gate.verdict": "unknown"}
    assert all(0 <= rows[one.name]["age_seconds"] < 600 for one in (first, second))
    # What is stale, another user's or of another policy, tests/unit asks.
    shown = tool("audit", where, "--recorded", place)
    assert "1 without a verdict" in shown.out, shown


@pytest.mark.nightly
def test_a_file_server_that_is_gone_costs_the_directory_alone(gated, tool):
    """A mount whose server never answers: whoever asks it is in state D, and no signal ends it."""
    node = gated[0][0]
    judge(node)
    before = json.loads(node.read(gate.VERDICT))["time"]
    words = ("nodeready.lab.culprits", node.pid, "dead_mount", "/srv/nodeready")
    culprit = int(project(sys.executable, "-m", *words).stdout)
    try:
        # As cron starts it, with the lock that keeps a second one away.
        locked = f"flock -n /run/nodeready.record sh -c 'exec env -i {gate.RECORD} 2>&1'"
        for said in ("/srv/nodeready: no answer within 10 s", "an earlier write still waits"):
            done = node.run(locked, check=False)
            assert done.returncode == 1
            assert said in done.stdout, done
        assert json.loads(node.read(gate.VERDICT))["time"] > before
        look = "grep -ls '(python[0-9.]*) D ' /proc/[0-9]*/stat"
        assert len(node.run(look, check=False).stdout.split()) == 1
    finally:
        os.kill(culprit, signal.SIGKILL)
    again = f"umount -l /srv/nodeready; env -i {gate.RECORD} 2>&1"
    wait_for(lambda: "answer" not in node.run(again, check=False).stdout)

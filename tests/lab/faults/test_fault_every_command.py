"""A node whose disk is full, or that stalls, in the commands that ask about a job."""

import time

import pytest

from tests.cases import read_data
from tests.command import ours
from tests.lab.stacks_job import Job

LOG = "/var/log/job.log"
#: Every place of the node where something is written; what is there stays.
FULL = read_data(__file__, "full.sh")
#: In place of `timeout`, with which each of our commands begins: it answers, and then stalls.
STALL = "#!/bin/sh\nprintf 'welcome\\n'\nexec sleep 600\n"


@pytest.fixture
def job(fresh_nodes) -> Job:
    """Two ranks on each of two nodes."""
    nodes = fresh_nodes(2)
    for node in nodes:
        node.write(LOG, "hello\n")
    return Job(nodes)


@pytest.mark.nightly
def test_a_full_disk_costs_a_node_no_look_and_a_deploy_its_own_change(job, fleet, tool, tmp_path):
    good, full = job.nodes
    full.enter(["sh", "-c", FULL])
    where, names = fleet(job.nodes, lock_wait_s=0), {good.name, full.name}
    audit = tool("audit", where, "--only", "ptrace,limits", "--format", "json")
    statuses = [[one["status"] for one in node.values()] for node in audit.results.values()]
    assert statuses[0] == statuses[1], audit
    tail = tool("tail", where, LOG, "--format", "json")
    assert (tail.status, len(tail.document["groups"])) == (0, 1), tail
    stacks = tool("stacks", where, "--job", job.name, "--format", "json")
    groups = stacks.document["groups"]
    assert {node for group in groups for node in group["nodes"]} == names, stacks
    assert tool("cores", where).status == 0
    smoke = tool("smoke", where, "--engine", "pairs", "--user", "root")
    assert smoke.out.startswith("GO "), smoke
    tool("incident", where, "--job", job.name, "-o", tmp_path / "incident", status=0)
    ready = tool("ready", where, "--user", "root", "--format", "json")
    assert ready.results.keys() == names, ready
    deploy = tool("deploy", where, "--yes", "--only", "ptrace,limits", status=1)
    words = f"failed      {full.name}: ptrace.scope: no space left on /run/nodeready.lock"
    assert words in deploy.out
    assert f"changed     {good.name}: ptrace.scope, limits.logins\n" in deploy.out, deploy
    for node in job.nodes:
        assert ours(node) == []


def test_a_node_that_stalls_costs_an_incident_its_time_once(job, fleet, tool, tmp_path):
    slow = job.nodes[1]
    slow.write("/usr/local/bin/timeout", STALL, 0o755)
    began = time.monotonic()
    words = ("--timeout", "15", "-o", tmp_path / "incident", "--format", "json")
    done = tool("incident", fleet(job.nodes), "--job", job.name, *words)
    # Each further part would wait for the node for at least 30 s more.
    assert time.monotonic() - began < 75
    parts = {part["name"]: part for part in done.document["parts"]}
    assert done.status == 3, done
    for name in ("stacks", "cores", "audit"):
        assert parts[name]["status"] == "partial", parts[name]
        assert [gap["node"] for gap in parts[name]["gaps"]] == [slow.name], parts[name]
    assert parts["audit"]["found"].startswith("1 node probed")

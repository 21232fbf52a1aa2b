"""The gate in a real Slurm: who gets jobs, who is drained and why, and what is left alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest

from nodeready.lab import Lab, LabNode, LabUnavailable, down
from nodeready.subjects.gate import facts as probe
from tests.builders.proof import put_py_spy
from tests.command import wait_for
from tests.conftest import _lab_name
from tests.helpers import nodeready
from tests.lab.targets import WAIT, start
from tests.lab.test_gate import LOGGER, SETTINGS

DRAINS = {**SETTINGS, "gate_drain": True, "gate_budget_s": 8}
CONF = (f"Prolog={probe.PROLOG}", f"HealthCheckProgram={probe.HEALTH_CHECK}")
# One worker starts the nodes, once.
pytestmark = pytest.mark.xdist_group("gate_slurm")


@pytest.fixture(scope="module")
def cluster(lab_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A node deployed with the gate."""
    name = _lab_name("gate")
    try:
        lab = Lab.up(name, 1, slurm=True)
    except LabUnavailable as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no Slurm here: {error}")
    try:
        lab.nodes[0].write("/usr/local/sbin/logger", LOGGER, mode=0o755)
        where = tmp_path_factory.mktemp("gate") / "inventory.py"
        where.write_text(f"lab = ({lab.inventory_data()!r}, {DRAINS!r})\n")
        deployed = nodeready("deploy", where, "--yes")
        assert " 0 failed, 0 unreachable" in deployed.stdout, deployed.stdout + deployed.stderr
        lab.slurm_configure(*CONF)
        yield lab
    finally:
        down(name)


@pytest.fixture
def good(cluster: Lab) -> Iterator[LabNode]:
    """The node, and afterwards as it was."""
    (node,) = cluster.nodes
    told(node, "reset")
    yield node
    node.run("sysctl -qw kernel.yama.ptrace_scope=0; rm -f /run/logged")
    told(node, "reset")


def slurm(lab: Lab, *words: str) -> str:
    return lab.slurm_run(*words).stdout


def reason(node: LabNode) -> str:
    """Why Slurm gives this node no jobs; "" when it does."""
    state = slurm(node.lab, "sinfo", "-h", "-N", "-n", node.name, "-o", "%T|%E").strip()
    what, _, why = state.partition("|")
    return why if what.startswith(("drain", "down")) else ""


def told(node: LabNode, how: str, wanted: str = "") -> None:
    """Tell Slurm about the node, as an administrator does."""
    words = {"reset": ["State=RESUME"], "disk swap": ["State=DRAIN", "Reason=disk swap"]}[how]
    if how != "reset" or reason(node):
        slurm(node.lab, "scontrol", "update", f"NodeName={node.name}", *words)
    wait_for(lambda: reason(node) == wanted)


def healthcheck(node: LabNode) -> None:
    """What slurmd runs every HealthCheckInterval, and as it runs it."""
    node.run(f"env -i SLURMD_NODENAME={node.name} {probe.HEALTH_CHECK}")


def job(node: LabNode, command: str = "hostname") -> str:
    """Submit a job to the node; its number."""
    where = ("-w", node.name, "-o", "/tmp/job-%j.out", "-D", "/tmp")
    return slurm(node.lab, "sbatch", "--parsable", *where, "--wrap", command).strip()


def ran(node: LabNode, number: str) -> str:
    """What the job printed, once it is done."""
    job = ("scontrol", "show", "job", number)
    wait_for(lambda: "JobState=COMPLETED " in slurm(node.lab, *job))
    return node.run(f"cat /tmp/job-{number}.out").stdout


def breaks(node: LabNode, scope: int = 1) -> None:
    """Somebody changes the node by hand: attaching without sudo is over."""
    node.run(f"sysctl -qw kernel.yama.ptrace_scope={scope}")


def repaired(node: LabNode) -> None:
    breaks(node, 0)


def is_drained(node: LabNode) -> bool:
    return reason(node).startswith("nodeready: hides cause, deploy: ptrace.scope: ")


def test_a_node_that_fails_is_drained_before_the_job_lands_and_comes_back(good):
    healthcheck(good)
    assert json.loads(good.read(probe.VERDICT))["go"] is True
    assert ran(good, job(good)) == f"{good.name}\n"
    assert reason(good) == ""
    assert good.run("cat /run/logged", check=False).stdout == ""
    good.run(f"rm -f {probe.VERDICT}")
    breaks(good)
    number = job(good, "echo landed")
    wait_for(lambda: reason(good))
    assert is_drained(good)
    assert good.run(f"cat /tmp/job-{number}.out", check=False).stdout.count("landed") == 0
    line = "prolog: nodeready: no-go: hides cause, deploy: ptrace.scope"
    assert line in good.run("cat /run/logged").stdout
    slurm(good.lab, "scancel", number)
    # It stays so until it is repaired.
    healthcheck(good)
    assert is_drained(good)
    repaired(good)
    healthcheck(good)
    assert reason(good) == ""
    # An idle node is drained by its health check alone.
    breaks(good)
    healthcheck(good)
    assert is_drained(good)
    number = job(good, "rm -v /run/repaired")
    repaired(good)
    good.write("/run/repaired", "")
    healthcheck(good)
    assert ran(good, number) == "removed '/run/repaired'\n"


PLACE = "/var/lib/nodeready/incidents"


def evidence(node: LabNode) -> list[str]:
    return node.run(f"ls {PLACE}", check=False).stdout.split()


def drained_with_evidence(node: LabNode) -> str:
    """Have the node drained; the whole evidence of that.

    It has eight seconds, at the lowest priority: on a machine that is full, the stacks may be
    missing, and the node is drained anew.
    """
    for _ in range(10):
        told(node, "reset")
        healthcheck(node)
        assert is_drained(node)
        for _ in range(100):
            traces = node.run(f"ls -d {PLACE}/*/trace-*", check=False).stdout.split()
            if traces:
                return traces[0].rpartition("/")[0]
            time.sleep(0.1)
    raise AssertionError("no evidence is whole")


def test_a_node_keeps_the_evidence_before_it_is_drained(good):
    """Once for a drain, the last five, and nobody waits for it."""
    put_py_spy(good)
    secret = "s3cr3tpassw0rd"
    words = ("/usr/bin/python3", "-c", WAIT, "--password", secret)
    pid = start(good, *words, RANK=3, WORLD_SIZE=8)
    good.run(f"rm -rf {PLACE}")
    try:
        breaks(good)
        where = drained_with_evidence(good)
        # It is drained already: there is no new evidence.
        before = evidence(good)
        healthcheck(good)
        assert evidence(good) == before
        found = json.loads(good.read(f"{where}/incident.json"))
        assert found["schema"] == "nodeready.node-incident/1"
        assert found["results"][0]["check"] == "ptrace.scope"
        assert found["reasons"][0].startswith("ptrace.scope: ")
        trace = json.loads(good.read(f"{where}/trace-this-node.json"))
        assert [one["rank"] for one in trace["processes"]] == [3]
        assert "waits_here" in json.dumps(trace["frames"])
        assert good.run(f"grep -r {secret} {where}", check=False).stdout == ""
        modes = good.run(f"cd {where}; stat -c '%n %a' . *").stdout.splitlines()
        names = ("incident.json", "kernel.txt", "trace-this-node.json")
        assert modes == [". 700", *(f"{name} 600" for name in names)]
        old = [f"20200101T00000{number}Z-1" for number in range(5)]
        good.run(f"cd {PLACE}; mkdir {' '.join(old)}")
        told(good, "reset")
        healthcheck(good)
        wait_for(lambda: len(evidence(good)) == 5)
        assert old[0] not in evidence(good)
        # Where none can be kept, the node is drained all the same.
        told(good, "reset")
        good.run("rm -rf /var/lib/nodeready; touch /var/lib/nodeready")
        healthcheck(good)
        assert is_drained(good)
    finally:
        good.run(f"kill {pid}; rm -rf /var/lib/nodeready")


def test_an_administrators_drain_survives_both(good):
    for change in (breaks, repaired):
        told(good, "disk swap", wanted="disk swap")
        change(good)
        healthcheck(good)
        assert reason(good) == "disk swap"
        good.run(f"rm -f {probe.VERDICT}")
        done = good.run(f"env -i SLURMD_NODENAME={good.name} {probe.PROLOG}", check=False)
        logged = good.run("cat /run/logged", check=False).stdout
        assert done.returncode == (1 if change is breaks else 0), logged
        assert reason(good) == "disk swap"

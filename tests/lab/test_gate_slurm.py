"""The gate in a real Slurm: who gets jobs, who is drained and why, and what is left alone."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from nodeready.lab import LabNode
from nodeready.subjects.gate import facts as probe
from tests.builders.proof import put_py_spy
from tests.command import wait_for
from tests.conftest import _lab_name, started_slurm
from tests.helpers import nodeready
from tests.lab.targets import WAIT, start
from tests.lab.test_gate import LOGGER, SETTINGS
from tests.slurm_lab import SlurmLab

DRAINS = {**SETTINGS, "gate_drain": True, "gate_drain_max": 1, "gate_budget_s": 8}
T = TypeVar("T")
CONF = (f"Prolog={probe.PROLOG}", f"HealthCheckProgram={probe.HEALTH_CHECK}")
# One worker starts the nodes, once.
pytestmark = pytest.mark.xdist_group("gate_slurm")


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate") / "inventory.py"


@pytest.fixture(scope="module")
def cluster(lab_machine: None, where: Path) -> Iterator[SlurmLab]:
    """Three nodes deployed with the gate, of which one may be drained."""
    with started_slurm(_lab_name("gate"), 3) as lab:
        for node in lab.nodes:
            node.write("/usr/local/sbin/logger", LOGGER, mode=0o755)
            node.write("/var/lib/prometheus/node-exporter/other.prom", "")
        where.write_text(f"lab = ({lab.inventory_data()!r}, {DRAINS!r})\n")
        deployed = nodeready("deploy", where, "--yes")
        assert " 0 failed, 0 unreachable" in deployed.stdout, deployed.stdout + deployed.stderr
        lab.slurm_configure(*CONF)
        yield lab


@pytest.fixture
def all_good(cluster: SlurmLab) -> Iterator[list[LabNode]]:
    """The nodes, and afterwards as they were."""
    for node in cluster.nodes:
        told(node, "reset")
    yield cluster.nodes
    for node in cluster.nodes:
        node.run("sysctl -qw kernel.yama.ptrace_scope=0; rm -f /run/logged /run/nodeready/held")
        told(node, "reset")


@pytest.fixture
def good(all_good: list[LabNode]) -> LabNode:
    """One of the nodes; the others stay as they are."""
    return all_good[0]


def slurm(lab: SlurmLab, *words: str) -> str:
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
    wait_for(lambda: is_drained(good))
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


def at_once(work: Callable[[LabNode], T], nodes: list[LabNode]) -> list[T]:
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(work, nodes))


def prolog_status(node: LabNode) -> int:
    node.run(f"rm -f {probe.VERDICT}")
    return node.run(f"env -i SLURMD_NODENAME={node.name} {probe.PROLOG}", check=False).returncode


def test_of_nodes_that_all_fail_the_share_is_drained_and_the_rest_say_so(all_good, where):
    """In the log, the metrics and the audit, by the prolog and by the health check."""
    full = "1 or more of 3 nodes of batch are drained by nodeready, and gate_drain_max is 1"
    for node in all_good:
        breaks(node)
    # Prologs of a job on all nodes: only that of the drained node keeps the job away.
    statuses = at_once(prolog_status, all_good)
    drained = [node for node in all_good if is_drained(node)]
    assert [node for node, status in zip(all_good, statuses, strict=True) if status] == drained
    assert len(drained) == 1
    serving = [node for node in all_good if node not in drained]
    assert [reason(node) for node in serving] == ["", ""]
    at_once(healthcheck, all_good)
    assert [is_drained(node) for node in all_good] == [node in drained for node in all_good]
    for node in serving:
        log = node.run("cat /run/logged").stdout
        assert f"prolog: the job starts: nodeready: held: not drained: {full}" in log
        held = f"gate.drain: not ready, and not drained: {full}"
        assert f"health check: exit status 1: nodeready: no-go: loses job, inspect: {held}" in log
        metrics = node.read("/var/lib/prometheus/node-exporter/nodeready.prom")
        assert 'check="gate.drain",status="fail",severity="loses_job"' in metrics
        # Its jobs start.
        assert ran(node, job(node)) == f"{node.name}\n"
    audit = nodeready("audit", where, "--format", "json", "--only", "gate.drain", status=3)
    results = {
        report["name"]: report["results"][0] for report in json.loads(audit.stdout)["nodes"]
    }
    assert {name for name, result in results.items() if result["status"] == "fail"} == {
        node.name for node in serving
    }
    assert results[serving[0].name]["actual"] == f"not ready, and not drained: {full}"
    # The drained node comes back, and one of the others takes its place.
    at_once(repaired, drained)
    at_once(healthcheck, drained)
    assert [reason(node) for node in all_good] == ["", "", ""]
    time.sleep(1)
    at_once(healthcheck, serving)
    assert sorted(is_drained(node) for node in serving) == [False, True]
    # The policy is right again for all.
    at_once(repaired, serving)
    at_once(healthcheck, serving)
    assert [reason(node) for node in all_good] == ["", "", ""]
    assert nodeready("audit", where, "--only", "gate.drain").returncode == 0


PLACE = "/var/lib/nodeready/incidents"


def evidence(node: LabNode) -> list[str]:
    return node.run(f"ls {PLACE}", check=False).stdout.split()


def drained_with_evidence(node: LabNode) -> str:
    """Have the node drained; the whole evidence of that, of which the stacks come last."""
    traces: list[str] = []

    def is_whole() -> bool:
        traces[:] = node.run(f"ls -d {PLACE}/*/trace-*", check=False).stdout.split()
        return bool(traces)

    told(node, "reset")
    healthcheck(node)
    assert is_drained(node)
    wait_for(is_whole)
    return traces[0].rpartition("/")[0]


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
        assert found["schema"] == "nodeready.agent-incident/1"
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

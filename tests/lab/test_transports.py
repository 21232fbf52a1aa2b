"""The ways to the nodes beside plain ssh: Slurm's steps, and ssh shared between processes.

Whoever carries, a node that cannot be asked is named once, with its cause, and costs itself.
"""

import os
import re
import signal
import subprocess
import time

import gevent
import pytest

from nodeready.agent.asking import Request
from nodeready.core.outcome import UNREACHABLE
from nodeready.fleet.transport.srun import OwnJob
from tests.command import ours, wait_for

ONLY = ("--only", "ptrace.scope", "--format", "json")


@pytest.fixture
def root_slurm(slurm_lab, monkeypatch):
    """Slurm's commands for root of this machine; every node is as before afterwards."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_lab.slurm_conf))

    def slurm(*words):
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    def is_idle():
        """Slurm drains the node of a step that did not end in time ("Kill task failed")."""
        for node in slurm_lab.nodes:
            state = slurm("sinfo", "-h", "-n", node.name, "-o", "%T")
            if "drain" in state or "down" in state:
                slurm("scontrol", "update", f"nodename={node.name}", "state=resume")
        return slurm("sinfo", "-h", "-o", "%T") == "idle"

    yield slurm
    slurm("scancel", "--user=root")
    wait_for(is_idle)
    assert slurm("squeue", "-h") == ""


def statuses(done):
    """Node -> its status, and the reason of its gap, in an audit's document."""
    assert len(done.nodes) == len(done.document["nodes"])
    return {name: (row["status"], done.reasons.get(name, "")) for name, row in done.nodes.items()}


def test_an_allocation_of_ones_own_names_who_cannot_be_had(slurm_lab, root_slurm, fleet, tool):
    """Drained, busy, unknown to Slurm; the rest is asked, and Slurm has everything back."""
    first, drained, busy = (node.name for node in slurm_lab.nodes)
    where, srun = fleet(slurm_lab.nodes), ("--via", "srun", *ONLY)
    env = {"SLURM_CONF": slurm_lab.slurm_conf}
    whole, over_ssh = tool("audit", where, *srun, env=env), tool("audit", where, *ONLY)
    assert (whole.status, statuses(whole)) == (over_ssh.status, statuses(over_ssh))
    root_slurm("scontrol", "update", f"nodename={drained}", "state=drain", "reason=disk | swap")
    root_slurm("sbatch", "-D", "/tmp", "-w", busy, "--exclusive", "--wrap", "sleep 900")
    wait_for(lambda: root_slurm("sinfo", "-h", "-n", busy, "-o", "%T") == "allocated")
    found = statuses(tool("audit", f"{first},{drained},{busy},nosuch9", *srun, env=env))
    assert found.pop(first)[1] == ""
    assert {status for status, _ in found.values()} == {"unreachable"}
    assert found[drained][1] == "Slurm: is drained (disk | swap)"
    assert found[busy][1].startswith("Slurm: is allocated: no CPU is free there")
    assert found["nosuch9"][1] == "Slurm: knows no node of this name"
    assert root_slurm("squeue", "-h", "--name=nodeready") == ""


def test_in_a_running_job_as_its_user(slurm_lab, login, fleet, tool):
    """Those of INVENTORY that it has, by the inventory's policy, and nothing of the job ends."""
    here = [node.name for node in slurm_lab.nodes[:2]]
    job = login("sbatch", "--parsable", "-w", ",".join(here), "-D", "/tmp", "--wrap", "sleep 900")
    wait_for(lambda: login("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING")
    done = tool(
        "audit", fleet(slurm_lab.nodes, ptrace_scope=1), "--via", "srun", "--job", job, "-v",
        *ONLY, env=login.env,
    )  # fmt: skip
    assert statuses(done) == dict.fromkeys(here, ("fail", "")), done
    assert f"job {job} has 2 of these nodes; 1 are not asked" in done.err
    assert done.results[here[0]]["ptrace.scope"]["expected"].startswith("1")
    assert login("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING"


@pytest.mark.nightly
@pytest.mark.parametrize("reads", [True, False])
def test_a_node_that_slurm_loses_in_the_middle_costs_itself(slurm_lab, root_slurm, reads):
    """What only reads is asked again on the others; what may change something never is."""
    names = [node.name for node in slurm_lab.nodes]
    count = "echo x >>/tmp/way-count; sleep 4; echo ok"
    for node in slurm_lab.nodes:
        node.run("rm -f /tmp/way-count")
    with OwnJob(names) as transport:
        gevent.spawn_later(
            1.5, root_slurm, "scontrol", "update", f"nodename={names[1]}", "state=down", "reason=x"
        )
        answers = list(transport.ask([Request(name, count, 20, reads=reads) for name in names]))
        assert sorted(name for name, _ in answers) == sorted(names)
        said = dict(answers)
        assert said[names[1]].gap.kind in (UNREACHABLE, "lost")
        assert re.search(r"Slurm: has left job|Killed|down", said[names[1]].gap.reason)
        again = dict(transport.ask([Request(name, "echo again", 20) for name in names]))
    for node in (slurm_lab.nodes[0], slurm_lab.nodes[2]):
        runs = node.run("cat /tmp/way-count").stdout.count("x")
        assert runs == 1 or (reads and runs == 2)
        assert said[node.name].ok or not reads
        assert again[node.name].stdout.strip() == "again"
    assert again[names[1]].gap.kind == UNREACHABLE


@pytest.mark.nightly
def test_a_slurm_that_hangs_is_named_for_every_node(slurm_lab, root_slurm, fleet, tool):
    """slurmctld stops: one cause for all, in a minute; afterwards nothing is left or drained."""
    names = [node.name for node in slurm_lab.nodes]
    with OwnJob(names) as transport:
        controller = int(slurm_lab.controller.run("pgrep -x slurmctld").stdout)
        slurm_lab.controller.run(f"kill -STOP {controller}")
        try:
            began = time.monotonic()
            said = dict(transport.ask([Request(name, "echo ok", 5) for name in names]))
            assert time.monotonic() - began < 60
        finally:
            slurm_lab.controller.run(f"kill -CONT {controller}")
    assert {one.gap.reason for one in said.values()} == {
        "squeue -h -a gave no answer in 15 s: is slurmctld up? (scontrol ping)"
    }
    wait_for(lambda: root_slurm("squeue", "-h") == "")
    assert not [row for node in slurm_lab.nodes for row in ours(node)]


def test_an_interrupt_gives_the_allocation_back(slurm_lab, root_slurm, fleet, tool):
    where = fleet(slurm_lab.nodes)
    env = {"SLURM_CONF": slurm_lab.slurm_conf}
    process = tool.start("ready", where, "--user", "root", "--via", "srun", env=env)
    wait_for(lambda: root_slurm("squeue", "-h", "-s", "-o", "%i").count(".") > 0)
    process.send_signal(signal.SIGINT)
    done = tool.end(process, status=130)
    assert "interrupted: the results are partial" in done.err
    wait_for(lambda: root_slurm("squeue", "-h") == "")
    assert not [row for node in slurm_lab.nodes for row in ours(node)]


@pytest.mark.parametrize(("salloc", "said"), [
    ("-p nosuch", "salloc: Job submit/allocate failed"),
    ("-A 'x", "--salloc -A 'x: no closing quotation"),
])  # fmt: skip
def test_what_slurm_refuses_is_one_line(slurm_lab, fleet, tool, salloc, said):
    env = {"SLURM_CONF": slurm_lab.slurm_conf}
    done = tool("audit", fleet(slurm_lab.nodes), "--via", "srun", "--salloc", salloc, env=env)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1), done
    assert done.err.startswith(f"nodeready: {said}")


# --- ssh, shared between processes.


def test_shared_between_processes_the_document_is_the_same(lab, fleet, tool):
    """With a mesh, which holds a channel with every node while the nodes connect to each other."""
    where = fleet(lab.nodes)
    # The errors of ports are judged by their change since the look before.
    tool("audit", where, "-q")
    words = ("ready", where, "--user", "root", "--format", "json", "--ssh-processes")
    first, second = (
        {
            name: {check: result["status"] for check, result in node.items()}
            for name, node in tool(*words, count).results.items()
        }
        for count in (1, 3)
    )
    assert first == second
    assert {found["proof.mesh"] for found in first.values()} == {"ok"}
    assert set(first) == {node.name for node in lab.nodes}


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["one is killed", "an interrupt", "the parent is killed"])
def test_processes_that_share_the_nodes_and_an_end_in_the_middle(how, lab, fleet, tool):
    words = ("--user", "root", "--format", "json", "--ssh-processes", "3")
    process = tool.start("ready", fleet(lab.nodes), *words)
    # The looks and proofs are under way.
    wait_for(lambda: any(ours(node) for node in lab.nodes))
    pgrep = ["pgrep", "-P", str(process.pid)]
    kept = subprocess.check_output(pgrep, text=True).split()
    if how == "one is killed":
        # A copy of the command: what it starts else is another program.
        copies = subprocess.check_output([*pgrep, "-f", "nodeready"], text=True).split()
        os.kill(int(copies[0]), signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT if how == "an interrupt" else signal.SIGKILL)
    done = tool.end(process)
    wait_for(lambda: not [pid for pid in kept if os.path.exists(f"/proc/{pid}")])
    wait_for(lambda: not [row for node in lab.nodes for row in ours(node)])
    if how != "one is killed":
        assert done.status == (130 if how == "an interrupt" else -signal.SIGKILL), done
        return
    found = statuses(done)
    lost = [error for _, error in found.values() if error]
    assert (len(lost) <= 1, len(found), done.status in (1, 3)) == (True, len(lab.nodes), True)
    said = "".join(lost) or done.out
    assert "the process that asked it was ended by signal 9" in said, done

"""A lab with Slurm: real daemons, jobs of real users, drained and healed; nothing left behind."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeready.lab import (
    Lab,
    LabError,
    LabNode,
    LabUnavailable,
    freezer,
    needs,
    processes,
    slurm,
    state,
)
from tests.command import Tool, wait_for
from tests.helpers import nodeready
from tests.lab.test_lab import loaded, traces


def state_of(node: LabNode) -> str:
    """What Slurm says about the node, in the words of scontrol: DOWN+NOT_RESPONDING, IDLE+DRAIN.

    sinfo (22.05) shows `mixed` for good where a job ends in the second in which its node changed.
    """
    shown = node.lab.slurm_run("scontrol", "-o", "show", "node", node.name).stdout
    return next(word for word in shown.split() if word.startswith("State=")).partition("=")[2]


def groups(name: str) -> str:
    """The directories of a lab in the machine's freezer."""
    script = f'mount -t cgroup -o freezer f /mnt && find "/mnt{freezer.group_path(name)}" -type d'
    argv = ["unshare", "--mount", "sh", "-c", script]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def test_jobs_run_from_nodes_from_this_machine_and_from_the_controller(slurm_lab: Lab) -> None:
    nodes = slurm_lab.nodes
    wait_for(lambda: {state_of(node) for node in nodes} == {"IDLE"})
    for user in ("root", "ml"):
        ran = nodes[0].run("srun -N3 sh -c 'echo $(hostname) $(id -un)'", user=user).stdout
        assert sorted(ran.splitlines()) == [f"{node.name} {user}" for node in nodes]
    two = slurm_lab.slurm_run("srun", "-N2", "hostname").stdout.split()
    assert len(set(two) & {node.name for node in nodes}) == 2
    assert slurm_lab.controller is not None
    assert slurm_lab.controller.name not in {name for name, _ in slurm_lab.inventory_data()}
    assert slurm_lab.controller.run("srun id -un", user="ml").stdout == "ml\n"
    with pytest.raises(LabError, match="invalid partition"):
        slurm_lab.slurm_run("srun", "-p", "nosuch", "hostname")


def test_a_job_is_contained(slurm_lab: Lab) -> None:
    node = slurm_lab.nodes[0]
    script = "(setsid sleep 4711 >/dev/null 2>&1 &); cat /proc/self/cgroup"
    where = node.run(f"srun -w {node.name} sh -c '{script}'").stdout
    gone = node.enter(["pgrep", "-f", "sleep 471[1]"], check=False).returncode == 1
    known = state.load(slurm_lab.name)
    assert known is not None
    assert known.slurm is not None
    tracking = slurm_lab.slurm_run("scontrol", "show", "config").stdout
    if known.slurm.freezer:
        assert "proctrack/cgroup" in tracking
        assert f":freezer:/slurm_{node.name}/uid_0/job_" in where
        assert gone
    else:
        assert "proctrack/linuxproc" in tracking


@pytest.mark.nightly
def test_a_node_that_dies_with_a_frozen_job_comes_back(slurm_lab: Lab) -> None:
    """A node with a fault is one of Slurm's, too."""
    node = slurm_lab.nodes[2]
    batch = ["sbatch", "--parsable", "--no-requeue", "-o", "/dev/null", "-w", node.name]
    job = slurm_lab.slurm_run(*batch, "--wrap", "sleep 1234").stdout.strip()
    frozen = ["pgrep", "-x", "sleep"]
    if freezer.group_of(node.pid):
        step = f"/sys/fs/cgroup/freezer/slurm_{node.name}/uid_0/job_{job}/step_batch"
        frozen = ["sh", "-c", f"grep . {step}/cgroup.procs && echo FROZEN >{step}/freezer.state"]
    wait_for(lambda: node.enter(frozen, check=False).returncode == 0)
    pid = node.pid
    node.kill()
    assert processes.started_at(pid) is None
    node.reset(fault="read-only")
    slurm_lab.slurm_run("scancel", job)
    wait_for(lambda: state_of(node) == "IDLE")
    tried = slurm_lab.nodes[0].run(f"srun -w {node.name} touch /etc/x", check=False)
    assert "Read-only file system" in tried.stderr
    node.reset()
    wait_for(lambda: state_of(node) == "IDLE")


@pytest.mark.nightly
def test_postmortem_finds_the_log_of_a_job_that_slurm_still_knows(
    slurm_lab: Lab, fleet: Callable[..., Path], tool: Tool
) -> None:
    """Without accounting: scontrol knows the job for a while; the log is on its first node."""
    train = (
        "import os, sys, time, traceback\n"
        "def load(): return {}['lr']\n"
        "try: load() if os.environ['SLURM_PROCID'] == '2' else time.sleep(60)\n"
        # Slurm drops the last lines of a task whose step it kills.
        "except KeyError: traceback.print_exc(); time.sleep(1); sys.exit(1)\n"
    )
    for node in slurm_lab.nodes:
        node.write("/tmp/train.py", train)
    script = "NCCL_NET=Socket srun -N3 --label --kill-on-bad-exit /usr/bin/python3 /tmp/train.py"
    words = ("sbatch", "--parsable", "-N3", "-D", "/tmp", "-o", "dead-%x-%j.out", "-J", "train")
    job = slurm_lab.slurm_run(*words, "--wrap", script).stdout.strip()
    known = ("scontrol", "show", "job", job)
    wait_for(lambda: "JobState=FAILED " in slurm_lab.slurm_run(*known).stdout)
    env = {"SLURM_CONF": str(slurm_lab.slurm_conf)}
    done = tool("postmortem", fleet(slurm_lab.nodes), "--job", job, env=env)
    log = "".join(node.run("cat /tmp/dead-*", check=False).stdout for node in slurm_lab.nodes)
    assert done.status == 0, f"{done}\n{log}"
    assert re.match(r"exception +rank 2 .*KeyError: 'lr'", done.out), f"{done}\n{log}"
    assert f"job {job} is FAILED, the batch script: 1 variable" in " ".join(done.out.split())


def test_slurm_refuses_a_setting(slurm_lab: Lab) -> None:
    for line, says in (("Bogus=1", "unrecognized key: Bogus"), ("Prolog=a\nB=1", "no line of")):
        with pytest.raises(LabError, match=says):
            slurm_lab.slurm_configure(line)
    assert [state_of(node) for node in slurm_lab.nodes] == ["IDLE"] * 3
    assert "Bogus" not in slurm_lab.nodes[0].read(slurm.CONF)


def test_life_of_a_lab_with_slurm(slurm_lab: Lab, own_lab: str) -> None:
    name = own_lab
    machine = [Path("/etc/slurm"), Path("/etc/munge"), Path("/var/lib/slurm"), Path("/run/munge")]
    before = [sorted(path.glob("**/*")) for path in machine]
    first = nodeready("lab", "up", "--slurm", "--nodes", "1", "--name", name)
    assert (first.returncode, first.stderr.count("Traceback")) == (0, 0)
    assert first.stdout.splitlines()[0] == f"{name}: 1 nodes up: {name}001"
    conf = next(word for word in first.stdout.split() if word.startswith("SLURM_CONF="))
    listed = subprocess.check_output(["env", conf, "sinfo", "-h", "-o", "%N %T"], text=True)
    assert listed == f"{name}001 idle\n"
    lab = loaded(name)
    known = state.load(name)
    assert known is not None

    # It grows, without being asked for Slurm again; what the first node runs goes on.
    sleeper = lab.slurm_run("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 1234")
    again = nodeready("lab", "up", "--nodes", "2", "--name", name)
    assert again.stdout.startswith(f"{name}: 1 of 2 nodes started")
    lab = loaded(name)
    ran = lab.nodes[1].run("srun -N2 hostname", user="ml").stdout
    assert sorted(ran.split()) == [node.name for node in lab.nodes]
    job = lab.slurm_run("squeue", "-h", "-j", sleeper.stdout.strip(), "-o", "%T %N")
    assert job.stdout == f"RUNNING {name}001\n"

    # A controller that has lost its power comes back and knows its jobs.
    controller = lab.controller
    assert controller is not None
    controller.kill()
    assert nodeready("lab", "up", "--slurm", "--name", name, "--nodes", "2").returncode == 0
    lab = loaded(name)
    assert sleeper.stdout.strip() in lab.slurm_run("squeue", "-h", "-o", "%i").stdout.split()

    assert groups(name) or not (known.slurm and known.slurm.freezer)
    assert traces(name, known.index) != []
    assert nodeready("lab", "down", "--name", name).returncode == 0
    assert (traces(name, known.index), groups(name)) == ([], "")
    assert [sorted(path.glob("**/*")) for path in machine] == before


def test_slurm_is_for_the_whole_life_of_a_lab(slurm_lab: Lab, own_lab: str) -> None:
    lab = Lab.up(own_lab, 1)
    done = nodeready("lab", "up", "--slurm", "--nodes", "1", "--name", own_lab)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert f"the lab {own_lab} runs without Slurm; end it first: " in done.stderr
    assert not lab.slurm
    with pytest.raises(LabError, match="has no Slurm; start one that has"):
        lab.slurm_run("sinfo")
    empty = lab.nodes[0].run("ls -A /etc/slurm /etc/munge").stdout.split()
    assert empty == ["/etc/munge:", "/etc/slurm:"]


def test_without_its_packages_is_one_clear_line(
    own_lab: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ip", "sshd", "ssh", "nsenter", "munged", "apt-get"):
        (tmp_path / name).symlink_to("/bin/true")
    monkeypatch.setattr(needs, "environment", lambda: {"PATH": str(tmp_path)})
    says = "not installed: slurmctld, slurmd, sinfo; apt-get install slurm-client slurmctld slurmd"
    with pytest.raises(LabUnavailable, match=says):
        Lab.up(own_lab, 1, slurm=True)
    assert not state.directory(own_lab).exists()

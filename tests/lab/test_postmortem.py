"""A lab with Slurm: real daemons, jobs of real users; nothing left behind."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from nodeready.lab import LabError, LabNode
from tests.command import wait_for
from tests.conftest import _lab_name, started_slurm
from tests.lab.test_lab import index_of, traces
from tests.slurm_lab import SlurmLab, group_path


def state_of(slurm_lab: SlurmLab, node: LabNode) -> str:
    """What Slurm says about the node, in the words of scontrol: DOWN+NOT_RESPONDING, IDLE+DRAIN.

    sinfo (22.05) shows `mixed` for good where a job ends in the second in which its node changed.
    """
    shown = slurm_lab.slurm_run("scontrol", "-o", "show", "node", node.name).stdout
    return next(word for word in shown.split() if word.startswith("State=")).partition("=")[2]


def groups(name: str) -> str:
    """The directories of a lab in the machine's freezer."""
    script = f'mount -t cgroup -o freezer f /mnt && find "/mnt{group_path(name)}" -type d'
    argv = ["unshare", "--mount", "sh", "-c", script]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def test_jobs_run_from_nodes_from_this_machine_and_from_the_controller(slurm_lab):
    nodes = slurm_lab.nodes
    wait_for(lambda: {state_of(slurm_lab, node) for node in nodes} == {"IDLE"})
    for user in ("root", "ml"):
        ran = nodes[0].run("srun -N3 sh -c 'echo $(hostname) $(id -un)'", user=user).stdout
        assert sorted(ran.splitlines()) == [f"{node.name} {user}" for node in nodes]
    two = slurm_lab.slurm_run("srun", "-N2", "hostname").stdout.split()
    assert len(set(two) & {node.name for node in nodes}) == 2
    assert slurm_lab.controller.name not in {name for name, _ in slurm_lab.inventory_data()}
    assert slurm_lab.controller.run("srun id -un", user="ml").stdout == "ml\n"
    with pytest.raises(LabError, match="invalid partition"):
        slurm_lab.slurm_run("srun", "-p", "nosuch", "hostname")


def test_a_job_is_contained(slurm_lab):
    node = slurm_lab.nodes[0]
    script = "(setsid sleep 4711 >/dev/null 2>&1 &); cat /proc/self/cgroup"
    where = node.run(f"srun -w {node.name} sh -c '{script}'").stdout
    gone = node.enter(["pgrep", "-f", "sleep 471[1]"], check=False).returncode == 1
    tracking = slurm_lab.slurm_run("scontrol", "show", "config").stdout
    if slurm_lab.has_freezer:
        assert "proctrack/cgroup" in tracking
        assert f":freezer:/slurm_{node.name}/uid_0/job_" in where
        assert gone
    else:
        assert "proctrack/linuxproc" in tracking


@pytest.mark.nightly
def test_postmortem_finds_the_log_of_a_job_that_slurm_still_knows(slurm_lab, fleet, tool):
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


def test_nothing_is_left_of_a_lab_with_slurm(lab_machine):
    machine = [Path("/etc/slurm"), Path("/etc/munge"), Path("/var/lib/slurm"), Path("/run/munge")]
    before = [sorted(path.glob("**/*")) for path in machine]
    name = _lab_name("nothing")
    with started_slurm(name, 1) as lab:
        env = {**os.environ, "SLURM_CONF": str(lab.slurm_conf)}
        listed = subprocess.check_output(["sinfo", "-h", "-o", "%N %T"], text=True, env=env)
        assert listed == f"{lab.nodes[0].name} idle\n"
        assert bool(groups(name)) == lab.has_freezer
        index = index_of(name)
    assert (traces(name, index), groups(name)) == ([], "")
    assert [sorted(path.glob("**/*")) for path in machine] == before

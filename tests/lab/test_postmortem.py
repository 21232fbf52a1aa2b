"""`nodeready postmortem` of a job of a real Slurm."""

import re

import pytest

from tests.command import wait_for


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

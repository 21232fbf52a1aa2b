"""Ranks of a real Slurm's job: tasks of a step, not the batch script, nor other steps' shells."""

from __future__ import annotations

from tests.builders.proof import put_py_spy
from tests.command import wait_for
from tests.lab.targets import WAIT, by_rank, capture, functions

# A step of two ranks, each in a shell, and beside it a step with a person's shell in it.
SCRIPT = """#!/bin/bash
export UP=/dev/null
cat >/tmp/rank.py <<'END'
{code}
END
srun -n2 --overlap bash -c 'python3 /tmp/rank.py; exit 1' &
srun -n1 --overlap bash -c 'read x </tmp/never; exit 1' &
wait
"""


def test_a_job_of_slurm(slurm_lab, tmp_path):
    node = slurm_lab.nodes[0]
    put_py_spy(node)
    node.enter(["rm", "-f", "/tmp/never"])
    node.enter(["mkfifo", "/tmp/never"])
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT.format(code=WAIT))
    # Two tasks, whatever the machine's number of cores.
    where = ["-w", node.name, "-n2", "--overcommit", "-D", "/tmp", "-o", "/tmp/job.out"]
    job = slurm_lab.slurm_run("sbatch", "--parsable", *where, str(script)).stdout.strip()
    try:
        ready = "pgrep -fc '^python3 /tmp/rank.py' | grep -qx 2 && pgrep -f 'read x'"
        wait_for(lambda: node.enter(["sh", "-c", ready], check=False).returncode == 0)
        for how in ({}, {"job": job}):
            trace = capture(node, **how)
            ranks = by_rank(trace)
            assert sorted(ranks) == [0, 1], trace["processes"]
            for process in ranks.values():
                assert process["command"] == "python3 /tmp/rank.py"
                assert (process["job"], process["world_size"]) == (job, 2)
                names = functions(trace, process["samples"][-1]["main"])
                assert names[-1] == "waits_here"
        assert capture(node, job=f"{job}0")["processes"] == []
    finally:
        slurm_lab.slurm_run("scancel", job)

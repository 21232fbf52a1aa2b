"""The running Slurm of a lab: asked, told of new nodes and settings, waited for."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path

from nodeready.lab import helper, processes, slurm, state
from nodeready.lab.errors import LabError
from nodeready.lab.helper import Done
from nodeready.lab.needs import environment
from nodeready.lab.state import LabState, NodeState

# A node registers within a moment; the rest is for a machine that is loaded.
READY_S = 60.0

NONE = "the lab {lab} has no Slurm; start one that has: nodeready lab up --slurm"


def conf(lab: str) -> Path:
    """The slurm.conf of this lab for the commands of this machine."""
    return state.directory(lab) / "slurm.conf"


def run(lab: LabState, argv: Sequence[str], timeout: float = 60) -> Done:
    """Run one of Slurm's commands of this machine on the lab. Raises LabError."""
    if lab.slurm is None:
        raise LabError(NONE.format(lab=lab.name))
    # What is set where a job runs, or by its user, is not about the lab.
    env = {name: value for name, value in environment().items() if not _is_slurms(name)}
    env["SLURM_CONF"] = str(conf(lab.name))
    return helper.run(argv, timeout=timeout, env=env)


def began(lab: LabState, started: Collection[NodeState]) -> None:
    """These machines have just started: wait until Slurm knows them. Raises LabError."""
    if lab.slurm is None:
        return
    state.write(conf(lab.name), slurm.client_conf(lab, lab.slurm))
    # A fault may well be that it never answers.
    waiting = {one.name for one in started if one in lab.nodes and not one.fault}
    deadline = time.monotonic() + READY_S
    while waiting:
        done = run(lab, ["sinfo", "-h", "-a", "-N", "-o", "%N %T"])
        if done.returncode:
            return  # somebody has stopped the controller: the nodes wait for it, we do not
        words = (line.split() for line in done.stdout.splitlines())
        # The asterisk: it does not answer, or has not yet (sinfo(1)).
        waiting -= {name for name, what in words if what.strip("*") == what != "unknown"}
        if waiting and time.monotonic() > deadline:
            raise LabError(
                f"Slurm gets no answer from {min(waiting)}; see /var/log/slurm there and on "
                f"{lab.slurm.controller.name}"
            )
        time.sleep(0.05)


def configure(lab: LabState, lines: Sequence[str]) -> None:
    """Have these lines in slurm.conf. Raises LabError when Slurm refuses; then it has the old."""
    if lab.slurm is None:
        raise LabError(NONE.format(lab=lab.name))
    old, lab.slurm.lines = lab.slurm.lines, slurm.checked(lines)
    try:
        spread(lab)
    except LabError:
        lab.slurm.lines = old
        spread(lab)
        raise
    finally:
        state.save(lab)


def spread(lab: LabState) -> None:
    """Have every machine that runs take slurm.conf as it is now. Raises LabError."""
    if lab.slurm is None:
        return
    alive = [one for one in lab.machines() if processes.started_at(one.pid) == one.started]
    controller = lab.slurm.controller
    state.write(conf(lab.name), slurm.client_conf(lab, lab.slurm))
    content = slurm.conf(lab, lab.slurm)
    for one in alive:
        helper.enter(one.pid, ["sh", "-c", f"cat >{slurm.CONF}"], content)
    # A slurmctld takes new nodes only when it starts, and the others obey when they please:
    # starting them again is what has certainly happened when this returns.
    for one in sorted(alive, key=lambda one: one is not controller):
        _restart(one)
    if controller in alive:
        began(lab, [one for one in alive if one is not controller])


def _restart(one: NodeState) -> None:
    """Start its daemon again, as process 1 would: what runs in jobs goes on."""
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    argv = ["nsenter", "-t", "1", "-C", "env", "-i", path, "sh", "-e", slurm.SCRIPT]
    done = helper.enter(one.pid, argv)
    if done.returncode:
        said = (done.stderr.strip() or f"exit {done.returncode}").splitlines()[0]
        raise LabError(f"{one.name}: Slurm does not start: {said}")


def _is_slurms(name: str) -> bool:
    return name.startswith(("SLURM", "SBATCH_", "SINFO_", "SQUEUE_", "SALLOC_"))

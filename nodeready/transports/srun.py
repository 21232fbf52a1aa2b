"""srun as the carrier: one script to every node of a running job, as a step that takes nothing.

For users who have neither ssh to the nodes nor root there. The step overlaps with the job's own
(srun(1), --overlap): it waits for no resources and takes none.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from shutil import which
from typing import cast

import gevent
from gevent import subprocess
from pyinfra.api.exceptions import InventoryError

from nodeready import shell, slurm
from nodeready.nodesets import fold
from nodeready.transports.answer import Answer
from nodeready.transports.srun_output import StepOutput

#: Seconds beyond the script's own limit: slurmd starts a step within moments, and srun gives up a
#: node that does not answer after 10 s (TcpTimeout and MessageTimeout, slurm.conf(5)).
STARTING_S = 15
_PIECE = 64 << 10
#: A job, a task of an array, a component of a heterogeneous one (squeue(1), --jobs).
_JOB = re.compile(r"[0-9]+(_[0-9]+|\+[0-9]+)?")


class SrunError(Exception):
    """srun cannot be used, or not for this job; one line."""


@dataclass(frozen=True)
class Job:
    """A running job. number: what Slurm calls SLURM_JOB_ID."""

    number: str
    nodes: tuple[str, ...]


def job(words: str, environ: dict[str, str] | None = None) -> Job:
    """The running job of ``--job``. Raises SrunError when there is none, and without Slurm."""
    if not _JOB.fullmatch(words):
        raise SrunError(f"--job {words}: is no number of a Slurm job")
    path = (environ or dict(os.environ)).get("PATH", os.defpath)
    for tool in ("srun", "squeue"):
        if not which(tool, path=path):
            raise SrunError(
                f"{tool} is not installed here: --via srun is for where jobs are submitted"
            )
    argv = ["squeue", "-h", "-a", "-t", "all", "-j", words, "-o", "%A|%T|%N"]
    try:
        rows = slurm.ask(argv, path, slurm.TIMEOUT_S).split()
        found = [tuple(row.split("|")) for row in rows if row.count("|") == 2]
        running = [one for one in found if one[1] == "RUNNING"]
        if len(running) == 1:
            number, _, nodes = running[0]
            return Job(number, tuple(slurm.job_nodes(nodes, path, slurm.TIMEOUT_S)))
    except InventoryError as error:
        if "Invalid job id" in str(error):
            raise SrunError(f"--job {words}: Slurm knows no such job") from None
        raise SrunError(str(error)) from None
    if running:
        raise SrunError(f"--job {words}: is an array; name one of its tasks, such as {words}_0")
    state = f"does not run: it is {found[0][1]}" if found else "does not run any more"
    raise SrunError(f"--job {words}: {state}")


@dataclass
class Srun:
    """Steps in one job.

    tag:  the word that marks their processes on the nodes
    tell: gets one line when an older Slurm has to be asked in another way
    """

    job: Job
    tag: str
    tell: Callable[[str], None] = lambda text: None
    _overlap: tuple[str, ...] = ("--overlap",)
    _gres: str = "none"

    def carry(
        self,
        script: str,
        limit_s: int,
        heard: Callable[[str, Answer], None],
        nodes: Sequence[str] = (),
    ) -> None:
        """Run a POSIX sh text on these nodes of the job, or on all, and wait for the answers.

        limit_s: seconds that it has on a node
        heard:   gets each node's answer, once; a node that gives none has one with an error
        Never raises for what Slurm or a node does; an interrupt ends the step.
        """
        waiting = nodes or self.job.nodes
        # When one node cannot be started, srun ends the others with it: those get a second try.
        for last in (False, True):
            step, whole = self._step(script, limit_s, heard, waiting)
            waiting = [name for name in step.waiting if name not in step.unlaunched]
            if last or not waiting or not step.unlaunched:
                step.give_up(limit_s, whole)
                return
            for name in waiting:
                del step.waiting[name]
            step.give_up(limit_s, whole)

    def _step(
        self,
        script: str,
        limit_s: int,
        heard: Callable[[str, Answer], None],
        nodes: Sequence[str],
    ) -> tuple[StepOutput, bool]:
        """What a step said, asked for in the way that this Slurm takes."""
        while True:
            step = StepOutput(f"nodeready-{secrets.token_hex(8)}", nodes, heard)
            whole = self._run(step, self._argv(step.script(script), limit_s, nodes), limit_s)
            if step.names:
                return step, whole
            if self._overlap and step.has_no_overlap:
                # There, steps overlap unless the job's own is --exclusive.
                self.tell("srun has no --overlap (Slurm before 20.11): asking without it")
                self._overlap = ()
            elif self._gres == "none" and step.has_no_gres:
                self._gres = "gpu:0"
            else:
                return step, whole

    def _argv(self, script: str, limit_s: int, nodes: Sequence[str]) -> list[str]:
        return [
            "srun", f"--jobid={self.job.number}", *self._overlap, f"--gres={self._gres}",
            f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1",
            f"--nodelist={fold(nodes)}", "--label", "--input=none", "--mpi=none",
            "--kill-on-bad-exit=0", "--wait=0", "--chdir=/",
            "sh", "-c", shell.command(script, limit_s, self.tag),
        ]  # fmt: skip

    def _run(self, step: StepOutput, argv: list[str], limit_s: int) -> bool:
        """Feed the step with what srun says; whether that came to its own end."""
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            # A Ctrl-C is for us to hand on: srun's own answer to it is to wait for a second one.
            start_new_session=True,
        )
        out, complaints = (cast("BufferedIOBase", s) for s in (process.stdout, process.stderr))

        def stderr() -> None:
            while piece := complaints.read1(_PIECE):
                step.complain(piece)

        drain = gevent.spawn(stderr)
        try:
            with gevent.Timeout(limit_s + shell.KILL_AFTER_S + STARTING_S):
                while piece := out.read1(_PIECE):
                    step.add(piece)
                drain.join()
                process.wait()
            return True
        except gevent.Timeout:
            return False
        finally:
            _end(process)
            gevent.killall([drain])
            for stream in (out, complaints):
                with contextlib.suppress(OSError):
                    stream.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """At TERM, srun ends its step and nothing else of the job."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=shell.KILL_AFTER_S)


def _environment() -> dict[str, str]:
    """Ours, without what a job or its user sets for other calls of srun (srun(1), INPUT
    ENVIRONMENT VARIABLES)."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM", "SRUN_"))
    }
    return {**kept, "LC_ALL": "C"}

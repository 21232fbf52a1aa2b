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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from io import BufferedIOBase
from shutil import which
from typing import cast

import gevent
from gevent import subprocess
from pyinfra.api.exceptions import InventoryError

from nodeready import shell, slurm
from nodeready.nodesets import fold
from nodeready.transports.answer import FAILED, OUTPUT, TIMEOUT, UNREACHABLE, Answer
from nodeready.transports.channel import ANSWER_BYTES, ERROR_BYTES

#: Seconds beyond the script's own limit: slurmd starts a step within moments, and srun gives up a
#: node that does not answer after 10 s (TcpTimeout and MessageTimeout, slurm.conf(5)).
STARTING_S = 15
#: srun parts a line that is longer than this, and puts a label before each part.
_LINE_BYTES = 1024
_PIECE = 64 << 10
#: A job, a task of an array, a component of a heterogeneous one (squeue(1), --jobs).
_JOB = re.compile(r"[0-9]+(_[0-9]+|\+[0-9]+)?")

Progress = Callable[[str], None]


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
    state = f"is {found[0][1].lower()}, not running" if found else "does not run any more"
    raise SrunError(f"--job {words}: {state}")


@dataclass
class _Step:
    """What one srun says, task by task.

    texts: task -> its output; names: task -> its node, once it has said so
    """

    nonce: str
    done: Progress
    texts: dict[str, bytearray] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    errors: bytearray = field(default_factory=bytearray)
    too_much: set[str] = field(default_factory=set)
    _rest: bytes = b""

    def add(self, piece: bytes) -> None:
        *rows, self._rest = (self._rest + piece).split(b"\n")
        for row in rows:
            self._row(row)

    def _row(self, row: bytes) -> None:
        label, found, said = row.partition(b": ")
        task = label.strip().decode("ascii", "replace")
        if not found or not task.isdigit():
            return
        words = said.decode("ascii", "replace").split(" ")
        if words[0] == self.nonce and words[1:2] == ["at"]:
            self.names[task] = words[2]
        elif words == [self.nonce, "end"]:
            self.ended.add(task)
            if task in self.names:
                self.done(self.names[task])
        else:
            text = self.texts.setdefault(task, bytearray())
            if len(text) > ANSWER_BYTES:
                self.too_much.add(task)
            else:
                text += said if len(said) == _LINE_BYTES else said + b"\n"

    def answers(self, late: str) -> dict[str, Answer]:
        """Node -> what it said. late: the error of one that has not ended."""
        found = {}
        for task, name in self.names.items():
            text = self.texts.get(task, b"").decode("utf-8", "surrogateescape")
            if task in self.too_much:
                found[name] = Answer(False, error="too much output", kind=OUTPUT)
            elif task in self.ended:
                found[name] = Answer(True, text)
            else:
                found[name] = Answer(False, text, error=late, kind=TIMEOUT)
        return found

    @property
    def complaints(self) -> list[str]:
        text = self.errors.decode("utf-8", "replace")
        rows = [re.sub(r"^(srun|slurmstepd): (error: )?", "", row) for row in text.splitlines()]
        return [row.strip() for row in rows if row.strip()]


#: What srun says that has no --overlap (before 20.11: steps overlap there unless they are
#: exclusive), or no Gres to ask none of.
_NO_OVERLAP = re.compile(r"unrecognized option .*overlap")
_NO_GRES = re.compile(r"(?i)invalid generic resource|gres.*(invalid|unknown)")
_LAUNCH = re.compile(r"(?:Task launch for .*|launch.*)failed on node (\S+): (.+)")


@dataclass
class Srun:
    """Steps in one job. ``tell`` gets one line when an older Slurm has to be asked otherwise."""

    job: Job
    tag: str
    tell: Callable[[str], None] = lambda text: None
    _overlap: list[str] = field(default_factory=lambda: ["--overlap"])
    _gres: str = "none"
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def carry(
        self, script: str, limit_s: int, done: Progress, nodes: Sequence[str] = ()
    ) -> dict[str, Answer]:
        """Run a POSIX sh text on these nodes of the job, or on all, and wait for the answers.

        limit_s: seconds that it has on a node. A node without an answer has one with an error.
        Never raises for what Slurm or a node does.
        """
        waiting = list(nodes or self.job.nodes)
        found: dict[str, Answer] = {}
        # When one node cannot be started, srun ends the others with it: they are tried once more.
        for _ in range(2):
            answers, lost = self._step(script, limit_s, done, waiting)
            found |= answers
            again = [name for name in waiting if name not in found or found[name].kind == FAILED]
            waiting = [name for name in again if name not in lost]
            if not waiting or not lost:
                break
        return found

    def _step(
        self, script: str, limit_s: int, done: Progress, nodes: Sequence[str]
    ) -> tuple[dict[str, Answer], set[str]]:
        """One step's answers, and the nodes on which it could not be started."""
        while True:
            step, whole = self._run(script, limit_s, done, nodes)
            text = "\n".join(step.complaints)
            if step.names:
                break
            if self._overlap and _NO_OVERLAP.search(text):
                self.tell("srun has no --overlap (Slurm before 20.11): a step without it is used")
                self._overlap = []
            elif self._gres == "none" and _NO_GRES.search(text):
                self._gres = "gpu:0"
            else:
                break
        late = f"no answer in {limit_s} s"
        answers = step.answers(late if not whole else _last(step.complaints))
        lost = {name: why for name, why in _LAUNCH.findall(text) if name in nodes}
        for name in nodes:
            if name in lost and not (name in answers and answers[name].ok):
                why = f"srun could not start a step there: {lost[name]}"
                answers[name] = Answer(False, error=why, kind=UNREACHABLE)
            elif name not in answers:
                said = _last(step.complaints)
                why = f"srun gave no answer in {limit_s + STARTING_S} s: {said}"
                why = f"srun: {said}" if whole else why
                answers[name] = Answer(False, error=why, kind=FAILED)
        return answers, set(lost)

    def _argv(self, script: str, limit_s: int, nonce: str, nodes: Sequence[str]) -> list[str]:
        line = shell.command(
            f'echo {nonce} at "$SLURMD_NODENAME"\n(\n{script}\n)\necho; echo {nonce} end',
            limit_s,
            self.tag,
        )
        return [
            "srun", f"--jobid={self.job.number}", *self._overlap, f"--gres={self._gres}",
            f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1",
            f"--nodelist={fold(nodes)}", "--label", "--input=none", "--mpi=none",
            "--kill-on-bad-exit=0", "--wait=0", "--chdir=/", "sh", "-c", line,
        ]  # fmt: skip

    def _run(
        self, script: str, limit_s: int, done: Progress, nodes: Sequence[str]
    ) -> tuple[_Step, bool]:
        """What one srun said, and whether it came to its own end."""
        step = _Step(f"nodeready-{secrets.token_hex(8)}", done)
        process = subprocess.Popen(
            self._argv(script, limit_s, step.nonce, nodes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            # A Ctrl-C is for us to hand on: srun's own answer to it is to ask for a second one.
            start_new_session=True,
        )
        self._running.add(process)
        out, complaints = (cast("BufferedIOBase", s) for s in (process.stdout, process.stderr))

        def stderr() -> None:
            while piece := complaints.read1(_PIECE):
                step.errors += piece[: ERROR_BYTES - len(step.errors)]

        drain = gevent.spawn(stderr)
        try:
            with gevent.Timeout(limit_s + shell.KILL_AFTER_S + STARTING_S):
                while piece := out.read1(_PIECE):
                    step.add(piece)
                drain.join()
                process.wait()
            return step, True
        except gevent.Timeout:
            return step, False
        finally:
            self._end(process)
            gevent.killall([drain], block=False)
            for stream in (out, complaints):
                with contextlib.suppress(OSError):
                    stream.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End a step: at TERM, srun ends its step and nothing else of the job."""
        self._running.discard(process)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                return
            with contextlib.suppress(OSError):
                process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=shell.KILL_AFTER_S)

    def end(self) -> None:
        """End all steps of ours."""
        for process in list(self._running):
            self._end(process)


def _last(complaints: Iterable[str]) -> str:
    rows = [row for row in complaints if not row.startswith("Job step aborted")]
    return rows[-1] if rows else "ended without a word"


def _environment() -> dict[str, str]:
    """Ours, without what a job or its user sets for other calls of srun (srun(1), INPUT
    ENVIRONMENT VARIABLES)."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM", "SRUN_"))
    }
    return {**kept, "LC_ALL": "C"}

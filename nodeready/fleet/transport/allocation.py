"""A Slurm job on whose nodes steps can be started: a running job, or a new allocation.

The allocation runs no program (salloc(1), --no-shell), and has one CPU on every node that Slurm
can give now. This process ends it; otherwise it ends after `_LIMIT_MIN` minutes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import gevent
from gevent import subprocess
from pyinfra.api.exceptions import InventoryError

from nodeready.agent.asking import TransportUnavailable
from nodeready.agent.proc import user_name
from nodeready.core.shell import find_program
from nodeready.core.text import sanitise
from nodeready.fleet.inventory import slurm
from nodeready.fleet.inventory.nodeset import fold
from nodeready.fleet.transport import Note, ignore

#: A job, a task of an array job, or a component of a heterogeneous job (squeue(1), --jobs).
_JOB = re.compile(r"[0-9]+(_[0-9]+|\+[0-9]+)?")
_IMMEDIATE_S = 20  # seconds for Slurm to allocate free nodes (salloc(1), --immediate)
_RELEASE_S = 5  # seconds for a command of Slurm that ends the job
_LIMIT_MIN = 60  # maximum minutes of the job
#: sinfo's words for a node that can start a job at once, without `_FLAGS` (sinfo(1), NODE STATE
#: CODES).
_FREE, _PARTLY = "idle", "mixed"
#: Characters at the end of a state, such as * for a node that does not answer.
_FLAGS = "*~#!%$@^+-"
#: The states of nodes whose slurmd does not answer.
_DEAD = ("down", "unknown", "powered_down", "powering_down", "future", "inval")
#: The states of nodes that Slurm gives only to jobs of a reservation.
_RESERVED = ("reserved", "maint", "planned")


class SrunError(TransportUnavailable):
    """srun cannot be used here, or for this job; one line."""


@dataclass(frozen=True)
class JobAllocation:
    number: str  # Slurm's SLURM_JOB_ID; "": no node could be allocated
    nodes: tuple[str, ...]
    # requested node -> why the job does not have it
    refused: Mapping[str, str] = field(default_factory=dict)

    def of(self, names: Iterable[str]) -> JobAllocation:
        """The job with only these nodes, in the job's own order."""
        requested = {*names}
        job_nodes = tuple(name for name in self.nodes if name in requested)
        missing = requested - {*job_nodes} - self.refused.keys()
        refused = {**self.refused, **dict.fromkeys(missing, f"is not in job {self.number}")}
        return replace(self, nodes=job_nodes, refused=refused)


def running(job_id: str) -> JobAllocation:
    """The running job that ``--job`` names. Raises SrunError."""
    if not _JOB.fullmatch(job_id):
        raise SrunError(f"--job {job_id}: is no number of a Slurm job")
    for tool in ("srun", "squeue"):
        if not find_program(tool):
            raise SrunError(
                f"{tool} is not installed here: --via srun is for where jobs are submitted"
            )
    argv = ["squeue", "-h", "-a", "-t", "all", "-j", job_id, "-o", "%A|%T|%u|%N"]
    try:
        rows = slurm.ask(argv).split()
        jobs = [tuple(row.split("|")) for row in rows if row.count("|") == 3]
        running_jobs = [job for job in jobs if job[1] == "RUNNING"]
        if len(running_jobs) == 1:
            number, _, user, nodes = running_jobs[0]
            # Slurm refuses root, too (step_mgr.c), but root may have a wrapper of srun that works.
            if os.geteuid() and user not in (user_name(os.geteuid()), str(os.geteuid())):
                remedy = f"ask as {user} (sudo -u {user} ...), or over ssh as root"
                reason = f"is {user}'s: Slurm starts a step in it for nobody but {user}"
                raise SrunError(f"--job {job_id}: {reason}; {remedy}")
            return JobAllocation(number, tuple(slurm.job_nodes(nodes)))
    except InventoryError as error:
        if "Invalid job id" in str(error):
            raise SrunError(f"--job {job_id}: Slurm knows no such job") from None
        raise SrunError(str(error)) from None
    if running_jobs:
        raise SrunError(f"--job {job_id}: is an array; name one of its tasks, such as {job_id}_0")
    state = f"does not run: it is {jobs[0][1]}" if jobs else "does not run any more"
    raise SrunError(f"--job {job_id}: {state}")


# --- A new allocation.


@dataclass(frozen=True)
class _SlurmNodeState:
    """The state of a node in Slurm. partitions: that are up"""

    state: str
    idle_cpus: int
    reason: str
    partitions: tuple[str, ...]

    def refusal(self) -> str:
        """Why the node cannot start a job now; "": it can."""
        if not self.partitions:
            return "is in no partition that is up"
        if self.state in (_FREE, _PARTLY) and self.idle_cpus:
            return ""
        if self.state in (_FREE, _PARTLY, "allocated", "completing"):
            return f"is {self.state}: no CPU is free there; --job ID asks inside of a job"
        return self.text()

    def text(self) -> str:
        reason = "" if self.reason == "none" else f" ({self.reason})"
        return f"is {self.state}{reason}"


_GONE = _SlurmNodeState("gone", 0, "none", ())  # the state of a node that Slurm does not know


def _state_of(nodes: Sequence[str]) -> dict[str, _SlurmNodeState]:
    """Node -> its state, for the nodes that Slurm knows."""
    argv = ["sinfo", "-h", "-a", "-N", "-n", fold(nodes), "-o", "%N|%R|%a|%T|%C|%E"]
    states: dict[str, _SlurmNodeState] = {}
    for row in slurm.ask(argv).splitlines():
        name, partition, availability, state, cpus, reason = (*row.split("|", 5), *[""] * 6)[:6]
        # %C is "allocated/idle/other/total".
        idle_cpus = (*cpus.split("/"), "", "")[1]
        # A node has a row for each of its partitions.
        earlier = states[name].partitions if name in states else ()
        up_partition = (partition,) if availability == "up" else ()
        idle, partitions = int(idle_cpus) if idle_cpus.isdigit() else 0, (*earlier, *up_partition)
        states[name] = _SlurmNodeState(state, idle, sanitise(reason, 200), partitions)
    return states


def unusable_nodes(job: JobAllocation, nodes: Sequence[str]) -> dict[str, str]:
    """Node of the job -> why Slurm can no longer start a step on it.

    {} if Slurm does not answer. A node that Slurm has lost leaves the job.
    """
    try:
        job_nodes = {*running(job.number).nodes}
        states = _state_of(nodes)
    except SrunError as problem:
        return dict.fromkeys(nodes, str(problem).removeprefix("--"))
    except InventoryError:
        return {}
    reasons = {}
    for name in nodes:
        node = states.get(name, _GONE)
        if name not in job_nodes or node.state.strip(_FLAGS) in _DEAD or "*" in node.state:
            departure = "" if name in job_nodes else f"has left job {job.number}, "
            reasons[name] = f"Slurm: {departure}{node.text()}"
    return reasons


def allocate(nodes: Sequence[str], options: str = "", notify: Note = ignore) -> JobAllocation:
    """Allocate a job on those of these nodes that Slurm can give now; `release` ends it.

    options: for salloc(1): ``--reservation=maintenance --account=ops``
    notify:  shows the user a line when Slurm is slow

    Raises SrunError if Slurm does not answer, or refuses the options.
    """
    for tool in ("srun", "salloc", "sinfo", "scancel"):
        if not find_program(tool):
            raise SrunError(f"{tool} is not installed here: --via srun needs Slurm's commands")
    try:
        arguments = shlex.split(options)
    except ValueError as problem:
        raise SrunError(f"--salloc {options}: {str(problem).lower()}") from None
    number, error = "", ""
    try:
        refused, partition = _refused_nodes(nodes, arguments)
        arguments += [f"--partition={partition}"] if partition else []
        free = [name for name in nodes if name not in refused]
        if free:
            number, error = _run_salloc(free, arguments, notify)
        if "Unable to allocate" in error:
            # Another job got some of the nodes, or waits for them: try again with the idle nodes.
            states = _state_of(free)
            for name in free:
                state = states.get(name, _GONE).state
                if state != _FREE:
                    refused[name] = f"is {state}: salloc: {error}"
            free = [name for name in free if name not in refused]
            if free:
                number, error = _run_salloc(free, arguments, notify)
        reasons = {name: f"Slurm: {reason}" for name, reason in refused.items()}
        if not free:
            return JobAllocation("", (), reasons)
        if not number:
            raise SrunError(f"salloc: {error}")
        return replace(running(number), refused=reasons)
    except InventoryError as problem:
        raise SrunError(str(problem)) from None


def _refused_nodes(nodes: Sequence[str], arguments: Sequence[str]) -> tuple[dict[str, str], str]:
    """The nodes that Slurm cannot give now, each with the reason, and the partition for the job.

    A job has one partition: here the partition with the most nodes; "" if the options name one.
    """
    states = _state_of(nodes)
    refused = {name: "knows no node of this name" for name in nodes if name not in states}
    reserved = any(word.startswith("--reservation") for word in arguments)
    for name, state in states.items():
        reason = state.refusal()
        if reason and not (reserved and state.state.strip(_FLAGS) in _RESERVED):
            refused[name] = reason
    partitions = {name: state.partitions for name, state in states.items() if name not in refused}
    has_partition = re.compile(r"--partition\b|--reservation\b|-p")
    if not partitions or any(has_partition.match(argument) for argument in arguments):
        return refused, ""
    counts = Counter(name for names in partitions.values() for name in names)
    ((partition, _),) = counts.most_common(1)
    reason = f"is not in Slurm's partition {partition}: --salloc '--partition=...'"
    outside = [name for name, names in partitions.items() if partition not in names]
    return {**refused, **dict.fromkeys(outside, reason)}, partition


def _run_salloc(nodes: Sequence[str], arguments: Sequence[str], notify: Note) -> tuple[str, str]:
    """The number of the new job, or "", and the error of salloc, or ""."""
    argv = [
        "salloc", "--no-shell", "--no-kill", f"--nodes={len(nodes)}", f"--nodelist={fold(nodes)}",
        f"--ntasks={len(nodes)}", "--ntasks-per-node=1", f"--time={_LIMIT_MIN}",
        "--job-name=nodeready", f"--immediate={_IMMEDIATE_S}", *arguments,
    ]  # fmt: skip
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
        env={**os.environ, "LC_ALL": "C"},
        start_new_session=True,
    )
    slow = gevent.spawn_later(3, notify, f"waiting for Slurm to give {len(nodes)} nodes")
    errors = b""
    try:
        with gevent.Timeout(_IMMEDIATE_S + slurm.TIMEOUT_S):
            _, errors = child.communicate()
    except gevent.Timeout:
        return "", f"gave no answer in {_IMMEDIATE_S + slurm.TIMEOUT_S} s"
    finally:
        slow.kill()
        if child.poll() is None:
            # At SIGTERM, salloc cancels its request.
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, errors = child.communicate(timeout=3)
        text = errors.decode("utf-8", "replace")
        granted = re.search(r"Granted job allocation ([0-9]+)", text)
        if granted and child.returncode:
            release(JobAllocation(granted[1], ()), notify)
    if granted and not child.returncode:
        return granted[1], ""
    rows = [row.removeprefix("salloc: ").removeprefix("error: ") for row in text.splitlines()]
    return "", sanitise(rows[-1], 200) if rows else f"ended with exit status {child.returncode}"


def release(job: JobAllocation, notify: Note = ignore) -> None:
    """End a job of `allocate`. notify: shows the user a line when Slurm does not answer"""
    if not job.number:
        return
    try:
        # squeue first: a slurmctld that hangs must not get scancel's request. When it resumes, it
        # would act on the request before the slurmds report that the steps have ended, consider
        # the steps unkillable, and drain the nodes.
        slurm.ask(["squeue", "-h", "-j", job.number, "-o", "%A"], _RELEASE_S)
        slurm.ask(["scancel", job.number], _RELEASE_S)
    except InventoryError as problem:
        if "Invalid job id" not in str(problem):
            end = f"in at most {_LIMIT_MIN} minutes, or with scancel {job.number}"
            notify(f"job {job.number} is not given back ({problem}): it ends by itself {end}")

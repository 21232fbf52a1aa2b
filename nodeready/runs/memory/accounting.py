"""The jobs and the drains of nodes, by Slurm's accounting."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from shutil import which

from nodeready.core.shell import search_path
from nodeready.runs.memory.look import Event
from nodeready.subjects.gate.facts import PENDING

#: A job's user chooses the last field, which may have any character.
_FIELDS = "JobID,User,State,Start,End"
#: States of a node that gets no job: sacctmgr(1), of events.
_LOST = ("DRAIN", "DOWN", "FAIL")
#: Seconds for `sacct`: a large accounting database answers in some seconds.
_TIMEOUT_S = 20
#: Maximum jobs, the newest ones.
_MAX_JOBS = 1000


@dataclass(frozen=True)
class NodeJob:
    """A job that ran on a node."""

    id: str
    user: str
    state: str
    start_s: float  # seconds since 1970
    end_s: float | None  # likewise; None: it runs


def node_jobs(
    node: str, since_s: float, environ: Mapping[str, str] = os.environ
) -> tuple[tuple[NodeJob, ...], str]:
    """The newest jobs on a node since a time, the oldest first; why there are none, or ""."""
    words = ["sacct", f"--nodelist={node}", f"--starttime={_time(since_s)}", "--allusers"]
    words += ["--allocations", "--parsable2", f"--format={_FIELDS}"]
    text, problem = _run(words, environ)
    return parse_jobs(text)[-_MAX_JOBS:], problem


def node_drains(
    since_s: float, nodes: Collection[str], environ: Mapping[str, str] = os.environ
) -> tuple[list[Event], str]:
    """Slurm's records of drains and losses of nodes since a time; what failed, or ""."""
    words = ["sacctmgr", "--noheader", "--parsable2", "list", "event", f"start={_time(since_s)}"]
    words += [f"nodes={','.join(nodes)}", "format=NodeName,Start,State,Reason"]
    text, problem = _run(words, environ)
    return parse_drains(text), problem


def _run(argv: list[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """What a command of Slurm prints; why it prints nothing, or ""."""
    path = search_path(environ.get("PATH", ""))
    if not which(argv[0], path=path):
        return "", f"{argv[0]} is not installed here"
    # Imported only here, because they import pyinfra, which is slow.
    from pyinfra.api.exceptions import InventoryError

    from nodeready.fleet.inventory.slurm import ask

    try:
        return ask(argv, path, _TIMEOUT_S), ""
    except InventoryError as error:
        return "", str(error)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(timespec="seconds")


def parse_jobs(text: str) -> tuple[NodeJob, ...]:
    """The jobs in the table of `sacct`, in order of their start. Other lines are left out."""
    jobs = []
    for line in text.splitlines()[1:]:
        fields = line.split("|")
        if len(fields) == len(_FIELDS.split(",")):
            job, user, state, start, end = (field[:60] for field in fields)
            start_s = _seconds(start)
            if start_s is not None:
                jobs.append(NodeJob(job, user, state, start_s, _seconds(end)))
    return tuple(sorted(jobs, key=lambda job: job.start_s))


def parse_drains(text: str) -> list[Event]:
    """The drains and losses in rows ``NODE|START|STATE|REASON``.

    Other lines are left out, and the pending drains of a gate: the final one has a row, too.
    """
    drains = []
    for line in text.splitlines():
        # Anyone who may drain a node chooses the reason, which may have any character.
        node, start, state, reason = [*line.split("|", 3), "", "", ""][:4]
        start_s = _seconds(start)
        is_pending = reason.startswith(PENDING)
        if node and start_s is not None and state.startswith(_LOST) and not is_pending:
            words = f"{state[:20]}: {reason[:200]}"
            drains.append(Event(start_s, 0, node[:255], "", "drain", words))
    return drains


def _seconds(text: str) -> float | None:
    """A time of Slurm, which is in this machine's time zone; None: "Unknown", "None"."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None

"""What the node of a dead or dying job knows of it.

Its ranks that still run and their environment; core files, without gdb; and the node's own gate:
its last verdict, and the reasons of drains that `nodeready.agent.gate.drain` has kept.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nodeready.agent import users_file
from nodeready.agent.cores.listing import listing
from nodeready.agent.cores.program import read_notes
from nodeready.agent.failure_events import FileFailures
from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.stacks import processes, ranks
from nodeready.agent.witnesses import environment
from nodeready.core import wire
from nodeready.core.text import sanitise
from nodeready.subjects.environment_table import EnvironmentFacts, RankVariables

#: Maximum ranks that still run, and cores, of a node.
_MAX_RANKS, _MAX_CORES = 64, 8
#: Where the gate keeps its verdict and the incidents of its drains (nodeready/agent/gate); their
#: schemas; maximum bytes of a file, incidents, reasons of one, and characters of a reason.
_VERDICT, _INCIDENTS = "/run/nodeready/verdict.json", "/var/lib/nodeready/incidents"
_SCHEMAS = ("nodeready.verdict/1", "nodeready.agent-incident/1")
_MAX_BYTES, _MAX_INCIDENTS, _MAX_REASONS, _MAX_REASON = 1 << 18, 5, 4, 200


@dataclass(frozen=True)
class RunningRank:
    """A rank of the job that still runs. rank, local_rank: None: not known"""

    pid: wire.Pid
    rank: wire.Number | None
    local_rank: wire.Number | None
    variables: RankVariables


@dataclass(frozen=True)
class JobCore:
    """A core file that may be of the job. pid, signal, rank: None: the core does not tell"""

    path: wire.Path
    written_s: float  # since 1970, by the node's clock
    pid: int | None
    signal: int | None
    rank: int | None
    command: wire.Name


@dataclass(frozen=True)
class GateRecord:
    """A verdict of the node's gate by which it gets no job. drained: kept before a drain"""

    time_s: float  # since 1970, by the node's clock
    reasons: tuple[wire.Line, ...]
    drained: bool


@dataclass(frozen=True)
class JobNode:
    """What a node knows of the job."""

    ranks: tuple[RunningRank, ...] = ()  # that still run
    # of the node, that decide about the job's environment
    facts: EnvironmentFacts = EnvironmentFacts("not needed")
    cores: tuple[JobCore, ...] = ()  # of its user, the newest first
    # the last verdict of its gate, if it is no-go, and its drains
    gate: tuple[GateRecord, ...] = ()


def observe_cores(
    supervisor: ProcessSupervisor, job: str, uid: int, age_s: float
) -> tuple[JobCore, ...]:
    """The cores of the last `age_s` seconds that may be of the job. job, uid: as below"""
    cores = []
    files = [file for file in listing((), age_s).files if uid < 0 or file.owner in (0, uid)]
    for file in files[:_MAX_CORES]:
        if supervisor.left_s < 1:
            break
        selected = file.path, file.inode, file.modified_ns, file.size_bytes
        core = read_notes(supervisor, selected)
        is_others = uid >= 0 and core.uid not in (None, uid)
        if is_others or (job and core.jobs and job not in core.jobs):
            continue
        pid = core.pid if file.pid is None else file.pid
        number = file.signal if core.signal is None else core.signal
        moment = file.modified_ns / 1e9
        cores.append(JobCore(file.path, moment, pid, number, core.rank, core.comm))
    return tuple(cores)


def read_gate() -> tuple[GateRecord, ...]:
    """The gate's records of this node; a file that cannot be read is none."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(_INCIDENTS))[-_MAX_INCIDENTS:]
    paths = [_VERDICT, *(f"{_INCIDENTS}/{name}/incident.json" for name in names)]
    return tuple(record for path in paths if (record := _gate_record(path)))


def _gate_record(path: str) -> GateRecord | None:
    try:
        handle, status = users_file.open_regular(path)
        try:
            if status.st_uid not in (0, os.geteuid()):
                return None
            data = json.loads(os.read(handle, _MAX_BYTES))
        finally:
            os.close(handle)
        if data["schema"] not in _SCHEMAS or data.get("go"):
            return None
        reasons = tuple(sanitise(str(text), _MAX_REASON) for text in data["reasons"])
        taken = data.get("taken")
        moment = float(data["time"]) if taken is None else _epoch(taken)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return GateRecord(moment, reasons[:_MAX_REASONS], taken is not None)


def _epoch(text: str) -> float:
    """A time that `text.utc_now` has written, in seconds since 1970. Raises ValueError."""
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


def observe_environment(
    job: str,
    uid: int,
    variables: Mapping[str, str],
    files: Iterable[FileFailures],
    deadline: float,
) -> tuple[tuple[RunningRank, ...], EnvironmentFacts]:
    """The ranks of the job that still run, and the facts that decide about its environment.

    job:       Slurm's number; "": its ranks cannot be told from others'
    uid:       of its user; -1: not known
    variables: of its batch script; files: its logs on this node
    deadline:  a moment of time.monotonic()
    """
    live: Sequence[ranks.JobRank] = ()
    if job:
        scanned, _ = processes.scan(deadline)
        selection = ranks.Selection(job, uid=None if uid < 0 else uid)
        selected = ranks.select(scanned, selection, os.getpid())
        live = [rank for rank in selected if not rank.stranger][:_MAX_RANKS]
    rows: dict[object, dict[str, str]] = {"script": dict(variables)}
    for number, file in enumerate(files):
        for variable in file.facts.variables:
            key = number, variable.rank, variable.local_rank, variable.host
            rows.setdefault(key, dict(variables))[variable.name] = variable.value
    if not live and not any(rows.values()):
        return (), EnvironmentFacts("not needed")
    pids = [rank.process.pid for rank in live]
    network = environment.network_pid(pids or [os.getpid()])
    masters: dict[tuple[str, str], list[int]] = {}
    for row in (*(rank.process.environment or {} for rank in live), *rows.values()):
        if row.get("MASTER_ADDR"):
            masters[row["MASTER_ADDR"], row.get("MASTER_PORT", "")] = pids
    answers = processes.probe_each(
        lambda pid: wire.plain(environment.observe_rank(pid, network)), pids, deadline
    )
    running = []
    for rank in live:
        answer = answers.get(rank.process.pid, processes.HANGS)
        if answer is not processes.HANGS and not answer["absent"]:
            identity = rank.identity.rank, rank.identity.local_rank
            observed = wire.decode(RankVariables, answer)
            running.append(RunningRank(rank.process.pid, *identity, observed))
    return tuple(running), environment.observe_node(network, masters, deadline)

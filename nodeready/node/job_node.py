"""What the node of a dead or dying job knows of it: its live ranks, and their environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nodeready.node.failure_events import FileFailures
from nodeready.node.stacks import processes, ranks
from nodeready.node.witnesses import environment
from nodeready.subjects import wire
from nodeready.subjects.job_environment import EnvironmentFacts, RankVariables

#: Maximum ranks that still run, of a node.
_MAX_RANKS = 64


@dataclass(frozen=True)
class RunningRank:
    """A rank of the job that still runs. rank, local_rank: None: not known"""

    pid: wire.Pid
    rank: wire.Number | None
    local_rank: wire.Number | None
    variables: RankVariables


@dataclass(frozen=True)
class JobNode:
    """What a node knows of the job.

    ranks: that still run
    facts: of the node, that decide about the job's environment
    """

    ranks: tuple[RunningRank, ...] = ()
    facts: EnvironmentFacts = EnvironmentFacts("not needed")


def observe_job_node(
    job: str,
    uid: int,
    variables: Mapping[str, str],
    files: Iterable[FileFailures],
    deadline: float,
) -> JobNode:
    """What this node knows of the job.

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
        for variable in file.variables:
            key = number, variable.rank, variable.local_rank, variable.host
            rows.setdefault(key, dict(variables))[variable.name] = variable.value
    if not live and not any(rows.values()):
        return JobNode()
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
    return JobNode(tuple(running), environment.observe_node(network, masters, deadline))

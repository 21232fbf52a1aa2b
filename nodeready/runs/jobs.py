"""The run of `nodeready jobs`: what runs where, from traces without stacks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Annotated, ClassVar, NamedTuple

from nodeready.agent.stacks.ranks import CLAIMS, LAUNCHER
from nodeready.core.exit_codes import Refused
from nodeready.core.json_types import Count, Moment, MomentOrEmpty, Name, Names
from nodeready.core.outcome import NodeGaps, gaps_code, node_gaps
from nodeready.core.policy import Policy
from nodeready.core.text import counted, sanitise, utc_now
from nodeready.fleet.inventory.nodeset import folded, natural
from nodeready.runs import targets
from nodeready.runs.options import JobsOptions
from nodeready.runs.stacks.collect import capture, program_config
from nodeready.runs.stacks.document import STACKS_FAILURES
from nodeready.runs.stacks.trace import Trace
from nodeready.runs.targets import Targets, ask_with_progress, keep_gaps
from nodeready.runs.tell import Tell

#: The advice where no process of a named job was found.
IF_ENDED = "if it has ended: nodeready postmortem shows who failed first"
MAX_NAME = 40  # maximum columns of a job's name or user
_MAX_LINES = 5  # maximum jobs that are named where another job was asked for
_TIMEOUT_S = 30  # seconds for one node, after it is connected: no stack is taken
_MOMENT = "%Y-%m-%dT%H:%M:%SZ"  # the format of a trace's `started`


class RunningJob(NamedTuple):
    """A job of one user, as far as its processes show it."""

    # its name, as ``--job`` takes it: Slurm's number, torchrun's id of the run, or ADDRESS:PORT;
    # empty: its processes name no job
    job: str
    user: str  # whose processes they are
    nodes: Names  # the nodes on which it has processes
    ranks: tuple[Count, ...]  # the numbers of its ranks that were found
    processes: Count  # the number of its processes, with or without a number
    launchers: Count  # the number of launchers that have started no rank yet
    # the number of ranks that it is to have; None: not known
    world_size: Annotated[int | None, {"minimum": 1}]
    since: MomentOrEmpty  # when the earliest of its processes began; empty: not known
    command: str  # the command line of its first rank

    @property
    def rank_count(self) -> str:
        """``8 of 16``; the processes where they have no numbers; what the launchers wait for."""
        if not self.processes:
            return counted(self.launchers, "launcher")
        if not self.ranks:
            return counted(self.processes, "process", "processes")
        size = self.world_size
        if size is None or size == len(self.ranks):
            return str(len(self.ranks))
        return f"{len(self.ranks)} of {size}"

    @property
    def summary(self) -> str:
        """``job 4711 of ada: 8 ranks on gpu[1-2]``."""
        name = f"job {sanitise(self.job)[:MAX_NAME]}" if self.job else "a job without a name"
        count = self.rank_count
        noun = "" if not self.ranks else " rank" if count == "1" else " ranks"
        user = sanitise(self.user)[:MAX_NAME]
        return f"{name} of {user}: {count}{noun} on {folded(self.nodes)}"


@dataclass(frozen=True)
class Jobs:
    """The document of `nodeready jobs`: what runs where. Text is one line."""

    SCHEMA: ClassVar = "jobs"
    VERSION: ClassVar = 2
    JSON: ClassVar = ("started", "finished", "complete", "nodes", "jobs", "gaps")

    started: Moment  # when the nodes were first asked, UTC
    finished: Moment  # when the last answer came, UTC
    nodes: tuple[Name, ...]  # the nodes that answered
    jobs: tuple[RunningJob, ...]  # by user and name
    gaps: NodeGaps  # the nodes that gave no answer
    complete: bool = True  # False when it was interrupted


def jobs_code(document: Jobs) -> int:
    """The exit code: 3 if a node's processes could not be read."""
    return gaps_code(document.gaps, complete=document.complete, failures=STACKS_FAILURES)


class _JobProcess(NamedTuple):
    """A process of a job."""

    rank: int | None
    is_launcher: bool
    world_size: int
    command: str
    node: str
    began: str  # by the node's own clock

    @property
    def order(self) -> tuple[bool, bool, bool, int]:
        """The job has the command line of its first process."""
        return not self.command, self.is_launcher, self.rank is None, self.rank or 0


def _job(name: str, user: str, members: list[_JobProcess]) -> RunningJob:
    launchers = sum(member.is_launcher for member in members)
    return RunningJob(
        name,
        user,
        tuple(sorted({member.node for member in members}, key=natural)),
        tuple(sorted({member.rank for member in members if member.rank is not None})),
        len(members) - launchers,
        launchers,
        max(member.world_size for member in members) or None,
        min((member.began for member in members if member.began), default=""),
        min(members, key=lambda member: member.order).command,
    )


def _began(trace: Trace, start_s: float) -> str:
    """When a process began, by the node's own clock; "": not known."""
    if not trace.uptime_s:
        return ""
    try:
        trace_time = datetime.strptime(trace.started, _MOMENT).replace(tzinfo=timezone.utc)
        return (trace_time - timedelta(seconds=trace.uptime_s - start_s)).strftime(_MOMENT)
    except (ValueError, OverflowError):
        return ""


def running_jobs(traces: Iterable[Trace]) -> tuple[RunningJob, ...]:
    """The jobs of these traces; without processes that only claim a job."""
    members: dict[tuple[str, str], list[_JobProcess]] = {}
    for trace in traces:
        for process in trace.processes:
            if not process.note.startswith(CLAIMS):
                is_launcher = process.note.startswith(LAUNCHER)
                words = process.world_size or 0, process.command, trace.node
                began = _began(trace, process.start_s)
                member = _JobProcess(process.rank, is_launcher, *words, began)
                members.setdefault((process.user, process.job), []).append(member)
    keys = sorted(members, key=lambda key: tuple(map(natural, key)))
    return tuple(_job(name, user, members[user, name]) for user, name in keys)


# --- Asking.


def run(inventory: str | None, options: JobsOptions, tell: Tell) -> Jobs:
    """The jobs of the nodes. inventory: None: this machine, or the job's nodes. Raises Refused."""
    if options.via == "ssh" and options.local == (inventory is not None):
        raise Refused("give either an INVENTORY or --local")
    if options.local and (options.via != "ssh" or options.limit is not None):
        raise Refused("--local: cannot be combined with --via or --limit")
    if options.local:
        nodes = targets.local_targets(Policy(), sudo=options.sudo)
    else:
        nodes = targets.select_targets(inventory, options, job=options.job, tell=tell.note)
    with nodes.transport:
        document = find_jobs(nodes, tell, options.user or "")
    keep_gaps(nodes, tell, document.gaps, complete=document.complete)
    return document


def find_jobs(nodes: Targets, tell: Tell, user: str = "") -> Jobs:
    """The jobs of the nodes, found as `nodeready stacks` finds them."""
    started = utc_now()
    config = program_config(_TIMEOUT_S, user=user, samples=0)
    captured = capture(ask_with_progress(nodes.transport, tell), nodes.transport.nodes, config)
    jobs = running_jobs(captured.traces())
    answered = tuple(name for name in captured.nodes if name not in captured.gaps)
    return Jobs(started, utc_now(), answered, jobs, node_gaps(captured.gaps), captured.complete)


def running_lines(nodes: Targets, tell: Tell) -> list[str]:
    """The jobs that run on the nodes, a line each; []: none, or they could not be asked."""
    jobs = find_jobs(nodes, tell).jobs
    lines = [f"running: {job.summary}" for job in jobs[:_MAX_LINES]]
    if len(jobs) > len(lines):
        unlisted = counted(len(jobs) - len(lines), "more job")
        lines.append(f"running: {unlisted}: nodeready jobs")
    return lines

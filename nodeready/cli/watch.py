"""`nodeready watch`: probe a job every minute, and keep its evidence when it hangs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from nodeready.agent.witnesses import motion
from nodeready.cli.conversations import ask_with_progress
from nodeready.cli.default_inventory import find_inventory
from nodeready.cli.incident import JOB, TIMEOUT, USER, collector, nodes_of_job, refuse_bad_search
from nodeready.cli.jobs import running_lines
from nodeready.cli.options import (
    Refused,
    command,
    inventory_argument,
    local_option,
    option,
    output_directory,
    span_option,
    transport_options,
)
from nodeready.cli.screen import Screen
from nodeready.cli.targets import TargetOptions, Targets, running_job
from nodeready.core.exit_codes import INTERRUPTED, exit_code
from nodeready.core.files import make_directory, state_directory, user_name
from nodeready.core.outcome import gaps_code, node_gaps
from nodeready.core.text import sanitise, utc_now
from nodeready.fleet.inventory.placement import JobPlacement
from nodeready.reports.lines import node_set
from nodeready.reports.table_layout import show_gaps
from nodeready.runs import incident as incidents
from nodeready.runs.incident import ForeignDirectory, Incident
from nodeready.runs.watch import LIMIT_S, JobSnapshot, Watch, probe

#: Maximum seconds for the command of ``--then``.
_COMMAND_TIMEOUT_S = 600


def _default_directory() -> Path:
    return state_directory() / "incidents"


def _run_command(command: list[str], incident: Incident, screen: Screen) -> bool:
    """Run the user's command with the verdict in its environment. Returns whether it succeeded."""
    verdict = incident.verdict
    variables = {
        "NODEREADY_INCIDENT": incident.archive.removesuffix(".tar.gz"),
        "NODEREADY_JOB": incident.job,
        "NODEREADY_VERDICT": sanitise(
            f"{verdict.kind}: {verdict.text}" if verdict else "unclear", 4000
        ),
    }
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    except OSError as problem:
        screen.say(f"--then {command[0]}: {problem.strerror}")
        return False
    try:
        status = process.wait(timeout=_COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        screen.say(f"--then {command[0]}: was killed after {_COMMAND_TIMEOUT_S} s")
        status = -1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status > 0:
        screen.say(f"--then {command[0]}: exit status {status}")
    return status == 0


@dataclass
class _Watcher:
    """One job while it is watched."""

    nodes: Targets
    screen: Screen
    job: str
    user: str
    timeout: int
    watch: Watch
    directory: Path  # of the incidents
    command: list[str]  # the user's command, run after an incident
    has_ended: Callable[[], bool]  # whether Slurm says that the job has ended
    owner: str = ""  # uid of the job's user; "": not known yet
    # Slurm's record of the job; its other nodes are not probed
    placement: JobPlacement = field(default_factory=JobPlacement)
    failed: bool = False  # an incident has no archive, or the command failed
    hangs: int = 0  # the number of hangs so far
    _last_summary: str = ""

    def probe(self) -> JobSnapshot:
        """A snapshot of the ranks of the job's user; ranks of other users are left out.

        Raises Refused if several users have ranks of the job and its owner is unknown.
        """
        transport = self.nodes.transport
        config = motion.MotionConfig(
            "",
            transport.tag,
            LIMIT_S,
            self.job,
            user=self.user,
            owner=self.owner,
            parts=self.placement.parts,
        )
        # The command runs unattended: progress would fill its log.
        ask = ask_with_progress(transport, Screen("never", quiet=True))
        nodes = [name for name in transport.nodes if name not in self.placement.other_nodes]
        snapshot = probe(ask, nodes, config, time.monotonic())
        if not snapshot.ranks and self.placement.user:
            self._update_placement()
        users = snapshot.users
        if self.user or self.owner or not users:
            return snapshot
        if len(users) > 1:
            names = " and ".join(sorted(user_name(uid or 0) for uid in users))
            raise Refused(f"the owner of job {self.job} is unknown: {names} claim it: --user NAME")
        self.owner = str(users[0])
        return snapshot.of_user(users[0])

    def _update_placement(self) -> None:
        """Ask Slurm again: a requeued job gets other nodes."""
        from nodeready.fleet.inventory.slurm import job_placement

        placement = job_placement(self.job, self.nodes.transport.nodes)
        # Slurm forgets a job minutes after its end.
        if placement.user:
            self.placement = placement

    def print_judgement(self) -> None:
        """Print the judgement, unless only its numbers have changed."""
        text = self.watch.text
        summary = f"{self.watch.judgement.kind} {text.partition(': ')[2].partition(':')[0]}"
        if summary != self._last_summary:
            self._last_summary = summary
            click.echo(sanitise(f"{utc_now()} job {self.job}: {text}"))

    def take_incident(self) -> Incident | None:
        """Take an incident and run the user's command. None: its directory cannot be made."""
        still_s = self.watch.judgement.still_s
        signs = self.watch.intervals[-1].signs
        still = "; ".join(sign.text for sign in signs if sign.moves is False)
        reason = f"nothing has moved for {still_s:.0f} s: {still}"
        path = self.directory / incidents.directory_name(self.job, utc_now())
        try:
            make_directory(self.directory, 0o700)
            directory = incidents.prepare(path)
        except (ForeignDirectory, OSError) as problem:
            text = str(problem)
            if isinstance(problem, OSError):
                text = f"{problem.filename}: {problem.strerror}"
            self.screen.say(f"no incident: {text}")
            self.failed = True
            return None
        evidence = collector(
            self.nodes, self.screen, self.job, self.user, self.timeout, owner=self.owner
        )
        incident, archive_problem = evidence.collect(directory, reason)
        if archive_problem:
            self.screen.say(f"no archive: {archive_problem}")
        verdict = incident.verdict
        summary = f"{verdict.kind}: {verdict.text}" if verdict else "no verdict"
        text = f"{utc_now()} job {self.job}: incident {incident.archive or path}: {summary}"
        click.echo(sanitise(text))
        self.failed = self.failed or not incident.archive
        if verdict is not None and verdict.kind == "not-stuck":
            # The stacks show more than the counters, and overrule them.
            self.screen.note("no hang: the stacks show that the job goes on")
            return incident
        self.hangs += 1
        if self.command and incident.complete:
            self.failed = not _run_command(self.command, incident, self.screen) or self.failed
        return incident


@command()
@inventory_argument
@local_option
@JOB
@USER
@TIMEOUT
@span_option(
    "--interval",
    minimum_s=1,
    maximum_s=3600,
    default="60s",
    general=False,
    help="Time between two samples.",
)
# The name of --interval in earlier releases.
@span_option("--every", minimum_s=1, maximum_s=3600, hidden=True, help="Time between two samples.")
@span_option(
    "--confirm",
    minimum_s=1,
    maximum_s=86400,
    default="3m",
    help="Time without progress before an incident is taken.",
)
@option("--then", metavar="COMMAND", help="Command to run after an incident, once for each hang.")
@option("--once", is_flag=True, help="End after the first incident, with exit status 3.")
@output_directory("Where incidents go: DIR/JOB-TIME.", general=False)
@transport_options
def watch(
    inventory: str | None,
    *,
    local: bool,
    job: str,
    user: str | None,
    timeout: int,
    interval: float,
    every: float | None,
    confirm: float,
    then: str | None,
    once: bool,
    output: str | None,
    **shared: Any,
) -> int:
    """Watch a job, and keep its evidence when it hangs. It ends with the job.

    Every snapshot reads counters of /proc and takes no stack: CPU time, voluntary switches, bytes,
    ports, logs. When at least two of these show for --confirm seconds that nothing moves, and none
    shows a movement, an incident is taken and COMMAND is run, without a shell. Its environment has
    NODEREADY_INCIDENT (the directory), NODEREADY_JOB and NODEREADY_VERDICT.

    \b
    Examples:
      nodeready watch inventories/prod.py --job 4711 -o /var/tmp/hangs
      nodeready watch inventories/prod.py --job 4711 --then '/usr/local/bin/page oncall'
      nodeready watch --via srun --job 4711 --once
    """
    from nodeready.fleet.inventory.slurm import job_placement

    options = TargetOptions(**shared)
    refuse_bad_search(timeout, job, user)
    try:
        command = shlex.split(then or "")
    except ValueError as problem:
        raise Refused(f"--then {then}: {problem}") from None
    if then is not None and not command:
        raise Refused("--then: names no command")
    screen = options.screen()
    inventory = find_inventory(inventory, options, elsewhere=local or options.via != "ssh")
    nodes, name = nodes_of_job(inventory, job, options, local=local)
    directory = Path(output) if output is not None else _default_directory()
    placement = JobPlacement() if user else job_placement(name, nodes.transport.nodes)
    watcher = _Watcher(
        nodes,
        screen,
        name,
        user or "",
        timeout,
        Watch(confirm),
        directory,
        command,
        has_ended=(lambda: _ended(job)) if nodes.job else (lambda: False),
        owner=placement.user,
        placement=placement,
    )
    with nodes.transport:
        try:
            return _watch_until_end(watcher, every or interval, once)
        except KeyboardInterrupt:
            return INTERRUPTED


def _ended(job: str) -> bool:
    """Whether Slurm no longer runs the job."""
    try:
        running_job(job)
    except Refused:
        return True
    return False


def _watch_until_end(watcher: _Watcher, interval_s: float, once: bool) -> int:
    """Probe the job until it has ended, or --once ends it. Returns the exit code."""
    is_first = True
    while True:
        began = time.monotonic()
        snapshot = watcher.probe()
        if snapshot.interrupted or watcher.nodes.transport.interrupted:
            return INTERRUPTED
        if is_first and not snapshot.ranks:
            _refuse_missing_job(watcher, snapshot)
            return gaps_code(node_gaps(snapshot.gaps), complete=True)
        is_first = False
        if not snapshot.ranks and snapshot.gaps and watcher.has_ended():
            snapshot = JobSnapshot(snapshot.taken_s)
        judgement = watcher.watch.add(snapshot)
        watcher.print_judgement()
        if judgement.kind == "gone":
            return exit_code(failed=watcher.failed)
        if judgement.fire:
            incident = watcher.take_incident()
            if incident is not None and not incident.complete:
                return INTERRUPTED
            if once and watcher.hangs:
                return exit_code(failed=watcher.failed, check=True)
        time.sleep(max(0.0, interval_s - (time.monotonic() - began)))


def _refuse_missing_job(watcher: _Watcher, snapshot: JobSnapshot) -> None:
    """Print why no rank was found. Raises Refused if every node has answered."""
    watcher.screen.show_on_stderr(show_gaps(node_gaps(snapshot.gaps)))
    if not snapshot.gaps:
        names = node_set(watcher.nodes.transport.nodes)
        job_nodes = watcher.placement.nodes
        advice = "start it when the job runs"
        if job_nodes:
            advice = f"Slurm runs the job on {node_set(job_nodes)}"
        text = f"no ranks of job {watcher.job} on {names}: {advice}"
        raise Refused("\n".join([text, *running_lines(watcher.nodes, watcher.screen)]))

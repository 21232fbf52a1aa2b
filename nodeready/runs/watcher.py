"""The run of `nodeready watch`: probes a job again and again, and takes incidents."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path

from nodeready.agent.witnesses import motion
from nodeready.core.exit_codes import INTERRUPTED, Refused, exit_code
from nodeready.core.files import make_directory, state_directory, user_name
from nodeready.core.outcome import NodeGaps, gaps_code, node_gaps
from nodeready.core.text import sanitise, utc_now
from nodeready.fleet.inventory.nodeset import folded
from nodeready.fleet.inventory.slurm import JobPlacement, job_placement
from nodeready.runs import incident as incidents
from nodeready.runs.collector import EvidenceCollector, WriteFacts, nodes_of_job
from nodeready.runs.incident import Incident
from nodeready.runs.jobs import running_lines
from nodeready.runs.options import WatchOptions
from nodeready.runs.stacks.command import Render
from nodeready.runs.targets import ask_with_progress, running_job
from nodeready.runs.tell import Tell
from nodeready.runs.values import checked_regex
from nodeready.runs.watch import LIMIT_S, JobSnapshot, Watch, probe

_COMMAND_TIMEOUT_S = 600  # maximum seconds for the command of ``--then``
_WAIT_S = 5.0  # seconds between two probes for the first rank (``--wait``)


def run(
    inventory: str | None,
    options: WatchOptions,
    tell: Tell,
    render: Render,
    write_facts: WriteFacts,
) -> Generator[str | NodeGaps, None, int]:
    """Yields lines about the job, and the nodes that do not answer; returns the exit code. It ends
    with the job, or with ``--once`` after an incident. Raises Refused.
    """
    try:
        command = shlex.split(options.after_incident or "")
    except ValueError as problem:
        raise Refused(f"--then {options.after_incident}: {problem}") from None
    if options.after_incident is not None and not command:
        raise Refused("--then: names no command")
    checked_regex("--progress", options.progress)
    nodes, name = nodes_of_job(inventory, options, tell)
    placement = JobPlacement()
    if not options.user:
        placement = job_placement(name, nodes.transport.nodes)
    user = options.user or ""
    evidence = EvidenceCollector(nodes, tell, name, user, options.timeout, render, write_facts)
    watcher = _Watcher(evidence, options, command, placement, owner=placement.user)
    with nodes.transport:
        try:
            return (yield from watcher.run(options.every or options.interval))
        except KeyboardInterrupt:
            return INTERRUPTED


@dataclass
class _Watcher:
    evidence: EvidenceCollector  # of an incident, before it is taken
    options: WatchOptions
    command: list[str]  # the user's command, run after an incident
    placement: JobPlacement  # Slurm's record of the job; its other nodes are not probed
    owner: str = ""  # uid of the job's user; "": not known yet
    failed: bool = False  # an incident has no archive, or the command failed
    hangs: int = 0  # the number of hangs so far
    watch: Watch = field(init=False)
    _last_summary: str = ""

    def __post_init__(self) -> None:
        self.nodes, self.tell = self.evidence.nodes, self.evidence.tell
        self.job = self.evidence.job
        self.watch = Watch(self.options.confirm)

    def run(self, interval_s: float) -> Generator[str | NodeGaps, None, int]:
        """Probe the job until it has ended, or --once ends it. Returns the exit code."""
        is_first = True
        wait_until = time.monotonic() + (self.options.wait or 0)
        while True:
            began = time.monotonic()
            snapshot = self.probe()
            if snapshot.interrupted or self.nodes.transport.interrupted:
                return INTERRUPTED
            if is_first and not snapshot.ranks and began < wait_until:
                time.sleep(min(_WAIT_S, interval_s))
                continue
            if is_first and not snapshot.ranks:
                gaps = node_gaps(snapshot.gaps)
                yield gaps
                if not gaps:
                    self._refuse_missing_job()
                return gaps_code(gaps, complete=True)
            is_first = False
            if not snapshot.ranks and snapshot.gaps and self._has_ended():
                snapshot = JobSnapshot(snapshot.taken_s)
            judgement = self.watch.add(snapshot)
            text = self.watch.text
            summary = f"{judgement.kind} {text.partition(': ')[2].partition(':')[0]}"
            # Not where only the numbers have changed.
            if summary != self._last_summary:
                self._last_summary = summary
                yield f"{utc_now()} job {self.job}: {text}"
            if judgement.kind == "gone":
                return exit_code(failed=self.failed)
            if judgement.fire:
                incident = yield from self.take_incident()
                if incident is not None and not incident.complete:
                    return INTERRUPTED
                if self.options.once and self.hangs:
                    return exit_code(failed=self.failed, check=True)
            if self.watch.confirm_s < self.options.confirm:  # the job's own timeout is short
                interval_s = min(interval_s, self.watch.confirm_s / 8)
            time.sleep(max(0.0, interval_s - (time.monotonic() - began)))

    def probe(self) -> JobSnapshot:
        """A snapshot of the ranks of the job's user. Raises Refused if several users claim it."""
        transport, user = self.nodes.transport, self.options.user or ""
        parts, progress = self.placement.parts, self.options.progress or ""
        config = motion.MotionConfig("", transport.tag, LIMIT_S, self.job, user=user)
        config = replace(config, owner=self.owner, parts=parts, progress=progress)
        # The command runs unattended: progress would fill its log.
        ask = ask_with_progress(transport, self.tell.without_progress())
        names = [name for name in transport.nodes if name not in self.placement.other_nodes]
        snapshot = probe(ask, names, config, time.monotonic())
        if not snapshot.ranks and self.placement.user:
            # A requeued job gets other nodes. Slurm forgets a job minutes after its end.
            placement = job_placement(self.job, transport.nodes)
            self.placement = placement if placement.user else self.placement
        users = snapshot.users
        if user or self.owner or not users:
            return snapshot
        if len(users) > 1:
            names = sorted(user_name(uid or 0) for uid in users)
            text = f"the owner of job {self.job} is unknown: {' and '.join(names)} claim it"
            raise Refused(f"{text}: --user NAME")
        self.owner = str(users[0])
        return snapshot.of_user(users[0])

    def _has_ended(self) -> bool:
        """Whether Slurm no longer runs the job, in whose steps the requests run."""
        if not self.nodes.job:
            return False
        try:
            running_job(self.options.job)
        except Refused:
            return True
        return False

    def _refuse_missing_job(self) -> None:
        """Raises Refused: every node has answered, and none has a rank."""
        advice = "start it when the job runs"
        if self.placement.nodes:
            advice = f"Slurm runs the job on {folded(self.placement.nodes)}"
        text = f"no ranks of job {self.job} on {folded(self.nodes.transport.nodes)}: {advice}"
        raise Refused("\n".join([text, *running_lines(self.nodes, self.tell)]))

    def take_incident(self) -> Generator[str, None, Incident | None]:
        """Take an incident and run the user's command. None: its directory cannot be made."""
        signs = self.watch.intervals[-1].signs
        still = "; ".join(sign.text for sign in signs if sign.moves is False)
        reason = f"nothing has moved for {self.watch.judgement.still_s:.0f} s: {still}"
        output = self.options.output
        place = state_directory() / "incidents" if output is None else Path(output)
        path = place / incidents.directory_name(self.job, utc_now())
        try:
            make_directory(place, 0o700)
            directory = incidents.prepare(path, option="")
        except (Refused, OSError) as problem:
            text = str(problem)
            if isinstance(problem, OSError):
                text = f"{problem.filename}: {problem.strerror}"
            self.tell.say(f"no incident: {text}")
            self.failed = True
            return None
        evidence = replace(self.evidence, owner=self.owner)
        incident, archive_problem = evidence.collect(directory, reason)
        if archive_problem:
            self.tell.say(f"no archive: {archive_problem}")
        verdict = incident.verdict
        summary = f"{verdict.kind}: {verdict.text}" if verdict else "no verdict"
        yield f"{utc_now()} job {self.job}: incident {incident.archive or path}: {summary}"
        self.failed = self.failed or not incident.archive
        if verdict is not None and verdict.kind == "not-stuck":
            # The stacks show more than the counters, and overrule them.
            self.tell.note("no hang: the stacks show that the job goes on")
            return incident
        self.hangs += 1
        if self.command and incident.complete:
            self.failed = not _run_command(self.command, incident, self.tell) or self.failed
        return incident


def _run_command(command: list[str], incident: Incident, tell: Tell) -> bool:
    """Run the user's command with the verdict in its environment. Returns whether it succeeded."""
    verdict = incident.verdict
    words = f"{verdict.kind}: {verdict.text}" if verdict else "unclear"
    variables = {"NODEREADY_JOB": incident.job, "NODEREADY_VERDICT": sanitise(words, 4000)}
    variables["NODEREADY_INCIDENT"] = incident.archive.removesuffix(".tar.gz")
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    except OSError as problem:
        tell.say(f"--then {command[0]}: {problem.strerror}")
        return False
    try:
        status = process.wait(timeout=_COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        tell.say(f"--then {command[0]}: was killed after {_COMMAND_TIMEOUT_S} s")
        status = -1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status > 0:
        tell.say(f"--then {command[0]}: exit status {status}")
    return status == 0

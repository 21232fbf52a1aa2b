"""`nodeready watch`: look at a job every minute, and keep its evidence when it hangs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from nodeready.cli.conversations import ask_with_progress
from nodeready.cli.incident import (
    JOB,
    LOCAL,
    TIMEOUT,
    USER,
    checked,
    collector,
    nodes_of_job,
)
from nodeready.cli.options import Refused, asking, option, output_directory
from nodeready.cli.screen import Screen
from nodeready.cli.targets import TargetOptions, Targets
from nodeready.exit_codes import INTERRUPTED, exit_code
from nodeready.files import make_directory, user_name
from nodeready.node.witnesses import motion
from nodeready.reports.lines import nodes as folded
from nodeready.text import now, sanitise
from nodeready.triage import incident as kept
from nodeready.triage import watch as watching
from nodeready.triage.incident import ForeignDirectory, Incident

#: Seconds for the command of ``--then``.
_THEN_S = 600


def _default_place() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "nodeready" / "incidents"


def _run_then(words: list[str], incident: Incident, screen: Screen) -> bool:
    """Run the user's command with the verdict in its environment; whether it succeeded."""
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
            words,
            stdin=subprocess.DEVNULL,
            stdout=2,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    except OSError as problem:
        screen.say(f"--then {words[0]}: {problem.strerror}")
        return False
    try:
        status = process.wait(timeout=_THEN_S)
    except subprocess.TimeoutExpired:
        screen.say(f"--then {words[0]}: has not ended in {_THEN_S} s, and was ended")
        status = -1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status > 0:
        screen.say(f"--then {words[0]}: exit status {status}")
    return status == 0


@dataclass
class _Watcher:
    """One job while it is watched.

    place:  the directory of the incidents
    then:   the user's command
    over:   tells whether the job has ended, without its processes: Slurm, for example
    owner:  uid of the job's user; "": not known yet
    hangs:  their number
    failed: an incident is incomplete, or the command failed
    """

    nodes: Targets
    screen: Screen
    job: str
    user: str
    timeout: int
    watch: watching.Watch
    place: Path
    command: list[str]
    over: Callable[[], bool]
    owner: str = ""
    failed: bool = False
    hangs: int = 0
    _last_summary: str = ""

    def look(self) -> watching.Look:
        """Look once at the ranks of the job's user on all nodes; other claimants are left out.

        Raises Refused where several users claim the job and its owner is unknown.
        """
        transport, owner_options = self.nodes.transport, {"user": self.user, "owner": self.owner}
        config = motion.MotionConfig(
            "", transport.tag, watching.LIMIT_S, self.job, **owner_options
        )
        # It runs unattended: progress would fill the log.
        ask = ask_with_progress(transport, Screen("never", quiet=True))
        look = watching.take(ask, transport.nodes, config, time.monotonic())
        users = look.users
        if self.user or self.owner or not users:
            return look
        if len(users) > 1:
            names = " and ".join(sorted(user_name(uid or 0) for uid in users))
            raise Refused(f"whose job {self.job} is, nothing tells: {names} claim it: --user NAME")
        self.owner = str(users[0])
        return look.of(users[0])

    def tell(self) -> None:
        """Print the judgement when its kind has changed, not only its numbers."""
        words = self.watch.words
        summary = f"{self.watch.judgement.kind} {words.partition(': ')[2].partition(':')[0]}"
        if summary != self._last_summary:
            self._last_summary = summary
            click.echo(sanitise(f"{now()} job {self.job}: {words}", 1000))

    def fire(self) -> Incident | None:
        """Take an incident and run the user's command."""
        still_s = self.watch.judgement.still_s
        signs = self.watch.intervals[-1].signs
        still = "; ".join(sign.text for sign in signs if sign.moves is False)
        reason = f"nothing has moved for {still_s:.0f} s: {still}"
        path = self.place / kept.directory_name(self.job, now())
        try:
            make_directory(self.place, 0o700)
            directory = kept.prepare(path)
        except (ForeignDirectory, OSError) as problem:
            problem_text = (
                f"{problem.filename}: {problem.strerror}" if isinstance(problem, OSError) else ""
            )
            self.screen.say(f"no incident: {problem_text or problem}")
            self.failed = True
            return None
        evidence = collector(
            self.nodes, self.screen, self.job, self.user, self.timeout, owner=self.owner
        )
        incident, problem_text = evidence.collect(directory, reason)
        if problem_text:
            self.screen.say(f"no archive: {problem_text}")
        verdict = incident.verdict
        summary = f"{verdict.kind}: {verdict.text}" if verdict else "no verdict"
        click.echo(
            sanitise(
                f"{now()} job {self.job}: incident {incident.archive or path}: {summary}", 2000
            )
        )
        self.failed = self.failed or not incident.archive
        if verdict is not None and verdict.kind == "not-stuck":
            # The stacks cost more and know more: they overrule the watch.
            self.screen.note("its stacks say that the job goes on: that was no hang")
            return incident
        self.hangs += 1
        if self.command and incident.complete:
            self.failed = not _run_then(self.command, incident, self.screen) or self.failed
        return incident


@click.command()
@click.argument("inventory", required=False)
@LOCAL
@JOB
@USER
@TIMEOUT
@option(
    "--every",
    type=click.FloatRange(1, 3600),
    default=60.0,
    metavar="S",
    help="Seconds between two samples.",
)
@option(
    "--confirm",
    type=click.FloatRange(1, 86400),
    default=180.0,
    metavar="S",
    help="Seconds without progress before an incident is taken.",
)
@option("--then", metavar="COMMAND", help="Run this after an incident, once for each hang.")
@option("--once", is_flag=True, help="End after the first incident, with exit status 3.")
@output_directory("Where incidents go: DIR/JOB-TIME.", general=False)
@asking
def watch(
    inventory: str | None,
    *,
    local: bool,
    job: str,
    user: str | None,
    timeout: int,
    every: float,
    confirm: float,
    then: str | None,
    once: bool,
    output: str | None,
    **shared: Any,
) -> int:
    """Watch a job, and keep its evidence when it hangs. It ends with the job.

    Every look reads counters of /proc, and takes no stack: CPU time, voluntary switches, bytes,
    ports, logs. When two of these agree for the time of --confirm that nothing moves, and none
    sees a movement, an incident is taken and COMMAND is run, which finds NODEREADY_INCIDENT (the
    directory), NODEREADY_JOB and NODEREADY_VERDICT in its environment. No shell reads COMMAND.

    \b
    Examples:
      nodeready watch inventories/prod.py --job 4711 -o /var/tmp/hangs
      nodeready watch inventories/prod.py --job 4711 --then '/usr/local/bin/page oncall'
      nodeready watch --via srun --job 4711 --once
    """
    from nodeready.inventory.slurm import job_user

    options = TargetOptions(**shared)
    checked(timeout, job, user)
    try:
        words = shlex.split(then or "")
    except ValueError as problem:
        raise Refused(f"--then {then}: {problem}") from None
    if then is not None and not words:
        raise Refused("--then: there is no command in it")
    screen = options.screen()
    nodes, name = nodes_of_job(inventory, job, options, local=local)
    place = Path(output) if output is not None else _default_place()
    watcher = _Watcher(
        nodes,
        screen,
        name,
        user or "",
        timeout,
        watching.Watch(confirm),
        place,
        words,
        over=(lambda: _ended(job)) if nodes.job else (lambda: False),
        owner="" if user else job_user(name),
    )
    with nodes.transport:
        try:
            return _watched(watcher, every, once)
        except KeyboardInterrupt:
            return INTERRUPTED


def _ended(job: str) -> bool:
    """Whether Slurm says that the job does not run any more: no step can be started in it."""
    from nodeready.transport.allocation import SrunError
    from nodeready.transport.allocation import running as running_job

    try:
        running_job(job)
    except SrunError:
        return True
    return False


def _watched(watcher: _Watcher, every: float, once: bool) -> int:
    """Look until the job has ended. Returns the exit code."""
    first = True
    while True:
        began = time.monotonic()
        look = watcher.look()
        if look.interrupted or watcher.nodes.transport.interrupted:
            return INTERRUPTED
        if first and not look.ranks:
            _refuse_nothing(watcher, look)
            return exit_code(unreachable=bool(look.unreached), failed=not look.unreached)
        first = False
        if not look.ranks and look.errors and watcher.over():
            look = watching.Look(look.at)
        judgement = watcher.watch.add(look)
        watcher.tell()
        if judgement.kind == "gone":
            return exit_code(failed=watcher.failed)
        if judgement.fire:
            incident = watcher.fire()
            if incident is not None and not incident.complete:
                return INTERRUPTED
            if once and watcher.hangs:
                return exit_code(failed=watcher.failed, check=True)
        time.sleep(max(0.0, every - (time.monotonic() - began)))


def _refuse_nothing(watcher: _Watcher, look: watching.Look) -> None:
    """Say why there is nothing to watch. Raises Refused where every node has answered."""
    for name, reason in list(look.errors.items())[:10]:
        watcher.screen.say(f"{name}: {reason}")
    if not look.errors:
        names = folded(watcher.nodes.transport.nodes)
        raise Refused(f"no ranks of job {watcher.job} on {names}: start it when the job runs")

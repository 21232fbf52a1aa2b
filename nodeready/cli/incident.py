"""`nodeready incident`: the evidence of a hang, before it is gone.

The one place where stacks, logs, cores and the audit of a job meet: triage and audit do not know
each other.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from nodeready.audit.document import Audit, NodeReport
from nodeready.cli.audit import document as audit_document
from nodeready.cli.options import Refused, asking, format_option, option, output_directory
from nodeready.cli.screen import Screen, show
from nodeready.cli.start import (
    Common,
    Nodes,
    ask_with_progress,
    converse,
    nodes_of,
    remember_failed,
    this_machine,
)
from nodeready.healthcheck import here
from nodeready.node.tail import TailConfig
from nodeready.policy.policy import PolicyError, digest
from nodeready.reports.registry import FORMATS, Options, find, names
from nodeready.subjects.registry import Selection, select
from nodeready.text import counted, now, redact, redacted, sanitise
from nodeready.transport.base import UNREACHED, Conversation
from nodeready.transport.look import PROBE_TIMEOUT_S, Look, look_at
from nodeready.triage import incident as kept
from nodeready.triage.cores import Cores, collect_cores
from nodeready.triage.incident import Directory, ForeignDirectory, Incident, Interrupted, Part
from nodeready.triage.logs import Fetched, fetch_tail, fetched
from nodeready.triage.stacks import archive, group
from nodeready.triage.stacks.collect import SearchError, capture, nothing, program_config
from nodeready.triage.stacks.document import Stacks, fold_ranks
from nodeready.triage.stacks.trace import Trace

#: Lines of each log, and logs of each node, that are kept.
_LINES, _LOGS = 1000, 64
#: Seconds for the logs of one node.
_LOGS_S = 30


@dataclass(frozen=True)
class Writer:
    """A process that writes a log. start_s: since boot; lines: the last that the stacks saw"""

    pid: int
    start_s: float
    rank: int | None
    lines: tuple[str, ...]


#: Node -> what its processes call a log -> those that write it. The name is shown, never opened.
Logs = dict[str, dict[str, list[Writer]]]


@dataclass
class Taker:
    """Takes the parts of one incident, in turn.

    timeout: seconds for one node's stacks
    owner:   uid of the user whose job it is; "": not known yet
    found:   the stacks, once they are taken
    logs:    what the ranks write to
    """

    nodes: Nodes
    screen: Screen
    job: str
    user: str
    timeout: int
    owner: str = ""
    found: Stacks | None = None
    logs: Logs = field(default_factory=lambda: defaultdict(dict))

    def parts(self) -> Mapping[str, kept.Taking]:
        """By name, in their order."""
        return {
            "stacks": self.stacks, "logs": self.tails, "cores": self.cores, "audit": self.audit,
        }  # fmt: skip

    def _done(self, part: Part) -> Part:
        """The part; raises Interrupted with it when the run was interrupted meanwhile."""
        if self.nodes.carrier.interrupted:
            status = "missing" if part.status == "empty" else "partial"
            raise Interrupted(replace(part, status=status, why="interrupted"))
        return part

    def is_empty(self, incident: Incident) -> bool:
        """Whether every node has answered, and none has anything of the job."""
        ranks = self.found is None or self.found.processes or self.found.errors
        others = [part for part in incident.parts if part.name in ("logs", "cores")]
        return not ranks and all(part.status == "empty" and not part.errors for part in others)

    @property
    def _of_the_job(self) -> list[str]:
        """The nodes that have ranks, or may have: all, when nobody knows."""
        stacks = self.found
        if stacks is None or not stacks.processes:
            return list(self.nodes.carrier.nodes)
        there = {one.node for one in stacks.processes} | stacks.errors.keys()
        return [name for name in self.nodes.carrier.nodes if name in there]

    # --- Stacks, and the witnesses beside them.

    def stacks(self, directory: Directory) -> Part:
        """Every rank's stack in every form, with all witnesses."""
        from nodeready.inventory.slurm import job_user

        carrier, started = self.nodes.carrier, now()
        owner = "" if self.user else self.owner or job_user(self.job)
        config = program_config(self.timeout, job=self.job, user=self.user, owner=owner)
        ask = ask_with_progress(carrier, self.screen)
        found = capture(ask, carrier.nodes, replace(config, tag=carrier.tag))
        into = directory.part("stacks")
        stacks = redacted(
            group.group(
                archive.keep_traces(into, self._seen(found.traces())),
                found.errors,
                started=started,
                finished=now(),
                complete=found.complete,
            )
        )
        self.found = stacks
        forms = FORMATS["stacks"].values()
        texts = {
            f"stacks{form.extension}": form.render(stacks, Options(verbose=1)) for form in forms
        }
        archive.write(into, stacks, texts)
        ranks = counted(len(stacks.processes), "process", "processes")
        lost = tuple(found.unreached)
        if not stacks.processes:
            why = nothing(found) if len(found.errors) < len(found.asked) else "no node answered"
            return self._done(
                Part("stacks", "missing", why=why, errors=stacks.errors, unreached=lost)
            )
        said = f"{ranks} in {counted(len(stacks.groups), 'group')}"
        unseen = [one for one in stacks.groups if one.processes and not one.frames]
        lack = counted(sum(one.processes for one in unseen), "process", "processes")
        why = f"no stack of {lack}: {unseen[0].why}" if unseen else ""
        return self._done(
            Part(
                "stacks",
                "partial" if stacks.errors or unseen else "kept",
                said,
                why,
                errors=dict(stacks.errors),
                unreached=lost,
                failed=bool(found.mistaken),
            )
        )

    def _seen(self, traces: Iterator[Trace]) -> Iterator[Trace]:
        """The traces without secrets; where the ranks write to is noted before."""
        for trace in traces:
            for process in trace["processes"]:
                self._note_log(trace["node"], process)
            yield redacted(trace)

    def _note_log(self, node: str, process: Mapping[str, Any]) -> None:
        log = process.get("witnesses", {}).get("logs")
        path = log.get("path") if isinstance(log, dict) else None
        if not isinstance(path, str) or not path.startswith("/"):
            return
        lines = log.get("lines", ())
        is_text = isinstance(lines, list) and all(isinstance(line, str) for line in lines)
        pid, start_s, rank = process["pid"], process["start_s"], process["rank"]
        writer = Writer(pid, start_s, rank, tuple(lines) if is_text else ())
        self.logs[node].setdefault(path, []).append(writer)

    # --- The ends of the logs.

    def tails(self, directory: Directory) -> Part:
        """The last lines of what the ranks write to."""
        if self.found is None:
            return Part("logs", "missing", why="there are no stacks, which would tell the logs")
        if not self.logs:
            return Part("logs", "empty", why="no rank is known to write into a file")
        carrier = self.nodes.carrier

        def reading(name: str) -> Conversation[list[tuple[str, Fetched]]]:
            found = []
            for path, writers in [*self.logs[name].items()][:_LOGS]:
                known = tuple((writer.pid, writer.start_s) for writer in writers)
                config = TailConfig("", "", "", _LINES, limit_s=_LOGS_S, processes=known)
                one = yield from fetch_tail(name, config, carrier.tag)
                found.append((path, one))
            return found

        directory.part("logs")
        errors: dict[str, str] = {}
        written, lost = 0, set[str]()
        for name, answer in converse(carrier, self.screen, "logs", reading, self.logs).items():
            rows = answer if isinstance(answer, list) else []
            if not isinstance(answer, list):
                errors[name] = fetched(answer).error
                lost.update({name} if answer.kind in UNREACHED else ())
            number, read = 0, dict(rows)
            for path, writers in [*self.logs[name].items()][:_LOGS]:
                answered = read.get(path, Fetched())
                tail = answered.tail
                files = [(one.path, one.pids, one.lines) for one in tail.files] if tail else []
                if tail is None or tail.unread:
                    why = tail.unread[0].why if tail else "not read"
                    errors.setdefault(name, answered.error or f"{path}: {why}")
                if not files:
                    # What the stacks saw of it is better than nothing.
                    files = [(path, (writers[0].pid,), writers[0].lines)]
                for shown, pids, lines in files:
                    number += 1
                    if not lines:
                        continue
                    ranks = sorted(
                        {w.rank for w in writers if w.pid in pids and w.rank is not None}
                    )
                    head = f"{name}:{shown}" + (f" (ranks {fold_ranks(ranks)})" if ranks else "")
                    text = [sanitise(line, 100_000) for line in redacted([head, *lines])]
                    target = f"logs/{kept.log_name(name, ranks, number)}"
                    directory.write(target, (f"{line}\n" for line in text))
                    written += 1
        errors = {name: why for name, why in errors.items() if why}
        status = "partial" if errors else "kept" if written else "empty"
        said = f"the last lines of {counted(written, 'log')}"
        return self._done(Part("logs", status, said, errors=errors, unreached=tuple(lost)))

    # --- Cores.

    def cores(self, directory: Directory) -> Part:
        """Backtraces of the job's cores."""
        carrier, chosen = self.nodes.carrier, self._of_the_job
        ask = ask_with_progress(carrier, self.screen)
        policies = {name: self.nodes.policies[name] for name in chosen}
        found: Cores = collect_cores(ask, carrier.tag, policies, 0, self.job)
        errors = {name: one for name, one in found.errors.items() if one}
        lost = tuple(found.unreachable)
        if not found.crashes:
            status, said = ("partial", "") if errors else ("empty", "no core of the job")
            return self._done(Part("cores", status, said, errors=errors, unreached=lost))
        found = redacted(found)
        directory.part("cores")
        for crash, name in zip(found.crashes, found.file_names, strict=True):
            if crash.text:
                directory.write(f"cores/{name}", [crash.text])
        for form in FORMATS["cores"].values():
            text = form.render(found, Options(verbose=1))
            directory.write(f"cores/cores{form.extension}", text)
        said = f"{counted(len(found.crashes), 'core')} of {counted(len(found.groups), 'crash')}"
        unread = f"{len(found.unread)} without a backtrace" if found.unread else ""
        status = "partial" if errors or unread else "kept"
        return self._done(Part("cores", status, said, unread, errors, unreached=lost))

    # --- The audit.

    def audit(self, directory: Directory) -> Part:
        """What differs from the policy on the job's nodes."""
        started, selection = now(), select(subjects=here.SEEN)
        carrier, policies = self.nodes.carrier, self.nodes.policies
        found = converse(
            carrier,
            self.screen,
            "looking",
            lambda name: look_at(
                name, policies[name], selection.subjects, PROBE_TIMEOUT_S, nonce=carrier.nonce
            ),
            self._of_the_job,
        )
        looks = [Look.of(name, value) for name, value in found.items()]
        audit = self._judged(looks, selection, started)
        directory.part("audit")
        data = json.loads("".join(find("audit", "json").render(audit)))
        directory.write("audit/audit.json", [json.dumps(redacted(data), indent=1), "\n"])
        lines = find("audit", "table").render(audit, Options(verbose=1))
        directory.write("audit/audit.txt", (redact("", line) for line in lines))
        errors = {node.name: node.error for node in audit.nodes if node.error}
        lost = tuple(node.name for node in audit.nodes if node.status == "unreachable")
        wrong = sum(node.status == "fail" for node in audit.nodes)
        looked = counted(len(audit.nodes) - len(errors), "node")
        said = f"{looked} looked at, {wrong} with a finding"
        status = "partial" if errors else "kept"
        return self._done(Part("audit", status, said, errors=errors, unreached=lost))

    def _judged(self, looks: list[Look], selection: Selection, started: str) -> Audit:
        if self.nodes.inventory is not None:
            return audit_document(self.nodes, self.screen, selection, looks, started)
        # Without an inventory there are no peers to compare with, and no fleet's host keys.
        reports = []
        for one in looks:
            policy = self.nodes.policies[one.name]
            results = here.judge_alone(one.snapshot, policy) if one.snapshot else []
            reports.append(
                NodeReport.of(
                    one.name,
                    selection.of(results),
                    snapshot=one.snapshot,
                    seconds=round(one.seconds, 3),
                    error=one.error,
                    unreachable=one.unreachable,
                )
            )
        policies = {self.nodes.policies[one.name] for one in looks}
        complete = not self.nodes.carrier.interrupted
        return Audit(started, now(), digest(policies), tuple(reports), complete=complete)


def take_incident(taker: Taker, directory: Directory, reason: str) -> tuple[Incident, str]:
    """All parts of an incident, its index and its archive; and why there is no archive, or ""."""
    started = now()
    parts, complete = kept.take(directory, taker.parts(), time.monotonic)
    forms = {
        kept.README: lambda one: find("incident", "table").render(one, Options(verbose=1)),
        kept.DOCUMENT: lambda one: find("incident", "json").render(one),
    }
    stacks = taker.found

    def made(complete: bool) -> Incident:
        return Incident(
            started,
            now(),
            taker.job,
            stacks.user if stacks else "",
            reason,
            complete,
            stacks.verdict if stacks else None,
            stacks.advice if stacks else (),
            parts,
            "",
        )

    try:
        return kept.finish(directory, made(complete), forms)
    except KeyboardInterrupt:
        # The next one ends the process: what there is, is packed.
        return kept.finish(directory, made(False), forms)


# --- The way to the nodes.


def nodes_of_job(
    inventory: str | None, job: str, options: Common, *, local: bool
) -> tuple[Nodes, str]:
    """The nodes, and the job by the name that its processes know. Raises Refused."""
    if local and (inventory is not None or options.via != "ssh"):
        raise Refused("--local: this machine alone, without INVENTORY or --via")
    if not local and inventory is None and options.via == "ssh":
        raise Refused("an INVENTORY, --local, or --via srun: one of these")
    if local and options.limit is not None:
        raise Refused("--limit: selects from an INVENTORY, and there is none")
    if not local:
        steps = job if options.via == "srun" or inventory is None else None
        found = nodes_of(inventory, options, job=steps, tell=options.screen().note)
        return found, found.job or job
    try:
        policy = here.load(None)
    except PolicyError as error:
        raise Refused("\n".join(error.problems)) from None
    return this_machine(policy, sudo=options.sudo), job


def _directory(path: Path) -> Directory:
    """Raises Refused."""
    try:
        return kept.prepare(path)
    except ForeignDirectory as problem:
        raise Refused(f"-o {problem}") from None
    except OSError as problem:
        raise Refused(f"-o {problem.filename}: {problem.strerror}") from None


def checked(timeout: int, job: str, user: str | None) -> None:
    """Raises Refused."""
    try:
        program_config(timeout, job=job, user=user or "")
    except SearchError as problem:
        raise Refused(str(problem)) from None


# --- The options that `watch` has, too.

LOCAL = option("--local", is_flag=True, help="This machine, without any connection.")
JOB = option(
    "--job", metavar="ID", required=True, help="The job: of Slurm, torchrun, or ADDRESS:PORT."
)
USER = option("--user", metavar="NAME", help="Only this user's ranks, whatever others claim.")
TIMEOUT = option(
    "--timeout",
    type=click.IntRange(1, 3600),
    default=60,
    metavar="S",
    help="Seconds for the stacks of one node, once it is connected.",
)


@click.command()
@click.argument("inventory", required=False)
@LOCAL
@JOB
@USER
@TIMEOUT
@output_directory("A new directory for all of it; DIR.tar.gz holds the same.", general=False)
@format_option(*names("incident"), help="The index for people, or another form.", general=False)
@asking
def incident(
    inventory: str | None,
    *,
    local: bool,
    job: str,
    user: str | None,
    timeout: int,
    output: str | None,
    format: str,
    **shared: Any,
) -> int:
    """Keep the evidence of a job that hangs, before it is gone. Changes nothing on the nodes.

    The stacks of all ranks in every form, all witnesses, the ends of the job's logs, backtraces of
    its cores, and the audit of its nodes: in a new directory and one archive, without secrets. A
    part that fails is named in the index and costs no other.

    \b
    Examples:
      nodeready incident inventories/prod.py --job 4711 -o hang-4711
      nodeready incident --via srun --job 4711 -o hang-4711   # no ssh, no root
      nodeready incident --local --job 4711 -o hang-4711
      nodeready stacks --from hang-4711/stacks
    """
    options = Common(**shared)
    if output is None:
        raise Refused("where to? Name a new directory with -o DIR")
    checked(timeout, job, user)
    screen = options.screen()
    nodes, name = nodes_of_job(inventory, job, options, local=local)
    directory = _directory(Path(output))
    with nodes.carrier:
        taker = Taker(nodes, screen, name, user or "", timeout)
        found, problem = take_incident(taker, directory, "somebody asked for it")
    lost = {node for part in found.parts for node in part.unreached}
    remember_failed(nodes, sorted(lost), lost=True, asked=None if found.complete else lost)
    if found.complete and taker.is_empty(found):
        directory.remove()
        stacks = next(part for part in found.parts if part.name == "stacks")
        raise Refused(f"{stacks.why}; there is no core of it, either: nothing is kept")
    if problem:
        screen.say(f"no archive: {problem}")
    code = kept.incident_code(found)
    show("incident", format, found, screen, silent=screen.quiet and not code)
    return code

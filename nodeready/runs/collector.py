"""The run of `nodeready incident`: stacks, logs, cores and the audit of the nodes of a job."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nodeready.agent.asking import Answer, Conversation, Request, Transport
from nodeready.agent.audit_document import Audit, NodeReport
from nodeready.agent.gate import here
from nodeready.agent.log_ranks import host_node
from nodeready.agent.secrets import redacted
from nodeready.agent.tail import NodeTail, TailConfig
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import (
    FAILED,
    HUNG,
    INCOMPLETE,
    OVER,
    Gap,
    GapError,
    Outcome,
    node_gaps,
)
from nodeready.core.policy import digest
from nodeready.core.text import counted, sanitise, utc_now
from nodeready.fleet.inventory.slurm import JobPlacement
from nodeready.runs import incident, targets
from nodeready.runs.audit.command import audit_document
from nodeready.runs.audit.workers import AuditWorkers
from nodeready.runs.cores import collect_cores
from nodeready.runs.incident import Directory, Incident, Interrupted, Part
from nodeready.runs.jobs import IF_ENDED, running_lines
from nodeready.runs.options import HangOptions, IncidentOptions
from nodeready.runs.stacks import group
from nodeready.runs.stacks import trace as archive
from nodeready.runs.stacks.collect import capture, no_ranks_reason, program_config
from nodeready.runs.stacks.command import Render
from nodeready.runs.stacks.document import Stacks, fold_ranks
from nodeready.runs.stacks.trace import Trace, TracedProcess
from nodeready.runs.tail import fetch_tail
from nodeready.runs.targets import Targets, ask_with_progress, converse, keep_gaps, probe_nodes
from nodeready.runs.tell import Tell
from nodeready.subjects.registry import select

_MAX_LINES, _MAX_LOGS = 1000, 64  # maximum lines of each log, and logs of each node
_LOGS_TIMEOUT_S = 30  # seconds for the logs of one node

#: Makes the text of an observation, for the JSON of an audit.
WriteFacts = Callable[[Any], str] | None


def nodes_of_job(inventory: str | None, options: HangOptions, tell: Tell) -> tuple[Targets, str]:
    """The nodes, and the job's id there. inventory: None: local, or the job's. Raises Refused."""
    if options.local and (inventory is not None or options.via != "ssh"):
        raise Refused("--local: cannot be combined with an INVENTORY or --via")
    if not options.local and inventory is None and options.via == "ssh":
        raise Refused("give an INVENTORY, --local, or --via srun")
    if options.local and options.limit is not None:
        raise Refused("--limit: cannot be combined with --local")
    # Values with which no rank can be searched for.
    program_config(options.timeout, job=options.job, user=options.user or "")
    if options.local:
        policy = targets.local_policy(options, tell.note)
        return targets.local_targets(policy, sudo=options.sudo), options.job
    srun_job = options.job if options.via == "srun" or inventory is None else None
    nodes = targets.select_targets(inventory, options, job=srun_job, tell=tell.note)
    return nodes, nodes.job or options.job


def run(
    inventory: str | None,
    options: IncidentOptions,
    tell: Tell,
    render: Render,
    write_facts: WriteFacts,
) -> Incident:
    """The evidence of a job in a new directory, and in an archive. Raises Refused."""
    if options.output is None:
        raise Refused("-o is missing: name a new directory with -o DIR")
    nodes, name = nodes_of_job(inventory, options, tell)
    directory = incident.prepare(Path(options.output))
    with nodes.transport:
        user = options.user or ""
        evidence = EvidenceCollector(nodes, tell, name, user, options.timeout, render, write_facts)
        document, problem_text = evidence.collect(directory, "taken on request")
        is_empty = document.complete and evidence.is_empty(document)
        running = running_lines(nodes, tell) if is_empty else []
    gaps = {gap.node: gap.gap for part in document.parts for gap in part.gaps}
    keep_gaps(nodes, tell, node_gaps(gaps), complete=document.complete)
    if is_empty:
        directory.remove()
        stacks = next(part for part in document.parts if part.name == "stacks")
        text = f"{stacks.reason}; the job has no core file either: nothing is kept"
        raise Refused("\n".join([text, *running, IF_ENDED]))
    if problem_text:
        tell.say(f"no archive: {problem_text}")
    return document


@dataclass(frozen=True)
class LogWriter:
    pid: int
    start_s: float  # since boot
    rank: int | None
    lines: tuple[str, ...]  # the last lines that the stacks saw


def own_files(
    tail: NodeTail, writers: Sequence[LogWriter]
) -> list[tuple[str, list[int], tuple[str, ...]]]:
    """Path, ranks and lines of each log of these writers; of a mixed log, of each rank apart."""
    files = []
    for log in tail.files:
        writer_ranks = {writer.rank for writer in writers if writer.pid in log.pids}
        ranks = sorted(rank for rank in writer_ranks if rank is not None)
        if log.is_mixed and log.rank is not None:
            ranks = [log.rank] if log.rank in ranks else []
            if not ranks:
                continue
        elif log.is_mixed:
            ranks = []
            if host_node(log.host).partition(".")[0] not in ("", tail.host.partition(".")[0]):
                continue
        files.append((log.path, ranks, log.lines))
    return files


#: Node -> path of a log in its processes' namespace (never opened) -> those that write it.
Logs = dict[str, dict[str, list[LogWriter]]]


@dataclass
class EvidenceCollector:
    """Collects the parts of one incident, in the order of `incident.PARTS`."""

    nodes: Targets
    tell: Tell
    job: str  # of the ranks; user "": of any user
    user: str  # likewise
    timeout_s: int  # for the stacks of one node
    render: Render  # makes the files of a document
    write_facts: WriteFacts
    owner: str = ""  # uid of the job's user; "": not known yet
    stacks: Stacks | None = field(default=None, init=False)  # None: not taken yet
    # the logs of the ranks, from the stacks
    logs: Logs = field(default_factory=lambda: defaultdict(dict), init=False)
    # node -> its answer in an earlier part, if the node did not answer within the limit of a
    # command. It gets no further request, so that it delays the incident once
    hung: dict[str, Answer] = field(default_factory=dict, init=False)

    @property
    def transport(self) -> Transport:
        return self.nodes.transport

    def collect(self, directory: Directory, reason: str) -> tuple[Incident, str]:
        """All parts, their index and archive; and why there is no archive, or ""."""
        started = utc_now()
        methods = self.take_stacks, self.take_logs, self.take_cores, self.take_audit
        takers = dict(zip(incident.PARTS, methods, strict=True))
        parts, is_complete = incident.take(directory, takers, time.monotonic)
        stacks = self.stacks
        verdict, advice = (stacks.verdict, stacks.advice) if stacks else (None, ())
        taken = started, utc_now(), self.job, stacks.user if stacks else "", reason, is_complete
        document = Incident(*taken, verdict, advice, parts, archive="")
        forms = {
            incident.README: lambda document: self.render("incident", document)[".txt"],
            incident.DOCUMENT: lambda document: self.render("incident", document)[".json"],
        }
        try:
            return incident.finish(directory, document, forms)
        except KeyboardInterrupt:
            # The files so far are packed. A second interrupt ends the process.
            return incident.finish(directory, replace(document, complete=False), forms)

    def _ask(self, activity: str, requests: Mapping[str, Request]) -> Mapping[str, Answer]:
        """The answers; for a hung node, its answer in the earlier part."""
        answers = {name: answer for name, answer in self.hung.items() if name in requests}
        new_requests = {name: request for name, request in requests.items() if name not in answers}
        if new_requests:
            answers |= ask_with_progress(self.transport, self.tell)(activity, new_requests)
        self.hung |= {name: answer for name, answer in answers.items() if answer.has_gap(HUNG)}
        return answers

    def _unless_interrupted(self, part: Part) -> Part:
        """The part. Raises Interrupted with the part if the run was interrupted meanwhile."""
        if self.transport.interrupted:
            status = "missing" if part.status == "empty" else "partial"
            raise Interrupted(replace(part, status=status, reason="interrupted"))
        return part

    def is_empty(self, taken: Incident) -> bool:
        """Whether every node has answered and none knows the job."""
        if self.stacks is None or self.stacks.processes or self.stacks.gaps:
            return False
        parts = [part for part in taken.parts if part.name in ("logs", "cores")]
        return all(part.status == "empty" and not part.gaps for part in parts)

    @property
    def _job_nodes(self) -> list[str]:
        """The nodes that have ranks or may have some: all nodes before the stacks are known."""
        stacks = self.stacks
        if stacks is None or not stacks.processes:
            return list(self.transport.nodes)
        names = {process.node for process in stacks.processes}
        names |= {gap.node for gap in stacks.gaps}
        return [name for name in self.transport.nodes if name in names]

    # --- Stacks, and all witnesses.

    def take_stacks(self, directory: Directory) -> Part:
        # Imported only here, because it imports pyinfra, and --help must be quick.
        from nodeready.fleet.inventory.slurm import job_placement

        transport, started = self.transport, utc_now()
        placement = JobPlacement() if self.user else job_placement(self.job, transport.nodes)
        placement = replace(placement, user=placement.user or self.owner)
        config = program_config(self.timeout_s, job=self.job, user=self.user)
        config = replace(config, tag=transport.tag)
        captured = capture(self._ask, transport.nodes, config, placement)
        path = directory.make_part("stacks")
        traces = archive.keep_traces(path, self._redact_traces(captured.traces()))
        gaps, complete = captured.gaps, captured.complete
        stacks = group.group(traces, gaps, started=started, finished=utc_now(), complete=complete)
        stacks = redacted(stacks)
        self.stacks = stacks
        forms = self.render("stacks", stacks).items()
        archive.write(path, stacks, {f"stacks{extension}": text for extension, text in forms})
        ranks = counted(len(stacks.processes), "process", "processes")
        if not stacks.processes:
            reason = "no node answered"
            if len(captured.gaps) < len(captured.nodes):
                reason = no_ranks_reason(captured)
            missing = Part("stacks", "missing", reason=reason, gaps=stacks.gaps)
            return self._unless_interrupted(missing)
        summary = f"{ranks} in {counted(len(stacks.groups), 'group')}"
        unread = [group for group in stacks.groups if group.processes and not group.frames]
        count = counted(sum(group.processes for group in unread), "process", "processes")
        reason = f"no stack of {count}: {unread[0].no_stack_reason}" if unread else ""
        status = "partial" if stacks.gaps or unread else "kept"
        has_failed = any(gap.kind == FAILED for gap in stacks.gaps)
        part = Part("stacks", status, summary, reason, gaps=stacks.gaps, failed=has_failed)
        return self._unless_interrupted(part)

    def _redact_traces(self, traces: Iterator[Trace]) -> Iterator[Trace]:
        """The traces without secrets. Notes the logs of each trace in `logs`."""
        for trace in traces:
            for process in trace.processes:
                self._note_log(trace.node, process)
            yield redacted(trace)

    def _note_log(self, node: str, process: TracedProcess) -> None:
        log = process.witnesses.get("logs")
        path = log.get("path") if isinstance(log, dict) else None
        if not isinstance(path, str) or not path.startswith("/"):
            return
        lines = log.get("lines", ())
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            lines = ()
        writer = LogWriter(process.pid, process.start_s, process.rank, tuple(lines))
        self.logs[node].setdefault(path, []).append(writer)

    # --- The ends of the logs.

    def _first_logs(self, node: str) -> Iterable[tuple[str, list[LogWriter]]]:
        return itertools.islice(self.logs[node].items(), _MAX_LOGS)

    def _read_tails(self, node: str) -> Conversation[list[tuple[str, Outcome[NodeTail]]]]:
        """The conversation with one node: path -> its last lines."""
        tails = []
        for path, writers in self._first_logs(node):
            processes = tuple((writer.pid, writer.start_s) for writer in writers)
            config = TailConfig(
                "", "", "", _MAX_LINES, limit_s=_LOGS_TIMEOUT_S, processes=processes
            )
            try:
                tail = yield from fetch_tail(node, config, self.transport.tag)
            except GapError as end:
                tails.append((path, Outcome[NodeTail](node, gap=end.gap)))
                if end.gap.kind in OVER:
                    # Each further log would cost the same time.
                    self.hung[node] = Answer(gap=end.gap)
                    break
            else:
                tails.append((path, Outcome(node, tail)))
        return tails

    def take_logs(self, directory: Directory) -> Part:
        if self.stacks is None:
            return Part("logs", "missing", reason="the logs are unknown without the stacks")
        if not self.logs:
            return Part("logs", "empty", reason="no rank is known to write into a file")
        directory.make_part("logs")
        gaps: dict[str, Gap] = {}
        written = 0
        outcomes = converse(self.transport, self.tell, "logs", self._read_tails, self.logs)
        for name, outcome in outcomes.items():
            tails = dict(outcome.value or ())
            if outcome.gap:
                gaps[name] = outcome.gap
            number = 0
            for path, writers in self._first_logs(name):
                fetched = tails.get(path, Outcome(name))
                tail = fetched.value
                files = own_files(tail, writers) if tail else []
                if tail is None or tail.unread:
                    reason = tail.unread[0].reason if tail else "not read"
                    gap = fetched.gap or Gap(INCOMPLETE, f"{path}: {reason}")
                    gaps.setdefault(name, gap)
                if not files:
                    # Use the lines that the stacks have.
                    writer = writers[0]
                    ranks = [] if writer.rank is None else [writer.rank]
                    files = [(path, ranks, writer.lines)]
                for shown, ranks, lines in files:
                    number += 1
                    if lines:
                        head = f"{name}:{shown}"
                        head += f" (ranks {fold_ranks(ranks)})" if ranks else ""
                        text = [sanitise(line, 100_000) for line in redacted([head, *lines])]
                        target = f"logs/{incident.log_name(name, ranks, number)}"
                        directory.write(target, (f"{line}\n" for line in text))
                        written += 1
        status = "partial" if gaps else "kept" if written else "empty"
        summary = f"the last lines of {counted(written, 'log')}"
        return self._unless_interrupted(Part("logs", status, summary, gaps=node_gaps(gaps)))

    # --- Cores.

    def take_cores(self, directory: Directory) -> Part:
        policies = {name: self.nodes.policies[name] for name in self._job_nodes}
        cores = collect_cores(self._ask, self.transport.tag, policies, 0, self.job)
        if not cores.crashes:
            status, summary = ("partial", "") if cores.gaps else ("empty", "no core of the job")
            return self._unless_interrupted(Part("cores", status, summary, gaps=cores.gaps))
        cores = redacted(cores)
        directory.make_part("cores")
        for crash in cores.crashes:
            if crash.text_file:
                directory.write(f"cores/{crash.text_file}", [crash.text])
        for extension, text in self.render("cores", cores).items():
            directory.write(f"cores/cores{extension}", text)
        summary = f"{counted(len(cores.crashes), 'core')} of {counted(len(cores.groups), 'crash')}"
        unread = f"{len(cores.unread)} without a backtrace" if cores.unread else ""
        status = "partial" if cores.gaps or unread else "kept"
        return self._unless_interrupted(Part("cores", status, summary, unread, cores.gaps))

    # --- The audit.

    def take_audit(self, directory: Directory) -> Part:
        answers = {name: self.hung[name] for name in self._job_nodes if name in self.hung}
        hung = node_gaps({name: answer.gap for name, answer in answers.items() if answer.gap})
        names = [name for name in self._job_nodes if name not in answers]
        if not names:
            return Part("audit", "missing", reason="no node answered", gaps=hung)
        with self._audit(names) as audit:
            directory.make_part("audit")
            for extension, texts in self.render("audit", audit).items():
                directory.write(f"audit/audit{extension}", texts)
        failing = sum(node.status == "fail" for node in audit.nodes)
        probed, gaps = counted(len(audit.nodes) - len(audit.gaps), "node"), (*hung, *audit.gaps)
        summary = f"{probed} probed, {failing} with a finding"
        status = "partial" if gaps else "kept"
        return self._unless_interrupted(Part("audit", status, summary, gaps=gaps))

    @contextmanager
    def _audit(self, names: list[str]) -> Iterator[Audit]:
        started, nodes = utc_now(), self.nodes
        selection = select(nodes.policies.values(), subjects=here.LOCAL_SUBJECTS)
        outcomes = probe_nodes(nodes, self.tell, selection.subjects, names=names)
        if nodes.inventory is not None:
            with AuditWorkers(nodes.policies, self.write_facts, 0) as workers:
                yield audit_document(
                    nodes, self.tell, selection, outcomes, started=started, workers=workers
                )
            return
        # Without an inventory there are no peers, and no host keys of the fleet.
        reports = []
        for outcome in outcomes:
            policy = nodes.policies[outcome.node]
            results = here.judge_alone(outcome.value, policy) if outcome.value else []
            about = outcome.node, selection.of(results)
            seconds, gap = round(outcome.seconds, 3), outcome.gap
            report = NodeReport.of(*about, snapshot=outcome.value, seconds=seconds, gap=gap)
            reports.append(report)
        policies = digest({nodes.policies[outcome.node] for outcome in outcomes})
        complete = not nodes.transport.interrupted
        yield Audit(started, utc_now(), policies, tuple(reports), complete=complete)

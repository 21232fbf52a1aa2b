"""Collects the evidence on a dead job from its nodes, and makes the document."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from nodeready.agent.asking import Conversation, new_nonce, packed_value, request
from nodeready.agent.failures.events import FileFailures
from nodeready.agent.failures.rules import SIGNAL_NAMES
from nodeready.agent.postmortem import JobNode, NodeFailures, PostmortemConfig
from nodeready.core.outcome import INCOMPLETE, Gap, GapError, NodeGaps
from nodeready.core.text import counted, utc_now
from nodeready.fleet.inventory.nodeset import fold
from nodeready.runs.postmortem.clocks import NodeClock
from nodeready.runs.postmortem.document import ClockOffset, Postmortem
from nodeready.runs.postmortem.evidence import (
    JobEvidence,
    JobFile,
    LiveRank,
    NodeFault,
    NodeRecord,
    left_out,
)
from nodeready.runs.postmortem.first_failure import FirstFailureFinder

#: Maximum bytes of a node's unpacked answer.
_MAX_UNPACKED = 16 << 20
#: The kernel's faults, cores and no-gos of this many seconds before the end of the logs count: a
#: fault may let a job hang until its timeout.
_BEFORE_S = 2 * 3600
#: Seconds after the end of the logs: a large core is written for minutes, and Slurm runs the gate
#: every HealthCheckInterval, mostly 5 minutes, at most an hour.
_AFTER_S = {"kernel": 120, "core": 900, "gate": 3600}


@dataclass(frozen=True)
class NodeEvidence:
    """One node's answer."""

    failures: NodeFailures
    clock: NodeClock


def fetch_failures(node: str, config: PostmortemConfig, tag: str) -> Conversation[NodeEvidence]:
    """The conversation with one node. Raises GapError.

    config: its tag is set here, and its nonce if it has none
    """
    config = replace(config, nonce=config.nonce or new_nonce(), tag=tag)
    answer = yield request(node, "nodeready.agent.postmortem", config)
    received_s = time.time()
    if answer.gap:
        raise GapError(answer.gap)
    failures = packed_value(NodeFailures, answer, config, "job", _MAX_UNPACKED)
    return NodeEvidence(failures, _clock(failures, received_s, answer.seconds))


def _clock(failures: NodeFailures, received_s: float, seconds: float) -> NodeClock:
    """The node's clock, as NTP measures it: by the times of the question and of the answer."""
    sent_s = received_s - seconds
    offset_s = ((failures.started_s - sent_s) + (failures.finished_s - received_s)) / 2
    slack_s = max(0.0, seconds - (failures.finished_s - failures.started_s)) / 2
    if abs(offset_s) <= slack_s:
        # An offset within the uncertainty proves nothing.
        return NodeClock(0.0, slack_s + abs(offset_s), received_s)
    return NodeClock(offset_s, slack_s, received_s)


@dataclass
class EvidenceBuilder:
    """Takes the nodes' answers one at a time."""

    evidence: JobEvidence = field(default_factory=JobEvidence)
    gaps: dict[str, Gap] = field(default_factory=dict)  # of the answers that are not complete
    #: why a source gave nothing -> nodes
    _absent: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    _kernels: dict[str, tuple[NodeFailures, NodeClock]] = field(default_factory=dict)

    def add(self, node: str, answer: NodeEvidence) -> None:
        """Add one node's answer."""
        failures, clock, evidence = answer.failures, answer.clock, self.evidence
        evidence.clocks[node] = clock
        evidence.files += [JobFile(node, failures) for failures in failures.files]
        if failures.error:
            self.gaps[node] = Gap(INCOMPLETE, failures.error)
        for file in failures.unread:
            if file.fault:
                evidence.missing[f"{node}:{file.path}"] = file.reason
        if failures.left_out:
            evidence.missing[f"{node}: {counted(failures.left_out, 'log')}"] = "beyond --max-files"
        if not (failures.files or failures.unread or failures.error):
            self._absent.setdefault(("logs", "no file matches"), []).append(node)
        for rank in failures.node.ranks:
            live = LiveRank(node, rank.pid, rank.rank, rank.local_rank, rank.variables)
            evidence.live_ranks.append(live)
        evidence.environment_facts[node] = failures.node.facts
        self._add_records(node, failures.node, clock)
        if failures.kernel.absent:
            self._absent.setdefault(("kernel's log", failures.kernel.absent), []).append(node)
        else:
            self._kernels[node] = failures, clock

    def _add_records(self, node: str, job_node: JobNode, clock: NodeClock) -> None:
        for core in job_node.cores:
            name = SIGNAL_NAMES.get(core.signal or 0, f"signal {core.signal}")
            process = f"{core.command or 'a process'} (pid {core.pid})"
            text = f"{process} ended by {name}: {core.path}"
            identity = core.path, core.rank, core.pid, core.signal
            moment = core.written_s - clock.offset_s
            self.evidence.records.append(NodeRecord(node, "core", moment, text, *identity))
        for record in job_node.gate:
            word = "drained" if record.drained else "no-go"
            text = f"{word}: {'; '.join(record.reasons)}"
            moment = record.time_s - clock.offset_s
            self.evidence.records.append(NodeRecord(node, "gate", moment, text))

    def complete(self) -> JobEvidence:
        """The evidence, with the kernel's faults and the nodes' records in the job's time."""
        evidence = self.evidence
        ends = [
            file.failures.mtime_s - evidence.clocks[file.node].offset_s
            for file in evidence.files
            if file.failures.size_bytes
        ]
        for (source, reason), absent in self._absent.items():
            evidence.missing[f"{source} of {fold(absent)}"] = reason
        evidence.files = _shared_once(evidence.files)
        end_s = max(ends, default=None)
        for node, (failures, clock) in self._kernels.items():
            for message in failures.kernel.messages:
                moment = failures.started_s - message.ago_s
                if _is_of_job(moment - clock.offset_s, end_s, "kernel"):
                    fault = NodeFault(node, message.kind, moment, message.pid, message.text)
                    evidence.kernel.append(fault)
        evidence.records = [
            record for record in evidence.records if _is_of_job(record.time_s, end_s, record.kind)
        ]
        for kind, name in (("core", "cores"), ("gate", "gate")):
            names = {record.node for record in evidence.records if record.kind == kind}
            evidence.sources |= {name: f"of {counted(len(names), 'node')}"} if names else {}
        if self._kernels:
            count = counted(len(evidence.kernel), "fault")
            evidence.sources["kernel's log"] = f"{count} on {counted(len(self._kernels), 'node')}"
        if evidence.live_ranks:
            evidence.sources["environment"] = counted(len(evidence.live_ranks), "live rank")
        if evidence.files:
            nodes = counted(len(evidence.clocks), "node")
            logs = counted(len(evidence.files), "file")
            evidence.sources = {"logs": f"{logs} on {nodes}", **evidence.sources}
        return evidence


def _is_of_job(moment: float, end_s: float | None, kind: str) -> bool:
    return end_s is None or -_BEFORE_S < moment - end_s < _AFTER_S[kind]


def _shared_once(files: list[JobFile]) -> list[JobFile]:
    """The files; a file of a shared file system, which several nodes have read, once."""
    nodes_of: dict[FileFailures, list[str]] = {}
    for file in files:
        nodes_of.setdefault(file.failures, []).append(file.node)
    return [
        JobFile(nodes[0] if len(nodes) == 1 else "", failures)
        for failures, nodes in nodes_of.items()
    ]


def postmortem_of(
    evidence: JobEvidence,
    *,
    started: str,
    job: str = "",
    source: str,
    gaps: NodeGaps = (),
    complete: bool = True,
) -> Postmortem:
    """The document of this evidence."""
    finder = FirstFailureFinder(evidence)
    cause = finder.find()
    clocks = {
        node: ClockOffset(round(clock.offset_s, 3), round(clock.uncertainty_s, 3))
        for node, clock in evidence.clocks.items()
    }
    return Postmortem(
        *(started, utc_now(), job, source, cause, finder.groups(cause), len(evidence.files)),
        sources=evidence.sources,
        missing={**evidence.missing, **left_out(evidence.files)},
        nodes=finder.node_events(),
        clocks=clocks,
        gaps=gaps,
        complete=complete,
        witnesses=finder.witnesses(cause),
    )

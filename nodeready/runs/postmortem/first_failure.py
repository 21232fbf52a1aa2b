"""Who failed first, by the events of all ranks, the kernel and Slurm. Pure.

The rules stand in their order, and the first that finds evidence names the cause: an error of a
rank's own outranks every lost peer; a kill outranks a timeout; a timeout outranks a lost
connection. Times decide between own errors only beyond the uncertainty of the clocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from nodeready.agent.failures.rules import (
    CONSEQUENCE,
    ENDED,
    FAILED,
    LOST,
    REPORT,
    SIGNAL_NAMES,
    WAITED,
    kind_of_code,
    signal_of,
)
from nodeready.core.text import excerpt
from nodeready.runs.postmortem.document import KERNEL, LOG, FailureGroup, FirstFailure, NodeEvent
from nodeready.runs.postmortem.environment import explaining_faults
from nodeready.runs.postmortem.evidence import (
    JobEvidence,
    NodeFault,
    RankFailure,
    reporter_of,
)
from nodeready.runs.postmortem.findings import (
    ENDED_BY,
    ERROR,
    MAX_SUSPECTS,
    Finding,
    Rule,
    is_of_program,
    kernel_lines,
    last_lines,
    launcher_words,
    lines_of,
    moment_text,
    nodes_in,
    of_kernel,
    report_text,
    slurm_steps,
    subject,
)
from nodeready.runs.postmortem.hangs import hang
from nodeready.runs.postmortem.links import fabric, lost_peers
from nodeready.runs.postmortem.own_errors import (
    earlier_error,
    mismatch,
    not_launched,
    own_connection,
    own_error,
)
from nodeready.runs.postmortem.rank_ends import ended, ended_first, killed, limit
from nodeready.runs.postmortem.rank_failures import (
    JobFailures,
    equal_failures,
    ranks_in,
)
from nodeready.runs.postmortem.survival import complained, survived
from nodeready.runs.stacks.document import Suspect
from nodeready.runs.stacks.evidence import ranks_of

#: Kind of a kernel's fault of hardware -> the kind of its cause.
HARDWARE = {"xid": "gpu", "link": "network"}
#: Kind of a kernel's fault -> the kind of the cause, where the ranks only lost a peer.
_FAULTS = {"link": "network", "filesystem": "storage", "segfault": "segfault",
           "oom": "oom", "memory": "signal"}  # fmt: skip
#: Order of the groups of failures.
_ROLE_ORDER = (FAILED, WAITED, LOST, CONSEQUENCE, ENDED, REPORT)
#: Slurm's number of a task in the name of a cgroup, which it counts on each node.
_TASK = re.compile(r"/step_\S*?/task_(\d{1,6})")
#: The words of an error about a worker of a data loader, and its process.
_KILLED_WORKER = "is killed by signal: Killed"
_WORKER = re.compile(r"DataLoader (?:worker|process) \(pid(?:\(s\))? (\d{1,10})")
#: Maximum characters of what one source says of a process that was killed.
_QUOTED = 120


def out_of_memory(job: JobFailures) -> Finding | None:
    """The kernel or Slurm killed a process of the job for its memory."""
    faults = [fault for fault in job.evidence.kernel if fault.kind == "oom"]
    slurm = [f for f in job.own_errors if f.event.kind == "oom" and f.is_by("manager")]
    steps, step_lines = slurm_steps(job, "OUT_OF_ME")
    srun = [f for f in job.reports if f.event.kind == "oom"]
    is_known = bool(slurm or steps or srun)
    killed = [f for f in job.reports if signal_of(f.event.code) == 9]
    workers = [f for f in job.own_errors if _KILLED_WORKER in f.event.text]
    workers += [f for f in job.consequences if _WORKER.search(f.event.text)]
    nodes = {fault.node for fault in faults if fault.node} | nodes_in(slurm)
    ranks = ranks_in([*srun, *(f for f in slurm if f.is_by("of_pods"))])
    against = list[str]()
    ended_ranks = {f.event.pid: f.rank for f in (*killed, *workers) if f.rank is not None}
    matches = [(f.rank, _WORKER.search(f.event.text)) for f in workers]
    ended_ranks |= {int(match[1]): rank for rank, match in matches if match and rank is not None}
    killed_at = set[str]()
    for fault in faults:
        rank, task = job.finder.by_pid.get((fault.node, fault.pid)), _TASK.search(fault.text)
        if rank is None and task and not srun:
            rank = job.finder.global_rank(fault.node, int(task[1]))
        rank = ended_ranks.get(fault.pid, rank) if fault.pid else rank
        # The kernel's log has its kills in their order: on each node, the first one.
        ranks |= {rank} if rank is not None and fault.node not in killed_at else set()
        killed_at |= {fault.node} if rank is not None else set()
    is_named = any(map(job.finder.is_named, faults))
    # Logs that name no node are of the only one whose kernel's log there is.
    places = nodes | ({""} if len(nodes) == 1 and not job.finder.nodes else set())
    if not ranks and (faults or is_known):
        # The ranks that SIGKILL ended there, if the kernel killed as many; or whose log just ends.
        dead = [f for f in (*workers, *killed) if not nodes or f.node in places]
        ended = [*ranks_in(dead)]
        if len(ended) > max(1, len({fault.pid for fault in faults})):
            rivals = {(f.time_s, f.rank) for f in dead if f.rank is not None}
            times = Counter(time_s for time_s, _ in rivals)
            ended = [*ranks_in(
                f for f in dead
                if f.event.source == "torchrun-root" and times[f.time_s] == 1
            )]  # fmt: skip
        if not (dead or job.final):
            at = {"", *nodes}
            ended = [rank for rank in job.silent_ranks() if job.node_of.get(rank, "") in at]
        ranks = set(ended)
        if faults and not (slurm or steps or is_named):
            against.append("no log has the number of the process that the kernel killed")
    # Otherwise the kernel may have killed a process of another job.
    is_known |= bool(faults) and any(not nodes or f.node in places for f in killed)
    is_doubtful = not (ranks or is_named) and (_has_other_error(job) or not is_known)
    if not (faults or is_known) or is_doubtful:
        return None
    evidence = [*kernel_lines(faults), *step_lines]
    evidence += [f"{reporter_of(f.event.source)['manager']}: {f.event.text}" for f in slurm[:2]]
    evidence += [report_text(f) for f in srun[:2]]
    evidence += [report_text(f) for f in killed[:1] if f.rank in ranks]
    process = "them" if len(ranks) > 1 else "it"
    words = {"process": "a worker of its data loader" if workers else process, "by": "the kernel"}
    if slurm and not slurm[0].event.has_phrase("kernel-kills"):
        words["by"] = reporter_of(slurm[0].event.source)["manager"]
    words["quoted"] = _quoted((*slurm[:1], *srun[:1], *workers[:1]), faults[:1], [
        f for f in killed[:1] if f.rank in ranks or not ranks
    ])  # fmt: skip
    # Slurm may write the name of a node in another case than its kernel.
    nodes = {*{node.lower(): node for node in (*nodes, *job.nodes_of(ranks))}.values()}
    return Finding(ranks, nodes, evidence, against, (workers or killed)[:1], words)


def _quoted(
    failures: Sequence[RankFailure], faults: Sequence[NodeFault], killed: Sequence[RankFailure]
) -> str:
    """The words of who saw a kill, in brackets; ""."""
    texts = [f.event.text for f in failures] + [launcher_words(f) for f in killed]
    texts += [fault.text.partition("total-vm")[0].rstrip(", ") for fault in faults]
    quoted = "; ".join(excerpt(text, _QUOTED) for text in dict.fromkeys(filter(None, texts)))
    return f" ({quoted})" if quoted else ""


def _has_other_error(job: JobFailures) -> bool:
    """Whether a rank has an error that no kill for memory explains."""
    # What a program says after one of its processes has died is of that.
    died = {f.file: f.event.line for f in job.consequences if f.event.has_phrase("died")}
    return any(
        f.event.kind != "oom" and _KILLED_WORKER not in f.event.text
        and not f.event.has_phrase("only-ends")
        and not died.get(f.file, f.event.line) < f.event.line
        for f in job.final
    )  # fmt: skip


def lost_node(job: JobFailures) -> Finding | None:
    """Slurm lost a node."""
    steps, lines = slurm_steps(job, "NODE_FAIL")
    return Finding(for_=lines, words={"nodes": steps[0].nodes}) if steps else None


def gpu_fault(job: JobFailures) -> Finding | None:
    """A GPU's fault in the kernel's log, where no rank has an own error."""
    return of_kernel(job, job.xids(), job.xids())


def node_fault(job: JobFailures) -> Finding | None:
    """A fault of a node in the kernel's log, where the ranks only lost a peer."""
    # A link may come back, unless a rank has failed.
    order, kinds = list(_FAULTS), {*_FAULTS} - ({"link"} if not job.all else set())
    faults = [f for f in job.evidence.kernel if f.kind in kinds]
    first = sorted(faults, key=lambda fault: order.index(fault.kind))[:1]
    finding = of_kernel(job, first, faults)
    return finding and replace(finding, kind=_FAULTS[first[0].kind])


def hang_by_node(job: JobFailures) -> Finding | None:
    """A hang; where nothing tells who was late, a fault of a node, or of the network, if all that
    waited did so for a connection that the network refused.
    """
    finding, fault = hang(job), None
    if finding and not finding.ranks and job.waited:
        is_unreached = all(f.event.has_phrase("connects") for f in job.waited)
        unreached = fabric(job) if is_unreached else None
        fault = node_fault(job) or (unreached and replace(unreached, kind="network"))
    return replace(fault, sentence=ERROR) if fault else finding


def silent(job: JobFailures) -> Finding | None:
    """The rank whose log ends without a failure, while its peers lost a rank."""
    ranks = set(job.silent_ranks())
    if not ranks or not job.lost:
        return None
    evidence = last_lines(job, ranks) + lines_of(job.lost, 1)
    missing = ("its exit status: sacct, the launcher's output or the kernel's log",)
    words = {"peers": ranks_of(ranks_in(job.lost))}
    return Finding(ranks, job.nodes_of(ranks), evidence, words=words, missing=missing)


def consequence(job: JobFailures) -> Finding | None:
    """An error that says that its cause is elsewhere, or that came when others had lost a peer."""
    failures = job.consequences or job.late
    # What the job itself has ended says less than a connection that broke before.
    if job.losses:
        failures = [f for f in failures if not f.event.has_phrase("by-the-job")]
    # A launcher knows only that some rank of its has ended, and a name says less.
    is_quoted = all(
        f.is_by("is_unnamed") or f.event.has_phrase("wraps") or " " not in f.event.text
        for f in failures
    )
    is_told = all(f.event.has_phrase("no-peer") for f in job.losses)
    # The processes whose ends are reported are those that have lost a connection.
    pids = {f.event.pid for f in job.reports}
    is_own = bool(pids) and pids <= {f.event.pid for f in job.losses} - {0}
    is_told &= is_own or not any(f.event.has_phrase("died") for f in failures)
    if (job.losses and (is_quoted or is_told)) or (is_quoted and complained(job)):
        return None
    # One that says a reason says more than what quotes it.
    failures = sorted(failures, key=lambda f: (
        f.event.has_phrase("wraps"), " because " not in f.event.text
    ))  # fmt: skip
    name = subject(ranks_in(failures), nodes_in(failures))
    missing = ("the log of the process that failed first",)
    words = {"who": name, "error": failures[0].event.text} if failures else {}
    finding = Finding(for_=lines_of(failures), failures=failures[:1], words=words, missing=missing)
    return finding if failures else None


def exit_status(job: JobFailures) -> Finding | None:
    """Only Slurm, or a launcher, knows how the ranks ended."""
    steps = [step for step in job.evidence.steps if step.code or step.signal]
    if job.reports or not steps:
        text = "; ".join(dict.fromkeys(report_text(f) for f in job.reports[:3]))
        return Finding(sentence="{error}", words={"error": text}) if text else None
    step, kind, how = steps[-1], "", f"exit code {steps[-1].code}"
    if step.signal:
        kind = kind_of_code(-step.signal)
        how = SIGNAL_NAMES.get(step.signal, f"signal {step.signal}")
    lines = [f"Slurm: {s.step} {s.state} {s.code}:{s.signal}" for s in steps[:3]]
    words = {"error": f"{step.step} {step.state} with {how}"}
    return Finding(for_=lines, words=words, kind=kind, missing=("the logs of the ranks",))


#: The rules in their order.
RULES = (
    Rule("unclear", survived, "no failure: {how}{seen}"),
    Rule("oom", out_of_memory, "{who}: out of memory: {by} killed {process}{quoted}"),
    Rule("signal", ended_first, "{who} {was|were} ended by {signal}, from outside"),
    Rule("environment", not_launched, "no rank was started: {error}"),
    Rule("exception", own_error, ERROR),
    Rule("unclear", mismatch, "{who} or a peer called with another size: {error}"),
    Rule("network", lost_node, "Slurm lost a node of the job ({nodes})"),
    Rule("limit", limit, ENDED_BY),
    Rule("signal", killed,
         "{who} {was|were} ended by {signal}, without an error in its log{quoted}"),
    Rule("gpu", gpu_fault, ERROR),
    Rule("exception", earlier_error, ERROR),
    Rule("network", own_connection, ERROR),
    Rule("timeout", hang_by_node, "{who} did not come until a timeout: {error}"),
    Rule("network", node_fault, ERROR),
    Rule("unclear", silent, "{who} ended without a word; {peers} lost a peer"),
    Rule("signal", ended, "{who} {was|were} ended by {signal}, from outside"),
    Rule("network", fabric, ERROR),
    Rule("unclear", consequence, "{who}: {error}: the cause is elsewhere"),
    Rule("unclear", lost_peers,
         "every failure is a lost peer: the rank that failed first left no trace: {error}"),
    Rule("exception", complained, ERROR),
    Rule("unclear", exit_status, "Slurm: {error}, and no log says why"),
    Rule("unclear", lambda job: Finding(), "no failure in the evidence"),
)  # fmt: skip


class FirstFailureFinder:
    """Finds the first failure in the evidence on one job."""

    def __init__(self, evidence: JobEvidence) -> None:
        self.evidence, self.job = evidence, JobFailures(evidence)

    def find(self) -> FirstFailure:
        """The first failure."""
        findings = ((rule, rule.evidence(self.job)) for rule in RULES)
        cause = next(rule.cause(finding) for rule, finding in findings if finding)
        cause = self._by_environment(cause)
        ranks, nodes = set(cause.ranks), set(cause.nodes)
        records = [
            f"{record.kind} of {record.node}: {record.text}"
            for record, rank in self.job.ranked_records()
            if (rank in ranks if rank is not None else record.node in nodes)
        ]
        if not records or not cause.suspects:
            return cause
        first, *further = cause.suspects
        first = replace(first, for_=(*first.for_, *records[:4]))
        return replace(cause, suspects=(first, *further))

    def _by_environment(self, cause: FirstFailure) -> FirstFailure:
        """The cause; the fault of the job's environment that explains it, if there is one."""
        job, texts = self.job, [cause.text]
        if cause.kind == "unclear":
            texts += [f"{f.event.text} {f.event.frame}" for f in (*job.lost, *job.waited)]
        faults = [*explaining_faults(self.evidence, job.finder, job.node_of, cause.kind, texts)]
        if not faults:
            return cause
        suspects = [
            Suspect(finding.ranks, finding.nodes, (finding.text, *places), ())
            for finding, places in faults[:MAX_SUSPECTS]
        ]
        (finding, places), *_ = faults
        suspects[0] = replace(suspects[0], for_=(*places, f"it explains: {cause.text}"))
        text = f"{subject(finding.ranks, finding.nodes)}: {finding.text}; {finding.advice}"
        return replace(
            cause, kind="environment", text=text, suspects=tuple(suspects), missing=(),
            ranks=finding.ranks, nodes=finding.nodes,
        )  # fmt: skip

    def groups(self, cause: FirstFailure) -> tuple[FailureGroup, ...]:
        """All failures, equal ones once: the cause first, victims after it."""
        groups = [
            FailureGroup(
                *(group.first.event.role, group.first.event.kind, group.first.event.text),
                *(len({(f.rank, f.file, f.event.line) for f in group.failures}), group.ranks),
                *(group.nodes, group.first.example),
                time=moment_text(group.earliest.time_s) if group.earliest else "",
            )
            for group in equal_failures(self.job.all)
        ]
        cause_ranks = set(cause.ranks)

        def order(group: FailureGroup) -> tuple[object, ...]:
            is_cause = group.role == FAILED and cause_ranks.issuperset(group.ranks)
            return _ROLE_ORDER.index(group.role), not is_cause, len(group.ranks)

        return tuple(sorted(groups, key=order))

    def node_events(self) -> tuple[NodeEvent, ...]:
        """What the nodes keep beside the logs."""
        return tuple(
            NodeEvent(record.node, record.kind, () if rank is None else (rank,),
                      moment_text(record.time_s), record.text)
            for record, rank in self.job.ranked_records()
        )  # fmt: skip

    def witnesses(self, cause: FirstFailure) -> dict[str, str]:
        """Who saw the fault on each node of the cause itself: `Postmortem.witnesses`."""
        files, sources_of = self.evidence.files, dict[str, str]()
        for failure in self.job.all:
            is_own_log = failure.file >= 0 and failure.node == files[failure.file].node
            if failure.event.kind == cause.kind and is_own_log:
                sources_of[failure.node] = LOG
        for fault in self.evidence.kernel:
            if HARDWARE.get(fault.kind) == cause.kind and not is_of_program(fault):
                sources_of[fault.node] = KERNEL
        return {node: by for node, by in sources_of.items() if node in cause.nodes}

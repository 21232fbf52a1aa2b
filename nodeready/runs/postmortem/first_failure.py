"""Who failed first, by the events of all ranks, the kernel and Slurm. Pure.

The rules stand in their order, and the first that finds evidence names the cause: an error of a
rank's own outranks every lost peer; a kill outranks a timeout; a timeout outranks a lost
connection. Times decide between own errors only beyond the uncertainty of the clocks.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from nodeready.agent.failure_rules import (
    CONSEQUENCE,
    ENDED,
    FAILED,
    LOST,
    PHRASES,
    REPORT,
    SIGNAL_NAMES,
    STOPS,
    WAITED,
    kind_of_code,
    meaning,
    signal_of,
)
from nodeready.core.text import excerpt
from nodeready.runs.postmortem.document import KERNEL, LOG, FailureGroup, FirstFailure, NodeEvent
from nodeready.runs.postmortem.environment import explaining_faults
from nodeready.runs.postmortem.evidence import (
    JobEvidence,
    NodeFault,
    RankFailure,
    SlurmStep,
    reporter_of,
)
from nodeready.runs.postmortem.findings import (
    MAX_SUSPECTS,
    Finding,
    Rule,
    kernel_lines,
    launcher_words,
    lines_of,
    moment_text,
    nodes_in,
    report_text,
    subject,
    suspect_of,
    undecided,
)
from nodeready.runs.postmortem.hangs import hang
from nodeready.runs.postmortem.links import fabric, lost_peers
from nodeready.runs.postmortem.own_errors import (
    WENT_ON,
    earlier_error,
    first_error,
    mismatch,
    not_launched,
    own_connection,
    own_error,
)
from nodeready.runs.postmortem.rank_failures import (
    JobFailures,
    equal_failures,
    is_after,
    precedes,
    ranks_in,
)
from nodeready.runs.postmortem.survival import complained, survived
from nodeready.runs.stacks.document import Suspect
from nodeready.runs.stacks.evidence import ranks_of
from nodeready.subjects.gpus import xids

#: Kind of a kernel's fault of hardware -> the kind of its cause.
HARDWARE = {"xid": "gpu", "link": "network"}
#: Kind of a kernel's fault -> the kind of the cause, where the ranks only lost a peer.
_FAULTS = {"link": "network", "filesystem": "storage", "segfault": "segfault",
           "oom": "oom", "memory": "signal"}  # fmt: skip
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d{1,5})\b")
#: The Xid of a process that has ended.
_CLEANUP = "45"
#: Word of Slurm -> why it ended a job.
_LIMITS = {
    "TIME": "its time limit was reached", "PREEMPT": "it was preempted",
    "DEADLINE": "its deadline was reached", "REQUEUE": "it was requeued",
}  # fmt: skip
#: The sentences about an error, and about a limit.
_ERROR, _ENDED_BY = "{who}: {error}", "{by} ended the job: {reason}"
#: Order of the groups of failures.
_ROLE_ORDER = (FAILED, WAITED, LOST, CONSEQUENCE, ENDED, REPORT)
#: Slurm's number of a task in the name of a cgroup, which it counts on each node.
_TASK = re.compile(r"/step_\S*?/task_(\d{1,6})")
#: The words of an error about a worker of a data loader, and its process.
_KILLED_WORKER = "is killed by signal: Killed"
_WORKER = re.compile(r"DataLoader (?:worker|process) \(pid(?:\(s\))? (\d{1,10})")
#: The words of a signal from outside in an exception of torchrun.
_SIGNAL = re.compile(r"got signal: (\d{1,2})\b")
#: Seconds by which the ends that two launchers see may be in another order: torchrun reports whole
#: seconds, and looks every 0.1 s.
_SEEN_S = 1.1
#: Maximum characters of what one source says of a process that was killed.
_QUOTED = 120


def _steps(job: JobFailures, *states: str) -> tuple[list[SlurmStep], list[str]]:
    """Slurm's steps in states that begin like these, and the lines about them."""
    steps = [step for step in job.evidence.steps if step.state.startswith(states)]
    return steps, [f"sacct: {step.step} {step.state}" for step in steps[:2]]


def _last_lines(job: JobFailures, ranks: set[int], maximum: int = 3) -> list[str]:
    """The last lines of some of the ranks that belong to no failure."""
    lines = [
        f"its last line: {stream.last}"
        for file in job.evidence.files
        for stream in file.failures.streams
        if stream.last and ranks & {job.finder.file_rank(file), stream.rank}
    ]  # fmt: skip
    return list(dict.fromkeys(lines))[:maximum]


def out_of_memory(job: JobFailures) -> Finding | None:
    """The kernel or Slurm killed a process of the job for its memory."""
    faults = [fault for fault in job.evidence.kernel if fault.kind == "oom"]
    slurm = [f for f in job.own_errors if f.event.kind == "oom" and f.is_by("manager")]
    steps, step_lines = _steps(job, "OUT_OF_ME")
    srun = [f for f in job.reports if f.event.kind == "oom"]
    is_known = bool(slurm or steps or srun)
    killed = [f for f in job.reports if signal_of(f.event.code) == 9]
    workers = [f for f in job.own_errors if _KILLED_WORKER in f.event.text]
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
    if slurm and slurm[0].is_by("cancels"):
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
    # What a program says after a process of its own has died is of that.
    died = {f.file: f.event.line for f in job.consequences if f.event.has_phrase("died")}
    return any(
        f.event.kind != "oom" and _KILLED_WORKER not in f.event.text
        and not f.event.has_phrase("only-ends")
        and not died.get(f.file, f.event.line) < f.event.line
        for f in job.final
    )  # fmt: skip


def lost_node(job: JobFailures) -> Finding | None:
    """Slurm lost a node."""
    steps, lines = _steps(job, "NODE_FAIL")
    return Finding(for_=lines, words={"nodes": steps[0].nodes}) if steps else None


def limit(job: JobFailures) -> Finding | None:
    """Slurm, or another scheduler, ended the job by its limit."""
    events = [f for f in job.ended if f.event.kind == "limit"]
    steps, lines = _steps(job, "TIMEOUT", "PREEMPTED", "DEADLINE")
    for word in [f.event.text for f in events] + [step.state for step in steps]:
        reason = next((reason for key, reason in _LIMITS.items() if key in word), word)
        by = reporter_of(events[0].event.source if events else "slurm")
        words = {"by": by.get("manager", "the scheduler"), "reason": reason}
        lines = lines_of(events) + lines
        return Finding(for_=lines, words=words, kind="limit", sentence=_ENDED_BY)
    return None


def killed(job: JobFailures) -> Finding | None:
    """A rank that ended by a signal or with a status, without an error in its log."""
    excused = ranks_in((*job.victims, *job.consequences))
    agent_pids = {(f.node, f.event.pid) for f in job.ended if f.event.source == "torchrun"}
    # All reported ranks of a file may have lost a peer.
    unknown = Counter(f.file for f in job.victims if f.rank is None)
    #: (index of a file, whether a report names no rank) -> failures that its rank may have had.
    aborting = Counter(
        (f.file, is_unnamed)
        for f in (*job.victims, *job.consequences)
        for is_unnamed in (True, False)
        if f.rank is None or (is_unnamed and f.event.role == WAITED)
        if f.event.role != CONSEQUENCE or f.event.has_phrase("ends-since-another")
    )  # fmt: skip
    reported = Counter(file for file, _ in {
        (f.file, f.event.pid or f.rank)
        for f in job.reports if signal_of(f.event.code) not in STOPS
    })  # fmt: skip
    order: list[RankFailure] = []
    for failure in _without_kills_of_srun(job):
        number = signal_of(failure.event.code)
        is_ended = failure.rank in excused or (failure.node, failure.event.pid) in agent_pids
        # A signal that torchrun did not send came from outside.
        is_torchrun = failure.event.source.startswith("torchrun") and bool(agent_pids)
        is_ended |= (number in STOPS and not is_torchrun) or _ended_itself(job, failure)
        is_ended |= not number and (
            unknown[failure.file] >= reported[failure.file] or _is_launcher(job, failure)
        )
        # A watchdog's timeout aborts its process, and so may a lost peer.
        is_ended |= (
            number == 6 and aborting[failure.file, failure.rank is None] >= reported[failure.file]
        )
        # Of a rank without a log, it is not known whether it lost a peer, as others did.
        is_unlogged = failure.rank is not None and failure.rank not in job.logged
        is_unlogged &= bool(job.logged and excused) and failure.event.source != "torchrun-root"
        if not is_ended and (number or not is_unlogged):
            order.append(failure)
    if not order:
        return None
    has_signals = any(signal_of(f.event.code) for f in order)
    order.sort(key=lambda f: (
        has_signals and not signal_of(f.event.code) and f.event.source != "srun",
        f.rank is None,
        # mpirun kills the other ranks, and tells it of them, too.
        (f.rank is None or f.event.source == "mpirun") and signal_of(f.event.code) == 9,
        f.time_s or 0.0,
        f.event.source not in ("torchrun-root", "srun", "mpirun"),
        f.event.line,
    ))  # fmt: skip
    first, code = order[0], order[0].event.code
    same = [
        f for f in order
        if (f.event.code, f.file, f.event.line) == (code, first.file, first.event.line)
        and f.event.source in (first.event.source, "torchrun-root")
    ]  # fmt: skip
    ranks, nodes, number = ranks_in(same), nodes_in(same), signal_of(code)
    rivals = [
        f for f in order
        if f.rank not in (None, *ranks) and bool(signal_of(f.event.code)) == bool(number)
        and f.file != first.file and not f.earliest_s - first.latest_s > _SEEN_S
    ]  # fmt: skip
    if rivals:
        ended = {f.rank: f for f in (*rivals, first) if f.rank is not None}
        suspects = [suspect_of((r,), (f.node,), (report_text(f),)) for r, f in ended.items()]
        return undecided(suspects, "times of their ends would tell which was first")
    if not number and (errors := [f for f in job.own_errors if f.rank in ranks]):
        return first_error(job, errors, WENT_ON)
    roots = [f for f in job.roots if f.rank in ranks and f is not first][:1]
    evidence = [report_text(f) for f in (first, *roots)]
    evidence += _last_lines(job, ranks, 1) if len(ranks) == 1 else []
    evidence += lines_of([first]) if first.event.text else []
    finding = Finding(ranks, nodes, evidence, failures=[first], kind=kind_of_code(code))
    quoted = f": {first.event.text}" if first.is_by("is_quoted") or not ranks else ""
    said = first.event.last_words or job.complaint(ranks)
    if said and (not number or (number == signal.SIGABRT and PHRASES["cries"].search(said))):
        # The first report of several says less than a log of the rank's own.
        is_known = first.rank in job.logged or {f.rank for f in order} == ranks
        finding = finding if is_known else replace(finding, ranks=(), nodes=())
        return _complained(finding, first, said)
    if not number:
        return _exited(finding, first, quoted)
    # The kernel names the process of a GPU's fault, which ends it. Xid 45 follows an end.
    pids = {(f.node, f.event.pid) for f in same if f.event.pid}
    faults = [
        fault for fault in job.xids()
        if not pids.isdisjoint([(fault.node, fault.pid), ("", fault.pid)])
        and not ((xid := _XID.match(fault.text)) and xid[1] == _CLEANUP)
    ]  # fmt: skip
    if faults and number not in (*STOPS, signal.SIGKILL):
        on_gpu = _of_kernel(job, faults, faults)
        return on_gpu and replace(
            on_gpu, ranks=ranks, nodes=nodes | {*on_gpu.nodes}, for_=[*on_gpu.for_, *evidence],
            failures=[first], kind="gpu", sentence=_ERROR,
        )  # fmt: skip
    name = SIGNAL_NAMES.get(number, f"signal {number}")
    equal_ends = (f for f in order if f.event.code == code and f.rank in (None, *ranks))
    ends = map(launcher_words, equal_ends)
    quoted_end = next((f"; {text}" for text in ends if text not in ("", f"signal {number}")), "")
    finding.words = {"signal": f"{name} (signal {number}{quoted_end})", "quoted": quoted}
    against, finding.missing = _doubts(job, number)
    finding.against = (against,) if against else ()
    return finding


def _complained(finding: Finding, first: RankFailure, text: str) -> Finding:
    """A rank that ended itself after words of an error that no row explains."""
    words = {"error": f"{text}; then {report_text(first)}"}
    return replace(finding, kind=meaning(text).kind, words=words, sentence=_ERROR)


def _exited(finding: Finding, first: RankFailure, quoted: str) -> Finding:
    """A rank that ended with an exit status, and its log does not say why."""
    is_told = not first.event.text or launcher_words(first)
    how = f"ended with exit code {first.event.code}" if is_told else "failed"
    how = "ended" if first.is_by("is_blind") else how
    quoted = quoted if is_told else f": {first.event.text}"
    return replace(
        finding, kind="unclear", words={"how": how, "quoted": quoted},
        sentence="{who} {how}, without an error in its log{quoted}",
        missing=("why it exited: its log does not say",),
    )  # fmt: skip


def _without_kills_of_srun(job: JobFailures) -> list[RankFailure]:
    """The reports of ends, without those of most ranks that srun killed after another's end."""
    reports = [f for f in job.reports if f.event.source == "srun"]
    kills = [f for f in reports if f.event.code == -signal.SIGKILL]
    first = min((f.event.line for f in reports), default=0)
    is_sent = 2 * len(ranks_in(kills)) > len(job.ranks) and len({f.file for f in reports}) == 1
    sent = {id(f) for f in kills if is_sent and f.event.line > first}
    return [f for f in job.reports if id(f) not in sent]


def _ended_itself(job: JobFailures, failure: RankFailure) -> bool:
    """Whether a program that a shell started has ended itself after a failure of its processes."""
    is_own = failure.rank is None and failure.is_by("of_program")
    return is_own and signal_of(failure.event.code) == 9 and is_after(failure, job.all)


def _is_launcher(job: JobFailures, failure: RankFailure) -> bool:
    """Whether Slurm's task of a node is a launcher, which fails with the ranks that it names."""
    is_task = failure.event.source == "srun" and job.finder.has_node_launchers
    return is_task and any(f.rank is not None for f in job.reports)


def _doubts(job: JobFailures, number: int) -> tuple[str, tuple[str, ...]]:
    """What speaks against a signal as a cause of its own, "": nothing; what would tell more."""
    missing = ("where it crashed: nodeready cores",) * (number in (4, 6, 7, 8, 11))
    if number == signal.SIGBUS:
        # A process gets it where a file that it has mapped cannot be written or read.
        missing += ("how full /dev/shm and the disks of the node were: df, dmesg",)
    if number != signal.SIGKILL:
        return "", missing
    if any("kernel" in name for name in job.evidence.sources):
        return "not for memory by the kernel: its log has no such line", ()
    reasons = [reason for name, reason in job.evidence.missing.items() if "kernel" in name]
    missing = ("the kernel's log would tell whether it was killed for memory",)
    if reasons:
        return f"a person, or the kernel for memory: {reasons[0]}", missing
    return "a person may have killed it, or the kernel for memory: its log was not read", missing


def gpu_fault(job: JobFailures) -> Finding | None:
    """A GPU's fault in the kernel's log, where no rank has an own error."""
    return _of_kernel(job, job.xids(), job.xids())


def node_fault(job: JobFailures) -> Finding | None:
    """A fault of a node in the kernel's log, where the ranks only lost a peer."""
    order, faults = list(_FAULTS), [f for f in job.evidence.kernel if f.kind in _FAULTS]
    first = sorted(faults, key=lambda fault: order.index(fault.kind))[:1]
    finding = _of_kernel(job, first, faults)
    return finding and replace(finding, kind=_FAULTS[first[0].kind])


def _of_kernel(
    job: JobFailures, faults: Sequence[NodeFault], shown: Sequence[NodeFault]
) -> Finding | None:
    by_pid, keys = job.finder.by_pid, [(fault.node, fault.pid) for fault in faults]
    ranks, nodes = {by_pid[key] for key in keys if key in by_pid}, {f.node for f in faults}
    words = {"error": faults[0].text if faults else ""}
    return Finding(ranks, nodes, kernel_lines(shown), words=words) if faults else None


def hang_by_node(job: JobFailures) -> Finding | None:
    """A hang; where nothing tells who was late, a fault of a node, or of the network, if all that
    waited did so for a connection that the network refused.
    """
    finding, fault = hang(job), None
    if finding and not finding.ranks and job.waited:
        is_unreached = all(f.event.has_phrase("connects") for f in job.waited)
        unreached = fabric(job) if is_unreached else None
        fault = node_fault(job) or (unreached and replace(unreached, kind="network"))
    return replace(fault, sentence=_ERROR) if fault else finding


def silent(job: JobFailures) -> Finding | None:
    """The rank whose log ends without a failure, while its peers lost a rank."""
    ranks = set(job.silent_ranks())
    if not ranks or not job.lost:
        return None
    evidence = _last_lines(job, ranks) + lines_of(job.lost, 1)
    missing = ("its exit status: sacct, the launcher's output or the kernel's log",)
    words = {"peers": ranks_of(ranks_in(job.lost))}
    return Finding(ranks, job.nodes_of(ranks), evidence, words=words, missing=missing)


def ended_first(job: JobFailures) -> Finding | None:
    """A signal, or a limit, ended the launcher before any rank failed."""
    errors = [*job.final, *(f for f in job.reports if f.event.source != "core")]
    is_first = job.final and any(
        all(
            end.event.line < f.event.line if end.file == f.file else precedes(end, f)
            for f in errors
        )
        for end in job.ended
        if end.event.source in ("slurm-job", "agent") or end.event.kind == "limit"
    )
    return (limit(job) or ended(job)) if is_first else None


def ended(job: JobFailures) -> Finding | None:
    """A signal ended the launcher or the ranks."""
    # A job whose ranks have lost a peer and aborted, is cancelled for that.
    aborted = {f.file: f.event.line for f in job.reports if job.losses and f.event.code == -6}
    ends = [f for f in job.ended if aborted.get(f.file, f.event.line) >= f.event.line]
    launchers = [f for f in ends if f.is_by("cancels")]
    launchers += [f for f in ends if f.event.source == "agent"]
    # Slurm also says CANCELLED of a batch script that crashed (22.05): 0:11.
    steps, lines = _steps(job, "CANCELLED")
    is_cancelled = any(not s.signal or kind_of_code(-s.signal) == "signal" for s in steps)
    if launchers or is_cancelled:
        quoted = [f": {f.event.text}" for f in launchers if f.is_by("manager")]
        sentence, name = "the job was cancelled{quoted}", ""
        if sent := {signal_of(f.event.code) for f in job.reports} & {10, 12}:
            sentence, name = "{signal} of Slurm ended the ranks", SIGNAL_NAMES[min(sent)]
        if not (is_cancelled or launchers[0].is_by("cancels")):
            sentence = "{signal} ended the launcher, from outside"
            name = _signal_name(launchers[0], "a signal (Ctrl-C)")
        words = {"signal": name, "quoted": quoted[0] if quoted else ""}
        return Finding(for_=lines_of(launchers) + lines, sentence=sentence, words=words)
    own_ends = [f for f in job.ended if f.event.source in ("", "error-file", "shell")]
    failures = own_ends or [f for f in job.reports if signal_of(f.event.code) in STOPS]
    # srun ends the other ranks when one has ended.
    by_srun = [f for f in failures if f.event.source == "srun" and not own_ends]
    is_sent = bool(by_srun) and any(
        f.file == by_srun[0].file and f.event.line < by_srun[0].event.line
        for f in (*job.reports, *job.losses) if f not in failures
    )  # fmt: skip
    if not failures or is_sent:
        return None
    first = min(failures, key=lambda f: (f.time_s or 0.0, f.event.line))
    failures = own_ends or failures[:1]
    ranks, words = ranks_in(failures), {"signal": _signal_name(first, "SIGTERM")}
    words |= {"who": "all ranks"} if len(job.ranks) > 1 and ranks == job.ranks else {}
    return Finding(ranks, nodes_in(failures), lines_of([first]), (), [first], words)


def _signal_name(failure: RankFailure, default: str) -> str:
    """The signal that an event names."""
    event, match = failure.event, _SIGNAL.search(failure.event.text)
    if "KeyboardInterrupt" in event.text:
        return "SIGINT (Ctrl-C)"
    code = int(match[1]) if match and not event.code else event.code
    return SIGNAL_NAMES.get(signal_of(code) or abs(code), default)


def consequence(job: JobFailures) -> Finding | None:
    """An error that says that its cause is elsewhere, or that came when others had lost a peer."""
    failures = job.consequences or job.late
    # What the job itself has ended says less than a connection that broke before.
    if job.losses:
        failures = [f for f in failures if not f.event.has_phrase("by-the-job")]
    # A launcher knows no more than that one of its ranks has ended.
    is_quoted = all(f.is_by("is_unnamed") or f.event.has_phrase("wraps") for f in failures)
    is_told = all(f.event.has_phrase("no-peer") for f in job.losses)
    is_told = is_told and not any(f.event.has_phrase("died") for f in failures)
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
    Rule("environment", not_launched, "no rank was started: {error}"),
    Rule("signal", ended_first, "{who} {was|were} ended by {signal}, from outside"),
    Rule("exception", own_error, _ERROR),
    Rule("unclear", mismatch, "{who} or a peer called with another size: {error}"),
    Rule("network", lost_node, "Slurm lost a node of the job ({nodes})"),
    Rule("limit", limit, _ENDED_BY),
    Rule("signal", killed,
         "{who} {was|were} ended by {signal}, without an error in its log{quoted}"),
    Rule("gpu", gpu_fault, _ERROR),
    Rule("exception", earlier_error, _ERROR),
    Rule("network", own_connection, _ERROR),
    Rule("timeout", hang_by_node, "{who} did not come until a timeout: {error}"),
    Rule("network", node_fault, _ERROR),
    Rule("unclear", silent, "{who} ended without a word; {peers} lost a peer"),
    Rule("signal", ended, "{who} {was|were} ended by {signal}, from outside"),
    Rule("network", fabric, _ERROR),
    Rule("unclear", consequence, "{who}: {error}: the cause is elsewhere"),
    Rule("unclear", lost_peers,
         "every failure is a lost peer: the rank that failed first left no trace: {error}"),
    Rule("exception", complained, _ERROR),
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
            code = _XID.match(fault.text)
            # Any program causes some of a GPU's faults.
            rule = xids.find_rule(fault.text)
            action = rule.action if rule else ""
            action = xids.action_of(int(code[1]), fault.text) if code else action
            if HARDWARE.get(fault.kind) == cause.kind and action != xids.APPLICATION:
                sources_of[fault.node] = KERNEL
        return {node: by for node, by in sources_of.items() if node in cause.nodes}

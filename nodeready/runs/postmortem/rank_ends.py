"""The ends of ranks, and of the job, that no error of a rank's own explains: by a signal, an exit
status, a limit. Pure.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from dataclasses import replace

from nodeready.agent.failures.rules import (
    CONSEQUENCE,
    FAILED,
    LOST,
    PHRASES,
    SIGNAL_NAMES,
    STOPS,
    WAITED,
    kind_of_code,
    meaning,
    signal_of,
)
from nodeready.runs.postmortem.evidence import RankFailure, reporter_of
from nodeready.runs.postmortem.findings import (
    ENDED_BY,
    ENDED_POD,
    ERROR,
    XID,
    Finding,
    last_lines,
    launcher_words,
    lines_of,
    nodes_in,
    of_kernel,
    report_text,
    slurm_steps,
    suspect_of,
    undecided,
)
from nodeready.runs.postmortem.links import fabric
from nodeready.runs.postmortem.own_errors import WENT_ON, first_error
from nodeready.runs.postmortem.rank_failures import JobFailures, is_after, precedes, ranks_in

#: The Xid of a process that has ended.
_CLEANUP = "45"
#: Word of Slurm -> why it ended a job.
_LIMITS = {
    "TIME": "its time limit was reached", "PREEMPT": "it was preempted",
    "DEADLINE": "its deadline was reached", "REQUEUE": "it was requeued",
}  # fmt: skip
#: The words of a signal from outside in an exception of torchrun.
_SIGNAL = re.compile(r"got signal: (\d{1,2})\b")
#: Seconds by which the ends that two launchers see may be in another order: torchrun reports whole
#: seconds, and looks every 0.1 s.
_SEEN_S = 1.1


def limit(job: JobFailures) -> Finding | None:
    """Slurm, or another scheduler, ended the job by its limit."""
    events = [f for f in job.ended if f.event.kind == "limit"]
    steps, lines = slurm_steps(job, "TIMEOUT", "PREEMPTED", "DEADLINE")
    for word in [f.event.text for f in events] + [step.state for step in steps]:
        reason = next((reason for key, reason in _LIMITS.items() if key in word), word)
        by = reporter_of(events[0].event.source if events else "slurm")
        words = {"by": by.get("manager", "the scheduler"), "reason": reason}
        lines = lines_of(events) + lines
        # A pod, or its node, that is taken away ends its ranks: their peers lose them.
        taken = [f for f in events if f.event.host and f.is_by("of_pods")]
        pods = {f.event.host for f in taken}
        kind, sentence = ("signal", ENDED_POD) if taken else ("limit", ENDED_BY)
        return Finding(
            ranks_in(taken), pods, for_=lines, words=words, kind=kind, sentence=sentence
        )  # fmt: skip
    return None


def _cries(number: int, complaint: str) -> bool:
    """Whether a process that ended itself by a signal has printed a reason."""
    return number == signal.SIGABRT and PHRASES["cries"].search(complaint) is not None


def killed(job: JobFailures) -> Finding | None:
    """A rank that ended by a signal or with a status, without an error in its log."""
    excused = ranks_in((*job.victims, *job.consequences))
    agent_pids = {(f.node, f.event.pid) for f in job.ended if f.event.source == "torchrun"}
    # All reported ranks of a file may have lost a peer.
    unknown, reported = _unknown_victims(job), _reported(job)
    aborted = _aborted(job, reported)
    of_themselves = _ends_of_themselves(job)
    order: list[RankFailure] = []
    for failure in _without_kills_of_srun(job):
        number = signal_of(failure.event.code)
        is_ended = failure.rank in excused or (failure.node, failure.event.pid) in agent_pids
        # A signal that torchrun did not send came from outside.
        is_torchrun = failure.event.source.startswith("torchrun") and bool(agent_pids)
        is_ended |= (number in STOPS and not is_torchrun) or id(failure) in of_themselves
        is_ended |= not number and (
            unknown[failure.file] >= reported[failure.file, False] or _is_launcher(job, failure)
        )
        is_ended |= number == 6 and (failure.file, failure.rank is None) in aborted
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
        # mpirun kills all further ranks, and tells it of them, too.
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
    evidence += last_lines(job, ranks, 1) if len(ranks) == 1 else []
    evidence += lines_of([first]) if first.event.text else []
    finding = Finding(ranks, nodes, evidence, failures=[first], kind=kind_of_code(code))
    quoted = f": {first.event.text}" if first.is_by("is_quoted") or not ranks else ""
    complaint = first.event.last_words or job.complaint(ranks)
    if complaint and (not number or _cries(number, complaint)):
        # The first report of several says less than a log of the rank's own.
        is_known = first.rank in job.logged or {f.rank for f in order} == ranks
        finding = finding if is_known else replace(finding, ranks=(), nodes=())
        return _complained(finding, first, complaint)
    if not number:
        return _exited(finding, first, quoted)
    # The kernel names the process of a GPU's fault, which ends it. Xid 45 follows an end.
    pids = {(f.node, f.event.pid) for f in same if f.event.pid}
    faults = [
        fault for fault in job.xids()
        if not pids.isdisjoint([(fault.node, fault.pid), ("", fault.pid)])
        and not ((xid := XID.match(fault.text)) and xid[1] == _CLEANUP)
    ]  # fmt: skip
    if faults and number not in (*STOPS, signal.SIGKILL):
        on_gpu = of_kernel(job, faults, faults)
        return on_gpu and replace(
            on_gpu, ranks=ranks, nodes=nodes | {*on_gpu.nodes}, for_=[*on_gpu.for_, *evidence],
            failures=[first], kind="gpu", sentence=ERROR,
        )  # fmt: skip
    name = SIGNAL_NAMES.get(number, f"signal {number}")
    equal_ends = (
        f for f in order if signal_of(f.event.code) == number and f.rank in (None, *ranks)
    )
    words = map(launcher_words, equal_ends)
    quoted_end = next((f"; {text}" for text in words if text not in ("", f"signal {number}")), "")
    finding.words = {"signal": f"{name} (signal {number}{quoted_end})", "quoted": quoted}
    against, finding.missing = _doubts(job, number)
    finding.against = (against,) if against else ()
    return finding


def _unknown_victims(job: JobFailures) -> Counter[int]:
    """Index of a file -> at most how many unknown ranks of it have lost a peer or waited.

    Where all ends are alike, the lines of half of these ranks may be lost, or mixed with others.
    """
    victims = Counter(f.file for f in job.victims if f.rank is None)
    codes = Counter(file for file, _ in {(f.file, f.event.code) for f in job.reports})
    return Counter({file: victims[file] * (2 if codes[file] == 1 else 1) for file in victims})


def _reported(job: JobFailures) -> Counter[tuple[int, bool]]:
    """The ends that no launcher has caused: (index of a file, False: all; True: of unnamed ranks)
    -> how many.
    """
    ends = {
        (f.file, f.event.pid or f.rank, is_unnamed)
        for f in job.reports if signal_of(f.event.code) not in STOPS
        for is_unnamed in ((False, True) if f.rank is None else (False,))
    }  # fmt: skip
    return Counter((file, is_unnamed) for file, _, is_unnamed in ends)


def _aborted(job: JobFailures, reported: Counter[tuple[int, bool]]) -> set[tuple[int, bool]]:
    """The files, each with whether a report names no rank, whose reported ends by SIGABRT are of
    others: a watchdog's timeout aborts its process, and so may a lost peer. reported: `_reported`
    """
    first = {(f.file, f.rank): f.event.line for f in reversed(job.reports)}
    # What follows the first report of each rank does not explain its end.
    last_at = Counter[int]()
    for (file, _), line in first.items():
        last_at[file] = max(line, last_at[file])
    explained = Counter(
        (f.file, is_unnamed)
        for f in (*job.victims, *job.consequences)
        for is_unnamed in (True, False)
        # A named rank that lost a peer is excused by itself.
        if f.rank is None or (is_unnamed and f.event.role in (LOST, WAITED))
        if f.event.role != CONSEQUENCE or f.event.has_phrase("ends-since-another")
        if not 0 < last_at[f.file] < f.event.line
    )  # fmt: skip
    return {key for key, count in reported.items() if explained[key] >= count}


def _complained(finding: Finding, first: RankFailure, text: str) -> Finding:
    """A rank that ended itself after words of an error that no row explains."""
    words = {"error": f"{text}; then {report_text(first)}"}
    return replace(finding, kind=meaning(text).kind, words=words, sentence=ERROR)


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


def _ends_of_themselves(job: JobFailures) -> set[int]:
    """The ids of reports of programs that a shell started, and that have ended themselves after
    a failure of their processes; and of such shells, which return how their program has ended.
    """
    programs = [
        f for f in job.reports
        if f.rank is None and f.is_by("of_program") and signal_of(f.event.code) == 9
        and is_after(f, job.all)
    ]  # fmt: skip
    ends = {(f.file, f.event.code) for f in programs}
    shells = [
        f for f in job.reports
        if f.event.code > 128 and (f.file, -signal_of(f.event.code)) in ends
    ]  # fmt: skip
    return {id(f) for f in (*programs, *shells)}


def _is_launcher(job: JobFailures, failure: RankFailure) -> bool:
    """Whether Slurm's task of a node is a launcher, which fails with the ranks that it names."""
    is_task = failure.event.source == "srun" and job.finder.has_node_launchers
    return is_task and any(f.rank is not None for f in job.reports)


def _doubts(job: JobFailures, number: int) -> tuple[str, tuple[str, ...]]:
    """What speaks against a signal as the cause, "": nothing; what would tell more."""
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
    aborts = [f for f in job.reports if f.event.code == -signal.SIGABRT]
    aborts += [f for f in job.all if (f.event.role, f.event.source) == (FAILED, "mpirun")]
    aborts.sort(key=lambda f: f.event.line, reverse=True)
    aborted = {f.file: f.event.line for f in aborts if job.losses}
    ends = [f for f in job.ended if aborted.get(f.file, f.event.line) >= f.event.line]
    launchers = [f for f in ends if f.is_by("cancels")]
    # Where the network fails between nodes, and a launcher says that its own rank has ended by
    # that, its peers are ended for it.
    is_told = any(signal_of(f.event.code) not in STOPS for f in job.roots) and fabric(job)
    # So is the launcher of a node when that of another one has ended itself.
    closed_at = {f.file: f.event.line for f in job.lost if f.event.has_phrase("closed-rendezvous")}
    launchers += [
        f for f in ends if f.event.source == "agent"
        if not is_told or any(precedes(f, loss) for loss in job.losses)
        if not closed_at.get(f.file, f.event.line) < f.event.line
    ]  # fmt: skip
    # Slurm also says CANCELLED of a batch script that crashed (22.05): 0:11.
    steps, lines = slurm_steps(job, "CANCELLED")
    is_cancelled = any(not s.signal or kind_of_code(-s.signal) == "signal" for s in steps)
    # It ends the steps of a job that fails, too.
    is_failed = any(s.state == "FAILED" and "." not in s.step for s in job.evidence.steps)
    is_cancelled &= not (is_failed and job.losses)
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
    # Who ends a program after an error with its cause elsewhere, is not the cause.
    own_ends = [
        f for f in job.ended
        if f.event.source in ("", "error-file", "shell") and not job.follows_consequence(f)
    ]  # fmt: skip
    # torchrun ends the further ranks of its node when one of these has lost a peer.
    root_files = {f.file for f in job.roots if job.losses and signal_of(f.event.code) not in STOPS}
    failures = own_ends or [
        f for f in job.reports
        if signal_of(f.event.code) in STOPS and not job.follows_consequence(f)
        and not (f.event.source == "torchrun" and f.file in root_files)
    ]  # fmt: skip
    # A launcher of all ranks ends all when one has ended.
    orders = [f for f in failures if f.is_by("of_all") and not own_ends]
    is_sent = bool(orders) and any(
        f.file == orders[0].file and f.event.line < orders[0].event.line
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
        # Servers raise it in their handlers of signals, with their word for SIGTERM.
        return "SIGTERM" if event.text.endswith(": terminated") else "SIGINT (Ctrl-C)"
    code = int(match[1]) if match and not event.code else event.code
    return SIGNAL_NAMES.get(signal_of(code) or abs(code), default)

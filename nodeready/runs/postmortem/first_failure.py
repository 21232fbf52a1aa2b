"""Who failed first, by the events of all ranks, the kernel and Slurm. Pure.

The rules stand in their order, and the first that finds evidence names the cause: an error of a
rank's own outranks every lost peer; a kill outranks a timeout; a timeout outranks a lost
connection. Times decide between own errors only beyond the uncertainty of the clocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nodeready.agent.failure_rules import (
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
from nodeready.agent.witnesses import nccl_errors
from nodeready.core.text import counted, utc_moment
from nodeready.fleet.inventory.nodeset import fold, natural
from nodeready.runs.postmortem.document import KERNEL, LOG, FailureGroup, FirstFailure, NodeEvent
from nodeready.runs.postmortem.environment import explaining_faults
from nodeready.runs.postmortem.evidence import JobEvidence, NodeFault, RankFailure, SlurmStep
from nodeready.runs.postmortem.rank_failures import (
    ASSERT,
    FINAL_LINES,
    EqualFailures,
    JobFailures,
    equal_failures,
    is_clear_root,
    is_final,
    once_per_rank,
    precedes,
    ranks_in,
)
from nodeready.runs.stacks.document import Suspect, say
from nodeready.runs.stacks.evidence import Evidence
from nodeready.runs.stacks.statements import RankPlace, ranks_of
from nodeready.runs.stacks.witness_reader import read_witnesses
from nodeready.subjects.gpus import xids

#: Maximum characters of a failure in the first line.
_TEXT = 240
#: Maximum suspects in the document, and in its first line; records of nodes beside a suspect.
_MAX_SUSPECTS, _NAMED, _MAX_RECORDS = 32, 4, 4
#: Errors of NCCL that mean the network between nodes, if no rank has failed.
_FABRIC = ("ib-retry", "ib-rnr", "ib-completion", "ib-remote-operation", "connect-timeout",
           "connect-no-route", "gloo-connect")  # fmt: skip
#: Kind of a kernel's fault of hardware -> the kind of its cause.
HARDWARE = {"xid": "gpu", "link": "network"}
#: Kind of a kernel's fault -> the kind of the cause, where the ranks only lost a peer.
_FAULTS = {"link": "network", "filesystem": "storage", "segfault": "segfault",
           "oom": "oom", "memory": "signal"}  # fmt: skip
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d{1,5})\b")
#: Errors of CUDA that a later call reports.
_ASYNCHRONOUS = re.compile(
    r"CUDA.*(?:illegal|assert|misaligned|unspecified|launch|ECC|unknown error)"
)
#: Word of Slurm -> why it ended a job.
_LIMITS = {
    "TIME": "its time limit was reached", "PREEMPT": "it was preempted",
    "DEADLINE": "its deadline was reached", "REQUEUE": "it was requeued",
}  # fmt: skip
#: Errors of ranks that call different collectives: of ProcessGroupWrapper.cpp, gloo's pair.cc, and
#: NCCL's and MPI's transports. The ranks that see it are not always those that differ.
_MISMATCH = re.compile(
    r"mismatch between collectives|op\.preamble\.length|[Mm]essage truncated|ismatched collective"
)
#: The text that `nodeready.agent.failure_events` makes of the first.
_TWO_CALLS = re.compile(r": rank (\d{1,7}) calls (.{1,120}), rank (\d{1,7}) calls (.{1,120})$")
#: Functions of torch.distributed in which the ranks of a group rightly differ.
_PAIRWISE = frozenset(("send", "recv", "isend", "irecv", "batch_isend_irecv"))
#: Where NCCL's lines have the addresses of a connection (net_ib.cc, socket.cc).
_ADDRESS = re.compile(r"[0-9a-fA-F.:]+")
_LOCAL = re.compile(r"localGid:? ?(?:::ffff:)?([0-9a-fA-F.:]{2,45})")
_PEER = re.compile(
    r"remoteGids?:? ?(?:::ffff:)?([0-9a-fA-F.:]{2,45})"
    r"|(?:peer|[Cc]onnect to) \[?([\w.:-]{2,60}?)(?:\]:\d|<\d)"
)
_NO_ROUTE = re.compile(r"No route to host|Network is unreachable|errno: (?:101|110|113)\b")
#: Order of the groups of failures.
_ROLE_ORDER = {
    role: order for order, role in enumerate((FAILED, WAITED, LOST, CONSEQUENCE, ENDED, REPORT))
}
_JOINED = re.compile(r"(\d{1,5})/(\d{1,5}) clients joined")
#: Slurm's number of a task in the name of a cgroup, which it counts on each node.
_TASK = re.compile(r"/step_\S*?/task_(\d{1,6})")
#: The words of an error about a worker of a data loader, and its process.
_KILLED_WORKER = "is killed by signal: Killed"
_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? (\d{1,10})")
#: Python's own errors of a connection, which no library of collectives raised.
_OWN_CONNECTION = re.compile(
    r"^(?:ConnectionResetError|ConnectionRefusedError|BrokenPipeError|ConnectionAbortedError)\b"
)
#: Source of an event -> its name in reports.
_LAUNCHERS = {
    "torchrun": "torchrun", "torchrun-root": "torchrun", "srun": "srun", "mpirun": "mpirun",
    "deepspeed": "DeepSpeed's launcher", "shell": "the shell", "spawn": "torch.multiprocessing",
    "slurm": "Slurm", "slurm-job": "Slurm", "agent": "the launcher",
    "error-file": "its error file", "core": "a core file",
}  # fmt: skip
#: Seconds by which the ends that two launchers see may be in another order: torchrun reports whole
#: seconds, and looks every 0.1 s.
_SEEN_S = 1.1
#: The signals that end a job from outside.
_OUTSIDE = (1, 2, 15)
_WENT_ON = "its rank wrote further lines after it"
#: Plain lines after an error in a log of unknown ranks from which on its rank went on.
_FURTHER_LINES = 5


@dataclass
class Finding:
    """What a rule has found: the ranks and nodes of the cause, with the evidence."""

    ranks: Iterable[int] = ()
    nodes: Iterable[str] = ()
    for_: Iterable[str] = ()
    against: Iterable[str] = ()
    failures: Sequence[RankFailure] = ()  # the first time of these is that of the cause
    words: Mapping[str, str] = field(default_factory=dict)  # of the rule's sentence
    missing: tuple[str, ...] = ()
    frame: str = ""
    suspects: Sequence[Suspect] = ()  # all; (): the ranks and nodes are the only one
    kind: str = ""  # "": as of the rule
    says: str = ""  # likewise


_NOBODY = Suspect((), (), (), ())


class Rule(NamedTuple):
    """A kind of cause. says: ``{who}`` stands for its ranks and nodes, as in `say`"""

    kind: str
    evidence: Callable[[JobFailures], Finding | None]
    says: str


# --- Words.


def _subject(ranks: Iterable[int], nodes: Iterable[str]) -> str:
    ranks, names = set(ranks), sorted(filter(None, set(nodes)), key=natural)
    place = fold(names) if names else ""
    if ranks:
        return f"{ranks_of(ranks)}{f' ({place})' if place and len(place) < 60 else ''}"
    return f"a rank on {place}" if place else "a rank"


def _report_text(failure: RankFailure) -> str:
    event = failure.event
    how = f"ended with exit code {event.code}"
    if event.kind == "oom":
        how = "out of memory"
    elif number := signal_of(event.code):
        how = f"ended by {SIGNAL_NAMES.get(number, number)}"
    subject = f"process {event.pid}" if event.pid else "a process"
    if failure.rank is not None:
        subject = f"rank {failure.rank}"
    elif event.local_rank is not None:
        subject = f"local rank {event.local_rank}"
    root = ", as its first observed failure" if event.source == "torchrun-root" else ""
    return f"{_LAUNCHERS.get(event.source, event.source)} reports: {subject} {how}{root}"


def _suspect(
    ranks: Iterable[int], nodes: Iterable[str], for_: Iterable[str], against: Iterable[str] = ()
) -> Suspect:
    names = tuple(sorted(filter(None, set(nodes)), key=natural))
    evidence = tuple(dict.fromkeys(for_)), tuple(dict.fromkeys(against))
    return Suspect(tuple(sorted(set(ranks))), names, *evidence)


def _undecided(suspects: Sequence[Suspect], *missing: str) -> Finding:
    """The cause where the evidence does not tell which of the suspects failed first."""
    names = [_subject(suspect.ranks, suspect.nodes) for suspect in suspects]
    names[_NAMED:] = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    ranks = {rank for suspect in suspects for rank in suspect.ranks}
    nodes = {node for suspect in suspects for node in suspect.nodes}
    return Finding(
        ranks, nodes, kind="unclear", says="{names}: which failed first is not known",
        words={"names": " or ".join(names)}, suspects=suspects[:_MAX_SUSPECTS], missing=missing,
    )  # fmt: skip


def moment_text(seconds: float | None) -> str:
    """A time as the reports write it; "" for none."""
    if seconds is None or not 0 < seconds < 1e11:
        return ""
    return utc_moment(seconds)


def _nodes_in(failures: Iterable[RankFailure]) -> set[str]:
    return {f.node for f in failures if f.node}


def _lines(failures: Sequence[RankFailure], maximum: int = 2) -> list[str]:
    return [f"{f.example}: {f.event.text}" for f in failures[:maximum]]


def _kernel_lines(faults: Sequence[NodeFault]) -> list[str]:
    return [f"the kernel of {fault.node}: {fault.text}" for fault in faults[:3]]


def _sacct_lines(steps: Sequence[SlurmStep]) -> list[str]:
    return [f"sacct: {step.step} {step.state}" for step in steps[:2]]


def _steps(job: JobFailures, *states: str) -> list[SlurmStep]:
    """Slurm's steps in states that begin like these."""
    return [step for step in job.evidence.steps if step.state.startswith(states)]


def _last_lines(job: JobFailures, ranks: set[int]) -> list[str]:
    """The last lines of some of the ranks that belong to no failure."""
    lines = [
        f"its last line: {stream.last}"
        for file in job.evidence.files
        for stream in file.failures.streams
        if stream.last and ranks & {job.finder.file_rank(file), stream.rank}
    ]  # fmt: skip
    return list(dict.fromkeys(lines))[:3]


# --- The evidence of each rule.


def survived(job: JobFailures) -> Finding | None:
    """All that failed was survived: by Slurm, by the end of the log, by more steps after it."""
    bad = [
        f for f in (*job.own_errors, *job.reports, *job.ended, *job.lost, *job.waited,
                    *job.consequences) if f.event.source != "warning"
    ]  # fmt: skip
    files = job.evidence.files
    ends = {at: file.failures.facts.finished for at, file in enumerate(files)}
    last_ended = any(ends[at] for at in job.last_files)
    went_on = [
        f for f in bad
        if f.event.went_on and (f.rank is not None or f.event.lines_after >= _FURTHER_LINES)
    ]  # fmt: skip
    open_ = [
        f for f in bad
        if f.event.line > ends.get(f.file, 0) and f not in went_on
        and (f.file in job.last_files or not last_ended)
    ]  # fmt: skip
    how = ""
    if not open_ and bad:
        how = "the log says afterwards that the job has ended well"
        how = how if last_ended else "its rank went on after it"
    slurm = {step.step: step for step in job.evidence.steps}
    is_complete = bool(slurm) and all(
        step.state == "COMPLETED" and not (step.code or step.signal)
        for name, step in slurm.items()
        if "." not in name or name == max(slurm, key=_step_number)
    )
    # A batch script may hide how its command ended; of a step, Slurm knows it.
    is_known = any(_step_number(name) >= 0 for name in slurm) or not any(
        f.event.role in (REPORT, FAILED) and not ends.get(f.file) for f in open_
    )
    if is_complete and is_known:
        how = "Slurm: COMPLETED 0:0"
    if not how:
        return None
    seen = [
        f"{_subject(group.ranks, group.nodes)}: {group.first.event.text}"
        for group in equal_failures(bad)
    ]
    says = "no failure: {how}; seen and survived: {seen}" if seen else "no failure: {how}"
    return Finding(
        for_=_lines(bad), says=says, words={"how": how, "seen": "; ".join(seen)[:_TEXT]}
    )


def _step_number(name: str) -> int:
    """The number of a step of srun; -1: the job, its batch script, or another step."""
    number = name.partition(".")[2]
    return int(number) if number.isdigit() else -1


def out_of_memory(job: JobFailures) -> Finding | None:
    """The kernel or Slurm killed a process of the job for its memory."""
    faults = [fault for fault in job.evidence.kernel if fault.kind == "oom"]
    slurm_events = [
        f for f in job.own_errors if f.event.kind == "oom" and f.event.source == "slurm"
    ]
    steps = _steps(job, "OUT_OF_ME")
    srun = [f for f in job.reports if f.event.kind == "oom"]
    if not (faults or slurm_events or steps or srun):
        return None
    killed = [f for f in job.reports if signal_of(f.event.code) == 9]
    workers = [f for f in job.own_errors if _KILLED_WORKER in f.event.text]
    nodes = {fault.node for fault in faults if fault.node} | _nodes_in(slurm_events)
    ranks, against = ranks_in(srun), list[str]()
    ended_ranks = {f.event.pid: f.rank for f in (*killed, *workers)}
    for failure in workers:
        if match := _WORKER.search(failure.event.text):
            ended_ranks[int(match[1])] = failure.rank
    for fault in faults:
        rank = job.finder.by_pid.get((fault.node, fault.pid))
        task = _TASK.search(fault.text)
        if rank is None and task and not srun:
            rank = job.finder.global_rank(fault.node, int(task[1]))
        if fault.pid:
            rank = ended_ranks.get(fault.pid, rank)
        ranks |= {rank} if rank is not None else set()
    if not ranks:
        # A rank that SIGKILL ended there, or whose log just ends.
        ended = [f.rank for f in (*workers, *killed) if not nodes or f.node in nodes][:1]
        if not (ended or job.final):
            at = {"", *nodes}
            ended = [r for r in job.silent_ranks() if job.node_of.get(r, "") in at]
        ranks = {rank for rank in ended if rank is not None}
        if faults and not (slurm_events or steps):
            against.append("no log has the number of the process that the kernel killed")
    other_errors = [
        f for f in job.final if f.event.kind != "oom" and _KILLED_WORKER not in f.event.text
    ]
    # Otherwise the kernel may have killed a process of another job.
    if not ranks and (other_errors or not (slurm_events or steps or srun)):
        return None
    evidence = [*_kernel_lines(faults), *(f"Slurm: {f.event.text}" for f in slurm_events[:2])]
    evidence += _sacct_lines(steps) + [_report_text(f) for f in srun[:2]]
    evidence += [_report_text(f) for f in killed[:1] if f.rank in ranks]
    words = {"process": "a worker of its data loader" if workers else "it"}
    nodes |= job.nodes_of(ranks)
    return Finding(ranks, nodes, evidence, against, (workers or killed)[:1], words)


def own_error(job: JobFailures) -> Finding | None:
    """An error that no other rank's end has caused."""
    return _of_errors(job, [f for f in job.final if not _MISMATCH.search(f.event.text)])


def _of_errors(job: JobFailures, errors: Sequence[RankFailure], note: str = "") -> Finding | None:
    """The first of these errors. note: what speaks against each of them"""
    groups = equal_failures(once_per_rank(errors))
    if not groups:
        return None
    groups, reason, missing = _in_order(job, groups)
    notes = (note,) if note else ()
    if not reason:
        return _undecided([_error_suspect(job, group, notes) for group in groups], missing)
    first = groups[0]
    ranks, event = set(first.ranks), first.first.event
    nodes = {*first.nodes} | job.nodes_of(ranks)
    if not event.frame:
        event = next((f.event for f in first.failures if f.event.frame), event)
    asserts = [f for f in job.own_errors if f.event.text.startswith(ASSERT)]
    for_ = [f"in {first.first.example}", reason]
    for_ += [f.event.text for f in asserts[:1] if f is not first.first]
    for_ += [_report_text(f) for f in job.roots if f.rank in ranks][:1]
    for_ += _kernel_lines(job.xids(first.nodes)) if first.first.event.kind == "gpu" else []
    subject = _subject(ranks, nodes)
    if len(job.ranks) > 1 and ranks == job.ranks:
        subject = f"all {len(ranks)} ranks"
        for_.append("every rank raised it: a mistake that all share, not one rank's")
    elif not ranks and len(first.failures) > 1:
        subject = f"{len(first.failures)} ranks"
    against = _contrary_reports(job, ranks)
    if first.first.file not in job.last_files:
        against.append("torchrun started the ranks again after it")
    if event.kind == "gpu" and _ASYNCHRONOUS.search(event.text):
        against.append(
            "CUDA reports errors late: the frame may be wrong; CUDA_LAUNCH_BLOCKING=1 "
            "shows the call"
        )
    suspect = _suspect(ranks, nodes, for_, (*against, *notes))
    suspects = (suspect, *(_error_suspect(job, group, notes) for group in groups[1:4]))
    words = {"who": subject, "error": event.text[:_TEXT]}
    return Finding(
        ranks, nodes, failures=first.failures, words=words, kind=event.kind, frame=event.frame,
        suspects=suspects,
    )  # fmt: skip


def _error_suspect(job: JobFailures, group: EqualFailures, notes: Iterable[str]) -> Suspect:
    """The ranks with this error, as one of several suspects."""
    event, nodes = group.first.event, {*group.nodes} | job.nodes_of(group.ranks)
    frame = (f"at {event.frame}",) if event.frame else ()
    for_ = event.text, *frame, f"in {group.first.example}"
    return _suspect(group.ranks, nodes, for_, notes)


def _contrary_reports(job: JobFailures, ranks: set[int]) -> list[str]:
    """Launchers that name another rank as the first."""
    roots = [f for f in job.roots if f.rank is not None]
    return [
        f"torchrun names rank {f.rank} as its first observed failure, which only says that "
        "its end was seen first"
        for f in roots[:1]
        if ranks and all(other.rank not in ranks for other in roots)
    ]


def _in_order(
    job: JobFailures, groups: list[EqualFailures]
) -> tuple[list[EqualFailures], str, str]:
    """The groups, the first failure first, and how that is known; "": it is not known, and what
    would tell.
    """
    if len(groups) == 1:
        lost = ranks_in(job.lost) - {*groups[0].ranks}
        return groups, f"{ranks_of(lost)} only lost a peer" if lost else "no other error", ""
    missing = "times in the logs would tell which error was first"
    timed = [(earliest, group) for group in groups if (earliest := group.earliest)]
    if len(timed) == len(groups):
        timed.sort(key=lambda row: row[0].time_s or 0.0)
        candidate, first = min(timed, key=lambda row: row[0].latest_s)
        rivals = [
            group for _, group in timed
            if group is not first and not all(
                precedes(candidate, f) for f in group.failures if f.time_s is not None
            )
        ]  # fmt: skip
        if not rivals:
            groups = [first, *(group for _, group in timed if group is not first)]
            next_s = min(row[0].time_s or 0.0 for row in timed if row[1] is not first)
            gap_s = next_s - (candidate.time_s or 0.0)
            return groups, f"{gap_s:.1f} s before the next error", ""
        missing = "the clocks may differ by more than the time between the errors"
        groups = [first, *rivals] if len(rivals) + 1 < len(groups) else groups
    # Of several torchruns, each sees only its node's ranks.
    root = job.roots[0] if len(job.roots) == 1 else None
    if root is not None and root.rank is not None and is_clear_root(root, job.reports):
        nodes = {node for group in groups for node in (*group.nodes, *job.nodes_of(group.ranks))}
        for group in groups if nodes <= {root.node} else ():
            if root.rank in group.ranks:
                remaining = [other for other in groups if other is not group]
                return [group, *remaining], "torchrun saw its end first", ""
    if len({f.file for group in groups for f in group.failures}) == 1:
        groups = sorted(groups, key=lambda group: group.first.event.line)
        return groups, "its lines come first in the log", ""
    by_size = sorted(groups, key=lambda group: len(group.ranks) or 1)
    few, many = len(by_size[0].ranks), len(by_size[-1].ranks)
    if few < len(by_size[1].ranks) and 2 * many > len(job.ranks):
        return by_size, f"{counted(many, 'other rank')} share one error, as victims do", ""
    return by_size, "", missing


def mismatch(job: JobFailures) -> Finding | None:
    """Ranks that call different collectives: those unlike most, if the errors name them."""
    failures = [f for f in job.final if _MISMATCH.search(f.event.text)]
    if not failures:
        return None
    calls: dict[int, str] = {}
    peers: dict[int, str] = {}
    for failure in failures:
        match = _TWO_CALLS.search(failure.event.text)
        # Other numbers are those of a process group.
        if match and failure.rank in (None, int(match[1])):
            calls[int(match[1])], peers[int(match[3])] = match[2], match[4]
    # A rank whose call has another form reads its peers' wrongly.
    if found := _odd_call(job, {**peers, **calls}, failures):
        return replace(found, kind=found.kind or "exception")
    error = failures[0].event.text.rpartition("] ")[2][:_TEXT]
    return Finding(
        ranks_in(failures), _nodes_in(failures), [f"in {f.example}" for f in failures[:3]],
        failures=failures, words={"error": error},
        missing=("TORCH_DISTRIBUTED_DEBUG=DETAIL names the rank and its call",),
    )  # fmt: skip


def _odd_call(
    job: JobFailures, calls: Mapping[int, str], failures: Sequence[RankFailure]
) -> Finding | None:
    """The ranks that call another collective than most; None: all call the same.

    calls: rank -> its call
    """
    sides: dict[str, set[int]] = {}
    for rank, call in calls.items():
        sides.setdefault(call, set()).add(rank)
    if len(sides) < 2:
        return None
    usual = max(sides, key=lambda call: len(sides[call]))
    is_usual = 2 * len(sides[usual]) > len(calls)
    by_rank = {f.rank: f for f in reversed(failures) if f.rank in calls}
    suspects = []
    for call, ranks in sides.items():
        if call != usual or not is_usual:
            known = [by_rank[rank] for rank in ranks if rank in by_rank]
            first = min(known, key=lambda f: (f.file, f.event.line), default=None)
            places = (f"in {first.example}",) if first else ()
            evidence = f"{ranks_of(ranks)} called {call}", *places
            suspects.append(_suspect(ranks, job.nodes_of(ranks), evidence))
    if not is_usual:
        return _undecided(suspects)
    odd = {rank for suspect in suspects for rank in suspect.ranks}
    words = {
        "odd": " and ".join(call for call in sides if call != usual)[:_TEXT],
        "usual": f"{ranks_of(sides[usual])} {usual}",
    }
    return Finding(
        odd, {node for suspect in suspects for node in suspect.nodes}, failures=failures,
        words=words, says="{who} called {odd}, {usual}: the calls must agree", suspects=suspects,
        frame=next((f.event.frame for f in failures if f.rank in odd), ""),
    )  # fmt: skip


def lost_node(job: JobFailures) -> Finding | None:
    """Slurm lost a node."""
    steps = _steps(job, "NODE_FAIL")
    words = {"nodes": steps[0].nodes if steps else ""}
    return Finding(for_=_sacct_lines(steps), words=words) if steps else None


def limit(job: JobFailures) -> Finding | None:
    """Slurm ended the job by its limit."""
    slurm_events = [f for f in job.ended if f.event.kind == "limit"]
    steps = _steps(job, "TIMEOUT", "PREEMPTED", "DEADLINE")
    if not (slurm_events or steps):
        return None
    word = slurm_events[0].event.text if slurm_events else steps[0].state
    reason = next((reason for key, reason in _LIMITS.items() if key in word), word)
    return Finding(for_=_lines(slurm_events) + _sacct_lines(steps), words={"reason": reason})


def killed(job: JobFailures) -> Finding | None:
    """A rank that ended by a signal or with a status, without an error in its log."""
    excused = ranks_in((*job.lost, *job.waited, *job.consequences))
    agent_pids = {(f.node, f.event.pid) for f in job.ended if f.event.source == "torchrun"}
    order: list[RankFailure] = []
    for failure in job.reports:
        number = signal_of(failure.event.code)
        is_ended = (failure.node, failure.event.pid) in agent_pids
        # A signal that torchrun did not send came from outside.
        is_torchrun = failure.event.source.startswith("torchrun") and bool(agent_pids)
        is_ended = is_ended or (number in _OUTSIDE and not is_torchrun)
        # Of a rank without a log, nobody knows whether it lost a peer, as others did.
        has_log = failure.rank in (None, *job.logged) or not (job.logged and excused)
        is_ended = is_ended or not (number or has_log or failure in job.roots)
        if not is_ended and failure.rank not in excused:
            order.append(failure)
    if not order:
        return None
    has_signals = any(signal_of(f.event.code) for f in order)
    order.sort(key=lambda f: (
        has_signals and not signal_of(f.event.code) and f.event.source != "srun",
        f.rank is None,
        f.time_s or 0.0,
        f.event.source not in ("torchrun-root", "srun", "mpirun"),
        f.event.line,
    ))  # fmt: skip
    first = order[0]
    same = [
        f
        for f in order
        if f.event.code == first.event.code
        and f.event.source in (first.event.source, "torchrun-root")
        and (f.file, f.event.line) == (first.file, first.event.line)
    ] or [first]
    ranks, nodes, number = ranks_in(same), _nodes_in(same), signal_of(first.event.code)
    rivals = [
        f for f in order
        if f.rank not in (None, *ranks) and bool(signal_of(f.event.code)) == bool(number)
        and _may_precede(f, first)
    ]  # fmt: skip
    if rivals:
        ended = {f.rank: f for f in (*rivals, first) if f.rank is not None}
        suspects = [_suspect((r,), (f.node,), (_report_text(f),)) for r, f in ended.items()]
        return _undecided(suspects, "times of their ends would tell which was first")
    if not number and (errors := [f for f in job.own_errors if f.rank in ranks]):
        found = _of_errors(job, errors, _WENT_ON)
        return found and replace(found, says=found.says or _ERROR)
    roots = [f for f in job.roots if f.rank in ranks and f is not first][:1]
    evidence = [_report_text(f) for f in (first, *roots)]
    evidence += _last_lines(job, ranks)[:1] if len(ranks) == 1 else []
    evidence += _lines([first]) if first.event.text else []
    against: list[str] = []
    missing: tuple[str, ...] = ("why it exited: its log does not say",)
    if number:
        reason, missing = _no_oom_reason(job) if number == 9 else ("", ())
        against += [reason] if reason else []
        if number in (4, 6, 7, 8, 11):
            missing = ("where it crashed: nodeready cores",)
    words = {
        "signal": f"{SIGNAL_NAMES.get(number, f'signal {number}')} (signal {number})",
        "code": str(first.event.code),
    }
    says = "{who} ended with exit code {code}, without an error in its log"
    return Finding(
        ranks, nodes, evidence, against, [first], words, missing,
        kind=kind_of_code(first.event.code) if number else "unclear", says="" if number else says,
    )  # fmt: skip


def _may_precede(failure: RankFailure, first: RankFailure) -> bool:
    """Whether a report of another launcher may be of an earlier end."""
    if failure.file == first.file:
        return False
    if failure.time_s is None or first.time_s is None:
        return True
    return failure.earliest_s - first.latest_s <= _SEEN_S


def _no_oom_reason(job: JobFailures) -> tuple[str, tuple[str, ...]]:
    """Why SIGKILL may be one for memory or not, and what would tell."""
    missing = ("the kernel's log would tell whether it was killed for memory",)
    reasons = [reason for name, reason in job.evidence.missing.items() if "kernel" in name]
    if reasons:
        return f"a person, or the kernel for memory: {reasons[0]}", missing
    if any("kernel" in name for name in job.evidence.sources):
        return "not for memory by the kernel: its log has no such line", ()
    return "a person may have killed it, or the kernel for memory: its log was not read", missing


def gpu_fault(job: JobFailures) -> Finding | None:
    """A GPU's fault in the kernel's log, where no rank has an own error."""
    faults = job.xids()
    return _of_kernel(job, faults, {fault.node for fault in faults}) if faults else None


def node_fault(job: JobFailures) -> Finding | None:
    """A fault of a node in the kernel's log, where the ranks only lost a peer."""
    order = list(_FAULTS)
    faults = sorted(
        (fault for fault in job.evidence.kernel if fault.kind in _FAULTS),
        key=lambda fault: order.index(fault.kind),
    )
    if not faults:
        return None
    found = _of_kernel(job, faults[:1], {faults[0].node})
    lines = [fault for fault in job.evidence.kernel if fault.kind in _FAULTS]
    return replace(found, for_=_kernel_lines(lines), kind=_FAULTS[faults[0].kind])


def _of_kernel(job: JobFailures, faults: Sequence[NodeFault], nodes: set[str]) -> Finding:
    keys = [(fault.node, fault.pid) for fault in faults]
    ranks = {job.finder.by_pid[key] for key in keys if key in job.finder.by_pid}
    return Finding(ranks, nodes, _kernel_lines(faults), words={"error": faults[0].text[:_TEXT]})


def earlier_error(job: JobFailures) -> Finding | None:
    """An error after which its rank went on, such as that of a thread."""
    died_later = {
        (f.file, f.rank) for f in job.lost if f.event.call and f.event.lines_after <= FINAL_LINES
    }
    later = [f for f in job.own_errors if not is_final(f) and (f.file, f.rank) not in died_later]
    groups = equal_failures(later)
    few = [f for g in groups if 2 * len(g.ranks) <= len(job.ranks) for f in g.failures]
    return _of_errors(job, few, _WENT_ON) if job.lost or job.waited else None


def own_connection(job: JobFailures) -> Finding | None:
    """A connection of the user's own code, where its peers lost a rank of the job."""
    errors = [
        f for f in job.lost
        if _OWN_CONNECTION.match(f.event.text) and not (f.event.went_on and f.rank is not None)
    ]  # fmt: skip
    ranks = {f.rank for f in errors}
    if not errors or 2 * len(ranks) > len(job.ranks) or len(errors) == len(job.lost):
        return None
    return _of_errors(job, errors)


def hang(job: JobFailures) -> Finding | None:
    """A hang that a watchdog ended: the rank that lags behind is the suspect."""
    lags, stuck = _lags(job)
    if not (job.waited or lags or stuck):
        return None
    waiting, ranks, missing = ranks_in(job.waited), set[int](), ()
    evidence: list[str] = []
    if lags:
        (ranks, _), *_ = lags
        evidence += [reason for _, reason in lags[:3]]
    elif found := _odd_call(job, _collectives(job), job.waited):
        return found
    elif late := _late_ranks(job, waiting):
        ranks = late
        evidence.append(f"{ranks_of(late)} lost a peer only after the timeout of the others")
    elif absent := _absent_ranks(job):
        ranks = set(absent)
        evidence.append(f"no log names {ranks_of(ranks)}, and only the others had come")
    elif silent := job.silent_ranks() if job.waited else []:
        ranks = set(silent)
        evidence.append(f"{ranks_of(waiting)} waited; the log of {ranks_of(ranks)} just ends")
    elif found := node_fault(job):
        return replace(found, says=_ERROR)
    # The lagging rank's own words, if it has some.
    waited = sorted(job.waited, key=lambda f: (f.rank not in ranks, f.file, f.event.line))[:1]
    evidence += _lines(waited)
    words = {"error": (waited[0].event.text if waited else lags[0][1] if lags else stuck)[:_TEXT]}
    found = Finding(ranks, job.nodes_of(ranks), evidence, (), waited, words)
    if ranks:
        return found
    missing = "which rank was late: the flight recorder's dumps would tell"
    says = "a timeout, and no rank is known to be late: {error}"
    return replace(found, says=says, missing=(missing,))


def _late_ranks(job: JobFailures, waiting: set[int]) -> set[int]:
    """The few ranks that came when the timeout of the others was over."""
    ends = [f.latest_s for f in job.waited if f.time_s is not None]
    late = {
        f.rank for f in job.lost
        if f.rank is not None and f.rank not in waiting and f.time_s is not None
        and ends and f.earliest_s > max(ends)
    }  # fmt: skip
    return late if len(late) < len(waiting) else set()


def _collectives(job: JobFailures) -> dict[int, str]:
    """Rank -> the collective in which it waited or lost a peer; {}: of fewer than most."""
    failures = (*job.lost, *job.waited)
    calls = {f.rank: f.event.call for f in failures if f.rank is not None and f.event.call}
    is_known = 2 * len(calls) > len(job.ranks) and not _PAIRWISE.intersection(calls.values())
    return calls if is_known else {}


def _absent_ranks(job: JobFailures) -> list[int]:
    """The ranks without a log, where the store names the size of the job."""
    for failure in job.waited:
        if match := _JOINED.search(failure.event.text):
            joined, size = int(match[1]), int(match[2])
            absent = sorted(set(range(size)) - job.ranks)
            return absent if len(absent) == size - joined else []
    return []


def _lags(job: JobFailures) -> tuple[list[tuple[set[int], str]], str]:
    """The ranks that lag behind by the watchdogs' reports and the flight recorder's dumps, and
    what the watchdogs of most ranks say.
    """
    evidence, places, ranks = Evidence(), list[RankPlace](), set(job.ranks)
    for number, file in enumerate(job.evidence.files, 1):
        reports, recording = file.failures.reports, file.failures.recording
        if not reports and recording is None:
            continue
        rank = job.finder.file_rank(file)
        if rank is None:
            # The log of several ranks: only the reports that name one count.
            reports = tuple(report for report in reports if report.rank is not None)
            rank = reports[0].rank if reports else None
        ranks |= {report.rank for report in reports if report.rank is not None}
        place = RankPlace(file.node or "node", number, rank)
        evidence.keep_log(place[:2], file.failures.path, reports, recording)
        places.append(place)
    named = {place.rank for place in places}
    places += [RankPlace("node", -rank - 1, rank) for rank in sorted(ranks - named)]
    report = read_witnesses(evidence, places, False)
    lags = sorted(
        (lag for lag in report.lags if lag.ranks and not lag.chained), key=lambda lag: -lag.weight
    )
    rows = [(set(lag.ranks), f"{ranks_of(lag.ranks)} has not called {lag.call}") for lag in lags]
    stuck = ""
    for statement in (s for witness in report.witnesses for s in witness.statements):
        if statement.weight and not statement.against and statement.ranks and not rows:
            if 2 * len(statement.ranks) <= len(ranks) or len(ranks) == 1:
                rows.append((set(statement.ranks), statement.text))
            else:
                stuck = stuck or f"{ranks_of(statement.ranks)}: {statement.text}"
    return rows, stuck


def silent(job: JobFailures) -> Finding | None:
    """The rank whose log ends without a failure, while its peers lost a rank."""
    ranks = set(job.silent_ranks())
    if not ranks or not job.lost:
        return None
    evidence = _last_lines(job, ranks) + _lines(job.lost, 1)
    missing = ("its exit status: sacct, the launcher's output or the kernel's log",)
    words = {"peers": ranks_of(ranks_in(job.lost))}
    return Finding(ranks, job.nodes_of(ranks), evidence, words=words, missing=missing)


def ended_first(job: JobFailures) -> Finding | None:
    """A signal ended the launcher before any rank failed."""
    ends = [f for f in job.ended if f.event.source in ("slurm-job", "agent")]
    errors = [*job.final, *(f for f in job.reports if f.event.source != "core")]
    is_first = bool(job.final) and any(
        all(
            end.event.line < f.event.line if end.file == f.file else precedes(end, f)
            for f in errors
        )
        for end in ends
    )
    return ended(job) if is_first else None


def ended(job: JobFailures) -> Finding | None:
    """A signal ended the launcher or the ranks."""
    launchers = [f for f in job.ended if f.event.source in ("slurm-job", "agent")]
    # Slurm also says CANCELLED of a batch script that crashed (22.05): 0:11.
    cancelled = [
        step
        for step in _steps(job, "CANCELLED")
        if not step.signal or kind_of_code(-step.signal) == "signal"
    ]
    own = [f for f in job.ended if f.event.source in ("", "error-file", "shell")]
    reports = [f for f in job.reports if signal_of(f.event.code) in _OUTSIDE]
    if launchers or cancelled:
        says, name = "the job was cancelled", ""
        if sent := {signal_of(f.event.code) for f in job.reports} & {10, 12}:
            says, name = "{signal} of Slurm ended the ranks", SIGNAL_NAMES[min(sent)]
        if not (cancelled or launchers[0].event.source == "slurm-job"):
            says, name = "{signal} ended the launcher, from outside", _signal_name(launchers)
        evidence = _lines(launchers) + _sacct_lines(cancelled)
        return Finding(for_=evidence, says=says, words={"signal": name})
    failures = own or reports[:1]
    if not failures:
        return None
    first = min(own or reports, key=lambda f: (f.time_s or 0.0, f.event.line))
    ranks, words = ranks_in(failures), {"signal": _signal_name([first], "SIGTERM")}
    if len(job.ranks) > 1 and ranks == job.ranks:
        words["who"] = "all ranks"
    return Finding(ranks, _nodes_in(failures), _lines([first]), (), [first], words)


def _signal_name(failures: Sequence[RankFailure], default: str = "a signal (Ctrl-C)") -> str:
    """The signal that the first of these names."""
    event = failures[0].event
    if "KeyboardInterrupt" in event.text:
        return "SIGINT (Ctrl-C)"
    if not event.code and (match := re.search(r"got signal: (\d{1,2})\b", event.text)):
        return SIGNAL_NAMES.get(int(match[1]), default)
    return SIGNAL_NAMES.get(signal_of(event.code) or abs(event.code), default)


def fabric(job: JobFailures) -> Finding | None:
    """The network between nodes: a peer's port, or the store's address, does not answer."""
    errors = [(f, nccl_errors.meaning(f.event.text)) for f in job.lost]
    rows = [(f, e.meaning, e.step) for f, e in errors if e and e.key in _FABRIC]
    rows = rows or [
        (f, "an address does not answer", "MASTER_ADDR and the route to it: nodeready ready")
        for f in job.lost
        if _NO_ROUTE.search(f.event.text)
    ]
    if not rows:
        return None
    first, meaning, step = rows[0]
    failures = [f for f, *_ in rows]
    ranks, nodes, links = ranks_in(failures), _nodes_in(failures), _links(job, failures)
    error = f"{_link_text(links)}{meaning}: {first.event.text[-_TEXT:]}"
    words = {"who": _subject(ranks, nodes), "error": error}
    nodes |= {end for link in links for end in link if not _ADDRESS.fullmatch(end)}
    return Finding(ranks, nodes, _lines(failures, 3), words=words, missing=(step,))


def _links(job: JobFailures, failures: Iterable[RankFailure]) -> list[tuple[str, str]]:
    """The pairs of nodes between which the errors are; a peer that is not known by address."""
    node_of = {
        text.partition("/")[0]: node
        for node, facts in job.evidence.environment_facts.items()
        for interface in facts.interfaces
        for text in interface.addresses or ()
    }
    for file in job.evidence.files:
        node_of |= dict.fromkeys(file.failures.facts.addresses if file.node else (), file.node)
    ends = [(f, _LOCAL.search(f.event.text), _PEER.search(f.event.text)) for f in failures]
    node_of |= {local[1]: f.node for f, local, _ in ends if local and f.node}
    links: dict[tuple[str, str], None] = {}
    for failure, _, peer in ends:
        if peer and failure.node:
            address = peer[1] or peer[2]
            first, second = sorted((failure.node, node_of.get(address, address)))
            links[first, second] = None
    return list(links)


def _link_text(links: Sequence[tuple[str, str]]) -> str:
    """``gpu2 to gpu5: ``; the node that all links share comes first; "": no link is known."""
    if not links:
        return ""
    shared = set(links[0]).intersection(*links)
    if not shared:
        return f"{counted(len(links), 'pair')} of nodes, such as {' to '.join(links[0])}: "
    node = min(shared)
    peers = sorted({name for link in links for name in link} - {node}, key=natural)
    return f"{node} to {', '.join(peers[:8])}: "


def consequence(job: JobFailures) -> Finding | None:
    """An error that says itself that its cause is elsewhere, where nothing else is known."""
    failures = job.consequences or job.late
    if not failures:
        return None
    who = _subject(ranks_in(failures), _nodes_in(failures))
    missing = ("the log of the process that failed first",)
    words = {"who": who, "error": failures[0].event.text[:_TEXT]}
    return Finding(for_=_lines(failures), failures=failures[:1], words=words, missing=missing)


def lost_peers(job: JobFailures) -> Finding | None:
    """Every rank lost a peer."""
    missing = ("the log of the rank that ended first, its exit status",)
    return Finding(for_=_lines(job.lost), missing=missing) if job.lost else None


def exit_status(job: JobFailures) -> Finding | None:
    """Only Slurm, or a launcher, knows how the ranks ended."""
    steps = [step for step in job.evidence.steps if step.code or step.signal]
    if job.reports or not steps:
        text = "; ".join(dict.fromkeys(_report_text(f) for f in job.reports[:3]))
        return Finding(says="{error}", words={"error": text}) if text else None
    step, how = steps[-1], f"exit code {steps[-1].code}"
    if step.signal:
        how = SIGNAL_NAMES.get(step.signal, f"signal {step.signal}")
    evidence = [f"Slurm: {s.step} {s.state} {s.code}:{s.signal}" for s in steps[:3]]
    return Finding(
        for_=evidence, words={"error": f"{step.step} {step.state} with {how}"},
        kind=kind_of_code(-step.signal) if step.signal else "", missing=("the logs of the ranks",),
    )  # fmt: skip


def nothing(job: JobFailures) -> Finding:
    """No rule has found a cause."""
    return Finding()


_ERROR = "{who}: {error}"
#: The rules in their order.
RULES = (
    Rule("unclear", survived, "no failure: {how}; seen and survived: {seen}"),
    Rule("oom", out_of_memory, "{who}: the kernel killed {process} for memory"),
    Rule("signal", ended_first, "{who} {was|were} ended by {signal}, from outside"),
    Rule("exception", own_error, _ERROR),
    Rule("unclear", mismatch, "{who} or a peer called with another size: {error}"),
    Rule("network", lost_node, "Slurm lost a node of the job ({nodes})"),
    Rule("limit", limit, "Slurm ended the job: {reason}"),
    Rule("signal", killed, "{who} {was|were} ended by {signal}, without an error in its log"),
    Rule("gpu", gpu_fault, _ERROR),
    Rule("exception", earlier_error, _ERROR),
    Rule("network", own_connection, _ERROR),
    Rule("timeout", hang, "{who} did not come until a timeout: {error}"),
    Rule("network", node_fault, _ERROR),
    Rule("unclear", silent, "{who} ended without a word; {peers} lost a peer"),
    Rule("signal", ended, "{who} {was|were} ended by {signal}, from outside"),
    Rule("network", fabric, _ERROR),
    Rule("unclear", consequence, "{who}: {error}: the cause is elsewhere"),
    Rule("unclear", lost_peers,
         "every failure is a lost peer: the rank that failed first left no trace"),
    Rule("unclear", exit_status, "Slurm: {error}, and no log says why"),
    Rule("unclear", nothing, "no failure in the evidence"),
)  # fmt: skip


class FirstFailureFinder:
    """Finds the first failure in the evidence on one job."""

    def __init__(self, evidence: JobEvidence) -> None:
        self.evidence, self.job = evidence, JobFailures(evidence)

    def find(self) -> FirstFailure:
        """The first failure."""
        found = ((rule, rule.evidence(self.job)) for rule in RULES)
        cause = next(self._cause(rule, finding) for rule, finding in found if finding)
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
        first = replace(first, for_=(*first.for_, *records[:_MAX_RECORDS]))
        return replace(cause, suspects=(first, *further))

    @staticmethod
    def _cause(rule: Rule, found: Finding) -> FirstFailure:
        """The cause that a rule has found, in words."""
        suspect = _suspect(found.ranks, found.nodes, found.for_, found.against)
        ranks, nodes = suspect.ranks, suspect.nodes
        words = {"who": _subject(ranks, nodes), **found.words}
        number = 2 if words["who"].startswith("all ") else max(1, len(ranks))
        moments = [f.time_s for f in found.failures if f.time_s is not None]
        suspects = tuple(found.suspects) or ((suspect,) if suspect != _NOBODY else ())
        return FirstFailure(
            found.kind or rule.kind, say(found.says or rule.says, number, **words), ranks, nodes,
            found.frame, moment_text(min(moments, default=None)), suspects, found.missing,
        )  # fmt: skip

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
            for finding, places in faults[:_MAX_SUSPECTS]
        ]
        (finding, places), *_ = faults
        suspects[0] = replace(suspects[0], for_=(*places, f"it explains: {cause.text}"))
        text = f"{_subject(finding.ranks, finding.nodes)}: {finding.text}; {finding.advice}"
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
            return _ROLE_ORDER[group.role], not is_cause, len(group.ranks)

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
            if HARDWARE.get(fault.kind) == cause.kind and not _is_of_application(fault):
                sources_of[fault.node] = KERNEL
        return {node: by for node, by in sources_of.items() if node in cause.nodes}


def _is_of_application(fault: NodeFault) -> bool:
    """Whether a fault of a GPU is one that any program causes."""
    code = _XID.match(fault.text)
    return code is not None and xids.action_of(int(code[1]), fault.text) == xids.APPLICATION

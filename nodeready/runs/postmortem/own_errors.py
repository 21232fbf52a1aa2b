"""Which of the errors of ranks' own was the first: by times beyond the clocks' uncertainty, by the
launcher, by the lines of one log; and ranks that call different collectives. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from nodeready.agent.failures.events import NOT_LAUNCHED
from nodeready.agent.failures.rules import FAILED, meaning
from nodeready.core.text import counted, excerpt
from nodeready.runs.postmortem.evidence import COORDINATOR, RankFailure
from nodeready.runs.postmortem.findings import (
    Finding,
    is_of_program,
    kernel_lines,
    lines_of,
    nodes_in,
    report_text,
    subject,
    suspect_of,
    undecided,
)
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
from nodeready.runs.stacks.document import Suspect
from nodeready.runs.stacks.evidence import ranks_of

#: The text that `nodeready.agent.failures.reader` makes of a mismatch of ProcessGroupWrapper.cpp.
_TWO_CALLS = re.compile(r": rank (\d{1,7}) calls (.{1,120}), rank (\d{1,7}) calls (.{1,120})$")
_DIFFERENT = "a mismatch between collectives"
WENT_ON = "its rank wrote further lines after it"
#: Seconds between an error that CUDA reports late and the kernel's line about the fault behind it.
_SAME_FAULT_S = 60.0


def own_error(job: JobFailures) -> Finding | None:
    """An error that no other rank's end has caused."""
    errors = [f for f in job.final if not _is_mismatch(f)]
    # What other ranks' steps have survived, and no line repeats, is no cause beside another error.
    texts = {f.event.text for f in errors if not f.event.steps_on}
    errors = [f for f in errors if f.event.text in texts] or errors
    # Who says only that a rank has ended, where its own log has the signal.
    signals = {(f.rank, f.file) for f in job.ended if f.event.kind == "signal"}
    errors = [
        f for f in errors if not f.event.has_phrase("only-ends")
        or all(rank != f.rank or file == f.file for rank, file in signals)
    ]  # fmt: skip
    # What a limit has ended calls MPI_Abort, too.
    if any(f.event.kind == "limit" for f in job.ended):
        errors = [
            f for f in errors if not f.event.has_phrase("only-ends") or f.event.last_words
            or job.complaint(ranks_in([f]))
        ]  # fmt: skip
    # A task that its coordinator misses may be a victim of one that says why it ended, and so may
    # a launcher that finds no peer.
    coordinators = [f for f in job.final if f.event.source == COORDINATOR]
    told_at = {f.file: f.event.line for f in coordinators}
    named = [
        f for f in errors if f.event.source not in (COORDINATOR, NOT_LAUNCHED)
        # A process aborts when its coordinator misses another one.
        and not (f.event.kind == "signal" and told_at.get(f.file, f.event.line) < f.event.line)
    ]  # fmt: skip
    # Each process that the coordinator tells writes the same.
    missed = [f for f in job.own_errors if f.event.source == COORDINATOR]
    named = _with_missed_rank(named, missed)
    # What has ended the missed rank says more.
    if not named and set() < ranks_in(coordinators) <= ranks_in(job.ended):
        return None
    return first_error(job, named or coordinators or errors)


def _with_missed_rank(
    errors: Sequence[RankFailure], coordinators: Sequence[RankFailure]
) -> list[RankFailure]:
    """The errors; those of one kind and of unknown rank get the only rank that coordinators miss,
    if these say so in the same log and after them.
    """
    ranks, kinds = ranks_in(coordinators), {f.event.kind for f in errors}
    if len(ranks) != 1 or len(kinds) != 1 or len({f.file for f in (*errors, *coordinators)}) != 1:
        return [*errors]
    is_before = max(f.event.line for f in errors) < min(f.event.line for f in coordinators)
    if not is_before or any(f.rank is not None or f.event.source for f in errors):
        return [*errors]
    return [f._replace(rank=rank) for f in errors for rank in ranks]


def _is_mismatch(failure: RankFailure) -> bool:
    """Whether ranks call different collectives. Those that see it are not always the odd ones."""
    event = failure.event
    return event.has_phrase("collective-mismatch") or event.has_phrase("other-size")


def not_launched(job: JobFailures) -> Finding | None:
    """A launcher that could not start the ranks, where none of them has an error."""
    errors = [f for f in job.all if f.event.source == NOT_LAUNCHED]
    files = {f.file for f in errors}
    further = [f for f in job.final if not (f.event.source == NOT_LAUNCHED or f.event.is_warning)]
    # A launcher that finds no peer may be late: then the ranks of others tell more.
    if any(f.event.role != FAILED or f.event.kind == "network" for f in errors):
        failures = *job.reports, *job.lost, *job.waited
        further += [f for f in failures if f.file not in files and not f.event.is_warning]
    if not errors or further:
        return None
    errors.sort(key=lambda f: f.event.has_phrase("told-by-another"))
    event = errors[0].event
    words = {"error": event.text}
    kinds = {event.kind, meaning(event.text).kind}
    kind = "network" if kinds & {"network", "timeout"} else "storage" if "storage" in kinds else ""
    # A launcher that does not come to its own tasks waits for no peer.
    kind = "timeout" if (event.role, event.kind) == (FAILED, "timeout") else kind
    # Those that were started wait for the others in vain.
    is_partial = any(f.event.call for f in job.victims)
    finding = Finding(
        for_=lines_of(errors), failures=errors[:1], words=words, kind=kind,
        sentence="not all ranks were started: {error}" if is_partial else "",
    )  # fmt: skip
    # srun kills all further tasks when the container of one rank does not start.
    tasks = [f for f in job.reports if f.event.source == "srun"]
    failed = [f for f in tasks if f.event.code > 0]
    if not failed or len(failed) == len(tasks):
        return finding
    sentence = "{who} {was|were} not started: {error}"
    return replace(finding, ranks=ranks_in(failed), nodes=nodes_in(failed), sentence=sentence)


def earlier_error(job: JobFailures) -> Finding | None:
    """An error after which its rank went on, such as that of a thread."""
    died_later = {
        (f.file, f.rank) for f in job.lost if f.event.call and f.event.lines_after <= FINAL_LINES
    }
    # The last error of a task that is tried no more.
    given_up = {f.file: f.event.line for f in job.consequences if f.event.has_phrase("gives-up")}
    last = {f.file: f.event.text for f in sorted(job.own_errors, key=lambda f: f.event.line)
            if f.event.line < given_up.get(f.file, 0)}  # fmt: skip
    later = [
        f for f in job.own_errors
        if not (is_final(f) or (f.event.handled and last.get(f.file) != f.event.text)
                or (f.file, f.rank) in died_later)
    ]  # fmt: skip
    groups = equal_failures(later)
    few = [f for g in groups if 2 * len(g.ranks) <= len(job.ranks) for f in g.failures]
    # What quotes the error of a worker comes after that error.
    is_late = job.lost or job.waited or any(f.event.has_phrase("wraps") for f in job.consequences)
    return first_error(job, few, WENT_ON) if is_late else None


def own_connection(job: JobFailures) -> Finding | None:
    """A connection of the user's own code, where its peers lost a rank of the job."""
    errors = [f for f in job.lost if f.event.has_phrase("own-connection") and not f.went_on]
    is_rare = 2 * len({f.rank for f in errors}) <= len(job.ranks) and len(errors) < len(job.lost)
    return first_error(job, errors) if errors and is_rare else None


def first_error(job: JobFailures, errors: Sequence[RankFailure], *notes: str) -> Finding | None:
    """The first of these errors. notes: what speaks against each of them"""
    groups = equal_failures(once_per_rank(errors))
    if not groups:
        return None
    groups, reason, missing = _in_order(job, groups)
    ranks = set(groups[0].ranks)
    # One fault of a shared file system has several errors.
    if not reason and {group.first.event.kind for group in groups} == {"storage"}:
        ranks, reason = {rank for group in groups for rank in group.ranks}, "all are of storage"
    if not reason:
        return undecided([_suspect(job, group, notes) for group in groups], missing)
    first = groups[0]
    event, kind = first.first.event, first.first.event.kind
    nodes = {*first.nodes} | job.nodes_of(ranks)
    if not event.frame:
        event = next((f.event for f in first.failures if f.event.frame), event)
    asserts = [f for f in job.own_errors if f.event.text.startswith(ASSERT)]
    for_ = [f"in {first.first.example}", reason]
    for_ += [f.event.text for f in asserts[:1] if f is not first.first]
    for_ += [report_text(f) for f in job.roots if f.rank in ranks][:1]
    xids = job.xids(first.nodes) if kind == "gpu" else []
    # The kernel names the process of a fault that others see, too.
    faulty = {job.finder.by_pid.get((fault.node, fault.pid)) for fault in xids}
    if len(groups) == len(faulty) == 1 and not ranks:
        ranks = {rank for rank in faulty if rank is not None}
    for_ += kernel_lines(xids)
    name = subject(ranks, nodes)
    # A process that torchrun ended may be of a rank that no line names.
    is_all = ranks == job.ranks and not any(f.event.source == "torchrun" for f in job.ended)
    if len(job.ranks) > 1 and is_all:
        name = f"all {len(ranks)} ranks"
        for_.append("every rank raised it: a mistake that all share, not one rank's")
    elif not ranks and first.writers > 1:
        name = f"{first.writers} ranks"
    roots, against = [f.rank for f in job.roots if f.rank is not None], list[str]()
    if ranks and roots and ranks.isdisjoint(roots):
        text = "torchrun names rank {} as its first observed failure, which only says that {}"
        against.append(text.format(roots[0], "its end was seen first"))
    if first.first.file not in job.last_files:
        against.append("torchrun started the ranks again after it")
    is_late = event.kind == "gpu" and event.has_phrase("reported-late")
    time_s = first.first.time_s if is_late else None
    behind = [
        fault for fault in xids
        if time_s is not None and fault.time_s is not None and not is_of_program(fault)
        and abs(fault.time_s - time_s) <= _SAME_FAULT_S
    ]  # fmt: skip
    if is_late:
        text = "CUDA reports errors late: the frame may be wrong; {} shows the call"
        against.append(text.format("CUDA_LAUNCH_BLOCKING=1"))
    suspects = [suspect_of(ranks, nodes, for_, (*against, *notes))]
    complaint = job.complaint(ranks) if event.has_phrase("only-ends") else ""
    last_words = complaint or event.last_words
    is_told = complaint or (last_words and event.kind == "exception")
    kind = meaning(last_words).kind if is_told else event.kind
    lead = f"{excerpt(last_words, 200)}; then " if last_words else ""
    error = "; ".join((f"{lead}{event.text}", *kernel_lines(behind)[:1]))
    return Finding(
        ranks, nodes, failures=first.failures, kind=kind, frame=event.frame,
        sentence="{who}: {error}", words={"who": name, "error": error},
        suspects=suspects + [_suspect(job, group, notes) for group in groups[1:4]],
    )  # fmt: skip


def _suspect(job: JobFailures, group: EqualFailures, notes: Iterable[str]) -> Suspect:
    """The ranks with this error, as one of several suspects."""
    event, nodes = group.first.event, {*group.nodes} | job.nodes_of(group.ranks)
    frame = (f"at {event.frame}",) if event.frame else ()
    return suspect_of(group.ranks, nodes, (event.text, *frame, f"in {group.first.example}"), notes)


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
        earliest, first = min(timed, key=lambda row: row[0].latest_s)
        later = [row for row in timed if row[1] is not first]
        rivals = [
            group for _, group in later
            if not all(precedes(earliest, f) for f in group.failures if f.time_s is not None)
        ]  # fmt: skip
        groups = [first, *(rivals or [group for _, group in later])]
        if not rivals:
            gap_s = (later[0][0].time_s or 0.0) - (earliest.time_s or 0.0)
            return groups, f"{gap_s:.1f} s before the next error", ""
        missing = "the clocks may differ by more than the time between the errors"
    # Of several torchruns, each sees only its node's ranks.
    root = job.roots[0] if len(job.roots) == 1 else None
    nodes = {node for group in groups for node in (*group.nodes, *job.nodes_of(group.ranks))}
    if root is not None and nodes <= {root.node} and is_clear_root(root, job.reports):
        for group in groups:
            if root.rank in group.ranks:
                others_of_node = [other for other in groups if other is not group]
                return [group, *others_of_node], "torchrun saw its end first", ""
    if len({f.file for group in groups for f in group.failures}) == 1:
        groups = sorted(groups, key=lambda group: (
            group.first.event.has_phrase("told-by-another"), group.first.event.line
        ))  # fmt: skip
        return groups, "its lines come first in the log", ""
    waits = [group for group in groups if group.first.event.kind == "timeout"]
    if len(waits) == len(groups) - 1:
        groups = [*(group for group in groups if group not in waits), *waits]
        return groups, "a timeout ends a wait for what others did not do", ""
    by_size = sorted(groups, key=lambda group: len(group.ranks) or 1)
    few, many = len(by_size[0].ranks), len(by_size[-1].ranks)
    if few < len(by_size[1].ranks) and 2 * many > len(job.ranks):
        return by_size, f"{counted(many, 'other rank')} share one error, as victims do", ""
    return by_size, "", missing


def mismatch(job: JobFailures) -> Finding | None:
    """Ranks that call different collectives: those unlike most, if the errors name them."""
    failures = [f for f in job.final if _is_mismatch(f)]
    calls: dict[int, str] = {}
    peers: dict[int, str] = {}
    for failure in failures:
        match = _TWO_CALLS.search(failure.event.text)
        # Other numbers are those of a process group.
        if match and failure.rank in (None, int(match[1])):
            calls[int(match[1])], peers[int(match[3])] = match[2], match[4]
    # A rank whose call has another form reads its peers' wrongly.
    calls = {**peers, **calls}
    if finding := odd_call(job, calls, failures):
        if not finding.kind:
            return replace(finding, kind="exception")
        # Each side may be the wrong one: the error is known, its rank is not.
        words = {"calls": ", ".join(f"rank {r} called {calls[r]}" for r in sorted(calls)[:3])}
        sentence = f"{_DIFFERENT}, and which is wrong is not known: {{calls}}"
        return replace(
            finding, kind="exception", ranks=(), nodes=(), sentence=sentence, words=words
        )
    named = [f for f in failures if f.event.has_phrase("collective-mismatch")]
    if named:
        words = {"error": named[0].event.text}
        sentence = f"{_DIFFERENT}, and which rank is wrong is not known: {{error}}"
        places = [f"in {f.example}" for f in named[:3]]
        return Finding(
            for_=places, failures=named, words=words, kind="exception", sentence=sentence,
        )  # fmt: skip
    words = {"error": failures[0].event.text.rpartition("] ")[2]} if failures else {}
    return Finding(
        ranks_in(failures), nodes_in(failures), [f"in {f.example}" for f in failures[:3]],
        failures=failures, words=words,
        missing=("TORCH_DISTRIBUTED_DEBUG=DETAIL names the rank and its call",),
    ) if failures else None  # fmt: skip


def odd_call(
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
            known_failures = [by_rank[rank] for rank in ranks if rank in by_rank]
            first = min(known_failures, key=lambda f: (f.file, f.event.line), default=None)
            places = (f"in {first.example}",) if first else ()
            evidence = f"{ranks_of(ranks)} called {call}", *places
            suspects.append(suspect_of(ranks, job.nodes_of(ranks), evidence))
    if not is_usual:
        return undecided(suspects)
    odd = {rank for suspect in suspects for rank in suspect.ranks}
    calls_of_odd = " and ".join(call for call in sides if call != usual)
    return Finding(
        odd, {node for suspect in suspects for node in suspect.nodes}, failures=failures,
        words={"odd": calls_of_odd, "usual": f"{ranks_of(sides[usual])} {usual}"},
        sentence=f"{{who}} called {{odd}}, {{usual}}: {_DIFFERENT}", suspects=suspects,
        frame=next((f.event.frame for f in failures if f.rank in odd), ""),
    )  # fmt: skip

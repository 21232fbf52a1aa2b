"""The failures of ranks, before the first is searched: equal ones together, each rank's once."""

from __future__ import annotations

import math
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from nodeready.agent.failures.events import LAUNCHERS_OWN, OF_PEERS, WARNING, FailureEvent
from nodeready.agent.failures.rules import (
    CONSEQUENCE,
    ENDED,
    FAILED,
    LOST,
    REPORT,
    ROLES,
    WAITED,
    kind_of_code,
    signal_of,
)
from nodeready.fleet.inventory.nodeset import natural
from nodeready.runs.postmortem.evidence import (
    JobEvidence,
    NodeFault,
    NodeRecord,
    RankFailure,
    RankFinder,
)

#: Lines of the same rank after an error from which on the rank went on after it.
FINAL_LINES = 40
#: The line of an assertion in a kernel on the GPU.
ASSERT = "block: ["
#: A number: of an address, of a device on its bus (9d000), of a version.
_SHAPE = re.compile(
    r"0x[0-9a-fA-F]+|\b(?=[a-f]*\d[0-9a-f]*\b)[0-9a-f]{4,}\b|\d+(?:\.\d+)*|\b[0-9a-f]{8,}\b"
)


@dataclass
class EqualFailures:
    """Failures with the same text, but for numbers. The list is complete before it is asked."""

    failures: list[RankFailure] = field(default_factory=list)

    @property
    def first(self) -> RankFailure:
        return self.failures[0]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({f.rank for f in self.failures if f.rank is not None}))

    @property
    def nodes(self) -> tuple[str, ...]:
        # A failure of unknown rank on another node may be a copy.
        ranked = [f for f in self.failures if f.rank is not None] or self.failures
        return tuple(sorted({f.node for f in ranked if f.node}, key=natural))

    @property
    def writers(self) -> int:
        """How many processes have written them: Python, C++ and a watchdog may each name one."""
        names = Counter(_shape(f.event.text.partition("; then ")[0]) for f in self.failures)
        return max(names.values())

    @property
    def earliest(self) -> RankFailure | None:
        """The failure with the earliest time; None: none has a time."""
        timed = [f for f in self.failures if f.time_s is not None]
        return min(timed, key=lambda f: f.latest_s, default=None)


def equal_failures(failures: Iterable[RankFailure]) -> list[EqualFailures]:
    groups: dict[tuple[str, str, str], EqualFailures] = defaultdict(EqualFailures)
    for failure in failures:
        event = failure.event
        key = event.role, event.source if event.role == REPORT else "", _chain(failure)
        groups[key].failures.append(failure)
    return list(groups.values())


def _shape(text: str) -> str:
    return _SHAPE.sub("0", text)[:120]


def deadly(errors: list[RankFailure], lost: Iterable[RankFailure]) -> list[RankFailure]:
    """The errors without those after which most of their ranks called a collective.

    A library that logs the errors that it handles (a tracker without its server) does so on all
    ranks. If all errors are like that, all.
    """
    calls: dict[tuple[int, int | None], int] = {}
    for failure in lost:
        key = failure.file, failure.rank
        if failure.event.frame and failure.rank is not None:
            calls[key] = min(failure.event.lines_after, calls.get(key, failure.event.lines_after))
    fatal: list[RankFailure] = []
    for group in equal_failures(errors):
        went_on = {
            f.rank for f in group.failures
            if calls.get((f.file, f.rank), f.event.lines_after) < f.event.lines_after
        }  # fmt: skip
        if len(went_on) < 2 or 2 * len(went_on) < len(group.ranks):
            fatal += group.failures
    return fatal or errors


#: monitored_barrier names the rank that reports (ProcessGroupGloo.cpp).
_BARRIER = re.compile(r"\bRank (\d{1,7}) (?:successfully reached|timed out in) monitoredBarrier")
_ATTEMPT = re.compile(r"^(.*/)?attempt_(\d{1,4})/")
#: The name that people give the output of ``kubectl logs --previous``; Slurm's words about a job
#: that it will start again.
_PREVIOUS = re.compile(r"\bprevious\.(?:log|txt|out)$")
_REQUEUED = re.compile(r" DUE TO (?:PREEMPTION|JOB REQUEUE)")


def last_attempt(evidence: JobEvidence) -> frozenset[int]:
    """Indexes of the files, without those of attempts after which torchrun, Kubernetes or Slurm
    started again, or a further job continued and ended well.
    """
    is_finished = any(file.failures.facts.finished for file in evidence.files)
    continued_s = max((
        math.inf if stream.last_s is None else stream.last_s
        for file in evidence.files for stream in file.failures.streams
        if 0 < file.failures.facts.resumed < file.failures.facts.finished
    ), default=-math.inf)  # fmt: skip
    requeued = {
        number for number, file in enumerate(evidence.files) if is_finished
        if not file.failures.facts.finished
        if any(
            _REQUEUED.search(e.text)
            or ((e.role, e.kind) == (ENDED, "limit") and (e.time_s or 0.0) < continued_s)
            for e in file.failures.events
        )
    }  # fmt: skip
    matches = [_ATTEMPT.match(file.failures.path) for file in evidence.files]
    last: dict[tuple[str, str], int] = {}
    for file, match in zip(evidence.files, matches, strict=True):
        if match:
            key = file.node, match[1] or ""
            last[key] = max(int(match[2]), last.get(key, 0))
    return frozenset(
        number
        for number, (file, match) in enumerate(zip(evidence.files, matches, strict=True))
        if (int(match[2]) == last[file.node, match[1] or ""] if match
            else not (number in requeued or _PREVIOUS.search(file.failures.path)))
    )  # fmt: skip


def once_per_rank(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """The first error of each rank; of a rank's log and a launcher's copy of it, the log's."""

    def order(failure: RankFailure) -> tuple[object, ...]:
        event = failure.event
        is_assert = event.text.startswith(ASSERT)
        # After a failed assertion on the GPU, the exception has the call; MPI's report of an abort
        # only has the rank.
        is_abort = event.source == "mpirun" and event.has_phrase("only-ends")
        is_told = event.has_phrase("told-by-another")
        return event.source not in ("", "mpirun"), is_abort, is_assert, is_told, event.line

    failures = list(failures)
    aborts = {
        (f.file, f.rank): f.event.line for f in reversed(failures)
        if f.event.source == "mpirun" and f.event.has_phrase("only-ends")
    }  # fmt: skip
    # A crash below its own abort is of the end.
    ordered = sorted(
        (f for f in failures if f.rank is None or f.event.kind != "segfault"
         or aborts.get((f.file, f.rank), f.event.line) >= f.event.line),
        key=order,
    )  # fmt: skip
    by_rank: dict[object, RankFailure] = {}
    texts: set[str] = set()
    told_in = {f.file for f in ordered if f.event.has_phrase("reported-late")}
    for failure in ordered:
        event, rank = failure.event, failure.rank
        first = by_rank.get(rank)
        if rank is None:
            if event.text.startswith(ASSERT):
                # A kernel on one GPU writes a line for each of its threads.
                if failure.file not in told_in:
                    by_rank.setdefault((failure.file, failure.node, ASSERT), failure)
                continue
            if event.source and _shape(event.text) in texts:
                continue
            by_rank[failure.file, event.line] = failure
        elif first is None:
            by_rank[rank] = failure
        elif event.source == "error-file" and _shape(event.text) == _shape(first.event.text):
            # The error file has whole seconds.
            early_s, late_s = failure.early_s - 1.0, failure.late_s + 1.0
            by_rank[rank] = first._replace(
                time_s=failure.time_s, early_s=early_s, late_s=late_s, slack_s=failure.slack_s
            )
        texts.add(_shape(event.text))
    return list(by_rank.values())


def is_after(failure: RankFailure, failures: Iterable[RankFailure]) -> bool:
    """Whether something else is known to have failed before what a launcher reports."""
    return any(
        f.event.line < failure.event.line if f.file == failure.file
        else f.event.role == FAILED
        for f in failures
        if f.event.source not in (LAUNCHERS_OWN, WARNING) and is_final(f) and not f.event.went_on
    )  # fmt: skip


def _by_launchers(failures: Sequence[RankFailure]) -> list[RankFailure]:
    """The failures; an error of a launcher's own after no other is as one of a rank."""
    return [
        f._replace(event=replace(f.event, source=""))
        if f.event.source == LAUNCHERS_OWN and (f.rank is not None or not is_after(f, failures))
        else f
        for f in failures
    ]


def with_reported_ranks(failures: list[RankFailure]) -> list[RankFailure]:
    """The failures; an error in a shared log gets the rank whose end a launcher reports there."""
    #: The index of a file, and the node of a line of a file of several nodes -> failures.
    by_place: dict[tuple[int, str | None], list[RankFailure]] = defaultdict(list)
    for failure in failures:
        by_place[failure.file, None].append(failure)
        by_place[failure.file, failure.node].append(failure)
    reported = {place: _reported(placed) for place, placed in by_place.items()}
    copies: dict[str, set[int]] = defaultdict(set)
    #: The index of a file and the first error of a chain -> the ranks that have it.
    chains: dict[tuple[int, str], set[int | None]] = defaultdict(set)
    for failure in failures:
        if failure.event.role == FAILED:
            chains[failure.file, _chain(failure)].add(failure.rank)
        if failure.is_by("is_copy") and failure.event.role != REPORT:
            copies[_shape(failure.event.text)] |= set() if failure.rank is None else {failure.rank}
    attributed = []
    for failure in failures:
        event, ranks = failure.event, set[int]()
        if failure.rank is None and event.role == WAITED:
            barrier = _BARRIER.search(event.text)
            ranks = {int(barrier[1])} if barrier else set()
        elif failure.rank is None and event.role == LOST and event.has_phrase("aborts"):
            # The library ends its process: the only one of its node that has aborted.
            placed = by_place[failure.file, failure.node] if event.host else ()
            aborted = ranks_in(f for f in placed if f.event.code == -signal.SIGABRT)
            ranks = aborted if len(aborted) == 1 else set()
        elif failure.rank is None and event.role == FAILED and not event.source:
            place = failure.file, failure.node if event.host else None
            reported_ranks = reported[place].get(event.line, set())
            ranks = copies.get(_shape(event.text)) or reported_ranks
            # A report of the end may only have the last error of the chain.
            named = (chains[failure.file, text] - {None} for text in _causes(event))
            ranks = ranks or {r for r in next(filter(None, named), ()) if r is not None}
            ranks = reported_ranks if len(ranks) > 1 else ranks
        if not ranks or (event.role == WAITED and len(ranks) > 1):
            attributed.append(failure)
            continue
        # Another rank may have written the lines after it.
        event = replace(event, went_on=False)
        attributed += [failure._replace(rank=rank, event=event) for rank in sorted(ranks)]
    return attributed


#: The name of an error of PyTorch's C++, in C++, in Python and in the words of its watchdog, and
#: the place in the first.
_NAME = re.compile(
    r"^.{0,160}\bterminated with exception: "
    r"|^(?:(?:c10::\w*|std::runtime_)[Ee]rror|RuntimeError|torch\.AcceleratorError): "
    r"(?:\[Rank:\d+\] FATAL ERROR :: .{0,120}? Check \S{1,60} for details)?"
    r"| \(\w+ at /.*"
)


def _chain(failure: RankFailure) -> str:
    """The first error of a chain of exceptions."""
    return _causes(failure.event)[0]


def _causes(event: FailureEvent) -> list[str]:
    """The errors of a chain of exceptions, without their numbers."""
    return [_shape(_NAME.sub("", text)) for text in event.text.split("; then ")]


#: The device that PyTorch's allocator, or DDP, names; the local rank of a rank's command.
_DEVICE = re.compile(
    r"(?:CUDA|HIP|NPU|XPU) out of memory\..{0,80}?\b[GN]PU (\d{1,3})(?:; | has a total capac)"
    r"|\bbut got device_ids \[(\d{1,3})\]"
)
_LOCAL_RANK = re.compile(r"--local[_-]rank[=' ,]{1,4}(\d{1,3})\b")
#: The devices of most nodes: more ranks are likely on several nodes, although no line names them.
_DEVICES, _PAIR = 8, 2


def with_ranks_of_devices(
    failures: list[RankFailure], finder: RankFinder, job_ranks: Iterable[int]
) -> list[RankFailure]:
    """The failures; an error of unknown rank that names its device gets the rank that has it.

    A process that sees all devices of its node uses that of its local rank. Device 0 proves that
    only beside an equal error of another device: it may be the only one that the process sees.

    job_ranks: of all lines, names of files and reports
    """
    devices = {
        at: int(match[1] or match[2]) for at, failure in enumerate(failures)
        if (failure.rank, failure.event.role) == (None, FAILED)
        and (match := _DEVICE.search(failure.event.text))
    }  # fmt: skip
    # The programs whose processes see a further device.
    programs = {
        (failures[at].file, _chain(failures[at])) for at, device in devices.items() if device
    }
    counts = Counter(devices.values())
    texts = (match for f in failures if (match := _LOCAL_RANK.search(f.event.text)))
    named = {*job_ranks, *(int(match[1]) for match in texts)}
    # The rank that failed may have written no line with its number.
    last = max(named, default=0) + (len(named) > 1)
    ends = ranks_in(
        f for f in failures
        if f.event.role == REPORT and f.event.code and signal_of(f.event.code) not in _SENT
    )  # fmt: skip
    failed_ranks = ranks_in(f for f in failures if f.event.role in (FAILED, LOST, WAITED))
    ranked = list(failures)
    for at, device in devices.items():
        failure = failures[at]
        rank = finder.global_rank(failure.node, device)
        is_one_log = len(finder.evidence.files) == 1
        is_local = device <= last <= _DEVICES if finder.is_one_node else bool(failure.node)
        is_told_otherwise = rank in failed_ranks or (ends and rank not in ends)
        # Two errors of one device may be of two nodes.
        is_clear = (failure.file, _chain(failure)) in programs and counts[device] == 1
        if is_local and (failure.node or is_one_log) and is_clear and not is_told_otherwise:
            event = replace(failure.event, went_on=False)
            ranked[at] = failure._replace(rank=rank, event=event)
    return ranked


def with_all_ranks(failures: list[RankFailure], finder: RankFinder) -> list[RankFailure]:
    """The failures; equal errors of unknown rank, as many as a node's launcher has started ranks,
    get these ranks.

    The command that it quotes is that of its last rank. Of two, one rank may have written both.
    """
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for at, failure in enumerate(failures):
        event = failure.event
        if event.role == FAILED and not event.source and event.lines_after <= FINAL_LINES:
            groups[failure.file, _chain(failure)].append(at)
    lasts = {
        int(match[1]) for f in failures
        if f.event.source in ("deepspeed", "the launcher")
        and (match := _LOCAL_RANK.search(f.event.text))
    }  # fmt: skip
    is_one_log = finder.is_one_node and len(finder.evidence.files) == 1
    if len(groups) != 1 or len(lasts) != 1 or not is_one_log:
        return failures
    (places,) = groups.values()
    is_unknown = all(failures[at].rank is None for at in places)
    if not (is_unknown and len(places) == max(lasts) + 1 > _PAIR):
        return failures
    ranks = {at: rank for rank, at in enumerate(places)}
    return [f._replace(rank=ranks.get(at, f.rank)) for at, f in enumerate(failures)]


#: What launchers send to the ranks that have not failed.
_SENT = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)


def _reported(failures: Sequence[RankFailure]) -> dict[int, set[int]]:
    """The line of an own error in a log -> the ranks that have it, by the ends that launchers
    report there; none: not known.

    An end by which an error ends its process is that of one of the errors, if there are no more
    ends than errors. A rank that lost a peer ends like one that failed: then only the first end
    counts.
    """
    errors = [
        f for f in failures
        if f.rank is None and f.event.role == FAILED and not f.event.source
        and f.event.lines_after <= FINAL_LINES and not f.event.handled
    ]  # fmt: skip
    aborts = [
        f for f in failures
        if f.event.role == FAILED and f.event.source in ("mpirun", "the launcher")
    ]  # fmt: skip
    reports = [f for f in failures if f.event.role == REPORT and f.event.code]
    ends = [f for f in (*reports, *aborts)
            if f.rank is not None and signal_of(f.event.code) not in _SENT]  # fmt: skip
    errors = [f for f in errors if not f.event.has_phrase("told-by-another")] or errors
    ranks_of_pid: dict[int, set[int]] = defaultdict(set)
    for report in reports:
        ranks_of_pid[report.event.pid] |= ranks_in([report])
    of_pids = {
        f.event.line: ranks_of_pid[f.event.pid]
        for f in errors if f.event.pid and len(ranks_of_pid[f.event.pid]) == 1
    }  # fmt: skip
    own_ends = {f.event.line - 1: ranks_in([f]) for f in ends if f.is_by("of_itself")}
    # So is a rank's own line after the error, which says only that it ends itself.
    own_ends |= {
        f.event.line - 1: ranks_in([f]) for f in failures
        if f.rank is not None and f.event.role == FAILED and f.event.has_phrase("only-ends")
        and not f.event.source
    }  # fmt: skip
    of_next = {f.event.line: own_ends[f.event.line] for f in errors if f.event.line in own_ends}
    is_lost = any(f.event.role in (LOST, WAITED) and not f.event.is_warning for f in failures)
    # All ranks that have ended but one have a traceback of their own.
    raised = [
        f for f in failures if f.rank is not None and f.event.role == FAILED and f.event.frame
    ]
    without = ranks_in(ends) - ranks_in(raised)
    if len(errors) == len(without) == 1 and raised and not is_lost:
        is_other = errors[0].event.frame and _chain(errors[0]) not in map(_chain, raised)
        of_next |= {errors[0].event.line: without} if is_other else {}
    exits, aborted, crashed = _by_end(ends, lambda f: bool(signal_of(f.event.code)))
    # A process that aborts says so after its error.
    errors, notices, crashes = _by_end(errors, lambda f: f.event.kind in ("segfault", "signal"))
    # A program may end by SIGABRT or with a status after a crash; and an exception of C++ that
    # nothing catches ends by SIGABRT, as may a rank that lost a peer.
    of_crash = crashed or ([] if errors else aborted or exits)
    of_error = (exits if errors else []) or ([] if crashes or is_lost else aborted)
    of_lines = _assigned(crashes, of_crash, is_lost=is_lost)
    return of_lines | _assigned(errors or notices, of_error, is_lost=is_lost) | of_pids | of_next


def _by_end(
    failures: Iterable[RankFailure], is_crash: Callable[[RankFailure], bool]
) -> tuple[list[RankFailure], list[RankFailure], list[RankFailure]]:
    """The failures that are no crash, those by SIGABRT, and the crashes by something else."""
    parts: tuple[list[RankFailure], ...] = [], [], []
    for failure in failures:
        is_abort = signal_of(failure.event.code) == signal.SIGABRT
        parts[1 if is_abort else 2 * is_crash(failure)].append(failure)
    return parts[0], parts[1], parts[2]


def _assigned(
    errors: Sequence[RankFailure], ends: Sequence[RankFailure], *, is_lost: bool
) -> dict[int, set[int]]:
    """The line of an error -> its ranks, of the errors and ends of one kind in a log."""
    roots = [f for f in ends if f.event.source == "torchrun-root"]
    # Of several launchers, that whose ranks ended first.
    earliest = min(roots, key=lambda f: f.latest_s, default=None)
    if earliest and all(f is earliest or precedes(earliest, f) for f in roots):
        roots = [earliest]
    ranks = sorted(ranks_in(ends))
    texts = {_chain(f) for f in errors if not f.event.text.startswith(ASSERT)}
    codes = {f.event.code for f in ends}
    # torchrun ends the ranks that have not failed by a signal.
    is_most = 2 * len(errors) >= len(ranks) or all(f.is_by("is_copy") for f in ends)
    is_shared = not is_lost and len(texts) == len(codes) == 1 and is_most
    if is_shared and 1 < len(errors) < len(ranks):
        # The lines of further ranks are lost, or mixed with these.
        ranks_of_lines = {f.event.line: {rank} for f, rank in zip(errors, ranks, strict=False)}
        return ranks_of_lines | {errors[-1].event.line: {*ranks[len(errors) - 1 :]}}
    if is_lost or len(errors) < len(ranks):
        # The exception after an assertion on the GPU is of the same fault.
        is_told = any(f.event.has_phrase("reported-late") for f in errors)
        faults = [f for f in errors if not (is_told and f.event.text.startswith(ASSERT))]
        if len(faults) != 1 or not all(is_clear_root(root, ends) for root in roots):
            return {}
        of_all = [f for f in ends if f.event.source in ("srun", "mpirun")]
        first = roots or [f for f in of_all if f.event.line == of_all[0].event.line]
        first_ranks = ranks_in(first or ends)
        return {f.event.line: first_ranks for f in errors} if len(first_ranks) == 1 else {}
    if len(texts) == 1 and all(f.event.text[:8] != ASSERT for f in errors):
        return {f.event.line: {rank} for f, rank in zip(errors, ranks, strict=False)}
    # Several lines of one fault; a process with a different exception may be another one.
    kinds = {f.event.kind for f in errors}
    is_fault = len(texts) < 2 or (len(kinds) == 1 and "exception" not in kinds)
    is_fault |= all(
        b.event.line == a.event.line + 1 and not b.event.frame for a, b in pairwise(errors)
    )
    return {f.event.line: {*ranks} for f in errors} if is_fault and len(ranks) == 1 else {}


def _without_reason(failures: Sequence[RankFailure]) -> list[RankFailure]:
    """The failures; one without a reason after a wait that a watchdog has ended is a lost peer.
    The wait is of its rank, or, where its line names none, of the same log.
    """
    waited: dict[tuple[int, tuple[int, ...]], int] = {}
    for failure in failures:
        if failure.event.role == WAITED and not failure.event.is_warning:
            for ranks in {failure.event.ranks, ()}:
                waited.setdefault((failure.file, ranks), failure.event.line)
    return [
        f._replace(event=replace(f.event, role=LOST))
        if f.event.role == FAILED and f.event.has_phrase("no-reason")
        and waited.get((f.file, f.event.ranks), f.event.line) < f.event.line else f
        for f in failures
    ]  # fmt: skip


def _without_warnings(errors: Iterable[RankFailure]) -> list[RankFailure]:
    """The errors, without the warnings that another rank has survived, or that an error of their
    kind and rank repeats in their log.
    """
    errors = list(errors)
    survived = {f.event.text for f in errors if f.event.is_warning and f.event.handled}
    repeated = {(f.file, f.rank, f.event.kind) for f in errors if not f.event.is_warning}
    return [
        f for f in errors if f.event.handled or not f.event.is_warning
        or not (f.event.text in survived or (f.file, f.rank, f.event.kind) in repeated)
    ]  # fmt: skip


def is_final(failure: RankFailure) -> bool:
    """Whether an error may have ended its rank."""
    event = failure.event
    return event.lines_after <= FINAL_LINES and not (failure.went_on or event.handled)


def is_same_clock(failure: RankFailure, other: RankFailure) -> bool:
    """Whether the times of two failures are of one clock."""
    return failure.file == other.file or bool(failure.node and failure.node == other.node)


def precedes(failure: RankFailure, other: RankFailure) -> bool:
    """Whether a failure is earlier by more than the clocks may differ."""
    is_below = failure.file == other.file and failure.event.line > other.event.line
    if is_below and failure.event.time_s is None:
        return False  # Its rank's line with a time may be old.
    if is_same_clock(failure, other):
        return failure.late_s < other.early_s
    return failure.latest_s < other.earliest_s


def ranks_in(failures: Iterable[RankFailure]) -> set[int]:
    return {f.rank for f in failures if f.rank is not None}


class JobFailures:
    """The failures of a job by their roles, without those that follow from others."""

    def __init__(self, evidence: JobEvidence) -> None:
        self.evidence, self.finder = evidence, RankFinder(evidence)
        self.all = with_reported_ranks(_by_launchers(list(self.finder.failures())))
        self.all = with_all_ranks(self.all, self.finder)
        self.all += self._core_reports()
        ranks = self.finder.ranks(ranks_in(self.all))
        self.all = with_ranks_of_devices(self.all, self.finder, ranks)
        self.ranks = ranks | ranks_in(self.all)
        #: The ranks that have a log.
        self.logged: set[int] = set()
        self.node_of: dict[int, str] = {}
        for failure in self.all:
            if failure.rank is not None and failure.node:
                self.node_of.setdefault(failure.rank, failure.node)
        for file in evidence.files:
            for rank in (self.finder.file_rank(file), *(s.rank for s in file.failures.streams)):
                if rank is not None:
                    self.logged.add(rank)
                    if file.node:
                        self.node_of.setdefault(rank, file.node)
        self.all = _without_reason(self.all)
        by_role = {role: [f for f in self.all if f.event.role == role] for role in ROLES}
        self.lost, self.waited, self.ended = by_role[LOST], by_role[WAITED], by_role[ENDED]
        # A warning of a wait is overcome when its rank continues; a launcher waits for others in
        # vain when its ranks have failed.
        self.waited = [
            f for f in self.waited
            if (is_final(f) or not f.event.is_warning) and f.event.source != LAUNCHERS_OWN
        ]  # fmt: skip
        self.consequences = by_role[CONSEQUENCE]
        #: The lost peers, and all that others have caused, that are more than a warning.
        self.losses = [f for f in self.lost if not f.event.is_warning]
        self.victims = self.losses + [f for f in self.waited if not f.event.is_warning]
        self.reports = [f for f in by_role[REPORT] if f.event.code]
        self.roots = [f for f in self.reports if f.event.source == "torchrun-root"]
        #: (index of a file, rank; None: any) -> the first line of what others have caused.
        self.victim_at: dict[tuple[int, int | None], int] = {}
        for failure in (*self.lost, *self.waited, *self.ended, *self.consequences):
            event, keys = failure.event, [(failure.file, failure.rank)]
            # c10d warns of connections that it tries again.
            # The error that is announced stands below its stack.
            is_past = event.is_warning or event.handled or event.has_phrase("error-below")
            if event.lines_after <= FINAL_LINES and not is_past:
                keys += [(failure.file, None)] if event.role in (LOST, WAITED) else []
                for key in keys if failure.rank is not None or len(keys) > 1 else ():
                    self.victim_at[key] = min(event.line, self.victim_at.get(key, event.line))
        #: Index of a file -> its first line of an error that says that its cause is elsewhere.
        self.consequence_at: dict[int, int] = {}
        for failure in (f for f in self.consequences if not f.event.handled):
            at, line = failure.file, failure.event.line
            self.consequence_at[at] = min(line, self.consequence_at.get(at, line))
        #: Index of a file -> its first line about a worker of Ray that has ended without a word.
        self.died_at: dict[int, int] = {}
        for failure in self.consequences:
            if failure.event.has_phrase("raylet-worker-died") and is_final(failure):
                self.died_at.setdefault(failure.file, failure.event.line)
        #: The errors of ranks' own. An error of an earlier attempt counts where the last attempt
        #: has none.
        self.own_errors = _without_warnings(f for f in by_role[FAILED] if not self._is_victim(f))
        self.last_files = last_attempt(evidence)
        last_errors = [f for f in self.own_errors if f.file in self.last_files]
        self.own_errors = last_errors or self.own_errors
        own_errors = [f for f in self.own_errors if is_final(f)]
        final = deadly(own_errors, (*self.lost, *self.waited))
        #: The errors that may have ended the job, and those that came when peers had lost a rank.
        losses = [f for f in self.losses if f.rank is not None and not f.event.lines_after]
        loss = min(losses, key=lambda f: f.latest_s, default=None)
        self.late = [f for f in final if loss and f.file != loss.file and precedes(loss, f)]
        late = set(map(id, self.late))
        self.final = [f for f in final if id(f) not in late]
        # How an attempt before the last one has ended is no end of the job.
        if self.final or not all(f.event.handled for f in (*self.ended, *self.reports)):
            self.ended = [f for f in self.ended if not f.event.handled]
            self.reports = [f for f in self.reports if not f.event.handled]

    def follows_consequence(self, failure: RankFailure) -> bool:
        """Whether an error of its file before it says that its cause is elsewhere."""
        return self.consequence_at.get(failure.file, failure.event.line) < failure.event.line

    def _is_victim(self, failure: RankFailure) -> bool:
        """Whether an error follows a lost peer, a timeout or a signal of the same rank."""
        event = failure.event
        if event.source == LAUNCHERS_OWN:
            return True
        # A lost peer is seen before its node is given up. What peers quote is that rank's error.
        if event.has_phrase("node-marked-dead") or event.source == OF_PEERS:
            return False
        # A rank that lost a peer ends in MPI_Abort, too.
        if event.source == "mpirun" and any(
            (f.file, f.rank) == (failure.file, None) and f.event.line < event.line and is_final(f)
            for f in self.victims
        ):
            return True
        # A process that says that its cause is elsewhere, or lost a peer, may abort itself then.
        lost_at = self.victim_at.get((failure.file, None), event.line)
        is_after_others = self.follows_consequence(failure) or lost_at < event.line
        is_end = event.code == -signal.SIGABRT or event.has_phrase("only-ends")
        if is_end and is_after_others:
            return True
        # What other processes miss then is of the worker that died.
        if self.died_at.get(failure.file, event.line) < event.line:
            return True
        if event.source == "the launcher" and failure.rank in ranks_in((*self.lost, *self.waited)):
            return True
        if failure.rank is not None:
            return self.victim_at.get((failure.file, failure.rank), event.line) < event.line
        # A shared log may have the lines of several ranks: only a crash follows there.
        first = self.victim_at.get((failure.file, None), event.line)
        return not event.frame and first < event.line

    def _core_reports(self) -> list[RankFailure]:
        """The ends of ranks that cores report."""
        reports = []
        for number, (record, rank) in enumerate(self.ranked_records()):
            if rank is not None and record.signal:
                code, place = -record.signal, (record.node, -1 - number, record.path)
                event = FailureEvent(
                    *(kind_of_code(code), REPORT, "core", record.text, "", (rank,), None),
                    *(record.node, record.pid or 0, code, record.time_s, None, 0, 0),
                )
                times = record.time_s, record.time_s, record.time_s
                reports.append(RankFailure(rank, *place, event, *times))
        return reports

    def ranked_records(self) -> Iterator[tuple[NodeRecord, int | None]]:
        """What the nodes keep beside the logs, each with its rank; None: not known."""
        for record in self.evidence.records:
            rank = self.finder.by_pid.get((record.node, record.pid or 0))
            yield record, rank if record.rank is None else record.rank

    def nodes_of(self, ranks: Iterable[int]) -> set[str]:
        return {self.node_of[rank] for rank in ranks if rank in self.node_of}

    def silent_ranks(self) -> list[int]:
        """The ranks whose logs have no failure, unlike their peers'; [] for more than half."""
        failed = {f.rank for f in self.all if f.rank is not None and f.event.role != REPORT}
        silent = sorted(self.ranks - failed)
        nodes = {self.node_of.get(rank, "") for rank in silent}
        # A node that was lost takes all of its ranks.
        on_nodes = [rank for rank in self.ranks if self.node_of.get(rank, "") in nodes]
        is_node = len(nodes) == 1 and "" not in nodes and silent == sorted(on_nodes)
        is_few = 2 * len(silent) < len(self.ranks) or (is_node and len(silent) < len(self.ranks))
        # A rank without a log says nothing.
        return silent if is_few and self.logged.issuperset(silent) else []

    def complaint(self, ranks: set[int]) -> str:
        """The last words of an error in the logs of some of the ranks, or, where these have none,
        the words with which the log of an unknown rank ends; "": none.
        """
        streams = [
            (stream, {self.finder.file_rank(file), stream.rank} - {None}, file.failures.events)
            for file in self.evidence.files for stream in file.failures.streams
            if stream.complaint
        ]  # fmt: skip
        ends = [stream for stream, written, _ in streams if ranks & written]
        if not ranks & self.logged:
            # In a log without a failure, the last words of a program without a logger count, too.
            ends = [
                s for s, written, events in streams if not written
                if s.is_cut or (not events and (s.is_last or s.last.strip() == s.complaint))
            ]  # fmt: skip
        ends.sort(key=lambda s: (not s.is_cut, not s.is_last))
        return ends[0].complaint if ends else ""

    def xids(self, nodes: Iterable[str] = ()) -> list[NodeFault]:
        """The kernel's messages about GPUs of these nodes; (): of all."""
        names = set(nodes)
        xids = [fault for fault in self.evidence.kernel if fault.kind == "xid"]
        return [fault for fault in xids if not names or fault.node in names][:3]


def is_clear_root(root: RankFailure, reports: Sequence[RankFailure]) -> bool:
    """Whether torchrun saw this rank end first; of equal times, it names the lowest rank."""
    return not any(
        f.time_s == root.time_s and (f.rank or 0) > (root.rank or 0) and f.event.code > 0
        for f in reports
        if f.event.source == "torchrun"
    )

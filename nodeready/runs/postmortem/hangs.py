"""Hangs that a watchdog ended, and which rank was late: by the watchdogs' reports and the flight
recorder's dumps, by the calls and times of the ranks, by what is missing. Pure.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import replace

from nodeready.agent.failures.rules import meaning
from nodeready.agent.log_ranks import ranks_in as numbers_in
from nodeready.runs.postmortem.findings import Finding, lines_of
from nodeready.runs.postmortem.own_errors import odd_call
from nodeready.runs.postmortem.rank_failures import JobFailures, ranks_in
from nodeready.runs.stacks.evidence import Evidence, RankPlace, ranks_of
from nodeready.runs.stacks.witness_reader import read_witnesses

#: Functions of torch.distributed in which the ranks of a group rightly differ.
_PAIRWISE = frozenset(("send", "recv", "isend", "irecv", "batch_isend_irecv"))
_JOINED = re.compile(r"(\d{1,5})/(\d{1,5}) clients joined")
#: A rank that waits in the first barrier of a job's store, the ranks of the job, and those that
#: have come (distributed_c10d.py, _store_based_barrier).
_STORE_BARRIER = re.compile(
    r"in store based barrier .{0,40}rank: (\d{1,7}), (?:for )?key: store_based_barrier_key:1 "
    r"\(world_size=(\d{1,7}), worker_count=(\d{1,7}),"
)
#: The rank from which NCCL's id did not come (ProcessGroupNCCL.cpp, broadcastUniqueNCCLID); the
#: rank whose answer did not come to its peers (ProcessGroupGloo.cpp, monitoredBarrier).
_AWAITED = re.compile(r"retrieving ncclUniqueId from \[(\d{1,7})\]")
_BARRIER = re.compile(r"monitoredBarrier, but .{1,60} from rank (\d{1,7})\b")
#: The ranks that Horovod's stall inspector marks (stall_inspector.cc).
_MARKED = re.compile(r"^(\d{1,7})!: \[")
#: The tasks that did not come to a barrier, as its service names them, and the number of one.
_MISSED, _TASK = (
    re.compile(r"imed out task names: (.*)"),
    re.compile(r"/task:(\d{1,7}(?:,\d{1,7})*)"),
)


def hang(job: JobFailures) -> Finding | None:
    """A hang that a watchdog ended: the rank that lags behind is the suspect."""
    lags, stuck = _lags(job)
    if not (job.waited or lags or stuck):
        return None
    ranks, evidence = lags[0][0] if lags else set[int](), [reason for _, reason in lags[:3]]
    if not lags:
        calls = {f.rank: f.event.call for f in (*job.lost, *job.waited) if f.event.call}
        # The ranks of one group that wait in different calls of the same number.
        reports = [r for file in job.evidence.files for r in file.failures.reports
                   if r.kind == "timeout" and r.sequence is not None]  # fmt: skip
        is_reported = not calls and len({(r.sequence, r.group) for r in reports}) == 1
        calls = {r.rank: r.operation for r in reports} if is_reported else calls
        calls_of = {rank: call for rank, call in calls.items() if rank is not None}
        is_known = 2 * len(calls_of) > len(job.ranks)
        is_known &= _PAIRWISE.isdisjoint(map(str.lower, calls_of.values()))
        finding = odd_call(job, calls_of, job.waited) if is_known else None
        # Of reports without the name of a group, two halves may be two groups.
        if finding and not (is_reported and finding.kind):
            words = {**finding.words, "error": "".join(f.event.text for f in job.waited[:1])}
            sentence = finding.sentence + ": {error}" * bool(job.waited and not finding.kind)
            kind = finding.kind or "timeout"
            return replace(finding, kind=kind, sentence=sentence, words=words)
        ranks, reason = _late_ranks(job)
        evidence = [reason] if ranks else []
    # The lagging rank's own words, if it has some; what only warns says least.
    waited = sorted(job.waited, key=lambda f: (
        f.event.is_warning, f.rank not in ranks, f.file, f.event.line
    ))[:1]  # fmt: skip
    text = waited[0].event.text if waited else lags[0][1] if lags else stuck
    # What the rank that did not come complains of says more than those that waited for it.
    complaint = job.complaint(ranks) if ranks & job.logged - ranks_in(job.waited) else ""
    finding = Finding(
        ranks, job.nodes_of(ranks), evidence + lines_of(waited), failures=waited,
        words={"error": complaint or text}, kind=meaning(complaint).kind if complaint else "",
    )  # fmt: skip
    missing = "which rank was late: the flight recorder's dumps would tell"
    sentence = "a timeout, and no rank is known to be late: {error}"
    return finding if ranks else replace(finding, sentence=sentence, missing=(missing,))


def _late_ranks(job: JobFailures) -> tuple[set[int], str]:
    """The ranks that came late or never, and how that is known."""
    waiting = ranks_in(job.waited)
    # The few ranks that came when the timeout of their peers was over.
    ends = [f.latest_s for f in job.waited if f.time_s is not None]
    end_s = max(ends, default=math.inf)
    late = ranks_in(f for f in job.lost if f.time_s and f.earliest_s > end_s) - waiting
    if late and len(late) < len(waiting):
        return late, f"{ranks_of(late)} lost a peer only after the timeout of the others"
    # The store names the size of the job.
    match = next(filter(None, (_JOINED.search(f.event.text) for f in job.waited)), None)
    absent = set(range(int(match[2]))) - job.ranks if match else set[int]()
    if match and absent and len(absent) == int(match[2]) - int(match[1]):
        return absent, f"no log names {ranks_of(absent)}, and only the others had come"
    stores = [m for m in (_STORE_BARRIER.search(f.event.text) for f in job.waited) if m]
    came = {int(match[1]) for match in stores}
    if stores and len(came) == max(int(match[3]) for match in stores):
        absent = set(range(int(stores[0][2]))) - came
        if absent:
            return absent, f"only {ranks_of(came)} came to the barrier of the store"
    sources = (_AWAITED.search(f.event.text) for f in job.waited)
    awaited = {int(source[1]) for source in sources if source} - waiting
    if awaited:
        return awaited, f"{ranks_of(waiting)} waited for what {ranks_of(awaited)} should send"
    # It may wait itself for one that is not heard of.
    barriers = (_BARRIER.search(f.event.text) for f in job.waited)
    awaited = {int(match[1]) for match in barriers if match} - waiting
    if len(awaited) == 1 and not job.ranks - waiting - awaited:
        return awaited, f"{ranks_of(waiting)} came to the barrier of {ranks_of(awaited)}"
    marks = (_MARKED.search(f.event.text) for f in job.waited)
    marked = {int(mark[1]) for mark in marks if mark}
    if marked and 2 * len(marked) <= len(job.ranks):
        return marked, f"the stall inspector says that {ranks_of(marked)} did not come"
    names = next(filter(None, (_MISSED.search(f.event.text) for f in job.waited)), None)
    tasks = ",".join(_TASK.findall(names[1])) if names else ""
    missed = set(numbers_in(tasks)) - waiting if tasks else set[int]()
    if missed:
        return missed, f"the service of the barrier says that {ranks_of(missed)} did not come"
    silent = _quiet(job, set(job.silent_ranks())) if job.waited else set[int]()
    return silent, f"{ranks_of(waiting)} waited; the log of {ranks_of(silent)} just ends"


def _quiet(job: JobFailures, ranks: set[int]) -> set[int]:
    """Of ranks without a word, those that are shown to say none: no rank that waited writes into
    their log, or it has their lines after the first wait. Others may be cut off.
    """
    first_s = min((f.time_s for f in job.waited if f.time_s is not None), default=math.inf)
    quiet = set[int]()
    for file in job.evidence.files:
        times = {s.rank: s.last_s or 0.0 for s in file.failures.streams if s.rank is not None}
        times |= {rank: 0.0 for rank in [job.finder.file_rank(file)] if rank is not None}
        is_alone = ranks.issuperset(times)
        quiet |= {rank for rank, last_s in times.items() if is_alone or last_s > first_s}
    return quiet & ranks


def _lags(job: JobFailures) -> tuple[list[tuple[set[int], str]], str]:
    """The ranks that lag behind by the watchdogs' reports and the flight recorder's dumps, each
    with the reason; what the watchdogs of most ranks say.
    """
    evidence, places, ranks = Evidence(), list[RankPlace](), set(job.ranks)
    #: The number and the operation of a call -> the process groups of the reports that name one.
    groups: dict[tuple[int | None, str], set[str]] = defaultdict(set)
    for row in (r for file in job.evidence.files for r in file.failures.reports if r.group):
        groups[row.sequence, row.operation].add(row.group)
    for number, file in enumerate(job.evidence.files, 1):
        reports, recording = file.failures.reports, file.failures.recording
        # Of one version's two lines about a timeout, only the second names the group.
        reports = tuple(
            replace(r, group=next(iter(names))) if not r.group and len(names) == 1 else r
            for r in reports for names in [groups.get((r.sequence, r.operation), set())]
        )  # fmt: skip
        rank, named = job.finder.file_rank(file), [r for r in reports if r.rank is not None]
        if rank is None and named:
            # The log of several ranks: only the reports that name one count.
            reports, rank = tuple(named), named[0].rank
        if reports or recording:
            ranks |= {report.rank for report in named if report.rank is not None}
            place = RankPlace(file.node or "node", number, rank)
            evidence.keep_log(place[:2], file.failures.path, reports, recording)
            places.append(place)
    placed = {place.rank for place in places}
    places += [RankPlace("node", -rank - 1, rank) for rank in sorted(ranks - placed)]
    report = read_witnesses(evidence, places, False)
    lags = sorted(report.lags, key=lambda lag: -lag.weight)
    silent = {rank for lag in lags if lag.silent for rank in lag.ranks}
    unseen = silent - _quiet(job, silent)
    rows = [
        (late, f"{ranks_of(late)} has not called {lag.call}")
        for lag in lags if not lag.chained
        if (late := {*lag.ranks} - (unseen if lag.silent else set()))
    ]  # fmt: skip
    stuck = ""
    for statement in (s for witness in report.witnesses for s in witness.statements):
        is_seen = not unseen.issuperset(statement.ranks)
        if statement.weight and not statement.against and is_seen and not rows:
            if 2 * len(statement.ranks) <= len(ranks) or len(ranks) == 1:
                rows.append((set(statement.ranks), statement.text))
            else:
                stuck = stuck or f"{ranks_of(statement.ranks)}: {statement.text}"
    return rows, stuck

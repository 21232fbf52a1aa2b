"""Whether a job lives or has ended well, although its logs have words of an error. Pure.

Slurm's records, the program's own end and its progress after a failure outweigh words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from nodeready.agent.failures.events import NOT_LAUNCHED
from nodeready.agent.failures.rules import (
    CONSEQUENCE,
    ENDED,
    FAILED,
    LOST,
    PHRASES,
    REPORT,
    STOPS,
    WAITED,
    meaning,
    signal_of,
)
from nodeready.runs.postmortem.evidence import RankFailure
from nodeready.runs.postmortem.findings import Finding, lines_of, subject
from nodeready.runs.postmortem.rank_failures import JobFailures, equal_failures

#: Seconds after a GPU's fault in which a program may still write the steps before it.
_AFTER_FAULT_S = 60.0
#: How often a worker is started again without success.
_RESTARTS_IN_VAIN = 3
#: Lines after the end of a job, or after a connection that closes then, in which another lost one
#: belongs to it; plain lines after an error in a log of unknown ranks from which on its rank went
#: on.
_END_LINES, _FURTHER_LINES = 20, 5


def survived(job: JobFailures) -> Finding | None:
    """All that failed was survived: by Slurm, by the end of the log, by more steps after it."""
    kinds = job.own_errors, job.reports, job.ended, job.lost, job.waited, job.consequences
    failures = [f for kind in kinds for f in kind]
    bad = [f for f in failures if not f.event.is_warning]
    ends = {at: file.failures.facts.finished for at, file in enumerate(job.evidence.files)}
    has_end = any(ends[at] for at in job.last_files)
    # A pod that was killed was started again, where the log of each rank has ended well.
    files = job.evidence.files
    logs = [at for at in job.last_files if job.finder.file_rank(files[at]) is not None]
    own_ends = [file.failures.facts.program_finished for file in files]
    again = "starts_again" if (all(ends[at] for at in logs) if logs else any(own_ends)) else ""
    # Who starts again what fails says that all has ended well.
    managers = {at for at in job.last_files if files[at].failures.facts.manager_finished}
    tried_again = {
        id(f) for f in failures
        if f.is_by(again) or (managers and f.file >= 0 and f.file not in managers)
    }  # fmt: skip
    # Steps follow all failures, and nothing else reports an end.
    ends_alone = [
        f for f in (*job.reports, *job.ended)
        if not (f.event.steps_on or f.event.handled) and (f.file < 0 or f.file in job.last_files)
        and not (has_end and _is_stopped(f)) and id(f) not in tried_again
    ]  # fmt: skip
    has_failed = any(step.code or step.signal for step in job.evidence.steps)
    is_ended = bool(ends_alone or job.evidence.kernel or has_failed)
    closed = _closed(job, failures, ends, is_ended=is_ended)
    # A log with nothing but warnings is judged by them; what the kernel killed beside a job that
    # has ended well was not of it.
    judged = bad or failures
    is_beside = has_end or not (failures or has_failed or not _went_on(job))
    is_beside = is_beside and bool(job.evidence.kernel) and not job.silent_ranks()
    # A worker that is started again and again does not come.
    is_rare = len([f for f in bad if f.event.has_phrase("restarts")]) < _RESTARTS_IN_VAIN
    lengths = [sum(s.lines for s in file.failures.streams) for file in job.evidence.files]
    #: The files of ranks whose last line is of a step: they were launched.
    working = {
        at for at, file in enumerate(job.evidence.files)
        if ends[at] or any(PHRASES["step"].search(s.last) for s in file.failures.streams)
    }  # fmt: skip
    goes_on = has_end or (not is_ended and bool(working & job.last_files))
    fatal = [
        f for f in judged
        # What no log says has no line: a core file.
        if (f.file < 0 or f.event.line > ends.get(f.file, 0) or _is_hidden(job, f))
        and (f.file in job.last_files or not goes_on)
        and not (f.event.steps_on and not is_ended)
        and not (f.event.source == NOT_LAUNCHED and not is_ended and (
            # Who wants a pod tries again, and its log may be of several jobs.
            (f.event.kind in ("environment", "limit") and working - {f.file})
            or (f.event.kind == "limit" and job.logged)
        ))
        # A connection is tried again, or a worker started again, and further lines of its file
        # tell that it came.
        and not (
            (f.event.is_warning or (f.event.has_phrase("restarts") and is_rare))
            and not is_ended
            and f.file >= 0 and (
                f.event.lines_after if f.event.role == WAITED
                else lengths[f.file] - f.event.line
            ) >= _FURTHER_LINES
        )
        and id(f) not in closed | tried_again
        and not (f.went_on or f.event.handled)
        and not (f.event.went_on and f.event.lines_after >= _FURTHER_LINES)
    ]  # fmt: skip
    how = "its rank went on after it" if (judged or is_beside) and not fatal else ""
    is_told = has_end or bool(closed)
    how = "the log says afterwards that the job has ended well" if how and is_told else how
    last = {step.step: step for step in job.evidence.steps}
    numbers = {name: int(number) for name in last if (number := name.partition(".")[2]).isdigit()}
    names = [name for name in last if "." not in name]
    is_ok = {name: (s.state, s.code, s.signal) == ("COMPLETED", 0, 0) for name, s in last.items()}
    # Another step than the program's, which has ended well, is of what a script cleans up.
    is_cleanup = bool(fatal) and all(_is_cleanup(job, f) for f in fatal)
    is_cleanup &= any(map(is_ok.get, numbers))
    names += [max(numbers, key=lambda name: numbers[name])] if numbers and not is_cleanup else []
    # A batch script may hide how its command ended; of a step, Slurm knows it.
    hidden = [
        f for f in fatal
        if f.event.role in (REPORT, FAILED) and (not ends.get(f.file) or _is_hidden(job, f))
    ]  # fmt: skip
    if names and (numbers or not hidden) and all(map(is_ok.get, names)):
        how = "Slurm: COMPLETED 0:0"
    groups = equal_failures(bad)
    text = "; ".join(f"{subject(g.ranks, g.nodes)}: {g.first.event.text}" for g in groups)
    words = {"how": how, "seen": f"; seen and survived: {text}" if text else ""}
    return Finding(for_=lines_of(bad), words=words) if how else None


def _closed(
    job: JobFailures, failures: Sequence[RankFailure], ends: Mapping[int, int], *, is_ended: bool
) -> set[int]:
    """The ids of failures that are of the end of a job that has ended well: connections that close
    right after a line that says so, or before one about a command; and those of another file.

    ends: index of a file -> its last line that says so of the job, 0: none; is_ended: something
    else reports an end
    """
    files = [file.failures for file in job.evidence.files]
    outside = [f for f in failures if not (f.event.call or is_ended)]
    noise = {
        id(f) for f in failures
        if f.event.role in (LOST, CONSEQUENCE) or f.event.is_warning
        or any(map(f.event.has_phrase, ("at-some-point", "at-finalize"))) or _is_stopped(f)
    }  # fmt: skip
    commands = {
        at: 0 if any(s.is_cut or s.is_last for s in file.streams) else file.facts.command_ended
        for at, file in enumerate(files)
    }
    closed = set[int]()
    for rows, lines in ((failures, dict(ends)), (outside, commands)):
        for f in sorted((f for f in rows if id(f) in noise), key=lambda f: f.event.line):
            end = lines.get(f.file, 0)
            # What is missed before a server is stopped is no effect of it.
            is_after = f.event.role not in (CONSEQUENCE, ENDED, REPORT) or end < f.event.line
            if 0 < end >= f.event.line - _END_LINES and is_after:
                lines[f.file] = max(f.event.line, lines[f.file])
                closed.add(id(f))
    # A job that runs later in the same directory is another one.
    well = [s for at in job.last_files if ends[at] for s in files[at].streams]
    last_s = max((s.last_s for s in well if s.last_s is not None), default=math.inf)
    # Earlier phases, which have come to their last words: those of progress.
    phases = {
        at for at, file in enumerate(files)
        if well and all(PHRASES["progresses"].search(s.last) for s in file.streams)
    }  # fmt: skip
    return closed | {
        id(f) for f in outside
        if well and not ends.get(f.file) and (
            id(f) in noise or f.event.kind == "network"
            # A log of no rank is one of what looks at the nodes.
            or (f.rank is None and f.event.kind == "environment")
            or (f.rank is None and f.event.lines_after and f.file in phases)
        )
        and (f.time_s or 0.0) <= last_s + _AFTER_FAULT_S
    }  # fmt: skip


def _is_stopped(failure: RankFailure) -> bool:
    """Whether a signal from outside has ended a process: after the job's end, its helper."""
    event = failure.event
    is_stopped = event.role == REPORT and signal_of(event.code) in STOPS
    return is_stopped or (event.role == ENDED and event.kind == "signal")


def _is_cleanup(job: JobFailures, failure: RankFailure) -> bool:
    """Whether a process ends right after the words of its program that it has ended well."""
    is_end = failure.file >= 0 and failure.event.role in (REPORT, ENDED)
    end = job.evidence.files[failure.file].failures.facts.program_finished if is_end else 0
    return 0 < end < failure.event.line <= end + _END_LINES


def _is_hidden(job: JobFailures, failure: RankFailure) -> bool:
    """Whether only a batch script says after the end of a process that the job has ended well."""
    facts = job.evidence.files[failure.file].failures.facts
    return failure.event.is_last and not facts.program_finished > failure.event.line


def _went_on(job: JobFailures) -> bool:
    """Whether each log ends with words of a rank that has ended well, or each log with steps ends
    with one, long after the last fault of a kernel.
    """
    streams = [s for file in job.evidence.files for s in file.failures.streams]
    if streams and all(PHRASES["rank-done"].search(s.last) for s in streams):
        return True
    last_s = max((f.time_s for f in job.evidence.kernel if f.time_s is not None), default=math.inf)
    streams = [s for s in streams if PHRASES["step"].search(s.last)]
    ends = [s.last_s for s in streams if s.last_s is not None]
    return bool(ends) and len(ends) == len(streams) and min(ends) > last_s + _AFTER_FAULT_S


def complained(job: JobFailures) -> Finding | None:
    """The last words of a log are of an error that no row explains, and no other log has steps."""
    files, has_failed = job.evidence.files, any(step.code for step in job.evidence.steps)
    at_finalize = PHRASES["at-finalize"].search
    rows = [(s, file) for file in files for s in file.failures.streams
            if (s.is_cut or (s.complaint and (has_failed or s.is_last)))
            and not (file.failures.facts.command_ended and at_finalize(s.complaint))]  # fmt: skip
    # What a list of pods shows says less than the log of one.
    rows.sort(key=lambda row: bool(PHRASES["told-by-another"].search(row[0].complaint)))
    silent = [f for f in files if not any(s.is_cut or s.is_last for s in f.failures.streams)]
    going = [s.last for file in silent for s in file.failures.streams]
    is_well = any(file.failures.facts.finished for file in files)
    # The program, and what has started it, say that they have ended well.
    is_well |= len(files) > 1 and all(file.failures.facts.command_ended for file in files)
    if not rows or is_well or any(map(PHRASES["step"].search, going)):
        return None
    text = rows[0][0].complaint
    ranks = {
        rank for s, file in rows if s.complaint == text
        for rank in [s.rank if s.rank is not None else job.finder.file_rank(file)]
        if rank is not None
    }  # fmt: skip
    lines = [f"{file.failures.path}: {stream.complaint}" for stream, file in rows[:2]]
    words = {"error": text}
    return Finding(ranks, job.nodes_of(ranks), lines, words=words, kind=meaning(text).kind)

"""The program on the node that reads what a dead job left: failures in its logs, the kernel's log,
and what the node itself knows of the job.

Of a log, the beginning and the end are read, and only events come back, not its lines. The files
are found and read as `nodeready.agent.tail` finds and reads them: in forks, as their owners.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nodeready.agent import users_file
from nodeready.agent.cores.program import listing, read_notes
from nodeready.agent.failures.events import FileFailures
from nodeready.agent.failures.log_file import read_error_file, read_lines
from nodeready.agent.log_bytes import LogBytes, UnreadableLogError, count_lines, read_bytes
from nodeready.agent.log_lines import Calendar, node_calendar, text_lines
from nodeready.agent.log_variables import LogFacts
from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.stacks import processes, ranks
from nodeready.agent.tail import TailAnswer, TailConfig, TailReader, UnreadFile, read_tail
from nodeready.agent.witnesses import environment, flight_recorder
from nodeready.agent.witnesses.kernel_log import KernelLog, witness_log
from nodeready.core import wire
from nodeready.core.text import sanitise
from nodeready.subjects.environment_table import EnvironmentFacts, RankVariables

# --- What the node knows: ranks that still run and their environment; core files, without gdb; and
# its own gate: the last verdict, and the reasons of drains that `agent.gate.drain` has kept.

_MAX_RANKS, _MAX_CORES = 64, 8  # maximum ranks that still run, and cores, of a node
#: Where the gate keeps its verdict and the incidents of its drains (nodeready/agent/gate); their
#: schemas; maximum bytes of a file, incidents, reasons of one, and characters of a reason.
_VERDICT, _INCIDENTS = "/run/nodeready/verdict.json", "/var/lib/nodeready/incidents"
_SCHEMAS = ("nodeready.verdict/1", "nodeready.agent-incident/1")
_MAX_GATE_BYTES, _MAX_INCIDENTS, _MAX_REASONS, _MAX_REASON = 1 << 18, 5, 4, 200


@dataclass(frozen=True)
class RunningRank:
    """A rank of the job that still runs. rank, local_rank: None: not known"""

    pid: wire.Pid
    rank: wire.Number | None
    local_rank: wire.Number | None
    variables: RankVariables


@dataclass(frozen=True)
class JobCore:
    """A core file that may be of the job. pid, signal, rank: None: the core does not tell"""

    path: wire.Path
    written_s: float  # since 1970, by the node's clock
    pid: int | None
    signal: int | None
    rank: int | None
    command: wire.Name


@dataclass(frozen=True)
class GateRecord:
    """A no-go verdict of the node's gate. drained: it was kept before a drain"""

    time_s: float  # since 1970, by the node's clock
    reasons: tuple[wire.Line, ...]
    drained: bool


@dataclass(frozen=True)
class JobNode:
    """What a node knows of the job."""

    ranks: tuple[RunningRank, ...] = ()  # that still run
    # of the node, that decide about the job's environment
    facts: EnvironmentFacts = EnvironmentFacts("not needed")
    cores: tuple[JobCore, ...] = ()  # of its user, the newest first
    # the last verdict of its gate, if it is no-go, and its drains
    gate: tuple[GateRecord, ...] = ()


def observe_cores(
    supervisor: ProcessSupervisor, job: str, uid: int, age_s: float
) -> tuple[JobCore, ...]:
    """The cores of the last `age_s` seconds that may be of the job; see `observe_environment`."""
    cores = []
    files = [file for file in listing((), age_s).files if uid < 0 or file.owner in (0, uid)]
    for file in files[:_MAX_CORES]:
        if supervisor.left_s < 1:
            break
        selected = file.path, file.inode, file.modified_ns, file.size_bytes
        core = read_notes(supervisor, selected)
        is_of_other_user = uid >= 0 and core.uid not in (None, uid)
        if is_of_other_user or (job and core.jobs and job not in core.jobs):
            continue
        pid = core.pid if file.pid is None else file.pid
        number = file.signal if core.signal is None else core.signal
        moment = file.modified_ns / 1e9
        cores.append(JobCore(file.path, moment, pid, number, core.rank, core.comm))
    return tuple(cores)


def read_gate() -> tuple[GateRecord, ...]:
    """The gate's records of this node, without files that cannot be read."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(_INCIDENTS))[-_MAX_INCIDENTS:]
    paths = [_VERDICT, *(f"{_INCIDENTS}/{name}/incident.json" for name in names)]
    return tuple(record for path in paths if (record := _gate_record(path)))


def _gate_record(path: str) -> GateRecord | None:
    try:
        handle, status = users_file.open_regular(path)
        try:
            if status.st_uid not in (0, os.geteuid()):
                return None
            data = json.loads(os.read(handle, _MAX_GATE_BYTES))
        finally:
            os.close(handle)
        if data["schema"] not in _SCHEMAS or data.get("go"):
            return None
        reasons = tuple(sanitise(str(text), _MAX_REASON) for text in data["reasons"])
        taken = data.get("taken")
        moment = float(data["time"]) if taken is None else _epoch(taken)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return GateRecord(moment, reasons[:_MAX_REASONS], taken is not None)


def _epoch(text: str) -> float:
    """A time that `text.utc_now` has written, in seconds since 1970. Raises ValueError."""
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


def observe_environment(
    job: str,
    uid: int,
    variables: Mapping[str, str],
    files: Iterable[FileFailures],
    deadline: float,
) -> tuple[tuple[RunningRank, ...], EnvironmentFacts]:
    """The ranks of the job that still run, and the facts that decide about its environment.

    job:       Slurm's number; "": its ranks cannot be distinguished from others'
    uid:       of its user; -1: not known
    variables: of its batch script; files: its logs on this node
    deadline:  a moment of time.monotonic()
    """
    live: Sequence[ranks.JobRank] = ()
    if job:
        scanned, _ = processes.scan(deadline)
        selection = ranks.Selection(job, uid=None if uid < 0 else uid)
        selected = ranks.select(scanned, selection, os.getpid())
        live = [rank for rank in selected if not rank.stranger][:_MAX_RANKS]
    rows: dict[object, dict[str, str]] = {"script": dict(variables)}
    for number, file in enumerate(files):
        for variable in file.facts.variables:
            key = number, variable.rank, variable.local_rank, variable.host
            rows.setdefault(key, dict(variables))[variable.name] = variable.value
    if not live and not any(rows.values()):
        return (), EnvironmentFacts("not needed")
    pids = [rank.process.pid for rank in live]
    network = environment.network_pid(pids or [os.getpid()])
    masters: dict[tuple[str, str], list[int]] = {}
    for row in (*(rank.process.environment or {} for rank in live), *rows.values()):
        if row.get("MASTER_ADDR"):
            masters[row["MASTER_ADDR"], row.get("MASTER_PORT", "")] = pids

    def observe(pid: int) -> Any:
        return wire.plain(environment.observe_rank(pid, network))

    answers = processes.probe_each(observe, pids, deadline)
    running = []
    for rank in live:
        answer = answers.get(rank.process.pid, processes.HANGS)
        if answer is not processes.HANGS and not answer["absent"]:
            identity = rank.identity.rank, rank.identity.local_rank
            observed = wire.decode(RankVariables, answer)
            running.append(RunningRank(rank.process.pid, *identity, observed))
    return tuple(running), environment.observe_node(network, masters, deadline)


# --- The logs of the job.

#: Maximum bytes at the beginning and at the end of a file that are read.
HEAD_BYTES, END_BYTES = 256 << 10, (4 << 20) - (256 << 10)
#: Bytes of all files of a pattern, in equal shares, and the least share.
_ALL_BYTES, _LEAST_BYTES = 64 << 20, 256 << 10
MAX_ROWS = 100_000  # maximum lines of a file; of more, those in its middle are left out
_MAX_ANSWER = 3 << 20  # maximum bytes of an answer before it is compressed
#: Seconds for unpacking a log; of all logs of a pattern, in equal shares, and the least share.
_READ_S, _ALL_READ_S, _LEAST_READ_S = 10.0, 10.0, 0.1
_COUNT_S = 3.0  # maximum seconds for counting the lines of a log's middle: about 3 GB
_KERNEL_S = 8.0  # seconds for the kernel's log


@dataclass(frozen=True)
class PostmortemConfig(TailConfig):
    """The program's configuration; ``pattern`` is not used."""

    patterns: tuple[str, ...] = ()  # of the logs
    kernel_s: int = 0  # age of the kernel's messages in seconds; 0: do not read them
    uid: int = -1  # only files of this user are read: the job names them; -1: of all users
    job: str = ""  # Slurm's number of the job, whose live ranks are read; "": not known
    variables: tuple[tuple[str, str], ...] = ()  # (name, value) that its batch script sets


@dataclass(frozen=True)
class NodeFailures:
    """What one node has of the job."""

    host: wire.Name  # the node's own host name
    started_s: float  # by the node's clock, in seconds since 1970
    finished_s: float  # likewise
    files: tuple[FileFailures, ...]
    unread: tuple[UnreadFile, ...]
    left_out: wire.Count  # matching files beyond max_files
    older: wire.Count  # matching files outside the requested time
    kernel: KernelLog
    node: JobNode  # what the node itself knows of the job
    error: wire.Line  # why the answer is incomplete; ""


def file_failures(
    handle: int,
    path: str,
    room: int,
    calendar: Calendar = node_calendar,
    *,
    on_read: Callable[[], None] = lambda: None,
    rank_pattern: str = "",
    limit_s: float = _READ_S,
) -> FileFailures:
    """What an open file reports, from its beginning and its end.

    room:    maximum bytes
    limit_s: seconds for unpacking it, and for counting the lines of its middle
    on_read: called when the file was read, and before its lines are parsed
    rank_pattern: as of a `TailConfig`
    Raises OSError, UnreadableLogError.
    """
    status = os.fstat(handle)
    size = status.st_size
    if "trace_rank_" in os.path.basename(path):
        with contextlib.suppress(flight_recorder.NoDumpError):
            data = os.pread(handle, min(size, flight_recorder.MAX_BYTES), 0)
            dump = flight_recorder.parse(data)
            return FileFailures(path, size, status.st_mtime, recording=replace(dump, path=path))
    head_bytes = min(HEAD_BYTES, room // 4)
    log = read_bytes(handle, head_bytes, min(END_BYTES, room - head_bytes), limit_s)
    rows = text_lines(log.head, is_whole=True, keeps_states=True)
    end = text_lines(log.end, is_whole=False, keeps_states=True) if log.end else []
    if rows is None or end is None:
        raise UnreadableLogError("is no text")
    on_read()
    head_rows, skipped, middle = len(rows), log.skipped, slice(0, 0)
    rows += end
    if len(rows) > MAX_ROWS:
        middle = slice(MAX_ROWS // 10, len(rows) - MAX_ROWS * 9 // 10)
        skipped += sum(len(row) + 1 for row in rows[middle])
        rows[middle] = []
    lines = [row.decode("utf-8", "replace") for row in rows]
    try:
        year = time.gmtime(status.st_mtime).tm_year
    except (OverflowError, ValueError, OSError):
        year = time.gmtime().tm_year
    failures = None
    if not log.end and size <= HEAD_BYTES and lines and lines[0].startswith("{"):
        failures = read_error_file("\n".join(lines), calendar)
    if failures is None:
        failures = read_lines(lines, year, calendar, path, rank_pattern)
        first_of_end = min(head_rows, middle.start) if middle.stop else head_rows
        if log.end and any(row.line > first_of_end for row in _rows(failures)):
            log = _with_counted_lines(handle, log, head_bytes, limit_s)
        numbers = log.line_numbers()
        numbers[middle] = []
        failures = _with_numbers(failures, numbers)
    failures = replace(failures, path=path, size_bytes=size, mtime_s=status.st_mtime)
    return replace(failures, skipped=skipped, note=log.note)


def _rows(failures: FileFailures) -> tuple[Any, ...]:
    """What has the number of a line."""
    return (*failures.events, *failures.facts.variables)


def _with_counted_lines(handle: int, log: LogBytes, head_bytes: int, limit_s: float) -> LogBytes:
    """The log with the number of the lines before its end."""
    if log.lines_before is not None:
        return log
    count = count_lines(handle, 0, head_bytes + log.skipped, min(limit_s, _COUNT_S))
    if count is not None:
        return log._replace(lines_before=count)
    count = log.head.count(b"\n")
    note = f"the lines of its middle were not counted: numbers above {count} are too small"
    return log._replace(lines_before=count, note=note)


def _with_numbers(failures: FileFailures, numbers: Sequence[int]) -> FileFailures:
    """The failures with the numbers of lines in the file. numbers: of the lines that were read"""
    in_file, facts = [0, *numbers], failures.facts
    events = tuple(replace(event, line=in_file[event.line]) for event in failures.events)
    variables = tuple(replace(row, line=in_file[row.line]) for row in facts.variables)
    facts = replace(
        facts, variables=variables, finished=in_file[facts.finished],
        command_ended=in_file[facts.command_ended],
        program_finished=in_file[facts.program_finished],
    )  # fmt: skip
    prefix = in_file[failures.unknown_prefix]
    return replace(failures, events=events, facts=facts, unknown_prefix=prefix)


class FailureFileReader(TailReader):
    """One fork's work: sends what each file reports."""

    config: PostmortemConfig
    unpacks = True

    def open(self, hit: Any) -> Any:
        """The file, opened; None: it cannot be opened, or belongs to another user."""
        opened = super().open(hit)
        if opened is None or self.config.uid in (-1, os.fstat(opened[1]).st_uid):
            return opened
        os.close(opened[1])
        self.unread(hit.match.shown, "belongs to another user", fault=True)
        return None

    def read(self, hit: Any, handle: int) -> None:
        """Read one file, and send what it reports."""
        try:
            self.touch(hit.match.real)
            room = max(_LEAST_BYTES, _ALL_BYTES // max(1, self.file_count))
            reason = "its lines take too long"
            message = {"search": hit.match.shown, "owner": hit.owner, "reason": reason}
            limit_s = max(_LEAST_READ_S, _ALL_READ_S / max(1, self.file_count))
            failures = file_failures(
                handle, hit.match.shown, room, on_read=lambda: self.send(message),
                rank_pattern=self.config.rank_pattern, limit_s=limit_s,
            )  # fmt: skip
        except UnreadableLogError as problem:
            self.unread(hit.match.shown, str(problem), fault=False)
            return
        except OSError as error:
            self.report_error(hit.match.shown, error)
            return
        finally:
            os.close(handle)
        self.send({"failures": asdict(failures)})


class _FailureAnswer(TailAnswer):
    """Collects the forks' messages."""

    def __init__(self, config: TailConfig) -> None:
        super().__init__(config)
        self.failures: dict[str, FileFailures] = {}

    def add_message(self, message: dict[str, Any]) -> None:
        """Add a message of a fork."""
        if "failures" not in message:
            super().add_message(message)
            return
        failures = wire.decode(FileFailures, message["failures"])
        self.failures[failures.path] = failures
        # A further fork leaves it out.
        self.add_file(failures.path, ())


_NODE_PART = 4  # the logs leave 1/4 of the time limit for the node's ranks, cores and gate


def read_job(
    config: PostmortemConfig,
    supervisor: ProcessSupervisor,
    read_kernel_log: Callable[[], KernelLog],
) -> NodeFailures:
    """What this node has of the job, within config.limit_s."""
    started_s, last = time.time(), time.monotonic() + config.limit_s
    deadline = last - config.limit_s / _NODE_PART
    kernel_log = read_kernel_log()
    files: dict[str, FileFailures] = {}
    unread: dict[str, UnreadFile] = {}
    left_out = older = 0
    errors = []
    for number, pattern in enumerate(config.patterns):
        seconds_left = deadline - time.monotonic()
        share_s = max(2, int(seconds_left / (len(config.patterns) - number)))
        part = replace(config, pattern=pattern, limit_s=share_s)
        answer = _FailureAnswer(part)
        tail = read_tail(part, FailureFileReader, answer)
        files |= answer.failures
        unread |= {file.path: file for file in tail.unread}
        left_out, older = left_out + tail.left_out, older + tail.older
        errors += [tail.error] if tail.error else []
    variables = dict(config.variables)
    live = observe_environment(config.job, config.uid, variables, files.values(), last)
    cores = observe_cores(supervisor, config.job, config.uid, config.kernel_s or 1)
    node = JobNode(*live, cores, read_gate())
    chosen, error = fitting(files.values())
    return NodeFailures(
        *(os.uname().nodename, started_s, time.time(), chosen, tuple(unread.values())[:64]),
        *(left_out, older, kernel_log, node, error or next(iter(errors), "")),
    )


def fitting(files: Iterable[FileFailures]) -> tuple[tuple[FileFailures, ...], str]:
    """The files whose events fit into an answer, and why events are missing; ""."""
    room, chosen, error = _MAX_ANSWER, [], ""
    for failures in sorted(files, key=lambda failures: len(failures.events)):
        events = failures.events[:20]
        short = replace(failures, events=events, streams=(), reports=(), facts=LogFacts())
        for form in (failures, short):
            size = len(json.dumps(asdict(form)))
            if size <= room:
                chosen.append(form)
                room -= size
                break
            error = "too many failures: those of some logs are missing"
    return tuple(chosen), error


def main(config: PostmortemConfig) -> None:
    """Read what the job left, and print it as the line ``NONCE job "..."``."""
    supervisor = ProcessSupervisor(config.tag, config.limit_s)
    supervisor.end_on_signals()

    def read_kernel_log() -> KernelLog:
        if not config.kernel_s:
            return KernelLog("not asked for")
        return witness_log(supervisor, config.kernel_s, _KERNEL_S)

    with supervisor:
        failures = read_job(config, supervisor, read_kernel_log)
    print(wire.packed_line(config.nonce, "job", failures), flush=True)

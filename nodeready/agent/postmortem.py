"""The program on the node that reads what a dead job left: failures in its logs, the kernel's log.

Of a log, the beginning and the end are read, and only events come back, not its lines. The files
are found and read as `nodeready.agent.tail` finds and reads them: in forks, as their owners.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from nodeready.agent.failure_events import (
    FailureEvent,
    FileFailures,
    LogStream,
    read_error_file,
    read_lines,
)
from nodeready.agent.job_node import JobNode, observe_cores, observe_environment, read_gate
from nodeready.agent.log_lines import text_lines
from nodeready.agent.log_times import Calendar, node_calendar
from nodeready.agent.log_variables import LogFacts
from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.tail import TailAnswer, TailConfig, TailReader, UnreadFile, read_tail
from nodeready.agent.witnesses.flight_recorder import (
    MAX_BYTES,
    NoDumpError,
    ProcessGroup,
    RecorderEntry,
    Recording,
    parse,
)
from nodeready.agent.witnesses.kernel_log import KernelLog, witness_log
from nodeready.agent.witnesses.logs import WatchdogReport
from nodeready.core import wire

#: Maximum bytes at the beginning and at the end of a file that are read.
HEAD_BYTES, END_BYTES = 256 << 10, (4 << 20) - (256 << 10)
#: Bytes of all files of a pattern, in equal shares, and the least share.
_ALL_BYTES, _LEAST_BYTES = 64 << 20, 256 << 10
#: Maximum lines of a file; of more, those in its middle are left out.
MAX_ROWS = 100_000
#: Maximum bytes of an answer before it is compressed.
_MAX_ANSWER = 3 << 20
#: Seconds for the kernel's log.
_KERNEL_S = 8.0


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
) -> FileFailures | None:
    """What an open file reports, from its beginning and its end; None: it is no text.

    room:    maximum bytes
    on_read: called when the file was read, and before its lines are parsed
    rank_pattern: as of a `TailConfig`
    Raises OSError.
    """
    status = os.fstat(handle)
    size = status.st_size
    if "trace_rank_" in os.path.basename(path):
        with contextlib.suppress(NoDumpError):
            dump = parse(os.pread(handle, min(size, MAX_BYTES), 0))
            return FileFailures(path, size, status.st_mtime, recording=replace(dump, path=path))
    head_bytes = min(HEAD_BYTES, room // 4)
    end_bytes = min(END_BYTES, room - head_bytes)
    is_whole = size <= head_bytes + end_bytes
    head = _without_nuls(os.pread(handle, size if is_whole else head_bytes, 0))
    rows = text_lines(head if is_whole else head[: head.rfind(b"\n") + 1], is_whole=True)
    end = (
        []
        if is_whole
        else text_lines(
            _without_nuls(os.pread(handle, end_bytes, size - end_bytes)), is_whole=False
        )
    )
    if rows is None or end is None:
        return None
    on_read()
    rows += end
    skipped = 0 if is_whole else size - head_bytes - end_bytes
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
    if is_whole and size <= HEAD_BYTES and lines and lines[0].startswith("{"):
        failures = read_error_file("\n".join(lines), calendar)
    if failures is None:
        failures = read_lines(lines, year, calendar, path, rank_pattern)
    return replace(
        failures,
        path=path,
        size_bytes=size,
        mtime_s=status.st_mtime,
        skipped=skipped,
    )


def _without_nuls(data: bytes) -> bytes:
    """The data without the few NUL bytes that a crash may leave in a text."""
    return data.replace(b"\0", b"") if 10 * data.count(b"\0") < len(data) else data


class FailureFileReader(TailReader):
    """One fork's work: sends what each file reports."""

    config: PostmortemConfig

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
            failures = file_failures(
                *(handle, hit.match.shown, room),
                on_read=lambda: self.send(message),
                rank_pattern=self.config.rank_pattern,
            )
        except OSError as error:
            self.report_error(hit.match.shown, error)
            return
        finally:
            os.close(handle)
        if failures is None:
            self.unread(hit.match.shown, "is no text", fault=False)
            return
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
        row = message["failures"]
        dump = row["recording"]
        failures = FileFailures(
            **{
                **row,
                "events": tuple(FailureEvent(**event) for event in row["events"]),
                "streams": tuple(LogStream(**stream) for stream in row["streams"]),
                "reports": tuple(WatchdogReport(**report) for report in row["reports"]),
                "facts": wire.decode(LogFacts, row["facts"]),
                "recording": dump and _recording(dump),
            }
        )
        self.failures[failures.path] = failures
        # A further fork leaves it out.
        self.add_file(failures.path, ())


def _recording(row: dict[str, Any]) -> Recording:
    groups = tuple(ProcessGroup(**group) for group in row["groups"])
    entries = tuple(RecorderEntry(**entry) for entry in row["entries"])
    return Recording(**{**row, "groups": groups, "entries": entries})


#: The part of the time that is left for the node itself.
_NODE_PART = 4


def read_job(
    config: PostmortemConfig, supervisor: ProcessSupervisor, kernel: Callable[[], KernelLog]
) -> NodeFailures:
    """What this node has of the job, within config.limit_s."""
    started_s, last = time.time(), time.monotonic() + config.limit_s
    deadline = last - config.limit_s / _NODE_PART
    messages = kernel()
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
    live = observe_environment(
        config.job, config.uid, dict(config.variables), files.values(), last
    )
    cores = observe_cores(supervisor, config.job, config.uid, config.kernel_s or 1)
    node = JobNode(*live, cores, read_gate())
    chosen, error = fitting(files.values())
    return NodeFailures(
        *(os.uname().nodename, started_s, time.time(), chosen, tuple(unread.values())[:64]),
        *(left_out, older, messages, node, error or next(iter(errors), "")),
    )


def fitting(files: Iterable[FileFailures]) -> tuple[tuple[FileFailures, ...], str]:
    """The files whose events fit into an answer, and why events are missing; ""."""
    room, chosen, error = _MAX_ANSWER, [], ""
    for failures in sorted(files, key=lambda failures: len(failures.events)):
        short = replace(
            failures, events=failures.events[:20], streams=(), reports=(), facts=LogFacts()
        )
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
    with supervisor:

        def kernel() -> KernelLog:
            if not config.kernel_s:
                return KernelLog("not asked for")
            return witness_log(supervisor, config.kernel_s, _KERNEL_S)

        failures = read_job(config, supervisor, kernel)
    print(wire.packed_line(config.nonce, "job", failures), flush=True)

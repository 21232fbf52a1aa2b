"""The log that a rank writes: its last lines, and the lines of PyTorch's watchdog as data.

The file is found by the process's descriptors: /proc/PID/fd/1 and 2 lead to the file that is
written, also in a container, and also after it was renamed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from nodeready.agent import users_file
from nodeready.agent.log_lines import learn_file, read_ranks, text_lines
from nodeready.agent.log_ranks import GLOBAL_RANK, LineOrigin, RankReader, host_node
from nodeready.agent.proc import all_pids
from nodeready.agent.stacks import processes
from nodeready.agent.users_file import READ_FLAGS, opened_path, rights_of, with_rights
from nodeready.agent.witnesses import nccl_log
from nodeready.agent.witnesses.nccl_log import NcclRank, last_collective, read_log

#: Maximum lines shown of a log, and characters of each.
MAX_LINES, MAX_CHARACTERS = 5, 200
#: Bytes at the end of a log that are read.
TAIL_BYTES = 64 * 1024
#: Bytes at the end of a mixed log in which the lines of one rank are searched.
_MIXED_BYTES = 1 << 20
#: Maximum reports of one log.
MAX_REPORTS = 64
#: The kinds of a report; see `WatchdogReport`.
KINDS = ("timeout", "status", "missing", "reached", "lost", "mismatch", "stuck")


@dataclass(frozen=True)
class WatchdogReport:
    """One line of the watchdog of ProcessGroupNCCL (or of gloo's errors), as data."""

    rank: int | None  # the global rank that the line is about; None: the line does not tell
    group: str  # description of the process group (``default_pg``); "": unknown
    # ``timeout``: a collective took too long; ``status``: the group's progress; ``missing``: other
    # ranks report that this rank has not come; ``reached``: this rank has come, and others have
    # not; ``lost``: its connection to another rank broke; ``mismatch``: it called another
    # collective than its peers; ``stuck``: its watchdog hangs
    kind: str
    sequence: int | None  # number of the collective that timed out; None: unknown
    operation: str  # ``ALLREDUCE``; "": unknown
    enqueued: int | None  # number of the last enqueued collective; 0: none yet; None: unknown
    completed: int | None  # number of the last completed collective; 0: none yet; None: unknown


@dataclass(frozen=True)
class RankLog:
    """The log of a process: its standard output and error."""

    absent: str = ""  # why there is no log, one line; "": there is a log
    path: str = ""  # the file that is written
    age_s: int = 0  # whole seconds since it was last written
    # its last lines, the oldest first, at most `MAX_LINES`; of a log of many ranks, its own lines
    # without the prefixes; escapes are not removed
    lines: tuple[str, ...] = ()
    # of the watchdog, in its last `TAIL_BYTES` bytes, at most `MAX_REPORTS`
    reports: tuple[WatchdogReport, ...] = ()
    # what NCCL says about the process at the beginning and the end of its log, and in its
    # NCCL_DEBUG_FILE; None: nothing
    nccl: NcclRank | None = None
    is_own: bool = False  # many ranks write the file, and the lines are this rank's


# --- The watchdog's lines as data. Pure; also for logs that were collected after a job's end.

#: Characters of a line that are searched: a mismatch names two collectives in full.
_LONGEST = 4096
#: A number of a rank or of a collective; -1 stands for "none yet".
_RANK, _COUNT = r"\d{1,7}", r"-?\d{1,18}"
_MANY = rf"{_RANK}(?:, {_RANK}){{0,1000}}"
# ProcessGroupNCCL::logPrefix, with the rank in the group:
#   2.5 on     [PG ID 0 PG GUID 0(default_pg) Rank 1]
#   2.7 on     [PG GUID 0(default_pg) Rank 1]
#   2.4        [PG 0 (default_pg) Rank 1]
#   2.2, 2.3   [PG 0 Rank 1]
#   before     [Rank 1]
_GROUP = re.compile(
    r"\[(?:PG (?:ID \d{1,9} PG )?(?:GUID )?([^\]()\[ ]{1,60}) ?(?:\(([^)\]]{0,80})\))? )?"
    rf"Rank ({_RANK})\]"
)
# nccl2 (torch 2.15, c10d/nccl2/Logging.hpp): [TC][rank=1][name=default_pg]
_NCCL2 = re.compile(rf"\[TC\]\[rank=({_RANK})\](?:\[name=([^\]]{{0,80}})\])?")
_DEFAULT = "default_pg"

_CAUGHT = re.compile(r"Watchdog caught collective operation timeout:")
_NUMBER = re.compile(rf"\bSeqNum=({_COUNT})")
_OPERATION = re.compile(r"\bOpType=(\w{1,60})")
_STATUS = re.compile(
    rf"(?i)last enqueued (?:[a-z]+ )?work: ({_COUNT})"
    rf"(?:, last started (?:[a-z]+ )?work: {_COUNT})?"
    rf"(?:, last completed (?:[a-z]+ )?work: ({_COUNT}))?"
)
# "detected by watchdog at work: 7", "... at work sequence id: 7", "Timeout at NCCL work: 7"
_AT_WORK = re.compile(rf"\bat (?:NCCL )?work(?: sequence id)?: ({_COUNT})")
_FAILED = re.compile(rf"(?:\[Rank ({_RANK})\]: )?Ranks? ({_MANY}) failed to pass monitoredBarrier")
_MISMATCH = re.compile(
    rf"Rank ({_RANK}) is running (?:inconsistent )?collective: "
    rf"CollectiveFingerPrint\((?:SequenceNumber=(\d{{1,18}}))?(?:, )?OpType=(\w{{1,60}})"
)
# c10d's desync report (TORCH_NCCL_DESYNC_DEBUG, TraceUtils.h)
_RANKS = rf"\[({_MANY})\]"
_NOT_JOINED = re.compile(
    rf"{_RANKS} finished collective #(\d{{1,18}}), but didn't join collective #(\d{{1,18}})"
)
_UNFINISHED = re.compile(rf"{_RANKS} joined but didn't finish collective #(\d{{1,18}})")
_NEVER = re.compile(rf"ranks {_RANKS} are the lagging ranks that caused this timeout")
#: Lines that a single expression reads (groups: the rank in the group, the operation); the kind
#: and the operation of their reports.
_LINES = tuple((re.compile(pattern), kind, operation) for kind, operation, pattern in (
    ("stuck", "", r"watchdog got stuck for \d+ seconds|Heartbeat monitor timed out|"
     r"watchdog hang detected|due to .{0,40}ProcessGroupNCCL watchdog hang"),
    ("reached", "monitoredBarrier",
     rf"Rank (?P<rank>{_RANK}) successfully reached monitoredBarrier"),
    ("timeout", "monitoredBarrier", rf"Rank (?P<rank>{_RANK}) timed out in monitoredBarrier"),
    ("timeout", "",
     r"Timed out waiting \d+ms for (?P<operation>send|recv) operation to complete"),
    # gloo's pair.cc, NCCL's socket.cc; in any other line, the words are about any connection.
    ("lost", "",
     r"\.cc:\d+\] (?:Connection closed by peer|(?:Read|Write|Writev|Send)\b.{0,120}: "
     r"(?:Connection reset by peer|Broken pipe))"
     r"|NCCL WARN .{0,200}(?:Connection closed by remote peer|Connection reset by peer)"),
    # Rank 0, which holds the store, has ended (socket.cpp, ProcessGroupNCCL.cpp).
    ("lost", "store", r"(?:recvValue|sendBytes|recvBytes) failed on Socket|flag on TCPStore, \("),
    ("timeout", "store", r"wait timeout after \d+ ?ms, keys: "
     r"|Timed out after \d+ seconds waiting for clients\."),
))  # fmt: skip
#: Each useful line contains one of these words; a search for words is fast.
_NEEDLES = re.compile(
    r"(?i)watchdog|enqueued |monitoredBarrier|Timed out |Connection (?:closed|reset) by |"
    r"Broken pipe|failed on Socket|flag on TCPStore|wait timeout after|is running |collective #|"
    r"lagging ranks|heartbeat monitor|at NCCL work"
)


def reports(lines: Iterable[str], maximum: int = MAX_REPORTS) -> tuple[WatchdogReport, ...]:
    """The reports of PyTorch's watchdogs in these lines of a log, each once, in order.

    The ranks are global. ``[rank3]:`` before a line is a global rank. ``[Rank 3]`` in a line is
    the rank in a process group, which equals the global rank only in the default group. So it is
    used there, and if an old version names no group and the lines do not contradict each other.

    Sources: ProcessGroupNCCL.cpp, ProcessGroupGloo.cpp, ProcessGroupWrapper.cpp, TraceUtils.h and
    TCPStore.cpp of PyTorch 1.13 to 2.15, gloo's unbound_buffer.cc.
    """
    statements: dict[_LogStatement, None] = {}
    for line in lines:
        text = line[:_LONGEST]
        if _NEEDLES.search(text):
            for statement in _statements(text):
                statements.setdefault(statement)
        if len(statements) >= 4 * maximum:
            break
    return tuple(dict.fromkeys(_merged_reports(list(statements))))[:maximum]


def with_writer(report: WatchdogReport, rank: int | None) -> WatchdogReport:
    """The report, with the rank that wrote it if it is about that rank."""
    is_about_writer = report.kind not in ("missing", "mismatch")
    return replace(report, rank=rank) if report.rank is None and is_about_writer else report


@dataclass(frozen=True)
class _LogStatement:
    """A report, and the source of its rank."""

    report: WatchdogReport
    group_rank: int | None  # the rank in its process group
    is_global: bool  # the report's rank is global


def _statements(text: str) -> Iterator[_LogStatement]:
    """The statements in one line."""
    if match := _CAUGHT.search(text):
        number, operation = _NUMBER.search(text, match.end()), _OPERATION.search(text, match.end())
        yield _by_prefix(
            text[: match.start()],
            "timeout",
            sequence=_count(number[1]) if number else None,
            operation=operation[1] if operation else "",
        )
    elif match := _STATUS.search(text):
        timed_out = _AT_WORK.search(text, 0, match.start())
        yield _by_prefix(
            text[: match.start()],
            "timeout" if timed_out else "status",
            sequence=_count(timed_out[1]) if timed_out else None,
            enqueued=_count(match[1]),
            completed=_count(match[2]),
        )
    elif match := _FAILED.search(text):
        # Rank 0 of the group reports it.
        is_global = _numbers_are_global(text, int(match[1] or 0))
        for rank in _numbers(match[2]):
            global_rank = rank if is_global else None
            report = _report(global_rank, "missing", operation="monitoredBarrier")
            yield _LogStatement(report, rank, is_global)
    else:
        for pattern, kind, default in _LINES:
            if match := pattern.search(text):
                groups: dict[str, str] = {"operation": default, **match.groupdict()}
                group_rank = int(groups.pop("rank")) if "rank" in groups else None
                yield _by_prefix(text[: match.start()], kind, group_rank=group_rank, **groups)
                return
        yield from _mismatches(text)


def _mismatches(text: str) -> Iterator[_LogStatement]:
    """A mismatch of collectives, or the desync report, with ranks in the group."""
    running = list(_MISMATCH.finditer(text))[:2]
    is_global = bool(running) and _numbers_are_global(text, int(running[0][1]))
    for match in running:
        rank, sequence = int(match[1]), _count(match[2])
        global_rank = rank if is_global else None
        report = _report(global_rank, "mismatch", sequence=sequence, operation=match[3])
        yield _LogStatement(report, rank, is_global)
    for match in _NOT_JOINED.finditer(text):
        for rank in _numbers(match[1]):
            report = _report(rank, "missing", sequence=int(match[3]), completed=int(match[2]))
            yield _LogStatement(report, rank, False)
    for match in _UNFINISHED.finditer(text):
        for rank in _numbers(match[1]):
            last = int(match[2])
            report = _report(rank, "status", enqueued=last, completed=max(0, last - 1))
            yield _LogStatement(report, rank, False)
    if never := _NEVER.search(text):
        for rank in _numbers(never[1]):
            yield _LogStatement(_report(rank, "missing", enqueued=0, completed=0), rank, False)


def _numbers_are_global(text: str, reporter: int) -> bool:
    """Whether the ranks in a line are global: its prefix has no other rank for the reporter."""
    global_rank = GLOBAL_RANK.search(text)
    return global_rank is None or int(global_rank[1]) == reporter


def _report(
    rank: int | None,
    kind: str,
    *,
    sequence: int | None = None,
    operation: str = "",
    enqueued: int | None = None,
    completed: int | None = None,
) -> WatchdogReport:
    return WatchdogReport(rank, "", kind, sequence, operation, enqueued, completed)


def _by_prefix(
    before: str, kind: str, *, group_rank: int | None = None, **values: Any
) -> _LogStatement:
    """A report of the rank and the group that the line's prefix names.
    values: see `_report`
    """
    global_rank, group = GLOBAL_RANK.search(before), ""
    if match := _GROUP.search(before):
        name, description = match[1] or "", match[2] or ""
        group_rank = int(match[3])
        group = description if description not in ("", "undefined") else name
    elif match := _NCCL2.search(before):
        group_rank, group = int(match[1]), match[2] or ""
    # The default group is number 0.
    group = _DEFAULT if group == "0" else group
    is_global = global_rank is not None or group == _DEFAULT
    rank = int(global_rank[1]) if global_rank else group_rank if is_global or not group else None
    report = replace(_report(rank, kind, **values), group=group)
    return _LogStatement(report, group_rank, is_global)


def _merged_reports(statements: Sequence[_LogStatement]) -> Iterator[WatchdogReport]:
    """The reports; two lines about one timeout become one report with the data of both."""
    timeouts = [statement for statement in statements if statement.report.kind == "timeout"]
    sequences: dict[tuple[int | None, str], set[int]] = {}
    for statement in timeouts:
        if not statement.is_global and statement.report.sequence is not None:
            member = statement.group_rank, statement.report.group
            sequences.setdefault(member, set()).add(statement.report.sequence)
    later = {
        (statement.report.rank, statement.group_rank, statement.report.sequence): statement.report
        for statement in timeouts
        if statement.report.enqueued is not None
    }
    merged = set()
    for statement in statements:
        report = statement.report
        if report.kind == "timeout" and report.sequence is not None:
            key = (report.rank, statement.group_rank, report.sequence)
            status = later.get(key)
            if status is None and not statement.is_global:
                # The first line has no group. Its rank is the rank of the second line.
                same = [other for k, other in later.items() if k[1:] == key[1:]]
                status = same[0] if len(same) == 1 else None
            if status is not None and report.enqueued is None:
                merged.add(status)
                report = replace(status, operation=report.operation or status.operation)
            elif report in merged:
                continue
        # A rank waits for one collective of a group at a time: these are several groups.
        is_ambiguous = len(sequences.get((statement.group_rank, report.group), ())) > 1
        if is_ambiguous and not statement.is_global:
            report = replace(report, rank=None)
        yield report


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word.strip()][:MAX_REPORTS]


def _count(text: str | None) -> int | None:
    """The number of a collective; 0: none yet."""
    return None if text is None else max(0, int(text))


# --- The file behind a descriptor.

#: Maximum processes searched for the reader of a pipe, and seconds for the search.
_MAX_PROCESSES, _SEARCH_S = 4096, 0.3
#: Maximum descriptors read of a process.
_MAX_DESCRIPTORS = 1024
#: Maximum filters between a process and the writer of the file.
_MAX_STEPS = 3
#: Maximum ancestors read of a process.
_MAX_ANCESTORS = 32
#: File systems in memory, which hold no logs.
_MEMORY = ("/dev/shm/", "/memfd:", "/run/shm/")


class NoLogError(Exception):
    """Why there is no log to read, one line."""


@dataclass(frozen=True)
class _LogFile:
    """An open log."""

    path: str
    number: int  # its descriptor, which the caller closes
    file_stat: os.stat_result

    @property
    def inode(self) -> tuple[int, int]:
        return _inode(self.file_stat)


def _inode(file_stat: os.stat_result) -> tuple[int, int]:
    """A file on this node: its device and inode."""
    return file_stat.st_dev, file_stat.st_ino


def observe(pid: int, uid: int, rank: int | None = None, local_rank: int | None = None) -> RankLog:
    """The log of this process, read with its user's rights.

    It runs in a fork (`processes.probe_each`), because the file system may never answer.

    uid: of the user who started the process
    rank, local_rank: of the process, by which its lines are found in a log of many ranks
    """
    try:
        with open_logs(pid, uid) as files:
            parts: dict[_LogFile, _LogParts] = {}
            for file in files:
                with contextlib.suppress(OSError):
                    parts[file] = _read_parts(file.number)
            log = _log(parts, rank, local_rank)
            return replace(log, nccl=_nccl(pid, uid, rank, [*parts.values()]))
    except NoLogError as problem:
        return RankLog(absent=str(problem), nccl=_nccl(pid, uid, rank, ()))


@contextlib.contextmanager
def open_logs(pid: int, uid: int) -> Iterator[list[_LogFile]]:
    """The files of a process's standard output and error, opened with its user's rights. Raises
    NoLogError if there are no such files.
    """
    open_files: list[_LogFile] = []
    reasons: dict[str, None] = {}
    try:
        for descriptor in (1, 2):
            try:
                open_files += _files(pid, uid, descriptor)
            except NoLogError as problem:
                reasons.setdefault(str(problem))
        if not open_files:
            raise NoLogError("; ".join(reasons))
        yield list({file.inode: file for file in open_files}.values())
    finally:
        for file in open_files:
            os.close(file.number)


class _LogParts(NamedTuple):
    """The first NCCL_BYTES and the last TAIL_BYTES of a log, and its size."""

    head: bytes
    tail: bytes
    size: int


def _read_parts(number: int) -> _LogParts:
    """The parts of an open log, each read once. Raises OSError."""
    head = os.pread(number, NCCL_BYTES, 0)
    size = max(os.fstat(number).st_size, len(head))
    if size <= NCCL_BYTES:
        return _LogParts(head, head[-TAIL_BYTES:], size)
    return _LogParts(head, os.pread(number, TAIL_BYTES, size - TAIL_BYTES), size)


def _log(parts: Mapping[_LogFile, _LogParts], rank: int | None, local_rank: int | None) -> RankLog:
    """The lines of the file that was written last, and the reports of all files."""
    ends: dict[_LogFile, _LogEnd | None] = {}
    for file in parts:
        with contextlib.suppress(OSError):
            ends[file] = _log_end(file, parts[file])
    if not ends:
        return RankLog(absent="its log cannot be read")
    last = last_written(list(ends))
    end = ends[last]
    if end is None:
        return RankLog(absent=f"what it writes is no text: {last.path[:MAX_CHARACTERS]}")
    age = max(0, min(int(time.time() - last.file_stat.st_mtime), 1 << 31))
    watchdog_reports = dict.fromkeys(
        report for other in ends.values() if other for report in other.reports()
    )
    rank_lines: list[str] = []
    with contextlib.suppress(OSError):
        rank_lines = _own_lines(last, end.reader, rank, local_rank)
    shown = tuple(line[:MAX_CHARACTERS] for line in (rank_lines or end.lines)[-MAX_LINES:])
    all_reports = tuple(watchdog_reports)[:MAX_REPORTS]
    return RankLog("", last.path, age, shown, all_reports, is_own=bool(rank_lines))


@dataclass(frozen=True)
class _LogEnd:
    """The last lines of a log, and the reader of their ranks."""

    lines: list[str]
    reader: RankReader

    def reports(self) -> tuple[WatchdogReport, ...]:
        """The reports of the watchdogs; in a log of many ranks, those of each rank."""
        if not self.reader.is_mixed:
            return reports(self.lines)
        lines_by_rank: dict[int | None, list[str]] = {}
        for line in self.lines:
            lines_by_rank.setdefault(self.reader.split(line).rank, []).append(line)
        return tuple(
            with_writer(report, rank)
            for rank, lines in lines_by_rank.items()
            for report in reports(lines)
        )


def _own_lines(
    file: _LogFile, reader: RankReader, rank: int | None, local_rank: int | None
) -> list[str]:
    """The last lines of one rank in a log of many ranks; []: there are none."""
    node = os.uname().nodename.partition(".")[0]

    def is_own(origin: LineOrigin) -> bool:
        if origin.rank is not None:
            return origin.rank == rank
        is_here = host_node(origin.host).partition(".")[0] in ("", node)
        return is_here and origin.local_rank is not None and origin.local_rank == local_rank

    if not reader.is_mixed:
        return []
    size = os.fstat(file.number).st_size
    ranks = read_ranks(
        file.number, size, reader, MAX_LINES, is_wanted=is_own, max_bytes=_MIXED_BYTES
    )
    return ranks[0].lines if ranks else []


# --- What NCCL says: its choices stand at the beginning of a log, its errors at the end.

#: Bytes that are read at the beginning of a log for them.
NCCL_BYTES = 256 * 1024


def _nccl(pid: int, uid: int, rank: int | None, logs: Sequence[_LogParts]) -> NcclRank | None:
    """What NCCL and its Inspector say about this process; None: nothing."""
    nccl = _nccl_rank(pid, uid, rank, logs)
    completed = last_collective(_inspector_lines(pid, uid))
    return replace(nccl or NcclRank(rank), completed=completed) if completed else nccl


def _inspector_lines(pid: int, uid: int) -> Iterator[str]:
    """The lines at the end of the files into which the NCCL Inspector of a process writes."""
    for number in other_descriptors(pid):
        link = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError, NoLogError):
            shown = os.readlink(link)
            if not nccl_log.INSPECTOR_FILES.search(shown):
                continue
            data, start = written_part(link, shown, uid, TAIL_BYTES)
            rows = data.split(b"\n")[1 if start else 0 :]
            yield from (row[:_LONGEST].decode("utf-8", "replace") for row in rows)


def _nccl_rank(pid: int, uid: int, rank: int | None, logs: Sequence[_LogParts]) -> NcclRank | None:
    """What NCCL says about this process; None: nothing."""
    with contextlib.suppress(OSError), _nccl_file(pid, uid) as number:
        logs = [*logs, _read_parts(number)]
    log = read_log(line for parts in logs for line in _nccl_lines(parts))
    pids = all_pids(pid)
    candidates = [nccl for nccl in log.ranks if nccl.pid in pids]
    # Logs of several nodes in one file: another node may have the same pid.
    node = os.uname().nodename.partition(".")[0]
    local = [nccl for nccl in candidates if nccl.host.partition(".")[0] == node]
    candidates = local or candidates
    candidates = [nccl for nccl in candidates if nccl.rank == rank] or candidates
    if len({(nccl.host, nccl.pid) for nccl in log.ranks}) > 1 or (log.ranks and not candidates):
        return candidates[0] if candidates else None
    # The log of one process: errors of PyTorch and gloo name no process.
    if not candidates and not log.errors:
        return None
    first = candidates[0] if candidates else NcclRank(rank)
    return replace(first, errors=(*first.errors, *log.errors)[: nccl_log.MAX_ERRORS])


def _nccl_lines(parts: _LogParts) -> Iterator[str]:
    """The lines of NCCL, gloo and errors at the beginning and the end of a log."""
    data = parts.head
    if parts.size > NCCL_BYTES:
        data += b"\n" + parts.tail[max(0, NCCL_BYTES + TAIL_BYTES - parts.size) :]
    for row in data.split(b"\n"):
        yield row[:_LONGEST].decode("utf-8", "replace")


@contextlib.contextmanager
def _nccl_file(pid: int, uid: int) -> Iterator[int]:
    """The file of the process's NCCL_DEBUG_FILE, opened with its user's rights. Raises OSError."""
    path = (processes.environment_of(pid) or {}).get("NCCL_DEBUG_FILE", "")
    if not path:
        raise FileNotFoundError
    values = {"%h": os.uname().nodename, "%p": str(all_pids(pid)[-1]), "%%": "%"}
    path = re.sub("%[hp%]", lambda match: values[match[0]], path)
    with opened_path(pid, uid, path) as (number, _):
        yield number


def last_written(files: Sequence[_LogFile]) -> _LogFile:
    """The file that was written last; a file with text comes before an empty file."""
    return max(files, key=lambda file: (file.file_stat.st_size > 0, file.file_stat.st_mtime_ns))


def _log_end(log_file: _LogFile, parts: _LogParts) -> _LogEnd | None:
    """The end of a log; None: it is no text."""
    rows = text_lines(parts.tail, is_whole=parts.size <= TAIL_BYTES)
    if rows is None:
        return None
    reader = learn_file(log_file.number, parts.size, rows, path=log_file.path)
    lines = [row[: 4 * _LONGEST].decode("utf-8", "replace").rstrip() for row in rows]
    return _LogEnd(lines, reader)


def _files(pid: int, uid: int, descriptor: int) -> list[_LogFile]:
    """The regular files that are written through this descriptor. Raises NoLogError."""
    link = f"/proc/{pid}/fd/{descriptor}"
    try:
        shown = os.readlink(link)
        file_stat = os.stat(link)
    except FileNotFoundError:
        has_ended = not os.path.exists(f"/proc/{pid}")
        raise NoLogError("it has ended" if has_ended else "it has closed its output") from None
    except ProcessLookupError:
        raise NoLogError("it has ended") from None
    except OSError as problem:
        raise NoLogError(f"its output cannot be looked at: {_reason(problem)}") from None
    mode = file_stat.st_mode
    if stat.S_ISFIFO(mode):
        return _open_behind_pipe(pid, uid, shown, _inode(file_stat), error=descriptor == 2)
    if stat.S_ISREG(mode):
        return [open_written(link, shown, uid)]
    raise NoLogError(_destination(shown, mode))


def _destination(shown: str, mode: int) -> str:
    """The destination of output that goes to no file, as a sentence."""
    if stat.S_ISSOCK(mode):
        return "its output goes to a socket: to systemd's journal, or over the network"
    if shown == os.devnull:
        return f"its output goes to {os.devnull}"
    if stat.S_ISCHR(mode) and shown.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
        return f"its output goes to a terminal ({shown})"
    return f"its output goes to {users_file.special_kind(mode)}"


def open_written(link: str, shown: str, uid: int) -> _LogFile:
    """The regular file of a descriptor, opened with its user's rights. Raises NoLogError.
    link: the descriptor's path in /proc/PID/fd
    """
    try:
        # O_PATH opens nothing: it neither releases a FIFO's writer nor touches a device.
        held = os.open(link, os.O_PATH | os.O_CLOEXEC)
        try:
            file_stat = os.fstat(held)
            if not stat.S_ISREG(file_stat.st_mode):
                raise NoLogError(
                    f"its output goes to {users_file.special_kind(file_stat.st_mode)}"
                )
            if not file_stat.st_nlink:
                raise NoLogError(f"the file that it writes was deleted: {shown}")
            # A process of root's may write a user's file.
            with with_rights(rights_of(uid or file_stat.st_uid)):
                number = os.open(f"/proc/self/fd/{held}", READ_FLAGS)
            return _LogFile(shown, number, file_stat)
        finally:
            os.close(held)
    except OSError as problem:
        raise NoLogError(f"{shown}: {_reason(problem)}") from None


def written_part(
    link: str, shown: str, uid: int, max_bytes: int, *, from_end: bool = True
) -> tuple[bytes, int]:
    """The end or the beginning of the file of a descriptor, and where in the file it begins.
    link, shown, uid: as of `open_written`. Raises NoLogError, OSError.
    """
    file = open_written(link, shown, uid)
    try:
        size = file.file_stat.st_size
        start = max(0, size - max_bytes) if from_end else 0
        return os.pread(file.number, max_bytes, start), start
    finally:
        os.close(file.number)


def _open_behind_pipe(
    pid: int, uid: int, shown: str, pipe: tuple[int, int], *, error: bool, steps: int = _MAX_STEPS
) -> list[_LogFile]:
    """The files that a pipe's reader writes. Raises NoLogError.
    error: it is standard error; steps: filters that are followed (``train | ts | tee log``)
    """
    search = _find_readers(pid, uid)
    readers = [reader for reader in search.readers.get(pipe, ()) if reader.pid != pid]
    if not readers:
        if _below_slurmstepd(pid):
            return _open_srun_log(pid, uid, search.sruns, error=error)
        reason = "that no process of its user reads"
        if not search.is_complete:
            reason = f"whose reader {_SEARCH_S} s did not find"
        raise NoLogError(f"its output goes into a pipe {reason} ({shown})")
    for reader in readers:
        if log_files := open_written_log(reader.pid, uid, _output_descriptors(reader, error)):
            return log_files
    for reader in readers if steps else ():
        # A filter that writes no file may write into another pipe.
        with contextlib.suppress(OSError, NoLogError):
            link = f"/proc/{reader.pid}/fd/1"
            target, file_stat = os.readlink(link), os.stat(link)
            if stat.S_ISFIFO(file_stat.st_mode):
                return _open_behind_pipe(
                    reader.pid, uid, target, _inode(file_stat), error=error, steps=steps - 1
                )
    reader_name = f"{_name(readers[0].pid)} ({readers[0].pid})"
    raise NoLogError(f"its output goes through a pipe to {reader_name}, which writes no file")


def _output_descriptors(reader: _PipeReader, error: bool) -> list[list[int]]:
    """The descriptors to which a filter or launcher may write a pipe's data, likeliest first. A
    filter such as tee writes to its output, or to files. A launcher such as mpirun writes output
    to its own output, and errors to its own errors.
    """
    further = other_descriptors(reader.pid)
    if reader.number == 0:
        return [[1], further, [2]]
    return [[2], [1], further] if error else [[1], [2], further]


def open_written_log(
    pid: int, uid: int, turns: Iterable[Sequence[int]], count: int = 1
) -> list[_LogFile]:
    """The files, at most `count`, that a process writes through the first of these descriptors.
    They may be common logs of many ranks. The most recently written file comes first.
    """
    for numbers in turns:
        written_files: list[_LogFile] = []
        for number in numbers:
            link = f"/proc/{pid}/fd/{number}"
            with contextlib.suppress(OSError, NoLogError):
                shown = os.readlink(link)
                if not shown.startswith("/") or shown.startswith(_MEMORY):
                    continue
                if _access(pid, number) != os.O_RDONLY and stat.S_ISREG(os.stat(link).st_mode):
                    written_files.append(open_written(link, shown, uid))
        if written_files:
            written_files.sort(key=lambda file: -file.file_stat.st_mtime_ns)
            for file in written_files[count:]:
                os.close(file.number)
            return written_files[:count]
    return []


def _open_srun_log(pid: int, uid: int, sruns: Iterable[int], *, error: bool) -> list[_LogFile]:
    """The file into which srun writes the output that slurmstepd sends it. Raises NoLogError. If a
    batch script started the step, srun runs on the job's first node.
    sruns: this user's processes of srun; each srun has two, which write the same file
    """
    job = _slurm_job(pid)
    files_by_inode: dict[tuple[int, int], _LogFile] = {}
    for srun in sruns:
        if not job or _slurm_job(srun) != job:
            continue
        # srun has the file of --output open in addition to its own output.
        files = open_written_log(srun, uid, [other_descriptors(srun)])
        if not files:
            with contextlib.suppress(NoLogError):
                files = _files(srun, uid, 2 if error else 1)
        for file in files:
            if files_by_inode.setdefault(file.inode, file) is not file:
                os.close(file.number)
    if len(files_by_inode) == 1:
        return list(files_by_inode.values())
    for file in files_by_inode.values():
        os.close(file.number)
    if files_by_inode:
        count = len(files_by_inode)
        raise NoLogError(f"srun takes its output, and its job has {count} sruns here")
    raise NoLogError("srun takes its output to another node: look at srun's --output")


def _slurm_job(pid: int) -> str:
    """The number of the Slurm job in which a process was started; "": in none."""
    return (processes.environment_of(pid) or {}).get("SLURM_JOB_ID", "")


def _below_slurmstepd(pid: int) -> bool:
    """Whether a slurmstepd is among the ancestors of a process."""
    for _ in range(_MAX_ANCESTORS):
        pid = _parent(pid)
        if pid <= 1:
            return False
        if _name(pid) == "slurmstepd":
            return True
    return False


def other_descriptors(pid: int) -> list[int]:
    """The descriptors of a process without standard input, output and error."""
    return sorted(number for number in descriptors(pid) if number > 2)


def descriptors(pid: int) -> list[int]:
    """The first descriptors of a process: one may have millions."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        return [
            int(entry.name) for entry in islice(entries, _MAX_DESCRIPTORS) if entry.name.isdigit()
        ]
    return []


def _access(pid: int, number: int) -> int:
    """O_RDONLY, O_WRONLY or O_RDWR of a descriptor (proc(5), fdinfo); O_RDONLY where unknown."""
    text = processes.contents(f"/proc/{pid}/fdinfo/{number}", 4096)
    flags = re.search(r"^flags:\s*([0-7]+)", text, re.M)
    return int(flags[1], 8) & os.O_ACCMODE if flags else os.O_RDONLY


@dataclass(frozen=True)
class _PipeReader:
    """A process that reads a pipe, and its descriptor of it."""

    pid: int
    number: int


@dataclass
class _PipeSearch:
    """The pipes that a user's processes read."""

    begun_s: float
    # pipe -> its readers (ranks share pipes)
    readers: dict[tuple[int, int], list[_PipeReader]] = field(default_factory=dict)
    sruns: list[int] = field(default_factory=list)  # the processes that are srun
    is_complete: bool = True  # all of the user's processes were read


#: User -> the latest search of its processes.
_searches: dict[int, _PipeSearch] = {}
_KNOWN_S = 2.0


def _find_readers(pid: int, uid: int) -> _PipeSearch:
    """The readers of pipes among this user's processes.
    pid: the process whose reader is searched for
    """
    search = _searches.get(uid)
    if search is None or not search.readers or time.monotonic() - search.begun_s > _KNOWN_S:
        search = _searches[uid] = _PipeSearch(time.monotonic())
        until = search.begun_s + _SEARCH_S
        for number, process in enumerate(_processes(pid, uid)):
            if number >= _MAX_PROCESSES or time.monotonic() > until:
                search.is_complete = False
                break
            for pipe, descriptor in _pipes_read_by(process):
                search.readers.setdefault(pipe, []).append(_PipeReader(process, descriptor))
            if _name(process) == "srun":
                search.sruns.append(process)
    return search


def _processes(pid: int, uid: int) -> Iterator[int]:
    """This user's processes: the parent of this process first, then by the distance of the pid.
    The processes of a pipeline start together, so their pids are close.
    """
    parent = _parent(pid)
    order = sorted(processes.pids(), key=lambda other: (other != parent, abs(other - pid)))
    for number in order:
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{number}").st_uid == uid:
                yield number


def _pipes_read_by(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """The pipes that a process reads, each with its descriptor."""
    for number in descriptors(pid):
        with contextlib.suppress(OSError):
            link = f"/proc/{pid}/fd/{number}"
            if os.readlink(link).startswith("pipe:") and _access(pid, number) != os.O_WRONLY:
                yield _inode(os.stat(link)), number


def _parent(pid: int) -> int:
    process = processes.stat(processes.contents(f"/proc/{pid}/stat", 4096))
    return process.parent if process else 0


def _name(pid: int) -> str:
    return processes.contents(f"/proc/{pid}/comm", 64).strip() or "a process"


def _reason(problem: OSError) -> str:
    return (problem.strerror or str(problem)).lower()

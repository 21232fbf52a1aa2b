"""The program on the node that reads the last lines of logs.

The logs match a pattern, or belong to given processes. Only a fork reads file systems
(`TailReader`): a fork that hangs is left behind, and another fork continues without that mount.
The answer is one line, ``NONCE tail "..."``: `NodeTail` as JSON, compressed, in base64.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nodeready.agent import users_file
from nodeready.agent.log_lines import last_lines, learn_file, read_ranks, text_lines
from nodeready.agent.log_ranks import file_ranks, named_ranks, path_ranks
from nodeready.agent.path_pattern import PathMatch, PatternWalk, absolute_pattern
from nodeready.agent.proc import (
    KERNEL_FILE_SYSTEMS,
    hung_devices,
    name_after,
    open_own_name,
    own_mounts,
)
from nodeready.agent.runtime import ForkedWorker, Send
from nodeready.agent.stacks import processes
from nodeready.agent.users_file import NOBODY, FileRefused, Rights, by_turns
from nodeready.agent.witnesses import logs
from nodeready.agent.witnesses.logs import TAIL_BYTES, WatchdogReport, reports
from nodeready.core import wire

# --- The program's configuration, and its answer.

MAX_BYTES = 256 * 1024  # maximum bytes at the end of a file that are read


@dataclass(frozen=True)
class TailConfig:
    nonce: str  # random word with which its line begins
    tag: str  # ``nodeready:RUN``, by which an interrupt finds the process
    # an absolute path, or a path that begins with ``~/``; with ``*``, ``?``, ``[...]`` and ``**``
    pattern: str
    lines: int = 10  # number of lines of each file
    grep: str = ""  # a regular expression that each line must contain; "": none
    newer_s: int = 0  # maximum age of a file in seconds; 0: any age
    since_s: float = 0  # minimum time of a file, in seconds since 1970; 0: any time
    max_files: int = 64  # maximum number of files; the newest are read
    limit_s: int = 30  # seconds after which it must have ended
    # (pid, seconds since boot at its start): read the logs of these processes, found by their
    # descriptors, in place of the pattern; grep and the times are ignored
    processes: tuple[tuple[int, float], ...] = ()
    # (first, last, step) of the global ranks whose lines are read; (): all lines
    ranks: tuple[tuple[int, int, int], ...] = ()
    # a regular expression that finds the rank in a line (`learn_ranks`); "": learned
    rank_pattern: str = ""

    def is_wanted(self, rank: int | None) -> bool:
        """Whether the lines of this rank are read; None: of an unknown rank."""
        spans = self.ranks
        return not spans or any(
            rank is not None and first <= rank <= last and (rank - first) % step == 0
            for first, last, step in spans
        )


@dataclass(frozen=True)
class LogTail:
    """A file that was read, or the lines of one rank in a mixed log."""

    path: wire.Path
    size_bytes: wire.Number
    mtime_s: float  # of its last change, in seconds since 1970
    age_s: float  # since its last change, by the node's clock
    lines: tuple[wire.Line, ...]  # the oldest first
    # lines with the expression in the last `MAX_BYTES`; None: no expression
    matches: wire.Count | None
    # of PyTorch's watchdog, in its last `TAIL_BYTES` bytes
    reports: tuple[WatchdogReport, ...] = ()
    # processes of `TailConfig.processes` that write it; these chose the path
    pids: tuple[wire.Pid, ...] = ()
    is_mixed: bool = False  # the lines of one rank of several; without their prefixes
    host: wire.Line = ""  # of a mixed log's lines, see `LineOrigin`
    rank: wire.Count | None = None  # likewise
    local_rank: wire.Count | None = None  # likewise
    lines_after: wire.Count = 0  # lines of all ranks after the last line of this one


@dataclass(frozen=True)
class UnreadFile:
    """A path that was not read."""

    path: wire.Path
    reason: wire.Line
    fault: bool  # an error that a person must examine; else the file is of a kind that is not read


@dataclass(frozen=True)
class NodeTail:
    """The logs of one node."""

    host: wire.Name  # the node's own host name
    files: tuple[LogTail, ...]
    unread: tuple[UnreadFile, ...]
    left_out: wire.Count  # number of matching files beyond max_files
    older: wire.Count  # number of matching files outside the requested time
    error: wire.Line  # why the answer is incomplete; ""
    other_ranks: wire.Count = 0  # number of matching files without a line of `TailConfig.ranks`


# --- The fork: it expands the pattern and reads the files, and may hang at each step.
#
# It sends ``at`` before it uses a file system, ``search`` before it searches, each file, and
# ``done`` at the end. So the reader of the messages knows where the fork hangs.

#: Bytes of a line in which the watchdog's words are searched.
_MAX_LINE_BYTES = 4096
_PACKED = (".gz", ".xz", ".bz2", ".zst", ".lz4", ".zip")
_MAX_MEMORY = 1 << 30  # maximum bytes of memory of the fork


def _last_rows(rows: list[bytes]) -> list[bytes]:
    """The lines of the last TAIL_BYTES bytes."""
    size, first = 0, len(rows)
    while first and size + len(rows[first - 1]) < TAIL_BYTES:
        first -= 1
        size += len(rows[first]) + 1
    return rows[first:]


class _HungMountError(OSError):
    """A file is on a mount that does not answer."""


@dataclass(frozen=True)
class _Hit:
    """A regular file that matches."""

    match: PathMatch
    owner: int
    modified_ns: int
    mtime_s: float


class TailReader:
    """One fork's work.

    hung:     devices of mounts that do not answer, and are not used
    left_out: paths that are not read
    used_s:   owner -> seconds that the owner's files have taken
    file_count: number of files that are read
    unpacks:  it reads compressed files
    """

    file_count, unpacks = 0, False

    def __init__(
        self,
        config: TailConfig,
        send: Send,
        hung: set[str],
        left_out: set[str],
        used_s: Mapping[int, float],
    ) -> None:
        self.config, self.send, self.hung, self.left_out = config, send, hung, left_out
        self.used_s = defaultdict(float, used_s)
        self.mounts = own_mounts()
        self.expression = re.compile(config.grep) if config.grep else None
        self.device, self.name = "", open_own_name()

    def touch(self, real: str) -> None:
        """Send the device that is used next. Raises OSError for a mount that does not answer."""
        mount = self.mounts.mount_of(real)
        if mount.device in self.hung:
            raise _HungMountError(0, f"the mount {mount} does not answer")
        if mount.device != self.device:
            self.device = mount.device
            name_after(mount.device, self.name)
        self.send({"at": mount.device})

    def report_error(self, shown: str, error: OSError) -> None:
        reason = error.strerror or str(error)
        is_expected = isinstance(error, (_HungMountError, FileRefused))
        self.unread(shown, reason if is_expected else reason.lower(), fault=True)

    def unread(self, shown: str, reason: str, *, fault: bool) -> None:
        self.send({"unread": asdict(UnreadFile(shown, reason, fault))})

    def blocked(self, real: str) -> bool:
        return self.mounts.mount_of(real).kind in KERNEL_FILE_SYSTEMS

    def work(self) -> None:
        """Expand the pattern, and read the newest files. All files are opened first, because the
        fork gives up its rights before it reads.
        """
        users_file.confine(_MAX_MEMORY, self.config.limit_s + 1)
        walk = PatternWalk(self.touch, self.blocked, self.report_error)
        pattern = absolute_pattern(self.config.pattern)
        hits: dict[str, _Hit] = {}
        for match in walk.expand(pattern):
            hit = self.examine(match, deep=pattern.endswith("**"))
            # Each file once, even if a link such as `latest` also leads there.
            if hit is not None:
                hits.setdefault(match.real, hit)
        if walk.too_many:
            self.send({"error": f"more than {walk.too_many:,} names: only some were looked at"})
        new = [hit for hit in hits.values() if self.is_in_time(hit.mtime_s)]
        # Files of the same time are ordered by name.
        new.sort(key=lambda hit: hit.match.shown)
        # Files of other ranks come last: the rank in a path may be a local one.
        hits_of_ranks: list[_Hit] = []
        hits_of_others: list[_Hit] = []
        for hit in new:
            rank = named_ranks(hit.match.shown).rank
            is_wanted = rank is None or self.config.is_wanted(rank)
            (hits_of_ranks if is_wanted else hits_of_others).append(hit)
        chosen = [*by_turns(hits_of_ranks), *by_turns(hits_of_others)][: self.config.max_files]
        self.file_count = len(chosen)
        header = {"left_out": len(new) - len(chosen), "older": len(hits) - len(new)}
        self.send({**header, "chosen": [hit.match.shown for hit in chosen]})
        opened = [self.open(hit) for hit in chosen if hit.match.shown not in self.left_out]
        if os.geteuid() == 0:
            # A user namespace may not have that user.
            with contextlib.suppress(OSError):
                users_file.give_up(Rights(NOBODY, NOBODY, ()))
        unread = [file for file in opened if file]
        while unread:
            # Slow files of one owner must not take the time of another owner's files.
            index = min(range(len(unread)), key=lambda index: self.used_s[unread[index][0].owner])
            hit, handle = unread.pop(index)
            started_s = time.monotonic()
            self.read(hit, handle)
            self.used_s[hit.owner] += time.monotonic() - started_s
        self.send({"done": True})

    def is_in_time(self, mtime: float) -> bool:
        config = self.config
        return mtime >= config.since_s and not 0 < config.newer_s < time.time() - mtime

    def examine(self, match: PathMatch, *, deep: bool) -> _Hit | None:
        """The match if it is a regular file; otherwise None, and it is reported as unread."""
        try:
            self.touch(match.real)
            status = users_file.linked_status(match.resolved)
        except OSError as error:
            self.report_error(match.shown, error)
            return None
        kind = users_file.special_kind(status.st_mode)
        if not kind:
            if self.unpacks or not match.real.endswith(_PACKED):
                moment = users_file.modified_ns(status)
                return _Hit(match, users_file.main_uid(status.st_uid), moment, status.st_mtime)
            self.unread(match.shown, "is compressed", fault=False)
        elif not (deep and stat.S_ISDIR(status.st_mode)):
            self.unread(match.shown, f"is {kind}", fault=False)
        return None

    def open(self, hit: _Hit) -> tuple[_Hit, int] | None:
        """The file, opened with its owner's rights; None: it cannot be opened."""
        match = hit.match
        try:
            self.touch(match.real)
            handle, _ = users_file.open_regular(match.real, match.owner)
        except OSError as error:
            self.report_error(match.shown, error)
            return None
        return hit, handle

    def read(self, hit: _Hit, handle: int) -> None:
        match = hit.match
        try:
            self.touch(match.real)
            # The file may have grown since it was found.
            status = os.fstat(handle)
            is_whole = self.expression is not None
            rows = _read_rows(handle, status.st_size, self.config.lines, is_whole=is_whole)
            if rows is None:
                self.unread(match.shown, "is no text", fault=False)
                return
            if self.expression or self.config.rank_pattern:
                self.send({"search": match.shown, "owner": hit.owner})
            files = _log_tails(
                match.shown, handle, status, rows, self.config, expression=self.expression
            )
        except OSError as error:
            self.report_error(match.shown, error)
            return
        finally:
            os.close(handle)
        self.send({"file": match.shown, "tails": [asdict(file) for file in files]})


def _read_rows(handle: int, size: int, count: int, *, is_whole: bool) -> list[bytes] | None:
    """At least the file's last ``count`` lines; None: it is no text.
    is_whole: all lines of its last `MAX_BYTES` bytes
    """
    rows: list[bytes] | None = []
    for limit in (MAX_BYTES,) if is_whole else (TAIL_BYTES, MAX_BYTES):
        start = max(0, size - limit)
        rows = text_lines(os.pread(handle, min(limit, size), start), is_whole=start == 0)
        if rows is None or start == 0 or len(rows) > count:
            break
    return rows


def _log_tails(
    path: str,
    handle: int,
    status: os.stat_result,
    rows: list[bytes],
    config: TailConfig,
    *,
    expression: re.Pattern[str] | None = None,
) -> list[LogTail]:
    """The last lines of a file; of a mixed log, those of each rank."""
    size = status.st_size
    file = LogTail(path, size, status.st_mtime, time.time() - status.st_mtime, (), None)
    reader = learn_file(handle, size, rows, path=path, pattern=config.rank_pattern)
    if not reader.is_mixed:
        lines, matches = last_lines(rows, config.lines, expression)
        texts = (row[:_MAX_LINE_BYTES].decode("utf-8", "replace") for row in _last_rows(rows))
        file = replace(file, lines=lines, matches=matches, reports=reports(texts))
        return [file] if config.is_wanted(file_ranks(path_ranks(path), lines).rank) else []
    return [
        replace(
            file,
            lines=tuple(rank.lines),
            matches=rank.matches if expression else None,
            reports=reports(rank.whole_lines),
            is_mixed=True,
            host=rank.origin.host,
            rank=rank.origin.rank,
            local_rank=rank.origin.local_rank,
            lines_after=rank.lines_after,
        )
        for rank in read_ranks(
            handle,
            size,
            reader,
            config.lines,
            is_wanted=lambda origin: config.is_wanted(origin.rank),
            expression=expression,
        )
    ]


# --- The logs of processes, which are found by descriptors and not by names.


@dataclass(frozen=True)
class _ProcessLog:
    """A process's log."""

    files: tuple[LogTail, ...] = ()  # as `_log_tails` returns them; (): there is no log to read
    key: str = ""  # device and inode of the file
    reason: str = ""  # why there is no log to read


def _read_process_log(pid: int, uid: int, config: TailConfig) -> _ProcessLog:
    """The log that a process writes, read with its user's rights; called in a fork."""
    try:
        with logs.open_logs(pid, uid) as files:
            log = logs.last_written(files)
            status = os.fstat(log.number)
            rows = _read_rows(log.number, status.st_size, config.lines, is_whole=False)
            if rows is None:
                return _ProcessLog(reason=f"{log.path}: is no text")
            key = f"{status.st_dev}:{status.st_ino}"
            tails = _log_tails(log.path, log.number, status, rows, config)
            return _ProcessLog(tuple(tails), key)
    except (logs.NoLogError, OSError) as problem:
        return _ProcessLog(reason=str(problem))


def read_logs(config: TailConfig) -> NodeTail:
    """The logs of `TailConfig.processes`, each once, within config.limit_s."""
    answer, started = TailAnswer(config), dict(config.processes)
    deadline = time.monotonic() + config.limit_s - 1
    facts = processes.observe(list(started), deadline)
    # Another process may have the pid of a process that has ended.
    uids = {
        pid: process.uid
        for pid, process in facts.items()
        if process and process.start_s == started[pid]
    }
    process_logs = processes.probe_each(
        lambda pid: asdict(_read_process_log(pid, uids[pid], config)), list(uids), deadline, uids
    )
    pids: dict[str, list[int]] = defaultdict(list)
    for pid in started:
        log = process_logs.get(pid)
        if isinstance(log, dict) and log["files"]:
            pids[log["key"]].append(pid)
            tails = [{**file, "pids": pids[log["key"]]} for file in log["files"]]
            answer.add_message({"file": log["key"], "tails": tails})
        else:
            has_ended = pid in facts and pid not in uids
            reason = "it has ended" if has_ended else "not read in time"
            reason = log["reason"] if isinstance(log, dict) else reason
            unread = UnreadFile(f"the log of process {pid}", reason, True)
            answer.add_message({"unread": asdict(unread)})
    return answer.tail()


# --- The program: forks until all files are read, and their messages as one answer.

#: Maximum bytes of all lines of a node, maximum unread paths, maximum reports, and maximum files
#: and ranks in an answer.
MAX_ANSWER, MAX_UNREAD, MAX_REPORTS, MAX_TAILS = 900_000, 64, 2000, 8192
PATIENCE_S = 4  # seconds for one use of a file system, or for the expression on one file


class TailAnswer:
    """The answer, collected from the forks' messages."""

    def __init__(self, config: TailConfig) -> None:
        self.config = config
        #: Path, or key of a file -> the file, or its ranks; (): it has no wanted rank.
        self.files: dict[str, tuple[LogTail, ...]] = {}
        self.unread: dict[str, UnreadFile] = {}
        self.chosen: list[str] = []
        self.counts = {"left_out": 0, "older": 0}
        self.error = ""
        self.done = False
        #: Key of a file -> the sizes of each rank's lines.
        self.sizes: dict[str, list[list[int]]] = {}
        self.size = 0

    def add_message(self, message: dict[str, Any]) -> None:
        """Add a message of a fork."""
        if "tails" in message:
            tails = [wire.decode(LogTail, tail) for tail in message["tails"]]
            self.add_file(message["file"], tails)
        elif "unread" in message:
            unread_file = UnreadFile(**message["unread"])
            if len(self.unread) < MAX_UNREAD or unread_file.path in self.unread:
                self.unread[unread_file.path] = unread_file
            elif unread_file.fault:
                self.error = f"more than {MAX_UNREAD} paths were not read"
        elif "chosen" in message:
            self.chosen = message["chosen"]
            self.counts = {name: message[name] for name in self.counts}
        elif "error" in message:
            self.error = message["error"]
        self.done = self.done or "done" in message

    def add_file(self, key: str, tails: Sequence[LogTail]) -> None:
        """Add a file. All files together take at most twice the maximum of an answer."""
        self.size -= sum(map(sum, self.sizes.get(key, ())))
        count = sum(map(len, self.files.values())) - len(self.files.get(key, ()))
        if count + len(tails) > MAX_TAILS:
            self.error = f"more than {MAX_TAILS:,} ranks and files: take less, or use --rank"
            tails = tails[: MAX_TAILS - count]
        self.files[key] = tuple(tails)
        self.sizes[key] = [[len(json.dumps(text)) + 1 for text in tail.lines] for tail in tails]
        self.size += sum(map(sum, self.sizes[key]))
        if self.size > 2 * MAX_ANSWER:
            self.fit()

    def fit(self) -> None:
        """Leave out the first lines of the largest files and ranks, until all fit."""
        tails = [(key, index) for key, sizes in self.sizes.items() for index in range(len(sizes))]
        tails.sort(key=lambda tail: sum(self.sizes[tail[0]][tail[1]]))
        room, remaining = MAX_ANSWER, len(tails)
        for key, index in tails:
            sizes, per_file = self.sizes[key][index], room // remaining
            remaining -= 1
            size = kept_count = 0
            # The last lines are the most useful.
            for line_size in reversed(sizes):
                if size + line_size > per_file:
                    break
                size += line_size
                kept_count += 1
            if kept_count < len(sizes):
                self.error = f"more than {MAX_ANSWER:,} bytes: lines are missing; take less"
                first = len(sizes) - kept_count
                files = [*self.files[key]]
                files[index] = replace(files[index], lines=files[index].lines[first:])
                self.files[key], self.sizes[key][index] = tuple(files), sizes[first:]
            room -= size
        self.size = MAX_ANSWER - room

    def tail(self) -> NodeTail:
        self.fit()
        tails = [tail for files in self.files.values() for tail in files]
        per_file = max(1, MAX_REPORTS // max(1, len(tails)))
        paths = {tail.path for tail in tails}
        for path in self.chosen:
            if path not in self.files and path not in self.unread:
                reason = f"not read within {self.config.limit_s} s"
                self.unread[path] = UnreadFile(path, reason, True)
        return NodeTail(
            os.uname().nodename,
            tuple(replace(tail, reports=tail.reports[:per_file]) for tail in tails),
            tuple(file for file in self.unread.values() if file.path not in paths),
            self.counts["left_out"],
            self.counts["older"],
            self.error,
            sum(not files for files in self.files.values()),
        )


def read_tail(
    config: TailConfig, reader: type[TailReader] = TailReader, answer: TailAnswer | None = None
) -> NodeTail:
    """The logs of this node that match the pattern, within config.limit_s.
    reader: does the work of a fork; answer: takes its messages
    """
    if config.processes:
        return read_logs(config)
    answer = answer or TailAnswer(config)
    deadline = time.monotonic() + config.limit_s - 1
    hung, slow = hung_devices(), set[str]()
    used_s: dict[int, float] = defaultdict(float)
    while (seconds_left := deadline - time.monotonic()) > 0:

        def work(send: Send) -> None:
            reader(config, send, hung, slow | {*answer.files}, used_s).work()

        worker, device, searching, ended = ForkedWorker(work, seconds_left + 1), "", "", True
        owner, option = 0, "--grep" if config.grep else "--rank-pattern"
        slow_reason = f"{option} takes longer than {PATIENCE_S} s on its lines"
        for message in worker.messages(PATIENCE_S, deadline):
            if message is None:
                ended = False
                break
            searching, owner = message.get("search", ""), message.get("owner", owner)
            device = message.get("at", device)
            slow_reason = message.get("reason", slow_reason)
            answer.add_message(message)
        worker.end()
        if ended:
            if not answer.done:
                answer.error = "its own reader broke off"
            break
        if searching:
            slow.add(searching)
            used_s[owner] += PATIENCE_S
            answer.unread[searching] = UnreadFile(searching, slow_reason, True)
        elif device:
            hung.add(device)
    else:
        answer.error = answer.error or f"not done within {config.limit_s} s"
    return answer.tail()


def main(config: TailConfig) -> None:
    """Read the logs, and print the answer."""
    try:
        for expression in (config.grep, config.rank_pattern):
            re.compile(expression)
        tail = read_tail(config)
    except re.error as error:
        tail = NodeTail(os.uname().nodename, (), (), 0, 0, f"no regular expression: {error}")
    print(wire.packed_line(config.nonce, "tail", tail), flush=True)

"""The program on the node that reads the last lines of the files that match a pattern, or of the
logs that processes write.

Only a fork reads file systems (`TailReader`): a fork that hangs is left behind, and another fork
continues without that mount. The answer is one line, ``NONCE tail "..."``: `NodeTail` as JSON,
compressed, in base64.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import json
import os
import pwd
import re
import stat
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nodeready.node import users_file
from nodeready.node.log_lines import last_lines, text_lines
from nodeready.node.runtime import ForkedWorker, Send
from nodeready.node.stacks import processes
from nodeready.node.users_file import NOBODY, FileRefused, Resolved, Rights, by_turns, follow
from nodeready.node.witnesses import logs
from nodeready.node.witnesses.logs import TAIL_BYTES, WatchdogReport, reports
from nodeready.subjects import wire

# --- What the program is told, and what it answers.

#: Bytes at the end of a file that are read.
MAX_BYTES = 256 * 1024


@dataclass(frozen=True)
class TailConfig:
    """What the program is told.

    nonce:     random word with which its line begins
    tag:       ``nodeready:RUN``, by which an interrupt finds the process
    pattern:   an absolute path, or one that begins with ``~/``; with ``*``,
               ``?``, ``[...]`` and ``**``
    lines:     how many of each file
    grep:      a regular expression; then only lines in which it is found; "": all
    newer_s:   only files that were written in the last so many seconds; 0: all
    since_s:   only files that were written since then, in seconds since 1970; 0: all
    max_files: of more files, those that were written last
    limit_s:   seconds after which it must have ended
    processes: (pid, seconds since boot at its start): instead of what a pattern matches, the log
               that each of these writes, found by its descriptors; grep and the times do not count
    """

    nonce: str
    tag: str
    pattern: str
    lines: int = 10
    grep: str = ""
    newer_s: int = 0
    since_s: float = 0
    max_files: int = 64
    limit_s: int = 30
    processes: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class LogTail:
    """A file that was read. mtime_s: seconds since 1970; age_s: since then, by the node's clock.

    lines:   the oldest first
    matches: of the expression in the last `MAX_BYTES`; None: there is none
    reports: of PyTorch's watchdog, in its last `TAIL_BYTES` bytes
    pids:    of `TailConfig.processes`, those that write it; its path is their word
    """

    path: wire.Path
    size_bytes: wire.Number
    mtime_s: float
    age_s: float
    lines: tuple[wire.Line, ...]
    matches: wire.Count | None
    reports: tuple[WatchdogReport, ...] = ()
    pids: tuple[wire.Pid, ...] = ()


@dataclass(frozen=True)
class UnreadFile:
    """A path that was not read. fault: somebody has to look; else it is no file for us."""

    path: wire.Path
    why: wire.Line
    fault: bool


@dataclass(frozen=True)
class NodeTail:
    """What one node has.

    host:    its own name for itself
    left_out: files that match, too, of which max_files were newer
    older:   files that match, and were not written in the time that was asked for
    error:   why the whole answer is not what was asked for; ""
    """

    host: wire.Name
    files: tuple[LogTail, ...]
    unread: tuple[UnreadFile, ...]
    left_out: wire.Count
    older: wire.Count
    error: wire.Line


# --- A pattern of paths, expanded within bounds and never into a mount that does not answer.

#: Names that are read, those of them that are looked at, and directories below each other that
#: ``**`` goes down.
MAX_NAMES, MAX_HITS, MAX_DEPTH = 1_000_000, 100_000, 16
_MAGIC = re.compile(r"[*?[]")


@dataclass(frozen=True)
class Match:
    """A path that matches.

    shown: as the pattern spells it
    real:  without links
    owner: of links on the way that are not root's, with whose rights alone it is asked for
    """

    shown: str
    real: str
    owner: int | None = None

    @property
    def resolved(self) -> Resolved:
        return Resolved(self.real, self.owner)

    def at(self, name: str) -> str:
        return f"{self.shown.rstrip('/')}/{name}"


@dataclass(frozen=True)
class _Named:
    name: str
    owner: int
    modified_ns: int


@dataclass
class Walk:
    """One way through the node's directories. A user's link leads nowhere that the user could
    not go.

    touch:   called with each path without links before it is asked for; raises OSError when it
             must not be
    blocked: whether ``**`` stays out of this directory
    trouble: called with what could not be looked at, and why
    too_many: MAX_NAMES or MAX_HITS, where there are more; 0: there are not
    """

    touch: Callable[[str], None]
    blocked: Callable[[str], bool]
    trouble: Callable[[str, OSError], None]
    too_many: int = 0
    _names: int = 0
    _hits: int = 0

    def expand(self, pattern: str) -> Iterator[Match]:
        """What matches an absolute pattern of ``*``, ``?``, ``[...]`` and ``**``."""
        words = [word for word in pattern.split("/") if word]
        yield from self._below([Match("/", "/")], words)

    def _below(self, parents: list[Match], words: list[str]) -> Iterator[Match]:
        if not words:
            yield from parents
            return
        word, *remaining = words
        if word == "**":
            for parent in parents:
                for child in self._deep(parent, MAX_DEPTH):
                    yield from self._below([child], remaining or ["*"])
        elif _MAGIC.search(word):
            like = re.compile(fnmatch.translate(word))
            for parent in parents:
                hits = [
                    match
                    for name in self._list(parent, like)
                    if word[0] == "." or name[0] != "."
                    for match in self._one(parent, name, last=not remaining)
                ]
                yield from self._below(hits, remaining)
        else:
            for parent in parents:
                yield from self._below(
                    list(self._one(parent, word, last=not remaining)), remaining
                )

    def _one(self, parent: Match, name: str, *, last: bool) -> Iterator[Match]:
        """The name in this directory, if it is there and, unless it is the last one, leads on."""
        shown = parent.at(name)
        try:
            target = follow(parent.resolved, name, self.touch)
            if last or stat.S_ISDIR(users_file.linked_status(target).st_mode):
                yield Match(shown, target.path, target.owner)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self.trouble(shown, error)

    def _list(self, parent: Match, like: re.Pattern[str] | None = None) -> list[str]:
        """The names in this directory, in order; of more than we look at, some."""
        names: list[str] = []
        try:
            self.touch(parent.real)
            with users_file.scan(parent.resolved) as entries:
                for entry in entries:
                    self._names += 1
                    if like is None or like.match(entry.name):
                        names.append(entry.name)
                    if self._names > MAX_NAMES:
                        self.too_many = MAX_NAMES
                        break
            room = MAX_HITS - self._hits
            if len(names) > room:
                self.too_many = self.too_many or MAX_HITS
                names = self._newest(parent, names)[:room]
            self._hits += len(names)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.trouble(parent.shown, error)
        return sorted(names)

    def _newest(self, parent: Match, names: list[str]) -> list[str]:
        """The names in this directory, each owner's newest by turns."""
        matches = []
        for name in names:
            place = Resolved(f"{parent.real.rstrip('/')}/{name}", parent.owner)
            self.touch(place.path)
            with contextlib.suppress(FileNotFoundError):
                status = users_file.linked_status(place)
                matches.append(
                    _Named(name, users_file.person(status.st_uid), users_file.modified_ns(status))
                )
        return [entry.name for entry in users_file.by_turns(matches)]

    def _deep(self, parent: Match, depth: int) -> Iterator[Match]:
        """The directory and all below it, without following links: those may go round."""
        yield parent
        if depth == 0:
            return
        for name in self._list(parent):
            real = f"{parent.real.rstrip('/')}/{name}"
            child = Match(parent.at(name), real, parent.owner)
            if name[0] == "." or self.blocked(child.real):
                continue
            try:
                self.touch(child.real)
                directory = stat.S_ISDIR(users_file.linked_status(child.resolved).st_mode)
            except FileNotFoundError:
                continue
            except OSError as error:
                self.trouble(child.shown, error)
                continue
            if directory:
                yield from self._deep(child, depth - 1)


def home() -> str:
    """The home directory of whoever has logged in, sudo or not."""
    user = os.environ.get("SUDO_USER")
    if user:
        try:
            return pwd.getpwnam(user).pw_dir
        except KeyError:
            pass
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return os.environ.get("HOME", "/")


def absolute(pattern: str) -> str:
    """The pattern with ``~`` replaced by the home of whoever has logged in, taken literally."""
    if pattern == "~" or pattern.startswith("~/"):
        return re.sub(r"([*?[])", r"[\1]", home()) + pattern[1:]
    return pattern


# --- The mounts of this node, and those whose server does not answer.
#
# A process that asks such a mount hangs in the kernel for good.

TABLE = "/proc/self/mountinfo"
#: File systems that hold the kernel's own things, and no file of a job.
KERNEL_FILE_SYSTEMS = frozenset(
    (
        *("proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "debugfs", "tracefs"),
        *("securityfs", "bpf", "pstore", "configfs", "fusectl", "mqueue", "efivarfs"),
        *("binfmt_misc", "rpc_pipefs", "hugetlbfs", "selinuxfs", "nsfs"),
    )
)
#: A process of ours that asks a mount is named: this, and the mount's device. The kernel keeps
#: 15 characters of it (proc(5), /proc/PID/comm).
_NAME = "nr-"
#: The bit of SIGKILL among a process's pending signals (proc(5), SigPnd).
_KILLED = 1 << 8


@dataclass(frozen=True)
class Mount:
    """A row of `TABLE`. device: ``MAJOR:MINOR``; kind: ``nfs4``; source: ``nas:/export``"""

    path: str
    device: str
    kind: str
    source: str

    def __str__(self) -> str:
        return f"{self.path} ({self.source}, {self.kind})"


def parse_mounts(text: str) -> list[Mount]:
    """The rows of `TABLE` (proc(5)); what is no row of it is passed over."""
    matches = []
    for row in text.splitlines():
        before, _, after = row.partition(" - ")
        first, right = before.split(" "), after.split(" ")
        if len(first) >= 6 and len(right) >= 2:
            matches.append(Mount(_plain(first[4]), first[2], right[0], _plain(right[1])))
    return matches


def _plain(word: str) -> str:
    """White space and backslashes stand in the table as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


class Mounts:
    """Which mount a path without links is on, found without asking the path."""

    def __init__(self, rows: Iterable[Mount]) -> None:
        # Of two at the same place, the later one is seen.
        self._rows = {row.path: row for row in rows}

    def of(self, path: str) -> Mount:
        """The mount that holds this absolute path without links."""
        directory = path
        while directory not in self._rows and directory != "/":
            directory = os.path.dirname(directory)
        return self._rows.get(directory, Mount("/", "", "", ""))


def own_mounts() -> Mounts:
    """The mounts that this process sees."""
    with open(TABLE, encoding="utf-8", errors="surrogateescape") as file:
        return Mounts(parse_mounts(file.read()))


def own_name() -> int:
    """The open name of this process (proc(5), /proc/PID/comm); -1: there is none."""
    try:
        return os.open("/proc/self/comm", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def name_after(device: str, name: int) -> None:
    """Name this process after the device, by which `unresponsive` finds it when it hangs.

    name: from `own_name`
    """
    with contextlib.suppress(OSError):
        os.write(name, f"{_NAME}{device}".encode())


def unresponsive() -> set[str]:
    """The devices for which a killed process of an earlier run still waits in the kernel."""
    numbers = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
                text = file.read()
            match = re.match(rf"Name:\t{_NAME}(\d+:\d+)\n", text)
            pending = re.search(r"^SigPnd:\t([0-9a-f]+)$", text, re.MULTILINE)
            if match and pending and int(pending[1], 16) & _KILLED:
                numbers.add(match[1])
    return numbers


# --- The fork: it expands the pattern and reads the files, and may hang at each step.
#
# It sends ``at`` before it asks a file system anything, ``search`` before it searches, each file,
# and ``done`` at the end. So the reader of the messages knows where the fork hangs.

#: Bytes of a line in which the watchdog's words are looked for.
_LONGEST = 4096
_PACKED = (".gz", ".xz", ".bz2", ".zst", ".lz4", ".zip")
# The fork's memory.
_MEMORY = 1 << 30


def _last(rows: list[bytes]) -> list[bytes]:
    """The lines of the last TAIL_BYTES bytes."""
    size, first = 0, len(rows)
    while first and size + len(rows[first - 1]) < TAIL_BYTES:
        first -= 1
        size += len(rows[first]) + 1
    return rows[first:]


class _DeadError(OSError):
    pass


@dataclass(frozen=True)
class _Hit:
    """A regular file that matches."""

    match: Match
    owner: int
    modified_ns: int
    mtime_s: float


class TailReader:
    """One fork's work.

    dead:     devices of the mounts that are not asked
    left_out: paths that are not read
    used_s:   owner -> seconds that the owner's files have taken
    """

    def __init__(
        self,
        config: TailConfig,
        send: Send,
        dead: set[str],
        left_out: set[str],
        used_s: Mapping[int, float],
    ) -> None:
        self.config, self.send, self.dead, self.left_out = config, send, dead, left_out
        self.used_s = defaultdict(float, used_s)
        self.mounts = own_mounts()
        self.like = re.compile(config.grep) if config.grep else None
        self.device, self.name = "", own_name()

    def touch(self, real: str) -> None:
        """Send where the next question goes. Raises OSError for a mount that does not answer."""
        mount = self.mounts.of(real)
        if mount.device in self.dead:
            raise _DeadError(0, f"the mount {mount} does not answer")
        if mount.device != self.device:
            self.device = mount.device
            name_after(mount.device, self.name)
        self.send({"at": mount.device})

    def trouble(self, shown: str, error: OSError) -> None:
        reason = error.strerror or str(error)
        is_expected = isinstance(error, (_DeadError, FileRefused))
        self.unread(shown, reason if is_expected else reason.lower(), fault=True)

    def unread(self, shown: str, reason: str, *, fault: bool) -> None:
        self.send({"unread": asdict(UnreadFile(shown, reason, fault))})

    def blocked(self, real: str) -> bool:
        return self.mounts.of(real).kind in KERNEL_FILE_SYSTEMS

    def work(self) -> None:
        """Expand the pattern, and read the files that were written last.

        All are opened first: what reads them has no rights any more.
        """
        users_file.confine(_MEMORY, self.config.limit_s + 1)
        walk = Walk(self.touch, self.blocked, self.trouble)
        pattern = absolute(self.config.pattern)
        hits: dict[str, _Hit] = {}
        for match in walk.expand(pattern):
            hit = self.look(match, deep=pattern.endswith("**"))
            # Once, though a link such as `latest` leads there too.
            if hit is not None:
                hits.setdefault(match.real, hit)
        if walk.too_many:
            self.send({"error": f"more than {walk.too_many:,} names: only some were looked at"})
        new = [hit for hit in hits.values() if self.new(hit.mtime_s)]
        # In order of their names, where they were written in the same moment.
        new.sort(key=lambda hit: hit.match.shown)
        chosen = by_turns(new)[: self.config.max_files]
        header = {"left_out": len(new) - len(chosen), "older": len(hits) - len(new)}
        self.send({**header, "chosen": [hit.match.shown for hit in chosen]})
        opened = [self.open(hit) for hit in chosen if hit.match.shown not in self.left_out]
        if os.geteuid() == 0:
            # A user namespace may not know that user: its root is no real one.
            with contextlib.suppress(OSError):
                users_file.give_up(Rights(NOBODY, NOBODY, ()))
        todo = [file for file in opened if file]
        while todo:
            # Nobody's files that take long take another's time.
            next_ = min(range(len(todo)), key=lambda at: self.used_s[todo[at][0].owner])
            hit, handle = todo.pop(next_)
            began = time.monotonic()
            self.read(hit, handle)
            self.used_s[hit.owner] += time.monotonic() - began
        self.send({"done": True})

    def new(self, mtime: float) -> bool:
        config = self.config
        return mtime >= config.since_s and not 0 < config.newer_s < time.time() - mtime

    def look(self, match: Match, *, deep: bool) -> _Hit | None:
        """A regular file; anything else is reported as unread, and None."""
        try:
            self.touch(match.real)
            status = users_file.linked_status(match.resolved)
        except OSError as error:
            self.trouble(match.shown, error)
            return None
        kind = users_file.kind(status.st_mode)
        if not kind:
            if not match.real.endswith(_PACKED):
                moment = users_file.modified_ns(status)
                return _Hit(match, users_file.person(status.st_uid), moment, status.st_mtime)
            self.unread(match.shown, "is compressed", fault=False)
        elif not (deep and stat.S_ISDIR(status.st_mode)):
            self.unread(match.shown, f"is {kind}", fault=False)
        return None

    def open(self, hit: _Hit) -> tuple[_Hit, int] | None:
        """The file, opened with the rights of whoever has put it there; None: not to be opened."""
        match = hit.match
        try:
            self.touch(match.real)
            handle, _ = users_file.open_regular(match.real, match.owner)
        except OSError as error:
            self.trouble(match.shown, error)
            return None
        return hit, handle

    def read(self, hit: _Hit, handle: int) -> None:
        match = hit.match
        try:
            self.touch(match.real)
            # What was written since it was found counts, too.
            status = os.fstat(handle)
            rows = _rows(handle, status.st_size, self.config.lines, is_whole=self.like is not None)
        except OSError as error:
            self.trouble(match.shown, error)
            return
        finally:
            os.close(handle)
        if rows is None:
            self.unread(match.shown, "is no text", fault=False)
            return
        if self.like:
            self.send({"search": match.shown, "owner": hit.owner})
        self.send({"file": asdict(_file(match.shown, status, rows, self.config.lines, self.like))})


def _rows(handle: int, size: int, count: int, *, is_whole: bool) -> list[bytes] | None:
    """The file's last ``count`` lines at least, or whole: of its last `MAX_BYTES`; None: it is no
    text."""
    rows: list[bytes] | None = []
    for limit in (MAX_BYTES,) if is_whole else (TAIL_BYTES, MAX_BYTES):
        start = max(0, size - limit)
        rows = text_lines(os.pread(handle, min(limit, size), start), is_whole=start == 0)
        if rows is None or start == 0 or len(rows) > count:
            break
    return rows


def _file(
    path: str,
    status: os.stat_result,
    rows: list[bytes],
    count: int,
    like: re.Pattern[str] | None = None,
) -> LogTail:
    lines, matches = last_lines(rows, count, like)
    age = time.time() - status.st_mtime
    log_reports = reports(row[:_LONGEST].decode("utf-8", "replace") for row in _last(rows))
    return LogTail(path, status.st_size, status.st_mtime, age, lines, matches, log_reports)


# --- The logs of processes: what a descriptor leads to is read, and no name is asked for.


@dataclass(frozen=True)
class _Written:
    """A process's log. file: None: there is none to read: why; key: of the file itself"""

    file: LogTail | None = None
    key: str = ""
    why: str = ""


def _written(pid: int, uid: int, count: int) -> _Written:
    """The log that a process writes, as its user may read it; for a fork."""
    try:
        with logs.open_logs(pid, uid) as files:
            log = logs.last_written(files)
            status = os.fstat(log.number)
            rows = _rows(log.number, status.st_size, count, is_whole=False)
            if rows is None:
                return _Written(why=f"{log.path}: is no text")
            key = f"{status.st_dev}:{status.st_ino}"
            return _Written(_file(log.path, status, rows, count), key)
    except (logs.NoLogError, OSError) as problem:
        return _Written(why=str(problem))


def read_logs(config: TailConfig) -> NodeTail:
    """The logs of `TailConfig.processes`, each once, within config.limit_s."""
    answer, started = _TailAnswer(config), dict(config.processes)
    deadline = time.monotonic() + config.limit_s - 1
    facts = processes.observe(list(started), deadline)
    uids = {
        pid: facts_now.uid
        for pid, facts_now in facts.items()
        if facts_now and facts_now.start_s == started[pid]
    }
    process_facts = processes.probe_each(
        lambda pid: asdict(_written(pid, uids[pid], config.lines)), list(uids), deadline, uids
    )
    pids: dict[str, list[int]] = defaultdict(list)
    for pid in started:
        log = process_facts.get(pid)
        if isinstance(log, dict) and log["file"]:
            pids[log["key"]].append(pid)
            answer.add_message({"file": {**log["file"], "pids": pids[log["key"]]}}, log["key"])
        else:
            gone = pid in facts and pid not in uids
            reason = "it has ended" if gone else "not read in time"
            reason = log["why"] if isinstance(log, dict) else reason
            answer.add_message(
                {"unread": asdict(UnreadFile(f"the log of process {pid}", reason, True))}
            )
    return answer.tail()


# --- The program: forks until all files are read, and their messages as one answer.

#: Bytes of all lines of a node; paths that are told of without having been read; reports.
MAX_ANSWER, MAX_TOLD, MAX_REPORTS = 900_000, 64, 2000
#: Seconds for one question to a file system, or for the expression on one file.
PATIENCE_S = 4


class _TailAnswer:
    """The answer, as the forks' messages make it."""

    def __init__(self, config: TailConfig) -> None:
        self.config = config
        self.files: dict[str, LogTail] = {}
        self.unread: dict[str, UnreadFile] = {}
        self.chosen: list[str] = []
        self.told = {"left_out": 0, "older": 0}
        self.error = ""
        self.done = False
        self.sizes: dict[str, list[int]] = {}
        self.size = 0

    def add_message(self, message: dict[str, Any], key: str = "") -> None:
        """key: of a file; "": its path"""
        if "file" in message:
            header = message["file"]
            header["reports"] = tuple(WatchdogReport(**report) for report in header["reports"])
            self.add_file(LogTail(**header), key)
        elif "unread" in message:
            unread_file = UnreadFile(**message["unread"])
            if len(self.unread) < MAX_TOLD or unread_file.path in self.unread:
                self.unread[unread_file.path] = unread_file
            elif unread_file.fault:
                self.error = f"more than {MAX_TOLD} paths were not read"
        elif "chosen" in message:
            self.chosen = message["chosen"]
            self.told = {name: message[name] for name in self.told}
        elif "error" in message:
            self.error = message["error"]
        self.done = self.done or "done" in message

    def add_file(self, file: LogTail, key: str = "") -> None:
        """Add a file; of all, no more is kept meanwhile than twice what an answer can have."""
        key = key or file.path
        self.size -= sum(self.sizes.get(key, ()))
        self.files[key] = replace(file, lines=tuple(file.lines), pids=tuple(file.pids))
        self.sizes[key] = [len(json.dumps(text)) + 1 for text in file.lines]
        self.size += sum(self.sizes[key])
        if self.size > 2 * MAX_ANSWER:
            self.fit()

    def fit(self) -> None:
        """Leave out the first lines of the largest files, until all fit into the answer."""
        room, files = MAX_ANSWER, len(self.files)
        for path in sorted(self.files, key=lambda path: sum(self.sizes[path])):
            sizes, per_file = self.sizes[path], room // files
            files -= 1
            size = kept_count = 0
            # The last lines are the ones that count.
            for one in reversed(sizes):
                if size + one > per_file:
                    break
                size += one
                kept_count += 1
            if kept_count < len(sizes):
                self.error = f"more than {MAX_ANSWER:,} bytes: lines are missing; take less"
                first = len(sizes) - kept_count
                self.files[path] = replace(self.files[path], lines=self.files[path].lines[first:])
                self.sizes[path] = sizes[first:]
            room -= size
        self.size = MAX_ANSWER - room

    def tail(self) -> NodeTail:
        self.fit()
        per_file = max(1, MAX_REPORTS // max(1, len(self.files)))
        for path in self.chosen:
            if path not in self.files and path not in self.unread:
                self.unread[path] = UnreadFile(
                    path, f"not read within {self.config.limit_s} s", True
                )
        return NodeTail(
            os.uname().nodename,
            tuple(replace(file, reports=file.reports[:per_file]) for file in self.files.values()),
            tuple(file for file in self.unread.values() if file.path not in self.files),
            self.told["left_out"],
            self.told["older"],
            self.error,
        )


def read_tail(config: TailConfig) -> NodeTail:
    """What the pattern finds here, within config.limit_s."""
    if config.processes:
        return read_logs(config)
    answer = _TailAnswer(config)
    deadline = time.monotonic() + config.limit_s - 1
    dead, slow = unresponsive(), set[str]()
    used_s: dict[int, float] = defaultdict(float)
    while (seconds_left := deadline - time.monotonic()) > 0:

        def work(send: Send) -> None:
            TailReader(config, send, dead, slow | {*answer.files}, used_s).work()

        worker, device, searching, ended = ForkedWorker(work, seconds_left + 1), "", "", True
        owner = 0
        for message in worker.messages(PATIENCE_S, deadline):
            if message is None:
                ended = False
                break
            searching, owner = message.get("search", ""), message.get("owner", owner)
            device = message.get("at", device)
            answer.add_message(message)
        worker.end()
        if ended:
            if not answer.done:
                answer.error = "its own reader broke off"
            break
        if searching:
            slow.add(searching)
            used_s[owner] += PATIENCE_S
            reason = f"--grep takes longer than {PATIENCE_S} s on its lines"
            answer.unread[searching] = UnreadFile(searching, reason, True)
        elif device:
            dead.add(device)
    else:
        answer.error = answer.error or f"not done within {config.limit_s} s"
    return answer.tail()


def packed(config: TailConfig, tail: NodeTail) -> str:
    """The program's line."""
    text = json.dumps(asdict(tail), separators=(",", ":")).encode("ascii")
    return f'{config.nonce} tail "{base64.b64encode(zlib.compress(text)).decode("ascii")}"'


def main(config: TailConfig) -> None:
    """The program."""
    try:
        if config.grep:
            re.compile(config.grep)
        tail = read_tail(config)
    except re.error as error:
        tail = NodeTail(os.uname().nodename, (), (), 0, 0, f"--grep: {error}")
    print(packed(config, tail), flush=True)

"""The program on the node: list its core files, or read some of them with gdb. It only reads.

Each core is read in its own fork, with the rights of its owner (`nodeready.agent.users_file`), and
printed at once, so that a core that takes too long delays no other core.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import resource
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from nodeready.agent import users_file
from nodeready.agent.cores import core_pattern, gdb
from nodeready.agent.cores.core_file import CoreReader, NoCore, program_problem
from nodeready.agent.cores.core_pattern import CorePlace, PatternDirectory, printable
from nodeready.agent.runtime import ForkedWorker, ProcessSupervisor, Send
from nodeready.agent.users_file import by_turns
from nodeready.core import wire
from nodeready.core.base import ProbeError
from nodeready.subjects.proof.facts import PROGRAM

# --- The core files of a node, by their names in the few directories of the kernel.
#
# Any user may write to a core directory. Each directory is listed in a fork, and no file is
# opened. Of too many files, each user's newest are listed, so no user can hide another's.

LISTED = 1000  # maximum files that are listed; any further files are only counted
_KEPT = 20_000  # maximum files that are kept while a directory is read
# Seconds to read the names of one place, and to sort them; the fork's memory.
_LOOK_S, _SORT_S, _MEMORY = 6.0, 2.0, 1 << 30


@dataclass(frozen=True)
class CoreFile:
    """A file that is named like a core. Bytes of its path that are no text are surrogates."""

    path: wire.Path  # on the node
    inode: wire.Number  # with the path, the time and the size, it identifies the file
    modified_ns: int
    size_bytes: wire.Number
    owner: wire.Uid  # user id of the file; the first id of a range for user namespaces (`person`)
    age_s: float  # seconds since it was written, by the node's clock
    compressed: wire.Name = ""  # its suffix (``.zst``); "": it is not compressed
    host: wire.Name = ""  # the %h of its name; "": the name has none
    pid: int | None = None  # %P or %p, and %s, of its name; None: the name has none
    signal: int | None = None  # likewise


@dataclass(frozen=True)
class Listing:
    """The core files of a node, the newest first."""

    places: tuple[wire.Path, ...]  # that were read: patterns with ``*`` for the kernel's values
    files: tuple[CoreFile, ...]
    unlisted_count: wire.Count = 0  # older files that are not listed
    notes: tuple[wire.Line, ...] = ()  # why a place could not be read, one line each


def core_places(patterns: Iterable[str]) -> tuple[list[CorePlace], list[str]]:
    """The places that may have cores, also by these patterns of the policy, and a note about each
    place that cannot be read.
    """
    places, notes = [], []
    live = core_pattern.live_place()
    if live.pattern.startswith("/"):
        places.append(live)
    elif not live.handler:
        note = "cores lie in whatever directory each process worked in, which nobody can list"
        shown = live.shown or "empty"
        notes.append(f"core_pattern is {shown}: {note} (nodeready deploy sets a path)")
    elif os.path.basename(live.handler) != PROGRAM:
        handler = printable(live.handler)
        notes.append(f"core_pattern hands cores to {handler}, which alone knows where they are")
    places += [CorePlace(pattern) for pattern in patterns if pattern.startswith("/")]
    if os.path.isdir(core_pattern.STORE):
        places.append(CorePlace(core_pattern.STORE_PATTERN))
    return list(dict.fromkeys(places)), notes


# --- One place, in a fork.


@dataclass(frozen=True)
class _CoreEntry:
    """A regular file in a directory of a place."""

    directory: int  # its index in the place's directories
    name: str
    device: int
    inode: int
    modified_ns: int
    size_bytes: int
    owner: int


def _entries(
    place: CorePlace, directories: Sequence[PatternDirectory], until: float
) -> tuple[list[_CoreEntry], int, list[str]]:
    """The regular files of the place, the number of them, and a note about each unread directory.
    Of too many files, each user's newest are kept.
    """
    entries: list[_CoreEntry] = []
    count, notes = 0, []
    for index, directory in enumerate(directories):
        names = read_names = 0
        try:
            with users_file.scan(directory.real) as directory_entries:
                for entry in directory_entries:
                    names += 1
                    now_s = time.monotonic()
                    if now_s > until:
                        # One more second, to count the names.
                        if now_s > until + 1:
                            break
                        continue
                    read_names += 1
                    # A file with another prefix cannot be a core.
                    if not entry.name.startswith(place.prefix):
                        continue
                    with contextlib.suppress(OSError):
                        if kept_entry := _entry(index, entry):
                            count += 1
                            entries.append(kept_entry)
                    if len(entries) >= 2 * _KEPT:
                        entries = by_turns(entries)[:_KEPT]
        except OSError as problem:
            notes.append(f"{printable(directory.shown)}: {problem.strerror or problem}")
        if read_names < names:
            counts = f"{names:,} names or more, looked at {read_names:,}"
            note = "newer cores may be among the others"
            notes.append(f"{printable(directory.shown)}: {counts}: {note}")
    return entries, count, notes


def _entry(directory: int, entry: os.DirEntry[str]) -> _CoreEntry | None:
    status = entry.stat(follow_symlinks=False) if entry.is_file(follow_symlinks=False) else None
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    identity = directory, entry.name, status.st_dev, status.st_ino
    owner = users_file.main_uid(status.st_uid)
    return _CoreEntry(*identity, users_file.modified_ns(status), status.st_size, owner)


def _number(values: dict[str, str], letters: str) -> int | None:
    """The first of these specifiers that has a number in the name."""
    for letter in letters:
        # A longer number is not the kernel's.
        if 0 < len(values.get(letter, "")) < 20:
            return int(values[letter])
    return None


def _list(place: CorePlace, since_s: float, send: Send) -> None:
    """The fork's work: it sends ``{"files": [...], "unlisted": N, "notes": [...]}``."""
    users_file.confine(_MEMORY, int(_LOOK_S + _SORT_S) + 1)
    began, now_s = time.monotonic(), time.time()
    try:
        directories = place.directories()
    except OSError as problem:
        source = printable(str(problem.filename or place.directory))
        send({"files": [], "unlisted": 0, "notes": [f"{source}: {problem.strerror or problem}"]})
        return
    entries, count, notes = _entries(place, directories, began + _LOOK_S)
    if since_s:
        recent = [entry for entry in entries if now_s - entry.modified_ns / 1e9 <= since_s]
        # The times of files that were not kept are unknown, so those files stay counted.
        count, entries = count - (len(entries) - len(recent)), recent
    files: list[CoreFile] = []
    visited: set[tuple[int, int]] = set()
    for index, entry in enumerate(by_turns(entries)):
        if time.monotonic() > began + _LOOK_S + _SORT_S:
            count_left = f"{len(entries) - index:,}"
            notes.append(f"{place.shown}: {count_left} files, and no time to look at their names")
            break
        name = next(place.names(directories[entry.directory], [entry.name]), None)
        if name is None or (entry.device, entry.inode) in visited:
            count -= 1
            continue
        visited.add((entry.device, entry.inode))
        if len(files) < LISTED:
            age_s = max(0.0, now_s - entry.modified_ns / 1e9)
            files.append(CoreFile(
                name.path, entry.inode, entry.modified_ns, entry.size_bytes, entry.owner, age_s,
                name.compressed, name.values.get("h", ""),
                pid=_number(name.values, "PpIi"), signal=_number(name.values, "s"),
            ))  # fmt: skip
    unlisted = max(0, count - len(files))
    send({"files": [asdict(file) for file in files], "unlisted": unlisted, "notes": notes})


# --- All places.


def listing(patterns: Iterable[str], since_s: float = 0) -> Listing:
    """The cores of this node, the newest first; of more than LISTED, each user's newest cores.
    patterns: of the policy; the pattern in force and systemd's store are added
    since_s:  maximum age of a core in seconds; 0: any age
    """
    places, notes = core_places(patterns)
    files_by_inode: dict[tuple[str, int], CoreFile] = {}
    unlisted = 0
    for place in places:
        answer = _answer(place, since_s)
        if answer is None:
            notes.append(f"{place.shown}: no answer within {_LOOK_S + _SORT_S:.0f} s")
            continue
        before = len(files_by_inode)
        listed = [CoreFile(**row) for row in answer["files"]]
        files_by_inode |= {(file.path, file.inode): file for file in listed}
        # Two patterns may name the same directory, and then leave out the same files.
        is_same_directory = len(files_by_inode) == before
        remaining = answer["unlisted"]
        unlisted = max(unlisted, remaining) if is_same_directory else unlisted + remaining
        notes += answer["notes"]
    chosen = by_turns(files_by_inode.values())[:LISTED]
    unlisted += len(files_by_inode) - len(chosen)
    shown = tuple(dict.fromkeys(place.shown for place in places))
    newest = tuple(sorted(chosen, key=lambda file: -file.modified_ns))
    return Listing(shown, newest, unlisted, tuple(dict.fromkeys(notes)))


def _answer(place: CorePlace, since_s: float) -> Any:
    """The fork's message; None: the fork hangs, or ended early."""
    worker = ForkedWorker(partial(_list, place, since_s), 2 * (_LOOK_S + _SORT_S))
    try:
        until = time.monotonic() + _LOOK_S + _SORT_S + 1
        return next(worker.messages(_LOOK_S + _SORT_S + 1, until), None)
    finally:
        worker.end()


# --- The program's configuration, and its answers, a line each (`nodeready.core.wire`).


@dataclass(frozen=True)
class CoresConfig:
    nonce: str  # random word with which each of its lines begins
    tag: str  # ``nodeready:RUN``
    limit_s: int  # seconds after which it must have ended
    patterns: tuple[str, ...] = ()  # of the policy, for further places of cores
    since_s: float = 0  # maximum age of a core in seconds; 0: any age
    # the cores to read, as (path, inode, modified_ns, size_bytes); (): list the cores
    selected: tuple[tuple[str, int, int, int], ...] = ()
    job: str = ""  # read only the cores of this job (`stacks.ranks.jobs`); "": all
    maximum: int = 20  # of the cores to read


@dataclass(frozen=True)
class CoreSummary:
    """The notes of one core, and its backtrace by gdb."""

    number: wire.Count  # the core's index in ``selected``
    # why there is no backtrace, and what to do, one line; "": there is a backtrace
    unread: wire.Line = ""
    warning: wire.Line = ""  # why the backtrace is doubtful, one line
    whole_bytes: int | None = None  # the size by the core's program headers; None: not known
    pid: int | None = None  # in its own namespace; None here and below: the core does not tell
    signal: int | None = None  # that ended the process; 0: none, it is a copy of a live process
    uid: int | None = None  # the file's owner; the user in the notes, if root owns the file
    user: wire.Name = ""  # likewise
    comm: wire.Name = ""  # the first 15 characters of the process's name
    program: wire.Path = ""  # path of the executable; "": not known
    command: wire.Line = ""  # the first 80 characters of the command line
    threads: wire.Count = 0  # number of threads; 0: not known
    rank: int | None = None  # from the environment, if the core has it
    job: wire.Line = ""  # likewise
    jobs: tuple[wire.Line, ...] = ()  # all names of the job; the first is `job`
    text: wire.Text = ""  # gdb's output, zlib and base64
    cut: bool = False  # the output was longer
    seconds: wire.Seconds = 0.0


@dataclass(frozen=True)
class ReadTotals:
    """The last line of the answer."""

    read_count: wire.Count  # cores that were read
    unread_count: wire.Count  # cores beyond ``maximum``
    unknown_job_count: wire.Count = 0  # left out because they do not tell their job


# --- The work.

#: Seconds: a younger core that is too short may still be written.
_FRESH_S = 120
_GDB_MISSING = "gdb is not installed (nodeready deploy installs it)"


def main(config: CoresConfig) -> None:
    """List the cores, or read the selected cores."""
    with contextlib.suppress(OSError):
        os.nice(19)
    # If memory runs out, the kernel kills this program and its children before any job.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    # gdb may crash, and must leave no core.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if not config.selected:
        cores = listing(config.patterns, config.since_s)
        print(wire.line(config.nonce, "listing", cores), flush=True)
        return
    supervisor = ProcessSupervisor(config.tag, config.limit_s)
    supervisor.end_on_signals()
    with supervisor:
        _read_all(supervisor, config)


def _read_all(supervisor: ProcessSupervisor, config: CoresConfig) -> None:
    read_count = unread_count = unknown_job_count = 0
    for number in range(len(config.selected)):
        if read_count == config.maximum:
            unread_count = len(config.selected) - number
            break
        core = _read(supervisor, config, number)
        if not config.job or config.job in core.jobs:
            read_count += 1
            print(wire.line(config.nonce, "core", core), flush=True)
        elif not core.job:
            unknown_job_count += 1
    totals = ReadTotals(read_count, unread_count, unknown_job_count)
    print(wire.line(config.nonce, "done", totals), flush=True)


def read_notes(supervisor: ProcessSupervisor, selected: tuple[str, int, int, int]) -> CoreSummary:
    """What a core's own notes say, without gdb. selected: as of a `CoresConfig`"""
    try:
        with _CoreReading(supervisor, selected) as reading:
            return reading.core()
    except ProbeError:
        return CoreSummary(0, unread=_TOO_COSTLY)


def _read(supervisor: ProcessSupervisor, config: CoresConfig, number: int) -> CoreSummary:
    """One of the selected cores; an error is a field of it."""
    began, core = time.monotonic(), CoreSummary(number)
    with _CoreReading(supervisor, config.selected[number]) as reading:
        try:
            core = replace(reading.core(), number=number)
            if not core.unread and (not config.job or config.job in core.jobs):
                core = _with_backtrace(supervisor, core, reading)
        except ProbeError:
            core = replace(core, unread=_TOO_COSTLY)
    return replace(core, seconds=round(time.monotonic() - began, 3))


# --- One core: its file opened, and its notes read, in a fork.

_READ_S, _READ_CPU_S, _READ_MEMORY = 20.0, 15, 1 << 30  # the fork's seconds, of CPU, memory
#: Maximum files that a core names and that are checked.
_NAMES = 10_000
_TOO_COSTLY = "not read: it takes more time or memory than a core may"
_NOT_PERMITTED = "not permitted to read it: it is another user's (its owner or root may: --sudo)"
_NO_TOOL = "coredumpctl, which is not installed,"
_STORED = re.compile(re.escape(core_pattern.STORE) + r"/core\..*\.([0-9]+)\.[0-9a-f]{32}\.[0-9.]+")


class _CoreReading:
    """The fork that reads one core, its messages, and the descriptor of the core that it sends.
    While the fork is root, it tells whose rights it takes, and sends the open file. Its later
    messages are only data (`wire.decode`), which start nothing but gdb, with those rights.
    """

    def __init__(self, supervisor: ProcessSupervisor, selected: tuple[str, int, int, int]) -> None:
        self.file, self.uid = -1, 0
        _, _, self.modified_ns, self.size = selected
        self.exec = self.doubt = ""
        self._channel, worker_end = socket.socketpair()
        self._left_s = supervisor.left_s
        work = partial(_send_core, selected, worker_end)
        self._worker = ForkedWorker(work, _READ_S + 1, keep=(worker_end.fileno(),))
        self._ended = False
        supervisor.at_end(self.end)
        worker_end.close()

    def __enter__(self) -> _CoreReading:
        return self

    def __exit__(self, *problem: object) -> None:
        self.end()

    def end(self) -> None:
        """End the fork and close the core. A second call is harmless."""
        if not self._ended:
            self._ended = True
            self._worker.end()
            self._channel.close()
            if self.file >= 0:
                os.close(self.file)

    def core(self) -> CoreSummary:
        """The core's notes, or why they cannot be read. Raises ProbeError for a bad message."""
        patience_s = min(_READ_S, self._left_s)
        for message in self._worker.messages(patience_s, time.monotonic() + patience_s):
            if message is None or not isinstance(message, dict):
                break
            if "uid" in message and self.file < 0:
                _, numbers, _, _ = socket.recv_fds(self._channel, 1, 1)
                self.file, self.uid = numbers[0], message["uid"]
            elif "core" in message:
                core = wire.decode(CoreSummary, message["core"])
                self.exec, self.doubt = str(message.get("exec", "")), str(message.get("doubt", ""))
                return core
        return CoreSummary(0, unread=_TOO_COSTLY)


def _send_core(selected: tuple[str, int, int, int], channel: socket.socket, send: Send) -> None:
    """The fork's work: it sends ``{"uid": U}`` with the open file, then the core."""
    users_file.confine(_READ_MEMORY, _READ_CPU_S)
    path, summary = selected[0], CoreSummary(0)
    try:
        place = users_file.follow(users_file.ROOT, path)
        number, status = users_file.open_regular(place.path, place.owner, hard_links=True)
        if (status.st_ino, users_file.modified_ns(status), status.st_size) != selected[1:]:
            words = "it has changed since it was listed: still being written?"
            raise users_file.FileRefused(words)
        owner = status.st_uid if place.owner is None else place.owner
        uid, core = owner, None
        if os.geteuid() == 0 and owner == 0:
            # The kernel or systemd wrote the file as root; the process may have been a user's.
            uid, core = _process_owner(path, number, status)
            summary = _with_notes(summary, core, owner)
            _refuse_secret(number, uid)
        rights = users_file.rights_of(uid)
        send({"uid": uid})
        socket.send_fds(channel, [b"."], [number])
        channel.close()
        users_file.give_up(rights)
        core = core or CoreReader(number)
        address, program = core.notes.executable()
        summary = _with_notes(summary, core, owner)
        if fifo := _named_fifo(core):
            raise users_file.FileRefused(fifo)
        doubt = program_problem(program, core.build_id(address) if address else "")
        send({"core": asdict(summary), "exec": "" if doubt else program, "doubt": doubt})
    except (NoCore, OSError, MemoryError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else ""
        if isinstance(problem, MemoryError):
            reason = _TOO_COSTLY
        elif isinstance(problem, NoCore) and path.endswith((".zst", ".lz4", ".xz")):
            tool = "coredumpctl" if shutil.which("coredumpctl") else _NO_TOOL
            reason = f"it is compressed: {tool} unpacks it (coredumpctl dump PID -o FILE)"
        elif isinstance(problem, PermissionError):
            reason = _NOT_PERMITTED
        elif isinstance(problem, FileNotFoundError):
            reason = "it was removed since it was listed"
        send({"core": asdict(replace(summary, unread=reason or str(problem)))})


def _process_owner(path: str, number: int, status: os.stat_result) -> tuple[int, CoreReader]:
    """The uid of the process that left this core of root's, and the core. The uid is taken from
    the name in systemd's store and from the notes. Raises FileRefused if root must not read the
    core with a debugger.
    """
    if status.st_mode & 0o022:
        raise users_file.FileRefused("it is root's, and others may write to it")
    core = CoreReader(number)
    stored = _STORED.fullmatch(path)
    uids = {int(stored[1][:10]) if stored else 0, core.notes.uid}
    # If the core was cut off before the uid, gdb gets no rights.
    return max(users_file.NOBODY if uid is None else uid for uid in uids), core


def _refuse_secret(number: int, uid: int) -> None:
    """Raises FileRefused for an open core that this user may not read. The user could take the
    core from gdb, which runs as that user (ptrace(2), pidfd_getfd(2)).
    """
    try:
        with users_file.with_rights(users_file.rights_of(uid)):
            os.close(os.open(f"/proc/self/fd/{number}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        raise users_file.FileRefused(
            f"it is root's, of a process of uid {uid}'s, who may not read it (a setuid program's)"
        ) from None


def _named_fifo(core: CoreReader) -> str:
    """Why gdb would hang when it opens the files in the core's notes, one line; ""."""
    names = dict.fromkeys(name for _, _, name in core.notes.files)
    for name in islice(names, _NAMES):
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISFIFO(os.stat(name).st_mode):
                return printable(f"its notes name {os.fsdecode(name)}, which is a FIFO")
    return ""


def _with_notes(summary: CoreSummary, core: CoreReader, owner: int) -> CoreSummary:
    """The summary with the values of the core's notes.
    owner: of the file. The kernel wrote the notes of root's file. Other notes may be forged, or
           from a user namespace, so the file's owner counts instead
    """
    notes = core.notes
    rank, jobs = core.rank()
    user, uid = "", owner or notes.uid
    if uid is not None:
        with contextlib.suppress(KeyError, OverflowError):
            user = pwd.getpwuid(uid).pw_name
    return replace(
        summary, whole_bytes=core.whole_bytes, pid=notes.pid, signal=notes.signal, uid=uid,
        user=user, comm=notes.comm, program=core.notes.executable()[1], command=notes.command,
        threads=notes.threads, rank=rank, job=jobs[0] if jobs else "", jobs=jobs,
    )  # fmt: skip


def _with_backtrace(
    supervisor: ProcessSupervisor, summary: CoreSummary, reading: _CoreReading
) -> CoreSummary:
    """The summary with gdb's backtrace, or with the reason why gdb has none."""
    cut_off = ""
    if summary.whole_bytes is None or reading.size < summary.whole_bytes:
        total = "" if summary.whole_bytes is None else f" of {summary.whole_bytes}"
        cut_off = f"it is cut off at {reading.size}{total} bytes"
        if time.time() - reading.modified_ns / 1e9 < _FRESH_S:
            cut_off += ", or still being written"
    debugger = gdb.find_gdb()
    if not debugger:
        return replace(summary, unread="; ".join(filter(None, (cut_off, _GDB_MISSING))))
    if supervisor.left_s < 1:
        return replace(summary, unread="not read: the time was over")
    rights = users_file.rights_of(reading.uid)
    text, error, warning, cut = gdb.backtrace(
        supervisor, debugger, reading.file,
        program=reading.exec, threads=summary.threads, rights=rights,
    )  # fmt: skip
    words = printable("; ".join(filter(None, (cut_off, error, reading.doubt or warning))))
    if error:
        return replace(summary, unread=words)
    return replace(summary, text=wire.pack(text.encode("utf-8")), warning=words, cut=cut)

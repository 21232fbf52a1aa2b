"""The program on the node: list its core files, or read some of them with gdb. It only reads.

Each answer is a line as soon as it is there, so that a core that takes too long costs itself: each
is read in a fork of its own, with the rights of its owner (`nodeready.node.users_file`).
"""

from __future__ import annotations

import base64
import contextlib
import os
import pwd
import re
import resource
import shutil
import socket
import stat
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from nodeready.node import users_file
from nodeready.node.cores import core_pattern, gdb
from nodeready.node.cores.core_file import CoreReader, NoCore, program_problem
from nodeready.node.cores.core_pattern import CorePlace, Name, PatternDirectory, printable
from nodeready.node.runtime import ForkedWorker, ProcessSupervisor, Send
from nodeready.node.users_file import by_turns
from nodeready.subjects import wire
from nodeready.subjects.base import ProbeError
from nodeready.subjects.proof.facts import PROGRAM

# --- What the program is told, and what it answers: a line each (`nodeready.subjects.wire`).


@dataclass(frozen=True)
class CoresConfig:
    """What the program is told.

    nonce:    random word with which each of its lines begins
    tag:      ``nodeready:RUN``
    limit_s:  seconds after which it must have ended
    patterns: of the policy: where else cores may lie
    since_s:  only those of the last so many seconds; 0: all
    wanted:   the cores to read, as (path, inode, modified_ns, size_bytes); (): list them
    job:      read only those of a job of this name (`stacks.ranks.jobs`); "": all
    most:     read no more than so many
    """

    nonce: str
    tag: str
    limit_s: int
    patterns: tuple[str, ...] = ()
    since_s: float = 0
    selected: tuple[tuple[str, int, int, int], ...] = ()
    job: str = ""
    maximum: int = 20


@dataclass(frozen=True)
class CoreSummary:
    """What one core tells, and the backtrace that gdb took from it.

    number:      which of the files that were asked for
    unread:      why there is no backtrace, and what to do, one line; "": there is one
    warning:     what is doubtful about it, one line
    whole_bytes: the size that its own program headers give; None: not known
    pid:         as the process itself saw it; None here and below: the core does not say
    signal:      that ended it; 0: none, it is a copy of a live process
    uid, user:   whose it was: the file's owner, or of a file of root's, whom its notes name
    comm:        the first 15 characters of its name
    program:     path of the executable; "": not known
    command:     the first 80 characters of its command line
    threads:     how many it had; 0: not known
    rank, job:   by the environment that it was started with, where the core has that
    jobs:        all names of the job; the first is `job`
    text:        gdb's words, zlib and base64
    cut:         the words were more
    """

    number: wire.Count
    unread: wire.Line = ""
    warning: wire.Line = ""
    whole_bytes: int | None = None
    pid: int | None = None
    signal: int | None = None
    uid: int | None = None
    user: wire.Name = ""
    comm: wire.Name = ""
    program: wire.Path = ""
    command: wire.Line = ""
    threads: wire.Count = 0
    rank: int | None = None
    job: wire.Line = ""
    jobs: tuple[wire.Line, ...] = ()
    text: wire.Text = ""
    cut: bool = False
    seconds: wire.Seconds = 0.0


@dataclass(frozen=True)
class Done:
    """The last line of the answer.

    read:    how many cores were looked at in full
    left:    how many were not looked at, because that was enough
    unknown: how many were passed over because they do not tell their job
    """

    read: wire.Count
    left: wire.Count
    unknown: wire.Count = 0


# --- The work.

#: Younger than this, a core that is too short may still be written.
_FRESH_S = 120
_GDB_MISSING = "gdb is not installed (nodeready deploy installs it)"


def main(config: CoresConfig) -> None:
    """List, or read what is wanted."""
    with contextlib.suppress(OSError):
        os.nice(19)
    # Where memory runs out, this and what it starts is ended before any job.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    # gdb itself may crash: no core of that.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if not config.selected:
        files_listing = listing(config.patterns, config.since_s)
        print(wire.line(config.nonce, "listing", files_listing), flush=True)
        return
    supervisor = ProcessSupervisor(config.tag, config.limit_s)
    supervisor.end_on_signals()
    with supervisor:
        _read_all(supervisor, config)


def _read_all(supervisor: ProcessSupervisor, config: CoresConfig) -> None:
    read = remaining_count = unknown = 0
    for number, selected in enumerate(config.selected):
        if read == config.maximum:
            remaining_count = len(config.selected) - number
            break
        core = _read(supervisor, config, number, selected)
        if not config.job or config.job in core.jobs:
            read += 1
            print(wire.line(config.nonce, "core", core), flush=True)
        elif not core.job:
            unknown += 1
    print(wire.line(config.nonce, "done", Done(read, remaining_count, unknown)), flush=True)


def _read(
    supervisor: ProcessSupervisor,
    config: CoresConfig,
    number: int,
    selected: tuple[str, int, int, int],
) -> CoreSummary:
    """One core, whatever is wrong with it."""
    began, core = time.monotonic(), CoreSummary(number)
    with _CoreReading(supervisor, selected) as reading:
        try:
            core = replace(reading.core(), number=number)
            if not core.unread and (not config.job or config.job in core.jobs):
                core = _with_backtrace(supervisor, core, reading)
        except ProbeError:
            core = replace(core, unread=_BROKE_OFF)
    return replace(core, seconds=round(time.monotonic() - began, 3))


# --- One core: its file opened, and its notes read, in a fork.

#: The fork's seconds, of the wall clock and of the processor; its memory.
_READ_S, _READ_CPU_S, _READ_MEMORY = 20.0, 15, 1 << 30
#: Files that a core names and that are looked at.
_NAMES = 10_000
_BROKE_OFF = "not read: it takes more time or memory than a core may"
_STORED = re.compile(re.escape(core_pattern.STORE) + r"/core\..*\.([0-9]+)\.[0-9a-f]{32}\.[0-9.]+")


class _CoreReading:
    """The fork that reads one core; what it says, and the descriptor that it gives us.

    As long as it is root it says with whose rights it goes on, and gives us the open file. What
    it says afterwards is data: of the right shape (`wire.decode`), and nothing is started by it
    but gdb, with those rights.
    """

    def __init__(self, supervisor: ProcessSupervisor, selected: tuple[str, int, int, int]) -> None:
        self.file = -1
        self.uid = 0
        self.size, self.modified_ns = selected[3], selected[2]
        self.path = selected[0]
        self.exec = self.doubt = ""
        self._ours, worker_end = socket.socketpair()
        self._left_s = supervisor.left_s
        work = partial(_look, selected, worker_end)
        self._worker = ForkedWorker(work, _READ_S + 1, keep=(worker_end.fileno(),))
        self._ended = False
        supervisor.at_end(self.end)
        worker_end.close()

    def __enter__(self) -> _CoreReading:
        return self

    def __exit__(self, *problem: object) -> None:
        self.end()

    def end(self) -> None:
        """Harmless twice."""
        if not self._ended:
            self._ended = True
            self._worker.end()
            self._ours.close()
            if self.file >= 0:
                os.close(self.file)

    def core(self) -> CoreSummary:
        """What its notes tell, or why they do not. Raises ProbeError when it makes no sense."""
        patience_s = min(_READ_S, self._left_s)
        for message in self._worker.messages(patience_s, time.monotonic() + patience_s):
            if message is None or not isinstance(message, dict):
                break
            if "uid" in message and self.file < 0:
                _, numbers, _, _ = socket.recv_fds(self._ours, 1, 1)
                self.file, self.uid = numbers[0], message["uid"]
            elif "core" in message:
                core = wire.decode(CoreSummary, message["core"])
                self.exec, self.doubt = str(message.get("exec", "")), str(message.get("doubt", ""))
                return core
        return CoreSummary(0, unread=_BROKE_OFF)


def _look(selected: tuple[str, int, int, int], channel: socket.socket, send: Send) -> None:
    """The fork's work: it sends ``{"uid": U}`` with the open file, then the core."""
    users_file.confine(_READ_MEMORY, _READ_CPU_S)
    path, seen = selected[0], CoreSummary(0)
    try:
        place = users_file.follow(users_file.ROOT, path)
        number, status = users_file.open_regular(place.path, place.owner, hard_links=True)
        if (status.st_ino, users_file.modified_ns(status), status.st_size) != selected[1:]:
            reason = "it has changed since it was listed: still being written?"
            send({"core": asdict(replace(seen, unread=reason))})
            return
        owner = status.st_uid if place.owner is None else place.owner
        uid, core = owner, None
        if os.geteuid() == 0 and owner == 0:
            # The kernel's file, or systemd's: root's, though the process may have been a user's.
            uid, core = _process_owner(path, number, status)
            seen = _with_notes(seen, core, owner)
            _refuse_secret(number, uid)
        rights = users_file.rights_of(uid)
        send({"uid": uid})
        socket.send_fds(channel, [b"."], [number])
        channel.close()
        users_file.give_up(rights)
        core = core or CoreReader(number)
        address, program = core.notes.executable()
        seen = _with_notes(seen, core, owner)
        if waits := _waits(core):
            send({"core": asdict(replace(seen, unread=waits))})
            return
        doubt = program_problem(program, core.build_id(address) if address else "")
        send({"core": asdict(seen), "exec": "" if doubt else program, "doubt": doubt})
    except NoCore as problem:
        send({"core": asdict(replace(seen, unread=_compressed(path) or str(problem)))})
    except OSError as problem:
        send({"core": asdict(replace(seen, unread=_denied(problem)))})
    except MemoryError:
        send({"core": asdict(replace(seen, unread=_BROKE_OFF))})


def _process_owner(path: str, number: int, status: os.stat_result) -> tuple[int, CoreReader]:
    """Whose process left this core, a file of root's: by its name in systemd's store, and by its
    notes. Raises FileRefused when root must not read it with a debugger."""
    if status.st_mode & 0o022:
        raise users_file.FileRefused("it is root's, and others may write to it")
    core = CoreReader(number)
    stored = _STORED.fullmatch(path)
    uids = {int(stored[1][:10]) if stored else 0, core.notes.uid}
    # Where it was cut off before that is told, gdb gets no rights.
    return max(users_file.NOBODY if uid is None else uid for uid in uids), core


def _refuse_secret(number: int, uid: int) -> None:
    """Raises FileRefused for an open core that this user may not read: gdb would be the user's own
    process, who could take the core from it (ptrace(2), pidfd_getfd(2))."""
    try:
        with users_file.with_rights(users_file.rights_of(uid)):
            os.close(os.open(f"/proc/self/fd/{number}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        raise users_file.FileRefused(
            f"it is root's, of a process of uid {uid}'s, who may not read it (a setuid program's)"
        ) from None


def _waits(core: CoreReader) -> str:
    """Why gdb would wait for somebody when it opens what the core's notes name, one line."""
    names = dict.fromkeys(name for _, _, name in core.notes.files)
    for name in islice(names, _NAMES):
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISFIFO(os.stat(name).st_mode):
                return printable(f"its notes name {os.fsdecode(name)}, which is a FIFO")
    return ""


def _denied(problem: OSError) -> str:
    if isinstance(problem, PermissionError):
        return "not permitted to read it: it is another user's (its owner or root may: --sudo)"
    if isinstance(problem, FileNotFoundError):
        return "it was removed since it was listed"
    return problem.strerror or str(problem)


def _compressed(path: str) -> str:
    if not path.endswith((".zst", ".lz4", ".xz")):
        return ""
    tool = "" if shutil.which("coredumpctl") else ", which is not installed,"
    return f"it is compressed: coredumpctl{tool} unpacks it (coredumpctl dump PID -o FILE)"


def _with_notes(summary: CoreSummary, core: CoreReader, owner: int) -> CoreSummary:
    """The answer with what the core's notes tell.

    owner: of the file. Notes are words of whoever wrote it, in which a user's process may be
           another's, and in a user namespace is root's; of a file of root's they are the kernel's
    """
    notes = core.notes
    rank, jobs = core.rank()
    user, uid = "", owner or notes.uid
    if uid is not None:
        with contextlib.suppress(KeyError, OverflowError):
            user = pwd.getpwuid(uid).pw_name
    return replace(
        summary,
        whole_bytes=core.whole_bytes,
        pid=notes.pid,
        signal=notes.signal,
        uid=uid,
        user=user,
        comm=notes.comm,
        program=core.notes.executable()[1],
        command=notes.command,
        threads=notes.threads,
        rank=rank,
        job=jobs[0] if jobs else "",
        jobs=jobs,
    )


def _with_backtrace(
    supervisor: ProcessSupervisor, summary: CoreSummary, reading: _CoreReading
) -> CoreSummary:
    """The answer with gdb's backtrace, or with the reason why there is none."""
    cut_off = ""
    if summary.whole_bytes is None or reading.size < summary.whole_bytes:
        of = "" if summary.whole_bytes is None else f" of {summary.whole_bytes}"
        cut_off = f"it is cut off at {reading.size}{of} bytes"
        if time.time() - reading.modified_ns / 1e9 < _FRESH_S:
            cut_off += ", or still being written"
    debugger = gdb.find_gdb()
    if not debugger:
        return replace(summary, unread="; ".join(filter(None, (cut_off, _GDB_MISSING))))
    if supervisor.left_s < 1:
        return replace(summary, unread="not read: the time was over")
    rights = users_file.rights_of(reading.uid)
    text, error, warning, cut = gdb.backtrace(
        supervisor,
        debugger,
        reading.file,
        program=reading.exec,
        threads=summary.threads,
        rights=rights,
    )
    doubt = reading.doubt or warning
    if error:
        reason = "; ".join(filter(None, (cut_off, error, doubt)))
        return replace(summary, unread=printable(reason))
    packed = base64.b64encode(zlib.compress(text.encode("utf-8"))).decode("ascii")
    warnings = "; ".join(filter(None, (cut_off, doubt)))
    return replace(summary, text=packed, warning=printable(warnings), cut=cut)


# --- The core files that are there: by their names, in the few places where the kernel puts them.
#
# A core directory is everybody's. Each place is listed in a fork, names are never opened, and of
# more files than are kept every user's newest ones stay: who makes many hides nobody else's.

#: Files that are listed; beyond them only their number is told.
LISTED = 1000
# Files of which more is kept than their number, while a directory is looked through.
_KEPT = 20_000
# Seconds for the names of one place, and for their order; the fork's memory.
_LOOK_S, _SORT_S, _MEMORY = 6.0, 2.0, 1 << 30


@dataclass(frozen=True)
class File:
    """A file that is named like a core.

    path:        as the node names it; bytes that are no text as surrogates
    inode, modified_ns, size_bytes: with the path, what tells it from every other file
    owner:       user id of the file; of the ids for user namespaces, the first (`person`)
    age_s:       seconds since it was written, by the node's clock
    compressed:  its suffix (``.zst``); "": it is not compressed
    host:        the %h of its name; "": the name has none
    pid, signal: %P or %p, and %s, of its name; None: the name has none
    """

    path: wire.Path
    inode: wire.Number
    modified_ns: int
    size_bytes: wire.Number
    owner: wire.Uid
    age_s: float
    compressed: wire.Name = ""
    host: wire.Name = ""
    pid: int | None = None
    signal: int | None = None


@dataclass(frozen=True)
class Listing:
    """The core files that one node sees, the newest first.

    places: where was looked: patterns with ``*`` for what the kernel fills in
    more:   how many older ones are not listed
    notes:  what kept us from looking somewhere, one line each
    """

    places: tuple[wire.Path, ...]
    files: tuple[File, ...]
    more: wire.Count = 0
    notes: tuple[wire.Line, ...] = ()


def places(patterns: Iterable[str]) -> tuple[list[CorePlace], list[str]]:
    """The places to look in, and a note about each place where nobody can look.

    patterns: of the policy
    """
    directories, notes = [], []
    live = core_pattern.live()
    if live.pattern.startswith("/"):
        directories.append(live)
    elif not live.handler:
        notes.append(
            f"core_pattern is {live.shown or 'empty'}: cores lie in whatever directory each "
            "process worked in, which nobody can list (nodeready deploy sets a path)"
        )
    elif os.path.basename(live.handler) != PROGRAM:
        notes.append(
            f"core_pattern hands cores to {printable(live.handler)}, "
            "which alone knows where they are"
        )
    directories += [CorePlace(pattern) for pattern in patterns if pattern.startswith("/")]
    if os.path.isdir(core_pattern.STORE):
        directories.append(CorePlace(core_pattern.STORE_PATTERN))
    return list(dict.fromkeys(directories)), notes


# --- One place, in a fork.


@dataclass(frozen=True)
class _CoreEntry:
    """A regular file in one of a place's directories."""

    directory: int
    name: str
    device: int
    inode: int
    modified_ns: int
    size_bytes: int
    owner: int


def _entries(
    place: CorePlace, directories: Sequence[PatternDirectory], until: float
) -> tuple[list[_CoreEntry], int, list[str]]:
    """The regular files that may be the place's, of many each user's newest; how many there are;
    and a note about each directory that was not looked through."""
    entries: list[_CoreEntry] = []
    count, notes = 0, []
    for at, directory in enumerate(directories):
        names = looked = 0
        try:
            with users_file.scan(directory.real) as directory_entries:
                for entry in directory_entries:
                    names += 1
                    now_s = time.monotonic()
                    if now_s > until:
                        # A moment more, to know how many there are.
                        if now_s > until + 1:
                            break
                        continue
                    looked += 1
                    # What cannot be a core is not even looked at.
                    if not entry.name.startswith(place.prefix):
                        continue
                    with contextlib.suppress(OSError):
                        kept_entry = _entry(at, entry)
                        count += kept_entry is not None
                        entries += [kept_entry] if kept_entry else []
                    if len(entries) >= 2 * _KEPT:
                        entries = by_turns(entries)[:_KEPT]
        except OSError as problem:
            notes.append(f"{printable(directory.shown)}: {problem.strerror or problem}")
        if looked < names:
            notes.append(
                f"{printable(directory.shown)}: {names:,} names or more, looked at {looked:,}: "
                "newer cores may be among the others"
            )
    return entries, count, notes


def _entry(at: int, entry: os.DirEntry[str]) -> _CoreEntry | None:
    if not entry.is_file(follow_symlinks=False):
        return None
    status = entry.stat(follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        return None
    size, when = status.st_size, users_file.modified_ns(status)
    owner = users_file.person(status.st_uid)
    return _CoreEntry(at, entry.name, status.st_dev, status.st_ino, when, size, owner)


def _number(values: dict[str, str], letters: str) -> int | None:
    """The first of these specifiers that has a number in the name."""
    for letter in letters:
        # As long as a number of the kernel's, whatever the file is called.
        if 0 < len(values.get(letter, "")) < 20:
            return int(values[letter])
    return None


def _file(name: Name, entry: _CoreEntry, now_s: float) -> File:
    return File(
        name.path,
        entry.inode,
        entry.modified_ns,
        entry.size_bytes,
        entry.owner,
        max(0.0, now_s - entry.modified_ns / 1e9),
        compressed=name.compressed,
        host=name.values.get("h", ""),
        pid=_number(name.values, "PpIi"),
        signal=_number(name.values, "s"),
    )


def _list(place: CorePlace, since_s: float, send: Send) -> None:
    """The fork's work: it sends ``{"files": [...], "more": N, "notes": [...]}``."""
    users_file.confine(_MEMORY, int(_LOOK_S + _SORT_S) + 1)
    began, now_s = time.monotonic(), time.time()
    try:
        directories = place.directories()
    except OSError as problem:
        source = printable(str(problem.filename or place.directory))
        send({"files": [], "more": 0, "notes": [f"{source}: {problem.strerror or problem}"]})
        return
    entries, count, notes = _entries(place, directories, began + _LOOK_S)
    if since_s:
        recent = [entry for entry in entries if now_s - entry.modified_ns / 1e9 <= since_s]
        # Of those that were not kept, nobody knows.
        count, entries = count - (len(entries) - len(recent)), recent
    files: list[File] = []
    visited: set[tuple[int, int]] = set()
    for at, entry in enumerate(by_turns(entries)):
        if time.monotonic() > began + _LOOK_S + _SORT_S:
            remaining_count = len(entries) - at
            notes.append(
                f"{place.shown}: {remaining_count:,} files, and no time to look at their names"
            )
            break
        name = next(place.names(directories[entry.directory], [entry.name]), None)
        if name is None or (entry.device, entry.inode) in visited:
            count -= 1
            continue
        visited.add((entry.device, entry.inode))
        if len(files) < LISTED:
            files.append(_file(name, entry, now_s))
    unlisted = max(0, count - len(files))
    send({"files": [asdict(file) for file in files], "more": unlisted, "notes": notes})


# --- All places.


def listing(patterns: Iterable[str], since_s: float = 0) -> Listing:
    """The cores of this node, the newest first; of more than LISTED, those of each user by turns.

    patterns: the policy's, beside the one in force and systemd's store
    since_s:  only those that were written in the last so many seconds; 0: all
    """
    directories, notes = places(patterns)
    files_by_inode: dict[tuple[str, int], File] = {}
    unlisted = 0
    for place in directories:
        answer = _answer(place, since_s)
        if answer is None:
            notes.append(f"{place.shown}: no answer within {_LOOK_S + _SORT_S:.0f} s")
            continue
        before = len(files_by_inode)
        listed = [File(**row) for row in answer["files"]]
        files_by_inode |= {(file.path, file.inode): file for file in listed}
        # Two patterns may name the same directory: what both do not list is the same, too.
        unlisted = (
            max(unlisted, answer["more"])
            if len(files_by_inode) == before
            else unlisted + answer["more"]
        )
        notes += answer["notes"]
    chosen = by_turns(files_by_inode.values())[:LISTED]
    unlisted += len(files_by_inode) - len(chosen)
    shown = tuple(dict.fromkeys(place.shown for place in directories))
    newest = tuple(sorted(chosen, key=lambda file: -file.modified_ns))
    return Listing(shown, newest, unlisted, tuple(dict.fromkeys(notes)))


def _answer(place: CorePlace, since_s: float) -> Any:
    """What the fork sends; None: it hangs, or broke off."""
    worker = ForkedWorker(partial(_list, place, since_s), 2 * (_LOOK_S + _SORT_S))
    try:
        until = time.monotonic() + _LOOK_S + _SORT_S + 1
        return next(worker.messages(_LOOK_S + _SORT_S + 1, until), None)
    finally:
        worker.end()

"""The program on the node: list its core files, or read some of them with gdb. It only reads.

Each answer is a line as soon as it is there, so that a core that takes too long costs itself.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pwd
import re
import resource
import shutil
import stat
import subprocess
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from nodeready.node.cores import core_pattern
from nodeready.node.cores.core_file import NoCore, Reader, open_regular, program_problem
from nodeready.node.cores.core_pattern import Name, Place, printable
from nodeready.node.proofs.attach import environment
from nodeready.node.runtime import Supervisor
from nodeready.subjects import wire
from nodeready.subjects.proof.facts import PROGRAM

# --- What the program is told, and what it answers: a line each (`nodeready.subjects.wire`).


@dataclass(frozen=True)
class Config:
    """What the program is told.

    nonce:    random word with which each of its lines begins
    tag:      ``nodeready:RUN``
    limit_s:  seconds after which it must have ended
    patterns: of the policy: where else cores may lie
    since_s:  only those of the last so many seconds; 0: all
    wanted:   the cores to read, as (path, inode, modified_ns, size_bytes); (): list them
    job:      read only those of this job; "": all
    most:     read no more than so many
    """

    nonce: str
    tag: str
    limit_s: int
    patterns: tuple[str, ...] = ()
    since_s: float = 0
    wanted: tuple[tuple[str, int, int, int], ...] = ()
    job: str = ""
    most: int = 20


@dataclass(frozen=True)
class File:
    """A file that is named like a core.

    path:        as the node names it; bytes that are no text as surrogates
    inode, modified_ns, size_bytes: with the path, what tells it from every other file
    owner:       user id of the file
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


@dataclass(frozen=True)
class Core:
    """What one core tells, and the backtrace that gdb took from it.

    number:      which of the files that were asked for
    unread:      why there is no backtrace, and what to do, one line; "": there is one
    warning:     what is doubtful about it, one line
    whole_bytes: the size that its own program headers give; None: not known
    pid:         as the process itself saw it; None here and below: the core does not say
    signal:      that ended it; 0: none, it is a copy of a live process
    uid, user:   whose it was
    comm:        the first 15 characters of its name
    program:     path of the executable; "": not known
    command:     the first 80 characters of its command line
    threads:     how many it had; 0: not known
    rank, job:   by the environment that it was started with, where the core has that
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


# --- The core files that are there: by their names, in the few places where the kernel puts them.

#: Files that are listed; beyond them only their number is told.
LISTED = 1000


def places(patterns: Iterable[str]) -> tuple[list[Place], list[str]]:
    """The places to look in, and a note about each place where nobody can look.

    patterns: of the policy
    """
    found, notes = [], []
    live = core_pattern.live()
    if live.pattern.startswith("/"):
        found.append(live)
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
    found += [Place(pattern) for pattern in patterns if pattern.startswith("/")]
    if os.path.isdir(core_pattern.STORE):
        found.append(Place(core_pattern.STORE_PATTERN))
    return list(dict.fromkeys(found)), notes


def _number(values: dict[str, str], letters: str) -> int | None:
    """The first of these specifiers that has a number in the name."""
    for letter in letters:
        # As long as a number of the kernel's, whatever the file is called.
        if 0 < len(values.get(letter, "")) < 20:
            return int(values[letter])
    return None


def _file(name: Name, now: float) -> File | None:
    """The file of that name; None: it is none, or gone."""
    try:
        seen = os.lstat(name.path)
    except OSError:
        return None
    if not stat.S_ISREG(seen.st_mode):
        return None
    return File(
        name.path,
        seen.st_ino,
        seen.st_mtime_ns,
        seen.st_size,
        seen.st_uid,
        max(0.0, now - seen.st_mtime),
        compressed=name.compressed,
        host=name.values.get("h", ""),
        pid=_number(name.values, "PpIi"),
        signal=_number(name.values, "s"),
    )


def _names(place: Place, notes: list[str]) -> Iterator[Name]:
    try:
        yield from place.find()
    except OSError as problem:
        where = printable(str(problem.filename or place.directory))
        notes.append(f"{where}: {problem.strerror or problem}")


def listing(patterns: Iterable[str], since_s: float = 0) -> Listing:
    """The cores of this node, the newest first.

    patterns: the policy's, beside the one in force and systemd's store
    since_s:  only those that were written in the last so many seconds; 0: all
    """
    now = time.time()
    where, notes = places(patterns)
    found: dict[str, File] = {}
    for place in where:
        for name in _names(place, notes):
            file = None if name.path in found else _file(name, now)
            if file is not None and (not since_s or file.age_s <= since_s):
                found[name.path] = file
    newest = sorted(found.values(), key=lambda file: -file.modified_ns)
    shown = tuple(dict.fromkeys(place.shown for place in where))
    more = max(0, len(newest) - LISTED)
    return Listing(shown, tuple(newest[:LISTED]), more, tuple(dict.fromkeys(notes)))


# --- gdb's backtraces of one core.

#: Seconds for one core.
LIMIT_S = 60
FRAMES, THREADS = 200, 500
#: Characters of gdb's words that are kept.
TEXT = 1 << 20
#: The headings in gdb's text; `nodeready.triage.cores.document` reads the text by them.
CRASHED, EVERY, PYTHON = "== the thread of the signal", "== every thread", "== Python"

# A frame whose function is known.
_NAMED = re.compile(r"^#[0-9]+ +(?:0x[0-9a-f]+ in |(?!0x))[^?\s]", re.M)

# What gdb says of most cores, whatever is wrong with them.
_NOISE = ("Undefined command", "warning: Unexpected size of section")


def find_gdb() -> str:
    """gdb's path; "": it is not installed."""
    return shutil.which("gdb") or ""


def rights(owner: int) -> dict[str, object]:
    """How gdb is started: root does not read what a user can write, but lets that user read it."""
    if os.geteuid() != 0 or owner == 0:
        return {}
    try:
        known = pwd.getpwuid(owner)
        groups = os.getgrouplist(known.pw_name, known.pw_gid)
        return {"user": owner, "group": known.pw_gid, "extra_groups": groups}
    except KeyError:
        return {"user": owner, "group": owner, "extra_groups": []}


def command(gdb: str, program: str, core: str, threads: int) -> list[str]:
    """gdb in batch; it reads no start-up file and asks nobody anything."""
    said = [f"set backtrace limit {FRAMES}", "set print elements 100", "set print repeats 10"]
    last = max(1, min(threads, THREADS))
    asked = [
        *(f"echo \\n{CRASHED}\\n", "bt"),
        *(f"echo \\n{EVERY}\\n", f"thread apply 1-{last} bt"),
        *(f"echo \\n{PYTHON}\\n", "py-bt"),
    ]
    words = [gdb, "-batch", "-nx", "-iex", "set width 0", "-iex", "set height 0"]
    for line in (*said, *asked):
        words += ["-ex", line]
    words += [
        f"--core={core}",
        *([f"--exec={program}", f"--symbols={program}"] if program else ()),
    ]
    quiet = shutil.which("ionice")
    return [quiet, "-c", "3", "-t", *words] if quiet else words


class _Output:
    """gdb's output, the first TEXT bytes of it."""

    def __init__(self) -> None:
        self.out, self.more = bytearray(), False

    def add(self, process: subprocess.Popen[bytes], stream: int, piece: bytes) -> None:
        if stream == 1:
            self.more = self.more or len(self.out) + len(piece) > TEXT
            self.out += piece[: max(0, TEXT - len(self.out))]


def backtrace(
    supervisor: Supervisor, gdb: str, core: Reader, owner: int
) -> tuple[str, str, str, bool]:
    """gdb's text, why there is none, what is doubtful about it, and whether it is cut.

    core:  it is handed to gdb as an open file: no name that somebody can change meanwhile
    owner: user id of its file, with whose rights gdb runs
    """
    address, program = core.notes.executable()
    warning = program_problem(program, core.build_id(address) if address else "")
    path = "" if warning else program
    argv = command(gdb, path, f"/proc/self/fd/{core.number}", core.notes.threads)
    kept = _Output()
    limit_s = min(LIMIT_S, supervisor.left_s)
    how: dict[str, object] = {"pass_fds": (core.number,), "env": environment(), "cwd": "/"}
    try:
        ended = supervisor.run(argv, limit_s, kept.add, **how, **rights(owner))
    except OSError as problem:
        return "", f"{gdb}: {problem.strerror or problem}", warning, False
    text = bytes(kept.out).decode("utf-8", "replace")
    if _NAMED.search(text):
        if ended.rc is None:
            kept.more = True
            warning = warning or f"gdb was ended after {limit_s:.0f} s: not every thread is there"
        return text, "", warning, kept.more
    if ended.rc is None:
        return "", f"gdb had no backtrace after {limit_s:.0f} s and was ended", warning, False
    rows = [row.strip() for row in ended.err.splitlines() if row.strip()]
    said = [row for row in rows if not row.startswith(_NOISE)]
    why = "gdb finds no function in it" + (f": {said[-1][:200]}" if said else "")
    return "", why, warning, False


# --- The work.

#: Younger than this, a core that is too short may still be written.
_FRESH_S = 120
_GDB_MISSING = "gdb is not installed (nodeready deploy installs it)"


def main(config: Config) -> None:
    """List, or read what is wanted."""
    with contextlib.suppress(OSError):
        os.nice(19)
    # gdb itself may crash: no core of that.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if not config.wanted:
        found = listing(config.patterns, config.since_s)
        print(wire.line(config.nonce, "listing", found), flush=True)
        return
    supervisor = Supervisor(config.tag, config.limit_s)
    supervisor.end_on_signals()
    with supervisor:
        _read_all(supervisor, config)


def _read_all(supervisor: Supervisor, config: Config) -> None:
    read = left = unknown = 0
    for number, wanted in enumerate(config.wanted):
        if read == config.most:
            left = len(config.wanted) - number
            break
        seen = _read(supervisor, config, number, wanted)
        if not config.job or seen.job == config.job:
            read += 1
            print(wire.line(config.nonce, "core", seen), flush=True)
        elif not seen.job:
            unknown += 1
    print(wire.line(config.nonce, "done", Done(read, left, unknown)), flush=True)


def _read(
    supervisor: Supervisor, config: Config, number: int, wanted: tuple[str, int, int, int]
) -> Core:
    """One core, whatever is wrong with it."""
    path, began = wanted[0], time.monotonic()
    seen = Core(number)
    try:
        owner = os.lstat(path).st_uid
        file = open_regular(path, owner)
    except OSError as problem:
        return replace(seen, unread=_denied(problem))
    try:
        known = os.fstat(file)
        if (known.st_ino, known.st_mtime_ns, known.st_size) != wanted[1:]:
            return replace(seen, unread="it has changed since it was listed: still being written?")
        core = Reader(file)
        seen = _with_notes(seen, core)
        if config.job and seen.job != config.job:
            return seen
        seen = _with_backtrace(supervisor, seen, core, known)
    except NoCore as problem:
        seen = replace(seen, unread=_compressed(path) or str(problem))
    except OSError as problem:
        seen = replace(seen, unread=problem.strerror or str(problem))
    finally:
        os.close(file)
    return replace(seen, seconds=round(time.monotonic() - began, 3))


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


def _with_notes(seen: Core, core: Reader) -> Core:
    """The answer with what the core's notes tell."""
    notes = core.notes
    rank, job = core.rank()
    user = ""
    if notes.uid is not None:
        with contextlib.suppress(KeyError, OverflowError):
            user = pwd.getpwuid(notes.uid).pw_name
    return replace(
        seen,
        whole_bytes=core.whole_bytes,
        pid=notes.pid,
        signal=notes.signal,
        uid=notes.uid,
        user=user,
        comm=notes.comm,
        program=core.notes.executable()[1],
        command=notes.command,
        threads=notes.threads,
        rank=rank,
        job=job,
    )


def _with_backtrace(
    supervisor: Supervisor, seen: Core, core: Reader, known: os.stat_result
) -> Core:
    """The answer with gdb's backtrace, or with the reason why there is none."""
    short = core.whole_bytes is None or known.st_size < core.whole_bytes
    cut_off = ""
    if short:
        of = "" if core.whole_bytes is None else f" of {core.whole_bytes}"
        cut_off = f"it is cut off at {known.st_size}{of} bytes"
        if time.time() - known.st_mtime < _FRESH_S:
            cut_off += ", or still being written"
    gdb = find_gdb()
    if not gdb:
        return replace(seen, unread="; ".join(filter(None, (cut_off, _GDB_MISSING))))
    if supervisor.left_s < 1:
        return replace(seen, unread="not read: the time was over")
    text, error, warning, cut = backtrace(supervisor, gdb, core, known.st_uid)
    packed = base64.b64encode(zlib.compress(text.encode("utf-8"))).decode("ascii") if text else ""
    doubts = "; ".join(filter(None, (cut_off, warning)))
    if error:
        why = "; ".join(filter(None, (cut_off, error, warning)))
        return replace(seen, unread=printable(why))
    return replace(seen, text=packed, warning=doubts, cut=cut)

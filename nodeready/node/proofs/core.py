"""Prove that a crash leaves a core: crash a shell of our own, read its core, remove it."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import resource
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nodeready.node.proofs.attach import environment, first_number
from nodeready.node.proofs.config import Config
from nodeready.node.runtime import Own
from nodeready.subjects.proof.facts import DUMP_S, PROGRAM, REPORTERS, Core, Directory

# --- Where kernel.core_pattern sends the core of a process: core(5), "Naming of core dump files".

#: Stands for what only the kernel knows: a number in an outer namespace, the CPU.
UNKNOWN = "\0"
#: All specifiers of Linux 6.16; the kernel drops any other one.
SPECIFIERS = frozenset("cCdeEFghiIpPstu")
# The kernel keeps a value of these from leading into another directory.
_NAMES = frozenset("eEh")


def program(pattern: str) -> str:
    """The program that a pattern pipes to, or the socket (``@``); "": it names a file."""
    if pattern.startswith("@"):
        return pattern.split(maxsplit=1)[0]
    words = pattern[1:].split() if pattern.startswith("|") else []
    # A relative program is looked up from /, where the kernel starts it.
    return f"/{words[0].lstrip('/')}" if words else "|" if pattern.startswith("|") else ""


def expand(pattern: str, values: Mapping[str, str], *, uses_pid: bool = False) -> str:
    """The path of a core, with UNKNOWN for each specifier that has no value.

    uses_pid: kernel.core_uses_pid, which counts when there is no %p
    """

    def one(match: re.Match[str]) -> str:
        letter = match[1]
        if letter == "%":
            return "%"
        value = values.get(letter, UNKNOWN if letter in SPECIFIERS else "")
        return _harmless(value) if letter in _NAMES else value

    path = re.sub(r"%(.?)", one, pattern, flags=re.S)
    # "%%p" is no %p.
    if uses_pid and "p" not in re.findall(r"%(.)", pattern, re.S):
        path += f".{values.get('p', UNKNOWN)}"
    return path


def _harmless(value: str) -> str:
    value = value.replace("/", "!")
    return "!" if value == "" else f"!{value[1:]}" if value in (".", "..") else value


def pattern_shown(path: str) -> str:
    """An expanded path for people: ``*`` for what is unknown, bytes that are no text replaced."""
    text = path.replace(UNKNOWN, "*")
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def names_process(pattern: str, values: Mapping[str, str], *, uses_pid: bool = False) -> bool:
    """Whether the path contains a number of the process that is known here."""
    letters = {*re.findall(r"%(.)", pattern, re.S), *("p" if uses_pid else "")}
    return bool(letters & {"p", "P", "i", "I"} & set(values))


def existing(path: str) -> Iterator[str]:
    """The files whose paths an expanded path can stand for."""
    if UNKNOWN not in path:
        # No listing: a core directory may let users write and not read.
        if os.path.lexists(path):
            yield path
        return
    pieces = path.split(UNKNOWN)
    exact = re.compile(r"[0-9]*".join(map(re.escape, pieces)), re.S)
    for found in glob.iglob("*".join(map(glob.escape, pieces))):
        if exact.fullmatch(found):
            yield found


# --- The core file of our canary: told from all others, measured, removed.

# The kernel writes the program headers and, right after them, the command line of what crashed.
_HEAD_BYTES = 65536


@dataclass(frozen=True)
class Found:
    """A core file.

    whole_bytes: the size that its headers give; None: it has no headers
    """

    path: str
    device: int
    inode: int
    size_bytes: int
    whole_bytes: int | None


@dataclass(frozen=True)
class Mark:
    """What tells our canary's core.

    word: stands on the canary's command line, which a core begins with, and nowhere else
    uid:  whose it must be
    since: seconds since the epoch; it cannot be older
    """

    word: str
    uid: int
    since: float


def look(path: str, mark: Mark, *, named: bool) -> Found | None:
    """The file at ``path``, when it is our canary's core; None for every other.

    named: its name has the canary's number, so that it is ours even when it was cut off before
    the command line. A link is never followed.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        seen = os.fstat(number)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != mark.uid or seen.st_nlink != 1:
            return None
        head = os.read(number, _HEAD_BYTES)
    except OSError:
        return None
    finally:
        os.close(number)
    # Its times are the file server's: a little off.
    ours = mark.word.encode() in head or (named and seen.st_mtime >= mark.since - 2)
    if not ours:
        return None
    return Found(path, seen.st_dev, seen.st_ino, seen.st_size, whole_bytes(head))


def whole_bytes(head: bytes) -> int | None:
    """The size of the core that begins with ``head``: where its last segment ends (elf(5)).

    None for what is no ELF file, or has not even its program headers.
    """
    layouts = {b"\x01": ("I", 0x1C, 0x2A, "IIII", 4), b"\x02": ("Q", 0x20, 0x36, "QQQQ", 8)}
    if head[:4] != b"\x7fELF" or head[4:5] not in layouts:
        return None
    word, at_table, at_size, fields, at_offset = layouts[head[4:5]]
    order = ">" if head[5:6] == b"\x02" else "<"
    try:
        (table,) = struct.unpack_from(order + word, head, at_table)
        size, count = struct.unpack_from(order + "HH", head, at_size)
        ends = [0]
        for number in range(count):
            # offset, virtual address, physical address, size in the file
            values = struct.unpack_from(order + fields, head, table + number * size + at_offset)
            ends.append(values[0] + values[-1])
    except struct.error:
        return None
    return max(ends)


def remove(found: Found) -> str:
    """Remove exactly this file; returns why it cannot be removed, or ""."""
    parent, name = os.path.split(found.path)
    try:
        directory = os.open(parent or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as problem:
        return problem.strerror or str(problem)
    try:
        now = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if (now.st_dev, now.st_ino) == (found.device, found.inode):
            os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    except OSError as problem:
        return problem.strerror or str(problem)
    finally:
        with contextlib.suppress(OSError):
            os.close(directory)
    return ""


# --- A shell of our own to crash, and everything that its crash can leave on the disk.

_UP_S = 10
# The PID namespace of the host (PROC_PID_INIT_INO): there, %P is the number that we know.
_HOST_PIDS = "pid:[4026531836]"


class Scene:
    """A sleeping /bin/sh, and where its core may be.

    home:  a directory of its own, which it works in: where the core lies when the pattern is
           relative, or not the kernel's; "": none can be made
    """

    def __init__(self, own: Own, pattern: str) -> None:
        self.own = own
        self.pattern = pattern
        self.home = ""
        self.pid = 0
        self.program = "/bin/sh"
        self.mark = Mark(os.urandom(8).hex(), os.geteuid(), time.time())
        self._uses_pid = bool(first_number("/proc/sys/kernel/core_uses_pid"))
        self._values: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: float | None = None

    def begin(self) -> None:
        """Raises OSError when no shell comes up."""
        self.home = _private(self.mark.word)
        # It ends by itself when we do: its input is a pipe of ours.
        argv = ["/bin/sh", "-c", "echo; read x; :", self.own.tag, self.mark.word]
        process = self.own.start(argv, stdin=subprocess.PIPE, cwd=self.home or "/")
        self._process, self.pid = process, process.pid
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], min(_UP_S, self.own.left_s))
        if not ready or not os.read(process.stdout.fileno(), 1):
            raise OSError("/bin/sh does not run")
        with contextlib.suppress(OSError):
            self.program = os.readlink(f"/proc/{self.pid}/exe")
        self._values = self._specifiers()

    def _specifiers(self) -> dict[str, str]:
        pid = str(self.pid)
        limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="surrogateescape") as file:
            comm = file.read().rstrip("\n")
        found = {
            "p": pid, "i": pid, "u": str(os.getuid()), "g": str(os.getgid()), "d": "1",
            "s": str(int(signal.SIGSEGV)), "h": os.uname().nodename, "e": comm,
            "E": self.program, "c": str(limit % 2**64),
        }  # fmt: skip
        with contextlib.suppress(OSError):
            if os.readlink("/proc/self/ns/pid") == _HOST_PIDS:
                found.update(P=pid, I=pid)
        return found

    def crash(self) -> bool | None:
        """Whether the kernel says that it dumped; None when it is still at it."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        os.kill(self.pid, signal.SIGSEGV)
        until = time.monotonic() + min(DUMP_S, self.own.left_s)
        # Popen's own wait() drops the bit that says so.
        while (seen := os.waitid(os.P_PID, self.pid, how)) is None:
            if time.monotonic() > until:
                return None
            time.sleep(0.02)
        self._ended = time.time()
        return seen.si_code == os.CLD_DUMPED

    def expected(self, second: int | None = None) -> str:
        """The path that the pattern gives, expanded; second: of the crash."""
        values = self._values if second is None else {**self._values, "t": str(second)}
        path = expand(self.pattern, values, uses_pid=self._uses_pid)
        return os.path.join(self.home or "/", path)

    def cores(self) -> list[Found]:
        """Every core of the canary's that is there."""
        found: list[Found | None] = []
        if self.home:
            with contextlib.suppress(OSError):
                paths = [entry.path for entry in os.scandir(self.home)]
                found = [look(path, self.mark, named=True) for path in paths]
        if self._values and self.pattern and not program(self.pattern):
            named = names_process(self.pattern, self._values, uses_pid=self._uses_pid)
            until = self._ended or time.time()
            # A second more on both sides: the kernel's coarse clock is a little behind.
            seconds = range(int(self.mark.since) - 1, int(until) + 2)
            for path in dict.fromkeys(self.expected(second) for second in seconds):
                for name in existing(path):
                    # A number alone is the host's only where we have the host's numbers.
                    ours = named and "P" in self._values
                    found.append(look(name, self.mark, named=ours))
        return [one for one in found if one is not None]

    def tidy(self) -> str:
        """End the canary, remove its cores; returns what is left and why. Harmless twice."""
        if self._process is not None:
            self.own.stop(self._process)
        problems = [(core.path, remove(core)) for core in self.cores()]
        if self.home:
            with contextlib.suppress(OSError):
                os.rmdir(self.home)
        return "; ".join(f"{pattern_shown(path)}: {why}" for path, why in problems if why)


def _private(word: str) -> str:
    """A new directory for this user alone; "" when none can be made."""
    import tempfile

    for parent in ("/tmp", "/var/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix=f"nodeready-{word}-", dir=parent)
    return ""


# --- The core of our canary in systemd-coredump's store: coredumpctl(1), systemd-coredump(8).

_STORE = "/var/lib/systemd/coredump"
# The kernel does not wait for the handler, which takes a backtrace of its own first.
_KEEP_S = 15
_STORAGE = re.compile(r"^\s*Storage: (/\S+|journal|none)(?: \((.*)\))?\s*$", re.M)


@dataclass(frozen=True)
class Kept:
    """What systemd-coredump has of the canary.

    path: its file, or "journal"; "": nothing
    said: why there is no copy that gdb could read; "": there is one
    """

    path: str = ""
    said: str = ""


def store_kept(own: Own, pid: int, mark: Mark, home: str) -> Kept:
    """Wait for the canary's core, and copy it to ``home``/core.

    The stored file stays, for systemd-tmpfiles: only root may remove it.
    """
    until = time.monotonic() + min(_KEEP_S, own.left_s / 2)
    while True:
        path, said = _entry(own, pid, mark)
        if path or time.monotonic() > until:
            break
        time.sleep(0.3)
    if not path:
        return Kept(_stored(pid, mark), said)
    if path == "none" or said == "missing":
        return Kept("", f"coredumpctl: Storage: {path} {said}".rstrip())
    return Kept(path, _copy(own, pid, home))


def _entry(own: Own, pid: int, mark: Mark) -> tuple[str, str]:
    """Where the journal says that the core is, and how it is there; else "", and why not."""
    argv = ["coredumpctl", "--no-pager", "-1", "info", str(pid)]
    try:
        info = own.run(argv, 5, env=environment())
    except OSError as problem:
        return "", f"coredumpctl: {problem.strerror}"
    # An earlier process had the same number, and another command line.
    match = _STORAGE.search(info.out) if mark.word in info.out else None
    return (match[1], match[2] or "") if match else ("", f"coredumpctl: {info.first}")


def _copy(own: Own, pid: int, home: str) -> str:
    """Why there is no copy; "": there is one."""
    if not home:
        return "no directory for a copy of the core"
    argv = ["coredumpctl", "--no-pager", "-o", os.path.join(home, "core"), "dump", str(pid)]
    ended = own.run(argv, own.left_s, env=environment())
    return "" if ended.rc == 0 else f"coredumpctl: {ended.first or 'no answer'}"


def _stored(pid: int, mark: Mark) -> str:
    """The file of a journal that this user may not read: core.COMM.UID.BOOT.PID.TIME."""
    for path in glob.glob(f"{_STORE}/core.*.{mark.uid}.*.{pid}.*"):
        with contextlib.suppress(OSError):
            if os.lstat(path).st_mtime >= mark.since - 2:
                return path
    return ""


_PATTERN = "/proc/sys/kernel/core_pattern"
_GDB_S = 60


def _directory(path: str) -> Directory | None:
    """The directory as this user finds it; None: its name is not known."""
    if UNKNOWN in path:
        return None
    shown = pattern_shown(path)
    try:
        mode = os.stat(os.path.join(path, "")).st_mode
        room = os.statvfs(path)
    except OSError as problem:
        return Directory(shown, problem.strerror or str(problem))
    return Directory(
        shown,
        mode=mode & 0o7777,
        writable=os.access(path, os.W_OK | os.X_OK),
        read_only=bool(room.f_flag & os.ST_RDONLY),
        free_bytes=room.f_bavail * room.f_frsize,
        free_files=room.f_favail if room.f_files else None,
    )


def _backtrace(own: Own, gdb: str, program: str, path: str) -> tuple[int, str]:
    """How many frames gdb reads from a core, and what it said when there is none."""
    argv = [gdb, "-batch", "-nx", "-ex", "bt", program, path]
    ended = own.run(argv, _GDB_S, env=environment())
    if ended.rc is None:
        return 0, f"no answer in {ended.seconds:.0f} s"
    frames = len(re.findall(r"^#[0-9]+ ", ended.out, re.M))
    return frames, "" if frames else ended.first or f"exit status {ended.rc}"


def _before(scene: Scene) -> Core:
    """What can be seen before the crash."""
    handler = program(scene.pattern)
    limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
    expected = "" if handler else pattern_shown(scene.expected())
    # With no second in it, the path is what a crash would replace (fs/coredump.c unlinks it).
    there = not handler and scene.pattern and os.path.lexists(scene.expected())
    return Core(
        pattern=pattern_shown(scene.pattern),
        handler=pattern_shown(handler),
        handler_there=not handler or os.access(handler, os.X_OK),
        skipped=f"{expected} is there, and a crash would replace it" if there else "",
        # Of a process that is not, these files are root's, though not their directory.
        dumpable=os.stat(f"/proc/{scene.pid}/environ").st_uid == os.geteuid(),
        limit_bytes=None if limit == resource.RLIM_INFINITY else limit,
        expected=expected,
        gdb=shutil.which("gdb") or "",
    )


def _after(scene: Scene, seen: Core) -> Core:
    """Crash it, and see what is on the disk, where it stays."""
    seen = replace(seen, dumped=scene.crash())
    if not seen.handler:
        seen = replace(seen, directory=_directory(os.path.dirname(scene.expected())))
    elif os.path.basename(seen.handler) == PROGRAM and seen.dumped:
        kept = store_kept(scene.own, scene.pid, scene.mark, scene.home)
        seen = replace(seen, path=pattern_shown(kept.path), gdb_said=kept.said)
    found = scene.cores()
    if not found:
        return seen
    core = found[-1]
    at_home = os.path.dirname(core.path) == scene.home
    relative = not seen.handler and not os.path.isabs(scene.pattern)
    seen = replace(
        seen,
        path=seen.path or pattern_shown(core.path),
        stray=at_home and not relative and not seen.path,
        size_bytes=core.size_bytes,
        whole_bytes=core.whole_bytes,
    )
    if seen.gdb and core.size_bytes >= (core.whole_bytes or sys.maxsize):
        frames, said = _backtrace(scene.own, seen.gdb, scene.program, core.path)
        seen = replace(seen, frames=frames, gdb_said=said)
    return seen


def prove(own: Own, config: Config) -> Core:
    """Crash a canary and see what is left of it."""
    with open(_PATTERN, encoding="utf-8", errors="surrogateescape") as file:
        pattern = file.read().rstrip("\n")
    handler = program(pattern)
    if os.path.basename(handler) in REPORTERS:
        shown = pattern_shown(handler)
        why = f"{shown} reports each crash to somebody, so nothing was crashed"
        return Core(pattern_shown(pattern), shown, skipped=why)
    scene = Scene(own, pattern)
    own.at_end(scene.tidy)
    try:
        scene.begin()
        seen = _before(scene)
        seen = seen if seen.skipped else _after(scene, seen)
    finally:
        left = scene.tidy()
    return replace(seen, left=left)

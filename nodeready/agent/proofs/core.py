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
import tempfile
import time
from dataclasses import dataclass, replace

from nodeready.agent.cores import core_pattern, gdb
from nodeready.agent.proc import first_number
from nodeready.agent.proofs.attach import environment
from nodeready.agent.runtime import ProcessSupervisor
from nodeready.agent.users_file import ROOT, follow, open_regular
from nodeready.subjects.proof import facts

# --- The canary's core file: found among other cores, measured, removed.

_HEAD_BYTES = 65536  # the program headers, then the command line of the crashed process


@dataclass(frozen=True)
class CanaryCore:
    path: str
    device: int
    inode: int
    size_bytes: int
    whole_bytes: int | None  # the size that its headers give; None: it has no headers


@dataclass(frozen=True)
class Mark:
    """What identifies the canary's core."""

    word: str  # that only the canary's command line has, near the beginning of the core
    uid: int  # the owner of the core
    since: float  # seconds since the epoch; the core is not older


def find_core(path: str, mark: Mark, *, named: bool) -> CanaryCore | None:
    """The file at ``path`` if it is our canary's core; None for any other file, and for a link.
    named: its name has the canary's pid, so it is ours even if it lacks the command line
    """
    try:
        if stat.S_ISLNK(os.lstat(path).st_mode):
            return None
        place = follow(ROOT, path)
        number, status = open_regular(place.path, place.owner)
        with os.fdopen(number, "rb", buffering=0) as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    if status.st_uid != mark.uid or status.st_nlink != 1:
        return None
    # The file server's clock may differ a little.
    if mark.word.encode() in head or (named and status.st_mtime >= mark.since - 2):
        return CanaryCore(path, status.st_dev, status.st_ino, status.st_size, whole_bytes(head))
    return None


def whole_bytes(head: bytes) -> int | None:
    """The size of the core that begins with ``head``: the end of its last segment (elf(5)). None
    if the file is no ELF file or lacks program headers.
    """
    layouts = {b"\x01": ("I", 0x1C, 0x2A, "IIII", 4), b"\x02": ("Q", 0x20, 0x36, "QQQQ", 8)}
    if head[:4] != b"\x7fELF" or head[4:5] not in layouts:
        return None
    # The type of an offset; the places of the table's offset and of its rows' size and number; a
    # row's fields, and their place in it.
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


def remove(core_file: CanaryCore) -> str:
    """Remove exactly this file. Returns why it cannot be removed; "": it is removed."""
    parent, name = os.path.split(core_file.path)
    try:
        directory = os.open(parent or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            current = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if (current.st_dev, current.st_ino) == (core_file.device, core_file.inode):
                os.unlink(name, dir_fd=directory)
        finally:
            os.close(directory)
    except FileNotFoundError:
        return ""
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""


# --- The canary: a shell to crash, and the places where its core can be.

_UP_S = 10
# The PID namespace of the host (PROC_PID_INIT_INO), in which %P is the pid that we know.
_HOST_PIDS = "pid:[4026531836]"


class CrashCanary:
    """A sleeping /bin/sh to crash, and the places where its core may be."""

    def __init__(self, supervisor: ProcessSupervisor, pattern: str) -> None:
        self.supervisor, self.pattern, self.pid, self.program = supervisor, pattern, 0, "/bin/sh"
        # The shell's working directory, which is new: a relative pattern or a program puts the
        # core there; "": no directory can be made.
        self.home = ""
        self.mark = Mark(os.urandom(8).hex(), os.geteuid(), time.time())
        self._began_s = time.monotonic()
        self._uses_pid = bool(first_number("/proc/sys/kernel/core_uses_pid"))
        self._values: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: tuple[float, float] | None = None  # by time.time(), and time.monotonic()

    def begin(self) -> None:
        """Start the shell. Raises OSError if it does not start."""
        self.home = _private(self.mark.word)
        # The shell ends with this process, which holds the pipe of the shell's input.
        argv = ["/bin/sh", "-c", "echo; read x; :", self.supervisor.tag, self.mark.word]
        process = self.supervisor.start(argv, stdin=subprocess.PIPE, cwd=self.home or "/")
        self._process, self.pid = process, process.pid
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], min(_UP_S, self.supervisor.left_s))
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
        values = {
            "p": pid, "i": pid, "u": str(os.getuid()), "g": str(os.getgid()), "d": "1",
            "s": str(int(signal.SIGSEGV)), "h": os.uname().nodename, "e": comm,
            "E": self.program, "c": str(limit % 2**64),
        }  # fmt: skip
        with contextlib.suppress(OSError):
            if os.readlink("/proc/self/ns/pid") == _HOST_PIDS:
                values.update(P=pid, I=pid)
        return values

    @property
    def has_unique_path(self) -> bool:
        """Whether no other canary's core can have the same path at the same time."""
        is_unique = core_pattern.handler_of(self.pattern) or not os.path.isabs(self.pattern)
        return bool(is_unique or self._uses_pid or re.search("%[pPiI]", self.pattern))

    def crash(self) -> bool | None:
        """Crash the shell. Returns whether the kernel dumped a core; None: it is still dumping."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        os.kill(self.pid, signal.SIGSEGV)
        until = time.monotonic() + min(facts.DUMP_S, self.supervisor.left_s)
        # Popen.wait() drops the bit of the status that tells about the dump.
        while (status := os.waitid(os.P_PID, self.pid, how)) is None:
            if time.monotonic() > until:
                return None
            time.sleep(0.02)
        self._ended = time.time(), time.monotonic()
        return status.si_code == os.CLD_DUMPED

    def expected_path(self, second: int | None = None) -> str:
        """The core's path by the pattern. second: of the crash, for a pattern with the time"""
        values = self._values if second is None else {**self._values, "t": str(second)}
        path = core_pattern.expand(self.pattern, values, uses_pid=self._uses_pid)
        return os.path.join(self.home or "/", path)

    def cores(self) -> list[CanaryCore]:
        core_files: list[CanaryCore | None] = []
        if self.home:
            with contextlib.suppress(OSError):
                paths = [entry.path for entry in os.scandir(self.home)]
                core_files = [find_core(path, self.mark, named=True) for path in paths]
        if self._values and self.pattern and not core_pattern.handler_of(self.pattern):
            named = core_pattern.names_process(self.pattern, self._values, uses_pid=self._uses_pid)
            for path in dict.fromkeys(self.expected_path(second) for second in self._seconds()):
                for name in core_pattern.existing_files(path):
                    # The name has the host's pid, which we know only in the host's namespace.
                    is_ours = named and "P" in self._values
                    core_files.append(find_core(name, self.mark, named=is_ours))
        return [core_file for core_file in core_files if core_file is not None]

    def _seconds(self) -> list[int]:
        """The seconds since the epoch in which the core can have been dumped. If the clock was set
        meanwhile, these are the seconds after the start by the old clock and those before the end
        by the new one. One second more on both sides: the kernel's coarse clock is behind.
        """
        until, until_s = self._ended or (time.time(), time.monotonic())
        first, last = int(self.mark.since) - 1, int(until) + 1
        count = int(until_s - self._began_s) + 3
        return sorted({*range(first, first + count), *range(last - count, last + 1)})

    def clean_up(self) -> str:
        """End the canary and remove its cores. Returns the cores that are left, with the reason. A
        second call is harmless.
        """
        if self._process is not None:
            self.supervisor.stop(self._process)
        problems = [(core_pattern.printable(core.path), remove(core)) for core in self.cores()]
        if self.home:
            with contextlib.suppress(OSError):
                os.rmdir(self.home)
        return "; ".join(f"{path}: {reason}" for path, reason in problems if reason)


def _private(word: str) -> str:
    """A new directory that only this user can read; "": none can be made."""
    for parent in ("/tmp", "/var/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix=f"nodeready-{word}-", dir=parent)
    return ""


# --- The canary's core in systemd-coredump's store: coredumpctl(1), systemd-coredump(8).

_STORE = "/var/lib/systemd/coredump"
# The kernel does not wait for the handler, which first takes a backtrace itself.
_KEEP_S = 15
_STORAGE = re.compile(r"^\s*Storage: (/\S+|journal|none)(?: \((.*)\))?\s*$", re.M)


def stored_core(supervisor: ProcessSupervisor, pid: int, mark: Mark, home: str) -> tuple[str, str]:
    """Wait for the canary's core, and copy it to ``home``/core.

    Returns the path of its file, "journal", or "" for no core; and why gdb has no copy to read, ""
    if there is a copy. The stored file stays, for systemd-tmpfiles: only root may remove it.
    """
    until = time.monotonic() + min(_KEEP_S, supervisor.left_s / 2)
    while True:
        path, complaint = _entry(supervisor, pid, mark)
        if path or time.monotonic() > until:
            break
        time.sleep(0.3)
    if not path:
        return _stored_path(pid, mark), complaint
    if path == "none" or complaint == "missing":
        return "", f"coredumpctl: Storage: {path} {complaint}".rstrip()
    return path, _copy(supervisor, pid, home)


def _entry(supervisor: ProcessSupervisor, pid: int, mark: Mark) -> tuple[str, str]:
    """The core's path and its state in the journal; else "" and the reason."""
    argv = ["coredumpctl", "--no-pager", "-1", "info", str(pid)]
    try:
        info = supervisor.run(argv, 5, env=environment())
    except OSError as problem:
        return "", f"coredumpctl: {problem.strerror}"
    # An earlier process had the same number, and another command line.
    match = _STORAGE.search(info.out) if mark.word in info.out else None
    return (match[1], match[2] or "") if match else ("", f"coredumpctl: {info.first}")


def _copy(supervisor: ProcessSupervisor, pid: int, home: str) -> str:
    """Copy the core. Returns why that fails; "": the copy is there."""
    if not home:
        return "no directory for a copy of the core"
    argv = ["coredumpctl", "--no-pager", "-o", os.path.join(home, "core"), "dump", str(pid)]
    try:
        ended = supervisor.run(argv, supervisor.left_s, env=environment())
    except OSError as problem:
        return f"coredumpctl: {problem.strerror}"
    return "" if ended.rc == 0 else f"coredumpctl: {ended.first or 'no answer'}"


def _stored_path(pid: int, mark: Mark) -> str:
    """The core's file, for a user who may not read the journal: core.COMM.UID.BOOT.PID.TIME."""
    for path in glob.glob(f"{_STORE}/core.*.{mark.uid}.*.{pid}.*"):
        with contextlib.suppress(OSError):
            if os.lstat(path).st_mtime >= mark.since - 2:
                return path
    return ""


# --- The proof: the state before the crash, the crash, and its core.

_PATTERN = "/proc/sys/kernel/core_pattern"
_GDB_S = 60


def _directory(path: str) -> facts.CoreDirectory | None:
    """The directory as this user sees it; None: its name is not known."""
    if core_pattern.UNKNOWN in path:
        return None
    shown = core_pattern.printable(path)
    try:
        mode = os.stat(os.path.join(path, "")).st_mode
        room = os.statvfs(path)
    except OSError as problem:
        return facts.CoreDirectory(shown, problem.strerror or str(problem))
    free_files = room.f_favail if room.f_files else None
    return facts.CoreDirectory(
        shown, "", mode & 0o7777, os.access(path, os.W_OK | os.X_OK),
        bool(room.f_flag & os.ST_RDONLY), room.f_bavail * room.f_frsize, free_files,
    )  # fmt: skip


def _backtrace(
    supervisor: ProcessSupervisor, path: str, program: str, core: CanaryCore
) -> tuple[int, str]:
    """How many frames the gdb at this path reads from a core, and its error if it reads none."""
    try:
        number, status = open_regular(follow(ROOT, core.path).path)
    except OSError as problem:
        return 0, problem.strerror or str(problem)
    try:
        if (status.st_dev, status.st_ino) != (core.device, core.inode):
            return 0, "another file has its name now"
        argv = gdb.words(path, f"/proc/self/fd/{number}", program, ("bt",))
        ended = supervisor.run(argv, _GDB_S, None, **gdb.start_options(number))
    except OSError as problem:
        return 0, f"{path} does not start: {problem.strerror}"
    finally:
        os.close(number)
    if ended.rc is None:
        return 0, f"no answer in {ended.seconds:.0f} s"
    frames = len(re.findall(r"^#[0-9]+ ", ended.out, re.M))
    return frames, "" if frames else ended.first or f"exit status {ended.rc}"


def _before_crash(canary: CrashCanary) -> facts.ProvedCore:
    """The proof's values that are known before the crash."""
    handler = core_pattern.handler_of(canary.pattern)
    limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
    expected = "" if handler else core_pattern.printable(canary.expected_path())
    # A crash replaces a file with this path, if the path has no time in it (fs/coredump.c).
    existed = not handler and canary.pattern and os.path.lexists(canary.expected_path())
    # The files in /proc/PID of a process that is not dumpable belong to root.
    is_dumpable = os.stat(f"/proc/{canary.pid}/environ").st_uid == os.geteuid()
    return facts.ProvedCore(
        core_pattern.printable(canary.pattern), core_pattern.printable(handler),
        handler_there=not handler or os.access(handler, os.X_OK),
        skipped=f"{expected} is there, and a crash would replace it" if existed else "",
        dumpable=is_dumpable, limit_bytes=None if limit == resource.RLIM_INFINITY else limit,
        expected=expected, gdb=shutil.which("gdb") or "",
    )  # fmt: skip


def _after_crash(canary: CrashCanary, observed: facts.ProvedCore) -> facts.ProvedCore:
    """Crash the canary, and add its core on the disk. Nothing is removed here."""
    observed = replace(observed, dumped=canary.crash())
    if not observed.handler:
        observed = replace(observed, directory=_directory(os.path.dirname(canary.expected_path())))
    elif os.path.basename(observed.handler) == facts.PROGRAM and observed.dumped:
        path, error = stored_core(canary.supervisor, canary.pid, canary.mark, canary.home)
        observed = replace(observed, path=core_pattern.printable(path), gdb_said=error)
    core_files = canary.cores()
    if not core_files:
        return observed
    core = core_files[-1]
    at_home = os.path.dirname(core.path) == canary.home
    relative = not observed.handler and not os.path.isabs(canary.pattern)
    is_stray = at_home and not relative and not observed.path
    path = observed.path or core_pattern.printable(core.path)
    observed = replace(observed, path=path, stray=is_stray, size_bytes=core.size_bytes)
    observed = replace(observed, whole_bytes=core.whole_bytes)
    if observed.gdb and core.size_bytes >= (core.whole_bytes or sys.maxsize):
        frames, complaint = _backtrace(canary.supervisor, observed.gdb, canary.program, core)
        observed = replace(observed, frames=frames, gdb_said=complaint)
    return observed


def prove(supervisor: ProcessSupervisor, config: facts.ProofConfig) -> facts.ProvedCore:
    """Crash a canary, and examine its core."""
    with open(_PATTERN, encoding="utf-8", errors="surrogateescape") as file:
        pattern = file.read().rstrip("\n")
    handler = core_pattern.handler_of(pattern)
    if os.path.basename(handler) in facts.REPORTERS:
        shown = core_pattern.printable(handler)
        reason = f"{shown} stores a report of each crash, so nothing was crashed"
        return facts.ProvedCore(core_pattern.printable(pattern), shown, skipped=reason)
    canary = CrashCanary(supervisor, pattern)
    supervisor.at_end(canary.clean_up)
    try:
        canary.begin()
        if config.machine and not canary.has_unique_path:
            reason = "one core at a time has this name"
            return facts.ProvedCore(core_pattern.printable(pattern), skipped=reason)
        observed = _before_crash(canary)
        if config.machine:
            observed = replace(observed, gdb="")
        if not observed.skipped:
            observed = _after_crash(canary, observed)
    finally:
        leftover = canary.clean_up()
    return replace(observed, leftover=leftover)

"""The program on the node that takes a core of a live process, which continues afterwards.

gdb's gcore runs as the process's user and writes into that user's file, so that the kernel refuses
memory that the user may not see. Where Yama is on, gdb needs a capability and may attach to more:
so gdb first only holds the process still, and writes after its rights were read again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import signal
import struct
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nodeready.agent.cores import core_pattern, gdb
from nodeready.agent.cores.core_file import CoreReader, NoCore
from nodeready.agent.cores.core_pattern import CorePlace, printable
from nodeready.agent.cores.gdb import environment, find_gdb
from nodeready.agent.proc import all_pids, first_number, stat_fields, status_fields, user_name
from nodeready.agent.runtime import Ended, ProcessSupervisor, status
from nodeready.agent.users_file import Rights, confine, rights_of_process
from nodeready.core import files, wire

# --- The live process: may it be paused, and how large will its core be?

#: States in which gdb must not attach: it leaves a process in state D stopped forever.
_BAD_STATES = {
    "D": "waits in the kernel (state D): gdb would leave it stopped forever",
    "T": "is stopped by a signal: kill -CONT lets it continue",
    "t": "is stopped by a tracer",
    "Z": "has ended (a zombie)",
    "X": "has ended",
}
#: How often the states are read, and the seconds between: a short wait for a disk is harmless.
_STATE_READS, _BETWEEN_S = 5, 0.1
#: getauxval(3): set if a program was started with more rights than its caller had.
_AT_SECURE = 23
_MAPPING = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) .(.).(.) [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ ([0-9]+) *(.*)"
)
#: Mappings of the kernel, of shared memory without a file, and of memory that is not dumped.
_SPECIAL = ("[vvar", "[vsyscall", "[vdso")
_SHARED_ANONYMOUS = ("/SYSV", "/dev/zero", "/memfd:")
_NOT_DUMPED = {"dd", "io"}


class DumpRefused(Exception):
    """Why no core is taken of this process, one line."""


@dataclass(frozen=True)
class DumpTarget:
    """The live process to dump."""

    pid: int
    started: int  # in clock ticks after boot; with the pid it identifies the process
    rights: Rights
    resident_bytes: int  # in memory and in swap
    mapped_bytes: int  # that gdb copies: many more, if address space is only reserved


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _start_time(pid: int) -> int:
    """The start time of a process, in clock ticks after boot; 0: it has ended."""
    try:
        return int(stat_fields(f"/proc/{pid}/stat")[1][19])
    except (OSError, IndexError, ValueError):
        return 0


def _threads(pid: int) -> dict[str, dict[str, str]]:
    """The status of each thread, by its number. Raises OSError if the process has ended."""
    threads = {}
    for number in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            threads[number] = status_fields(f"/proc/{pid}/task/{number}/status")
    if not threads:
        raise ProcessLookupError(pid)
    return threads


def privilege_problem(pid: int) -> str:
    """Why a process's memory may have more than its user may see, a few words; "": it has not.
    Raises OSError if the process has ended or is another user's.
    """
    threads = list(_threads(pid).values())
    users = {row for thread in threads for row in thread["Uid"].split()}
    groups = {row for thread in threads for row in thread["Gid"].split()}
    if len(users) > 1 or len(groups) > 1:
        return "runs with the rights of more than one user or group (setuid, setgid)"
    uid = int(users.pop())
    # Even its user may not trace it then: the files in /proc/PID are root's (proc(5), dumpable).
    if os.stat(f"/proc/{pid}/stat").st_uid != uid:
        return "is closed to its own user (not dumpable)"
    sets = ("CapPrm", "CapEff", "CapAmb")
    has_capabilities = any(int(thread.get(name, "0"), 16) for thread in threads for name in sets)
    # In a namespace of the user's own, capabilities give nothing here.
    if uid and has_capabilities and os.path.samefile(f"/proc/{pid}/ns/user", "/proc/self/ns/user"):
        return "has capabilities, which its user has not"
    with open(f"/proc/{pid}/auxv", "rb") as file:
        raw = file.read(1 << 16)
    is_secure = dict(struct.iter_unpack("<QQ", raw[: len(raw) // 16 * 16])).get(_AT_SECURE)
    if is_secure is None:
        return "is no 64-bit program"
    return "was started with more rights than its user has (setuid, setgid)" if is_secure else ""


def core_bytes(smaps: Iterable[str]) -> int:
    """The bytes of memory that gdb copies, from the lines of /proc/PID/smaps (proc(5)).

    By the default of coredump_filter (core(5)) it is all memory that is no copy of a file, even
    if it is unreadable or unused, without mapped devices and memory not to be dumped (``dd``).
    """
    total = size = 0
    for row in smaps:
        if header := _MAPPING.match(row):
            size = 0
            first, last, writable, kind, inode, path = header.groups()
            deleted = path.endswith(" (deleted)") or path.startswith(_SHARED_ANONYMOUS)
            counts = (inode == "0" or writable == "w") if kind == "p" else deleted
            if counts and not path.startswith(_SPECIAL):
                size = int(last, 16) - int(first, 16)
        elif row.startswith("VmFlags:") and not _NOT_DUMPED & set(row.split()[1:]):
            total += size
    return total


def check_target(pid: int) -> DumpTarget:
    """The process, if a core can be taken of it. Raises DumpRefused, and OSError."""
    if not (started := _start_time(pid)):
        raise DumpRefused(f"there is no process {pid}")
    fields = status_fields(f"/proc/{pid}/status")
    if int(fields["Tgid"]) != pid:
        raise DumpRefused(f"{pid} is a thread of process {int(fields['Tgid'])}")
    ancestor = os.getpid()
    with contextlib.suppress(OSError):
        while ancestor not in (0, pid):
            ancestor = int(stat_fields(f"/proc/{ancestor}/stat")[1][1])
    if pid in (1, ancestor):
        raise DumpRefused(f"process {pid} is what this very command hangs on")
    rights = rights_of_process(pid)
    if os.geteuid() not in (0, rights.uid):
        raise DumpRefused(f"process {pid} is another user's: only root may (--sudo)")
    if tracer := int(fields["TracerPid"]):
        raise DumpRefused(f"process {pid} is traced by process {tracer} already")
    for read in range(_STATE_READS):
        time.sleep(_BETWEEN_S if read else 0)
        states = {thread["State"].split()[0] for thread in _threads(pid).values()}
        if not states & _BAD_STATES.keys():
            break
    else:
        raise DumpRefused(f"process {pid} {_BAD_STATES[min(states & _BAD_STATES.keys())]}")
    if reason := privilege_problem(pid):
        raise DumpRefused(f"process {pid} {reason}: no core is taken of such a process")
    resident = sum(int(fields.get(name, "0").split()[0]) << 10 for name in ("VmRSS", "VmSwap"))
    mapped = core_bytes(_read(f"/proc/{pid}/smaps").splitlines())
    return DumpTarget(pid, started, rights, resident, max(resident, mapped))


# --- The program's configuration, its answers and its work.

#: Space besides the mapped bytes: headers, notes, and data of other processes in the meantime.
_MARGIN_BYTES, _MARGIN_PARTS = 64 << 20, 20


def _with_margin(size_bytes: int) -> int:
    return size_bytes + size_bytes // _MARGIN_PARTS + _MARGIN_BYTES


_RESUME_S = 3  # seconds for a process to continue after gdb detached
#: Limits of gdb, which copies the memory in small parts: address space, and seconds of CPU.
_GDB_BYTES, _MAX_CPU_S = 16 << 30, 3600
#: Prefix of a core's name meanwhile, and the errors of open(2), where there is no O_TMPFILE.
_HIDDEN = ".nodeready.core."
_NO_TMPFILE_ERRORS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


@dataclass(frozen=True)
class AttachConfig:
    nonce: str
    tag: str
    limit_s: int
    pid: int
    pattern: str = ""  # the policy's core_pattern, used if the pattern in force names no directory
    into: str = ""  # the directory for the core; "": the core directory
    started: int = 0  # the expected start time of the process; 0: only print the preview


@dataclass(frozen=True)
class Preview:
    """The core that would be taken, or the reason why none can be taken."""

    pid: int
    refused: str = ""  # one line; "": a core can be taken
    started: int = 0
    user: str = ""
    command: str = ""
    path: str = ""
    size_bytes: int = 0  # that gdb copies


@dataclass(frozen=True)
class DumpResult:
    """The core that was taken."""

    path: str
    error: str = ""  # why there is no core; "": there is a core
    size_bytes: int = 0
    seconds: float = 0.0  # the maximum time for which the process was paused
    state: str = ""  # of the process afterwards, the letter of /proc; "": it ended
    continued: bool = False  # the process was left stopped, and got SIGCONT


def main(config: AttachConfig) -> None:
    """Print the preview, or take the core."""
    try:
        answer: Preview | DumpResult = _take(config)
    except DumpRefused as problem:
        answer = Preview(config.pid, str(problem))
    except OSError as problem:
        answer = Preview(config.pid, f"{printable(str(problem.filename))}: {problem.strerror}")
    kind = "taken" if isinstance(answer, DumpResult) else "seen"
    print(wire.line(config.nonce, kind, answer), flush=True)


def _take(config: AttachConfig) -> Preview | DumpResult:
    """The preview, or the core that was taken. Raises DumpRefused, and OSError."""
    target = check_target(config.pid)
    if config.started not in (0, target.started):
        raise DumpRefused(f"process {config.pid} has ended, and another one has its number")
    path = _core_path(target, config)
    directory, hidden = files.open_directory(Path(path).parent), f"{_HIDDEN}{secrets.token_hex(8)}"

    def clean_up() -> None:
        if config.started:
            resume(target)
        with contextlib.suppress(OSError):
            os.unlink(hidden, dir_fd=directory)

    supervisor = ProcessSupervisor(config.tag, config.limit_s, clean_up)
    supervisor.at_end(clean_up)
    supervisor.end_on_signals()
    with supervisor:
        try:
            number = _create(directory, os.path.basename(path), hidden, target.rights)
        except OSError as problem:
            raise DumpRefused(f"{printable(path)}: {problem.strerror}") from None
        preview = _preview(supervisor, target, path, number)
        return dump(supervisor, target, path, directory, number) if config.started else preview


def _core_path(target: DumpTarget, config: AttachConfig) -> str:
    """The path of the core: that of a crash, so that it is found in the same way."""
    timestamp, host = str(int(time.time())), os.uname().nodename
    comm = _read(f"/proc/{target.pid}/comm").rstrip("\n")
    if config.into:
        name = "".join(letter if letter.isalnum() else "_" for letter in comm) or "_"
        return os.path.join(config.into, f"core.{name}.{target.pid}.{host}.{timestamp}")
    program, inner_pid = os.readlink(f"/proc/{target.pid}/exe"), str(all_pids(target.pid)[-1])
    values = dict.fromkeys(core_pattern.SPECIFIERS, "0") | {
        "p": inner_pid, "i": inner_pid, "P": str(target.pid), "I": str(target.pid),
        "u": str(target.rights.uid), "g": str(target.rights.gid), "h": host, "t": timestamp,
        "e": comm, "f": os.path.basename(program), "E": program,
    }  # fmt: skip
    for place in (core_pattern.live_place(), CorePlace(config.pattern)):
        if place.pattern.startswith("/"):
            return core_pattern.expand(place.pattern, values, uses_pid=place.uses_pid)
    raise DumpRefused("neither core_pattern nor the policy names a directory for cores")


def _create(directory: int, name: str, hidden: str, rights: Rights) -> int:
    """A descriptor of a new file of the process's user, without a name. Raises OSError;
    FileExistsError if the later name exists.
    hidden: its name until then, if the file system has no files without a name
    """
    with contextlib.suppress(FileNotFoundError):
        os.stat(name, dir_fd=directory, follow_symlinks=False)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        number = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=directory)
    except OSError as problem:
        if problem.errno not in _NO_TMPFILE_ERRORS:
            raise
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        number = os.open(hidden, flags, 0o600, dir_fd=directory)
    if os.geteuid() == 0:
        os.fchown(number, rights.uid, rights.gid)
    return number


def _preview(supervisor: ProcessSupervisor, target: DumpTarget, path: str, number: int) -> Preview:
    """The preview. Raises DumpRefused if space or gdb is missing."""
    if not find_gdb():
        raise DumpRefused("gdb is not installed (nodeready deploy installs it)")
    ended = supervisor.run([find_gdb(), "-nx", "--version"], 10, env=environment())
    version = re.search(r" ([0-9]+)\.[0-9]", ended.out.split("\n", 1)[0])
    # From 15.1 on, gdb leaves zeros out (its NEWS).
    is_sparse = version is not None and int(version[1]) >= 15
    need = _with_margin(target.resident_bytes if is_sparse else target.mapped_bytes)
    filesystem = os.fstatvfs(number)
    free = filesystem.f_bavail * filesystem.f_frsize
    if free < need:
        reason = f"{free >> 20} MiB free, and the core needs {need >> 20} MiB"
        zeros = "" if is_sparse else " (a gdb before 15 also writes the zeros of reserved memory)"
        raise DumpRefused(f"{printable(os.path.dirname(path))} has {reason}{zeros}")
    command = _read(f"/proc/{target.pid}/cmdline").replace("\0", " ").strip()
    shown, user = printable(command[:200]), user_name(target.rights.uid)
    return Preview(target.pid, "", target.started, user, shown, path, target.mapped_bytes)


# --- gdb: it holds the process, waits for our check, writes the core and detaches.

#: gdb opens no file of the process: each of the process's paths is prefixed with /dev/null.
_SETTINGS = (
    "auto-load off", "auto-load safe-path /dev/null", "libthread-db-search-path /dev/null",
    "sysroot /dev/null", "auto-solib-add off", "debuginfod enabled off",
    "exec-file-mismatch off", "confirm off", "height 0", "width 0",
)  # fmt: skip
#: gdb prints it when it has attached, or has failed to.
_MARK = b"nodeready: attached"
_NOT_HELD = "gdb does not hold every thread of it"
#: Yama's values with which only a parent or a process with CAP_SYS_PTRACE may attach.
_YAMA, _CAPABILITY_SCOPES = "/proc/sys/kernel/yama/ptrace_scope", (1, 2)


def _gdb_command(target: DumpTarget) -> list[str]:
    """The words that start gdb as the process's user; gdb detaches at the end of its input. The
    kernel then decides whether that user may attach to the process.
    """
    words = [find_gdb(), "-q", "-nx", "-readnever"]
    for setting in _SETTINGS:
        words += ["-iex", f"set {setting}"]
    words += ["-ex", f"attach {target.pid}", "-ex", f"echo {_MARK.decode()}\\n"]
    if os.geteuid() != 0:
        return words
    needs_capability = not target.rights.uid or first_number(_YAMA) in _CAPABILITY_SCOPES
    capabilities = (gdb.READ_MEMORY,) if needs_capability else ()
    return gdb.tool_command(target.rights, capabilities, _GDB_BYTES, words)


def _hold_problem(target: DumpTarget, session: int) -> str:
    """Why gdb may not write; "": it holds every thread, with the same rights. session: of gdb"""
    pid = target.pid
    with contextlib.suppress(OSError):
        threads = _threads(pid)
        is_held = all(
            thread["State"].split()[0] == "t" and os.getsid(int(thread["TracerPid"])) == session
            for thread in threads.values()
        )
        # A thread that started in the meantime is in the new list.
        is_held = is_held and set(os.listdir(f"/proc/{pid}/task")) == threads.keys()
        reason = privilege_problem(pid)
        if (_start_time(pid), rights_of_process(pid)) != (target.started, target.rights):
            reason = reason or "is another process, or has another user or group"
        if reason:
            return f"process {pid} changed while it was looked at: it {reason}"
        if is_held:
            return ""
    return _NOT_HELD


def dump(
    supervisor: ProcessSupervisor, target: DumpTarget, path: str, directory: int, number: int
) -> DumpResult:
    """Have gdb write the core, and ensure that the process continues. Raises OSError.
    directory, number: descriptors of the core's directory and of its file
    """
    # A process that grows in the meantime must not fill the disk.
    confine(_GDB_BYTES, _MAX_CPU_S, _with_margin(target.mapped_bytes))
    output, refusals = b"", list[str]()

    def answer(process: subprocess.Popen[bytes], stream: int, data: bytes) -> None:
        """Tell gdb once to write, or only to detach."""
        nonlocal output
        output = (output + data)[-(1 << 16) :] if stream == 1 else output
        if refusals or _MARK not in output:
            return
        refusals.append(_hold_problem(target, process.pid))
        commands = "" if refusals[0] else f"gcore /proc/self/fd/{number}\ndetach\n"
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(f"{commands}quit\n".encode("ascii"))
            process.stdin.flush()

    # The rest of the time is for ending gdb and resuming the process.
    limit_s = max(1.0, supervisor.left_s - 2 * _RESUME_S)
    how = {"stdin": subprocess.PIPE, "pass_fds": (number,), "env": environment()}
    ended = supervisor.run(_gdb_command(target), limit_s, answer, **how)
    state, continued = resume(target)
    error = _dump_problem(ended, number, refusals[0] if refusals else _NOT_HELD)
    size = 0 if error else os.fstat(number).st_size
    if not error:
        try:
            os.link(f"/proc/self/fd/{number}", os.path.basename(path), dst_dir_fd=directory)
        except OSError as problem:
            error = f"{printable(path)}: {problem.strerror}"
    return DumpResult(path, error, size, round(ended.seconds, 1), state, continued)


def _dump_problem(ended: Ended, number: int, refused: str) -> str:
    """Why gdb's file is no complete core, one line; "": it is."""
    if ended.rc is None:
        return f"gdb had not finished after {ended.seconds:.0f} s and was ended"
    if refused not in ("", _NOT_HELD):
        return refused
    if not refused and "Saved corefile" in ended.out:
        with contextlib.suppress(NoCore, OSError):
            core = CoreReader(number)
            if core.whole_bytes and os.fstat(number).st_size >= core.whole_bytes:
                return ""
    rows = [row.strip() for row in ended.err.splitlines() if row.strip()]
    messages = [row for row in rows if "process to debug" not in row]
    return f"gdb: {messages[-1][:200] if messages else refused or f'exit status {ended.rc}'}"


def resume(target: DumpTarget) -> tuple[str, bool]:
    """Ensure that the process continues. Returns its state, and whether it needed SIGCONT.

    A stopped process is refused before, so gdb left the stop: it was killed while it attached. A
    second call is harmless.
    """
    continued, until = False, time.monotonic() + _RESUME_S
    while _start_time(target.pid) == target.started:
        current = status(target.pid)
        if current.state == "T" and not current.tracer:
            with contextlib.suppress(OSError):
                os.kill(target.pid, signal.SIGCONT)
                continued = True
        elif current.state not in "Tt" or time.monotonic() > until:
            return current.state, continued
        time.sleep(0.05)
    return "", continued

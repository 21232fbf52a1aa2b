"""The program on the node that takes a core of a live process, which continues afterwards.

The owner of the memory is checked three times: in the process, in the process when gdb holds it
still, and in the core. Root's gdb has the rights of the process's user, so that the kernel refuses
memory that the user may not see. The core is our own file without a name until all checks agree.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import resource
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass

from nodeready.node.cores import core_pattern
from nodeready.node.cores.core_file import CoreReader, NoCore
from nodeready.node.cores.core_pattern import CorePlace, printable
from nodeready.node.cores.gdb import environment, find_gdb
from nodeready.node.cores.identity import (
    NewFile,
    ProcessIdentity,
    auxv,
    identity,
    namespace,
    open_directory,
    remove_leftovers,
)
from nodeready.node.proc import first_number, stat_fields, status_fields
from nodeready.node.runtime import Ended, ProcessSupervisor, status
from nodeready.subjects import wire

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
#: Mappings of the kernel.
_SPECIAL = ("[vvar", "[vsyscall", "[vdso")
_MAPPING = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) .(.).(.) [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ ([0-9]+) *(.*)"
)
_NOT_DUMPED = {"dd", "io"}
_SHARED_ANONYMOUS = ("/SYSV", "/dev/zero", "/memfd:")


@dataclass(frozen=True)
class DumpTarget:
    """The live process to dump.

    identity:   its rights and its program
    inner_pid:  its pid in its own pid namespace
    resident_bytes: in memory and in swap
    mapped_bytes:   that gdb copies: many more, if address space is only reserved
    """

    pid: int
    identity: ProcessIdentity
    user: str
    comm: str
    program: str
    command: str
    inner_pid: int
    resident_bytes: int
    mapped_bytes: int


class DumpRefused(Exception):
    """Why no core is taken of this process, one line."""


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def start_time(pid: int) -> int:
    """The start time of a process, in clock ticks after boot; 0: it has ended."""
    try:
        return int(stat_fields(f"/proc/{pid}/stat")[1][19])
    except (OSError, IndexError, ValueError):
        return 0


def states(pid: int) -> set[str]:
    """The states of all threads of a process. Raises OSError if it has ended."""
    letters = set()
    for name in os.listdir(f"/proc/{pid}/task"):
        try:
            letters.add(stat_fields(f"/proc/{pid}/task/{name}/stat")[1][0])
        except (OSError, IndexError):
            continue
    return letters


def _ancestors() -> set[int]:
    """This process and its ancestors."""
    pids, pid = set[int](), os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        try:
            pid = int(stat_fields(f"/proc/{pid}/stat")[1][1])
        except (OSError, IndexError, ValueError):
            break
    return pids


def core_bytes(smaps: Iterable[str]) -> int:
    """The bytes of memory that gdb copies, from the lines of /proc/PID/smaps (proc(5)).

    By the default of coredump_filter (core(5)) it is all memory that is no copy of a file, even
    if it is unreadable or unused. Memory marked as not to be dumped (``dd``) and mapped devices
    are excluded.
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


def look(pid: int) -> DumpTarget:
    """The process, if a core can be taken of it. Raises DumpRefused."""
    try:
        return _look(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise DumpRefused(f"there is no process {pid}") from None
    except PermissionError:
        raise DumpRefused(f"process {pid} is another user's: only root may (--sudo)") from None


def _look(pid: int) -> DumpTarget:
    status = status_fields(f"/proc/{pid}/status")
    if int(status["Tgid"]) != pid:
        raise DumpRefused(f"{pid} is a thread of process {int(status['Tgid'])}")
    if pid == 1 or pid in _ancestors():
        raise DumpRefused(f"process {pid} is what this very command hangs on")
    if "VmRSS" not in status and status["State"].split()[0] not in "ZX":
        raise DumpRefused(f"process {pid} is the kernel's own")
    uid = int(status["Uid"].split()[1])
    if os.geteuid() not in (0, uid):
        raise DumpRefused(f"process {pid} is another user's: only root may (--sudo)")
    if tracer := int(status["TracerPid"]):
        raise DumpRefused(f"process {pid} is traced by process {tracer} already")
    _refuse_bad_state(pid)
    own_identity = identity(pid)
    if reason := own_identity.privilege_problem(namespace("self")):
        raise DumpRefused(f"process {pid} {reason}: no core is taken of such a process")
    sizes_kib = [int(status.get(name, "0").split()[0]) for name in ("VmRSS", "VmSwap")]
    resident = sum(sizes_kib) * 1024
    mapped = core_bytes(_read(f"/proc/{pid}/smaps").splitlines())
    command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    try:
        user = pwd.getpwuid(own_identity.uid).pw_name
    except KeyError:
        user = str(own_identity.uid)
    return DumpTarget(
        pid=pid,
        identity=own_identity,
        user=user,
        comm=_read(f"/proc/{pid}/comm").rstrip("\n"),
        program=os.readlink(f"/proc/{pid}/exe"),
        command=command[:200],
        inner_pid=int(status.get("NSpid", str(pid)).split()[-1]),
        resident_bytes=resident,
        mapped_bytes=max(resident, mapped),
    )


def _refuse_bad_state(pid: int) -> None:
    """Raises DumpRefused while one of its threads is in one of the _BAD_STATES."""
    problems: set[str] = set()
    for number in range(_STATE_READS):
        time.sleep(_BETWEEN_S if number else 0)
        problems = states(pid) & _BAD_STATES.keys()
        if not problems:
            return
    raise DumpRefused(f"process {pid} {_BAD_STATES[min(problems)]}")


# --- The program's configuration, its answers and its work.

#: Space besides the mapped bytes: headers, notes, and data of other processes in the meantime.
_MARGIN_BYTES, _MARGIN_PARTS = 64 << 20, 20
#: Seconds for a process to continue after gdb detached.
_RESUME_S = 3


def _with_margin(size_bytes: int) -> int:
    return size_bytes + size_bytes // _MARGIN_PARTS + _MARGIN_BYTES


@dataclass(frozen=True)
class AttachConfig:
    """The program's configuration.

    pid:      of the process
    pattern:  the policy's core_pattern, used if the pattern in force names no directory
    into:     the directory for the core; "": the core directory
    started:  the expected start time of the process; 0: take no core, only print the preview
    """

    nonce: str
    tag: str
    limit_s: int
    pid: int
    pattern: str = ""
    into: str = ""
    started: int = 0


@dataclass(frozen=True)
class Preview:
    """The core that would be taken, or the reason why none can be taken.

    refused:    one line; "": a core can be taken
    size_bytes: that gdb copies
    """

    pid: int
    refused: str = ""
    started: int = 0
    user: str = ""
    command: str = ""
    path: str = ""
    size_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True)
class DumpResult:
    """The core that was taken.

    error:     why there is no core; "": there is a core
    seconds:   the maximum time for which the process was paused
    state:     of the process afterwards, the letter of /proc; "": it ended
    continued: the process was left stopped, and got SIGCONT
    """

    path: str
    error: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    state: str = ""
    continued: bool = False


def main(config: AttachConfig) -> None:
    """Print the preview, or take the core."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        target = look(config.pid)
        path = _path(target, config)
        directory = _directory(path)
        preview = _preview(target, path, directory)
        if config.started not in (0, preview.started):
            raise DumpRefused(f"process {config.pid} has ended, and another one has its number")
    except DumpRefused as problem:
        print(wire.line(config.nonce, "seen", Preview(config.pid, str(problem))), flush=True)
        return
    if not config.started:
        print(wire.line(config.nonce, "seen", preview), flush=True)
        return

    def after_kill() -> None:
        resume(target)
        remove_leftovers(directory)

    supervisor = ProcessSupervisor(config.tag, config.limit_s, after_kill)
    supervisor.at_end(lambda: resume(target))
    supervisor.end_on_signals()
    with supervisor:
        remove_leftovers(directory)
        taken = dump(supervisor, target, path, directory)
        print(wire.line(config.nonce, "taken", taken), flush=True)


def _path(target: DumpTarget, config: AttachConfig) -> str:
    """The path of the core: that of a crash, so that it is found in the same way."""
    timestamp = str(int(time.time()))
    host = os.uname().nodename
    if config.into:
        comm = "".join(letter if letter.isalnum() else "_" for letter in target.comm) or "_"
        return os.path.join(config.into, f"core.{comm}.{target.pid}.{host}.{timestamp}")
    values = dict.fromkeys(core_pattern.SPECIFIERS, "0") | {
        "p": str(target.inner_pid), "i": str(target.inner_pid),
        "P": str(target.pid), "I": str(target.pid),
        "u": str(target.identity.uid), "g": str(target.identity.gid), "h": host, "t": timestamp,
        "e": target.comm, "f": os.path.basename(target.program), "E": target.program,
    }  # fmt: skip
    for place in (core_pattern.live_place(), CorePlace(config.pattern)):
        if place.pattern.startswith("/"):
            return core_pattern.expand(place.pattern, values, uses_pid=place.uses_pid)
    raise DumpRefused("neither core_pattern nor the policy names a directory for cores")


def _writes_sparse() -> bool:
    """Whether this gdb leaves zeros out (NEWS of 15.1)."""
    argv = [find_gdb(), "-nx", "--version"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        shown = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=10, env=environment(), cwd="/", check=False,
        )  # fmt: skip
        version = re.search(rb" ([0-9]+)\.[0-9]", shown.stdout.split(b"\n", 1)[0])
        return version is not None and int(version[1]) >= 15
    return False


def _directory(path: str) -> int:
    """A descriptor of the directory for this core. Raises DumpRefused."""
    try:
        return open_directory(os.path.dirname(path))
    except OSError as problem:
        raise DumpRefused(f"{printable(str(problem.filename))}: {problem.strerror}") from None


def _preview(target: DumpTarget, path: str, directory: int) -> Preview:
    """The preview. Raises DumpRefused if room or a tool is missing."""
    if not find_gdb():
        raise DumpRefused("gdb is not installed (nodeready deploy installs it)")
    if os.geteuid() == 0 and not _setpriv():
        raise DumpRefused(
            "setpriv, which gives gdb the user's rights, is not installed (util-linux)"
        )
    shown = printable(os.path.dirname(path))
    room = os.statvfs(directory)
    if room.f_flag & os.ST_RDONLY:
        raise DumpRefused(f"{shown} is on a read-only file system")
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=directory):
        raise DumpRefused(f"{shown} is not writable for {target.user}")
    written = target.resident_bytes if _writes_sparse() else target.mapped_bytes
    need = _with_margin(written)
    free = room.f_bavail * room.f_frsize
    if free < need:
        reason = f"{shown} has {free >> 20} MiB free, and the core needs {need >> 20} MiB"
        if written > 2 * target.resident_bytes:
            reason += (
                f": {target.resident_bytes >> 20} MiB of memory, and address space that is only "
                "reserved, of which a gdb before 15 writes the zeros"
            )
        raise DumpRefused(reason)
    return Preview(
        pid=target.pid,
        started=target.identity.started,
        user=target.user,
        command=printable(target.command),
        path=path,
        size_bytes=target.mapped_bytes,
        free_bytes=free,
    )


#: gdb opens no file of the process: each of the process's paths is prefixed with this file, which
#: is no directory.
_NOWHERE = os.devnull
_SETTINGS = (
    "auto-load off", "auto-load safe-path /dev/null", "libthread-db-search-path /dev/null",
    f"sysroot {_NOWHERE}", "auto-solib-add off", "debuginfod enabled off",
    "exec-file-mismatch off", "confirm off", "height 0", "width 0",
)  # fmt: skip
#: The values of kernel.yama.ptrace_scope with which only a parent or a process with CAP_SYS_PTRACE
#: may attach.
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_CAPABILITY_SCOPES = (1, 2)


def _setpriv() -> str:
    return shutil.which("setpriv") or ""


def _rights(process: ProcessIdentity, scope: int | None) -> list[str]:
    """The words that give gdb the rights of the process's user.

    The kernel then decides whether that user may attach to the process.

    scope: of Yama, which may let a user attach only to children; then gdb needs a capability
    """
    capabilities = "-all,+sys_ptrace" if scope in _CAPABILITY_SCOPES else "-all"
    return [
        _setpriv(), f"--reuid={process.uid}", f"--regid={process.gid}", "--clear-groups",
        f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}",
        f"--bounding-set={capabilities}",
        "--no-new-privs", "--",
    ]  # fmt: skip


def _command(target: DumpTarget, mark: str) -> list[str]:
    """The words that start gdb, which attaches, prints the mark and reads commands from its input.

    gdb detaches at the end of its input.
    """
    words = [find_gdb(), "-q", "-nx", "-readnever"]
    for setting in _SETTINGS:
        words += ["-iex", f"set {setting}"]
    words += ["-ex", f"attach {target.pid}", "-ex", f"echo {mark}\\n"]
    as_user = os.geteuid() != 0 or target.identity.uid == 0
    return words if as_user else [*_rights(target.identity, first_number(_YAMA)), *words]


def _hold_problem(target: DumpTarget, session: int) -> str:
    """Why gdb does not hold every thread of the process, one line; "": it holds all.

    session: of gdb
    """
    with contextlib.suppress(OSError):
        threads = os.listdir(f"/proc/{target.pid}/task")
        statuses = [status(int(name)) for name in threads]
        # A thread that started in the meantime is in the new list.
        is_complete = os.listdir(f"/proc/{target.pid}/task") == threads
        if change := _change(target):
            return change
        if is_complete and all(
            thread.state == "t" and os.getsid(thread.tracer) == session for thread in statuses
        ):
            return ""
    return _NOT_HELD


def _change(target: DumpTarget) -> str:
    """How the process changed since it was looked at, one line; "": it did not. Raises OSError."""
    change = target.identity.describe_change(identity(target.pid), namespace("self"))
    return f"process {target.pid} {change}" if change else ""


_NOT_HELD = "gdb does not hold every thread of it"


class _GdbDialogue:
    """The commands for gdb when it holds the process: write the core and detach, or only detach.

    refused: why gdb only detaches; "": it writes the core
    """

    def __init__(self, target: DumpTarget, file: int) -> None:
        self.target, self.file, self.refused = target, file, ""
        self.mark = f"held-{secrets.token_hex(8)}"
        self._output, self._is_answered = b"", False

    def on_output(self, process: subprocess.Popen[bytes], stream: int, data: bytes) -> None:
        """Check the process as soon as gdb holds it, and answer gdb."""
        if self._is_answered or stream != 1:
            return
        self._output = (self._output + data)[-(1 << 16) :]
        if self.mark.encode() not in self._output:
            return
        self._is_answered = True
        self.refused = _hold_problem(self.target, process.pid)
        commands = "" if self.refused else f"gcore /proc/self/fd/{self.file}\ndetach\n"
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(f"{commands}quit\n".encode("ascii"))
            process.stdin.flush()


def _limit_size(mapped_bytes: int) -> None:
    """Limit the size of the core: a process that grows in the meantime must not fill the disk."""
    limit_bytes = _with_margin(mapped_bytes)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit_bytes = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))


def dump(
    supervisor: ProcessSupervisor, target: DumpTarget, path: str, directory: int
) -> DumpResult:
    """Have gdb write the core, and ensure that the process continues.

    directory: descriptor of the path's directory
    """
    process, name = target.identity, os.path.basename(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=directory, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        new = NewFile(directory)
    except OSError as problem:
        reason = f"{printable(path)}: {problem.strerror}"
        return DumpResult(path, reason, state=status(target.pid).state)
    supervisor.at_end(new.clean_up)
    _limit_size(target.mapped_bytes)
    dialogue = _GdbDialogue(target, new.number)
    # The rest of the time is for ending gdb and resuming the process.
    limit_s = max(1.0, supervisor.left_s - 2 * _RESUME_S)
    argv = _command(target, dialogue.mark)
    try:
        ended = supervisor.run(
            argv, limit_s, dialogue.on_output,
            stdin=subprocess.PIPE, pass_fds=(new.number,), env=environment(), cwd="/",
        )  # fmt: skip
    except OSError as problem:
        ended = Ended(127, "", f"gdb does not start: {problem.strerror}", 0.0)
    state, continued = resume(target)
    error = _dump_problem(ended, target, new.number, dialogue.refused)
    if not error:
        try:
            new.publish(name, process.uid, process.gid)
        except OSError as problem:
            error = f"{printable(path)}: {problem.strerror}"
    new.clean_up()
    size = 0 if error else os.fstat(new.number).st_size
    return DumpResult(path, error, size, round(ended.seconds, 1), state, continued)


def _dump_problem(ended: Ended, target: DumpTarget, file: int, refused: str) -> str:
    """Why gdb's file is no complete core of this process, one line; "": it is."""
    if ended.rc is None:
        return f"gdb had not finished after {ended.seconds:.0f} s and was ended"
    if refused not in ("", _NOT_HELD):
        return refused
    if not refused and "Saved corefile" in ended.out:
        with contextlib.suppress(NoCore, OSError):
            core = CoreReader(file)
            if core.whole_bytes and os.fstat(file).st_size >= core.whole_bytes:
                return _owner_problem(core, target)
    # gdb reports a changed process as "not permitted".
    with contextlib.suppress(OSError):
        if change := _change(target):
            return change
    rows = [row.strip() for row in ended.err.splitlines() if row.strip()]
    messages = [row for row in rows if "process to debug" not in row]
    return f"gdb: {messages[-1][:200] if messages else refused or f'exit status {ended.rc}'}"


def _owner_problem(core: CoreReader, target: DumpTarget) -> str:
    """Why the core's notes are not this process's, one line; "": they are."""
    notes, process = core.notes, target.identity
    expected = target.pid, process.uid, process.auxv
    if (notes.pid, notes.uid, auxv(notes.auxv)) == expected:
        return ""
    return f"the core is of another process or program than {target.pid} was: it is removed"


def resume(target: DumpTarget) -> tuple[str, bool]:
    """Ensure that the process continues. Returns its state, and whether it needed SIGCONT.

    `look` refuses a stopped process, so gdb left the stop: it was killed while it attached. A
    second call is harmless.
    """
    continued, until = False, time.monotonic() + _RESUME_S
    while start_time(target.pid) == target.identity.started:
        current = status(target.pid)
        if current.state == "T" and not current.tracer:
            with contextlib.suppress(OSError):
                os.kill(target.pid, signal.SIGCONT)
                continued = True
        elif current.state not in "Tt" or time.monotonic() > until:
            return current.state, continued
        time.sleep(0.05)
    return "", continued

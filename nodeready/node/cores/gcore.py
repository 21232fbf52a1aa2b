"""The program on the node that takes a core of a live process, which goes on afterwards.

gdb writes into a file that we made, and handed to it open: no name in a directory that everybody
may write to is trusted twice.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import resource
import signal
import stat
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass

from nodeready.node.cores import core_pattern
from nodeready.node.cores.core_file import NoCore, Reader
from nodeready.node.cores.core_pattern import Place, printable
from nodeready.node.cores.gdb import find_gdb
from nodeready.node.proofs.attach import environment
from nodeready.node.runtime import Ended, Supervisor, status
from nodeready.subjects import wire

# --- The live process: may it be paused, and how large will its core be?

#: States in which gdb must not attach: gdb on a process in state D leaves it stopped for good.
_BAD_STATES = {
    "D": "waits in the kernel (state D): gdb would leave it stopped for good",
    "T": "is stopped by a signal: kill -CONT lets it go on",
    "t": "is stopped by a tracer",
    "Z": "has ended (a zombie)",
    "X": "has ended",
}
#: Looks at the threads: waiting for a disk for a moment is no reason to refuse.
_LOOKS, _BETWEEN_S = 5, 0.1
#: Mappings of the kernel's own.
_SPECIAL = ("[vvar", "[vsyscall", "[vdso")
_MAPPING = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) .(.).(.) [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ ([0-9]+) *(.*)"
)
_NOT_DUMPED = {"dd", "io"}
_SHARED_ANONYMOUS = ("/SYSV", "/dev/zero", "/memfd:")


@dataclass(frozen=True)
class Target:
    """One process, as /proc has it now.

    started:    clock ticks after boot: with the pid, what tells it from every other process
    inner_pid:  its number in its own pid namespace
    resident_bytes: what it has in memory and in swap
    mapped_bytes:   what gdb copies: it is much more where address space is only reserved
    """

    pid: int
    started: int
    uid: int
    gid: int
    user: str
    comm: str
    program: str
    command: str
    inner_pid: int
    resident_bytes: int
    mapped_bytes: int


class Refused(Exception):
    """No core is taken of this process: why, one line."""


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _stat(path: str) -> list[str]:
    """The fields from the state on (proc_pid_stat(5), field 3)."""
    return _read(path).rpartition(")")[2].split()


def started(pid: int) -> int:
    """When it was started, in clock ticks after boot; 0: it is gone."""
    try:
        return int(_stat(f"/proc/{pid}/stat")[19])
    except (OSError, IndexError, ValueError):
        return 0


def states(pid: int) -> set[str]:
    """The states of all its threads. Raises OSError when it is gone."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/task"):
        try:
            found.add(_stat(f"/proc/{pid}/task/{name}/stat")[0])
        except (OSError, IndexError):
            continue
    return found


def _ancestors() -> set[int]:
    found, pid = set[int](), os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int(_stat(f"/proc/{pid}/stat")[1])
        except (OSError, IndexError, ValueError):
            break
    return found


def core_bytes(smaps: Iterable[str]) -> int:
    """The bytes of memory that gdb copies, from the lines of /proc/PID/smaps (proc(5)).

    By the default of coredump_filter (core(5)): what is no file's copy, whether it may be read or
    was ever used, but for what is marked as not to be dumped (``dd``) and mapped devices.
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


def look(pid: int) -> Target:
    """The process, when a core can be taken of it. Raises Refused."""
    try:
        return _look(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise Refused(f"there is no process {pid}") from None
    except PermissionError:
        raise Refused(f"process {pid} is another user's: only root may (--sudo)") from None


def _look(pid: int) -> Target:
    status = dict(
        row.split(":", 1) for row in _read(f"/proc/{pid}/status").splitlines() if ":" in row
    )
    if int(status["Tgid"]) != pid:
        raise Refused(f"{pid} is a thread of process {int(status['Tgid'])}")
    if pid == 1 or pid in _ancestors():
        raise Refused(f"process {pid} is what this very command hangs on")
    if "VmRSS" not in status and status["State"].split()[0] not in "ZX":
        raise Refused(f"process {pid} is the kernel's own")
    uid, gid = int(status["Uid"].split()[1]), int(status["Gid"].split()[1])
    if os.geteuid() not in (0, uid):
        raise Refused(f"process {pid} is another user's: only root may (--sudo)")
    if tracer := int(status["TracerPid"]):
        raise Refused(f"process {pid} is traced by process {tracer} already")
    _refuse_bad_state(pid)
    resident = sum(
        int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmSwap") if name in status
    )
    mapped = core_bytes(_read(f"/proc/{pid}/smaps").splitlines())
    command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return Target(
        pid=pid,
        started=started(pid),
        uid=uid,
        gid=gid,
        user=user,
        comm=_read(f"/proc/{pid}/comm").rstrip("\n"),
        program=os.readlink(f"/proc/{pid}/exe"),
        command=command[:200],
        inner_pid=int(status.get("NSpid", str(pid)).split()[-1]),
        resident_bytes=resident,
        mapped_bytes=max(resident, mapped),
    )


def _refuse_bad_state(pid: int) -> None:
    """Raises Refused while one of its threads is in one of the _BAD_STATES."""
    found: set[str] = set()
    for number in range(_LOOKS):
        time.sleep(_BETWEEN_S if number else 0)
        found = states(pid) & _BAD_STATES.keys()
        if not found:
            return
    raise Refused(f"process {pid} {_BAD_STATES[min(found)]}")


# --- What the program is told and answers, and its work.

#: Space beside the mapped bytes: headers, notes, and what other processes write meanwhile.
_MARGIN_BYTES, _MARGIN_PARTS = 64 << 20, 20
#: Seconds for a process to go on after gdb let it go.
_RESUME_S = 3


@dataclass(frozen=True)
class Config:
    """What the program is told.

    pid:      of the process
    pattern:  the policy's core_pattern, where the one in force names no directory
    into:     the directory for the core; "": the core directory
    started:  take the core, when it is still the process that was started then; 0: only look
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
    """What would be done, or why nothing is done.

    refused:    one line; "": it can be done
    size_bytes: that gdb copies
    need_bytes: that have to be free
    """

    pid: int
    refused: str = ""
    started: int = 0
    user: str = ""
    command: str = ""
    path: str = ""
    size_bytes: int = 0
    need_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True)
class Taken:
    """What was done.

    error:     why there is no core; "": there is one
    seconds:   that the process was paused, at most
    state:     the process's afterwards, the letter of /proc; "": it ended
    continued: it had been left stopped and was sent SIGCONT
    """

    path: str
    error: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    state: str = ""
    continued: bool = False


def main(config: Config) -> None:
    """Look, or take the core."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        target = look(config.pid)
        seen = _preview(target, config)
    except Refused as problem:
        print(wire.line(config.nonce, "seen", Preview(config.pid, str(problem))), flush=True)
        return
    if not config.started:
        print(wire.line(config.nonce, "seen", seen), flush=True)
        return
    if seen.started != config.started:
        why = f"process {config.pid} has ended, and another one has its number"
        print(wire.line(config.nonce, "seen", Preview(config.pid, why)), flush=True)
        return
    supervisor = Supervisor(config.tag, config.limit_s)
    supervisor.at_end(lambda: resume(target))
    supervisor.end_on_signals()
    with supervisor:
        print(wire.line(config.nonce, "taken", dump(supervisor, target, seen.path)), flush=True)


def _path(target: Target, config: Config) -> str:
    """Where the core goes: as a crash would name it, so that it is found like one."""
    now = str(int(time.time()))
    host = os.uname().nodename
    if config.into:
        return os.path.join(config.into, f"core.{_plain(target.comm)}.{target.pid}.{host}.{now}")
    values = dict.fromkeys(core_pattern.SPECIFIERS, "0") | {
        "p": str(target.inner_pid), "i": str(target.inner_pid),
        "P": str(target.pid), "I": str(target.pid),
        "u": str(target.uid), "g": str(target.gid), "h": host, "t": now,
        "e": target.comm, "f": os.path.basename(target.program), "E": target.program,
    }  # fmt: skip
    for place in (core_pattern.live(), Place(config.pattern)):
        if place.pattern.startswith("/"):
            return core_pattern.expand(place.pattern, values, uses_pid=place.uses_pid)
    raise Refused("neither core_pattern nor the policy names a directory for cores")


def _plain(comm: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in comm) or "_"


def _writes_sparse() -> bool:
    """Whether this gdb leaves out zeros (NEWS of 15.1)."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(
            [find_gdb(), "-nx", "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=10,
            env=environment(),
            check=False,
        ).stdout.split(b"\n", 1)[0]
        version = re.search(rb" ([0-9]+)\.[0-9]", said)
        return version is not None and int(version[1]) >= 15
    return False


def _preview(target: Target, config: Config) -> Preview:
    """Raises Refused when there is no place or no tool for it."""
    if not find_gdb():
        raise Refused("gdb is not installed (nodeready deploy installs it)")
    path = _path(target, config)
    parent = os.path.dirname(path)
    shown = printable(parent)
    try:
        room = os.statvfs(parent)
    except OSError as problem:
        raise Refused(f"{shown}: {problem.strerror}") from None
    if room.f_flag & os.ST_RDONLY:
        raise Refused(f"{shown} is on a read-only file system")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise Refused(f"{shown} is not writable for {target.user}")
    written = target.resident_bytes if _writes_sparse() else target.mapped_bytes
    need = written + written // _MARGIN_PARTS + _MARGIN_BYTES
    free = room.f_bavail * room.f_frsize
    if free < need:
        why = f"{shown} has {free >> 20} MiB free, and the core needs {need >> 20} MiB"
        if written > 2 * target.resident_bytes:
            why += (
                f": {target.resident_bytes >> 20} MiB of memory, and address space that is only "
                "reserved, of which a gdb before 15 writes the zeros"
            )
        raise Refused(why)
    return Preview(
        pid=target.pid,
        started=target.started,
        user=target.user,
        command=printable(target.command),
        path=path,
        size_bytes=target.mapped_bytes,
        need_bytes=need,
        free_bytes=free,
    )


def dump(supervisor: Supervisor, target: Target, path: str) -> Taken:
    """Have gdb write the core, and see that the process goes on."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o600)
    except OSError as problem:
        return Taken(path, f"{printable(path)}: {problem.strerror}")
    whole = False

    def tidy() -> None:
        if not whole:
            _remove(path, file)

    supervisor.at_end(tidy)
    if os.geteuid() == 0:
        os.fchown(file, target.uid, target.gid)
    argv = [
        find_gdb(), "-batch", "-nx", "-readnever", "-iex", "set height 0",
        "-ex", f"attach {target.pid}", "-ex", f"gcore /proc/self/fd/{file}", "-ex", "detach",
    ]  # fmt: skip
    # The rest of the time is for ending gdb and letting the process go on.
    limit_s = max(1.0, supervisor.left_s - 2 * _RESUME_S)
    ended = supervisor.run(argv, limit_s, pass_fds=(file,), env=environment(), cwd="/")
    state, continued = resume(target)
    error = _wrong(ended, file)
    whole = not error
    tidy()
    size = os.fstat(file).st_size if whole else 0
    return Taken(path, error, size, round(ended.seconds, 1), state, continued)


def _wrong(ended: Ended, file: int) -> str:
    """Why what gdb wrote is no whole core, one line; "": it is."""
    if ended.rc is None:
        return f"gdb had not finished after {ended.seconds:.0f} s and was ended"
    try:
        whole = Reader(file).whole_bytes
        if "Saved corefile" in ended.out and whole and os.fstat(file).st_size >= whole:
            return ""
    except (NoCore, OSError):
        pass
    rows = [row.strip() for row in ended.err.splitlines() if row.strip()]
    said = [row for row in rows if "process to debug" not in row] or [f"exit status {ended.rc}"]
    return f"gdb: {said[-1][:200]}"


def _remove(path: str, file: int) -> None:
    """Remove the file that we made, and no other that has its name now."""
    with contextlib.suppress(OSError):
        ours, now = os.fstat(file), os.lstat(path)
        if stat.S_ISREG(now.st_mode) and (ours.st_dev, ours.st_ino) == (now.st_dev, now.st_ino):
            os.unlink(path)


def resume(target: Target) -> tuple[str, bool]:
    """See that the process goes on: its state, and whether it needed SIGCONT. Harmless twice.

    `look` refuses a stopped process, so a stop is our doing: a gdb that was killed while it
    attached leaves one.
    """
    continued, until = False, time.monotonic() + _RESUME_S
    while started(target.pid) == target.started:
        now = status(target.pid)
        if now.state == "T" and not now.tracer:
            with contextlib.suppress(OSError):
                os.kill(target.pid, signal.SIGCONT)
                continued = True
        elif now.state not in "Tt" or time.monotonic() > until:
            return now.state, continued
        time.sleep(0.05)
    return "", continued

"""The program on the node that takes a core of a live process, which goes on afterwards.

gdb writes into a file that we made, and handed to it open: no name in a directory that everybody
may write to is trusted twice.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import stat
import subprocess
import time
from dataclasses import dataclass

from nodeready.capture import core_names, gcore_target
from nodeready.capture.backtrace import find_gdb
from nodeready.capture.core_names import Place
from nodeready.capture.core_reader import NoCore, Reader
from nodeready.capture.gcore_target import Refused, Target
from nodeready.proofs import core_pattern, wire
from nodeready.proofs.attempt import environment
from nodeready.proofs.own import Ended, Own, status

#: Beside what is mapped: headers, notes, and what others write meanwhile.
_MARGIN_BYTES, _MARGIN_PARTS = 64 << 20, 20
#: Seconds for a process to go on after gdb let it go.
_RESUME_S = 3


@dataclass(frozen=True)
class Config:
    """What the program has to do.

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
class Seen:
    """What would be done, or why nothing is.

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
        target = gcore_target.look(config.pid)
        seen = _seen(target, config)
    except Refused as problem:
        print(wire.line(config.nonce, "seen", Seen(config.pid, str(problem))), flush=True)
        return
    if not config.started:
        print(wire.line(config.nonce, "seen", seen), flush=True)
        return
    if seen.started != config.started:
        why = f"process {config.pid} has ended, and another one has its number"
        print(wire.line(config.nonce, "seen", Seen(config.pid, why)), flush=True)
        return
    own = Own(config.tag, config.limit_s)
    own.at_end(lambda: resume(target))

    def leave(number: int, frame: object) -> None:
        own.end()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    with own:
        print(wire.line(config.nonce, "taken", take(own, target, seen.path)), flush=True)


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
    for place in (core_names.live(), Place(config.pattern)):
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


def _seen(target: Target, config: Config) -> Seen:
    """Raises Refused when there is no place or no tool for it."""
    if not find_gdb():
        raise Refused("gdb is not installed (nodeready deploy installs it)")
    path = _path(target, config)
    parent = os.path.dirname(path)
    shown = core_pattern.shown(parent)
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
    return Seen(
        pid=target.pid,
        started=target.started,
        user=target.user,
        command=core_pattern.shown(target.command),
        path=path,
        size_bytes=target.mapped_bytes,
        need_bytes=need,
        free_bytes=free,
    )


def take(own: Own, target: Target, path: str) -> Taken:
    """Have gdb write the core, and see that the process goes on."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o600)
    except OSError as problem:
        return Taken(path, f"{core_pattern.shown(path)}: {problem.strerror}")
    whole = False

    def tidy() -> None:
        if not whole:
            _remove(path, file)

    own.at_end(tidy)
    if os.geteuid() == 0:
        os.fchown(file, target.uid, target.gid)
    argv = [
        find_gdb(), "-batch", "-nx", "-readnever", "-iex", "set height 0",
        "-ex", f"attach {target.pid}", "-ex", f"gcore /proc/self/fd/{file}", "-ex", "detach",
    ]  # fmt: skip
    # The rest of the time is for ending gdb and letting the process go on.
    limit_s = max(1.0, own.left_s - 2 * _RESUME_S)
    ended = own.run(argv, limit_s, pass_fds=(file,), env=environment(), cwd="/")
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

    It was not stopped before we came. A gdb that was killed while it attached leaves it stopped.
    """
    continued, until = False, time.monotonic() + _RESUME_S
    while gcore_target.started(target.pid) == target.started:
        now = status(target.pid)
        if now.state == "T" and not now.tracer:
            with contextlib.suppress(OSError):
                os.kill(target.pid, signal.SIGCONT)
                continued = True
        elif now.state not in "Tt" or time.monotonic() > until:
            return now.state, continued
        time.sleep(0.05)
    return "", continued

"""The live process of which a core is wanted: may it be paused, and how large will its core be?"""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

#: What cannot be attached to without harm: gdb on a process in state D leaves it stopped for good.
_BAD = {
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
    _calm(pid)
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


def _calm(pid: int) -> None:
    """Raises Refused when one of its threads is in a state in which it must be left alone."""
    found: set[str] = set()
    for number in range(_LOOKS):
        time.sleep(_BETWEEN_S if number else 0)
        found = states(pid) & _BAD.keys()
        if not found:
            return
    raise Refused(f"process {pid} {_BAD[min(found)]}")

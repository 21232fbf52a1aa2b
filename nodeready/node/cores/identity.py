"""Whose memory a process has: its rights and its program, and whether they are still the same.

A process can become another by execve(2): its number and its start time stay.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace

#: getauxval(3): set where a program was started with more rights than its caller had.
_AT_SECURE = 23
#: The sets of capabilities(7) that are rights, or become some by themselves.
_SETS = ("CapPrm", "CapEff", "CapAmb")


@dataclass(frozen=True)
class Credentials:
    """Of one thread: each thread can have its own, by the kernel's own calls.

    users, groups: real, effective, saved, of the file system
    capabilities:  in any of the sets, as the kernel's bits
    """

    users: tuple[int, ...]
    groups: tuple[int, ...]
    capabilities: int


@dataclass(frozen=True)
class Identity:
    """One process, as /proc has it at one moment.

    started:     clock ticks after boot: with the pid, what tells it from every other process
    credentials: of all threads; one where all have the same
    namespace:   of users, where its capabilities count: device and inode
    owner:       of the files in /proc/PID: root, where nobody may look into the process, not even
                 its user (proc(5), dumpable); the directory itself is always the user's
    executable:  device and inode
    auxv:        what the kernel told its program at the start, addresses among it: another
                 program, and the same one started again, has another (getauxval(3))
    """

    started: int
    credentials: frozenset[Credentials]
    namespace: tuple[int, int]
    owner: int
    executable: tuple[int, int] = (0, 0)
    auxv: tuple[tuple[int, int], ...] = ()

    @property
    def uid(self) -> int:
        """The lowest effective user id among its threads."""
        return min(one.users[1] for one in self.credentials)

    @property
    def gid(self) -> int:
        """The lowest effective group id among its threads."""
        return min(one.groups[1] for one in self.credentials)

    def mixed(self, ours: tuple[int, int]) -> str:
        """Why its memory may be more than its user's own, a few words; "": it is the user's.

        ours: our own namespace of users
        """
        for one in self.credentials:
            if len(set(one.users)) > 1 or len(set(one.groups)) > 1:
                return "runs with the rights of more than one user or group (setuid, setgid)"
            if one.capabilities and one.users[0] and self.namespace == ours:
                return "has capabilities, which its user has not"
        if len(self.credentials) > 1:
            return "has threads with different rights"
        if self.owner != self.uid:
            return "is closed to its own user (not dumpable)"
        secure = dict(self.auxv).get(_AT_SECURE)
        if secure is None:
            return "is no 64-bit program"
        return "was started with more rights than its user has (setuid, setgid)" if secure else ""

    def change(self, now: Identity, ours: tuple[int, int]) -> str:
        """What became of it, a few words; "": nothing.

        now: the same pid, later
        """
        if now == self:
            return ""
        if now.started != self.started:
            return "ended, and another one has its number"
        if why := now.mixed(ours):
            return f"changed while it was looked at: it {why}"
        same = replace(now, executable=self.executable, auxv=self.auxv) == self
        what = "runs another program" if same else "has another user or group"
        return f"changed while it was looked at: it {what}"


def auxv(raw: bytes) -> tuple[tuple[int, int], ...]:
    """The pairs of a 64-bit process up to AT_NULL."""
    found = []
    for kind, value in struct.iter_unpack("<QQ", raw[: len(raw) // 16 * 16]):
        if kind == 0:
            break
        found.append((kind, value))
    return tuple(found)


def namespace(pid: int | str) -> tuple[int, int]:
    """The namespace of users of a process, as device and inode."""
    known = os.stat(f"/proc/{pid}/ns/user")
    return known.st_dev, known.st_ino


def thread(status: str) -> dict[str, str]:
    """The rows of a status of proc(5)."""
    return dict(row.split(":", 1) for row in status.splitlines() if ":" in row)


def credentials(rows: dict[str, str]) -> Credentials:
    """Of one thread, from its status."""
    capabilities = 0
    for name in _SETS:
        capabilities |= int(rows.get(name, "0"), 16)
    users, groups = (tuple(map(int, rows[name].split())) for name in ("Uid", "Gid"))
    return Credentials(users, groups, capabilities)


def identity(pid: int) -> Identity:
    """The process of this number.

    Raises OSError (ProcessLookupError) where it is gone, or hidden from us.
    """
    found = set()
    with open(f"/proc/{pid}/stat", "rb") as file:
        started = int(file.read().rpartition(b")")[2].split()[19])
    for name in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{name}/status", encoding="utf-8", errors="replace") as f:
                found.add(credentials(thread(f.read())))
        except (FileNotFoundError, ProcessLookupError):
            continue
    if not found:
        raise ProcessLookupError(pid)
    owner = os.stat(f"/proc/{pid}/stat").st_uid
    if os.geteuid() not in (0, owner):
        return Identity(started, frozenset(found), (0, 0), owner)
    known = os.stat(f"/proc/{pid}/exe")
    with open(f"/proc/{pid}/auxv", "rb") as raw:
        told = auxv(raw.read(1 << 16))
    program = (known.st_dev, known.st_ino)
    return Identity(started, frozenset(found), namespace(pid), owner, program, told)

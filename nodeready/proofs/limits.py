"""Prove which limits a new session really has: after PAM, and after the user's profile."""

from __future__ import annotations

import os
import resource

from nodeready.proofs.attempt import first_number
from nodeready.proofs.config import Config
from nodeready.proofs.own import Own
from nodeready.proofs.seen import Limit, SessionLimits

ITEMS = {
    "core": resource.RLIMIT_CORE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
}
# Bit of CAP_SYS_RESOURCE (capabilities(7)): without it nobody may raise a hard limit.
_CAP_SYS_RESOURCE = 1 << 24


def of(pid: int) -> tuple[Limit, ...]:
    """The limits of a process, in the order of ITEMS. Raises OSError, ValueError, KeyError.

    From /proc, which everybody may read: prlimit() asks for the right to trace the process.
    """
    names = {"core": "Max core file size", "memlock": "Max locked memory"}
    names["nofile"] = "Max open files"
    with open(f"/proc/{pid}/limits", encoding="ascii", errors="replace") as file:
        rows = {row[:25].strip(): row[25:].split() for row in file}
    values = [rows[names[item]][:2] for item in ITEMS]
    return tuple(
        Limit(*(-1 if value == "unlimited" else int(value) for value in pair)) for pair in values
    )


def _before() -> tuple[Limit, ...]:
    """Those of the su that opened this session: it has them from PAM, and reads no profile."""
    pid = os.getppid()
    try:
        for _up in range(4):
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            if name == "su":
                return of(pid)
            pid = int(rest.split()[1])
    except (OSError, ValueError, KeyError, IndexError):
        pass
    return ()


def _ceiling() -> tuple[int, ...]:
    """sshd's hard limits, or process 1's, where nobody may raise them."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        sets = dict(row.split(":", 1) for row in file if row.startswith("Cap"))
    if int(sets["CapBnd"], 16) & _CAP_SYS_RESOURCE:
        return ()
    try:
        return tuple(limit.hard for limit in of(first_number("/run/sshd.pid") or 1))
    except (OSError, ValueError, KeyError):
        return ()


def prove(own: Own, config: Config) -> SessionLimits:
    """Only looks."""
    core, memlock, nofile = (Limit(*resource.getrlimit(number)) for number in ITEMS.values())
    nr_open = first_number("/proc/sys/fs/nr_open")
    return SessionLimits(core, memlock, nofile, _before(), _ceiling(), nr_open)

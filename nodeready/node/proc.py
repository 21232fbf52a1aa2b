"""Files of /proc (proc(5)), with their values as text."""

from __future__ import annotations

import contextlib
import os
from itertools import islice


def stat_fields(path: str) -> tuple[str, list[str]]:
    """The name, and the fields from the state on (field 3), in a ``stat``. Raises OSError."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        name, _, fields = file.read().partition("(")[2].rpartition(")")
    return name, fields.split()


def status_fields(path: str) -> dict[str, str]:
    """Name -> value in a ``status``. Raises OSError."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return dict(row.split(":", 1) for row in file if ":" in row)


def first_number(path: str) -> int | None:
    """The first number in a file of the kernel; None: the file has no number."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return int(file.read(100).split()[0])
    except (OSError, ValueError, IndexError):
        return None


def list_directory(path: str, maximum: int = 65536) -> list[str]:
    """The first names in a directory, sorted; []: it is missing, or not permitted."""
    try:
        return sorted(os.listdir(path))[:maximum]
    except OSError:
        return []


def socket_inodes(pid: int, maximum: int) -> set[str]:
    """The inodes of the sockets among a process's first descriptors."""
    inodes = set()
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in islice(entries, maximum):
            with contextlib.suppress(OSError):
                link = os.readlink(entry.path)
                if link.startswith("socket:["):
                    inodes.add(link[len("socket:[") : -1])
    return inodes

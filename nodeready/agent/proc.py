"""Files of /proc (proc(5)), with their values as text."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pwd
import struct
from collections.abc import Iterator
from dataclasses import dataclass
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


def all_pids(pid: int) -> list[int]:
    """The pids of a process: on the node, and in its containers, the innermost last (NSpid)."""
    try:
        words = status_fields(f"/proc/{pid}/status").get("NSpid", "").split()
    except OSError:
        words = []
    return [int(word) for word in words] or [pid]


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


def user_name(uid: int) -> str:
    """The user's name; the number if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@dataclass(frozen=True)
class Listener:
    """A TCP socket that listens."""

    address: str
    port: int
    uid: int
    inode: int


def listeners(text: str) -> Iterator[Listener]:
    """The listening sockets in /proc/net/tcp or tcp6 (proc(5))."""
    for row in text.splitlines()[1:]:
        words = row.split()
        if len(words) < 10 or words[3] != "0A":
            continue
        host, _, port = words[1].partition(":")
        with contextlib.suppress(ValueError, struct.error):
            groups = [int(host[start : start + 8], 16) for start in range(0, len(host), 8)]
            # Each group of 32 bits is printed in this machine's order.
            address = ipaddress.ip_address(struct.pack(f"={len(groups)}I", *groups))
            yield Listener(str(address), int(port, 16), int(words[7]), int(words[9]))


#: Maximum processes that are searched for a port's holder, and descriptors of each.
_MAX_HOLDERS, _MAX_DESCRIPTORS = 4096, 65536


def holder_text(listener: Listener) -> str:
    """The user and, if it is visible, the program that has a port."""
    name = user_name(listener.uid)
    user = name if name == str(listener.uid) else f"{name} (uid {listener.uid})"
    text = f"port {listener.port} is taken by {user}"
    for pid in islice(filter(str.isdigit, os.listdir("/proc")), _MAX_HOLDERS):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == listener.uid and (
                str(listener.inode) in socket_inodes(int(pid), _MAX_DESCRIPTORS)
            ):
                return f"{text}: {stat_fields(f'/proc/{pid}/stat')[0]}, pid {pid}"
    return text

"""The mounts of this node, and those whose server does not answer.

A process that uses such a mount hangs in the kernel forever.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

TABLE = "/proc/self/mountinfo"
#: File systems of the kernel, which hold no file of a job.
KERNEL_FILE_SYSTEMS = frozenset(
    (
        *("proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "debugfs", "tracefs"),
        *("securityfs", "bpf", "pstore", "configfs", "fusectl", "mqueue", "efivarfs"),
        *("binfmt_misc", "rpc_pipefs", "hugetlbfs", "selinuxfs", "nsfs"),
    )
)
#: The prefix of the name of our process that uses a mount; the mount's device follows. The kernel
#: keeps 15 characters of a name (proc(5), /proc/PID/comm).
_NAME_PREFIX = "nr-"
#: The bit of SIGKILL among a process's pending signals (proc(5), SigPnd).
_KILLED = 1 << 8


@dataclass(frozen=True)
class MountRow:
    """A row of `TABLE`."""

    path: str
    device: str  # ``MAJOR:MINOR``
    kind: str  # ``nfs4``
    source: str  # ``nas:/export``

    def __str__(self) -> str:
        return f"{self.path} ({self.source}, {self.kind})"


def parse_mounts(text: str) -> list[MountRow]:
    """The rows of `TABLE` (proc(5)); other lines are ignored."""
    mounts = []
    for row in text.splitlines():
        before, _, after = row.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) >= 6 and len(right) >= 2:
            path, source = _decode_octal(left[4]), _decode_octal(right[1])
            mounts.append(MountRow(path, left[2], right[0], source))
    return mounts


def _decode_octal(word: str) -> str:
    """The word without the table's octal codes for white space and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


class MountTable:
    """Finds the mount of a path without links, without using the path."""

    def __init__(self, rows: Iterable[MountRow]) -> None:
        # Of two mounts at the same path, the later mount is visible.
        self._rows = {row.path: row for row in rows}

    def mount_of(self, path: str) -> MountRow:
        """The mount that holds this absolute path without links."""
        directory = path
        while directory not in self._rows and directory != "/":
            directory = os.path.dirname(directory)
        return self._rows.get(directory, MountRow("/", "", "", ""))


def own_mounts() -> MountTable:
    """The mounts that this process sees."""
    with open(TABLE, encoding="utf-8", errors="surrogateescape") as file:
        return MountTable(parse_mounts(file.read()))


def open_own_name() -> int:
    """A descriptor of this process's name (proc(5), /proc/PID/comm); -1: it cannot be opened."""
    try:
        return os.open("/proc/self/comm", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def name_after(device: str, name: int) -> None:
    """Name this process after the device, so that `hung_devices` finds the process when it hangs.

    name: from `open_own_name`
    """
    with contextlib.suppress(OSError):
        os.write(name, f"{_NAME_PREFIX}{device}".encode())


def hung_devices() -> set[str]:
    """The devices for which a killed process of an earlier run still waits in the kernel."""
    devices = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
                text = file.read()
            match = re.match(rf"Name:\t{_NAME_PREFIX}(\d+:\d+)\n", text)
            pending = re.search(r"^SigPnd:\t([0-9a-f]+)$", text, re.MULTILINE)
            if match and pending and int(pending[1], 16) & _KILLED:
                devices.add(match[1])
    return devices

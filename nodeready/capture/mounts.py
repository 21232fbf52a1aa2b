"""The mounts of this node, and those that do not answer: whoever asks them never comes back."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

TABLE = "/proc/self/mountinfo"
#: File systems that hold the kernel's own things, and no file of a job.
KERNELS = frozenset(
    (
        *("proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "debugfs", "tracefs"),
        *("securityfs", "bpf", "pstore", "configfs", "fusectl", "mqueue", "efivarfs"),
        *("binfmt_misc", "rpc_pipefs", "hugetlbfs", "selinuxfs", "nsfs"),
    )
)
#: The name of a process of ours that asks a mount: this and the mount's device. The kernel keeps
#: 15 characters of it (proc(5), /proc/PID/comm).
_NAME = "nr-"
#: The bit of SIGKILL among a process's pending signals (proc(5), SigPnd).
_KILLED = 1 << 8


@dataclass(frozen=True)
class Mount:
    """A row of `TABLE`. device: ``MAJOR:MINOR``; kind: ``nfs4``; source: ``nas:/export``"""

    path: str
    device: str
    kind: str
    source: str

    def __str__(self) -> str:
        return f"{self.path} ({self.source}, {self.kind})"


def parse(text: str) -> list[Mount]:
    """The rows of `TABLE` (proc(5)); what is no row of it is passed over."""
    found = []
    for row in text.splitlines():
        before, _, after = row.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) >= 6 and len(right) >= 2:
            found.append(Mount(_plain(left[4]), left[2], right[0], _plain(right[1])))
    return found


def _plain(word: str) -> str:
    """White space and backslashes stand in the table as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


class Mounts:
    """Which mount a path without links is on, found without asking the path."""

    def __init__(self, rows: Iterable[Mount]) -> None:
        # Of two at the same place, the later one is seen.
        self._rows = {row.path: row for row in rows}

    def of(self, path: str) -> Mount:
        """The mount that holds this absolute path without links."""
        here = path
        while here not in self._rows and here != "/":
            here = os.path.dirname(here)
        return self._rows.get(here, Mount("/", "", "", ""))


def here() -> Mounts:
    """This process's own."""
    with open(TABLE, encoding="utf-8", errors="surrogateescape") as file:
        return Mounts(parse(file.read()))


def name_after(device: str) -> None:
    """Have this process bear the device's name: where it hangs shows then, and for how long."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(f"{_NAME}{device}")


def dead() -> set[str]:
    """The devices for which a process of an earlier run still waits, though it was killed."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
                text = file.read()
            match = re.match(rf"Name:\t{_NAME}(\d+:\d+)\n", text)
            pending = re.search(r"^SigPnd:\t([0-9a-f]+)$", text, re.MULTILINE)
            if match and pending and int(pending[1], 16) & _KILLED:
                found.add(match[1])
    return found

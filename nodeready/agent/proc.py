"""Files of /proc (proc(5)): processes, listening sockets, mounts."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pwd
import re
import struct
from collections.abc import Callable, Iterable, Iterator
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


def has_open(pid: int, fits: Callable[[str], object], maximum: int = 65536) -> bool:
    """Whether a process has a file open whose path fits. maximum: of its descriptors"""
    for number in list_directory(f"/proc/{pid}/fd", maximum):
        with contextlib.suppress(OSError):
            if fits(os.readlink(f"/proc/{pid}/fd/{number}")):
                return True
    return False


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
    address: str
    port: int
    uid: int
    inode: int


def file_text(path: str, max_characters: int = 16 << 20) -> str:
    """The content of a small file, such as the kernel's, up to this maximum; "": unreadable."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read(max_characters)
    return ""


def all_listeners(pid: int | str = "self") -> Iterator[Listener]:
    """The listening sockets in the network namespace of a process."""
    for name in ("tcp", "tcp6"):
        yield from listeners(file_text(f"/proc/{pid}/net/{name}"))


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


# --- The mounts of this node, and those whose server does not answer.
#
# A process that uses such a mount hangs in the kernel forever.

TABLE = "/proc/self/mountinfo"
#: File systems of the kernel, which hold no file of a job.
KERNEL_FILE_SYSTEMS = frozenset((
    "proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs",
    "bpf", "pstore", "configfs", "fusectl", "mqueue", "efivarfs", "binfmt_misc", "rpc_pipefs",
    "hugetlbfs", "selinuxfs", "nsfs",
))  # fmt: skip
#: The prefix of the name of our process that uses a mount; the mount's device follows. The kernel
#: keeps 15 characters of a name (proc(5), /proc/PID/comm).
_NAME_PREFIX = "nr-"
_KILLED = 1 << 8  # the bit of SIGKILL among a process's pending signals (proc(5), SigPnd)


@dataclass(frozen=True)
class MountRow:
    """A row of `TABLE`."""

    path: str
    device: str  # ``MAJOR:MINOR``
    kind: str  # ``nfs4``
    source: str  # ``nas:/export``
    number: str = ""  # of the mount, ``mnt_id`` in the fdinfo of a file that is open

    def __str__(self) -> str:
        return f"{self.path} ({self.source}, {self.kind})"


def parse_mounts(text: str) -> list[MountRow]:
    """The rows of `TABLE` (proc(5)); other lines are ignored."""
    mounts = []
    for row in text.splitlines():
        mount_text, _, source_text = row.partition(" - ")
        mount_words, source_words = mount_text.split(" "), source_text.split(" ")
        if len(mount_words) >= 6 and len(source_words) >= 2:
            path, source = _decode_octal(mount_words[4]), _decode_octal(source_words[1])
            mounts.append(MountRow(path, mount_words[2], source_words[0], source, mount_words[0]))
    return mounts


def _decode_octal(word: str) -> str:
    """The word without the table's octal codes for white space and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


class MountTable:
    """Finds the mount of a path without links, without using the path."""

    def __init__(self, rows: Iterable[MountRow]) -> None:
        self._rows = {row.path: row for row in rows}  # the later of two at a path is visible

    def mount_of(self, path: str) -> MountRow:
        """The mount that holds this absolute path without links."""
        directory = path
        while directory not in self._rows and directory != "/":
            directory = os.path.dirname(directory)
        return self._rows.get(directory, MountRow("/", "", "", ""))


def own_mounts() -> MountTable:
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
        text = file_text(f"/proc/{pid}/status")
        match = re.match(rf"Name:\t{_NAME_PREFIX}(\d+:\d+)\n", text)
        pending = re.search(r"^SigPnd:\t([0-9a-f]+)$", text, re.MULTILINE)
        if match and pending and int(pending[1], 16) & _KILLED:
            devices.add(match[1])
    return devices

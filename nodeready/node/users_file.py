"""A file that an ordinary user of the node may have made, read without harm: cores and logs.

A name is looked at before it is opened, because opening has effects of its own: a watchdog begins
to count, a FIFO lets its writer go on. `look` holds what the name stands for with O_PATH, which
opens nothing (open(2)); `open_regular` opens that very file, and regular files alone, with the
rights of the user who has put it there. So a link leads nowhere that its owner could not read.
What is read is read in a fork (`runtime.ForkedWorker`) that has limits (`confine`), and that gives
up root's rights for good (`give_up`) once its files are open.

A debugger opens what its target names: files of the user's, links, FIFOs, devices. So a tool of
root's that reads what a user made is the user, with one capability (capabilities(7)) for what it
could not read at all otherwise (`with_rights_of`). The user can end such a tool, and can neither
trace it nor take its descriptors: ptrace(2) asks for all capabilities that its target has.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import resource
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

#: Links on the way to one file (Linux: MAXSYMLINKS).
_MAX_LINKS = 40
#: Who reads what has been opened by root.
NOBODY = 65534
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


class FileRefused(OSError):
    """It is not opened: why, one line (``strerror``)."""

    def __init__(self, reason: str) -> None:
        super().__init__(0, reason)


def kind(mode: int) -> str:
    """``a FIFO``; "": a regular file."""
    if stat.S_ISREG(mode):
        return ""
    return _KINDS.get(stat.S_IFMT(mode), "no regular file")


# --- Rights: root does not read what a user can write, but lets that user read it.


@dataclass(frozen=True)
class Rights:
    """Whose rights; from `rights_of`."""

    uid: int
    gid: int
    groups: tuple[int, ...]


def rights_of(uid: int) -> Rights | None:
    """The rights of this user, for root to take on; None: our own ones (uid 0, or no root)."""
    return None if os.geteuid() != 0 or uid == 0 else _rights(uid)


@lru_cache(maxsize=1000)
def _rights(uid: int) -> Rights:
    try:
        account = pwd.getpwuid(uid)
        groups = os.getgrouplist(account.pw_name, account.pw_gid)
        return Rights(uid, account.pw_gid, tuple(groups))
    except (KeyError, OverflowError):
        return Rights(uid, uid, ())


@contextmanager
def with_rights(rights: Rights | None) -> Iterator[None]:
    """Files are asked for with these rights within the block; None: with our own.

    For a process without threads. The user can neither signal nor trace it: its real user id
    stays root's. Raises OSError where the user is not known to the kernel (user_namespaces(7)).
    """
    if rights is None:
        yield
        return
    before = os.getegid(), os.getgroups()
    try:
        os.setgroups(rights.groups)
        os.setegid(rights.gid)
        os.seteuid(rights.uid)
        yield
    finally:
        os.seteuid(0)
        os.setegid(before[0])
        os.setgroups(before[1])


def give_up(rights: Rights | None) -> None:
    """Go on with these rights for good; None: as it is. All capabilities go, too; the user can
    signal this process then, and not trace it."""
    if rights is not None:
        os.setgroups(rights.groups)
        os.setresgid(rights.gid, rights.gid, rights.gid)
        os.setresuid(rights.uid, rights.uid, rights.uid)
        # The kernel does it, too, unless fs.suid_dumpable is 1 (proc_sys_fs(5)).
        with contextlib.suppress(Exception):
            import ctypes

            ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def confine(memory_bytes: int, cpu_s: int, file_bytes: int = 0, *, executes: bool = False) -> None:
    """Limits of this process and all that it starts (setrlimit(2)); it leaves no core.

    memory_bytes: of address space, beyond what a fork has from the process that it is a copy of:
                  there every thread has set 64 MiB aside (glibc's arenas), used or not
    file_bytes:   of a file that it writes
    executes:     another program takes this process's place, with an address space of its own
    """
    memory_bytes += 0 if executes else _address_space()
    for number, wanted_limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, file_bytes),
    ):
        hard = resource.getrlimit(number)[1]
        allowed = wanted_limit if hard == resource.RLIM_INFINITY else min(wanted_limit, hard)
        resource.setrlimit(number, (allowed, allowed))


def _address_space() -> int:
    """Bytes that this process has (proc_pid_statm(5))."""
    # As bytes: whose rights are given up may not be able to import a codec.
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


# --- Names: links followed by hand, and known by whom they are.


@dataclass(frozen=True)
class Resolved:
    """Where a path leads to.

    path:  absolute, and without links
    owner: of the links on the way that are not root's; None: there is none
    """

    path: str
    owner: int | None = None


def _no_touch(path: str) -> None:
    """Nothing hangs here."""


def follow(place: Resolved, name: str, touch: Callable[[str], None] = _no_touch) -> Resolved:
    """Where a name in this directory, or a path, leads to. A user's link is followed with that
    user's rights alone.

    touch: called with each path before it is asked for. Raises what ``touch`` does; OSError where
    there is nothing; FileRefused for links of several users, or one that is a hard link.
    """
    todo, links = name.split("/")[::-1], 0
    path, owner = "/" if name.startswith("/") else place.path, place.owner
    while todo:
        name = todo.pop()
        if name in ("", "."):
            continue
        if name == "..":
            path = os.path.dirname(path)
            continue
        step = f"{path.rstrip('/')}/{name}"
        touch(step)
        with with_rights(None if owner is None else rights_of(owner)):
            status = os.lstat(step)
            if not stat.S_ISLNK(status.st_mode):
                path = step
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            target = os.readlink(step)
        if os.geteuid() == 0:
            if status.st_nlink > 1 and status.st_uid == 0:
                raise FileRefused(f"the link {step} has several names (hard links)")
            if status.st_uid not in (0, owner):
                if owner is not None:
                    raise FileRefused(f"the link {step} is another user's than the one before it")
                owner = status.st_uid
        path = "/" if target.startswith("/") else path
        todo += target.split("/")[::-1]
    return Resolved(path, owner)


#: Where every path begins.
ROOT = Resolved("/")


def linked_status(place: Resolved) -> os.stat_result:
    """What lies there, as whoever's links led there may see it. Raises OSError."""
    with with_rights(None if place.owner is None else rights_of(place.owner)):
        return os.lstat(place.path)


# --- What a process names: the file that it opened is that file and no name; a path is its own.


@contextmanager
def held(pid: int, uid: int, path: str) -> Iterator[tuple[int, os.stat_result]]:
    """What a path that a process named stands for there: a descriptor with O_PATH, and about it.

    The path is resolved below the process's own root, with the rights of this user, and through
    nobody's links but root's and that user's. Whoever opens it does so by the descriptor, with the
    same rights. Raises OSError: FileNotFoundError for none, FileRefused for another user's link.
    """
    if "\0" in path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    opened = [os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        if not path.startswith("/"):
            path = os.path.join(os.readlink(f"/proc/{pid}/cwd"), path)
        with with_rights(rights_of(uid)):
            opened_path, todo, links = [opened[0]], path.split("/")[::-1], 0
            while todo:
                name = todo.pop()
                if name in ("", "."):
                    continue
                if name == "..":
                    opened_path = opened_path[:-1] or opened_path
                    continue
                number = os.open(name, flags, dir_fd=opened_path[-1])
                opened.append(number)
                status = os.fstat(number)
                if not stat.S_ISLNK(status.st_mode):
                    opened_path.append(number)
                    continue
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if status.st_uid not in (0, uid):
                    raise FileRefused("a link on the way is another user's")
                target = os.readlink("", dir_fd=number)
                opened_path = [opened[0]] if target.startswith("/") else opened_path
                todo += target.split("/")[::-1]
        yield opened_path[-1], os.fstat(opened_path[-1])
    finally:
        for number in opened:
            os.close(number)


@contextmanager
def scan(directory: Resolved) -> Iterator[Iterator[os.DirEntry[str]]]:
    """The entries of a directory, within the block; a user's link leads to no other than that
    user may list.

    Raises OSError; NotADirectoryError for what is none.
    """
    result = look(directory.path)
    try:
        if not stat.S_ISDIR(result.known.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory.path)
        with with_rights(None if directory.owner is None else rights_of(directory.owner)):
            number = os.open(f"/proc/self/fd/{result.number}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(result.number)
    try:
        with os.scandir(number) as entries:
            yield entries
    finally:
        os.close(number)


@dataclass(frozen=True)
class ScannedEntry:
    """What a path stood for when it was looked at.

    number:  descriptor of it, with O_PATH; the caller's to close
    known:   about this very thing
    shared:  somebody else than its owner may have given it this name
    """

    number: int
    known: os.stat_result
    shared: bool


def look(path: str) -> ScannedEntry:
    """Hold what a path without links stands for; nothing is opened.

    Raises OSError; FileRefused when one of its components has become a link.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open("/", flags | os.O_DIRECTORY)
    parent = os.fstat(number)
    for name in filter(None, path.split("/")):
        try:
            child = os.open(name, flags, dir_fd=number)
        except OSError as problem:
            problem.filename = path
            raise
        finally:
            parent = os.fstat(number)
            os.close(number)
        number = child
    try:
        status = os.fstat(number)
        if stat.S_ISLNK(status.st_mode):
            raise FileRefused("it is a link")
    except OSError:
        os.close(number)
        raise
    private = parent.st_uid in (0, status.st_uid) and not parent.st_mode & _OTHERS_WRITE
    return ScannedEntry(number, status, not private)


def open_regular(
    path: str, owner: int | None = None, *, hard_links: bool = False
) -> tuple[int, os.stat_result]:
    """A descriptor to read a regular file with, and what it is.

    path:       without links (`Resolved`)
    owner:      of links that led to it: it is opened with that user's rights, else with the
                rights of whoever owns the file
    hard_links: open it, unless it is root's, also where the name may be a hard link that somebody
                else than its owner has made

    Raises OSError; FileRefused for anything but a regular file, which is then not opened.
    """
    result = look(path)
    try:
        mode = result.known.st_mode
        if not stat.S_ISREG(mode):
            raise FileRefused(f"it is {kind(mode)}")
        root = os.geteuid() == 0
        several = result.known.st_nlink > 1 and result.shared
        if root and several and not (hard_links and result.known.st_uid):
            raise FileRefused(
                f"it has {result.known.st_nlink} names: a hard link, which somebody else than its "
                "owner may have made"
            )
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with with_rights(rights_of(result.known.st_uid if owner is None else owner)):
            # This very file, whatever has its name by now.
            number = os.open(f"/proc/self/fd/{result.number}", flags)
    finally:
        os.close(result.number)
    return number, result.known


#: The last moment that a number of 64 bits has, in nanoseconds since 1970: in 2262.
_LAST_NS = (1 << 63) - 1


def modified_ns(status: os.stat_result) -> int:
    """When it was written, in nanoseconds since 1970, within 64 bits: its owner may set any time,
    and some file systems keep seconds of 64 bits (utimensat(2))."""
    return max(-_LAST_NS, min(status.st_mtime_ns, _LAST_NS))


# --- Many files: who makes many hides nobody else's.


_SUBUID = "/etc/subuid"
#: Seconds for the names of such ids, all together.
_NAMES_S = 1.0
_asked_s: list[float] = []


@lru_cache(maxsize=1)
def _subordinate() -> tuple[tuple[int, int], ...]:
    """The ids that users have for user namespaces, as (first, behind the last)."""
    with contextlib.suppress(OSError), open(_SUBUID, encoding="utf-8", errors="replace") as file:
        rows = (row.strip().split(":") for row in file.read(1 << 20).splitlines())
        rows_of_digits = (
            row[1:] for row in rows if len(row) == 3 and all(map(str.isdigit, row[1:]))
        )
        return tuple((int(first), int(first) + int(count)) for first, count in rows_of_digits)
    return ()


@lru_cache(maxsize=100_000)
def person(uid: int) -> int:
    """One number for all ids of a person: of those that a user has for user namespaces, tens of
    thousands (subuid(5), newuidmap(1)), the first, unless it is another user's own."""
    first = next((first for first, end in _subordinate() if first <= uid < end), None)
    if first is None:
        return uid
    began = time.monotonic()
    if sum(_asked_s) < _NAMES_S:
        with contextlib.suppress(KeyError, OverflowError):
            return pwd.getpwuid(uid).pw_uid
        _asked_s[:] = [sum(_asked_s) + time.monotonic() - began]
    return first


class _Owned(Protocol):
    @property
    def owner(self) -> int: ...

    @property
    def modified_ns(self) -> int: ...


Owned = TypeVar("Owned", bound=_Owned)


def by_turns(files: Iterable[Owned]) -> list[Owned]:
    """The newest of each owner (a `person`), the newest first, then the second, and so on."""
    nth: Counter[int] = Counter()
    ranked = []
    for file in sorted(files, key=lambda file: -file.modified_ns):
        ranked.append((nth[file.owner], file))
        nth[file.owner] += 1
    return [file for _, file in sorted(ranked, key=lambda row: row[0])]


#: Capabilities: reading every file, and every process's memory.
READ_FILES, READ_MEMORY = 2, 19

# A program of its own: what runs between fork and exec must not use threads, locks or ctypes.
# uid, groups (the first is the main one), capabilities, bytes of memory, the process by whose maps
# the tool goes (0: none); then the tool's words.
# Where a capability cannot be kept (Linux before 4.3, a Python without ctypes), it is lacking.
_LOWER = r"""
import os, resource, struct, sys
uid, memory, pid = int(sys.argv[1]), int(sys.argv[4]), int(sys.argv[5])
groups = [int(word) for word in sys.argv[2].split(",")]
kept = [int(word) for word in sys.argv[3].split(",") if word]
for number, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory)):
    hard = resource.getrlimit(number)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(number, (most, most))
try:
    # Where memory runs out, this is ended before any job.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
except OSError:
    pass
try:
    import ctypes
    libc = ctypes.CDLL(None)
except (ImportError, OSError):
    libc = None
def show_root(process, top):
    # py-spy opens what the maps name, below /proc/PID/root. Those names begin at the root of the
    # process's mount namespace. In a chroot(2) that is shown in place of its own.
    names = os.listdir(f"/proc/{pid}")
    if libc.mount(b"none", b"/proc/%d" % pid, b"tmpfs", 0, b"size=64k,mode=755") == 0:
        for name in names:
            leads = top if name == "root" else f"{process}/{name}"
            os.symlink(f"/proc/self/fd/{leads}", f"/proc/{pid}/{name}")
        os.set_inheritable(process, True)
        os.set_inheritable(top, True)
def top_of(pid):
    # setns(2): the root of a process's mount namespace, held; -1: it is the process's own root.
    if not pid or os.readlink(f"/proc/{pid}/root") == "/":
        return -1
    flags = os.O_PATH | os.O_DIRECTORY
    here, own = os.open("/", flags), os.open("/proc/self/ns/mnt", os.O_RDONLY)
    if libc.setns(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY), 0x00020000):
        return -1
    top = os.open("/", flags)
    if libc.setns(own, 0x00020000):
        sys.exit("setns: no way back")
    os.fchdir(here)
    os.chroot(".")
    return top
if libc:
    alone = uid == 0 or 2 in kept
    try:
        top = top_of(pid)
    except OSError:
        top = -1
    if (alone or top >= 0) and libc.unshare(0x00020000) == 0:
        private = libc.mount(b"none", b"/", None, 0x44000, 0) == 0
        if private and top >= 0:
            show_root(os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY), top)
        # No device is opened but by who may open it anyway, and no file written:
        # mount_namespaces(7), mount_setattr(2) with RDONLY, NOSUID and NODEV.
        if private and alone:
            libc.mount(b"none", b"/dev", b"tmpfs", 0, b"size=4k")
            libc.syscall(442, -100, b"/", 0x8000, struct.pack("=QQQQ", 7, 0, 0, 0), 32)
    if uid and 2 in kept:
        # What may read every file talks to nobody: network_namespaces(7), ipc_namespaces(7).
        libc.unshare(0x48000000)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    for capability in range(64):
        if capability not in kept:
            libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
os.setgroups(groups)
os.setresgid(groups[0], groups[0], groups[0])
os.setresuid(uid, uid, uid)
if libc:
    mask = sum(1 << capability for capability in kept)
    head = struct.pack("=II", 0x20080522, 0)
    libc.capset(head, struct.pack("=IIIIII", *(mask,) * 3, 0, 0, 0))
    for capability in kept:
        libc.prctl(47, 2, capability, 0, 0)  # PR_CAP_AMBIENT_RAISE
os.execv(sys.argv[6], sys.argv[6:])
"""


def words(
    rights: Rights,
    capabilities: Sequence[int],
    memory_bytes: int,
    tool: Sequence[str],
    maps_of: int = 0,
) -> list[str]:
    """The words that start ``tool`` (its path first) with these rights; to be started by root.

    capabilities: what it may do beside, of READ_FILES and READ_MEMORY
    memory_bytes: of its address space
    maps_of:      the process of which it opens what the maps name, below /proc/PID/root; 0: none
    """
    groups = dict.fromkeys((rights.gid, *rights.groups))
    options = [
        str(rights.uid),
        ",".join(map(str, groups)),
        ",".join(map(str, capabilities)),
        str(memory_bytes),
        str(maps_of),
    ]
    return [sys.executable, "-I", "-S", "-B", "-c", _LOWER, *options, *tool]


def rights_of_process(pid: int) -> Rights:
    """The rights that this process has now (proc(5)). Raises OSError when it is gone."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        rows = dict(row.split(":", 1) for row in file if ":" in row)
    uid, gid = (int(rows[name].split()[1]) for name in ("Uid", "Gid"))
    return Rights(uid, gid, tuple(map(int, rows["Groups"].split())))


def with_rights_of(
    pid: int, memory_bytes: int, tool: Sequence[str], *, by_maps: bool = False
) -> list[str]:
    """The words that start a tool which reads this process's memory; as no root, the tool's own.

    by_maps: it opens what the process's maps name

    Root's own process is read by root, without devices and all other capabilities. Raises OSError
    when the process is gone.
    """
    if os.geteuid() != 0:
        return list(tool)
    rights = rights_of_process(pid)
    capabilities = (READ_MEMORY,) if rights.uid else (READ_FILES, READ_MEMORY)
    return words(rights, capabilities, memory_bytes, tool, pid if by_maps else 0)

"""Read files that an ordinary user may have created, such as cores and logs, without harm.

A file is checked before it is opened, because opening has effects: it starts a watchdog device,
and releases the writer of a FIFO. `hold` holds the file with O_PATH, which does not open it
(open(2)). `open_regular` then opens the same file if it is regular, with the rights of the user
who put it there. So a link leads only to files that its owner could read. The files are read in a
fork (`runtime.ForkedWorker`) with limits (`confine`), which gives up root's rights forever
(`give_up`) when its files are open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import resource
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

from nodeready.agent.proc import status_fields

_MAX_LINKS = 40  # maximum links in a path (Linux: MAXSYMLINKS)
NOBODY = 65534  # the user who reads files that root has opened
#: Flags to read a file that a user may have exchanged for a FIFO or a terminal.
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFLNK: "a link",
}  # fmt: skip


class FileRefused(OSError):
    """Why a file is not opened, one line (``strerror``)."""

    def __init__(self, reason: str) -> None:
        super().__init__(0, reason)


def special_kind(mode: int) -> str:
    """The kind of a file that is not regular, such as ``a FIFO``; "" for a regular file."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no regular file")


# --- Rights: a file that a user can write is read with that user's rights, not root's.


@dataclass(frozen=True)
class Rights:
    uid: int
    gid: int
    groups: tuple[int, ...]


def rights_of(uid: int) -> Rights | None:
    """The rights of this user, for root; None: our own (for uid 0, or if we are not root)."""
    return None if os.geteuid() != 0 or uid == 0 else _rights(uid)


@lru_cache(maxsize=1000)
def _rights(uid: int) -> Rights:
    try:
        account = pwd.getpwuid(uid)
        groups = os.getgrouplist(account.pw_name, account.pw_gid)
        return Rights(uid, account.pw_gid, tuple(groups))
    except (KeyError, OverflowError):
        return Rights(uid, uid, ())


def rights_of_process(pid: int) -> Rights:
    """The current rights of a process (proc(5)). Raises OSError if it has ended."""
    rows = status_fields(f"/proc/{pid}/status")
    uid, gid = (int(rows[name].split()[1]) for name in ("Uid", "Gid"))
    return Rights(uid, gid, tuple(map(int, rows["Groups"].split())))


def rights_of_job(pid: int, uid: int) -> Rights | None:
    """The rights of a process, which root takes; None: root keeps its own rights.

    The groups of a process may differ from its user's groups, and /proc shows the process only to
    a process with the same groups (ptrace(2)). Raises OSError; PermissionError if the process has
    another user's rights now.
    """
    if os.geteuid() != 0 or uid == 0:
        return None
    rights = rights_of_process(pid)
    if rights.uid != uid:
        raise PermissionError(1, "it has taken on another user's rights")
    return rights


@contextmanager
def with_rights(rights: Rights | None) -> Iterator[None]:
    """Use files with these rights within the block; None: with our own rights.

    The process must have no threads. The user can neither signal nor trace it, because its real
    user id stays root's. Raises OSError if the kernel does not know the user
    (user_namespaces(7)).
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
    """Take these rights forever, without capabilities; None: keep our own. The user can then
    signal this process, but not trace it.
    """
    if rights is not None:
        os.setgroups(rights.groups)
        os.setresgid(rights.gid, rights.gid, rights.gid)
        os.setresuid(rights.uid, rights.uid, rights.uid)
        # The kernel does it, too, unless fs.suid_dumpable is 1 (proc_sys_fs(5)).
        with contextlib.suppress(Exception):
            import ctypes

            ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def confine(memory_bytes: int, cpu_s: int, file_bytes: int = 0, *, executes: bool = False) -> None:
    """Set limits of this process and its children (setrlimit(2)), without a core.

    memory_bytes: of address space, in addition to the address space that a fork inherits, in which
                  each thread has reserved 64 MiB (glibc's arenas)
    file_bytes:   of a file that it writes
    executes:     another program replaces this process, with a new address space
    """
    if not executes:
        # Read as bytes: after rights are given up, a codec may not be importable.
        with open("/proc/self/statm", "rb") as file:
            memory_bytes += int(file.read().split()[0]) * resource.getpagesize()
    numbers = resource.RLIMIT_CORE, resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE
    for number, limit in zip(numbers, (0, memory_bytes, cpu_s, file_bytes)):
        hard = resource.getrlimit(number)[1]
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (allowed, allowed))


# --- Paths: links are followed one by one, with the rights of their owners.


@dataclass(frozen=True)
class Resolved:
    path: str  # absolute, and without links
    owner: int | None = None  # of the followed links that are not root's; None: no such link


def follow(directory: Resolved, name: str, touch: Callable[[str], None] | None = None) -> Resolved:
    """The target of a name or a path in this directory, or of an absolute path.

    A user's link is followed with that user's rights. Raises OSError if the target is missing,
    FileRefused for links of several users or a hard link, and the exceptions of ``touch``.

    touch: called with each path before the path is used
    """
    remaining_names, links = name.split("/")[::-1], 0
    path, owner = "/" if name.startswith("/") else directory.path, directory.owner
    while remaining_names:
        name = remaining_names.pop()
        if name in ("", "."):
            continue
        if name == "..":
            path = os.path.dirname(path)
            continue
        step = f"{path.rstrip('/')}/{name}"
        if touch is not None:
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
        remaining_names += target.split("/")[::-1]
    return Resolved(path, owner)


ROOT = Resolved("/")  # the root directory


def linked_status(place: Resolved) -> os.stat_result:
    """The status of a target, read with the rights of the links' owner. Raises OSError."""
    with with_rights(None if place.owner is None else rights_of(place.owner)):
        return os.lstat(place.path)


def walked(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Each directory, link and file of an absolute path with its status, in the kernel's order. No
    rights are taken, and every link is followed. Raises OSError.
    """
    todo, directory, links = path.split("/")[::-1], "/", 0
    yield "/", os.lstat("/")
    while todo:
        name = todo.pop()
        if name in ("", "."):
            continue
        if name == "..":
            directory = os.path.dirname(directory)
            continue
        step = os.path.join(directory, name)
        status = os.lstat(step)
        yield step, status
        if not stat.S_ISLNK(status.st_mode):
            directory = step
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), step)
        target = os.readlink(step)
        directory = "/" if target.startswith("/") else directory
        todo += target.split("/")[::-1]


# --- Paths in a process's own root.


@contextmanager
def held_path(pid: int, uid: int, path: str) -> Iterator[tuple[int, os.stat_result]]:
    """An O_PATH descriptor and the status of the target of a path of a process.

    The path is resolved below the process's own root, with the rights of this user, and only
    through links of root and that user. The caller opens the target by the descriptor, with the
    same rights. Raises OSError: FileNotFoundError if it is missing, FileRefused for another user's
    link.
    """
    if "\0" in path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    opened = [os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        if not path.startswith("/"):
            path = os.path.join(os.readlink(f"/proc/{pid}/cwd"), path)
        with with_rights(rights_of(uid)):
            # The descriptors of the current directory and its parents.
            opened_path = [opened[0]]
            remaining_names, links = path.split("/")[::-1], 0
            while remaining_names:
                name = remaining_names.pop()
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
                remaining_names += target.split("/")[::-1]
        yield opened_path[-1], os.fstat(opened_path[-1])
    finally:
        for number in opened:
            os.close(number)


@contextmanager
def opened_path(pid: int, uid: int, path: str) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor to read the regular file at a path of a process, and the file's status. The
    file is found as by `held_path`. Raises OSError; FileRefused for another kind of file.
    """
    with held_path(pid, uid, path) as (held, status):
        if not stat.S_ISREG(status.st_mode):
            raise FileRefused(f"it is {special_kind(status.st_mode)}")
        with with_rights(rights_of(uid)):
            number = os.open(f"/proc/self/fd/{held}", READ_FLAGS)
    try:
        yield number, status
    finally:
        os.close(number)


@contextmanager
def scan(directory: Resolved) -> Iterator[Iterator[os.DirEntry[str]]]:
    """The entries of a directory, within the block. A user's link leads only to a directory that
    this user may list. Raises OSError; NotADirectoryError if it is no directory.
    """
    held_file = hold(directory.path)
    try:
        if not stat.S_ISDIR(held_file.status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory.path)
        with with_rights(None if directory.owner is None else rights_of(directory.owner)):
            number = os.open(f"/proc/self/fd/{held_file.number}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(held_file.number)
    try:
        with os.scandir(number) as entries:
            yield entries
    finally:
        os.close(number)


@dataclass(frozen=True)
class HeldFile:
    """A file that is held by an O_PATH descriptor."""

    number: int  # the descriptor, which the caller closes
    status: os.stat_result  # of the file
    is_name_forgeable: bool  # a user other than the owner may have given the file this name


def hold(path: str) -> HeldFile:
    """Hold the file of a path without links, without opening it. Raises OSError; FileRefused if a
    component of the path has become a link.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open("/", flags | os.O_DIRECTORY)
    parent = os.fstat(number)
    for name in filter(None, path.split("/")):
        directory = number
        try:
            parent = os.fstat(directory)
            number = os.open(name, flags, dir_fd=directory)
        except OSError as problem:
            problem.filename = path
            raise
        finally:
            os.close(directory)
    try:
        status = os.fstat(number)
        if stat.S_ISLNK(status.st_mode):
            raise FileRefused("it is a link")
    except OSError:
        os.close(number)
        raise
    is_private = parent.st_uid in (0, status.st_uid) and not parent.st_mode & _OTHERS_WRITE
    return HeldFile(number, status, is_name_forgeable=not is_private)


def open_regular(
    path: str, owner: int | None = None, *, hard_links: bool = False
) -> tuple[int, os.stat_result]:
    """A descriptor to read a regular file, and the file's status.

    path:       without links (`Resolved`)
    owner:      of the links that led to the file, with whose rights it is opened; None: the
                rights of the file's owner are used
    hard_links: also open a file, unless it is root's, whose name may be another user's hard link

    Raises OSError; FileRefused for other files, which are not opened.
    """
    held_file = hold(path)
    try:
        mode = held_file.status.st_mode
        if not stat.S_ISREG(mode):
            raise FileRefused(f"it is {special_kind(mode)}")
        is_root = os.geteuid() == 0
        may_be_hard_link = held_file.status.st_nlink > 1 and held_file.is_name_forgeable
        if is_root and may_be_hard_link and not (hard_links and held_file.status.st_uid):
            raise FileRefused(
                f"it has {held_file.status.st_nlink} names: a hard link, which a user other than "
                "its owner may have made"
            )
        with with_rights(rights_of(held_file.status.st_uid if owner is None else owner)):
            # By the descriptor, because another file may have the name now.
            number = os.open(f"/proc/self/fd/{held_file.number}", READ_FLAGS)
    finally:
        os.close(held_file.number)
    return number, held_file.status


_LAST_NS = (1 << 63) - 1  # the last time in nanoseconds since 1970 that fits into 64 bits: in 2262


def modified_ns(status: os.stat_result) -> int:
    """The time of the last change, in nanoseconds since 1970, limited to 64 bits. The owner may
    set any time, and some file systems store seconds in 64 bits (utimensat(2)).
    """
    return max(-_LAST_NS, min(status.st_mtime_ns, _LAST_NS))


# --- Too many files: a user with many files must not hide another user's.

_SUBUID = "/etc/subuid"
#: Maximum seconds in this process to look up the accounts of such ids; the seconds used so far.
_MAX_LOOKUP_S = 1.0
_used_s = [0.0]


@lru_cache(maxsize=1)
def _subordinate() -> tuple[tuple[int, int], ...]:
    """The ranges of ids for user namespaces, as (first, last + 1)."""
    with contextlib.suppress(OSError), open(_SUBUID, encoding="utf-8", errors="replace") as file:
        rows = (row.strip().split(":") for row in file.read(1 << 20).splitlines())
        numbers = (row[1:] for row in rows if len(row) == 3 and all(map(str.isdigit, row[1:])))
        return tuple((int(first), int(first) + int(count)) for first, count in numbers)
    return ()


@lru_cache(maxsize=100_000)
def main_uid(uid: int) -> int:
    """The same id for all subordinate ids of a user (subuid(5), newuidmap(1)).

    A user has tens of thousands of them for user namespaces. The first id of the range stands for
    all, except an id that is the uid of another account.
    """
    first = next((first for first, end in _subordinate() if first <= uid < end), None)
    if first is None:
        return uid
    started_s = time.monotonic()
    if _used_s[0] < _MAX_LOOKUP_S:
        with contextlib.suppress(KeyError, OverflowError):
            return pwd.getpwuid(uid).pw_uid
        _used_s[0] += time.monotonic() - started_s
    return first


class _Owned(Protocol):
    @property
    def owner(self) -> int: ...
    @property
    def modified_ns(self) -> int: ...


Owned = TypeVar("Owned", bound=_Owned)


def by_turns(files: Iterable[Owned]) -> list[Owned]:
    """The newest file of each owner (a `main_uid`), then the second newest of each, and so on."""
    nth: Counter[int] = Counter()
    ranked = []
    for file in sorted(files, key=lambda file: -file.modified_ns):
        ranked.append((nth[file.owner], file))
        nth[file.owner] += 1
    return [file for _, file in sorted(ranked, key=lambda row: row[0])]

"""Whose memory a process has: its rights and its program, and whether they are still the same.

A process can become another by execve(2): its number and its start time stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
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
class ProcessIdentity:
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
        return min(credentials.users[1] for credentials in self.credentials)

    @property
    def gid(self) -> int:
        """The lowest effective group id among its threads."""
        return min(credentials.groups[1] for credentials in self.credentials)

    def mixed(self, own_namespace: tuple[int, int]) -> str:
        """Why its memory may be more than its user's own, a few words; "": it is the user's.

        ours: our own namespace of users
        """
        for credentials in self.credentials:
            if len(set(credentials.users)) > 1 or len(set(credentials.groups)) > 1:
                return "runs with the rights of more than one user or group (setuid, setgid)"
            if (
                credentials.capabilities
                and credentials.users[0]
                and self.namespace == own_namespace
            ):
                return "has capabilities, which its user has not"
        if len(self.credentials) > 1:
            return "has threads with different rights"
        if self.owner != self.uid:
            return "is closed to its own user (not dumpable)"
        secure = dict(self.auxv).get(_AT_SECURE)
        if secure is None:
            return "is no 64-bit program"
        return "was started with more rights than its user has (setuid, setgid)" if secure else ""

    def change(self, current: ProcessIdentity, own_namespace: tuple[int, int]) -> str:
        """What became of it, a few words; "": nothing.

        now: the same pid, later
        """
        if current == self:
            return ""
        if current.started != self.started:
            return "ended, and another one has its number"
        if reason := current.mixed(own_namespace):
            return f"changed while it was looked at: it {reason}"
        same = replace(current, executable=self.executable, auxv=self.auxv) == self
        difference = "runs another program" if same else "has another user or group"
        return f"changed while it was looked at: it {difference}"


def auxv(raw: bytes) -> tuple[tuple[int, int], ...]:
    """The pairs of a 64-bit process up to AT_NULL."""
    ids = []
    for kind, value in struct.iter_unpack("<QQ", raw[: len(raw) // 16 * 16]):
        if kind == 0:
            break
        ids.append((kind, value))
    return tuple(ids)


def namespace(pid: int | str) -> tuple[int, int]:
    """The namespace of users of a process, as device and inode."""
    status = os.stat(f"/proc/{pid}/ns/user")
    return status.st_dev, status.st_ino


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


def identity(pid: int) -> ProcessIdentity:
    """The process of this number.

    Raises OSError (ProcessLookupError) where it is gone, or hidden from us.
    """
    ids = set()
    with open(f"/proc/{pid}/stat", "rb") as file:
        started = int(file.read().rpartition(b")")[2].split()[19])
    for name in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{name}/status", encoding="utf-8", errors="replace") as f:
                ids.add(credentials(thread(f.read())))
        except (FileNotFoundError, ProcessLookupError):
            continue
    if not ids:
        raise ProcessLookupError(pid)
    owner = os.stat(f"/proc/{pid}/stat").st_uid
    if os.geteuid() not in (0, owner):
        return ProcessIdentity(started, frozenset(ids), (0, 0), owner)
    status = os.stat(f"/proc/{pid}/exe")
    with open(f"/proc/{pid}/auxv", "rb") as raw:
        auxiliary = auxv(raw.read(1 << 16))
    program = (status.st_dev, status.st_ino)
    return ProcessIdentity(started, frozenset(ids), namespace(pid), owner, program, auxiliary)


#: Links on the way to a directory (path_resolution(7)).
_LINKS = 40
#: Where the file system has no files without a name: the private directory's own name begins so.
_PREFIX = ".nodeready.core."
_INSIDE = "core"
#: Names among which directories are looked for that a killed run left.
_ENTRIES = 10_000
#: What open(2) says where there is no O_TMPFILE: the file system, and an old kernel.
_UNNAMED_MISSING = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


def _ours_alone(status: os.stat_result) -> bool:
    """Whether nobody but root and we can have made what is in this directory."""
    shared = status.st_mode & 0o002 or (status.st_mode & 0o020 and status.st_gid != 0)
    return status.st_uid in (0, os.geteuid()) and not shared


def open_directory(path: str) -> int:
    """An O_PATH descriptor of the directory of an absolute path.

    A link on the way is followed only where it and all directories above it are root's or ours,
    and nobody else can write there. Raises OSError with the name of the component.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    directory, is_ours_alone, links = os.open("/", flags), True, 0
    todo, done = [part for part in reversed(path.split("/")) if part], ""
    try:
        while todo:
            name = todo.pop()
            is_ours_alone = is_ours_alone and _ours_alone(os.fstat(directory))
            try:
                next_directory = os.open(name, flags, dir_fd=directory)
            except OSError as problem:
                raise OSError(problem.errno, problem.strerror, f"{done}/{name}") from None
            status = os.fstat(next_directory)
            if stat.S_ISLNK(status.st_mode):
                with contextlib.ExitStack() as after:
                    after.callback(os.close, next_directory)
                    links += 1
                    if (
                        not is_ours_alone
                        or status.st_uid not in (0, os.geteuid())
                        or links > _LINKS
                    ):
                        reason = "is a link that another user may have made"
                        raise OSError(errno.ELOOP, reason, f"{done}/{name}")
                    target = os.readlink("", dir_fd=next_directory)
                todo += [part for part in reversed(target.split("/")) if part]
                if target.startswith("/"):
                    os.close(directory)
                    directory, is_ours_alone, done = os.open("/", flags), True, ""
                continue
            os.close(directory)
            directory, done = next_directory, f"{done}/{name}"
            if not stat.S_ISDIR(status.st_mode):
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), done)
    except BaseException:
        os.close(directory)
        raise
    return directory


class NewFile:
    """A file for another process to write through /proc/self/fd/NUMBER, whoever that is.

    It is ours, and only its descriptor leads to it: it has no name, or, where the file system has
    no such files, one in a directory that only we can enter. Raises OSError.

    directory: descriptor of the directory where it gets its name
    number:    its own descriptor
    """

    def __init__(self, directory: int) -> None:
        self._directory, self._private, self._hidden = directory, -1, ""
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            self.number = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=directory)
        except OSError as problem:
            if problem.errno not in _UNNAMED_MISSING:
                raise
            self._hidden = f"{_PREFIX}{secrets.token_hex(8)}"
            os.mkdir(self._hidden, 0o700, dir_fd=directory)
            self._private = _enter(self._hidden, directory)
            # Held while we live: whoever finds the directory without it may remove it.
            fcntl.flock(self._private, fcntl.LOCK_EX | fcntl.LOCK_NB)
            flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self.number = os.open(_INSIDE, flags, 0o600, dir_fd=self._private)
        # Whoever has the descriptor opens the file once more by it.
        os.fchmod(self.number, 0o666)

    def publish(self, name: str, uid: int, gid: int) -> None:
        """Make it that user's, for that user's eyes only, and then name it.

        Raises OSError: FileExistsError where there is something of that name.
        """
        os.fchmod(self.number, 0o600)
        if os.geteuid() == 0:
            os.fchown(self.number, uid, gid)
        if self._private < 0:
            os.link(f"/proc/self/fd/{self.number}", name, dst_dir_fd=self._directory)
        else:
            how = {"src_dir_fd": self._private, "dst_dir_fd": self._directory}
            os.link(_INSIDE, name, **how, follow_symlinks=False)

    def tidy(self) -> None:
        """Remove all but the name that `publish` gave it. Harmless twice."""
        if self._hidden:
            _remove(self._directory, self._hidden)


def _enter(name: str, directory: int) -> int:
    """A descriptor of a directory that is ours and closed to all others. Raises OSError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open(name, flags, dir_fd=directory)
    status = os.fstat(number)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(number)
        raise OSError(errno.EPERM, "was put into the place of ours", name)
    return number


def _remove(directory: int, name: str, unlocked: bool = False) -> None:
    """Remove a private directory of ours; unlocked: only when its maker has ended."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as after:
        number = _enter(name, directory)
        after.callback(os.close, number)
        if unlocked:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_INSIDE, dir_fd=number)
        # It fails on whatever is no empty directory.
        os.rmdir(name, dir_fd=directory)


def remove_leftovers(directory: int) -> None:
    """Remove what killed runs left in this directory: where there is no file without a name."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with contextlib.suppress(OSError), contextlib.ExitStack() as after:
        number = os.open(".", flags, dir_fd=directory)
        after.callback(os.close, number)
        with os.scandir(number) as entries:
            names = [entry.name for _, entry in zip(range(_ENTRIES), entries)]
        for name in names:
            if name.startswith(_PREFIX):
                _remove(directory, name, unlocked=True)

"""The rights and the program of a process, and whether both are still the same.

execve(2) changes them, and keeps the pid and the start time.
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
from itertools import islice

from nodeready.node.proc import stat_fields, status_fields

#: getauxval(3): set if a program was started with more rights than its caller had.
_AT_SECURE = 23
#: The sets of capabilities(7) that are rights or become rights.
_SETS = ("CapPrm", "CapEff", "CapAmb")


@dataclass(frozen=True)
class Credentials:
    """The credentials of one thread: the kernel has them for each thread.

    users, groups: real, effective, saved and file system ids
    capabilities:  the bits of all sets
    """

    users: tuple[int, ...]
    groups: tuple[int, ...]
    capabilities: int


@dataclass(frozen=True)
class ProcessIdentity:
    """One process in /proc at one moment.

    started:     clock ticks after boot; with the pid it identifies the process
    credentials: of all threads, each once
    namespace:   of users, in which its capabilities count: device and inode
    owner:       of the files in /proc/PID: root, if even its user may not trace the process
                 (proc(5), dumpable); the directory itself always belongs to the user
    executable:  device and inode
    auxv:        the auxiliary vector of its program, which has random addresses: each start of a
                 program has another vector (getauxval(3))
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

    def privilege_problem(self, own_namespace: tuple[int, int]) -> str:
        """Why its memory may have data that its user may not see, a few words; "": it has none.

        own_namespace: our own namespace of users
        """
        for credentials in self.credentials:
            if len(set(credentials.users)) > 1 or len(set(credentials.groups)) > 1:
                return "runs with the rights of more than one user or group (setuid, setgid)"
            is_user = credentials.users[0] != 0 and self.namespace == own_namespace
            if is_user and credentials.capabilities:
                return "has capabilities, which its user has not"
        if len(self.credentials) > 1:
            return "has threads with different rights"
        if self.owner != self.uid:
            return "is closed to its own user (not dumpable)"
        secure = dict(self.auxv).get(_AT_SECURE)
        if secure is None:
            return "is no 64-bit program"
        return "was started with more rights than its user has (setuid, setgid)" if secure else ""

    def describe_change(self, current: ProcessIdentity, own_namespace: tuple[int, int]) -> str:
        """How the process changed, a few words; "": it did not change.

        current: the identity of the same pid, later
        """
        if current == self:
            return ""
        if current.started != self.started:
            return "ended, and another one has its number"
        if reason := current.privilege_problem(own_namespace):
            return f"changed while it was looked at: it {reason}"
        same = replace(current, executable=self.executable, auxv=self.auxv) == self
        difference = "runs another program" if same else "has another user or group"
        return f"changed while it was looked at: it {difference}"


def auxv(raw: bytes) -> tuple[tuple[int, int], ...]:
    """The pairs of a 64-bit process's auxiliary vector, up to AT_NULL."""
    pairs = []
    for kind, value in struct.iter_unpack("<QQ", raw[: len(raw) // 16 * 16]):
        if kind == 0:
            break
        pairs.append((kind, value))
    return tuple(pairs)


def namespace(pid: int | str) -> tuple[int, int]:
    """The namespace of users of a process, as device and inode."""
    status = os.stat(f"/proc/{pid}/ns/user")
    return status.st_dev, status.st_ino


def credentials(rows: dict[str, str]) -> Credentials:
    """The credentials of one thread, from the fields of its status."""
    capabilities = 0
    for name in _SETS:
        capabilities |= int(rows.get(name, "0"), 16)
    users, groups = (tuple(map(int, rows[name].split())) for name in ("Uid", "Gid"))
    return Credentials(users, groups, capabilities)


def identity(pid: int) -> ProcessIdentity:
    """The identity of a process.

    Raises OSError (ProcessLookupError) if it has ended or is hidden from us.
    """
    thread_credentials = set()
    started = int(stat_fields(f"/proc/{pid}/stat")[1][19])
    for name in os.listdir(f"/proc/{pid}/task"):
        try:
            fields = status_fields(f"/proc/{pid}/task/{name}/status")
            thread_credentials.add(credentials(fields))
        except (FileNotFoundError, ProcessLookupError):
            continue
    if not thread_credentials:
        raise ProcessLookupError(pid)
    owner = os.stat(f"/proc/{pid}/stat").st_uid
    if os.geteuid() not in (0, owner):
        return ProcessIdentity(started, frozenset(thread_credentials), (0, 0), owner)
    status = os.stat(f"/proc/{pid}/exe")
    with open(f"/proc/{pid}/auxv", "rb") as raw:
        auxiliary = auxv(raw.read(1 << 16))
    program = (status.st_dev, status.st_ino)
    return ProcessIdentity(
        started, frozenset(thread_credentials), namespace(pid), owner, program, auxiliary
    )


# --- A new core file, in a directory where other users may write.

#: Maximum links in a path (path_resolution(7)).
_MAX_LINKS = 40
#: The prefix of a private directory, for a file system that has no files without a name.
_PREFIX = ".nodeready.core."
_FILE_NAME = "core"
#: Maximum names that are searched for private directories of killed runs.
_MAX_ENTRIES = 10_000
#: Errors of open(2) if the file system or the kernel has no O_TMPFILE.
_NO_TMPFILE_ERRORS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


def _is_private(status: os.stat_result) -> bool:
    """Whether only root and we can create files in this directory."""
    shared = status.st_mode & 0o002 or (status.st_mode & 0o020 and status.st_gid != 0)
    return status.st_uid in (0, os.geteuid()) and not shared


def open_directory(path: str) -> int:
    """An O_PATH descriptor of the directory of an absolute path.

    A link in the path is followed only if it and all directories above it belong to root or us,
    and no other user can write there. Raises OSError with the name of the component.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    directory, is_private, links = os.open("/", flags), True, 0
    todo, done = [part for part in reversed(path.split("/")) if part], ""
    try:
        while todo:
            name = todo.pop()
            is_private = is_private and _is_private(os.fstat(directory))
            try:
                next_directory = os.open(name, flags, dir_fd=directory)
            except OSError as problem:
                raise OSError(problem.errno, problem.strerror, f"{done}/{name}") from None
            status = os.fstat(next_directory)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                is_trusted = is_private and status.st_uid in (0, os.geteuid())
                try:
                    if not is_trusted or links > _MAX_LINKS:
                        reason = "is a link that another user may have made"
                        raise OSError(errno.ELOOP, reason, f"{done}/{name}")
                    target = os.readlink("", dir_fd=next_directory)
                finally:
                    os.close(next_directory)
                todo += [part for part in reversed(target.split("/")) if part]
                if target.startswith("/"):
                    os.close(directory)
                    directory, is_private, done = os.open("/", flags), True, ""
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
    """A file for another process, which writes it through /proc/self/fd/NUMBER.

    The file is ours, and only its descriptor leads to it: it has no name, or, if the file system
    has no such files, a name in a directory that only we can enter. Raises OSError.

    directory: descriptor of the directory in which the file gets its name
    number:    descriptor of the file
    """

    def __init__(self, directory: int) -> None:
        self._directory, self._private, self._hidden = directory, -1, ""
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            self.number = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=directory)
        except OSError as problem:
            if problem.errno not in _NO_TMPFILE_ERRORS:
                raise
            self._hidden = f"{_PREFIX}{secrets.token_hex(8)}"
            os.mkdir(self._hidden, 0o700, dir_fd=directory)
            self._private = _enter(self._hidden, directory)
            # The lock is held until we end. Then another run may remove the directory.
            fcntl.flock(self._private, fcntl.LOCK_EX | fcntl.LOCK_NB)
            flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self.number = os.open(_FILE_NAME, flags, 0o600, dir_fd=self._private)
        # The process that gets the descriptor opens the file once more through it.
        os.fchmod(self.number, 0o666)

    def publish(self, name: str, uid: int, gid: int) -> None:
        """Give the file to this user, readable for that user only, and name it.

        Raises OSError: FileExistsError if the name exists.
        """
        os.fchmod(self.number, 0o600)
        if os.geteuid() == 0:
            os.fchown(self.number, uid, gid)
        if self._private < 0:
            os.link(f"/proc/self/fd/{self.number}", name, dst_dir_fd=self._directory)
        else:
            os.link(
                _FILE_NAME, name, src_dir_fd=self._private, dst_dir_fd=self._directory,
                follow_symlinks=False,
            )  # fmt: skip

    def clean_up(self) -> None:
        """Remove the private directory. A second call is harmless."""
        if self._hidden:
            _remove(self._directory, self._hidden)


def _enter(name: str, directory: int) -> int:
    """A descriptor of a directory that is ours and private. Raises OSError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open(name, flags, dir_fd=directory)
    status = os.fstat(number)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(number)
        raise OSError(errno.EPERM, "replaced our directory", name)
    return number


def _remove(directory: int, name: str, unlocked: bool = False) -> None:
    """Remove one of our private directories.

    unlocked: only if the process that created it has ended
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as after:
        number = _enter(name, directory)
        after.callback(os.close, number)
        if unlocked:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_FILE_NAME, dir_fd=number)
        # It fails if the name is no empty directory.
        os.rmdir(name, dir_fd=directory)


def remove_leftovers(directory: int) -> None:
    """Remove the private directories of killed runs in this directory."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with contextlib.suppress(OSError), contextlib.ExitStack() as after:
        number = os.open(".", flags, dir_fd=directory)
        after.callback(os.close, number)
        with os.scandir(number) as entries:
            names = [entry.name for entry in islice(entries, _MAX_ENTRIES)]
        for name in names:
            if name.startswith(_PREFIX):
                _remove(directory, name, unlocked=True)

"""Write a file on this machine atomically, and follow only links of root and of this user.

A file that a user names is read with `only_regular` as its opener.

A path is walked from the root, one component at a time, each opened without following a link and
relative to its parent: a component that is replaced meanwhile redirects nothing. A link
is followed only where only root or this user could have made it: it and every parent directory
belong to root or to this user, and no other user can replace it. The kernel's
protected_symlinks, protected_regular and protected_fifos (proc_sys_fs(5)) need not be set.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: Descriptors that were handed to us: no path is looked up for them.
_GIVEN = re.compile(r"/dev/(stdin|stdout|stderr)|/(?:dev|proc/self)/fd/(\d+)")
_NAMED = {"stdin": 0, "stdout": 1, "stderr": 2}
#: Seconds after which a temporary file is that of a killed run: no run writes that long.
_LEFT_S = 3600
#: Maximum links in a path, as in the kernel (path_resolution(7)).
MAX_LINKS = 40
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class NotFollowed(OSError):
    """A file of another user at a path that would be written; its file name is that component."""

    def __init__(self, kind: str, status: os.stat_result, component: str) -> None:
        message = f"{kind} of {user_name(status.st_uid)}: not followed"
        super().__init__(errno.EPERM, message, component)


def user_name(uid: int) -> str:
    """The user's name, or ``uid NUMBER`` where this machine knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return f"uid {uid}"


def _is_trusted(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


@dataclass(frozen=True)
class _OpenDirectory:
    number: int  # its O_PATH descriptor, closed with the walk
    path: str  # the components up to it, for messages
    status: os.stat_result
    open: bool  # others can replace what is in it, or the directory itself: no link is followed

    def child(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"


@dataclass(frozen=True)
class _PathEnd:
    directory: _OpenDirectory
    name: str  # in the directory; "": the directory itself is what the path names
    number: int = -1  # an O_PATH descriptor of what has this name; -1: there is nothing

    @property
    def status(self) -> os.stat_result | None:
        return None if self.number < 0 else os.fstat(self.number)


def _replaceable(status: os.stat_result) -> bool:
    """Whether other users can replace root's or our link in this directory.

    In a sticky directory they cannot. For a user other than root, the user's own group may write:
    with a umask of 002 it can write to all of the user's directories.
    """
    if not _is_trusted(status):
        return True
    group = status.st_gid == os.getegid() and os.geteuid() != 0
    writable = stat.S_IWOTH | (0 if group else stat.S_IWGRP)
    return bool(status.st_mode & writable) and not status.st_mode & stat.S_ISVTX


def _components(path: str) -> list[str]:
    """The last one first."""
    return [word for word in reversed(path.split("/")) if word not in ("", ".")]


@contextlib.contextmanager
def _walk(path: Path, make: int | None = None) -> Iterator[_PathEnd]:
    """Where the path ends; missing directories are made with the mode ``make``.

    Raises NotFollowed, and OSError with the path as its file name.
    """
    with contextlib.ExitStack() as opened:

        def look(name: str, how: int, at: int | None = None) -> int:
            number = os.open(name, _LOOK | how, dir_fd=at)
            opened.callback(os.close, number)
            return number

        def enter(name: str, parent: _OpenDirectory | None) -> _OpenDirectory:
            # O_DIRECTORY mounts a directory that is mounted on demand.
            number = look(name, os.O_DIRECTORY, parent.number if parent else None)
            status = os.fstat(number)
            place = parent.child(name) if parent else "/"
            insecure = _replaceable(status) or (parent is not None and parent.open)
            return _OpenDirectory(number, place, status, insecure)

        directory = enter("/", None)
        words = _components(os.path.join(os.getcwd(), path))
        links = 0
        while words:
            name = words.pop()
            with contextlib.suppress(NotADirectoryError, FileNotFoundError):
                directory = enter(name, directory)
                continue
            try:
                number = look(name, 0, directory.number)
            except FileNotFoundError:
                if make is None and words:
                    raise
                if make is None:
                    yield _PathEnd(directory, name)
                    return
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, make, dir_fd=directory.number)
                directory = enter(name, directory)
                continue
            status = os.fstat(number)
            if stat.S_ISDIR(status.st_mode):
                # Another process has made it meanwhile.
                words.append(name)
                continue
            if not stat.S_ISLNK(status.st_mode):
                if words or make is not None:
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
                yield _PathEnd(directory, name, number)
                return
            # In a sticky directory, any user can make a hard link to a symbolic link of root's.
            doubled = directory.status.st_mode & stat.S_ISVTX and status.st_nlink > 1
            if directory.open or doubled or not _is_trusted(status):
                raise NotFollowed("a link", status, directory.child(name))
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = os.readlink("", dir_fd=number)
            if target.startswith("/"):
                directory = enter("/", None)
            words += _components(target)
        yield _PathEnd(directory, "", directory.number)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors have the path as their file name, and NotFollowed its component."""
    try:
        yield
    except NotFollowed:
        raise
    except OSError as problem:
        problem.filename, problem.filename2 = str(path), None
        raise


def state_directory() -> Path:
    """Where commands keep what they need later, of this user."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "nodeready"


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make this directory and its missing parents; an existing one keeps its mode.

    Raises NotFollowed, and OSError with the path as its file name.
    """
    with _named(path), _walk(path, mode):
        pass


def _require_directory(end: _PathEnd) -> None:
    """Raises OSError if the path ends at a file, or at a name that is missing."""
    if end.name:
        code = errno.ENOENT if end.number < 0 else errno.ENOTDIR
        raise OSError(code, os.strerror(code))


def open_directory(path: Path) -> int:
    """An O_PATH descriptor of a directory, which the caller closes.

    Raises NotFollowed, and OSError with the path as its file name.
    """
    with _named(path), _walk(path) as end:
        _require_directory(end)
        return os.dup(end.number)


def own_directory(path: Path, name: str) -> None:
    """Make this directory, private to us, in an existing one; check that it can take this file.

    Raises NotFollowed, and OSError with the path as its file name, also where no file can be.
    """
    if not os.path.lexists(path):
        with _named(path), _walk(path.parent) as end:
            _require_directory(end)
            os.mkdir(path.name, 0o700, dir_fd=end.number)
    check(path / name)


def private_file(path: Path, *, make: bool) -> Path:
    """The path, without links, of the user's file in a directory that no other user can change.

    A program that opens the path, and files beside it, then opens nothing of another user.

    make: make the missing directories (0700) and the missing file (0600)
    Raises NotFollowed, IsADirectoryError, FileNotFoundError without ``make``, and further OSError
    with the path as its file name.
    """
    if make:
        make_directory(path.parent, 0o700)
    with _named(path), _walk(path) as end:
        directory, status = end.directory, end.status
        if not end.name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # A sticky directory takes the files of other users.
        if directory.open or directory.status.st_mode & stat.S_ISVTX:
            raise OSError(errno.EPERM, f"other users can change {directory.path}")
        if status is None:
            if not make:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(end.name, flags, 0o600, dir_fd=directory.number))
        elif not stat.S_ISREG(status.st_mode) or not _is_trusted(status):
            raise OSError(errno.EPERM, f"is no file of {user_name(os.geteuid())}")
        return Path(directory.child(end.name))


def remove(path: Path) -> None:
    """Remove a file that may be there. Raises NotFollowed, and OSError."""
    with _named(path), _walk(path.parent) as end, contextlib.suppress(FileNotFoundError):
        os.unlink(path.name, dir_fd=end.directory.number)


def only_regular(path: str, flags: int) -> int:
    """Open a regular file, or a descriptor that was handed to us; the opener of `open`.

    Raises IsADirectoryError for a directory, and OSError for a file of another kind: a pipe
    blocks, and a device acts when it is opened.
    """
    if _GIVEN.fullmatch(os.fspath(path)):
        return os.open(path, flags)
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is no regular file", path)
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    finally:
        os.close(descriptor)


def read_regular(path: str | Path) -> bytes:
    """The content of a file, opened by `only_regular`. Raises OSError."""
    with open(path, "rb", opener=only_regular) as file:
        return file.read()


def check(path: Path) -> None:
    """Raises what `write_atomically` would raise before it writes; writes nothing."""
    if not _GIVEN.fullmatch(str(path)):
        with _named(path), _written(path):
            pass


def write_atomically(
    path: Path, parts: Iterable[str | bytes], mode: int = 0o644, *, keep_mode: bool = True
) -> None:
    """Make ``path`` hold these pieces: a reader sees the old file or the new one, never a part.

    A link of root's or ours stays and its target is replaced; another user's link is refused. An
    existing file of root's or ours keeps its mode; a new one has ``mode`` less the umask. A device
    or a pipe (``/dev/stdout``) is written to directly, when it is root's, ours, or a descriptor
    that was handed to us.

    keep_mode: False: the file gets ``mode``, regardless of its old mode and the umask
    Raises NotFollowed, and OSError with the path as its file name; the old file is intact then.
    """
    descriptor = _GIVEN.fullmatch(str(path))
    with _named(path):
        if descriptor is not None:
            _pour(os.dup(_NAMED[descriptor[1]] if descriptor[1] else int(descriptor[2])), parts)
            return
        with _written(path) as (end, status):
            if status is None or stat.S_ISREG(status.st_mode):
                if status and keep_mode and _is_trusted(status) and status.st_nlink == 1:
                    mode = status.st_mode & 0o777
                elif keep_mode:
                    # The umask can only be read by setting it (umask(2)).
                    umask = os.umask(0o077)
                    os.umask(umask)
                    mode &= ~umask
                _replace(end, parts, mode)
            else:
                # The opened pipe or device, even if its name was given to another file.
                flags = os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC
                _pour(os.open(f"/proc/self/fd/{end.number}", flags), parts)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[tuple[_PathEnd, os.stat_result | None]]:
    """The place to write, and the status of an existing file."""
    with _walk(path) as end:
        status = end.status
        if not end.name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if status is not None:
            _refuse_planted(end, status)
        yield end, status


def _refuse_planted(end: _PathEnd, status: os.stat_result) -> None:
    """Raises NotFollowed for a file that another user may have planted to receive the text."""
    directory = end.directory
    if _is_trusted(status):
        return
    if not stat.S_ISREG(status.st_mode):
        kind = "a pipe" if stat.S_ISFIFO(status.st_mode) else "a device or socket"
        raise NotFollowed(kind, status, directory.child(end.name))
    shared = directory.status.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
    if shared and status.st_uid != directory.status.st_uid:
        raise NotFollowed("a file", status, directory.child(end.name))


def _pour(number: int, parts: Iterable[str | bytes]) -> None:
    with open(number, "wb") as out:
        out.writelines(map(_bytes, parts))


def _remove_leftovers(at: int, start: str) -> None:
    """Remove temporary files that a killed run left beside the file."""
    with contextlib.suppress(OSError):
        number = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
        try:
            names = os.listdir(number)
        finally:
            os.close(number)
        for name in names:
            if name.startswith(start) and re.fullmatch("[0-9a-f]{8}", name[len(start) :]):
                leftover = os.stat(name, dir_fd=at, follow_symlinks=False)
                if leftover.st_uid == os.geteuid() and time.time() - leftover.st_mtime > _LEFT_S:
                    os.unlink(name, dir_fd=at)


def _replace(end: _PathEnd, parts: Iterable[str | bytes], mode: int) -> None:
    """Write a new file, without a name where the file system allows it, then rename it."""
    at = end.directory.number
    start = f".{end.name[:200]}."
    passing = f"{start}{os.urandom(4).hex()}"
    _remove_leftovers(at, start)
    named = False
    try:
        try:
            number = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=at)
        except OSError:
            # A file system without O_TMPFILE (open(2)), or one that takes no files at all.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            number = os.open(passing, flags, 0o600, dir_fd=at)
            named = True
        with open(number, "wb") as out:
            out.writelines(map(_bytes, parts))
            out.flush()
            os.fchmod(number, mode)
            os.fsync(number)
            if not named:
                os.link(f"/proc/self/fd/{number}", passing, dst_dir_fd=at, follow_symlinks=True)
                named = True
            os.rename(passing, end.name, src_dir_fd=at, dst_dir_fd=at)
            named = False
    finally:
        if named:
            with contextlib.suppress(OSError):
                os.unlink(passing, dir_fd=at)


def _bytes(part: str | bytes) -> bytes:
    return part if isinstance(part, bytes) else part.encode("utf-8", "backslashreplace")

"""A file that has no name until it is whole, in a directory where everybody may write."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat

#: Links on the way to a directory (path_resolution(7)).
_LINKS = 40
#: Where the file system has no files without a name: the private directory's own name begins so.
_PREFIX = ".nodeready.core."
_INSIDE = "core"
#: Names among which directories are looked for that a killed run left.
_ENTRIES = 10_000
#: What open(2) says where there is no O_TMPFILE: the file system, and an old kernel.
_UNNAMED_MISSING = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


def _ours_alone(known: os.stat_result) -> bool:
    """Whether nobody but root and we can have made what is in this directory."""
    shared = known.st_mode & 0o002 or (known.st_mode & 0o020 and known.st_gid != 0)
    return known.st_uid in (0, os.geteuid()) and not shared


def open_directory(path: str) -> int:
    """An O_PATH descriptor of the directory of an absolute path.

    A link on the way is followed only where it and all directories above it are root's or ours,
    and nobody else can write there. Raises OSError with the name of the component.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    here, alone, links = os.open("/", flags), True, 0
    todo, done = [part for part in reversed(path.split("/")) if part], ""
    try:
        while todo:
            name = todo.pop()
            alone = alone and _ours_alone(os.fstat(here))
            try:
                found = os.open(name, flags, dir_fd=here)
            except OSError as problem:
                raise OSError(problem.errno, problem.strerror, f"{done}/{name}") from None
            known = os.fstat(found)
            if stat.S_ISLNK(known.st_mode):
                with contextlib.ExitStack() as after:
                    after.callback(os.close, found)
                    links += 1
                    if not alone or known.st_uid not in (0, os.geteuid()) or links > _LINKS:
                        why = "is a link that another user may have made"
                        raise OSError(errno.ELOOP, why, f"{done}/{name}")
                    target = os.readlink("", dir_fd=found)
                todo += [part for part in reversed(target.split("/")) if part]
                if target.startswith("/"):
                    os.close(here)
                    here, alone, done = os.open("/", flags), True, ""
                continue
            os.close(here)
            here, done = found, f"{done}/{name}"
            if not stat.S_ISDIR(known.st_mode):
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), done)
    except BaseException:
        os.close(here)
        raise
    return here


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
    known = os.fstat(number)
    if known.st_uid != os.geteuid() or known.st_mode & 0o077:
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

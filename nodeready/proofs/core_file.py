"""The core file of our canary: told from all others, measured, removed."""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from dataclasses import dataclass

# The kernel writes the program headers and, right after them, the command line of what crashed.
_HEAD_BYTES = 65536


@dataclass(frozen=True)
class Found:
    """A core file.

    whole_bytes: the size that its headers give; None: it has no headers
    """

    path: str
    device: int
    inode: int
    size_bytes: int
    whole_bytes: int | None


@dataclass(frozen=True)
class Mark:
    """What tells our canary's core.

    word: stands on the canary's command line, which a core begins with, and nowhere else
    uid:  whose it must be
    since: seconds since the epoch; it cannot be older
    """

    word: str
    uid: int
    since: float


def look(path: str, mark: Mark, *, named: bool) -> Found | None:
    """The file at ``path``, when it is our canary's core; None for every other.

    named: its name has the canary's number, so that it is ours even when it was cut off before
    the command line. A link is never followed.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        seen = os.fstat(number)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != mark.uid or seen.st_nlink != 1:
            return None
        head = os.read(number, _HEAD_BYTES)
    except OSError:
        return None
    finally:
        os.close(number)
    # Its times are the file server's: a little off.
    ours = mark.word.encode() in head or (named and seen.st_mtime >= mark.since - 2)
    if not ours:
        return None
    return Found(path, seen.st_dev, seen.st_ino, seen.st_size, whole_bytes(head))


def whole_bytes(head: bytes) -> int | None:
    """The size of the core that begins with ``head``: where its last segment ends (elf(5)).

    None for what is no ELF file, or has not even its program headers.
    """
    layouts = {b"\x01": ("I", 0x1C, 0x2A, "IIII", 4), b"\x02": ("Q", 0x20, 0x36, "QQQQ", 8)}
    if head[:4] != b"\x7fELF" or head[4:5] not in layouts:
        return None
    word, at_table, at_size, fields, at_offset = layouts[head[4:5]]
    order = ">" if head[5:6] == b"\x02" else "<"
    try:
        (table,) = struct.unpack_from(order + word, head, at_table)
        size, count = struct.unpack_from(order + "HH", head, at_size)
        ends = [0]
        for number in range(count):
            # offset, virtual address, physical address, size in the file
            values = struct.unpack_from(order + fields, head, table + number * size + at_offset)
            ends.append(values[0] + values[-1])
    except struct.error:
        return None
    return max(ends)


def remove(found: Found) -> str:
    """Remove exactly this file; returns why it cannot be removed, or ""."""
    parent, name = os.path.split(found.path)
    try:
        directory = os.open(parent or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as problem:
        return problem.strerror or str(problem)
    try:
        now = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if (now.st_dev, now.st_ino) == (found.device, found.inode):
            os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    except OSError as problem:
        return problem.strerror or str(problem)
    finally:
        with contextlib.suppress(OSError):
            os.close(directory)
    return ""

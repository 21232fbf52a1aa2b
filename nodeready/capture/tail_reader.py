"""The reading of files whose paths match, in a fork that may hang at each of its questions.

It tells ``at`` before it asks a file system anything, ``search`` before it searches, and what it
has found; ``done`` at the end. Whoever listens knows by that where it came no further.
"""

from __future__ import annotations

import os
import re
import stat
import time
from dataclasses import asdict

from nodeready.capture import last_lines, mounts
from nodeready.capture.aside import Tell
from nodeready.capture.paths import MAX_NAMES, Found, TooManyError, Walk, absolute
from nodeready.capture.tail_seen import MAX_BYTES, Config, File, Unread

#: Bytes at the end of a file that are tried first.
_FIRST_BYTES = 16 * 1024
_PACKED = (".gz", ".xz", ".bz2", ".zst", ".lz4", ".zip")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class _DeadError(OSError):
    pass


class Reader:
    """One fork's work.

    dead:     devices of the mounts that are not asked
    left_out: paths that are not read
    """

    def __init__(self, config: Config, tell: Tell, dead: set[str], left_out: set[str]) -> None:
        self.config, self.tell, self.dead, self.left_out = config, tell, dead, left_out
        self.mounts = mounts.here()
        self.like = re.compile(config.grep) if config.grep else None
        self.device = ""

    def touch(self, real: str) -> None:
        """Tell where the next question goes. Raises OSError when nobody answers there."""
        mount = self.mounts.of(real)
        if mount.device in self.dead:
            raise _DeadError(0, f"the mount {mount} does not answer")
        if mount.device != self.device:
            self.device = mount.device
            mounts.name_after(mount.device)
        self.tell({"at": mount.device})

    def trouble(self, shown: str, error: OSError) -> None:
        why = error.strerror or str(error)
        self.unread(shown, why if isinstance(error, _DeadError) else why.lower(), fault=True)

    def unread(self, shown: str, why: str, *, fault: bool) -> None:
        self.tell({"unread": asdict(Unread(shown, why, fault))})

    def blocked(self, real: str) -> bool:
        return self.mounts.of(real).kind in mounts.KERNELS

    def work(self) -> None:
        """Expand the pattern, and read the files that were written last."""
        walk = Walk(self.touch, self.blocked, self.trouble)
        pattern = absolute(self.config.pattern)
        found: dict[str, tuple[float, Found]] = {}
        older = 0
        try:
            for one in walk.expand(pattern):
                mtime = self.suits(one, deep=pattern.endswith("**"))
                # Once, though a link such as `latest` leads there too.
                if mtime is not None and one.real not in found:
                    found[one.real] = (mtime, one)
                    older += not self.new(mtime)
        except TooManyError:
            self.tell({"error": f"more than {MAX_NAMES:,} names: only some were looked at"})
        new = [(mtime, one) for mtime, one in found.values() if self.new(mtime)]
        new.sort(key=lambda item: (-item[0], item[1].shown))
        chosen = [one for _, one in new[: self.config.max_files]]
        left_out = len(new) - len(chosen)
        self.tell({"left_out": left_out, "older": older, "chosen": [one.shown for one in chosen]})
        for one in chosen:
            if one.shown not in self.left_out:
                self.read(one)
        self.tell({"done": True})

    def new(self, mtime: float) -> bool:
        config = self.config
        return mtime >= config.since_s and not 0 < config.newer_s < time.time() - mtime

    def suits(self, one: Found, *, deep: bool) -> float | None:
        """When it was written, if it is a regular file; else it is told of."""
        try:
            self.touch(one.real)
            known = os.lstat(one.real)
        except OSError as error:
            self.trouble(one.shown, error)
            return None
        if stat.S_ISREG(known.st_mode):
            if not one.real.endswith(_PACKED):
                return known.st_mtime
            self.unread(one.shown, "is compressed", fault=False)
        elif not (deep and stat.S_ISDIR(known.st_mode)):
            kind = _KINDS.get(stat.S_IFMT(known.st_mode), "no regular file")
            self.unread(one.shown, f"is {kind}", fault=False)
        return None

    def read(self, one: Found) -> None:
        try:
            self.touch(one.real)
            # Whatever has come into its place meanwhile: no waiting, no terminal, no other file.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(one.real, flags)
            try:
                known = os.fstat(handle)
                if not stat.S_ISREG(known.st_mode):
                    self.unread(one.shown, "is no regular file any more", fault=False)
                    return
                rows = self.rows(handle, known.st_size)
            finally:
                os.close(handle)
        except OSError as error:
            self.trouble(one.shown, error)
            return
        if rows is None:
            self.unread(one.shown, "is no text", fault=False)
            return
        if self.like:
            self.tell({"search": one.shown})
        lines, matches = last_lines.last(rows, self.config.lines, self.like)
        age = time.time() - known.st_mtime
        file = File(one.shown, known.st_size, known.st_mtime, age, lines, matches)
        self.tell({"file": asdict(file)})

    def rows(self, handle: int, size: int) -> list[bytes] | None:
        """All that is needed of its lines."""
        rows: list[bytes] | None = []
        for most in (MAX_BYTES,) if self.like else (_FIRST_BYTES, MAX_BYTES):
            start = max(0, size - most)
            rows = last_lines.rows(os.pread(handle, min(most, size), start), whole=start == 0)
            if rows is None or start == 0 or len(rows) > self.config.lines:
                break
        return rows

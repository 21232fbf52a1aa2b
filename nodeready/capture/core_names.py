"""Where core files lie, and what their names tell: kernel.core_pattern, read backwards."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nodeready.proofs import core_pattern

#: systemd-coredump(8): core.COMM.UID.BOOT.PID.MICROSECONDS, compressed or not.
STORE = "/var/lib/systemd/coredump"
#: As a pattern; %E stands for the boot's id.
STORE_PATTERN = f"{STORE}/core.%e.%u.%E.%p.%t"
#: Entries of one directory that are looked at.
ENTRIES = 100_000
#: Directories that one pattern may lead to.
_DIRECTORIES = 1000
_COMPRESSED = re.compile(r"\.(?:zst|lz4|xz)\Z")
_MARK = re.compile("\x01(.)")
# The values of these have no slash: the kernel makes "!" of it.
_NUMBERS = frozenset("cCdFgiIpPstu")


@dataclass(frozen=True)
class Name:
    """A file whose name a pattern gives.

    values: letter of the specifier -> what stands for it, the first where there are several
    """

    path: str
    values: dict[str, str]
    compressed: str = ""


@dataclass(frozen=True)
class Place:
    """One pattern as a place to look in.

    pattern: as the kernel has it
    uses_pid: kernel.core_uses_pid
    """

    pattern: str
    uses_pid: bool = False

    def _parts(self) -> list[str]:
        letters = {letter: f"\x01{letter}" for letter in core_pattern.SPECIFIERS}
        return core_pattern.expand(self.pattern, letters, uses_pid=self.uses_pid).split("/")

    @property
    def handler(self) -> str:
        """The program, or socket, that gets the cores; "": they are files."""
        return core_pattern.program(self.pattern)

    @property
    def shown(self) -> str:
        """For people: ``*`` for what is unknown."""
        return core_pattern.shown(core_pattern.expand(self.pattern, {}, uses_pid=self.uses_pid))

    @property
    def directory(self) -> str:
        """Where all of its files lie; "": the pattern names no such directory."""
        parts = self._parts()[:-1]
        fixed = self.pattern.startswith("/") and not any("\x01" in part for part in parts)
        return ("/".join(parts) or "/") if fixed else ""

    def find(self) -> Iterator[Name]:
        """The files that are there, in no order. Raises OSError when there is no such directory.

        Only the directories that the pattern names are listed. Where a value is part of the name
        of a directory, anybody may have made one: no link is followed there.
        """
        first, *parts = self._parts()
        if first or not parts:
            return
        found = [("/", dict[str, str]())]
        for part in parts[:-1]:
            found = list(self._enter(found, part))[:_DIRECTORIES]
        matches = _regex(parts[-1])
        for directory, values in found:
            for name in _entries(directory):
                suffix = _COMPRESSED.search(name)
                stem = name[: suffix.start()] if suffix else name
                match = matches.fullmatch(stem) or (None if suffix else matches.fullmatch(name))
                if match:
                    yield Name(
                        os.path.join(directory, name),
                        {**match.groupdict(), **values},
                        suffix[0] if suffix else "",
                    )

    def _enter(
        self, found: list[tuple[str, dict[str, str]]], part: str
    ) -> Iterator[tuple[str, dict[str, str]]]:
        for directory, values in found:
            if "\x01" not in part:
                yield os.path.join(directory, part), values
                continue
            for name in _entries(directory):
                path = os.path.join(directory, name)
                match = _regex(part).fullmatch(name)
                if match and os.path.isdir(path) and not os.path.islink(path):
                    yield path, {**match.groupdict(), **values}


def _entries(directory: str) -> Iterator[str]:
    with os.scandir(directory) as entries:
        for _, entry in zip(range(ENTRIES), entries):
            yield entry.name


def _regex(part: str) -> re.Pattern[str]:
    """What one component of a marked path can be."""
    text, at, seen = "", 0, set[str]()
    for mark in _MARK.finditer(part):
        letter = mark[1]
        kind = "[0-9]+" if letter in _NUMBERS else ".*"
        group = f"(?:{kind})" if letter in seen else f"(?P<{letter}>{kind})"
        text += re.escape(part[at : mark.start()]) + group
        seen.add(letter)
        at = mark.end()
    return re.compile(text + re.escape(part[at:]), re.S)


def live() -> Place:
    """The pattern in force; "" where it cannot be read."""
    try:
        with open(
            "/proc/sys/kernel/core_pattern", encoding="utf-8", errors="surrogateescape"
        ) as f:
            pattern = f.read().rstrip("\n")
        with open("/proc/sys/kernel/core_uses_pid", encoding="ascii", errors="replace") as f:
            return Place(pattern, f.read().strip() not in ("", "0"))
    except OSError:
        return Place("")

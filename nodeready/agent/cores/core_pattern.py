"""kernel.core_pattern: a pattern gives the path of a core, and a core's name gives its values.

The rules are those of core(5), "Naming of core dump files".
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nodeready.agent import users_file
from nodeready.agent.users_file import ROOT, Resolved

# --- A pattern expanded: the path of a core.

UNKNOWN = "\0"  # replaces a value that only the kernel knows: a pid in an outer namespace, the CPU
SPECIFIERS = frozenset("cCdeEFghiIpPstu")  # of Linux 6.16; the kernel drops all others
# The kernel removes slashes and dots from these values, so they lead into no other directory.
_NAMES = frozenset("eEh")


def handler_of(pattern: str) -> str:
    """The program or socket (``@``) that gets the cores of a pattern; "": cores are files."""
    if pattern.startswith("@"):
        return pattern.split(maxsplit=1)[0]
    if not pattern.startswith("|"):
        return ""
    words = pattern[1:].split()
    # The kernel starts a relative program from /.
    return f"/{words[0].lstrip('/')}" if words else "|"


def expand(pattern: str, values: Mapping[str, str], *, uses_pid: bool = False) -> str:
    """The path of a core, with UNKNOWN for each specifier that has no value.
    uses_pid: kernel.core_uses_pid, which matters for a pattern without %p
    """

    def value_of(match: re.Match[str]) -> str:
        letter = match[1]
        if letter == "%":
            return "%"
        value = values.get(letter, UNKNOWN if letter in SPECIFIERS else "")
        if letter in _NAMES:
            value = value.replace("/", "!")
            value = f"!{value[1:]}" if value in ("", ".", "..") else value
        return value

    path = re.sub(r"%(.?)", value_of, pattern, flags=re.S)
    # "%%p" is no %p.
    if uses_pid and "p" not in re.findall(r"%(.)", pattern, re.S):
        path += f".{values.get('p', UNKNOWN)}"
    return path


def printable(path: str) -> str:
    """An expanded path for people: ``*`` for unknown values, a mark for bytes that are no text."""
    text = path.replace(UNKNOWN, "*")
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def names_process(pattern: str, values: Mapping[str, str], *, uses_pid: bool = False) -> bool:
    """Whether the path contains the process's pid, and the pid is known here."""
    letters = {*re.findall(r"%(.)", pattern, re.S), *("p" if uses_pid else "")}
    return bool(letters & {"p", "P", "i", "I"} & set(values))


def existing_files(path: str) -> Iterator[str]:
    """The existing files that match an expanded path."""
    if UNKNOWN not in path:
        # The directory is not listed: users may be allowed to write there but not to read.
        if os.path.lexists(path):
            yield path
        return
    parts = path.split(UNKNOWN)
    exact = re.compile(r"[0-9]*".join(map(re.escape, parts)), re.S)
    for match in glob.iglob("*".join(map(glob.escape, parts))):
        if exact.fullmatch(match):
            yield match


# --- A pattern read backwards: the existing core files, and the values in their names.

#: systemd-coredump(8): core.COMM.UID.BOOT.PID.MICROSECONDS, compressed or not.
STORE = "/var/lib/systemd/coredump"
STORE_PATTERN = f"{STORE}/core.%e.%u.%E.%p.%t"  # as a pattern; %E stands for the boot's id
#: Maximum directories of one pattern.
_MAX_DIRECTORIES = 1000
_COMPRESSED = re.compile(r"\.(?:zst|lz4|xz)\Z")
# A specifier in a marked path (`CorePlace._parts`): \x01 and its letter.
_MARK = re.compile("\x01(.)")
_NUMBERS = frozenset("cCdFgiIpPstu")  # specifiers whose values are numbers
_MAX_LENGTHS = {"e": 64, "h": 64}  # maximum characters of a thread's name and of a host's name


@dataclass(frozen=True)
class CoreName:
    """A file whose name matches a pattern."""

    path: str
    # letter of the specifier -> its value, the first if it occurs more than once
    values: dict[str, str]
    compressed: str = ""


@dataclass(frozen=True)
class PatternDirectory:
    """A directory to which a pattern leads."""

    shown: str  # its path as the pattern spells it
    real: Resolved  # its path without links
    values: dict[str, str]  # of the specifiers in its path
    owner: int = 0  # of the deepest directory with a value in its name
    modified_ns: int = 0  # likewise


@dataclass(frozen=True)
class CorePlace:
    """The directories and files of one pattern."""

    pattern: str  # as in kernel.core_pattern
    uses_pid: bool = False  # kernel.core_uses_pid

    def _parts(self) -> list[str]:
        letters = {letter: f"\x01{letter}" for letter in SPECIFIERS}
        return expand(self.pattern, letters, uses_pid=self.uses_pid).split("/")

    @property
    def handler(self) -> str:
        """The program or socket that gets the cores; "": cores are files."""
        return handler_of(self.pattern)

    @property
    def shown(self) -> str:
        """The pattern for people: ``*`` for unknown values."""
        return printable(expand(self.pattern, {}, uses_pid=self.uses_pid))

    @property
    def directory(self) -> str:
        """The directory of all its files; "": the files are in more than one directory."""
        parts = self._parts()[:-1]
        is_fixed = self.pattern.startswith("/") and not any("\x01" in part for part in parts)
        return ("/".join(parts) or "/") if is_fixed else ""

    def directories(self) -> list[PatternDirectory]:
        """The existing directories of the pattern. Raises OSError if none exists.

        Only directories of the pattern are listed. Any user may have created a directory with a
        value in its name: such a link is not followed; of too many, each user's newest are taken.
        """
        first, *parts = self._parts()
        if first or not parts:
            return []
        directories = [PatternDirectory("/", ROOT, {})]
        for part in parts[:-1]:
            problems: list[OSError] = []
            entered = [d for parent in directories for d in self._enter(parent, part, problems)]
            if problems and not entered:
                raise problems[0]
            is_too_many = len(entered) > _MAX_DIRECTORIES
            directories = (
                users_file.by_turns(entered)[:_MAX_DIRECTORIES] if is_too_many else entered
            )
        return directories

    @property
    def prefix(self) -> str:
        """The beginning of the names of all its files."""
        return self._parts()[-1].partition("\x01")[0]

    def names(self, directory: PatternDirectory, names: Iterable[str]) -> Iterator[CoreName]:
        """The names in a directory that match the pattern."""
        expression = _regex(self._parts()[-1])
        for name in names:
            suffix = _COMPRESSED.search(name)
            stem = name[: suffix.start()] if suffix else name
            match = expression.fullmatch(stem) or (None if suffix else expression.fullmatch(name))
            if match:
                values = {**match.groupdict(), **directory.values}
                path = os.path.join(directory.shown, name)
                yield CoreName(path, values, suffix[0] if suffix else "")

    def find(self) -> Iterator[CoreName]:
        """The existing files, in no order. Raises OSError if there is no such directory."""
        for directory in self.directories():
            with users_file.scan(directory.real) as entries:
                yield from self.names(directory, (entry.name for entry in entries))

    def _enter(
        self, directory: PatternDirectory, part: str, problems: list[OSError]
    ) -> list[PatternDirectory]:
        """The subdirectories that match this part of the pattern; errors are added to problems."""
        directories: list[PatternDirectory] = []
        try:
            if "\x01" not in part:
                real = users_file.follow(directory.real, part)
                return [replace(directory, shown=os.path.join(directory.shown, part), real=real)]
            expression = _regex(part)
            with users_file.scan(directory.real) as entries:
                for entry in entries:
                    match = expression.fullmatch(entry.name)
                    if match and entry.is_dir(follow_symlinks=False):
                        directories.append(_subdirectory(directory, entry, match.groupdict()))
        except OSError as problem:
            problems.append(problem)
        return directories


def _subdirectory(
    directory: PatternDirectory, entry: os.DirEntry[str], values: dict[str, str]
) -> PatternDirectory:
    """A subdirectory, with the values in its name."""
    status = entry.stat(follow_symlinks=False)
    shown = os.path.join(directory.shown, entry.name)
    path = os.path.join(directory.real.path, entry.name)
    owner, modified_ns = users_file.main_uid(status.st_uid), users_file.modified_ns(status)
    real, values = Resolved(path, directory.real.owner), {**values, **directory.values}
    return PatternDirectory(shown, real, values, owner, modified_ns)


def _regex(part: str) -> re.Pattern[str]:
    """The expression for one component of a marked path."""
    text, position, keywords = "", 0, set[str]()
    for mark in _MARK.finditer(part):
        letter = mark[1]
        # The kernel's or systemd's maximum (\\x20 for a byte): no name takes long to match.
        kind = "[0-9]{1,20}" if letter in _NUMBERS else f".{{0,{_MAX_LENGTHS.get(letter, 255)}}}"
        group = f"(?:{kind})" if letter in keywords else f"(?P<{letter}>{kind})"
        text += re.escape(part[position : mark.start()]) + group
        keywords.add(letter)
        position = mark.end()
    return re.compile(text + re.escape(part[position:]), re.S)


def live_place() -> CorePlace:
    """The place of the pattern in force; its pattern is "" if that cannot be read."""
    try:
        pattern, uses_pid = (
            Path(f"/proc/sys/kernel/{name}").read_text("utf-8", "surrogateescape")
            for name in ("core_pattern", "core_uses_pid")
        )
    except OSError:
        return CorePlace("")
    return CorePlace(pattern.rstrip("\n"), uses_pid.strip() not in ("", "0"))

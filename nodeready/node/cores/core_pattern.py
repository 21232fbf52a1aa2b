"""kernel.core_pattern: the path of a core, and backwards, what the name of a core file tells.

The rules are those of core(5), "Naming of core dump files".
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from nodeready.node.users_file import ROOT, Resolved, by_turns, follow, modified_ns, person, scan

# --- A pattern expanded: the path of a core.

#: Stands for a value that only the kernel knows: a number in an outer namespace, the CPU.
UNKNOWN = "\0"
#: All specifiers of Linux 6.16; the kernel drops any other one.
SPECIFIERS = frozenset("cCdeEFghiIpPstu")
# The kernel keeps a value of these from leading into another directory.
_NAMES = frozenset("eEh")


def handler_of(pattern: str) -> str:
    """The program that a pattern pipes to, or the socket (``@``); "": it names a file."""
    if pattern.startswith("@"):
        return pattern.split(maxsplit=1)[0]
    words = pattern[1:].split() if pattern.startswith("|") else []
    # A relative program is looked up from /, where the kernel starts it.
    return f"/{words[0].lstrip('/')}" if words else "|" if pattern.startswith("|") else ""


def expand(pattern: str, values: Mapping[str, str], *, uses_pid: bool = False) -> str:
    """The path of a core, with UNKNOWN for each specifier that has no value.

    uses_pid: kernel.core_uses_pid, which counts when there is no %p
    """

    def one(match: re.Match[str]) -> str:
        letter = match[1]
        if letter == "%":
            return "%"
        value = values.get(letter, UNKNOWN if letter in SPECIFIERS else "")
        return _harmless(value) if letter in _NAMES else value

    path = re.sub(r"%(.?)", one, pattern, flags=re.S)
    # "%%p" is no %p.
    if uses_pid and "p" not in re.findall(r"%(.)", pattern, re.S):
        path += f".{values.get('p', UNKNOWN)}"
    return path


def _harmless(value: str) -> str:
    value = value.replace("/", "!")
    return "!" if value == "" else f"!{value[1:]}" if value in (".", "..") else value


def printable(path: str) -> str:
    """An expanded path for people: ``*`` for what is unknown, bytes that are no text replaced."""
    text = path.replace(UNKNOWN, "*")
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def names_process(pattern: str, values: Mapping[str, str], *, uses_pid: bool = False) -> bool:
    """Whether the path contains the process's number, and that number is known here."""
    letters = {*re.findall(r"%(.)", pattern, re.S), *("p" if uses_pid else "")}
    return bool(letters & {"p", "P", "i", "I"} & set(values))


def existing(path: str) -> Iterator[str]:
    """The files whose paths an expanded path can stand for."""
    if UNKNOWN not in path:
        # No listing: a core directory may let users write and not read.
        if os.path.lexists(path):
            yield path
        return
    parts = path.split(UNKNOWN)
    exact = re.compile(r"[0-9]*".join(map(re.escape, parts)), re.S)
    for match in glob.iglob("*".join(map(glob.escape, parts))):
        if exact.fullmatch(match):
            yield match


# --- A pattern read backwards: the core files that are there, and what their names tell.

#: systemd-coredump(8): core.COMM.UID.BOOT.PID.MICROSECONDS, compressed or not.
STORE = "/var/lib/systemd/coredump"
#: As a pattern; %E stands for the boot's id.
STORE_PATTERN = f"{STORE}/core.%e.%u.%E.%p.%t"
#: Directories that one pattern may lead to.
_DIRECTORIES = 1000
_COMPRESSED = re.compile(r"\.(?:zst|lz4|xz)\Z")
_MARK = re.compile("\x01(.)")
# The values of these have no slash: the kernel makes "!" of it.
_NUMBERS = frozenset("cCdFgiIpPstu")
#: Characters of the other values: a thread's name, a host's.
_LONGEST = {"e": 64, "h": 64}


@dataclass(frozen=True)
class Name:
    """A file whose name a pattern gives.

    values: letter of the specifier -> what stands for it, the first where there are several
    """

    path: str
    values: dict[str, str]
    compressed: str = ""


@dataclass(frozen=True)
class PatternDirectory:
    """A directory to which a pattern leads.

    shown:  its path as the pattern spells it
    real:   without links
    values: of the specifiers in its path
    owner, modified_ns: of the one in whose name a value stands, the last of several
    """

    shown: str
    real: Resolved
    values: dict[str, str]
    owner: int = 0
    modified_ns: int = 0


@dataclass(frozen=True)
class CorePlace:
    """One pattern as a place to look in.

    pattern: as the kernel has it
    uses_pid: kernel.core_uses_pid
    """

    pattern: str
    uses_pid: bool = False

    def _parts(self) -> list[str]:
        letters = {letter: f"\x01{letter}" for letter in SPECIFIERS}
        return expand(self.pattern, letters, uses_pid=self.uses_pid).split("/")

    @property
    def handler(self) -> str:
        """The program or socket that gets the cores; "": cores are files."""
        return handler_of(self.pattern)

    @property
    def shown(self) -> str:
        """For people: ``*`` for what is unknown."""
        return printable(expand(self.pattern, {}, uses_pid=self.uses_pid))

    @property
    def directory(self) -> str:
        """Where all of its files lie; "": the pattern names no such directory."""
        parts = self._parts()[:-1]
        fixed = self.pattern.startswith("/") and not any("\x01" in part for part in parts)
        return ("/".join(parts) or "/") if fixed else ""

    def directories(self) -> list[PatternDirectory]:
        """Where such files may lie. Raises OSError when there is no such directory.

        Only the directories that the pattern names are listed. Where a value is part of the name
        of a directory, anybody may have made one: no link is followed there, and of too many each
        user's newest are taken by turns.
        """
        first, *parts = self._parts()
        if first or not parts:
            return []
        directories = [PatternDirectory("/", ROOT, {})]
        for part in parts[:-1]:
            problems: list[OSError] = []
            entered = [
                directory
                for parent in directories
                for directory in self._enter(parent, part, problems)
            ]
            if problems and not entered:
                raise problems[0]
            directories = (
                by_turns(entered)[:_DIRECTORIES] if len(entered) > _DIRECTORIES else entered
            )
        return directories

    @property
    def prefix(self) -> str:
        """With what the names of all of its files begin."""
        return self._parts()[-1].partition("\x01")[0]

    def names(self, directory: PatternDirectory, names: Iterable[str]) -> Iterator[Name]:
        """Those of the names in one of its directories that the pattern gives."""
        matches = _regex(self._parts()[-1])
        for name in names:
            suffix = _COMPRESSED.search(name)
            stem = name[: suffix.start()] if suffix else name
            match = matches.fullmatch(stem) or (None if suffix else matches.fullmatch(name))
            if match:
                yield Name(
                    os.path.join(directory.shown, name),
                    {**match.groupdict(), **directory.values},
                    suffix[0] if suffix else "",
                )

    def find(self) -> Iterator[Name]:
        """The files that are there, in no order. Raises OSError: there is no such directory."""
        for directory in self.directories():
            with scan(directory.real) as entries:
                yield from self.names(directory, (entry.name for entry in entries))

    def _enter(
        self, directory: PatternDirectory, part: str, problems: list[OSError]
    ) -> list[PatternDirectory]:
        """The directories below this one that this part of the pattern names; what was in the way
        is added to the problems."""
        directories: list[PatternDirectory] = []
        try:
            if "\x01" not in part:
                real = follow(directory.real, part)
                return [replace(directory, shown=os.path.join(directory.shown, part), real=real)]
            matches = _regex(part)
            with scan(directory.real) as entries:
                for entry in entries:
                    match = matches.fullmatch(entry.name)
                    if match and entry.is_dir(follow_symlinks=False):
                        directories.append(_entered(directory, entry, match.groupdict()))
        except OSError as problem:
            problems.append(problem)
        return directories


def _entered(
    directory: PatternDirectory, entry: os.DirEntry[str], values: dict[str, str]
) -> PatternDirectory:
    """A directory in this one, with the values in its name."""
    status = entry.stat(follow_symlinks=False)
    return PatternDirectory(
        os.path.join(directory.shown, entry.name),
        Resolved(os.path.join(directory.real.path, entry.name), directory.real.owner),
        {**values, **directory.values},
        person(status.st_uid),
        modified_ns(status),
    )


def _regex(part: str) -> re.Pattern[str]:
    """What one component of a marked path can be."""
    text, at, keywords = "", 0, set[str]()
    for mark in _MARK.finditer(part):
        letter = mark[1]
        # As much as the kernel writes, or systemd's \\x20 for a byte: no name takes long to match.
        kind = "[0-9]{1,20}" if letter in _NUMBERS else f".{{0,{_LONGEST.get(letter, 255)}}}"
        group = f"(?:{kind})" if letter in keywords else f"(?P<{letter}>{kind})"
        text += re.escape(part[at : mark.start()]) + group
        keywords.add(letter)
        at = mark.end()
    return re.compile(text + re.escape(part[at:]), re.S)


def live() -> CorePlace:
    """The pattern in force; "" where it cannot be read."""
    try:
        with open(
            "/proc/sys/kernel/core_pattern", encoding="utf-8", errors="surrogateescape"
        ) as f:
            pattern = f.read().rstrip("\n")
        with open("/proc/sys/kernel/core_uses_pid", encoding="ascii", errors="replace") as f:
            return CorePlace(pattern, f.read().strip() not in ("", "0"))
    except OSError:
        return CorePlace("")

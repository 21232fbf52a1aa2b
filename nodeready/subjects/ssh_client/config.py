"""ssh_config(5): the line that gives an option its value for a host.

The first value counts: the user's own file is read before the system's, each from its top. A
section ends at the next Host or Match line of the same file. An included file begins and ends in
the section of its Include line. A Match line other than ``all`` and ``host`` counts as not
matching, because its condition is unknown here.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from nodeready.core.base import Line
from nodeready.core.sysctl import Setting

MAIN = "/etc/ssh/ssh_config"
#: Where newer SLES keeps its defaults: read when MAIN does not exist.
VENDOR = "/usr/etc/ssh/ssh_config"
#: nodeready's file; its name sorts before the usual names.
DROPIN = "/etc/ssh/ssh_config.d/00-nodeready.conf"

#: The directories whose files a probe reads.
DROPIN_FOLDERS = ("/etc/ssh/ssh_config.d", "/usr/etc/ssh/ssh_config.d")

#: Maximum depth of Include in ssh (READCONF_MAX_DEPTH).
_MAX_DEPTH = 16

#: The lines of each file, by path.
Files = Mapping[str, tuple[Line, ...]]


class Directive(NamedTuple):
    """One line with a keyword: the keyword in small letters, and the rest of the line."""

    keyword: str
    value: str
    line: Line


def lines_of(path: str, content: bytes) -> tuple[Line, ...]:
    """A file's bytes as lines, without their line ends."""
    text = content.decode("utf-8", "surrogateescape")
    return tuple(Line(path, number, row) for number, row in enumerate(text.split("\n"), 1))


def directive(line: Line) -> Directive | None:
    """The directive of a line; None for a comment or an empty line."""
    match = re.match(r"([^\s=#]+)(?:\s*=\s*|\s+)(.*)$", line.text.strip(), re.S)
    if match is None:
        return None
    return Directive(match[1].lower(), match[2].replace('"', "").strip(), line)


def matches(patterns: list[str], host: str) -> bool:
    """Whether a Host line's patterns match ``host``, and no negated pattern does."""
    matching = [
        pattern
        for pattern in patterns
        if fnmatch.fnmatchcase(host, pattern.lstrip("!").replace("[", "[[]"))
    ]
    return bool(matching) and not any(pattern.startswith("!") for pattern in matching)


def _section_applies(entry: Directive, host: str) -> bool:
    """Whether the section of this Host or Match line applies to the host."""
    words = entry.value.split()
    if entry.keyword == "host":
        return matches(words, host)
    if [word.lower() for word in words] == ["all"]:
        return True
    if len(words) == 2 and words[0].lower() in ("host", "originalhost"):
        return matches(words[1].split(","), host)
    return False


def _folder(pattern: str) -> str:
    """The directory of one word of an Include line; a relative one is below /etc/ssh."""
    return (pattern if pattern.startswith("/") else f"/etc/ssh/{pattern}").rpartition("/")[0]


def included(pattern: str, files: Files) -> list[str]:
    """The files of one word of an Include line, in the order in which ssh reads them."""
    folder, name = _folder(pattern), pattern.rpartition("/")[2]
    return sorted(
        path
        for path in files
        if path.rpartition("/")[0] == folder and fnmatch.fnmatchcase(path.rpartition("/")[2], name)
    )


def applied(path: str, files: Files, host: str, depth: int = 0) -> Iterator[Directive]:
    """The directives of a file that apply to ``host``, in order, with those of included files."""
    active = True
    for line in files.get(path, ()):
        if (entry := directive(line)) is None:
            continue
        if entry.keyword in ("host", "match"):
            active = _section_applies(entry, host)
        elif active and entry.keyword == "include" and depth < _MAX_DEPTH:
            for word in entry.value.split():
                for name in included(word, files):
                    yield from applied(name, files, host, depth + 1)
        elif active:
            yield entry


def winner(path: str, files: Files, host: str, option: str) -> Setting | None:
    """The first line that gives ``option`` (small letters) a value for ``host``, or None."""
    entries = (entry for entry in applied(path, files, host) if entry.keyword == option)
    return next((Setting(entry.value, entry.line.source) for entry in entries), None)


def speaks_first(path: str, files: Files, options: tuple[str, ...]) -> bool:
    """Whether DROPIN is or would be read for every host, before any line that sets an option.

    A file before DROPIN that was not probed counts as a file with such a line.
    """
    all_files: dict[str, tuple[Line, ...]] = {**files, DROPIN: ()}
    for line in all_files.get(path, ()):
        if (entry := directive(line)) is None:
            continue
        if entry.keyword in ("host", "match", *options):
            return False
        if entry.keyword != "include":
            continue
        for word in entry.value.split():
            names = included(word, all_files)
            before = names[: names.index(DROPIN)] if DROPIN in names else names
            entries = (directive(other) for name in before for other in all_files[name])
            if any(other and other.keyword in (*options, "include") for other in entries):
                return False
            if DROPIN in names:
                return True
            if _folder(word) not in DROPIN_FOLDERS:
                return False
    return False

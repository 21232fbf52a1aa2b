"""The limits of logins: the lines of limits.conf and limits.d, PAM's stacks and sshd's UsePAM."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from nodeready.subjects.base import (
    PAM_DIRECTORIES,
    Line,
    by_path,
    files_by_name,
)
from nodeready.subjects.own_files import beatable

# --- The limits of logins: the lines of limits.conf and limits.d, as pam_limits applies them.
#
# Rules, from limits.conf(5) and Linux-PAM's pam_limits.c: limits.conf comes first, then
# limits.d/*.conf in byte order of their names; ``#`` begins a comment anywhere; fields are
# separated by any white space (a CR is white space too); within one kind of domain the later line
# wins; a user's line beats a group's, which beats ``*``, wherever they stand. A range of uids is a
# user's line for each of them (``:7`` is uid 7 alone, ``7:`` and ``7:9`` are what they say), and
# ``@`` before a range makes it one of gids. A line ``DOMAIN -`` exempts that user, group or range
# from all limits, wherever it stands; ``* -`` and ``%group -`` have no effect.

#: Item -> kernel units (bytes, descriptors) in one unit of limits.conf, which has core and memlock
#: in KiB. The items are the limits of the policy.
ITEMS = {"core": 1024, "memlock": 1024, "nofile": 1}

KINDS = ("soft", "hard")

#: RLIM_INFINITY of the kernel: no limit.
UNLIMITED = 2**64 - 1

#: A file of an earlier directory masks the files of its name in later ones, the vendor's.
DIRECTORIES = ("/etc/security", "/usr/etc/security", "/usr/share/security")

_SPACE = re.compile(r"[ \t\n\v\f\r]+")


@dataclass(frozen=True)
class LimitEntry:
    """One limit that a line gives to a domain.

    domain: ``*``, a user, ``@group``, or a range of ids as written
    kind:   ``soft`` or ``hard``; a line of type ``-`` is two entries
    item:   one of ITEMS
    value:  in kernel units; UNLIMITED
    source: the line, ``/path:number``
    """

    JSON_KEYS: ClassVar = {"source": "where"}

    domain: str
    kind: str
    item: str
    value: int
    source: str


@dataclass(frozen=True)
class PamLimits:
    """What a node's files give to new logins.

    entries: in the order in which pam_limits applies them
    exempt:  (domain, line) of the lines that exempt a user or group from all limits
    last:    base name of the last foreign file of limits.d that gives one of ITEMS and that a
             file of nodeready can follow; "" for none
    """

    entries: tuple[LimitEntry, ...] = ()
    exempt: tuple[tuple[str, str], ...] = ()
    last: str = ""

    def effective(self, domain: str, kind: str, item: str) -> LimitEntry | None:
        """The entry of this domain, kind and item that wins; None when no line gives one."""
        winner = None
        for entry in self.entries:
            if (entry.kind, entry.item) == (kind, item) and same_domain(entry.domain, domain):
                winner = entry
        return winner

    def beyond(self, domains: Iterable[str]) -> list[LimitEntry]:
        """The entries for domains beyond these, where no other line wins over them.

        One entry for each domain, kind and item. A line loses to a later line about at least the
        same people, and to a line of a stronger kind that is about all people.
        """
        is_ours = {*domains, "*"}
        last: dict[tuple[str, str, str], tuple[int, LimitEntry]] = {}
        for at, entry in enumerate(self.entries):
            last[entry.kind, entry.item, entry.domain] = at, entry
        wide: dict[tuple[str, str], list[tuple[int, LimitEntry]]] = {}
        for at, entry in last.values():
            if span(entry.domain) is not None:
                wide.setdefault((entry.kind, entry.item), []).append((at, entry))
        return [
            entry
            for at, entry in last.values()
            if entry.domain not in is_ours
            and not any(
                _wins(other, entry, later > at)
                for later, other in wide.get((entry.kind, entry.item), [])[-_MOST_RANGES:]
            )
        ]


#: Maximum ranges that are compared with each line: a hostile node has any number of them.
_MOST_RANGES = 256


def same_domain(written: str, domain: str) -> bool:
    """Whether a line for ``written`` is about ``domain``; root's uid may be in a range."""
    if written == domain:
        return True
    ids = span(written)
    return domain == "root" and ids is not None and not written.startswith("@") and ids[0] == 0


#: The highest id that Linux has: (uid_t) -1 is no id.
_LAST_ID = 2**32 - 2
#: What login.defs(5) gives to people: UID_MIN to UID_MAX.
_PEOPLE = (1000, 60000)
_RANGE = re.compile(r"@?(?:(\d{1,10}):(\d{1,10})?|:(\d{1,10}))")


def span(domain: str) -> tuple[int, int] | None:
    """The first and last id of a range; None for another domain (pam_limits.c).

    >>> span("@100:200")
    (100, 200)
    """
    match = _RANGE.fullmatch(domain)
    if match is None:
        return None
    if match[3] is not None:
        return int(match[3]), int(match[3])
    return int(match[1]), _LAST_ID if match[2] is None else int(match[2])


def covers_all_people(domain: str) -> bool:
    """Whether a range holds all ids that people have."""
    ids = span(domain)
    return ids is not None and ids[0] <= _PEOPLE[0] and ids[1] >= _PEOPLE[1]


def _rank(domain: str) -> int:
    """The kind of a domain: of two kinds, the lower one wins wherever its line stands."""
    return 2 if domain == "*" else 1 if domain.startswith("@") else 0


def _wins(wide: LimitEntry, entry: LimitEntry, later: bool) -> bool:
    """Whether a range's line wins over another line, for all people of that line."""
    if wide is entry or _rank(wide.domain) > _rank(entry.domain):
        return False
    if _rank(wide.domain) == _rank(entry.domain) and not later:
        return False
    first, second = span(wide.domain), span(entry.domain)
    if first is None:
        return False
    if second is not None and _rank(wide.domain) == _rank(entry.domain):
        return first[0] <= second[0] and second[1] <= first[1]
    return covers_all_people(wide.domain)


def _value(text: str, item: str) -> int | None:
    """The value in kernel units, or None for a text that pam_limits skips."""
    if text in ("-1", "-", "unlimited", "infinity"):
        return UNLIMITED
    match = re.match(r"[+-]?\d+", text)
    if match is None:
        return None
    # strtoull: what follows the digits is ignored, a negative number wraps around.
    value = int(match[0]) % 2**64 if len(match[0]) < 21 else UNLIMITED
    return min(value * ITEMS[item], UNLIMITED)


def _reading_order(paths: Iterable[str]) -> list[str]:
    """limits.conf, then the files of limits.d by name; earlier directories mask later ones.

    paths: all existing files, for an empty one masks too
    """
    main = files_by_name(DIRECTORIES, paths).get("limits.conf")
    dropins = files_by_name((f"{directory}/limits.d" for directory in DIRECTORIES), paths)
    return [*([main] if main else []), *dropins.values()]


def parse_pam_limits(
    lines: Iterable[Line], existing: Iterable[str] = (), conf: str = ""
) -> PamLimits:
    """The limits that the lines give; lines of files that pam_limits does not read are skipped.

    existing: the files that are there, without lines too
    conf:  the only file that pam_limits reads, by its option ``conf=``; "": those of the system
    """
    files = by_path(lines)
    entries: list[LimitEntry] = []
    exempt: list[tuple[str, str]] = []
    last = ""
    for path in [conf] if conf else _reading_order(dict.fromkeys((*existing, *files))):
        before = len(entries)
        for line in files.get(path, ()):
            words = _SPACE.split(line.text.partition("#")[0].partition("\0")[0].strip(" \t\v\f\r"))
            domain, kind = words[0], words[1].lower() if len(words) > 1 else ""
            if domain.startswith("%") or (":" in domain and span(domain) is None):
                continue
            if len(words) == 2 and kind[:1] == "-" and domain != "*":
                exempt.append((domain, line.source))
            if len(words) < 4 or kind not in ("soft", "hard", "-"):
                continue
            item = words[2].lower()
            value = _value(words[3].lower(), item) if item in ITEMS else None
            if value is not None:
                kinds = KINDS if kind == "-" else (kind,)
                entries.extend(
                    LimitEntry(domain, kind_, item, value, line.source) for kind_ in kinds
                )
        name = path.rpartition("/")[2]
        is_ours = "/limits.d/" not in path or "nodeready" in name
        if len(entries) > before and not is_ours and beatable(name):
            last = name
    return PamLimits(tuple(entries), tuple(exempt), last)


# --- Whether logins take these limits at all: pam_limits in the PAM stacks, and sshd's UsePAM.
#
# Rules, from pam.conf(5), pam_limits(8) and sshd_config(5): a service's stack is its file in the
# first of these directories; ``@include`` takes another file's lines of all kinds, ``include`` and
# ``substack`` those of the line's own kind. With ``conf=`` pam_limits reads that file alone. Of
# several values of a keyword sshd takes the first one; without a value it uses no PAM.

#: The services that open sessions of jobs and people; RHEL has a separate stack for ``su -``.
SERVICES = ("sshd", "su", "su-l")
_PAM_INCLUDED = (
    "common-session", "common-session-noninteractive", "common-session-pc", "common-auth",
    "common-account", "common-password", "system-auth", "password-auth", "postlogin",
    "system-login", "system-remote-login", "base-session",
)  # fmt: skip
_SSHD_CONFIG = ("/etc/ssh/sshd_config", "/usr/etc/ssh/sshd_config")
_SSHD_INCLUDED = ("/etc/ssh/sshd_config.d/*.conf", "/usr/etc/ssh/sshd_config.d/*.conf")
_PAM_LINE = re.compile(r"-?(\w+)\s+(\[[^]]*\]|\S+)\s+(\S+)\s*(.*)")
_DEEPEST = 8


@dataclass(frozen=True)
class Stack:
    """What one service's PAM stack says of limits.

    path:   the service's file
    limits: the lines of its session stack that call pam_limits, in order
    is_complete: all files that the stack names were seen
    """

    JSON_KEYS: ClassVar = {"is_complete": "whole"}

    path: str
    limits: tuple[Line, ...] = ()
    is_complete: bool = True

    @property
    def conf(self) -> str:
        """The file of ``conf=``, the only file that pam_limits reads then; "" for the system's."""
        match = re.search(r"\sconf=(\S+)", self.limits[-1].text) if self.limits else None
        return match[1] if match else ""


def parse_stack(service: str, files: Mapping[str, list[Line]], depth: int = 0) -> Stack | None:
    """The stack of a service; None when no file of its name was seen."""
    paths = (f"{directory}/{service}" for directory in PAM_DIRECTORIES)
    path = next((path for path in paths if path in files), "")
    if not path or depth > _DEEPEST:
        return None
    limit_lines: list[Line] = []
    is_complete = True
    for line in files[path]:
        text = line.text.partition("#")[0].strip()
        include = re.fullmatch(r"@include\s+(\S+)", text)
        match = _PAM_LINE.fullmatch(text)
        other = include[1] if include else ""
        if match and match[1].lower() == "session":
            if match[2] in ("include", "substack"):
                other = match[3]
            elif match[3].rpartition("/")[2] == "pam_limits.so":
                limit_lines.append(line)
        if other:
            inner = parse_stack(other.rpartition("/")[2], files, depth + 1)
            limit_lines.extend(inner.limits if inner else ())
            is_complete = is_complete and inner is not None and inner.is_complete
    return Stack(path, tuple(limit_lines), is_complete)


#: The patterns of ``Include`` whose files were looked at.
_SEEN = {word for path in _SSHD_INCLUDED for word in (path, path.removeprefix("/etc/ssh/"))}


def uses_pam(files: Mapping[str, list[Line]]) -> Line | str | None:
    """The line of sshd's configuration that switches PAM off.

    A path: no line of that file and of those that it includes switches PAM on. None: PAM is on,
    or no configuration was seen.
    """
    main = next((path for path in _SSHD_CONFIG if path in files), "")
    for line in _sshd_lines(main, files, 0):
        words = line.text.lower().replace("=", " ", 1).split()
        if words[:1] == ["include"] and not {word.strip('"') for word in words[1:]} <= _SEEN:
            # What stands in a file that was not looked at may come first.
            return None
        match = re.fullmatch(r"usepam[\s=]+\"?(\w+)\"?\s*", line.text.strip(), re.I)
        if match:
            return line if match[1].lower() == "no" else None
    return main or None


def _sshd_lines(path: str, files: Mapping[str, list[Line]], depth: int) -> Iterator[Line]:
    """The lines of sshd's configuration that are about all connections, in order."""
    for line in files.get(path, ()) if depth <= _DEEPEST else ():
        words = line.text.replace("=", " ", 1).split()
        keyword = words[0].lower() if words else ""
        if keyword == "match":
            return
        if keyword == "include":
            for pattern in words[1:]:
                path_pattern = pattern.strip('"')
                path_pattern = (
                    path_pattern if path_pattern.startswith("/") else f"/etc/ssh/{path_pattern}"
                )
                for other in sorted(files):
                    if fnmatch.fnmatchcase(other, path_pattern):
                        yield from _sshd_lines(other, files, depth + 1)
        yield line

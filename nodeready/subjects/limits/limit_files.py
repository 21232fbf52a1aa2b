"""The files that give limits to logins and services, as PAM and systemd read them."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from nodeready.core import sysctl
from nodeready.core.base import PAM_DIRECTORIES, Line, by_path, files_by_name
from nodeready.core.own_files import beatable

# --- The limits of logins: the lines of limits.conf and limits.d, as pam_limits applies them.
#
# Rules, from limits.conf(5) and Linux-PAM's pam_limits.c:
#
# - limits.conf comes first, then limits.d/*.conf in byte order of their names.
# - ``#`` begins a comment anywhere; any white space separates fields (a CR is white space, too).
# - Within one kind of domain the later line wins. A user's line beats a group's, and a group's
#   beats ``*``, in any order of lines.
# - A range of uids is a user's line for each uid (``:7`` is uid 7 alone; ``7:`` has no end); ``@``
#   before a range makes it a range of gids.
# - A line ``DOMAIN -`` exempts that user, group or range from all limits, in any order of lines;
#   ``* -`` and ``%group -`` have no effect.

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
    """One limit that a line gives to a domain."""

    JSON_KEYS: ClassVar = {"source": "where"}
    domain: str  # ``*``, a user, ``@group``, or a range of ids as written
    kind: str  # ``soft`` or ``hard``; a line of type ``-`` is two entries
    item: str  # ``core``, ``memlock`` or ``nofile``
    value: int  # in kernel units; UNLIMITED
    source: str  # the line, ``/path:number``


@dataclass(frozen=True)
class PamLimits:
    """The limits that a node's files give to new logins."""

    entries: tuple[LimitEntry, ...] = ()  # in the order in which pam_limits applies them
    exempt: tuple[tuple[str, str], ...] = ()  # (domain, line) of those exempt from all limits
    last: str = ""  # name of the last foreign file with one of ITEMS that ours can follow, or ""

    def effective(self, domain: str, kind: str, item: str) -> LimitEntry | None:
        """The winning entry of this domain, kind and item; None without an entry."""
        winner = None
        for entry in self.entries:
            if (entry.kind, entry.item) == (kind, item) and applies_to(entry.domain, domain):
                winner = entry
        return winner

    def beyond(self, domains: Iterable[str]) -> list[LimitEntry]:
        """The entries for other domains that no other line beats.

        One entry for each domain, kind and item. A line loses to a later line for at least the
        same people, and to a line of a stronger kind for all people.
        """
        policy_domains = {*domains, "*"}
        last: dict[tuple[str, str, str], tuple[int, LimitEntry]] = {}
        for index, entry in enumerate(self.entries):
            last[entry.kind, entry.item, entry.domain] = index, entry
        ranges_by_item: dict[tuple[str, str], list[tuple[int, LimitEntry]]] = {}
        for index, entry in last.values():
            if span(entry.domain) is not None:
                ranges_by_item.setdefault((entry.kind, entry.item), []).append((index, entry))
        winners = []
        for index, entry in last.values():
            ranges = ranges_by_item.get((entry.kind, entry.item), [])[-_MOST_RANGES:]
            if entry.domain not in policy_domains and not any(
                _wins(other, entry, is_later=other_index > index) for other_index, other in ranges
            ):
                winners.append(entry)
        return winners


#: Maximum ranges that are compared with each line: a hostile node may have millions.
_MOST_RANGES = 256


def applies_to(written: str, domain: str) -> bool:
    """Whether a line for ``written`` applies to ``domain``; root's uid may be in a range."""
    if written == domain:
        return True
    ids = span(written)
    return domain == "root" and ids is not None and not written.startswith("@") and ids[0] == 0


#: The highest id of Linux: (uid_t) -1 is no id.
_LAST_ID = 2**32 - 2
#: The ids of people in login.defs(5): UID_MIN to UID_MAX.
_PEOPLE = (1000, 60000)
_RANGE = re.compile(r"@?(?:(\d{1,10}):(\d{1,10})?|:(\d{1,10}))")


def span(domain: str) -> tuple[int, int] | None:
    """The first and last id of a range; None for another domain (pam_limits.c).

    >>> span("@100:200")
    (100, 200)
    """
    if (match := _RANGE.fullmatch(domain)) is None:
        return None
    if match[3] is not None:
        return int(match[3]), int(match[3])
    return int(match[1]), _LAST_ID if match[2] is None else int(match[2])


def covers_all_people(domain: str) -> bool:
    """Whether a range contains the ids of all people."""
    ids = span(domain)
    return ids is not None and ids[0] <= _PEOPLE[0] and ids[1] >= _PEOPLE[1]


def _rank(domain: str) -> int:
    """The rank of a domain's kind: the lower rank wins, in any order of lines."""
    return 2 if domain == "*" else 1 if domain.startswith("@") else 0


def _wins(range_entry: LimitEntry, entry: LimitEntry, *, is_later: bool) -> bool:
    """Whether a range's line beats another line, for all people of that line."""
    range_rank, rank = _rank(range_entry.domain), _rank(entry.domain)
    if range_entry is entry or range_rank > rank or (range_rank == rank and not is_later):
        return False
    ids, beaten_ids = span(range_entry.domain), span(entry.domain)
    if ids is not None and beaten_ids is not None and range_rank == rank:
        return ids[0] <= beaten_ids[0] and beaten_ids[1] <= ids[1]
    return covers_all_people(range_entry.domain)


def _value(text: str, item: str) -> int | None:
    """The value in kernel units, or None for a text that pam_limits skips."""
    if text in ("-1", "-", "unlimited", "infinity"):
        return UNLIMITED
    if (match := re.match(r"[+-]?\d+", text)) is None:
        return None
    # strtoull ignores the text after the digits, and wraps a negative number around.
    value = int(match[0]) % 2**64 if len(match[0]) < 21 else UNLIMITED
    return min(value * ITEMS[item], UNLIMITED)


def parse_pam_limits(
    lines: Iterable[Line], existing: Iterable[str] = (), conf: str = ""
) -> PamLimits:
    """The limits that the lines give; lines of files that pam_limits does not read are skipped.

    existing: the files that exist, also without lines
    conf:     the only file that pam_limits reads, by its option ``conf=``; "": the system's files
    """
    files = by_path(lines)
    entries: list[LimitEntry] = []
    exempt: list[tuple[str, str]] = []
    last = ""
    # limits.conf, then the files of limits.d by name. An empty file masks those of its name, too.
    paths = dict.fromkeys((*existing, *files))
    main = files_by_name(DIRECTORIES, paths).get("limits.conf", "")
    dropins = files_by_name((f"{directory}/limits.d" for directory in DIRECTORIES), paths)
    for path in [conf] if conf else [main, *dropins.values()]:
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
                for entry_kind in KINDS if kind == "-" else (kind,):
                    entries.append(LimitEntry(domain, entry_kind, item, value, line.source))
        name = path.rpartition("/")[2]
        is_ours = "/limits.d/" not in path or "nodeready" in name
        if len(entries) > before and not is_ours and beatable(name):
            last = name
    return PamLimits(tuple(entries), tuple(exempt), last)


# --- Whether logins get the limits at all: pam_limits in the PAM stacks, and sshd's UsePAM.
#
# Rules, from pam.conf(5), pam_limits(8) and sshd_config(5): the first of the PAM directories with
# a file of the service's name has its stack. ``@include`` includes another file's lines of all
# kinds, ``include`` and ``substack`` its lines of the same kind. With ``conf=`` pam_limits reads
# only that file. Sshd uses the first of several values of a keyword; without a value it does not
# use PAM.

#: The services that open sessions of jobs and people; RHEL has a separate stack for ``su -``.
SERVICES = ("sshd", "su", "su-l")
PAM_INCLUDED = (
    "common-session", "common-session-noninteractive", "common-session-pc", "common-auth",
    "common-account", "common-password", "system-auth", "password-auth", "postlogin",
    "system-login", "system-remote-login", "base-session",
)  # fmt: skip
SSHD_CONFIG = ("/etc/ssh/sshd_config", "/usr/etc/ssh/sshd_config")
SSHD_INCLUDED = ("/etc/ssh/sshd_config.d/*.conf", "/usr/etc/ssh/sshd_config.d/*.conf")
_PAM_LINE = re.compile(r"-?(\w+)\s+(\[[^]]*\]|\S+)\s+(\S+)\s*(.*)")
#: Maximum depth of included files.
_MAX_DEPTH = 8


@dataclass(frozen=True)
class PamStack:
    """The calls of pam_limits in a service's PAM stack."""

    JSON_KEYS: ClassVar = {"is_complete": "whole"}
    path: str  # the service's file
    limits: tuple[Line, ...] = ()  # the lines of its session stack that call pam_limits, in order
    is_complete: bool = True  # all files that the stack names were read

    @property
    def conf(self) -> str:
        """The only file that pam_limits reads, by ``conf=``; "": the system's files."""
        match = re.search(r"\sconf=(\S+)", self.limits[-1].text) if self.limits else None
        return match[1] if match else ""


def parse_stack(service: str, files: Mapping[str, list[Line]], depth: int = 0) -> PamStack | None:
    """The stack of a service; None when no file of its name was read."""
    paths = (f"{directory}/{service}" for directory in PAM_DIRECTORIES)
    path = next((path for path in paths if path in files), "")
    if not path or depth > _MAX_DEPTH:
        return None
    limit_lines: list[Line] = []
    is_complete = True
    for line in files[path]:
        text = line.text.partition("#")[0].strip()
        include = re.fullmatch(r"@include\s+(\S+)", text)
        match = _PAM_LINE.fullmatch(text)
        included = include[1] if include else ""
        if match and match[1].lower() == "session":
            if match[2] in ("include", "substack"):
                included = match[3]
            elif match[3].rpartition("/")[2] == "pam_limits.so":
                limit_lines.append(line)
        if included:
            inner = parse_stack(included.rpartition("/")[2], files, depth + 1)
            limit_lines.extend(inner.limits if inner else ())
            is_complete = is_complete and inner is not None and inner.is_complete
    return PamStack(path, tuple(limit_lines), is_complete)


#: The patterns of ``Include`` whose files were read.
_READ = {word for path in SSHD_INCLUDED for word in (path, path.removeprefix("/etc/ssh/"))}


def find_disabled_pam(files: Mapping[str, list[Line]]) -> Line | str | None:
    """The line of sshd's configuration that switches PAM off.

    A path: neither that file nor an included one switches PAM on. None: on, or nothing was read.
    """
    main = next((path for path in SSHD_CONFIG if path in files), "")
    for line in _sshd_lines(main, files, 0):
        words = line.text.lower().replace("=", " ", 1).split()
        if words[:1] == ["include"] and not {word.strip('"') for word in words[1:]} <= _READ:
            # A file that was not read may have an earlier line.
            return None
        if match := re.fullmatch(r"usepam[\s=]+\"?(\w+)\"?\s*", line.text.strip(), re.I):
            return line if match[1].lower() == "no" else None
    return main or None


def _sshd_lines(path: str, files: Mapping[str, list[Line]], depth: int) -> Iterator[Line]:
    for line in files.get(path, ()) if depth <= _MAX_DEPTH else ():
        words = line.text.replace("=", " ", 1).split()
        keyword = words[0].lower() if words else ""
        if keyword == "match":
            return
        if keyword == "include":
            for pattern in words[1:]:
                # An absolute pattern replaces the directory.
                path_pattern = posixpath.join("/etc/ssh", pattern.strip('"'))
                for included in fnmatch.filter(sorted(files), path_pattern):
                    yield from _sshd_lines(included, files, depth + 1)
        yield line


# --- The limits of services: systemd's unit files, their drop-ins and the manager's defaults.
#
# Rules, from systemd.unit(5) and systemd.exec(5): the unit file of the first directory counts.
# Drop-ins of all directories apply in the order of their base names; of several directories with
# one name, the first counts. A later assignment wins, and an empty assignment resets. Drop-ins may
# also belong to a prefix (``foo-.service.d`` for foo-bar) or to all services (``service.d``).

#: Highest priority first, systemd.unit(5), table 1; /lib on a system without merged /usr.
UNIT_DIRECTORIES = (
    "/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system", "/lib/systemd/system",
)  # fmt: skip
_SUFFIXES = {suffix: 1024**power for power, suffix in enumerate(("", *"KMGTPE"))}


@dataclass(frozen=True)
class UnitLimit:
    """One limit of a unit."""

    JSON_KEYS: ClassVar = {"source": "where"}
    soft: int  # in kernel units
    hard: int  # likewise
    source: str  # the line that sets it, ``/path:number``


@dataclass(frozen=True)
class Unit:
    """An installed service."""

    path: str  # its unit file
    limits: Mapping[str, UnitLimit] = field(default_factory=dict)  # item -> the limit in its files
    last: str = ""  # name of the last foreign file with one of ITEMS that ours can follow, or ""


def file_names(service: str) -> tuple[str, ...]:
    """The file names of a service's unit.

    >>> file_names("getty@tty1")
    ('getty@tty1.service', 'getty@.service')
    """
    template, _, instance = service.partition("@")
    return (f"{service}.service", *((f"{template}@.service",) if instance else ()))


def dropin_directories(service: str) -> tuple[str, ...]:
    """The directories of a service's drop-ins, the most specific name first."""
    names = list(file_names(service))
    stem = service.partition("@")[0]
    while "-" in stem.rstrip("-"):
        stem = stem.rstrip("-").rpartition("-")[0] + "-"
        names.append(f"{stem}.service")
    return tuple(
        f"{directory}/{name}.d" for name in (*names, "service") for directory in UNIT_DIRECTORIES
    )


def _size_in_bytes(text: str) -> int | None:
    """The bytes or the number of ``64K`` or ``infinity``; None for a text that systemd ignores."""
    if text == "infinity":
        return UNLIMITED
    if (match := re.fullmatch(r"(\d{1,19})(\.\d{1,9})? ?([KMGTPE]?)B?", text)) is None:
        return None
    factor = _SUFFIXES[match[3]]
    value: int = int(match[1]) * factor + int(float(match[2] or 0) * factor)
    return min(value, UNLIMITED)


def _apply_section(
    lines: Iterable[Line],
    limits: dict[str, UnitLimit],
    section_name: str = "Service",
    prefix: str = "",
) -> bool:
    """Apply one file's section to ``limits``. Returns whether it sets one of ITEMS.

    prefix: of the keys, before ``Limit``
    """
    sets_limit = False
    for line in sysctl.section(lines, section_name):
        match = re.fullmatch(rf"{prefix}Limit([A-Z]+)\s*=\s*(.*)", line.text.strip())
        if match is None or match[1].lower() not in ITEMS:
            continue
        item, sets_limit = match[1].lower(), True
        if not match[2]:
            limits.pop(item, None)
        # ``BOTH`` or ``SOFT:HARD``.
        soft_text, colon, hard_text = match[2].partition(":")
        soft = _size_in_bytes(soft_text.strip())
        hard = _size_in_bytes((hard_text if colon else soft_text).strip())
        if soft is not None and hard is not None:
            limits[item] = UnitLimit(soft, hard, line.source)
    return sets_limit


def parse_unit_limits(
    service: str, path: str, lines: Iterable[Line], existing: Iterable[str] = ()
) -> Unit:
    """The limits of a service, from the lines of its unit file and drop-ins.

    existing: paths of the drop-ins that exist; an empty one, too, hides others of its name
    """
    files = by_path(lines)
    dropins = files_by_name(dropin_directories(service), dict.fromkeys((*existing, *files)))
    limits: dict[str, UnitLimit] = {}
    _apply_section(files.get(path, ()), limits)
    last = ""
    for name, dropin in dropins.items():
        sets_limit = _apply_section(files.get(dropin, ()), limits)
        if sets_limit and "nodeready" not in name and beatable(name):
            last = name
    return Unit(path, limits, last)


#: The manager's directories, the highest priority first (systemd-system.conf(5)).
MANAGER_DIRECTORIES = (
    "/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd",
)  # fmt: skip


def parse_defaults(lines: Iterable[Line], existing: Iterable[str] = ()) -> dict[str, UnitLimit]:
    """Item -> the limit of services that set none: DefaultLimit… of systemd-system.conf(5)."""
    files = by_path(lines)
    main_files = (f"{directory}/system.conf" for directory in MANAGER_DIRECTORIES)
    main = next((path for path in main_files if path in files), "")
    dropin_folders = (f"{directory}/system.conf.d" for directory in MANAGER_DIRECTORIES)
    dropins = files_by_name(dropin_folders, dict.fromkeys((*existing, *files)))
    limits: dict[str, UnitLimit] = {}
    for path in (main, *dropins.values()):
        _apply_section(files.get(path, ()), limits, "Manager", "Default")
    return limits

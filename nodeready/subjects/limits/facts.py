"""Which resource limits jobs get on a node: at login, from services, and in what runs already."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from nodeready import shell
from nodeready.policy import Policy
from nodeready.policy.fields import Names
from nodeready.subjects import sysctl
from nodeready.subjects.base import (
    PAM_DIRECTORIES,
    Line,
    Output,
    Probe,
    ProbeError,
    Section,
    by_path,
    frozen,
    number,
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
# from all limits, wherever it stands; ``* -`` and ``%group -`` exempt nobody.

#: Item -> kernel units (bytes, descriptors) in one unit of limits.conf, which has core and memlock
#: in KiB. The items are the limits of the policy.
ITEMS = {"core": 1024, "memlock": 1024, "nofile": 1}

#: RLIM_INFINITY of the kernel: no limit.
UNLIMITED = 2**64 - 1

#: A file of an earlier directory masks the files of its name in later ones, the vendor's.
DIRECTORIES = ("/etc/security", "/usr/etc/security", "/usr/share/security")

_SPACE = re.compile(r"[ \t\n\v\f\r]+")


@dataclass(frozen=True)
class Entry:
    """One limit that a line gives to a domain.

    domain: ``*``, a user, ``@group``, or a range of ids as written
    kind:   ``soft`` or ``hard``; a line of type ``-`` is two entries
    item:   one of ITEMS
    value:  in kernel units; UNLIMITED
    where:  the line, ``/path:number``
    """

    domain: str
    kind: str
    item: str
    value: int
    where: str


@dataclass(frozen=True)
class PamLimits:
    """What a node's files give to new logins.

    entries: in the order in which pam_limits applies them
    exempt:  (domain, where) of the lines that exempt a user or group from all limits
    last:    base name of the last file of limits.d that is not ours, gives one of ITEMS and can
             be followed by a file of ours; "" for none
    """

    entries: tuple[Entry, ...] = ()
    exempt: tuple[tuple[str, str], ...] = ()
    last: str = ""

    def effective(self, domain: str, kind: str, item: str) -> Entry | None:
        """The entry of this domain, kind and item that wins; None when no line gives one."""
        found = None
        for entry in self.entries:
            if (entry.kind, entry.item) == (kind, item) and same_domain(entry.domain, domain):
                found = entry
        return found

    def beyond(self, domains: Iterable[str]) -> list[Entry]:
        """What the lines give to others than these domains, where no other line wins over it.

        One entry for each domain, kind and item. A line loses to a later one about at least the
        same people, and to one of a stronger kind that is about everybody.
        """
        ours = {*domains, "*"}
        last: dict[tuple[str, str, str], tuple[int, Entry]] = {}
        for at, entry in enumerate(self.entries):
            last[entry.kind, entry.item, entry.domain] = at, entry
        wide: dict[tuple[str, str], list[tuple[int, Entry]]] = {}
        for at, entry in last.values():
            if span(entry.domain) is not None:
                wide.setdefault((entry.kind, entry.item), []).append((at, entry))
        return [
            entry
            for at, entry in last.values()
            if entry.domain not in ours
            and not any(
                _wins(other, entry, later > at)
                for later, other in wide.get((entry.kind, entry.item), [])[-_MOST_RANGES:]
            )
        ]


#: Ranges that are compared with each line: a node has a few, a hostile one no end of them.
_MOST_RANGES = 256


def same_domain(written: str, domain: str) -> bool:
    """Whether a line for ``written`` is about ``domain``; root's uid may be in a range."""
    if written == domain:
        return True
    ids = span(written)
    return domain == "root" and ids is not None and not written.startswith("@") and ids[0] == 0


#: The highest id that Linux has: (uid_t) -1 is none.
_LAST_ID = 2**32 - 2
#: What login.defs(5) gives to people: UID_MIN to UID_MAX.
_PEOPLE = (1000, 60000)
_RANGE = re.compile(r"@?(?:(\d{1,10}):(\d{1,10})?|:(\d{1,10}))")


def span(domain: str) -> tuple[int, int] | None:
    """The first and last id of a range; None for a domain that is none (pam_limits.c)."""
    match = _RANGE.fullmatch(domain)
    if match is None:
        return None
    if match[3] is not None:
        return int(match[3]), int(match[3])
    return int(match[1]), _LAST_ID if match[2] is None else int(match[2])


def everybody(domain: str) -> bool:
    """Whether a range holds all ids that people have."""
    ids = span(domain)
    return ids is not None and ids[0] <= _PEOPLE[0] and ids[1] >= _PEOPLE[1]


def _rank(domain: str) -> int:
    """The kind of a domain: of two kinds, the lower one wins wherever its line stands."""
    return 2 if domain == "*" else 1 if domain.startswith("@") else 0


def _wins(wide: Entry, entry: Entry, later: bool) -> bool:
    """Whether a range's line wins over another line for all people that the other is about."""
    if wide is entry or _rank(wide.domain) > _rank(entry.domain):
        return False
    if _rank(wide.domain) == _rank(entry.domain) and not later:
        return False
    first, second = span(wide.domain), span(entry.domain)
    if first is None:
        return False
    if second is not None and _rank(wide.domain) == _rank(entry.domain):
        return first[0] <= second[0] and second[1] <= first[1]
    return everybody(wide.domain)


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


def _order(paths: Iterable[str]) -> list[str]:
    """limits.conf, then the files of limits.d by name; earlier directories mask later ones.

    ``paths``: of all files that are there: an empty one masks too.
    """
    main: dict[str, str] = {}
    drop: dict[str, str] = {}
    for directory in DIRECTORIES:
        for path in paths:
            parent, _, name = path.rpartition("/")
            if parent == directory and name == "limits.conf":
                main.setdefault(name, path)
            elif parent == f"{directory}/limits.d":
                drop.setdefault(name, path)
    ordered = sorted(drop, key=lambda name: name.encode("utf-8", "surrogateescape"))
    return [*main.values(), *(drop[name] for name in ordered)]


def parse_pam_limits(
    lines: Iterable[Line], there: Iterable[str] = (), conf: str = ""
) -> PamLimits:
    """The limits that the lines give; lines of files that pam_limits does not read are skipped.

    there: the files that are there, without lines too
    conf:  the one file that pam_limits reads by its option ``conf=``; "": those of the system
    """
    files = by_path(lines)
    entries: list[Entry] = []
    exempt: list[tuple[str, str]] = []
    last = ""
    for path in [conf] if conf else _order(dict.fromkeys((*there, *files))):
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
                kinds = ("soft", "hard") if kind == "-" else (kind,)
                entries.extend(Entry(domain, one, item, value, line.source) for one in kinds)
        name = path.rpartition("/")[2]
        ours = "/limits.d/" not in path or "nodeready" in name
        if len(entries) > before and not ours and beatable(name):
            last = name
    return PamLimits(tuple(entries), tuple(exempt), last)


# --- Whether logins take these limits at all: pam_limits in the PAM stacks, and sshd's UsePAM.
#
# Rules, from pam.conf(5), pam_limits(8) and sshd_config(5): a service's stack is its file in the
# first of these directories; ``@include`` takes another file's lines of all kinds, ``include`` and
# ``substack`` those of the line's own kind. With ``conf=`` pam_limits reads that file alone. Of
# several values of a keyword sshd takes the first one; without a value it uses no PAM.

#: The ways in that jobs and people take; RHEL gives ``su -`` a stack of its own.
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
    whole:  all files that the stack names were seen
    """

    path: str
    limits: tuple[Line, ...] = ()
    whole: bool = True

    @property
    def conf(self) -> str:
        """The one file that pam_limits reads in this stack; "" for the system's."""
        match = re.search(r"\sconf=(\S+)", self.limits[-1].text) if self.limits else None
        return match[1] if match else ""


def parse_stack(service: str, files: Mapping[str, list[Line]], depth: int = 0) -> Stack | None:
    """The stack of a service; None when no file of its name was seen."""
    paths = (f"{directory}/{service}" for directory in PAM_DIRECTORIES)
    path = next((path for path in paths if path in files), "")
    if not path or depth > _DEEPEST:
        return None
    found: list[Line] = []
    whole = True
    for line in files[path]:
        text = line.text.partition("#")[0].strip()
        include = re.fullmatch(r"@include\s+(\S+)", text)
        match = _PAM_LINE.fullmatch(text)
        other = include[1] if include else ""
        if match and match[1].lower() == "session":
            if match[2] in ("include", "substack"):
                other = match[3]
            elif match[3].rpartition("/")[2] == "pam_limits.so":
                found.append(line)
        if other:
            inner = parse_stack(other.rpartition("/")[2], files, depth + 1)
            found.extend(inner.limits if inner else ())
            whole = whole and inner is not None and inner.whole
    return Stack(path, tuple(found), whole)


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
                whole = pattern.strip('"')
                whole = whole if whole.startswith("/") else f"/etc/ssh/{whole}"
                for other in sorted(files):
                    if fnmatch.fnmatchcase(other, whole):
                        yield from _sshd_lines(other, files, depth + 1)
        yield line


# --- The limits that systemd gives to a service: its unit file and its drop-ins.
#
# Rules, from systemd.unit(5) and systemd.exec(5): the unit file of the first directory counts;
# drop-ins of all directories are applied by base name, a name that stands in several directories
# counts in the first; a later assignment wins, an empty one resets. Drop-ins may also belong to a
# prefix (``foo-.service.d`` for foo-bar) or to all services (``service.d``).

#: Highest priority first, systemd.unit(5), table 1; /lib on a system without merged /usr.
UNIT_DIRECTORIES = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_SUFFIXES = {suffix: 1024**power for power, suffix in enumerate(("", *"KMGTPE"))}


@dataclass(frozen=True)
class UnitLimit:
    """One limit of a unit in kernel units, and the line that sets it."""

    soft: int
    hard: int
    where: str


@dataclass(frozen=True)
class Unit:
    """An installed service.

    path:   its unit file
    limits: item -> the limit that the unit's files set; without the items that they do not set
    last:   base name of the last drop-in that is not ours, sets a limit and can be followed by
            one of ours; "" for none
    """

    path: str
    limits: Mapping[str, UnitLimit] = field(default_factory=dict)
    last: str = ""


def file_names(service: str) -> tuple[str, ...]:
    """The file names of a service's unit; an instance may have its template's."""
    template, at, instance = service.partition("@")
    names = (f"{service}.service",)
    return (*names, f"{template}@.service") if at and instance else names


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


def _size(text: str) -> int | None:
    if text == "infinity":
        return UNLIMITED
    match = re.fullmatch(r"(\d{1,19})(\.\d{1,9})? ?([KMGTPE]?)B?", text)
    if match is None:
        return None
    factor = _SUFFIXES[match[3]]
    value: int = int(match[1]) * factor + int(float(match[2] or 0) * factor)
    return min(value, UNLIMITED)


def _limit(text: str, where: str) -> UnitLimit | None:
    """``HARD_AND_SOFT`` or ``SOFT:HARD``; None for a text that systemd ignores."""
    soft, colon, hard = text.partition(":")
    first, second = _size(soft.strip()), _size((hard if colon else soft).strip())
    return None if first is None or second is None else UnitLimit(first, second, where)


def _apply(
    lines: Iterable[Line], limits: dict[str, UnitLimit], wanted: str = "[Service]", word: str = ""
) -> bool:
    """Apply one file's section to ``limits``. Returns whether it sets one of ITEMS.

    word: what stands before ``Limit`` in the keys
    """
    section, sets = "", False
    for line in lines:
        text = line.text.strip()
        if text.startswith("["):
            section = text
        match = re.fullmatch(rf"{word}Limit([A-Z]+)\s*=\s*(.*)", text)
        if section != wanted or match is None or match[1].lower() not in ITEMS:
            continue
        sets = True
        if not match[2]:
            limits.pop(match[1].lower(), None)
        limit = _limit(match[2], line.source)
        if limit is not None:
            limits[match[1].lower()] = limit
    return sets


def _dropins(directories: Iterable[str], there: Iterable[str]) -> dict[str, str]:
    """Base name -> the drop-in of that name that counts, in the order of reading."""
    found: dict[str, str] = {}
    for directory in directories:
        for path in there:
            parent, _, name = path.rpartition("/")
            if parent == directory:
                found.setdefault(name, path)
    names = sorted(found, key=lambda name: name.encode("utf-8", "surrogateescape"))
    return {name: found[name] for name in names}


def parse_unit_limits(
    service: str, path: str, lines: Iterable[Line], there: Iterable[str] = ()
) -> Unit:
    """The limits of a service, from the lines of its unit file and drop-ins.

    there: the drop-ins that are there: one without lines masks too
    """
    files = by_path(lines)
    dropins = _dropins(dropin_directories(service), dict.fromkeys((*there, *files)))
    limits: dict[str, UnitLimit] = {}
    _apply(files.get(path, ()), limits)
    last = ""
    for name in dropins:
        sets = _apply(files.get(dropins[name], ()), limits)
        if sets and "nodeready" not in name and beatable(name):
            last = name
    return Unit(path, limits, last)


#: Highest priority first (systemd-system.conf(5)).
_MANAGER = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd")


def parse_defaults(lines: Iterable[Line], there: Iterable[str] = ()) -> dict[str, UnitLimit]:
    """The limits of a unit that sets none: DefaultLimitX of systemd-system.conf(5)."""
    files = by_path(lines)
    main = next((f"{one}/system.conf" for one in _MANAGER if f"{one}/system.conf" in files), "")
    names = _dropins((f"{one}/system.conf.d" for one in _MANAGER), dict.fromkeys((*there, *files)))
    limits: dict[str, UnitLimit] = {}
    for path in (main, *names.values()):
        _apply(files.get(path, ()), limits, "[Manager]", "Default")
    return limits


# --- The look at a node's limits, and the processes that have some already.

NR_OPEN = "fs.nr_open"
# A number of /proc/sys has to be read at once, and dash reads byte by byte: so nr_lines reads it.
_NR_OPEN_FILE = "/proc/sys/fs/nr_open"
_PROC_NAMES = {
    "Max core file size": "core",
    "Max locked memory": "memlock",
    "Max open files": "nofile",
}
_CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")


# Any user can give a process the name of a service, and lower its limits. UID_MIN is 1000.
_A_PERSONS = (
    "nr_uid=0; while read -r nr_key nr_uid nr_rest; do "
    'if [ "$nr_key" = Uid: ]; then break; fi; '
    'done 2>/dev/null <"/proc/$nr_pid/status"; [ "${nr_uid:-0}" -ge 1000 ]'
)


def _service_script(service: str) -> str:
    """Find the unit file of one service, its drop-ins and its main processes."""
    files = " ".join(
        shell.quote(f"{directory}/{name}")
        for name in file_names(service)
        for directory in UNIT_DIRECTORIES
    )
    dropins = " ".join(
        f"{shell.quote(directory)}/*.conf" for directory in dropin_directories(service)
    )
    procs = " ".join(
        shell.quote(f"{root}/system.slice/{service}.service/cgroup.procs") for root in _CGROUPS
    )
    name = shell.quote(service)
    return rf"""
    for nr_file in {files}; do
        if [ -e "$nr_file" ] || [ -L "$nr_file" ]; then
            # A link to /dev/null masks the unit: no regular file.
            if [ -f "$nr_file" ]; then
                printf 'unit=%s %s\n' {name} "$nr_file"
                set -- "$@" "$nr_file" {dropins}
                nr_seen {dropins}
            fi
            break
        fi
    done
    nr_first= nr_main= nr_persons=
    for nr_file in {procs}; do
        if [ ! -r "$nr_file" ]; then continue; fi
        while read -r nr_pid; do
            nr_comm=
            {{ read -r nr_comm <"/proc/$nr_pid/comm"; }} 2>/dev/null || continue
            # Where slurmd has no cgroups for jobs, their processes are in its own.
            if {_A_PERSONS}; then
                if [ -n "$nr_first" ] && [ -z "$nr_persons" ]; then continue; fi
                nr_persons=1
            fi
            nr_first=${{nr_first:-$nr_pid}}
            if [ "$nr_comm" = {shell.quote(service[:15])} ]; then nr_main="$nr_main $nr_pid"; fi
        done <"$nr_file"
    done
    for nr_pid in ${{nr_main:-$nr_first}}; do
        printf 'process=%s %s\n' {name} "$nr_pid"
        set -- "$@" "/proc/$nr_pid/limits"
    done
    """


# Without CAP_SYS_RESOURCE (a container) root may not raise a hard limit above sshd's own. A strict
# pam_limits then refuses the login, so the limits that root can set there matter. The capability
# is bit 24, in the tenth digit of CapBnd.
_CEILING = r"""
    while read -r nr_key nr_bits; do
        if [ "$nr_key" = CapBnd: ]; then break; fi
    done </proc/self/status
    case $nr_bits in
    ?????????[02468ace]??????)
        nr_pid=1
        { read -r nr_pid </run/sshd.pid; } 2>/dev/null
        printf 'ceiling=%s\n' "$nr_pid"
        set -- "$@" "/proc/$nr_pid/limits"
        nr_few '^-\{0,1\}session[[:space:]]\{1,\}requi.*pam_limits'
        nr_lines few /etc/pam.d/* /usr/lib/pam.d/*
        ;;
    esac
"""


_STRICT = re.compile(r"-?session[ \t\v\f\r]+requi.*pam_limits")


def _script(policy: Policy) -> str:
    services = policy.limit_services
    # With ``conf=``, pam_limits reads another file: mostly one beside its own.
    limits = " ".join(
        f"{directory}/*.conf {directory}/limits.d/*.conf" for directory in DIRECTORIES
    )
    manager = " ".join(f"{one}/system.conf {one}/system.conf.d/*.conf" for one in _MANAGER)
    pam = " ".join(
        f"{directory}/{name}"
        for directory in PAM_DIRECTORIES
        for name in (*SERVICES, *_PAM_INCLUDED)
    )
    sshd = " ".join((*_SSHD_CONFIG, *_SSHD_INCLUDED))
    names = " ".join(f"-e {shell.quote(service[:15])}" for service in services)
    # Without systemd there are no cgroups of services: look at the names of all processes.
    scan = rf"""
    if [ ! -d /run/systemd/system ]; then
        for nr_file in $(grep -slxF {names} /proc/[0-9]*/comm); do
            nr_pid=${{nr_file%/comm}}
            nr_comm=
            {{ read -r nr_comm <"$nr_file"; }} 2>/dev/null || continue
            nr_pid=${{nr_pid#/proc/}}
            {_A_PERSONS} && continue
            printf 'process=%s %s\n' "$nr_comm" "$nr_pid"
            set -- "$@" "/proc/$nr_pid/limits"
        done
    fi
    """
    return rf"""
    nr_seen() {{
        for nr_there in "$@"; do
            if [ -e "$nr_there" ] || [ -L "$nr_there" ]; then printf 'there=%s\n' "$nr_there"; fi
        done
    }}
    if [ -d /run/systemd/system ]; then printf 'systemd=1\n'; fi
    nr_seen {limits} {manager}
    set --
    {"".join(_service_script(service) for service in services)}
    {scan if services else ""}
    {_CEILING}
    nr_lines set {limits} {manager} {pam} {sshd} "$@" {_NR_OPEN_FILE}
    """


@dataclass(frozen=True)
class Running:
    """A process of a service with its limits, item -> (soft, hard) in kernel units."""

    service: str
    pid: int
    limits: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Limits:
    """The limits of jobs on a node.

    pam:          what the files give to new logins
    units:        service -> its unit; without the services that are not installed
    running:      the processes of the policy's services
    ceiling:      item -> the hard limit that logins cannot exceed, where root may raise none and
                  pam_limits is strict; empty on every usual node
    nr_open:      fs.nr_open in force: no process may have more open files; None: unreadable
    nr_open_boot: what the sysctl files set fs.nr_open to at the next boot
    systemd:      systemd runs as the init
    defaults:     item -> the limit of a service that sets none, where systemd's configuration does
    stacks:       service of SERVICES -> its PAM stack; without those that were not seen
    confs:        file -> the limits that pam_limits gives by its option ``conf=``
    no_pam:       where sshd's configuration leaves PAM off: a line, a file without one, or None
    """

    pam: PamLimits
    units: Mapping[str, Unit]
    running: tuple[Running, ...]
    ceiling: Mapping[str, int]
    nr_open: int | None
    nr_open_boot: sysctl.BootSetting
    systemd: bool
    defaults: Mapping[str, UnitLimit] = field(default_factory=dict)
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    confs: Mapping[str, PamLimits] = field(default_factory=dict)
    no_pam: Line | str | None = None


def _proc_limits(lines: Iterable[Line]) -> dict[str, tuple[int, int]]:
    """Item -> (soft, hard) of a /proc/PID/limits; {} when the process ended meanwhile."""
    found: dict[str, tuple[int, int]] = {}
    for line in lines:
        match = re.match(r"(Max(?: [a-z]+)+)\s{2,}(\w+)\s+(\w+)", line.text)
        if match and match[1] in _PROC_NAMES:
            soft, hard = (
                UNLIMITED if text == "unlimited" else number(text, match[1])
                for text in (match[2], match[3])
            )
            found[_PROC_NAMES[match[1]]] = (soft, hard)
    return found


_CEILING_PID = re.compile("^ceiling=([0-9]+)$", re.M)


def parse(outputs: Mapping[str, Output], policy: Policy) -> Limits:
    """The observation. Raises ProbeError when a value of the kernel is no number."""
    output = outputs["limits"]
    pid = _CEILING_PID.search(output.text)
    if pid and "process=" not in output.text:
        # The number of a process is all that differs between most nodes.
        text = output.text.replace(f"/proc/{pid[1]}/limits:", "/proc/0/limits:")
        output = replace(output, text=f"{text[: pid.start(1)]}0{text[pid.end(1) :]}")
    return _parse(output, outputs["sysctl"], policy.limit_services)


@lru_cache(maxsize=64)
def _parse(output: Output, kernel: Output, services: Names) -> Limits:
    values = output.values()
    # Of a container, PAM's files come twice.
    files = by_path(dict.fromkeys(output.lines()))
    lines = [line for found in files.values() for line in found]
    there = output.all("there")
    units: dict[str, Unit] = {}
    for text in output.all("unit"):
        service, _, path = text.partition(" ")
        if service not in services or not path.startswith("/"):
            raise ProbeError("a unit that was not asked for", text)
        units[service] = parse_unit_limits(service, path, lines, there)
    by_name = {service[:15]: service for service in services}
    running = []
    for text in dict.fromkeys(output.all("process")):
        name, _, pid = text.partition(" ")
        limits = _proc_limits(files.get(f"/proc/{pid}/limits", ()))
        if limits:
            if name[:15] not in by_name:
                raise ProbeError("a process that was not asked for", text)
            running.append(Running(by_name[name[:15]], number(pid, "a process id"), limits))
    own = _proc_limits(files.get(f"/proc/{values.get('ceiling')}/limits", ()))
    strict = any("/pam.d/" in line.path and _STRICT.match(line.text) for line in lines)
    stacks = {name: found for name in SERVICES if (found := parse_stack(name, files))}
    confs = {stack.conf for stack in stacks.values()} & {*files, *there}
    nr_open = files.get(_NR_OPEN_FILE, ())
    observed: Limits = frozen(
        Limits(
            pam=parse_pam_limits(lines, there),
            units=units,
            running=tuple(running),
            ceiling={item: hard for item, (_, hard) in own.items()} if strict else {},
            nr_open=number(nr_open[0].text, NR_OPEN) if nr_open else None,
            nr_open_boot=sysctl.boot_value(sysctl.parse(kernel), NR_OPEN),
            systemd="systemd" in values,
            defaults=parse_defaults(lines, there),
            stacks=stacks,
            confs={path: parse_pam_limits(files.get(path, ()), conf=path) for path in confs},
            no_pam=uses_pam(files),
        )
    )
    return observed


PROBE = Probe("limits", (Section("limits", _script), sysctl.SECTION), parse)

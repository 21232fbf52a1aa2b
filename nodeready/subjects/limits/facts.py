"""Which resource limits jobs get on a node: at login, from services, and in what runs already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects import sysctl
from nodeready.subjects.base import (
    Line,
    Output,
    Probe,
    ProbeError,
    Section,
    beatable,
    by_path,
    file_lines,
    number,
)

# --- The limits of logins: the lines of limits.conf and limits.d, as pam_limits applies them.
#
# Rules, from limits.conf(5) and Linux-PAM's pam_limits.c: limits.conf comes first, then
# limits.d/*.conf in byte order of their names; ``#`` begins a comment anywhere; fields are
# separated by any white space (a CR is white space too); within one kind of domain the later line
# wins; a user's line beats a group's, which beats ``*``. A line ``DOMAIN -`` exempts that user or
# group from all limits, wherever it stands.

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


def same_domain(written: str, domain: str) -> bool:
    """Whether a line for ``written`` is about ``domain``; root's uid may be in a range."""
    if written == domain:
        return True
    return domain == "root" and re.fullmatch(r":0+|0+:\d*", written) is not None


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
    """limits.conf, then the files of limits.d by name; earlier directories mask later ones."""
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


def parse_pam_limits(lines: Iterable[Line]) -> PamLimits:
    """The limits that the lines give; lines of files that pam_limits does not read are skipped."""
    files = by_path(lines)
    entries: list[Entry] = []
    exempt: list[tuple[str, str]] = []
    last = ""
    for path in _order(files):
        before = len(entries)
        for line in files[path]:
            words = _SPACE.split(line.text.partition("#")[0].partition("\0")[0].strip(" \t\v\f\r"))
            domain, kind = words[0], words[1].lower() if len(words) > 1 else ""
            if len(words) == 2 and kind[:1] == "-" and domain != "*":
                exempt.append((domain, line.where))
            if len(words) < 4 or domain.startswith("%") or kind not in ("soft", "hard", "-"):
                continue
            item = words[2].lower()
            value = _value(words[3].lower(), item) if item in ITEMS else None
            if value is not None:
                kinds = ("soft", "hard") if kind == "-" else (kind,)
                entries.extend(Entry(domain, one, item, value, line.where) for one in kinds)
        name = path.rpartition("/")[2]
        ours = "/limits.d/" not in path or "nodeready" in name
        if len(entries) > before and not ours and beatable(name):
            last = name
    return PamLimits(tuple(entries), tuple(exempt), last)


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


def _apply(lines: Iterable[Line], limits: dict[str, UnitLimit]) -> bool:
    """Apply one file's [Service] section to ``limits``. Returns whether it sets one of ITEMS."""
    section, sets = "", False
    for line in lines:
        text = line.text.strip()
        if text.startswith("["):
            section = text
        match = re.fullmatch(r"Limit([A-Z]+)\s*=\s*(.*)", text)
        if section != "[Service]" or match is None or match[1].lower() not in ITEMS:
            continue
        sets = True
        if not match[2]:
            limits.pop(match[1].lower(), None)
        limit = _limit(match[2], line.where)
        if limit is not None:
            limits[match[1].lower()] = limit
    return sets


def parse_unit_limits(service: str, path: str, lines: Iterable[Line]) -> Unit:
    """The limits of a service, from the lines of its unit file and drop-ins."""
    files = by_path(lines)
    dropins: dict[str, str] = {}
    for directory in dropin_directories(service):
        for candidate in files:
            parent, _, name = candidate.rpartition("/")
            if parent == directory:
                dropins.setdefault(name, candidate)
    limits: dict[str, UnitLimit] = {}
    _apply(files.get(path, ()), limits)
    last = ""
    for name in sorted(dropins, key=lambda name: name.encode("utf-8", "surrogateescape")):
        sets = _apply(files[dropins[name]], limits)
        if sets and "nodeready" not in name and beatable(name):
            last = name
    return Unit(path, limits, last)


# --- The look at a node's limits, and the processes that have some already.

NR_OPEN = "fs.nr_open"
# A number of /proc/sys has to be read at once, and dash reads byte by byte: so grep reads it.
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
        grep -asHE '^-?session[[:space:]]+requi.*pam_limits' /etc/pam.d/* /usr/lib/pam.d/*
        ;;
    esac
"""


def _script(policy: Policy) -> str:
    services = policy.limit_services
    limits = " ".join(
        f"{directory}/limits.conf {directory}/limits.d/*.conf" for directory in DIRECTORIES
    )
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
    if [ -d /run/systemd/system ]; then printf 'systemd=1\n'; fi
    set --
    {"".join(_service_script(service) for service in services)}
    {scan if services else ""}
    {_CEILING}
    grep -asHnv -e '^[[:space:]]*[#;]' -e '^[[:space:]]*$' {limits} "$@" {_NR_OPEN_FILE}
    :
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
    """

    pam: PamLimits
    units: Mapping[str, Unit]
    running: tuple[Running, ...]
    ceiling: Mapping[str, int]
    nr_open: int | None
    nr_open_boot: sysctl.Boot
    systemd: bool


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


def parse(outputs: Mapping[str, Output], policy: Policy) -> Limits:
    """The observation. Raises ProbeError when a value of the kernel is no number."""
    output = outputs["limits"]
    values = output.values()
    files = by_path(file_lines(output.require()))
    lines = [line for found in files.values() for line in found]
    units: dict[str, Unit] = {}
    for text in output.all("unit"):
        service, _, path = text.partition(" ")
        if service not in policy.limit_services or not path.startswith("/"):
            raise ProbeError("a unit that was not asked for", text)
        units[service] = parse_unit_limits(service, path, lines)
    by_name = {service[:15]: service for service in policy.limit_services}
    running = []
    for text in dict.fromkeys(output.all("process")):
        name, _, pid = text.partition(" ")
        limits = _proc_limits(files.get(f"/proc/{pid}/limits", ()))
        if limits:
            if name[:15] not in by_name:
                raise ProbeError("a process that was not asked for", text)
            running.append(Running(by_name[name[:15]], number(pid, "a process id"), limits))
    own = _proc_limits(files.get(f"/proc/{values.get('ceiling')}/limits", ()))
    strict = re.search(r"^/[^:]*/pam\.d/", output.text, re.M)
    nr_open = files.get(_NR_OPEN_FILE, ())
    return Limits(
        pam=parse_pam_limits(lines),
        units=units,
        running=tuple(running),
        ceiling={item: hard for item, (_, hard) in own.items()} if strict else {},
        nr_open=number(nr_open[0].text, NR_OPEN) if nr_open else None,
        nr_open_boot=sysctl.boot_value(sysctl.parse(outputs["sysctl"]), NR_OPEN),
        systemd="systemd" in values,
    )


PROBE = Probe("limits", (Section("limits", _script), sysctl.SECTION), parse)

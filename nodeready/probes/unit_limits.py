"""The limits that systemd gives to a service: its unit file and its drop-ins.

Rules, from systemd.unit(5) and systemd.exec(5): the unit file of the first directory counts;
drop-ins of all directories are applied by base name, a name that stands in several directories
counts in the first; a later assignment wins, an empty one resets. Drop-ins may also belong to a
prefix (``foo-.service.d`` for foo-bar) or to all services (``service.d``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nodeready.probes.base import Line
from nodeready.probes.last_name import beatable
from nodeready.probes.pam_limits import ITEMS, UNLIMITED

#: Highest priority first, systemd.unit(5), table 1; /lib on a system without merged /usr.
DIRECTORIES = (
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
    limits: item -> the limit that its files set; an item that they do not set is missing
    last:   base name of the last drop-in that is not ours and sets a limit, of those that one
            of ours can follow
    """

    path: str
    limits: Mapping[str, UnitLimit] = field(default_factory=dict)
    last: str = ""


def file_names(service: str) -> tuple[str, ...]:
    """The names under which a service's unit file may stand: an instance has its template's."""
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
        f"{directory}/{name}.d" for name in (*names, "service") for directory in DIRECTORIES
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
    """Apply one file's [Service] section; whether it sets a limit of ours."""
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


def parse(service: str, path: str, lines: Iterable[Line]) -> Unit:
    """What the files of a service set, from the lines of its unit file and drop-ins."""
    by_path: dict[str, list[Line]] = {}
    for line in lines:
        by_path.setdefault(line.path, []).append(line)
    dropins: dict[str, str] = {}
    for directory in dropin_directories(service):
        for candidate in by_path:
            parent, _, name = candidate.rpartition("/")
            if parent == directory:
                dropins.setdefault(name, candidate)
    limits: dict[str, UnitLimit] = {}
    _apply(by_path.get(path, ()), limits)
    last = ""
    for name in sorted(dropins, key=lambda name: name.encode("utf-8", "surrogateescape")):
        sets = _apply(by_path[dropins[name]], limits)
        if sets and "nodeready" not in name and beatable(name):
            last = name
    return Unit(path, limits, last)

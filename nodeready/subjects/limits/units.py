"""The limits of services: systemd's unit files, their drop-ins and the manager's defaults.

Rules, from systemd.unit(5) and systemd.exec(5): the unit file of the first directory counts.
Drop-ins of all directories apply in the order of their base names; of several directories with one
name, the first counts. A later assignment wins, and an empty assignment resets. Drop-ins may also
belong to a prefix (``foo-.service.d`` for foo-bar) or to all services (``service.d``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from nodeready.core.base import Line, by_path, files_by_name
from nodeready.core.own_files import beatable
from nodeready.subjects.limits.limits_conf import ITEMS, UNLIMITED

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
    # item -> the limit that the unit's files set; without items that no file sets
    limits: Mapping[str, UnitLimit] = field(default_factory=dict)
    # base name of the last foreign drop-in with a limit that a drop-in of nodeready can follow; ""
    # for none
    last: str = ""


def file_names(service: str) -> tuple[str, ...]:
    """The file names of a service's unit.

    >>> file_names("getty@tty1")
    ('getty@tty1.service', 'getty@.service')
    """
    template, _, instance = service.partition("@")
    names = (f"{service}.service",)
    return (*names, f"{template}@.service") if instance else names


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
    match = re.fullmatch(r"(\d{1,19})(\.\d{1,9})? ?([KMGTPE]?)B?", text)
    if match is None:
        return None
    factor = _SUFFIXES[match[3]]
    value: int = int(match[1]) * factor + int(float(match[2] or 0) * factor)
    return min(value, UNLIMITED)


def _unit_limit(text: str, source: str) -> UnitLimit | None:
    """The limit of ``BOTH`` or ``SOFT:HARD``; None for a text that systemd ignores."""
    soft_text, colon, hard_text = text.partition(":")
    soft = _size_in_bytes(soft_text.strip())
    hard = _size_in_bytes((hard_text if colon else soft_text).strip())
    return None if soft is None or hard is None else UnitLimit(soft, hard, source)


def _apply_section(
    lines: Iterable[Line],
    limits: dict[str, UnitLimit],
    section_name: str = "[Service]",
    prefix: str = "",
) -> bool:
    """Apply one file's section to ``limits``. Returns whether it sets one of ITEMS.

    prefix: of the keys, before ``Limit``
    """
    section, sets_limit = "", False
    for line in lines:
        text = line.text.strip()
        if text.startswith("["):
            section = text
        match = re.fullmatch(rf"{prefix}Limit([A-Z]+)\s*=\s*(.*)", text)
        if section != section_name or match is None or match[1].lower() not in ITEMS:
            continue
        item, sets_limit = match[1].lower(), True
        if not match[2]:
            limits.pop(item, None)
        limit = _unit_limit(match[2], line.source)
        if limit is not None:
            limits[item] = limit
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
        _apply_section(files.get(path, ()), limits, "[Manager]", "Default")
    return limits

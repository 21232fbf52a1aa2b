"""The lines of limits.conf and limits.d, as pam_limits takes them.

Rules, from limits.conf(5) and Linux-PAM's pam_limits.c: limits.conf comes first, then
limits.d/*.conf in byte order of their names; ``#`` begins a comment anywhere; fields are separated
by any white space (a CR is white space too); within one kind of domain the later line wins; a
user's line beats a group's, which beats ``*``. A line ``DOMAIN -`` exempts that user or group from
all limits, wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from nodeready.probes.base import Line
from nodeready.probes.last_name import beatable

#: The limits of the policy, with the number of kernel units (bytes, descriptors) in one unit of
#: limits.conf: core and memlock are given there in KiB.
ITEMS = {"core": 1024, "memlock": 1024, "nofile": 1}

#: RLIM_INFINITY of the kernel: no limit.
UNLIMITED = 2**64 - 1

#: Distributions with a vendor directory read a file from there unless /etc has one of that name.
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
    last:    base name of the last file of limits.d that is not ours and gives one of ITEMS, of
             those that a file of ours can follow
    """

    entries: tuple[Entry, ...] = ()
    exempt: tuple[tuple[str, str], ...] = ()
    last: str = ""

    def effective(self, domain: str, kind: str, item: str) -> Entry | None:
        """The entry that wins for this domain among its kind; None when no line gives one."""
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
    """limits.conf, then the files of limits.d by name; the first directory masks the others."""
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


def parse(lines: Iterable[Line]) -> PamLimits:
    """The limits that the lines give; lines of other files are passed over."""
    by_path: dict[str, list[Line]] = {}
    for line in lines:
        by_path.setdefault(line.path, []).append(line)
    entries: list[Entry] = []
    exempt: list[tuple[str, str]] = []
    last = ""
    for path in _order(by_path):
        before = len(entries)
        for line in by_path[path]:
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

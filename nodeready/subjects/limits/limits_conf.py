"""The limits of logins: the lines of limits.conf and limits.d, as pam_limits applies them.

Rules, from limits.conf(5) and Linux-PAM's pam_limits.c:

- limits.conf comes first, then limits.d/*.conf in byte order of their names.
- ``#`` begins a comment anywhere; any white space separates fields (a CR is white space, too).
- Within one kind of domain the later line wins. A user's line beats a group's, and a group's beats
  ``*``, in any order of lines.
- A range of uids is a user's line for each uid (``:7`` is uid 7 alone; ``7:`` has no end); ``@``
  before a range makes it a range of gids.
- A line ``DOMAIN -`` exempts that user, group or range from all limits, in any order of lines;
  ``* -`` and ``%group -`` have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from nodeready.core.base import Line, by_path, files_by_name
from nodeready.core.own_files import beatable

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
    # (domain, line) of the lines that exempt a user or group from all limits
    exempt: tuple[tuple[str, str], ...] = ()
    # base name of the last foreign file of limits.d with one of ITEMS that a file of nodeready can
    # follow; "" for none
    last: str = ""

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
    match = _RANGE.fullmatch(domain)
    if match is None:
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
    match = re.match(r"[+-]?\d+", text)
    if match is None:
        return None
    # strtoull ignores the text after the digits, and wraps a negative number around.
    value = int(match[0]) % 2**64 if len(match[0]) < 21 else UNLIMITED
    return min(value * ITEMS[item], UNLIMITED)


def _reading_order(paths: Iterable[str]) -> list[str]:
    """limits.conf, then the files of limits.d by name; earlier directories mask later ones.

    paths: all existing files: an empty file masks, too
    """
    main = files_by_name(DIRECTORIES, paths).get("limits.conf")
    dropins = files_by_name((f"{directory}/limits.d" for directory in DIRECTORIES), paths)
    return [*([main] if main else []), *dropins.values()]


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
                for entry_kind in KINDS if kind == "-" else (kind,):
                    entries.append(LimitEntry(domain, entry_kind, item, value, line.source))
        name = path.rpartition("/")[2]
        is_ours = "/limits.d/" not in path or "nodeready" in name
        if len(entries) > before and not is_ours and beatable(name):
            last = name
    return PamLimits(tuple(entries), tuple(exempt), last)

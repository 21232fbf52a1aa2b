"""Ranges of ports: how they are written, and how they are joined and cut."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: The first and the last port.
Range = tuple[int, int]

#: The kernel's own value of ip_local_port_range (Documentation/networking/ip-sysctl.rst).
KERNEL_EPHEMERAL = (32768, 60999)


def parse_ranges(text: str) -> tuple[Range, ...] | None:
    """``8080,29500-29510`` as ranges; () for none, None when it makes no sense."""
    ranges = []
    for part in filter(None, re.split(r"[,\s]+", text)):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if match is None:
            return None
        ranges.append((int(match[1]), int(match[2] or match[1])))
    return tuple(ranges)


def range_text(first: int, last: int) -> str:
    """A range of ports as text.

    >>> range_text(22, 22), range_text(29500, 29510)
    ('22', '29500-29510')
    """
    return str(first) if first == last else f"{first}-{last}"


def join_ranges(ranges: Iterable[Range]) -> list[Range]:
    """The ranges in their order, overlapping and touching ones as one.

    >>> join_ranges([(5, 6), (1, 2), (3, 4), (9, 9)])
    [(1, 6), (9, 9)]
    """
    joined: list[Range] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def overlap(ranges: Iterable[Range], first: int, last: int) -> tuple[Range, ...]:
    """The parts of the ranges from ``first`` to ``last``.

    >>> overlap([(1, 4), (6, 6), (8, 9)], 3, 8)
    ((3, 4), (6, 6), (8, 8))
    """
    parts = ((max(first, low), min(last, high)) for low, high in ranges)
    return tuple(part for part in parts if part[0] <= part[1])


def without(ports: Range, removed: Iterable[Range]) -> tuple[Range, ...]:
    """The parts of a range that are in none of the removed ranges.

    >>> without((1, 9), [(3, 4), (9, 12)])
    ((1, 2), (5, 8))
    """
    start, parts = ports[0], []
    for first, last in join_ranges(removed):
        parts.append((start, first - 1))
        start = max(start, last + 1)
    return overlap((*parts, (start, ports[1])), *ports)

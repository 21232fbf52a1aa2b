"""Sections of a report that fits on a screen: rows in full, rows in a line, and a count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from nodeready.reports.lines import StyledLine


class RowSection(NamedTuple):
    """Rows of one kind, the most important one first."""

    rows: Sequence[Any]
    full: Callable[[Any], Iterable[StyledLine]]  # makes all lines of a row
    # makes the only line of a row, where there is no room for more
    short: Callable[[Any], StyledLine]
    count_line: Callable[[int], StyledLine]  # makes the line that counts the hidden rows
    max_rows: int = 30  # maximum number of shown rows, unless all rows of all sections are shown
    title: StyledLine | None = None  # the line above the rows, if any


def fitted(
    sections: Sequence[RowSection], room: int, width: int, few: int = 0
) -> Iterator[StyledLine]:
    """The sections in at most ``room`` lines of a screen; 0: without a limit.

    If there is too little room, each section first gets its share of lines, one for each row.
    Lines that are left show the first rows whole.

    few: up to this number of rows in all sections, every row is shown whole
    """
    if not room or sum(len(section.rows) for section in sections) <= few:
        for section in sections:
            yield from _title(section)
            for row in section.rows:
                yield from section.full(row)
        return
    room -= sum(1 for section in sections for _ in _title(section))
    demands = [
        min(len(section.rows), section.max_rows) + (len(section.rows) > section.max_rows)
        for section in sections
    ]
    shares = _shares(demands, room)
    spare = room - sum(shares)
    for section, share in zip(sections, shares):
        yield from _title(section)
        shown = section.rows if len(section.rows) <= share else section.rows[: max(0, share - 1)]
        has_room = True
        for row in shown:
            lines = list(section.full(row)) if has_room else []
            cost = sum(_height(full_line, width) for full_line in lines) - 1
            has_room = has_room and cost <= spare
            if has_room:
                spare -= cost
                yield from lines
            else:
                short_line = section.short(row)
                yield short_line if len(short_line.plain) <= width else short_line.cut(width - 3)
        if len(shown) < len(section.rows) and share:
            yield section.count_line(len(section.rows) - len(shown))


def _title(section: RowSection) -> Iterator[StyledLine]:
    if section.rows and section.title is not None:
        yield section.title


def _height(row: StyledLine, width: int) -> int:
    """Lines of a screen that a line takes: `Screen.show` wraps a long one with an indent."""
    text = row.plain
    if len(text) <= width:
        return 1
    return -(-len(text) // max(20, width - (len(text) - len(text.lstrip()) + 4)))


def _shares(demands: Sequence[int], room: int) -> list[int]:
    """Lines for each section: its demand, or an equal share; the remainder goes to the first.

    >>> _shares([1, 9, 9], 9)
    [1, 4, 4]
    """
    shares = [0] * len(demands)
    while room > 0:
        unmet = [index for index, demand in enumerate(demands) if shares[index] < demand]
        if not unmet:
            break
        share = max(1, room // len(unmet))
        for index in unmet:
            addition = min(share, demands[index] - shares[index], room)
            shares[index] += addition
            room -= addition
    return shares

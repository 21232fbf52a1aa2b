"""Sections of a report that fits on a screen: rows in full, rows in a line, and a count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from nodeready.reports.lines import Line


class Section(NamedTuple):
    """Rows of one kind, the most important one first.

    full, short: the lines of a row, and the one line that it has where there is no room for more
    more:        the line that counts the rows that are not shown
    most:        rows that are shown at most, where anything is left out
    title:       the line above the rows; None: there is none
    """

    rows: Sequence[Any]
    full: Callable[[Any], Iterable[Line]]
    short: Callable[[Any], Line]
    more: Callable[[int], Line]
    most: int = 30
    title: Line | None = None


def fitted(sections: Sequence[Section], room: int, width: int, few: int = 0) -> Iterator[Line]:
    """The sections in at most ``room`` lines of a screen; 0: all of them, without a limit.

    Where not everything has room, every row has one line before one row has several, a section
    gets its share before another one gets more, and the first rows are shown whole.

    few: so many rows in all are always shown whole
    """
    if not room or sum(len(section.rows) for section in sections) <= few:
        for section in sections:
            yield from _titled(section)
            for row in section.rows:
                yield from section.full(row)
        return
    room -= sum(1 for section in sections for _ in _titled(section))
    wanted = [
        min(len(section.rows), section.most) + (len(section.rows) > section.most)
        for section in sections
    ]
    shares = _shares(wanted, room)
    left = room - sum(shares)
    for section, share in zip(sections, shares):
        yield from _titled(section)
        shown = section.rows if len(section.rows) <= share else section.rows[: max(0, share - 1)]
        whole = True
        for row in shown:
            lines = list(section.full(row)) if whole else []
            cost = sum(_height(one, width) for one in lines) - 1
            whole = whole and cost <= left
            if whole:
                left -= cost
                yield from lines
            else:
                one = section.short(row)
                yield one if len(one.plain) <= width else one.cut(width - 3)
        if len(shown) < len(section.rows) and share:
            yield section.more(len(section.rows) - len(shown))


def _titled(section: Section) -> Iterator[Line]:
    if section.rows and section.title is not None:
        yield section.title


def _height(one: Line, width: int) -> int:
    """Lines of a screen that a line takes, where a long one goes on below its own text."""
    text = one.plain
    if len(text) <= width:
        return 1
    return -(-len(text) // max(20, width - (len(text) - len(text.lstrip()) + 4)))


def _shares(wanted: Sequence[int], room: int) -> list[int]:
    """Lines for each: what it wants, or an equal share; what is left over goes to the first."""
    shares = [0] * len(wanted)
    while room > 0:
        open_ = [at for at, want in enumerate(wanted) if shares[at] < want]
        if not open_:
            break
        each = max(1, room // len(open_))
        for at in open_:
            more = min(each, wanted[at] - shares[at], room)
            shares[at] += more
            room -= more
    return shares

"""The columns and the limits of a table on a terminal, and the sections that fit on a screen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from nodeready.core.outcome import FAILED_WORD, INCOMPLETE_WORD, UNREACHABLE_WORD, WORDS, NodeGap
from nodeready.reports.lines import (
    STYLES,
    Part,
    StyledLine,
    line,
    node_set,
    node_set_or_count,
    reasons,
)
from nodeready.reports.registry import PLAIN, Options


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


#: Characters of a node set or of a text that is not cut.
NO_LIMIT = 1_000_000
#: Columns beyond which a node set is cut even where nothing wraps.
MAX_WIDTH = 160
#: Characters of a text from a node that are shown without -v.
MAX_TEXT = 500
#: Columns of a node set without -v, and of one in a short line.
_MAX_NODES, _SHORT_NODES = 60, 30
#: Word of a gap -> its style.
_GAP_STYLES = {UNREACHABLE_WORD: "unreachable", FAILED_WORD: "failed", INCOMPLETE_WORD: "warn"}
#: A reason, and the nodes that have it.
Reason = tuple[str, list[str]]


class TableLayout:
    """The layout of one table."""

    indent = 9  # columns of the words on the left

    def __init__(self, options: Options) -> None:
        self.verbose, self.width = options.verbose, options.width
        # Nothing is cut or left out: -v, a pipe or a file.
        self.is_whole = bool(options.verbose) or not options.lines

    def names(self, names: Iterable[str], room: int = 0) -> tuple[str, str]:
        """A node set, cut after ``room`` columns."""
        return node_set(names, NO_LIMIT if self.is_whole else room or _MAX_NODES), "bold"

    def head(self, word: str, style: str, *parts: Part) -> StyledLine:
        """The first line of a row: its word on the left, in a style of STYLES or ""."""
        return line((f"{word:<{self.indent}}", STYLES.get(style, "")), *parts)

    def sentence(self, *parts: Part) -> StyledLine:
        """A further line of a row in nodeready's words, such as a repair, which is never cut."""
        return line(" " * self.indent, *parts)

    def detail(self, *parts: Part) -> StyledLine:
        """A further line of a row."""
        text = self.sentence(*parts)
        return text if self.is_whole else text.cut(MAX_TEXT)

    def count_line(self, count: int) -> StyledLine:
        """The line that counts the rows that are not shown."""
        return self.detail((f"and {count} more (-v shows them)", "bold"))

    def limited(
        self, rows: Sequence[Any], maximum: int, full: Callable[[Any], Iterable[StyledLine]]
    ) -> Iterator[StyledLine]:
        """The first rows, and the number of the hidden ones; all rows of a whole table."""
        shown = rows if self.is_whole else rows[:maximum]
        for row in shown:
            yield from full(row)
        if len(rows) > len(shown):
            yield self.count_line(len(rows) - len(shown))

    def by_reason(self, word: str, style: str, rows: list[Reason]) -> RowSection:
        """Nodes without a complete answer, a row for each reason."""

        start = f"{word:<{self.indent - 2}}  "

        def full(row: Reason) -> Iterable[StyledLine]:
            names = self.names(row[1], max(20, self.width - len(start)))
            return self.head(start, style, names), self.sentence(row[0])

        def short(row: Reason) -> StyledLine:
            names = node_set_or_count(row[1], _SHORT_NODES)
            return self.head(start, style, (names, "bold"), f"  {row[0]}")

        return RowSection(rows, full, short, self.count_line)

    def gaps(self, gaps: Iterable[NodeGap]) -> list[RowSection]:
        """The nodes without a complete answer: a section for each word, a row for each reason."""
        reasons_of: dict[str, list[tuple[str, str]]] = {word: [] for word in WORDS}
        for gap in gaps:
            reasons_of[gap.gap.word].append((gap.node, gap.reason))
        return [
            self.by_reason(word, _GAP_STYLES[word], reasons(pairs, self.verbose))
            for word, pairs in reasons_of.items()
        ]

    def partial(self) -> StyledLine:
        """The line that says that the report was interrupted."""
        return self.head("partial", "warn", "interrupted: not all nodes answered")


def show_gaps(gaps: Iterable[NodeGap], options: Options = PLAIN) -> Iterator[StyledLine]:
    """The nodes without a complete answer, a row for each reason."""
    return fitted(TableLayout(options).gaps(gaps), 0, options.width)

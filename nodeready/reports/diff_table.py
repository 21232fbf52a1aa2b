"""`diff` on a terminal: the likely cause of failures first, then results, then other changes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from nodeready.core.fact_kinds import COUNTER
from nodeready.core.result import join_first
from nodeready.core.text import counted
from nodeready.reports.lines import STYLES, StyledLine, line, node_set_or_count
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.sections import RowSection, fitted
from nodeready.reports.table_layout import MAX_TEXT, TableLayout
from nodeready.runs.memory.changes import ANSWER, POLICY, REBOOT, RESULT
from nodeready.runs.memory.diff import Diff, FleetChange, Side
from nodeready.runs.memory.facts import shown_value

#: Columns of a node set in a short line.
_SHORT_NODES = 24


class _DiffTable(TableLayout):
    indent = 10

    def __init__(self, diff: Diff, options: Options) -> None:
        super().__init__(options)
        self.diff = diff

    def first_line(self, change: FleetChange) -> StyledLine:
        """The kind, the key, and the values of a change."""
        word, style = change.kind, "change"
        if change.suspect:
            word = style = "suspect"
        elif change.kind == RESULT:
            style = str(change.after) if change.after in STYLES else "unreachable"
        elements = f" ({join_first(change.elements, ', ')})" if change.elements else ""
        first = self.head(word, style, (_subject(change), "bold"), elements, _values(change))
        return first if self.is_whole else first.cut(MAX_TEXT)

    def full(self, change: FleetChange) -> Iterator[StyledLine]:
        yield self.first_line(change)
        counts = ""
        if change.suspect:
            failing, healthy = len(self.diff.failing), self.diff.healthy
            counts = (
                f"  {change.failing} of {failing} failing, {change.healthy} of {healthy} healthy"
            )
        since = f"  since {_minute(change.since)}" if change.since else ""
        yield self.detail(self.names(change.nodes), f"{counts}{since}")

    def short(self, change: FleetChange) -> StyledLine:
        names = node_set_or_count(change.nodes, _SHORT_NODES)
        return self.first_line(change).with_text(f"  {names}")


def _subject(change: FleetChange) -> str:
    if change.key == ANSWER:
        return "the node's answer"
    if change.kind == REBOOT:
        return "boot"
    return f"{change.part} {change.key}" if change.part else change.key


def _values(change: FleetChange) -> str:
    """``  9000 -> 1500  (why)``; of different values only what they have in common."""
    if change.kind in (COUNTER, REBOOT, POLICY) and change.after is None:
        return f"  {change.note}"
    before, after = (shown_value(change.key, value) for value in (change.before, change.after))
    text = f"  {before} -> {after}"
    return f"{text}  ({change.note})" if change.note else text


def _side(side: Side) -> str:
    return f"{side.source} ({_minute(side.time)})" if side.time else side.source


def _minute(moment: str) -> str:
    return moment[:16].replace("T", " ")


def show(diff: Diff, options: Options = PLAIN) -> Iterator[StyledLine]:
    """Suspects, results, then changes of other kinds."""
    table = _DiffTable(diff, options)
    sections = [
        RowSection(list(changes), table.full, table.short, table.count_line)
        for _, changes in groupby(diff.changes, lambda change: (change.suspect, change.kind))
    ]
    end = list(_end(table, diff))
    room = 0 if table.is_whole else max(10, options.lines - len(end))
    yield from fitted(sections, room, options.width)
    yield from end


def _end(table: _DiffTable, diff: Diff) -> Iterator[StyledLine]:
    if diff.changes:
        yield line("")
    for side, names in ((diff.before, diff.only_before), (diff.after, diff.only_after)):
        if names:
            yield line("only in ", side.source, ": ", table.names(names))
    yield line(f"before: {_side(diff.before)}")
    yield line(f"after:  {_side(diff.after)}")
    count = counted(len(diff.changes), "difference") if diff.changes else "no difference"
    yield line(f"{counted(diff.compared, 'node')}, {count}")

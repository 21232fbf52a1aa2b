"""The columns and the limits of a table on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nodeready.core.outcome import FAILED_WORD, INCOMPLETE_WORD, UNREACHABLE_WORD, WORDS, NodeGap
from nodeready.reports.lines import STYLES, Part, StyledLine, line, node_set, node_set_or_count
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.sections import RowSection, fitted
from nodeready.reports.similar_texts import reasons

#: Characters of a node set or of a text that is not cut.
NO_LIMIT = 1_000_000
#: Columns beyond which a node set is cut even where nothing wraps.
MAX_WIDTH = 160
#: Characters of a text from a node that are shown without -v.
MAX_TEXT = 500
#: Columns of a node set in a short line.
_SHORT_NODES = 30
#: Word of a gap -> its style.
_GAP_STYLES = {UNREACHABLE_WORD: "unreachable", FAILED_WORD: "failed", INCOMPLETE_WORD: "warn"}
#: A reason, and the nodes that have it.
Reason = tuple[str, list[str]]


class TableLayout:
    """The layout of one table.

    indent:    columns of the words on the left
    max_nodes: columns of a node set without -v
    is_whole:  nothing is cut or left out: -v, a pipe or a file
    """

    indent = 9
    max_nodes = 60

    def __init__(self, options: Options) -> None:
        self.verbose, self.width = options.verbose, options.width
        self.is_whole = bool(options.verbose) or not options.lines

    def names(self, names: Iterable[str], room: int = 0) -> tuple[str, str]:
        """A node set, cut after ``room`` columns."""
        return node_set(names, NO_LIMIT if self.is_whole else room or self.max_nodes), "bold"

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

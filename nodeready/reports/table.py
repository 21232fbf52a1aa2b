"""The audit on a terminal: failures first with their fix, healthy nodes folded into one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from nodeready.audit import Audit, NodeReport, Outlier
from nodeready.reports.findings import Finding, errors, findings
from nodeready.reports.peers import majority, who
from nodeready.reports.text import STYLES, Line, Part, counted, line, nodes

#: Findings, and outliers, that are shown without -v.
MOST = 30
#: Values of one outlier that are shown without -v.
_VALUES = 4
#: Columns beyond which a node set is cut even where nothing wraps; none under -v.
_WIDEST, _WHOLE = 160, 1_000_000
#: Columns of the words on the left, and at most of the names of checks.
_INDENT, _NAME = 9, 26
#: Characters of a text that are shown without -v.
_TEXT = 500

Row = TypeVar("Row")


class _Table:
    """The layout of one table.

    room:  columns for the names of checks and facts
    alone: there is one node, which is not named again and again
    """

    def __init__(self, audit: Audit, names: Iterable[str], verbose: int, width: int) -> None:
        self.room = min(max(map(len, names), default=0), _NAME)
        self.alone = len(audit.nodes) == 1
        self.verbose, self.width = verbose, min(width, _WIDEST)

    def nodes(self, names: Iterable[str], beside: int) -> str:
        """A node set, cut where it does not fit beside so many columns of other text."""
        return nodes(names, _WHOLE if self.verbose else max(20, self.width - beside))

    def head(self, word: str, name: str, names: Iterable[str], style: str = "") -> Line:
        """``fail     gpus.ecc_errors  gpu[007,019]``."""
        start = (f"{word:<{_INDENT}}", STYLES[style or word])
        if self.alone:
            return line(start, name)
        name = f"{name:<{self.room}}  "
        return line(start, name, (self.nodes(names, _INDENT + len(name)), "bold"))

    def below(self, *parts: Part) -> Line:
        text = line(" " * _INDENT, *parts)
        return text if self.verbose else text.cut(_TEXT)

    def finding(self, one: Finding) -> Iterator[Line]:
        """The row, what was seen, and what repairs it or why it was waived."""
        if self.alone and one.status in ("ok", "na"):
            start = (f"{one.status:<{_INDENT}}", STYLES[one.status])
            yield line(start, f"{one.check:<{self.room}}  {one.text}".rstrip())
            return
        yield self.head(one.status, one.title, one.names)
        if one.text:
            yield self.below(f"e.g. {one.example}: " if one.example else "", one.text)
        if one.status == "waived":
            yield self.below((one.fix, "dim"))
        elif one.fix:
            yield self.below("fix: ", (one.fix, "cyan"))

    def error(self, one: Finding) -> Iterator[Line]:
        """Nodes that could not be looked at, and why."""
        word = f"{one.status:<{_INDENT - 2}}  "
        yield line((word, STYLES[one.status]), (self.nodes(one.names, len(word)), "bold"))
        yield self.below(f"e.g. {one.example}: " if one.example else "", one.text)

    def outlier(self, one: Outlier) -> Iterator[Line]:
        """The fact with who differs, then what the others have."""
        yield self.head("differs", one.fact, one.nodes, "warn")
        rows = list(who(one))
        most = len(rows) if self.verbose or len(rows) <= _VALUES else _VALUES
        said = "; ".join(f"{nodes(names)}: {value}" for names, value in rows[:most])
        more = f"; and {len(rows) - most} more values" if rows[most:] else ""
        yield self.below(rows[0][1] if len(rows) == 1 else f"{said}{more}")
        yield self.below(majority(one))

    def capped(self, rows: list[Row], show: Callable[[Row], Iterable[Line]]) -> Iterator[Line]:
        """Every row, or the first ones with the number of the others."""
        most = len(rows) if self.verbose else MOST
        for row in rows[:most]:
            yield from show(row)
        if rows[most:]:
            yield self.below((f"and {len(rows) - most} more (-v shows them)", "bold"))

    def healthy(self, all_nodes: Iterable[NodeReport]) -> Iterator[Line]:
        """One line for the nodes without a finding, one for those to which nothing applies."""
        fine = [node for node in all_nodes if node.status in ("ok", "waived")]
        passed = [sum(result.status == "ok" for result in node.results) for node in fine]
        least, most = min(passed, default=0), max(passed, default=0)
        some = counted(most, "check") if least == most else f"{least} to {most} checks"
        idle = [node for node in all_nodes if node.status == "na"]
        for word, row, text in (
            ("ok", fine, f"  {some} passed"),
            ("na", idle, "  nothing applies here"),
        ):
            if row:
                names = self.nodes((node.name for node in row), _INDENT + len(text))
                yield line((f"{word:<{_INDENT}}", STYLES[word]), (names, "bold"), text)


def _counts(noun: str, counts: dict[str, int]) -> str:
    shown = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    return f"{counted(sum(counts.values()), noun)}: {shown or 'nothing to show'}"


def show_audit(audit: Audit, verbose: int = 0, width: int = 80) -> Iterator[Line]:
    """What is wrong, the worst first, each with its fix; then what is well, in a line.

    verbose: from 1 on nothing is folded by example or cut, and what is ok or does not apply is
             shown too
    width:   columns that there are for node sets
    """
    every = verbose > 0
    lost = errors(audit, every)
    found = findings(audit, ("fail", "warn", "unknown"), every)
    waived = findings(audit, ("waived",), every)
    rest = findings(audit, ("na", "ok")) if every else []
    names = [one.title for one in (*found, *waived, *rest)]
    table = _Table(audit, [*names, *(one.fact for one in audit.outliers)], verbose, width)
    yield from table.capped(lost, table.error)
    yield from table.capped(found, table.finding)
    yield from table.capped(list(audit.outliers), table.outlier)
    yield from table.capped(waived, table.finding)
    yield from table.capped(rest, table.finding)
    if names or lost or audit.outliers:
        yield line("")
    yield from table.healthy(audit.nodes)
    if not audit.complete:
        yield line(("partial  ", STYLES["warn"]), "interrupted: not all nodes were looked at")
    yield line(_counts("node", audit.summary["nodes"]))
    yield line(_counts("result", audit.summary["results"]))

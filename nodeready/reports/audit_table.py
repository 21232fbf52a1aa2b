"""The tables of `audit` and `ready`: failures first with their fix, then a line for healthy nodes.

On a terminal the table fits on a screen. `ready` shows its go and no-go above the findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nodeready.audit.document import Audit, NodeReport, Outlier, Recorded
from nodeready.reports.lines import STYLES, Line, Part, Safe, fits, grouped, line, nodes
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.sections import Section, fitted
from nodeready.reports.table_layout import MAX_WIDTH, NO_LIMIT, TableLayout
from nodeready.text import counted, sanitise, span

if TYPE_CHECKING:
    from nodeready.audit.document import Ready
from nodeready.reports.findings import Finding, errors, findings, majority, shown, who

#: Values of one outlier that are shown without -v.
_VALUES = 4


#: So many findings of one node are shown whole.
_ALONE = 30

#: Lines of findings in any case.
_LEAST = 12

#: Where the rest of a table is that was cut.
REST = "all of it: -v, | less, or --format json; these nodes again: --limit @last-failed"

#: Columns of the words on the left, and at most of the names of checks.
_INDENT, _NAME = 9, 26


#: Reasons of no-go that are told without -v.
_WHYS = 8


class _AuditTable(TableLayout):
    """The layout of one table.

    room:  columns for the names of checks and facts
    alone: the audit has one node, which no row names
    cut:   a row of the table does not name all its nodes
    """

    def __init__(self, audit: Audit, names: Iterable[str], options: Options) -> None:
        super().__init__(options)
        self.room = min(max(map(len, names), default=0), _NAME)
        self.alone = len(audit.nodes) == 1
        self.width = min(options.width, MAX_WIDTH)
        self.cut = False

    def nodes(self, names: Iterable[str], beside: int) -> str:
        """A node set, cut where it does not fit beside so many columns of other text."""
        return self.names(names, max(20, self.width - beside))[0]

    def bad(self, names: Sequence[str], beside: int) -> str:
        """The same of nodes that are not well."""
        text = self.nodes(names, beside)
        self.cut = self.cut or text.endswith(f"({len(names)} nodes)")
        return text

    def named(self, word: str, name: str, names: Sequence[str], style: str = "") -> Line:
        """``fail     gpus.ecc_errors  gpu[007,019]``."""
        start = (f"{word:<{_INDENT}}", STYLES[style or word])
        if self.alone:
            return line(start, name)
        name = f"{name:<{self.room}}  "
        return line(start, name, (self.bad(names, _INDENT + len(name)), "bold"))

    def short(
        self, word: str, name: str, names: Sequence[str], text: str, style: str = ""
    ) -> Line:
        """A row in one line: its nodes, as far as half of the line goes, and what they say."""
        self.cut = True
        start = (f"{word:<{_INDENT - 2}}  ", STYLES[style or word])
        name = f"{name:<{self.room}}  " if name else ""
        room = max(20, (self.width - _INDENT - len(name)) // 2)
        return line(start, name, (fits(names, room), "bold"), f"  {text}")

    def finding(self, one: Finding) -> Iterator[Line]:
        """A finding: its row, what was observed, and the fix or the reason of the waiver."""
        if self.alone and one.status in ("ok", "na"):
            start = (f"{one.status:<{_INDENT}}", STYLES[one.status])
            yield line(start, f"{one.check:<{self.room}}  {one.text}".rstrip())
            return
        yield self.named(one.status, one.title, one.names)
        yield from self.said(one)
        if one.status == "waived":
            yield self.below((one.fix, "dim"))
        elif one.fix:
            yield self.below("fix: ", (one.fix, "cyan"))

    def said(self, one: Finding) -> Iterator[Line]:
        if one.text:
            yield self.below(one.text)
        if one.example:
            yield self.below("e.g. ", one.example)

    def brief(self, one: Finding) -> Line:
        """A finding in one line."""
        return self.short(one.status, one.title, one.names, one.text or f"e.g. {one.example}")

    def error(self, one: Finding) -> Iterator[Line]:
        """Nodes that could not be looked at, and why."""
        word = f"{one.status:<{_INDENT - 2}}  "
        yield line((word, STYLES[one.status]), (self.bad(one.names, len(word)), "bold"))
        yield from self.said(one)

    def outlier(self, one: Outlier) -> Iterator[Line]:
        """An outlier: the fact with the nodes that differ, then the value of the others."""
        yield self.named("differs", one.fact, list(one.nodes), "warn")
        yield self.below(self.values(one))
        yield self.below(majority(one))

    def values(self, one: Outlier) -> str:
        """The values of those that differ: of many, the first ones."""
        rows = list(who(one))
        most = len(rows) if self.is_whole or len(rows) <= _VALUES else _VALUES
        said = "; ".join(f"{self.nodes(names, 20)}: {value}" for names, value in rows[:most])
        more = f"; and {len(rows) - most} more values" if rows[most:] else ""
        text = rows[0][1] if len(rows) == 1 else f"{said}{more}"
        return Safe(sanitise(text, len(text))) if self.is_whole else text

    def apart(self, one: Outlier) -> Line:
        """An outlier in one line."""
        text = f"not {shown(one.majority)}: {self.values(one)}"
        return self.short("differs", one.fact, list(one.nodes), text, "warn")

    def more(self, count: int) -> Line:
        self.cut = True
        return super().more(count)

    def section(self, rows: Sequence[Any], kind: str = "") -> Section:
        """Rows of one kind: findings, errors or outliers."""
        if kind == "differs":
            return Section(rows, self.outlier, self.apart, self.more)
        if kind == "error":
            return Section(rows, self.error, self.brief, self.more)
        return Section(rows, self.finding, self.brief, self.more)

    def healthy(self, all_nodes: Iterable[NodeReport]) -> Iterator[Line]:
        """One line for the nodes without a finding, one for those to which nothing applies."""
        fine, passed, idle = list[str](), set[int](), list[str]()
        for node in all_nodes:
            if node.status in ("ok", "waived"):
                fine.append(node.name)
                passed.add(node.statuses["ok"])
            elif node.status == "na":
                idle.append(node.name)
        least, most = min(passed, default=0), max(passed, default=0)
        some = counted(most, "check") if least == most else f"{least} to {most} checks"
        for word, row, text in (
            ("ok", fine, f"  {some} passed"),
            ("na", idle, "  nothing applies here"),
        ):
            if row:
                names = self.nodes(row, _INDENT + len(text))
                yield line((f"{word:<{_INDENT}}", STYLES[word]), (names, "bold"), text)


def _counts(noun: str, counts: dict[str, int]) -> str:
    shown = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    return f"{counted(sum(counts.values()), noun)}: {shown or 'nothing to show'}"


def show_audit(audit: Audit, options: Options = PLAIN) -> Iterator[Line]:
    """The findings, the worst first, each with its fix; then a line for the healthy nodes.

    With ``verbose`` nothing is folded by example or cut, and the results ok and na are shown, too.
    """
    every = options.verbose > 0
    lost = errors(audit, every)
    found = findings(audit, ("fail", "unknown", "warn"), every)
    waived = findings(audit, ("waived",), every)
    rest = findings(audit, ("na", "ok")) if every else []
    names = [one.title for one in (*found, *waived, *rest)]
    table = _AuditTable(audit, [*names, *(one.fact for one in audit.outliers)], options)
    tail = [line("")] if names or lost or audit.outliers else []
    tail += table.healthy(audit.nodes)
    if not audit.complete:
        tail.append(
            line(("partial  ", STYLES["warn"]), "interrupted: not all nodes were looked at")
        )
    if audit.recorded is not None:
        tail += _recorded(audit, audit.recorded, options.verbose)
    tail.append(line(_counts("node", audit.summary["nodes"])))
    tail.append(line(_counts("result", audit.summary["results"])))
    sections = [
        table.section(lost, "error"),
        table.section(found),
        table.section(audit.outliers, "differs"),
        table.section(waived),
        table.section(rest),
    ]
    room = 0 if every or not options.lines else max(_LEAST, options.lines - len(tail) - 1)
    # One node's findings are all worth their lines.
    yield from fitted(sections, room, options.width, _ALONE if table.alone else 0)
    yield from tail
    if table.cut:
        yield line((REST, "dim"))


def _recorded(audit: Audit, found: Recorded, verbose: int) -> Iterator[Line]:
    """From where the verdicts are, and how old; with ``verbose`` that of each node."""
    if verbose:
        ages = (
            (span(max(0.0, node.age_s)), node) for node in audit.nodes if node.age_s is not None
        )
        for age, names in grouped((age, node.name) for age, node in ages):
            yield line(
                (f"{'age':<{_INDENT}}", "bold"), f"{age}  ", (nodes(names, NO_LIMIT), "bold")
            )
    said = f"recorded: {counted(found.believed, 'node')} of {len(audit.nodes)} in {found.source}"
    if found.newest_s is not None and found.oldest_s is not None:
        said += f", newest {span(found.newest_s)}, oldest {span(found.oldest_s)} old"
    rest = len(audit.nodes) - found.believed - found.stale - found.missing
    more = ((found.stale, "stale"), (found.missing, "without a verdict"), (rest, "not believed"))
    bad = ", ".join(f"{number} {word}" for number, word in more if number)
    yield line(f"{said}; {bad}" if bad else said)


def show_ready(ready: Ready, options: Options = PLAIN) -> Iterator[Line]:
    """The nodes that are ready, the others with their reasons, then the findings of the audit."""
    head = list(_go(ready, options))
    yield from head
    left = max(_LEAST, options.lines - len(head)) if options.lines else 0
    yield from show_audit(ready.audit, replace(options, lines=left))


def _go(ready: Ready, options: Options) -> Iterator[Line]:
    """Who is ready, who is not, and whether that is enough."""
    whole = bool(options.verbose) or not options.lines
    room = NO_LIMIT if whole else min(options.width, MAX_WIDTH) - _INDENT
    for word, style, names in (("GO", "ok", ready.go), ("NO-GO", "fail", ready.no_go)):
        if names:
            count = counted(len(names), "node")
            text = nodes(names, max(20, room - len(count) - 2))
            yield line((f"{word:<{_INDENT}}", STYLES[style]), (text, "bold"), f"  {count}")
    if ready.no_go:
        yield from _why(ready, whole, room)
    if ready.needed is not None:
        word, style = ("enough", "ok") if ready.enough else ("too few", "fail")
        yield line((f"{word:<{_INDENT}}", STYLES[style]), f"{ready.needed} needed")
    yield line("")


def _why(ready: Ready, whole: bool, room: int) -> Iterator[Line]:
    """A line for each set of checks that stops nodes; the findings below have their texts."""
    pairs = (
        (", ".join(dict.fromkeys(reason.partition(":")[0] for reason in reasons)), name)
        for name, reasons in ready.no_go.items()
    )
    rows = grouped(pairs)
    most = len(rows) if whole else _WHYS
    for checks, names in rows[:most]:
        shown = nodes(names, NO_LIMIT) if whole else fits(names, max(20, room // 3))
        who_: list[Part] = [] if len(rows) == 1 else [(shown, "bold"), "  "]
        text = line(" " * _INDENT, *who_, checks)
        yield text if whole or len(rows) == 1 else text.cut(_INDENT + room - 3)
    if rows[most:]:
        yield line(" " * _INDENT, (f"and {len(rows) - most} more (-v shows them)", "bold"))

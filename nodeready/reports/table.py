"""An audit on a terminal: failures first with their fix, healthy nodes folded into one line.

Equal findings stand once with all their nodes, and findings that differ by numbers alone stand as
one example: a thousand nodes with a thousand numbers in one check are one row. `ready` shows its
go and no-go above the findings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from nodeready.audit.document import Audit, NodeReport, Outlier
from nodeready.reports.registry import (
    PLAIN,
    STYLES,
    Line,
    Options,
    Part,
    grouped,
    line,
    nodes,
    told,
)
from nodeready.subjects.registry import OBSERVED, SUBJECTS, check_ids
from nodeready.text import counted

if TYPE_CHECKING:
    from nodeready.audit.document import Ready

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
#: So many different texts of one check are all shown; of more, an example.
_APART = 3
#: So many different reasons why nodes could not be looked at are all shown; of more, an example.
_REASONS = 6
#: Reasons of no-go that are told without -v.
_WHYS = 8
_WORD = re.compile(r"[\w.:]+")
_DIGIT = re.compile(r"\d")

#: The text of a finding, and its fix.
Said = tuple[str, str]
Row = TypeVar("Row")


@dataclass(frozen=True)
class Finding:
    """One row of a report.

    text:    what is, what should be, where it comes from
    names:   the nodes
    example: the node whose text this is, where other nodes have a similar text; "": all nodes
             have just this text
    also:    how many more checks of the subject have the same text
    """

    status: str
    check: str
    text: str
    fix: str
    names: tuple[str, ...]
    example: str = ""
    also: int = 0

    @property
    def title(self) -> str:
        """The check, and how many more."""
        return f"{self.check} and {self.also} more" if self.also else self.check


def _places() -> dict[str, float]:
    """Check id -> its place in the reports."""
    places: dict[str, float] = {check: place for place, check in enumerate(check_ids())}
    for name, subject in SUBJECTS.items():
        first = min((places[check] for check in subject.ids()), default=0.0)
        places[f"{name}.{OBSERVED}"] = first - 0.5
    return places


def _shape(said: Said) -> tuple[str, ...]:
    """The texts with a ``#`` for every word that has a digit in it: numbers, devices, lines."""
    return tuple(
        _WORD.sub(lambda word: "#" if _DIGIT.search(word[0]) else word[0], text) for text in said
    )


def _folded(
    said: dict[Said, list[str]], apart: int, every: bool
) -> Iterator[tuple[Said, list[str], str]]:
    """The findings of one check in few rows: (text and fix, nodes, example)."""
    rows = sorted(said.items(), key=lambda row: -len(row[1]))
    if every or len(rows) <= apart:
        yield from ((one, names, "") for one, names in rows)
        return
    alike: dict[tuple[str, ...], list[tuple[Said, list[str]]]] = {}
    for row in rows:
        alike.setdefault(_shape(row[0]), []).append(row)
    groups = list(alike.values()) if len(alike) <= apart else [rows]
    for group in groups:
        first, names = group[0]
        example = names[0] if len(group) > 1 else ""
        yield first, [name for _, some in group for name in some], example


def findings(audit: Audit, statuses: Iterable[str], every: bool = False) -> list[Finding]:
    """The results of these statuses, in that order, then in the order of the subjects.

    every: fold only what is equal
    """
    wanted = {status: rank for rank, status in enumerate(statuses)}
    found: dict[tuple[str, str], dict[Said, list[str]]] = {}
    for node in audit.nodes:
        for result in node.results:
            if result.status in wanted:
                said = found.setdefault((result.status, result.check), {})
                said.setdefault((told(result), result.fix), []).append(node.name)
    places = _places()
    order = sorted(
        found, key=lambda key: (wanted[key[0]], places.get(key[1], len(places)), key[1])
    )
    rows = [
        Finding(status, check, text, fix, tuple(names), example)
        for status, check in order
        for (text, fix), names, example in _folded(found[status, check], _APART, every)
    ]
    return rows if every else _together(rows)


def _together(rows: list[Finding]) -> list[Finding]:
    """The rows, with the unknown results of one subject and one reason as one row.

    The row has the id of the first of these checks: a tool that hangs leaves a dozen unknown.
    """
    alike: dict[tuple[object, ...], list[Finding]] = {}
    for number, row in enumerate(rows):
        subject = row.check.partition(".")[0]
        alone = row.status != "unknown"
        key = (number,) if alone else (subject, row.text, row.names, row.example)
        alike.setdefault(key, []).append(row)
    return [replace(first, also=len(more)) if more else first for first, *more in alike.values()]


def errors(audit: Audit, every: bool = False) -> list[Finding]:
    """The nodes that could not be looked at, with the reason; the most nodes first."""
    pairs = (
        ((node.status, node.error.removeprefix(f"{node.name}: ")), node.name)
        for node in audit.nodes
        if node.error
    )
    found: dict[str, dict[Said, list[str]]] = {}
    for (status, text), names in grouped(pairs):
        found.setdefault(status, {})[text, ""] = names
    return [
        Finding(status, "", text, "", tuple(names), example)
        for status in sorted(found, reverse=True)
        for (text, _), names, example in _folded(found[status], _REASONS, every)
    ]


def shown(value: Any) -> str:
    """A fact's value; a node that has no such thing has "none"."""
    return "none" if value is None else str(value)


def majority(outlier: Outlier) -> str:
    """The value of most nodes of the group: ``61 nodes of h100: 535.161.08``."""
    return f"{counted(outlier.count, 'node')} of {outlier.group}: {shown(outlier.majority)}"


def differing(outlier: Outlier, name: str) -> str:
    """The value of one node that differs, and the value of most nodes of its group."""
    return f"{outlier.fact} is {shown(outlier.nodes[name])}; {majority(outlier)}"


def who(outlier: Outlier) -> Iterator[tuple[list[str], str]]:
    """The nodes that differ, by their value; the most nodes first."""
    for value, names in grouped((shown(value), name) for name, value in outlier.nodes.items()):
        yield names, value


def told_outlier(outlier: Outlier, limit: int = 4) -> str:
    """One line: ``gpus.driver gpu017: 535.129.03; 61 nodes of h100: 535.161.08``."""
    rows = [f"{nodes(names)}: {value}" for names, value in who(outlier)]
    more = [f"and {len(rows) - limit} more values"] if len(rows) > limit else []
    return "; ".join([f"{outlier.fact} {rows[0]}", *rows[1:limit], *more, majority(outlier)])


class _Table:
    """The layout of one table.

    room:  columns for the names of checks and facts
    alone: the audit has one node, which no row names
    """

    def __init__(self, audit: Audit, names: Iterable[str], options: Options) -> None:
        self.room = min(max(map(len, names), default=0), _NAME)
        self.alone = len(audit.nodes) == 1
        self.verbose, self.width = options.verbose, min(options.width, _WIDEST)

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
        """A finding: its row, what was observed, and the fix or the reason of the waiver."""
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
        """An outlier: the fact with the nodes that differ, then the value of the others."""
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


def show_audit(audit: Audit, options: Options = PLAIN) -> Iterator[Line]:
    """The findings, the worst first, each with its fix; then a line for the healthy nodes.

    With ``verbose`` nothing is folded by example or cut, and the results ok and na are shown, too.
    """
    every = options.verbose > 0
    lost = errors(audit, every)
    found = findings(audit, ("fail", "warn", "unknown"), every)
    waived = findings(audit, ("waived",), every)
    rest = findings(audit, ("na", "ok")) if every else []
    names = [one.title for one in (*found, *waived, *rest)]
    table = _Table(audit, [*names, *(one.fact for one in audit.outliers)], options)
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


def show_ready(ready: Ready, options: Options = PLAIN) -> Iterator[Line]:
    """The nodes that are ready, the others with their reasons, then the findings of the audit."""
    room = options.width - _INDENT
    if ready.go:
        count = counted(len(ready.go), "node")
        names = nodes(ready.go, max(20, room - len(count) - 2))
        yield line((f"{'GO':<{_INDENT}}", STYLES["ok"]), (names, "bold"), f"  {count}")
    if ready.no_go:
        count = counted(len(ready.no_go), "node")
        names = nodes(ready.no_go, max(20, room - len(count) - 2))
        yield line((f"{'NO-GO':<{_INDENT}}", STYLES["fail"]), (names, "bold"), f"  {count}")
        yield from _why(ready, options.verbose, room)
    if ready.needed is not None:
        word, style = ("enough", "ok") if ready.enough else ("too few", "fail")
        yield line((f"{word:<{_INDENT}}", STYLES[style]), f"{ready.needed} needed")
    yield line("")
    yield from show_audit(ready.audit, options)


def _why(ready: Ready, verbose: int, room: int) -> Iterator[Line]:
    """A line for each set of checks that stops nodes; the findings below have their texts."""
    pairs = (
        (", ".join(dict.fromkeys(reason.partition(":")[0] for reason in reasons)), name)
        for name, reasons in ready.no_go.items()
    )
    rows = grouped(pairs)
    most = len(rows) if verbose else _WHYS
    for checks, names in rows[:most]:
        shown = nodes(names, max(20, room // 3))
        if len(rows) == 1:
            yield line(" " * _INDENT, checks)
        else:
            yield line(" " * _INDENT, (shown, "bold"), f"  {checks}")
    if rows[most:]:
        yield line(" " * _INDENT, (f"and {len(rows) - most} more (-v shows them)", "bold"))

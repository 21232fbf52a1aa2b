"""The findings of an audit with their nodes: one row where they differ by numbers alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nodeready.audit.document import Audit, Outlier
from nodeready.reports.lines import grouped, nodes, told
from nodeready.reports.similar_texts import Alike, Texts, alike
from nodeready.subjects.registry import OBSERVED, SUBJECTS, check_ids
from nodeready.text import counted

if TYPE_CHECKING:
    pass

#: So many different reasons why nodes could not be looked at are all shown; of more, an example.
_REASONS = 6


@dataclass(frozen=True)
class Finding:
    """One row of a report.

    text:    what is, what should be, where it comes from; where the nodes differ in numbers, the
             least and the most; "" where they differ in more
    names:   the nodes
    example: one of the nodes, and its text, where ``text`` does not tell what one node says; ""
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


def _found(status: str, check: str, row: Alike) -> Finding:
    """The row of nodes that say the same, or nearly the same, of one check."""
    text, fix = row.said or ("", row.instance[1])
    example = f"{row.example}: {row.instance[0]}" if row.example else ""
    if not row.said:
        example += f" (one of {row.texts} texts)"
    return Finding(status, check, text, fix, tuple(row.names), example)


def _rows(pairs: list[tuple[Texts, str]], every: bool, reasons: int = 0) -> list[Alike]:
    """The findings of one check in few rows; ``reasons``: that many different ones stay apart."""
    if every:
        return [Alike(said, names) for said, names in grouped(pairs)]
    return alike(pairs, reasons, reasons=True) if reasons else alike(pairs)


def findings(audit: Audit, statuses: Iterable[str], every: bool = False) -> list[Finding]:
    """The results of these statuses, in that order; the most nodes first, but of what is well, in
    the order of the subjects.

    every: fold only what is equal
    """
    wanted = {status: rank for rank, status in enumerate(statuses)}
    found: dict[tuple[str, str], list[tuple[Texts, str]]] = {}
    for node in audit.nodes:
        for result in node.results:
            if result.status in wanted:
                pairs = found.setdefault((result.status, result.check), [])
                pairs.append(((told(result), result.fix), node.name))
    places = _places()
    order = sorted(
        found,
        key=lambda key: (
            wanted[key[0]],
            0 if key[0] in ("ok", "na") else -len(found[key]),
            places.get(key[1], len(places)),
            key[1],
        ),
    )
    rows = [
        _found(status, check, row)
        for status, check in order
        for row in _rows(found[status, check], every)
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
    found: dict[str, list[tuple[Texts, str]]] = {}
    for node in audit.nodes:
        if node.error:
            text = node.error.removeprefix(f"{node.name}: ")
            found.setdefault(node.status, []).append(((text, ""), node.name))
    return [
        _found(status, "", row)
        for status in sorted(found, reverse=True)
        for row in _rows(found[status], every, _REASONS)
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

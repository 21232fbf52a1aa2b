"""The findings of an audit, folded: equal ones once with their nodes, alike ones by an example.

A thousand nodes with a thousand different numbers in one check are one finding.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from nodeready.audit import Audit
from nodeready.reports.text import grouped, told
from nodeready.subjects import OBSERVED, SUBJECTS

#: Different texts of one check that are all shown; of more, an example.
_APART = 3
#: The same for the reasons why nodes could not be looked at.
_REASONS = 6
_WORD = re.compile(r"[\w.:]+")
_DIGIT = re.compile(r"\d")

Said = tuple[str, str]


@dataclass(frozen=True)
class Finding:
    """One row of a report.

    text:    what is, what should be, where it comes from
    names:   the nodes
    example: "" when all of them say just this, else the node that says it: the others say
             something like it
    also:    how many more checks of the subject say the same
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


def _places(subjects: Collection[str]) -> dict[str, int]:
    """Check id -> its place in the reports, of these subjects: what was not seen stands first."""
    chosen = [subject for name, subject in SUBJECTS.items() if name in subjects]
    ids = (check for one in chosen for check in (f"{one.name}.{OBSERVED}", *one.ids()))
    return {check: place for place, check in enumerate(ids)}


def _shape(said: Said) -> tuple[str, ...]:
    """The texts with a ``#`` for every word that has a digit in it: numbers, devices, lines."""
    return tuple(
        _WORD.sub(lambda word: "#" if _DIGIT.search(word[0]) else word[0], text) for text in said
    )


def _folded(
    said: dict[Said, list[str]], apart: int, every: bool
) -> Iterator[tuple[Said, list[str], str]]:
    """What was said, as few rows as it takes: (text and fix, nodes, example)."""
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
    places = _places({check.partition(".")[0] for _, check in found})
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
    """What could not be observed for one and the same reason stands once, with the first check.

    A tool that hangs leaves a dozen checks unknown: one row says so.
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

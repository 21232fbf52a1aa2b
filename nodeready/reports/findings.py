"""The findings of an audit with their nodes: one row where they differ by numbers alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from nodeready.agent.audit_document import Audit, Outlier
from nodeready.core.result import Result, fix_text, result_text
from nodeready.core.text import counted
from nodeready.reports.lines import SimilarTexts, Texts, cost_text, fold_similar, grouped, node_set
from nodeready.subjects.registry import OBSERVED, SUBJECTS

#: Maximum different reasons why nodes could not be probed; of more, an example is shown.
_MAX_REASONS = 6


@dataclass(frozen=True)
class AuditFinding:
    status: str
    check: str
    # the value, the expected value, the source; where the nodes differ in numbers, the minimum and
    # the maximum; "" where they differ in more
    text: str
    fix: str
    names: tuple[str, ...]  # the nodes
    example: str = ""  # one of the nodes, and its text, where no single node has ``text``; else ""
    also: int = 0  # number of further checks of the subject with the same text
    severity: str = ""  # what the finding costs a job; "": its check declares nothing

    @property
    def title(self) -> str:
        """The check, and the number of further ones."""
        return f"{self.check} and {self.also} more" if self.also else self.check

    @property
    def cost(self) -> str:
        return cost_text(self.severity, self.status)


@cache
def _places() -> dict[str, tuple[int, int]]:
    """Check id -> the places of its subject and of itself in the reports."""
    places: dict[str, tuple[int, int]] = {}
    for number, (name, subject) in enumerate(SUBJECTS.items()):
        ids = (name, f"{name}.{OBSERVED}", *subject.ids())
        places |= {check: (number, place) for place, check in enumerate(ids)}
    return places


def _place(check: str) -> tuple[int, int]:
    """The place of a check. A check of the policy comes last in its subject."""
    number, _ = _places().get(check.partition(".")[0], (len(SUBJECTS), 0))
    return _places().get(check, (number, len(_places())))


def _finding_of(status: str, check: str, row: SimilarTexts, severity: str = "") -> AuditFinding:
    """The finding of nodes with similar texts of one check."""
    text, fix = row.shared_texts or ("", row.instance[1])
    example = f"{row.example}: {row.instance[0]}" if row.example else ""
    if not row.shared_texts:
        example += f" (one of {row.variants} texts)"
    return AuditFinding(status, check, text, fix, tuple(row.names), example, severity=severity)


def _rows(pairs: list[tuple[Texts, str]], every: bool, reasons: int = 0) -> list[SimilarTexts]:
    """The findings of one check in few rows. reasons: 0, or the maximum rows of errors"""
    if every:
        return [SimilarTexts(texts, names) for texts, names in grouped(pairs)]
    return fold_similar(pairs, reasons, reasons=True) if reasons else fold_similar(pairs)


def findings(audit: Audit, statuses: Iterable[str], every: bool = False) -> list[AuditFinding]:
    """The results of these statuses, in that order; the worst severity first, and of one severity
    those of most nodes. ok and na are in the order of the subjects. every: fold only equal texts
    """
    order_of = {status: rank for rank, status in enumerate(statuses)}
    pairs_of: dict[tuple[str, str], list[tuple[Texts, str]]] = {}
    first_of: dict[tuple[str, str], Result] = {}
    for node in audit.nodes:
        for result in node.results:
            if result.status in order_of:
                kind = result.status, result.check
                pairs = pairs_of.setdefault(kind, [])
                pairs.append(((result_text(result), fix_text(result)), node.name))
                first_of.setdefault(kind, result)

    def order(kind: tuple[str, str]) -> tuple[object, ...]:
        status, check = kind
        count = 0 if status in ("ok", "na") else -len(pairs_of[kind])
        return order_of[status], first_of[kind].rank[1], count, _place(check), check

    kinds = (
        (kind, row) for kind in sorted(pairs_of, key=order) for row in _rows(pairs_of[kind], every)
    )
    rows = [_finding_of(*kind, row, first_of[kind].severity) for kind, row in kinds]
    return rows if every else _merge_unknown(rows)


def _merge_unknown(rows: list[AuditFinding]) -> list[AuditFinding]:
    """The rows, with the unknown results of one subject and one reason as one row.

    A tool that hangs leaves a dozen checks unknown: the row has the id of the first one.
    """
    groups: dict[tuple[object, ...], list[AuditFinding]] = {}
    for index, row in enumerate(rows):
        subject = row.check.partition(".")[0]
        is_unknown = row.status == "unknown"
        key = (subject, row.text, row.names, row.example) if is_unknown else (index,)
        groups.setdefault(key, []).append(row)
    return [replace(first, also=len(further)) for first, *further in groups.values()]


#: The fix of a finding that a deploy repairs; the subject.
_DEPLOY = re.compile(r"nodeready deploy INVENTORY --only (\w+)")


def fold_fixes(rows: list[AuditFinding]) -> tuple[list[AuditFinding], list[str]]:
    """The rows without repeated fixes; the subjects for a deploy. All findings that a deploy
    repairs share one command, which no row shows. Of consecutive equal fixes, the last stays.
    """
    subjects: dict[str, None] = {}
    folded: list[AuditFinding] = []
    next_fix = ""
    for row in reversed(rows):
        deploy = _DEPLOY.fullmatch(row.fix)
        if deploy:
            subjects[deploy[1]] = None
        folded.append(replace(row, fix="") if deploy or row.fix == next_fix else row)
        next_fix = row.fix
    names = [name for name in SUBJECTS if name in subjects]
    return folded[::-1], names


def errors(audit: Audit, every: bool = False) -> list[AuditFinding]:
    """The nodes that could not be probed, by the reason, that of most nodes first."""
    pairs_of: dict[str, list[tuple[Texts, str]]] = {}
    for gap in audit.gaps:
        text = gap.reason.removeprefix(f"{gap.node}: ")
        pairs_of.setdefault(gap.gap.word, []).append(((text, ""), gap.node))
    return [
        _finding_of(status, "", row)
        for status in sorted(pairs_of, reverse=True)
        for row in _rows(pairs_of[status], every, _MAX_REASONS)
    ]


def value_text(value: Any) -> str:
    """The value of a fact; "none" where the node has no such thing."""
    return "none" if value is None else str(value)


def majority(outlier: Outlier) -> str:
    """The value of most nodes of the group: ``61 nodes of h100: 535.161.08``."""
    return f"{counted(outlier.count, 'node')} of {outlier.group}: {value_text(outlier.majority)}"


def differing(outlier: Outlier, name: str) -> str:
    """The value of one node that differs, and the value of most nodes of its group."""
    return f"{outlier.fact} is {value_text(outlier.nodes[name])}; {majority(outlier)}"


def nodes_by_value(outlier: Outlier) -> Iterator[tuple[list[str], str]]:
    """The nodes that differ, by their value; the most nodes first."""
    values = ((value_text(value), name) for name, value in outlier.nodes.items())
    yield from ((names, value) for value, names in grouped(values))


def outlier_line(outlier: Outlier, limit: int = 4) -> str:
    """One line: ``gpus.driver gpu017: 535.129.03; 61 nodes of h100: 535.161.08``."""
    rows = [f"{node_set(names)}: {value}" for names, value in nodes_by_value(outlier)]
    hidden = [f"and {len(rows) - limit} more values"] if len(rows) > limit else []
    return "; ".join([f"{outlier.fact} {rows[0]}", *rows[1:limit], *hidden, majority(outlier)])

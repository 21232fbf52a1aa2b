"""The parts of a node and their faults as a page to print, for the vendor of the node.

The page has what `node_parts` has, and the findings about these parts: it can leave the site.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from nodeready import __version__
from nodeready.audit.document import Audit, NodeReport
from nodeready.reports.html_page import HtmlPage
from nodeready.reports.lines import node_set
from nodeready.reports.node_parts import PART_TABLES, observed_facts
from nodeready.reports.registry import PLAIN, Options
from nodeready.subjects.result import STATUSES, Result

#: The subjects of parts that have a vendor.
_SUBJECTS = ("gpus", "rdma", "nics")
#: Maximum nodes of a page.
_NODES = 64
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(\.\d{1,3}){3}(?![\w.]\w)")


@dataclass(frozen=True)
class _NodeEvidence:
    """What the page has of one node.

    hidden: number of findings that are not about a part
    tables: heading, columns and rows; a column without a value is left out
    """

    node: NodeReport
    findings: tuple[Result, ...]
    hidden: int
    tables: tuple[tuple[str, list[str], list[list[str]]], ...]


def _evidence(node: NodeReport, moment: str) -> _NodeEvidence:
    bad = sorted(
        (result for result in node.results if result.bad),
        key=lambda result: STATUSES.index(result.status),
    )
    findings = [result for result in bad if result.check.partition(".")[0] in _SUBJECTS]
    facts, tables = observed_facts(node.facts, moment), []
    for table in PART_TABLES:
        rows = table.rows(facts)
        used = [index for index in range(len(table.columns)) if any(row[index] for row in rows)]
        heads = list(table.columns)
        if rows:
            cells = [[row[index] for index in used] for row in rows]
            tables.append((table.name, [heads[index] for index in used], cells))
    return _NodeEvidence(node, tuple(findings), len(bad) - len(findings), tuple(tables))


def _without_addresses(text: str) -> str:
    return _ADDRESS.sub("ADDRESS", text)


@cache
def page() -> HtmlPage:
    """The page of evidence."""
    return HtmlPage("evidence_page", VERSION=__version__, site_free=_without_addresses)


def render(audit: Audit, options: Options = PLAIN) -> Iterator[str]:
    """The page, in pieces: every node on paper of its own."""
    nodes = audit.nodes[:_NODES]
    yield from page().render(
        title=f"{node_set(node.name for node in nodes)}: evidence",
        audit=audit,
        nodes=(_evidence(node, audit.started) for node in nodes),
        hidden=len(audit.nodes) - len(nodes),
    )

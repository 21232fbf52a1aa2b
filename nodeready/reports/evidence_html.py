"""The parts of a node and their faults as a page to print, for the vendor of the node.

The page has what `node_parts` has, and the findings about these parts: it can leave the site.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import compress, islice
from operator import attrgetter

from nodeready import __version__
from nodeready.agent.audit_document import Audit, NodeReport
from nodeready.core.result import COUNTER, HARDWARE, VERSION, fix_text
from nodeready.reports.html_page import HtmlPage
from nodeready.reports.lines import node_set
from nodeready.reports.node_parts import PART_TABLES, observed_facts
from nodeready.reports.registry import PLAIN, Options
from nodeready.runs.memory.changes import REBOOT, RESULT
from nodeready.runs.memory.history import PART, HistoryEntry

#: The subjects of parts that have a vendor.
_SUBJECTS = ("gpus", "rdma", "nics")
_PARTS = tuple(f"{subject}." for subject in _SUBJECTS)
#: The kinds of entries of a history that name no user, no job and no setting of the site.
_KINDS = (HARDWARE, VERSION, REBOOT, PART)
#: Maximum nodes of a page, and entries of a node's history.
_NODES, _ENTRIES = 64, 200
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\d|\.\d)")
#: Also a MAC or PCI address and a GUID, which stay.
_MAYBE_IPV6 = re.compile(r"(?<![\w.:])[0-9A-Fa-f]*:[0-9A-Fa-f:]+(?![\w:])")


def _history(entries: Iterable[HistoryEntry]) -> Iterator[tuple[str, str, str]]:
    """The entries about parts, versions and boots."""
    for entry in entries:
        is_about_part = bool(entry.serial) or entry.text.startswith(_PARTS)
        if entry.kind in _KINDS or (entry.kind == COUNTER and is_about_part):
            until = f", until {entry.until}" if entry.until else ""
            serial = f"{entry.serial}: " if entry.serial else ""
            yield entry.time, entry.kind, f"{serial}{entry.text}{until}"
        elif entry.kind == RESULT and entry.checks[0].partition(".")[0] in _SUBJECTS:
            yield entry.time, entry.kind, _shown(entry.text, entry.checks[0])


def _evidence(node: NodeReport, moment: str, entries: Iterable[HistoryEntry]) -> dict[str, object]:
    """What the page has of one node, for its template."""
    bad = sorted(filter(attrgetter("bad"), node.results), key=attrgetter("rank"))
    findings = [result for result in bad if result.check.partition(".")[0] in _SUBJECTS]
    facts, tables = observed_facts(node.facts, moment), []
    for table in PART_TABLES:
        rows = table.rows(facts)
        # A column without a value is left out.
        used = [any(column) for column in zip(*rows)]
        if rows:
            cells = [list(compress(row, used)) for row in rows]
            tables.append((table.name, list(compress(table.columns, used)), cells))
    return {
        "node": node,
        "findings": findings,
        "hidden": len(bad) - len(findings),  # findings that are not about a part
        "tables": tables,  # heading, columns and rows
        # Moment, kind and text of each change of a part or of software, the newest first.
        "history": list(islice(_history(entries), _ENTRIES)),
    }


def _shown(text: str, check: str) -> str:
    """A text of a check's result without addresses of the site.

    Four numbers can be a version of firmware, too.
    """
    if check.endswith(".firmware"):
        return text
    return _MAYBE_IPV6.sub(_without_ipv6, _IPV4.sub("ADDRESS", text))


def _without_ipv6(match: re.Match[str]) -> str:
    try:
        ipaddress.IPv6Address(match[0])
    except ValueError:
        return match[0]
    return "ADDRESS"


@cache
def page() -> HtmlPage:
    """The page of evidence."""
    return HtmlPage("evidence_page", VERSION=__version__, fix=fix_text, shown=_shown)


def render(audit: Audit, options: Options = PLAIN) -> Iterator[str]:
    """The page, in pieces: each node begins a sheet of paper."""
    nodes = audit.nodes[:_NODES]
    yield from page().render(
        title=f"{node_set(node.name for node in nodes)}: evidence",
        audit=audit,
        nodes=(_evidence(node, audit.started, options.history(node.name)) for node in nodes),
        hidden=len(audit.nodes) - len(nodes),
    )

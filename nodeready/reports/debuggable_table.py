"""`stacks --check` on a terminal: an item per line, and what to do for the next run."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.core.text import counted, sanitise
from nodeready.reports.lines import STYLES, StyledLine, line, node_set
from nodeready.reports.rank_groups import ranks
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.table_layout import NO_LIMIT, show_gaps
from nodeready.runs.stacks.debuggable import Debuggable

#: Columns of the ranks and of the nodes of an item.
_MAX_SET = 30


def debuggable(document: Debuggable, options: Options = PLAIN) -> Iterator[StyledLine]:
    """An item per line, with its ranks where these are not all, and what to do."""
    maximum = max((finding.processes for finding in document.findings), default=0)
    places = {node for finding in document.findings for node in finding.nodes}
    job = f"job {sanitise(document.job)[:60]}: " if document.job else ""
    many = counted(maximum, "process", "processes")
    yield line(f"{job}{many} on {counted(len(places), 'node')}")
    for finding in document.findings:
        if options.quiet and finding.result == "ok":
            continue
        owner = ""
        if finding.processes < maximum:
            limit = NO_LIMIT if options.verbose else _MAX_SET
            members = ranks(finding.ranks, limit) or counted(
                finding.processes, "process", "processes"
            )
            owner = f"{members} on {node_set(finding.nodes, limit)}: "
        result = (f"{finding.result:<9}", STYLES[finding.result])
        yield line(result, f"{finding.item:<13}{owner}{finding.found}")
        if finding.fix and finding.result != "ok":
            yield line(" " * 22, finding.fix)
    yield from show_gaps(document.gaps, options)

"""`jobs` on a terminal: a job per line, with its nodes."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.core.text import sanitise
from nodeready.reports.lines import StyledLine, line, node_set
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.table_layout import MAX_TEXT, NO_LIMIT, show_gaps
from nodeready.runs.jobs import MAX_NAME, Jobs
from nodeready.runs.stacks.document import fold_ranks

_HEAD = ("JOB", "USER", "RANKS", "SINCE (UTC)", "NODES")
#: Maximum columns of a node set.
_NODES = 160


def jobs(document: Jobs, options: Options = PLAIN) -> Iterator[StyledLine]:
    """A job per line; with -v its ranks and its command, too."""
    limit = NO_LIMIT if options.verbose or not options.lines else _NODES
    rows = [
        (
            sanitise(job.job)[:MAX_NAME] or "-",
            sanitise(job.user)[:MAX_NAME] or "-",
            job.rank_count,
            job.since.replace("T", " ")[:16] or "-",
        )
        for job in document.jobs
    ]
    if rows:
        widths = [max(map(len, column)) for column in zip(_HEAD, *rows)]
        yield line(("  ".join(map(str.ljust, _HEAD[:-1], widths)) + f"  {_HEAD[-1]}", "bold"))
        for job, row in zip(document.jobs, rows):
            yield line("  ".join(map(str.ljust, row, widths)), "  ", node_set(job.nodes, limit))
            if options.verbose:
                ranks = f"ranks {fold_ranks(job.ranks)}: " if job.ranks else ""
                yield line(f"    {ranks}{sanitise(job.command)[:MAX_TEXT]}")
    else:
        yield line(
            "no ranks on ", node_set(document.nodes, limit) if document.nodes else "0 nodes"
        )
    yield from show_gaps(document.gaps, options)

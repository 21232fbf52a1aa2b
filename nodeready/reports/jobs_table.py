"""`jobs` on a terminal: a job per line, with its nodes."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.core.text import counted, sanitise
from nodeready.reports.lines import StyledLine, line, node_set
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.table_layout import MAX_TEXT, NO_LIMIT, show_gaps
from nodeready.runs.jobs import Jobs, RunningJob
from nodeready.runs.stacks.document import fold_ranks

_HEAD = ("JOB", "USER", "RANKS", "SINCE (UTC)", "NODES")
#: Maximum columns of a job's name or user; of a node set.
_MAX_NAME, _NODES = 40, 160


def rank_count(job: RunningJob) -> str:
    """``8 of 16``; the processes where they have no numbers; what the launchers wait for."""
    if not job.processes:
        return counted(job.launchers, "launcher")
    if not job.ranks:
        return counted(job.processes, "process", "processes")
    size = job.world_size
    if size is None or size == len(job.ranks):
        return str(len(job.ranks))
    return f"{len(job.ranks)} of {size}"


def summary(job: RunningJob) -> str:
    """``job 4711 of ada: 8 ranks on gpu[1-2]``."""
    name = f"job {sanitise(job.job)[:_MAX_NAME]}" if job.job else "a job without a name"
    ranks = rank_count(job)
    noun = "" if not job.ranks else " rank" if ranks == "1" else " ranks"
    return f"{name} of {sanitise(job.user)[:_MAX_NAME]}: {ranks}{noun} on {node_set(job.nodes)}"


def jobs(document: Jobs, options: Options = PLAIN) -> Iterator[StyledLine]:
    """A job per line; with -v its ranks and its command, too."""
    limit = NO_LIMIT if options.verbose or not options.lines else _NODES
    rows = [
        (
            sanitise(job.job)[:_MAX_NAME] or "-",
            sanitise(job.user)[:_MAX_NAME] or "-",
            rank_count(job),
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

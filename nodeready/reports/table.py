"""The audit on a terminal: failures first with their fix, healthy nodes folded into one line."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from nodeready.reports.text import STYLES, counted, grouped, line, nodes, told
from nodeready.results import STATUSES
from nodeready.session import NodeRun


def show_table(runs: list[NodeRun]) -> Iterator[Text]:
    """One row per finding, its nodes folded; then the healthy nodes; then a count."""
    rows = grouped(
        ((STATUSES.index(r.status), r.check, told(r), r.fix), node.name)
        for node in runs
        for r in node.results
        if r.bad
    )
    width = max((len(check) for (_, check, _, _), _ in rows), default=0)
    for (rank, check, text, fix), names in sorted(rows, key=lambda row: (row[0][0], row[0][1])):
        status = STATUSES[rank]
        yield line((f"{status:<8}", STYLES[status]), f"{check:<{width}}  ", (nodes(names), "bold"))
        yield line(f"        {text}")
        if fix:
            yield line("        fix: ", (fix, "cyan"))
    healthy = [node for node in runs if node.reached and not any(r.bad for r in node.results)]
    if healthy:
        checks = sum(r.status == "ok" for r in healthy[0].results)
        yield line(
            (f"{'ok':<8}", STYLES["ok"]),
            (nodes(node.name for node in healthy), "bold"),
            f"  {counted(checks, 'check')} passed",
        )
    counts = []
    for status in STATUSES:
        number = sum(r.status == status for node in runs for r in node.results)
        if number:
            counts.append(f"{number} {status}")
    unreachable = sum(1 for node in runs if node.error)
    yield line(
        f"{counted(len(runs), 'node')}: {', '.join(counts) or 'no results'}"
        + (f", {unreachable} unreachable" if unreachable else "")
    )

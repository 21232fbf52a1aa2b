"""The audit on a terminal: failures first with their fix, healthy nodes folded into one line."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from nodeready.reports.text import STYLES, counted, grouped, line, nodes, told
from nodeready.results import STATUSES
from nodeready.session import NodeRun
from nodeready.transports.answer import LOST, UNREACHABLE


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
    passed = grouped((sum(r.status == "ok" for r in node.results), node.name) for node in healthy)
    for checks, names in passed:
        yield line(
            (f"{'ok' if checks else 'na':<8}", STYLES["ok" if checks else "na"]),
            (nodes(names), "bold"),
            f"  {counted(checks, 'check')} passed" if checks else "  nothing applies here",
        )
    counts = [counted(len(runs), "node")]
    for status in STATUSES:
        number = sum(r.status == status for node in runs for r in node.results)
        if number:
            counts.append(f"{number} {status}")
    lost = sum(node.kind in (UNREACHABLE, LOST) for node in runs)
    failed = sum(bool(node.error) for node in runs) - lost
    counts += [f"{lost} unreachable"] if lost else []
    counts += [f"{failed} failed"] if failed else []
    yield line(f"{counts[0]}: {', '.join(counts[1:]) or 'no results'}")

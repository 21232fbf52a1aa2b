"""Go or no-go, above what was found."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.ready import Ready
from nodeready.reports.table import show_audit
from nodeready.reports.text import STYLES, Line, counted, grouped, line, nodes

#: Columns of the words on the left; reasons of no-go that are told without -v.
_INDENT, _MOST = 9, 8


def show_ready(ready: Ready, verbose: int = 0, width: int = 80) -> Iterator[Line]:
    """Who is ready, who is not and why; then the findings with what repairs them."""
    room = width - _INDENT
    if ready.go:
        count = counted(len(ready.go), "node")
        names = nodes(ready.go, max(20, room - len(count) - 2))
        yield line((f"{'GO':<{_INDENT}}", STYLES["ok"]), (names, "bold"), f"  {count}")
    if ready.no_go:
        count = counted(len(ready.no_go), "node")
        names = nodes(ready.no_go, max(20, room - len(count) - 2))
        yield line((f"{'NO-GO':<{_INDENT}}", STYLES["fail"]), (names, "bold"), f"  {count}")
        yield from _why(ready, verbose, room)
    if ready.needed is not None:
        word, style = ("enough", "ok") if ready.enough else ("too few", "fail")
        yield line((f"{word:<{_INDENT}}", STYLES[style]), f"{ready.needed} needed")
    yield line("")
    yield from show_audit(ready.audit, verbose, width)


def _why(ready: Ready, verbose: int, room: int) -> Iterator[Line]:
    """A line for each set of checks that stops nodes; what they say stands in the findings."""
    pairs = (
        (", ".join(dict.fromkeys(reason.partition(":")[0] for reason in reasons)), name)
        for name, reasons in ready.no_go.items()
    )
    rows = grouped(pairs)
    most = len(rows) if verbose else _MOST
    for checks, names in rows[:most]:
        shown = nodes(names, max(20, room // 3))
        if len(rows) == 1:
            yield line(" " * _INDENT, checks)
        else:
            yield line(" " * _INDENT, (shown, "bold"), f"  {checks}")
    if rows[most:]:
        yield line(" " * _INDENT, (f"and {len(rows) - most} more (-v shows them)", "bold"))

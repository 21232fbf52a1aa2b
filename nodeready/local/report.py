"""A report of this machine, written where it is wanted."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nodeready.audit import Audit
    from nodeready.ready import Ready

#: The forms of an audit, and those of a go or no-go.
AUDIT, READY = ("table", "json", "prometheus", "nagios"), ("table", "json")


def of_audit(audit: Audit, form: str, verbose: int = 0) -> Iterator[str]:
    """The report in pieces, the same as from outside."""
    if form == "json":
        from nodeready.reports import json_report

        return json_report.render(audit)
    if form == "prometheus":
        from nodeready.reports import prometheus

        return prometheus.render(audit)
    if form == "nagios":
        from nodeready.reports import nagios

        return nagios.render(audit)
    from nodeready.reports.table import show_audit

    return (f"{line.plain}\n" for line in show_audit(audit, verbose))


def of_ready(ready: Ready, form: str, verbose: int = 0) -> Iterator[str]:
    """The same for a go or no-go."""
    if form == "json":
        from nodeready.reports import json_report

        return json_report.render_ready(ready)
    from nodeready.reports.go import show_ready

    return (f"{line.plain}\n" for line in show_ready(ready, verbose))


def write(pieces: Iterable[str], output: str | None) -> None:
    """To a file, whole or not at all, or to standard output. Raises OSError."""
    if output is None:
        sys.stdout.writelines(pieces)
        return
    from pathlib import Path

    from nodeready.files import write_atomically

    write_atomically(Path(output), pieces)

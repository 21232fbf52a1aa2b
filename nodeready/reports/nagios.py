"""The output of a Nagios plugin: its line, performance data, and a line per finding.

Nagios reads at most 8 KiB of a plugin's output, and takes the text after a ``|`` as numbers
(Nagios Plugin API, "Plugin Output Length"; Monitoring Plugins guidelines).
"""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.agent.audit_document import FAILED, UNREACHABLE, Audit, nagios_code
from nodeready.core.result import STATUSES
from nodeready.core.text import counted, sanitise
from nodeready.reports.findings import AuditFinding, errors, findings, outlier_line
from nodeready.reports.lines import node_set
from nodeready.reports.registry import PLAIN, Options

#: The words of the exit codes 0 to 3.
STATES = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
#: Maximum bytes of the whole output; the rest of the 8 KiB is left to a command around the plugin.
_MAX_BYTES = 7000
#: Maximum bytes of one line, and of an observed value that stands before a long fix.
_MAX_LINE_BYTES, _SHORT_BYTES = 400, 120


def _line(text: str, end: str = "") -> str:
    """The text as one line of at most _MAX_LINE_BYTES, without the ``|`` of performance data.

    end: what the line ends with, and what is never cut: the text before it is
    """
    safe, safe_end = (sanitise(part).replace("|", "\\x7c") for part in (text, end))
    room = max(_SHORT_BYTES, _MAX_LINE_BYTES - len(safe_end.encode()))
    if len(safe.encode()) > room:
        safe = safe.encode()[: room - 3].decode(errors="ignore") + "..."
    return f"{safe}{safe_end}"


def _headline(audit: Audit) -> str:
    counts = audit.summary["nodes"]
    bad = [
        f"{counts[status]} {status}"
        for status in (UNREACHABLE, FAILED, "fail", "unknown", "warn")
        if counts[status]
    ]
    total = counted(len(audit.nodes), "node")
    names = [node.name for node in audit.nodes if node.status not in ("ok", "na", "waived")]
    if not audit.nodes:
        text = "no nodes"
    elif names:
        text = f"{len(names)} of {total}: {', '.join(bad)}: {node_set(names)}"
    else:
        text = f"{total} as the policy wants {'it' if len(audit.nodes) == 1 else 'them'}"
    if audit.summary["results"]["waived"]:
        text += f" ({counted(audit.summary['results']['waived'], 'finding')} waived)"
    return text if audit.complete else f"interrupted, partial: {text}"


def _performance(audit: Audit) -> str:
    """Counts with their ranges, always in the same order, so that graphs keep their lines."""
    total, results = len(audit.nodes), audit.summary["results"]
    nodes = [f"nodes_{key}={count};;;0;{total}" for key, count in audit.summary["nodes"].items()]
    checks = [f"checks_{status}={results[status]};;;0" for status in STATUSES]
    return " ".join([*nodes, *checks, f"outliers={len(audit.outliers)};;;0"])


def _finding_text(finding: AuditFinding) -> str:
    return finding.text or f"e.g. {finding.example}"


def _finding_line(finding: AuditFinding) -> str:
    notes = [finding.cost, f"fix: {finding.fix}" if finding.fix else ""]
    note = "; ".join(filter(None, notes))
    word = f"{finding.status.upper()} {finding.title}"
    text = f"{word} {node_set(finding.names)}: {_finding_text(finding)}"
    return _line(text, f" ({note})" if note else "")


def _detail_lines(audit: Audit) -> Iterator[str]:
    for error in errors(audit):
        yield _line(f"{error.status.upper()} {node_set(error.names)}: {_finding_text(error)}")
    statuses = ("fail", "unknown", "warn", "waived")
    yield from (_finding_line(finding) for finding in findings(audit, statuses))
    yield from (_line(f"DIFFERS {outlier_line(outlier)}") for outlier in audit.outliers)


def nagios(audit: Audit, options: Options = PLAIN) -> Iterator[str]:
    """The plugin's line with its performance data, then a line per finding as room allows."""
    head = _line(f"NODEREADY {STATES[nagios_code(audit)]}: {_headline(audit)}")
    first = f"{head} | {_performance(audit)}\n"
    yield first
    room, rows = _MAX_BYTES - len(first.encode()), list(_detail_lines(audit))
    for count, row in enumerate(rows):
        text = f"{row}\n"
        room -= len(text.encode())
        if room < 0:
            yield f"and {len(rows) - count} more\n"
            return
        yield text

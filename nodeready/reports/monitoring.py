"""What monitoring reads: the answer of a Nagios plugin, and samples for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import nodeready
from nodeready.agent.audit_document import FAILED, UNREACHABLE, Audit, nagios_code
from nodeready.core.result import STATUSES
from nodeready.core.text import counted, sanitise
from nodeready.reports.findings import AuditFinding, errors, findings, outlier_line, value_text
from nodeready.reports.lines import node_set
from nodeready.reports.registry import PLAIN, Options

if TYPE_CHECKING:
    from nodeready.runs.smoke.document import SmokeReport


STATES = ("OK", "WARNING", "CRITICAL", "UNKNOWN")  # the words of the exit codes 0 to 3
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
    worst = UNREACHABLE, FAILED, "fail", "unknown", "warn"
    bad = [f"{counts[status]} {status}" for status in worst if counts[status]]
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


def _finding_line(finding: AuditFinding) -> str:
    notes = [finding.cost, f"fix: {finding.fix}" if finding.fix else ""]
    note = "; ".join(filter(None, notes))
    words = " ".join(filter(None, (finding.status.upper(), finding.title)))
    text = finding.text or f"e.g. {finding.example}"
    return _line(f"{words} {node_set(finding.names)}: {text}", f" ({note})" if note else "")


def _detail_lines(audit: Audit) -> Iterator[str]:
    yield from map(_finding_line, (*errors(audit), *findings(audit, _LISTED_STATUSES)))
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


# --- Prometheus text, for the node exporter's textfile collector.
# A series for each finding, counts for the remaining results: with 60 checks on 10,000 nodes, a
# series per check would be 600,000 series, nearly all of them ok. A repaired finding has no
# series.

_LISTED_STATUSES = ("fail", "unknown", "warn", "waived")  # the statuses of results with a series
_MAX_LABEL = 200  # characters of a label's value: a scrape can be configured to refuse longer ones
Sample = tuple[dict[str, str], float]


def _label(text: str) -> str:
    """A label's value: sanitised, then with the format's three escapes."""
    safe = sanitise(text, _MAX_LABEL)
    return safe.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _metric(name: str, about: str, samples: Iterable[Sample]) -> Iterator[str]:
    """The text of one gauge; whole numbers have no fraction.

    Prometheus refuses a file that has a series twice: the first of equal series is kept.
    """
    yield f"# HELP {name} {about}\n# TYPE {name} gauge\n"
    written: set[str] = set()
    for labels, value in samples:
        label_text = ",".join(f'{key}="{_label(text)}"' for key, text in labels.items())
        if label_text in written:
            continue
        written.add(label_text)
        number = int(value) if value == int(value) else value
        yield f"{name}{{{label_text}}} {number}\n" if label_text else f"{name} {number}\n"


def _seconds(moment: str) -> float:
    """A moment of a report (ISO 8601, UTC) as seconds since 1970."""
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def duration_s(started: str, finished: str) -> float:
    """Seconds between two moments; 0 where the clock was set back in between."""
    return max(0.0, round(_seconds(finished) - _seconds(started), 3))


def _checks(audit: Audit) -> Iterator[Sample]:
    for node in audit.nodes:
        for result in node.results:
            if result.status in _LISTED_STATUSES:
                labels = {"node": node.name, "check": result.check, "status": result.status}
                yield labels | ({"severity": result.severity} if result.severity else {}), 1


def _outliers(audit: Audit) -> Iterator[Sample]:
    for outlier in audit.outliers:
        for node, value in outlier.nodes.items():
            labels = {
                "node": node, "fact": outlier.fact, "group": outlier.group,
                "value": value_text(value), "majority": value_text(outlier.majority),
            }  # fmt: skip
            yield labels, 1


def prometheus(audit: Audit, options: Options = PLAIN) -> Iterator[str]:
    """The pieces of the exposition, a series at a time."""
    finished = _seconds(audit.finished)
    took = duration_s(audit.started, audit.finished)
    digest, version = {"policy_digest": audit.policy_digest}, {"version": nodeready.__version__}
    counts = [({"status": key}, count) for key, count in audit.summary["nodes"].items()]
    ages = [({"node": node.name}, node.age_s) for node in audit.nodes if node.age_s is not None]
    lost = (UNREACHABLE, FAILED)
    reached = (({"node": node.name}, float(node.status not in lost)) for node in audit.nodes)
    judged = ((node, status) for node in audit.nodes if node.results for status in STATUSES)
    results = (({"node": n.name, "status": status}, n.statuses[status]) for n, status in judged)
    about_timestamp = "When the audit ended, in seconds since 1970."
    about_complete = "0 when it was interrupted: nodes are missing."
    rows: tuple[tuple[str, str, Iterable[Sample]], ...] = (
        ("audit_timestamp_seconds", about_timestamp, [({}, finished)]),
        ("audit_duration_seconds", "How long the audit took.", [({}, took)]),
        ("audit_complete", about_complete, [({}, audit.complete)]),
        ("audit_info", "The digest of the policy that was judged by.", [(digest, 1)]),
        ("build_info", "The version of nodeready that judged.", [(version, 1)]),
        ("nodes", "Nodes by their worst status.", counts),
        ("node_up", "0 when the node could not be looked at.", reached),
        ("node_results", "Results of one node by status.", results),
        ("check_status", "A check that is not ok; those that are have no series.", _checks(audit)),
        ("outlier", "A fact in which the node differs from its group.", _outliers(audit)),
        *([("verdict_age_seconds", "The age of a recorded verdict.", ages)] if ages else ()),
    )
    for name, about, samples in rows:
        yield from _metric(f"nodeready_{name}", about, samples)


def prometheus_smoke(smoke_test: SmokeReport, options: Options = PLAIN) -> Iterator[str]:
    """A smoke test: the verdict, a series for each suspect, and the bandwidth of the links."""
    finished = _seconds(smoke_test.finished)
    blamed = ((name, s.kind) for s in smoke_test.suspects for name in s.blamed or ("",))
    suspects: list[Sample] = [({"node": name, "kind": kind}, 1) for name, kind in blamed]
    excluded: list[Sample] = [({"node": name}, 1) for name in smoke_test.exclude]
    counts: list[Sample] = [({"status": key}, count) for key, count in smoke_test.summary.items()]
    took = duration_s(smoke_test.started, smoke_test.finished)
    rows: list[tuple[str, str, list[Sample]]] = [
        ("timestamp_seconds", "When it ended, in seconds since 1970.", [({}, finished)]),
        ("duration_seconds", "How long it took.", [({}, took)]),
        ("complete", "0 when it was interrupted.", [({}, smoke_test.complete)]),
        ("go", "1 when every test was made and passed.", [({}, smoke_test.good)]),
        ("info", "What made the collective.", [({"engine": smoke_test.engine}, 1)]),
        ("tests", "Collectives of several nodes.", [({}, smoke_test.tests)]),
        ("nodes", "Nodes by their status.", counts),
        ("suspect", "A suspected node, by kind; scale: only several nodes together.", suspects),
        ("excluded", "A node without which the others pass, or that was not tested.", excluded),
    ]
    for name, about, value in (
        ("gbps", "Bus bandwidth in Gbit/s, the median of the tests.", "median_gbps"),
        ("least_gbps", "The least of the tests.", "least_gbps"),
        ("floor_gbps", "The least that the policy wants.", "floor_gbps"),
    ):
        figures = [({"class": link.name}, getattr(link, value)) for link in smoke_test.links]
        rows.append((name, about, [row for row in figures if row[1] or value != "floor_gbps"]))
    for name, about, samples in rows:
        yield from _metric(f"nodeready_smoke_{name}", about, samples)

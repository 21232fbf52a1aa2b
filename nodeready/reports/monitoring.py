"""What monitoring reads: Prometheus text and the output of a Nagios plugin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import nodeready
from nodeready.audit.document import FAILED, UNREACHABLE, Audit
from nodeready.reports.registry import PLAIN, Options, nodes
from nodeready.reports.table import Finding, errors, findings, shown, told_outlier
from nodeready.subjects.result import STATUSES
from nodeready.text import counted, sanitise

if TYPE_CHECKING:
    from nodeready.smoke.document import SmokeReport


# --- Prometheus text, for the node exporter's textfile collector.
#
# A series for each finding, counts for the rest: with 60 checks on 10,000 nodes, a series per
# check would be 600,000 series, nearly all of them ok. A finding that is repaired has no series
# any more.

#: The results that have a series of their own.
_LISTED = ("fail", "unknown", "warn", "waived")
#: Characters of a label's value: Prometheus can be told to refuse a scrape with longer ones.
_LABEL = 200

Sample = tuple[dict[str, str], float]


def _label(text: str) -> str:
    """A label's value: sanitised, then with the format's three escapes."""
    safe = sanitise(text, _LABEL)
    return safe.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _metric(name: str, about: str, samples: Iterable[Sample]) -> Iterator[str]:
    """One gauge with its head; whole numbers without a fraction.

    Prometheus refuses a file that has a series twice: of equal series the first one stays.
    """
    yield f"# HELP {name} {about}\n# TYPE {name} gauge\n"
    seen: set[str] = set()
    for labels, value in samples:
        inside = ",".join(f'{key}="{_label(text)}"' for key, text in labels.items())
        if inside in seen:
            continue
        seen.add(inside)
        number = int(value) if value == int(value) else value
        yield f"{name}{{{inside}}} {number}\n" if inside else f"{name} {number}\n"


def _seconds(moment: str) -> float:
    """A moment of a report (ISO 8601, UTC) as seconds since 1970."""
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def _nodes(audit: Audit) -> Iterator[Sample]:
    for node in audit.nodes:
        yield {"node": node.name}, float(node.status not in (UNREACHABLE, FAILED))


def _results(audit: Audit) -> Iterator[Sample]:
    for node in audit.nodes:
        counts = node.statuses
        for status in STATUSES:
            if node.results:
                yield {"node": node.name, "status": status}, counts[status]


def _checks(audit: Audit) -> Iterator[Sample]:
    for node in audit.nodes:
        for result in node.results:
            if result.status in _LISTED:
                yield {"node": node.name, "check": result.check, "status": result.status}, 1


def _ages(audit: Audit) -> Iterator[Sample]:
    for node in audit.nodes:
        if node.age_s is not None:
            yield {"node": node.name}, node.age_s


def _outliers(audit: Audit) -> Iterator[Sample]:
    for one in audit.outliers:
        for node, value in one.nodes.items():
            yield (
                {
                    "node": node,
                    "fact": one.fact,
                    "group": one.group,
                    "value": shown(value),
                    "majority": shown(one.majority),
                },
                1,
            )


def prometheus(audit: Audit, options: Options = PLAIN) -> Iterator[str]:
    """The pieces of the exposition, a series at a time."""
    finished = _seconds(audit.finished)
    moments: list[Sample] = [({}, finished)]
    duration: list[Sample] = [({}, round(finished - _seconds(audit.started), 3))]
    complete: list[Sample] = [({}, audit.complete)]
    digest: list[Sample] = [({"policy_digest": audit.policy_digest}, 1)]
    build: list[Sample] = [({"version": nodeready.__version__}, 1)]
    ages = list(_ages(audit))
    counts: list[Sample] = [({"status": s}, n) for s, n in audit.summary["nodes"].items()]
    for name, about, samples in (
        ("audit_timestamp_seconds", "When the audit ended, in seconds since 1970.", moments),
        ("audit_duration_seconds", "How long the audit took.", duration),
        ("audit_complete", "0 when it was interrupted: nodes are missing.", complete),
        ("audit_info", "The digest of the policy that was judged by.", digest),
        ("build_info", "The version of nodeready that judged.", build),
        ("nodes", "Nodes by their worst status.", counts),
        ("node_up", "0 when the node could not be looked at.", _nodes(audit)),
        ("node_results", "Results of one node by status.", _results(audit)),
        ("check_status", "A check that is not ok; those that are have no series.", _checks(audit)),
        ("outlier", "A fact in which the node differs from its group.", _outliers(audit)),
        *([("verdict_age_seconds", "The age of a recorded verdict.", ages)] if ages else ()),
    ):
        yield from _metric(f"nodeready_{name}", about, samples)


def prometheus_smoke(found: SmokeReport, options: Options = PLAIN) -> Iterator[str]:
    """A smoke test: the verdict, a series for each suspect, and the bandwidth of the links."""
    finished = _seconds(found.finished)
    suspects: list[Sample] = [
        ({"node": name, "kind": one.kind}, 1)
        for one in found.suspects
        for name in one.blamed or ("",)
    ]
    excluded: list[Sample] = [({"node": name}, 1) for name in found.exclude]
    counts: list[Sample] = [({"status": s}, n) for s, n in found.summary.items()]
    rows: list[tuple[str, str, list[Sample]]] = [
        ("timestamp_seconds", "When it ended, in seconds since 1970.", [({}, finished)]),
        ("duration_seconds", "How long it took.", [({}, finished - _seconds(found.started))]),
        ("complete", "0 when it was interrupted.", [({}, found.complete)]),
        ("go", "1 when every test was made and passed.", [({}, found.good)]),
        ("info", "What made the collective.", [({"engine": found.engine}, 1)]),
        ("tests", "Collectives of several nodes.", [({}, found.tests)]),
        ("nodes", "Nodes by their status.", counts),
        ("suspect", "Who spoils the collective; scale: no node alone.", suspects),
        ("excluded", "A node without which the others pass, or that was not tested.", excluded),
    ]
    for name, about, value in (
        ("gbps", "Bus bandwidth in Gbit/s, the median of the tests.", "median_gbps"),
        ("least_gbps", "The least of the tests.", "least_gbps"),
        ("floor_gbps", "The least that the policy wants.", "floor_gbps"),
    ):
        figures = [({"class": one.name}, getattr(one, value)) for one in found.links]
        rows.append((name, about, [one for one in figures if one[1] or value != "floor_gbps"]))
    for name, about, samples in rows:
        yield from _metric(f"nodeready_smoke_{name}", about, samples)


# --- A Nagios plugin: a line, performance data, the findings below.
#
# Nagios reads at most 8 KiB of a plugin's output, and takes what follows a ``|`` as numbers
# (Nagios Plugin API, "Plugin Output Length"; Monitoring Plugins guidelines).

#: The words of the exit codes 0 to 3.
STATES = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
#: Bytes of the whole output; the rest of the 8 KiB is left to the command around the plugin.
_ROOM = 7000
#: Bytes of one line.
_LINE = 400


def nagios_code(audit: Audit) -> int:
    """The exit code of the plugin.

    2 when a check failed or a node could not be reached; else 3 when something could not be
    observed, a node could not be looked at, or the audit is partial or empty; else 1 for a
    warning. Unknown stands above a warning, because an unknown may hide a failure.
    """
    have, results = audit.summary["nodes"], audit.summary["results"]
    if results["fail"] or have[UNREACHABLE]:
        return 2
    if results["unknown"] or have[FAILED] or not audit.complete or not audit.nodes:
        return 3
    return 1 if results["warn"] else 0


def _line(text: str) -> str:
    """``text`` as one line of at most _LINE bytes, without the ``|`` of performance data."""
    safe = sanitise(text).replace("|", "\\x7c")
    if len(safe.encode()) <= _LINE:
        return safe
    return safe.encode()[: _LINE - 3].decode(errors="ignore") + "..."


def _headline(audit: Audit) -> str:
    have = audit.summary["nodes"]
    bad = [
        f"{have[status]} {status}"
        for status in (UNREACHABLE, FAILED, "fail", "unknown", "warn")
        if have[status]
    ]
    total = counted(len(audit.nodes), "node")
    names = [node.name for node in audit.nodes if node.status not in ("ok", "na", "waived")]
    if not audit.nodes:
        text = "no nodes"
    elif names:
        text = f"{len(names)} of {total}: {', '.join(bad)}: {nodes(names)}"
    else:
        text = f"{total} as the policy wants {'it' if len(audit.nodes) == 1 else 'them'}"
    if audit.summary["results"]["waived"]:
        text += f" ({counted(audit.summary['results']['waived'], 'finding')} waived)"
    return text if audit.complete else f"interrupted, partial: {text}"


def _performance(audit: Audit) -> str:
    """Counts with their ranges, always in the same order, so that graphs keep their lines."""
    have, total = audit.summary["nodes"], len(audit.nodes)
    of_nodes = [f"nodes_{status}={have[status]};;;0;{total}" for status in have]
    results = audit.summary["results"]
    of_checks = [f"checks_{status}={results[status]};;;0" for status in STATUSES]
    return " ".join([*of_nodes, *of_checks, f"outliers={len(audit.outliers)};;;0"])


def _said(finding: Finding) -> str:
    return finding.text or f"e.g. {finding.example}"


def _told(finding: Finding) -> str:
    fix = f" (fix: {finding.fix})" if finding.fix else ""
    return (
        f"{finding.status.upper()} {finding.title} {nodes(finding.names)}: {_said(finding)}{fix}"
    )


def _below(audit: Audit) -> Iterator[str]:
    for error in errors(audit):
        yield f"{error.status.upper()} {nodes(error.names)}: {_said(error)}"
    yield from (_told(finding) for finding in findings(audit, ("fail", "unknown", "warn")))
    yield from (_told(finding) for finding in findings(audit, ("waived",)))
    yield from (f"DIFFERS {told_outlier(outlier)}" for outlier in audit.outliers)


def nagios(audit: Audit, options: Options = PLAIN) -> Iterator[str]:
    """The plugin's line with its performance data, then a line per finding as room allows."""
    head = _line(f"NODEREADY {STATES[nagios_code(audit)]}: {_headline(audit)}")
    first = f"{head} | {_performance(audit)}\n"
    yield first
    left, rows = _ROOM - len(first.encode()), list(_below(audit))
    for count, row in enumerate(rows):
        text = _line(row) + "\n"
        left -= len(text.encode())
        if left < 0:
            yield f"and {len(rows) - count} more\n"
            return
        yield text

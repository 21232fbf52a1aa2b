"""Prometheus text, for the node exporter's textfile collector.

A series for each finding, counts for the remaining results: with 60 checks on 10,000 nodes, a
series per check would be 600,000 series, nearly all of them ok. A repaired finding has no series.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import nodeready
from nodeready.agent.audit_document import FAILED, UNREACHABLE, Audit
from nodeready.core.result import STATUSES
from nodeready.core.text import sanitise
from nodeready.reports.findings import value_text
from nodeready.reports.registry import PLAIN, Options

if TYPE_CHECKING:
    from nodeready.runs.smoke.document import SmokeReport

#: The statuses of results with a series.
_LISTED_STATUSES = ("fail", "unknown", "warn", "waived")
#: Characters of a label's value: a scrape can be configured to refuse longer ones.
_MAX_LABEL = 200
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
                "node": node,
                "fact": outlier.fact,
                "group": outlier.group,
                "value": value_text(value),
                "majority": value_text(outlier.majority),
            }
            yield labels, 1


def prometheus(audit: Audit, options: Options = PLAIN) -> Iterator[str]:
    """The pieces of the exposition, a series at a time."""
    finished = _seconds(audit.finished)
    took = duration_s(audit.started, audit.finished)
    digest, version = {"policy_digest": audit.policy_digest}, {"version": nodeready.__version__}
    counts = [({"status": key}, count) for key, count in audit.summary["nodes"].items()]
    ages = [({"node": node.name}, node.age_s) for node in audit.nodes if node.age_s is not None]
    reached = (
        ({"node": node.name}, float(node.status not in (UNREACHABLE, FAILED)))
        for node in audit.nodes
    )
    results = (
        ({"node": node.name, "status": status}, node.statuses[status])
        for node in audit.nodes
        if node.results
        for status in STATUSES
    )
    about_complete = "0 when it was interrupted: nodes are missing."
    rows: tuple[tuple[str, str, Iterable[Sample]], ...] = (
        (
            "audit_timestamp_seconds",
            "When the audit ended, in seconds since 1970.",
            [({}, finished)],
        ),
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
    suspects: list[Sample] = [
        ({"node": name, "kind": suspect.kind}, 1)
        for suspect in smoke_test.suspects
        for name in suspect.blamed or ("",)
    ]
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
        rows.append(
            (name, about, [figure for figure in figures if figure[1] or value != "floor_gbps"])
        )
    for name, about, samples in rows:
        yield from _metric(f"nodeready_smoke_{name}", about, samples)

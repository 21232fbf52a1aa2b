"""What other tools read: JUnit's XML for CI, and CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from nodeready.agent.audit_document import Audit, NodeReport, Outlier
from nodeready.core.result import Result, fix_text, result_text
from nodeready.core.text import sanitise
from nodeready.reports.findings import differing
from nodeready.reports.lines import cost_text
from nodeready.reports.registry import PLAIN, Options

if TYPE_CHECKING:
    from nodeready.runs.smoke.document import SmokeReport


# What XML 1.0 forbids beside the control characters (section 2.2).
_FORBIDDEN = re.compile("[\ufffe\uffff]")
#: The name of a smoke test's suite for all nodes together; no node can have it.
_ALL_NODES = "all nodes"


def _xml(text: str) -> str:
    """``text`` for an attribute or an element: one line, without markup and what XML forbids."""
    return escape(_FORBIDDEN.sub("\ufffd", sanitise(text)), {'"': "&quot;"})


def _tag(element: str, /, **attributes: str) -> str:
    return f"<{element}" + "".join(f' {key}="{_xml(text)}"' for key, text in attributes.items())


def _element(name: str, message: str, kind: str, text: str = "") -> str:
    tag = _tag(name, message=message, type=kind)
    return f"{tag}>{_xml(text)}</{name}>" if text else f"{tag}/>"


def _outcome(result: Result, failing: tuple[str, ...]) -> str:
    """The elements inside of a check's case; "" for a check that passed."""
    status, text, severity = (
        result.status,
        result_text(result),
        cost_text(result.severity, result.status),
    )
    fix = f"fix: {fix_text(result)}" if fix_text(result) else ""
    cost = "; ".join(filter(None, (severity, fix)))
    if status in failing:
        return _element("failure", text, status, cost)
    if status == "warn":
        return f"<system-out>{_xml(f'warn: {text} {cost}'.rstrip())}</system-out>"
    if status == "unknown":
        return _element("error", text, status, severity)
    if status == "waived":
        return _element("skipped", result.fix, status, text)
    return _element("skipped", text, status) if status == "na" else ""


@lru_cache(maxsize=8192)
def _check_case(result: Result, failing: tuple[str, ...]) -> str:
    """A check's case. It is cached because most nodes of a fleet share most results."""
    return _case(result.check.partition(".")[0], result.check, _outcome(result, failing))


def _document(command: str, complete: bool, suites: Iterable[str], **counts: int) -> Iterator[str]:
    """The whole document in pieces. counts: tests, failures and errors of all suites"""
    name = f"nodeready {command}" if complete else f"nodeready {command} (partial: interrupted)"
    tag = _tag("testsuites", name=name, **{key: str(count) for key, count in counts.items()})
    yield f'<?xml version="1.0" encoding="UTF-8"?>\n{tag}>\n'
    yield from suites
    yield "</testsuites>\n"


def _case(classname: str, name: str, inside: str) -> str:
    tag = _tag("testcase", classname=classname, name=name)
    return f"    {tag}>{inside}</testcase>\n" if inside else f"    {tag}/>\n"


def _suite(
    node: NodeReport, audit: Audit, failing: tuple[str, ...], outliers: list[Outlier]
) -> str:
    statuses = [result.status for result in node.results]
    cases = [_check_case(result, failing) for result in node.results]
    for outlier in outliers:
        text = differing(outlier, node.name)
        difference = f"<system-out>{_xml(f'differs: {text}')}</system-out>"
        if "warn" in failing:
            difference = _element("failure", text, "differs")
        cases.append(_case("outliers", outlier.fact, difference))
    if node.error:
        cases.insert(0, _case("node", "node.look", _element("error", node.error, node.status)))
    failures = sum(status in failing for status in statuses)
    return _testsuite(
        node.name, audit.started, f"{node.seconds:.3f}", cases,
        failures=failures + len(outliers) * ("warn" in failing),
        errors=statuses.count("unknown") + bool(node.error),
        skipped=statuses.count("na") + statuses.count("waived"),
    )  # fmt: skip


def _testsuite(name: str, started: str, seconds: str, cases: list[str], **counts: int) -> str:
    """The element of a suite. counts: failures, errors and skipped cases"""
    numbers = {key: str(count) for key, count in {"tests": len(cases), **counts}.items()}
    tag = _tag("testsuite", name=name, hostname=name, timestamp=started, time=seconds, **numbers)
    return f"  {tag}>\n{''.join(cases)}  </testsuite>\n"


def junit(audit: Audit, options: Options = PLAIN) -> Iterator[str]:
    """The document in pieces, a node at a time. With ``fail_on`` "warn", outliers fail as well."""
    failing = ("fail", "warn") if options.fail_on == "warn" else ("fail",)
    results = audit.summary["results"]
    errors = sum(bool(node.error) for node in audit.nodes)
    # Node -> the facts in which it differs from its peers.
    outliers_of: dict[str, list[Outlier]] = {node.name: [] for node in audit.nodes}
    for outlier in audit.outliers:
        for name in outlier.nodes.keys() & outliers_of.keys():
            outliers_of[name].append(outlier)
    differing_facts = sum(map(len, outliers_of.values()))
    failures = sum(results[status] for status in failing)
    return _document(
        "audit", audit.complete,
        (_suite(node, audit, failing, outliers_of[node.name]) for node in audit.nodes),
        tests=sum(results.values()) + errors + differing_facts,
        failures=failures + differing_facts * ("warn" in failing),
        errors=results["unknown"] + errors,
    )  # fmt: skip


def junit_smoke(smoke_test: SmokeReport, options: Options = PLAIN) -> Iterator[str]:
    """A smoke test: a suite per node with one case, and one suite for all nodes together. A
    suspect is a failure in the case of each of its nodes, or in the case of all nodes if it has
    none. A node that was not tested is an error.
    """
    suspicions_of: dict[str, list[tuple[str, str]]] = {}
    for suspect in smoke_test.suspects:
        for name in suspect.blamed or (_ALL_NODES,):
            suspicions = suspicions_of.setdefault(name, [])
            suspicions.append((suspect.kind, "; ".join(suspect.evidence)))
    unfinished = smoke_test.stopped or ("" if smoke_test.complete else "interrupted")
    together = suspicions_of.get(_ALL_NODES, [])
    suites = [_smoke_suite(_ALL_NODES, "smoke.together", smoke_test, together, reason=unfinished)]
    for node in smoke_test.nodes:
        suspicions = suspicions_of.get(node.name, [])
        is_untested = node.status in ("unreachable", "untested")
        reason = (node.absence or node.status) if is_untested else ""
        case = node.name, "smoke.collective", smoke_test, suspicions
        suites.append(_smoke_suite(*case, reason=reason, warnings=node.warnings))
    return _document(
        "smoke", smoke_test.complete, suites, tests=len(suites),
        failures=sum("<failure" in suite for suite in suites),
        errors=sum("<error" in suite for suite in suites),
    )  # fmt: skip


def _smoke_suite(
    name: str, case: str, smoke_test: SmokeReport, suspicions: list[tuple[str, str]], *,
    reason: str, warnings: tuple[str, ...] = (),
) -> str:  # fmt: skip
    """A suite with its one case. suspicions: (kind, evidence); reason: "" if it was tested"""
    inside = ""
    if suspicions:
        (kind, message), *further = suspicions
        text = "; ".join(f"{kind}: {evidence}" for kind, evidence in further)
        inside = _element("failure", message, kind, text)
    elif reason:
        inside = _element("error", reason, "untested")
    elif warnings:
        inside = f"<system-out>{_xml('warn: ' + '; '.join(warnings))}</system-out>"
    counts = {"failures": int(bool(suspicions)), "errors": int(bool(reason) and not suspicions)}
    cases = [_case("smoke", case, inside)]
    return _testsuite(name, smoke_test.started, "0", cases, **counts, skipped=0)


# --- An audit as CSV: a row for each result of each node, for a spreadsheet.

COLUMNS = (
    "node", "status", "check", "severity", "expected", "actual", "source", "fix", "actions",
    "owner",
)  # fmt: skip
#: A spreadsheet takes a cell that begins so for a formula, also in full-width characters (OWASP,
#: CSV Injection). A leading apostrophe makes it a text.
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")


@lru_cache(maxsize=1 << 13)
def _cell(text: str) -> str:
    # Most nodes have the same texts.
    text = sanitise(text)
    return f"'{text}" if _FORMULA.match(text) else text


def csv_lines(audit: Audit, options: Options = PLAIN) -> Iterator[str]:
    """The rows of a node at a time. A node that could not be probed has one row, without a check:
    its own status, and the reason as its actual value.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for node in audit.nodes:
        if node.error:
            error = {"node": node.name, "status": node.status, "actual": node.error}
            writer.writerow([_cell(error.get(column, "")) for column in COLUMNS])
        for result in node.results:
            texts = {**vars(result), "node": node.name, "actions": " ".join(result.actions)}
            writer.writerow([_cell(texts[column]) for column in COLUMNS])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()

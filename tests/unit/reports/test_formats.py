"""An audit in each format: what other programs read of it, whatever a node says."""

import json
from pathlib import Path

import pytest
import xmlschema
from prometheus_client.parser import text_string_to_metric_families

from nodeready.agent.audit_document import Audit, audit_code, nagios_code, reasons
from nodeready.agent.verdict import listed_fields
from nodeready.core.text import sanitise
from nodeready.reports import exports, json_report, monitoring
from nodeready.reports.registry import Options, find_format
from tests.builders.fleets import Ptrace, audit, crowd, fleet, node, outcomes
from tests.builders.results import fail
from tests.unit.reports.test_golden import FORMATS, text_of

JUNIT = xmlschema.XMLSchema(str(Path(__file__).parent / "data" / "junit-10.xsd"))
AUDITS = {**outcomes(), "fleet": fleet(100)}
HOSTILE = AUDITS["hostile"]
OUTCOMES = pytest.mark.parametrize("name", AUDITS)


#: outcome -> the exit codes: of the command, of the command with --fail-on warn, of Nagios
CODES = {
    "ok": (0, 0, 0), "warn": (0, 3, 1), "fail": (3, 3, 2), "unknown": (3, 3, 3),
    "waived": (0, 0, 0), "unreachable": (4, 4, 2), "failed": (1, 1, 3), "partial": (130, 130, 3),
    "outliers": (0, 3, 0), "hostile": (4, 4, 2), "one": (3, 3, 2), "mixed": (130, 130, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CODES)
def test_every_outcome_has_its_exit_codes(name):
    report = AUDITS[name]
    assert (audit_code(report), audit_code(report, "warn"), nagios_code(report)) == CODES[name]


def test_an_audit_without_nodes_is_never_green():
    nothing = Audit(*(["2030-01-02T03:04:05Z"] * 2), "", ())
    assert (audit_code(nothing), nagios_code(nothing)) == (2, 3)


def test_json_keeps_harmless_text_and_is_written_a_node_at_a_time():
    text = 'é ü 日本 😀 "quoted" back\\slash \\u001b tab\t'
    report = audit(node("gpu001"))
    report.nodes[0].snapshot.subjects["ptrace"] = Ptrace(winner=text)
    (row,) = json.loads("".join(json_report.render(report)))["nodes"]
    assert row["facts"]["ptrace"]["winner"] == text
    assert max(map(len, json_report.render(fleet(50)))) < 3000


@OUTCOMES
@pytest.mark.parametrize("fail_on", ["fail", "warn"])
def test_junit_is_valid_and_fails_where_the_run_fails(name, fail_on):
    report = AUDITS[name]
    text = "".join(exports.junit(report, Options(fail_on=fail_on)))
    JUNIT.validate(text)
    suites = xmlschema.XMLResource(text).root
    summary = report.summary["results"]
    failures = summary["fail"]
    if fail_on == "warn":
        failures += summary["warn"] + sum(len(outlier.nodes) for outlier in report.outliers)
    errors = summary["unknown"] + sum(bool(host.error) for host in report.nodes)
    assert len(suites) == len(report.nodes)
    for word, count in (("failure", failures), ("error", errors)):
        assert len(list(suites.iter(word))) == int(suites.get(f"{word}s")) == count
    assert len(list(suites.iter("testcase"))) == int(suites.get("tests"))
    assert ('type="warn"' in text) is (fail_on == "warn" and summary["warn"] > 0)


def samples(report):
    values = {}
    for family in text_string_to_metric_families("".join(monitoring.prometheus(report))):
        assert (family.type, bool(family.documentation)) == ("gauge", True)
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in values
            values[key] = sample.value
    return values


@OUTCOMES
def test_prometheus_has_every_node_and_every_bad_result(name):
    report = AUDITS[name]
    rows = [(key[0][10:], dict(key[1])) for key in samples(report)]
    bad = [(n.name, r.check, r.status) for n in report.nodes for r in n.results]
    assert [
        (x["node"], x["check"], x["status"]) for kind, x in rows if kind == "check_status"
    ] == [row for row in bad if row[2] in ("fail", "warn", "unknown", "waived")]
    assert samples(report)["nodeready_audit_complete", ()] == report.complete
    up = [labels["node"] for kind, labels in rows if kind == "node_up"]
    assert up == [sanitise(node.name) for node in report.nodes]


@pytest.mark.parametrize(
    "report",
    [*AUDITS.values(), fleet(1000), crowd(300, 50)],
    ids=[*AUDITS, "1000", "300 findings"],
)
def test_nagios_reads_its_performance_data_and_no_other(report):
    text = "".join(monitoring.nagios(report))
    first, *below = text.splitlines()
    assert first.startswith("NODEREADY ")
    assert first.count("|") == 1
    assert not any("|" in line for line in below)
    for word in first.partition("|")[2].split():
        label, _, values = word.partition("=")
        assert label.isidentifier()
        assert values.split(";")[0].isdigit()
    # Nagios reads no more; the findings of a large fleet are cut, not left out.
    assert len(text.encode()) < 8192
    assert len(below) > 2 or len(report.nodes) < 50


def test_a_format_that_is_no_table_has_no_lines():
    with pytest.raises(ValueError, match="audit as json"):
        find_format("audit", "json").lines(HOSTILE)


def test_every_format_that_has_the_fix_has_its_end():
    """What a node says is cut before what nodeready advises."""
    repair = f"set it in {'/a/long/path' * 40}, then ask the owner"
    report = audit(node("gpu001", fail("pdsh.rcmd", "ssh", "x" * 3000, "/etc/x:1", repair)))
    shown = {form for form in FORMATS["audit"] if "set it in" in text_of("audit", form, report)}
    whole = {form for form in shown if "then ask the owner" in text_of("audit", form, report)}
    assert whole == shown >= {"table", "json", "junit", "nagios", "body"}
    (row,) = listed_fields(report.nodes[0].results)["results"]
    assert row["fix"] == repair
    assert reasons(report.nodes[0].results)[0].endswith("x" * 3000)

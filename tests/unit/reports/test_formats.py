"""Each format is what its readers expect, whatever a node says."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import xmlschema
from prometheus_client.parser import text_string_to_metric_families

from nodeready.reports import json_report, junit, monitoring
from nodeready.reports.registry import Options
from nodeready.reports.table import show_audit
from tests.builders.fleets import HOSTILE, Ptrace, audit, crowd, fleet, node, outcomes
from tests.paths import schema
from tests.unit.reports.test_golden import FORMATS

SCHEMA = schema("audit")
JUNIT = xmlschema.XMLSchema(str(Path(__file__).parent / "data" / "junit-10.xsd"))
VALID = jsonschema.Draft202012Validator(SCHEMA)
AUDITS = {**outcomes(), "fleet": fleet(100)}
HURT = AUDITS["hostile"]


def document(made):
    return json.loads("".join(json_report.audit(made)))


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_that_a_node_says_can_steer_a_terminal(form):
    text = "".join(FORMATS[form](HURT))
    assert "\\x1b" in text
    assert "\\xff" in text
    assert not {c for c in text if ord(c) < 32 or 127 <= ord(c) < 160} - {"\n"}
    assert not set("\u202e") & set(text)
    text.encode()


@pytest.mark.parametrize("name", AUDITS)
def test_json_is_as_its_schema_says(name):
    made = document(AUDITS[name])
    VALID.validate(made)
    assert [one["name"] for one in made["nodes"]] == [one.name for one in AUDITS[name].nodes]


def test_the_schema_is_strict():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    good = document(AUDITS["fail"])
    for spoil in (
        lambda doc: doc.update(more=1),
        lambda doc: doc["nodes"][0].update(more=1),
        lambda doc: doc["nodes"][0].update(status="unreachable"),
        lambda doc: doc["nodes"][0]["results"][0].update(status="green"),
        lambda doc: doc["nodes"][0]["results"][0].pop("source"),
        lambda doc: doc["summary"]["nodes"].pop("failed"),
        lambda doc: doc.update(started="yesterday"),
    ):
        bad = json.loads(json.dumps(good))
        spoil(bad)
        assert not VALID.is_valid(bad)


def test_json_keeps_what_is_no_danger():
    text = 'é ü 日本 😀 "quoted" back\\slash \\u001b tab\t'
    one = audit(node("gpu001"))
    one.nodes[0].snapshot.subjects["ptrace"] = Ptrace(winner=text)
    assert document(one)["nodes"][0]["facts"]["ptrace"]["winner"] == text


def test_json_is_written_a_node_at_a_time():
    pieces = json_report.audit(fleet(50))
    assert max(len(piece) for piece in pieces) < 3000


@pytest.mark.parametrize("name", AUDITS)
def test_junit_is_as_its_schema_says(name):
    made = AUDITS[name]
    text = "".join(junit.render(made))
    JUNIT.validate(text)
    suites = xmlschema.XMLResource(text).root
    summary = made.summary["results"]
    apart = sum(bool(one.error) for one in made.nodes)
    assert len(suites) == len(made.nodes)
    assert len(list(suites.iter("failure"))) == int(suites.get("failures")) == summary["fail"]
    errors = len(list(suites.iter("error")))
    assert errors == int(suites.get("errors")) == summary["unknown"] + apart
    assert len(list(suites.iter("testcase"))) == int(suites.get("tests"))


def test_what_fails_the_run_fails_in_junit_too():
    text = "".join(junit.render(AUDITS["outliers"], Options(fail_on="warn")))
    JUNIT.validate(text)
    root = xmlschema.XMLResource(text).root
    assert len(list(root.iter("failure"))) == int(root.get("failures")) == 4
    assert 'failures="0"' in "".join(junit.render(AUDITS["outliers"]))


def samples(made):
    found = {}
    for family in text_string_to_metric_families("".join(monitoring.prometheus(made))):
        assert (family.type, bool(family.documentation)) == ("gauge", True)
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


@pytest.mark.parametrize("name", AUDITS)
def test_prometheus_reads_it(name):
    made, found = AUDITS[name], samples(AUDITS[name])
    up = {key[1][0][1]: value for key, value in found.items() if key[0] == "nodeready_node_up"}
    assert up == {one.name: float(not one.error) for one in made.nodes}
    bad = sum(made.summary["results"][s] for s in ("fail", "warn", "unknown", "waived"))
    assert sum(key[0] == "nodeready_check_status" for key in found) == bad
    assert found["nodeready_audit_timestamp_seconds", ()] == 1893553457


def test_prometheus_gives_back_what_was_escaped():
    labels = dict(next(key for key in samples(HURT) if key[0] == "nodeready_outlier")[1])
    assert labels["majority"].startswith("\\x1b[31mred\\x1b[0m <b>&\"'</b>")
    assert "{c} \\ \\u202e" in labels["majority"]


@pytest.mark.parametrize("name", AUDITS)
def test_nagios_finds_its_performance_data_and_no_other(name):
    text = "".join(monitoring.nagios(AUDITS[name]))
    first, *below = text.splitlines()
    assert first.startswith("NODEREADY ")
    assert first.count("|") == 1
    assert not any("|" in line for line in below)
    for word in first.partition("|")[2].split():
        label, _, values = word.partition("=")
        assert label.isidentifier()
        assert values.split(";")[0].isdigit()


@pytest.mark.parametrize("made", [fleet(1000), crowd(300, 50), HURT], ids=["1000", "300", "hurt"])
def test_nagios_never_says_more_than_nagios_reads(made):
    text = "".join(monitoring.nagios(made))
    assert len(text.encode()) < 8192
    assert len(text.splitlines()) > 3


def lines(made, verbose=0):
    return [line.plain for line in show_audit(made, Options(verbose, 80))]


def test_a_thousand_nodes_with_different_numbers_are_one_finding():
    shown = lines(fleet(1000))
    assert len(shown) < 30
    assert sum("gpus.ecc_errors" in line for line in shown) == 1
    assert any(line.strip().startswith("e.g. gpu0001: gpu 1 (0000:01:00.0)") for line in shown)
    assert len(lines(fleet(1000), verbose=1)) > 300


def test_three_hundred_findings_are_cut_and_counted():
    shown = lines(crowd(300, 50))
    assert len(shown) < 110
    assert any("and 270 more" in line for line in shown)
    every = "\n".join(lines(crowd(300, 50), 1))
    assert all(f"host.check_{i}" in every for i in range(300))


def test_what_is_worst_stands_first():
    words = [line.split()[0] for line in lines(fleet(100)) if line and not line.startswith(" ")]
    order = ["unreachable", "fail", "fail", "warn", "unknown", "differs", "waived", "ok"]
    assert words[: len(order)] == order


def test_a_waiver_is_always_listed_with_its_reason():
    shown = "\n".join(lines(AUDITS["waived"]))
    assert "waived   pdsh.rcmd  gpu004" in shown
    assert "waived: until the login node moves, ticket 4711" in shown


def test_markup_of_a_node_is_text():
    (row,) = (line for line in show_audit(HURT, Options(0, 80)) if line.plain.startswith("fail"))
    assert "[bold]x[/bold]" in "\n".join(lines(HURT))
    assert ("x", "bold") not in row.parts
    assert HOSTILE not in "\n".join(lines(HURT))

"""share/, which is installed with nodeready: alerts, a dashboard, examples, a skill."""

import json
import re
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import yaml

from nodeready.agent.gate import drain
from nodeready.agent.verdict import NodeVerdict
from nodeready.core.severity import ACTIONS, SEVERITIES
from tests.paths import DOCS, ROOT, schema
from tests.unit.docs.pages import commands
from tests.unit.docs.test_documentation import check

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHARE = ROOT / "share"
DASHBOARD = json.loads((SHARE / "grafana/nodeready.json").read_text())
RULES, RULE_TESTS = (
    yaml.safe_load((SHARE / f"prometheus/nodeready.{part}.yml").read_text())
    for part in ("rules", "test")
)
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]


def metrics() -> set[str]:
    """The names in the recorded expositions of an audit and of a smoke test."""
    golden = ROOT / "tests/unit/reports/golden"
    texts = (golden / f"{name}-mixed.prometheus" for name in ("audit", "smoke"))
    return {
        name for path in texts for name in re.findall(r"^# TYPE (\S+)", path.read_text(), re.M)
    }


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_alerts_and_dashboard_use_metrics_that_exist():
    expressions = [*dashboard_expressions(), *(alert["expr"] for alert in ALERTS)]
    expressions += [query["definition"] for query in variables("query")]
    for expression in expressions:
        names = set(re.findall(r"\bnodeready_\w+", expression))
        assert names, expression
        assert names <= metrics(), expression


def test_every_alert_is_expected_to_fire_in_one_test():
    fired = {
        row["alertname"]
        for test in RULE_TESTS["tests"]
        for row in test["alert_rule_test"]
        if row.get("exp_alerts")
    }
    assert fired == {alert["alert"] for alert in ALERTS}


def variables(kind: str) -> list[dict[str, Any]]:
    return [row for row in DASHBOARD["templating"]["list"] if row["type"] == kind]


def test_the_dashboard_names_no_data_source_of_its_author_and_no_unknown_variable():
    known = {row["name"] for row in DASHBOARD["templating"]["list"]}
    text = json.dumps(DASHBOARD)
    assert set(re.findall(r"\$\{?(\w+)", text)) - {"__all"} == known
    assert variables("datasource")[0]["query"] == "prometheus"
    sources = {row["uid"] for row in data_sources(DASHBOARD)}
    assert sources == {"${datasource}"}


def data_sources(value: Any) -> Iterator[dict[str, str]]:
    """Every data source that a part of the dashboard names."""
    if isinstance(value, dict):
        if isinstance(value.get("datasource"), dict):
            yield value["datasource"]
        value = list(value.values())
    for part in value if isinstance(value, list) else []:
        yield from data_sources(part)


@pytest.mark.parametrize(
    "name", ["slurm/job.sbatch", "cron/nodeready", "systemd/nodeready-audit.service"]
)
def test_the_commands_of_an_example_parse(name):
    text = (SHARE / name).read_text()
    # The command behind what starts it: flock, env, eval, a schedule.
    found = re.findall(r"(?m)^[^#\n]*?\b(nodeready (?!explain)[a-z]+ [^#\n)&]*)", text)
    assert found
    for line in found:
        plain = line.replace("${INVENTORY}", "prod.py").replace('"$SLURM_JOB_ID"', "4711")
        (words,) = commands(f"```sh\n{plain}\n```\n")
        check(words)


def test_the_lines_for_slurm_are_those_of_the_page():
    lines = re.findall(r"^\w.*$", (SHARE / "slurm/slurm.conf").read_text(), re.M)
    assert "```text\n" + "\n".join(lines) + "\n```\n" in (DOCS / "gate.md").read_text()


SKILL = (SHARE / "skills/nodeready/SKILL.md").read_text()


def test_the_skill_has_a_name_and_commands_that_parse():
    about = yaml.safe_load(SKILL.split("---\n")[1])
    assert about["name"] == "nodeready"
    assert 50 < len(about["description"]) < 1024
    asked = [*commands(SKILL)]
    assert ["incident", "prod.py", "--job", "4711", "-o", "hang-4711"] in asked
    for words in asked:
        if words[0] != "deploy":
            check(words)


@pytest.mark.parametrize("document", ["stacks", "audit"])
def test_the_keys_that_the_skill_reads_exist(document):
    published = schema(document)
    table = SKILL.partition(f"In `nodeready.{document}/2`")[2].partition("\n\nIn ")[0]
    keys = re.findall(r"^\| `([\w.]+)` \|", table.partition("\n\nExit")[0], re.M)
    assert len(keys) > 5
    for key in keys:
        node = published
        for part in key.split("."):
            found = re.search(r'"#/\$defs/(\w+)"', json.dumps(node))
            if "properties" not in node and found:
                node = published["$defs"][found[1]]
            assert part in node["properties"], (key, part)
            node = node["properties"][part]


def test_the_kinds_of_a_verdict_are_all_in_the_skill():
    kinds = schema("stacks")["$defs"]["verdict"]["properties"]["kind"]["enum"]
    row = re.search(r"^\| `verdict.kind` \|(.*)$", SKILL, re.M)
    assert row
    assert sorted(re.findall(r"`([\w-]+)`", row[1])) == sorted(kinds)


# --- The workflows of the forge.

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_takes_actions_by_their_digest_and_runs_what_is_there(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]
        for step in job["steps"]:
            action = step.get("uses", "")
            assert not action or re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
            for program in re.findall(r"(?:^|\s)((?:\.ci|scripts)/[\w.]+)", step.get("run", "")):
                assert (ROOT / program).exists(), program


#: The first action against what loses the job -> the pattern for NVSentinel.
NVSENTINEL = {
    "reset_gpu": "reset-gpu", "reboot": "restart", "power_cycle": "restart",
    "reseat": "hardware", "replace": "hardware",
}  # fmt: skip


def gate_reasons() -> Iterator[tuple[str, str]]:
    """Each kind of reason with which a gate drains, and the name of its pattern."""
    yield drain.reason_of([]), "other"
    yield drain.reason_of(["nothing was looked at"]), "other"
    yield drain.reason_of(["a.b: loses job, reset GPU: x"]), "other"
    for status, severity, action in product(
        ("fail", "unknown"), ("", *SEVERITIES), ("", *ACTIONS)
    ):
        row = {"check": "a.b", "status": status, "severity": severity}
        rows = ({**row, "actions": (action,)} if action else row,)
        verdict = NodeVerdict(1.0, "", "", False, ("a.b: x, reboot: y", "c.d: z"), results=rows)
        is_fatal = (status, severity) == ("fail", "loses_job")
        name = NVSENTINEL.get(action, "other") if is_fatal else "other"
        yield drain.reason_of(verdict.costed_reasons), name


def test_nvsentinel_takes_a_drain_by_exactly_one_pattern():
    """As its parser does, with an empty delimiter: pkg/parser/parser.go."""
    patterns = tomllib.loads((SHARE / "nvsentinel/slurm-drain-monitor.toml").read_text())[
        "patterns"
    ]

    def matched(reason: str) -> list[str]:
        return [row["name"] for row in patterns if re.search(row["regex"], reason)]

    for reason, name in gate_reasons():
        # What another program drained is not ours; a pending drain may be over in a second.
        assert matched(reason.replace(drain.PREFIX, drain.PENDING.strip(), 1)) == []
        assert (matched(reason), matched(f"NHC: {reason}")) == ([f"nodeready-{name}"], []), reason

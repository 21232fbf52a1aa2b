"""The document of a deploy: its exit codes, the statuses of its nodes, and its formats."""

import json
import re
from dataclasses import replace

import pytest

from nodeready.core.text import sanitise
from nodeready.reports.registry import Options, find_format
from nodeready.runs.deploy.document import deploy_code
from tests.builders.deploys import DEPLOYS, PTRACE, SCOPE, node, well

CODES = {"check": 1, "result": 1, "well": 0, "interrupted": 130, "hostile": 1}
TABLE, JSON = find_format("deploy", "table"), find_format("deploy", "json")


@pytest.mark.parametrize("name", DEPLOYS)
def test_each_outcome_has_its_exit_code_and_steers_no_terminal(name):
    report = DEPLOYS[name]()
    assert deploy_code(report) == CODES[name]
    rows = "".join(TABLE.render(report, Options(diff=True))).splitlines()
    for row in (*rows, *"".join(JSON.render(report, Options(diff=True))).splitlines()):
        assert row == sanitise(row, 1_000_000)
    # Without --diff the same rows, without the differences of the files.
    plain = "".join(TABLE.render(report)).splitlines()
    assert plain == [row for row in rows if not re.match(" {6}[-+@]", row)]
    brief = json.loads("".join(JSON.render(report)))
    assert not any(change["diff"] for row in brief["nodes"] for change in row["changes"])


@pytest.mark.parametrize(
    ("change", "code"), [(node("n"), 0), (node("n", PTRACE, SCOPE), 3)], ids=["nothing", "one"]
)
def test_a_plan_with_a_change_is_a_failed_check(change, code):
    assert deploy_code(replace(well(), check=True, nodes=(change,))) == code


def test_quiet_shows_nothing_more_when_all_is_well():
    assert list(TABLE.lines(DEPLOYS["well"](), Options(quiet=True))) == []
    assert list(TABLE.lines(DEPLOYS["result"](), Options(quiet=True)))

"""The document of a deploy and its formats, byte for byte as in golden_deploy/.

A change that is meant: as in test_stacks_golden.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nodeready.deploy.document import deploy_code
from nodeready.reports.registry import Options, find
from nodeready.text import sanitise
from tests.builders.deploys import DEPLOYS, PTRACE, SCOPE, node

GOLDEN = Path(__file__).parent / "golden_deploy"
CODES = {"check": 1, "result": 1, "well": 0, "interrupted": 130, "hostile": 1}
OPTIONS = {"table": Options(), "diff": Options(diff=True), "json": Options(diff=True)}
CASES = [(name, form) for name in DEPLOYS for form in OPTIONS]


def made(name: str, form: str) -> str:
    row = find("deploy", "json" if form == "json" else "table")
    return "".join(row.render(DEPLOYS[name](), OPTIONS[form]))


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_report_is_as_its_golden_file(name, form):
    path = GOLDEN / f"{name}.{CODES[name]}.{form}"
    text = made(name, form).encode()
    old = path.read_bytes() if path.is_file() else b""
    if os.environ.get("NODEREADY_GOLDEN") == "write" and text != old:
        path.write_bytes(text)
        pytest.fail(f"{path.name} is written anew: read the difference")
    assert text == old


def test_no_golden_file_is_without_its_deploy():
    assert {path.name for path in GOLDEN.iterdir()} == {f"{n}.{CODES[n]}.{f}" for n, f in CASES}


@pytest.mark.parametrize("name", DEPLOYS)
def test_the_exit_code_is_the_documented_one(name):
    assert deploy_code(DEPLOYS[name]()) == CODES[name]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_nothing_that_a_node_says_can_steer_a_terminal(name, form):
    for row in made(name, form).splitlines():
        assert row == sanitise(row, 1_000_000)


def test_the_statuses_of_all_nodes():
    found = {one.name: one.status for one in DEPLOYS["check"]().nodes}
    assert found == {
        "gpu001": "to-change", "gpu002": "to-change", "gpu003": "to-change", "gpu004": "ok",
        "gpu005": "unknown", "gpu006": "for-a-person", "gpu007": "unreachable", "gpu008": "failed",
    }  # fmt: skip
    after = {one.name: one.status for one in DEPLOYS["result"]().nodes}
    assert (after["gpu001"], after["gpu002"]) == ("changed", "unreachable")
    assert (after["gpu003"], after["gpu009"]) == ("failed", "failed")


def test_a_plan_and_its_result_are_one_document():
    plan = json.loads(made("check", "json"))
    result = json.loads(made("result", "json"))
    assert set(plan) == set(result)
    assert {one["outcome"] for one in plan["nodes"]} == {None}
    first, after = plan["nodes"][0], result["nodes"][0]
    assert first["changes"] == after["changes"]
    (change,) = first["changes"]
    assert [one["check"] for one in change["checks"]] == ["ptrace.scope"]
    assert change["actions"][0]["path"] == "/etc/sysctl.d/60-nodeready.conf"
    assert change["actions"][1]["command"] == ["sysctl", "-w", "x=0"]
    assert "+kernel.yama.ptrace_scope = 0" in change["diff"]
    assert after["outcome"]["done"] == ["ptrace.sysctl"]


def test_differences_are_there_when_they_are_asked_for():
    text = "".join(find("deploy", "json").render(DEPLOYS["check"]()))
    assert all(not c["diff"] for n in json.loads(text)["nodes"] for c in n["changes"])


def test_quiet_says_nothing_more_when_all_is_well():
    row = find("deploy", "table")
    assert list(row.lines(DEPLOYS["well"](), Options(quiet=True))) == []
    assert list(row.lines(DEPLOYS["result"](), Options(quiet=True)))


@pytest.mark.parametrize(
    ("results", "code"), [((), 0), ((SCOPE,), 3)], ids=["nothing to do", "a change"]
)
def test_a_plan_that_changes_something_is_a_failed_check(results, code):
    from nodeready.deploy.document import Deploy

    one = node("gpu001", PTRACE, *results) if results else node("gpu001")
    assert deploy_code(Deploy("", "", True, (), (one,))) == code

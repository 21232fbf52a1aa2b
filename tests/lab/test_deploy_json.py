"""`nodeready deploy --format json` on real nodes: a document on standard output, nothing else."""

from __future__ import annotations

import json

import jsonschema

from tests.helpers import Done, nodeready
from tests.paths import schema

SCHEMA = schema("deploy")


def document(ran: Done) -> dict:
    made = json.loads(ran.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(made)
    return made


def statuses(made: dict) -> list[str]:
    return [node["status"] for node in made["nodes"]]


def test_a_plan_and_what_became_of_it(fresh_nodes, inventory):
    nodes = fresh_nodes(2)
    where = inventory(nodes)
    words = ("deploy", where, "--only", "ptrace", "--format", "json")

    plan = nodeready(*words, "--check", "--diff")
    made = document(plan)
    assert plan.returncode == 3
    assert made["check"]
    assert statuses(made) == ["to-change", "to-change"]
    assert [node["outcome"] for node in made["nodes"]] == [None, None]
    (change,) = made["nodes"][0]["changes"]
    assert change["step"] == "ptrace.scope"
    assert [check["check"] for check in change["checks"]] == ["ptrace.scope"]
    assert "+-kernel.yama.ptrace_scope = 0" in change["diff"]

    refused = nodeready(*words)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "add --yes" in refused.stderr

    done = nodeready(*words, "--yes")
    made = document(done)
    assert done.returncode == 0, done.stderr
    assert not made["check"]
    assert statuses(made) == ["changed", "changed"]
    assert made["nodes"][1]["outcome"]["done"] == ["ptrace.scope"]
    assert made["nodes"][1]["results"]["fail"] == 0

    nodes[1].stop_sshd()
    again = nodeready(*words, "--yes")
    made = document(again)
    assert again.returncode == 4
    assert statuses(made) == ["ok", "unreachable"]
    assert made["nodes"][1]["error"]
    assert made["summary"]["unreachable"] == 1

"""Go and no-go when nodes fail, hang, die half-way or talk nonsense, and after an interrupt."""

from __future__ import annotations

import json

from tests.fake import hangs, interrupts, says
from tests.unit.commands import AWAY, DIES, looks

WORDS = ("ready", "--only", "proof.limits", "--format", "json")


def results(done):
    return {
        node["name"]: {one["check"]: (one["status"], one["actual"]) for one in node["results"]}
        for node in json.loads(done.out)["nodes"]
    }


def test_each_nodes_trouble_is_its_own(run):
    nodes = {
        "away": AWAY,
        "mad": looks(says("welcome")),
        "dead": looks(DIES),
        "hung": looks(hangs),
    }
    done = run(nodes, *WORDS)
    told = {node["name"]: node for node in json.loads(done.out)["nodes"]}
    assert done.code == 4
    assert told["away"]["status"] == "unreachable"
    assert told["away"]["error"] == "n: no answer in 15 s"
    found = results(done)
    assert found["mad"]["proof.user"] == ("unknown", "did not finish in time")
    assert found["dead"]["proof.user"] == ("unknown", "connection lost")
    assert found["hung"]["proof.user"] == ("unknown", "did not finish in time")


def test_a_look_that_never_ends_costs_the_budget_and_that_node(run):
    done = run({"slow": looks(says(""), look=hangs), "mad": looks(says(""))}, *WORDS)
    told = {node["name"]: node for node in json.loads(done.out)["nodes"]}
    assert done.code == 3
    assert told["slow"]["error"] == ""


def test_an_interrupt_is_no_go_and_partial(run):
    done = run({"a": looks(says("")), "b": interrupts, "c": looks(says(""))}, *WORDS)
    assert done.code == 130
    assert "interrupted: the results are partial; not b,c" in done.err
    assert json.loads(done.out)["complete"] is False
    assert done.carrier.ended == 1

"""Stacks when nodes fail, hang, die half-way or talk nonsense, and after an interrupt."""

from __future__ import annotations

import json

from nodeready.node.stacks import program as answer
from nodeready.transport.base import TIMEOUT, Failure
from nodeready.transport.fake import hangs, interrupts, says
from tests.builders.traces import process, trace
from tests.unit.commands import AWAY, DIES, program


def node(rank: int):
    made = trace("itself", process(rank))
    return program(lambda nonce: f"a motd\n{nonce} {answer.pack(made)}\n")


def late(request):
    """It had said all when its time was over."""
    said = node(1)(request).stdout
    return Failure(said, kind=TIMEOUT, error="ended after 63 s")


def test_each_nodes_trouble_is_its_own(run):
    nodes = {
        "n0": node(0),
        "n1": late,
        "away": AWAY,
        "dead": DIES,
        "hung": hangs,
        "mad": says("welcome"),
        "old": program(lambda nonce: f"{nonce} no Python 3.9 or newer\n"),
    }
    done = run(nodes, "stacks", "--format", "json")
    told = json.loads(done.out)
    assert done.code == 4
    assert {one["node"] for one in told["processes"]} == {"n0", "n1"}
    text = done.out
    for words in ("no answer in 15 s", "connection lost", "no Python 3.9 or newer", "no answer"):
        assert words in text


def test_an_interrupt_leaves_what_came_until_then(run):
    nodes = {"n0": node(0), "n1": interrupts, "n2": node(2)}
    done = run(nodes, "stacks", "--format", "json")
    assert done.code == 130
    told = json.loads(done.out)
    assert told["complete"] is False
    assert [one["node"] for one in told["processes"]] == ["n0"]
    assert "interrupted: the results are partial; not n[1-2]" in done.err

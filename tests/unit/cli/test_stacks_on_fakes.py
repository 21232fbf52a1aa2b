"""Stacks when nodes fail, hang, die half-way or talk nonsense, and after an interrupt."""

from __future__ import annotations

import json

import pytest

from nodeready.cli.options import Refused
from nodeready.node.stacks import program as answer
from nodeready.transport.base import TIMEOUT, Failure
from tests.builders.traces import process, trace
from tests.fake import hangs, interrupts, says
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


def test_a_check_says_what_the_next_hang_would_lack(run):
    settings = {"torch": "2.6.0", "nccl": "2.21.5", "cuda": False, "core_bytes": 0}
    settings |= {"core_place": "core", "core_wrong": "", "dump_wrong": "", "variables": []}
    one = process(0, "main train.py 9", witnesses={"settings": {**settings, "dump_place": "/x"}})
    made = trace("itself", one)
    node_ = program(lambda nonce: f"{nonce} {answer.pack(made)}\n")
    done = run({"n0": node_}, "stacks", "--check")
    assert done.code == 3
    assert "fail     core         the limit of its cores is 0\n" in done.out
    told = json.loads(run({"n0": node_}, "stacks", "--check", "--format", "json").out)
    assert told["schema"] == "nodeready.debuggable/1"
    assert {one["nodes"][0] for one in told["findings"]} == {"n0"}
    for words in (("--format", "html"), ("-o", "x")):
        with pytest.raises(Refused, match="--check: "):
            run({"n0": node_}, "stacks", "--check", *words)

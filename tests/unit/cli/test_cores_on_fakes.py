"""Cores when nodes fail, hang, die half-way or talk nonsense, and after an interrupt."""

from __future__ import annotations

import json
from dataclasses import asdict

from nodeready.node.cores.program import File
from tests.fake import hangs, interrupts, one_by_one, says
from tests.unit.commands import AWAY, DIES, program

FILE = File("/c/core.1", inode=1, modified_ns=7, size_bytes=5, owner=0, age_s=0.0)


def listing(*files: dict[str, object]):
    row = {"places": ["/c/*"], "files": list(files), "more": 0, "notes": []}
    return program(lambda nonce: f"{nonce} listing {json.dumps(row)}\n")


def file(**more: object) -> dict[str, object]:
    return {**asdict(FILE), **more}


def test_each_nodes_trouble_is_its_own(run):
    nodes = {
        "none": listing(),
        "away": AWAY,
        "hung": hangs,
        "mad": says("welcome"),
        "lies": program(lambda nonce: f'{nonce} listing {{"places": 1}}\n'),
        # It lists a core, and dies when it is read.
        "dead": one_by_one(listing(file()), DIES),
        "mute": one_by_one(listing(file(path="/c/core.2", inode=2)), says("nonsense")),
    }
    done = run(nodes, "cores", "--format", "json")
    assert done.code == 1
    told = json.loads(done.out)
    why = told["errors"]
    assert why["away"] == "n: no answer in 15 s"
    assert why["hung"].startswith("no answer in ")
    assert why["mad"] == "no answer from the node's Python"
    assert "makes no sense" in why["lies"]
    assert why["dead"] == "connection lost"
    assert "no answer from the node's Python" in done.out


def test_an_interrupt_while_they_are_read(run):
    nodes = {"a": one_by_one(listing(file()), interrupts), "b": listing()}
    done = run(nodes, "cores", "--format", "json")
    assert done.code == 130
    assert json.loads(done.out)["complete"] is False
    assert "interrupted" in done.out
    assert done.carrier.ended == 1

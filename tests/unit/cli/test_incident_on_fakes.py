"""Incidents when nodes fail, lie or hang, and after an interrupt: what there is, is kept."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from nodeready.cli.options import Refused
from nodeready.node.stacks import program as answer
from tests.builders.traces import process, trace
from tests.fake import hangs, interrupts
from tests.unit.commands import AWAY, DIES, program

SECRET = "hf_abcdefghijABCDEFGHIJ0123"


def node(rank: int, **changes: object):
    made = trace("itself", {**process(rank), **changes})
    return program(lambda nonce: f"a motd\n{nonce} {answer.pack(made)}\n")


def index(place: Path) -> dict:
    return json.loads((place / "incident.json").read_text())


def test_each_nodes_trouble_is_named_and_costs_its_own(run, tmp_path):
    place = tmp_path / "kept"
    nodes = {"n0": node(0), "n1": node(1), "away": AWAY, "dead": DIES, "hung": hangs}
    done = run(nodes, "incident", "--job", "4711", "-o", str(place))
    assert done.code == 4
    stacks, *others = index(place)["parts"]
    assert stacks["status"] == "partial"
    assert stacks["errors"].keys() == {"away", "dead", "hung"}
    assert sorted(stacks["unreached"]) == ["away", "dead"]
    assert [part["name"] for part in others] == ["logs", "cores", "audit"]
    assert done.out.startswith("job 4711")
    assert (place / "README.txt").read_text().splitlines()[0] == done.out.splitlines()[0]


def test_an_interrupt_packs_what_there_is(run, tmp_path):
    place = tmp_path / "kept"
    done = run(
        {"n0": node(0), "n1": interrupts, "n2": node(2)},
        *("incident", "--job", "4711", "-o", str(place)),
    )
    assert done.code == 130
    found = index(place)
    assert found["complete"] is False
    assert [(one["status"], one["why"]) for one in found["parts"]] == [
        ("partial", "interrupted"), *[("missing", "interrupted")] * 3,
    ]  # fmt: skip
    with tarfile.open(f"{place}.tar.gz") as archive:
        assert "kept/stacks/trace-n0.json" in archive.getnames()


def test_what_a_node_says_has_no_secret_no_path_and_no_escape(run, tmp_path):
    place = tmp_path / "kept"
    told = {
        "command": f"train.py --token {SECRET} \x1b[31m",
        "witnesses": {
            "logs": {"path": "/var/log/../../etc/\x1b[2Jx", "lines": [f"T={SECRET}\x1b[2J"]}
        },
    }
    nodes = {"n0": node(0, **told)}
    run(nodes, "incident", "--job", f"../{SECRET}", "-o", str(place))
    files = [path for path in place.rglob("*") if path.is_file()]
    assert {path.parent.parent for path in files} <= {place, tmp_path}
    assert any(path.parent.name == "logs" for path in files)
    for path in files:
        text = path.read_text()
        assert SECRET not in text, path
        assert "\x1b" not in text, path


def test_a_place_that_is_taken_is_refused_before_any_node(run, tmp_path):
    place = tmp_path / "kept"
    place.mkdir()
    (place / "notes").write_text("mine")
    with pytest.raises(Refused, match="holds other files \\(notes\\) already"):
        run({"n0": node(0)}, "incident", "--job", "4711", "-o", str(place))
    assert (place / "notes").read_text() == "mine"

"""`nodeready.facts` through pyinfra's own command, on this machine."""

import dataclasses
import json

import pytest

import nodeready
from nodeready.core.result import Result
from nodeready.subjects.registry import LOOKED_AT
from tests.unit.commands import pyinfra

#: Counts the questions to nodes, and keeps them and the facts in a file.
PROJECT = """
import json
from pathlib import Path
from pyinfra import host
from nodeready.facts import *
from nodeready.fleet.transport.ssh import ConnectedHosts
asked, facts, converse = [], [], ConnectedHosts.converse
def counted(self, conversations, *rest):
    asked.extend(conversations)
    return converse(self, conversations, *rest)
ConnectedHosts.converse = counted
for fact, arguments in {facts!r}:
    facts.append(host.get_fact(globals()[fact], **arguments))
Path("facts.json").write_text(json.dumps([len(asked), facts]))
"""
MISSPELT = "command line: unknown setting ptrace_scop: did you mean ptrace_scope?"


@pytest.mark.parametrize(("facts", "questions"), [
    ([("NodeFacts", {}), ("Ptrace", {}), ("Verdicts", {"only": "ptrace,limits"})], 1),
    ([("Ptrace", {}), ("Ptrace", {}), ("Verdicts", {"only": "ptrace,limits"})], 2),
    ([("Verdicts", {"only": "ptrace,limits"}), ("Ptrace", {}), ("NodeFacts", {})], 2),
])  # fmt: skip
def test_the_facts_of_a_run_share_one_snapshot(facts, questions, tmp_path):
    (tmp_path / "deploy.py").write_text(PROJECT.replace("{facts!r}", repr(facts)))
    done = pyinfra("-y", "@local", "deploy.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    asked, values = json.loads((tmp_path / "facts.json").read_text())
    assert asked == questions
    value_of = {name: value for (name, _), value in zip(facts, values, strict=True)}
    assert value_of["Ptrace"].keys() >= {"live", "boot"}
    if "NodeFacts" in value_of:
        assert value_of["NodeFacts"].keys() == {*LOOKED_AT}
        assert value_of["NodeFacts"]["ptrace"] == value_of["Ptrace"]
    assert {row["check"].partition(".")[0] for row in value_of["Verdicts"]} == {"ptrace", "limits"}


def test_the_verdicts_are_those_of_an_audit(tmp_path):
    words = ("@local", "fact", "nodeready.facts.Verdicts", "skip=ports,host,nics")
    done = pyinfra(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    shown = json.loads(text[text.index("\n{") : text.rindex("\n}") + 2])
    (node,) = nodeready.audit("@local", skip="ports,host,nics").nodes
    expected = [(result.check, result.status, result.expected) for result in node.results]
    assert [(row["check"], row["status"], row["expected"]) for row in shown["@local"]] == expected
    assert shown["@local"][0].keys() == {field.name for field in dataclasses.fields(Result)}


@pytest.mark.parametrize(("words", "line"), [
    (("@local", "fact", "nodeready.facts.Verdicts", "only=nosuch"), "--only nosuch: no such"),
    (("--data", "ptrace_scop=1", "@local", "fact", "nodeready.facts.Ptrace"), MISSPELT),
    (("--data", "ptrace_scop=1", "@local", "fact", "nodeready.facts.Verdicts"), MISSPELT),
])  # fmt: skip
def test_a_mistake_is_one_line(words, line, tmp_path):
    done = pyinfra(*words, cwd=tmp_path)
    assert done.stderr.count(line) == 1, done.stderr
    assert "Traceback" not in done.stderr

"""`nodeready waivers`: what it says when a node does not answer, and without a waiver."""

from __future__ import annotations

from nodeready.core.policy import Policy
from nodeready.core.settings import Waiver
from tests.unit.commands import AWAY, SOUND

STRICT = Policy(ptrace_scope=2, waivers=(Waiver("ptrace.scope", "ticket 4711"),))


def test_a_node_without_an_answer_is_named_and_hides_no_finding(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "group_data").mkdir()
    (tmp_path / "group_data/all.py").write_text('waivers = {"ptrace.scope": "ticket 4711"}\n')
    done = run({"a": SOUND, "b": AWAY}, "waivers", policy=STRICT)
    assert done.code == 4
    assert done.out.splitlines()[:3] == [
        "holds    ptrace.scope  a,b",
        "         does not end: ticket 4711",
        "         waived  a  0, next boot 0",
    ]
    assert "unreachable  b\n" in done.out


def test_without_a_waiver_no_node_is_asked(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run({"a": AWAY}, "waivers")
    assert (done.code, done.out, done.transport.asked) == (0, "0 waivers\n", [])

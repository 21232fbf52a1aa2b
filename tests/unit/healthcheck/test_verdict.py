"""Which verdict is believed, and what the node's commands make of it."""

import json
import syslog
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nodeready.agent.gate import drain, gate, here
from nodeready.agent.gate.drain import DrainError
from nodeready.agent.verdict import NodeVerdict
from nodeready.core.policy import Policy, PolicyError
from nodeready.subjects.gate import facts
from nodeready.subjects.gate.facts import Hold
from tests.builders.fleets import MEMLOCK, RCMD, SCOPE, audit, node, rated
from tests.builders.results import unknown
from tests.cases import cases, with_table

GOOD = NodeVerdict(1000.0, "boot", "policy", True)
BAD = NodeVerdict(1000.0, "boot", "policy", False, ("gpus.present: 7",))
LATE = rated(unknown("gpus.tool", "late"))
NOW = {"now_s": 1060.0, "boot_id": "boot", "policy_digest": "policy", "max_age_s": 60}


@pytest.mark.parametrize("verdict", [GOOD, BAD], ids=["go", "no-go"])
def test_a_written_verdict_is_read(verdict):
    assert gate.parse(verdict.text().encode()) == verdict
    assert gate.valid_verdict(verdict, **NOW) == verdict


@pytest.mark.parametrize(("results", "reasons"), [
    ([SCOPE, RCMD], ["loses job, configure: pdsh.rcmd: rsh", "ptrace.scope: 1"]),
    ([SCOPE, LATE], ["loses job? inspect: gpus.tool: late", "ptrace.scope: 1"]),
    ([RCMD, LATE], ["loses job, configure: pdsh.rcmd: rsh", "gpus.tool: late"]),
    ([SCOPE, MEMLOCK], ["hides cause, deploy: ptrace.scope: 1"]),
    ([MEMLOCK], []),
], ids=["two failures", "the worst is unknown", "as bad", "a warning", "go"])  # fmt: skip
def test_the_reasons_begin_with_the_worst_cost_and_its_first_action(results, reasons):
    verdict = gate.node_verdict(audit(node("n1", *results)), Policy())
    assert list(verdict.costed_reasons) == reasons
    assert gate.parse(verdict.text().encode()).costed_reasons == verdict.costed_reasons


def test_a_stale_verdict_is_none():
    stale = [("now_s", moment) for moment in (1060.1, 999.9, -1.0)]
    stale += [("max_age_s", 0), ("boot_id", "another"), ("boot_id", "")]
    for name, value in (*stale, ("policy_digest", "another")):
        assert gate.valid_verdict(GOOD, **{**NOW, name: value}) is None, (name, value)
    assert gate.valid_verdict(None, **NOW) is None
    assert gate.valid_verdict(replace(GOOD, boot_id=""), **{**NOW, "boot_id": ""}) is None
    for moment in (float("nan"), float("inf"), float("-inf")):
        assert gate.valid_verdict(replace(GOOD, time=moment), **NOW) is None


@pytest.mark.parametrize("case", cases(__file__, "data/verdicts.json"))
def test_a_verdict_with_a_wrong_field_is_none(case):
    changes = {key: value for key, value in case.items() if key != "name"}
    assert gate.parse(json.dumps({**json.loads(BAD.text()), **changes}).encode()) is None


def test_a_text_that_is_no_verdict_is_none():
    whole = BAD.text().encode()
    never = whole.replace(b'"time": ', b'"time": 1' + b"0" * 400)
    for text in (b"", b"null", b"[]", b"{}", whole[:-3], b"\xff\xfe{", b"[" * 100_000, never):
        assert gate.parse(text) is None


@pytest.fixture
def slurm(monkeypatch, tmp_path) -> Iterator[list[DrainError | str]]:
    """What Slurm makes of each drain or undrain to come; the node has no verdict yet."""
    answers: list[DrainError | str] = []

    def drain_or_undrain(reasons, is_ready, maximum, until, before):
        # What keeps the node in service is no reason to drain it.
        assert not any("gate.drain" in reason for reason in reasons)
        answer = answers.pop(0)
        if isinstance(answer, DrainError):
            raise answer
        return answer

    monkeypatch.setattr(drain, "drain_or_undrain", drain_or_undrain)
    monkeypatch.setattr(drain, "HELD", str(tmp_path / "run/held"))
    monkeypatch.setattr(syslog, "syslog", lambda *words: None)
    monkeypatch.setattr(gate, "read", lambda *given: None)
    yield answers
    assert answers == []


DRAINS = Policy(gate=True, gate_textfile="", gate_drain=True)
NO_GO = "nodeready: no-go: hides cause, deploy: ptrace.scope: 1\n"
SILENT, FULL = DrainError("no controller"), DrainError("20 of 200 nodes", 200)


def test_the_commands_keep_the_verdict_and_report_it(monkeypatch, capsys, slurm):
    written: list[NodeVerdict] = []
    monkeypatch.setattr(here, "audit", lambda *given: audit(node("n1", SCOPE)))
    monkeypatch.setattr(gate, "write", written.append)
    for command, answers, code, line in (
        (gate.record, [], 3, NO_GO),
        (gate.healthcheck, ["n1 state=drain"], 3, NO_GO),
        (gate.prolog, ["n1 state=drain"], 3, NO_GO),
    ):
        slurm += answers
        assert command(DRAINS, Namespace()) == code
        assert capsys.readouterr() == (line, "")
    assert {(verdict.go, verdict.node) for verdict in written} == {(False, "n1")}
    monkeypatch.setattr(gate, "read", lambda *given: GOOD)
    assert gate.prolog(DRAINS, Namespace()) == 0
    assert capsys.readouterr() == ("nodeready: go\n", "")


@pytest.mark.parametrize("held", [SILENT, FULL], ids=str)
def test_a_node_that_is_kept_in_service_says_so_everywhere(
    monkeypatch, capsys, tmp_path, slurm, held
):
    """In the log, the prolog's answer, the verdict, the metrics, until it is ready or drained."""
    metrics, logged = tmp_path / "nodeready.prom", []
    policy = replace(DRAINS, gate_textfile=str(metrics))
    results = [SCOPE]
    monkeypatch.setattr(here, "audit", lambda *given: audit(node("n1", *results)))
    monkeypatch.setattr(gate, "PATH", str(tmp_path / "run/verdict.json"))
    monkeypatch.setattr(gate.write, "__defaults__", (gate.PATH,))
    monkeypatch.setattr(syslog, "syslog", lambda level, text: logged.append((level, text)))

    def is_shown() -> bool:
        verdict = gate.parse((tmp_path / "run/verdict.json").read_bytes())
        assert verdict is not None
        rows = {row["check"]: row for row in verdict.results}
        assert ("gate.drain" in rows) is ('check="gate.drain"' in metrics.read_text())
        assert "gate.drain" in {*rows, *verdict.ok}
        return "gate.drain" in rows and f"not drained: {held}" in rows["gate.drain"]["actual"]

    slurm.append(held)
    assert gate.healthcheck(policy, Namespace()) == 1
    assert f"not drained: {held}" in capsys.readouterr().err
    words = "not ready: hides cause, deploy: ptrace.scope: 1"
    assert logged == [(syslog.LOG_ERR, f"nodeready: not drained: {held}; {words}")]
    assert is_shown()
    assert gate.record(policy, Namespace()) == 3
    assert is_shown()
    # The prolog trusts that the share is filled, and asks again where Slurm did not answer. With
    # another policy it asks in any case.
    if held is SILENT:
        slurm.append(held)
    assert gate.prolog(policy, Namespace()) == 3
    slurm.append(FULL)
    other = replace(policy, gate_interval_s=99)
    capsys.readouterr()
    assert gate.prolog(other, Namespace()) == 3
    assert capsys.readouterr().out == "nodeready: held: not drained: 20 of 200 nodes\n"
    # It is drained, or ready. So few nodes may ask Slurm again at once.
    monkeypatch.setattr(facts, "_LOOKS_PER_S", 1e9)
    slurm += [held, "n1 state=drain"]
    gate.healthcheck(policy, Namespace())
    assert is_shown()
    gate.healthcheck(policy, Namespace())
    assert not is_shown()
    slurm.append(held)
    gate.healthcheck(policy, Namespace())
    assert is_shown()
    results.clear()
    results.append(MEMLOCK)
    assert gate.record(policy, Namespace()) == 0
    assert not is_shown()


HOLD = Hold(1000, 4000, "abc", "20 of 4000 nodes")


@with_table("hold, now_s, trusted_s, is_valid")
def test_how_long_a_filled_share_is_believed(hold, now_s, trusted_s, is_valid):
    hold = replace(HOLD, **hold)
    assert Hold.parse(hold.line()) == hold
    assert hold.is_valid(now_s, "abc", trusted_s) is is_valid


def test_a_line_that_is_no_hold_is_none():
    for line in ("", "\n", "1 2 abc", "x 2 abc y", "1 2 xyz y", HOLD.line().replace(" ", "\n")):
        assert Hold.parse(line) is None, line


def test_the_options_of_the_nodes_own_ready_go_before_its_policy():
    said = Namespace(ports="30000-30009", gpus=4, user="ada")
    changed = here._with_options(Policy(port_range="1-9", gpu_count=8, job_user="ml"), said)
    assert changed == Policy(port_range=(30000, 30009), gpu_count=4, job_user="ada")
    none = Namespace(ports=None, gpus=None, user=None)
    assert here._with_options(changed, none) == changed
    for name, value in (("ports", "9-1"), ("gpus", -1)):
        with pytest.raises(PolicyError, match=f"--{name}"):
            here._with_options(changed, Namespace(**{**vars(none), name: value}))

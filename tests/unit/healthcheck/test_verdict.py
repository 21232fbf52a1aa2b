"""Which verdict is believed, and what the node's commands make of it."""

from __future__ import annotations

import json
import syslog
from argparse import Namespace
from dataclasses import replace

import pytest

from nodeready.audit.verdict import NodeVerdict
from nodeready.healthcheck import drain, gate, here
from nodeready.healthcheck.drain import DrainError
from nodeready.policy import Policy
from nodeready.policy.policy import PolicyError
from nodeready.subjects.result import unknown
from tests.builders.fleets import MEMLOCK, RCMD, SCOPE, audit, node, rated
from tests.cases import cases

GOOD = NodeVerdict(1000.0, "boot", "policy", True)
BAD = NodeVerdict(1000.0, "boot", "policy", False, ("gpus.present: 7",))
LATE = rated(unknown("gpus.tool", "late"))
NOW = {"now_s": 1060.0, "boot_id": "boot", "policy_digest": "policy", "max_age_s": 60}


@pytest.mark.parametrize("verdict", [GOOD, BAD], ids=["go", "no-go"])
def test_a_written_verdict_is_read(verdict):
    assert gate.parse(verdict.text().encode()) == verdict
    assert gate.valid_verdict(verdict, **NOW) == verdict


@pytest.mark.parametrize(
    ("results", "reasons"),
    [
        ([SCOPE, RCMD], ["loses job, configure: pdsh.rcmd: rsh", "ptrace.scope: 1"]),
        ([SCOPE, LATE], ["loses job? inspect: gpus.tool: late", "ptrace.scope: 1"]),
        ([RCMD, LATE], ["loses job, configure: pdsh.rcmd: rsh", "gpus.tool: late"]),
        ([SCOPE, MEMLOCK], ["hides cause, deploy: ptrace.scope: 1"]),
        ([MEMLOCK], []),
    ],
    ids=["two failures", "the worst is unknown", "as bad", "a warning", "go"],
)
def test_the_reasons_begin_with_the_worst_cost_and_its_first_action(results, reasons):
    verdict = gate.node_verdict(audit(node("n1", *results)), Policy())
    assert list(verdict.costed_reasons) == reasons
    assert gate.parse(verdict.text().encode()).costed_reasons == verdict.costed_reasons


def test_a_stale_verdict_is_none():
    for more in (
        {"now_s": 1060.1},
        {"now_s": 999.9},
        {"now_s": -1.0},
        {"max_age_s": 0},
        {"boot_id": "another"},
        {"boot_id": ""},
        {"policy_digest": "another"},
    ):
        assert gate.valid_verdict(GOOD, **{**NOW, **more}) is None, more
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


def test_the_commands_keep_the_verdict_and_report_it(monkeypatch, capsys):
    def drain_or_undrain(reasons, is_ready, until, before):
        raise DrainError(f"{reasons[0]}: no controller, {is_ready}")

    written: list[NodeVerdict] = []
    policy = Policy(gate=True, gate_textfile="", gate_drain=True)
    monkeypatch.setattr(here, "audit", lambda *given: audit(node("n1", SCOPE)))
    monkeypatch.setattr(gate, "write", written.append)
    monkeypatch.setattr(gate, "read", lambda *given: None)
    monkeypatch.setattr(drain, "drain_or_undrain", drain_or_undrain)
    monkeypatch.setattr(syslog, "syslog", lambda *words: None)
    (line,) = [
        f"nodeready: no-go: hides cause, deploy: {reason}\n"
        for reason in gate.node_verdict(here.audit(), policy).reasons
    ]
    for command, code, err in (
        (gate.record, 3, ""),
        (gate.healthcheck, 1, "no controller, False"),
        (gate.prolog, 3, "no controller, False"),
    ):
        assert command(policy, Namespace()) == code
        shown = capsys.readouterr()
        assert shown.out == line
        assert err in shown.err
        assert bool(err) == bool(shown.err)
    assert [(verdict.go, verdict.node) for verdict in written] == [(False, "n1")] * 2
    monkeypatch.setattr(gate, "read", lambda *given: GOOD)
    assert gate.prolog(policy, Namespace()) == 0
    assert capsys.readouterr() == ("nodeready: go\n", "")


def test_the_options_of_the_nodes_own_ready_go_before_its_policy():
    said = Namespace(ports="30000-30009", gpus=4, user="ada")
    changed = here._with_options(Policy(port_range="1-9", gpu_count=8, job_user="ml"), said)
    assert changed == Policy(port_range=(30000, 30009), gpu_count=4, job_user="ada")
    assert here._with_options(changed, Namespace(ports=None, gpus=None, user=None)) == changed
    for wrong in ({"ports": "9-1"}, {"gpus": -1}):
        with pytest.raises(PolicyError, match="--" + next(iter(wrong))):
            here._with_options(
                changed, Namespace(**{"ports": None, "gpus": None, "user": None, **wrong})
            )

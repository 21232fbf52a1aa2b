"""Which verdict is believed: one of this boot, by this policy, and not too old."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nodeready.audit.verdict import Verdict
from nodeready.healthcheck import gate
from tests.cases import cases

GOOD = Verdict(1000.0, "boot", "policy", True)
BAD = Verdict(1000.0, "boot", "policy", False, ("gpus.present: 7",))
NOW = {"now": 1060.0, "boot_id": "boot", "policy_digest": "policy", "max_age_s": 60}


@pytest.mark.parametrize("verdict", [GOOD, BAD], ids=["go", "no-go"])
def test_a_written_verdict_is_read(verdict):
    assert gate.parse(verdict.text().encode()) == verdict
    assert gate.fresh(verdict, **NOW) == verdict


def test_a_stale_verdict_is_none():
    for more in (
        {"now": 1060.1},
        {"now": 999.9},
        {"now": -1.0},
        {"max_age_s": 0},
        {"boot_id": "another"},
        {"boot_id": ""},
        {"policy_digest": "another"},
    ):
        assert gate.fresh(GOOD, **{**NOW, **more}) is None, more
    assert gate.fresh(None, **NOW) is None
    assert gate.fresh(replace(GOOD, boot_id=""), **{**NOW, "boot_id": ""}) is None
    for moment in (float("nan"), float("inf"), float("-inf")):
        assert gate.fresh(replace(GOOD, time=moment), **NOW) is None


@pytest.mark.parametrize("case", cases(__file__, "data/verdicts.json"))
def test_a_verdict_with_a_wrong_field_is_none(case):
    changes = {key: value for key, value in case.items() if key != "name"}
    assert gate.parse(json.dumps({**json.loads(BAD.text()), **changes}).encode()) is None


def test_a_text_that_is_no_verdict_is_none():
    whole = BAD.text().encode()
    never = whole.replace(b'"time": ', b'"time": 1' + b"0" * 400)
    for text in (b"", b"null", b"[]", b"{}", whole[:-3], b"\xff\xfe{", b"[" * 100_000, never):
        assert gate.parse(text) is None

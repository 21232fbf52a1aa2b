"""Which verdict is believed: only one of this boot, by this policy, not too old, and root's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nodeready.audit.verdict import Verdict
from nodeready.healthcheck import gate

GOOD = Verdict(1000.0, "boot", "policy", True)
BAD = Verdict(1000.0, "boot", "policy", False, ("gpus.present: 7",))
NOW = {"now": 1060.0, "boot_id": "boot", "policy_digest": "policy", "max_age_s": 60}


@pytest.mark.parametrize("found", [GOOD, BAD], ids=["go", "no-go"])
def test_what_is_written_is_read(found):
    assert gate.parse(found.text().encode()) == found
    assert gate.fresh(found, **NOW) == found


@pytest.mark.parametrize(
    "more",
    [
        {"now": 1060.1},
        {"now": 999.9},
        {"now": -1.0},
        {"max_age_s": 0},
        {"boot_id": "another"},
        {"boot_id": ""},
        {"policy_digest": "another"},
    ],
    ids=str,
)
def test_a_stale_one_is_none(more):
    assert gate.fresh(GOOD, **{**NOW, **more}) is None


def test_there_may_be_none():
    assert gate.fresh(None, **NOW) is None
    assert gate.fresh(replace(GOOD, boot_id=""), **{**NOW, "boot_id": ""}) is None


def changed(**more: object) -> bytes:
    return json.dumps({**json.loads(BAD.text()), **more}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        BAD.text().encode()[:-3],
        b"\xff\xfe{",
        b"[" * 100_000,
        changed(schema="nodeready.verdict/2"),
        changed(go=1),
        changed(go="true"),
        changed(go=True),  # with a reason why not
        changed(reasons=[]),  # a no-go that does not say why
        changed(reasons="none"),
        changed(reasons=[1]),
        changed(time="now"),
        changed(time=True),
        changed(boot_id=None),
        changed(policy_digest=7),
        changed(more=1),
    ],
)
def test_what_is_no_verdict_is_none(text):
    assert gate.parse(text) is None


@pytest.mark.parametrize("moment", [float("nan"), float("inf"), float("-inf")])
def test_a_time_that_is_no_time_is_never_fresh(moment):
    assert gate.fresh(replace(GOOD, time=moment), **NOW) is None

"""The body of `--notify`: bounded, and by the schema."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema

from nodeready.audit.document import Audit, NodeReport
from nodeready.reports.notification import MAX_BYTES, bad_statuses, notification
from nodeready.reports.schema import schema
from nodeready.subjects.result import fail
from tests.builders.fleets import outcomes

AUDIT = outcomes()["mixed"]


def test_a_body_has_at_most_64_kb_and_counts_what_is_left_out():
    nodes = tuple(
        NodeReport.of(f"rack{n % 97}-x{n}", [fail(f"a.b{n}", "x", "\u2028" * 5000)])
        for n in range(300)
    )
    audit = replace(AUDIT, nodes=nodes)
    body = notification(audit, {}, "audit", "x" * 5000).body()
    made = json.loads(body)
    assert len(body) <= MAX_BYTES
    assert made["changes"][0]["count"] == 300
    assert len(made["findings"]) + made["left_out"] == 300
    assert made["findings"]


def test_a_body_is_by_the_schema():
    body = notification(AUDIT, {"gpu001": "fail"}, "audit", "prod.py").body()
    jsonschema.validate(json.loads(body), schema("notification"))


def test_a_look_without_a_change_has_none():
    assert notification(AUDIT, bad_statuses(AUDIT), "audit", "prod.py") is None
    waived: Audit = outcomes()["waived"]
    assert notification(waived, {}, "audit", "prod.py") is None

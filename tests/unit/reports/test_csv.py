"""An audit as CSV: a row per node and result, and no cell is a formula."""

import csv
import io
from dataclasses import replace

import pytest

from nodeready.agent.audit_document import Ready
from nodeready.reports.registry import find_format
from tests.builders.fleets import outcomes
from tests.builders.results import fail

AUDITS = outcomes()


def rows_of(document, kind="audit"):
    text = "".join(find_format(kind, "csv").render(document))
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def test_each_result_of_each_node_is_a_row():
    audit = AUDITS["mixed"]
    rows = rows_of(audit)
    assert rows == rows_of(Ready(audit, 60), "ready")
    failed = [row for row in rows if not row["check"]]
    errors = [(node.name, node.status) for node in audit.nodes if node.error]
    assert [(row["node"], row["status"]) for row in failed] == errors
    assert all(row["actual"] for row in failed)
    results = [(node.name, result.check) for node in audit.nodes for result in node.results]
    assert [(row["node"], row["check"]) for row in rows if row["check"]] == results


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "\uff1d1", "\n=1"]
)
def test_no_cell_is_a_formula(text):
    node = replace(AUDITS["ok"].nodes[0], results=(fail("nics.mtu", text, 'a,"b"\r\nc', "x=1"),))
    (row,) = rows_of(replace(AUDITS["ok"], nodes=(node,)))
    assert row["expected"][0] in "'\\"
    assert (row["actual"], row["source"]) == ('a,"b"\\x0d\\x0ac', "x=1")

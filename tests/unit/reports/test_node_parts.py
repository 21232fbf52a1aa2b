"""The parts of a node: serial numbers, firmware and errors, and nothing of the site."""

import json
import re
from dataclasses import replace

import pytest

from nodeready.agent.audit_document import NodeReport
from nodeready.core.base import Unknown
from nodeready.reports.evidence_html import PART_TABLES, observed_facts
from nodeready.subjects.gpus.gpu import KernelFault
from nodeready.subjects.snapshot import Snapshot
from tests.builders import gpus, host, job_env, nics
from tests.cases import read_table

XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=4711, name=secret.py, GPU has fallen off the bus."


def tables() -> dict[str, list[dict[str, str]]]:
    seen = replace(
        gpus.h100().observed(),
        kernel_faults=(KernelFault("xid", 79, "0000:1b:00.0", XID, "REBOOT", 3, 3600, 7200),),
    )
    subjects = {
        "gpus": seen, "host": host.node(), "nics": nics.gpu_node(),
        "rdma": job_env.rdma("mlx5_0", "mlx5_1"), "ports": Unknown("timed out"),
    }  # fmt: skip
    node = NodeReport("gpu007", "fail", snapshot=Snapshot(subjects))
    facts = observed_facts(node.facts, "2030-01-02T03:04:05Z")
    return {
        table.name: [dict(zip(table.columns, row, strict=True)) for row in table.rows(facts)]
        for table in PART_TABLES
    }


@pytest.mark.parametrize("uptime_s", [2**63 - 1, -(2**63), 10**19 - 1])
def test_an_uptime_beyond_all_years_has_no_moment(uptime_s):
    facts = observed_facts(
        {"host": {"uptime_s": uptime_s, "boot_id": "x"}}, "2030-01-02T03:04:05Z"
    )
    (row,) = PART_TABLES[0].rows(facts)
    assert [text for text in row if text] == ["x"]


#: table -> the number of its rows, and a part of its first row
FIRST_ROWS = read_table(__file__, "FIRST_ROWS")


def test_the_tables_of_a_node():
    rows = tables()
    assert {name: len(of_table) for name, of_table in rows.items()} == {
        name: count for name, (count, _) in FIRST_ROWS.items()
    }
    for name, (count, first) in FIRST_ROWS.items():
        assert not count or first.items() <= rows[name][0].items(), name


def test_the_tables_have_nothing_of_the_site():
    """No address, path, host name, user or program."""
    text = json.dumps(tables())
    assert not re.search(r"10\.\d+\.|/home|/sys|secret|gpu007", text)


def test_a_node_whose_subjects_were_not_observed_has_no_parts():
    node = NodeReport("a", "unknown", snapshot=Snapshot({"gpus": Unknown("x")}))
    facts = observed_facts(node.facts, "2030-01-02T03:04:05Z")
    assert not any(table.rows(facts) for table in PART_TABLES)

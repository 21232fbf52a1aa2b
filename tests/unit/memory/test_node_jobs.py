"""The ends of completed jobs, as `sacct` lists them."""

from __future__ import annotations

from datetime import datetime

from nodeready.memory.node_jobs import last_job_ends, parse_ends


def test_the_latest_end_of_each_node():
    text = (
        "2026-11-03T08:30:00|gpu[001-002]\n2026-11-02T08:30:00|gpu002,gpu007\n"
        "Unknown|gpu009\n2026-11-04T00:00:00|None assigned\n|\nnonsense\n"
    )
    third, second = datetime(2026, 11, 3, 8, 30), datetime(2026, 11, 2, 8, 30)
    assert parse_ends(text) == {
        "gpu001": third.timestamp(),
        "gpu002": third.timestamp(),
        "gpu007": second.timestamp(),
    }


def test_a_failing_sacct_is_no_error(tmp_path):
    sacct = tmp_path / "sacct"
    sacct.write_text("#!/bin/sh\necho 'slurmdbd is down' >&2; exit 1\n")
    sacct.chmod(0o755)
    ends, problem = last_job_ends(["a"], 0.0, {"PATH": str(tmp_path)})
    assert (ends, problem.rpartition(" failed: ")[2]) == ({}, "slurmdbd is down")

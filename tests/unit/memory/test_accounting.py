"""The ends of completed jobs and the drains of nodes, as Slurm's accounting lists them."""

from datetime import datetime

from nodeready.runs.memory.accounting import last_job_ends, node_drains, parse_drains, parse_ends


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


def test_drains_are_read_with_any_reason():
    """Recorded with Slurm 22.05: ``sacctmgr list event format=NodeName,Start,State,Reason``."""
    text = (
        "|2026-11-26T18:29:31||Cluster Registered TRES\n"
        "vm|2026-11-26T18:29:50|DRAIN|nodeready: (pending) loses job, reset GPU: gpus.ecc|x\n"
        "vm|2026-11-26T18:29:52|DRAIN|nodeready: loses job, reset GPU: gpus.ecc|errors x\n"
        "vm|2026-11-26T18:29:56|MAINT|the first Tuesday\n"
    )
    (drain,) = parse_drains(text)
    assert drain.time_s == datetime(2026, 11, 26, 18, 29, 52).timestamp()
    assert (drain.node, drain.kind) == ("vm", "drain")
    assert drain.text == "DRAIN: nodeready: loses job, reset GPU: gpus.ecc|errors x"


def test_without_accounting_there_is_no_drain(tmp_path):
    assert node_drains(0.0, ["a"], {"PATH": str(tmp_path)}) == (
        [],
        "sacctmgr is not installed here",
    )

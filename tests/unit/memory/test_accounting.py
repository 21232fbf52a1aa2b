"""The jobs and the drains of nodes, as Slurm's accounting lists them."""

from datetime import datetime

from nodeready.runs.memory.history import node_drains, node_jobs, parse_drains


def test_a_failing_sacct_is_no_error(stand_ins):
    stand_ins(sacct="echo 'slurmdbd is down' >&2; exit 1")
    jobs, problem = node_jobs("a", 0.0)
    assert (jobs, problem.rpartition(" failed: ")[2]) == ([], "slurmdbd is down")


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


def test_without_accounting_there_is_no_drain(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node_drains(0.0, ["a"]) == ([], "sacctmgr is not installed here")

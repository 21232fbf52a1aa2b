"""What Slurm is told about a node, and above all what it is not told."""

import time

import pytest

from nodeready.agent.gate import drain
from nodeready.agent.gate.drain import DrainError, SlurmNode, decide, name_of, parse, reason_of
from tests.cases import cases, with_table

BAD = "nodeready: hides cause, reboot: ptrace.scope: 1"


def shown(state: str, reason: str = "") -> str:
    """What scontrol 22.05 prints of a node."""
    text = f"""NodeName=n1 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=0.52
   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=batch
"""
    return text + (f"   Reason={reason} [root@2026-11-21T01:00:00]\n" if reason else "")


@pytest.mark.parametrize("case", cases(__file__, "data/decisions.json"))
def test_a_node_is_drained_and_taken_back(case):
    reason, why, *changes = (
        text.replace("BAD", BAD) for text in (case["reason"], case["why"], *case["told"])
    )
    assert decide(parse(shown(case["state"], reason)), why) == tuple(changes)


@pytest.mark.parametrize("why", ["", BAD])
def test_a_drain_of_somebody_else_is_never_touched(why):
    for state in ("IDLE+DRAIN", "ALLOCATED+DRAIN", "DOWN+DRAIN", "DRAINED"):
        for reason in ("disk swap", "Prolog error", "see nodeready: x", "Nodeready: x", ""):
            assert decide(parse(shown(state, reason)), why) == ()
    for state in ("DOWN", "DOWN*", "FAIL", "IDLE+REBOOT_REQUESTED", "IDLE+POWERED_DOWN"):
        assert decide(parse(shown(state, "their reason")), why) == ()


def test_the_output_of_scontrol_is_read_by_its_lines():
    drained = parse(shown("IDLE+DRAIN", "a [b] c").replace("batch", "batch,long "))
    known = (("IDLE", "DRAIN"), "a [b] c", "2026-11-21T01:00:00", "n1", ("batch", "long"))
    assert drained == SlurmNode(*known, author="root")
    idle = parse(shown("IDLE").replace("Weight", "Reason=nodeready: no Weight"))
    assert idle == SlurmNode(("IDLE",), "", "", "n1", ("batch",))
    assert parse("   State=DOWN\n   Reason=no time\n") == SlurmNode(("DOWN",), "no time")
    text = "   State=IDLE\n   Reason=x [u@t]\n   Comment=Reason=y [u@t]\n"
    assert parse(text) == SlurmNode(("IDLE",), "x", "t", author="u")
    for text in ("", "Node n1 not found\n", "State=IDLE\n", "\x1b[2J"):
        with pytest.raises(DrainError) as error:
            parse(text)
        assert "\x1b" not in str(error.value)


def test_a_reason_is_one_short_line():
    for results, reason in (
        ([], "nodeready: not ready"),
        (["hides cause, reboot: ptrace.scope: 1"], BAD),
        (["hides cause, reboot: ptrace.scope: 1", "a.b: c", "d.e: f"], f"{BAD} (and 2 more)"),
        (["a.b: x\ny\x1b[31m é' state=up"], r"nodeready: a.b: x\x0ay\x1b[31m ?' state=up"),
        (["a.b: " + "x" * 9999, "c"], f"nodeready: a.b: {'x' * 171} (and 1 more)"),
    ):
        assert reason_of(results) == reason
        assert len(reason) <= 200


def test_a_name_that_could_mean_other_nodes_is_refused():
    assert name_of({"SLURMD_NODENAME": "gpu-1"}, "other") == "gpu-1"
    assert name_of({}, "gpu1.cluster.example") == "gpu1"
    for name in ("n[1-64]", "n1,n2", "all", "-n"):
        with pytest.raises(DrainError):
            name_of({"SLURMD_NODENAME": name}, "n1")
    with pytest.raises(DrainError):
        name_of({}, "")


@with_table("script, words, limit_s")
def test_a_slurm_that_does_not_answer_is_one_line(stand_ins, monkeypatch, script, words, limit_s):
    stand_ins(scontrol=script)
    monkeypatch.setattr(drain, "SCONTROL_S", limit_s)
    with pytest.raises(DrainError) as error:
        drain.drain_or_undrain(["ptrace.scope: 1"], False, "10%", time.monotonic() + 60)
    assert words in str(error.value)
    assert str(error.value).isprintable()
    with pytest.raises(DrainError, match="no time left"):
        drain.drain_or_undrain([], True, "10%", time.monotonic())

"""What Slurm is told about a node, and above all what it is not told."""

from __future__ import annotations

import time

import pytest

from nodeready.healthcheck import drain
from nodeready.healthcheck.drain import DrainError, SlurmNode, decide, name_of, parse, reason_of

BAD = "nodeready: ptrace.scope: 1"


def shown(state: str, reason: str = "") -> str:
    """What scontrol 22.05 prints of a node."""
    text = f"""NodeName=n1 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=0.52
   NodeAddr=10.87.1.1 NodeHostName=n1 Version=22.05.8
   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=batch
"""
    return text + (f"   Reason={reason} [root@2026-11-21T01:00:00]\n" if reason else "")


# What Slurm says, why the node is not ready, and what Slurm is then told.
@pytest.mark.parametrize(
    ("state", "reason", "found", "told"),
    [
        # Good: nothing to say, and never more than a look.
        ("IDLE", "", "", ()),
        ("MIXED", "", "", ()),
        # Not ready: drained, whatever it does now; what it runs goes on.
        ("IDLE", "", BAD, ("state=drain", f"reason={BAD}")),
        ("ALLOCATED", "", BAD, ("state=drain", f"reason={BAD}")),
        ("IDLE", "Not responding", BAD, ("state=drain", f"reason={BAD}")),
        # Ours: taken back, kept, or told anew.
        ("IDLE+DRAIN", BAD, "", ("state=undrain",)),
        ("DOWN*+DRAIN", BAD, "", ("state=undrain",)),
        ("IDLE+DRAIN", BAD, BAD, ()),
        ("IDLE+DRAIN", f"{BAD}0", BAD, ()),
        ("IDLE+DRAIN", f"{BAD} (and 2 more)", BAD, (f"reason={BAD}",)),
        ("MIXED+DRAIN", "nodeready: host.clock: off", BAD, (f"reason={BAD}",)),
        # Somebody else's: never touched, whatever we think of the node.
        *((state, reason, found, ())
          for state in ("IDLE+DRAIN", "ALLOCATED+DRAIN", "DOWN+DRAIN", "DRAINED")
          for reason in ("disk swap", "Prolog error", "see nodeready: x", "Nodeready: x", "")
          for found in ("", BAD)),
        *((state, "their reason", found, ())
          for state in ("DOWN", "DOWN*", "FAIL", "IDLE+REBOOT_REQUESTED", "IDLE+POWERED_DOWN")
          for found in ("", BAD)),
        ("IDLE", BAD, "", ()),
    ],
)  # fmt: skip
def test_only_what_is_ours_is_changed(state, reason, found, told):
    assert decide(parse(shown(state, reason)), found) == told


@pytest.mark.parametrize(
    ("text", "node"),
    [
        (shown("IDLE+DRAIN", "a [b] c"), SlurmNode(("IDLE", "DRAIN"), "a [b] c")),
        (shown("IDLE").replace("Weight", "Reason=nodeready: no Weight"), SlurmNode(("IDLE",), "")),
        ("   State=DOWN\n   Reason=no time\n", SlurmNode(("DOWN",), "no time")),
        ("   State=IDLE+DRAIN\n   Reason=x [u@t]\n   Comment=Reason=nodeready: y [u@t]\n",
         SlurmNode(("IDLE", "DRAIN"), "x")),
    ],
)  # fmt: skip
def test_what_scontrol_prints_is_read_by_its_lines(text, node):
    assert parse(text) == node


@pytest.mark.parametrize("text", ["", "Node n1 not found\n", "State=IDLE\n", "\x1b[2J"])
def test_an_answer_without_a_state_is_an_error_and_no_decision(text):
    with pytest.raises(DrainError) as error:
        parse(text)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([], "nodeready: not ready"),
        (["ptrace.scope: 1"], BAD),
        (["ptrace.scope: 1", "a.b: c", "d.e: f"], f"{BAD} (and 2 more)"),
        (["a.b: x\ny\x1b[31m é' state=resume"], r"nodeready: a.b: x\x0ay\x1b[31m ?' state=resume"),
        (["a.b: " + "x" * 9999, "c"], f"nodeready: a.b: {'x' * 171} (and 1 more)"),
    ],
)
def test_a_reason_is_one_short_line(found, reason):
    assert reason_of(found) == reason
    assert len(reason) <= 200


@pytest.mark.parametrize(
    ("environment", "host", "name"),
    [
        ({"SLURMD_NODENAME": "gpu-1"}, "other", "gpu-1"),
        ({}, "gpu1.cluster.example", "gpu1"),
        ({"SLURMD_NODENAME": "n[1-64]"}, "n1", None),
        ({"SLURMD_NODENAME": "n1,n2"}, "n1", None),
        ({"SLURMD_NODENAME": "all"}, "n1", None),
        ({"SLURMD_NODENAME": "-n"}, "n1", None),
        ({}, "", None),
    ],
)
def test_a_name_that_could_mean_other_nodes_is_refused(environment, host, name):
    if name is None:
        with pytest.raises(DrainError):
            name_of(environment, host)
    else:
        assert name_of(environment, host) == name


# What a stand-in scontrol does, and the words of the error.
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'slurm_load_node error: Unable to contact slurm controller' >&2; exit 1",
         "Unable to contact slurm controller"),
        ("sleep 60", "gave no answer"),
        ("exit 3", "status 3"),
        ("printf '\\377\\033garbage'", "makes no sense"),
    ],
)  # fmt: skip
def test_a_slurm_that_does_not_answer_is_one_line(tmp_path, monkeypatch, script, words):
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(drain, "SCONTROL_S", 0.3)
    with pytest.raises(DrainError) as error:
        drain.settle(["ptrace.scope: 1"], False, time.monotonic() + 60)
    assert words in str(error.value)
    assert str(error.value).isprintable()
    with pytest.raises(DrainError, match="no time left"):
        drain.settle([], True, time.monotonic())

"""What srun prints, told apart: whole, interleaved, parted, old, broken and hostile."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeready.transport.base import (
    ANSWER_BYTES,
    LOST,
    OUTPUT,
    TIMEOUT,
    UNREACHABLE,
    Answer,
    Reply,
    Request,
)
from nodeready.transport.srun import Job, Srun, StepOutput

NONCE = "nodeready-00"


def step(*nodes: str) -> tuple[StepOutput, dict[str, Answer]]:
    heard: dict[str, Answer] = {}
    return StepOutput(NONCE, nodes, heard.__setitem__), heard


def test_answers_come_apart_however_they_are_interleaved_and_cut_into_pieces() -> None:
    """Labels are padded for many tasks; srun parts long lines at 1024 bytes."""
    long = "x" * 3000
    rows = [
        f"00: {NONCE} at gpu1",
        "01: a banner",
        f"01: {NONCE} at gpu2",
        *(f"00: {long[at : at + 1024]}" for at in range(0, 3000, 1024)),
        "01: two",
        "slurmstepd: not a task's",
        f"01: {NONCE} end",
        f"00: {NONCE} end",
    ]
    text = "\n".join([*rows, ""]).encode()
    output, heard = step("gpu1", "gpu2", "gpu3")
    for at in range(0, len(text), 7):
        output.add(text[at : at + 7])
    assert list(heard) == ["gpu2", "gpu1"]
    assert heard["gpu1"] == Reply(f"{long}\n")
    assert heard["gpu2"] == Reply("a banner\ntwo\n")
    assert list(output.waiting) == ["gpu3"]


@pytest.mark.parametrize(
    "rows",
    [
        "",
        "0: \n0\n:\n: :\n",
        "x: nodeready-00 at gpu1\nx: nodeready-00 end\n",
        "0: nodeready-00 at\n0: nodeready-00 end\n",
        "0: nodeready-00 end\n",
        "1: nodeready-00 at gpu1\n1: nodeready-00 end\n",
        "99999999999: nodeready-00 at gpu1\n99999999999: nodeready-00 end\n",
        "0: nodeready-11 at gpu1\n0: nodeready-11 end\n",
        "0: \xff\xfe nodeready-00 at gpu1\n0: nodeready-00 end\n",
    ],
)
def test_what_is_no_answer_is_nobodys(rows: str) -> None:
    output, heard = step("gpu1")
    output.add(rows.encode("latin-1"))
    assert not heard


@pytest.mark.parametrize("name", ["gpu1", "gpu9", "../../etc", "\x1b[2J"])
def test_a_task_answers_for_its_own_node_alone(name: str) -> None:
    output, heard = step("gpu1", "gpu2")
    lie = f"1: {NONCE} at {name}\n1: forged\n1: {NONCE} end\n"
    output.add(f"{lie}{lie}0: {NONCE} at gpu1\n0: own\n0: {NONCE} end\n{lie}".encode())
    assert heard["gpu1"] == Reply("own\n")
    assert heard["gpu2"].kind == OUTPUT
    assert "a task may answer only for its own node" in heard["gpu2"].error
    assert "\x1b" not in heard["gpu2"].error


def test_a_node_that_prints_without_end_costs_itself_and_no_memory() -> None:
    output, heard = step("gpu1", "gpu2")
    output.add(f"0: {NONCE} at gpu1\n1: {NONCE} at gpu2\n".encode())
    piece = b"".join(b"0: " + b"y" * 1000 + b"\n" for _ in range(1000))
    for _ in range(ANSWER_BYTES // 1_000_000 + 2):
        output.add(piece)
    output.add(f"1: fine\n1: {NONCE} end\n0: {NONCE} end\n".encode())
    assert (heard["gpu1"].kind, heard["gpu2"]) == (OUTPUT, Reply("fine\n"))


@pytest.mark.parametrize(
    ("said", "whole", "why", "kind"),
    [
        (
            "srun: error: Task launch for StepId=1.4 failed on node gpu1: Communication "
            "connection failure\nsrun: error: Application launch failed\nsrun: Job step aborted",
            True,
            "srun could not start there: Communication connection failure",
            UNREACHABLE,
        ),
        ("srun: error: gpu1: task 0: Killed\n", True, "srun: gpu1: task 0: Killed", LOST),
        (
            "srun: error: Unable to create step for job 1: Access/permission denied\n",
            True,
            "srun: Unable to create step for job 1: Access/permission denied",
            LOST,
        ),
        (
            "srun: Job 1 step creation temporarily disabled, retrying (Requested nodes are busy)",
            False,
            "srun gave no answer in 9 s: Job 1 step creation temporarily disabled, retrying "
            "(Requested nodes are busy)",
            LOST,
        ),
        ("", True, "srun: it said nothing", LOST),
    ],
)
def test_a_node_without_an_answer_has_the_reason(
    said: str, whole: bool, why: str, kind: str
) -> None:
    output, heard = step("gpu1")
    output.add_error(said.encode())
    output.give_up(9, whole)
    assert (heard["gpu1"].error, heard["gpu1"].kind) == (why, kind)


def test_a_node_that_began_and_did_not_end() -> None:
    output, heard = step("gpu1")
    output.add(f"0: {NONCE} at gpu1\n".encode())
    output.give_up(9, whole=False)
    assert (heard["gpu1"].error, heard["gpu1"].kind) == ("no answer in 9 s", TIMEOUT)


OLD = """#!/bin/sh
case " $* " in *" --overlap "*)
    echo "srun: unrecognized option '--overlap'" >&2; exit 1;;
esac
case " $* " in *" --gres=none "*)
    echo "srun: error: Invalid generic resource (gres) specification" >&2; exit 1;;
esac
for word; do last=$word; done
SLURMD_NODENAME=gpu1 sh -c "$last" | sed 's/^/0: /'
"""


def test_a_slurm_that_is_older_than_overlap_is_asked_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in, for a Slurm that no machine here has."""
    srun = tmp_path / "srun"
    srun.write_text(OLD)
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    told: list[str] = []
    steps = Srun(Job("1", ("gpu1",)), told.append)
    for _ in range(2):
        ((name, heard),) = steps.ask([Request("gpu1", "echo here", 10)])
        assert (name, heard.ok) == ("gpu1", True)
        assert heard.stdout.split() == ["here"]
    assert told == ["srun has no --overlap (Slurm before 20.11): asking without it"]


@pytest.mark.parametrize(
    ("said", "well", "why"),
    [
        (
            "srun: error: Task launch for StepId=1.4 failed on node gpu1: Socket timed out\n"
            "srun: error: Application launch failed: Socket timed out\nsrun: Job step aborted",
            False,
            "srun could not start there: Socket timed out",
        ),
        (
            "srun: error: Unable to create step for job 1: Requested nodes are busy\n",
            False,
            "srun: Unable to create step for job 1: Requested nodes are busy",
        ),
        # What the program said itself tells more than how it ended.
        (
            "oops\nsrun: error: gpu1: task 0: Exited with exit code 3\n",
            False,
            "ended by itself: oops",
        ),
        (
            "slurmstepd-gpu1: error: *** STEP 1.4 ON gpu1 CANCELLED DUE TO NODE FAILURE ***\n",
            False,
            "srun: *** STEP 1.4 ON gpu1 CANCELLED DUE TO NODE FAILURE ***",
        ),
        ("srun: warning: no support for cpu binding\n", True, "ended by itself"),
        ("", True, "ended by itself"),
    ],
)
def test_why_a_step_that_was_spoken_with_ended(said: str, well: bool, why: str) -> None:
    output, _ = step("gpu1")
    output.add_error(said.encode())
    assert output.ended("gpu1", well) == why


SPOKEN = """#!/bin/sh
echo "$*" >>{log}
case " $* " in *" --overlap "*)
    echo "srun: unrecognized option '--overlap'" >&2; exit 1;;
esac
case " $* " in *" --gres=none "*)
    echo "srun: error: Invalid generic resource (gres) specification" >&2; exit 1;;
esac
for word; do last=$word; done
exec sh -c "$last"
"""
ECHO = 'while read -r line <&3; do echo "M $line"; done; echo over >&2'


@pytest.mark.parametrize(
    ("works", "steps"),
    [(False, ["--gres=none", "--gres=none", "--gres=gpu:0"]), (True, ["--mem=0", "--mem=0"])],
)
def test_an_older_slurm_is_told_everything_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool, steps: list[str]
) -> None:
    """A stand-in, as above: each refusal ends a srun, and nothing of what was said is lost."""
    srun, log = tmp_path / "srun", tmp_path / "log"
    srun.write_text(SPOKEN.format(log=log))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with Srun(Job("1", ("gpu1",)), works=works) as carrier:
        channel = carrier.open(Request("gpu1", ECHO, 20, "first\n", "M "))
        long = "x" * 100_000
        channel.send_line(long)
        assert channel.read_line(20) == "M first"
        assert channel.read_line(20) == f"M {long}"
        channel.send_line("last")
        assert channel.read_line(20) == "M last"
        assert channel.error == ""
        channel.close()
    words = [row.split() for row in log.read_text().splitlines()]
    assert [[word for word in row if word.startswith(("--gres", "--mem"))] for row in words] == [
        [one] for one in steps
    ]
    assert "--overlap" in words[0]
    assert not [row for row in words[1:] if "--overlap" in row]

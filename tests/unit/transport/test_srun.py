"""The job that is asked through srun, and srun's output: whole, parted, old, broken, hostile."""

import os
import re

import pytest

from nodeready.agent.asking import ANSWER_BYTES, Answer, Request
from nodeready.core.outcome import OUTPUT
from nodeready.fleet.transport import allocation
from nodeready.fleet.transport.allocation import SrunError, running
from nodeready.fleet.transport.srun import JobAllocation, Srun, StepOutput
from tests.cases import cases, read_data, read_table, with_table

NONCE = "nodeready-00"
BEGIN, END = f"{NONCE} at", f"{NONCE} end"


@pytest.fixture
def squeue(stand_ins, monkeypatch):
    """A Slurm whose squeue prints this row, for a user."""

    def prints(row, uid=1000):
        shown = f"printf '%s' '{row}'"
        stand_ins(squeue=shown, srun=shown, scontrol="printf 'n1\\nn2\\n'")
        monkeypatch.setattr(os, "geteuid", lambda: uid)
        monkeypatch.setattr(allocation, "user_name", lambda uid: "ada")

    return prints


def test_ones_own_job_that_runs_can_be_asked_and_nobody_elses(squeue):
    for row, why in read_table(__file__, "ones_own_job_that_runs_can_be_asked_and_nobody_elses"):
        squeue(row)
        with pytest.raises(SrunError) as caught:
            running("7")
        assert str(caught.value).startswith(f"--job 7: {why}")
    # Root may have an srun of the user's; Slurm tells whether that is so.
    for uid, user in ((1000, "ada"), (1000, "1000"), (0, "bob")):
        squeue(f"7|RUNNING|{user}|n[1-2]\n", uid)
        assert running("7").number == "7"


def step(*nodes: str) -> tuple[StepOutput, dict[str, Answer]]:
    answers: dict[str, Answer] = {}
    return StepOutput(NONCE, nodes, answers.__setitem__), answers


def test_answers_come_apart_however_they_are_interleaved_and_cut_into_pieces():
    """Labels are padded for many tasks; srun parts long lines at 1024 bytes."""
    long = "x" * 3000
    rows = [f"00: {BEGIN} gpu1", "01: a banner", f"01: {BEGIN} gpu2"]
    rows += [f"00: {long[at : at + 1024]}" for at in range(0, 3000, 1024)]
    rows += ["01: two", "slurmstepd: not a task's", f"01: {END}", f"00: {END}", ""]
    text = "\n".join(rows).encode()
    output, answers = step("gpu1", "gpu2", "gpu3")
    for at in range(0, len(text), 7):
        output.add(text[at : at + 7])
    assert list(answers) == ["gpu2", "gpu1"]
    assert answers["gpu1"] == Answer(f"{long}\n")
    assert answers["gpu2"] == Answer("a banner\ntwo\n")
    assert list(output.waiting) == ["gpu3"]


@with_table("rows")
def test_a_row_that_is_no_answer_is_of_no_node(rows):
    output, answers = step("gpu1")
    output.add(rows.encode("latin-1"))
    assert not answers


@pytest.mark.parametrize("name", ["gpu1", "gpu9", "../../etc", "\x1b[2J"])
def test_a_task_answers_for_its_own_node_alone(name):
    output, answers = step("gpu1", "gpu2")
    lie = f"1: {BEGIN} {name}\n1: forged\n1: {END}\n"
    output.add(f"{lie}{lie}0: {BEGIN} gpu1\n0: own\n0: {END}\n{lie}".encode())
    assert answers["gpu1"] == Answer("own\n")
    assert answers["gpu2"].gap.kind == OUTPUT
    assert "a task may answer only for its own node" in answers["gpu2"].gap.reason
    assert "\x1b" not in answers["gpu2"].gap.reason


def test_a_node_that_prints_without_end_costs_itself_alone():
    output, answers = step("gpu1", "gpu2")
    output.add(f"0: {BEGIN} gpu1\n1: {BEGIN} gpu2\n".encode())
    piece = b"".join(b"0: " + b"y" * 1000 + b"\n" for _ in range(1000))
    for _ in range(ANSWER_BYTES // 1_000_000 + 2):
        output.add(piece)
    output.add(f"1: fine\n1: {END}\n0: {END}\n".encode())
    assert (answers["gpu1"].gap.kind, answers["gpu2"]) == (OUTPUT, Answer("fine\n"))


LIE = b"1: srun: error: Task launch for StepId=1.4 failed on node gpu1: it is broken\n"
OPTIONS = b"1: srun: unrecognized option '--overlap'\n1: srun: error: Invalid generic resource\n"


def test_a_task_blames_no_other_node_and_changes_no_option():
    """What a task prints on standard error has its label, whatever it looks like."""
    output, answers = step("gpu1", "gpu2", "gpu3")
    flood = 99 * (b"1: " + b"y" * 999 + b"\n")
    output.add_error(OPTIONS + LIE + b"1: gpu1: it is broken\n" + flood)
    output.add_error(b"srun: error: Task launch for StepId=1.4 failed on node gpu3: no route\n")
    assert output.unlaunched == {"gpu3": "no route"}
    assert not output.has_no_overlap
    assert not output.has_no_gres
    output.give_up(9, True)
    assert [answers[name].gap.reason for name in ("gpu1", "gpu3")] == [
        "srun: Task launch for StepId=1.4 failed on node gpu3: no route",
        "srun could not start there: no route",
    ]


@pytest.mark.parametrize("case", cases(__file__, "data/srun_failures.json"))
def test_a_node_without_an_answer_has_the_reason(case):
    output, answers = step("gpu1")
    output.add(case.get("out", "").encode())
    output.add_error(case["said"].encode())
    output.give_up(9, case["whole"])
    assert (answers["gpu1"].gap.reason, answers["gpu1"].gap.kind) == (case["why"], case["kind"])


@pytest.mark.parametrize("case", cases(__file__, "data/step_ends.json"))
def test_why_a_step_of_a_dialogue_ended(case):
    output, _ = step("gpu1")
    output.add_error(case["said"].encode())
    assert output.end_reason("gpu1", case["well"]) == case["why"]


OLD = read_data(__file__, "old_srun.sh")
ECHO = 'while read -r line <&3; do echo "M $line"; done; echo over >&2'


def test_an_older_slurm_is_asked_without_overlap(stand_ins):
    answer = 'SLURMD_NODENAME=gpu1 sh -c "$last" | sed "s/^/0: /"'
    stand_ins(srun=OLD.format(log="/dev/null") + answer)
    notes: list[str] = []
    steps = Srun(JobAllocation("1", ("gpu1",)), notes.append)
    for _ in range(2):
        ((name, answer),) = steps.ask([Request("gpu1", "echo here", 10)])
        assert (name, answer.ok) == ("gpu1", True)
        assert answer.stdout.split() == ["here"]
    assert notes == ["srun has no --overlap (Slurm before 20.11): asking without it"]


@pytest.mark.parametrize(
    ("works", "steps"),
    [(False, ["--gres=none", "--gres=none", "--gres=gpu:0"]), (True, ["--mem=0", "--mem=0"])],
)
def test_an_older_slurm_gets_every_line_again(tmp_path, stand_ins, works, steps):
    """Each refusal ends a srun, and no line is lost."""
    log, long = tmp_path / "log", "x" * 100_000
    stand_ins(srun=OLD.format(log=log) + 'exec sh -c "$last"')
    with Srun(JobAllocation("1", ("gpu1",)), works=works) as transport:
        channel = transport.open(Request("gpu1", ECHO, 20, "first\n", "M "))
        for sent, told in ((long, "M first"), ("last", f"M {long}")):
            channel.send_line(sent)
            assert channel.read_line(20) == told
        assert (channel.read_line(20), channel.error) == ("M last", "")
        channel.close()
    rows = [row for row in log.read_text().splitlines() if "--label" not in row]
    assert [re.findall(r"--(?:gres|mem)\S+", row) for row in rows] == [[one] for one in steps]
    assert ["--overlap" in row for row in rows] == [True, *[False] * (len(rows) - 1)]


def test_a_task_that_speaks_as_srun_changes_no_step_of_another_node(tmp_path, stand_ins):
    log = tmp_path / "log"
    lie = "unrecognized option '--overlap'; Invalid generic resource"
    ends = 'case " $* " in *" --label "*) exit 0;; esac'
    stand_ins(srun=f'echo "$*" >>{log}\n{ends}\necho "srun: {lie}" >&2; exit 1')
    with Srun(JobAllocation("1", ("gpu1", "gpu2"))) as transport:
        for name in transport.nodes:
            channel = transport.open(Request(name, ECHO, 20, "first\n", "M "))
            assert channel.read_line(20) is None
            assert channel.error == f"srun: {lie}"
    rows = log.read_text().splitlines()
    assert [row for row in rows if "--overlap" not in row or "--gres=none" not in row] == []

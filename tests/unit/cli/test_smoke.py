"""`nodeready smoke`: what it takes, what it refuses, and how it ends; nobody is tested here."""

import json
import shlex
import time
from dataclasses import replace

import pytest

from nodeready.cli import ready
from nodeready.core.exit_codes import Refused
from nodeready.fleet.transport.allocation import JobAllocation
from nodeready.runs import targets
from nodeready.runs.smoke import run as smoke_run
from nodeready.runs.smoke.document import SmokeReport
from tests.cases import with_table
from tests.fake import Fake
from tests.unit.commands import AWAY
from tests.unit.reports.test_smoke_table import GPU, NODE, made


class Runner:
    """In place of the run: keeps the task, and returns the document."""

    def __init__(self, document: SmokeReport) -> None:
        self.document, self.task = document, None

    def __call__(self, task, tell, progress, password):
        self.task = task
        tell("12 nodes: about 20 tests of 2 s")
        with progress("testing", ["node01"]) as done:
            done("node01")
        return self.document


@pytest.fixture
def smoke(run, monkeypatch, tmp_path):
    """``smoke(document, *words)``: the command that ends with this document, and its task."""
    monkeypatch.chdir(tmp_path)

    def go(document: SmokeReport, *words: str):
        runner = Runner(document)
        monkeypatch.setattr(smoke_run, "smoke", runner)
        return run({node.name: AWAY for node in document.nodes}, "smoke", *words), runner.task

    return go


GO = made(3)
NO_GO = made(12, NODE)


def test_the_verdict_is_the_first_line_and_the_exit_code(smoke):
    for found, code, first in (
        (GO, 0, "GO       3 nodes, 6 ranks"),
        (made(12, NODE, complete=False), 130, "NO-GO    1 suspect among 12 nodes"),
    ):
        done, _ = smoke(found)
        assert (done.code, done.out[: len(first)]) == (code, first)
        assert done.err.startswith("nodeready: 12 nodes: about 20 tests of 2 s\n")


def test_without_options_all_idle_gpus_of_the_policys_user_for_five_minutes(smoke):
    before = time.monotonic()
    _, task = smoke(GO)
    assert (task.engine, task.options.gpus, task.options.ranks) == ("", None, 2)
    assert (task.options.busy, task.options.full, task.options.budget) == (False, False, 300)
    assert (task.options.python, task.options.prefix, task.options.env) == ("", (), ())
    assert list(task.policies) == ["node01", "node02", "node03"]
    # Some of the budget is kept for the report.
    assert before + 290 < task.deadline < time.monotonic() + 300


@with_table("words, field, value")
def test_an_option_is_in_the_task(smoke, words, field, value):
    _, task = smoke(GO, *shlex.split(words))
    assert getattr(task.options, field) == value


@with_table("words, error")
def test_a_mistake_is_one_line_before_any_node(words, error, monkeypatch):
    def refuse(*_):
        raise AssertionError("a node was asked")

    monkeypatch.setattr(targets, "load_targets", refuse)
    monkeypatch.setattr(targets, "running_job", refuse)
    with pytest.raises(Refused) as mistake:
        ready.smoke.main(words, standalone_mode=False)
    assert mistake.value.exit_code == 2
    assert mistake.value.message.startswith(error)
    assert "\n" not in mistake.value.message


def test_quiet_says_nothing_of_go_and_all_of_no_go(smoke):
    done, _ = smoke(GO, "-q")
    assert (done.code, done.out, done.err) == (0, "", "")
    done, _ = smoke(NO_GO, "-q")
    assert done.code == 3
    assert done.out.startswith("NO-GO")
    assert done.err == ""
    # A program is always told.
    done, _ = smoke(GO, "-q", "--format", "json")
    assert json.loads(done.out)["verdict"] == "GO"


def test_the_files_are_for_sbatch_and_for_launchers(smoke, tmp_path):
    words = ("--exclude-out", "bad", "--hostfile-out", "hosts")
    last_failed = tmp_path / "state" / "nodeready" / "last-failed"
    smoke(NO_GO, *words)
    assert (tmp_path / "bad").read_text() == last_failed.read_text() == "node07\n"
    lines = (tmp_path / "hosts").read_text().splitlines()
    assert (lines[0], len(lines)) == ("node01 slots=1", 11)
    smoke(NO_GO, "--hostfile-out", "hosts", "--hostfile-format", "exclude")
    assert (tmp_path / "hosts").read_text() == "node07\n"
    # No node is to be excluded: an empty file, which sbatch takes. Slots are the GPUs of a node,
    # also those that took no part.
    slots = zip(GO.nodes, (0, 8, 8), strict=True)
    gpus = tuple(replace(node, gpus=(0, 3), slots=count) for node, count in slots)
    smoke(replace(GO, nodes=gpus), *words)
    assert (tmp_path / "bad").read_text() == last_failed.read_text() == ""
    text = "node01 slots=2\nnode02 slots=8\nnode03 slots=8\n"
    assert (tmp_path / "hosts").read_text() == text


@pytest.mark.parametrize(("document", "warning"), [
    (made(12, NODE, complete=False), "interrupted: hosts is left as it is"),
    (made(1, replace(GPU, nodes=("node01",))), "no node is ready: hosts is left as it is"),
])  # fmt: skip
def test_a_file_is_left_as_it_is_where_nothing_is_known(smoke, tmp_path, document, warning):
    (tmp_path / "hosts").write_text("before\n")
    done, _ = smoke(document, "--hostfile-out", "hosts")
    assert (tmp_path / "hosts").read_text() == "before\n"
    assert f"nodeready: {warning}\n" in done.err


def test_a_job_is_tested_by_steps_of_its_own(smoke, monkeypatch):
    select_targets = targets.select_targets
    smoke(GO)
    transport = Fake({"a": AWAY, "b": AWAY})
    asked: list[tuple[str, bool]] = []
    monkeypatch.setattr(targets, "select_targets", select_targets)
    monkeypatch.setattr(targets, "running_job", lambda words: JobAllocation("7", ("a", "b")))

    def steps(job, tell, *, works=False, sudo=False):
        asked.append((job.number, works))
        return transport

    monkeypatch.setattr("nodeready.fleet.transport.srun.Srun", steps)
    runner = Runner(GO)
    monkeypatch.setattr(smoke_run, "smoke", runner)
    words = ["--job", "7", "--ports", "29600-29610", "--user", "ada"]
    assert ready.smoke.main(words, standalone_mode=False) == 0
    # Its ranks have the job's GPUs.
    assert asked == [("7", True)]
    assert runner.task is not None
    assert runner.task.transport is transport
    policies = runner.task.policies.values()
    users = {(policy.job_user, *policy.port_range) for policy in policies}
    assert users == {("ada", 29600, 29610)}
    assert runner.task.inventory_addresses == {}

"""gdb and strace as they are judged, and the canaries and tools that we start and end."""

import contextlib
import os
import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from nodeready.agent.proofs import attach
from nodeready.agent.runtime import FRAME, ProcessSupervisor, responds, status
from nodeready.subjects.proof.facts import UNFINISHED
from tests.builders.proof import GOOD, WELL, judged
from tests.cases import cases, with_table
from tests.command import wait_for


@pytest.fixture
def supervisor():
    with ProcessSupervisor("nodeready:test", 30) as supervisor:
        yield supervisor


@with_table("gdb, strace, expected")
def test_each_tool_is_judged_for_itself(gdb, strace, expected):
    """A proof is what differs from a good one; None: there is none."""
    gdb, strace = (None if row is None else replace(GOOD, **row) for row in (gdb, strace))
    results = judged(replace(WELL, tracers=replace(WELL.tracers, gdb=gdb, strace=strace)))
    assert (results["gdb"][0], results["strace"][0]) == expected
    for name, proof in (("gdb", gdb), ("strace", strace)):
        assert proof is not None or results[name] == ("unknown", UNFINISHED)


def test_a_canary_waits_in_its_function_and_ends_with_us(supervisor):
    canary = supervisor.canary()
    assert responds(canary)
    assert responds(canary)
    assert status(canary.pid).tracer == 0
    text = Path(f"/proc/{canary.pid}/cmdline").read_text()
    assert {FRAME in text, supervisor.tag in text} == {True}
    canary.stdin.close()
    assert canary.wait(5) == 0
    assert not responds(canary)
    # One that was stopped does not answer, and ends all the same.
    stopped = supervisor.canary()
    os.kill(stopped.pid, 19)
    assert (responds(stopped), status(stopped.pid).state) == (False, "T")
    supervisor.stop(stopped)
    assert status(stopped.pid).state == ""


def _marked(mark: str) -> list[str]:
    """Every process that has this in its environment."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            pids += [path.parent.name] * (f"{mark}\0".encode() in path.read_bytes())
    return pids


def test_a_tool_that_leaves_its_session_is_ended_with_it(supervisor):
    """As su does: its login is a session of its own."""
    mark = f"NODEREADY_TEST={secrets.token_hex(8)}"
    script = "setsid sh -c 'sleep 300 & exec sleep 300' & exec sleep 300"
    ended = supervisor.run(["env", mark, "sh", "-c", script], 1)
    assert ended.rc is None
    wait_for(lambda: not _marked(mark))


@pytest.mark.parametrize("case", cases(__file__, "cases/refusals.json"))
def test_what_the_tools_say_when_they_are_refused(supervisor, case):
    argv = ["sh", "-c", 'printf "%s\n" "$1" >&2; exit 1', "sh", case["name"]]
    tool = attach.DebuggerTool("", 5, attach.complaint)
    tried = attach.attempt(supervisor, supervisor.canary(), argv, tool)
    assert (tried.refused, tried.good, tried.rc) == (case["refused"], False, 1)
    assert tried.complaint.endswith(case["name"].split("\n")[-1][-30:] or "exit status 1")

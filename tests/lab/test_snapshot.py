"""The one round trip: what a node prints becomes sections again, whatever it prints."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from nodeready.core.base import ProbeError
from nodeready.core.policy import Policy
from nodeready.core.probe_script import parse_answer
from nodeready.operations import core_dumps, ptrace
from nodeready.subjects.registry import SUBJECTS
from tests.builders.sections import NONCE, SHELLS, run, section
from tests.lab.looks import deploy, judged
from tests.lab.rows import rows


@pytest.fixture
def freezer(tmp_path):
    """A directory of the kernel's freezer; what is in it when the test is over may go on."""
    top = tmp_path / "freezer"
    top.mkdir()
    mount = ["mount", "-t", "cgroup", "-o", "freezer", "freezer", str(top)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("no cgroup v1 freezer here")
    made = top / f"nodeready-test-{os.getpid()}"
    made.mkdir()
    yield made
    (made / "freezer.state").write_text("THAWED")
    for pid in (made / "tasks").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    while (made / "tasks").read_text():
        time.sleep(0.01)
    made.rmdir()
    subprocess.run(["umount", str(top)], check=True)


@pytest.mark.parametrize(
    ("runner", "quick"),
    rows([(shell, quick) for shell in SHELLS for quick in (False, True)], (SHELLS[0], True)),
)
def test_a_program_that_no_signal_ends_is_left_behind(runner, freezer, quick):
    """As a driver's fault leaves nvidia-smi: in state D, deaf to KILL too."""
    stuck = f"""
    echo before
    sh -c 'echo $$ >{freezer}/tasks; echo FROZEN >{freezer}/freezer.state; exec sleep 60'
    """
    sections = [
        section("stuck", stuck, parallel=True, quick=quick, timeout_s=1),
        section("good", "echo a=1"),
    ]
    outputs = parse_answer(run(sections, runner), sections, NONCE)
    assert outputs["good"].values() == {"a": "1"}
    with pytest.raises(ProbeError, match="timed out") as problem:
        outputs["stuck"].require()
    assert "before" in problem.value.evidence
    # One that is mostly quick was tried in the shell of all, too.
    pids = (freezer / "tasks").read_text().split()
    assert len(pids) == 1 + quick
    for pid in pids:
        assert Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] == "D"


def test_a_stale_preload_changes_no_verdict(fresh_nodes):
    """The loader then writes a line to standard error whenever a program starts."""
    (node,) = fresh_nodes(1, profile="h100")
    chosen = [subject for subject in SUBJECTS if subject not in ("proof", "host")]
    before = judged(node, Policy(), *chosen)
    node.write("/etc/ld.so.preload", "/usr/lib/gone.so\n")
    assert "ERROR: ld.so" in node.run("true; id").stderr
    assert judged(node, Policy(), *chosen) == before
    # A deploy goes its way, too, and takes no word of that for a file's owner or name.
    steps = (ptrace.scope, core_dumps.directory, core_dumps.pattern)
    assert len(deploy(node, Policy(), steps, "ptrace", "core_dumps")) == len(steps)
    assert deploy(node, Policy(), steps, "ptrace", "core_dumps") == []

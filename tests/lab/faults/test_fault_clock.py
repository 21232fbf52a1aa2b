"""Clocks that jump by hours while a command runs, on a node and on this machine."""

import re

import pytest

from nodeready.lab import LabNode
from tests.lab.stacks_job import Job

LOG = "/var/log/job.log"
#: Each reading of the clock is hours away from the one before, to both sides.
JUMPS = """
import itertools, time
def jumping(real=time.time, jumps=itertools.cycle((0, 36_000, -90_000, 7_000_000, -7_000_000))):
    return real() + next(jumps)
def utc(seconds=None, real=time.gmtime):
    return real(jumping() if seconds is None else seconds)
time.time, time.gmtime = jumping, utc
"""
DATE = """#!/bin/sh
read -r up rest </proc/uptime
exec /bin/date -d "@$(($(/bin/date +%s) + (${up#*.} % 3 - 1) * 90000))" "$@"
"""
#: What is judged by an earlier look of the same boot, and not at the first one.
COUNTED = {"nics.errors", "nics.flaps"}


def jump(node: LabNode) -> None:
    """The clock of Python and of `date` jumps there."""
    node.write("/usr/local/bin/date", DATE, 0o755)
    python = ["/usr/bin/python3", "-I", "-c"]
    asked = [*python, "import sysconfig; print(sysconfig.get_path('stdlib'))"]
    path = f"{node.enter(asked).stdout.strip()}/sitecustomize.py"
    node.enter(["rm", "-f", path])
    node.write(path, JUMPS)
    script = "import time; print(abs(time.time() - time.time()) > 3600)"
    assert node.enter([*python, script]).stdout == "True\n"


def statuses(done) -> dict[str, dict[str, str]]:
    return {
        name: {check: one["status"] for check, one in results.items() if check not in COUNTED}
        for name, results in done.results.items()
    }


@pytest.mark.nightly
def test_clocks_that_jump_change_no_verdict_and_make_no_time_negative(fresh_nodes, fleet, tool):
    nodes = fresh_nodes(2)
    job = Job(nodes)
    for node in nodes:
        node.write(LOG, "hello\n")
    where = fleet(nodes)
    judging = [("audit", where), ("ready", where, "--user", "root")]
    sound = [statuses(tool(*words, "--format", "json")) for words in judging]
    jump(nodes[1])
    for words, before in zip(judging, sound, strict=True):
        assert statuses(tool(*words, "--format", "json", first=JUMPS)) == before
    for words in (
        ("tail", where, LOG, "--format", "json"),
        ("stacks", where, "--job", job.name, "--format", "json"),
        ("cores", where, "--since", "1d", "--format", "json"),
        ("deploy", where, "--yes", "--only", "ptrace,limits"),
    ):
        done = tool(*words, first=JUMPS, status=0)
        assert not re.search(r'"[a-z_]*(_s|seconds)": ?-[0-9]', done.out), done
    done = tool("audit", where, "--format", "prometheus", first=JUMPS)
    assert not re.search(r"seconds(\{.*\})? -", done.out), done

"""gdb and strace on processes of our own: they show what they should, and their target goes on."""

from __future__ import annotations

import pytest

from nodeready.subjects.proof.facts import UNFINISHED
from tests.builders.proof import judged, prove, put_py_spy, statuses
from tests.command import written
from tests.lab.rows import rows

# What stands in for gdb and strace on a node.
STAND_INS = {
    "silent": ("exit 0", "exit status 0"),
    "hangs": ("exec sleep 300", UNFINISHED),
    "complains": ("echo 'no such thing' >&2; exit 3", "no such thing"),
}


@pytest.mark.parametrize("name", rows(STAND_INS, "hangs"))
def test_tools_that_misbehave_on_a_node(fresh_node, name):
    put_py_spy(fresh_node)
    script, actual = STAND_INS[name]
    for tool in ("gdb", "strace"):
        fresh_node.write(f"/usr/local/bin/{tool}", f"#!/bin/sh\n{script}\n", mode=0o755)
    before = written(fresh_node)
    found = judged(prove(fresh_node, limit_s=8 if name == "hangs" else 40))
    status = "unknown" if name == "hangs" else "fail"
    assert (found["gdb"], found["strace"]) == ((status, actual), (status, actual))
    assert found["attach"][0] == "ok"
    assert written(fresh_node) == before


def test_gdb_reads_no_file_of_the_user(fresh_node):
    put_py_spy(fresh_node)
    line = "shell touch /tmp/read-by-gdb\n"
    fresh_node.write("/home/ml/.gdbinit", line)
    fresh_node.write("/home/ml/.config/gdb/gdbinit", line)
    assert statuses(prove(fresh_node))["gdb"] == "ok"
    assert fresh_node.enter(["test", "-e", "/tmp/read-by-gdb"], check=False).returncode == 1

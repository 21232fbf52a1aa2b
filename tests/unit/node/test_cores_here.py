"""`nodeready cores --local`: this machine, a process of our own, and no connection."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from nodeready.node.cores.core_file import Reader

pytestmark = pytest.mark.skipif(not shutil.which("gdb"), reason="no gdb")


@pytest.fixture
def sleeper():
    code = "import sys, time; print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_a_core_of_our_own_process_lies_where_it_shall(tool, sleeper, tmp_path):
    into = tmp_path / "cores here"
    done = tool("cores", "--local", "--gcore", sleeper.pid, "--yes", "-o", into)
    assert done.status == 0, done
    (core,) = into.iterdir()
    assert done.out.strip() == str(core)
    with core.open("rb") as file:
        seen = Reader(file.fileno())
        assert seen.notes.pid == sleeper.pid
        assert seen.whole_bytes is not None
        assert core.stat().st_size >= seen.whole_bytes
    assert sleeper.poll() is None


def test_this_machine_is_looked_at_without_a_connection(tool):
    done = tool("cores", "--local", "--since", "1s", "--format", "json", "-q")
    assert done.status == 0, done
    assert json.loads(done.out)["complete"] is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "an INVENTORY or --local, one of both"),
        (["@local", "--local"], "an INVENTORY or --local, one of both"),
        (["--local", "--limit", "x"], "--limit: --local is about this machine alone"),
        (["--local", "--since", "soon"], "--since soon: must be a moment or a span"),
        (["a,b", "--gcore", "77", "--yes"], "--gcore 77: choose one node with --limit"),
        (["a", "--gcore", "77", "-o", "x"], "-o: with --gcore only for --local"),
        (["--local", "-o", "/dev/null"], "-o /dev/null: is no directory"),
        (["--local", "-o", "/none/x"], "-o /none/x: No such file or directory"),
        (["--local", "--gcore", "1"], "--gcore"),
    ],
)
def test_a_users_mistake_is_one_line(tool, words, said):
    done = tool("cores", *words)
    assert (done.status, done.out) == (2, ""), done
    assert said in done.err

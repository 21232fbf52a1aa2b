"""gdb and strace on processes of our own: they show what they should, and their target goes on."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nodeready.agent.cores import gdb
from nodeready.agent.cores.core_file import CoreReader
from nodeready.agent.runtime import ProcessSupervisor, status
from tests.command import wait_for


@pytest.fixture
def started() -> Iterator[subprocess.Popen[bytes]]:
    """A Python whose interpreter has ended: it waits in C."""
    code = "import ctypes; c = ctypes.CDLL(None); c.on_exit(c.pause, None); print('x', flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_for(lambda: status(process.pid).state == "S")
        yield process
        process.kill()


def test_a_live_process_goes_on_afterwards(started):
    def is_at_its_end() -> bool:
        with open(f"/proc/{started.pid}/wchan", encoding="ascii") as file:
            return "pause" in file.read()

    wait_for(is_at_its_end)
    with ProcessSupervisor("nodeready:test", 60) as supervisor:
        calls, problem, stopped = gdb.live_stack(supervisor, started.pid, 50)
    assert (problem, stopped) == ("", False)
    assert any("exit" in name for name, _, _ in calls)
    assert (status(started.pid).state, status(started.pid).tracer) == ("S", 0)


def test_a_core_of_our_own_process_lies_where_it_shall(tool, started, tmp_path):
    """`nodeready cores --local`: this machine, and no connection."""
    into = tmp_path / "cores here"
    done = tool("cores", "--local", "--gcore", started.pid, "--yes", "-o", into, status=0)
    (core,) = into.iterdir()
    assert done.out.strip() == str(core)
    with core.open("rb") as file:
        reader = CoreReader(file.fileno())
        assert reader.notes.pid == started.pid
        assert reader.whole_bytes is not None
        assert os.stat(core).st_size >= reader.whole_bytes
    assert started.poll() is None

"""The calls that gdb tells of a live process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from nodeready.node.cores import gdb
from nodeready.node.runtime import Supervisor, status

# gdb 13 on a Python whose interpreter has ended.
TEXT = """\
[Thread debugging using libthread_db enabled]
0x00007f5d3c8e3dd0 in __libc_pause () at ../sysdeps/unix/sysv/linux/pause.c:29
#0  0x00007f5d3c8e3dd0 in __libc_pause () at ../sysdeps/unix/sysv/linux/pause.c:29
#1  0x00007f5d3c84e4ab in __run_exit_handlers (status=..., run_dtors=...) at ./stdlib/exit.c:92
#2  0x00007f5d3c84e69b in c10d::ProcessGroupNCCL::~ProcessGroupNCCL() () from /x/libtorch.so
#3  0x00007f5d3c84e69a in ?? ()
#4  std::thread::join (this=...) at /x/thread.cc:127
#5  0x000055f8b2ec4081 in operator delete(void*) () from /lib/libc++.so.1
[Inferior 1 (process 31650) detached]
"""


def test_calls_are_root_to_leaf():
    assert gdb.calls(TEXT) == [
        ("operator delete(void*)", "libc++.so.1", 0),
        ("std::thread::join", "thread.cc", 127),
        ("?", "", 0),
        ("c10d::ProcessGroupNCCL::~ProcessGroupNCCL()", "libtorch.so", 0),
        ("__run_exit_handlers", "exit.c", 92),
        ("__libc_pause", "pause.c", 29),
    ]


@pytest.mark.parametrize("text", ["", "No stack.", "#x y", "#0", "#0  (" * 9, "#0 " + "a " * 9999])
def test_what_is_no_stack_has_no_call(text):
    assert gdb.calls(text) == []


@pytest.mark.skipif(not gdb.find_gdb(), reason="gdb is not installed")
def test_a_live_process_goes_on_afterwards():
    code = "import ctypes; c = ctypes.CDLL(None); c.on_exit(c.pause, None); print('x', flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            until = time.monotonic() + 20
            while not _pauses(process.pid) and time.monotonic() < until:
                time.sleep(0.05)
            with Supervisor("nodeready:test", 60) as supervisor:
                found, why, stopped = gdb.live_stack(supervisor, process.pid, 50)
            if "not permitted" in why:
                pytest.skip("this machine lets nobody trace")
            assert (why, stopped) == ("", False)
            assert any("exit" in name for name, _, _ in found)
            assert status(process.pid).state == "S"
            assert status(process.pid).tracer == 0
        finally:
            process.kill()


def _pauses(pid: int) -> bool:
    with open(f"/proc/{pid}/wchan", encoding="ascii") as file:
        known = file.read()
    return "pause" in known or (os.geteuid() != 0 and not known.strip("0"))

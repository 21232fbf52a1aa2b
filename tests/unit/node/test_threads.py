"""How the threads of a rank wait, and when they last ran, on live processes of ours."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nodeready.agent.stacks import threads
from nodeready.agent.stacks.threads import ThreadWait, group_name, stood_s
from tests.cases import with_table
from tests.command import wait_for

if os.uname().machine not in ("x86_64", "aarch64"):
    pytest.skip("system calls of this machine have no table", allow_module_level=True)

#: Starts threads that run no Python: (function of libc, name) of each.
NATIVE = """
import ctypes, sys, time
libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_create.argtypes = [ctypes.c_void_p] * 4
libc.pthread_setname_np.argtypes = [ctypes.c_ulong, ctypes.c_char_p]
def start(function, name):
    thread = ctypes.c_ulong()
    address = ctypes.cast(getattr(libc, function), ctypes.c_void_p).value
    libc.pthread_create(ctypes.addressof(thread), None, address, ctypes.addressof(semaphore))
    libc.pthread_setname_np(thread.value, name.encode())
"""


@with_table("name, group")
def test_names_that_differ_by_numbers_are_one(name, group):
    assert group_name(name) == group


@contextlib.contextmanager
def running(code, count):
    """A Python with this number of threads beside its main one, which all wait."""
    with subprocess.Popen([sys.executable, "-S", "-c", f"{NATIVE}\n{code}"]) as process:
        tasks = Path(f"/proc/{process.pid}/task")
        try:
            wait_for(lambda: len(list(tasks.iterdir())) == count + 1)
            yield process.pid
        finally:
            process.kill()


def look(pid):
    """Name, call, state -> count, by two looks a moment apart; and the rows."""
    deadline = time.monotonic() + 9
    earlier = threads.first_look([pid], deadline)
    time.sleep(0.05)
    rows = threads.observe({pid: pid}, earlier, deadline)[pid]
    return {(wait.name, wait.call, wait.state): count for wait, count in rows}, rows


def test_threads_without_python_are_counted_by_name_and_wait():
    code = """
for number in range(30):
    start("sem_wait", f"pt_autograd_{number}")
start("pause", "pt_autograd_30")
time.sleep(60)
"""
    usual, odd = ("pt_autograd_N", "futex", "S"), ("pt_autograd_N", "pause", "S")
    with running(code, 31) as pid:
        wait_for(lambda: look(pid)[0] == {usual: 30, odd: 1})
        _, rows = look(pid)
        (wait,) = (wait for wait, _ in rows if wait.call == "pause")
        assert (Path(f"/proc/{pid}/task/{wait.number}/comm")).read_text() == "pt_autograd_30\n"
        if os.geteuid() == 0:
            assert any("pause" in function for function in wait.kernel_stack)
            assert not any("syscall" in function for function in wait.kernel_stack)


def test_a_thread_that_runs_waits_for_nothing():
    code = """
import threading
def loop():
    while True: pass
threading.Thread(target=loop, daemon=True).start()
time.sleep(60)
"""
    with running(code, 1) as pid:
        wait_for(lambda: [key[1:] for key in look(pid)[0]] == [("", "")])


def test_a_process_that_has_ended_or_has_too_many_threads_has_no_rows(monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert look(gone.pid) == ({}, [])
    with running('start("pause", "a")\nstart("pause", "b")\ntime.sleep(60)', 2) as pid:
        wait_for(lambda: len(look(pid)[0]) == 2)
        monkeypatch.setattr(threads, "MAX_ROWS", 1)
        assert look(pid) == ({}, [])
        monkeypatch.setattr(threads, "MAX_ROWS", 9)
        monkeypatch.setattr(threads, "_MAX_THREADS", 2)
        assert look(pid) == ({}, [])


def test_rows_of_equal_waits_are_equal_whatever_thread_they_were_seen_in():
    assert ThreadWait("a", "S", number=1) == ThreadWait("a", "S", number=2, native=("f",))


def test_the_time_since_a_thread_ran_is_the_kernels():
    if not Path("/proc/self/sched").exists():
        pytest.skip("this kernel has no /proc/PID/sched")
    with running('start("pause", "a")\ntime.sleep(60)', 1) as pid:
        began = time.monotonic()
        wait_for(lambda: stood(pid, pid) >= 0.5)
        assert stood(pid, pid) <= time.monotonic() - began + 1.0
    assert stood(pid, pid) == 0.0
    assert stood(os.getpid(), os.getpid()) < 0.5


def stood(pid, number):
    """`stood_s` in a fork, as it changes the process's CPUs."""
    (seconds,) = threads.probe_each(
        lambda number: stood_s(pid, number), [number], time.monotonic() + 9
    ).values()
    return seconds

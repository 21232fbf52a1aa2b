"""A process of ours is ended, and nothing that has its number by then."""

import os
import subprocess
import time

import pytest

from nodeready.agent import runtime


@pytest.fixture
def started():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_number_that_was_given_to_another_process_is_left_alone(started, monkeypatch, pidfd):
    """Its user can end a process of the session between our look and our signal."""
    if not pidfd:
        monkeypatch.delattr(runtime.os, "pidfd_open")
    looks = []
    known = runtime._process_stat

    def again(pid: int) -> tuple[int, int, int]:
        parent, session, start = known(pid)
        looks.append(pid)
        # At the second look, what has the number began later.
        return parent, session, start + (looks.count(pid) % 2 == 0)

    monkeypatch.setattr(runtime, "_process_stat", again)
    runtime.end_all({started.pid})
    assert looks.count(started.pid) >= 2
    assert started.poll() is None
    # As long as it is ours it is ended.
    monkeypatch.setattr(runtime, "_process_stat", known)
    runtime.end_all({started.pid})
    assert started.wait(timeout=10) == -9


def test_the_first_line_of_a_tool_is_that_of_its_errors():
    for out, err, first in (("out", " \n a \nb", "a"), ("out\n", "", "out"), ("", "", "")):
        assert runtime.Ended(1, out, err, 0.1).first == first
    assert runtime.Ended(1, "", "x" * 300, 0.1).first == "x" * 200


def test_a_fork_that_says_nothing_is_waited_for_up_to_the_deadline():
    worker = runtime.ForkedWorker(lambda send: (send({"a": 1}), time.sleep(60)), 60)
    messages = worker.messages(0.05, time.monotonic() + 0.5)
    assert [next(messages) for _ in range(3)] == [{"a": 1}, None, None]
    os.kill(worker.pid, 9)
    os.waitpid(worker.pid, 0)
    loader = "ERROR: ld.so: object '/x.so' from /etc/ld.so.preload cannot be preloaded: ignored."
    with runtime.ProcessSupervisor("nodeready:test", 20) as supervisor:
        says = f'echo "{loader}" >&2; echo broken >&2'
        assert supervisor.run(["sh", "-c", says], 10).err == "broken\n"

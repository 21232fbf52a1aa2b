"""A process of ours is ended, and nothing that has its number by then."""

from __future__ import annotations

import subprocess

import pytest

from nodeready.node import runtime


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
    known = runtime._known

    def again(pid: int) -> tuple[int, int, int]:
        parent, session, start = known(pid)
        looks.append(pid)
        # At the second look, what has the number began later.
        return parent, session, start + (looks.count(pid) % 2 == 0)

    monkeypatch.setattr(runtime, "_known", again)
    runtime.end_all({started.pid})
    assert looks.count(started.pid) >= 2
    assert started.poll() is None
    # As long as it is ours it is ended.
    monkeypatch.setattr(runtime, "_known", known)
    runtime.end_all({started.pid})
    assert started.wait(timeout=10) == -9

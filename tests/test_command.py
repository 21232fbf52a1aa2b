"""The tests' own tools: what they tell does not depend on who started the tests, or came before."""

from __future__ import annotations

from tests.command import tool

__all__ = ["tool"]


def test_the_memory_measured_is_the_commands_own(tool):
    """Not that of the tests' process, which a child starts with."""
    large = bytearray(b"x") * 200_000_000
    done = tool.measured("--version")
    assert len(large) == 200_000_000
    assert done.status == 0, done
    assert 0 < done.peak_kb < 150 * 1024

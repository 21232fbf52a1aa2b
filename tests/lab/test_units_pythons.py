"""`nodeready run` under the oldest Python of a node, and under one with sys.monitoring."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.node.test_run import (  # noqa: F401
    script,
    test_all_stacks_on_a_signal_also_in_c_with_the_lock,
    test_the_last_lines_are_written_when_it_fails,
    test_the_users_own_path_and_sitecustomize_stay,
)


def executables(version: str) -> list[str]:
    own = [*Path("/usr/bin").glob(f"python{version}")]
    own += Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    return [str(path) for path in own[:1]]


@pytest.fixture(params=["3.9", "3.13"])
def python(request: pytest.FixtureRequest) -> str:
    found = executables(request.param)
    if not found:
        pytest.skip(f"no Python {request.param}")
    return found[0]

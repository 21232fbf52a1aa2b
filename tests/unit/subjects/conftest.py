"""The shell of these tests: tests/lab/test_units_shells.py asks some of them of others."""

import pytest


@pytest.fixture
def posix_sh() -> list[str]:
    """The command of a node's shell."""
    return ["sh"]

"""The tests' own tools tell the same whoever started the tests, and in whatever order."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT


def test_the_memory_measured_is_the_commands_own(tool):
    """Not that of the tests' process, which a child starts with."""
    large = bytearray(b"x") * 200_000_000
    done = tool.measured("--version")
    assert len(large) == 200_000_000
    assert done.status == 0, done
    assert 0 < done.peak_kb < 150 * 1024


_HEARS = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


def test_a_child_hears_ctrl_c():
    """Whether or not this test's process was started with it ignored."""
    done = subprocess.run([sys.executable, "-c", _HEARS], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"True\n"


@pytest.mark.nightly
def test_a_suite_in_the_background_of_a_script_is_no_other():
    """A shell without job control starts what it leaves in the background with SIGINT ignored."""
    this = f"{Path(__file__)}::{test_a_child_hears_ctrl_c.__name__}"
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", this]
    done = subprocess.run(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN

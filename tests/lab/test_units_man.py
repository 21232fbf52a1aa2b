"""The manual page as man(1) shows it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.paths import DOCS


def test_man_understands_the_manual():
    if not shutil.which("man"):
        pytest.skip("man is not installed (man-db)")
    done = subprocess.run(
        ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", str(DOCS / "nodeready.1")],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MANWIDTH": "80"},
        check=True,
    )
    assert done.stderr == ""
    assert "EXIT STATUS" in re.sub(".\x08", "", done.stdout)

"""Other releases of the libraries than the locked ones: in a directory of their own, which stands
in front of the locked packages. Wheels alone, so that nothing of them runs before a test.
"""

import os
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from tests.command import LIMIT_S, Tool, cannot_run
from tests.helpers import Done
from tests.paths import ROOT


def run(argv: list[str], limit_s: int = LIMIT_S, **how: Any) -> Done:
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=limit_s, check=False, **how
    )


def install(directory: Path, *words: str) -> Path:
    """The directory, with these packages from PyPI."""
    argv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--only-binary", ":all:"]
    where = ["--python", sys.executable, "--target", str(directory)]
    done = run([*argv, *where, *words], 300, cwd=directory.parent)
    if done.returncode and re.search("Failed to fetch|network was disabled", done.stderr):
        cannot_run(f"PyPI cannot be reached: {' '.join(done.stderr.split())}")
    assert done.returncode == 0, done.stderr
    return directory


def put_in_front(tool: Tool, directory: Path) -> Tool:
    tool.environment = partial(tool.environment, PYTHONPATH=f"{directory}:{ROOT}")
    return tool


def unit_tests(directory: Path, *paths: str) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    done = run([sys.executable, *words], cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout


def versions(directory: Path) -> dict[str, str]:
    """distribution -> its version there."""
    return {item.name: item.version for item in distributions(path=[str(directory)])}

"""The lines of `nodeready env` in the shells of users."""

from __future__ import annotations

import shutil

import pytest

from tests.builders.environments import ENVIRONMENTS
from tests.unit.reports.test_exports import evaluate


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("shell", ["dash", "bash", "busybox sh", "zsh"])
def test_a_shell_takes_the_values_and_nothing_else(name, shell, tmp_path):
    words = shell.split()
    if not shutil.which(words[0]):
        pytest.skip(f"{words[0]} is not installed")
    evaluate(words, name, tmp_path)

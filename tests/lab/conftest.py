"""Tests that share a lab which takes its time to start run on one worker."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import cannot_run

#: A fixture -> the group of the tests that have it, where they name no other.
GROUPS = {"slurm_lab": "slurm", "job": "stacks"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names = [GROUPS[name] for name in getattr(item, "fixturenames", ()) if name in GROUPS]
        if names and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(names[0]))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    import chromium

    try:
        driver = chromium.start()
    except LookupError as missing:
        cannot_run(str(missing))
    yield driver
    driver.quit()


@pytest.fixture
def quiet_browser(browser: Any) -> Iterator[Any]:
    """The same; no page's policy refuses anything, and no script fails."""
    browser.get_log("browser")
    yield browser
    assert browser.get_log("browser") == []


SHELLS = {"dash": ("dash",), "bash": ("bash", "--posix"), "busybox": ("busybox", "sh")}


@pytest.fixture(params=SHELLS)
def interpreter(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """`interpreter(TOOLS)`: the words of a shell, and a PATH with these tools: of busybox, its own
    alone.
    """
    words = [shutil.which(SHELLS[request.param][0]), *SHELLS[request.param][1:]]
    if words[0] is None:
        pytest.skip(f"{request.param} is not installed")

    def with_tools(names: str) -> tuple[list[str], str]:
        if request.param != "busybox":
            return words, os.environ["PATH"]
        tools = tmp_path / "tools"
        tools.mkdir()
        for name in names.split():
            (tools / name).symlink_to(words[0])
        return words, str(tools)

    return with_tools

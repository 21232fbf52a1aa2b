"""Tests that share a lab which takes its time to start run on one worker."""

from collections.abc import Iterator
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

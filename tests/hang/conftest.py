"""The job that hangs, on nodes of the lab."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nodeready.lab import Lab, down
from tests.hang import pythons
from tests.hang.job import NODES, Job


@pytest.fixture(scope="module")
def job(lab_machine: None) -> Iterator[Job]:
    """The job, running."""
    if pythons.DEBIAN not in pythons.found():
        pythons.missing("no torch for /usr/bin/python3 (Debian: python3-torch)", in_ci=True)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    name = f"test-{worker}-{os.getpid()}-torch"
    try:
        yield Job(Lab.up(name, NODES).nodes)
    finally:
        down(name)

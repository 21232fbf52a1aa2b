"""The job that hangs, the command, and inventories of lab nodes for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeready.lab import Lab, down
from tests.hang.job import NODES, Job

TORCH = Path("/usr/lib/python3/dist-packages/torch/__init__.py")


@pytest.fixture(scope="module")
def job(lab_machine: None) -> Iterator[Job]:
    """The job, running. Where there is no torch, a skip; in CI that is a failure."""
    if not TORCH.exists():
        reason = "no torch for /usr/bin/python3 (Debian: python3-torch)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    name = f"test-{worker}-{os.getpid()}-torch"
    try:
        yield Job(Lab.up(name, NODES).nodes)
    finally:
        down(name)

"""One lab of three nodes for each file: the commands that a user of the README meets.

nodes      pristine at the file's first test; each test leaves them as the next one wants them
where      their inventory, with a policy that every machine can give its nodes
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeready.lab import Lab, LabNode, down


@pytest.fixture(scope="module")
def nodes(lab_machine: None, request: pytest.FixtureRequest) -> Iterator[list[LabNode]]:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    name = f"test-{worker}-{os.getpid()}-{request.module.__name__.rpartition('_')[2]}"
    try:
        yield Lab.up(name, 3).nodes
    finally:
        down(name)


@pytest.fixture
def where(nodes: list[LabNode], fleet: Callable[..., Path]) -> Path:
    return fleet(nodes)

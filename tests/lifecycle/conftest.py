"""One lab of three nodes for each file: the commands that a user of the README meets.

nodes      pristine at the file's first test; each test leaves them as the next one wants them
where      their inventory, with a policy that every machine can give its nodes
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeready.lab import LabNode
from tests.conftest import _lab_name, started_lab


@pytest.fixture(scope="module")
def nodes(lab_machine: None, request: pytest.FixtureRequest) -> Iterator[list[LabNode]]:
    with started_lab(_lab_name(request.module.__name__.rpartition("_")[2]), 3) as lab:
        yield lab.nodes


@pytest.fixture
def where(nodes: list[LabNode], fleet: Callable[..., Path]) -> Path:
    return fleet(nodes)

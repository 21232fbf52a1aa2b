"""The small virtual machine for tests that need a real kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.vm.machine import Vm, image


@pytest.fixture(scope="session")
def vm_tools() -> None:
    """Skip where the machine cannot run, with the reason; in CI that is a failure."""
    lacks = image.missing()
    if lacks:
        reason = f"the virtual machine needs {', '.join(lacks)}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="module")
def vm(vm_tools: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vm]:
    """A freshly installed machine, shared by the tests of one module."""
    with Vm.start(tmp_path_factory.mktemp("vm")) as machine:
        yield machine

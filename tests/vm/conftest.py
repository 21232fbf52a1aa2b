"""One small virtual machine for all tests that need a real kernel.

vm          the machine, booted once; a test leaves it as it was
deployed    its inventory and how the deploy ended, which the first test that asks for it starts
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import cannot_run
from tests.helpers import nodeready
from tests.vm.machine import Vm, image

USER = "ml"
#: Values that tell the policy's from the machine's own.
POLICY = {
    "limit_nofile": 65536,
    "ssh_client_hosts": ["vm*"],
    "pdshrc_users": [USER],
    "job_user": USER,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these tests run on one worker."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.xdist_group("vm"))


@pytest.fixture(scope="session")
def vm_tools() -> None:
    """Skip where the machine cannot run."""
    if lacks := image.missing():
        cannot_run(f"the virtual machine needs {', '.join(lacks)}")


@pytest.fixture(scope="session")
def vm(vm_tools: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vm]:
    with Vm.start(tmp_path_factory.mktemp("vm")) as machine:
        yield machine


@pytest.fixture(scope="session")
def deployed(
    vm: Vm, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The machine has the hardware of an MI300X node."""
    vm.plant_pci_device("0000:41:00.0", "0x1002", "0x74a1", "0x120000")
    path = tmp_path_factory.mktemp("inventory") / "inventory.py"
    path.write_text(f"vm = ([('vm1', {vm.inventory_data()!r})], {POLICY!r})\n")
    done = nodeready("deploy", path, "--yes", status=0)
    return path, done


@pytest.fixture(scope="session")
def where(deployed: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    """The inventory of the machine, after a deploy."""
    return deployed[0]

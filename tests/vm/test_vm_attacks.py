"""What users plant where root writes, on a kernel that protects root and on one that does not."""

import subprocess
from collections.abc import Iterator

import pytest

from tests.attacks.links import ATTACKS, Machine, attack
from tests.vm.machine import Vm

_PROTECTED = ("protected_symlinks", "protected_regular", "protected_fifos")


@pytest.fixture(scope="module")
def machine(vm: Vm) -> Machine:
    def root(script: str, given: str) -> subprocess.CompletedProcess[str]:
        return vm.run(script, check=False, input=given, timeout=120)

    return Machine(root, program=False)


@pytest.fixture(params=[0, 1])
def protected(vm: Vm, request: pytest.FixtureRequest) -> Iterator[int]:
    value: int = request.param
    keys = " ".join(f"fs.{name}" for name in _PROTECTED)
    vm.run(f"sysctl {keys} >/run/protected")
    vm.run("; ".join(f"sysctl -qw fs.{name}={value}" for name in _PROTECTED))
    assert vm.run(f"sysctl -n {keys}").stdout.split() == [str(value)] * len(_PROTECTED)
    yield value
    vm.run("sysctl -qp /run/protected")


@pytest.mark.nightly
def test_what_somebody_planted_is_neither_followed_nor_written_to(machine, protected):
    for one in ATTACKS:
        said = attack(machine, one, brief=True)
        assert one.told in said, (one.name, said)

"""The scripts of the probes under busybox, of which unit tests ask the same of sh and awk."""

import inspect
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases
from tests.unit.subjects import test_gpus_kernel_log as kernel_log
from tests.unit.subjects import (
    test_gpus_nvidia,
    test_gpus_pci,
    test_gpus_peers,
    test_ports_firewall,
    test_rdma_script,
    test_site,
)

pytestmark = pytest.mark.skipif(not shutil.which("busybox"), reason="no busybox here")


def questions(word: str) -> list[Callable[..., None]]:
    """The unit tests that take this."""
    modules = (
        *(kernel_log, test_gpus_nvidia, test_gpus_pci, test_gpus_peers),
        *(test_ports_firewall, test_rdma_script),
    )
    functions = {name: one for module in modules for name, one in vars(module).items()}
    tests = [one for name, one in functions.items() if name.startswith("test_")]
    return [one for one in tests if word in inspect.signature(one).parameters]


for function in [*questions("scan"), *questions("awk")]:
    globals()[function.__name__] = function


@pytest.fixture
def scan(tmp_path: Path) -> Any:
    return kernel_log.scanner(tmp_path, "busybox awk")


@pytest.fixture
def awk() -> list[str]:
    return ["busybox", "awk"]


@pytest.mark.parametrize("question", questions("shell"))
def test_the_shell(question, tmp_path):
    given = {"shell": ["busybox", "ash"], "tmp_path": tmp_path}
    question(**{word: given[word] for word in inspect.signature(question).parameters})


@pytest.mark.nightly
@pytest.mark.parametrize("missing", ["", "timeout"])
def test_checks_of_a_sites_own(missing, tmp_path):
    """With nothing but busybox, whose `timeout` ends only its child; and without any."""
    busybox = str(shutil.which("busybox"))
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    for name in {*listed.stdout.split()} - {missing}:
        (tmp_path / name).symlink_to(busybox)
    made = test_site.make_rows([busybox, "ash"], tmp_path)
    rows = [case.values[0] for case in cases(test_site.__file__, test_site.DATA)]
    wrong = [row["name"] for row in rows if made[row["name"]].status != row["status"]]
    # Its PATH is that of the first lines of every script, which `make` leaves out here.
    assert wrong == ["finds what root finds"]

"""The probe's shell text on a made-up /sys."""

from pathlib import Path

import pytest

from nodeready.core.base import Output
from nodeready.core.policy import Policy
from nodeready.lab.hardware import ib_tree, ports_of
from nodeready.subjects.rdma import facts as rdma
from nodeready.subjects.rdma.facts import Rdma
from tests.builders.sections import run_on
from tests.cases import read_table

# tests/lab/test_units_busybox.py asks the same of busybox.
in_each_shell = pytest.mark.parametrize("shell", [["sh"], ["bash", "--posix"]], ids=" ".join)

# Address -> class, vendor, device.
PCI = read_table(__file__, "PCI")


def parse(text: str) -> Rdma:
    observed: Rdma = rdma.parse({"rdma": Output(text, 0)}, Policy())
    return observed


def look(shell: list[str], root: Path, files: dict[str, str]) -> str:
    (section,) = rdma.PROBE.sections
    return run_on(root, section.script(Policy()), shell, files).stdout


def below(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{path}": text for path, text in files.items()}


IB_CLASS = "sys/class/infiniband"


@in_each_shell
def test_it_reads_what_is_there(shell, tmp_path):
    files = below(IB_CLASS, ib_tree(ports_of("h100")))
    observed = parse(look(shell, tmp_path, files))
    lines = (f"/{path}:{line}\n" for path, text in files.items() for line in text.splitlines())
    expected = parse("".join(lines))
    assert observed.nccl_ib_hca == expected.nccl_ib_hca
    assert observed.devices["mlx5_bond_0"] == expected.devices["mlx5_bond_0"]
    assert len(observed.devices) == 9
    # The GIDs of an InfiniBand port cost much and say nothing.
    assert observed.ports["mlx5_0/1"].gids == ()


@in_each_shell
def test_gids_beyond_the_first_16_are_not_read(shell, tmp_path):
    gids = {f"mlx5_0/ports/1/gids/{at}": f"fe80::{at}\n" for at in range(16, 40)}
    observed = parse(
        look(shell, tmp_path, below(IB_CLASS, {**ib_tree(ports_of("mi300x")), **gids}))
    )
    assert [gid.index for gid in observed.ports["mlx5_0/1"].gids] == [0, 1, 2, 3]


@in_each_shell
def test_adapters_without_a_device_and_virtual_functions(shell, tmp_path):
    pci = {
        f"sys/bus/pci/devices/{address}/{name}": f"{value}\n"
        for address, values in PCI.items()
        for name, value in zip(("class", "vendor", "device"), values, strict=True)
    }
    pair = ib_tree(ports_of("h100")[:2], mlx5_1={"pci_address": "0000:18:00.2"})
    for path in (
        f"{IB_CLASS}/mlx5_1/device/physfn",
        "sys/bus/pci/devices/0000:18:00.2/physfn",
        "sys/bus/pci/devices/0000:77:00.0/driver",
        "sys/bus/pci/drivers/vfio-pci/0000:78:00.0",
    ):
        (tmp_path / path).mkdir(parents=True)
    observed = parse(look(shell, tmp_path, {**pci, **below(IB_CLASS, pair)}))
    assert [(adapter.pci_address, adapter.bound) for adapter in observed.without] == [
        ("0000:00:06.0", False), ("0000:77:00.0", True),
    ]  # fmt: skip
    assert {name: device.virtual for name, device in observed.devices.items()} == {
        "mlx5_0": False, "mlx5_1": True,
    }  # fmt: skip


@in_each_shell
def test_nothing_there_prints_nothing(shell, tmp_path):
    assert look(shell, tmp_path, {}) == ""
    assert look(shell, tmp_path, {"sys/bus/pci/devices/0000:02:00.0/class": "0x010802\n"}) == ""

"""The probe's shell text on a made-up /sys, under each shell that is here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from nodeready import shell as shell_text
from nodeready.lab.hardware import h100, ib_tree, mi300x
from nodeready.policy import Policy
from nodeready.subjects.base import Output
from nodeready.subjects.rdma import facts as rdma
from nodeready.subjects.rdma.facts import Rdma

SHELLS = [["dash"], ["busybox", "ash"], ["bash", "--posix"]]
# Address -> class, vendor, device.
PCI = {
    "0000:18:00.0": ("0x020700", "0x15b3", "0x1021"),
    "0000:18:00.2": ("0x020700", "0x15b3", "0x101e"),
    "0000:77:00.0": ("0x020700", "0x15b3", "0x1021"),
    "0000:78:00.0": ("0x020700", "0x15b3", "0x1021"),
    "0000:00:05.0": ("0x020000", "0x1d0f", "0xec20"),
    "0000:00:06.0": ("0x020000", "0x1d0f", "0xefa1"),
    "0000:01:00.0": ("0x020000", "0x15b3", "0x1021"),
    "0000:02:00.0": ("0x010802", "0x144d", "0xa80a"),
}


@pytest.fixture(params=SHELLS, ids=lambda words: str(words[0]))
def shell(request: pytest.FixtureRequest) -> list[str]:
    words: list[str] = request.param
    if not shutil.which(words[0]):
        pytest.skip(f"no {words[0]} here")
    return words


def make(sys: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (sys / path).parent.mkdir(parents=True, exist_ok=True)
        (sys / path).write_text(text)


def look(shell: list[str], sys: Path) -> tuple[Rdma, str]:
    """What is seen of this /sys, and what the script printed."""
    (section,) = rdma.PROBE.sections
    text = shell_text.library("probe") + section.script(Policy()).replace("/sys/", f"{sys}/")
    done = subprocess.run(
        [*shell, "-c", text], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    assert done.stderr == ""
    printed = done.stdout.replace(f"{sys}/", "/sys/")
    seen: Rdma = rdma.parse({"rdma": Output(printed, 0)}, Policy())
    return seen, printed


def test_it_reads_what_is_there(shell: list[str], tmp_path: Path) -> None:
    devices = {f"class/infiniband/{path}": text for path, text in ib_tree(h100()).items()}
    make(tmp_path, devices)
    seen, _ = look(shell, tmp_path)
    text = "".join(
        f"/sys/{path}:{line}\n" for path, text in devices.items() for line in text.splitlines()
    )
    expected: Rdma = rdma.parse({"rdma": Output(text, 0)}, Policy())
    assert seen.nccl_ib_hca == expected.nccl_ib_hca
    bond = "mlx5_bond_0"
    assert seen.devices[bond] == expected.devices[bond]
    assert len(seen.devices) == 9
    # The GIDs of an InfiniBand port cost much and say nothing.
    assert seen.ports["mlx5_0/1"].gids == ()


def test_gids_beyond_the_first_16_are_not_read(shell: list[str], tmp_path: Path) -> None:
    port = "class/infiniband/mlx5_0/ports/1"
    more = {f"{port}/gids/{at}": f"fe80::{at}\n" for at in range(20, 256)}
    devices = {f"class/infiniband/{path}": text for path, text in ib_tree(mi300x()).items()}
    make(tmp_path, {**devices, **more})
    assert [gid.index for gid in look(shell, tmp_path)[0].ports["mlx5_0/1"].gids] == [0, 1, 2, 3]


def test_adapters_without_a_device_and_virtual_functions(shell: list[str], tmp_path: Path) -> None:
    names = ("class", "vendor", "device")
    pci = {
        f"bus/pci/devices/{address}/{name}": f"{value}\n"
        for address, values in PCI.items()
        for name, value in zip(names, values, strict=True)
    }
    one = ib_tree(h100()[:2], mlx5_1={"pci_address": "0000:18:00.2"})
    make(tmp_path, {**pci, **{f"class/infiniband/{path}": text for path, text in one.items()}})
    (tmp_path / "class/infiniband/mlx5_1/device/physfn").mkdir()
    (tmp_path / "bus/pci/devices/0000:18:00.2/physfn").mkdir()
    (tmp_path / "bus/pci/devices/0000:77:00.0/driver").mkdir()
    (tmp_path / "bus/pci/drivers/vfio-pci/0000:78:00.0").mkdir(parents=True)
    seen, _ = look(shell, tmp_path)
    assert [(a.pci_address, a.bound) for a in seen.without] == [
        ("0000:00:06.0", False),
        ("0000:77:00.0", True),
    ]
    assert {name: device.virtual for name, device in seen.devices.items()} == {
        "mlx5_0": False,
        "mlx5_1": True,
    }


def test_nothing_there_prints_nothing(shell: list[str], tmp_path: Path) -> None:
    assert look(shell, tmp_path)[1] == ""
    make(tmp_path, {"bus/pci/devices/0000:02:00.0/class": "0x010802\n"})
    assert look(shell, tmp_path)[1] == ""

"""What the virtual machine says when it cannot be built or does not boot."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from tests.vm import machine
from tests.vm.machine import image as vm_image
from tests.vm.machine.boot import VmError, boot_args, grub_args

MENU = """\
menuentry 'Debian' {
\tlinux\t/boot/vmlinuz-6.1 root=/dev/vda ro  quiet iommu=pt
}
menuentry 'Debian, recovery mode' {
\tlinux\t/boot/vmlinuz-6.1 root=/dev/vda ro single
}
"""


@pytest.mark.parametrize(
    ("grub_cfg", "args"),
    [
        (MENU, ("root=/dev/vda", "ro", "quiet", "iommu=pt")),
        ("linux16 /vmlinuz dyndbg='file a.c +p'", ("dyndbg=file a.c +p",)),
        ("### BEGIN /etc/grub.d/10_linux ###\nset linux_gfx_mode=keep\n", ()),
        ("", ()),
    ],
)
def test_the_first_entry_gives_the_kernel_arguments(grub_cfg: str, args: tuple[str, ...]) -> None:
    assert grub_args(grub_cfg) == args


def test_what_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(VmError) as caught:
        vm_image.build()
    said = str(caught.value)
    assert "qemu-system-x86_64 (package qemu-system-x86)" in said
    assert "mmdebstrap (package mmdebstrap)" in said
    assert "root" in said
    assert "\n" not in said


def test_a_disk_without_a_boot_entry_would_not_boot(vm_tools: None, tmp_path: Path) -> None:
    assert boot_args(_disk(tmp_path / "good", MENU))[-1] == "iommu=pt"
    with pytest.raises(VmError, match=r"would not boot: no kernel line in /boot/grub/grub\.cfg"):
        boot_args(_disk(tmp_path / "empty", ""))


@pytest.mark.nightly
def test_a_machine_that_dies_at_boot_shows_its_console(vm_tools, tmp_path, monkeypatch):
    no_init = dataclasses.replace(vm_image.build(), root=_disk(tmp_path / "no_init", MENU))
    monkeypatch.setattr(machine, "build", lambda: no_init)
    with pytest.raises(VmError) as caught:
        machine.Vm.start(tmp_path / "vm")
    first, *evidence, last = str(caught.value).splitlines()
    assert first == "vm1: the machine ended before ssh came up (rc 0)"
    assert any("Kernel panic - not syncing" in line for line in evidence)
    assert last == f"console log: {tmp_path / 'vm' / 'console.log'}"
    assert not (tmp_path / "vm" / "disk.img").exists()


def _disk(home: Path, grub_cfg: str) -> Path:
    grub = home / "tree/boot/grub"
    grub.mkdir(parents=True)
    (grub / "grub.cfg").write_text(grub_cfg)
    image = home / "disk.img"
    subprocess.run(
        ["/sbin/mke2fs", "-q", "-t", "ext4", "-d", home / "tree", image, "16M"], check=True
    )
    return image

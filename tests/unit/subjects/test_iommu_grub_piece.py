"""Our piece of GRUB's configuration, run by the shells that grub-mkconfig runs under."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from nodeready.operations.iommu import grub_piece

SHELLS = [
    pytest.param(
        command, marks=pytest.mark.skipif(not shutil.which(command[0]), reason="not installed")
    )
    for command in (["dash"], ["bash", "--posix"], ["busybox", "sh"])
]


def run(shell: list[str], before: str, args: tuple[str, ...]) -> list[str]:
    """GRUB_CMDLINE_LINUX and _DEFAULT after ``before`` and our piece, under ``set -e``."""
    show = r'printf "%s\n" "$GRUB_CMDLINE_LINUX" "$GRUB_CMDLINE_LINUX_DEFAULT"'
    script = f"set -e\n{before}\n{grub_piece(args).decode()}\n{show}\n"
    done = subprocess.run(shell, input=script.encode(), capture_output=True, check=True)
    assert done.stderr == b""
    return done.stdout.decode().split("\n")[:2]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("linux", "default", "args", "after"),
    [
        ("", "quiet splash", ("iommu=pt",), ["iommu=pt", "quiet splash"]),
        ("a=1", "", ("iommu=pt",), ["a=1 iommu=pt", ""]),
        ("a iommu=soft b", "iommu=off quiet", ("iommu=pt",), ["a b iommu=pt", "quiet"]),
        ("iommu=pt a", "iommu=pt", ("iommu=pt",), ["a iommu=pt", ""]),
        ('d="file x +p" *  $HOME', "", ("iommu=pt",), ['d="file x +p" *  $HOME iommu=pt', ""]),
        ('n="a iommu=soft b" iommu', "", ("iommu=pt",), ['n="a iommu=soft b" iommu=pt', ""]),
        (
            "amd-iommu=off x",
            "amd_iommu=off",
            ("amd_iommu=pgtbl_v2",),
            ["x amd_iommu=pgtbl_v2", ""],
        ),
        ("pci=noaer", "pci=realloc=off", ("pci=realloc=off",), ["pci=noaer pci=realloc=off", ""]),
        ("xiommu=soft iommux=1", "", ("iommu=pt",), ["xiommu=soft iommux=1 iommu=pt", ""]),
        ("a\r", "", ("iommu=pt",), ["a\riommu=pt", ""]),
        (
            "a",
            "b",
            (
                "intel_iommu=on",
                "iommu=pt",
            ),
            ["a intel_iommu=on iommu=pt", "b"],
        ),
    ],
)
def test_other_arguments_keep_their_order_and_text(shell, linux, default, args, after):
    before = f"GRUB_CMDLINE_LINUX='{linux}'\nGRUB_CMDLINE_LINUX_DEFAULT='{default}'"
    assert run(shell, before, args) == after
    again = f"GRUB_CMDLINE_LINUX='{after[0]}'\nGRUB_CMDLINE_LINUX_DEFAULT='{after[1]}'"
    assert run(shell, again, args) == after


@pytest.mark.parametrize("shell", SHELLS)
def test_an_open_quote_is_left_as_it_is(shell):
    before = "GRUB_CMDLINE_LINUX='a b=\"open iommu=soft'"
    assert run(shell, before, ("iommu=pt",))[0] == 'a b="open iommu=soft iommu=pt'


@pytest.mark.parametrize("shell", SHELLS)
def test_variables_that_were_never_set(shell):
    assert run(shell, "unset GRUB_CMDLINE_LINUX", ("iommu=pt",)) == ["iommu=pt", ""]

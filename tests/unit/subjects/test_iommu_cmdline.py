"""Kernel command lines: taken apart as the kernel does, compared as the kernel compares."""

from __future__ import annotations

import pytest

from nodeready.subjects.base import Line
from nodeready.subjects.iommu import facts as cmdline


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ro quiet iommu=pt", ("ro", "quiet", "iommu=pt")),
        ('ro  dyndbg="file x +p"\tb\r', ("ro", 'dyndbg="file x +p"', "b")),
        ('"dyndbg=file x" a', ('"dyndbg=file x"', "a")),
        ('a b="never closed c', ("a", 'b="never closed c')),
        ("ro -- iommu=pt", ("ro",)),
        ("", ()),
    ],
)
def test_tokens_split_at_blanks_outside_quotes_and_end_at_two_dashes(text, tokens):
    assert cmdline.tokens(text) == tokens


@pytest.mark.parametrize(
    ("present", "wanted", "missing", "contradicting"),
    [
        ("ro iommu=pt", "iommu=pt", (), ()),
        ("ro", "iommu=pt", ("iommu=pt",), ()),
        ("iommu=soft iommu=pt", "iommu=pt", (), ("iommu=soft",)),
        ("amd-iommu=pgtbl_v2", "amd_iommu=pgtbl_v2", (), ()),
        ("amd-iommu=off", "amd_iommu=pgtbl_v2", ("amd_iommu=pgtbl_v2",), ("amd-iommu=off",)),
        ("amd_iommu=off", "iommu=pt", ("iommu=pt",), ()),
        ("xiommu=soft iommux=soft", "iommu=pt", ("iommu=pt",), ()),
        ("iommu", "iommu=pt", ("iommu=pt",), ("iommu",)),
        ("pci=noaer", "pci=realloc=off", ("pci=realloc=off",), ()),
        ("iommu=PT", "iommu=pt", ("iommu=pt",), ("iommu=PT",)),
    ],
)
def test_missing_and_contradicting_tokens(present, wanted, missing, contradicting):
    have, want = cmdline.tokens(present), cmdline.tokens(wanted)
    assert cmdline.missing(have, want) == missing
    assert cmdline.contradicting(have, want) == contradicting


@pytest.mark.parametrize(
    ("lines", "tokens"),
    [
        (['GRUB_CMDLINE_LINUX="a b"', "GRUB_CMDLINE_LINUX_DEFAULT=quiet"], ("a", "b", "quiet")),
        (["GRUB_CMDLINE_LINUX='a'", 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX b"'], ("a", "b")),
        (["GRUB_CMDLINE_LINUX=a", 'GRUB_CMDLINE_LINUX="${GRUB_CMDLINE_LINUX} b" # c'], ("a", "b")),
        (["GRUB_CMDLINE_LINUX=a", "export GRUB_CMDLINE_LINUX=b"], ("b",)),
        (['GRUB_CMDLINE_LINUX="d=\\"x y\\" z"'], ('d="x y"', "z")),
        (['GRUB_CMDLINE_LINUX="a"\r'], ("a",)),
        (['#GRUB_CMDLINE_LINUX="a"', "GRUB_CMDLINE_LINUX_RECOVERY=b"], ()),
        (['GRUB_CMDLINE_LINUX="a \\'], None),
        (["GRUB_CMDLINE_LINUX=$(echo a)"], None),
        (["GRUB_CMDLINE_LINUX=`echo a`"], None),
        (["GRUB_CMDLINE_LINUX+=a"], None),
        ([], ()),
    ],
)
def test_what_grubs_configuration_makes(lines, tokens):
    seen = [Line("/etc/default/grub", at, text) for at, text in enumerate(lines, 1)]
    assert cmdline.configured(seen).tokens == tokens

"""Kernel command lines: taken apart as the kernel does, compared as the kernel compares."""

from __future__ import annotations

import pytest

from nodeready.subjects.base import Line, kernel_arguments
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
    assert kernel_arguments(text) == tokens


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
    have, want = kernel_arguments(present), kernel_arguments(wanted)
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


# Comma lists, quotes and other spellings. Sources: the kernel's kernel-parameters.txt,
# arch/x86/kernel/pci-dma.c, drivers/iommu/iommu.c, drivers/iommu/{intel/iommu.c,amd/init.c}.
@pytest.mark.parametrize(
    ("present", "wanted", "missing", "contradicting"),
    [
        ("iommu=pt,nofullflush", "iommu=pt", (), ()),
        ("iommu=nofullflush,pt", "iommu=pt", (), ()),
        ("iommu=force,pt", "iommu=pt", (), ()),
        ("iommu=noforce iommu=pt", "iommu=pt", (), ()),
        ("iommu=memaper=3 iommu=pt", "iommu=pt", (), ()),
        ("iommu=pt,soft", "iommu=pt", (), ("iommu=pt,soft",)),
        ("iommu=pt,off", "iommu=pt", (), ("iommu=pt,off",)),
        ("iommu=pt iommu=nopt", "iommu=pt", (), ("iommu=nopt",)),
        ("iommu=fullflush", "iommu=pt", ("iommu=pt",), ()),
        ("iommu=pt iommu=pt", "iommu=pt", (), ()),
        ('iommu="pt"', "iommu=pt", (), ()),
        ('"iommu=pt"', "iommu=pt", (), ()),
        ("intel_iommu=on,sm_on iommu=pt", "intel_iommu=on iommu=pt", (), ()),
        ("intel_iommu=sm_on,on", "intel_iommu=on", (), ()),
        ("intel_iommu=igfx_off", "intel_iommu=on", ("intel_iommu=on",), ()),
        ("intel_iommu=on intel_iommu=off", "intel_iommu=on", (), ("intel_iommu=off",)),
        ("intel_iommu=on,strict", "intel_iommu=on", (), ()),
        ("iommu.strict=0 iommu=pt", "iommu=pt", (), ()),
        ("iommu.passthrough=1", "iommu=pt", (), ()),
        ("iommu.passthrough=on", "iommu=pt", (), ()),
        ("iommu=pt iommu.passthrough=1", "iommu=pt", (), ()),
        ("iommu=pt iommu.passthrough=0", "iommu=pt", (), ("iommu.passthrough=0",)),
        ("iommu=pt", "iommu.passthrough=1", (), ()),
        ("iommu.passthrough=2", "iommu=pt", ("iommu=pt",), ()),
        ("amd_iommu=on iommu=pt", "iommu=pt", (), ()),
        ("amd_iommu=pgtbl_v2,force_isolation", "amd_iommu=pgtbl_v2", (), ()),
        ("amd_iommu=pgtbl_v1", "amd_iommu=pgtbl_v2", ("amd_iommu=pgtbl_v2",),
         ("amd_iommu=pgtbl_v1",)),
        ("amd_iommu=fullflush amd_iommu=pgtbl_v2", "amd_iommu=pgtbl_v2", (), ()),
        ("iommu=pt", "iommu=pt,force", ("iommu=pt,force",), ()),
        ("iommu=force iommu=pt", "iommu=pt,force", (), ()),
        ("IOMMU=off iommu=pt", "iommu=pt", (), ()),
        ("iommu=", "iommu=pt", ("iommu=pt",), ("iommu=",)),
    ],
)  # fmt: skip
def test_words_of_one_option(present, wanted, missing, contradicting):
    have, want = kernel_arguments(present), kernel_arguments(wanted)
    assert cmdline.missing(have, want) == missing
    assert cmdline.contradicting(have, want) == contradicting


GRUB = """\
### BEGIN /etc/grub.d/00_header ###
if [ -s $prefix/grubenv ]; then
  set have_grubenv=true
fi
if [ "${next_entry}" ] ; then
   set default="${next_entry}"
   set next_entry=
   set boot_once=true
else
   set default="DEFAULT"
fi
if [ "${prev_saved_entry}" ]; then
  set saved_entry="${prev_saved_entry}"
fi
function savedefault {
  if [ -z "${boot_once}" ]; then
    saved_entry="${chosen}"
  fi
}
### END /etc/grub.d/00_header ###
### BEGIN /etc/grub.d/10_linux ###
menuentry 'Ubuntu' --class ubuntu $menuentry_id_option 'gnulinux-simple-4a3c' {
\tlinux\t/vmlinuz-6.8 root=UUID=4a3c ro  first
}
submenu 'Advanced options for Ubuntu' $menuentry_id_option 'gnulinux-advanced-4a3c' {
\tmenuentry 'Ubuntu, with Linux 6.8' --class ubuntu $menuentry_id_option 'gnulinux-6.8-adv' {
\t\tlinux\t/vmlinuz-6.8 root=UUID=4a3c ro  sub-0
\t}
\tmenuentry 'Ubuntu, with Linux 6.8 (recovery mode)' --class ubuntu {
\t\tlinux\t/vmlinuz-6.8 root=UUID=4a3c ro single sub-1
\t}
\tmenuentry "Ubuntu, with Linux 6.5" --class ubuntu --id gnulinux-6.5-adv {
\t\tlinux\t/vmlinuz-6.5 root=UUID=4a3c ro  sub-2
\t}
}
### END /etc/grub.d/10_linux ###
### BEGIN /etc/grub.d/30_uefi-firmware ###
menuentry 'UEFI Firmware Settings' $menuentry_id_option 'uefi-firmware' {
\tfwsetup
}
### END /etc/grub.d/30_uefi-firmware ###
### BEGIN /etc/grub.d/40_custom ###
menuentry 'mine > yours' {
\tlinux /boot/custom ro own
}
### END /etc/grub.d/40_custom ###
"""


def lines_of(path, text):
    return [Line(path, at, one) for at, one in enumerate(text.split("\n"), 1)]


def booting(default, env="", family="debian"):
    """The last argument of the entry that boots, and the script that wrote it."""
    files = {
        "/boot/grub/grub.cfg": lines_of("/boot/grub/grub.cfg", GRUB.replace("DEFAULT", default))
    }
    if env:
        files["/boot/grub/grubenv"] = lines_of("/boot/grub/grubenv", env)
    entry = cmdline._boot(files, family).entry
    return entry.tokens[-1], entry.script


# GRUB's manual, "default"; grub-core/normal/menu.c (get_entry_number, run_menu).
@pytest.mark.parametrize(
    ("default", "env", "entry"),
    [
        ("0", "", "first"),
        ("1>0", "", "sub-0"),
        ("1>2", "", "sub-2"),
        ("1", "", "sub-0"),
        ("3", "", "own"),
        ("9", "", "first"),
        ("", "", "first"),
        ("Ubuntu", "", "first"),
        ("gnulinux-simple-4a3c", "", "first"),
        ("Advanced options for Ubuntu>Ubuntu, with Linux 6.5", "", "sub-2"),
        ("gnulinux-advanced-4a3c>gnulinux-6.5-adv", "", "sub-2"),
        ("gnulinux-advanced-4a3c>1", "", "sub-1"),
        ("1>gnulinux-6.8-adv", "", "sub-0"),
        # An entry of a submenu is not found without its submenu.
        ("gnulinux-6.5-adv", "", "first"),
        ("mine >> yours", "", "own"),
        ("no such entry", "", "first"),
        ("1>no such entry", "", "sub-0"),
        ("${saved_entry}", "saved_entry=1>2", "sub-2"),
        ("${saved_entry}", "saved_entry=gnulinux-advanced-4a3c>gnulinux-6.5-adv", "sub-2"),
        ("${saved_entry}", "saved_entry=", "first"),
        ("${saved_entry}", "", "first"),
        ("${saved_entry}", "saved_entry=0\nnext_entry=1>1", "sub-1"),
        ("0", "next_entry=3", "own"),
        ("0", "next_entry=", "first"),
        ("0", "saved_entry=1>2", "first"),
        # The entry of a firmware's menu has no kernel: what is known is the first one.
        ("uefi-firmware", "", "first"),
    ],
)
def test_the_entry_that_grub_boots(default, env, entry):
    script = "40_custom" if entry == "own" else "10_linux"
    assert booting(default, env) == (entry, script)


ENTRIES = {
    "abc-5.14.0-503.el9.x86_64": ("Rocky Linux (5.14.0-503) 9.5", "new"),
    "abc-5.14.0-70.el9.x86_64": ("Rocky Linux (5.14.0-70) 9.0", "old"),
    "abc-0-rescue": ("Rocky Linux (0-rescue) 9.5", "rescue"),
}


# blscfg.c of RHEL's grub2; systemd-boot(7), loader.conf(5).
@pytest.mark.parametrize(
    ("family", "env", "loader", "entry"),
    [
        ("redhat", "", "", "new"),
        ("redhat", "saved_entry=abc-5.14.0-70.el9.x86_64", "", "old"),
        ("redhat", "saved_entry=abc-5.14.0-503.el9.x86_64", "", "new"),
        ("redhat", "saved_entry=Rocky Linux (5.14.0-70) 9.0", "", "old"),
        ("redhat", "saved_entry=1", "", "old"),
        ("redhat", "saved_entry=0\nnext_entry=abc-5.14.0-70.el9.x86_64", "", "old"),
        ("redhat", "saved_entry=gone", "", "new"),
        ("redhat", "saved_entry=abc-0-rescue", "", "rescue"),
        ("debian", "", "timeout 3\ndefault abc-5.14.0-70*", "old"),
        ("debian", "", "default abc-5.14.0-503.el9.x86_64.conf", "new"),
        ("debian", "", "timeout 3", "new"),
    ],
)
def test_the_boot_loader_entry_that_boots(family, env, loader, entry):
    files = {}
    if family == "redhat":
        text = 'set default="${saved_entry}"\nblscfg\n'
        files["/boot/grub2/grub.cfg"] = lines_of("/boot/grub2/grub.cfg", text)
    for name, (title, word) in ENTRIES.items():
        path = f"/boot/loader/entries/{name}.conf"
        files[path] = lines_of(path, f"title {title}\nlinux /vmlinuz\noptions ro {word}")
    if loader:
        files["/boot/loader/loader.conf"] = lines_of("/boot/loader/loader.conf", loader)
    if env:
        files["/boot/grub2/grubenv"] = lines_of("/boot/grub2/grubenv", env)
    assert cmdline._boot(files, family).entry.tokens[-1] == entry


def test_a_menu_of_its_own_decides_where_boot_loader_entries_are_off():
    """GRUB_ENABLE_BLSCFG=false: grub.cfg has entries, and no blscfg."""
    entry = "/boot/loader/entries/abc-5.14.conf"
    files = {
        "/boot/grub2/grub.cfg": lines_of("/boot/grub2/grub.cfg", GRUB.replace("DEFAULT", "0")),
        entry: lines_of(entry, "options ro bls"),
    }
    assert cmdline._boot(files, "redhat").entry.tokens[-1] == "first"
    files["/boot/grub2/grub.cfg"] += lines_of("/boot/grub2/grub.cfg", "blscfg")
    assert cmdline._boot(files, "redhat").entry.tokens[-1] == "bls"

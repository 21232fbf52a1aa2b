"""Kernel arguments on real nodes with eight MI300X, by each distribution's way.

The node's boot loader tools stand in for the real ones (iommu_tools/); what they read and
write, and what is asserted here, are plain files.
"""

import base64
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeready.core.policy import Policy
from nodeready.lab import LabNode
from nodeready.operations import iommu
from tests.cases import read_table
from tests.lab.looks import deploy, statuses

STEPS, DONE = [iommu.args], ["iommu.args"]
TOOLS = {
    path.name: path.read_bytes() for path in Path(__file__).with_name("iommu_tools").iterdir()
}


def boots(node: LabNode, prints: str) -> None:
    """The kernel was started with what this prints."""
    script = (
        f"{prints} >/tmp/cmdline; umount /proc/cmdline; mount --bind /tmp/cmdline /proc/cmdline"
    )
    node.enter(["sh", "-c", script])


@pytest.fixture
def node(fresh_nodes: Callable[..., list[LabNode]]) -> Callable[..., LabNode]:
    """A factory: a node of a distribution with its boot loader tools and these files."""

    def make(release: str, *tools: str, **files: str | bytes) -> LabNode:
        made = fresh_nodes(1, profile="mi300x")[0]
        # As the kernel was started before anybody set its arguments.
        boots(made, "sed 's/ intel_iommu=on iommu=pt//' /proc/cmdline")
        made.write("/etc/os-release", release)
        for tool in tools:
            made.write(f"/usr/sbin/{tool}", TOOLS[tool], 0o755)
        for path, content in files.items():
            made.write(path, content)
        return made

    return make


DEBIAN = "ID=debian\nVERSION_ID=12\n"
ROCKY = 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.5"\n'
SLES = 'ID="sles"\nID_LIKE="suse"\nVERSION_ID="15.6"\n'


def calls(node: LabNode) -> list[str]:
    return node.run("cat /var/log/boot-tools.log 2>/dev/null || :").stdout.splitlines()


def arguments(node: LabNode, path: str = "/boot/grub/grub.cfg") -> list[str]:
    """The first kernel's arguments, apart from root, as a person would read them."""
    line = re.search(r"^\s*linux\s+\S+ root=\S+ (.*)$", node.read(path), re.M)
    assert line
    return re.findall(r'(?:[^\s"]|"[^"]*")+', line[1])


def expected(node: LabNode) -> list[str]:
    """iommu=pt, and on an Intel host (this machine's CPU shows through) intel_iommu=on."""
    intel = "GenuineIntel" in node.read("/proc/cpuinfo")
    return ["intel_iommu=on", "iommu=pt"] if intel else ["iommu=pt"]


#: What Debian's files say before; what our piece makes of each line, tests/unit asks.
DIRTY = read_table(__file__, "DIRTY")
#: The arguments of others afterwards, in front of ours and behind them.
BEFORE = ["ro", 'dyndbg="file drivers/* +p; func f"', "x=*", '"y=a b"', "a=1", "b=2", "c=3"]
BEHIND = ["console=ttyS0"]


def test_debian_keeps_other_tokens_and_drops_contradicting_ones(node):
    debian = node(DEBIAN, "update-grub")
    for files, before, behind in (({}, ["ro"], []), (DIRTY, BEFORE, BEHIND)):
        debian.run("rm -rf /etc/default/grub /etc/default/grub.d /var/log/boot-tools.log")
        for path, text in files.items():
            debian.write(f"/etc/default/grub{path}", text)
        sums = f"cd /etc/default; sha256sum {' '.join(f'grub{path}' for path in files)} </dev/null"
        debian.run("update-grub")
        was = debian.run(sums).stdout
        assert statuses(debian, Policy(), "iommu")["iommu.args"] == "fail"

        assert deploy(debian, Policy(), STEPS, "iommu") == DONE

        after = [*before, *expected(debian), *behind]
        assert arguments(debian) == after
        assert debian.run(sums).stdout == was
        expect = {"iommu.args": "ok", "iommu.live": "warn", "iommu.off": "ok"}
        assert statuses(debian, Policy(), "iommu") == expect
        assert deploy(debian, Policy(), STEPS, "iommu") == []
        assert len(calls(debian)) == 2
        # What a kernel update does.
        debian.run("update-grub")
        assert arguments(debian) == after
    # A reboot gives the kernel what the boot loader has.
    boots(debian, f"echo BOOT_IMAGE=/vmlinuz {' '.join(expected(debian))}")
    assert set(statuses(debian, Policy(), "iommu").values()) == {"ok"}
    # Another policy replaces, and an empty one leaves all alone.
    other = Policy(iommu_args=("iommu=nopt", "pci=noaer"))
    assert deploy(debian, other, STEPS, "iommu") == DONE
    assert arguments(debian) == [*BEFORE, "iommu=nopt", "pci=noaer", *BEHIND]
    assert deploy(debian, Policy(iommu_args=()), STEPS, "iommu") == []
    assert set(statuses(debian, Policy(iommu_args=()), "iommu").values()) == {"na"}
    fails = "#!/bin/sh\necho 'grub-probe: no device' >&2\nexit 1\n"
    debian.write("/usr/sbin/update-grub", fails, 0o755)
    with pytest.raises(AssertionError, match="update-grub: grub-probe: no device"):
        deploy(debian, Policy(), STEPS, "iommu")


def test_rhel_goes_through_grubby(node):
    entries = "/boot/loader/entries"
    files = {
        f"{entries}/1-5.14.0-503.conf": "title Rocky\nversion 5.14.0-503\n"
        "linux /vmlinuz-5.14.0-503\noptions root=/dev/r ro iommu=soft a=1 $tuned_params\n",
        f"{entries}/1-5.14.0-427.conf": "linux /vmlinuz-5.14.0-427\noptions root=/dev/r ro\n",
        "/boot/grub2/grubenv": "# GRUB Environment Block\ntuned_params=skew_tick=1\n####",
        "/boot/grub2/grub.cfg": "blscfg\n",
    }
    rocky = node(ROCKY, "grubby", "grub2-mkconfig", **files)
    assert statuses(rocky, Policy(), "iommu")["iommu.args"] == "fail"
    assert deploy(rocky, Policy(), STEPS, "iommu") == DONE
    ours = " ".join(expected(rocky))
    options = re.findall(r"^options (.*)$", rocky.run(f"cat {entries}/*.conf").stdout, re.M)
    assert options == [f"root=/dev/r ro {ours}", f"root=/dev/r ro a=1 $tuned_params {ours}"]
    (call,) = calls(rocky)
    assert "--remove-args=iommu=soft" in call
    assert statuses(rocky, Policy(), "iommu")["iommu.args"] == "ok"
    assert deploy(rocky, Policy(), STEPS, "iommu") == []
    assert rocky.run("ls /etc/default/grub.d", check=False).returncode != 0


def test_sles_gets_a_block_in_its_one_file(node):
    """Whatever its lines end in, tests/unit asks."""
    sles = node(SLES, "grub2-mkconfig")
    main = 'GRUB_DEFAULT=saved\r\nGRUB_CMDLINE_LINUX_DEFAULT="iommu=soft quiet"'
    # A link stays a link.
    sles.run("ln -sfn /etc/site/grub /etc/default/grub")
    sles.write("/etc/site/grub", main)
    sles.run("grub2-mkconfig -o /boot/grub2/grub.cfg")
    assert statuses(sles, Policy(), "iommu")["iommu.args"] == "fail"
    assert deploy(sles, Policy(), STEPS, "iommu") == DONE
    wanted_now = [*expected(sles), "quiet"]
    assert arguments(sles, "/boot/grub2/grub.cfg") == wanted_now
    assert sles.run("readlink /etc/default/grub").stdout == "/etc/site/grub\n"
    assert statuses(sles, Policy(), "iommu")["iommu.args"] == "ok"
    assert deploy(sles, Policy(), STEPS, "iommu") == []
    # Somebody adds a line behind our block: it would win.
    sles.run("echo 'GRUB_CMDLINE_LINUX=\"iommu=soft\"' >>/etc/site/grub")
    assert deploy(sles, Policy(), STEPS, "iommu") == DONE
    assert arguments(sles, "/boot/grub2/grub.cfg") == wanted_now
    kept = base64.b64decode(sles.run("base64 -w0 /etc/default/grub").stdout)
    assert kept.startswith(main.encode())

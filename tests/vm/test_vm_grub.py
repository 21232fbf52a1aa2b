"""GRUB itself reads the grub.cfg of a deploy, and starts the kernel with our arguments."""

import base64

import pytest

from nodeready.core.policy import Policy
from nodeready.operations import iommu
from tests.lab.looks import deploy, statuses
from tests.vm import machine
from tests.vm.machine import Vm
from tests.vm.machine.boot import HARNESS_ARGS, qemu_command

#: What an administrator wrote, in the quotes of a shell and of a kernel.
OTHERS = r"""GRUB_TIMEOUT=0
GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX iommu=soft dyndbg=\"file drivers/* +p; func f\" HARNESS"
"""
#: GRUB in the form of a kernel that qemu can load, with the modules that grub.cfg asks for.
LOADER = """
cd /usr/lib/grub/i386-pc
printf 'configfile (hd0)/boot/grub/grub.cfg\\n' >/tmp/early.cfg
grub-mkimage -O i386-pc -p '(hd0)/boot/grub' -c /tmp/early.cfg -o /tmp/core.img biosdisk ext2 \
    normal configfile linux search search_fs_uuid test echo gzio all_video loadenv minicmd
cat lnxboot.img /tmp/core.img | base64 -w0
"""


@pytest.mark.nightly
def test_grub_starts_the_kernel_with_what_the_deploy_wrote(vm_tools, tmp_path, monkeypatch):
    with Vm.start(tmp_path) as vm:
        vm.plant_pci_device("0000:41:00.0", "0x1002", "0x74a1", "0x120000")
        initrd = base64.b64encode(vm.image.initrd.read_bytes()).decode()
        vm.run("base64 -d >/boot/initrd.img-$(uname -r)", input=initrd)
        others = OTHERS.replace("HARNESS", " ".join(HARNESS_ARGS))
        vm.run("mkdir -p /etc/default/grub.d; cat >/etc/default/grub.d/50-site.cfg", input=others)
        assert deploy(vm, Policy(), [iommu.args], "iommu") == ["iommu.args"]

        loader = tmp_path / "loader"
        loader.write_bytes(base64.b64decode(vm.run(LOADER).stdout))
        monkeypatch.setattr(
            machine, "qemu_command", lambda **words: qemu_command(**{**words, "kernel": loader})
        )
        vm.reboot()
        cmdline = vm.run("cat /proc/cmdline").stdout
        assert cmdline.startswith("BOOT_IMAGE=/boot/vmlinuz-")
        # As GRUB writes the kernel's quotes.
        assert '"dyndbg=file drivers/* +p; func f"' in cmdline
        assert "iommu=soft" not in cmdline
        assert set(statuses(vm, Policy(), "iommu").values()) == {"ok"}

"""The virtual machine shows what namespaces cannot: a real kernel and a real reboot."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.vm.machine import Vm

SCOPE = "/proc/sys/kernel/yama/ptrace_scope"


def test_the_nodes_state_is_a_fresh_debians(vm: Vm) -> None:
    host = vm.testinfra()
    assert host.system_info.distribution in ("debian", "ubuntu")
    assert host.sysctl("kernel.core_pattern") == "core"
    assert host.file("/boot/grub/grub.cfg").contains("menuentry")
    assert not host.file("/etc/ssh/ssh_known_hosts").exists
    assert host.user("ml").uid == 2000
    assert vm.run("ulimit -Sc; ulimit -Hn", user="ml").stdout == "0\n1048576\n"


@pytest.mark.nightly
def test_a_power_cut_keeps_the_disk_and_nothing_else(vm: Vm) -> None:
    before = vm.boot_id
    own = set(vm.run("ls /sys/bus/pci/devices").stdout.split())
    vm.plant_pci_device("0000:42:00.0", "0x1002", "0x74a1", "0x120000")
    vm.run("echo 'kernel.yama.ptrace_scope = 2' > /etc/sysctl.d/50-yama.conf")
    vm.run("echo 'd /var/kept 1777 root root -' > /etc/tmpfiles.d/kept.conf; sync")
    vm.run(f"touch /run/live; echo 1 > {SCOPE}")
    vm.reboot(hard=True)
    assert vm.boot_id != before
    assert vm.run(f"cat {SCOPE}").stdout == "2\n"
    assert vm.run("stat -c %a /var/kept").stdout == "1777\n"
    assert vm.run("test -e /run/live", check=False).returncode == 1
    assert set(vm.run("ls /sys/bus/pci/devices").stdout.split()) == {*own, "0000:42:00.0"}
    assert vm.run("cat /sys/bus/pci/devices/0000:42:00.0/vendor").stdout == "0x1002\n"
    vm.run("rm -r /etc/sysctl.d/50-yama.conf /etc/tmpfiles.d/kept.conf /var/kept /var/lib/vm/pci")
    vm.run(f"vm-pci; echo 0 >{SCOPE}")


@pytest.mark.nightly
def test_a_killed_test_run_leaves_no_machine_behind(vm_tools: None, tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.vm.machine import Vm\n"
        "vm = Vm.start(Path(sys.argv[1])); print(vm._qemu.pid, flush=True); time.sleep(600)"
    )
    run = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        qemu = int(owner.stdout.readline())
        assert _alive(qemu)
        owner.kill()
    deadline = time.monotonic() + 30
    while _alive(qemu) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(qemu)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"

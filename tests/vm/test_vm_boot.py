"""The virtual machine shows what namespaces cannot: a real kernel and a real reboot."""

from __future__ import annotations

import re
import signal
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


def test_yama_decides_who_may_attach(vm: Vm) -> None:
    # The sleeper is init's child when gdb comes: a sibling, never a descendant.
    vm.run("setsid sleep 600 < /dev/null > /dev/null 2>&1 &", user="ml")
    attach = "gdb -nx -batch -p $(pgrep -u ml -nx sleep) -ex 'info proc' 2>&1"
    vm.run(f"echo 0 > {SCOPE}")
    assert "cmdline = 'sleep 600'" in vm.run(attach, user="ml").stdout
    vm.run(f"echo 1 > {SCOPE}")
    refused = vm.run(attach, user="ml", check=False).stdout
    assert "Operation not permitted" in refused
    assert "cmdline = 'sleep 600'" not in refused
    vm.run(f"pkill -u ml -x sleep; echo 0 > {SCOPE}")


def test_the_kernel_writes_a_core_where_core_pattern_says(vm: Vm) -> None:
    vm.run("mkdir -m 1777 /var/cores; sysctl -w kernel.core_pattern=/var/cores/core.%e.%P.%h.%t")
    crash = "ulimit -c unlimited; sh -c 'kill -SEGV $$; :'; echo $?"
    assert vm.run(crash, user="ml").stdout == f"{128 + signal.SIGSEGV}\n"
    (core,) = vm.run("ls /var/cores").stdout.split()
    assert re.fullmatch(r"core\.sh\.\d+\.vm1\.\d+", core)
    backtrace = vm.run(f"gdb -nx -batch -ex bt /bin/sh /var/cores/{core} 2>&1", user="ml").stdout
    assert "Program terminated with signal SIGSEGV" in backtrace
    assert "#0 " in backtrace
    vm.run("rm -r /var/cores; sysctl -w kernel.core_pattern=core")


@pytest.mark.nightly
def test_a_power_cut_keeps_the_disk_and_nothing_else(vm: Vm) -> None:
    before = vm.boot_id
    own = set(vm.run("ls /sys/bus/pci/devices").stdout.split())
    vm.plant_pci_device("0000:41:00.0", "0x1002", "0x74a1", "0x120000")
    vm.run("echo 'kernel.yama.ptrace_scope = 2' > /etc/sysctl.d/50-yama.conf")
    vm.run("echo 'd /var/kept 1777 root root -' > /etc/tmpfiles.d/kept.conf; sync")
    vm.run(f"touch /run/live; echo 1 > {SCOPE}")
    vm.reboot(hard=True)
    assert vm.boot_id != before
    assert vm.run(f"cat {SCOPE}").stdout == "2\n"
    assert vm.run("stat -c %a /var/kept").stdout == "1777\n"
    assert vm.run("test -e /run/live", check=False).returncode == 1
    assert set(vm.run("ls /sys/bus/pci/devices").stdout.split()) == {*own, "0000:41:00.0"}
    assert vm.run("cat /sys/bus/pci/devices/0000:41:00.0/vendor").stdout == "0x1002\n"


def test_kernel_arguments_are_pending_until_the_reboot(vm: Vm) -> None:
    before = vm.boot_id
    vm.run(
        "mkdir -p /etc/default/grub.d && "
        "echo 'GRUB_CMDLINE_LINUX_DEFAULT=\"$GRUB_CMDLINE_LINUX_DEFAULT iommu=pt\"'"
        " > /etc/default/grub.d/50-iommu.cfg && update-grub"
    )
    assert "iommu=pt" not in vm.run("cat /proc/cmdline").stdout.split()
    vm.reboot()
    assert vm.boot_id != before
    assert "iommu=pt" in vm.run("cat /proc/cmdline").stdout.split()


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

"""A deploy to a real kernel: live at once, seen in a crash, and still so after a reboot."""

import signal

import pytest

from nodeready.subjects.registry import CHANGED
from tests.helpers import nodeready
from tests.vm.machine import Vm


def at_work(vm: Vm) -> None:
    """What the kernel does, not what a file says."""
    assert vm.run("cat /proc/sys/kernel/yama/ptrace_scope").stdout == "0\n"
    pattern = "/var/crash/core.%e.%P.%h.%t\n"
    assert vm.run("cat /proc/sys/kernel/core_pattern").stdout == pattern
    for user in ("root", "ml"):
        limits = vm.run("ulimit -Sc; ulimit -Hc; ulimit -l; ulimit -Hn", user=user).stdout
        assert limits.split() == ["unlimited", "unlimited", "unlimited", "65536"], user

    # A crash of an ordinary user's leaves a core that gdb reads.
    crash = "sh -c 'kill -SEGV $$; :'; echo $?"
    assert vm.run(crash, user="ml").stdout == f"{128 + signal.SIGSEGV}\n"
    (core,) = vm.run("ls /var/crash").stdout.split()
    assert core.startswith("core.sh.")
    seen = vm.run(f"gdb -nx -batch -ex bt /bin/sh /var/crash/{core} 2>&1", user="ml").stdout
    assert "Program terminated with signal SIGSEGV" in seen
    vm.run(f"rm /var/crash/{core}")

    # py-spy attaches to a process of the same user that is no child of its own.
    vm.run(
        "setsid python3 -c 'import time\ndef waiting(): time.sleep(600)\nwaiting()'"
        " </dev/null >/dev/null 2>&1 & sleep 1",
        user="ml",
    )
    dump = vm.run("py-spy dump --pid $(pgrep -u ml -nx python3)", user="ml").stdout
    assert "waiting" in dump
    vm.run("pkill -u ml -x python3")


def test_a_deploy_is_at_work_at_once_and_after_a_reboot(vm, deployed):
    where, first = deployed
    # The kernel's arguments need a reboot: a person's, and only that is left.
    assert "1 changed" in first.stdout.splitlines()[-1]
    assert "iommu.live" in first.stdout
    assert "pending" in first.stdout
    at_work(vm)
    again = nodeready("deploy", where, "--yes", status=0)
    assert again.stdout.splitlines()[-1].startswith("0 changed (0 changes), ")
    assert "iommu=pt" not in vm.run("cat /proc/cmdline").stdout.split()

    vm.reboot()
    assert "iommu=pt" in vm.run("cat /proc/cmdline").stdout.split()
    at_work(vm)
    assert nodeready("deploy", where, "--check").returncode == 0
    nodeready("audit", where, "--only", ",".join(CHANGED), status=0)


@pytest.mark.nightly
def test_scope_3_cannot_be_lowered_and_says_so(vm, where):
    vm.run("sysctl -qw kernel.yama.ptrace_scope=3")
    deployed = nodeready("deploy", where, "--yes", "--only", "ptrace", status=3)
    assert "reboot needed" in deployed.stdout
    vm.reboot()
    assert nodeready("deploy", where, "--check", "--only", "ptrace").returncode == 0

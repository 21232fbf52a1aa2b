"""ptrace and core_dumps: which file wins at boot, for which reader, and who would rewrite it."""

from __future__ import annotations

from nodeready.core.policy import Policy
from nodeready.operations import core_dumps, ptrace
from tests.lab.looks import deploy, judged

WANT = Policy()
CORES = (core_dumps.rewriters, core_dumps.directory, core_dumps.pattern, core_dumps.size)
STEPS = (ptrace.scope, *CORES)
SUBJECTS = ("ptrace", "core_dumps")
DIRTY = {
    "/etc/sysctl.d/10-ptrace.conf": "kernel.yama.ptrace_scope = 1\n",
    "/etc/sysctl.d/99-zzz-cis.conf": "# hardening\n  kernel/yama/ptrace_scope=2",
    "/etc/sysctl.d/20-crlf.conf": "kernel.yama.ptrace_scope = 1\r\n",
    "/etc/sysctl.d/30-bytes.conf": b"# caf\xe9\nkernel.yama.ptrace_scope = 1\n",
    "/etc/sysctl.conf": "kernel.core_pattern = core\nkernel.yama.ptrace_scope=1\n",
    "/etc/sysctl.d/50-coredump.conf": "kernel.core_pattern=\n",
    "/etc/sysctl.d/zz-site.conf": "kernel.core_pattern = /tmp/core.%p",
    "/etc/tmpfiles.d/crash.conf": "d /var/crash 0755 root root 3d\n",
    "/usr/lib/systemd/system/apport.service": "[Unit]\nDescription=apport\n",
}


def test_on_a_dirty_node_ours_wins_at_boot_and_no_other_file_changes(fresh_nodes):
    (node,) = fresh_nodes(1, files=DIRTY)
    sums = f"sha256sum {' '.join(DIRTY)}"
    before = node.run(sums).stdout
    # What STIG asks for.
    node.write("/proc/sys/kernel/core_pattern", "\n")
    deploy(node, WANT, STEPS, *SUBJECTS)
    values = "sysctl -n kernel.yama.ptrace_scope kernel.core_pattern"
    assert node.run(values).stdout == f"0\n{WANT.core_pattern}\n"
    # What the boot itself would set, as its own readers say it.
    reader = "/lib/systemd/systemd-sysctl"
    if node.run(f"test -x {reader}", check=False).returncode == 0:
        node.run(f"sysctl -qw kernel.yama.ptrace_scope=2; {reader} --prefix=/kernel/yama || :")
        assert node.run(values).stdout[0] == "0"
    assert node.run("readlink /etc/systemd/system/apport.service").stdout == "/dev/null\n"
    node.run("touch /var/crash/core.x", user="ml")
    node.run("rm -r /var/crash; systemd-tmpfiles --create --prefix=/var/crash 2>/dev/null || :")
    assert node.run("stat -c '%F %a' /var/crash").stdout == "directory 1777\n"

    assert node.run(sums).stdout == before
    assert deploy(node, WANT, STEPS, *SUBJECTS) == []
    bad = {check: one.source for check, one in judged(node, WANT, *SUBJECTS).items() if one.bad}
    assert set(bad) == {"ptrace.sysctl_conf", "core_dumps.sysctl_conf"}
    assert bad["ptrace.sysctl_conf"] == "/etc/sysctl.conf:2"

    # A profile that comes back later, behind ours: ours moves behind it, and one file stays.
    node.write("/etc/sysctl.d/zzzz-again.conf", "kernel.yama.ptrace_scope = 2\n")
    assert deploy(node, WANT, STEPS, *SUBJECTS) == ["ptrace.scope"]
    ours = node.run("ls /etc/sysctl.d | grep nodeready-ptrace").stdout.split()
    assert ours == ["zzzz-nodeready-ptrace.conf"]
    assert deploy(node, WANT, STEPS, *SUBJECTS) == []


def test_changing_the_handler_takes_our_pattern_away_again(fresh_nodes):
    packaged = "|/usr/lib/systemd/systemd-coredump %P %u %g %s %t %c %h"
    files = {
        "/usr/lib/sysctl.d/50-coredump.conf": f"kernel.core_pattern={packaged}\n",
        "/usr/lib/systemd/systemd-coredump": "#!/bin/sh\n",
    }
    (node,) = fresh_nodes(1, files=files)
    store = Policy(core_handler="systemd-coredump")
    for policy in (WANT, store):
        deploy(node, policy, CORES, "core_dumps")
    assert node.run("cat /proc/sys/kernel/core_pattern").stdout.strip() == packaged
    assert node.run("ls /etc/sysctl.d | grep -c nodeready", check=False).stdout == "0\n"
    limits = node.read("/etc/systemd/coredump.conf.d/zz-nodeready.conf")
    assert "ProcessSizeMax=infinity" in limits
    assert deploy(node, store, CORES, "core_dumps") == []

"""A node is a machine of its own: its logins, kernel settings, hardware and faults."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nodeready.lab import image, state
from nodeready.lab.image import new_key
from nodeready.lab.profiles import PROFILES
from tests.command import wait_for


def test_sysctls_are_the_nodes_own(fresh_nodes):
    one, other = fresh_nodes(2)
    machine = [Path("/proc/sys/kernel/core_pattern"), Path("/proc/sys/fs/suid_dumpable")]
    before = [path.read_text() for path in machine]
    assert one.run("sysctl -n kernel.yama.ptrace_scope kernel.core_pattern").stdout == "1\ncore\n"
    one.run("sysctl -qw kernel.yama.ptrace_scope=0")
    one.run("echo '/tmp/core.%e' > /proc/sys/kernel/core_pattern")
    one.run("sysctl -qw kernel.numa_balancing=0 fs.suid_dumpable=2 net.ipv4.ip_forward=1")
    keys = "kernel.yama.ptrace_scope kernel.core_pattern fs.suid_dumpable net.ipv4.ip_forward"
    assert one.run(f"sysctl -n {keys}").stdout.split() == ["0", "/tmp/core.%e", "2", "1"]
    assert other.run(f"sysctl -n {keys}").stdout.split() == ["1", "core", "0", "0"]
    assert [path.read_text() for path in machine] == before
    assert one.run("cat /proc/sys/kernel/hostname").stdout == f"{one.name}\n"
    one.write("/proc/cmdline", "quiet iommu=pt\n")
    assert one.run("cat /proc/cmdline").stdout == "quiet iommu=pt\n"
    assert "iommu=pt\n" not in Path("/proc/cmdline").read_text() + other.read("/proc/cmdline")
    boots = {node.read("/proc/sys/kernel/random/boot_id") for node in (one, other)}
    assert len(boots | {state.boot_id() + "\n"}) == 3


def test_processes_and_files_are_the_nodes_own(lab):
    node = lab.nodes[0]
    with subprocess.Popen(["sleep", "98765"]) as outside:
        try:
            assert node.run("pgrep -f 'sleep 9876[5]'", check=False).returncode == 1
        finally:
            outside.kill()
    marker = f"/usr/local/{node.name}"
    node.run(f"touch {marker} /tmp/{node.name}")
    assert not Path(marker).exists()
    assert lab.nodes[1].run(f"ls {marker}", check=False).returncode == 2
    assert node.run("ls /home").stdout == "ml\n"
    assert node.run("ls /sys/class/net").stdout.split() == ["eth0", "lo"]
    assert node.run("echo x > /sys/kernel/profiling", check=False).returncode == 1


def test_orphans_are_reaped(fresh_node):
    def gone() -> bool:
        states = fresh_node.enter(["ps", "-eo", "state,args"]).stdout
        return "Z " not in states and "sleep 0.11" not in states

    fresh_node.run("(setsid sh -c 'sleep 0.11 & sleep 0.11 & exit' >/dev/null 2>&1 &)")
    wait_for(gone)
    fresh_node.stop_sshd()
    assert fresh_node.status == "no sshd"
    fresh_node.enter(["sh", "-c", "(setsid sleep 0.11 &)"])
    wait_for(gone)


def test_reboot_keeps_the_disk_and_reads_sysctls_as_a_boot_does(fresh_node):
    if not any(Path(p, "systemd/systemd-sysctl").exists() for p in ("/usr/lib", "/lib")):
        pytest.skip("this machine has no systemd-sysctl")
    fresh_node.write("/etc/sysctl.d/50-first.conf", "kernel.yama.ptrace_scope = 3\n")
    fresh_node.write("/etc/sysctl.d/60-last.conf", "kernel.yama.ptrace_scope = 2\n")
    fresh_node.run("sysctl -qw kernel.yama.ptrace_scope=0; touch /tmp/x /run/x /root/x")
    fresh_node.reboot()
    assert fresh_node.run("sysctl -n kernel.yama.ptrace_scope").stdout == "2\n"
    left = fresh_node.run("ls /tmp /run/x /root", check=False).stdout.split()
    assert left == ["/root:", "x", "/tmp:"]


def test_a_reset_node_is_as_on_the_first_day(fresh_node, tmp_path):
    known = tmp_path / "known_hosts"
    shutil.copy(fresh_node.lab.known_hosts, known)
    fresh_node.run("rm -rf /etc/ssh/ssh_config.d /usr/bin/python3 && echo x > /etc/environment")
    fresh_node.run("echo old >/etc/old")
    fresh_node.reset()
    # Nothing is left of the old disk.
    home = fresh_node.lab.directory / "fs" / "nodes" / fresh_node.name
    assert not list(home.glob("g*/upper*/etc/old"))
    assert len(list(home.glob("g*"))) == 1
    found = fresh_node.run("ls -d /etc/ssh/ssh_config.d; cat /etc/environment").stdout
    assert found == "/etc/ssh/ssh_config.d\n"
    # Its host key is the same one: nobody has to be told.
    argv = ["ssh", "-F", str(fresh_node.lab.ssh_config), "-o", f"UserKnownHostsFile={known}"]
    argv += [fresh_node.name, "true"]
    assert subprocess.run(argv, check=False).returncode == 0

    fresh_node.reset(new_host_key=True)
    fresh_node.run("true")
    refused = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "Host key verification failed" in refused.stderr


def test_labs_do_not_meet(lab, fresh_node):
    assert fresh_node.lab.subnet != lab.subnet
    there = lab.nodes[0].address
    tried = fresh_node.run(f"ssh -o ConnectTimeout=2 root@{there} true", check=False)
    assert "unreachable" in tried.stderr


def test_what_is_ours_on_this_machine_does_not_reach_a_node(lab_machine, tmp_path, monkeypatch):
    ours = tmp_path / "etc" / "99-nodeready.conf"
    ours.parent.mkdir()
    ours.write_text("x")
    monkeypatch.setattr(image, "OURS", (str(tmp_path / "etc"),))
    image.build(tmp_path / "base", PROFILES["cpu"], new_key("test"))
    hidden = (tmp_path / "base" / str(ours).lstrip("/")).lstat()
    assert (hidden.st_mode & 0o170000, hidden.st_rdev) == (0o020000, 0)
    opaque = tmp_path / "base" / "etc" / "sysctl.d"
    assert os.getxattr(opaque, "trusted.overlay.opaque") == b"y"

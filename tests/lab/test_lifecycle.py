"""The main job, end to end on real SSH nodes, read back by testinfra and plain ssh."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.helpers import Done, nodeready, project

POLICY = {
    # Values that a machine without CAP_SYS_RESOURCE can give its nodes as well.
    "limit_memlock": 4096,
    "limit_nofile": 16384,
    "pdshrc_users": ["ml"],
    "pdshrc_path": ["/opt/tools/bin"],
    "pdshrc_lines": ["export NCCL_DEBUG=WARN"],
    "ssh_client_hosts": ["test-*", "10.*"],
}


def pyinfra(*words: object) -> Done:
    return project(Path(sys.executable).parent / "pyinfra", *words)


def count_commands(nodes):
    """Have sshd note every command of root on these nodes; returns how to read the counts."""
    for node in nodes:
        keys = node.run("cat /root/.ssh/authorized_keys").stdout.strip()
        force = 'command="echo x >>/run/commands; exec /bin/sh -c \\"$SSH_ORIGINAL_COMMAND\\""'
        node.write("/root/.ssh/authorized_keys", f"{force} {keys}\n")

    def counts():
        read = "test -e /run/commands && wc -l </run/commands; rm -f /run/commands"
        return [int(node.enter(["sh", "-c", read]).stdout or 0) for node in nodes]

    return counts


def in_place(node, names) -> None:
    """Everything is live and set for the next boot, as the system's own tools say."""
    host = node.testinfra()
    assert host.sysctl("kernel.yama.ptrace_scope") == 0
    assert host.sysctl("kernel.core_pattern") == "/var/crash/core.%e.%P.%h.%t"
    assert host.file("/etc/sysctl.d/99-zz-nodeready-ptrace.conf").mode == 0o644
    assert host.file("/var/crash").mode == 0o1777
    assert "0.4.3" in node.run("/usr/local/bin/py-spy --version").stdout
    for user in ("root", "ml"):
        limits = node.run("ulimit -Sc; ulimit -Hc; ulimit -l; ulimit -n", user=user)
        assert limits.stdout.split() == ["unlimited", "unlimited", "4096", "16384"], user
        # pdsh goes by ssh, asks nothing, and every node answers.
        answers = node.run(f"pdsh -w {','.join(names)} hostname", user=user).stdout.split()
        assert sorted(answers[1::2]) == names, user
    assert "/opt/tools/bin" in node.run("cat ~/.pdshrc", user="ml").stdout


def test_nodes_become_ready_by_both_commands_and_one_round_trip_finds_them_so(
    fresh_nodes, inventory
):
    nodes = fresh_nodes(2)
    names = sorted(node.name for node in nodes)
    where = inventory(nodes, **POLICY)
    dry = pyinfra("--dry", where, "deploy.py")
    assert dry.returncode == 0, dry.stderr
    assert nodes[0].run("sysctl -n kernel.yama.ptrace_scope").stdout == "1\n"
    first = pyinfra("-y", where, "deploy.py")
    assert first.returncode == 0, first.stderr
    for node in nodes:
        in_place(node, names)
    counts = count_commands(nodes)
    again = nodeready("deploy", where, "--yes")
    assert (again.returncode, counts()) == (0, [1, 1]), again.stdout + again.stderr
    assert "0 changed (0 changes), 2 ok, 0 failed, 0 unreachable" in again.stdout
    same = pyinfra("-y", where, "deploy.py")
    assert (same.returncode, counts()) == (0, [1, 1]), same.stderr
    assert not re.search(r"^ +\[.*\] +Success", same.stderr, re.M)
    # What is broken by hand alone is repaired, and what --check prints is what deploy does.
    nodes[1].enter(["sysctl", "-qw", "kernel.yama.ptrace_scope=1"])
    check = nodeready("deploy", where, "--check")
    repaired = nodeready("deploy", where, "--yes")
    assert f"changed     {nodes[1].name}: ptrace.scope\n" in repaired.stdout
    assert "1 changed (1 change), 1 ok, 0 failed, 0 unreachable" in repaired.stdout
    planned = re.findall(r"^    \+ (.*)$", check.stdout, re.M)
    assert planned
    assert planned == re.findall(r"^    \+ (.*)$", repaired.stdout, re.M)

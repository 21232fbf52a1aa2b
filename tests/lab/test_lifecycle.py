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


def upper(node):
    """Everything that was ever written on the node, with times: what --check must not touch."""
    find = "find /etc /var /usr /home /root -xdev -newer /run/mark -type f | sort"
    return node.enter(["sh", "-c", find]).stdout.split()


def test_fresh_nodes_become_ready_and_stay_so(fresh_nodes, inventory):
    nodes = fresh_nodes(3)
    names = sorted(node.name for node in nodes)
    where = inventory(nodes, **POLICY)

    # Fresh nodes fail the checks, and looking changes nothing.
    for node in nodes:
        node.enter(["sh", "-c", "sleep 0.1; touch /run/mark; sleep 0.1"])
    audit = nodeready("audit", where)
    assert audit.returncode == 3, audit.stderr
    assert re.search(r"^fail +ptrace\.scope", audit.stdout, re.M)
    check = nodeready("deploy", where, "--check", "--diff")
    assert check.returncode == 3
    assert check.stdout.splitlines()[-1] == "3 to change, 0 ok, 0 unknown, 0 unreachable"
    assert "+-kernel.yama.ptrace_scope = 0" in check.stdout
    assert [upper(node) for node in nodes] == [[], [], []]

    # Deploy: what --check printed is what it does.
    deployed = nodeready("deploy", where, "--yes")
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    planned = set(re.findall(r"^    \+ (.*)$", check.stdout, re.M))
    assert planned == set(re.findall(r"^    \+ (.*)$", deployed.stdout, re.M))
    assert re.search(
        r"^3 changed \(\d+ changes\), 0 ok, 0 failed, 0 unreachable$", deployed.stdout, re.M
    )

    for node in nodes:
        in_place(node, names)

    # Again: zero changes by both ways in, and one round trip per node.
    counts = count_commands(nodes)
    again = nodeready("deploy", where, "--yes")
    assert (again.returncode, counts()) == (0, [1, 1, 1]), again.stdout + again.stderr
    assert "0 changed (0 changes), 3 ok, 0 failed, 0 unreachable" in again.stdout
    other = pyinfra("-y", where, "deploy.py")
    assert (other.returncode, counts()) == (0, [1, 1, 1]), other.stderr
    assert not re.search(r"^ +\[.*\] +Success", other.stderr, re.M)
    audit = nodeready("audit", where)
    assert audit.returncode == 0, audit.stdout
    assert audit.stdout.startswith("ok ")

    # One setting broken by hand on one node: only that one is repaired.
    broken = nodes[1]
    broken.enter(["sysctl", "-qw", "kernel.yama.ptrace_scope=1"])
    for node in nodes:
        node.enter(["sh", "-c", "sleep 0.1; touch /run/mark; sleep 0.1"])
    repaired = nodeready("deploy", where, "--yes")
    assert repaired.returncode == 0
    assert f"changed     {broken.name}: ptrace.scope\n" in repaired.stdout
    assert "1 changed (1 change), 2 ok, 0 failed, 0 unreachable" in repaired.stdout
    assert broken.enter(["sysctl", "-n", "kernel.yama.ptrace_scope"]).stdout == "0\n"
    assert [upper(node) for node in nodes] == [[], [], []]


def in_place(node, names) -> None:
    """Everything is live and set for the next boot, as the system's own tools say."""
    host = node.testinfra()
    assert host.sysctl("kernel.yama.ptrace_scope") == 0
    assert host.sysctl("kernel.core_pattern") == "/var/crash/core.%e.%P.%h.%t"
    assert host.file("/etc/sysctl.d/99-zz-nodeready-ptrace.conf").mode == 0o644
    assert host.file("/var/crash").mode == 0o1777
    # A new session of a user has the limits.
    for user in ("root", "ml"):
        limits = node.run("ulimit -Sc; ulimit -Hc; ulimit -l; ulimit -n", user=user)
        assert limits.stdout.split() == ["unlimited", "unlimited", "4096", "16384"], user
    # pdsh goes by ssh, asks nothing, and every node answers.
    for user in ("root", "ml"):
        answers = node.run(f"pdsh -w {','.join(names)} hostname", user=user).stdout.split()
        assert sorted(answers[1::2]) == names, user
    assert 'PATH="/opt/tools/bin' in node.run("cat ~/.pdshrc", user="ml").stdout.replace(
        "PATH=/", 'PATH="/'
    )
    for name in names:
        assert node.run(f"ssh -o BatchMode=yes {name} hostname", user="ml").stdout.strip() == name
    assert host.file("/usr/local/bin/py-spy").mode == 0o755
    assert "0.4.3" in node.run("/usr/local/bin/py-spy --version").stdout


def test_pyinfra_alone_deploys_the_same(fresh_nodes, inventory):
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
    limited = pyinfra("-y", "-v", where, "deploy.py", "--limit", names[0])
    assert limited.returncode == 0
    assert "noop" in limited.stderr
    assert nodeready("deploy", where, "--check").returncode == 0

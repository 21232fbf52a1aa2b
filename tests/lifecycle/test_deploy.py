"""Fresh nodes become ready and stay so: audit, deploy, ready, and the node's own gate.

The tests are the steps of one life: they run in this order on the same nodes.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeready.lab import LabNode
from nodeready.subjects.gate import facts as gate
from tests.command import WAIVERS, ours, written
from tests.helpers import project

pytestmark = pytest.mark.xdist_group("lifecycle-deploy")


def test_check_shows_what_deploy_does_and_writes_nothing(nodes, where, tool):
    before = [written(node) for node in nodes]
    audit = tool("audit", where, status=3)
    assert re.search(r"^fail +ptrace\.scope", audit.out, re.M)
    check = tool("deploy", where, "--check", "--diff", status=3)
    assert check.out.splitlines()[-1] == "3 to change, 0 ok, 0 unknown, 0 unreachable"
    assert "+-kernel.yama.ptrace_scope = 0" in check.out
    assert [written(node) for node in nodes] == before

    deployed = tool("deploy", where, "--yes", status=0)
    assert commands(deployed.out) == commands(check.out)


def commands(text: str) -> set[str]:
    """What a plan runs and writes."""
    return set(re.findall(r"^    \+ (.*)$", text, re.M))


def test_the_nodes_own_tools_say_that_they_are_debuggable(nodes):
    names = [node.name for node in nodes]
    for node in nodes:
        host = node.testinfra()
        assert host.sysctl("kernel.yama.ptrace_scope") == 0
        assert host.sysctl("kernel.core_pattern") == "/var/crash/core.%e.%P.%h.%t"
        assert "0.4.3" in node.run("/usr/local/bin/py-spy --version", user="ml").stdout
    assert host.file("/etc/sysctl.d/99-zz-nodeready-ptrace.conf").mode == 0o644
    assert host.file("/var/crash").mode == 0o1777
    for user in ("root", "ml"):
        limits = node.run("ulimit -Sc; ulimit -Hc; ulimit -l; ulimit -n", user=user)
        assert limits.stdout.split() == ["unlimited", "unlimited", "4096", "16384"], user
    answers = node.run(f"pdsh -w {','.join(names)} hostname", user="ml").stdout.split()
    assert sorted(answers[1::2]) == sorted(names)
    ssh = node.run(f"ssh -o BatchMode=yes {names[0]} hostname", user="ml")
    assert ssh.stdout.strip() == names[0]


def test_a_second_deploy_changes_nothing_and_makes_one_round_trip(nodes, where, tool):
    with counted(nodes) as counts:
        again = tool("deploy", where, "--yes")
        assert "0 changed (0 changes), 3 ok, 0 failed, 0 unreachable" in again.out
        assert (again.status, counts()) == (0, [1, 1, 1]), again
        program = Path(sys.executable).with_name("pyinfra")
        by_pyinfra = project(program, "-y", where, "deploy.py")
        assert (by_pyinfra.returncode, counts()) == (0, [1, 1, 1]), by_pyinfra.stderr
        assert not re.search(r"^ +\[.*\] +Success", by_pyinfra.stderr, re.M)


class counted:
    """Meanwhile each node's sshd notes the commands of root; `counts()` since the last call."""

    def __init__(self, nodes: list[LabNode]) -> None:
        self.nodes = nodes
        self.keys = [node.run("cat /root/.ssh/authorized_keys").stdout for node in nodes]

    def __enter__(self) -> Callable[[], list[int]]:
        force = 'command="echo x >>/run/commands; exec /bin/sh -c \\"$SSH_ORIGINAL_COMMAND\\""'
        for node, keys in zip(self.nodes, self.keys, strict=True):
            node.write("/root/.ssh/authorized_keys", f"{force} {keys.strip()}\n")
        read = "test -e /run/commands && wc -l </run/commands; rm -f /run/commands"
        return lambda: [int(node.enter(["sh", "-c", read]).stdout or 0) for node in self.nodes]

    def __exit__(self, *exception: object) -> None:
        for node, keys in zip(self.nodes, self.keys, strict=True):
            node.write("/root/.ssh/authorized_keys", keys)


def test_audit_names_what_drifted_and_deploy_repairs_only_that(nodes, where, tool):
    broken = nodes[1]
    broken.enter(["sysctl", "-qw", "kernel.yama.ptrace_scope=1"])
    before = [written(node) for node in nodes]
    audit = tool("audit", where, "--format", "json")
    failing = {
        name: [check for check, row in results.items() if row["status"] == "fail"]
        for name, results in audit.results.items()
    }
    assert audit.status == 3, audit
    assert failing == {node.name: ["ptrace.scope"] * (node is broken) for node in nodes}

    repaired = tool("deploy", where, "--yes")
    assert f"changed     {broken.name}: ptrace.scope\n" in repaired.out
    assert "1 changed (1 change), 2 ok, 0 failed, 0 unreachable" in repaired.out
    assert broken.testinfra().sysctl("kernel.yama.ptrace_scope") == 0
    assert [written(node) for node in nodes] == before
    assert tool("audit", where).out.startswith("ok ")


def test_ready_lets_nodes_go_whose_proofs_passed(nodes, fleet, tool, tmp_path):
    where, hosts = fleet(nodes, waivers=WAIVERS), tmp_path / "hosts"
    good = tool(
        "ready", where, "--user", "ml", "--hostfile-out", hosts, "--format", "json", status=0
    )
    results = good.results[nodes[0].name]
    # The proofs that every job needs were made, and none of them fails.
    needed = ("proof.user", "proof.attach", "proof.mesh", "proof.ssh", "proof.pdsh")
    assert {results[name]["status"] for name in needed} == {"ok"}, good
    assert hosts.read_text() == "".join(f"{node.name} slots=1\n" for node in nodes)
    assert not [row for node in nodes for row in ours(node)]


def test_the_gate_decides_on_the_node_itself_without_us(nodes, fleet, tool):
    node = nodes[0]
    # Slurm is as the gate wants it, and there is a cron.
    node.enter(["mkdir", "-p", "/etc/cron.d"])
    node.write(
        "/etc/slurm/slurm.conf",
        f"Prolog={gate.PROLOG}\nHealthCheckProgram={gate.HEALTH_CHECK}\nHealthCheckInterval=300\n",
    )
    where = fleet([node], gate=True, waivers=WAIVERS)
    assert tool("deploy", where, "--yes", "--only", "gate").status == 0
    host = node.testinfra()
    assert (host.file(gate.CRON).user, host.file(gate.CRON).mode) == ("root", 0o644)
    # As Slurm starts it: without a PATH.
    assert node.run(f"env -i {gate.RECORD}").stdout == "nodeready: go\n"
    assert node.run(f"env -i {gate.PROLOG}", check=False).returncode == 0
    node.enter(["sysctl", "-qw", "kernel.yama.ptrace_scope=2"])
    record = node.run(f"env -i {gate.RECORD}", check=False)
    assert "ptrace.scope" in record.stdout, record
    verdict = json.loads(node.run(f"cat {gate.VERDICT}").stdout)
    assert verdict["go"] is False

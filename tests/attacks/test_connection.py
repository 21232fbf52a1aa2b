"""A node whose sshd is hostile keeps nobody waiting, and fills no memory, but its own row.

evil   three nodes; on one, in place of sshd, what tests/attacks/hostile_sshd.py says

The other nodes' rows are what they are without the hostile one.
"""

import subprocess
import sys

import pytest

from nodeready.lab import LabNode
from tests.attacks.test_transport import MOST_KB, STILL, results
from tests.command import Terminal
from tests.lab.rows import rows
from tests.paths import ROOT

SSHD = ROOT / "tests/attacks/hostile_sshd.py"


@pytest.fixture
def evil(fresh_nodes):
    """A function that gives a node's sshd another behaviour; it ends with the test."""
    running = []

    def turn(node: LabNode, how: str) -> subprocess.Popen[bytes]:
        key = f"/proc/{node.pid}/root/etc/ssh/ssh_host_ed25519_key"
        node.stop_sshd()
        argv = ["nsenter", "-t", str(node.pid), "-n", "--", sys.executable, str(SSHD), how, key]
        running.append(subprocess.Popen(argv, stdout=subprocess.PIPE))
        assert running[-1].stdout.readline() == b"listening\n"
        return running[-1]

    yield turn
    for one in running:
        one.kill()
        one.wait()


@pytest.mark.parametrize("how", rows(["length", "ignored", "window", "rekey", "count"], "window"))
def test_a_hostile_sshd_costs_its_own_row(tool, fleet, fresh_nodes, evil, how):
    *others, hostile = nodes = fresh_nodes(4)
    inventory, names = fleet(nodes), [one.name for one in others]
    sound = tool("audit", inventory, *STILL, "--format", "json")
    evil(hostile, how)
    done = tool.measured("audit", inventory, *STILL, "--timeout", "20", "--format", "json")
    assert results(done, names) == results(sound, names)
    row = done.nodes[hostile.name]
    assert row["status"] in ("unreachable", "failed", "unknown"), row
    assert done.peak_kb < MOST_KB


def test_a_node_asks_nobody_at_the_terminal(tool, fleet, fresh_nodes, evil):
    (hostile,) = fresh_nodes(1)
    inventory = fleet([hostile])
    server = evil(hostile, "asks")
    terminal = Terminal(tool, "audit", inventory, *STILL, "--timeout", "20")
    terminal.send("secret\n")
    done = terminal.end()
    assert "password for" not in done.out, done
    assert "refused user root" in done.out, done
    server.kill()
    assert b"told" not in server.stdout.read()


def test_a_node_gets_no_way_to_the_user_s_agent(tool, fleet, fresh_nodes, evil):
    (hostile,) = fresh_nodes(1)
    config = tool.home / ".ssh" / "config"
    config.parent.mkdir(mode=0o700, exist_ok=True)
    config.write_text("Host *\n    ForwardAgent yes\n")
    server = evil(hostile, "agent")
    tool("audit", fleet([hostile]), *STILL, "--timeout", "5")
    server.kill()
    assert b"agent" not in server.stdout.read()

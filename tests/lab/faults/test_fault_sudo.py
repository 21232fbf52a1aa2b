"""sudo that wants a password, and secrets: asked for once, and never to be seen again."""

from __future__ import annotations

import re
import secrets

import pytest

from nodeready.inventory.nodeset import fold
from tests.command import Terminal, ours, written

WITH = "ml ALL=(ALL:ALL) ALL\n"
WANTS = "sudo wants a password: run on a terminal to be asked, or allow NOPASSWD"


@pytest.fixture
def password() -> str:
    """With all that a shell could stumble over."""
    return f"Zu-{secrets.token_hex(6)}'\"$x"


def lock(node, password: str, sudoers: str = WITH) -> None:
    """ml has this password, and these rights."""
    node.enter(["chpasswd"], input=f"ml:{password}\n")
    node.write("/etc/sudoers.d/ml", sudoers, mode=0o440)


def as_ml(fleet, nodes):
    return fleet(nodes, {node.name: {"ssh_user": "ml"} for node in nodes})


def test_sudo_wants_a_password(fresh_nodes, fleet, tool, password):
    """Without a terminal: found before any work, in one line for all nodes; the others finish."""
    free, *locked, stranger = fresh_nodes(4)
    for node in locked:
        lock(node, password)
    stranger.enter(["rm", "/etc/sudoers.d/ml"])
    before = [written(node) for node in (*locked, stranger)]
    where = as_ml(fleet, [free, *locked, stranger])
    done = tool("deploy", where, "--sudo", "--yes", "--only", "ptrace")
    assert done.status == 1, done
    assert done.out.count(WANTS) == 1
    assert f"failed      {fold(n.name for n in (*locked, stranger))}: {WANTS}\n" in done.out, done
    assert re.search(rf"^changed +{free.name}: ptrace\.scope$", done.out, re.M), done
    assert [written(node) for node in (*locked, stranger)] == before
    words = ("deploy", where, "--yes", "--only", "ptrace", "--limit", locked[0].name)
    without = tool(*words)
    assert without.status == 1, without
    assert "ptrace.scope: not root: run with sudo" in without.out
    # A wrong password: one line, and nothing was done.
    terminal = Terminal(tool, *words, "--sudo")
    terminal.expect("sudo password (1 node): ")
    terminal.send("wrong\n")
    done = terminal.end()
    assert done.status == 1, done
    assert f"failed      {locked[0].name}: sudo refused the password\n" in done.out, done
    assert "wrong" not in done.out
    assert [written(node) for node in (*locked, stranger)] == before


def test_sudo_asks_once_on_a_terminal(fresh_nodes, fleet, tool, password):
    """For all nodes together, whatever of them wants one; the password is nowhere to be seen."""
    free, first, second, stranger = nodes = fresh_nodes(4)
    for node in (first, second):
        lock(node, password)
    lock(stranger, password, "")
    where = as_ml(fleet, nodes)
    words = ("deploy", where, "--sudo", "--yes", "--diff", "--only", "ptrace,debug_tools", "-v")
    terminal = Terminal(tool, *words)
    terminal.expect("sudo password (3 nodes): ")
    terminal.send(f"{password}\n")
    done = terminal.end()
    assert done.status == 1, done
    assert done.out.count("sudo password") == 1
    assert f"failed      {stranger.name}: sudo: ml is not in the sudoers file" in done.out, done
    changed = fold(node.name for node in (free, first, second))
    assert f"changed     {changed}: ptrace.scope, debug_tools.py_spy\n" in done.out, done
    for node in (free, first, second):
        assert node.run("sysctl -n kernel.yama.ptrace_scope").stdout == "0\n"
        assert ours(node) == []
    # What processes and the nodes' files show, tests/attacks asks.
    assert password not in done.out
    kept = [path for path in tool.home.rglob("*") if path.is_file()]
    assert all(password not in path.read_text(errors="replace") for path in kept)

"""sudo that wants a password, and secrets: asked for once, and never to be seen again."""

import secrets

from nodeready.fleet.inventory.nodeset import fold
from tests.command import Terminal, ours, written

WANTS = "sudo wants a password: run on a terminal to be asked, or allow NOPASSWD"


def test_sudo_wants_a_password(fresh_nodes, fleet, tool):
    """Without a terminal: found before any work, in one line for all nodes; the others finish.
    On one it is asked for once, for whatever nodes want one, and nowhere to be seen.
    """
    free, first, second, stranger = nodes = fresh_nodes(4)
    # With all that a shell could stumble over.
    password = f"Zu-{secrets.token_hex(6)}'\"$x"
    for node in (first, second, stranger):
        node.enter(["chpasswd"], input=f"ml:{password}\n")
        node.write("/etc/sudoers.d/ml", "ml ALL=(ALL:ALL) ALL\n", mode=0o440)
    stranger.enter(["rm", "/etc/sudoers.d/ml"])
    before = [written(node) for node in nodes[1:]]
    where = fleet(nodes, {node.name: {"ssh_user": "ml"} for node in nodes})
    words = ("deploy", where, "--yes", "--only", "ptrace")
    done = tool(*words, "--sudo")
    assert (done.status, done.out.count(WANTS)) == (1, 1), done
    assert (
        f"failed      {fold(node.name for node in nodes[1:])}\n            {WANTS}\n" in done.out
    ), done
    assert f"changed     {free.name}: ptrace.scope\n" in done.out, done
    without = tool(*words, "--limit", first.name)
    assert (
        without.status,
        "ptrace.scope: not root: add --sudo, or log in as root (-u root)" in without.out,
    ) == (1, True)

    def answered(text: str, asks: str, *more: str) -> str:
        terminal = Terminal(tool, *words, "--sudo", *more)
        terminal.expect(f"sudo password ({asks}): ")
        terminal.send(f"{text}\n")
        done = terminal.end()
        assert (done.status, done.out.count("sudo password"), text in done.out) == (1, 1, False)
        return done.out

    said = answered("wrong", "1 node", "--limit", first.name)
    assert f"failed      {first.name}\n            sudo refused the password\n" in said
    assert [written(node) for node in nodes[1:]] == before
    said = answered(password, "3 nodes", "--diff", "-v")
    assert f"failed      {stranger.name}\n            sudo: ml is not in the sudoers file" in said
    assert f"changed     {fold([first.name, second.name])}: ptrace.scope\n" in said
    for node in (first, second):
        assert node.run("sysctl -n kernel.yama.ptrace_scope").stdout == "0\n"
        assert ours(node) == []
    # What processes and the nodes' files show, tests/attacks asks.
    kept = [path for path in tool.home.rglob("*") if path.is_file()]
    assert all(password not in path.read_text(errors="replace") for path in kept)

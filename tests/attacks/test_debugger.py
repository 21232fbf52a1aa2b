"""The debugger of a rank: only the user of the job reaches it; a hostile rank reaches nobody."""

from pathlib import Path

import pytest

from nodeready.agent import run as supervisor
from tests.command import Terminal, ours, wait_for

RANK = """
import os, time
def shard(number):
    name = "\\x1b]0;owned\\x07\\x1b[2J" + chr(0x202e) + "train"
    while not os.path.exists("go"):
        time.sleep(0.1)
    return name
print(len(shard(7)))
"""
#: Connects, also to a socket whose directory everybody may enter.
CONNECT = """
import os, socket, sys
client = socket.socket(socket.AF_UNIX)
os.chdir(sys.argv[1])
client.connect("socket")
print(client.recv(4096).decode(), end="")
"""


@pytest.fixture
def socket_path(bob) -> str:
    """The socket of bob's rank 3, which loops in shard()."""
    node = bob.node
    node.write("/run/nodeready-run.py", Path(supervisor.__file__).read_text(), 0o644)
    node.write(f"{bob.home}/train.py", RANK)
    words = (
        "exec python3 -I -S /run/nodeready-run.py --debug-rank 3 --log-dir logs python3 train.py"
    )
    bob.start("sh", "-c", f"cd; RANK=3 WORLD_SIZE=4 {words}")
    found = ["sh", "-c", "echo /tmp/nodeready-run-*/socket"]
    wait_for(lambda: "*" not in node.enter(found).stdout)
    return node.enter(found).stdout.strip()


def test_another_user_does_not_reach_a_rank(bob, mallory, socket_path):
    directory = socket_path.rpartition("/")[0]
    attempt = f"python3 -c '{CONNECT}' {directory}"
    assert "Permission denied" in mallory.run(attempt, check=False).stderr
    # Even if bob opens the directory to all.
    bob.run(f"chmod 755 {directory}; chmod 777 {socket_path}")
    assert mallory.run(attempt, check=False).stdout.startswith("busy")
    assert "interrupted" in bob.run(attempt).stdout


def test_a_rank_over_ssh_on_a_terminal_shows_escapes_and_goes_on(bob, socket_path, tool, fleet):
    node = bob.node
    there = Terminal(tool, "stacks", fleet([node]), "--attach", "3")
    there.expect("(Pdb) ")
    # The program that connects has bob's rights, and none of root's.
    rows = node.enter(["sh", "-c", "ps -eww -o uid,comm,args | grep '[n]odeready:'"]).stdout
    users = {row.split()[0] for row in rows.splitlines() if row.split()[1].startswith("python")}
    assert users == {str(bob.uid)}, rows
    there.send("p number\n")
    there.expect("7\n")
    there.send("!print(name)\n")
    there.expect("\\x1b]0;owned\\x07\\x1b[2J\\u202etrain\n(Pdb) ")
    there.send("\x04")
    done = there.end()
    assert done.status == 0
    assert "\x1b]0" not in there.text
    wait_for(lambda: not ours(node))
    bob.run("touch go")
    wait_for(lambda: bob.run("grep -q . logs/*", check=False).returncode == 0)
    wait_for(lambda: node.enter(["test", "-e", socket_path], check=False).returncode == 1)


def test_an_interrupt_and_a_killed_command_detach(bob, socket_path, tool, fleet):
    """By Ctrl-C, then by SIGKILL; afterwards the next one can attach."""
    inventory = fleet([bob.node])
    first = Terminal(tool, "stacks", inventory, "--attach", "3")
    first.expect("(Pdb) ")
    first.send("\x03")
    assert first.end().status == 130
    second = Terminal(tool, "stacks", inventory, "--attach", "3")
    second.expect("(Pdb) ")
    second.process.kill()
    second.end()
    wait_for(lambda: not ours(bob.node))
    done = tool("stacks", inventory, "--attach", "3")
    assert (done.status, done.out.count("(Pdb) ")) == (0, 1), done

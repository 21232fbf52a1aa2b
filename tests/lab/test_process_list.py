"""What any user of a node can read there while we are at work: the process list."""

import re

import pytest

from tests.command import wait_for
from tests.lab.targets import WATCH, start


def watch(node, tool, user: str, *command: object) -> str:
    """What this user saw while the command ran."""
    path = f"/tmp/seen-{user}"
    words = ("env", "-i", "/usr/bin/python3", "-c", WATCH, path)
    watcher = start(node, *words, user=user, up=False)
    wait_for(lambda: node.run(f"test -s {path}", check=False).returncode == 0)
    done = tool(*command)
    assert done.status in {0, 3}, done
    node.enter(["kill", str(watcher)])
    return node.read(path)


def test_another_user_sees_neither_the_nonce_nor_the_script(fresh_node, fleet, tool):
    """While an audit looks; only the word that marks the run's processes stands there."""
    inventory = fleet([fresh_node])
    nonces = set(
        re.findall(r"NR=([0-9a-f]{16})", watch(fresh_node, tool, "root", "audit", inventory))
    )
    assert nonces
    seen = watch(fresh_node, tool, "ml", "audit", inventory)
    assert "nodeready:" in seen
    # The shell functions of our script, and any nonce.
    assert not re.search(r"nr_(main|section|join|together|take|trap)|NR_LIB|NR=", seen), seen
    assert not re.search(r"\b[0-9a-f]{16}\b", seen), seen
    # No command line of ours is long.
    assert max(len(row) for row in seen.splitlines() if "nodeready:" in row) < 400


@pytest.mark.nightly
def test_nor_of_a_program(fresh_node, fleet, tool):
    seen = watch(fresh_node, tool, "ml", "ready", fleet([fresh_node]), "--only", "proof.limits")
    assert [row for row in seen.splitlines() if "python3" in row and "nodeready:" in row]
    assert not re.search(r"nodeready-[0-9a-f]{16}|CONFIG|SOURCES|b85decode", seen), seen

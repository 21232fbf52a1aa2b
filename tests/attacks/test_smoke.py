"""Mallory takes the job's ports while a smoke test hands them over: no good node is suspected."""

import pytest

from tests.command import wait_for
from tests.lab.test_smoke import TORCH

#: Takes whatever of the ports is free at any moment, and keeps it.
TAKES = """
import socket
kept = []
open("up", "w").close()
while True:
    for port in range(29500, 29503):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
            one.listen()
            kept.append(one)
        except OSError:
            one.close()
"""


@pytest.mark.nightly
def test_who_takes_the_ports_has_no_good_node_suspected(mallory, tool, fleet):
    """PyTorch 2.0 takes our listener, which is never closed; an older one loses its port."""
    node = mallory.node
    where = fleet([node], port_range=(29500, 29502))
    words = ("smoke", where, *TORCH, "--budget", "200", "--format", "json")
    running = tool.start(*words)
    # 29500 in the form of /proc/net/tcp6.
    listens = ["grep", "-q", ":733C ", "/proc/net/tcp6"]
    wait_for(lambda: node.enter(listens, check=False).returncode == 0)
    mallory.start("sh", "-c", 'cd; exec python3 -c "$0"', TAKES)
    done = tool.end(running)
    found = done.document
    assert found["suspects"] == [], done
    (row,) = found["nodes"]
    taken = "is taken by mallory (uid 4001): python3" in row["why"]
    assert taken or row["status"] == "passed", done

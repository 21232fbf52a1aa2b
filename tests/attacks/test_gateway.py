"""A gateway of ClusterShell's whose root is hostile costs the nodes behind it, and no other."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from nodeready.agent.asking import Request
from nodeready.fleet.transport.clush.transport import Clush
from tests.attacks import hostile_gateway
from tests.lab.rows import rows
from tests.lab.test_clush import Cluster, asked, make_gateway

#: Most memory of ClusterShell's process beside that of this one, of which it is a copy, in KiB.
MOST_KB = 110 << 10
HOWS = [*hostile_gateway.LIES]


@pytest.fixture
def cluster(fresh_nodes, tmp_path: Path) -> Cluster:
    """Two gateways and a node behind each; the second gateway is hostile."""
    nodes = fresh_nodes(4)
    sound, hostile = nodes[:2]
    make_gateway(sound)
    program = Path(hostile_gateway.__file__).read_text()
    hostile.write("/usr/local/bin/python3", program, 0o755)
    hostile.write("/root/names", ",".join(node.name for node in nodes))
    return Cluster(nodes, tmp_path)


class Watched:
    """The largest memory of ClusterShell's process while it works, in KiB; it ends with much."""

    def __init__(self, transport: Clush) -> None:
        self.peak_kb, self.pid = 0, transport._pool.children[0].pid
        self.first_kb = self.memory_kb("VmRSS:")
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def memory_kb(self, name: str) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(text.partition(name)[2].split()[0])

    def watch(self) -> None:
        while not self.ended.wait(0.1):
            self.peak_kb = self.memory_kb("VmHWM:") - self.first_kb
            if self.peak_kb > 4 * MOST_KB:
                os.kill(self.pid, signal.SIGKILL)
                return

    def __enter__(self) -> Watched:
        self.thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.ended.set()
        self.thread.join()


@pytest.mark.parametrize("how", rows(HOWS, "other nodes", "a message without an end"))
def test_a_hostile_gateway_changes_no_answer_of_another_gateways_node(cluster, how):
    cluster.nodes[1].write("/root/how", how)
    with cluster.transport() as transport, Watched(transport) as watched:
        began = time.monotonic()
        answers = asked(transport, "hostname", 4, max_bytes=1 << 20)
        seconds = time.monotonic() - began
    sound = [name for name, answer in answers.items() if answer.stdout == f"{name}\n"]
    assert len(sound) >= 3, answers
    assert seconds < 60, answers
    assert watched.peak_kb < MOST_KB
    for text in (*cluster.told, *(answer.reason() for answer in answers.values())):
        assert text.isprintable()
        assert len(text) < 400


def test_a_hostile_gateway_fills_no_memory_with_the_lines_of_a_session(cluster):
    cluster.nodes[1].write("/root/how", "output without an end")
    script = 'read -r line <&3; echo "mark $line"'
    with cluster.transport(names=cluster.behind) as transport, Watched(transport) as watched:
        channels = [
            transport.open(Request(name, script, 20, payload="", mark="mark", max_bytes=4 << 20))
            for name in cluster.behind
        ]
        for channel in channels:
            channel.send_line("hello")
        time.sleep(5)
        lines = [channel.read_line(5) for channel in channels]
        for channel in channels:
            channel.close()
    assert sorted(str(line) for line in lines) == ["None", "mark hello"]
    assert "too much output" in [channel.error for channel in channels]
    assert watched.peak_kb < MOST_KB

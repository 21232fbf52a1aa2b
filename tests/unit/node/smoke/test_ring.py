"""The ring and the pair over real sockets; faults of a network between network namespaces."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nodeready.node.proofs import mesh
from nodeready.node.smoke import orders, ring
from nodeready.node.smoke.orders import Collective, Pair, Paired, Peer, Rank
from nodeready.node.smoke.ring import Listeners, run_pair, run_ring
from nodeready.subjects import wire

LOOPBACK = "127.0.0.1"
MIB = 1 << 20


def peer(port: int, token: str, address: str = LOOPBACK, name: str = "") -> Peer:
    return Peer(name or address, (address,), port, token)


def collective(rank: int, peers: Sequence[Peer], **changed: Any) -> Collective:
    """The order of one rank in a ring of these, each named as the one before it sees it."""
    made = Collective(
        number=7,
        engine=orders.RING,
        backend="tcp",
        world=len(peers),
        first=rank,
        ranks=1,
        gpus=(),
        head=peers[0],
        next=peers[(rank + 1) % len(peers)] if len(peers) > 1 else None,
        small=4096,
        large=MIB,
        limit_s=20.0,
    )
    return dataclasses.replace(made, **changed)


# --- On loopback, in one process.


@pytest.fixture
def listen() -> Iterator[Callable[[], tuple[Listeners, int]]]:
    """Listeners of one free port, that serve."""
    made: list[Listeners] = []

    def begin() -> tuple[Listeners, int]:
        with socket.create_server((LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
        listeners = Listeners([port])
        assert listeners.ports == (port,)
        threading.Thread(target=listeners.serve, daemon=True).start()
        made.append(listeners)
        return listeners, port

    yield begin
    for one in made:
        for port in one.ports:
            one.release(port)


class Party:
    """Nodes of one ring, each with its listeners, on loopback."""

    def __init__(self, listen: Callable[[], tuple[Listeners, int]], count: int) -> None:
        made = [listen() for _ in range(count)]
        self.listeners = [one for one, _ in made]
        self.peers = [peer(port, one.token) for one, port in made]
        self.stop = threading.Event()
        self.ranks: dict[int, Rank] = {}
        self.threads: dict[int, threading.Thread] = {}

    def begin(self, rank: int, **changed: Any) -> None:
        order = collective(rank, self.peers, **changed)

        def run() -> None:
            self.ranks[rank] = run_ring(order, self.listeners[rank], self.stop)

        self.threads[rank] = threading.Thread(target=run, daemon=True)
        self.threads[rank].start()

    def end(self) -> list[Rank]:
        for one in self.threads.values():
            one.join(60)
        return [self.ranks[rank] for rank in sorted(self.threads)]

    def run(self, **changed: Any) -> list[Rank]:
        for rank in range(len(self.peers)):
            self.begin(rank, **changed)
        return self.end()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_ring_that_is_well(listen, count):
    ranks = Party(listen, count).run()
    assert [one.rank for one in ranks] == [*range(count)]
    for one in ranks:
        assert one.ok, one
        assert one.ms > 0 < one.gbps
        assert one.waits_for == -1
        assert 0 <= one.retransmits < 50
        # As the control machine will read it.
        assert wire.decode(Rank, json.loads(json.dumps(dataclasses.asdict(one)))) == one


@pytest.mark.parametrize(
    ("small", "large"), [(0, 0), (8, 1), (4096, 65536 * 3), (4097, 65537 * 3), (40_000, 100_001)]
)
def test_sizes_that_do_not_divide(listen, small, large):
    assert all(one.ok for one in Party(listen, 3).run(small=small, large=large))


def test_tests_one_after_the_other_on_the_same_listeners(listen):
    party = Party(listen, 3)
    for number in range(4):
        assert all(one.ok for one in party.run(number=number))


# --- On nodes of their own network, with its faults.

_PORT = 29500
GONE = ("STOP", "KILL")
_ADDRESS = "10.0.0.{}".format


def _sh(pid: int, script: str) -> None:
    words = ["nsenter", "-t", str(pid), "-n", "sh", "-ec", script]
    subprocess.run(words, check=True, capture_output=True, text=True)


def node() -> None:
    """One node: its listeners, and the orders of its standard input, one after the other."""
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    listeners = Listeners([_PORT, _PORT + 1, _PORT + 2, _PORT + 3])
    threading.Thread(target=listeners.serve, daemon=True).start()
    print(listeners.token, flush=True)
    for line in sys.stdin:
        order = orders.read(line)
        stop = threading.Event()
        if isinstance(order, Collective):
            seen = dataclasses.asdict(run_ring(order, listeners, stop))
        else:
            assert isinstance(order, Pair)
            seen = dataclasses.asdict(run_pair(order, (), listeners, stop))
        print(json.dumps(seen), flush=True)
    os._exit(0)


def stage(play: dict[str, Any]) -> None:
    """Nodes on one switch, with the faults of the play; prints what each answers."""
    count = play["nodes"]
    script = "ip link add br0 type bridge && ip link set br0 up"
    subprocess.run(["sh", "-ec", script], check=True)
    words = ["unshare", "-n", sys.executable, __file__, "node"]
    nodes = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    pids = [int(one.stdout.readline()) for one in nodes]
    for at, pid in enumerate(pids):
        script = f"""
            ip link add v{at} type veth peer name eth0 netns {pid}
            ip link set v{at} master br0 up
        """
        subprocess.run(["sh", "-ec", script], check=True)
        script = f"ip link set lo up; ip addr add {_ADDRESS(at + 1)}/24 dev eth0; ip link set eth0 up"
        _sh(pid, script)
        if str(at) in play.get("before", {}):
            _sh(pid, play["before"][str(at)])
    peers = []
    for at, one in enumerate(nodes):
        print("go", file=one.stdin, flush=True)
        token = one.stdout.readline().strip()
        peers.append(peer(_PORT, token, _ADDRESS(at + 1)))
    began = time.monotonic()
    if "pair" in play:
        order = Pair(3, peers[1], tuple(range(_PORT, _PORT + 4)), **play["pair"])
        print(orders.line(order), file=nodes[0].stdin, flush=True)
        asked = nodes[:1]
    else:
        for at, one in enumerate(nodes):
            order = collective(at, peers, **play.get("order", {}))
            print(orders.line(order), file=one.stdin, flush=True)
        asked = nodes
    later = play.get("later", [])
    for after_s, at, what in later:
        time.sleep(max(0, began + after_s - time.monotonic()))
        if what in ("STOP", "CONT", "KILL"):
            os.kill(pids[at], getattr(signal, f"SIG{what}"))
        else:
            _sh(pids[at], what)
    frozen = {at for at, what in {at: what for _, at, what in later}.items() if what in GONE}
    for at, one in enumerate(asked):
        answer = "null" if at in frozen else one.stdout.readline().strip()
        print(answer, round(time.monotonic() - began, 2), sep="\t", flush=True)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


UNSHARE = ["unshare", "-Urnpmf", "--mount-proc", "--kill-child"]


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where no network of our own can be had."""
    probe = "ip link add v0 type veth peer name v1 && iptables -L -n && ip link add br0 type bridge"
    words = [*UNSHARE, "sh", "-ec", probe]
    if not shutil.which("unshare") or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no network namespace with veth, a bridge and iptables")


def perform(**play: Any) -> tuple[list[Any], float]:
    """What each node answers (None: it was frozen or killed), and the seconds until the last."""
    words = [*UNSHARE, sys.executable, __file__, "stage", json.dumps(play)]
    root = str(Path(ring.__file__).parents[3])
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr
    rows = [row.split("\t") for row in done.stdout.splitlines()]
    kind = Paired if "pair" in play else Rank
    answers = [json.loads(row[0]) for row in rows]
    return [one and wire.decode(kind, one) for one in answers], float(rows[-1][1])


if __name__ == "__main__":
    if sys.argv[1] == "node":
        node()
    else:
        stage(json.loads(sys.argv[2]))

"""A pair between two network namespaces, with faults of their network."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from nodeready.agent.smoke import orders, pair
from nodeready.agent.smoke.orders import PairAnswer, PairOrder
from nodeready.agent.smoke.pair import SmokeListeners, run_pair
from nodeready.core import wire
from tests.unit.node.smoke.test_pair import MIB, peer

_PORT = 29500
_ADDRESS = "10.0.0.{}".format
UNSHARE = ["unshare", "-Urnpmf", "--mount-proc", "--kill-child"]


def sh(script: str, pid: int = 0) -> None:
    """Run this here, or in the network of that process."""
    enter = ["nsenter", "-t", str(pid), "-n"] if pid else []
    subprocess.run([*enter, "sh", "-ec", script], check=True, capture_output=True, text=True)


def node() -> None:
    """A node: its listeners, and the order of its standard input."""
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    listeners = SmokeListeners([_PORT, _PORT + 1, _PORT + 2, _PORT + 3])
    threading.Thread(target=listeners.serve, daemon=True).start()
    print(listeners.token, flush=True)
    for line in sys.stdin:
        order = orders.read(line)
        assert isinstance(order, PairOrder)
        answer = run_pair(order, (), threading.Event())
        print(json.dumps(dataclasses.asdict(answer)), flush=True)
    os._exit(0)


def stage(play: dict[str, Any]) -> None:
    """Two nodes on one switch, the second with the fault; prints what the first answers."""
    sh("ip link add br0 type bridge && ip link set br0 up")
    words = ["unshare", "-n", sys.executable, __file__, "node"]
    nodes = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    pids = [int(process.stdout.readline()) for process in nodes]
    for index, pid in enumerate(pids):
        sh(f"ip link add v{index} type veth peer name eth0 netns {pid}")
        sh(f"ip link set v{index} master br0 up")
        address = f"ip addr add {_ADDRESS(index + 1)}/24 dev eth0"
        sh(f"ip link set lo up; {address}; ip link set eth0 up", pid)
    sh(play["fault"], pids[1])
    peers = []
    for index, process in enumerate(nodes):
        print("go", file=process.stdin, flush=True)
        peers.append(peer(_PORT, process.stdout.readline().strip(), _ADDRESS(index + 1)))
    order = PairOrder(3, peers[1], tuple(range(_PORT, _PORT + 4)), **play["order"])
    print(orders.line(order), file=nodes[0].stdin, flush=True)
    print(nodes[0].stdout.readline().strip())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session", autouse=True)
def namespaces(lab_machine: None) -> None:
    """Skip where no network of our own can be had."""


def perform(**play: Any) -> PairAnswer:
    """What the first node answers."""
    words = [*UNSHARE, sys.executable, __file__, "stage", json.dumps(play)]
    env = {**os.environ, "PYTHONPATH": str(Path(pair.__file__).parents[3])}
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return wire.decode(PairAnswer, json.loads(done.stdout))


BLACK_HOLE = "iptables -A INPUT -m length --length 1400: -j DROP"
ONE_PORT = "iptables -A INPUT -p tcp --dport 29501 -j DROP"
LOSS = "iptables -A INPUT -m statistic --mode random --probability 0.05 -j DROP"
SLOW = "tc qdisc add dev eth0 root tbf rate 1mbit burst 16kb latency 400ms"


@pytest.mark.parametrize(("fault", "tries", "outcome", "gbps"), [
    (ONE_PORT, ["ok", "timeout", "ok", "ok"], "ok", (0.02, 1e6)),
    ("iptables -A INPUT -j DROP", ["timeout"] * 3 + ["skipped"], "", (-1, 0.02)),
    (BLACK_HOLE, ["ok"] * 4, "large", (-1, 0.02)),
    (SLOW, ["ok"] * 4, "slow", (0.0005, 0.0015)),
    (LOSS, ["ok"] * 4, "ok", (0.0, 1e6)),
])  # fmt: skip
def test_a_pair_and_its_faults(fault, tries, outcome, gbps):
    order = {"small": 4096, "large": 8 * MIB if fault == SLOW else MIB, "limit_s": 12.0}
    answer = perform(fault=fault, order=order)
    assert [attempt.outcome for attempt in answer.tries] == tries
    assert answer.outcome == outcome
    assert gbps[0] < answer.gbps < gbps[1]


if __name__ == "__main__":
    if sys.argv[1] == "node":
        node()
    else:
        stage(json.loads(sys.argv[2]))

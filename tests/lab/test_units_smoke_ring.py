"""The ring and the pair between network namespaces, with faults of their network."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nodeready.node.smoke import orders, ring
from nodeready.node.smoke.listeners import SmokeListeners
from nodeready.node.smoke.orders import CollectiveOrder, PairAnswer, PairOrder, RankResult
from nodeready.node.smoke.pair import run_pair
from nodeready.node.smoke.ring import run_ring
from nodeready.subjects import wire
from tests.unit.node.smoke.test_ring import MIB, collective, peer

_PORT = 29500
_ADDRESS = "10.0.0.{}".format
UNSHARE = ["unshare", "-Urnpmf", "--mount-proc", "--kill-child"]


def sh(script: str, pid: int = 0) -> None:
    """Run this here, or in the network of that process."""
    enter = ["nsenter", "-t", str(pid), "-n"] if pid else []
    subprocess.run([*enter, "sh", "-ec", script], check=True, capture_output=True, text=True)


def node() -> None:
    """A node: its listeners, and the orders of its standard input, one after the other."""
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    listeners = SmokeListeners([_PORT, _PORT + 1, _PORT + 2, _PORT + 3])
    threading.Thread(target=listeners.serve, daemon=True).start()
    print(listeners.token, flush=True)
    for line in sys.stdin:
        order, stop = orders.read(line), threading.Event()
        if isinstance(order, CollectiveOrder):
            answer: RankResult | PairAnswer = run_ring(order, listeners, stop)
        else:
            assert isinstance(order, PairOrder)
            answer = run_pair(order, (), listeners, stop)
        print(json.dumps(dataclasses.asdict(answer)), flush=True)
    os._exit(0)


def stage(play: dict[str, Any]) -> None:
    """Nodes on one switch, with the faults of the play; prints what each answers."""
    sh("ip link add br0 type bridge && ip link set br0 up")
    words = ["unshare", "-n", sys.executable, __file__, "node"]
    nodes = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(play["nodes"])
    ]
    pids = [int(process.stdout.readline()) for process in nodes]
    for index, pid in enumerate(pids):
        sh(f"ip link add v{index} type veth peer name eth0 netns {pid}")
        sh(f"ip link set v{index} master br0 up")
        address = f"ip addr add {_ADDRESS(index + 1)}/24 dev eth0"
        sh(f"ip link set lo up; {address}; ip link set eth0 up", pid)
        sh(play.get("before", {}).get(str(index), "true"), pid)
    peers = []
    for index, process in enumerate(nodes):
        print("go", file=process.stdin, flush=True)
        peers.append(peer(_PORT, process.stdout.readline().strip(), _ADDRESS(index + 1)))
    began, asked = time.monotonic(), nodes
    if "pair" in play:
        asked = nodes[:1]
        lines = [PairOrder(3, peers[1], tuple(range(_PORT, _PORT + 4)), **play["pair"])]
    else:
        lines = [collective(rank, peers, **play.get("order", {})) for rank in range(len(nodes))]
    for process, order in zip(asked, lines, strict=True):
        print(orders.line(order), file=process.stdin, flush=True)
    silent = set()
    for after_s, index, what in play.get("later", []):
        time.sleep(max(0, began + after_s - time.monotonic()))
        if what in ("STOP", "CONT", "KILL"):
            os.kill(pids[index], getattr(signal, f"SIG{what}"))
            (silent.discard if what == "CONT" else silent.add)(index)
        else:
            sh(what, pids[index])
    for index, process in enumerate(asked):
        answer = "null" if index in silent else process.stdout.readline().strip()
        print(answer, round(time.monotonic() - began, 2), sep="\t", flush=True)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session", autouse=True)
def namespaces(lab_machine: None) -> None:
    """Skip where no network of our own can be had."""


def perform(**play: Any) -> list[Any]:
    """What each node answers, within 30 s; None: it was frozen or killed."""
    words = [*UNSHARE, sys.executable, __file__, "stage", json.dumps(play)]
    env = {**os.environ, "PYTHONPATH": str(Path(ring.__file__).parents[3])}
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    rows = [row.split("\t") for row in done.stdout.splitlines()]
    assert float(rows[-1][1]) < 30
    kind = PairAnswer if "pair" in play else RankResult
    answers = [json.loads(answer) for answer, _ in rows]
    return [answer and wire.decode(kind, answer) for answer in answers]


def roots(ranks: Sequence[RankResult | None]) -> set[frozenset[int]]:
    """Where the ranks lead, each by whom it waits for: to the last rank, or the last two."""
    ends = set()
    for first in filter(None, ranks):
        path = [first.rank]
        while (rank := ranks[path[-1]]) and rank.waits_for >= 0 and rank.waits_for not in path:
            path.append(rank.waits_for)
        circle = rank is not None and rank.waits_for in path
        ends.add(frozenset(path[path.index(rank.waits_for) :] if circle else path[-1:]))
    return ends


LARGE = {"large": 1 << 33, "limit_s": 60.0}
BLACK_HOLE = "iptables -A INPUT -m length --length 1400: -j DROP"
ONE_WAY = "iptables -A INPUT -s 10.0.0.2 -j DROP"
ONE_PORT = "iptables -A INPUT -p tcp --dport 29501 -j DROP"
SLOW = "tc qdisc add dev eth0 root tbf rate 1mbit burst 16kb latency 400ms"


@pytest.mark.parametrize(
    ("play", "culprits", "rank", "phase", "error"),
    [
        pytest.param({"before": {"2": ONE_WAY}}, {1, 2}, 1, "init",
                     r"no connection to 10\.0\.0\.3 port 29500: timed out", id="one direction"),
        pytest.param({"before": {"2": BLACK_HOLE}}, {1, 2}, 1, "large",
                     r"to 10\.0\.0\.3 small messages pass, 64 KiB do not: MTU\?", id="MTU"),
        pytest.param({"order": LARGE, "later": [(1, 2, "STOP")]}, {2}, 3, "large",
                     r"rank 2 \(10\.0\.0\.3\) sent nothing for [34]\.\d s in large", id="freezes"),
        pytest.param({"order": LARGE, "later": [(1, 2, "KILL")]}, {2}, 1, "large",
                     r"10\.0\.0\.3 closed the connection in large", id="dies"),
        pytest.param({"order": LARGE, "later": [(1, 2, ONE_WAY)]}, {1, 2}, 1, "large",
                     r"10\.0\.0\.3 acknowledged nothing for [23]\.\d s in large", id="cut off"),
        pytest.param({"order": LARGE, "later": [(1, 1, "STOP"), (5, 1, "CONT")]}, {1}, 1, "large",
                     r"this node stood still for [345]\.\d s; .*", id="stands still"),
    ],
)  # fmt: skip
def test_a_fault_is_named_for_what_it_is(play, culprits, rank, phase, error):
    ranks = perform(nodes=4, **play)
    assert roots(ranks) == {frozenset(culprits)}, ranks
    assert ranks[rank].phase == phase
    assert re.fullmatch(error, ranks[rank].error), ranks
    assert not any(answer.ok or answer.mismatch for answer in ranks if answer)


def test_loss_costs_time_alone():
    lossy = "iptables -A INPUT -m statistic --mode random --probability 0.05 -j DROP"
    ranks = perform(nodes=4, before={"1": lossy})
    assert all(rank.ok for rank in ranks)


@pytest.mark.parametrize(
    ("fault", "tries", "outcome", "gbps"),
    [
        (ONE_PORT, ["ok", "timeout", "ok", "ok"], "ok", (0.02, 1e6)),
        ("iptables -A INPUT -j DROP", ["timeout"] * 3 + ["skipped"], "", (-1, 0.02)),
        (BLACK_HOLE, ["ok"] * 4, "large", (-1, 0.02)),
        (SLOW, ["ok"] * 4, "large", (0.0005, 0.0015)),
    ],
)
def test_a_pair_and_its_faults(fault, tries, outcome, gbps):
    order = {"small": 4096, "large": 8 * MIB if fault == SLOW else MIB, "limit_s": 12.0}
    (answer,) = perform(nodes=2, before={"1": fault}, pair=order)
    assert [attempt.outcome for attempt in answer.tries] == tries
    assert answer.outcome == outcome
    assert gbps[0] < answer.gbps < gbps[1]


if __name__ == "__main__":
    if sys.argv[1] == "node":
        node()
    else:
        stage(json.loads(sys.argv[2]))

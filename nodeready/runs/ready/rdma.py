"""The test of the RDMA ports between the nodes: who writes to whom, and the causes of low rates.

Each node writes to the next one of its ring, on each port with the same name: both are in the same
rail. A pair runs one port at a time, and a node is in one pair at a time.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nodeready.agent.asking import Transport, request
from nodeready.agent.proofs.rdma import MEASURE_S, SERVE_S, RdmaServer, RdmaStart
from nodeready.core.base import Unknown
from nodeready.fleet.transport.channels import Channels
from nodeready.subjects.proof.active import COMPARABLE, SLOW_SHARE
from nodeready.subjects.proof.facts import UNFINISHED, ProofConfig, RdmaBandwidth, RdmaRate

_MAIN = "nodeready.agent.proofs.rdma"
MAX_RING = 128  # maximum nodes of a ring: half as many pairs load the network at once
#: Seconds for the program to start on a node, for an answer to travel, and for one port.
_START_S, _ANSWER_S = 25, 3
_PORT_S = SERVE_S + MEASURE_S + _ANSWER_S


@dataclass(frozen=True)
class PairRate:
    source: str
    target: str
    link_gbps: float  # of the slower of the two links, in Gbit/s
    rate: RdmaRate


def split_rings(names: Sequence[str]) -> list[Sequence[str]]:
    """The nodes in as few rings as possible, all of about the same size."""
    rings, total = -(-len(names) // MAX_RING), len(names)
    return [names[total * n // rings : total * (n + 1) // rings] for n in range(rings)]


def ring_rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Each node to its next one, around the end, in rounds in which a node is in one pair.

    >>> ring_rounds(["a", "b", "c"])
    [[('a', 'b')], [('b', 'c')], [('c', 'a')]]
    """
    if len(names) < 2:
        return []
    edges = list(zip(names, [*names[1:], names[0]], strict=True))
    even = len(edges) // 2 * 2
    return [pairs for pairs in (edges[0:even:2], edges[1:even:2], edges[even:]) if pairs]


def bandwidths(pairs: Iterable[PairRate]) -> dict[str, RdmaBandwidth]:
    """What the rates say of each node, port by port."""
    by_link: dict[tuple[str, float], dict[str, dict[str, RdmaRate]]] = {}
    for pair in pairs:
        # A node does not say how its rate compares.
        rate = RdmaRate(pair.rate.port, pair.rate.gbps, pair.rate.error)
        by_node = by_link.setdefault((rate.port, pair.link_gbps), {})
        by_node.setdefault(pair.source, {})[pair.target] = rate
        by_node.setdefault(pair.target, {})[pair.source] = rate
    rows: dict[str, list[RdmaRate]] = {}
    for _, by_node in sorted(by_link.items(), key=lambda item: item[0]):
        for node, row in _judge_port(by_node).items():
            rows.setdefault(node, []).append(row)
    return {node: RdmaBandwidth(rates=tuple(node_rows)) for node, node_rows in rows.items()}


def _gbps(rate: RdmaRate) -> float:
    return rate.gbps or 0.0


def _judge_port(by_node: Mapping[str, Mapping[str, RdmaRate]]) -> dict[str, RdmaRate]:
    """Node -> its rate on one port. A slow node makes both of its pairs slow, so that only its
    better rate tells its own speed.
    by_node: node -> neighbour -> the rate between them
    """
    better = {node: max(rates.values(), key=_gbps) for node, rates in by_node.items()}
    measured = [rate.gbps for rate in better.values() if rate.gbps is not None]
    if len(measured) < COMPARABLE:
        return better
    median = statistics.median(measured)

    def low_peers(node: str) -> list[str]:
        rates = by_node[node]
        return sorted(peer for peer in rates if _gbps(rates[peer]) < SLOW_SHARE * median)

    # With a single neighbour, either of the two may be the slow one. A node between two slow ones
    # is named with them.
    slow = {node for node, rates in by_node.items() if len(low_peers(node)) == len(rates) > 1}
    judged = {}
    for node, rates in by_node.items():
        peers = [peer for peer in low_peers(node) if node in slow or peer not in slow]
        row = min((rates[peer] for peer in peers), key=_gbps, default=better[node])
        judged[node] = replace(
            row, peers=tuple(peers), is_pair=node not in slow, median_gbps=median,
            compared=len(measured),
        )  # fmt: skip
    return judged


def run_rdma(
    transport: Transport, port_ranges: Mapping[str, tuple[int, int]], deadline: float
) -> dict[str, RdmaBandwidth | Unknown]:
    """The RDMA bandwidth of each node, at the deadline at the latest.

    port_ranges: node -> the first and last TCP port of its job's range
    deadline:    of time.monotonic()

    Never raises for a node's fault; an interrupt also ends what runs on the nodes.
    """
    if len(port_ranges) < 2:
        return dict.fromkeys(port_ranges, RdmaBandwidth("one node alone"))
    results: dict[str, RdmaBandwidth | Unknown] = dict.fromkeys(port_ranges, Unknown(UNFINISHED))
    pairs: list[PairRate] = []
    for names in split_rings(list(port_ranges)):
        ring = _RdmaRing(transport, deadline)
        try:
            ring.start({name: port_ranges[name] for name in names})
            ring.run(names)
        finally:
            ring.channels.close()
        pairs += ring.pairs
        for name, start in ring.started.items():
            if start.absent or start.error or ring.channels.left_s > _PORT_S:
                error = start.error or "no neighbour can be tested on the same port"
                results[name] = RdmaBandwidth(start.absent, error)
        results |= ring.channels.lost
    return {**results, **bandwidths(pairs)}


class _RdmaRing:
    def __init__(self, transport: Transport, deadline: float) -> None:
        self.channels, self._transport = Channels(transport, deadline), transport
        self.pairs: list[PairRate] = []
        self.started: dict[str, RdmaStart] = {}

    def start(self, port_ranges: Mapping[str, tuple[int, int]]) -> None:
        nonce, limit_s = self.channels.nonce, max(1, int(self.channels.left_s))
        config = ProofConfig(nonce, self._transport.tag, limit_s=limit_s)

        def begin(name: str) -> None:
            ports = port_ranges[name]
            self.channels.start(request(name, _MAIN, config, mark=nonce, stdin=True, ports=ports))
            if start := self.channels.read(name, "rdma", RdmaStart, _START_S):
                self.started[name] = start

        self.channels.for_each(begin, port_ranges)

    def run(self, names: Iterable[str]) -> None:
        able = [
            name
            for name in names
            if name in self.channels.open
            and (start := self.started.get(name))
            and not (start.absent or start.error)
        ]
        target_of: dict[str, str] = {}

        def measure(source: str) -> None:
            self._measure(source, target_of[source])

        for pairs in ring_rounds(able):
            target_of.update(pairs)
            self.channels.for_each(measure, [source for source, _ in pairs])

    def _measure(self, source: str, target: str) -> None:
        """Measure each port that both have, in turn."""
        channels, begin = self.channels, self.started[target]
        target_gbps = {link.port: _gbps(link) for link in begin.links}
        for link in self.started[source].links:
            is_open = source in channels.open and target in channels.open
            if link.port not in target_gbps or not is_open or channels.left_s < _PORT_S:
                continue
            channels.open[target].send_line(json.dumps({"port": link.port}))
            server = channels.read(target, "rdma", RdmaServer, SERVE_S + _ANSWER_S)
            rate = None
            if server and server.tcp_port is None:
                rate = RdmaRate(link.port, error=f"{target}: {server.error}")
            elif server:
                address = {"target": target, "addresses": begin.addresses}
                words = {"port": link.port, "tcp_port": server.tcp_port, **address}
                channels.open[source].send_line(json.dumps(words))
                rate = channels.read(source, "rdma", RdmaRate, MEASURE_S + _ANSWER_S)
            if rate and rate.port == link.port:
                slower_gbps = min(_gbps(link), target_gbps[link.port])
                self.pairs.append(PairRate(source, target, slower_gbps, rate))

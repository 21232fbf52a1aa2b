"""The test of the RDMA ports between the nodes: who writes to whom, and the causes of low rates.

Each node writes to the next one of its ring, on each port with the same name: both are in the same
rail. A pair runs one port at a time, and a node is in one pair at a time.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from nodeready.agent.asking import Transport, request
from nodeready.agent.proofs.rdma import MEASURE_S, SERVE_S, RdmaStart, Serving
from nodeready.core.base import Unknown
from nodeready.fleet.transport.channels import Channels
from nodeready.runs.ready.reach import PAIR, ReachAttempt, attribute
from nodeready.subjects.proof.active import COMPARABLE, SLOW_SHARE
from nodeready.subjects.proof.facts import (
    UNFINISHED,
    ProofConfig,
    RdmaBandwidth,
    RdmaRate,
    RdmaTrouble,
)

_MAIN = "nodeready.agent.proofs.rdma"
#: Maximum nodes of a ring: half as many pairs load the network at once.
MAX_RING = 128
#: Seconds for the program to start on a node; seconds for an answer to travel.
_START_S, _ANSWER_S = 25, 3


@dataclass(frozen=True)
class PairRate:
    """The rate of one port between two nodes."""

    source: str
    target: str
    link_gbps: float  # of the slower of the two links, in Gbit/s
    rate: RdmaRate

    @property
    def ends(self) -> tuple[str, str]:
        return self.source, self.target


def split_rings(names: Sequence[str]) -> list[Sequence[str]]:
    """The nodes in as few rings as possible, all of about the same size.

    >>> split_rings(["a", "b", "c"])
    [['a', 'b', 'c']]
    """
    count = -(-len(names) // MAX_RING)
    bounds = [len(names) * index // count for index in range(count + 1)] if count else []
    return [names[first:last] for first, last in pairwise(bounds)]


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
    """What the rates say of each node. Both ends of a low rate may be its cause: it is the node
    that explains more of the low rates than its peers.
    """
    by_kind: dict[tuple[str, float], list[PairRate]] = {}
    for pair in pairs:
        by_kind.setdefault((pair.rate.port, pair.link_gbps), []).append(pair)
    results: dict[str, RdmaBandwidth] = {}
    for _, rows in sorted(by_kind.items(), key=lambda item: item[0]):
        for node, found in _of_port(rows).items():
            known = results.get(node, RdmaBandwidth())
            results[node] = RdmaBandwidth(
                rates=known.rates + found.rates,
                uncompared=known.uncompared + found.uncompared,
                troubles=known.troubles + found.troubles,
            )
    return results


def _of_port(rows: Sequence[PairRate]) -> dict[str, RdmaBandwidth]:
    """Node -> what the rates of one port say of it."""
    rates = {ends: row.rate for row in rows for ends in (row.ends, row.ends[::-1])}
    # A slow node makes both of its pairs slow: the best rate of each node is compared.
    best: dict[str, float] = {}
    for (node, _), rate in rates.items():
        if rate.gbps is not None:
            best[node] = max(rate.gbps, best.get(node, 0.0))
    if len(best) < COMPARABLE:
        return {node: RdmaBandwidth(uncompared=(rate,)) for (node, _), rate in rates.items()}
    port, median = rows[0].rate.port, statistics.median(best.values())
    low = {ends for ends, rate in rates.items() if (rate.gbps or 0.0) < SLOW_SHARE * median}
    findings = attribute(ReachAttempt(*ends, port, ends not in low) for ends in rates)
    results = {
        node: RdmaBandwidth(rates=(rate,))
        for (node, peer), rate in sorted(rates.items(), key=lambda item: -(item[1].gbps or 0.0))
        if (node, peer) not in low
    }
    for finding in findings:
        lows = [rates[finding.node, peer] for peer in finding.peers]
        slowest = min((rate.gbps for rate in lows if rate.gbps is not None), default=None)
        error = next((rate.error for rate in lows if rate.error), "")
        sides = {finding.node: finding.peers}
        if finding.kind == PAIR:
            sides[finding.peers[0]] = (finding.node,)
        for node, peers in sides.items():
            is_pair = finding.kind == PAIR
            trouble = RdmaTrouble(port, peers, is_pair, slowest, error, median, len(best))
            known = results.get(node, RdmaBandwidth())
            results[node] = replace(known, troubles=(*known.troubles, trouble))
    return results


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
    results: dict[str, RdmaBandwidth | Unknown] = {}
    pairs: list[PairRate] = []
    for names in split_rings(list(port_ranges)):
        run = _RdmaRing(transport, names, port_ranges, deadline)
        try:
            run.start()
            run.rounds()
        finally:
            run.channels.close()
        pairs += run.pairs
        results |= run.untested()
    results |= bandwidths(pairs)
    return {name: results.get(name, Unknown(UNFINISHED)) for name in port_ranges}


class _RdmaRing:
    """The rounds over one program on each node of a ring."""

    def __init__(
        self,
        transport: Transport,
        names: Sequence[str],
        port_ranges: Mapping[str, tuple[int, int]],
        deadline: float,
    ) -> None:
        self.channels = Channels(transport, deadline)
        self.pairs: list[PairRate] = []
        self._transport, self._names, self._port_ranges = transport, names, port_ranges
        self._started: dict[str, RdmaStart] = {}

    def start(self) -> None:
        """Start the program on every node."""
        limit_s = max(1, int(self.channels.left_s))
        config = ProofConfig(self.channels.nonce, self._transport.tag, limit_s=limit_s)

        def begin(name: str) -> None:
            ports = self._port_ranges[name]
            self.channels.start(
                request(name, _MAIN, config, mark=config.nonce, stdin=True, ports=ports)
            )
            start = self.channels.read(name, "rdma", RdmaStart, _START_S)
            if start is not None:
                self._started[name] = start

        self.channels.for_each(begin, self._names)

    def rounds(self) -> None:
        """Run the rounds, as long as there is time."""
        able = [
            name
            for name, start in self._started.items()
            if name in self.channels.open and not (start.absent or start.error)
        ]
        able.sort(key=list(self._names).index)
        target_of: dict[str, str] = {}

        def measure(source: str) -> None:
            self._measure(source, target_of[source])

        for pairs in ring_rounds(able):
            target_of.update(pairs)
            self.channels.for_each(measure, [source for source, _ in pairs])

    def _measure(self, source: str, target: str) -> None:
        """Measure each port that both have, one after the other."""
        channels, to_links = self.channels, self._links(target)
        for port, link_gbps in self._links(source).items():
            is_open = source in channels.open and target in channels.open
            if port not in to_links or not is_open or channels.left_s < SERVE_S + MEASURE_S:
                continue
            channels.open[target].send_line(json.dumps({"serve": port}))
            serving = channels.read(target, "serving", Serving, SERVE_S + _ANSWER_S)
            if serving is None:
                continue
            rate: RdmaRate | None = RdmaRate(port, error=f"{target}: {serving.error}")
            if serving.tcp_port is not None:
                addresses = self._started[target].addresses
                message = {"measure": port, "tcp_port": serving.tcp_port, "target": target}
                channels.open[source].send_line(json.dumps({**message, "addresses": addresses}))
                rate = channels.read(source, "rate", RdmaRate, MEASURE_S + _ANSWER_S)
            if rate is not None and rate.port == port:
                slower_gbps = min(link_gbps, to_links[port])
                self.pairs.append(PairRate(source, target, slower_gbps, rate))

    def _links(self, name: str) -> dict[str, float]:
        return {port.name: port.gbps for port in self._started[name].ports}

    def untested(self) -> dict[str, RdmaBandwidth | Unknown]:
        """Why each node has no rate, if it has none."""
        results: dict[str, RdmaBandwidth | Unknown] = {}
        for name, start in self._started.items():
            results[name] = Unknown(UNFINISHED)
            if start.absent or start.error:
                results[name] = RdmaBandwidth(start.absent, start.error)
            elif self.channels.left_s > SERVE_S + MEASURE_S:
                results[name] = RdmaBandwidth("", "no neighbour can be tested on the same port")
        return {**results, **self.channels.lost}

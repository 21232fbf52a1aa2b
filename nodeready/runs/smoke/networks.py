"""The network that NCCL chose on each node, and the bandwidth of nodes and links. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from nodeready.agent.smoke.orders import RankNetwork
from nodeready.core.result import join_first
from nodeready.core.text import counted, sanitise
from nodeready.runs.smoke.document import LinkBandwidth
from nodeready.runs.smoke.knowledge import CONTROL, SWEEP, SmokeOutcome, Test

#: NCCL's network without RDMA; the name of gloo, which is not NCCL.
_SOCKET, _GLOO = "Socket", "gloo"
#: Maximum characters of a name or a note.
_NAME, _NOTE = 40, 200


def of_node(ranks: Iterable[RankNetwork | None]) -> RankNetwork | None:
    """The network of a node's ranks; of several, sockets come first: they are the slow ones."""
    named = [rank for rank in ranks if rank is not None]
    if not named:
        return None
    first = min(named, key=lambda rank: rank.name != _SOCKET)
    gdr = [rank.gdr for rank in named if rank.gdr is not None]
    return RankNetwork(
        sanitise(first.name, _NAME),
        sanitise(first.interface, _NAME),
        tuple(sanitise(hca, _NAME) for hca in first.hcas[:32]),
        all(gdr) if gdr else None,
        sanitise(first.note, _NOTE),
    )


def network_of_nodes(results: Iterable[tuple[Test, SmokeOutcome]]) -> dict[str, RankNetwork]:
    """Node -> its network in the last test.

    Whether GPUDirect RDMA is used is only known of tests between nodes.
    """
    network_of_node: dict[str, RankNetwork] = {}
    for test, outcome in results:
        for name, network in outcome.networks if test.purpose not in (SWEEP, CONTROL) else ():
            before = network_of_node.get(name, network)
            keeps_gdr = network.gdr is None and before.name == network.name
            network_of_node[name] = replace(network, gdr=before.gdr) if keeps_gdr else network
    return network_of_node


def describe(network: str, interface: str, hcas: Sequence[str], gdr: bool | None) -> str:
    """A network in words.

    >>> describe("IB", "eth0", ["mlx5_0:1/IB", "mlx5_1:1/IB"], True)
    'IB, 2 ports, GPUDirect RDMA'
    >>> describe("Socket", "eth0", [], None)
    'Socket over eth0'
    """
    if network in (_SOCKET, _GLOO) and interface:
        return f"{network} over {interface}"
    words = [network]
    if hcas:
        kinds = {hca.rpartition("/")[2] for hca in hcas}
        kind = f" of {' and '.join(sorted(kinds))}" if kinds != {network} else ""
        words.append(counted(len(hcas), "port") + kind)
    if gdr is not None and network != _SOCKET:
        words.append(f"{'' if gdr else 'no '}GPUDirect RDMA")
    return ", ".join(words)


def _uses(network: RankNetwork, contrast: str) -> str:
    """What NCCL uses, in words, and why."""
    words = describe(network.name, network.interface, network.hcas, network.gdr)
    return f"NCCL uses {words}, {contrast}{network.note and f': {network.note}'}"


def unexpected(
    networks: Mapping[str, RankNetwork], expected: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """The nodes whose network is not the policy's -> the evidence, a sentence.

    expected: node -> the policy's nccl_network; "": any
    """
    return {
        name: (_uses(network, f"the policy wants {expected[name]} (nccl_network)"),)
        for name, network in networks.items()
        if expected.get(name) and network.name.lower() not in (expected[name].lower(), _GLOO)
    }


def warnings(
    networks: Mapping[str, RankNetwork], hcas: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """The nodes with a slower network than most nodes or than their own ports, or over loopback.

    The sentences about each.

    hcas: node -> its RDMA devices that NCCL could use
    """
    nccl = {name: network for name, network in networks.items() if network.name != _GLOO}
    # Of two equally frequent networks, sockets are not the usual one.
    counts = Counter(network.name for network in nccl.values())
    usual = max(counts, key=lambda name: (counts[name], name != _SOCKET), default="")
    direct = Counter(network.gdr for network in nccl.values() if network.gdr is not None)
    sentences: dict[str, tuple[str, ...]] = {}
    for name, network in networks.items() if len(networks) > 1 else ():
        interface, library = network.interface, "gloo" if network.name == _GLOO else "NCCL"
        if interface == "lo" or interface.startswith("127."):
            sentences[name] = (f"{library} uses {interface}: no other node reaches that",)
    for name, network in nccl.items():
        is_slow = network.name != usual and (
            network.name == _SOCKET or 2 * counts[usual] > len(nccl)
        )
        if is_slow:
            text = _uses(network, f"most nodes {usual}")
        elif network.name == _SOCKET and hcas.get(name):
            text = _uses(network, f"and not {join_first(hcas[name], ', ')}")
        elif network.gdr is False and direct[True] > direct[False]:
            text = _uses(replace(network, note=""), "which most nodes use")
        else:
            continue
        sentences[name] = (*sentences.get(name, ()), text)
    return sentences


# --- The bandwidth inside nodes and between them, and the floors of the policy.

INSIDE, BETWEEN = "inside", "between"
_TITLES = {INSIDE: "inside the node", BETWEEN: "between nodes"}
_SETTINGS = {INSIDE: "smoke_min_node_gbps", BETWEEN: "smoke_min_gbps"}


class Floor(NamedTuple):
    """A node's policy, in Gbit/s of bus bandwidth; 0: it has none."""

    between: float = 0.0
    inside: float = 0.0


Floors = Mapping[str, Floor]
Results = Iterable["tuple[Test, SmokeOutcome]"]


def _by_link(results: Results) -> dict[str, list[tuple[Test, float]]]:
    """Class of links -> the tests with a bandwidth, which a test of one rank does not have."""
    tests: dict[str, list[tuple[Test, float]]] = {INSIDE: [], BETWEEN: []}
    for test, outcome in results:
        if outcome.ok and outcome.gbps > 0 and test.purpose not in (SWEEP, CONTROL):
            name = INSIDE if len(test.nodes) == 1 else BETWEEN
            tests[name].append((test, outcome.gbps))
    return tests


def _floor(name: str, nodes: Iterable[str], floors: Floors) -> float:
    """The lowest floor of these nodes; 0 if a node has no floor: it may be slower."""
    return min((getattr(floors.get(node, Floor()), name) for node in nodes), default=0.0)


def links(results: Results, floors: Floors = MappingProxyType({})) -> tuple[LinkBandwidth, ...]:
    """The bandwidth inside nodes and between them, as far as there are tests."""
    rows = []
    for name, tests in _by_link(results).items():
        if tests:
            slowest, least = min(tests, key=lambda result: result[1])
            median = statistics.median(gbps for _, gbps in tests)
            lows = (_floor(name, test.nodes, floors) for test, _ in tests)
            floor = min(filter(None, lows), default=0.0)
            rows.append(LinkBandwidth(name, len(tests), median, least, slowest.nodes, floor))
    return tuple(rows)


def below_floor(
    results: Results, floors: Floors, without: Iterable[str] = ()
) -> dict[str, tuple[str, ...]]:
    """The nodes that reach the policy's floor in no test -> a sentence for each class of links.

    without: suspects: a test with one of them says nothing about other nodes
    """
    excluded, sentences = {*without}, dict[str, tuple[str, ...]]()
    for name, tests in _by_link(results).items():
        best: dict[str, tuple[float, Test]] = {}
        for test, gbps in tests:
            if excluded & {*test.nodes}:
                continue
            for node in test.nodes:
                if gbps > best.get(node, (0.0, test))[0]:
                    best[node] = gbps, test
        for node, (gbps, test) in best.items():
            floor = _floor(name, (node,), floors)
            if gbps < floor:
                sentence = (
                    f"at best {gbps:.3g} Gbit/s {_TITLES[name]}, the policy wants {floor:g} "
                    f"({_SETTINGS[name]}) [{test.number}]"
                )
                sentences[node] = (*sentences.get(node, ()), sentence)
    return sentences

"""The network that NCCL chose on each node, and the nodes on which it is not the best. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from nodeready.agent.smoke.orders import RankNetwork
from nodeready.core.result import join_first
from nodeready.core.text import counted, sanitise
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


def _is_loopback(interface: str) -> bool:
    """Whether this interface, or address, leads to no other node."""
    return interface == "lo" or interface.startswith("127.")


def _words(network: RankNetwork) -> str:
    return describe(network.name, network.interface, network.hcas, network.gdr)


def _because(network: RankNetwork) -> str:
    return f": {network.note}" if network.note else ""


def unexpected(
    networks: Mapping[str, RankNetwork], expected: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """The nodes whose network is not the policy's -> the evidence, a sentence.

    expected: node -> the policy's nccl_network; "": any
    """
    return {
        name: (
            f"NCCL uses {_words(network)}, the policy wants {expected[name]} (nccl_network)"
            f"{_because(network)}",
        )
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
        if _is_loopback(network.interface):
            library = "gloo" if network.name == _GLOO else "NCCL"
            sentences[name] = (f"{library} uses {network.interface}: no other node reaches that",)
    for name, network in nccl.items():
        is_slow = network.name != usual and (
            network.name == _SOCKET or 2 * counts[usual] > len(nccl)
        )
        if is_slow:
            text = f"NCCL uses {_words(network)}, most nodes {usual}{_because(network)}"
        elif network.name == _SOCKET and hcas.get(name):
            ports = join_first(hcas[name], ", ")
            text = f"NCCL uses {_words(network)}, and not {ports}{_because(network)}"
        elif network.gdr is False and direct[True] > direct[False]:
            text = f"NCCL uses {_words(network)}, which most nodes use"
        else:
            continue
        sentences[name] = (*sentences.get(name, ()), text)
    return sentences

"""The document of `nodeready smoke`: GO or NO-GO, the suspects with their evidence."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Annotated, ClassVar

from nodeready.agent.smoke.orders import RankNetwork
from nodeready.core.json_types import Count, Moment, Name, Positive
from nodeready.core.outcome import Gap, NodeGap, NodeGaps, gaps_code
from nodeready.core.policy import Policy
from nodeready.core.result import join_first
from nodeready.core.text import counted, sanitise
from nodeready.runs.smoke.knowledge import PAIR, SmokeOutcome, SmokeSuspect, Test
from nodeready.subjects.environment_rules import EnvironmentFinding

#: The statuses of a node, worst first; see `SmokeNode.status`.
NODE_STATUSES = ("suspect", "unreachable", "untested", "warned", "passed")
SUSPECT, UNREACHABLE, UNTESTED, WARNED, PASSED = NODE_STATUSES


@dataclass(frozen=True)
class SmokeNode:
    """One node."""

    JSON_KEYS: ClassVar = {"reason": "why"}

    name: str
    # suspect: a suspect names it; unreachable: it was not reached, or the connection was lost;
    # untested: no test could run there; warned: it passed, with ``warnings``
    status: Annotated[str, {"enum": NODE_STATUSES}]
    reason: str = ""  # why it was not tested, or what was lost; "": it was tested, or has a gap
    ranks: int = 0  # number of its ranks in each test
    gpus: tuple[int, ...] = ()  # indexes of the GPUs of its ranks
    engine: str = ""  # such as ``torch 2.13.0 over gloo``; "": none was found
    # values that got worse during the test (errors of a GPU, of a port), or are slow
    warnings: tuple[str, ...] = ()
    # maximum processes of a job: its GPUs, with those that took no part; 0: unknown
    slots: int = 0
    # that NCCL chose: ``IB``, ``Socket``, ``OFI`` or a plugin's; ``gloo``; "": unknown
    network: str = ""
    interface: str = ""  # of its sockets; "": unknown
    hcas: tuple[str, ...] = ()  # the RDMA ports that NCCL uses: ``mlx5_0:1/IB``
    gdr: bool | None = None  # GPUDirect RDMA is used; null: unknown
    gap: Gap | None = field(default=None, repr=False)

    @property
    def absence(self) -> str:
        """Why it was not reached or not tested; "": it was tested."""
        return self.gap.reason if self.gap else self.reason


@dataclass(frozen=True)
class LinkBandwidth:
    """The bandwidth of one class of links, in Gbit/s of bus bandwidth."""

    JSON_KEYS: ClassVar = {"slowest_nodes": "where"}

    name: str  # ``inside``: between the GPUs or ranks of a node; ``between``: between nodes
    tests: int
    median_gbps: float
    least_gbps: float  # the minimum of all tests that passed
    slowest_nodes: tuple[str, ...]  # of the test with the minimum
    floor_gbps: float = 0.0  # minimum of the policy; 0: it has none


@dataclass(frozen=True)
class SmokeReport:
    """The document of `nodeready smoke`. Texts are lines without control characters; bytes that
    are no UTF-8 are escapes: \\xNN.

    gaps:     the nodes that were not probed, or were lost
    """

    SCHEMA: ClassVar = "smoke"
    VERSION: ClassVar = 2
    JSON: ClassVar = (
        *("started", "finished", "verdict", "complete", "stopped", "engine", "proves", "control"),
        *("budget_s", "tests", "single_node_tests", "rounds", "go", "exclude"),
        *("suspects", "gaps", "nodes", "links", "environment", "summary"),
    )
    JSON_KEYS: ClassVar = {"single_node_tests": "alone"}

    started: Moment  # UTC
    finished: Moment  # UTC
    complete: bool  # False when it was interrupted
    # the program that ran the collectives, such as ``torch 2.13.0 over gloo``; "": none
    engine: str
    proves: str  # what a pass of this engine proves
    control: str  # the engine of the control tests; "": there were none
    budget_s: Positive  # maximum duration in seconds
    tests: Count  # number of collectives of several nodes
    single_node_tests: Count  # number of tests of one node
    rounds: Count  # number of rounds of simultaneous tests
    nodes: tuple[SmokeNode, ...]
    suspects: tuple[SmokeSuspect, ...]
    links: tuple[LinkBandwidth, ...]  # the bandwidth of each class of links
    stopped: str = ""  # why it ended early, such as the budget; "": it did not
    # what is wrong with the variables of the ranks
    environment: tuple[EnvironmentFinding, ...] = ()

    @property
    def gaps(self) -> NodeGaps:
        return tuple(NodeGap(node.name, *node.gap) for node in self.nodes if node.gap)

    @property
    def exclude(self) -> tuple[Name, ...]:
        """The fewest nodes that explain every failure, in the order of the inventory: suspects,
        nodes that were not reached or not tested, and of pairs the nodes of most pairs. A suspect
        of kind scale excludes no node.
        """
        excluded = {node.name for node in self.nodes if node.status in (UNREACHABLE, UNTESTED)}
        pairs: list[tuple[str, str]] = []
        for suspect in self.suspects:
            if suspect.kind == PAIR:
                pairs += combinations(suspect.nodes, 2)
            else:
                excluded |= {*suspect.blamed}
        names = [node.name for node in self.nodes]
        excluded |= _cover((pair for pair in pairs if not excluded & {*pair}), names)
        return tuple(name for name in names if name in excluded)

    @property
    def go(self) -> tuple[Name, ...]:
        """The nodes that are not excluded, in the order of the inventory."""
        excluded = {*self.exclude}
        return tuple(node.name for node in self.nodes if node.name not in excluded)

    @property
    def summary(self) -> Annotated[dict[str, Count], {"keys": NODE_STATUSES}]:
        """Nodes by status, with every status."""
        counts = Counter(node.status for node in self.nodes)
        return {status: counts[status] for status in NODE_STATUSES}

    @property
    def good(self) -> bool:
        """Whether the job may start on all nodes: every test was made, and all passed."""
        is_finished = self.complete and not self.stopped
        return is_finished and bool(self.nodes) and not self.suspects and not self.exclude

    @property
    def verdict(self) -> Annotated[str, {"enum": ("GO", "NO-GO")}]:
        """GO: every test was made, and all passed."""
        return "GO" if self.good else "NO-GO"


def _cover(pairs: Iterable[tuple[str, str]], names: list[str]) -> set[str]:
    """A small set of names with at least one name of each pair, the smallest one unless the pairs
    form a circle.
    names: in the inventory's order. Of two equal choices the later name is taken, because a job
           needs its first node for the rendezvous
    """
    remaining = {frozenset(pair) for pair in pairs}
    positions = {name: position for position, name in enumerate(names)}
    cover = set()
    while remaining:
        partners: dict[str, set[str]] = {}
        for first, second in map(tuple, remaining):
            partners.setdefault(first, set()).add(second)
            partners.setdefault(second, set()).add(first)
        # The partner of a node with one pair covers that pair, and perhaps more.
        better = {name for peers in partners.values() if len(peers) == 1 for name in peers}
        best = max(better or partners, key=lambda name: (len(partners[name]), positions[name]))
        cover.add(best)
        remaining = {pair for pair in remaining if best not in pair}
    return cover


def code(smoke: SmokeReport) -> int:
    """The exit code: 0 GO, 3 NO-GO; see `nodeready.core.exit_codes`."""
    is_empty, fails = not smoke.nodes, not smoke.good
    return gaps_code(
        smoke.gaps, complete=smoke.complete, usage=is_empty, check=fails, failures=frozenset()
    )


# --- The network that NCCL chose on each node, and the bandwidth of nodes and links. Pure.

#: NCCL's network without RDMA; the name of gloo, which is not NCCL.
_SOCKET, _GLOO = "Socket", "gloo"
_NAME, _NOTE = 40, 200  # maximum characters of a name or a note


def of_node(ranks: Iterable[RankNetwork | None]) -> RankNetwork | None:
    """The network of a node's ranks; of several, sockets come first: they are the slow ones."""
    named = [rank for rank in ranks if rank is not None]
    if not named:
        return None
    first = min(named, key=lambda rank: rank.name != _SOCKET)
    gdr = [rank.gdr for rank in named if rank.gdr is not None]
    name, interface, *hcas = (
        sanitise(text, _NAME) for text in (first.name, first.interface, *first.hcas[:32])
    )
    uses_gdr, note = all(gdr) if gdr else None, sanitise(first.note, _NOTE)
    return RankNetwork(name, interface, tuple(hcas), uses_gdr, note)


def network_of_nodes(results: Iterable[tuple[Test, SmokeOutcome]]) -> dict[str, RankNetwork]:
    """Node -> its network in the last test; GPUDirect RDMA by tests between nodes."""
    network_of_node: dict[str, RankNetwork] = {}
    for test, outcome in results:
        for name, network in outcome.networks if test.purpose not in ("sweep", "control") else ():
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
    networks: Mapping[str, RankNetwork], policies: Mapping[str, Policy]
) -> dict[str, tuple[str, ...]]:
    """The nodes whose network is not the policy's -> the evidence, a sentence."""
    return {
        name: (_uses(network, f"the policy wants {expected} (nccl_network)"),)
        for name, network in networks.items()
        if (expected := policies[name].nccl_network)
        and network.name.lower() not in (expected.lower(), _GLOO)
    }


def warnings(
    networks: Mapping[str, RankNetwork], hcas: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """The nodes with a slower network than most nodes or than their own ports, or over loopback ->
    the sentences about each. hcas: node -> its RDMA devices that NCCL could use
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
        is_slower_kind = network.name == _SOCKET or 2 * counts[usual] > len(nccl)
        if network.name != usual and is_slower_kind:
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

Policies = Mapping[str, Policy]
Results = Iterable["tuple[Test, SmokeOutcome]"]


def _by_link(results: Results) -> dict[str, list[tuple[Test, float]]]:
    """Class of links -> the tests with a bandwidth, which a test of one rank does not have."""
    tests: dict[str, list[tuple[Test, float]]] = {INSIDE: [], BETWEEN: []}
    for test, outcome in results:
        if outcome.ok and outcome.gbps > 0 and test.purpose not in ("sweep", "control"):
            name = INSIDE if len(test.nodes) == 1 else BETWEEN
            tests[name].append((test, outcome.gbps))
    return tests


def _floor(name: str, nodes: Iterable[str], policies: Policies) -> float:
    """The lowest floor of these nodes; 0 if a node has no floor: it may be slower."""
    floors = (getattr(policies[node], _SETTINGS[name]) for node in nodes if node in policies)
    return float(min(floors, default=0.0))


def links(results: Results, policies: Policies) -> tuple[LinkBandwidth, ...]:
    """The bandwidth inside nodes and between them, as far as there are tests."""
    rows = []
    for name, tests in _by_link(results).items():
        if tests:
            slowest, least = min(tests, key=lambda result: result[1])
            median = statistics.median(gbps for _, gbps in tests)
            lows = (_floor(name, test.nodes, policies) for test, _ in tests)
            floor = min(filter(None, lows), default=0.0)
            rows.append(LinkBandwidth(name, len(tests), median, least, slowest.nodes, floor))
    return tuple(rows)


def below_floor(
    results: Results, policies: Policies, without: Iterable[str] = ()
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
            floor = _floor(name, (node,), policies)
            if gbps < floor:
                sentence = (
                    f"at best {gbps:.3g} Gbit/s {_TITLES[name]}, the policy wants {floor:g} "
                )
                sentence += f"({_SETTINGS[name]}) [{test.number}]"
                sentences[node] = (*sentences.get(node, ()), sentence)
    return sentences

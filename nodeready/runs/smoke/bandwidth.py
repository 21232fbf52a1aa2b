"""The bandwidth inside nodes and between them, and the policy's floors. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from nodeready.runs.smoke.document import LinkBandwidth
from nodeready.runs.smoke.knowledge import CONTROL, SWEEP, SmokeOutcome, Test

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

"""`benchmarks/run smoke`: a smoke test's search for faults, beside testing all pairs and halving.

A simulated fleet with faults at random places answers the tests at once. The benchmark counts
collective tests, rounds and named nodes. It counts neither tests of a single node nor the sweep of
plain connections: both are no collectives, and only nodeready has them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks import command
from benchmarks.report import BenchmarkReport
from nodeready.runs.smoke.knowledge import CONFIRM, HALF, SWEEP, Test
from tests.unit.smoke.fleets import Fleet, names

HEADER = ("", "search", "tests", "most", "rounds", "found", "named wrongly", "CPU")
_NOTE = (
    "Tests and rounds are medians over the placements; most is the largest number of tests. "
    "Found: faults named as what they are: a node, a pair, all nodes of a switch (together or "
    "one by one). Named wrongly: nodes without a fault, over all placements; an end of a bad "
    "pair that is named as a bad node counts. CPU is that of one search with its simulated "
    "fleet, without the sweep. All pairs tests every two nodes once, as many pairs side by "
    "side as there are, and repeatedly names the node with the most failed pairs; a single "
    "failed pair is named as a pair. Halving begins with all nodes, splits what fails, and "
    "tests both halves in one round; it names a node that remains of a half and fails beside "
    "one that passed. Where both halves pass, it halves the larger side against the other "
    "until a pair remains."
)

#: The suspects that a search names, each with its nodes: two for a pair.
Named = set[tuple[str, ...]]


@dataclass(frozen=True)
class SearchCost:
    tests: int
    rounds: int
    named: Named


# --- The searches.


def nodeready(fleet: Fleet) -> SearchCost:
    """nodeready's own search, up to the sweep."""
    result = fleet.search(until=SWEEP)
    rounds = sum(tests[0].purpose != "alone" for tests in fleet.rounds)
    return SearchCost(result.tests, rounds, {suspect.nodes for suspect in result.suspects})


class _TestCounter:
    """Runs rounds of tests on a fleet, and counts them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.tests, self.rounds = fleet, 0, 0

    def passes(self, groups: Sequence[Sequence[str]], purpose: str = HALF) -> list[bool]:
        """Whether each of these groups passes; they are tested side by side."""
        self.rounds += bool(groups)
        self.tests += len(groups)
        tests = [Test(0, purpose, tuple(group)) for group in groups]
        return [self.fleet.outcome(test).ok for test in tests]


def all_pairs(fleet: Fleet) -> SearchCost:
    """Test every two nodes together; name the node with the most failures first."""
    counter = _TestCounter(fleet)
    failing: dict[str, set[str]] = {name: set() for name in fleet.nodes}
    for pairs in _rounds(fleet.nodes):
        for (first, second), ok in zip(pairs, counter.passes(pairs), strict=True):
            if not ok:
                failing[first].add(second)
                failing[second].add(first)
    named: Named = set()
    while any(failing.values()):
        worst = max(failing, key=lambda name: len(failing[name]))
        peers = failing[worst]
        named.add((worst,) if len(peers) > 1 else tuple(sorted((worst, *peers))))
        for peer in peers:
            failing[peer].discard(worst)
        failing[worst] = set()
    return SearchCost(counter.tests, counter.rounds, named)


def _rounds(nodes: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """All pairs, each node once in a round: one node stays, its peers rotate."""
    ring = list(nodes)
    half = len(ring) // 2
    for _ in range(len(ring) - 1):
        yield list(zip(ring[:half], reversed(ring[half:]), strict=True))
        ring = [ring[0], ring[-1], *ring[1:-1]]


def halving(fleet: Fleet) -> SearchCost:
    """Test all nodes together; split what fails into halves."""
    counter = _TestCounter(fleet)
    named: Named = set()
    suspects: list[str] = []
    passed: list[str] = []
    split_pairs: list[tuple[list[str], list[str]]] = []
    failing = [] if counter.passes([fleet.nodes])[0] else [list(fleet.nodes)]
    while failing:
        cut = [(group[: len(group) // 2], group[len(group) // 2 :]) for group in failing]
        halves = [half for group_halves in cut for half in group_halves]
        # A collective needs two nodes: a single node is not tested yet.
        several = [half for half in halves if len(half) > 1]
        fails = {
            half[0] for half, ok in zip(several, counter.passes(several), strict=True) if not ok
        }
        suspects += [half[0] for half in halves if len(half) == 1]
        passed += [name for half in several if half[0] not in fails for name in half]
        split_pairs += [
            (first, second)
            for first, second in cut
            if len(first) > 1 and not {first[0], second[0]} & fails
        ]
        failing = [half for half in several if half[0] in fails]
    waiting = suspects
    while waiting and passed:
        pairs = list(zip(waiting, passed, strict=False))
        results = counter.passes(pairs, CONFIRM)
        named |= {(name,) for (name, _), ok in zip(pairs, results, strict=True) if not ok}
        waiting = waiting[len(pairs) :]
    for parts in split_pairs:
        # Both halves pass: the pair has a node in each.
        sides = list(parts)
        while len(sides[0]) + len(sides[1]) > 2:
            smaller, larger = sorted(sides, key=len)
            half = larger[: len(larger) // 2]
            ok = counter.passes([[*half, *smaller]])[0]
            sides = [larger[len(half) :] if ok else half, smaller]
        pair = [*sides[0], *sides[1]]
        if not counter.passes([pair], CONFIRM)[0]:
            named.add(tuple(sorted(pair)))
    return SearchCost(counter.tests, counter.rounds, named)


SEARCHES: dict[str, Callable[[Fleet], SearchCost]] = {
    "nodeready": nodeready,
    "all pairs": all_pairs,
    "halving": halving,
}

# --- The fleets.


def _bad(nodes: list[str], choose: random.Random) -> tuple[Fleet, Named]:
    bad = tuple(sorted(choose.sample(nodes, 5)))
    return Fleet(nodes, bad=bad), {(name,) for name in bad}


def _pairs(nodes: list[str], choose: random.Random) -> tuple[Fleet, Named]:
    ends = choose.sample(nodes, 6)
    pairs = tuple(tuple(sorted(ends[place : place + 2])) for place in (0, 2, 4))
    return Fleet(nodes, pairs=pairs), set(pairs)  # type: ignore[arg-type]


def _switch(nodes: list[str], choose: random.Random) -> tuple[Fleet, Named]:
    begin = choose.randrange(len(nodes) - 16)
    cut = tuple(nodes[begin : begin + 16])
    return Fleet(nodes, sets=(cut,)), {cut}


FAULTS = {"5 bad nodes": _bad, "3 bad pairs": _pairs, "a bad switch, 16 nodes": _switch}


def rows(count: int, placements: int) -> Iterator[tuple[str, ...]]:
    for (kind, make), (name, search) in itertools.product(FAULTS.items(), SEARCHES.items()):
        results, right_count, faults, wrong_count = [], 0, 0, 0
        start_s = time.process_time()
        for seed in range(placements):
            fleet, expected = make(names(count), random.Random(seed))
            result = search(fleet)
            results.append(result)
            faults += len(expected)
            right = {fault for fault in expected if _is_named(fault, result.named)}
            right_count += len(right)
            nodes = {name for fault in expected if len(fault) != 2 for name in fault}
            named_wrongly = {name for suspect in result.named - right for name in suspect}
            wrong_count += len(named_wrongly - nodes)
        cpu_s = (time.process_time() - start_s) / placements
        tests = [result.tests for result in results]
        yield (
            f"{count} nodes, {kind}",
            name,
            f"{statistics.median(tests):.0f}",
            f"{max(tests)}",
            f"{statistics.median(result.rounds for result in results):.0f}",
            f"{right_count} of {faults}",
            f"{wrong_count}",
            f"{cpu_s:.2f} s",
        )


def _is_named(fault: tuple[str, ...], named: Named) -> bool:
    """Whether a fault is named: itself, or all nodes of a switch one by one."""
    return fault in named or (len(fault) > 2 and all((name,) in named for name in fault))


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    sizes, placements = arguments.nodes, arguments.placements
    table = [HEADER, *(row for size in sizes for row in rows(size, placements))]
    limits = ", ".join(f"{4 * math.sqrt(size) + 20:.0f} at {size}" for size in sizes)
    remark = (
        f"{placements} random placements of each. The limit for five bad nodes is 4·√N + 20 "
        f"tests: {limits} nodes."
    )
    return BenchmarkReport("The search of a smoke test", [("", table)], remark, _NOTE)


def main() -> int:
    parser = command.options("smoke", __doc__, nodes="232,1024", placements=20)
    return command.main("smoke", parser, _measure, has_lab=False)


if __name__ == "__main__":
    sys.exit(main())

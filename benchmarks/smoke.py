"""What a search for the culprit costs on a simulated fleet, beside trying all pairs and halving.

A fleet of nodes with faults at random places answers the tests at once: what is counted are
collective tests and rounds, and who is named. Tests of one node alone and the sweep of plain
connections are no collectives, and the same for whoever searches; the other two have neither.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine, table
from benchmarks.contenders import ROOT
from nodeready.smoke.knowledge import CONFIRM, HALF, SWEEP, Test
from tests.unit.smoke.fleets import Fleet, names

HEADER = ("", "search", "tests", "most", "rounds", "found", "accused wrongly", "CPU")
_WRAP = 99
_NOTE = (
    "Tests and rounds are medians over the placements, most is the most tests of any. Found: the "
    "faults that are named as what they are: a node, a pair, all nodes of a switch (together or "
    "one by one). Accused wrongly: nodes without a fault, over all placements; an end of a bad "
    "pair that is named as a bad node counts. CPU is that of one search with its simulated fleet, "
    "the sweep left out. All pairs puts every two nodes together once, as many pairs side by side "
    "as there are, and names, as long as a pair that failed is left, the node with the most of "
    "them, a node with one alone as the pair. Halving begins with all nodes, halves what fails, "
    "both halves in one round and every test by itself, and names a node that is left of a half "
    "and fails beside one that passed; where both halves pass, the larger side is halved against "
    "the other until a pair is left."
)

#: What one of the searches names: nodes of a suspect each, two for a pair.
Named = set[tuple[str, ...]]


@dataclass(frozen=True)
class Result:
    tests: int
    rounds: int
    named: Named


# --- The searches.


def nodeready(fleet: Fleet) -> Result:
    """Ours, up to the sweep."""
    found = fleet.search(until=SWEEP)
    rounds = sum(tests[0].purpose != "alone" for tests in fleet.rounds)
    return Result(found.tests, rounds, {one.nodes for one in found.suspects})


class _Asking:
    """Rounds of tests of a fleet, counted."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.tests, self.rounds = fleet, 0, 0

    def passes(self, groups: Sequence[Sequence[str]], purpose: str = HALF) -> list[bool]:
        """Which of these groups pass, tested side by side."""
        self.rounds += bool(groups)
        self.tests += len(groups)
        tests = [Test(0, purpose, tuple(group)) for group in groups]
        return [self.fleet.outcome(test).ok for test in tests]


def all_pairs(fleet: Fleet) -> Result:
    """Every two nodes together; who fails most is named first."""
    asking = _Asking(fleet)
    failing: dict[str, set[str]] = {name: set() for name in fleet.nodes}
    for pairs in _rounds(fleet.nodes):
        for (one, other), ok in zip(pairs, asking.passes(pairs), strict=True):
            if not ok:
                failing[one].add(other)
                failing[other].add(one)
    named: Named = set()
    while any(failing.values()):
        worst = max(failing, key=lambda name: len(failing[name]))
        others = failing[worst]
        named.add((worst,) if len(others) > 1 else tuple(sorted((worst, *others))))
        for other in others:
            failing[other].discard(worst)
        failing[worst] = set()
    return Result(asking.tests, asking.rounds, named)


def _rounds(nodes: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """All pairs, everybody once in a round: one node stays, the others go around."""
    turning = list(nodes)
    half = len(turning) // 2
    for _ in range(len(turning) - 1):
        yield list(zip(turning[:half], reversed(turning[half:]), strict=True))
        turning = [turning[0], turning[-1], *turning[1:-1]]


def halving(fleet: Fleet) -> Result:
    """All together; what fails in halves."""
    asking = _Asking(fleet)
    named: Named = set()
    suspects: list[str] = []
    passed: list[str] = []
    apart: list[tuple[list[str], list[str]]] = []
    failing = [] if asking.passes([fleet.nodes])[0] else [list(fleet.nodes)]
    while failing:
        cut = [(group[: len(group) // 2], group[len(group) // 2 :]) for group in failing]
        halves = [half for both in cut for half in both]
        # A collective needs two nodes: of one node nothing is known yet.
        several = [half for half in halves if len(half) > 1]
        fails = {
            half[0] for half, ok in zip(several, asking.passes(several), strict=True) if not ok
        }
        suspects += [half[0] for half in halves if len(half) == 1]
        passed += [name for half in several if half[0] not in fails for name in half]
        apart += [
            (one, other)
            for one, other in cut
            if len(one) > 1 and one[0] not in fails and other[0] not in fails
        ]
        failing = [half for half in several if half[0] in fails]
    waiting = suspects
    while waiting and passed:
        beside = list(zip(waiting, passed, strict=False))
        results = asking.passes(beside, CONFIRM)
        named |= {(name,) for (name, _), ok in zip(beside, results, strict=True) if not ok}
        waiting = waiting[len(beside) :]
    for one, other in apart:
        # Both halves pass: the pair is of one of each.
        sides = [one, other]
        while len(sides[0]) + len(sides[1]) > 2:
            smaller, larger = sorted(sides, key=len)
            half = larger[: len(larger) // 2]
            ok = asking.passes([[*half, *smaller]])[0]
            sides = [larger[len(half) :] if ok else half, smaller]
        pair = [*sides[0], *sides[1]]
        if not asking.passes([pair], CONFIRM)[0]:
            named.add(tuple(sorted(pair)))
    return Result(asking.tests, asking.rounds, named)


SEARCHES: dict[str, Callable[[Fleet], Result]] = {
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
    for (fault, make), (name, search) in itertools.product(FAULTS.items(), SEARCHES.items()):
        results, found, faults, wrong = [], 0, 0, 0
        begun = time.process_time()
        for seed in range(placements):
            fleet, expected = make(names(count), random.Random(seed))
            result = search(fleet)
            results.append(result)
            faults += len(expected)
            right = {one for one in expected if one in result.named or _each(one, result.named)}
            found += len(right)
            nodes = {name for one in expected if len(one) != 2 for name in one}
            wrong += len({name for one in result.named - right for name in one} - nodes)
        cpu_s = (time.process_time() - begun) / placements
        tests = [result.tests for result in results]
        yield (
            f"{count} nodes, {fault}",
            name,
            f"{statistics.median(tests):.0f}",
            f"{max(tests)}",
            f"{statistics.median(result.rounds for result in results):.0f}",
            f"{found} of {faults}",
            f"{wrong}",
            f"{cpu_s:.2f} s",
        )


def _each(nodes: tuple[str, ...], named: Named) -> bool:
    """Whether all nodes of a switch are named, one by one."""
    return len(nodes) > 2 and all((name,) in named for name in nodes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/run smoke", description=__doc__)
    parser.add_argument("--nodes", default="232,1024", help="default 232,1024")
    parser.add_argument("--placements", type=int, default=20, help="of each kind (default 20)")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "benchmarks.md")
    given = parser.parse_args()
    sizes = [int(size) for size in given.nodes.split(",")]
    load = os.getloadavg()[0]
    found = [HEADER, *(row for size in sizes for row in rows(size, given.placements))]
    limits = ", ".join(f"{4 * math.sqrt(size) + 20:.0f} at {size}" for size in sizes)
    about = (
        f"{machine.today()}; {machine.describe()}. Load average before the run {load:.1f}. "
        f"{given.placements} random placements of each. The limit for five bad nodes is 4·√N + 20 "
        f"tests: {limits} nodes."
    )
    print(table.aligned(found))
    print(about)
    command = f"benchmarks/run smoke --nodes {given.nodes} --placements {given.placements}"
    text = f"""## The search of a smoke test

`{command}`

{textwrap.fill(about, _WRAP)}

{table.markdown(found)}

{textwrap.fill(_NOTE, _WRAP)}"""
    table.replace(given.output, "smoke", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

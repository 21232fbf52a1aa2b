"""`benchmarks/run smoke`: a smoke test's search for faults.

A simulated fleet with faults at random places answers the tests at once. The benchmark counts
collective tests, rounds and named nodes. It counts neither tests of a single node nor the sweep of
plain connections, which are no collectives.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator

from benchmarks.command import Benchmark, BenchmarkReport
from tests.unit.smoke.fleets import Fleet, names

HEADER = ("", "tests", "most", "rounds", "found", "named wrongly", "CPU")
_NOTE = (
    "Tests and rounds are medians over the placements; most is the largest number of tests. "
    "Found: faults named as what they are: a node, a pair, all nodes of a switch (together or "
    "one by one). Named wrongly: nodes without a fault, over all placements; an end of a bad "
    "pair that is named as a bad node counts. CPU is that of one search with its simulated "
    "fleet, without the sweep."
)

#: The suspects that a search names, each with its nodes: two for a pair.
Named = set[tuple[str, ...]]


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
    for kind, make in FAULTS.items():
        tests, rounds, right_count, faults, wrong_count = [], [], 0, 0, 0
        start_s = time.process_time()
        for seed in range(placements):
            fleet, expected = make(names(count), random.Random(seed))
            result = fleet.search(until="sweep")
            tests.append(result.tests)
            rounds.append(sum(group[0].purpose != "alone" for group in fleet.rounds))
            named = {suspect.nodes for suspect in result.suspects}
            faults += len(expected)
            right = {fault for fault in expected if _is_named(fault, named)}
            right_count += len(right)
            nodes = {name for fault in expected if len(fault) != 2 for name in fault}
            wrong_count += len({name for suspect in named - right for name in suspect} - nodes)
        cpu_s = (time.process_time() - start_s) / placements
        middle, middle_rounds = (f"{statistics.median(row):.0f}" for row in (tests, rounds))
        results = f"{right_count} of {faults}", f"{wrong_count}", f"{cpu_s:.2f} s"
        yield f"{count} nodes, {kind}", middle, f"{max(tests)}", middle_rounds, *results


def _is_named(fault: tuple[str, ...], named: Named) -> bool:
    """Whether a fault is named: itself, or all nodes of a switch one by one."""
    return fault in named or (len(fault) > 2 and all((name,) in named for name in fault))


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    sizes, placements = arguments.nodes, arguments.placements
    table = [HEADER, *(row for size in sizes for row in rows(size, placements))]
    limits = ", ".join(f"{4 * math.sqrt(size) + 20:.0f} at {size}" for size in sizes)
    pairs = ", ".join(f"{size * (size - 1) // 2:,}" for size in sizes)
    remark = (
        f"{placements} random placements of each. The limit for five bad nodes is 4·√N + 20 "
        f"tests: {limits} nodes. To test all pairs takes {pairs} tests."
    )
    return BenchmarkReport("The search of a smoke test", [("", table)], remark, _NOTE)


BENCHMARK = Benchmark(_measure, {"nodes": "232,1024", "placements": 20}, has_lab=False)

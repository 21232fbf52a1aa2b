"""How often the rule of `nodeready lemons` is wrong, on simulated fleets.

Every node fails at random with the same rate; some of them ten times as often. A false alarm is a
fleet in which a node that fails no more often is named.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict

from benchmarks.command import Benchmark, BenchmarkReport
from nodeready.runs.memory.lemons import DAY_S, SuspectUnit, own_incidents, rank
from nodeready.runs.memory.look import Event

#: Failures of one node in a day: 6.5 and 2.34 in 1,000 node days (arXiv 2410.21680, RSC-1, RSC-2),
#: and three times as many.
RATES = (0.00234, 0.0065, 0.02)
DAYS, LEMONS, FACTOR = 90, 3, 10
HEADER = (
    "nodes",
    "failures in 1,000 node days",
    "fleets with a false alarm",
    f"found of {LEMONS} that fail {FACTOR} times as often",
)


def named(random_: random.Random, nodes: int, rate: float, lemons: int = 0) -> set[int]:
    """The nodes that the rule names in one fleet, whose first ``lemons`` nodes are bad."""
    incidents = []
    for node in range(nodes):
        node_rate = rate * (FACTOR if node < lemons else 1)
        day = random_.expovariate(node_rate)
        while day < DAYS:
            incidents.append(Event(day * DAY_S, str(node), "", "gpus.recovery", ""))
            day += random_.expovariate(node_rate)
    observed_s = {SuspectUnit(str(node), str(node)): DAYS * DAY_S for node in range(nodes)}
    by_node = defaultdict(list)
    for incident in own_incidents(incidents, nodes):
        by_node[SuspectUnit(incident.node, incident.node)].append(incident)
    ranked = rank(by_node, observed_s, "node", observed_s)
    return {int(unit.unit) for unit in ranked if unit.is_lemon}


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    rows: list[tuple[str, ...]] = [HEADER]
    for nodes in arguments.nodes:
        for rate in RATES:
            random_ = random.Random(1)
            alarms = detected = 0
            for _ in range(arguments.fleets):
                alarms += bool(named(random_, nodes, rate))
                detected += len(named(random_, nodes, rate, LEMONS) & {*range(LEMONS)})
            shares = alarms / arguments.fleets, detected / arguments.fleets / LEMONS
            rows.append((str(nodes), f"{rate * 1000:g}", f"{shares[0]:.1%}", f"{shares[1]:.0%}"))
    remark = f"{arguments.fleets} fleets of each kind, {DAYS} days each."
    return BenchmarkReport("The rule of lemons", [("", rows)], remark)


BENCHMARK = Benchmark(_measure, {"nodes": "16,64,1000", "fleets": 500}, has_lab=False)

"""`benchmarks/run deploy`: the first deploy, and one that has nothing to do.

In one run, on the same nodes: `nodeready deploy`, `pyinfra … deploy.py`, the same settings as
pyinfra's own operations and as an Ansible playbook, and the yardstick E, `pyinfra … exec -- true`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from benchmarks import contenders
from benchmarks.command import Benchmark, BenchmarkReport, Budget, budget_rows, say
from benchmarks.contenders import ANSIBLE, EXEC, NODEREADY, PROBE, PYINFRA, Cluster, Samples
from nodeready.core.policy import Policy

#: Runs with nothing to do for each first deploy, in turns with the yardstick: other load on the
#: machine then affects both. Slower contenders run once.
TURNS = 3
FIRST, NOTHING = "first deploy", "nothing to do"


def deploy(nodes: Cluster, rounds: int, ansible: Path | None) -> Samples:
    """The samples of every contender and phase: each on fresh nodes, then with nothing to do."""
    deploys = contenders.deploys(nodes, ansible)
    data = contenders.policy_data(f"{nodes.lab.name}*")
    inventory = nodes.pyinfra_inventory("inventory", data)
    units = [contenders.yardstick(inventory), contenders.probe(inventory, Policy(**data))]
    names = [f"{deploy.name}, {phase}" for phase in (FIRST, NOTHING) for deploy in deploys]
    samples = Samples({name: [] for name in (EXEC, PROBE, *names)})
    for number in range(rounds):
        for contender in deploys:
            if contender.name == ANSIBLE and number:
                continue
            nodes.reset()
            first = contender.run(nodes, matches=False)
            samples[f"{contender.name}, {FIRST}"].append(first)
            for _ in range(TURNS if contender.name in (NODEREADY, PYINFRA) else 1):
                for unit in units if contender.name == NODEREADY else units[:1]:
                    samples[unit.name].append(unit.run(nodes))
                samples[f"{contender.name}, {NOTHING}"].append(contender.run(nodes))
    return samples


def _budgets(size: int, samples: Samples) -> Iterator[Budget]:
    name, case = f"{NODEREADY}, {NOTHING}", f"{size} nodes, {NOTHING}"
    yield from contenders.run_budgets(case, samples, name, size, 35)
    pyinfra = Samples({**samples, name: samples[f"{PYINFRA}, {NOTHING}"]})
    *_, total_cpu = contenders.run_budgets(f"{case}, pyinfra deploy.py", pyinfra, name, size, 105)
    yield total_cpu
    if f"{ANSIBLE}, {NOTHING}" in samples:
        faster = samples.ratio(f"{ANSIBLE}, {NOTHING}", name)
        yield Budget(f"Ansible ÷ `nodeready deploy`, {case}: wall", 20, faster, is_maximum=False)


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    tables, budgets = [], list[Budget]()
    for size in arguments.nodes:
        say(f"{size} nodes")
        with contenders.cluster(size, arguments.name) as nodes:
            samples = deploy(nodes, arguments.repeat, arguments.ansible)
            # By nodeready's time in the same phase.
            ratios = {}
            for name, phase in product(samples, (FIRST, NOTHING)):
                if name.endswith(f", {phase}"):
                    ratios[name] = samples.ratio(name, f"{NODEREADY}, {phase}")
            rows = contenders.sample_rows(samples, EXEC, "E", size, ("÷ nodeready", ratios))
            tables.append((f"{size} nodes", rows))
            budgets += _budgets(size, samples)
            if size == arguments.nodes[-1]:
                data = contenders.policy_data(f"{arguments.name}*")
                budgets.append(contenders.probe_budget(nodes, data))
    return BenchmarkReport("Deploy", [*tables, ("Budgets", budget_rows(budgets))])


BENCHMARK = Benchmark(
    _measure, {"nodes": "64,256", "repeat": 2}, ("pyinfra", "paramiko"), has_ansible=True
)

"""`benchmarks/run deploy`: the first deploy, and one that has nothing to do.

In one run, on the same nodes: `nodeready deploy`, `pyinfra … deploy.py`, the same settings as
pyinfra's own operations and as an Ansible playbook, and the yardstick E, `pyinfra … exec -- true`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.command import Benchmark
from benchmarks.contenders import (
    ANSIBLE,
    EXEC,
    NODEREADY,
    PROBE,
    PYINFRA,
    BenchmarkReport,
    Budget,
    Cluster,
    Sample,
    budget_rows,
    cluster,
    deploys,
    median,
    policy_data,
    probe,
    probe_budget,
    run_budgets,
    sample_rows,
    say,
    yardstick,
)
from nodeready.core.policy import Policy

#: Runs with nothing to do for each first deploy, in turns with the yardstick: other load on the
#: machine then affects both. Slower contenders run once.
TURNS = 3
FIRST, NOTHING = "first deploy", "nothing to do"

Samples = dict[str, list[Sample]]


def deploy(nodes: Cluster, rounds: int, ansible: Path | None) -> Samples:
    """The samples of every contender and phase: each on fresh nodes, then with nothing to do."""
    contenders = deploys(nodes, ansible)
    data = policy_data(f"{nodes.lab.name}*")
    inventory = nodes.pyinfra_inventory("inventory", data)
    units = [yardstick(inventory), probe(inventory, Policy(**data))]
    names = [
        f"{contender.name}, {phase}" for phase in (FIRST, NOTHING) for contender in contenders
    ]
    samples: Samples = {name: [] for name in (EXEC, PROBE, *names)}
    for number in range(rounds):
        for contender in contenders:
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


def _ratios(samples: Samples) -> dict[str, float]:
    """Each contender's wall time by nodeready's in the same phase."""
    return {
        name: median(runs).wall_s / median(samples[f"{NODEREADY}, {phase}"]).wall_s
        for name, runs in samples.items()
        for phase in (FIRST, NOTHING)
        if name.endswith(f", {phase}")
    }


def _budgets(size: int, samples: Samples) -> Iterator[Budget]:
    name, case = f"{NODEREADY}, {NOTHING}", f"{size} nodes, {NOTHING}"
    yield from run_budgets(case, samples, name, size, 35)
    pyinfra = {**samples, name: samples[f"{PYINFRA}, {NOTHING}"]}
    *_, total_cpu = run_budgets(f"{case}, pyinfra deploy.py", pyinfra, name, size, 105)
    yield total_cpu
    if runs := samples.get(f"{ANSIBLE}, {NOTHING}"):
        faster = median(runs).wall_s / median(samples[name]).wall_s
        yield Budget(f"Ansible ÷ `nodeready deploy`, {case}: wall", 20, faster, is_maximum=False)


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    tables, budgets = [], list[Budget]()
    for size in arguments.nodes:
        say(f"{size} nodes")
        with cluster(size, arguments.name) as nodes:
            samples = deploy(nodes, arguments.repeat, arguments.ansible)
            ratios = ("÷ nodeready", _ratios(samples))
            tables.append((f"{size} nodes", sample_rows(samples, EXEC, "E", size, ratios)))
            budgets += _budgets(size, samples)
            if size == arguments.nodes[-1]:
                budgets.append(probe_budget(nodes, policy_data(f"{arguments.name}*")))
    return BenchmarkReport("Deploy", [*tables, ("Budgets", budget_rows(budgets))])


BENCHMARK = Benchmark(
    _measure, {"nodes": "64,256", "repeat": 2}, ("pyinfra", "paramiko"), has_ansible=True
)

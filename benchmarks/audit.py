"""`benchmarks/run audit`: an audit of every node, beside other ways to ask them something.

In one run, on the same nodes: `nodeready audit`, the same facts fetched one by one with pyinfra,
one `true` by pyinfra (the yardstick E), pdsh and clush, and Ansible's setup module.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.command import Benchmark
from benchmarks.contenders import (
    AUDIT,
    BIN,
    EXEC,
    PROBE,
    BenchmarkReport,
    Budget,
    Cluster,
    Contender,
    ansible_setup,
    audit,
    budget_rows,
    clush,
    cluster,
    in_turns,
    median,
    probe,
    probe_budget,
    run_budgets,
    sample_rows,
    say,
    yardstick,
)
from nodeready.core.policy import Policy
from nodeready.subjects.registry import LOOKED_AT


def contenders(nodes: Cluster, ansible: Path | None) -> list[Contender]:
    """All contenders; each exits with its own status for "all nodes answered"."""
    inventory = nodes.pyinfra_inventory("inventory", {})
    names, login = ",".join(node.name for node in nodes.lab.nodes), f"-F {nodes.lab.ssh_config}"
    classes = ["".join(word.capitalize() for word in name.split("_")) for name in LOOKED_AT]
    facts = [f"nodeready.facts.{name}" for name in classes]
    pdsh = ["pdsh", "-R", "ssh", "-S", "-f", str(nodes.size), "-w", names, "true"]
    return [
        yardstick(inventory),
        Contender("pdsh true", pdsh, environment={"PDSH_SSH_ARGS_APPEND": login}),
        clush("clush true", login, names, nodes.size),
        probe(inventory, Policy()),
        audit(AUDIT, inventory),
        Contender(
            "pyinfra fact, one by one", [str(BIN / "pyinfra"), str(inventory), "fact", *facts]
        ),
        *ansible_setup(nodes, ansible),
    ]


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    tables, budgets = [], list[Budget]()
    for size in arguments.nodes:
        say(f"{size} nodes")
        with cluster(size, arguments.name) as nodes:
            chosen = contenders(nodes, arguments.ansible)
            samples = in_turns(nodes, chosen, arguments.repeat)
            probe_s = median(samples[PROBE]).wall_s
            ratios = {name: median(runs).wall_s / probe_s for name, runs in samples.items()}
            rows = sample_rows(samples, EXEC, "E", size, ("÷ probe", ratios))
            tables.append((f"Audit, {size} nodes", rows))
            budgets += run_budgets(f"{size} nodes", samples, AUDIT, size, 50)
            if size == arguments.nodes[-1]:
                budgets.append(probe_budget(nodes, {}))
    return BenchmarkReport("Audit", [*tables, ("Audit's budgets", budget_rows(budgets))])


BENCHMARK = Benchmark(
    _measure,
    {"nodes": "64,256", "repeat": 3},
    ("pyinfra", "paramiko", "ClusterShell"),
    has_ansible=True,
)

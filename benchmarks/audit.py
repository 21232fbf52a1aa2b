"""`benchmarks/run audit`: an audit of every node, beside other ways to ask them something.

In one run, on the same nodes: `nodeready audit`, the same facts fetched one by one with pyinfra,
one `true` by pyinfra (the yardstick E), pdsh and clush, and Ansible's setup module.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import contenders
from benchmarks.command import Benchmark, BenchmarkReport, Budget, budget_rows, say
from benchmarks.contenders import AUDIT, BIN, EXEC, PROBE, Cluster, Contender
from nodeready.core.policy import Policy
from nodeready.subjects.registry import LOOKED_AT


def _contenders(nodes: Cluster, ansible: Path | None) -> list[Contender]:
    """All contenders; each exits with its own status for "all nodes answered"."""
    inventory = nodes.pyinfra_inventory("inventory", {})
    names, login = ",".join(node.name for node in nodes.lab.nodes), f"-F {nodes.lab.ssh_config}"
    classes = ["".join(word.capitalize() for word in name.split("_")) for name in LOOKED_AT]
    facts = [f"nodeready.facts.{name}" for name in classes]
    pdsh = ["pdsh", "-R", "ssh", "-S", "-f", str(nodes.size), "-w", names, "true"]
    return [
        contenders.yardstick(inventory),
        Contender("pdsh true", pdsh, environment={"PDSH_SSH_ARGS_APPEND": login}),
        contenders.clush("clush true", login, names, nodes.size),
        contenders.probe(inventory, Policy()),
        contenders.audit(AUDIT, inventory),
        Contender("pyinfra fact, one by one", [BIN / "pyinfra", inventory, "fact", *facts]),
        *contenders.ansible_setup(nodes, ansible),
    ]


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    tables, budgets = [], list[Budget]()
    for size in arguments.nodes:
        say(f"{size} nodes")
        with contenders.cluster(size, arguments.name) as nodes:
            chosen = _contenders(nodes, arguments.ansible)
            samples = contenders.in_turns(nodes, chosen, arguments.repeat)
            ratios = {name: samples.ratio(name, PROBE) for name in samples}
            rows = contenders.sample_rows(samples, EXEC, "E", size, ("÷ probe", ratios))
            tables.append((f"Audit, {size} nodes", rows))
            budgets += contenders.run_budgets(f"{size} nodes", samples, AUDIT, size, 50)
            if size == arguments.nodes[-1]:
                budgets.append(contenders.probe_budget(nodes, {}))
    return BenchmarkReport("Audit", [*tables, ("Audit's budgets", budget_rows(budgets))])


BENCHMARK = Benchmark(
    _measure,
    {"nodes": "64,256", "repeat": 3},
    ("pyinfra", "paramiko", "ClusterShell"),
    has_ansible=True,
)

"""`benchmarks/run audit`: an audit of every node, beside other ways to ask them something.

In one run, on the same nodes: `nodeready audit`, the same facts fetched one by one with pyinfra,
one `true` by pyinfra (the yardstick E), pdsh and clush, and Ansible's setup module.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.command import Benchmark
from benchmarks.contenders import (
    AUDIT,
    BIN,
    EXEC,
    BenchmarkReport,
    Budget,
    Cluster,
    Contender,
    Sample,
    ansible_setup,
    audit,
    budget_rows,
    clush,
    cluster,
    in_turns,
    median,
    probe,
    probe_budgets,
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


def _budgets(size: int, samples: Mapping[str, Sequence[Sample]]) -> list[Budget]:
    """The limits that the design sets."""
    audit_sample, case = median(samples[AUDIT]), f"audit, {size} nodes"
    return [
        Budget(f"{case}: wall ÷ E", 1.3, audit_sample.wall_s / median(samples[EXEC]).wall_s),
        Budget(f"{case}: commands per node", 1, audit_sample.sessions),
        Budget(f"{case}: CPU per node", 25, audit_sample.cpu_s / size * 1000, " ms"),
    ]


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    tables = []
    budgets: dict[int, list[Budget]] = {}
    of_probe: list[Budget] = []
    for size in arguments.nodes:
        say(f"{size} nodes")
        with cluster(size, arguments.name) as nodes:
            chosen = contenders(nodes, arguments.ansible)
            samples = in_turns(nodes, chosen, arguments.repeat)
            tables.append((f"Audit, {size} nodes", sample_rows(samples, EXEC, "E", size)))
            budgets[size] = _budgets(size, samples)
            if size == arguments.nodes[-1]:
                of_probe = probe_budgets(nodes, {})
    # The design's limits are for 64 nodes.
    limits = budgets.get(64) or budgets[max(budgets)]
    rows = budget_rows([*limits, *of_probe])
    return BenchmarkReport("Audit", [*tables, ("Audit's budgets", rows)])


BENCHMARK = Benchmark(
    _measure,
    {"nodes": "16,64,256", "repeat": 3},
    ("pyinfra", "paramiko", "ClusterShell"),
    has_ansible=True,
)

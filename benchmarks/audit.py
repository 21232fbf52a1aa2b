"""`benchmarks/run audit`: one look at every node, beside other ways to ask them something.

In one run, on the same nodes: `nodeready audit`, the same facts fetched one by one with pyinfra,
one `true` by pyinfra (the yardstick E), pdsh and clush, and Ansible's setup module. Then 10,000
simulated answers, as in `benchmarks/run simulated`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import command, report, table
from benchmarks.cluster import Cluster, cluster
from benchmarks.contenders import (
    BIN,
    EXEC,
    LOOK,
    Contender,
    ansible_setup,
    look,
    yardstick,
)
from benchmarks.measure import Sample, median
from benchmarks.probe_cost import ProbeCost, probe_cost
from benchmarks.simulated import HEAD, Simulated, simulate
from nodeready.policy import Policy
from nodeready.subjects.registry import LOOKED_AT

AUDIT, FACTS = "nodeready audit", "pyinfra fact, one by one"
PDSH, CLUSH, SETUP = "pdsh true", "clush true", "Ansible setup"
ORDER = (EXEC, PDSH, CLUSH, LOOK, AUDIT, FACTS, SETUP)


def contenders(nodes: Cluster, ansible: Path | None) -> list[Contender]:
    """All of them; each exits with its own word for "all nodes answered"."""
    inventory = nodes.pyinfra_inventory("inventory", {})
    names = ",".join(node.name for node in nodes.lab.nodes)
    fan, login = str(nodes.size), f"-F {nodes.lab.ssh_config}"
    classes = ["".join(word.capitalize() for word in name.split("_")) for name in LOOKED_AT]
    facts = [f"nodeready.deploy.pyinfra.{name}" for name in classes]
    found = [
        yardstick(inventory),
        Contender(
            PDSH,
            ["pdsh", "-R", "ssh", "-S", "-f", fan, "-w", names, "true"],
            "",
            environment={"PDSH_SSH_ARGS_APPEND": login},
        ),
        Contender(
            CLUSH, [str(BIN / "clush"), "-S", "-f", fan, "-o", login, "-w", names, "true"], ""
        ),
        look(inventory, Policy()),
        Contender(AUDIT, [str(BIN / "nodeready"), "audit", str(inventory)], "", (0, 3)),
        Contender(FACTS, [str(BIN / "pyinfra"), str(inventory), "fact", *facts], ""),
    ]
    if ansible is not None:
        names_file = nodes.ansible_inventory({})
        found.append(ansible_setup(names_file, ansible, nodes.size, nodes.directory))
    return found


@dataclass
class Report:
    """Medians by cluster size and contender, how many runs they are of, and the rest."""

    sizes: dict[int, dict[str, Sample]] = field(default_factory=dict)
    runs: dict[int, dict[str, int]] = field(default_factory=dict)
    probe: ProbeCost | None = None
    simulated: list[Simulated] = field(default_factory=list)
    command: str = ""
    about: str = ""

    def rows(self, size: int) -> list[tuple[str, ...]]:
        """The table of one cluster size. Its first row is the head."""
        found, runs = self.sizes[size], self.runs[size]
        unit = found[EXEC].wall_s
        head = ("", "runs", "wall", "÷ E", "CPU", "CPU/node", "commands", "logins")
        return [
            head,
            *(
                (
                    name,
                    str(runs[name]),
                    f"{found[name].wall_s:.2f} s",
                    f"{found[name].wall_s / unit:.2f}",
                    f"{found[name].cpu_s:.2f} s",
                    f"{found[name].cpu_s / size * 1000:.0f} ms",
                    f"{found[name].sessions:.4g}",
                    f"{found[name].logins:.4g}",
                )
                for name in ORDER
                if name in found
            ),
        ]

    def simulated_rows(self) -> list[tuple[str, ...]]:
        """What the simulated answers cost."""
        return [HEAD, *(one.row() for one in self.simulated)]

    def budget_rows(self) -> list[tuple[str, ...]]:
        """The limits that the design sets, on 64 nodes where they were measured."""
        size = 64 if 64 in self.sizes else max(self.sizes)
        found = self.sizes[size]
        unit, ours = found[EXEC].wall_s, found[AUDIT]
        budgets = [
            report.Budget(f"audit, {size} nodes: wall ÷ E", 1.3, ours.wall_s / unit),
            report.Budget(f"audit, {size} nodes: commands per node", 1, ours.sessions),
            report.Budget(
                f"audit, {size} nodes: CPU per node", 25, ours.cpu_s / size * 1000, " ms"
            ),
        ]
        if self.probe:
            cpu = self.probe.cpu_s * 1000
            budgets += [
                report.Budget("one look: processes started", 48, self.probe.processes),
                report.Budget("one look beyond `true`, a node: CPU", 54, cpu, " ms"),
            ]
        for one in self.simulated:
            budgets += one.budgets()
        return [("", "budget", "measured", ""), *(budget.row() for budget in budgets)]

    def text(self) -> str:
        """For a terminal."""
        parts = [f"{size} nodes\n{table.aligned(self.rows(size))}" for size in self.sizes]
        rest = [table.aligned(self.simulated_rows()), table.aligned(self.budget_rows())]
        return "\n\n".join([*parts, *rest, self.about])

    def markdown(self) -> str:
        """For docs/benchmarks.md."""
        parts = [f"## Audit\n\n```\n{self.command}\n```\n\n{textwrap.fill(self.about, 98)}"]
        parts += [
            f"### Audit, {size} nodes\n\n{table.markdown(self.rows(size))}" for size in self.sizes
        ]
        parts.append(f"### Simulated answers\n\n{table.markdown(self.simulated_rows())}")
        parts.append(f"### Audit's budgets\n\n{table.markdown(self.budget_rows())}")
        return "\n\n".join(parts)


def say(text: str) -> None:
    """Progress, beside the result."""
    print(text, file=sys.stderr, flush=True)


def measure(sizes: list[int], turns: int, ansible: Path | None, name: str) -> Report:
    """Run everything, one cluster after the other, the contenders in turns."""
    made = Report()
    for size in sizes:
        with (
            tempfile.TemporaryDirectory(prefix="nr-bench-") as scratch,
            cluster(size, Path(scratch), name) as nodes,
        ):
            say(f"{size} nodes")
            samples: dict[str, list[Sample]] = {}
            for turn in range(turns):
                for contender in contenders(nodes, ansible if turn == 0 else None):
                    sample = contender.run(nodes)
                    samples.setdefault(contender.name, []).append(sample)
                    say(f"  {contender.name}: {sample.wall_s:.2f} s, CPU {sample.cpu_s:.2f} s")
            made.sizes[size] = {key: median(found) for key, found in samples.items()}
            made.runs[size] = {key: len(found) for key, found in samples.items()}
            if size == sizes[-1]:
                made.probe = probe_cost(nodes.lab, Policy())
    return made


def _measure(given: argparse.Namespace, ansible: Path | None) -> Report:
    made = measure(given.nodes, given.repeat, ansible, given.name)
    made.simulated = [
        one
        for profile in ("cpu", "h100")
        for one in simulate(profile, given.simulated, given.name)
    ]
    return made


def main() -> int:
    """The command."""
    parser = command.options("audit", __doc__, "16,64,256", 3)
    parser.add_argument("--simulated", type=int, default=10_000, metavar="N")
    return command.main("audit", parser, _measure, ("pyinfra", "paramiko", "ClusterShell"))


if __name__ == "__main__":
    sys.exit(main())

"""`benchmarks/run deploy`: the first deploy, and the one that has nothing to do.

In one run, on the same nodes: `nodeready deploy`, `pyinfra … deploy.py`, the same settings as
pyinfra's own operations and as an Ansible playbook, and the yardstick E, `pyinfra … exec -- true`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import command, report
from benchmarks.cluster import Cluster, cluster
from benchmarks.contenders import (
    ANSIBLE,
    NODEREADY,
    PYINFRA,
    Contender,
    contenders,
    look,
    yardstick,
)
from benchmarks.measure import Sample, median, run
from benchmarks.probe_cost import probe_cost
from benchmarks.settings import policy_data
from nodeready.policy import Policy

#: A run of seconds is repeated for each fresh cluster, in turns with the yardstick: what else the
#: machine does then hits both. Slower ones run once.
TURNS = 3


class Benchmark:
    """All samples of one cluster size, by (contender, phase)."""

    def __init__(self, nodes: Cluster, ansible_commands: Path | None) -> None:
        self.cluster = nodes
        self.samples: dict[tuple[str, str], list[Sample]] = {}
        self.contenders = contenders(nodes, ansible_commands)
        data = policy_data(f"{nodes.lab.name}*")
        inventory = nodes.pyinfra_inventory("inventory", data)
        self.yardstick = yardstick(inventory)
        self.look = look(inventory, Policy(**data))

    def _run(self, contender: Contender, phase: str) -> None:
        def accept(status: int, output: str) -> bool:
            nothing = contender.did_nothing(output)
            right = nothing if phase == report.NOTHING else not nothing
            return status in contender.good and (right or phase == report.RUN)

        sample = run(self.cluster, contender.argv, contender.environ(), accept, contender.cwd)
        self.samples.setdefault((contender.name, phase), []).append(sample)
        say(f"{contender.name}, {phase}: {sample.wall_s:.2f} s, CPU {sample.cpu_s:.2f} s")

    def round(self, slow: bool) -> None:
        """Each contender on fresh nodes: a first deploy, then nothing to do.

        slow: Ansible takes part
        """
        for contender in self.contenders:
            if contender.name == ANSIBLE and not slow:
                continue
            self.cluster.reset()
            self._run(contender, report.FIRST)
            turns = TURNS if contender.name in (NODEREADY, PYINFRA) else 1
            for _ in range(turns):
                self._run(self.yardstick, report.RUN)
                if contender.name == NODEREADY:
                    self._run(self.look, report.RUN)
                self._run(contender, report.NOTHING)

    def medians(self) -> dict[tuple[str, str], Sample]:
        """The median sample of each (contender, phase)."""
        return {key: median(samples) for key, samples in self.samples.items()}


def say(text: str) -> None:
    """Progress, beside the result."""
    print(f"  {text}", file=sys.stderr, flush=True)


def measure(
    sizes: list[int],
    rounds: int,
    ansible_commands: Path | None,
    name: str,
    note: Callable[[str], None],
) -> report.Report:
    """Run everything, one cluster after the other."""
    made = report.Report()
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="nr-bench-") as scratch:
            note(f"{size} nodes")
            with cluster(size, Path(scratch), name) as nodes:
                benchmark = Benchmark(nodes, ansible_commands)
                for number in range(rounds):
                    benchmark.round(slow=number == 0)
                made.sizes[size] = benchmark.medians()
                made.runs[size] = {key: len(found) for key, found in benchmark.samples.items()}
                if size == sizes[-1]:
                    made.probe = probe_cost(nodes.lab, Policy(**policy_data(f"{name}*")))
    return made


def _measure(given: argparse.Namespace, ansible: Path | None) -> report.Report:
    return measure(
        given.nodes,
        given.repeat,
        ansible,
        given.name,
        lambda text: print(text, file=sys.stderr),
    )


def main() -> int:
    """The command."""
    parser = command.options("deploy", __doc__, "16,64", 2)
    return command.main("deploy", parser, _measure, ("pyinfra", "paramiko"))


if __name__ == "__main__":
    sys.exit(main())

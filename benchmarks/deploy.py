"""`benchmarks/run deploy`: the first deploy, and the one that has nothing to do.

In one run, on the same nodes: `nodeready deploy`, `pyinfra … deploy.py`, the same settings as
pyinfra's own operations and as an Ansible playbook, and the yardstick E, `pyinfra … exec -- true`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import machine, report, table
from benchmarks.cluster import Cluster, cluster
from benchmarks.contenders import (
    ROOT,
    Contender,
    ansible_environment,
    ansible_version,
    contenders,
    look,
    yardstick,
)
from benchmarks.measure import BenchmarkError, Sample, median, run
from benchmarks.probe_cost import probe_cost
from benchmarks.settings import policy_data
from nodeready.lab import LabError
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
            if contender.name == report.ANSIBLE and not slow:
                continue
            self.cluster.reset()
            self._run(contender, report.FIRST)
            turns = TURNS if contender.name in (report.NODEREADY, report.PYINFRA) else 1
            for _ in range(turns):
                self._run(self.yardstick, report.RUN)
                if contender.name == report.NODEREADY:
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
                    node = nodes.lab.nodes[0]
                    made.probe = probe_cost(node, Policy(**policy_data(f"{name}*")))
    return made


def _sizes(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def main() -> int:
    """The command. Exit status 1 when a run did not do what is measured."""
    parser = argparse.ArgumentParser(prog="benchmarks/run deploy", description=__doc__)
    parser.add_argument("--nodes", type=_sizes, default=[16, 64], metavar="N,…")
    parser.add_argument("--repeat", type=int, default=2, help="rounds on fresh nodes (default 2)")
    parser.add_argument("--without-ansible", action="store_true")
    parser.add_argument("--name", default="bench", help="of the lab (default bench)")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--note", default="", help="a sentence about this run, for the document")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("benchmarks: the lab makes network namespaces: run as root", file=sys.stderr)
        return 2
    commands = None if options.without_ansible else ansible_environment()
    # So that the lab goes away then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load, started = os.getloadavg()[0], time.monotonic()
    try:
        result = measure(
            options.nodes,
            options.repeat,
            commands,
            options.name,
            lambda text: print(text, file=sys.stderr),
        )
    except (BenchmarkError, LabError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    names = machine.versions("pyinfra", "paramiko")
    if commands:
        names += f", {ansible_version(commands)}"
    result.command = "benchmarks/run deploy --nodes " + ",".join(map(str, options.nodes))
    result.command += f" --repeat {options.repeat}"
    result.command += " --without-ansible" if options.without_ansible else ""
    result.about = (
        f"{machine.today()}; {machine.describe()}; {names}, {machine.sshd()}. "
        f"Load average before the run {load:.1f}; the run took "
        f"{(time.monotonic() - started) / 60:.0f} minutes. {options.note}"
    ).rstrip()
    print(result.text())
    options.output.parent.mkdir(parents=True, exist_ok=True)
    table.replace(options.output, "deploy", result.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())

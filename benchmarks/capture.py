"""`benchmarks/run capture`: the stacks of all ranks, beside py-spy by hand for one rank per node.

In one run, on the same nodes with four ranks each: `nodeready stacks`, `py-spy dump` of one rank
and of all four by pyinfra, and one `true` by pyinfra (the yardstick E). The ranks are Pythons that
sleep twenty calls deep. Then, on one node: what py-spy costs there, on such a rank and on one that
has torch loaded.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import command, report, table
from benchmarks.cluster import Cluster, cluster
from benchmarks.contenders import BIN, EXEC, Contender, yardstick
from benchmarks.measure import BenchmarkError, Sample, median, run
from nodeready.deploy import py_spy_binary
from nodeready.lab import Node
from nodeready.policy import Policy

RANKS = 4
ONE, ALL = "py-spy dump, one rank per node (Y)", "py-spy dump, all ranks"
ONCE, STACKS = "nodeready stacks --samples 1", "nodeready stacks"
ORDER = (EXEC, ONE, ALL, ONCE, STACKS)

_SPY = "/usr/local/bin/py-spy"
# Argument 1: calls below the first one; argument 2: a module to have, "": none.
_RANK = """\
import importlib, os, sys, time
def layer(depth):
    if depth:
        layer(depth - 1)
    time.sleep(3600)
if sys.argv[2]:
    importlib.import_module(sys.argv[2])
with open("/run/up-" + os.environ["LOCAL_RANK"], "w") as file:
    file.write(str(os.getpid()))
layer(int(sys.argv[1]))
"""
# Leaves a rank running, and ends when it stands.
_START = """
rm -f "/run/up-$2"
RANK=$1 LOCAL_RANK=$2 WORLD_SIZE=$3 MASTER_ADDR=node001 MASTER_PORT=29500 \
    setsid /usr/bin/python3 /run/rank.py 20 "$4" </dev/null >/dev/null 2>&1 &
until [ -s "/run/up-$2" ]; do sleep 0.1; done
"""
_TORCH = Path("/usr/lib/python3/dist-packages/torch/__init__.py")
_MODES = ("--nonblocking", "", "--native")
# Runs on the node. Arguments: file of a pid, how many turns, options of py-spy.
_TURNS = """\
import json, resource, subprocess, sys, time
pid, turns, options = open(sys.argv[1]).read(), int(sys.argv[2]), sys.argv[3:]
walls = []
for turn in range(turns):
    began = time.monotonic()
    done = subprocess.run(["py-spy", "dump", "--pid", pid, *options], capture_output=True)
    walls.append(time.monotonic() - began)
    assert b"layer (" in done.stdout, done.stderr
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps([walls, peak]))
"""


@dataclass(frozen=True)
class Spy:
    """What `py-spy dump` costs on a node. first_s: the first time that it looked so."""

    options: str
    target: str
    first_s: float
    median_s: float
    peak_kb: int

    def row(self) -> tuple[str, ...]:
        name = " ".join(filter(None, ("py-spy dump", self.options)))
        times = [f"{seconds * 1000:.0f} ms" for seconds in (self.first_s, self.median_s)]
        return f"{name}, {self.target}", *times, f"{self.peak_kb / 1024:.0f} MiB"


@dataclass
class Report:
    """Medians by cluster size and contender, how many runs they are of, and py-spy's own costs."""

    turns: int
    sizes: dict[int, dict[str, Sample]] = field(default_factory=dict)
    spies: list[Spy] = field(default_factory=list)
    command: str = ""
    about: str = ""

    def rows(self, size: int) -> list[tuple[str, ...]]:
        """The table of one cluster size. Its first row is the head."""
        found = self.sizes[size]
        return [
            ("", "runs", "wall", "÷ Y", "CPU", "CPU/node", "commands", "logins"),
            *(
                (
                    name,
                    str(self.turns),
                    f"{found[name].wall_s:.2f} s",
                    f"{found[name].wall_s / found[ONE].wall_s:.2f}",
                    f"{found[name].cpu_s:.2f} s",
                    f"{found[name].cpu_s / size * 1000:.0f} ms",
                    f"{found[name].sessions:.4g}",
                    f"{found[name].logins:.4g}",
                )
                for name in ORDER
            ),
        ]

    def budget_rows(self) -> list[tuple[str, ...]]:
        """The limits that the design sets, on the largest cluster."""
        size = max(self.sizes)
        found = self.sizes[size]
        budgets = [
            *(
                report.Budget(
                    f"`{name}`, {size} nodes: wall ÷ Y", 3, found[name].wall_s / found[ONE].wall_s
                )
                for name in (ONCE, STACKS)
            ),
            report.Budget(f"`{ONCE}`, {size} nodes: commands per node", 1, found[ONCE].sessions),
        ]
        return [("", "budget", "measured", ""), *(budget.row() for budget in budgets)]

    def spy_rows(self) -> list[tuple[str, ...]]:
        """What py-spy costs on a node."""
        return [("", "first", "median", "peak memory"), *(spy.row() for spy in self.spies)]

    def text(self) -> str:
        """For a terminal."""
        parts = [f"{size} nodes\n{table.aligned(self.rows(size))}" for size in self.sizes]
        rest = [table.aligned(rows) for rows in (self.spy_rows(), self.budget_rows())]
        return "\n\n".join([*parts, *rest, self.about])

    def markdown(self) -> str:
        """For docs/benchmarks.md."""
        parts = [f"## Stacks\n\n```\n{self.command}\n```\n\n{textwrap.fill(self.about, 98)}"]
        parts += [
            f"### Stacks, {size} nodes\n\n{table.markdown(self.rows(size))}" for size in self.sizes
        ]
        parts.append(f"### py-spy on a node\n\n{table.markdown(self.spy_rows())}")
        parts.append(f"### The stacks' budgets\n\n{table.markdown(self.budget_rows())}")
        return "\n\n".join(parts)


def _start(node: Node, rank: int, local: int, world: int, module: str = "") -> None:
    node.write("/run/rank.py", _RANK)
    node.enter(["sh", "-c", _START, "sh", str(rank), str(local), str(world), module])


def _contenders(nodes: Cluster) -> list[Contender]:
    inventory = nodes.pyinfra_inventory("inventory", {})
    by_hand = [str(BIN / "pyinfra"), str(inventory), "exec", "--"]
    stacks = [str(BIN / "nodeready"), "stacks", str(inventory)]
    every = f'for f in /run/up-*; do {_SPY} dump --pid "$(cat $f)" || exit; done'
    return [
        yardstick(inventory),
        Contender(ONE, [*by_hand, f'{_SPY} dump --pid "$(cat /run/up-0)"'], ""),
        Contender(ALL, [*by_hand, every], ""),
        Contender(ONCE, [*stacks, "--samples", "1"], ""),
        Contender(STACKS, stacks, ""),
    ]


def _costs(node: Node, turns: int) -> list[Spy]:
    """py-spy's own, on the node's first rank and on one with torch where this machine has it."""
    targets = [("a plain Python", 0)]
    if _TORCH.exists():
        _start(node, RANKS, RANKS, RANKS + 1, "torch.distributed")
        targets.append(("torch loaded", RANKS))
    found = []
    for target, local in targets:
        for options in _MODES:
            words = [f"/run/up-{local}", str(turns), *options.split()]
            done = node.enter(["python3", "-c", _TURNS, *words], timeout=60 * turns)
            walls, peak = json.loads(done.stdout)
            found.append(Spy(options, target, walls[0], statistics.median(walls[1:]), peak))
    return found


def _run(nodes: Cluster, contender: Contender) -> Sample:
    """Raises BenchmarkError unless it showed a stack, where it should."""
    return run(
        nodes,
        contender.argv,
        contender.environ(),
        lambda status, output: status == 0 and (contender.name == EXEC or "layer" in output),
        contender.cwd,
    )


def _measure(given: argparse.Namespace, ansible: Path | None) -> Report:
    if given.repeat < 2:
        raise BenchmarkError("--repeat: at least 2, the first run of py-spy is told apart")
    made = Report(given.repeat)
    program = py_spy_binary.binary(Policy().py_spy_version, platform.machine())
    for size in given.nodes:
        with (
            tempfile.TemporaryDirectory(prefix="nr-bench-") as scratch,
            cluster(size, Path(scratch), given.name) as nodes,
        ):
            for number, node in enumerate(nodes.lab.nodes):
                node.write(_SPY, program, 0o755)
                for local in range(RANKS):
                    _start(node, RANKS * number + local, local, RANKS * size)
            samples: dict[str, list[Sample]] = {}
            for _ in range(given.repeat):
                for contender in _contenders(nodes):
                    sample = _run(nodes, contender)
                    samples.setdefault(contender.name, []).append(sample)
                    print(f"  {contender.name}: {sample.wall_s:.2f} s", file=sys.stderr)
            made.sizes[size] = {name: median(found) for name, found in samples.items()}
            if size == given.nodes[-1]:
                made.spies = _costs(nodes.lab.nodes[0], given.repeat)
    return made


def main() -> int:
    """The command."""
    parser = command.options("capture", __doc__, "16", 5)
    parser.set_defaults(without_ansible=True)
    return command.main("capture", parser, _measure, ("pyinfra", "paramiko", "py-spy"))


if __name__ == "__main__":
    sys.exit(main())

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import command
from benchmarks.cluster import Cluster, cluster
from benchmarks.contenders import BIN, Contender, in_turns, pyinfra_exec, yardstick
from benchmarks.measure import BenchmarkError, Sample, median, sample_rows
from benchmarks.report import BenchmarkReport, Budget, budget_rows
from nodeready.core.policy import Policy
from nodeready.lab import LabNode
from nodeready.runs.deploy import py_spy_binary

RANKS = 4
ONE = "py-spy dump, one rank per node (Y)"
ONCE, STACKS = "nodeready stacks --samples 1", "nodeready stacks"

_PY_SPY = "/usr/local/bin/py-spy"
# Argument 1: depth of the stack; argument 2: a module to import, or "".
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
# Starts a rank, and ends when the rank has written its pid.
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
class PySpyCost:
    """The cost of `py-spy dump` on a node. first_s: of the first run with these options"""

    options: str
    target: str
    first_s: float
    median_s: float
    peak_kb: int

    def row(self) -> tuple[str, ...]:
        name = " ".join(filter(None, ("py-spy dump", self.options)))
        times = [f"{seconds * 1000:.0f} ms" for seconds in (self.first_s, self.median_s)]
        return f"{name}, {self.target}", *times, f"{self.peak_kb / 1024:.0f} MiB"


def _start(node: LabNode, rank: int, local: int, world: int, module: str = "") -> None:
    node.write("/run/rank.py", _RANK)
    node.enter(["sh", "-c", _START, "sh", str(rank), str(local), str(world), module])


def _contenders(nodes: Cluster) -> list[Contender]:
    """All contenders; all but the yardstick must show a stack."""
    inventory = nodes.pyinfra_inventory("inventory", {})
    argv = [str(BIN / "nodeready"), "stacks", str(inventory)]
    every = f'for f in /run/up-*; do {_PY_SPY} dump --pid "$(cat $f)" || exit; done'
    return [
        yardstick(inventory),
        pyinfra_exec(ONE, inventory, f'{_PY_SPY} dump --pid "$(cat /run/up-0)"', "layer"),
        pyinfra_exec("py-spy dump, all ranks", inventory, every, "layer"),
        Contender(ONCE, [*argv, "--samples", "1"], "layer"),
        Contender(STACKS, argv, "layer"),
    ]


def _costs(node: LabNode, turns: int) -> list[PySpyCost]:
    """py-spy's costs for the node's first rank, and for a rank with torch if it is installed."""
    targets = [("a plain Python", 0)]
    if _TORCH.exists():
        _start(node, RANKS, RANKS, RANKS + 1, "torch.distributed")
        targets.append(("torch loaded", RANKS))
    costs = []
    for target, local in targets:
        for options in _MODES:
            words = [f"/run/up-{local}", str(turns), *options.split()]
            done = node.enter(["python3", "-c", _TURNS, *words], timeout=60 * turns)
            walls, peak = json.loads(done.stdout)
            median_s = statistics.median(walls[1:])
            costs.append(PySpyCost(options, target, walls[0], median_s, peak))
    return costs


def _budgets(size: int, samples: Mapping[str, Sequence[Sample]]) -> list[Budget]:
    """The limits that the design sets."""
    one_s = median(samples[ONE]).wall_s
    once, stacks = median(samples[ONCE]), median(samples[STACKS])
    return [
        Budget(f"`{ONCE}`, {size} nodes: wall ÷ Y", 3, once.wall_s / one_s),
        Budget(f"`{STACKS}`, {size} nodes: wall ÷ Y", 3, stacks.wall_s / one_s),
        Budget(f"`{ONCE}`, {size} nodes: commands per node", 1, once.sessions),
    ]


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    if arguments.repeat < 2:
        raise BenchmarkError(
            "--repeat: at least 2, for the first run of py-spy has its own column"
        )
    tables, budgets, costs = [], [], []
    program = py_spy_binary.binary(Policy().py_spy_version, platform.machine())
    for size in arguments.nodes:
        with cluster(size, arguments.name) as nodes:
            for number, node in enumerate(nodes.lab.nodes):
                node.write(_PY_SPY, program, 0o755)
                for local in range(RANKS):
                    _start(node, RANKS * number + local, local, RANKS * size)
            samples = in_turns(nodes, _contenders(nodes), arguments.repeat)
            tables.append((f"Stacks, {size} nodes", sample_rows(samples, ONE, "Y", size)))
            budgets = _budgets(size, samples)
            if size == arguments.nodes[-1]:
                costs = _costs(nodes.lab.nodes[0], arguments.repeat)
    head = ("", "first", "median", "peak memory")
    tables += [
        ("py-spy on a node", [head, *(cost.row() for cost in costs)]),
        ("The stacks' budgets", budget_rows(budgets)),
    ]
    return BenchmarkReport("Stacks", tables)


def main() -> int:
    parser = command.options("capture", __doc__, nodes="16", repeat=5)
    return command.main("capture", parser, _measure, ("pyinfra", "paramiko", "py-spy"))


if __name__ == "__main__":
    sys.exit(main())

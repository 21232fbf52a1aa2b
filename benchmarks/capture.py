"""`benchmarks/run capture`: the stacks of all ranks, beside py-spy by hand for one rank per node.

In one run, on the same nodes with four ranks each: `nodeready stacks`, `py-spy dump` of one rank
and of all four by pyinfra, and one `true` by pyinfra (the yardstick E). The ranks are Pythons that
sleep twenty calls deep.
"""

from __future__ import annotations

import argparse
import platform

from benchmarks import contenders
from benchmarks.command import Benchmark, BenchmarkReport, Budget, budget_rows
from benchmarks.contenders import BIN, Cluster, Contender
from nodeready.core.policy import Policy
from nodeready.runs.deploy import py_spy_binary

RANKS = 4
ONE = "py-spy dump, one rank per node (Y)"
ONCE, STACKS = "nodeready stacks --samples 1", "nodeready stacks"

_PY_SPY = "/usr/local/bin/py-spy"
_RANK = """\
import os, time
def layer(depth):
    if depth:
        layer(depth - 1)
    time.sleep(3600)
with open("/run/up-" + os.environ["LOCAL_RANK"], "w") as file:
    file.write(str(os.getpid()))
layer(20)
"""
# Starts a rank, and ends when the rank has written its pid.
_START = """
rm -f "/run/up-$2"
RANK=$1 LOCAL_RANK=$2 WORLD_SIZE=$3 MASTER_ADDR=node001 MASTER_PORT=29500 \
    setsid /usr/bin/python3 /run/rank.py </dev/null >/dev/null 2>&1 &
until [ -s "/run/up-$2" ]; do sleep 0.1; done
"""


def _contenders(nodes: Cluster) -> list[Contender]:
    """All contenders; all but the yardstick must show a stack."""
    inventory = nodes.pyinfra_inventory("inventory", {})
    argv = [str(BIN / "nodeready"), "stacks", str(inventory)]
    first = f'{_PY_SPY} dump --pid "$(cat /run/up-0)"'
    every = f'for f in /run/up-*; do {_PY_SPY} dump --pid "$(cat $f)" || exit; done'
    return [
        contenders.yardstick(inventory),
        contenders.pyinfra_exec(ONE, inventory, first, "layer"),
        contenders.pyinfra_exec("py-spy dump, all ranks", inventory, every, "layer"),
        Contender(ONCE, [*argv, "--samples", "1"], "layer"),
        Contender(STACKS, argv, "layer"),
    ]


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    tables, budgets = [], []
    program = py_spy_binary.binary(Policy().py_spy_version, platform.machine())
    for size in arguments.nodes:
        with contenders.cluster(size, arguments.name) as nodes:
            for number, node in enumerate(nodes.lab.nodes):
                node.write(_PY_SPY, program, 0o755)
                node.write("/run/rank.py", _RANK)
                for local in range(RANKS):
                    numbers = RANKS * number + local, local, RANKS * size
                    node.enter(["sh", "-c", _START, "sh", *map(str, numbers)])
            samples = contenders.in_turns(nodes, _contenders(nodes), arguments.repeat)
            rows = contenders.sample_rows(samples, ONE, "Y", size)
            tables.append((f"Stacks, {size} nodes", rows))
            sessions, names = samples.median(ONCE).sessions, (ONCE, STACKS)
            budgets = [
                *(
                    Budget(f"`{n}`, {size} nodes: wall ÷ Y", 3, samples.ratio(n, ONE))
                    for n in names
                ),
                Budget(f"`{ONCE}`, {size} nodes: commands per node", 1, sessions),
            ]
    return BenchmarkReport("Stacks", [*tables, ("The stacks' budgets", budget_rows(budgets))])


BENCHMARK = Benchmark(_measure, {"nodes": "16", "repeat": 5}, ("pyinfra", "paramiko", "py-spy"))

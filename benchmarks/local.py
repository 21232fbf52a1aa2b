"""`benchmarks/run local`: the cost of the node's own program to the node, beside a bare Python.

On an idle node of the lab, without ssh, in turns: a Python that does nothing, the probe alone as
an audit from outside runs it, and the bundle's commands.
"""

from __future__ import annotations

import argparse
import json
import statistics

from benchmarks.command import Benchmark
from benchmarks.contenders import (
    BenchmarkError,
    BenchmarkReport,
    Budget,
    budget_rows,
    cluster,
    probe_command,
)
from nodeready.core.policy import Policy
from nodeready.fleet.transport import bundle
from nodeready.lab import LabNode

PYTHON, PROBE = "python3 -c pass (P)", "the probe alone"
AUDIT, COMPILED_AUDIT = "nodeready.pyz audit", "compiled.pyz audit"

_BUNDLE = "/usr/local/sbin/nodeready.pyz"
_COMPILED = "/usr/local/sbin/compiled.pyz"
# As a deploy compiles it there (nodeready/sh/compile.sh).
_COMPILE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from nodeready.agent.gate import main; "
    "main.compile_bundle(*sys.argv[1:])"
)
#: The script of the probe, on the node.
_SCRIPT = "/tmp/nodeready-benchmark-look"
# Runs on the node: argument 1 is the commands as JSON (name -> argv), argument 2 how many turns.
_TURNS = """\
import json, resource, subprocess, sys, time
def cpu():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
found = {}
for turn in range(int(sys.argv[2])):
    for name, argv in json.loads(sys.argv[1]).items():
        began, before = time.monotonic(), cpu()
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        cost = time.monotonic() - began, cpu() - before
        found.setdefault(name, []).append([*cost, done.returncode, done.stdout[-400:].decode()])
print(json.dumps(found))
"""


def _commands(probe: str) -> dict[str, list[str]]:
    """Each command's name and argv; `probe` is the command line that reads the probe's script."""
    compiled = ["python3", "-I", "-S", _COMPILED]
    return {
        PYTHON: ["python3", "-c", "pass"],
        PROBE: ["sh", "-c", f"{probe} <{_SCRIPT}"],
        AUDIT: ["python3", _BUNDLE, "audit"],
        "nodeready.pyz record": ["python3", _BUNDLE, "record"],
        "nodeready.pyz prolog": ["python3", _BUNDLE, "prolog"],
        COMPILED_AUDIT: [*compiled, "audit"],
        "compiled.pyz record": [*compiled, "record"],
        "compiled.pyz prolog": [*compiled, "prolog"],
        "nodeready.pyz ready": ["python3", _BUNDLE, "ready", "--user", "ml"],
    }


def _samples(node: LabNode, turns: int) -> dict[str, tuple[float, float]]:
    """The median wall and CPU seconds of each command. Raises BenchmarkError for another status.

    A fresh node is not ready: nodeready's commands say so with exit status 3.
    """
    node.write(_BUNDLE, bundle.build(), 0o755)
    node.enter(["python3", "-I", "-S", "-c", _COMPILE, _BUNDLE, _COMPILED, _COMPILED])
    line, stdin = probe_command(Policy())
    node.write(_SCRIPT, stdin)
    words = ["python3", "-c", _TURNS, json.dumps(_commands(line)), str(turns)]
    runs_by_name = json.loads(node.enter(words, timeout=60 + 30 * turns).stdout)
    samples = {}
    for name, runs in runs_by_name.items():
        expected = 0 if name in (PYTHON, PROBE) else 3
        for _, _, status, output in runs:
            if status != expected:
                raise BenchmarkError(f"{name}: exit {status}, not what is measured:\n{output}")
        walls, cpus, *_ = zip(*runs, strict=True)
        samples[name] = statistics.median(walls), statistics.median(cpus)
    return samples


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    tables, budgets = [], []
    for profile in ("cpu", "h100"):
        with cluster(1, arguments.name, profile=profile) as nodes:
            samples = _samples(nodes.lab.nodes[0], arguments.repeat)
        rows = [("", "runs", "wall", "÷ P", "CPU")]
        for name, (wall_s, cpu_s) in samples.items():
            ratio = wall_s / samples[PYTHON][0]
            times = f"{wall_s * 1000:.0f} ms", f"{ratio:.1f}", f"{cpu_s * 1000:.0f} ms"
            rows.append((name, str(arguments.repeat), *times))
        tables.append((f"On a node, profile {profile}", rows))
        if profile == "cpu":
            wall_s, ratio = samples[AUDIT][0], samples[COMPILED_AUDIT][0] / samples[AUDIT][0]
            budgets = [
                Budget("audit on an idle node: wall", 0.5, wall_s, " s"),
                Budget("the same, compiled: wall ÷ that", 0.5, ratio),
            ]
    return BenchmarkReport("On the node", [*tables, ("The node's budget", budget_rows(budgets))])


BENCHMARK = Benchmark(_measure, {"repeat": 21}, ("nodeready",))

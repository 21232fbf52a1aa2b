"""`benchmarks/run local`: the cost of the node's own program to the node, beside a bare Python.

On an idle node of the lab, without ssh, in turns: a Python that does nothing, the probe alone as
an audit from outside runs it, and the bundle's commands. Then each section of the probe alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping

from benchmarks import contenders
from benchmarks.command import Benchmark, BenchmarkError, BenchmarkReport, Budget, budget_rows
from nodeready.core.policy import Policy
from nodeready.fleet.transport import bundle
from nodeready.lab import LabNode
from nodeready.subjects import snapshot

PYTHON, PROBE = "python3 -c pass (P)", "the probe alone"
AUDIT, COMPILED_AUDIT = "nodeready.pyz audit", "compiled.pyz audit"
ALL = "all together"

_BUNDLE = "/usr/local/sbin/nodeready.pyz"
_COMPILED = "/usr/local/sbin/compiled.pyz"
# As a deploy compiles it there (nodeready/sh/compile.sh).
_COMPILE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from nodeready.agent.gate import main; "
    "main.compile_bundle(*sys.argv[1:])"
)
_SCRIPT = "/tmp/nodeready-benchmark-look"  # the script of the probe, on the node
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


def _samples(node: LabNode, turns: int) -> dict[str, tuple[float, float]]:
    """The median wall and CPU seconds of each command."""
    node.write(_BUNDLE, bundle.build(), 0o755)
    node.enter(["python3", "-I", "-S", "-c", _COMPILE, _BUNDLE, _COMPILED, _COMPILED])
    line, stdin = contenders.probe_command(Policy())
    node.write(_SCRIPT, stdin)
    commands = {PYTHON: ["python3", "-c", "pass"], PROBE: ["sh", "-c", f"{line} <{_SCRIPT}"]}
    compiled = ["python3", "-I", "-S", _COMPILED]
    for name, argv in (("nodeready.pyz", ["python3", _BUNDLE]), ("compiled.pyz", compiled)):
        commands |= {f"{name} {word}": [*argv, word] for word in ("audit", "record", "prolog")}
    commands["nodeready.pyz ready"] = ["python3", _BUNDLE, "ready", "--user", "ml"]
    return _in_turns(node, commands, turns)


def _in_turns(
    node: LabNode, commands: Mapping[str, list[str]], turns: int
) -> dict[str, tuple[float, float]]:
    """The median wall and CPU seconds of each command. Raises BenchmarkError for another status.

    A fresh node is not ready: nodeready's commands say so with exit status 3.
    """
    words = ["python3", "-c", _TURNS, json.dumps(commands), str(turns)]
    runs_by_name = json.loads(node.enter(words, timeout=60 + 30 * turns).stdout)
    samples = {}
    for name, runs in runs_by_name.items():
        expected = 3 if ".pyz " in name else 0
        for _, _, status, output in runs:
            if status != expected:
                raise BenchmarkError(f"{name}: exit {status}, not what is measured:\n{output}")
        walls, cpus, *_ = zip(*runs, strict=True)
        samples[name] = statistics.median(walls), statistics.median(cpus)
    return samples


def _section_rows(node: LabNode, turns: int) -> list[tuple[str, ...]]:
    """What each section costs alone, beyond a probe without sections; at last all together."""
    sections = snapshot.sections(snapshot.probes())
    # A policy can leave a section nothing to do.
    sections = tuple(s for s in sections if s.script(Policy()).strip() != ":")
    chosen = {"": (), **{section.name: (section,) for section in sections}, ALL: sections}
    probes = {n: contenders.probe_command(Policy(), sections=s) for n, s in chosen.items()}
    commands = {}
    for number, (name, command) in enumerate(probes.items()):
        file = f"{_SCRIPT}-{number}"
        node.write(file, command.stdin)
        commands[name] = ["sh", "-c", f"{command.line} <{file}"]
    samples = _in_turns(node, commands, turns)
    counts = {name: contenders.processes_of(node, command, 1) for name, command in probes.items()}
    rows = [
        (name, str(counts[name] - counts[""]), f"{(cpu_s - samples[''][1]) * 1000:.1f} ms")
        for name, (_, cpu_s) in samples.items()
    ]
    head = ("the probe without sections", str(counts[""]), f"{samples[''][1] * 1000:.1f} ms")
    return [("", "processes", "CPU"), head, *rows[1:]]


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    tables, budgets = [], []
    for profile in ("cpu", "h100"):
        with contenders.cluster(1, arguments.name, profile=profile) as nodes:
            samples = _samples(nodes.lab.nodes[0], arguments.repeat)
            sections = _section_rows(nodes.lab.nodes[0], arguments.repeat)
        rows: list[tuple[str, ...]] = [("", "runs", "wall", "÷ P", "CPU")]
        for name, (wall_s, cpu_s) in samples.items():
            ratio = wall_s / samples[PYTHON][0]
            times = f"{wall_s * 1000:.0f} ms", f"{ratio:.1f}", f"{cpu_s * 1000:.0f} ms"
            rows.append((name, str(arguments.repeat), *times))
        tables.append((f"On a node, profile {profile}", rows))
        tables.append((f"The probe's sections, profile {profile}", sections))
        if profile == "cpu":
            wall_s, ratio = samples[AUDIT][0], samples[COMPILED_AUDIT][0] / samples[AUDIT][0]
            budgets = [
                Budget("audit on an idle node: wall", 0.5, wall_s, " s"),
                Budget("the same, compiled: wall ÷ that", 0.5, ratio),
            ]
    return BenchmarkReport("On the node", [*tables, ("The node's budget", budget_rows(budgets))])


BENCHMARK = Benchmark(_measure, {"repeat": 21}, ("nodeready",))

"""`benchmarks/run local`: what the node's own program costs the node, beside a bare Python.

On an idle node of the lab, without ssh, in turns: a Python that does nothing, the look alone as
the audit from outside runs it, and the bundle's commands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import command, report, table
from benchmarks.measure import BenchmarkError
from nodeready import shell
from nodeready.lab import Lab, Node, down
from nodeready.policy import Policy
from nodeready.subjects import snapshot
from nodeready.subjects.snapshot import make_script
from nodeready.transport import bundle

PYTHON, LOOK = "python3 -c pass (P)", "the look alone"
AUDIT, RECORD = "nodeready.pyz audit", "nodeready.pyz record"
PROLOG, READY = "nodeready.pyz prolog", "nodeready.pyz ready"
COMPILED_AUDIT, COMPILED_RECORD = "compiled.pyz audit", "compiled.pyz record"
COMPILED_PROLOG = "compiled.pyz prolog"
PROFILES = ("cpu", "h100")

_PLACE = "/usr/local/sbin/nodeready.pyz"
_COMPILED = "/usr/local/sbin/compiled.pyz"
# As a deploy compiles it there (nodeready/sh/compile.sh).
_COMPILE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from nodeready.healthcheck import main; "
    "main.compile_bundle(*sys.argv[1:])"
)
#: What the look reads, on the node.
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


@dataclass(frozen=True)
class Cost:
    """Medians of one command on one node. cpu_s: user and system time of all its processes."""

    wall_s: float
    cpu_s: float


@dataclass
class Report:
    """Profile -> command -> its cost."""

    turns: int
    found: dict[str, dict[str, Cost]] = field(default_factory=dict)
    command: str = ""
    about: str = ""

    def rows(self, profile: str) -> list[tuple[str, ...]]:
        """The table of one kind of node. Its first row is the head."""
        found = self.found[profile]
        unit = found[PYTHON].wall_s
        return [
            ("", "runs", "wall", "÷ P", "CPU"),
            *(
                (
                    name,
                    str(self.turns),
                    f"{cost.wall_s * 1000:.0f} ms",
                    f"{cost.wall_s / unit:.1f}",
                    f"{cost.cpu_s * 1000:.0f} ms",
                )
                for name, cost in found.items()
            ),
        ]

    def budget_rows(self) -> list[tuple[str, ...]]:
        """The limit that the design sets."""
        costs = self.found["cpu"]
        wall = costs[AUDIT].wall_s
        ratio = costs[COMPILED_AUDIT].wall_s / wall
        return [
            ("", "budget", "measured", ""),
            report.Budget("audit on an idle node: wall", 0.5, wall, " s").row(),
            report.Budget("the same, compiled: wall ÷ that", 0.5, ratio).row(),
        ]

    def text(self) -> str:
        """For a terminal."""
        parts = [f"{profile}\n{table.aligned(self.rows(profile))}" for profile in self.found]
        return "\n\n".join([*parts, table.aligned(self.budget_rows()), self.about])

    def markdown(self) -> str:
        """For docs/benchmarks.md."""
        parts = [
            f"## On the node\n\n```\n{self.command}\n```\n\n{textwrap.fill(self.about, 98)}",
            *(
                f"### On a node, profile {profile}\n\n{table.markdown(self.rows(profile))}"
                for profile in self.found
            ),
            f"### The node's budget\n\n{table.markdown(self.budget_rows())}",
        ]
        return "\n\n".join(parts)


def _commands(look: str) -> dict[str, list[str]]:
    return {
        PYTHON: ["python3", "-c", "pass"],
        LOOK: ["sh", "-c", f"{look} <{_SCRIPT}"],
        AUDIT: ["python3", _PLACE, "audit"],
        RECORD: ["python3", _PLACE, "record"],
        PROLOG: ["python3", _PLACE, "prolog"],
        COMPILED_AUDIT: ["python3", "-I", "-S", _COMPILED, "audit"],
        COMPILED_RECORD: ["python3", "-I", "-S", _COMPILED, "record"],
        COMPILED_PROLOG: ["python3", "-I", "-S", _COMPILED, "prolog"],
        READY: ["python3", _PLACE, "ready", "--user", "ml"],
    }


def _costs(node: Node, turns: int) -> dict[str, Cost]:
    """Each command ``turns`` times, in turns. Raises BenchmarkError when one did not do its work.

    A fresh node is no ready one: all of them say so, with exit status 3.
    """
    node.write(_PLACE, bundle.build(), 0o755)
    node.enter(["python3", "-I", "-S", "-c", _COMPILE, _PLACE, _COMPILED, _COMPILED])
    script = make_script(snapshot.sections(snapshot.probes()), Policy(), "benchmark")
    look = shell.command(script, 60, "nodeready:benchmark")
    node.write(_SCRIPT, look.stdin)
    words = ["python3", "-c", _TURNS, json.dumps(_commands(look.line)), str(turns)]
    found = json.loads(node.enter(words, timeout=60 + 30 * turns).stdout)
    for name, runs in found.items():
        wanted = 0 if name in (PYTHON, LOOK) else 3
        for *_, status, said in runs:
            if status != wanted:
                raise BenchmarkError(f"{name}: exit {status}, not what is measured:\n{said}")
    return {
        name: Cost(*(statistics.median(column) for column in list(zip(*runs, strict=True))[:2]))
        for name, runs in found.items()
    }


def _measure(given: argparse.Namespace, ansible: Path | None) -> Report:
    made = Report(given.repeat)
    for profile in PROFILES:
        down(given.name)
        try:
            lab = Lab.up(given.name, nodes=1, profile=profile)
            made.found[profile] = _costs(lab.nodes[0], given.repeat)
        finally:
            down(given.name)
    return made


def main() -> int:
    """The command."""
    parser = command.options("local", __doc__, "1", 21)
    parser.set_defaults(without_ansible=True)
    return command.main("local", parser, _measure, ("nodeready",))


if __name__ == "__main__":
    sys.exit(main())

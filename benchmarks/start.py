"""`benchmarks/run start`: what commands import and how long they take before they do anything.

`--before DIR` measures another checkout, with a .venv of its own, in turns with this one.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine, table
from benchmarks.contenders import ROOT
from benchmarks.measure import BenchmarkError

_WRAP = 98
#: What is measured -> the words of the command line, and its environment.
COMMANDS: dict[str, tuple[list[str], dict[str, str]]] = {
    "nodeready --version": (["--version"], {}),
    "nodeready --help": (["--help"], {}),
    "nodeready audit --help": (["audit", "--help"], {}),
    "nodeready stacks --help": (["stacks", "--help"], {}),
    "completion of a command": (
        [],
        {"_NODEREADY_COMPLETE": "zsh_complete", "COMP_WORDS": "nodeready au", "COMP_CWORD": "1"},
    ),
    "completion of an option": (
        [],
        {
            "_NODEREADY_COMPLETE": "zsh_complete",
            "COMP_WORDS": "nodeready audit --f",
            "COMP_CWORD": "2",
        },
    ),
}
HEADER = ("", "checkout", "runs", "wall", "CPU", "importing", "modules")


@dataclass(frozen=True)
class Cost:
    """The start of one command: medians of wall and CPU time, and one run of -X importtime.

    import_s: the sum of what each module took to import by itself
    """

    wall_s: float
    cpu_s: float
    import_s: float
    modules: int

    def row(self, name: str, checkout: str, runs: int) -> tuple[str, ...]:
        times = (
            f"{seconds * 1000:.0f} ms" for seconds in (self.wall_s, self.cpu_s, self.import_s)
        )
        return (name, checkout, str(runs), *times, str(self.modules))


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(checkout: Path, name: str, *options: str) -> tuple[float, float, str]:
    """(wall, CPU, standard error) of one run. Raises BenchmarkError when it fails."""
    words, environment = COMMANDS[name]
    argv = [str(checkout / ".venv/bin/python"), *options, "-m", "nodeready", *words]
    began, before = time.monotonic(), _cpu()
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=False,
        cwd=checkout,
        env={**os.environ, **environment},
    )
    wall_s, cpu_s = time.monotonic() - began, _cpu() - before
    if done.returncode or not done.stdout:
        raise BenchmarkError(f"{name}: exit {done.returncode}: {done.stderr.strip()[-400:]}")
    return wall_s, cpu_s, done.stderr


def measure(checkouts: dict[str, Path], repeat: int) -> dict[tuple[str, str], Cost]:
    """(command, checkout) -> its cost; each command of all checkouts in turns."""
    found: dict[tuple[str, str], Cost] = {}
    for name in COMMANDS:
        # The first one compiles what was changed since.
        told = {
            where: _run(path, name, "-X", "importtime")[2] for where, path in checkouts.items()
        }
        told = {
            where: _run(path, name, "-X", "importtime")[2] for where, path in checkouts.items()
        }
        runs: dict[str, list[tuple[float, float]]] = {where: [] for where in checkouts}
        for _ in range(repeat):
            for where, path in checkouts.items():
                runs[where].append(_run(path, name)[:2])
        for where, text in told.items():
            own = [int(us) for us in re.findall(r"^import time: +(\d+) \|", text, re.M)]
            wall_s, cpu_s = (
                statistics.median(column) for column in zip(*runs[where], strict=True)
            )
            found[name, where] = Cost(wall_s, cpu_s, sum(own) / 1e6, len(own))
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="benchmarks/run start", description=__doc__)
    parser.add_argument("--repeat", type=int, default=15, help="default 15")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "benchmarks.md")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    checkouts = {"before": given.before} if given.before else {}
    checkouts["now"] = ROOT
    try:
        found = measure(checkouts, given.repeat)
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    rows = [HEADER, *(cost.row(*key, given.repeat) for key, cost in found.items())]
    about = (
        f"{machine.today()}; {machine.describe()}; {machine.versions('pyinfra', 'click')}. "
        f"Load average before the run {load:.1f}."
    )
    print(table.aligned(rows))
    print(about)
    command = f"benchmarks/run start --repeat {given.repeat}"
    command += " --before DIR" if given.before else ""
    text = f"## The start\n\n```\n{command}\n```\n\n{textwrap.fill(about, _WRAP)}\n\n"
    table.replace(given.output, "start", text + table.markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

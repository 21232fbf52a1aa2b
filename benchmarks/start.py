"""`benchmarks/run start`: the imports of commands, and their time before they do anything.

`--before DIR` measures another checkout, with its own .venv, in turns with this one.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import command
from benchmarks.contenders import ROOT
from benchmarks.measure import BenchmarkError
from benchmarks.report import BenchmarkReport

_COMPLETE = {"_NODEREADY_COMPLETE": "zsh_complete"}
#: Name -> the words of the command line, and its environment.
COMMANDS: dict[str, tuple[list[str], dict[str, str]]] = {
    "nodeready --version": (["--version"], {}),
    "nodeready --help": (["--help"], {}),
    "nodeready audit --help": (["audit", "--help"], {}),
    "nodeready stacks --help": (["stacks", "--help"], {}),
    "completion of a command": (
        [],
        {**_COMPLETE, "COMP_WORDS": "nodeready au", "COMP_CWORD": "1"},
    ),
    "completion of an option": (
        [],
        {**_COMPLETE, "COMP_WORDS": "nodeready audit --f", "COMP_CWORD": "2"},
    ),
}
HEADER = ("", "checkout", "runs", "wall", "CPU", "importing", "modules")


def _cpu_s() -> float:
    """CPU seconds of all ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(checkout: Path, name: str, *options: str) -> tuple[float, float, str]:
    """(wall, CPU, standard error) of one run. Raises BenchmarkError when it fails."""
    words, environment = COMMANDS[name]
    argv = [str(checkout / ".venv/bin/python"), *options, "-m", "nodeready", *words]
    began, before_s = time.monotonic(), _cpu_s()
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=False,
        cwd=checkout,
        env={**os.environ, **environment},
    )
    wall_s, cpu_s = time.monotonic() - began, _cpu_s() - before_s
    if done.returncode or not done.stdout:
        raise BenchmarkError(f"{name}: exit {done.returncode}: {done.stderr.strip()[-400:]}")
    return wall_s, cpu_s, done.stderr


def _imports(checkout: Path, name: str) -> tuple[float, int]:
    """(seconds, number) of the modules that a command imports."""
    # The first run compiles what has changed.
    for _ in range(2):
        text = _run(checkout, name, "-X", "importtime")[2]
    times_us = [int(time_us) for time_us in re.findall(r"^import time: +(\d+) \|", text, re.M)]
    return sum(times_us) / 1e6, len(times_us)


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    """Each command of all checkouts in turns: medians, and one run of -X importtime."""
    checkouts = {"before": arguments.before} if arguments.before else {}
    checkouts["now"] = ROOT
    rows: list[tuple[str, ...]] = [HEADER]
    for name in COMMANDS:
        imports = {label: _imports(path, name) for label, path in checkouts.items()}
        runs: dict[str, list[tuple[float, float]]] = {label: [] for label in checkouts}
        for _ in range(arguments.repeat):
            for label, path in checkouts.items():
                runs[label].append(_run(path, name)[:2])
        for label, (import_s, modules) in imports.items():
            medians = [statistics.median(column) for column in zip(*runs[label], strict=True)]
            times = [f"{seconds * 1000:.0f} ms" for seconds in (*medians, import_s)]
            rows.append((name, label, str(arguments.repeat), *times, str(modules)))
    return BenchmarkReport("The start", [("", rows)])


def main() -> int:
    parser = command.options("start", __doc__, repeat=15)
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout")
    return command.main("start", parser, _measure, ("pyinfra", "click"), has_lab=False)


if __name__ == "__main__":
    sys.exit(main())

"""`benchmarks/run start`: the imports of commands, and their time before they do anything."""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time

from benchmarks.command import ROOT, Benchmark, BenchmarkError, BenchmarkReport, cpu_s

COMMANDS = ("--version", "--help", "audit --help", "stacks --help")
#: Name -> the words of a command line that a shell completes.
COMPLETIONS = {
    "completion of a command": "nodeready au",
    "completion of an option": "nodeready audit --f",
}
HEADER = ("", "runs", "wall", "CPU", "importing", "modules")


def _run(name: str, *options: str) -> tuple[float, float, str]:
    """(wall, CPU, standard error) of one run. Raises BenchmarkError when it fails."""
    words = COMPLETIONS.get(name)
    argv = [sys.executable, *options, "-m", "nodeready", *(() if words else name.split()[1:])]
    variables = dict(os.environ)
    if words:
        variables |= {"_NODEREADY_COMPLETE": "zsh_complete", "COMP_WORDS": words}
        variables["COMP_CWORD"] = str(words.count(" "))
    began, before_s = time.monotonic(), cpu_s()
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, cwd=ROOT, env=variables
    )
    cost = time.monotonic() - began, cpu_s() - before_s
    if done.returncode or not done.stdout:
        raise BenchmarkError(f"{name}: exit {done.returncode}: {done.stderr.strip()[-400:]}")
    return *cost, done.stderr


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    """Each command: medians, and one run of -X importtime."""
    rows: list[tuple[str, ...]] = [HEADER]
    for name in (*(f"nodeready {words}" for words in COMMANDS), *COMPLETIONS):
        # The first run compiles what has changed.
        for _ in range(2):
            text = _run(name, "-X", "importtime")[2]
        times_us = [int(time_us) for time_us in re.findall(r"^import time: +(\d+) \|", text, re.M)]
        runs = [_run(name)[:2] for _ in range(arguments.repeat)]
        medians = [statistics.median(column) for column in zip(*runs, strict=True)]
        times = [f"{seconds * 1000:.0f} ms" for seconds in (*medians, sum(times_us) / 1e6)]
        rows.append((name, str(arguments.repeat), *times, str(len(times_us))))
    return BenchmarkReport("The start", [("", rows)])


BENCHMARK = Benchmark(_measure, {"repeat": 15}, ("pyinfra", "click"), has_lab=False)

"""What every benchmark's command does around its measuring: options, clean ends, the document."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks import machine, table
from benchmarks.contenders import ROOT, ansible_environment, ansible_version
from benchmarks.measure import BenchmarkError
from nodeready.lab import LabError


class Report(Protocol):
    """What a benchmark has measured."""

    command: str
    about: str

    def text(self) -> str: ...

    def markdown(self) -> str: ...


def _sizes(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def options(name: str, about: str | None, nodes: str, repeat: int) -> argparse.ArgumentParser:
    """The options that all benchmarks have, with these defaults."""
    parser = argparse.ArgumentParser(prog=f"benchmarks/run {name}", description=about)
    parser.add_argument("--nodes", type=_sizes, default=_sizes(nodes), metavar="N,…")
    parser.add_argument("--repeat", type=int, default=repeat, help=f"default {repeat}")
    parser.add_argument("--without-ansible", action="store_true")
    parser.add_argument("--name", default="bench", help="of the lab (default bench)")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--note", default="", help="a sentence about this run, for the document")
    return parser


def main(
    name: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, Path | None], Report],
    packages: Sequence[str],
) -> int:
    """Run a benchmark, show it and put it into the document.

    measure: gets the options and where Ansible's commands are, if it takes part
    packages: whose versions the numbers belong to
    Exit status 1 when a run did not do what is measured.
    """
    given = parser.parse_args()
    if os.geteuid() != 0:
        print("benchmarks: the lab makes network namespaces: run as root", file=sys.stderr)
        return 2
    commands = None if given.without_ansible else ansible_environment()
    # So that the lab goes away then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load, started = os.getloadavg()[0], time.monotonic()
    try:
        result = measure(given, commands)
    except (BenchmarkError, LabError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    names = machine.versions(*packages)
    if commands:
        names += f", {ansible_version(commands)}"
    result.command = f"benchmarks/run {name} --nodes {','.join(map(str, given.nodes))}"
    result.command += f" --repeat {given.repeat}"
    result.command += " --without-ansible" if given.without_ansible else ""
    result.about = (
        f"{machine.today()}; {machine.describe()}; {names}, {machine.sshd()}. "
        f"Load average before the run {load:.1f}; the run took "
        f"{(time.monotonic() - started) / 60:.0f} minutes. {given.note}"
    ).rstrip()
    print(result.text())
    given.output.parent.mkdir(parents=True, exist_ok=True)
    table.replace(given.output, name, result.markdown())
    return 0

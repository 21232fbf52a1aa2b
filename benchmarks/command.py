"""The command line of every benchmark: options, clean ends, the report and its document."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.contenders import ROOT, ansible_environment, ansible_version
from benchmarks.measure import BenchmarkError
from benchmarks.report import BenchmarkReport, replace_block
from nodeready.lab import LabError

#: Options that belong to the place of a run rather than to what is measured.
_UNNAMED = ("name", "output", "note", "child", "without_ansible")


def _sizes(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def options(name: str, about: str | None, **defaults: str | int) -> argparse.ArgumentParser:
    """A parser with the common options, and an option for each default: nodes, repeat, …."""
    parser = argparse.ArgumentParser(prog=f"benchmarks/run {name}", description=about)
    for option, default in defaults.items():
        parser.add_argument(
            f"--{option}",
            type=_sizes if option == "nodes" else type(default),
            default=_sizes(str(default)) if option == "nodes" else default,
            help=f"default {default}",
        )
    parser.add_argument("--without-ansible", action="store_true")
    parser.add_argument("--name", default="bench", help="of the lab (default bench)")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks" / "HISTORY.md")
    parser.add_argument("--note", default="", help="a sentence about this run, for the document")
    return parser


def main(
    name: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], BenchmarkReport],
    packages: Sequence[str] = (),
    *,
    has_lab: bool = True,
    has_ansible: bool = False,
) -> int:
    """Run a benchmark, show its report and put it into the document.

    measure:  its namespace has `ansible`: the directory of Ansible's commands, None without it
    packages: the distributions whose versions the document names
    Exit status 1 when a run did not do what is measured.
    """
    arguments = parser.parse_args()
    if has_lab and os.geteuid() != 0:
        print("benchmarks: the lab makes network namespaces: run as root", file=sys.stderr)
        return 2
    words = [f"benchmarks/run {name}", *_words(arguments)]
    has_ansible = has_ansible and not arguments.without_ansible
    arguments.ansible = ansible_environment() if has_ansible else None
    # SIGTERM removes the lab, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load, started = os.getloadavg()[0], time.monotonic()
    try:
        report = measure(arguments)
    except (BenchmarkError, LabError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    versions = [machine.versions(*packages)] if packages else []
    versions += [ansible_version(arguments.ansible)] if arguments.ansible else []
    versions += [machine.sshd()] if has_lab else []
    minutes = (time.monotonic() - started) / 60
    about = (
        f"{'; '.join(filter(None, (machine.today(), machine.describe(), ', '.join(versions))))}. "
        f"Load average before the run {load:.1f}; the run took {minutes:.0f} minutes. "
        f"{arguments.note}"
    ).rstrip()
    print(report.text(about))
    replace_block(arguments.output, name, report.markdown(" ".join(words), about))
    return 0


def _words(arguments: argparse.Namespace) -> list[str]:
    """The options that decide what is measured, as on the command line."""
    values = {key: value for key, value in vars(arguments).items() if key not in _UNNAMED}
    texts = {
        key: ",".join(map(str, value)) if isinstance(value, list) else str(value)
        for key, value in values.items()
        if value
    }
    words = [f"--{key} {text}" for key, text in texts.items()]
    return [*words, "--without-ansible"] if arguments.without_ansible else words

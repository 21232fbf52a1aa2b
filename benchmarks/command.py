"""The command line of every benchmark: options, clean ends, the report and its document."""

from __future__ import annotations

import argparse
import datetime
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.contenders import (
    ROOT,
    BenchmarkError,
    BenchmarkReport,
    ansible_environment,
    ansible_version,
    machine,
    replace_block,
    sshd,
)
from nodeready.lab import LabError

#: Options that belong to the place of a run rather than to what is measured.
_UNNAMED = ("name", "output", "note", "without_ansible")


def cpu_s() -> float:
    """CPU seconds of this process and of its ended children."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in used)


def in_child(
    function: Callable[..., Any], *arguments: Any, watch: Callable[[int], None] | None = None
) -> Any:
    """The value of a function in a new process, whose memory and CPU time are those of it alone.

    watch: is called with the process's pid while it runs, four times a second
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pid = pool.submit(os.getpid).result()
        future = pool.submit(function, *arguments)
        while watch and not future.done():
            watch(pid)
            time.sleep(0.25)
        return future.result()


def _sizes(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark, as its module declares it."""

    # its namespace has `ansible`: the directory of Ansible's commands, None without it
    measure: Callable[[argparse.Namespace], BenchmarkReport]
    # its own options with their defaults: nodes, repeat, …
    defaults: Mapping[str, str | int] = field(default_factory=dict)
    packages: Sequence[str] = ()  # the distributions whose versions the document names
    has_lab: bool = True
    has_ansible: bool = False

    def parser(self, name: str, about: str | None) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog=f"benchmarks/run {name}", description=about)
        for option, default in self.defaults.items():
            is_sizes = option == "nodes"
            parser.add_argument(
                f"--{option}",
                type=_sizes if is_sizes else type(default),
                default=_sizes(str(default)) if is_sizes else default,
                help=f"default {default}",
            )
        parser.add_argument("--without-ansible", action="store_true")
        parser.add_argument("--name", default="bench", help="of the lab (default bench)")
        parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks/HISTORY.md")
        parser.add_argument("--note", default="", help="a sentence about this run")
        return parser

    def main(self, name: str, about: str | None) -> int:
        """Run it; put its report into the document. Exit status 1: not what is measured."""
        arguments = self.parser(name, about).parse_args(sys.argv[2:])
        if self.has_lab and os.geteuid() != 0:
            print("benchmarks: the lab makes network namespaces: run as root", file=sys.stderr)
            return 2
        words = [f"benchmarks/run {name}", *_words(arguments)]
        has_ansible = self.has_ansible and not arguments.without_ansible
        arguments.ansible = ansible_environment() if has_ansible else None
        # SIGTERM removes the lab, too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        load, started = os.getloadavg()[0], time.monotonic()
        try:
            report = self.measure(arguments)
        except (BenchmarkError, LabError) as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            return 1
        versions = [f"{package} {version(package)}" for package in self.packages]
        versions += [ansible_version(arguments.ansible)] if arguments.ansible else []
        versions += [sshd()] if self.has_lab else []
        today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
        about = (
            f"{'; '.join(filter(None, (today, machine(), ', '.join(versions))))}. "
            f"Load average before the run {load:.1f}; "
            f"the run took {(time.monotonic() - started) / 60:.0f} minutes. {arguments.note}"
        ).rstrip()
        print(report.text(about))
        replace_block(arguments.output, name, report.markdown(" ".join(words), about))
        return 0


def _words(arguments: argparse.Namespace) -> list[str]:
    """The options that decide what is measured, as on the command line."""
    words = [
        f"--{key} {','.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in vars(arguments).items()
        if value and key not in _UNNAMED
    ]
    return [*words, "--without-ansible"] if arguments.without_ansible else words

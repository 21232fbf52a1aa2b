"""The command line of every benchmark: options, clean ends, the report and its document."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from nodeready.lab import LabError

ROOT = Path(__file__).parent.parent
Rows = Sequence[Sequence[str]]  # a table; its first row is the head
_WIDTH = 98
#: Ansible has a virtual environment here: it must not share versions with pyinfra.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "nodeready")
#: Options that belong to the place of a run rather than to what is measured.
_UNNAMED = ("name", "output", "note", "without_ansible")


class BenchmarkError(Exception):
    """A run failed, or did not do what is measured."""


@dataclass(frozen=True)
class BenchmarkReport:
    title: str
    tables: Sequence[tuple[str, Rows]]  # (heading, rows); the heading may be ""
    remark: str = ""  # follows the machine's description
    note: str = ""  # explains the columns, below the tables

    def text(self, about: str) -> str:
        parts = []
        for heading, rows in self.tables:
            lines = ["  ".join(row).rstrip() for row in _padded(rows)]
            parts.append("\n".join([heading, *lines] if heading else lines))
        return "\n\n".join([*parts, f"{about} {self.remark}".rstrip()])

    def markdown(self, command: str, about: str) -> str:
        """The report for the document, with the command that measures it again."""
        text, note = (
            textwrap.fill(t.strip(), _WIDTH) for t in (f"{about} {self.remark}", self.note)
        )
        parts = [f"## {self.title}", f"```\n{command}\n```", text]
        for heading, rows in self.tables:
            # Padded, so that the source reads as a table, too.
            head, *body = _padded(rows)
            rule = ["-" * len(head[0]), *("-" * (len(cell) - 1) + ":" for cell in head[1:])]
            parts += [f"### {heading}"] if heading else []
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body)))
        return "\n\n".join([*parts, note] if note else parts)


@dataclass(frozen=True)
class Budget:
    """A limit that the design sets, and the measured value."""

    name: str
    limit: float
    measured: float
    unit: str = ""
    is_maximum: bool = True  # the value must be at most the limit; otherwise at least

    def row(self) -> tuple[str, ...]:
        limit, measured = f"{self.limit:g}", f"{self.measured:.2f}".rstrip("0").rstrip(".")
        is_met = self.measured <= self.limit if self.is_maximum else self.measured >= self.limit
        texts = f"{'≤' if self.is_maximum else '≥'} {limit}{self.unit}", f"{measured}{self.unit}"
        return self.name, *texts, "met" if is_met else "missed"


def budget_rows(budgets: Iterable[Budget]) -> Rows:
    return [("", "budget", "measured", ""), *(budget.row() for budget in budgets)]


def _padded(rows: Rows) -> list[list[str]]:
    """The cells in columns of one width: the first column to the left, numbers to the right."""
    columns = []
    for index, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if index else cell.ljust(width) for cell in cells])
    return [list(row) for row in zip(*columns, strict=True)]


def replace_block(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the markers of ``name`` in a document; append them when missing."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    content = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
    block = f"{begin}\n\n{text.strip()}\n\n{end}"
    if begin in content and end in content:
        content = content.split(begin)[0] + block + content.split(end, 1)[1]
    else:
        content = f"{content.rstrip()}\n\n{block}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def machine() -> str:
    """One line: processors, memory, kernel, system, Python."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kernel = ".".join(platform.release().split("-")[0].split(".")[:2])
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return (
        f"{len(os.sched_getaffinity(0))} cores ({next(models, platform.machine())}), "
        f"{memory:.0f} GiB, {system}, Linux {kernel}, Python {platform.python_version()}"
    )


def _output(*argv: str) -> str:
    """What a command prints, with its standard error. Raises CalledProcessError."""
    return subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    ).stdout.strip()


def ansible_environment() -> Path:
    """The directory of Ansible's commands; the first call installs them from PyPI."""
    directory = _CACHE / f"ansible-py{sys.version_info[0]}{sys.version_info[1]}"
    commands = directory / "bin"
    if not (commands / "ansible-playbook").exists():
        say(f"installing ansible-core into {directory}")
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        pip = [str(commands / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--disable-pip-version-check", "ansible-core"], check=True)
    return commands


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
            # argparse converts a default that is a text, too.
            kind = (
                (lambda words: [*map(int, words.split(","))])
                if option == "nodes"
                else type(default)
            )
            parser.add_argument(
                f"--{option}", type=kind, default=default, help=f"default {default}"
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
            say("benchmarks: the lab makes network namespaces: run as root")
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
            say(f"benchmarks: {error}")
            return 1
        versions = [f"{package} {version(package)}" for package in self.packages]
        if arguments.ansible:
            code = "from importlib.metadata import version; print(version('ansible-core'))"
            versions.append(f"ansible-core {_output(f'{arguments.ansible}/python', '-c', code)}")
        if self.has_lab:
            versions.append(_output("ssh", "-V").partition(",")[0].replace("_", " "))
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

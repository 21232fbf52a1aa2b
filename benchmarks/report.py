"""A benchmark's tables, budgets and machine, for a terminal and for benchmarks/HISTORY.md.

The machine is described without host names and paths.
"""

from __future__ import annotations

import os
import platform
import subprocess
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: A table; its first row is the head.
Rows = Sequence[Sequence[str]]
_WIDTH = 98


class BenchmarkError(Exception):
    """A run failed, or did not do what is measured."""


@dataclass(frozen=True)
class BenchmarkReport:
    """The result of one benchmark."""

    title: str
    tables: Sequence[tuple[str, Rows]]  # (heading, rows); the heading may be ""
    remark: str = ""  # follows the machine's description
    note: str = ""  # explains the columns, below the tables

    def text(self, about: str) -> str:
        """The report for a terminal."""
        parts = [
            "\n".join(
                [*filter(None, [heading]), *("  ".join(row).rstrip() for row in _padded(rows))]
            )
            for heading, rows in self.tables
        ]
        return "\n\n".join([*parts, f"{about} {self.remark}".rstrip()])

    def markdown(self, command: str, about: str) -> str:
        """The report for the document, with the command that measures it again."""
        parts = [f"## {self.title}", f"```\n{command}\n```", _filled(f"{about} {self.remark}")]
        for heading, rows in self.tables:
            # Padded, so that the source reads as a table, too.
            head, *body = _padded(rows)
            rule = ["-" * len(head[0]), *("-" * (len(cell) - 1) + ":" for cell in head[1:])]
            parts += [f"### {heading}"] if heading else []
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body)))
        return "\n\n".join(filter(None, [*parts, _filled(self.note)]))


@dataclass(frozen=True)
class Budget:
    """A limit that the design sets, and the measured value."""

    name: str
    limit: float
    measured: float
    unit: str = ""
    is_maximum: bool = True  # the value must be at most the limit; otherwise at least

    def row(self) -> tuple[str, ...]:
        sign = 1 if self.is_maximum else -1
        number = f"{self.measured:.2f}".rstrip("0").rstrip(".")
        return (
            self.name,
            f"{'≤' if self.is_maximum else '≥'} {self.limit:g}{self.unit}",
            f"{number}{self.unit}",
            "met" if sign * self.measured <= sign * self.limit else "missed",
        )


def budget_rows(budgets: Iterable[Budget]) -> Rows:
    return [("", "budget", "measured", ""), *(budget.row() for budget in budgets)]


def _filled(text: str) -> str:
    return textwrap.fill(text.strip(), _WIDTH)


def _padded(rows: Rows) -> list[list[str]]:
    """The cells in columns of one width: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


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


def sshd() -> str:
    """The version of the nodes' ssh server."""
    words = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False).stderr
    return words.partition(",")[0].strip().replace("_", " ")

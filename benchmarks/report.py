"""A benchmark's tables and budgets, for a terminal and for benchmarks/HISTORY.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: A table; its first row is the head.
Rows = Sequence[Sequence[str]]
_WIDTH = 98


@dataclass(frozen=True)
class BenchmarkReport:
    """The result of one benchmark.

    tables: (heading, rows); the heading may be ""
    remark: follows the machine's description
    note:   explains the columns, below the tables
    """

    title: str
    tables: Sequence[tuple[str, Rows]]
    remark: str = ""
    note: str = ""

    def text(self, about: str) -> str:
        """The report for a terminal."""
        parts = [f"{heading}\n{aligned(rows)}".lstrip() for heading, rows in self.tables]
        return "\n\n".join([*parts, f"{about} {self.remark}".rstrip()])

    def markdown(self, command: str, about: str) -> str:
        """The report for the document, with the command that measures it again."""
        parts = [f"## {self.title}", f"```\n{command}\n```", _filled(f"{about} {self.remark}")]
        for heading, rows in self.tables:
            parts += [f"### {heading}"] if heading else []
            parts.append(markdown_table(rows))
        return "\n\n".join(filter(None, [*parts, _filled(self.note)]))


@dataclass(frozen=True)
class Budget:
    """A limit that the design sets, and the measured value.

    is_maximum: the value must be at most the limit; otherwise at least
    """

    name: str
    limit: float
    measured: float
    unit: str = ""
    is_maximum: bool = True

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


def aligned(rows: Rows) -> str:
    """The table for a terminal."""
    return "\n".join("  ".join(row).rstrip() for row in _padded(rows))


def markdown_table(rows: Rows) -> str:
    """The table as Markdown, padded so that the source reads as a table, too."""
    head, *body = _padded(rows)
    rule = ["-" * len(head[0]), *("-" * (len(cell) - 1) + ":" for cell in head[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


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

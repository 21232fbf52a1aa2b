"""Rows of text as an aligned table, as Markdown, and into a document between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Row = Sequence[str]


def _widths(rows: Sequence[Row]) -> list[int]:
    return [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]


def aligned(rows: Sequence[Row]) -> str:
    """The rows under their first one; the first column to the left, numbers to the right."""
    widths = _widths(rows)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown(rows: Sequence[Row]) -> str:
    """The same as a Markdown table."""
    widths = _widths(rows)
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [aligned_cells(row, widths) for row in (rows[0], rule, *rows[1:])]
    return "\n".join(lines)


def aligned_cells(row: Row, widths: Sequence[int]) -> str:
    """One Markdown row, padded so that the source reads as a table too."""
    cells = [
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return f"| {' | '.join(cells)} |"


def replace(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the markers of ``name`` in a document; append them when missing."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    old = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
    block = f"{begin}\n\n{text.strip()}\n\n{end}"
    if begin in old and end in old:
        before, after = old.split(begin)[0], old.split(end, 1)[1]
        new = before + block + after
    else:
        new = f"{old.rstrip()}\n\n{block}\n"
    path.write_text(new, encoding="utf-8")

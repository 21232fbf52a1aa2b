"""The last lines of a log file, from the bytes at its end."""

from __future__ import annotations

import re
from typing import NamedTuple

#: Maximum characters of a line; a longer line is cut, and gets a mark.
MAX_LINE = 2000


class LastLines(NamedTuple):
    """Lines of a log."""

    lines: tuple[str, ...]  # the oldest first
    matches: int | None  # number of lines with the expression; None: no expression


def text_lines(data: bytes, *, is_whole: bool, keeps_states: bool = False) -> list[bytes] | None:
    """The non-blank lines of the end of a file; None: it is no text.

    A progress bar, which restarts after each carriage return, becomes a line of its last state.
    NUL bytes at the beginning are skipped, because a file that was truncated under its writer has
    them; other NUL bytes mean that it is no text.

    is_whole: the data is the whole file; otherwise the first line is incomplete, and is left out
              unless it is the only line
    keeps_states: keep all states of a progress bar, with the carriage returns
    """
    rows: list[bytes] = []
    first, *further = data.split(b"\n")
    for row in [first, *further] if is_whole else further:
        if not _add(rows, row, keeps_states):
            return None
    # The only line began before the data: part of it is better than no line.
    return rows if rows or is_whole or _add(rows, first, keeps_states) else None


def _add(rows: list[bytes], line: bytes, keeps_states: bool) -> bool:
    """Add a line unless it is blank. Whether it is text."""
    line_states = line.lstrip(b"\0").split(b"\r")
    row = next((state for state in reversed(line_states) if state.strip()), b"")
    if row and keeps_states:
        row = line.lstrip(b"\0").rstrip(b"\r")
    if row:
        rows.append(row)
    return b"\0" not in row


def last_lines(
    rows: list[bytes], count: int, expression: re.Pattern[str] | None = None
) -> LastLines:
    """The last ``count`` of these lines, or of the lines that contain the expression."""
    if expression is None:
        return LastLines(tuple(_text(row) for row in rows[-count:]), None)
    texts = (row.decode("utf-8", "replace") for row in rows)
    hits = [text for text in texts if expression.search(text)]
    return LastLines(tuple(cut(text) for text in hits[-count:]), len(hits))


def _text(row: bytes) -> str:
    # At most four bytes are one character.
    return cut(row[: 4 * (MAX_LINE + 1)].decode("utf-8", "replace"))


def cut(text: str) -> str:
    text = text.rstrip()
    return text if len(text) <= MAX_LINE else text[:MAX_LINE] + "..."

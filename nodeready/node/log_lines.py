"""The last lines of a log file, from the bytes at its end."""

from __future__ import annotations

import re
from typing import NamedTuple

#: Characters of a line that are kept; a mark stands for the rest.
MAX_LINE = 2000


class LastLines(NamedTuple):
    """lines: the oldest first; matches: of the expression, in what was read"""

    lines: tuple[str, ...]
    matches: int | None


def text_lines(data: bytes, *, is_whole: bool) -> list[bytes] | None:
    """The lines of the end of a file, without the blank ones; None: this is no text.

    whole: this is all of the file; else the first line began before it, and is left out unless it
    is the only one.

    Of a progress bar, which begins again and again after a carriage return, the last state. A file
    that was truncated while its writer went on begins with NUL bytes; others make it no text.
    """
    rows: list[bytes] = []
    first, *further = data.split(b"\n")
    for row in [first, *further] if is_whole else further:
        if not _add(rows, row):
            return None
    # More than what was read, and the line ends only there: part of it is better than nothing.
    return rows if rows or is_whole or _add(rows, first) else None


def _add(rows: list[bytes], line: bytes) -> bool:
    """Keep a line, unless it is blank; whether it is text."""
    states = (state for state in reversed(line.lstrip(b"\0").split(b"\r")) if state.strip())
    row = next(states, b"")
    if row:
        rows.append(row)
    return b"\0" not in row


def last_lines(rows: list[bytes], count: int, like: re.Pattern[str] | None = None) -> LastLines:
    """The last ``count`` of these lines, or of those in which the expression is found."""
    if like is None:
        return LastLines(tuple(_text(row) for row in rows[-count:]), None)
    texts = (row.decode("utf-8", "replace") for row in rows)
    hits = [text for text in texts if like.search(text)]
    return LastLines(tuple(_cut(text) for text in hits[-count:]), len(hits))


def _text(row: bytes) -> str:
    # At most four bytes are one character.
    return _cut(row[: 4 * (MAX_LINE + 1)].decode("utf-8", "replace"))


def _cut(text: str) -> str:
    text = text.rstrip()
    return text if len(text) <= MAX_LINE else text[:MAX_LINE] + "..."

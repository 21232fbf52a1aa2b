"""The last lines of a log, and of each rank of a mixed log; the time of a line."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nodeready.agent.log_ranks import LineOrigin, RankReader, learn_ranks

MAX_LINE = 2000  # maximum characters of a line; a longer line is cut, and gets a mark


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
    keeps_states: keep the first and the last state of a progress bar, and a carriage return
              between them: either may have a prefix
    """
    rows: list[bytes] = []
    first, *further = data.split(b"\n")
    for row in [first, *further] if is_whole else further:
        if not _add(rows, row, keeps_states):
            return None
    # The only line began before the data: part of it is better than no line.
    return rows if rows or is_whole or _add(rows, first, keeps_states) else None


def _add(rows: list[bytes], line: bytes, keeps_states: bool) -> bool:
    """Add a line unless it is blank. Returns whether it is text."""
    line_states = line.lstrip(b"\0").split(b"\r")
    row = next((state for state in reversed(line_states) if state.strip()), b"")
    if row and keeps_states:
        first = next(state for state in line_states if state.strip())
        row = row if first is row else first + b"\r" + row
    if row:
        rows.append(row)
    return b"\0" not in row


def last_lines(
    rows: list[bytes], count: int, expression: re.Pattern[str] | None = None
) -> LastLines:
    """The last ``count`` of these lines, or of the lines that contain the expression."""
    if expression is None:
        # At most four bytes are one character.
        longest = 4 * (MAX_LINE + 1)
        texts = (row[:longest].decode("utf-8", "replace") for row in rows[-count:])
        return LastLines(tuple(map(cut, texts)), None)
    texts = (row.decode("utf-8", "replace") for row in rows)
    hits = [text for text in texts if expression.search(text)]
    return LastLines(tuple(cut(text) for text in hits[-count:]), len(hits))


def cut(text: str) -> str:
    """The text without trailing white space, of at most `MAX_LINE` characters and a mark."""
    text = text.rstrip()
    return text if len(text) <= MAX_LINE else text[:MAX_LINE] + "..."


# --- The last lines of each rank of a mixed log, read from the end of the file within bounds.

HEAD_BYTES = 64 * 1024  # bytes at the beginning of a file that are learned from
#: Bytes that are read at a time; maximum bytes and seconds until all ranks have their lines.
_BLOCK_BYTES, MAX_BYTES, MAX_S = 1 << 20, 16 << 20, 2.0
MAX_RANKS = 4096  # maximum ranks of a file
_MAX_CHARACTERS = 4096  # maximum characters of a line in which a rank and reports are searched


@dataclass
class RankLines:
    """The last lines of one rank in a mixed log."""

    origin: LineOrigin  # with an empty text; without anything known: the lines without a prefix
    lines: list[str] = field(default_factory=list)  # without their prefixes, the oldest first
    matches: int = 0  # number of its lines with the expression
    lines_after: int = 0  # number of lines of all ranks after its last line
    # its lines in the last block, with their prefixes, the oldest first
    whole_lines: list[str] = field(default_factory=list)


def learn_file(
    handle: int, size: int, rows: Sequence[bytes], *, path: str, pattern: str = ""
) -> RankReader:
    """The reader of a file's ranks, from its beginning and its last lines.
    rows: the last lines of the file; pattern: see `learn_ranks`
    """
    head: list[bytes] = []
    if size > sum(map(len, rows)) + len(rows):
        head = text_lines(os.pread(handle, HEAD_BYTES, 0), is_whole=True) or []
    return learn_ranks(map(_text, (*head[:-1], *rows)), pattern=pattern, path=path)


def read_ranks(
    handle: int,
    size: int,
    reader: RankReader,
    count: int,
    *,
    is_wanted: Callable[[LineOrigin], bool] = lambda _: True,
    expression: re.Pattern[str] | None = None,
    max_bytes: int = 0,
) -> list[RankLines]:
    """The last ``count`` lines of each wanted rank, in the order of ranks.

    It reads back until each rank that the reader knows has its lines, but at most `MAX_BYTES` and
    `MAX_S`. A rank without a line there has no lines.

    expression: each line must match it
    max_bytes:  maximum bytes that are read; 0: `MAX_BYTES`
    """
    ranks: dict[tuple[str, int | None, int | None], RankLines] = {}
    for origin in reader.origins:
        if is_wanted(origin) and len(ranks) < MAX_RANKS:
            ranks.setdefault(origin.key, RankLines(origin))
    missing = set(ranks)
    number = 0
    for is_last, rows in _blocks(handle, size, max_bytes or MAX_BYTES):
        for row in reversed(rows):
            origin = reader.split(_text(row))
            if not origin.text.strip():
                continue
            number += 1
            if not is_wanted(origin):
                continue
            rank = ranks.get(origin.key)
            if rank is None:
                if len(ranks) >= MAX_RANKS:
                    continue
                rank = ranks[origin.key] = RankLines(origin._replace(text=""))
            if not rank.lines_after and not rank.whole_lines:
                rank.lines_after = number - 1
            if is_last:
                rank.whole_lines.append(_text(row))
            if expression and not expression.search(row.decode("utf-8", "replace")):
                continue
            rank.matches += 1
            if len(rank.lines) < count:
                rank.lines.append(cut(origin.text))
                if len(rank.lines) == count:
                    missing.discard(origin.key)
        if not missing:
            break
    for rank in ranks.values():
        if not rank.matches and not rank.whole_lines and not rank.lines_after:
            rank.lines_after = number
        rank.lines.reverse()
        rank.whole_lines.reverse()
    writers = (rank for rank in ranks.values() if rank.lines or rank.origin.is_known)
    return sorted(writers, key=lambda rank: _order(rank.origin))


def _text(row: bytes) -> str:
    states = (state[: 4 * _MAX_CHARACTERS] for state in row.split(b"\r"))
    return "\r".join(state.decode("utf-8", "replace") for state in states)


def _order(origin: LineOrigin) -> tuple[object, ...]:
    """The key to sort by: rank, host, local rank; an unknown number comes first."""
    rank, local = (-1 if number is None else number for number in origin[1:3])
    return rank, origin.host, local


def _blocks(handle: int, size: int, max_bytes: int) -> Iterator[tuple[bool, list[bytes]]]:
    """The lines of each block of the file, the last block first; whether it is the last."""
    deadline, offset, unfinished = time.monotonic() + MAX_S, size, b""
    while offset and size - offset < max_bytes and time.monotonic() < deadline:
        start = max(0, offset - _BLOCK_BYTES)
        data = os.pread(handle, offset - start, start) + unfinished
        # The first line of the block may begin before it.
        unfinished, _, data = data.partition(b"\n") if start else (b"", b"", data)
        rows = text_lines(data, is_whole=True, keeps_states=True)
        if rows is None:
            return
        yield offset == size, rows
        offset = start


# --- The time at the beginning of a line.

_CLOCK = r"(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_STAMPS = (
    # 2026-03-01T12:00:00.123Z, 2026-03-01 12:00:00,123, torchrun's 2026-03-01_12:00:00
    re.compile(rf"(\d{{4}})[-/](\d\d)[-/](\d\d)[T _]{_CLOCK}(Z|[+-]\d\d:?\d\d)?"),
    # glog: E0301 12:00:00.123456, E20260301 12:00:00.123456; PyTorch: E301 12:00:00.123456
    re.compile(rf"\b[IWEFDV](\d{{4}})?(\d?\d)(\d\d) {_CLOCK}"),
    # syslog, in some languages in small letters, and dmesg -T with a year: Mar  1 12:00:00
    re.compile(rf"\b(?i:({'|'.join(_MONTHS)})) +(\d{{1,2}}) {_CLOCK}(?: (\d{{4}}))?"),
)
#: Characters at the beginning of a line in which its time stands.
STAMP_CHARACTERS = 80
TIMED = re.compile(r"\d\d:\d\d:\d\d")
#: Makes seconds since 1970 of year, month, day, hour, minute and second in a log's time zone.
Calendar = Callable[[tuple[int, int, int, int, int, int]], float]


def node_calendar(moment: tuple[int, int, int, int, int, int]) -> float:
    """The seconds since 1970 of a moment in this machine's time zone."""
    return time.mktime((*moment, 0, 0, -1))


def stamp(text: str, year: int, calendar: Calendar) -> float | None:
    """The time at a line's beginning, in seconds since 1970; None: none. year: if it has none"""
    head = text[:STAMP_CHARACTERS]
    iso, glog, syslog = (pattern.search(head) for pattern in _STAMPS)
    try:
        if iso:
            *words, fraction, zone = iso.groups()
            moment = tuple(map(int, words))
        elif glog:
            own_year, *words, fraction = glog.groups()
            moment, zone = (int(own_year or year), *map(int, words)), None
        elif syslog:
            month, *words, fraction, own_year = syslog.groups()
            month_number = _MONTHS.index(month.capitalize()) + 1
            moment, zone = (int(own_year or year), month_number, *map(int, words)), None
        else:
            return None
        if not (1970 <= moment[0] < 2200 and moment[1] <= 12 and moment[2] <= 31):
            return None
        if zone:
            digits = zone.replace(":", "")
            minutes = 0 if zone == "Z" else int(digits[1:3]) * 60 + int(digits[3:5])
            seconds = utc_calendar(moment)  # type: ignore[arg-type]
            seconds -= (-60 if digits.startswith("-") else 60) * minutes
        else:
            seconds = calendar(moment)  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        return None
    return seconds + (float(f"0.{fraction}") if fraction else 0.0)


def utc_calendar(moment: tuple[int, int, int, int, int, int]) -> float:
    """The seconds since 1970 of a moment in UTC."""
    import calendar

    return float(calendar.timegm((*moment, 0, 0, 0)))

"""The last lines of each rank of a mixed log, read from the end of the file within bounds."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from nodeready.agent.log_lines import cut, text_lines
from nodeready.agent.log_ranks import LineOrigin, RankReader, learn_ranks

#: Bytes at the beginning of a file that are learned from.
HEAD_BYTES = 64 * 1024
#: Bytes that are read at a time; maximum bytes and seconds until all ranks have their lines.
_BLOCK_BYTES, MAX_BYTES, MAX_S = 1 << 20, 16 << 20, 2.0
#: Maximum ranks of a file.
MAX_RANKS = 4096
#: Maximum characters of a line in which a rank and reports are searched.
_MAX_CHARACTERS = 4096


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

    It reads back until each rank that the reader has met has its lines, at most `MAX_BYTES` and
    `MAX_S`. A rank without a line there has no lines.

    expression: that each line must contain; max_bytes: in place of `MAX_BYTES`; 0: that
    """
    ranks: dict[tuple[str, int | None, int | None], RankLines] = {}
    for origin in reader.origins:
        if is_wanted(origin) and len(ranks) < MAX_RANKS:
            ranks.setdefault(origin.key, RankLines(origin))
    missing = set(ranks)
    number = 0
    for is_last, rows in _blocks(handle, size, max_bytes or MAX_BYTES):
        for row in reversed(rows):
            origin = _read_origin(reader, row)
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


def _read_origin(reader: RankReader, row: bytes) -> LineOrigin:
    """The origin and text of a line; of a progress bar, only the first state has the prefix."""
    first, *states = (state for state in row.split(b"\r") if state.strip())
    origin = reader.split(_text(first))
    return origin._replace(text=reader.split(_text(states[-1])).text) if states else origin


def _text(row: bytes) -> str:
    return row[: 4 * _MAX_CHARACTERS].decode("utf-8", "replace")


def _order(origin: LineOrigin) -> tuple[object, ...]:
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

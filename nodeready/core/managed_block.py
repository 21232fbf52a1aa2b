"""nodeready's marked block in a file that an administrator or user owns: bytes in, bytes out.

Everything outside the block stays byte for byte: its line ends, a missing final newline, bytes
that are no UTF-8. The block itself always has plain newlines, which the readers of these files
accept, also in a file with CRLF.
"""

from __future__ import annotations

import re
from typing import NamedTuple

BEGIN = b"# >>> nodeready: managed block, do not edit >>>"
END = b"# <<< nodeready <<<"

#: Where the block goes: top of the file, its end, or where it stands now (a new block: the end).
PLACES = ("top", "end", "keep")


class _Parts(NamedTuple):
    """A file before, inside and after its first whole block; ``inner``: None without a block."""

    before: bytes
    inner: bytes | None
    after: bytes


def _parts(content: bytes) -> _Parts:
    """Take the file apart. Markers without their partner and further blocks are left out.

    The lines behind a BEGIN without END may be the owner's own: they stay, only the marker goes.
    """
    outside: list[bytes] = []
    open_block: list[bytes] | None = None
    inner: bytes | None = None
    split = 0
    for line in re.findall(rb"[^\n]*\n|[^\n]+", content):
        word = line.rstrip()
        if word == BEGIN:
            outside.extend(open_block or ())
            open_block = []
        elif word == END:
            if open_block is not None and inner is None:
                inner, split = b"".join(open_block), len(outside)
            open_block = None
        elif open_block is not None:
            open_block.append(line)
        else:
            outside.append(line)
    outside.extend(open_block or ())
    if inner is None:
        split = len(outside)
    return _Parts(b"".join(outside[:split]), inner, b"".join(outside[split:]))


def _line_end(content: bytes) -> bytes:
    """The newline that is missing at the end of these lines, or nothing."""
    return b"\n" if content and not content.endswith(b"\n") else b""


def find(content: bytes) -> bytes | None:
    """The lines between the marks, unchanged; None without a whole block."""
    return _parts(content).inner


def put(content: bytes, inner: bytes, place: str) -> bytes:
    """``content`` with exactly one block that holds ``inner``, standing at ``place``.

    Putting the same block again changes nothing. Outside the block one thing may change: a last
    line without a newline gets one when the block comes behind it. Raises ValueError for an
    ``inner`` that holds one of our marks and for an unknown place.
    """
    if any(line.rstrip() in (BEGIN, END) for line in inner.split(b"\n")):
        raise ValueError("the block's own lines must not hold its marks")
    if place not in PLACES:
        raise ValueError(f"place must be one of {', '.join(PLACES)}")
    block = BEGIN + b"\n" + inner + _line_end(inner) + END + b"\n"
    before, old_inner, after = _parts(content)
    if place == "top":
        return block + before + after
    if place == "end" or old_inner is None:
        before, after = before + after, b""
    return before + _line_end(before) + block + after


def remove(content: bytes) -> bytes:
    """``content`` without nodeready's block and without stray marks."""
    before, _, after = _parts(content)
    return before + after

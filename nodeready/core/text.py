"""Sanitising text from a node, which is data and never markup, before it is shown.

Also the small texts that all reports share: a moment, a duration, a count, a range.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

# C0 and C1 controls and DEL, lone surrogates (bytes that are no UTF-8), and the characters that
# reorder or hide what stands beside them, or are not seen at all (bidirectional marks, zero-width,
# line separators, annotations, tags; Unicode, Default_Ignorable_Code_Point).
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\ud800-\udfff"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb"
    "\U000e0000-\U000e0fff]"
)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def sanitise(text: str, limit: int = 4000) -> str:
    """``text`` as one line that is safe to show: control characters become visible escapes.

    limit: characters after which the rest is cut off, with ``...``
    """
    if len(text) > limit:
        text = text[:limit] + "..."
    return _UNSAFE.sub(_visible, text.replace("\t", "    "))


def utc_now() -> str:
    """This moment as the reports write moments: ISO 8601, UTC."""
    return utc_moment(time.time())


def utc_moment(seconds: float) -> str:
    """A moment in seconds since 1970, as the reports write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def span(seconds: float) -> str:
    """``12 s``, ``4 min 10 s``, ``3 h 5 min``, ``2 days``."""
    total = max(0, int(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min" + (f" {total % 60} s" if total % 60 else "")
    if total < 48 * 3600:
        minutes = total % 3600 // 60
        return f"{total // 3600} h" + (f" {minutes} min" if minutes else "")
    return f"{total // 86400} days"


_SPAN = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_span(words: str) -> float:
    """The seconds of a span of time: ``90``, ``0.5``, ``20s``, ``10m``, ``2h``, ``3d``, ``1w``.

    Raises ValueError with the forms.
    """
    if (match := _SPAN.fullmatch(words.strip())) is None:
        raise ValueError(f"{words!a} is no span of time such as 20s, 5m, 2h or 3d")
    return float(match[1]) * _SECONDS[match[2]]


def span_words(seconds: float) -> str:
    """The seconds as an option takes them, in the largest unit that divides them: ``2h``."""
    for unit in "dhm":
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds // _SECONDS[unit]:g}{unit}"
    return f"{seconds:g}s"


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 node``, ``3 nodes``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def excerpt(text: str, limit: int) -> str:
    """A text without its middle where it is longer: of an error, the last words often say most.

    >>> excerpt("RuntimeError: CUDA error: the GPU is lost", 40)
    'RuntimeError: CUDA error: the...is lost'
    """
    head, tail = 3 * limit // 4, limit // 4 - 3
    return text if len(text) <= limit else f"{text[:head].rstrip()}...{text[-tail:].lstrip()}"


def cut(text: str, limit: int, count: int) -> str:
    """A folded node set of ``count`` nodes, cut behind a comma when longer than ``limit``."""
    if len(text) <= limit:
        return text
    ending = f"... ({count} nodes)"
    beginning = text[: limit - len(ending)]
    return beginning[: beginning.rfind(",") + 1 or None] + ending


def range_text(first: int, last: int) -> str:
    """A range of ports as text.

    >>> range_text(22, 22), range_text(29500, 29510)
    ('22', '29500-29510')
    """
    return str(first) if first == last else f"{first}-{last}"


def join_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges in their order, overlapping and touching ones as one.

    >>> join_ranges([(5, 6), (1, 2), (3, 4), (9, 9)])
    [(1, 6), (9, 9)]
    """
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined

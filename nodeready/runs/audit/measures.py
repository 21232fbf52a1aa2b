"""Numbers in an answer that change from look to look, and bounds in which they decide nothing.

`audit --watch` judges a node again only where its answer differs from the judged one in more than
measures within bounds. The bounds are tried when measures have changed: the node is judged with
all measures at their worse ends, and at their better ends. Where its checks have the same statuses
as before, they have them everywhere between, as no check gets better while its measure gets worse
(measures.toml).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nodeready import knowledge

_ROWS: list[dict[str, Any]] = [*knowledge.rows("measures").values()]
#: What stands before the words of a row in a line: of a program's output, a number or a bar.
_START = r"(?:[ |\t0-9]*<|[ |]*)"
#: Of each row, of a line: a group of what stands before the measure, and one for each number.
_PATTERNS = [re.compile(f"({_START}{row['before']}){row['value']}".encode()) for row in _ROWS]
#: A group for each row.
_ANY = re.compile(f"{_START}(?:({')|('.join(row['before'] for row in _ROWS)}))".encode())
#: The subjects with a check that judges a measure.
JUDGED = {key.split(".")[0] for key, row in knowledge.rows("measures").items() if "worse" in row}
#: How far the bounds are from a number, in parts of its span: the first that decides nothing.
_REACHES = (0.5, 0.2, 0.05)


class Bounds(NamedTuple):
    """The answers of a node that get the same verdict as its judged answer."""

    digest: bytes  # of the text without its measures
    places: Mapping[int, int]  # number of a line with a measure -> the number of its row
    ranges: Sequence[tuple[float, float]]  # of the numbers that a check judges

    def contain(self, text: bytes) -> bool:
        digest, numbers = _split(text.split(b"\n"), self.places)
        # Of equal digests, there are as many numbers.
        return digest == self.digest and all(
            low <= number <= high for number, (low, high) in zip(numbers, self.ranges, strict=True)
        )


def _split(lines: list[bytes], places: Mapping[int, int]) -> tuple[bytes, list[float]]:
    """The digest of these lines without their measures, which it removes, and the numbers."""
    numbers: list[float] = []
    for place, row in places.items():
        match = _PATTERNS[row].match(lines[place]) if place < len(lines) else None
        if match is None:
            return b"", []
        numbers += map(float, match.groups()[1:])
        lines[place] = match[1] + lines[place][match.end() :]
    return hashlib.sha256(b"\n".join(lines)).digest(), numbers


def _moved(line: bytes, row: int, reach: float) -> bytes:
    """The line with its numbers worse by this reach, or better where it is negative."""
    signs = _ROWS[row].get("worse", ())
    # The last number first: another one may be longer.
    for group in range(len(signs) + 1, 1, -1):
        match = _PATTERNS[row].match(line)
        assert match is not None
        number, decimals = float(match[group]), len(match[group].partition(b".")[2])
        moved = number + reach * signs[group - 2] * _ROWS[row].get("span", abs(number))
        # Most are never negative.
        text = f"{moved if number < 0 else max(0, moved):.{decimals}f}".encode()
        line = line[: match.start(group)] + text + line[match.end(group) :]
    return line


def find_bounds(
    text: bytes, later: bytes, statuses: Callable[[bytes], Sequence[str]]
) -> Bounds | None:
    """The bounds around a judged answer that contain a later one. None: without a new verdict it
    has none, as the answers differ in anything else, or as their measures may decide.

    statuses: of the checks of the subjects `JUDGED`, at a text
    """
    lines = text.split(b"\n")
    starts = {place: start for place, line in enumerate(lines) if (start := _ANY.match(line))}
    rows = {place: (start.lastindex or 0) - 1 for place, start in starts.items()}
    places = {place: row for place, row in rows.items() if _PATTERNS[row].match(lines[place])}
    digest, numbers = _split(lines.copy(), places)
    judged: Sequence[str] = ()
    for reach in _REACHES:
        worse, better = lines.copy(), lines.copy()
        for place, row in places.items():
            worse[place] = _moved(worse[place], row, reach)
            better[place] = _moved(better[place], row, -reach)
        ends = [_split(end.copy(), places)[1] for end in (worse, better)]
        if not len(numbers) == len(ends[0]) == len(ends[1]):
            # Out there, a number has another form.
            continue
        values = zip(numbers, *ends, strict=True)
        bounds = Bounds(digest, places, [(min(value), max(value)) for value in values])
        if not bounds.contain(later):
            return None
        at_worst = statuses(b"\n".join(worse))
        # What is good there is good everywhere.
        if {*at_worst} <= {"ok", "na"}:
            return bounds
        judged = judged or statuses(text)
        if at_worst == judged == statuses(b"\n".join(better)):
            return bounds
    return None

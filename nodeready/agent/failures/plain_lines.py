"""What a line that belongs to no failure tells: progress, a handled error, a complaint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

from nodeready.agent.failures import rules

#: Letters of a line that is compared with others.
_LETTERS = 8
#: Equal lines but for their numbers that show a program at work.
_ALIKE = 8
#: A number of a step.
STEP = rules.PHRASES["step"]
#: Characters in which two lines with words of an error are alike.
_SAME = 32
#: The words of an error: those that say so weigh more than those of what is not as it should be.
EXPLAINED, COMPLAINTS = 3, ((3, "system"), (2, "complains"), (1, "objects"))
_DIGITS = re.compile(r"\d+(?:\.\d+)?")


def is_of_request(text: str) -> bool:
    """Whether the error below a line is of a request to a server, which it may have answered."""
    answer = rules.PHRASES["answers"].search(text[:600])
    is_refused = answer and answer[answer.lastindex or 0] in ("4", "5")
    return bool(is_refused or rules.PHRASES["of-a-request"].search(text))


def is_handled(text: str) -> bool:
    """Whether a line says that its program has handled an error, and continues."""
    head = text[:400]
    return bool(rules.PHRASES["handles"].search(head)) and not rules.PHRASES["ends"].search(head)


def shape_counts(rows: Iterable[tuple[int, str]]) -> Counter[str]:
    """How often each shape of a line comes that has no word of an error."""
    return Counter(shape_of(text) for _, text in rows if not complaint(text))


def is_work(text: str, counts: Mapping[str, int]) -> bool:
    """Whether a line is of a step, also of a program that has no word for its steps."""
    shape = shape_of(text)
    return bool(STEP.search(text[:400]) or (shape and counts.get(shape, 0) >= _ALIKE))


def goes_on(text: str) -> bool:
    """Whether a line is of a step, or speaks of progress."""
    return bool(STEP.search(text[:400]) or rules.PHRASES["progresses"].search(text[:400]))


def without_survived(lines: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """The lines, without the words of an error that begin like those before a line of progress."""
    new, survived, rows = set[str](), set[str](), []
    for number, text in lines:
        head = shape_of(text, 0)[:_SAME] if complaint(text) else None
        if head not in survived:
            rows.append((number, text))
        if head is not None:
            new.add(head)
        elif new and goes_on(text):
            survived |= new
    return rows


@lru_cache(maxsize=1 << 10)
def complaint(text: str) -> int:
    """How much a line that no row explains tells of an error that ends a program; 0: nothing."""
    weights = (weight for weight, words in COMPLAINTS if rules.PHRASES[words].search(text))
    weight = next(weights, 0)
    is_none = any(rules.PHRASES[name].search(text) for name in ("no-complaint", "warns"))
    if not weight or is_none or is_handled(text):
        return 0
    # Words that a row explains say most, unless they only announce others.
    means = rules.meaning(text)
    if rules.VAGUE.search(text) or means.role == rules.CONSEQUENCE:
        return min(weight, EXPLAINED - 1)
    return EXPLAINED if means.is_known else weight


def shape_of(text: str, letters: int = _LETTERS) -> str:
    """A line without its numbers, to compare it with others; "": it has fewer letters."""
    shape = _DIGITS.sub("0", text[:160])
    return shape if sum(map(str.isalpha, shape)) >= letters else ""

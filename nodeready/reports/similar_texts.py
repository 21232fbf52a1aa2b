"""Texts that differ by a number, an address or the node's own name, as one row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from nodeready.reports.lines import grouped

#: What a text can say of one node: what is, and its fix.
Texts = tuple[str, ...]

#: A text in pieces: what all texts of its kind share, and the words that may differ between them.
_Pieces = tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]

#: A number with its thousands apart, or a word: a device, a version, an address, a path's part.
_WORD = re.compile(r"\d{1,3}(?:,\d{3})+(?![\w,])|\w(?:[\w.:-]*\w)?")

_NUMBER = re.compile(r"(\D*)(\d[\d,]*(?:\.\d+)?)(\D*)")

_ADDRESS = re.compile(
    r"\d+(?:\.\d+){3}|[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[\w.:]*|\w[\w-]*(?:\.[\w-]+)*\.[A-Za-z]{2,}"
)

_DIGIT = re.compile(r"\d")

#: The node's own name in a text, and an address that is another one on each node.
_OWN, _EACH = "NODE", "ADDRESS"

#: So many reasons are all told, where they are not alike.
_REASONS = 6

#: So many values of one word are all named; of more, the first and the last.
_NAMED = 3


class Alike(NamedTuple):
    """One row for the nodes that say the same, or the same but for numbers.

    said:    the texts; where the nodes differ, with all values or the least and the most
    names:   the nodes
    example: one of the nodes, where ``said`` alone does not tell what one node says; ""
    instance: what that node says
    texts:   how many different texts there are
    """

    said: Texts
    names: list[str]
    example: str = ""
    instance: Texts = ()
    texts: int = 1


def alike(
    pairs: Iterable[tuple[Texts, str]], apart: int = _NAMED, *, reasons: bool = False
) -> list[Alike]:
    """What nodes say, in few rows: the most nodes first.

    pairs:   texts and the node that says them; a node's own name in them makes no difference
    apart:   so many different texts are all shown; of more, those of one shape are one row
    reasons: why nodes have no answer: an address that is another one on each node makes no
             difference, however few they are
    """
    found: dict[Texts, list[str]] = {}
    for said, name in pairs:
        found.setdefault(said, []).append(name)
    shapes: dict[object, _Shape] = {}
    for said, names in found.items():
        # Of a text that several nodes say, the name is nobody's own.
        shared, words = _pieces(said, names[0] if len(names) == 1 else "")
        shapes.setdefault(shared, _Shape(shared)).add(said, words, names)
    kinds = sorted(shapes.values(), key=lambda one: -one.count)
    if reasons:
        for one in kinds:
            one.forget_addresses()
    if sum(len(one.rows) for one in kinds) <= apart:
        rows = [row for one in kinds for row in one.each()]
    elif len(kinds) <= apart:
        rows = [one.merged() for one in kinds]
    else:
        rows = [one.merged() for one in kinds[: apart - 1]]
        rows.append(_others(kinds[apart - 1 :]))
    return sorted(rows, key=lambda row: -len(row.names))


def reasons(found: Iterable[tuple[str, str]], verbose: int = 0) -> list[tuple[str, list[str]]]:
    """Why nodes have no answer, in few rows: the reason, or one of many, and its nodes.

    found: node and reason
    """
    pairs = (((why.removeprefix(f"{name}: "),), name) for name, why in found)
    if verbose:
        return [(why, names) for (why,), names in grouped(pairs)]
    return [
        (row.said[0] if row.said else f"e.g. {row.example}: {row.instance[0]}", row.names)
        for row in alike(pairs, _REASONS, reasons=True)
    ]


def _pieces(said: Texts, name: str) -> _Pieces:
    shared, words = [], []
    for text in said:
        between, end = [], 0
        for match in _WORD.finditer(text):
            word = match[0]
            if name and (word == name or word.startswith(f"{name}.")):
                word = _OWN
            elif not (_DIGIT.search(word) or "." in word or text.startswith(": ", match.end())):
                continue
            between.append(text[end : match.start()])
            words.append(word)
            end = match.end()
        shared.append((*between, text[end:]))
    return tuple(shared), tuple(words)


class _Shape:
    """The texts that share all but some words.

    rows: the words -> the nodes that say them, and their own texts
    """

    def __init__(self, shared: tuple[tuple[str, ...], ...]) -> None:
        self.shared = shared
        self.rows: dict[tuple[str, ...], tuple[list[str], list[Texts]]] = {}

        before = (text for between in shared for text in between[:-1])
        #: Whether a word can be an address: it is no part of a path.
        self.free = tuple(not text.endswith("/") for text in before)

    @property
    def count(self) -> int:
        return sum(len(names) for names, _ in self.rows.values())

    def add(self, said: Texts, words: tuple[str, ...], names: list[str]) -> None:
        known, texts = self.rows.setdefault(words, ([], []))
        known.extend(names)
        texts.append(said)

    def forget_addresses(self) -> None:
        """Make one row of the rows that differ by an address of each node's own alone."""
        found: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for words in self.rows:
            plain = tuple(
                _EACH if free and _ADDRESS.fullmatch(word) else word
                for word, free in zip(words, self.free)
            )
            found.setdefault(plain, []).append(words)
        for plain, several in found.items():
            if len(several) > 1:
                kept: tuple[str, ...] = several[0]
                for at, word in enumerate(plain):
                    if len({words[at] for words in several}) > 1:
                        kept = (*kept[:at], word, *kept[at + 1 :])
                for words in several:
                    names, texts = self.rows.pop(words)
                    known, others = self.rows.setdefault(kept, ([], []))
                    known.extend(names)
                    others.extend(texts)

    def said(self, words: Sequence[str]) -> Texts:
        """The texts with these words; an own name or address in front of a reason goes."""
        left, texts = list(words), []
        for between in self.shared:
            here, left = left[: len(between) - 1], left[len(between) - 1 :]
            text = "".join(piece for pair in zip(between, [*here, ""]) for piece in pair)
            for own in (_OWN, _EACH):
                if here[:1] == [own] and not between[0]:
                    text = text.removeprefix(f"{own}: ")
            texts.append(text)
        return tuple(texts)

    def row(self, words: tuple[str, ...]) -> Alike:
        names, texts = self.rows[words]
        return Alike(texts[0] if len(texts) == 1 else self.said(words), names)

    def each(self) -> Iterator[Alike]:
        return map(self.row, self.rows)

    def merged(self) -> Alike:
        """All of them as one row."""
        if len(self.rows) == 1:
            return self.row(next(iter(self.rows)))
        counts = [len(names) for names, _ in self.rows.values()]
        words, differ = [], 0
        for free, column in zip(self.free, zip(*self.rows)):
            values: Counter[str] = Counter()
            for word, count in zip(column, counts):
                values[word] += count
            differ += len(values) > 1
            words.append(_values(values, free))
        names = [name for some, _ in self.rows.values() for name in some]
        some, texts = max(self.rows.values(), key=lambda row: len(row[0]))
        example = (some[0], texts[0]) if differ > 1 else ("", ())
        return Alike(self.said(words), names, *example, texts=len(self.rows))


def _values(found: Counter[str], free: bool) -> str:
    """The values that one word has: ``71.2 to 84.9``, ``eth0, eth1``, ``a, b and 17 more``.

    free: addresses that are another one on each node are not named
    """
    if len(found) == 1:
        return next(iter(found))
    matches = [_NUMBER.fullmatch(value) for value in found]
    around = {(match[1], match[3]) for match in matches if match}
    if None in matches or len(around) > 1:
        if (
            free
            and len(found) == sum(found.values()) > _NAMED
            and all(map(_ADDRESS.fullmatch, found))
        ):
            return _EACH
        first = [value for value, _ in found.most_common(_NAMED)]
        if len(found) <= _NAMED:
            return ", ".join(first)
        return f"{', '.join(first[:2])} and {len(found) - 2} more"
    ranked = sorted(found, key=_number)
    if len(ranked) <= _NAMED:
        return ", ".join(ranked)
    text = f"{ranked[0]} to {ranked[-1]}"
    most, count = found.most_common(1)[0]
    return f"mostly {most} ({text})" if count * 2 > sum(found.values()) else text


def _number(text: str) -> float:
    match = _NUMBER.fullmatch(text)
    return float(match[2].replace(",", "")) if match else 0.0


def _others(kinds: Sequence[_Shape]) -> Alike:
    """One row for texts of many shapes: an example."""
    names = [name for one in kinds for some, _ in one.rows.values() for name in some]
    some, texts = next(iter(kinds[0].rows.values()))
    return Alike((), names, some[0], texts[0], sum(len(one.rows) for one in kinds))

"""The text of ``nft list`` as blocks and statements, and the sets and maps in it (nft(8))."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

Tokens = list[str]
#: An element of a set, one part per selector, and the verdict that a map gives for it.
Element = tuple[tuple[str, ...], Tokens]

_TOKEN = re.compile(r'"[^"\n]*"|# xt_\w+|#[^\n]*|[{}(),;\n]|[^\s{}(),;"]+|"')
#: What may follow an element of a set.
_ELEMENT_END = {"timeout", "expires", "comment", "counter", "limit", "quota", "last"}


def tokens(text: str) -> Tokens:
    """The words, brackets and line ends of the text."""
    return _TOKEN.findall(text)


@dataclass(frozen=True)
class SetOf:
    """A set or map: its elements, each with its verdict; None when they change by themselves."""

    elements: tuple[Element, ...] | None


def statements(words: Tokens) -> Iterator[Tokens]:
    """The statements of a block; a line end or a semicolon ends one, but not inside braces."""
    depth = 0
    current: Tokens = []
    for token in words:
        depth += (token in "{(") - (token in "})")
        if token in "\n;" and depth <= 0:
            if current:
                yield current
            current = []
        elif not token.startswith("#") or token.startswith("# xt_"):
            current.append(token)
    if current:
        yield current


def block(statement: Tokens) -> tuple[Tokens, Tokens] | None:
    """``chain input {...}`` as its words and what is inside; None for a plain statement."""
    if "{" not in statement or statement[-1] != "}":
        return None
    at = statement.index("{")
    return statement[:at], statement[at + 1 : -1]


def _split(words: Tokens, by: str) -> list[Tokens]:
    """Pieces between separators that are not inside braces."""
    pieces: list[Tokens] = [[]]
    depth = 0
    for token in words:
        depth += (token in "{(") - (token in "})")
        if token == by and depth == 0:
            pieces.append([])
        elif token != "\n":
            pieces[-1].append(token)
    return [piece for piece in pieces if piece]


def key(words: Tokens) -> tuple[str, ...]:
    """One element, ``10.0.0.1 . tcp . 80``, as its parts."""
    parts = []
    for piece in _split(words, "."):
        word = piece[0].strip('"')
        parts.append(word if len(piece) == 1 or piece[1] in _ELEMENT_END else "?")
    return tuple(parts)


def elements(inside: Tokens) -> tuple[Element, ...]:
    """What stands between the braces of a set or map."""
    found: list[Element] = []
    for piece in _split(inside, ","):
        halves = _split(piece, ":")
        if halves:
            found.append((key(halves[0]), halves[1] if len(halves) > 1 else []))
    return tuple(found)


def read_set(inside: Tokens) -> SetOf:
    """The set or map whose block this is."""
    found: tuple[Element, ...] = ()
    for statement in statements(inside):
        if statement[0] == "elements" and "{" in statement:
            found = elements(statement[statement.index("{") + 1 : -1])
        elif statement[0] == "timeout" or (statement[0] == "flags" and "dynamic" in statement):
            return SetOf(None)
    return SetOf(found)


def group(words: Tokens, at: int) -> int:
    """Behind the bracket that closes the one at ``at``."""
    depth = 0
    for index in range(at, len(words)):
        depth += (words[index] in "{(") - (words[index] in "})")
        if depth == 0:
            return index + 1
    return len(words)


def listed(words: Tokens, at: int) -> tuple[Tokens, int]:
    """``a,b,c``, or ``(a | b | c)``, as words."""
    if words[at : at + 1] == ["("]:
        end = group(words, at)
        return [t for t in words[at + 1 : end - 1] if t != "|"], end
    found = words[at : at + 1]
    at += 1
    while words[at : at + 1] == [","] and at + 1 < len(words):
        found.append(words[at + 1])
        at += 2
    return found, at

"""Pieces of a terminal report: sanitised, aligned, the meaning never carried by colour alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

from rich.text import Text

from nodeready.nodesets import fold
from nodeready.results import Result
from nodeready.sanitise import sanitise

STYLES = {
    "fail": "bold red",
    "warn": "yellow",
    "unknown": "magenta",
    "unreachable": "bold red",
    "failed": "bold red",
    "changed": "green",
    "change": "cyan",
    "ok": "green",
    "na": "dim",
    "waived": "dim",
}

Key = TypeVar("Key", bound=Hashable)


def grouped(pairs: Iterable[tuple[Key, str]]) -> list[tuple[Key, list[str]]]:
    """Equal things with the names of all nodes that share them, the most common first."""
    found: dict[Key, list[str]] = {}
    for key, name in pairs:
        found.setdefault(key, []).append(name)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def nodes(names: Iterable[str], limit: int = 60) -> str:
    """A folded node set; a very long one is cut, with the count."""
    names = list(names)
    text = sanitise(fold(names))
    if len(text) <= limit:
        return text
    more = f"... ({len(names)} nodes)"
    kept = text[: limit - len(more)]
    return kept[: kept.rfind(",") + 1 or None] + more


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 node``, ``3 nodes``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def line(*parts: str | tuple[str, str]) -> Text:
    """One line of parts, each a text or (text, style); everything is sanitised."""
    text = Text()
    for part in parts:
        plain, style = part if isinstance(part, tuple) else (part, "")
        text.append(sanitise(plain), style)
    return text


def told(result: Result) -> str:
    """What is, what should be, and where it comes from, in one clause."""
    text = result.actual
    if result.expected and result.status in ("fail", "warn") and result.expected != result.actual:
        text = f"{text} (want {result.expected})"
    return f"{text}  [{result.source}]" if result.source else text

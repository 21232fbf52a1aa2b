"""Lines of a report on a terminal: sanitised pieces of text, each with its style.

A style is a word, which the control machine hands to rich; a node shows the plain text. Colour is
never the only carrier of a meaning.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, Union

from nodeready.core.severity import words
from nodeready.core.text import counted, cut, sanitise

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
    # Groups of ranks, by their verdict or kind: see nodeready.runs.stacks.document.
    "missing": "bold red",
    "dead": "bold red",
    "no-data": "bold red",
    "uninterruptible": "bold red",
    "stopped": "red",
    "traced": "magenta",
    "blocked": "yellow",
    "spinning": "yellow",
    "unsure": "magenta",
    "suspect": "bold red",
    "victim": "cyan",
    "progressing": "green",
    "stack": "bold",
}
Key = TypeVar("Key", bound=Hashable)
#: A text, or a text with its style.
Part = Union[str, tuple[str, str]]


@dataclass(frozen=True)
class StyledLine:
    """One line of a report: pieces of sanitised text, each with its style or ""."""

    parts: tuple[tuple[str, str], ...]

    @property
    def plain(self) -> str:
        """The text without styles."""
        return "".join(text for text, _ in self.parts)

    def with_text(self, text: str) -> StyledLine:
        """This line with more text at its end."""
        return StyledLine((*self.parts, *line(text).parts))

    def cut(self, limit: int) -> StyledLine:
        """This line, cut after ``limit`` characters, with ``...``."""
        parts, room = [], limit
        for text, style in self.parts:
            parts.append((text[:room], style))
            room -= len(text)
            if room < 0:
                return StyledLine((*parts, ("...", "")))
        return self


def grouped(pairs: Iterable[tuple[Key, str]]) -> list[tuple[Key, list[str]]]:
    """Equal keys with the names of all their nodes, the most common key first.

    >>> grouped([("ok", "a"), ("bad", "b"), ("bad", "c")])
    [('bad', ['b', 'c']), ('ok', ['a'])]
    """
    names_of: dict[Key, list[str]] = {}
    for key, name in pairs:
        names_of.setdefault(key, []).append(name)
    return sorted(names_of.items(), key=lambda item: -len(item[1]))


class Safe(str):
    """A text that is already sanitised, and is never cut, such as a node set."""

    __slots__ = ()


def node_set(names: Iterable[str], limit: int = 60) -> Safe:
    """The folded node set; beyond ``limit`` characters it is cut, and ends with the count.

    >>> node_set(["gpu1", "gpu2"])
    'gpu[1-2]'
    """
    names = list(names)
    if len(names) == 1:
        return Safe(cut(sanitise(names[0]), limit, 1))
    # The node's own program has no ClusterShell, and only ever one name, its own.
    from nodeready.fleet.inventory.nodeset import folded

    return Safe(folded(names, limit))


def node_set_or_count(names: Sequence[str], limit: int) -> str:
    """The folded node set where it fits into the limit; else ``12 nodes``."""
    text = node_set(names, 1_000_000)
    return text if len(text) <= limit else counted(len(names), "node")


def line(*parts: Part) -> StyledLine:
    """One line of parts, each a text or (text, style); all but `Safe` texts are sanitised."""
    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return StyledLine(
        tuple((text if isinstance(text, Safe) else sanitise(text), style) for text, style in pairs)
    )


def with_inventory(text: str, inventory: str) -> str:
    """A fix with the run's inventory in its commands."""
    return text.replace(" INVENTORY", f" {inventory}")


def cost_text(severity: str, status: str) -> str:
    """The severity of a finding in words; ``loses job?`` of what is unknown; "" of other results.

    >>> cost_text("loses_job", "unknown")
    'loses job?'
    """
    if status not in ("fail", "unknown", "warn") or not severity:
        return ""
    return f"{words(severity)}?" if status == "unknown" else words(severity)

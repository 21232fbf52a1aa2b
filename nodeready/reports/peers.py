"""In what a node differs from its peers, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nodeready.audit import Outlier
from nodeready.reports.text import counted, grouped, nodes


def shown(value: Any) -> str:
    """A fact's value; a node that has no such thing has "none"."""
    return "none" if value is None else str(value)


def majority(outlier: Outlier) -> str:
    """What the others have: ``61 nodes of h100: 535.161.08``."""
    return f"{counted(outlier.count, 'node')} of {outlier.group}: {shown(outlier.majority)}"


def differing(outlier: Outlier, name: str) -> str:
    """The same for one of those who differ."""
    return f"{outlier.fact} is {shown(outlier.nodes[name])}; {majority(outlier)}"


def who(outlier: Outlier) -> Iterator[tuple[list[str], str]]:
    """Who differs, with the value; the most nodes first."""
    for value, names in grouped((shown(value), name) for name, value in outlier.nodes.items()):
        yield names, value


def told_outlier(outlier: Outlier, limit: int = 4) -> str:
    """One line: ``gpus.driver gpu017: 535.129.03; 61 nodes of h100: 535.161.08``."""
    rows = [f"{nodes(names)}: {value}" for names, value in who(outlier)]
    more = [f"and {len(rows) - limit} more values"] if len(rows) > limit else []
    return "; ".join([f"{outlier.fact} {rows[0]}", *rows[1:limit], *more, majority(outlier)])

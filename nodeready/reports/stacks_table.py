"""Where the ranks stand, on a terminal: the most suspicious group first."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.reports.text import Line, line
from nodeready.stacks import Stacks


def show(stacks: Stacks, verbose: int = 0, width: int = 80) -> Iterator[Line]:
    """The headline, a row per group, the merged tree, and what to look at next."""
    yield line(f"{len(stacks.groups)} groups")

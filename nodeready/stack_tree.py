"""The stacks of all groups as one tree: what is common to them is there once."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.stacks import Frame, Stacks


@dataclass(frozen=True)
class Tree:
    """A call, with what was called from there.

    frame:     None at the root
    processes: how many have it on their stack
    ranks:     theirs, sorted
    groups:    indexes into `Stacks.groups`, of all that pass here
    children:  the largest first
    """

    frame: Frame | None
    processes: int
    ranks: tuple[int, ...]
    groups: tuple[int, ...]
    children: tuple[Tree, ...]


def tree(stacks: Stacks) -> Tree:
    """The prefix tree of all groups that have frames."""
    raise NotImplementedError

"""The merged tree of all stacks, chain by chain: calls that the same processes share are one row.

No recursion: ranks that are in a recursive function make a tree that is hundreds of branches deep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nodeready.stack_tree import Tree, tree
from nodeready.stacks import Frame, Stacks


class Branch(NamedTuple):
    """Calls without a branch between them.

    frames: root to leaf; () where a row stands for branches that are not shown
    lasts:  for it and every branch above it, the outermost first, whether it is the last one there
    ends:   how many of its processes stand at its last call
    width:  digits of the largest number of processes beside it
    hidden: the branches that it stands for
    """

    frames: tuple[Frame, ...]
    processes: int
    ranks: tuple[int, ...]
    groups: tuple[int, ...]
    lasts: tuple[bool, ...]
    ends: int
    width: int
    hidden: int = 0

    @property
    def depth(self) -> int:
        """How many branches are above it."""
        return len(self.lasts) - 1


def _chain(node: Tree) -> tuple[tuple[Frame, ...], Tree]:
    """The calls up to the next branch, and the node there."""
    frames = []
    while True:
        if node.frame is not None:
            frames.append(node.frame)
        if len(node.children) != 1 or node.children[0].processes != node.processes:
            return tuple(frames), node
        node = node.children[0]


def branches(stacks: Stacks, most: int, deepest: int) -> Iterator[Branch]:
    """The rows of the tree from the root on, a branch before what comes after it.

    most:    branches that are shown at one place; one row stands for the others
    deepest: branches that are shown one below the other
    """
    root = tree(stacks)
    starts = root.children if root.frame is None else (root,)
    waiting: list[tuple[Tree | list[Tree], tuple[bool, ...], int]] = []

    def put(children: tuple[Tree, ...], lasts: tuple[bool, ...]) -> None:
        shown = len(children) if len(children) <= most else most
        if len(lasts) >= deepest:
            shown = 0
        width = max((len(str(child.processes)) for child in children), default=0)
        if children[shown:]:
            waiting.append((list(children[shown:]), (*lasts, True), width))
        for child in reversed(children[:shown]):
            last = child is children[-1]
            waiting.append((child, (*lasts, last), width))

    put(starts, ())
    while waiting:
        node, lasts, width = waiting.pop()
        if isinstance(node, list):
            count = sum(one.processes for one in node)
            yield Branch((), count, (), (), lasts, 0, width, len(node))
            continue
        frames, end = _chain(node)
        ends = end.processes - sum(child.processes for child in end.children)
        yield Branch(frames, node.processes, node.ranks, node.groups, lasts, ends, width)
        put(end.children, lasts)

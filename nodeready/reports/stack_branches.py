"""The merged tree of all stacks as rows: a row has the calls that the same processes share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nodeready.runs.stacks.document import Frame, JobTree, Stacks, tree


class Branch(NamedTuple):
    """A row of the merged tree: calls without a branch between them."""

    frames: tuple[Frame, ...]  # root to leaf; () for a row that stands for hidden branches
    processes: int
    ranks: tuple[int, ...]
    groups: tuple[int, ...]
    # for every branch above this one, the outermost first, and for this one: whether it is the
    # last of its siblings
    lasts: tuple[bool, ...]
    ends: int  # number of the branch's processes that stand at its last call
    width: int  # digits of the largest number of processes among the siblings
    hidden: int = 0  # number of branches that the row stands for

    @property
    def depth(self) -> int:
        """Number of the branches above it."""
        return len(self.lasts) - 1


def _chain(node: JobTree) -> tuple[tuple[Frame, ...], JobTree]:
    """The calls from ``node`` up to the next branch, and the tree's node at that branch."""
    frames = []
    while True:
        if node.frame is not None:
            frames.append(node.frame)
        if len(node.children) != 1 or node.children[0].processes != node.processes:
            return tuple(frames), node
        node = node.children[0]


def branches(stacks: Stacks, max_branches: int, max_depth: int) -> Iterator[Branch]:
    """The rows of the merged tree, a branch before the branches below it.

    The function does not recurse, because ranks in a recursive function make a tree that is
    hundreds of branches deep.

    max_branches: maximum number of siblings; one row stands for the hidden ones
    max_depth:    maximum number of nested branches
    """
    root = tree(stacks)
    starts = root.children if root.frame is None else (root,)
    waiting: list[tuple[JobTree | list[JobTree], tuple[bool, ...], int]] = []

    def push(children: tuple[JobTree, ...], lasts: tuple[bool, ...]) -> None:
        shown = len(children) if len(children) <= max_branches else max_branches
        if len(lasts) >= max_depth:
            shown = 0
        width = max((len(str(child.processes)) for child in children), default=0)
        if children[shown:]:
            waiting.append((list(children[shown:]), (*lasts, True), width))
        for child in reversed(children[:shown]):
            waiting.append((child, (*lasts, child is children[-1]), width))

    push(starts, ())
    while waiting:
        node, lasts, width = waiting.pop()
        if isinstance(node, list):
            count = sum(hidden.processes for hidden in node)
            yield Branch((), count, (), (), lasts, 0, width, len(node))
            continue
        frames, end = _chain(node)
        ends = end.processes - sum(child.processes for child in end.children)
        yield Branch(frames, node.processes, node.ranks, node.groups, lasts, ends, width)
        push(end.children, lasts)

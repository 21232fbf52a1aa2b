"""The merged tree of all stacks with its chains: calls that all of its processes share are one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nodeready.stack_tree import Tree, tree
from nodeready.stacks import Frame, Stacks


@dataclass(frozen=True)
class Branch:
    """Calls without a branch between them, root to leaf.

    ends:     how many of its processes stand at its last call
    children: what the others called from there, the largest first
    """

    frames: tuple[Frame, ...]
    processes: int
    ranks: tuple[int, ...]
    groups: tuple[int, ...]
    ends: int
    children: tuple[Branch, ...]


def _branch(node: Tree) -> Iterator[Branch]:
    frames = []
    while node.frame is not None:
        frames.append(node.frame)
        if len(node.children) != 1 or node.children[0].processes != node.processes:
            break
        node = node.children[0]
    children = tuple(branch for child in node.children for branch in _branch(child))
    if not frames:
        yield from children
        return
    ends = node.processes - sum(child.processes for child in node.children)
    yield Branch(tuple(frames), node.processes, node.ranks, node.groups, ends, children)


def branches(stacks: Stacks) -> tuple[Branch, ...]:
    """The chains that begin at the root, with what comes after them."""
    return tuple(_branch(tree(stacks)))

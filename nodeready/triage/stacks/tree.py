"""The stacks of all groups as one tree: what is common to them is there once."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.triage.stacks.document import Frame, Stacks


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


class _Node:
    __slots__ = ("below", "groups", "lines")

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.lines: set[int] = set()
        self.below: dict[tuple[str, str], _Node] = {}


def tree(stacks: Stacks) -> Tree:
    """The prefix tree of all groups that have frames; a frame's line is 0 where they differ."""
    root = _Node()
    for index, group in enumerate(stacks.groups):
        if not group.frames:
            continue
        at = root
        at.groups.append(index)
        for frame in group.frames:
            place = (frame.function, frame.file)
            below = at.below.get(place)
            at = below if below is not None else at.below.setdefault(place, _Node())
            at.groups.append(index)
            at.lines.add(frame.line)
    ranks: dict[tuple[int, ...], tuple[int, ...]] = {}

    def made(node: _Node, frame: Frame | None, children: tuple[Tree, ...]) -> Tree:
        groups = tuple(node.groups)
        if groups not in ranks:
            together = {rank for index in groups for rank in stacks.groups[index].ranks}
            ranks[groups] = tuple(sorted(together))
        processes = sum(stacks.groups[index].processes for index in groups)
        return Tree(frame, processes, ranks[groups], groups, children)

    # Without recursion: a stack can be deeper than Python's own.
    order: list[tuple[_Node, Frame | None]] = [(root, None)]
    for node, _ in order:
        for (function, file), child in node.below.items():
            line = next(iter(child.lines)) if len(child.lines) == 1 else 0
            order.append((child, Frame(function, file, line)))
    done: dict[int, Tree] = {}
    for node, own in reversed(order):
        children = [done.pop(id(child)) for child in node.below.values()]
        children.sort(key=lambda child: (-child.processes, child.ranks[:1]))
        done[id(node)] = made(node, own, tuple(children))
    return done[id(root)]

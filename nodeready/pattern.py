"""Which node tries which: pairs for all nodes at once, in rounds in which nobody has two.

A round is an offset into the list of the nodes: node ``i`` goes to node ``i + offset``, around
the end of the list. So in each round every node opens one connection and takes one, however many
nodes there are: no node is the one that all others hammer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def ring_and_skips(count: int) -> tuple[int, ...]:
    """The offsets 1, 2, 4, … below ``count``: the ring, and skips that double.

    Every node tries log2(count) others and is tried by as many, which tells a node that nobody
    reaches from a pair that fails, at 10,000 nodes with 14 connections each instead of 9,999; and
    neighbours, other racks and other switches are all among them.
    """
    return tuple(1 << power for power in range(max(0, count - 1).bit_length()))


def full(count: int) -> tuple[int, ...]:
    """The offsets 1 … ``count`` - 1: every node tries every other one."""
    return tuple(range(1, count))


def rounds(names: Sequence[str], offsets: Iterable[int]) -> list[list[tuple[str, str]]]:
    """For each offset the pairs (source, target), one of each per node.

    An offset that leads every node to itself, or where an earlier one led already, is left out:
    of two nodes there is one round. Raises ValueError when a name is there twice, for two nodes
    could not be told apart.
    """
    count = len(names)
    if len(set(names)) != count:
        raise ValueError("a name is there twice")
    turned = [*names, *names]
    different = dict.fromkeys(offset % count for offset in offsets if count and offset % count)
    return [list(zip(names, turned[offset : offset + count], strict=True)) for offset in different]


def peers_of(names: Sequence[str], offsets: Iterable[int]) -> dict[str, tuple[str, ...]]:
    """For each node the others that it tries, in the order of the rounds."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for pairs in rounds(names, offsets):
        for source, target in pairs:
            found[source].append(target)
    return {name: tuple(targets) for name, targets in found.items()}

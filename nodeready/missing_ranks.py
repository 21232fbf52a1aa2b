"""Ranks that WORLD_SIZE counts and nobody found, and where they should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from nodeready.nodesets import fold
from nodeready.stacks import Group

#: More ranks than any job has had: such a number is a mistake, and nothing is made of it.
MAX_RANKS = 1 << 20
#: How the reason ends when all of them are on nodes without an answer.
SILENT = ", without an answer"


def missing(
    world_size: int | None,
    by_node: Mapping[str, Collection[int]],
    silent: Collection[str],
    without: Collection[str],
) -> Group | None:
    """The group of missing ranks; None when there are none, or nobody knows.

    by_node: node -> the ranks that were found there
    silent:  nodes that gave no answer
    without: nodes that answered and have no rank of this job
    """
    found = {rank for ranks in by_node.values() for rank in ranks}
    if not world_size or not 0 < world_size <= MAX_RANKS or max(found, default=0) >= world_size:
        return None
    if len(found) == world_size or not found:
        return None
    ranks = tuple(rank for rank in range(world_size) if rank not in found)
    nodes = expected(world_size, ranks, by_node, [*silent, *without])
    why = f"WORLD_SIZE {world_size} counts them, and nobody found them"
    if nodes:
        why += f"; expected on {fold(nodes)}"
        if set(nodes) <= set(silent):
            why += SILENT
    elif silent:
        why += f"; {len(silent)} node{'s' if len(silent) > 1 else ''} gave no answer"
    return Group("missing", None, ranks, nodes, why=why)


def expected(
    world_size: int,
    ranks: Collection[int],
    by_node: Mapping[str, Collection[int]],
    others: Collection[str],
) -> tuple[str, ...]:
    """The nodes that should have these ranks; () when the ranks found follow no rule.

    The rule is that of torchrun and of Slurm's block distribution: each node has the same number
    of ranks, one after the other.
    """
    if len(by_node) == 1 and not others:
        return tuple(by_node)
    sizes = Counter(len(set(found)) for found in by_node.values())
    size = max(sizes, key=lambda one: (sizes[one], one))
    if world_size % size:
        return ()
    home: dict[int, str] = {}
    for node, found in by_node.items():
        blocks = {rank // size for rank in found}
        block = blocks.pop()
        if blocks or block in home:
            return ()
        home[block] = node
    blocks = {rank // size for rank in ranks}
    nodes = [home[block] for block in sorted(blocks & home.keys())]
    away = blocks - home.keys()
    if not away:
        return tuple(nodes)
    return (*nodes, *others) if len(away) == len(others) else ()

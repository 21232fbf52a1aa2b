"""The groups and the sweeps of a smoke test, and its rounds if there is no fault. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from nodeready.runs.ready import mesh

#: Up to this number of nodes, a sweep has all pairs.
_ALL_PAIRS = 64


class SmokePlan(NamedTuple):
    """The tests and rounds of a fleet without a fault."""

    tests: int  # number of tests of several nodes, before the sweep
    rounds: int  # number of rounds before the sweep; the first round tests each node alone
    sweeps: int  # number of rounds of the sweep, which tests pairs of nodes


def split_groups(nodes: Sequence[str]) -> list[list[str]]:
    """Groups of about √N neighbours, each of two nodes or more.

    >>> split_groups(["a", "b", "c", "d"])
    [['a', 'b'], ['c', 'd']]
    """
    count = max(1, min(len(nodes) // 2, round(math.sqrt(len(nodes)))))
    ends = [len(nodes) * number // count for number in range(count + 1)]
    return [list(nodes[begin:end]) for begin, end in itertools.pairwise(ends)]


def sweep_offsets(count: int, full: bool) -> list[int]:
    """The offsets between the nodes of a pair, one per round of the sweep.

    full: all offsets; else the ring and the skips, in both directions
    """
    if full or count <= _ALL_PAIRS:
        return [*mesh.full(count)]
    return [offset for skip in mesh.ring_and_skips(count) for offset in (skip, count - skip)]


def plan(count: int, *, full: bool = False) -> SmokePlan:
    """The plan of a fleet with this number of nodes."""
    if count < 2:
        return SmokePlan(0, count, 0)
    groups = len(split_groups([""] * count))
    merges = int(groups > 1)
    sweeps = len({offset % count for offset in sweep_offsets(count, full)})
    return SmokePlan(groups + merges, 2 + merges, sweeps)

"""What an earlier look saw of counters that only ever grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Counters:
    """The counters of one subject at an earlier look at the same boot of the same node.

    A counter of an adapter runs from the last reset or load of its driver, so that a total
    says nothing about today: only the change between two looks does.
    """

    #: How long before the present look the earlier one was, in seconds.
    seconds: float
    #: Counter -> its value then; the names are the subject's own ("mlx5_0/1.link_downed").
    values: Mapping[str, int]

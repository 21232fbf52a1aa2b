"""Audit: the document that every report shows. Pure data, from the looks at all nodes.

A node costs its results and its snapshot; the plain data of its facts is made when a report asks,
and never kept, so that 10,000 nodes fit in memory.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from nodeready.plain import plain
from nodeready.results import STATUSES, Result, worst
from nodeready.snapshot import Snapshot
from nodeready.subjects import SUBJECTS

#: Statuses of a node beside those of its results: it was not reached, or was lost on the way; it
#: could not be looked at for another reason (sudo, an interrupt, a mistake of ours).
UNREACHABLE, FAILED = "unreachable", "failed"
#: The statuses of a node, worst first.
NODE_STATUSES: tuple[str, ...] = (UNREACHABLE, FAILED, *STATUSES)
#: The error of a node that an interrupt left out.
NOT_LOOKED_AT = "not looked at: interrupted"


def now() -> str:
    """This moment as the reports write it: ISO 8601, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass(frozen=True)
class NodeReport:
    """One node of an audit.

    status:  one of NODE_STATUSES
    seconds: wall time of its look, connection included; 0 when there was none
    error:   one line when it could not be looked at, else ""
    groups:  of the inventory that it is in
    """

    name: str
    status: str
    seconds: float = 0.0
    error: str = ""
    groups: tuple[str, ...] = ()
    results: tuple[Result, ...] = ()
    snapshot: Snapshot | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        name: str,
        results: Iterable[Result] = (),
        *,
        snapshot: Snapshot | None = None,
        seconds: float = 0.0,
        error: str = "",
        unreachable: bool = False,
        groups: Iterable[str] = (),
    ) -> NodeReport:
        """The report of a node, with its status: the worst of its results, or the error's."""
        results = tuple(results)
        status = worst(results)
        if error:
            status = UNREACHABLE if unreachable else FAILED
        return cls(name, status, seconds, error, tuple(groups), results, snapshot)

    @property
    def facts(self) -> dict[str, Any]:
        """Subject -> what was observed of it, as plain data; made anew each time."""
        if self.snapshot is None:
            return {}
        seen = self.snapshot.subjects
        return {name: plain(seen[name]) for name in SUBJECTS if name in seen}


@dataclass(frozen=True)
class Outlier:
    """One fact in which some nodes of a group differ from most of it.

    fact:     ``SUBJECT.NAME``, e.g. ``gpus.driver``
    group:    the group of the inventory in which the nodes were compared
    majority: the value that most of them have; None: there is no such thing on the node
    count:    the number of nodes that have it
    nodes:    who differs -> their value
    """

    fact: Annotated[str, {"minLength": 1}]
    group: str
    majority: Any
    count: Annotated[int, {"minimum": 1}]
    nodes: Annotated[Mapping[str, Any], {"minProperties": 1}]


@dataclass(frozen=True)
class Audit:
    """What one audit found.

    started, finished: ISO 8601, UTC, with a Z
    policy_digest:     of the nodes' policies: equal digests, equal expectations
    complete:          False when it was interrupted: nodes that were not looked at are there with
                       the status FAILED and the error NOT_LOOKED_AT
    """

    started: str
    finished: str
    policy_digest: str
    nodes: tuple[NodeReport, ...]
    outliers: tuple[Outlier, ...] = ()
    complete: bool = True

    @cached_property
    def summary(self) -> dict[str, dict[str, int]]:
        """``{"nodes": {status: count}, "results": {status: count}}``, with every status."""
        nodes = Counter(node.status for node in self.nodes)
        results = Counter(result.status for node in self.nodes for result in node.results)
        return {
            "nodes": {status: nodes[status] for status in NODE_STATUSES},
            "results": {status: results[status] for status in STATUSES},
        }

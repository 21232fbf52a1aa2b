"""The third argument of a check: facts about a node from other nodes and from earlier runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Counters:
    """The counters of one subject in an earlier snapshot of the same boot of the same node.

    A counter of an adapter runs from the last reset or load of its driver. Its total is
    meaningless: only the change between two snapshots matters.
    """

    seconds: float  # from the earlier snapshot to the present one
    # counter -> its value then; the names are the subject's own ("mlx5_0/1.link_downed")
    values: Mapping[str, int]


@dataclass(frozen=True)
class FleetFacts:
    """Facts about one node from other nodes and from earlier runs."""

    # addresses that exactly one node of the run has; None: fewer than two were probed
    addresses: tuple[str, ...] | None = None
    # the expected lines of the node's block of host keys; None: not gathered
    known_hosts: tuple[str, ...] | None = None
    # the key with which the node's sshd answered this run, ``type base64``; "": unknown
    host_key: str = ""
    # (path, sha256) of every file of the node's gate; None: unknown, as on the node
    gate_files: tuple[tuple[str, str], ...] | None = None
    # subject -> its counters in an earlier snapshot
    counters: Mapping[str, Counters] = field(default_factory=dict)


#: For a node that is judged without its fleet.
ALONE = FleetFacts()

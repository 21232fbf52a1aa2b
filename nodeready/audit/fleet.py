"""What the nodes of a run tell together: their addresses, groups and earlier counters."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from nodeready.audit import counters
from nodeready.subjects.context import FleetContext, addresses_of
from nodeready.subjects.registry import COUNTING, CheckSelection
from nodeready.transport.base import SshPeer
from nodeready.transport.snapshots import SnapshotReply

if TYPE_CHECKING:
    from pyinfra.api import Inventory


def probed_subjects(selection: CheckSelection) -> tuple[str, ...]:
    """The subjects to probe for these checks."""
    subjects = selection.subjects
    has_counters = any(subject in COUNTING for subject in subjects)
    return tuple(dict.fromkeys((*subjects, "host"))) if has_counters else subjects


def complete(
    context: FleetContext,
    replies: Iterable[SnapshotReply],
    peers: Mapping[str, SshPeer] = MappingProxyType({}),
) -> FleetContext:
    """The context with the nodes' addresses and earlier counters; see `with_addresses`."""
    counting, claimed = [], []
    for reply in replies:
        if reply.snapshot is not None:
            if any(name in reply.snapshot.subjects for name in COUNTING):
                counting.append(reply.name)
            addresses = addresses_of(reply.snapshot)
            if addresses is not None:
                claimed.append(addresses)
    return replace(with_addresses(context, claimed, peers), earlier=counters.load(counting))


def with_addresses(
    context: FleetContext, claimed: Sequence[Set[str]], peers: Mapping[str, SshPeer]
) -> FleetContext:
    """The context of this moment, with the addresses of its nodes.

    claimed: the addresses that each node reports
    peers:   the peers that this run's connections reached. Their addresses belong to their nodes,
             whichever other node claims them
    """
    return replace(
        context,
        addresses=_unique_addresses(claimed, peers) if len(claimed) > 1 else None,
        moment=time.time(),
    )


def _unique_addresses(
    claimed: Sequence[Set[str]], peers: Mapping[str, SshPeer]
) -> tuple[str, ...]:
    """The addresses that exactly one node claims, and those that were reached.

    An address of several nodes, such as a container bridge's, leads to none of them. A node may
    claim no more addresses than the median node.
    """
    maximum = statistics.median_high(map(len, claimed))
    counts = Counter(address for addresses in claimed for address in sorted(addresses)[:maximum])
    reached = {peer.address for peer in peers.values()} & counts.keys()
    unique = {address for address, count in counts.items() if count == 1}
    return tuple(sorted(unique | reached))


def distinguishing_groups(inventory: Inventory, name: str, total: int) -> tuple[str, ...]:
    """The node's groups, without those that hold all of the inventory's nodes."""
    groups = inventory.get_host(name).groups
    return tuple(group for group in groups if len(inventory.get_group(group)) < total)

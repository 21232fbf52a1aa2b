"""The addresses and groups of the nodes of a run."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from nodeready.subjects.context import addresses_of
from nodeready.subjects.registry import COUNTING, CheckSelection
from nodeready.transport.base import SshPeer
from nodeready.transport.snapshots import SnapshotReply

if TYPE_CHECKING:
    from pyinfra.api import Inventory


def probed_subjects(selection: CheckSelection) -> tuple[str, ...]:
    subjects = selection.subjects
    has_counters = any(subject in COUNTING for subject in subjects)
    return tuple(dict.fromkeys((*subjects, "host"))) if has_counters else subjects


def addresses_of_replies(
    replies: Iterable[SnapshotReply], peers: Mapping[str, SshPeer]
) -> tuple[str, ...] | None:
    """The addresses of the nodes that were probed; see `unique_addresses`."""
    claimed = [addresses_of(reply.snapshot) for reply in replies if reply.snapshot is not None]
    return unique_addresses([addresses for addresses in claimed if addresses is not None], peers)


def unique_addresses(
    claimed: Sequence[Set[str]], peers: Mapping[str, SshPeer]
) -> tuple[str, ...] | None:
    """The addresses that exactly one node claims, and those that were reached; None for fewer than
    two nodes.

    An address of several nodes, such as a container bridge's, leads to none of them. A node may
    claim no more addresses than the median node.

    claimed: the addresses that each node reports
    peers:   the nodes' sshds. An address that this run has connected to is its node's, whichever
             other node claims it
    """
    if len(claimed) < 2:
        return None
    maximum = statistics.median_high(map(len, claimed))
    counts = Counter(address for addresses in claimed for address in sorted(addresses)[:maximum])
    reached = {peer.address for peer in peers.values()} & counts.keys()
    unique = {address for address, count in counts.items() if count == 1}
    return tuple(sorted(unique | reached))


def distinguishing_groups(inventory: Inventory, name: str, total: int) -> tuple[str, ...]:
    """The node's groups, without those that contain all nodes of the inventory."""
    groups = inventory.get_host(name).groups
    return tuple(group for group in groups if len(inventory.get_group(group)) < total)

"""The fleet's context: the nodes' host keys and addresses, and the digests of the gate's files."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from pyinfra.api import Inventory

from nodeready.inventory.endpoints import endpoint
from nodeready.policy import Policy
from nodeready.subjects.context import FleetContext, addresses_of, context_of
from nodeready.subjects.ssh_client import known_hosts
from nodeready.transport import bundle
from nodeready.transport.base import Request, SshPeer, Transport
from nodeready.transport.snapshots import SnapshotReply


def fleet_context(
    transport: Transport,
    declared: Mapping[str, Policy],
    replies: Iterable[SnapshotReply],
    inventory: Inventory,
) -> FleetContext:
    """The context of these snapshots, without the nodes' addresses.

    declared:  the policies of the inventory, which the gate's files have to have
    transport: fetches a block of known hosts that was too large for a snapshot
    """
    snapshots = {reply.name: reply.snapshot for reply in replies if reply.snapshot is not None}

    def read_block(name: str) -> str:
        request = Request(name, known_hosts.READ_BLOCK, 30)
        return "".join(answer.stdout for _, answer in transport.ask([request]))

    endpoints = {host.name: endpoint(host) for host in inventory}
    for name, peer in transport.ssh_peers().items():
        endpoints[name] = endpoints[name]._replace(reached=peer.address, key=peer.key)
    return context_of(declared, snapshots, endpoints, bundle.program, read_block)


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

"""The fleet's context: the nodes' host keys and addresses, and the digests of the gate's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pyinfra.api import Inventory

from nodeready.agent.asking import Request, SshPeer, Transport
from nodeready.core.outcome import Outcome
from nodeready.core.policy import Policy
from nodeready.fleet.inventory.endpoints import endpoint
from nodeready.fleet.transport import bundle
from nodeready.subjects.context import (
    FleetContext,
    addresses_of,
    context_of,
    unique_addresses,
)
from nodeready.subjects.snapshot import Snapshot
from nodeready.subjects.ssh_client import known_hosts


def fleet_context(
    transport: Transport,
    declared: Mapping[str, Policy],
    outcomes: Iterable[Outcome[Snapshot]],
    inventory: Inventory,
) -> FleetContext:
    """The context of these snapshots, without the nodes' addresses.

    declared:  the policies of the inventory, which the gate's files have to have
    transport: fetches a block of known hosts that was too large for a snapshot
    """
    snapshots = {outcome.node: outcome.value for outcome in outcomes if outcome.value is not None}

    def read_block(name: str) -> str:
        request = Request(name, known_hosts.READ_BLOCK, 30)
        return "".join(answer.stdout for _, answer in transport.ask([request]))

    endpoints = {host.name: endpoint(host) for host in inventory}
    for name, peer in transport.ssh_peers().items():
        endpoints[name] = endpoints[name]._replace(reached=peer.address, key=peer.key)
    return context_of(declared, snapshots, endpoints, bundle.program, read_block)


def addresses_of_nodes(
    outcomes: Iterable[Outcome[Snapshot]], peers: Mapping[str, SshPeer]
) -> tuple[str, ...] | None:
    """The addresses of the nodes that were probed; see `unique_addresses`."""
    claimed = [addresses_of(outcome.value) for outcome in outcomes if outcome.value is not None]
    reached = {peer.address for peer in peers.values()}
    return unique_addresses([addresses for addresses in claimed if addresses is not None], reached)

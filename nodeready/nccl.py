"""Which interface NCCL's sockets should use on a node: the value for NCCL_SOCKET_IFNAME.

Left alone, NCCL takes an interface whose name begins with ``ib``, else the first that is neither
loopback nor Docker's (NVIDIA's NCCL user guide, NCCL_SOCKET_IFNAME): on a node with a management
network, a virtual bridge or an unused port that is often one that reaches no other node, and the
job hangs or stops in its first collective.
"""

from __future__ import annotations

from nodeready.probes.nics import Nics, socket_interface


def socket_ifname(nics: Nics) -> tuple[str | None, str]:
    """The name of the interface, or None, and the reason.

    In this order: the interface whose routes lead to the most of the other nodes (what
    `nodeready.probes.nics.with_peers` found); the one of the default route; the only one that is
    configured. Never loopback, a bridge or wire of containers or virtual machines, or one without
    a link; a bond rather than its slaves, because it is the bond that has the routes.

    NCCL takes the value as a prefix, so that ``eth1`` also means ``eth10``: write ``=eth1``.
    """
    return socket_interface(nics)

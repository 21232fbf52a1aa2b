"""Which RDMA devices NCCL should use: the value of NCCL_IB_HCA.

NCCL takes every active device when nothing tells it otherwise, that of the management too, and
a job then waits for the slowest. A name in NCCL_IB_HCA is a prefix, so that mlx5_1 means mlx5_10
as well; with "=" in front it is exact (NCCL's documentation, environment variables).
"""

from __future__ import annotations

from nodeready.probes.nics import Nics
from nodeready.probes.rdma import Rdma, hcas


def ib_hca(rdma: Rdma, nics: Nics | None) -> tuple[tuple[str, ...], str]:
    """The devices, and why those; without the network (None) as far as RDMA alone tells."""
    return hcas(rdma, () if nics is None else _management(nics))


def variable(devices: tuple[str, ...]) -> str:
    """The value of NCCL_IB_HCA that means these devices and no other; "" for none."""
    return f"={','.join(devices)}" if devices else ""


def _management(nics: Nics) -> set[str]:
    """The interfaces of the default route and of the way to the other nodes, with their ports."""
    ends = {nics.default_interface, *nics.peers_via[:1]} - {None}
    below = {
        name for name, one in nics.interfaces.items() if one.master in ends or ends & {*one.upper}
    }
    return {name for name in ends | below if name}

"""Which RDMA devices NCCL should use, when the network tells what is for management."""

from __future__ import annotations

import pytest

from nodeready.lab.hardware import IB_CLASS, Device, a100, h100, ib_tree, mi300x
from nodeready.policy import Policy
from nodeready.ready.job_env import ib_hca, variable
from nodeready.subjects.base import Output
from nodeready.subjects.nics.facts import Nics
from nodeready.subjects.nics.nic import Nic
from nodeready.subjects.rdma import facts as rdma
from nodeready.subjects.rdma.facts import Rdma


def node(devices: tuple[Device, ...]) -> Rdma:
    text = "".join(
        f"{IB_CLASS}/{path}:{line}\n"
        for path, content in ib_tree(devices).items()
        for line in content.splitlines()
    )
    seen: Rdma = rdma.parse({"rdma": Output(text, 0)}, Policy())
    return seen


def network(default: str | None, *interfaces: Nic, peers: tuple[str, ...] = ()) -> Nics:
    return Nics({one.name: one for one in interfaces}, {}, 0, (), False, default, peers)


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(f"mlx5_{at}" for at in numbers)


@pytest.mark.parametrize(
    ("devices", "nics", "chosen"),
    [
        (h100(), None, names(*range(8))),
        (h100(), network("bond0"), names(*range(8))),
        (mi300x(), None, names(*range(8))),
        (mi300x(), network("eth0"), names(*range(8))),
        (mi300x(), network("eth1"), names(*range(1, 8))),
        (mi300x(), network(None, peers=("eth2", "eth3")), names(0, *range(2, 8))),
        # The default route leads through a bond or a VLAN of the port.
        (mi300x(), network("team0", Nic("eth1", "ethernet", master="team0")), names(*range(1, 8))),
        (mi300x(), network("vlan7", Nic("eth1", "ethernet", upper=("vlan7",))),
         names(*range(1, 8))),
        # InfiniBand is for jobs, also when host names lead there; one port is all there is.
        (a100(), network("ib0", peers=("ib0",)), names(*range(8))),
        (mi300x()[:1], network("eth1"), names(0)),
        ((), network("eth0"), ()),
    ],
)  # fmt: skip
def test_the_ports_of_jobs(
    devices: tuple[Device, ...], nics: Nics | None, chosen: tuple[str, ...]
) -> None:
    assert ib_hca(node(devices), nics)[0] == chosen


def test_it_says_why() -> None:
    assert ib_hca(node(h100()), None)[1] == "active InfiniBand ports at 400 Gb/s"
    assert ib_hca(node(mi300x()), None)[1] == "active RoCE ports at 400 Gb/s"
    assert ib_hca(node(()), None)[1] == "no active InfiniBand or RoCE port"


def test_the_variable_is_exact() -> None:
    assert variable(("mlx5_1", "mlx5_2:2")) == "=mlx5_1,mlx5_2:2"
    assert variable(()) == ""

"""Which variables the nodes' facts suggest, and what is said where they do not agree."""

from __future__ import annotations

import pytest

from nodeready.policy import Policy
from nodeready.ready import job_env
from nodeready.ready.job_env import Variable
from nodeready.subjects.base import Unknown
from nodeready.subjects.pdsh.facts import Pdsh
from nodeready.subjects.snapshot import Snapshot
from tests.builders.job_env import POLICY, nics, node, ports, rdma, socket

NAMES = (
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "PDSH_RCMD_TYPE", "MASTER_PORT",
)  # fmt: skip
LOST = Unknown("timed out")


def of(*nodes: Snapshot, policy: Policy = POLICY) -> dict[str, Variable]:
    """The variables of nodes that are called gpu1, gpu2 and so on."""
    named = {f"gpu{number}": one for number, one in enumerate(nodes, 1)}
    found = job_env.variables(named, dict.fromkeys(named, policy))
    assert tuple(one.name for one in found) == NAMES
    return {one.name: one for one in found}


def values(found: dict[str, Variable]) -> dict[str, str | None]:
    return {name: one.value for name, one in found.items()}


def test_nodes_that_agree() -> None:
    found = of(node(), node(), node())
    assert values(found) == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        "PDSH_RCMD_TYPE": "ssh",
        "MASTER_PORT": "29500",
    }
    assert all(one.settled and one.reason for one in found.values())
    assert all(one.nodes_by_value[0][1] == ("gpu1", "gpu2", "gpu3") for one in found.values())
    assert found["NCCL_SOCKET_IFNAME"].reason == "its routes lead to the other nodes"
    assert found["NCCL_IB_HCA"].reason == "active InfiniBand ports at 400 Gb/s"


def test_what_no_node_needs_is_no_trouble() -> None:
    found = of(*(node(rdma=rdma(), pdsh=Pdsh(installed=False)) for _ in range(2)))
    for name, reason in (
        ("NCCL_IB_HCA", "no active InfiniBand or RoCE port"),
        ("PDSH_RCMD_TYPE", "pdsh is not installed"),
    ):
        assert (found[name].value, found[name].reason) == (None, reason)
        assert found[name].settled
        assert found[name].nodes_by_value == (("", ("gpu1", "gpu2")),)


@pytest.mark.parametrize(
    ("name", "odd", "by_value"),
    [
        ("NCCL_SOCKET_IFNAME", node(nics=nics("eth1")), ("=eth0", "=eth1")),
        ("GLOO_SOCKET_IFNAME", node(nics=nics("eth1")), ("eth0", "eth1")),
        ("NCCL_IB_HCA", node(rdma=rdma("mlx5_0")), ("=mlx5_0,mlx5_1", "=mlx5_0")),
        ("NCCL_IB_HCA", node(rdma=rdma()), ("=mlx5_0,mlx5_1", "")),
    ],
)
def test_nodes_that_differ_set_nothing(
    name: str, odd: Snapshot, by_value: tuple[str, str]
) -> None:
    """The majority comes first, whoever was looked at first."""
    one = of(odd, node(), node())[name]
    assert (one.value, one.reason, one.settled) == (None, "the nodes differ", False)
    assert one.nodes_by_value == ((by_value[0], ("gpu2", "gpu3")), (by_value[1], ("gpu1",)))


def test_a_list_of_interfaces_is_told_where_no_node_has_two_of_them() -> None:
    found = of(node(), node(), node(nics=nics("eth1")))["NCCL_SOCKET_IFNAME"]
    assert found.notes == ("=eth0,eth1 means the right one on each: no node has two of them",)
    found = of(node(), node(nics=nics("eth1", "eth0")))["NCCL_SOCKET_IFNAME"]
    assert (found.notes, found.settled) == ((), False)


def test_pdsh_on_some_nodes_is_enough() -> None:
    one = of(node(pdsh=Pdsh(installed=False)), node())["PDSH_RCMD_TYPE"]
    assert (one.value, one.settled) == ("ssh", True)


@pytest.mark.parametrize(
    ("odd", "names", "why"),
    [
        (
            node(nics=LOST),
            ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"),
            "its network: timed out",
        ),
        (node(rdma=LOST), ("NCCL_IB_HCA",), "its RDMA devices: timed out"),
        (node(pdsh=LOST), ("PDSH_RCMD_TYPE",), "pdsh: timed out"),
        (node(ports=LOST), ("MASTER_PORT",), "timed out"),
        (node(ports=ports(listeners=None)), ("MASTER_PORT",), "/proc/net/tcp cannot be read"),
        (
            node(nics=nics(None, "eth0", "eth1")),
            ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
            "nothing tells which of eth0, eth1 reaches the other nodes",
        ),
        (Snapshot(), NAMES, "not looked at"),
    ],
)
def test_a_node_that_does_not_tell_is_named_and_outvotes_nobody(
    odd: Snapshot, names: tuple[str, ...], why: str
) -> None:
    found = of(node(), odd)
    assert values(found) == values(of(node()))
    for name, one in found.items():
        assert one.settled is (name not in names)
        assert [nodes for _, nodes in one.unknown] == ([("gpu2",)] if name in names else [])
        assert all(why in reason for reason, _ in one.unknown)
    alone = of(odd)
    assert all(alone[name].value is None and not alone[name].settled for name in names)


HOSTILE = (
    "eth0;reboot", "$(id)", "`id`", "a'b", 'a"b', "a b", "a\nb", "=eth0", "^eth0", "eth0,eth1",
    "-rf", "\x1b[2J", "é", "", "e" * 16, "eth0\n",
)  # fmt: skip


@pytest.mark.parametrize("name", [one for one in HOSTILE if one])
def test_a_name_that_nothing_has_is_not_taken(name: str) -> None:
    found = of(node(), node(nics=nics(name), rdma=rdma("mlx5_0", name * 5)))
    assert values(found) == values(of(node()))
    for variable, what in (
        ("NCCL_SOCKET_IFNAME", "an interface"),
        ("GLOO_SOCKET_IFNAME", "an interface"),
        ("NCCL_IB_HCA", "an RDMA device"),
    ):
        ((reason, nodes),) = found[variable].unknown
        assert nodes == ("gpu2",)
        assert reason.endswith(f"is no plausible name of {what}")
        assert reason.isascii()
        assert reason.isprintable()


@pytest.mark.parametrize(
    "name", ["eth0", "enp1s0f0np0", "bond0.100", "ib0", "br-ex", "hsn0", "e" * 15]
)
def test_names_that_interfaces_have(name: str) -> None:
    assert of(node(nics=nics(name)))["NCCL_SOCKET_IFNAME"].value == f"={name}"


def test_the_port_is_one_for_all_nodes() -> None:
    found = of(node(ports=ports(socket(29500))), node())["MASTER_PORT"]
    assert (found.value, found.settled) == ("29501", True)
    assert found.notes == ("not 29500 on gpu1: python3 of ada listens",)
    assert found.nodes_by_value == (("29501", ("gpu1", "gpu2")),)

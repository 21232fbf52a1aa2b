"""Which interface reaches the other nodes, by what /proc says about routes."""

from __future__ import annotations

import ipaddress

import pytest

from nodeready.ready.job_env import socket_ifname
from nodeready.subjects.base import Output
from nodeready.subjects.nics import facts as nics
from nodeready.subjects.nics import nic
from tests.builders.nics import (
    BMC,
    CNI,
    POLICY,
    PORT,
    UP,
    gpu_node,
    node,
    proc,
    text,
    v4,
    v6,
    wrong,
)

PEERS = (
    "10.1.0.7",
    "10.1.0.8",
    "10.1.0.9",
    "10.9.0.8",
    "172.30.0.1",
    "gpu01",
    "127.0.0.1",
    "fe80::1",
)


@pytest.mark.parametrize(
    ("routes", "addresses", "via"),
    [
        (("0.0.0.0/0 a", "10.1.0.0/16 b"), PEERS, ("b", "a")),
        (("0.0.0.0/0 a", "10.1.0.0/16 b", "10.1.0.8/32 c"), PEERS, ("a", "b", "c")),
        (("10.0.0.0/8 a", "10.1.0.0/24 b", "10.1.0.0/16 c"), PEERS, ("b", "a")),
        (("10.1.0.0/16 a", "10.1.0.0/16 b 100"), PEERS, ("a",)),
        (("10.1.0.0/16 a 100", "10.1.0.0/16 b"), PEERS, ("b",)),
        (("192.168.0.0/16 a",), PEERS, ()),
        (("0.0.0.0/0 a",), ("gpu01", "x" * 99, ""), ()),
        (("10.1.0.0/16 zz",), PEERS, ()),
        (("fd00::/64 a", "::/0 b"), ("fd00::5", "fd00::6", "2001:db8::1"), ("a", "b")),
    ],
)  # fmt: skip
def test_the_narrowest_route_reaches_a_peer(
    routes: tuple[str, ...], addresses: tuple[str, ...], via: tuple[str, ...]
) -> None:
    lines = []
    for route in routes:
        network, interface, *metric = route.split()
        make = v6 if ":" in network else v4
        lines.append(make(interface, network, metric=int(metric[0]) if metric else 0))
    seen = node(dict.fromkeys("abc", PORT), routes=tuple(lines))
    assert nics.reaching(seen, addresses) == via
    if via:
        assert nics.with_peers(seen, addresses).nccl_socket_ifname == via[0]


def test_a_nodes_own_networks_are_no_way_to_the_others() -> None:
    interfaces = {"eth0": PORT, "usb1": BMC, "br1": CNI, "flannel.1": UP}
    seen = node(
        {name: dict(one) for name, one in interfaces.items()},
        routes=(
            v4("eth0", "10.1.0.0/16"),
            v4("usb1", "192.168.31.0/24"),
            v4("br1", "10.244.7.0/24"),
            v4("flannel.1", "10.244.0.0/16"),
        ),
        own=("10.1.0.7", "192.168.31.7", "10.244.7.1"),
    )
    everyones = ("10.1.0.7", "192.168.31.7", "10.244.7.1", "10.1.0.8", "10.244.8.1", "10.244.9.1")
    assert nics.reaching(seen, everyones) == ("eth0",)
    assert wrong(nics.with_peers(seen, everyones)) == {}


def test_counting_by_slices_is_the_same_as_address_by_address() -> None:
    networks = ["0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "10.1.2.0/30",
                "10.1.2.128/25", "10.2.0.0/16", "10.1.2.3/32", "192.168.0.0/24"]  # fmt: skip
    names = [f"n{at % 4}" for at in range(len(networks))]
    seen = node(
        {name: dict(PORT) for name in names},
        routes=tuple(v4(name, network) for name, network in zip(names, networks, strict=True)),
    )
    addresses = tuple(
        f"{a}.{b}.2.{c}" for a in (10, 11) for b in range(4) for c in range(0, 250, 3)
    )
    expected: dict[str, int] = {}
    for address in addresses:
        hits = [
            (ipaddress.ip_network(network).prefixlen, name)
            for name, network in zip(names, networks, strict=True)
            if ipaddress.ip_address(address) in ipaddress.ip_network(network)
        ]
        name = max(hits)[1]
        expected[name] = expected.get(name, 0) + 1
    found = nic.reached(seen.routes, addresses)
    assert found == expected


@pytest.mark.parametrize(
    ("changed", "peers", "name"),
    [
        ({}, (), "bond0"),
        ({}, ("10.9.0.8", "10.9.0.9", "10.1.0.8"), "ib0"),
        ({"ib0": {"carrier": 0}}, ("10.9.0.8", "10.9.0.9", "10.1.0.8"), "bond0"),
        ({}, ("172.17.0.2",), "bond0"),
        ({"bond0": {"carrier": 0}}, ("10.1.0.8",), None),
        ({"bond0": {"carrier": 0}}, (), "ib0"),
    ],
)
def test_the_interface_for_nccl(
    changed: dict[str, dict[str, object]], peers: tuple[str, ...], name: str | None
) -> None:
    seen = nics.with_peers(gpu_node(changed), peers)
    found, reason = socket_ifname(seen)
    assert found == seen.nccl_socket_ifname == name
    assert reason


def test_interfaces_in_one_subnet_cannot_be_told_apart() -> None:
    rails = {f"eth{at}": dict(PORT) for at in range(4)}
    seen = node(rails, routes=tuple(v4(name, "10.1.0.0/16") for name in rails), own=("10.1.0.7",))
    assert {seen.interfaces[name].addresses for name in rails} == {None}
    assert seen.configured().keys() == rails.keys()
    assert socket_ifname(seen)[0] is None


@pytest.mark.parametrize(
    "line",
    [
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT",
        v4("*", "10.0.0.0/8", flags=0x201),
        v4("eth0", "10.0.0.0/8", flags=0),
        v4("lo", "10.0.0.0/8"),
        v4("eth0", "10.0.0.0/8").replace("000000FF", "000000F1"),
        v4("eth0", "10.0.0.0/8").replace("000000FF", "00FF00FF"),
        v4("eth0", "10.0.0.0/8")[:20],
        v4("eth0", "10.0.0.0/8", metric=10**12),
        v6("eth0", "fd00::/64", flags=0x80200001),
        v6("eth0", "::/0", flags=0x200 | 1),
        v6("eth0", "fd00::/64")[:70],
        "\x1b[2J \udcff eth0",
        "",
    ],
)
def test_what_is_no_route_of_this_node(line: str) -> None:
    assert node({"eth0": dict(PORT)}, routes=(line,)).routes == ()


def test_thousands_of_routes_of_containers_are_cut() -> None:
    lines = tuple(
        v4("eth0", f"10.{a}.{b}.0/26", "10.0.0.9") for a in range(20) for b in range(200)
    )
    seen = node({"eth0": dict(PORT)}, routes=(v4("eth0", "0.0.0.0/0", "10.0.0.1"), *lines))
    assert len(seen.routes) == 256
    assert seen.default_interface == "eth0"
    outputs = {
        "nics": Output(text({"eth0": dict(PORT)}), 0),
        "nic_routes": Output(proc((v4("eth0", "0.0.0.0/0", "10.0.0.1"),)), None, truncated=True),
    }
    cut = nics.parse(outputs, POLICY)
    assert (cut.routes_cut, cut.default_interface) == (True, "eth0")

"""Which interface reaches the other nodes, by what /proc says about routes."""

import ipaddress

import pytest

from nodeready.core.base import Output
from nodeready.core.policy import Policy
from nodeready.core.result import ALONE, FleetFacts
from nodeready.subjects.nics import facts as nics
from nodeready.subjects.nics import nic
from tests.builders.nics import BASES, PORT, UP, gpu_node, node, proc, route, text, wrong
from tests.cases import cases, read_table

PEERS = ("10.1.0.7", "10.1.0.8", "10.1.0.9", "10.9.0.8", "172.30.0.1", "gpu01", "127.0.0.1",
         "fe80::1")  # fmt: skip


@pytest.mark.parametrize("case", cases(__file__, "data/nics/reached.json"))
def test_the_narrowest_route_reaches_a_peer(case):
    """The name of a row is its routes."""
    routes = case["name"].partition(": ")[0].split(", ")
    observed = node(dict.fromkeys("abc", PORT), routes=tuple(routes))
    addresses = tuple(case.get("addresses", PEERS))
    assert nics.reaching(observed, addresses) == tuple(case["via"])
    if case["via"]:
        fleet = FleetFacts(addresses=addresses)
        assert nics.socket_interface(observed, fleet)[0] == case["via"][0]


def test_a_nodes_own_networks_are_no_way_to_the_others():
    observed = node(
        {"eth0": PORT, "usb1": BASES["BMC"], "br1": BASES["CNI"], "flannel.1": UP},
        routes=("10.1.0.0/16 eth0", "192.168.31.0/24 usb1", "10.244.7.0/24 br1",
                "10.244.0.0/16 flannel.1"),
        own=("10.1.0.7", "192.168.31.7", "10.244.7.1"),
    )  # fmt: skip
    everyones = ("10.1.0.7", "192.168.31.7", "10.244.7.1", "10.1.0.8", "10.244.8.1", "10.244.9.1")
    assert nics.reaching(observed, everyones) == ("eth0",)
    assert wrong(observed, FleetFacts(addresses=everyones)) == {}


def test_counting_by_slices_is_the_same_as_address_by_address():
    networks = ("0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "10.1.2.0/30",
                "10.1.2.128/25", "10.2.0.0/16", "10.1.2.3/32", "192.168.0.0/24")  # fmt: skip
    names = {network: f"n{index % 4}" for index, network in enumerate(networks)}
    lines = tuple(f"{network} {name}" for network, name in names.items())
    observed = node(dict.fromkeys(names.values(), PORT), routes=lines)
    addresses = tuple(
        f"{a}.{b}.2.{c}" for a in (10, 11) for b in range(4) for c in range(0, 250, 3)
    )
    expected: dict[str, int] = {}
    for address in addresses:
        narrowest = max(
            (network for network in map(ipaddress.ip_network, networks)
             if ipaddress.ip_address(address) in network),
            key=lambda network: network.prefixlen,
        )  # fmt: skip
        name = names[str(narrowest)]
        expected[name] = expected.get(name, 0) + 1
    assert nic.count_reached(observed.routes, addresses) == expected


@pytest.mark.parametrize(("changed", "peers", "name"), read_table(__file__, "interfaces_for_nccl"))
def test_the_interface_for_nccl(changed, peers, name):
    observed, fleet = gpu_node(changed), FleetFacts(addresses=peers)
    chosen, reason = nics.socket_interface(observed, fleet)
    assert chosen == nics.derived(observed, fleet)["nccl_socket_ifname"] == name
    assert reason


def test_interfaces_in_one_subnet_cannot_be_told_apart():
    rails = {f"eth{at}": dict(PORT) for at in range(4)}
    observed = node(
        rails, routes=tuple(f"10.1.0.0/16 {name}" for name in rails), own=("10.1.0.7",)
    )
    assert {observed.interfaces[name].addresses for name in rails} == {None}
    assert observed.configured().keys() == rails.keys()
    assert nics.socket_interface(observed, ALONE)[0] is None


NARROW = route("10.0.0.0/8 eth0")


@pytest.mark.parametrize("line", [
    "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT",
    route("10.0.0.0/8 * 0 0x201"),
    route("10.0.0.0/8 eth0 0 0"),
    route("10.0.0.0/8 lo"),
    NARROW.replace("000000FF", "000000F1"),
    NARROW.replace("000000FF", "00FF00FF"),
    NARROW[:20],
    route("10.0.0.0/8 eth0 1000000000000"),
    route("fd00::/64 eth0 256 0x80200001"),
    route("::/0 eth0 256 0x201"),
    route("fd00::/64 eth0")[:70],
    route("fd00::/64 eth0").replace(" 40 ", " 81 ", 1),
    "\x1b[2J \udcff eth0",
    "",
])  # fmt: skip
def test_what_is_no_route_of_this_node(line):
    outputs = {
        "nics": Output(text({"eth0": dict(PORT)}), 0),
        "nic_routes": Output(proc((line,)), 0),
    }
    assert nics.parse(outputs, Policy()).routes == ()


def test_thousands_of_routes_of_containers_are_cut():
    lines = tuple(f"10.{a}.{b}.0/26 eth0" for a in range(20) for b in range(200))
    observed = node({"eth0": dict(PORT)}, routes=("0.0.0.0/0 eth0", *lines))
    assert (len(observed.routes), observed.default_interface) == (256, "eth0")
    outputs = {
        "nics": Output(text({"eth0": dict(PORT)}), 0),
        "nic_routes": Output(proc((route("0.0.0.0/0 eth0"),)), None, truncated=True),
    }
    cut = nics.parse(outputs, Policy())
    assert (cut.routes_cut, cut.default_interface) == (True, "eth0")

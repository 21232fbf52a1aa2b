"""What /sys and /proc say about a node's network, and what is made of it."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from nodeready.checks import nics as checks
from nodeready.nccl import socket_ifname
from nodeready.plain import plain
from nodeready.policy import Policy
from nodeready.probes import nics, routes
from nodeready.probes.base import Output, ProbeError
from nodeready.probes.counters import Counters
from nodeready.probes.nics import Nics
from tests.helpers import judge_all

POLICY = Policy()
UP: dict[str, object] = {
    "flags": "0x1003", "carrier": 1, "operstate": "up", "mtu": 1500, "type": 1,
    "carrier_changes": 2, "address": "b8:3f:d2:00:00:01",
    "statistics/rx_errors": 0, "statistics/tx_errors": 0, "statistics/rx_crc_errors": 0,
}  # fmt: skip
PORT = {
    **UP, "speed": 400000, "duplex": "full", "device/numa_node": 1,
    "device/uevent": "DRIVER=mlx5_core\nPCI_CLASS=20000\nPCI_SLOT_NAME=0000:5e:00.0",
    "device/infiniband/mlx5_0/fw_ver": "28.39.1002",
}  # fmt: skip
# The kernel refuses carrier, speed and duplex with EINVAL while a port is switched off.
OFF = {"flags": "0x1002", "operstate": "down", "mtu": 1500, "type": 1, "carrier_changes": 0,
       "device/uevent": "DRIVER=igb\nPCI_SLOT_NAME=0000:01:00.0"}  # fmt: skip
LO = {"flags": "0x9", "type": 772, "carrier": 1, "operstate": "unknown", "mtu": 65536}
# The BMC's own wire to its host: an address of its own making, and a speed that means nothing.
BMC = {**UP, "speed": 10, "duplex": "half",
       "device/uevent": "DEVTYPE=usb_interface\nDRIVER=cdc_ether"}  # fmt: skip
CNI = {**UP, "uevent": "DEVTYPE=bridge\nINTERFACE=docker0", "carrier": 0}
SLAVE = {
    **PORT, "speed": 25000, "mtu": 9000, "bonding_slave/mii_status": "up",
    "bonding_slave/ad_aggregator_id": 1, "bonding_slave/link_failure_count": 3,
}  # fmt: skip
BOND = {
    **UP, "speed": 50000, "mtu": 9000, "uevent": "DEVTYPE=bond\nINTERFACE=bond0",
    "bonding/mode": "802.3ad 4", "bonding/mii_status": "up", "bonding/slaves": "eth0 eth1 ",
    "bonding/active_slave": "", "bonding/ad_aggregator": 1,
    "bonding/ad_partner_mac": "44:38:39:00:00:01",
}  # fmt: skip


def v4(interface: str, network: str, gateway: str = "", metric: int = 0, flags: int = 1) -> str:
    """A line of /proc/net/route: numbers in the byte order of the machine."""

    def number(text: str) -> str:
        return ipaddress.IPv4Address(text).packed[::-1].hex().upper()

    net = ipaddress.IPv4Network(network)
    words = (
        interface, number(str(net.network_address)), number(gateway or "0.0.0.0"),
        f"{flags:04X}", 0, 0, metric, number(str(net.netmask)), 0, 0, 0,
    )  # fmt: skip
    return "\t".join(map(str, words)) + "   "


def v6(interface: str, network: str, metric: int = 256, flags: int = 1) -> str:
    """A line of /proc/net/ipv6_route."""
    net = ipaddress.IPv6Network(network)
    return (
        f"{int(net.network_address):032x} {net.prefixlen:02x} {0:032x} 00 {0:032x} "
        f"{metric:08x} 00000001 00000000 {flags:08x} {interface:>8}"
    )


def text(
    interfaces: dict[str, dict[str, object]],
    printed: tuple[str, ...] = (),
) -> str:
    """What the section prints of these interfaces."""
    files = {f"/sys/class/net/{n}/{a}": str(v) for n, one in interfaces.items()
             for a, v in one.items()}  # fmt: skip
    lines = [f"{path}:{line}" for path, value in files.items() for line in value.split("\n")]
    return "\n".join([*printed, "ends=0", *lines]) + "\n"


def proc(routes: tuple[str, ...] = (), own: tuple[str, ...] = ()) -> str:
    """What the section prints of the routes and of the node's IPv4 addresses."""
    lines = [
        f"/proc/net/{'ipv6_route' if re.match('[0-9a-f]{32} ', line) else 'route'}:{line}"
        for line in routes
    ]
    for address in own:
        lines += [f"/proc/net/fib_trie:           |-- {address}",
                  "/proc/net/fib_trie:              /32 host LOCAL"]  # fmt: skip
    return "\n".join(lines) + "\n"


def node(
    interfaces: dict[str, dict[str, object]],
    *printed: str,
    routes: tuple[str, ...] = (),
    own: tuple[str, ...] = (),
    before: Counters | None = None,
) -> Nics:
    """The observation of a node with these interfaces, routes and addresses."""
    outputs = {
        "nics": Output(text({"lo": LO, **interfaces}, printed), 0),
        "nic_routes": Output(proc(routes, own), 0),
    }
    return replace(nics.parse(outputs, POLICY), before=before)


def gpu_node(
    changed: dict[str, dict[str, object]] | None = None,
    before: Counters | None = None,
) -> Nics:
    """Two bonded ports to the nodes, one InfiniBand port, an unused one, and the usual company."""
    interfaces = {
        "eth0": SLAVE,
        "eth1": SLAVE,
        "bond0": BOND,
        "ib0": {**PORT, "type": 32, "mtu": 2044},
        "eno4": OFF,
        "usb0": BMC,
        "docker0": CNI,
    }
    for name, attributes in (changed or {}).items():
        interfaces[name] = {**interfaces.get(name, {}), **attributes}
    return node(
        interfaces,
        *(f"{key}={name} bond0" for name in ("eth0", "eth1") for key in ("upper", "master")),
        routes=(
            v4("bond0", "0.0.0.0/0", "10.1.0.1"),
            v4("bond0", "10.1.0.0/16"),
            v4("ib0", "10.9.0.0/16"),
            v4("docker0", "172.17.0.0/16"),
            v4("usb0", "169.254.0.0/16"),
        ),
        own=("10.1.0.7", "10.9.0.7", "172.17.0.1", "169.254.3.1", "10.1.0.7"),
        before=before,
    )


def judged(seen: Nics, **policy: Any) -> dict[str, tuple[str, str]]:
    """Check -> (status, actual)."""
    results = judge_all(checks, seen, Policy(**policy))
    return {r.check.partition(".")[2]: (r.status, r.actual) for r in results}


def wrong(seen: Nics, **policy: Any) -> dict[str, tuple[str, str]]:
    """The checks that say something is wrong or unknown."""
    return {c: r for c, r in judged(seen, **policy).items() if r[0] not in ("ok", "na")}


def table(**interfaces: Mapping[str, object]) -> Any:
    """Policy.nics as its settings make it."""
    return tuple((name, tuple(columns.items())) for name, columns in interfaces.items())


def test_a_good_node() -> None:
    seen = gpu_node()
    assert wrong(seen) == {}
    assert {c for c, (status, _) in judged(seen).items() if status == "ok"} == {
        "link", "speed", "duplex", "mtu", "bond",
    }  # fmt: skip
    assert {name: one.kind for name, one in seen.interfaces.items()} == {
        "lo": "loopback", "eth0": "ethernet", "eth1": "ethernet", "bond0": "bond",
        "ib0": "infiniband", "eno4": "ethernet", "usb0": "usb", "docker0": "bridge",
    }  # fmt: skip
    eth0 = seen.interfaces["eth0"]
    assert (eth0.driver, eth0.firmware, eth0.pci_address, eth0.numa_node, eth0.master) == (
        "mlx5_core", "28.39.1002", "0000:5e:00.0", 1, "bond0",
    )  # fmt: skip
    assert seen.interfaces["bond0"].addresses == ("10.1.0.7/16",)
    assert [(s.name, s.link_failures) for s in seen.bonds["bond0"].slaves] == [
        ("eth0", 3), ("eth1", 3),
    ]  # fmt: skip
    assert seen.configured().keys() == {"eth0", "eth1", "bond0", "ib0"}
    assert json.loads(json.dumps(plain(seen)))["nccl_socket_ifname"] == "bond0"


def test_a_node_without_network() -> None:
    seen = node({})
    assert {status for status, _ in judged(seen).values()} == {"na"}
    assert socket_ifname(seen)[0] is None
    assert nics.compared(seen) == {"interfaces": ""}
    assert nics.learned(seen) == {}


@pytest.mark.parametrize(
    ("changed", "policy", "check", "said"),
    [
        ({"ib0": {"carrier": 0}}, {}, "link", "ib0: no link"),
        ({"eno4": {**PORT, "carrier": 0}}, {"eno4": {}}, "link", "eno4: no link"),
        ({}, {"eno4": {}}, "link", "eno4: switched off"),
        ({}, {"eth9": {}}, "expected", "no eth9; there: eth0, eth1, ib0, eno4"),
        ({"eth0": {"speed": 100}, "eth1": {"speed": 100}}, {}, "speed", "100 Mbit/s on eth0"),
        ({"eth1": {"speed": 10000}}, {}, "speed", "25000 Mbit/s on eth0; 10000 Mbit/s on eth1"),
        ({}, {"ib0": {"speed_mbps": 800000}}, "speed", "400000 Mbit/s on ib0"),
        ({"eth1": {"duplex": "half"}}, {}, "duplex", "half on eth1"),
        ({"eth1": {"mtu": 1500}}, {}, "mtu", "1500 on eth1"),
        ({}, {"ib0": {"mtu": 4092}, "eth0": {"mtu": 9000}}, "mtu", "2044 on ib0"),
        ({}, {"ib0": {"driver": "ib_ipoib"}}, "driver", "mlx5_core on ib0"),
        ({}, {"bond0": {"driver": "bonding"}}, "driver", "none on bond0"),
        ({}, {"ib0": {"firmware": "28.40.1000"}}, "firmware", "28.39.1002 on ib0"),
    ],
)
def test_what_is_wrong_is_said_once(
    changed: dict[str, dict[str, object]],
    policy: dict[str, dict[str, object]],
    check: str,
    said: str,
) -> None:
    found = wrong(gpu_node(changed), nics=table(**policy))
    assert list(found) == [check]
    assert found[check][0] == "fail"
    assert said in found[check][1]


@pytest.mark.parametrize(
    ("changed", "policy", "check"),
    [
        ({"ib0": {"carrier": "?"}}, {}, "link"),
        ({"ib0": {"speed": -1}}, {"ib0": {"speed_mbps": 400000}}, "speed"),
        ({"ib0": {"speed": 4294967295}}, {"ib0": {"speed_mbps": 400000}}, "speed"),
        ({}, {"eno4": {"firmware": "3.25"}, "eth0": {}}, "firmware"),
    ],
)
def test_what_the_kernel_does_not_say_is_unknown(
    changed: dict[str, dict[str, object]], policy: dict[str, dict[str, object]], check: str
) -> None:
    assert judged(gpu_node(changed), nics=table(**policy))[check][0] == "unknown"


def test_without_a_link_only_the_link_is_wrong() -> None:
    seen = gpu_node({"ib0": {"carrier": 0, "speed": -1}})
    assert list(wrong(seen, nics=table(ib0={"speed_mbps": 400000, "mtu": 2044}))) == ["link"]


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({}, "ok", "bond0"),
        ({"eth1": {"bonding_slave/mii_status": "down"}}, "fail", "eth1 down"),
        ({"eth1": {"bonding_slave/mii_status": "going back"}}, "fail", "eth1 down"),
        ({"eth1": {"bonding_slave/ad_aggregator_id": 2}}, "fail", "eth1 outside"),
        ({"eth1": {"bonding_slave/ad_aggregator_id": "N/A"}}, "ok", "bond0"),
        ({"bond0": {"bonding/ad_partner_mac": "00:00:00:00:00:00"}}, "fail", "not answer LACP"),
        ({"bond0": {"bonding/slaves": ""}}, "fail", "no slave"),
        ({"bond0": {"bonding/slaves": "eth0 gone"}}, "unknown", "gone"),
    ],
)
def test_a_degraded_bond(changed: dict[str, dict[str, object]], status: str, said: str) -> None:
    found = judged(gpu_node(changed))["bond"]
    assert found[0] == status
    assert said in found[1]


def test_a_bond_that_takes_turns_may_have_a_slower_spare() -> None:
    turns: dict[str, object] = {"bonding/mode": "active-backup 1", "bonding/active_slave": "eth0"}
    seen = gpu_node({"eth1": {"speed": 10000}, "bond0": turns})
    assert wrong(seen) == {"speed": ("warn", "25000 Mbit/s on eth0; 10000 Mbit/s on eth1")}
    assert seen.bonds["bond0"].active_slave == "eth0"


def test_the_empty_bond_of_the_module_is_nobodys() -> None:
    empty = {"bonding/mode": "balance-rr 0", "bonding/mii_status": "down", "bonding/slaves": ""}
    assert wrong(node({"bond0": {**BOND, **empty, "carrier": 0}})) == {}


def test_a_port_of_a_container_counts_before_its_wire() -> None:
    routes = (v4("eth0", "10.244.0.0/24"), v4("net1", "10.9.0.0/16"))
    seen = node({"eth0": UP, "net1": PORT, "tunl0": UP}, routes=routes)
    assert seen.configured().keys() == {"net1"}
    seen = node({"eth0": UP, "net1": PORT, "tunl0": UP}, routes=routes[:1])
    assert seen.configured().keys() == {"eth0"}


def test_a_containers_wire_counts_when_the_default_route_leads_through_it() -> None:
    wire = {"eth0": {**UP, "speed": 10000, "duplex": "full"}}
    routes = (v4("eth0", "0.0.0.0/0", "10.213.0.1"), v4("eth0", "10.213.0.0/23"))
    seen = node(wire, routes=routes, own=("10.213.0.2",))
    assert (seen.interfaces["eth0"].kind, wrong(seen)) == ("virtual", {})
    assert judged(seen, nics=table(eth0={"mtu": 1500}))["mtu"] == ("ok", "1500 on eth0")
    cut = node({"eth0": {**UP, "carrier": 0}}, routes=routes)
    assert list(wrong(cut)) == ["link"]
    assert wrong(node({"eth0": {**UP, "carrier": 0}})) == {}
    assert nics.learned(seen) == {"nics": {"eth0": {"mtu": 1500}}}


@pytest.mark.parametrize(
    ("seconds", "counter", "grown", "check", "status"),
    [
        (600, "carrier_changes", 0, "flaps", "ok"),
        (600, "carrier_changes", 2, "flaps", "warn"),
        (600, "carrier_changes", 4, "flaps", "fail"),
        (30 * 86400, "carrier_changes", 8, "flaps", "warn"),
        (600, "rx_crc_errors", 1, "errors", "warn"),
        (600, "rx_crc_errors", 121, "errors", "fail"),
        (10 * 3600, "rx_crc_errors", 1000, "errors", "warn"),
        (600, "rx_errors", 120, "errors", "ok"),
        (600, "rx_errors", 5000, "errors", "warn"),
        (600, "tx_errors", 121, "errors", "warn"),
    ],
)
def test_only_what_changed_since_the_last_look_counts(
    seconds: float, counter: str, grown: int, check: str, status: str
) -> None:
    attribute = counter if counter == "carrier_changes" else f"statistics/{counter}"
    old = gpu_node({"ib0": {attribute: 7000}})
    new = gpu_node(
        {"ib0": {attribute: 7000 + grown}}, before=Counters(seconds, nics.counters(old))
    )
    assert judged(old)[check][0] == "na"
    assert judged(new)[check][0] == status
    assert wrong(new).keys() <= {check}


def test_a_counter_that_began_anew_counts_in_full() -> None:
    old = Counters(600, {"ib0.carrier_changes": 900})
    assert judged(gpu_node({"ib0": {"carrier_changes": 1}}, before=old))["flaps"][0] == "warn"
    assert judged(gpu_node(before=Counters(600, {"eth7.carrier_changes": 1})))["flaps"][0] == "na"


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
    found = routes.reached(seen.routes, addresses)
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


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (Output("", 0), "no interface"),
        (Output("grep: /sys/class/net: Datei nicht gefunden\n", 0), "no interface"),
        (Output(text({"eth0": dict(PORT)}), None), "timed out"),
        (Output(text({"eth0": dict(PORT)}), None, truncated=True), "truncated"),
        (Output(text({"eth0": dict(PORT)}).replace("ends=0", "ends=many"), 0), "no number"),
    ],
)
def test_no_sense_is_no_observation(output: Output, reason: str) -> None:
    with pytest.raises(ProbeError, match=reason):
        nics.parse({"nics": output, "nic_routes": Output("", 0)}, POLICY)


@pytest.mark.parametrize(
    "value",
    ["", "NaN", "-1", "9" * 5000, "[bold]x[/]", "\x1b]0;x\x07", "$(reboot)", "\udcff", "\u0661"],
)
def test_hostile_values_are_none_or_text(value: str) -> None:
    hostile: dict[str, object] = dict.fromkeys([*SLAVE, *BOND], value)
    seen = node(
        {"eth0": hostile, "$(reboot)": hostile, "[red]": dict(PORT)},
        "upper=eth0", f"upper=eth0 {value}", f"master=nosuch {value}",
        routes=(v4("eth0", "0.0.0.0/0", "10.0.0.1"),),
        before=Counters(1.0, {"eth0.carrier_changes": 1, "eth0.rx_errors": -5}),
    )  # fmt: skip
    eth0 = seen.interfaces["eth0"]
    assert (eth0.speed_mbps, eth0.mtu, eth0.carrier, eth0.duplex, eth0.numa_node) == (None,) * 5
    assert judged(seen)["link"][0] == "unknown"
    assert judged(seen, nics=table(eth0={"mtu": 1500}))["mtu"][0] == "unknown"
    assert json.dumps([plain(seen), nics.compared(seen), nics.counters(seen)])
    assert nics.learned(seen)["nics"]["eth0"].keys() <= {"driver"}


def test_what_peers_are_compared_by_and_what_is_learnt() -> None:
    seen = gpu_node()
    facts = nics.compared(seen)
    assert facts["interfaces"] == "eno4,eth0,eth1,ib0"
    assert facts.keys() >= {"ib0.mtu", "bond0.speed_mbps", "eth0.firmware", "eno4.driver"}
    assert not {"eno4.mtu", "usb0.mtu", "docker0.mtu"} & facts.keys()
    learnt = nics.learned(seen)["nics"]
    assert learnt["ib0"] == {"speed_mbps": 400000, "mtu": 2044, "driver": "mlx5_core"}
    assert wrong(seen, nics=table(**learnt)) == {}

"""What an expert says of a node's network, case by case: what is wrong, and nothing else.

Sources: [sysfs] Documentation/ABI/testing/sysfs-class-net, net/core/net-sysfs.c; [bond]
Documentation/networking/bonding.rst, drivers/net/bonding/bond_sysfs_slave.c; [oper]
Documentation/networking/operstates.rst; [ethtool] include/uapi/linux/ethtool.h; [rep]
Documentation/networking/representors.rst; [bridge] net/bridge/br_forward.c; [vlan]
net/8021q/vlan.c; [route] proc(5), include/uapi/linux/route.h.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.builders.nics import (
    BOND,
    LO,
    OFF,
    PORT,
    SLAVE,
    UP,
    gpu_node,
    judged,
    node,
    table,
    v4,
    v6,
    wrong,
)

DEFAULT = (v4("eth0", "0.0.0.0/0", "10.1.0.1"), v4("eth0", "10.1.0.0/16"))
VIRTIO = {**UP, "device/uevent": "DRIVER=virtio_net", "speed": -1, "duplex": "unknown"}
XEN = {**UP, "device/uevent": "DRIVER=vif"}
ENA = {**UP, "device/uevent": "DRIVER=ena\nPCI_SLOT_NAME=0000:00:05.0"}
ETH = {**PORT, "speed": 25000}
VLAN = {**UP, "uevent": "DEVTYPE=vlan\nINTERFACE=eth0.100", "speed": 25000}
BRIDGE = {**UP, "uevent": "DEVTYPE=bridge\nINTERFACE=br0"}
CUT = {"carrier": 0, "operstate": "down"}
REPRESENTOR = {**PORT, **CUT, "phys_port_name": "pf0vf0", "speed": -1}
BY_TURNS: dict[str, dict[str, object]] = {
    name: {"bonding_slave/ad_aggregator_id": "N/A"} for name in ("eth0", "eth1")
}
Changes = dict[str, dict[str, Any]]


def without(one: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in one.items() if name not in names}


def bond(mode: str, **more: object) -> Changes:
    bonded = {"bonding/mode": mode, "bonding/ad_aggregator": "", "bonding/ad_partner_mac": ""}
    return {"bond0": {**bonded, **{f"bonding/{name}": value for name, value in more.items()}},
            **BY_TURNS}  # fmt: skip


#: The node of two bonded ports, with these attributes instead: what is wrong with it.
BONDED: dict[str, tuple[Changes, dict[str, str]]] = {
    "as it is": ({}, {}),
    # Modes: only LACP has aggregators and a partner [bond].
    "balance-rr": (bond("balance-rr 0"), {}),
    "active-backup": (bond("active-backup 1", active_slave="eth0"), {}),
    "balance-xor": (bond("balance-xor 2"), {}),
    "broadcast": (bond("broadcast 3"), {}),
    "balance-tlb": (bond("balance-tlb 5", active_slave="eth1"), {}),
    "balance-alb": (bond("balance-alb 6", active_slave="eth1"), {}),
    "active-backup, none active": (bond("active-backup 1"), {"bond": "fail"}),
    "balance-tlb, none active": (bond("balance-tlb 5"), {"bond": "fail"}),
    "balance-alb, none active": (bond("balance-alb 6"), {"bond": "fail"}),
    "active-backup, spare down": (
        {**bond("active-backup 1", active_slave="eth0"),
         "eth1": {**CUT, "bonding_slave/mii_status": "down"}},
        {"bond": "fail", "link": "fail"},
    ),
    # The slaves' words [bond]: up, down, going down, going back, unknown.
    "a slave down": (
        {"eth1": {**CUT, "bonding_slave/mii_status": "down"}}, {"bond": "fail", "link": "fail"},
    ),
    "a slave down for the bond alone": (
        {"eth1": {"bonding_slave/mii_status": "down"}}, {"bond": "fail"},
    ),
    "a slave going down": ({"eth1": {"bonding_slave/mii_status": "going down"}}, {"bond": "fail"}),
    "a slave going back": ({"eth1": {"bonding_slave/mii_status": "going back"}}, {"bond": "fail"}),
    "a slave unknown": ({"eth1": {"bonding_slave/mii_status": "unknown"}}, {"bond": "unknown"}),
    "a slave untold": ({"eth1": {"bonding_slave/mii_status": ""}}, {"bond": "unknown"}),
    # LACP: N/A in this mode is a port without an aggregator [bond].
    "LACP without an answer": (
        {"bond0": {"bonding/ad_partner_mac": "00:00:00:00:00:00"}}, {"bond": "fail"},
    ),
    "LACP in two aggregates": ({"eth1": {"bonding_slave/ad_aggregator_id": 2}}, {"bond": "fail"}),
    "LACP with a port in none": (
        {"eth1": {"bonding_slave/ad_aggregator_id": "N/A"}}, {"bond": "fail"},
    ),
    "LACP with no aggregate in use": ({"bond0": {"bonding/ad_aggregator": 0}}, {"bond": "fail"}),
    "LACP, partner hidden": ({"bond0": {"bonding/ad_partner_mac": ""}}, {}),
    "bond without slaves": ({"bond0": {"bonding/slaves": ""}}, {"bond": "fail"}),
    "bond with too few links (min_links)": (
        {"bond0": {**CUT, "bonding/mii_status": "down"}}, {"link": "fail"},
    ),
    "bond off": ({"bond0": {"flags": "0x1402", "carrier": "?"}}, {"link": "fail"}),
    "slave off": (
        {"eth1": {"flags": "0x1802", "carrier": "?", "bonding_slave/mii_status": "down"}},
        {"link": "fail", "bond": "fail"},
    ),
    "slaves of two speeds, LACP": ({"eth1": {"speed": 10000}}, {"speed": "fail"}),
    "slaves of two speeds, round robin": (
        {**bond("balance-rr 0"), "eth1": {"speed": 10000, **BY_TURNS["eth1"]}},
        {"speed": "warn"},
    ),
    # What one port tells, its equal with the same driver can tell too.
    "a slave without speed": ({"eth1": {"speed": -1}}, {"speed": "unknown"}),
    "a slave without duplex": ({"eth1": {"duplex": "unknown"}}, {"duplex": "unknown"}),
    "a slave with half duplex": ({"eth1": {"duplex": "half"}}, {"duplex": "fail"}),
    "slave's MTU above": ({"eth1": {"mtu": 9216}}, {"mtu": "fail"}),
    "slave's MTU below": ({"eth1": {"mtu": 1500}}, {"mtu": "fail"}),
    "slave's MTU untold": ({"eth1": {"mtu": ""}}, {"mtu": "unknown"}),
    "bond's MTU untold": ({"bond0": {"mtu": ""}}, {"mtu": "unknown"}),
    "one slave's carrier untold": ({"eth1": {"carrier": ""}}, {"link": "unknown"}),
    "IB port cut": ({"ib0": CUT}, {"link": "fail"}),
    "unused port without a cable": ({"eno4": {**PORT, **CUT}}, {}),
    "unused port, slow": ({"eno4": {**PORT, "speed": 100}}, {}),
    "docker0 without containers": ({"docker0": {**BRIDGE, **CUT}}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", BONDED)
def test_a_node_with_a_bond(case: str) -> None:
    changes, expected = BONDED[case]
    found = wrong(gpu_node(changes))
    assert {name: status for name, (status, _) in found.items()} == expected


#: Interfaces, what the script printed of their order, routes -> what is wrong.
NODES: dict[str, tuple[Changes, tuple[str, ...], tuple[str, ...], dict[str, str]]] = {
    **{
        f"{speed} Mbit/s": ({"eth0": {**PORT, "speed": speed}}, (), DEFAULT, {})
        for speed in (1000, 2500, 5000, 10000, 25000, 40000, 50000, 100000, 200000, 400000,
                      800000, 1600000)
    },
    "10 Mbit/s": ({"eth0": {**PORT, "speed": 10}}, (), DEFAULT, {"speed": "fail"}),
    "100 Mbit/s": ({"eth0": {**PORT, "speed": 100}}, (), DEFAULT, {"speed": "fail"}),
    # SPEED_UNKNOWN [ethtool].
    "-1": ({"eth0": {**PORT, "speed": -1}}, (), DEFAULT, {}),
    "65535": ({"eth0": {**PORT, "speed": 65535}}, (), DEFAULT, {}),
    "4294967295": ({"eth0": {**PORT, "speed": 4294967295}}, (), DEFAULT, {}),
    "0": ({"eth0": {**PORT, "speed": 0}}, (), DEFAULT, {}),
    "virtio": ({"eth0": VIRTIO}, (), DEFAULT, {}),
    "xen": ({"eth0": XEN}, (), DEFAULT, {}),
    "ena beside a card": (
        {"eth0": ENA, "eth1": PORT}, (), (*DEFAULT, v4("eth1", "10.9.0.0/16")), {},
    ),
    "operstate unknown": ({"eth0": {**PORT, "operstate": "unknown"}}, (), DEFAULT, {}),
    "operstate dormant": (
        {"eth0": {**PORT, "operstate": "dormant"}}, (), DEFAULT, {"link": "fail"},
    ),
    "operstate testing": (
        {"eth0": {**PORT, "operstate": "testing"}}, (), DEFAULT, {"link": "fail"},
    ),
    "default route's port cut": ({"eth0": {**PORT, **CUT}}, (), DEFAULT, {"link": "fail"}),
    "default route's port off": (
        {"eth0": OFF}, (), DEFAULT, {"link": "fail"},
    ),
    "IPv6 alone": (
        {"eth0": PORT}, (), (v6("eth0", "2001:db8::/64"), v6("eth0", "::/0")), {},
    ),
    "IPv6 alone, cut": (
        {"eth0": {**PORT, **CUT}}, (), (v6("eth0", "2001:db8::/64"), v6("eth0", "::/0")),
        {"link": "fail"},
    ),
    "wifi": (
        {"eth0": {**UP, "uevent": "DEVTYPE=wlan", "device/uevent": "DRIVER=iwlwifi"}}, (), DEFAULT,
        {},
    ),
    "wifi waits for its key": (
        {"eth0": {**UP, "operstate": "dormant", "uevent": "DEVTYPE=wlan",
                  "device/uevent": "DRIVER=iwlwifi"}},
        (), DEFAULT, {"link": "fail"},
    ),
    # A reject route leads nowhere [route]; RTF_REJECT 0x200.
    "an unreachable default beside the right one": (
        {"eth0": PORT, "eth1": {**PORT, **CUT}}, (),
        (v4("eth1", "0.0.0.0/0", flags=0x201), *DEFAULT), {},
    ),
    "two defaults, the better one cut": (
        {"eth0": {**PORT, **CUT}, "eth1": PORT}, (),
        (v4("eth0", "0.0.0.0/0", "10.1.0.1", metric=100),
         v4("eth1", "0.0.0.0/0", "10.2.0.1", metric=200)),
        {"link": "fail"},
    ),
    "two defaults": (
        {"eth0": PORT, "eth1": PORT}, (),
        (v4("eth0", "0.0.0.0/0", "10.1.0.1", metric=100),
         v4("eth1", "0.0.0.0/0", "10.2.0.1", metric=200)),
        {},
    ),
    "eight rails": (
        {f"eth{n}": PORT for n in range(8)}, (),
        tuple(v4(f"eth{n}", f"10.{n}.0.0/16") for n in range(8)), {},
    ),
    "eight rails, one cut": (
        {f"eth{n}": {**PORT, **(CUT if n == 5 else {})} for n in range(8)}, (),
        tuple(v4(f"eth{n}", f"10.{n}.0.0/16") for n in range(8)), {"link": "fail"},
    ),
    "a second port with only a link-local address": (
        {"eth0": PORT, "eth1": {**PORT, **CUT}}, (), (*DEFAULT, v4("eth1", "169.254.0.0/16")), {},
    ),
    # VLANs: the kernel keeps a VLAN's MTU at most at its port's [vlan].
    "a VLAN": (
        {"eth0": ETH, "eth0.100": VLAN}, ("upper=eth0 eth0.100",),
        (v4("eth0.100", "0.0.0.0/0", "10.1.0.1"),), {},
    ),
    "a VLAN with a smaller MTU": (
        {"eth0": {**ETH, "mtu": 9000}, "eth0.100": VLAN}, ("upper=eth0 eth0.100",),
        (v4("eth0.100", "0.0.0.0/0", "10.1.0.1"),), {},
    ),
    "a VLAN on a port without a cable": (
        {"eth0": {**ETH, **CUT},
         "eth0.100": {**VLAN, "carrier": 0, "operstate": "lowerlayerdown"}},
        ("upper=eth0 eth0.100",), (v4("eth0.100", "0.0.0.0/0", "10.1.0.1"),), {"link": "fail"},
    ),
    "a second VLAN, off": (
        {"eth0": ETH, "eth0.100": VLAN, "eth0.200": {**VLAN, "flags": "0x1002", "carrier": "?"}},
        ("upper=eth0 eth0.100", "upper=eth0 eth0.200"),
        (v4("eth0.100", "0.0.0.0/0", "10.1.0.1"), v4("eth0.200", "10.2.0.0/16")),
        {"link": "fail"},
    ),
    # Bridges of virtual machines.
    "a bridge": (
        {"eth0": ETH, "br0": BRIDGE}, ("upper=eth0 br0", "master=eth0 br0"),
        (v4("br0", "0.0.0.0/0", "10.1.0.1"), v4("br0", "10.1.0.0/16")), {},
    ),
    "a bridge wider than its port": (
        {"eth0": ETH, "br0": {**BRIDGE, "mtu": 9000}}, ("upper=eth0 br0", "master=eth0 br0"),
        (v4("br0", "0.0.0.0/0", "10.1.0.1"), v4("br0", "10.1.0.0/16")), {"mtu": "fail"},
    ),
    "a bridge narrower than its port": (
        {"eth0": {**ETH, "mtu": 9000}, "br0": BRIDGE}, ("upper=eth0 br0", "master=eth0 br0"),
        (v4("br0", "0.0.0.0/0", "10.1.0.1"), v4("br0", "10.1.0.0/16")), {},
    ),
    "a second bridge without a forwarding port": (
        {"eth0": ETH, "eth1": ETH, "br1": {**BRIDGE, **CUT}},
        ("upper=eth1 br1", "master=eth1 br1"), (*DEFAULT, v4("br1", "10.2.0.0/16")),
        {"link": "fail"},
    ),
    "a bridge of virtual machines alone": (
        {"eth0": PORT, "virbr0": {**BRIDGE, **CUT}}, (),
        (*DEFAULT, v4("virbr0", "192.168.122.0/24")), {},
    ),
    "a team": (
        {"eth0": ETH, "eth1": ETH, "team0": UP},
        ("upper=eth0 team0", "master=eth0 team0", "upper=eth1 team0", "master=eth1 team0"),
        (v4("team0", "0.0.0.0/0", "10.1.0.1"),), {},
    ),
    "a team with one port down": (
        {"eth0": ETH, "eth1": {**ETH, **CUT}, "team0": UP},
        ("upper=eth0 team0", "master=eth0 team0", "upper=eth1 team0", "master=eth1 team0"),
        (v4("team0", "0.0.0.0/0", "10.1.0.1"),), {"link": "fail"},
    ),
    "a second team without a link": (
        {"eth0": ETH, "eth1": ETH, "team1": {**UP, **CUT}},
        ("upper=eth1 team1", "master=eth1 team1"), (*DEFAULT, v4("team1", "10.2.0.0/16")),
        {"link": "fail"},
    ),
    # Virtual functions.
    "idle virtual functions": (
        {"eth0": PORT, "eth0v0": OFF, "eth0v1": {**PORT, **CUT}}, (), DEFAULT, {},
    ),
    "representors of idle functions in a switch": (
        {"eth0": PORT, "eth0_0": REPRESENTOR,
         "eth0_1": {**REPRESENTOR, "phys_port_name": "pf0sf88"}},
        ("upper=eth0_0 ovs-system", "upper=eth0_1 ovs-system"), DEFAULT, {},
    ),
    "the adapter's port has a name too": (
        {"eth0": {**PORT, **CUT, "phys_port_name": "p0"}}, (), DEFAULT, {"link": "fail"},
    ),
    "Azure's function below its port": (
        {"eth0": {**UP, "device/uevent": "DRIVER=hv_netvsc"}, "enP1s1": ETH},
        ("upper=enP1s1 eth0", "master=enP1s1 eth0"), DEFAULT, {},
    ),
    # Containers' company.
    "cilium, calico, flannel, docker": (
        {"eth0": PORT, "cilium_host": UP, "cilium_net": UP, "cilium_vxlan": {**UP, "carrier": 1},
         "flannel.1": {**UP, **CUT}, "docker0": {**BRIDGE, **CUT}, "kube-ipvs0": OFF,
         "tunl0": {**UP, **CUT}, "dummy0": OFF, "nodelocaldns": UP, "wg0": UP},
        (), (*DEFAULT, v4("cilium_host", "10.244.0.0/24"), v4("flannel.1", "10.245.0.0/16")), {},
    ),
    "a port renamed": ({"rename3": PORT}, (), (v4("rename3", "10.1.0.0/16"),), {}),
    "lo off, nothing else": ({"lo": {**LO, "flags": "0x8"}}, (), (), {"link": "fail"}),
}  # fmt: skip


@pytest.mark.parametrize("case", NODES)
def test_a_node(case: str) -> None:
    interfaces, printed, lines, expected = NODES[case]
    found = wrong(node(interfaces, *printed, routes=lines))
    assert {name: status for name, (status, _) in found.items()} == expected


#: Policy -> what is wrong on the node of two bonded ports.
POLICIES: dict[str, tuple[Changes, Changes, dict[str, str]]] = {
    "all as they should be": (
        {}, {"ib0": {"speed_mbps": 400000, "mtu": 2044}, "bond0": {"mtu": 9000}}, {},
    ),
    "renamed": ({}, {"ens5": {"mtu": 9000}}, {"expected": "fail"}),
    "speed untold": (
        {"ib0": {"speed": -1}}, {"ib0": {"speed_mbps": 400000}}, {"speed": "unknown"},
    ),
    "speed halved": (
        {"ib0": {"speed": 200000}}, {"ib0": {"speed_mbps": 400000}}, {"speed": "fail"},
    ),
    "MTU reset": ({"ib0": {"mtu": 1500}}, {"ib0": {"mtu": 2044}}, {"mtu": "fail"}),
    "MTU untold": ({"ib0": {"mtu": ""}}, {"ib0": {"mtu": 2044}}, {"mtu": "unknown"}),
    "a named port switched off": ({}, {"eno4": {}}, {"link": "fail"}),
    "slow by the policy": ({"eno4": {**PORT, "speed": 100}}, {"eno4": {"speed_mbps": 100}}, {}),
    "driver gone": (
        {"eno4": {**OFF, "device/uevent": "PCI_CLASS=20000"}}, {"eno4": {"driver": "igb"}},
        {"link": "fail", "driver": "fail"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", POLICIES)
def test_a_node_with_a_policy(case: str) -> None:
    changes, policy, expected = POLICIES[case]
    found = wrong(gpu_node(changes), nics=table(**policy))
    assert {name: status for name, (status, _) in found.items()} == expected


def test_the_words_name_the_cause() -> None:
    none = judged(gpu_node(bond("active-backup 1")))["bond"][1]
    assert none == "bond0: no slave is active"
    outside = judged(gpu_node({"eth1": {"bonding_slave/ad_aggregator_id": "N/A"}}))["bond"][1]
    assert outside == "bond0: eth1 outside the aggregate in use"
    off = judged(node({"lo": {**LO, "flags": "0x8"}}))["link"][1]
    assert off == "lo: switched off"
    assert {*SLAVE, *BOND} >= {"bonding_slave/ad_aggregator_id", "bonding/ad_aggregator"}

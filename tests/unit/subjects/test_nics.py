"""What /sys says about a node's interfaces, and what is wrong with them.

Sources of the rows: [sysfs] Documentation/ABI/testing/sysfs-class-net, net/core/net-sysfs.c;
[bond] Documentation/networking/bonding.rst, drivers/net/bonding/bond_sysfs_slave.c; [oper]
Documentation/networking/operstates.rst; [ethtool] include/uapi/linux/ethtool.h; [rep]
Documentation/networking/representors.rst; [bridge] net/bridge/br_forward.c; [vlan]
net/8021q/vlan.c; [route] proc(5), include/uapi/linux/route.h.
"""

import json

import pytest

from nodeready.core.base import Output, ProbeError
from nodeready.core.policy import Policy
from nodeready.core.result import ALONE, Counters, FleetFacts
from nodeready.core.wire import plain
from nodeready.subjects.nics import checks
from nodeready.subjects.nics import facts as nics
from nodeready.subjects.snapshot import shown_facts
from tests.builders import nics as built
from tests.builders.judging import assert_wrong, by_name
from tests.builders.nics import BASES, PORT, UP, gpu_node, judged, node, wrong
from tests.cases import cases

DEFAULT = ("0.0.0.0/0 eth0", "10.1.0.0/16 eth0")


@pytest.mark.parametrize("case", cases(__file__, "data/nics/bonded.json"))
def test_a_node_with_a_bond(case):
    """The node of two bonded ports, with other attributes, a policy, or another mode."""
    changed = {name: built.attributes(row) for name, row in case.get("set", {}).items()}
    if "mode" in case:
        # Only LACP has aggregators and a partner [bond].
        changed["bond0"] = {
            "bonding/mode": case["mode"], "bonding/active_slave": case.get("active", ""),
            "bonding/ad_aggregator": "", "bonding/ad_partner_mac": "",
        }  # fmt: skip
        for name in ("eth0", "eth1"):
            changed[name] = {**changed.get(name, {}), "bonding_slave/ad_aggregator_id": "N/A"}
    policy = Policy(nics=built.table(**case.get("policy", {})))
    assert_wrong(checks, gpu_node(changed), case["wrong"], policy)


@pytest.mark.parametrize("case", cases(__file__, "data/nics/nodes.json"))
def test_a_node(case):
    master = case.get("master", {})
    printed = [f"master={name} {above}" for name, above in master.items()]
    upper = {**master, **case.get("upper", {})}
    printed += [f"upper={name} {above}" for name, above in upper.items()]
    interfaces = {name: built.attributes(row) for name, row in case["interfaces"].items()}
    routes = case.get("routes", [*DEFAULT, *case.get("more_routes", ())])
    assert_wrong(checks, node(interfaces, *printed, routes=tuple(routes)), case["wrong"])


def test_a_good_node():
    observed = gpu_node()
    assert wrong(observed) == {}
    assert {c for c, (status, _) in judged(observed).items() if status == "ok"} == {
        "link", "speed", "duplex", "mtu", "bond",
    }  # fmt: skip
    assert judged(observed)["bond"][1] == "bond0"
    assert by_name(checks, observed)["speed"].source == "/sys/class/net/eth0/speed"
    assert {name: interface.kind for name, interface in observed.interfaces.items()} == {
        "lo": "loopback", "eth0": "ethernet", "eth1": "ethernet", "bond0": "bond",
        "ib0": "infiniband", "eno4": "ethernet", "usb0": "usb", "docker0": "bridge",
    }  # fmt: skip
    eth0 = observed.interfaces["eth0"]
    assert (eth0.driver, eth0.firmware, eth0.pci_address, eth0.numa_node, eth0.master) == (
        "mlx5_core", "28.39.1002", "0000:5e:00.0", 1, "bond0",
    )  # fmt: skip
    assert observed.interfaces["bond0"].addresses == ("10.1.0.7/16",)
    assert [(slave.name, slave.link_failures) for slave in observed.bonds["bond0"].slaves] == [
        ("eth0", 3), ("eth1", 3),
    ]  # fmt: skip
    assert observed.configured().keys() == {"eth0", "eth1", "bond0", "ib0"}
    shown = plain(shown_facts("nics", observed))
    assert json.loads(json.dumps(shown))["nccl_socket_ifname"] == "bond0"


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        ("/etc/nccl.conf:1:NCCL_SOCKET_IFNAME=bond0", "ok", "NCCL_SOCKET_IFNAME"),
        ("/etc/nccl.conf:1:NCCL_SOCKET_IFNAME=ib1", "fail",
         "NCCL_SOCKET_IFNAME=ib1 names no interface of the node"),
        ("/etc/nccl.conf:1:NCCL_SOCKET_IFNAME=eno4", "fail", "names an interface that is down"),
        # A list that only excludes takes lo, too.
        ("/etc/nccl.conf:1:NCCL_SOCKET_IFNAME=^docker,bond,ib,e,usb", "fail",
         "leads to the node itself"),
        # The environment outranks NCCL's file; pam_env takes export and quotes.
        ('/etc/environment:2:export NCCL_SOCKET_IFNAME="bond0"\n'
         "/etc/nccl.conf:1:NCCL_SOCKET_IFNAME=ib1", "ok", ""),
        ("/etc/environment:1:GLOO_SOCKET_IFNAME=eth9", "fail", "GLOO_SOCKET_IFNAME=eth9"),
        ("/etc/environment:1:GLOO_SOCKET_IFNAME=bond0\n/etc/environment:2:PATH=/bin", "ok", ""),
        # Slow is a choice of the site; the devices are another subject's.
        ("/etc/nccl.conf:1:NCCL_IB_DISABLE=1\n/etc/nccl.conf:2:NCCL_IB_HCA=mlx9_0", "ok", ""),
    ],
)  # fmt: skip
def test_the_variables_of_a_node_name_its_interfaces(lines, status, words):
    result = judged(gpu_node(variables=lines))["variables"]
    assert (result[0], words in result[1]) == (status, True), result


def test_the_file_whose_variable_counts_is_named():
    lines = (
        "/etc/environment:1:NCCL_SOCKET_IFNAME=ib1\n/etc/nccl.conf:1:NCCL_SOCKET_IFNAME=bond0\n"
        "/etc/nccl.conf:2:GLOO_SOCKET_IFNAME=eth9"
    )
    result = by_name(checks, gpu_node(variables=lines))["variables"]
    assert (result.status, result.source) == ("fail", "/etc/environment")
    assert "remove NCCL_SOCKET_IFNAME in /etc/environment;" in result.fix


def test_a_node_without_network():
    observed = node({})
    assert {status for status, _ in judged(observed).values()} == {"na"}
    assert nics.socket_interface(observed, ALONE)[0] is None
    assert nics.compared(observed) == {"interfaces": ""}
    assert nics.learned(observed) == {}


def test_a_port_of_a_container_counts_before_its_wire():
    interfaces = {"eth0": UP, "net1": PORT, "tunl0": UP}
    routes = ("10.244.0.0/24 eth0", "10.9.0.0/16 net1")
    assert node(interfaces, routes=routes).configured().keys() == {"net1"}
    assert node(interfaces, routes=routes[:1]).configured().keys() == {"eth0"}


def test_a_containers_wire_counts_when_the_default_route_leads_through_it():
    wire = {"eth0": {**UP, "speed": 10000, "duplex": "full"}}
    routes = ("0.0.0.0/0 eth0", "10.213.0.0/23 eth0")
    observed = node(wire, routes=routes, own=("10.213.0.2",))
    assert (observed.interfaces["eth0"].kind, wrong(observed)) == ("virtual", {})
    assert judged(observed, nics=built.table(eth0={"mtu": 1500}))["mtu"] == ("ok", "1500 on eth0")
    assert nics.learned(observed) == {"nics": {"eth0": {"mtu": 1500}}}
    cut = {"eth0": {**UP, "carrier": 0}}
    assert list(wrong(node(cut, routes=routes))) == ["link"]
    assert wrong(node(cut)) == {}


def earlier(seconds: float, counters: dict[str, int]) -> FleetFacts:
    return FleetFacts(counters={"nics": Counters(seconds, counters)})


@pytest.mark.parametrize("case", cases(__file__, "data/nics/counters.json"))
def test_only_what_changed_since_the_last_look_counts(case):
    counter, check = case["counter"], case["check"]
    old = gpu_node({"ib0": {counter: 7000}})
    fleet = earlier(case["seconds"], nics.counters(old))
    new = gpu_node({"ib0": {counter: 7000 + case["grown"]}})
    assert (judged(old)[check][0], judged(new, fleet)[check][0]) == ("na", case["status"])
    assert wrong(new, fleet).keys() <= {check}


def test_a_counter_that_began_anew_counts_in_full():
    restarted, old = gpu_node({"ib0": {"carrier_changes": 1}}), {"ib0.carrier_changes": 900}
    assert judged(restarted, earlier(600, old))["flaps"][0] == "warn"
    assert judged(gpu_node(), earlier(600, {"eth7.carrier_changes": 1}))["flaps"][0] == "na"


@pytest.mark.parametrize(("output", "reason"), [
    (Output("grep: /sys/class/net: Datei nicht gefunden\n", 0), "no interface"),
    (Output(built.text({"eth0": dict(PORT)}), None), "timed out"),
    (Output(built.text({"eth0": dict(PORT)}), None, truncated=True), "truncated"),
    (Output(built.text({"eth0": dict(PORT)}).replace("ends=0", "ends=many"), 0), "no number"),
])  # fmt: skip
def test_no_sense_is_no_observation(output, reason):
    with pytest.raises(ProbeError, match=reason):
        nics.parse({"nics": output, "nic_routes": Output("", 0)}, Policy())


def test_what_peers_are_compared_by_and_what_is_learnt():
    observed = gpu_node()
    facts = nics.compared(observed)
    assert facts["interfaces"] == "eno4,eth0,eth1,ib0"
    assert facts.keys() >= {"ib0.mtu", "bond0.speed_mbps", "eth0.firmware", "eno4.driver"}
    assert not {"eno4.mtu", "usb0.mtu", "docker0.mtu"} & facts.keys()
    learnt = nics.learned(observed)["nics"]
    assert learnt["ib0"] == {"speed_mbps": 400000, "mtu": 2044, "driver": "mlx5_core"}
    assert wrong(observed, nics=built.table(**learnt)) == {}


def test_a_name_from_a_node_is_one_word_of_a_command_to_paste():
    name = "x;id>y$(id)"
    observed = gpu_node({name: BASES["OFF"]})
    policy = Policy(nics=built.table(**{name: {"mtu": 1500}}))
    assert by_name(checks, observed, policy)["link"].fix == f"ip link set '{name}' up"

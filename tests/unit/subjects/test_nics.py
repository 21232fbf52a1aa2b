"""What /sys says about a node's interfaces, and what is made of it."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest

from nodeready.policy import Policy
from nodeready.ready.job_env import socket_ifname
from nodeready.subjects.base import Counters, Output, ProbeError
from nodeready.subjects.nics import checks
from nodeready.subjects.nics import facts as nics
from nodeready.subjects.wire import plain
from tests.builders.hostile import recorded
from tests.builders.judging import by_name
from tests.builders.nics import (
    BOND,
    OFF,
    POLICY,
    PORT,
    SLAVE,
    UP,
    gpu_node,
    judged,
    node,
    table,
    text,
    v4,
    wrong,
)


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
        ({"eth1": {"bonding_slave/ad_aggregator_id": "N/A"}}, "fail", "eth1 outside"),
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


def test_a_name_from_a_node_is_one_word_of_a_command_to_paste() -> None:
    name = "x;id>y$(id)"
    seen = replace(gpu_node({name: OFF}), peers_via=(name,))
    assert by_name(checks, seen, Policy())["link"].fix == f"ip link set '{name}' up"


@pytest.mark.parametrize("profile", ["h100", "mi300x"])
def test_a_look_like_an_earlier_one_is_read_as_if_it_were_the_first(profile, monkeypatch):
    draw = random.Random(profile)
    values = ("0", "1", "-1", "18446744073709551615", "", "x", "00:00:00:00:00:00", "7\r", " 7")
    routes = Output(recorded(profile)["nic_routes"], 0)

    def shown(text):
        try:
            return nics.parse({"nics": Output(text, 0), "nic_routes": routes}, Policy())
        except ProbeError as error:
            return error.reason

    again = 0
    for _ in range(400):
        lines = recorded(profile)["nics"].split("\n")
        own = [n for n, line in enumerate(lines) if re.search("address|errors:|_changes", line)]
        for _ in range(draw.choice((1, 1, 2, 4))):
            at = draw.choice(own) if draw.random() < 0.7 else draw.randrange(len(lines))
            at = min(at, len(lines) - 1)
            path, colon, value = lines[at].partition(":")
            step = draw.random()
            if step < 0.92:
                lines[at] = f"{path}{colon}{draw.choice((*values, value[::-1]))}"
            elif step < 0.96:
                lines.insert(at, draw.choice((lines[at], path.replace("/address", "/x/address"))))
            else:
                del lines[at]
        text = "\n".join(lines)
        before = nics._KNOWN
        known = [one for one in before.of(lines) if one.differing(lines) is not None]
        outcome = shown(text)
        monkeypatch.setattr(nics, "_KNOWN", type(before)())
        assert shown(text) == outcome
        monkeypatch.setattr(nics, "_KNOWN", before)
        again += bool(known)
    assert again > 80

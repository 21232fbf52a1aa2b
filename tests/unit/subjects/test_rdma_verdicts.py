"""What an expert says of a node's RDMA ports, case by case: what is wrong, and nothing else.

Sources: [sysfs] drivers/infiniband/core/sysfs.c (the words of state, phys_state, rate),
Documentation/ABI/stable/sysfs-class-infiniband; [IBA] InfiniBand Architecture Specification 1.4,
4.1.3 (LIDs), 7.2.7 (port states), 14.2.5.6 (PortInfo); [roce] drivers/infiniband/hw/mlx5/main.c
(mlx5_query_port_roce: the state is the interface's); [ndr] NVIDIA's speeds of InfiniBand: 4X, and
2X behind a splitter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from nodeready.lab.hardware import IB_CLASS, Device, a100, h100, ib_tree, mi300x
from nodeready.policy import Policy
from nodeready.policy.policy import make_policy
from nodeready.subjects.base import Counters, Output
from nodeready.subjects.rdma import checks
from nodeready.subjects.rdma import facts as rdma
from nodeready.subjects.rdma.facts import Rdma
from tests.builders.judging import by_name, wrong

POLLING = {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"}
DISABLED = {**POLLING, "phys_state": "3: Disabled"}
Case = tuple[Any, Mapping[str, Mapping[str, Any]], dict[str, str]]
Files = Mapping[str, str]


def parsed(files: Files, more: str = "", root: str = IB_CLASS) -> Rdma:
    text = "".join(f"{root}/{p}:{line}\n" for p, t in files.items() for line in t.splitlines())
    seen: Rdma = rdma.parse({"rdma": Output(text + more, 0)}, Policy())
    return seen


def one(**fields: Any) -> dict[str, dict[str, Any]]:
    return {"mlx5_3": fields}


def every(**fields: Any) -> dict[str, dict[str, Any]]:
    return {f"mlx5_{at}": fields for at in range(8)}


#: The node's adapters, what differs -> what is wrong. mlx5_0 to mlx5_7 are InfiniBand on the h100
#: (with a bond for the management beside them) and on the a100, RoCE on the mi300x.
CASES: dict[str, Case] = {
    "H100": (h100, {}, {}),
    "A100": (a100, {}, {}),
    "MI300X": (mi300x, {}, {}),
    # States [IBA 7.2.7] and physical states [IBA 14.2.5.6] in the kernel's words [sysfs].
    "down, polling": (h100, one(**POLLING), {"state": "fail"}),
    "down, sleeping": (h100, one(**{**POLLING, "phys_state": "1: Sleep"}), {"state": "fail"}),
    "down, training": (
        h100, one(**{**POLLING, "phys_state": "4: PortConfigurationTraining"}), {"state": "fail"},
    ),
    "down, phy test": (h100, one(**{**POLLING, "phys_state": "7: Phy Test"}), {"state": "fail"}),
    "down, disabled": (h100, one(**DISABLED), {"state": "warn"}),
    "two of eight disabled": (h100, {"mlx5_3": DISABLED, "mlx5_5": DISABLED}, {"state": "warn"}),
    "half disabled: not in use": (h100, {f"mlx5_{at}": DISABLED for at in range(4, 8)}, {}),
    "init": (h100, one(state="2: INIT"), {"state": "fail"}),
    "armed": (h100, one(state="3: ARMED"), {"state": "fail"}),
    "all in init": (h100, every(state="2: INIT"), {"state": "fail"}),
    "deferred": (h100, one(state="5: ACTIVE_DEFER"), {"state": "fail"}),
    "recovering": (h100, one(phys_state="6: LinkErrorRecovery"), {"state": "fail"}),
    "active, polling": (h100, one(phys_state="2: Polling"), {"state": "fail"}),
    "no state": (h100, one(state="0: NOP"), {"state": "unknown"}),
    "state untold": (h100, one(state=""), {"state": "unknown"}),
    "state beyond the list": (h100, one(state="9: UNKNOWN"), {"state": "unknown"}),
    "physical state untold": (h100, one(phys_state=""), {"state": "unknown"}),
    "physical state 0": (h100, one(phys_state="0: <unknown>"), {"state": "unknown"}),
    # LIDs [IBA 4.1.3].
    "LID 0": (h100, one(lid="0x0"), {"state": "fail"}),
    "LID 0xffff": (h100, one(lid="0xffff"), {"state": "fail"}),
    "a multicast LID": (h100, one(lid="0xc001"), {"state": "fail"}),
    "the highest LID": (h100, one(lid="0xbfff"), {}),
    "subnet manager's LID 0": (h100, one(sm_lid="0x0"), {"state": "fail"}),
    # An ACTIVE port has been given both: a recording without them is none the worse.
    "LIDs untold": (h100, every(lid="", sm_lid=""), {}),
    "RoCE has no LID": (mi300x, every(lid="0x0", sm_lid="0x0"), {}),
    # Rates [sysfs, ndr].
    **{
        f"all at {rate}": (h100, every(rate=rate), {})
        for rate in ("100 Gb/sec (4X EDR)", "100 Gb/sec (2X HDR)", "200 Gb/sec (4X HDR)",
                     "200 Gb/sec (2X NDR)", "400 Gb/sec (4X NDR)", "800 Gb/sec (4X XDR)",
                     "56 Gb/sec (4X FDR)", "40 Gb/sec (4X QDR)", "400 Gb/sec (2X XDR)",
                     "10 Gb/sec (4X SDR)", "10 Gb/sec (4X)")
    },
    **{
        f"one at {rate}": (h100, one(rate=rate), {"rate": "fail"})
        for rate in ("200 Gb/sec (2X NDR)", "100 Gb/sec (1X NDR)", "200 Gb/sec (4X HDR)",
                     "10 Gb/sec (4X SDR)", "2.5 Gb/sec (1X SDR)")
    },
    "all on one lane": (h100, every(rate="50 Gb/sec (1X HDR)"), {"rate": "fail"}),
    "rate untold": (h100, one(rate=""), {"rate": "unknown"}),
    "rate in no words": (h100, one(rate="Invalid argument"), {"rate": "unknown"}),
    "the bond is slower": (h100, {"mlx5_bond_0": {"rate": "25 Gb/sec (1X EDR)"}}, {}),
    "RoCE at another speed": (mi300x, one(rate="100 Gb/sec (4X EDR)"), {}),
    # Devices.
    "firmware unlike": (h100, one(firmware="28.39.1002"), {"firmware": "warn"}),
    "firmware untold": (h100, one(firmware=""), {"firmware": "unknown"}),
    "firmware untold of all": (h100, every(firmware=""), {}),
    "another board's firmware": (h100, one(firmware="28.1", board_id="DEL0000000041"), {}),
    "no uverbs": (h100, one(uverbs=""), {"devices": "fail"}),
    "no uverbs at all": (h100, every(uverbs=""), {"devices": "fail"}),
    "no GUID": (h100, one(guid="0000:0000:0000:0000"), {"devices": "fail"}),
    "RoCE's GUID of no interest": (mi300x, one(guid="0000:0000:0000:0000"), {}),
    # RoCE [roce].
    "RoCE, no cable": (mi300x, one(**DISABLED), {"state": "fail"}),
    "RoCE, down beside its interface": (
        mi300x, {"mlx5_3": {"state": "1: DOWN", "phys_state": "3: Disabled"}}, {"state": "fail"},
    ),
    "RoCE, GIDs of version 1": (
        mi300x, one(gids=(("fe80::1", "IB/RoCE v1"),)), {"gids": "fail"},
    ),
    "RoCE, no GID": (mi300x, one(gids=()), {"gids": "fail"}),
    "RoCE, GIDs' types untold": (mi300x, one(gids=(("fe80::1", ""),)), {"gids": "unknown"}),
    "RoCE, version 2 for IPv4 alone": (
        mi300x,
        one(gids=(("0000:0000:0000:0000:0000:ffff:0a01:0007", "RoCE v2"),)), {},
    ),
    "link layer untold": (mi300x, one(link_layer=""), {"gids": "unknown"}),
    "InfiniBand's link layer untold": (h100, one(link_layer=""), {"gids": "unknown"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_node(case: str) -> None:
    devices, changes, expected = CASES[case]
    assert wrong(checks, parsed(ib_tree(devices(), **changes))) == expected


def test_an_interface_with_a_carrier_and_a_port_that_is_down_contradict() -> None:
    files = ib_tree(mi300x(), mlx5_3={"state": "1: DOWN", "phys_state": "3: Disabled"})
    (carrier,) = (path for path in files if path.startswith("mlx5_3/") and "/carrier" in path)
    for text, status in (("1\n", "fail"), ("0\n", "fail"), ("", None)):
        found = wrong(checks, parsed({**files, carrier: text}))
        assert found == ({"state": status} if status else {}), text


def function(driver: str, at: int, **port: str) -> dict[str, str]:
    """A device as its driver shows it."""
    name = f"{driver.partition('_')[0]}{at}"
    values = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "100 Gb/sec (4X EDR)",
              "link_layer": "Ethernet", "lid": "0x0", "sm_lid": "0x0", "node_type": "1: CA",
              "netdev": "1", "gids/0": "fe80::1", "gid_attrs/types/0": "RoCE v2",
              **port}  # fmt: skip
    node_type, carrier = values.pop("node_type"), values.pop("netdev")
    return {
        f"{name}/node_type": node_type,
        f"{name}/fw_ver": "1.2.3",
        f"{name}/hca_type": driver,
        f"{name}/device/uevent": f"DRIVER={driver}\nPCI_SLOT_NAME=0000:{at:02x}:00.0",
        f"{name}/device/infiniband_verbs/uverbs{at}/ibdev": name,
        **({f"{name}/device/net/eth{at}/carrier": carrier} if carrier else {}),
        **{f"{name}/ports/1/{file}": text for file, text in values.items() if text},
    }


IB = {"link_layer": "InfiniBand", "lid": "0x12", "sm_lid": "0x1", "netdev": "", "gids/0": ""}
OPA = {**IB, "lid": "0x10012", "rate": "100 Gb/sec (4X EDR)"}
DOWN = {"state": "1: DOWN", "phys_state": "3: Disabled"}
#: Driver, what its port shows -> what is wrong.
DRIVERS: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "bnxt_re": ("bnxt_en", {}, {}),
    "bnxt_re cut": ("bnxt_en", {**DOWN, "netdev": "0"}, {"state": "fail"}),
    "irdma, RoCE": ("ice", {}, {}),
    "irdma, iWARP": ("ice", {"node_type": "4: RNIC", "gid_attrs/types/0": "IB/RoCE v1"}, {}),
    "i40iw of an older kernel": (
        "i40e", {"node_type": "4: RNIC", "phys_state": "0: <unknown>"}, {},
    ),
    "cxgb4": ("cxgb4", {"node_type": "4: RNIC"}, {}),
    "qedr": ("qede", {}, {}),
    "hns": ("hns3", {}, {}),
    "mlx4 InfiniBand": ("mlx4_core", {**IB, "rate": "56 Gb/sec (4X FDR)"}, {}),
    "mlx4 RoCE, version 1 alone": (
        "mlx4_core", {"gid_attrs/types/0": "IB/RoCE v1"}, {"gids": "fail"},
    ),
    "Omni-Path": ("hfi1", OPA, {}),
    "Omni-Path, init": ("hfi1", {**OPA, "state": "2: INIT"}, {"state": "fail"}),
    "Omni-Path, offline": ("hfi1", {**OPA, "state": "1: DOWN", "phys_state": "2: Polling"},
                           {"state": "fail"}),
    "mana": ("mana", {}, {}),
    "ionic": ("ionic", {}, {}),
    "erdma": ("erdma", {"node_type": "4: RNIC"}, {}),
    "efa": ("efa", {"link_layer": "Unknown", "gid_attrs/types/0": "IB/RoCE v1", "netdev": ""}, {}),
    "a function in a container, without its interface": ("mlx5_core", {"netdev": ""}, {}),
    "the same, down": ("mlx5_core", {**DOWN, "netdev": ""}, {}),
    "one InfiniBand port": ("mlx5_core", IB, {}),
    "one InfiniBand port, one lane": (
        "mlx5_core", {**IB, "rate": "25 Gb/sec (1X EDR)"}, {"rate": "fail"},
    ),
    "one InfiniBand port, disabled": ("mlx5_core", {**IB, **DOWN}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", DRIVERS)
def test_a_driver(case: str) -> None:
    driver, port, expected = DRIVERS[case]
    assert wrong(checks, parsed(function(driver, 3, **port))) == expected


def test_software_devices_are_not_judged() -> None:
    """Soft-RoCE and soft-iWARP stand on any interface."""
    for name in ("rxe0", "siw0"):
        files = {f"{name}/ports/1/state": "1: DOWN", f"{name}/ports/1/link_layer": "Ethernet"}
        assert wrong(checks, parsed(files)) == {}


@pytest.mark.parametrize(
    ("lid", "state", "expected"),
    [("0x0", "4: ACTIVE", {}), ("0x0", "1: DOWN", {}), ("0x5", "2: INIT", {})],
)
def test_a_virtual_function_beside_its_physical_one(
    lid: str, state: str, expected: dict[str, str]
) -> None:
    files = ib_tree(h100(), mlx5_7={"lid": lid, "state": state})
    assert wrong(checks, parsed(files, "virtual=mlx5_7\n")) == expected


def cards(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Device, ...]:
    one, two = h100()[:2]
    return (
        replace(one, pci_address="0000:18:00.0", **first),
        replace(two, pci_address="0000:18:00.1", **second),
    )


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, POLLING, {}),
        ({}, DISABLED, {}),
        (POLLING, POLLING, {"state": "fail"}),
        (DISABLED, DISABLED, {}),
        ({}, {**POLLING, "phys_state": "6: LinkErrorRecovery"}, {"state": "fail"}),
    ],
)
def test_a_card_of_two_ports(first: Any, second: Any, expected: dict[str, str]) -> None:
    assert wrong(checks, parsed(ib_tree(cards(first, second)))) == expected


#: Counters now and at the look before -> what is wrong. PMA counters have 16, 8 or 4 bits.
COUNTERS: dict[str, tuple[dict[str, str], dict[str, int], float, dict[str, str]]] = {
    "nothing new": ({}, {}, 600, {}),
    "a link lost": ({"link_downed": "1"}, {"link_downed": 0}, 600, {"errors": "fail"}),
    "a link lost long ago": ({"link_downed": "7"}, {"link_downed": 7}, 600, {}),
    "full for long": ({"link_downed": "255"}, {"link_downed": 255}, 600, {"errors": "warn"}),
    "full by now": ({"link_downed": "255"}, {"link_downed": 250}, 600, {"errors": "fail"}),
    "reset": ({"link_downed": "0"}, {"link_downed": 255}, 600, {}),
    "reset, and lost again": (
        {"link_downed": "2"}, {"link_downed": 255}, 600, {"errors": "fail"},
    ),
    "few symbol errors": ({"symbol_error": "120"}, {"symbol_error": 0}, 600, {}),
    "many symbol errors": (
        {"symbol_error": "121"}, {"symbol_error": 0}, 600, {"errors": "fail"},
    ),
    "many in a day": ({"symbol_error": "2880"}, {"symbol_error": 0}, 86400, {}),
    "integrity": (
        {"local_link_integrity_errors": "1"}, {"local_link_integrity_errors": 0}, 600,
        {"errors": "fail"},
    ),
    "integrity, full for long": (
        {"local_link_integrity_errors": "15"}, {"local_link_integrity_errors": 15}, 600, {},
    ),
    "overrun": (
        {"excessive_buffer_overrun_errors": "1"}, {"excessive_buffer_overrun_errors": 0}, 600,
        {"errors": "fail"},
    ),
    "no receiver ready": (
        {"rnr_nak_retry_err": "1"}, {"rnr_nak_retry_err": 0}, 600, {"errors": "fail"},
    ),
    "untold": ({"link_downed": ""}, {"link_downed": 0}, 600, {"errors": "unknown"}),
    "N/A (no PMA)": (
        {"symbol_error": "N/A (no PMA)"}, {"symbol_error": 0}, 600, {"errors": "unknown"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTERS)
def test_since_the_last_look(case: str) -> None:
    now, then, seconds, expected = COUNTERS[case]
    before = rdma.counters(parsed(ib_tree(h100())))
    before |= {f"mlx5_3/1.{name}": value for name, value in then.items()}
    seen = parsed(ib_tree(h100(), mlx5_3={"counters": now}))
    assert wrong(checks, replace(seen, before=Counters(seconds, before))) == expected


ROW = {"rate_gbps": 400, "link_layer": "InfiniBand", "firmware": "28.41.1000"}
#: What differs of mlx5_3, its row of the policy -> what is wrong.
NAMED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "as it should be": ({}, ROW, {}),
    "disabled": (DISABLED, ROW, {"state": "fail"}),
    "slow": ({"rate": "200 Gb/sec (2X NDR)"}, ROW, {"rate": "fail"}),
    "faster": ({}, {"rate_gbps": 200}, {"rate": "fail"}),
    "rate untold": ({"rate": ""}, ROW, {"rate": "unknown"}),
    "firmware untold": ({"firmware": ""}, ROW, {"firmware": "unknown"}),
    "firmware older": ({"firmware": "28.39.1002"}, ROW, {"firmware": "fail"}),
    "the other link layer": (
        {"link_layer": "Ethernet", "gids": (("fe80::1", "RoCE v2"),)},
        ROW,
        {"link_layer": "fail"},
    ),
    "link layer untold": ({"link_layer": ""}, ROW, {"link_layer": "unknown", "gids": "unknown"}),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_port_that_the_policy_names(case: str) -> None:
    changes, row, expected = NAMED[case]
    policy = make_policy({"rdma_ports": {"mlx5_3/1": row}})
    assert wrong(checks, parsed(ib_tree(h100(), mlx5_3=changes)), policy) == expected


# --- The PCIe link of an adapter: drivers/pci/pci-sysfs.c prints it.

LINK = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
GEN3, GEN4, GEN5 = "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe"
A_FAULT, A_DOUBT, UNTOLD = ({"pcie": "fail"}, {"pcie": "warn"}, {"pcie": "unknown"})
ZERO = ("0", "0", "Unknown", "Unknown")
SLOT = ("../max_link_width", "../max_link_speed")
Link = dict[str, str | None]


def link(*values: str, slot: tuple[str, str] | None = None) -> Link:
    """Lanes, most lanes, speed, highest speed; and what the slot has of lanes and of speed."""
    return dict(zip((*LINK, *SLOT), (*values, *(slot or ())), strict=False))


#: Adapters, whose links differ, how -> what is wrong. All of a node, or mlx5_3 alone.
PCIE: dict[str, tuple[Any, str, Link, dict[str, str]]] = {
    # Fewer lanes.
    **{f"{lanes} lanes": (h100, "mlx5_3", link(lanes), A_FAULT)
       for lanes in ("1", "2", "4", "8", "12")},
    "8 lanes everywhere": (h100, "", link("8"), A_FAULT),
    "8 lanes of RoCE": (mi300x, "mlx5_3", link("8"), A_FAULT),
    "8 lanes of HDR": (a100, "mlx5_3", link("8"), A_FAULT),
    "8 lanes, a slot of 16": (h100, "mlx5_3", link("8", "16", GEN5, GEN5, slot=("16", GEN5)),
                              A_FAULT),
    "4 lanes in a slot of 8": (a100, "", link("4", "16", GEN4, GEN4, slot=("8", GEN4)), A_FAULT),
    "8 lanes, both values lower": (a100, "mlx5_3", link("8", "16", GEN3), A_FAULT),
    "a port of a hypervisor with one lane": (
        h100, "mlx5_3", link("8", "16", GEN5, GEN5, slot=("1", "2.5 GT/s PCIe")), A_FAULT,
    ),
    # A slot with less than the card is meant so, unless its port needs more.
    "a card of 8 lanes": (h100, "mlx5_bond_0", link("8", "8"), {}),
    "HDR in 8 lanes of Gen5": (a100, "", link("8", "16", GEN5, GEN5, slot=("8", GEN5)), {}),
    "HDR in 8 lanes of Gen4": (a100, "", link("8", "16", GEN4, GEN4, slot=("8", GEN4)), A_DOUBT),
    "NDR in 8 lanes of Gen5": (h100, "", link("8", "16", GEN5, GEN5, slot=("8", GEN5)), A_DOUBT),
    "a slot of more lanes": (h100, "", link("16", "16", GEN5, GEN5, slot=("32", GEN5)), {}),
    # A lower speed.
    "Gen4 beside Gen5": (h100, "mlx5_3", link("16", "16", GEN4), A_FAULT),
    "Gen1 beside Gen5": (h100, "mlx5_3", link("16", "16", "2.5 GT/s PCIe"), A_FAULT),
    "Gen3 beside Gen4": (a100, "mlx5_3", link("16", "16", GEN3), A_FAULT),
    "Gen3 beside Gen4, RoCE": (mi300x, "mlx5_3", link("16", "16", GEN3), A_FAULT),
    "NDR at Gen4 everywhere": (h100, "", link("16", "16", GEN4), A_DOUBT),
    "HDR at Gen3 everywhere": (a100, "", link("16", "16", GEN3), A_DOUBT),
    "a Gen5 card, HDR at Gen4 everywhere": (a100, "", link("16", "16", GEN4, GEN5), {}),
    "a Gen5 card in a Gen4 slot": (
        a100, "", link("16", "16", GEN4, GEN5, slot=("16", GEN4)), {},
    ),
    "one of them in a Gen4 slot": (
        h100, "mlx5_bond_0", link("16", "16", GEN4, GEN5, slot=("16", GEN4)), {},
    ),
    "a Gen5 card in a Gen5 slot at Gen4": (
        a100, "", link("16", "16", GEN4, GEN5, slot=("16", GEN5)), A_DOUBT,
    ),
    "the management alone at Gen4": (h100, "mlx5_bond_0", link("16", "16", GEN4, GEN5), {}),
    "a slot of a later generation": (
        a100, "", link("16", "16", GEN4, GEN4, slot=("16", GEN5)), {},
    ),
    "a slot whose port says nothing": (
        h100, "", link("16", "16", GEN5, GEN5, slot=("0", "Unknown")), {},
    ),
    # The words of other kernels.
    "speeds of an older kernel": (h100, "", link("16", "16", "32 GT/s", "32 GT/s"), {}),
    "one of an older kernel": (h100, "mlx5_3", link("16", "16", "16 GT/s", "32 GT/s"), A_FAULT),
    "a kernel older than the speed": (
        h100, "", link("16", "16", "Unknown speed", "Unknown speed"), {},
    ),
    "the same, 8 lanes": (
        h100, "mlx5_3", link("8", "16", "Unknown speed", "Unknown speed"), A_FAULT,
    ),
    "Gen6": (h100, "", link("16", "16", "64.0 GT/s PCIe", "64.0 GT/s PCIe"), {}),
    "Gen6, idle": (h100, "", link("2", "16", "64.0 GT/s PCIe", "64.0 GT/s PCIe"), {}),
    "a Gen6 card at Gen5": (h100, "mlx5_3", link("8", "16", GEN5, "64.0 GT/s PCIe"), A_FAULT),
    # No link to tell of: virtual functions, and what hypervisors make.
    "all zeros": (h100, "", link(*ZERO), {}),
    "zeros in one": (h100, "mlx5_3", link(*ZERO), {}),
    "zeros now": (h100, "", link("0", "16", "Unknown", GEN5), {}),
    "zeros now, an older kernel": (h100, "", link("0", "16", "Unknown speed", GEN5), {}),
    "no maximum either": (h100, "", link("0", "255", "Unknown", "Unknown"), {}),
    "no files": (h100, "", dict.fromkeys(LINK), {}),
    # What no link says.
    **{f"lanes {text!r}": (h100, "mlx5_3", link(text), UNTOLD)
       for text in ("63", "3", "-1", "255", "65535", "4294967295", "", "Unknown", "16x", "0x10",
                    "Input/output error", "Invalid argument", "N/A")},
    **{f"most lanes {text!r}": (h100, "mlx5_3", link("16", text), UNTOLD)
       for text in ("63", "-1", "255", "0", "8", "", "Invalid argument")},
    **{f"speed {text!r}": (h100, "mlx5_3", link("16", "16", text), UNTOLD)
       for text in ("Unknown", "Unknown speed", "63", "-1", "0", "0.0 GT/s PCIe", "31 GT/s", "",
                    "255.0 GT/s PCIe", "32.0 GT/s XYZ", "Input/output error")},
    **{f"highest speed {text!r}": (h100, "mlx5_3", link("16", "16", GEN5, text), UNTOLD)
       for text in ("Unknown", GEN4, "-1", "", "Permission denied")},
    "lanes gone": (h100, "mlx5_3", {"current_link_width": None}, UNTOLD),
    "speed gone": (h100, "mlx5_3", {"current_link_speed": None}, UNTOLD),
    "no lanes, with a speed": (h100, "mlx5_3", link("0"), UNTOLD),
    "the slot's lanes make no sense": (
        h100, "mlx5_3", link("8", "16", GEN5, GEN5, slot=("63", GEN5)), UNTOLD,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PCIE)
def test_a_pcie_link(case: str) -> None:
    devices, which, values, expected = PCIE[case]
    files = ib_tree(devices())
    for name in [which] if which else sorted({path.partition("/")[0] for path in files}):
        if name == "mlx5_bond_0" and not which:
            continue
        for file, text in values.items():
            files.pop(f"{name}/device/{file}", None)
            if text is not None:
                files[f"{name}/device/{file}"] = f"{text}\n"
    assert wrong(checks, parsed(files)) == expected


def pcie_of(files: Files, more: str = "", want: Policy | None = None) -> str:
    return wrong(checks, parsed(files, more), want or Policy()).get("pcie", "")


def test_a_pcie_link_is_judged_where_its_adapter_is_in_use() -> None:
    narrow = {"lanes": 8}
    files = ib_tree(h100(), mlx5_3=narrow)
    assert pcie_of(files) == "fail"
    assert pcie_of(files, "virtual=mlx5_3\n") == ""
    for named, status in (("mlx5_0/1", ""), ("mlx5_3/1", "fail")):
        assert pcie_of(files, want=make_policy({"rdma_ports": {named: {}}})) == status
    half = {f"mlx5_{at}": {**DISABLED, "lanes": 8} for at in range(4, 8)}
    assert pcie_of(ib_tree(h100(), **half)) == ""


def test_a_pcie_link_that_is_not_that_of_a_slot_is_not_judged() -> None:
    """EFA's registers are its hypervisor's. A ConnectX-8 has a switch, with a GPU behind it."""
    files = dict(function("efa", 3, link_layer="Unknown", netdev=""))
    files |= {f"efa3/device/{name}": text for name, text in link("8", "16", GEN4, GEN5).items()}
    assert pcie_of(files) == ""
    lone = {"rate": "800 Gb/sec (4X XDR)", "speed": GEN5}
    for model, status in (("MT4129", "warn"), ("MT4131", "")):
        found = ib_tree(h100()[:1], mlx5_0={**lone, "hca_type": model})
        found["mlx5_0/device/max_link_speed"] = "64.0 GT/s PCIe\n"
        assert pcie_of(found) == status


def test_an_adapter_in_two_slots_has_the_bandwidth_of_both() -> None:
    """Socket Direct: each half has 16 lanes of Gen3, for one port of 200 Gb/s."""
    fields = {"speed": GEN3, "rate": "200 Gb/sec (4X HDR)"}
    files = ib_tree(a100()[:2], mlx5_0=fields, mlx5_1=fields)
    assert pcie_of(files) == "warn"
    for other, status in (("1", ""), ("2", "warn")):
        guids = {f"mlx5_{at}/sys_image_guid": guid for at, guid in enumerate(("1", other))}
        assert pcie_of({**files, **guids}) == status


def test_a_slingshot_adapter_has_a_pcie_link() -> None:
    files = {
        "cxi0/device/uevent": "DRIVER=cxi_ss1\nPCI_SLOT_NAME=0000:21:00.0",
        "cxi0/device/port/link": "up",
        "cxi0/device/port/speed": "BS_200G",
    }
    for width, status in (("16", None), ("8", "fail")):
        values = link(width, "16", GEN4, GEN4)
        shown = {**files, **{f"cxi0/device/{name}": text for name, text in values.items()}}
        assert wrong(checks, parsed(shown, root="/sys/class/cxi")).get("pcie") == status


def test_what_a_pcie_finding_says() -> None:
    seen = parsed(ib_tree(h100(), mlx5_3={"lanes": 8}))
    found = by_name(checks, seen)["pcie"]
    assert found.actual == "mlx5_3: 8 lanes at 32 GT/s, able to do 16 lanes"
    assert found.source == "/sys/class/infiniband/mlx5_3/device/current_link_width"
    assert "mlx5_3 at 0000:5e:00.0" in found.fix
    assert rdma.compared(seen)["mlx5_3.pcie"] == "8 lanes at 32 GT/s"
    assert rdma.compared(seen)["mlx5_0.pcie"] == "16 lanes at 32 GT/s"

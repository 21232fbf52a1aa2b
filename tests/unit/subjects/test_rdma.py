"""What the RDMA devices of a node show, and what is wrong with them.

Sources of the rows: [sysfs] drivers/infiniband/core/sysfs.c (the words of state, phys_state,
rate), Documentation/ABI/stable/sysfs-class-infiniband; [IBA] InfiniBand Architecture Specification
1.4, 4.1.3 (LIDs), 7.2.7 (port states), 14.2.5.6 (PortInfo); [roce] drivers/infiniband/hw/mlx5/
main.c (mlx5_query_port_roce: the state is the interface's); [ndr] NVIDIA's speeds of InfiniBand;
[pcie] drivers/pci/pci-sysfs.c. PMA counters have 16, 8 or 4 bits.
"""

import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nodeready.core.base import Output, ProbeError
from nodeready.core.policy import Policy, make_policy
from nodeready.core.result import Counters, FleetFacts
from nodeready.lab.hardware import IB_CLASS, Device, ib_tree, ports_of
from nodeready.runs.ready.job_env import hca_value, ib_hca
from nodeready.subjects.nics.facts import Nics
from nodeready.subjects.nics.nic import Nic, Route
from nodeready.subjects.rdma import checks
from nodeready.subjects.rdma import facts as rdma
from nodeready.subjects.rdma.facts import Rdma
from tests import paths
from tests.builders.judging import assert_wrong, by_name, wrong
from tests.cases import cases

POLICY = Policy()
POLLING = {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"}
DISABLED = {**POLLING, "phys_state": "3: Disabled"}
IB = {"link_layer": "InfiniBand", "lid": "0x12", "sm_lid": "0x1", "netdev": "", "gids/0": ""}
#: Fields of a port by a name, for rows of cases.
BASES: dict[str, dict[str, Any]] = {
    "POLLING": POLLING,
    "DISABLED": DISABLED,
    "DOWN": {"state": "1: DOWN", "phys_state": "3: Disabled"},
    "IB": IB,
    "OPA": {**IB, "lid": "0x10012", "rate": "100 Gb/sec (4X EDR)"},
    "ROW": {"rate_gbps": 400, "link_layer": "InfiniBand", "firmware": "28.41.1000"},
}
judged = partial(by_name, checks)


def parsed(files: Mapping[str, str], more: str = "", root: str = IB_CLASS) -> Rdma:
    """What is read when grep prints these files, and the script these lines."""
    text = "".join(
        f"{root}/{path}:{line}\n" for path, text in files.items() for line in text.splitlines()
    )
    observed: Rdma = rdma.parse({"rdma": Output(text + more, 0)}, POLICY)
    return observed


def node(devices: tuple[Device, ...], more: str = "", **changes: Mapping[str, Any]) -> Rdma:
    return parsed(ib_tree(devices, **changes), more)


def fields(row: Any) -> dict[str, Any]:
    """The fields in a row: `["POLLING", {"rate": ""}]`, later ones win."""
    result: dict[str, Any] = {}
    for part in row if isinstance(row, list) else [row]:
        result |= BASES[part] if isinstance(part, str) else part
    return result


@pytest.mark.parametrize("case", cases(__file__, "data/rdma/ports.json"))
def test_ports(case):
    """mlx5_0 to 7 are InfiniBand on h100 (beside a bond) and a100, RoCE on mi300x."""
    changes = {name: fields(row) for name, row in case.get("set", {}).items()}
    changes |= {f"mlx5_{n}": fields(case["every"]) for n in range(8) if "every" in case}
    rows = {name: fields(row) for name, row in case.get("policy", {}).items()}
    devices = ports_of(case.get("node", "h100"))
    observed = node(devices, case.get("more", ""), **changes)
    assert_wrong(checks, observed, case["wrong"], make_policy({"rdma_ports": rows}))


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


@pytest.mark.parametrize("case", cases(__file__, "data/rdma/drivers.json"))
def test_drivers(case):
    port = fields(case.get("port", {}))
    assert wrong(checks, parsed(function(case["driver"], 3, **port))) == case["wrong"]


@pytest.mark.parametrize("case", cases(__file__, "data/rdma/counters.json"))
def test_counters_since_the_last_look(case):
    before = rdma.counters(node(ports_of("h100")))
    before |= {f"mlx5_3/1.{name}": value for name, value in case["before"].items()}
    observed = node(ports_of("h100"), mlx5_3={"counters": case["now"]})
    assert judged(observed)["errors"].status == "na"
    seconds = case.get("seconds", 600)
    fleet = FleetFacts(counters={"rdma": Counters(seconds, before)})
    assert_wrong(checks, observed, case["wrong"], fleet=fleet)


def test_a_quiet_time_is_said_in_seconds_minutes_or_hours():
    observed = node(ports_of("h100"))
    times = {119: "119 s", 120: "2 min", 3600: "60 min", 7199: "120 min", 7200: "2.0 h"}
    for seconds, words in times.items():
        fleet = FleetFacts(counters={"rdma": Counters(seconds, rdma.counters(observed))})
        assert judged(observed, fleet=fleet)["errors"].actual == f"none in {words}"


LINK = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed",
        "../max_link_width", "../max_link_speed")  # fmt: skip
SPEEDS = {"Gen1": "2.5", "Gen3": "8.0", "Gen4": "16.0", "Gen5": "32.0", "Gen6": "64.0"}


def link(*values: str | None) -> dict[str, str | None]:
    """Files: lanes, most lanes, speed, highest speed, the slot's lanes and speed."""
    texts = [f"{SPEEDS[value]} GT/s PCIe" if value in SPEEDS else value for value in values]
    return dict(zip(LINK, texts, strict=False))


@pytest.mark.parametrize("case", cases(__file__, "data/rdma/pcie.json"))
def test_a_pcie_link(case):
    """The links of all adapters but the management's, or of one. A slot that has less than the
    card is meant so, unless the port needs more; virtual functions have no link to tell of.
    """
    tree = ib_tree(ports_of(case.get("node", "h100")))
    devices = {path.partition("/")[0] for path in tree} - {"mlx5_bond_0"}
    for value in case.get("values", [""]):
        files = dict(tree)
        values = [value if text == "VALUE" else text for text in case["link"]]
        for name in [case["device"]] if "device" in case else devices:
            for file, text in link(*values).items():
                files.pop(f"{name}/device/{file}", None)
                if text is not None:
                    files[f"{name}/device/{file}"] = f"{text}\n"
        expected = {"pcie": case["wrong"]} if case["wrong"] else {}
        assert wrong(checks, parsed(files)) == expected, value


def pcie_of(files: Mapping[str, str]) -> str:
    return wrong(checks, parsed(files)).get("pcie", "")


def test_a_pcie_link_that_is_not_that_of_a_slot_is_not_judged():
    """EFA's registers are its hypervisor's. A ConnectX-8 has a switch, with a GPU behind it."""
    files = function("efa", 3, link_layer="Unknown", netdev="")
    for name, text in link("8", "16", "Gen4", "Gen5").items():
        files[f"efa3/device/{name}"] = text or ""
    assert pcie_of(files) == ""
    lone = {"rate": "800 Gb/sec (4X XDR)", "speed": "32.0 GT/s PCIe"}
    for model, status in (("MT4129", "warn"), ("MT4131", "")):
        tree = ib_tree(ports_of("h100")[:1], mlx5_0={**lone, "hca_type": model})
        tree["mlx5_0/device/max_link_speed"] = "64.0 GT/s PCIe\n"
        assert pcie_of(tree) == status


def test_an_adapter_in_two_slots_has_the_bandwidth_of_both():
    """Socket Direct: each half has 16 lanes of Gen3, for one port of 200 Gb/s."""
    half = {"speed": "8.0 GT/s PCIe", "rate": "200 Gb/sec (4X HDR)"}
    files = ib_tree(ports_of("a100")[:2], mlx5_0=half, mlx5_1=half)
    assert pcie_of(files) == "warn"
    for other, status in (("1", ""), ("2", "warn")):
        guids = {f"mlx5_{at}/sys_image_guid": guid for at, guid in enumerate(("1", other))}
        assert pcie_of({**files, **guids}) == status


def test_what_a_pcie_finding_says():
    observed = node(ports_of("h100"), mlx5_3={"lanes": 8})
    result = judged(observed)["pcie"]
    assert result.actual == "mlx5_3: 8 lanes at 32 GT/s, able to do 16 lanes"
    assert result.source == "/sys/class/infiniband/mlx5_3/device/current_link_width"
    assert "mlx5_3 at 0000:5e:00.0" in result.fix
    assert rdma.compared(observed)["mlx5_3.pcie"] == "8 lanes at 32 GT/s"


def test_a_good_node_has_nothing_to_say():
    for devices in (ports_of("h100"), ports_of("a100"), ports_of("mi300x")):
        observed = node(devices)
        learnt = make_policy(rdma.learned(observed))
        assert wrong(checks, observed) == wrong(checks, observed, learnt) == {}
        assert judged(observed)["state"].status == judged(observed)["devices"].status == "ok"
        assert judged(observed)["gids"].status == ("na" if devices == ports_of("a100") else "ok")
    named = make_policy({"rdma_ports": {"mlx5_0/1": BASES["ROW"]}})
    results = judged(node(ports_of("h100")), named)
    assert {results[name].status for name in ("rate", "link_layer", "firmware")} == {"ok"}
    assert judged(node(()), named)["expected"].status == "fail"


def test_what_is_observed():
    observed = node(
        ports_of("h100"), mlx5_0={"counters": {"symbol_error": "3", "link_downed": "N/A (no PMA)"}}
    )
    device = observed.devices["mlx5_0"]
    assert (device.kind, device.driver, device.hca_type) == ("mlx5", "mlx5_core", "MT4129")
    assert (device.pci_address, device.slot, device.numa_node, device.uverbs) == (
        "0000:18:00.0", "0000:18:00", 0, True,
    )  # fmt: skip
    assert [netdev.name for netdev in device.netdevs] == ["ib0"]
    port = observed.ports["mlx5_0/1"]
    assert (port.state, port.phys_state, port.link_layer) == ("ACTIVE", "LinkUp", "InfiniBand")
    assert (port.rate_gbps, port.rate_text) == (400.0, "400 Gb/sec (4X NDR)")
    assert (port.lid, port.sm_lid) == (0x2A0, 1)
    assert (port.counters["symbol_error"], port.counters["link_downed"]) == (3, None)
    bond = observed.ports["mlx5_bond_0/1"]
    assert bond.netdev == "bond0"
    assert [gid.type for gid in bond.gids] == ["IB/RoCE v1", "RoCE v2"] * 2


def test_rates():
    rates = {"2.5 Gb/sec (1X SDR)": 2.5, "800 Gb/sec (4X XDR)": 800.0, "BS_200G": 200.0}
    rates |= {"": None, "99999999999999999999 Gb/sec": None}
    ports = {
        rate: node(ports_of("h100"), mlx5_0={"rate": rate}).ports["mlx5_0/1"] for rate in rates
    }
    assert {rate: port.rate_gbps for rate, port in ports.items()} == rates


def test_one_cable_in_a_card_of_two_ports():
    armed, broken = {"state": "3: ARMED"}, {**POLLING, "phys_state": "6: LinkErrorRecovery"}
    named = make_policy({"rdma_ports": {"mlx5_0/1": {}, "mlx5_1/1": {}}})
    one, two = ports_of("h100")[:2]
    for first, second, status in (
        ({}, {}, "ok"), ({}, POLLING, "ok"), ({}, DISABLED, "ok"), ({}, armed, "fail"),
        ({}, broken, "fail"), (POLLING, POLLING, "fail"), (POLLING, DISABLED, "fail"),
        (DISABLED, DISABLED, "na"),
    ):  # fmt: skip
        ports = (replace(one, pci_address="0000:18:00.0", **first),
                 replace(two, pci_address="0000:18:00.1", **second))  # fmt: skip
        assert judged(node(ports))["state"].status == status
        expected = "fail" if first or second else "ok"
        assert judged(node(ports), named)["state"].status == expected


def test_an_interface_with_a_carrier_and_a_port_that_is_down_contradict():
    files = ib_tree(ports_of("mi300x"), mlx5_3=BASES["DOWN"])
    (carrier,) = (path for path in files if path.startswith("mlx5_3/") and "/carrier" in path)
    for text, expected in (("1\n", {"state": "fail"}), ("0\n", {"state": "fail"}), ("", {})):
        assert wrong(checks, parsed({**files, carrier: text})) == expected, text


@pytest.mark.parametrize("state", ["4: ACTIVE", "1: DOWN"])
def test_a_virtual_function_and_software_are_not_judged(state):
    files = ib_tree(ports_of("h100"), mlx5_7={"lid": "0x0", "state": state})
    for name in ("rxe0", "siw0"):
        files |= {f"{name}/ports/1/state": "1: DOWN", f"{name}/ports/1/link_layer": "Ethernet"}
    observed = parsed(files, "virtual=mlx5_7\n")
    assert wrong(checks, observed) == {}
    assert observed.devices["rxe0"].kind == "software"
    assert "rxe0" not in rdma.compared(observed)["devices"]


def test_efa_always_says_active_so_its_state_is_not_judged():
    files = function("efa", 6, link_layer="Unknown", netdev="")
    observed = parsed(files)
    assert (observed.devices["efa6"].kind, observed.nccl_ib_hca) == ("efa", ())
    assert (judged(observed)["state"].status, judged(observed)["devices"].status) == ("na", "ok")
    down = parsed({**files, "efa6/device/net/ens6/operstate": "down\n"})
    assert "ens6 is down" in judged(down)["state"].actual


def test_slingshot():
    files = {"device/uevent": "DRIVER=cxi_ss1\nPCI_SLOT_NAME=0000:21:00.0",
             "device/port/speed": "BS_200G", "device/uc/qspi_blob_version": "1.5.41"}  # fmt: skip

    def adapter(width: str, state: str) -> Rdma:
        shown = {f"device/{n}": t or "" for n, t in link(width, "16", "Gen4", "Gen4").items()}
        shown |= {**files, "device/port/link": state}
        return parsed({f"cxi0/{n}": t for n, t in shown.items()}, root="/sys/class/cxi")

    assert wrong(checks, adapter("16", "up")) == {}
    assert wrong(checks, adapter("8", "up")) == {"pcie": "fail"}
    assert wrong(checks, adapter("16", "down")) == {"state": "fail"}
    device = adapter("16", "up").devices["cxi0"]
    assert (device.kind, device.firmware) == ("cxi", "1.5.41")
    assert (device.ports[0].state, device.ports[0].rate_gbps) == ("ACTIVE", 200.0)


def test_an_adapter_without_a_device():
    text = "adapter=0000:18:00.0 bound\nadapter=0000:40:00.0 unbound\n"
    lost = judged(parsed({}, text))
    assert lost["devices"].status == "fail"
    assert "0000:40:00.0 has no driver" in lost["devices"].actual
    assert {result.status for name, result in lost.items() if name != "devices"} == {"na"}
    assert judged(parsed(ib_tree(ports_of("h100")), text))["devices"].status == "ok"


def test_device_files_that_only_root_can_open():
    paths = "/dev/infiniband/uverbs0\n/dev/infiniband/uverbs3\n"
    found = judged(parsed(ib_tree(ports_of("h100")), paths))["devices"]
    assert (found.status, found.source) == ("fail", "/dev/infiniband")
    assert found.actual == "uverbs0, uverbs3: for root alone"


def test_nothing_there():
    observed = parsed({})
    assert {result.status for result in judged(observed).values()} == {"na"}
    assert rdma.compared(observed) == rdma.learned(observed) == {}


def test_what_nodes_share():
    observed = node(ports_of("h100"), mlx5_1=POLLING)
    facts = rdma.compared(observed)
    assert facts["mlx5_0/1.rate_gbps"] == 400.0
    assert facts["mlx5_0.firmware"] == "28.41.1000"
    assert facts["mlx5_0/1.link_layer"] == "InfiniBand"
    assert facts["mlx5_0.pcie"] == "16 lanes at 32 GT/s"
    assert "mlx5_1/1.rate_gbps" not in facts
    assert "mlx5_1/1" not in rdma.learned(observed)["rdma_ports"]


def network(default: str | None, *interfaces: Nic, peers: tuple[str, ...] = ()) -> Nics:
    """A network in which ``peers`` reach other nodes, the first of them the most."""
    nics = (*interfaces, *(Nic(name, "ethernet") for name in peers))
    routes = [Route(f"10.0.{number}.0/24", name, None, 0) for number, name in enumerate(peers)]
    return Nics({nic.name: nic for nic in nics}, {}, 0, tuple(routes), False, default)


FLEET = FleetFacts(addresses=("10.0.0.2", "10.0.0.3", "10.0.1.2"))


@pytest.mark.parametrize(("devices", "nics", "chosen"), [
    (ports_of("h100"), None, range(8)),
    (ports_of("h100"), network("bond0"), range(8)),
    (ports_of("mi300x"), network("eth0"), range(8)),
    (ports_of("mi300x"), network("eth1"), range(1, 8)),
    (ports_of("mi300x"), network(None, peers=("eth2", "eth3")), (0, *range(2, 8))),
    # The default route leads through a bond or a VLAN of the port.
    (ports_of("mi300x"), network("team0", Nic("eth1", "ethernet", master="team0")), range(1, 8)),
    (ports_of("mi300x"), network("vlan7", Nic("eth1", "ethernet", upper=("vlan7",))), range(1, 8)),
    # InfiniBand is for jobs, also when host names lead there; one port is all there is.
    (ports_of("a100"), network("ib0", peers=("ib0",)), range(8)),
    (ports_of("mi300x")[:1], network("eth1"), (0,)),
    ((), network("eth0"), ()),
])  # fmt: skip
def test_the_ports_that_nccl_uses(devices, nics, chosen):
    assert ib_hca(node(devices), nics, FLEET)[0] == tuple(f"mlx5_{at}" for at in chosen)


@pytest.mark.parametrize(("table", "status"), [
    (("0xffff", "0x0000", "0x0000"), "ok"), (("0xffff", "0x8001", "0x0000"), "warn"),
    (("0x7fff", "0x0000", "0x0000"), "warn"), (("x", "0xffff0000", "0x1\x1b"), "na"),
])  # fmt: skip
def test_the_ports_for_nccl_share_their_pkeys(table, status):
    def look(devices: tuple[Device, ...], **tables: tuple[str, ...]) -> Rdma:
        files = {
            f"{name}/ports/1/pkeys/{index}": text
            for name, entries in tables.items()
            for index, text in enumerate(entries)
        }
        return parsed({**ib_tree(devices), **files})

    normal = ("0xffff", "0x0000", "0x0000")
    one = look(ports_of("h100"), mlx5_0=normal, mlx5_1=table)
    assert one.ports["mlx5_0/1"].pkeys == ("0xffff",)
    assert judged(one)["pkeys"].status == status
    assert rdma.compared(one)["mlx5_0/1.pkeys"] == "0xffff"
    # An adapter that is not for NCCL, and RoCE, which has no subnet manager.
    assert judged(look(ports_of("h100"), mlx5_0=normal, mlx5_bond_0=table))["pkeys"].status == "na"
    assert look(ports_of("mi300x"), mlx5_0=normal).ports["mlx5_0/1"].pkeys == ()


def test_nccl_gets_no_slower_port_and_none_that_is_down():
    half = node(ports_of("h100"), mlx5_3={"rate": "200 Gb/sec (2X NDR)"}, mlx5_4=POLLING)
    assert half.nccl_ib_hca == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_5", "mlx5_6", "mlx5_7")
    assert node((ports_of("h100")[8],)).nccl_ib_hca == ("mlx5_bond_0",)
    for devices, reason in (
        (ports_of("h100"), "active InfiniBand ports at 400 Gb/s"),
        (ports_of("mi300x"), "active RoCE ports at 400 Gb/s"),
        ((), "no active InfiniBand or RoCE port"),
    ):
        assert ib_hca(node(devices), None)[1] == reason
    assert hca_value(("mlx5_1", "mlx5_2:2")) == "=mlx5_1,mlx5_2:2"
    assert hca_value(()) == ""


def test_a_look_that_makes_no_sense():
    for output in (
        Output("", None), Output("x", None, truncated=True), Output("grep: not found", 127),
        Output("adapter=0000:18:00.0 nonsense\n", 0),
    ):  # fmt: skip
        with pytest.raises(ProbeError):
            rdma.parse({"rdma": output}, POLICY)


def test_thousands_of_devices_are_cut():
    files = {f"x{at}/ports/1/state": "1: DOWN" for at in range(rdma.MAX_DEVICES + 1)}
    assert len(parsed(files).devices) == rdma.MAX_DEVICES


def test_the_recorded_h100(tmp_path):
    archive = paths.SAMPLES / "sysfs" / "class-infiniband-h100.tar.gz"
    if not archive.exists():
        pytest.skip("the recorded tree is not here")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    text = subprocess.run(
        ["grep", "-rasH", ""], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    observed = parsed({}, "".join(f"{IB_CLASS}/{line}\n" for line in text.splitlines()))
    assert len(observed.ports) == 9
    assert sorted(observed.nccl_ib_hca) == [f"mlx5_{at}" for at in (0, 1, 4, 5, 6, 7, 8, 9)]
    fleet = FleetFacts(counters={"rdma": Counters(3600, rdma.counters(observed))})
    results = judged(observed, fleet=fleet)
    assert {results[name].status for name in ("state", "rate", "firmware")} == {"ok"}
    assert results["errors"].status == "warn"  # link_downed of mlx5_1 has long been full

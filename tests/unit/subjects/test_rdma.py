"""What the RDMA devices of a node say, and what is made of it."""

from __future__ import annotations

import random
import re
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nodeready.lab.hardware import IB_CLASS, Device, a100, h100, ib_tree, mi300x
from nodeready.policy import Policy
from nodeready.policy.policy import make_policy
from nodeready.subjects.base import Counters, Output, ProbeError
from nodeready.subjects.rdma import checks
from nodeready.subjects.rdma import facts as rdma
from nodeready.subjects.rdma.facts import Rdma
from tests import paths
from tests.builders.hostile import recorded
from tests.builders.judging import by_name, judge_all

POLICY = Policy()
DOWN = {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"}
OFF = {**DOWN, "phys_state": "3: Disabled"}
RECORDED = paths.SAMPLES / "sysfs"


def printed(files: Mapping[str, str], root: str = IB_CLASS) -> str:
    """What grep prints of a tree."""
    return "".join(
        f"{root}/{path}:{line}\n" for path, text in files.items() for line in text.splitlines()
    )


def parsed(text: str) -> Rdma:
    seen: Rdma = rdma.parse({"rdma": Output(text, 0)}, POLICY)
    return seen


def node(devices: tuple[Device, ...], **changes: Mapping[str, Any]) -> Rdma:
    return parsed(printed(ib_tree(devices, **changes)))


judged = partial(by_name, checks)


def statuses(seen: Rdma, policy: Policy = POLICY) -> dict[str, str]:
    return {name: result.status for name, result in judged(seen, policy).items()}


def wants(**rows: Mapping[str, Any]) -> Policy:
    """A policy with these ports, "mlx5_0" for "mlx5_0/1"."""
    table = {f"{name}/1": dict(row) for name, row in rows.items()}
    return make_policy({"rdma_ports": table})


def test_a_good_node_has_nothing_to_say() -> None:
    for devices in (h100(), a100(), mi300x()):
        seen = node(devices)
        learnt = make_policy(rdma.learned(seen))
        assert {*statuses(seen, learnt).values()} <= {"ok", "na"}
        assert {name for name, s in statuses(seen).items() if s not in ("ok", "na")} == set()
        assert statuses(seen)["state"] == statuses(seen)["devices"] == "ok"
    assert statuses(node(h100()))["gids"] == "ok"  # the bond's
    assert statuses(node(a100()))["gids"] == "na"


def test_what_is_observed() -> None:
    seen = node(h100(), mlx5_0={"counters": {"symbol_error": "3", "link_downed": "N/A (no PMA)"}})
    device = seen.devices["mlx5_0"]
    assert (device.kind, device.driver, device.hca_type) == ("mlx5", "mlx5_core", "MT4129")
    assert (device.pci_address, device.slot, device.numa_node) == (
        "0000:18:00.0",
        "0000:18:00",
        0,
    )
    assert device.uverbs
    assert [one.name for one in device.netdevs] == ["ib0"]
    port = seen.ports["mlx5_0/1"]
    assert (port.state, port.phys_state, port.link_layer) == ("ACTIVE", "LinkUp", "InfiniBand")
    assert (port.rate_gbps, port.rate_text) == (400.0, "400 Gb/sec (4X NDR)")
    assert (port.lid, port.sm_lid) == (0x2A0, 1)
    assert port.counters["symbol_error"] == 3
    assert port.counters["link_downed"] is None
    bond = seen.ports["mlx5_bond_0/1"]
    assert bond.netdev == "bond0"
    assert [gid.type for gid in bond.gids] == ["IB/RoCE v1", "RoCE v2"] * 2


@pytest.mark.parametrize(
    ("rate", "gbps"),
    [
        ("2.5 Gb/sec (1X SDR)", 2.5),
        ("56 Gb/sec (4X FDR)", 56.0),
        ("800 Gb/sec (4X XDR)", 800.0),
        ("BS_200G", 200.0),
        ("", None),
        ("99999999999999999999 Gb/sec", None),
    ],
)
def test_rates(rate: str, gbps: float | None) -> None:
    assert node(h100(), mlx5_0={"rate": rate}).ports["mlx5_0/1"].rate_gbps == gbps


# What is wrong -> the check that says so, and what it names.
@pytest.mark.parametrize(
    ("devices", "changes", "check", "status", "words"),
    [
        (h100, {"mlx5_3": DOWN}, "state", "fail", "mlx5_3/1: DOWN, Polling"),
        (h100, {"mlx5_3": OFF}, "state", "warn", "mlx5_3/1: DOWN, Disabled"),
        (h100, {"mlx5_3": {"state": "2: INIT"}}, "state", "fail", "no subnet manager"),
        (h100, {"mlx5_3": {"phys_state": "6: LinkErrorRecovery"}}, "state", "fail", "Recovery"),
        (h100, {"mlx5_3": {"state": ""}}, "state", "unknown", "mlx5_3/1"),
        (mi300x, {"mlx5_3": OFF}, "state", "fail", "mlx5_3/1: DOWN"),
        (h100, {"mlx5_3": {"rate": "200 Gb/sec (2X NDR)"}}, "rate", "fail", "200 Gb/sec (2X NDR)"),
        (h100, {"mlx5_3": {"rate": ""}}, "rate", "unknown", "mlx5_3/1"),
        (h100, {"mlx5_bond_0": {"rate": "50 Gb/sec (1X HDR)"}}, "rate", "ok", ""),
        (h100, {"mlx5_3": {"firmware": "28.39.1002"}}, "firmware", "warn", "28.39.1002 on mlx5_3"),
        (h100, {"mlx5_3": {"uverbs": ""}}, "devices", "fail", "mlx5_3 has no uverbs"),
        (mi300x, {"mlx5_3": {"gids": ()}}, "gids", "fail", "no GID on mlx5_3/1"),
        (mi300x, {"mlx5_3": {"gids": (("fe80::1", "IB/RoCE v1"),)}}, "gids", "fail", "v1"),
        (mi300x, {"mlx5_3": {"gids": (("fe80::1", ""),)}}, "gids", "unknown", "mlx5_3/1"),
    ],
)
def test_faults(devices: Any, changes: Any, check: str, status: str, words: str) -> None:
    result = judged(node(devices(), **changes))[check]
    assert result.status == status, result
    assert words in result.actual


def two_ports(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Device, ...]:
    """A card of two functions, in a slot of its own."""
    one, two = h100()[:2]
    return (
        replace(one, pci_address="0000:18:00.0", **first),
        replace(two, pci_address="0000:18:00.1", **second),
    )


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ({}, {}, "ok"),
        ({}, DOWN, "ok"),
        (DOWN, DOWN, "fail"),
        ({}, {"state": "3: ARMED"}, "fail"),
        (DOWN, OFF, "fail"),
        (OFF, OFF, "na"),
    ],
)
def test_one_cable_in_a_card_of_two_ports(first: Any, second: Any, status: str) -> None:
    seen = node(two_ports(first, second))
    assert statuses(seen)["state"] == status
    named = wants(mlx5_0={}, mlx5_1={})
    assert statuses(seen, named)["state"] == ("ok" if not first and not second else "fail")


def test_a_port_that_the_policy_names() -> None:
    table = {"rate_gbps": 400, "link_layer": "InfiniBand", "firmware": "28.41.1000"}
    policy = wants(mlx5_0=table, mlx5_9=table)
    found = judged(node(h100()), policy)
    assert found["expected"].status == "fail"
    assert "mlx5_9/1" in found["expected"].actual
    assert {found[name].status for name in ("state", "rate", "link_layer", "firmware")} == {"ok"}
    other = node(h100(), mlx5_0={**dict.fromkeys(["rate", "firmware"], "2 Gb/sec"),
                                 "link_layer": "Ethernet"})  # fmt: skip
    found = judged(other, policy)
    assert {found[name].status for name in ("rate", "link_layer", "firmware")} == {"fail"}
    assert "0000:18:00.0" in found["link_layer"].fix
    assert judged(node(()), policy)["expected"].status == "fail"


@pytest.mark.parametrize(
    ("now", "before", "seconds", "status", "words"),
    [
        ({}, {}, 3600, "ok", "none in 60 min"),
        ({"link_downed": "1"}, {}, 3600, "fail", "mlx5_0/1 link_downed +1"),
        ({"rnr_nak_retry_err": "7"}, {"rnr_nak_retry_err": 5}, 60, "fail", "+2"),
        ({"link_downed": "255"}, {"link_downed": 250}, 60, "fail", "+at least 5"),
        ({"link_downed": "255"}, {"link_downed": 255}, 60, "warn", "link_downed 255"),
        ({"local_link_integrity_errors": "15"}, {"local_link_integrity_errors": 15}, 60,
         "ok", "full before"),
        ({"link_downed": "2"}, {"link_downed": 9}, 60, "fail", "+2"),
        ({"link_downed": "0"}, {"link_downed": 9}, 60, "ok", "none"),
        ({"symbol_error": "120"}, {}, 60, "ok", "none"),
        ({"symbol_error": "121"}, {}, 60, "fail", "symbol_error +121"),
        ({"symbol_error": "240"}, {}, 7200, "ok", "none in 2.0 h"),
        ({"port_rcv_errors": "9"}, {}, 60, "ok", "none"),
        ({"link_downed": "N/A (no PMA)"}, {}, 60, "unknown", "mlx5_0/1 link_downed"),
    ],
)  # fmt: skip
def test_what_changed_since_the_last_look(
    now: Any, before: Any, seconds: float, status: str, words: str
) -> None:
    earlier = rdma.counters(node(a100()))
    earlier |= {f"mlx5_0/1.{name}": value for name, value in before.items()}
    seen = node(a100(), mlx5_0={"counters": now})
    assert statuses(seen)["errors"] == "na"
    result = judged(replace(seen, before=Counters(seconds, earlier)))["errors"]
    assert result.status == status, result
    assert words in result.actual


def test_hca_names_for_nccl() -> None:
    assert node(h100()).nccl_ib_hca == tuple(f"mlx5_{at}" for at in range(8))
    half = node(h100(), mlx5_3={"rate": "200 Gb/sec (2X NDR)"}, mlx5_4=DOWN)
    assert half.nccl_ib_hca == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_5", "mlx5_6", "mlx5_7")
    assert rdma.hcas(node(mi300x()), {"eth1"})[0] == tuple(f"mlx5_{at}" for at in range(1, 8))
    assert rdma.hcas(node(mi300x()[:1]), {"eth1"})[0] == ("mlx5_0",)
    assert node((h100()[8],)).nccl_ib_hca == ("mlx5_bond_0",)
    assert node(()).nccl_ib_hca == ()


# One device each, as its driver shows it.
EFA = {
    "rdmap0s6/fw_ver": "0.0.0.0\n",
    "rdmap0s6/device/uevent": "DRIVER=efa\nPCI_SLOT_NAME=0000:00:06.0\n",
    "rdmap0s6/device/infiniband_verbs/uverbs0/ibdev": "rdmap0s6\n",
    "rdmap0s6/ports/1/state": "4: ACTIVE\n",
    "rdmap0s6/ports/1/phys_state": "5: LinkUp\n",
    "rdmap0s6/ports/1/rate": "100 Gb/sec (4X EDR)\n",
    "rdmap0s6/ports/1/link_layer": "Unknown\n",
}
CXI = {
    "cxi0/device/uevent": "DRIVER=cxi_ss1\nPCI_SLOT_NAME=0000:21:00.0\n",
    "cxi0/device/port/link": "up\n",
    "cxi0/device/port/speed": "BS_200G\n",
    "cxi0/device/uc/qspi_blob_version": "1.5.41\n",
    "cxi0/device/net/hsn0/operstate": "up\n",
}


def test_efa_always_says_active_so_its_state_is_not_judged() -> None:
    seen = parsed(printed(EFA))
    assert seen.devices["rdmap0s6"].kind == "efa"
    assert seen.nccl_ib_hca == ()
    result = judged(seen)["state"]
    assert (result.status, statuses(seen)["devices"]) == ("na", "ok")
    down = {**EFA, "rdmap0s6/device/net/ens6/operstate": "down\n"}
    assert "ens6 is down" in judged(parsed(printed(down)))["state"].actual


def test_slingshot() -> None:
    seen = parsed(printed(CXI, "/sys/class/cxi"))
    device = seen.devices["cxi0"]
    assert (device.kind, device.firmware) == ("cxi", "1.5.41")
    assert (device.ports[0].state, device.ports[0].rate_gbps) == ("ACTIVE", 200.0)
    assert {statuses(seen)[name] for name in ("devices", "state")} == {"ok"}
    down = parsed(printed({**CXI, "cxi0/device/port/link": "down\n"}, "/sys/class/cxi"))
    assert statuses(down)["state"] == "fail"


def test_software_and_idle_virtual_functions_are_not_judged() -> None:
    files = ib_tree(h100(), mlx5_7=DOWN)
    soft = {"rxe0/ports/1/state": "1: DOWN\n", "rxe0/ports/1/link_layer": "Ethernet\n"}
    seen = parsed(printed({**files, **soft}) + "virtual=mlx5_7\n")
    assert seen.devices["rxe0"].kind == "software"
    assert {*statuses(seen).values()} == {"ok", "na"}
    assert "rxe0" not in rdma.compared(seen)["devices"]  # type: ignore[operator]


def test_an_adapter_without_a_device() -> None:
    text = "adapter=0000:18:00.0 bound\nadapter=0000:40:00.0 unbound\n"
    lost = judged(parsed(text))
    assert lost["devices"].status == "fail"
    assert "0000:40:00.0 has no driver" in lost["devices"].actual
    assert {r.status for name, r in lost.items() if name != "devices"} == {"na"}
    assert statuses(parsed(text + printed(ib_tree(h100()))))["devices"] == "ok"


def test_nothing_there() -> None:
    assert {*statuses(parsed("")).values()} == {"na"}
    assert rdma.compared(parsed("")) == {}
    assert rdma.learned(parsed("")) == {}


def test_what_nodes_share() -> None:
    facts = rdma.compared(node(h100(), mlx5_1=DOWN))
    assert facts["mlx5_0/1.rate_gbps"] == 400.0
    assert facts["mlx5_0.firmware"] == "28.41.1000"
    assert facts["mlx5_0/1.link_layer"] == "InfiniBand"
    assert "mlx5_1/1.rate_gbps" not in facts
    assert "mlx5_1/1" not in rdma.learned(node(h100(), mlx5_1=DOWN))["rdma_ports"]


HOSTILE = (
    f"{IB_CLASS}/:x\n{IB_CLASS}/a:\n{IB_CLASS}//ports/1/state:4: ACTIVE\n"
    f"{IB_CLASS}/b/ports/x/state:4\n"
    f"{IB_CLASS}/b/ports/1/counters/symbol_error:{'9' * 5000}\n"
    f"{IB_CLASS}/b/ports/1/lid:0x{'f' * 99}\n{IB_CLASS}/b/ports/1/rate:{'1' * 5000}G\n"
    f"{IB_CLASS}/b/node_desc:\x1b[31m[bold]\x00\udcff\n{IB_CLASS}/b/device/uevent:=\n"
    f"{IB_CLASS}/b/ports/1/gids/99999999999999999999999:fe80::1\n"
    f"{IB_CLASS}/b/ports/1/state:{':' * 9999}\n{IB_CLASS}/b/device/net//operstate:up\n"
)


@pytest.mark.parametrize("cut", [0, 40, 97, 141, len(HOSTILE)])
def test_hostile_and_truncated_text_raises_nothing_else(cut: int) -> None:
    seen = parsed(HOSTILE[: len(HOSTILE) - cut])
    results = judge_all(checks, replace(seen, before=Counters(1, {"b/1.x": 1})), POLICY)
    assert "ok" not in {r.status for r in results if r.check in ("rdma.state", "rdma.rate")}
    rdma.compared(seen), rdma.learned(seen), rdma.counters(seen)


@pytest.mark.parametrize(
    "output",
    [
        Output("", None),
        Output("x", None, truncated=True),
        Output("grep: not found", 127),
        Output("adapter=0000:18:00.0 nonsense\n", 0),
    ],
)
def test_a_look_that_makes_no_sense(output: Output) -> None:
    with pytest.raises(ProbeError):
        rdma.parse({"rdma": output}, POLICY)


def test_thousands_of_devices_are_cut() -> None:
    text = "".join(f"{IB_CLASS}/x{at}/ports/1/state:1: DOWN\n" for at in range(5000))
    assert len(parsed(text).devices) == rdma.MAX_DEVICES


def test_the_recorded_h100(tmp_path: Path) -> None:
    archive = RECORDED / "class-infiniband-h100.tar.gz"
    if not archive.exists():
        pytest.skip("the recorded tree is not here")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    text = subprocess.run(
        ["grep", "-rasH", ""], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    seen = parsed("".join(f"{IB_CLASS}/{line}\n" for line in text.splitlines()))
    assert len(seen.ports) == 9
    assert sorted(seen.nccl_ib_hca) == [f"mlx5_{at}" for at in (0, 1, 4, 5, 6, 7, 8, 9)]
    found = statuses(replace(seen, before=Counters(3600, rdma.counters(seen))))
    assert {found[name] for name in ("state", "rate", "firmware")} == {"ok"}
    assert found["errors"] == "warn"  # link_downed of mlx5_1 has long been full


# --- A look like one that was read before.


@pytest.mark.parametrize("profile", ["h100", "mi300x"])
def test_a_look_like_an_earlier_one_is_read_as_if_it_were_the_first(profile, monkeypatch):
    draw = random.Random(profile)
    values = ("0", "1", "65535", "0x2a1", "", "x", "-1", "0000:0000", "fe80::1", " 7 ", "4: DOWN")
    read = again = 0
    for _ in range(400):
        lines = recorded(profile)["rdma"].split("\n")
        for _ in range(draw.choice((1, 1, 2, 4))):
            own = [n for n, line in enumerate(lines) if re.search("counters|guid|lid:|gids", line)]
            at = draw.choice(own) if draw.random() < 0.7 else draw.randrange(len(lines))
            path, colon, value = lines[at].partition(":")
            step = draw.random()
            if step < 0.96:
                lines[at] = f"{path}{colon}{draw.choice((*values, value[::-1]))}"
            elif step < 0.98:
                lines.insert(at, lines[at])
            else:
                del lines[at]
        text = "\n".join(lines)
        before = rdma._KNOWN
        known = [one for one in before.of(lines) if one.differing(lines) is not None]
        outcome = shown(text)
        monkeypatch.setattr(rdma, "_KNOWN", type(before)())
        assert shown(text) == outcome
        monkeypatch.setattr(rdma, "_KNOWN", before)
        read, again = read + 1, again + bool(known)
    assert again > read // 5


def shown(text):
    try:
        return rdma.parse({"rdma": Output(text, 0)}, Policy())
    except ProbeError as error:
        return error.reason

"""GPUs that are good, absent or broken, and what is judged, compared and learnt of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nodeready.lab import nvidia
from nodeready.subjects.base import Output
from nodeready.subjects.gpus import facts as gpus
from nodeready.subjects.gpus.gpu import Link
from tests.builders.gpus import (
    BUS,
    DEVICES,
    SERVER,
    VERSION,
    Node,
    a100,
    bad,
    h100,
    judged,
    one,
    pci,
)

DATA = Path(__file__).parent / "data" / "gpus"


@pytest.mark.parametrize("node", [h100(), a100()], ids=["h100", "a100"])
def test_a_healthy_node_is_ready(node: Node) -> None:
    results = node.judged(gpu_count=8, gpu_mig="off", gpu_idle=True)
    # The kernel's log is another module's, here it is empty.
    assert set(bad(results)) <= {"kernel_faults"}
    for name in ("present", "tool", "count", "model", "driver", "vbios", "ecc_errors", "pcie"):
        assert results[name].status == "ok", results[name]
    assert one(results, "nvlink")[0] == one(results, "fabric_manager")[0] == "ok"


GEFORCE = pci("0000:01:00.0", device="0x1f08", kind="0x030000", driver="nouveau")
RADEON = pci("0000:0a:00.0", "0x1002", "0x164e", "0x030000", driver="amdgpu")


@pytest.mark.parametrize(
    ("bus", "reason"),
    [
        ("", "no GPU on the PCI bus"),
        (SERVER, "no GPU on the PCI bus"),
        (RADEON, "display adapters only"),
        (GEFORCE, "display adapters only"),
        (BUS.replace("DRIVER=nvidia", "DRIVER=vfio-pci"),
         "the GPUs (8) belong to virtual machines"),
    ],
)  # fmt: skip
def test_no_gpu_of_this_host_is_no_fault(bus: str, reason: str) -> None:
    node = Node(bus, smi=Output("", 0), links=Output("", 0))
    results = node.judged()
    assert {result.status for result in results.values()} == {"na"}, bad(results)
    assert results["present"].actual == reason
    assert one(node.judged(gpu_count=8), "count") == (
        "fail",
        "0 on the PCI bus" + (", and 8 of virtual machines" if "virtual" in reason else ""),
    )


# What differs on GPU 2 of a good node -> the check that sees it, its status and its words.
@pytest.mark.parametrize(
    ("change", "check", "status", "actual"),
    [
        ({"ecc_uncorrectable": 2}, "ecc_errors", "fail", "2 uncorrectable ECC errors"),
        ({"ecc_correctable": 99, "ecc_uncorrectable_aggregate": 3}, "", "", ""),
        ({"remap_pending": True}, "remapped_rows", "fail", "remap pending"),
        ({"remap_failed": True}, "remapped_rows", "fail", "remapping failed"),
        ({"retired_pending": True}, "retired_pages", "fail", "page retirement pending"),
        ({"reset_required": True}, "recovery", "fail", "asks for reset"),
        ({"pcie_width": 8}, "pcie", "fail", "x8 of x16"),
        ({"pcie_generation": 3}, "pcie", "warn", "generation 3 of "),
        ({"pcie_generation": 3, "throttle": ("sw_power_cap",)}, "pcie", "fail", "generation 3 of"),
        ({"throttle": ("hw_slowdown", "hw_power_brake_slowdown")}, "throttle", "fail",
         "hw_slowdown, hw_power_brake_slowdown"),
        ({"throttle": ("sw_thermal_slowdown",)}, "throttle", "warn", "sw_thermal_slowdown"),
        ({"throttle": ("sw_power_cap",)}, "", "", ""),
        ({"temperature_c": 85}, "", "", ""),
        ({"temperature_c": 89}, "temperature", "fail", "89 C, limit 8"),
        ({"ecc": "off"}, "ecc_mode", "fail", "off"),
        ({"persistence": "off"}, "persistence", "fail", "off"),
        ({"mig": "on"}, "mig", "fail", "on"),
        ({"processes": ((4711, "python", 900),)}, "processes", "fail", "pid 4711 python 900 MiB"),
        ({"product": "NVIDIA H200"}, "model", "fail", "NVIDIA H200"),
        ({"vbios": "1.2"}, "vbios", "fail", "1.2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["h100", "a100"])
def test_a_fault_is_seen_by_its_check_alone(
    kind: str, change: Mapping[str, Any], check: str, status: str, actual: str
) -> None:
    node = (h100 if kind == "h100" else a100)({2: change})
    board = nvidia.BOARDS[kind]
    results = node.judged(
        gpu_count=8, gpu_model=board.product, gpu_vbios=(board.vbios,), gpu_driver="535.129.03",
        gpu_mig="off", gpu_idle=True,
    )  # fmt: skip
    results.pop("kernel_faults")
    assert set(bad(results)) == ({check} if check else set()), bad(results)
    if check:
        assert results[check].status == status
        assert results[check].actual.startswith(f"gpu 2 (0000:52:00.0): {actual}")
        assert results[check].fix or check == "model"


# The same for what the stand-in of nvidia-smi does not show: fields of GPU 2 -> the only finding.
@pytest.mark.parametrize(
    ("fields", "check", "words"),
    [
        ({"memory_temperature_c": 95, "memory_temperature_max_c": 95}, "temperature",
         "memory 95 C, limit 95 C"),
        ({"memory_temperature_c": 94, "memory_temperature_max_c": 95}, "", ""),
        ({"repair_pending": True}, "remapped_rows", "repair pending"),
        ({"remap_pending": None, "remap_failed": None}, "remapped_rows", "its tool does not say"),
        ({"remap_pending": None, "remap_failed": None, "mig": "on"}, "", ""),
        ({"links": (), "mig": "on"}, "", ""),
        ({"links": ()}, "nvlink", "all links inactive"),
        ({"pcie_generation": 3, "idle": False, "virtual": True}, "", ""),
        ({"fabric_status": "failure"}, "fabric_manager", "fabric completed: failure"),
        ({"recovery": "drain p2p"}, "recovery", "asks for drain p2p"),
        ({"ecc_pending": "off"}, "ecc_mode", "on, off after a reset"),
        ({"model": "NVIDIA H200", "links": (Link(0, "active", 50.0),)}, "nvlink", None),
        ({"mig_pending": "on"}, "", ""),
    ],
)  # fmt: skip
def test_a_field_is_judged_by_its_check_alone(
    fields: Mapping[str, Any], check: str, words: str | None
) -> None:
    seen = h100().seen()
    gpus = list(seen.nvidia)
    gpus[2] = replace(gpus[2], **fields)
    results = judged(replace(seen, nvidia=tuple(gpus)))
    results.pop("kernel_faults")
    if words is None:
        # Another model may have other links.
        assert bad(results) == {}
    else:
        assert bad(results) == ({check: f"gpu 2 (0000:52:00.0): {words}"} if check else {})


def test_equal_findings_stand_together() -> None:
    node = h100({n: {"ecc_uncorrectable": 1, "pcie_width": 8 if n < 4 else n} for n in range(8)})
    results = node.judged()
    assert results["ecc_errors"].actual == "gpus 0-7: 1 uncorrectable ECC errors"
    assert results["pcie"].actual == (
        "gpus 0-3: x8 of x16; gpu 4 (0000:9d:00.0): x4 of x16; gpu 5 (0000:c3:00.0): x5 of x16; "
        "gpu 6 (0000:d1:00.0): x6 of x16; and 1 more"
    )


def test_policy_any_and_pending_modes() -> None:
    assert one(h100({2: {"ecc": "off"}}).judged(gpu_ecc="any"), "ecc_mode")[0] == "na"
    text = h100().smi.text.replace("<pending_ecc>Enabled", "<pending_ecc>Disabled")
    results = replace(Node(), smi=Output(text, 0)).judged()
    assert one(results, "ecc_mode") == ("fail", "gpus 0-7: on, off after a reset")
    results = h100({2: {"temperature_c": 75}}).judged(gpu_max_temperature_c=70)
    assert one(results, "temperature") == ("fail", "gpu 2 (0000:52:00.0): 75 C, limit 70 C")
    assert one(h100().judged(gpu_driver="550.54.15"), "driver") == ("fail", "nvidia 535.129.03")


def t4(old: str = "", new: str = "") -> Node:
    text = (DATA / "nvidia-t4-v11.xml").read_text().replace(old, new)
    places = ("0000:3b:00.0", "0000:d8:00.0")
    bus = VERSION + "".join(pci(address, device="0x1eb8") for address in places) + DEVICES
    lines = [
        f"GPU {n}: Tesla T4 (UUID: GPU-d37e67a5-91dd-3774-a5cb-99096249601{n})" for n in (0, 1)
    ]
    return Node(bus, smi=Output(text, 0), links=Output("\n".join(lines), 0))


def test_cards_without_nvlink_and_an_idle_one_with_a_lower_generation() -> None:
    results = t4().judged()
    results.pop("kernel_faults")
    assert bad(results) == {}
    assert one(results, "nvlink") == ("na", "these GPUs use no links")
    assert one(results, "fabric_manager") == ("na", "no NVSwitch")
    assert one(results, "remapped_rows")[0] == "na"
    # Xorg only draws.
    assert one(t4().judged(gpu_idle=True), "processes") == (
        "fail",
        "gpu 0 (0000:3b:00.0): pid 5762 python 1005 MiB",
    )


def test_the_slot_of_a_guest_is_not_known() -> None:
    virtual = "virtualization_mode>Pass-Through<"
    node = t4("virtualization_mode>None<", virtual)
    text = node.smi.text.replace("current_link_width>16x", "current_link_width>8x")
    guest = replace(node, smi=Output(text, 0))
    assert one(guest.judged(), "pcie") == ("ok", "x8 in a virtual machine")
    text = node.smi.text.replace("current_link_width>16x", "current_link_width>8x", 1)
    guest = replace(node, smi=Output(text, 0))
    assert one(guest.judged(), "pcie") == ("fail", "gpu 0 (0000:3b:00.0): x8 of x16")


def test_facts_to_compare_and_to_learn() -> None:
    assert gpus.compared(h100().seen()) == {
        "driver": "535.129.03",
        "cuda": "12.2",
        "count": 8,
        "on_bus": 8,
        "model": "NVIDIA H100 80GB HBM3",
        "vbios": "96.00.89.00.01",
        "ecc": "on",
        "mig": "off",
        "persistence": "on",
        "pcie_width": "16",
        "links": "18 at 26.562 GB/s",
        "power_limit_w": "700",
    }
    learned = gpus.learned(h100({0: {"vbios": "1.2", "ecc": "off"}}).seen())
    assert learned == {
        "gpu_count": 8,
        "gpu_driver": "535.129.03",
        "gpu_vbios": ["1.2", "96.00.89.00.01"],
        "gpu_model": "NVIDIA H100 80GB HBM3",
        "gpu_mig": "off",
        "gpu_persistence": "on",
    }
    nothing = Node("", smi=Output("", 0), links=Output("", 0)).seen()
    assert (gpus.compared(nothing), gpus.learned(nothing)) == ({}, {})


def test_a_learnt_policy_fits_its_node() -> None:
    seen = t4().seen()
    results = t4().judged(**{**gpus.learned(seen), "gpu_vbios": ("90.04.84.00.06",)})
    results.pop("kernel_faults")
    assert bad(results) == {}

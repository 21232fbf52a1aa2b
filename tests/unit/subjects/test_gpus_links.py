"""The links between GPUs and the manager of their switches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeready.lab import nvidia
from nodeready.subjects.base import Output
from nodeready.subjects.gpus.gpu import Gpu, Link, Tool
from nodeready.subjects.result import Result
from tests.builders.gpus import BUS, DEVICES, PREFIX, VERSION, Node, a100, h100, judged, one, pci


def test_links_of_amd() -> None:
    links = tuple(Link(n, "active", 64.0) for n in range(7))
    instinct = Gpu(0, "amd", "0000:05:00.0", "AMD Instinct MI300X", links=links)
    bus = pci("0000:05:00.0", "0x1002", "0x74a1", "0x120000", driver="amdgpu")
    seen = replace(
        Node(bus, smi=Output("", 0), links=Output("", 0)).seen(),
        amd=(instinct,),
        amd_tool=Tool("amd-smi", "ok"),
    )
    assert one(judged(seen), "nvlink") == ("ok", "7 per GPU")
    # AMD's tools do not say that there is no reason, so there is nothing to judge.
    assert one(judged(seen), "throttle")[0] == "na"
    down = replace(instinct, links=(*links[1:], Link(0, "inactive")), throttle=("hw_slowdown",))
    results = judged(replace(seen, amd=(down,)))
    assert one(results, "nvlink") == ("fail", "gpu 0 (0000:05:00.0): 1 of 7 links down")
    assert one(results, "throttle")[0] == "fail"
    assert one(results, "fabric_manager") == ("na", "no NVIDIA GPU")


def nvlinks(text: str, rc: int | None = 0) -> Output:
    return Output(PREFIX + text, rc)


ALL = frozenset((3, link) for link in range(18))


@pytest.mark.parametrize(
    ("links", "status", "actual"),
    [
        (nvlinks(nvidia.nvlink_status(8)), "ok", "18 per GPU"),
        (nvlinks(nvidia.nvlink_status(8, inactive={(3, 2)})), "fail",
         "gpu 3 (0000:61:00.0): link 2 inactive"),
        (nvlinks(nvidia.nvlink_status(8, inactive=ALL)), "fail",
         "gpu 3 (0000:61:00.0): all links inactive"),
        (nvlinks(nvidia.nvlink_status(8).replace("26.562", "13.281", 1)), "fail",
         "gpu 0 (0000:1b:00.0): link 0 at 13.281 of 26.562 GB/s"),
        (nvlinks("", None), "unknown", "nvidia-smi nvlink timed out: after 20 s"),
        (nvlinks("NVML is broken", 3), "unknown", "nvidia-smi nvlink failed: NVML is broken"),
        (nvlinks("nr_stuck=7 99"), "unknown",
         "nvidia-smi nvlink stuck: an earlier nvidia-smi hangs in the kernel"),
    ],
)  # fmt: skip
def test_nvlinks(links: Output, status: str, actual: str) -> None:
    assert one(replace(Node(), links=links).judged(), "nvlink") == (status, actual)


def bridged(models: str, inactive: set[tuple[int, int]]) -> dict[str, Result]:
    """PCIe cards without NVSwitch: which links are used is the owner's choice."""
    text = a100().smi.text.replace("NVIDIA A100-SXM4-80GB", models)
    links = nvlinks(nvidia.nvlink_status(8, "a100", inactive))
    return Node(VERSION + BUS + DEVICES, smi=Output(text, 0), links=links).judged()


def test_bridges_between_pcie_cards() -> None:
    third = {(gpu, link) for gpu in range(8) for link in range(4)}
    card = "NVIDIA A100 80GB PCIe"
    assert one(bridged(card, third), "nvlink") == ("ok", "8 per GPU")
    two = {(gpu, link) for gpu in range(2, 8) for link in range(12)}
    assert one(bridged(card, two), "nvlink") == ("ok", "12 per GPU")
    every = two | {(gpu, link) for gpu in range(2) for link in range(12)}
    assert one(bridged(card, every), "nvlink") == ("na", "these GPUs use no links")
    assert one(bridged(card, {(0, 1)}), "nvlink")[0] == "warn"
    # On an SXM board each link leads somewhere, but a guest may have only some of its GPUs.
    seen = Node(VERSION + BUS, a100().smi, nvlinks(nvidia.nvlink_status(8, "a100", third))).seen()
    guests = tuple(replace(gpu, virtual=True) for gpu in seen.nvidia)
    assert one(judged(replace(seen, nvidia=guests)), "nvlink") == ("ok", "8 per GPU")
    assert one(bridged("NVIDIA A100-SXM4-80GB", third), "nvlink")[0] == "fail"


def test_the_fabric_manager() -> None:
    dead = h100().smi.text.replace("nr_fabric_manager=4711\n", "")
    node = replace(Node(), smi=Output(dead, 0))
    assert one(node.judged(), "fabric_manager") == (
        "fail",
        "4 NVSwitches, but nv-fabricmanager does not run",
    )
    many = replace(Node(), smi=Output(h100().smi.text.replace("nr_scanned=1\n", ""), 0))
    assert one(many.judged(), "fabric_manager")[0] == "unknown"
    node = h100({1: {"fabric_state": "In Progress", "fabric_status": "N/A"}})
    assert one(node.judged(), "fabric_manager") == (
        "fail",
        "gpu 1 (0000:43:00.0): fabric in progress",
    )
    # A guest sees no switches: the GPUs' own state counts, and no manager is asked for.
    guest = replace(node, bus=VERSION + BUS)
    assert one(guest.judged(), "fabric_manager")[0] == "fail"
    guest = replace(Node(), bus=VERSION + BUS, smi=Output(dead, 0))
    assert one(guest.judged(), "fabric_manager") == ("ok", "registered")
    never = {n: {"fabric_state": "Not Started", "fabric_status": "N/A"} for n in range(8)}
    assert one(replace(h100(never), bus=VERSION + BUS).judged(), "fabric_manager")[0] == "na"

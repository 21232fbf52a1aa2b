"""One source of what is known of GPUs fails: the others are judged, and nothing is guessed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeready.subjects.base import Output
from tests.builders.gpus import (
    ADDRESSES,
    BUS,
    PREFIX,
    VERSION,
    Node,
    bad,
    h100,
    one,
    pci,
    smi,
    statuses,
)


def test_an_instinct_without_its_tool_is_still_a_gpu() -> None:
    bus = pci("0000:05:00.0", "0x1002", "0x74a1", "0x120000", driver="amdgpu")
    results = Node(bus, smi=Output("", 0), links=Output("", 0)).judged()
    assert one(results, "tool") == ("warn", "amd-smi is not installed")
    assert one(results, "present")[0] == one(results, "ecc_errors")[0] == "unknown"
    assert one(results, "driver") == ("ok", "amdgpu loaded")


# Eight on the bus, seven in the tool's answer.
LOST = smi(ADDRESSES[:7], {})


def test_one_that_fell_off_the_bus() -> None:
    results = h100(smi=LOST).judged()
    assert one(results, "present") == ("fail", "0000:df:00.0: nvidia-smi does not show it")
    # One fault is one finding: what is shown is judged by itself.
    assert statuses(results, "fail") == {"present"}
    assert statuses(results, "unknown") & SEEN_BY_TOOL == set()
    none = replace(Node(), smi=smi([], {})).judged()
    assert statuses(none, "ok") & SEEN_BY_TOOL == set()
    worse = replace(Node(), smi=smi(ADDRESSES[:7], {0: {"ecc_uncorrectable": 1}})).judged()
    assert worse["ecc_errors"].status == "fail"


def test_one_without_a_driver_is_named_once() -> None:
    bus = BUS.replace("DRIVER=nvidia", "X=", 8).replace("X=", "DRIVER=nvidia", 7)
    results = h100(smi=LOST, bus=VERSION + bus).judged()
    assert one(results, "present") == ("fail", "0000:df:00.0: no driver")


SEEN_BY_TOOL = {
    "model", "vbios", "recovery", "ecc_mode", "ecc_errors", "remapped_rows", "retired_pages",
    "pcie", "throttle", "temperature", "persistence", "mig", "processes", "nvlink",
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "status", "actual"),
    [
        (Output(f"{PREFIX}nr_stuck=77 3600\n", 0), "fail",
         "nvidia-smi stuck: pid 77 hangs in the kernel for 3600 s"),
        (Output(PREFIX, None), "fail", "nvidia-smi timed out: after 20 s"),
        (Output(f"{PREFIX}Failed to initialize NVML: Unknown Error\n", 255), "fail",
         "nvidia-smi failed: Failed to initialize NVML: Unknown Error"),
        (Output("", 0), "warn", "nvidia-smi is not installed"),
        (Output("nr_hidden=8\n", 0), "unknown",
         "nvidia-smi: hidden: 8 GPUs were not given to the step of Slurm's that looks"),
        (Output(f"{PREFIX}<nvidia_smi_log>", 0), "unknown", "nvidia-smi: nonsense: no whole XML"),
        (Output("x" * 70000, None, truncated=True), "unknown", "nvidia-smi: nonsense: its answer"),
    ],
)  # fmt: skip
def test_a_broken_tool_hides_what_it_would_show_and_nothing_else(
    answer: Output, status: str, actual: str
) -> None:
    results = replace(Node(), smi=answer).judged(gpu_mig="off", gpu_idle=True, gpu_count=8)
    assert results["tool"].status == status
    assert results["tool"].actual.startswith(actual)
    assert {results[name].status for name in SEEN_BY_TOOL} == {"unknown"}
    assert one(results, "driver") == ("ok", "nvidia 535.129.03")
    assert results["present"].status == "unknown"
    assert one(results, "count") == ("ok", "8")
    lost = replace(Node(), smi=answer, bus=VERSION + "".join(map(pci, ADDRESSES[:7])))
    assert one(lost.judged(gpu_count=8), "count") == ("fail", "7 on the PCI bus")
    narrow = BUS.replace("current_link_width:16", "current_link_width:8", 1)
    narrow_results = replace(Node(), smi=answer, bus=VERSION + narrow).judged()
    assert one(narrow_results, "pcie") == ("fail", "0000:1b:00.0: x8, others x16")


def test_no_driver() -> None:
    bus = "".join(pci(address, driver="") for address in ADDRESSES)
    none = Output("nr_driver=none\n", 0)
    results = Node(bus, smi=none, links=none).judged()
    assert one(results, "driver") == ("fail", "nvidia is not loaded")
    assert one(results, "tool") == ("fail", "nvidia-smi failed: the driver is not loaded")
    words = ", ".join(f"{address}: no driver" for address in ADDRESSES[:4])
    assert one(results, "present") == ("fail", f"{words} and 4 more")
    nouveau = pci("0000:01:00.0", driver="nouveau")
    node = Node(nouveau, smi=Output("", 0), links=Output("", 0))
    assert one(node.judged(), "present") == ("fail", "0000:01:00.0: driver nouveau")


def test_a_tool_that_complains_and_shows_all_is_no_reason_to_doubt_the_rest() -> None:
    text = f"{h100().smi.text}WARNING: infoROM is corrupted at gpu 0000:1B:00.0\n"
    results = replace(Node(), smi=Output(text, 14)).judged()
    results.pop("kernel_faults")
    assert bad(results) == {
        "tool": "nvidia-smi failed: WARNING: infoROM is corrupted at gpu 0000:1B:00.0"
    }


def test_a_value_that_one_gpu_alone_does_not_say() -> None:
    text = h100().smi.text.replace("<gpu_temp>31 C", "<gpu_temp>N/A", 1)
    results = replace(Node(), smi=Output(text, 0)).judged()
    assert one(results, "temperature") == (
        "unknown",
        "gpu 0 (0000:1b:00.0): its tool does not say",
    )

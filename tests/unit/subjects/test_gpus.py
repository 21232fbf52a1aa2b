"""GPUs that are good, absent or broken, and what is judged, compared and learnt of them.

What one source of facts does not show is judged by the others, and nothing is guessed.
"""

import re
from dataclasses import replace

import pytest

from nodeready.core.base import Output
from nodeready.core.policy import Policy
from nodeready.lab import nvidia
from nodeready.subjects.gpus import facts as gpus
from nodeready.subjects.gpus.checks import model
from nodeready.subjects.gpus.gpu import Gpu, GpuLink, Gpus, PciGpu, Tool
from tests.builders import gpus as built
from tests.builders.gpus import Node, bad, h100, judged, pci, trees_of, verdict_of
from tests.builders.gpus import node as node_of

NOTHING = Output("", 0)


GEFORCE = pci("0000:01:00.0", device="0x1f08", kind="0x030000", driver="nouveau")
RADEON = pci("0000:0a:00.0", "0x1002", "0x164e", "0x030000", driver="amdgpu")


def test_no_gpu_of_this_host_is_no_fault():
    none, adapters = "no GPU on the PCI bus", "display adapters only"
    guests = (
        "the GPUs (8) belong to virtual machines",
        "0 on the PCI bus, and 8 of virtual machines",
    )
    virtual = built.BUS.replace("DRIVER=nvidia", "DRIVER=vfio-pci")
    for bus, reason in (("", none), (built.SERVER, none), (RADEON, adapters), (GEFORCE, adapters),
                        (virtual, guests[0])):  # fmt: skip
        node = Node(bus, smi=NOTHING, links=NOTHING)
        results = node.judged()
        assert {result.status for result in results.values()} == {"na"}, bad(results)
        assert results["present"].actual == reason
        count = guests[1] if bus == virtual else "0 on the PCI bus"
        assert verdict_of(node.judged(gpu_count=8), "count") == ("fail", count)


def test_a_field_is_judged_by_its_check_alone():
    """Fields of GPU 2, which the tool's text cannot have alone -> the only finding."""
    observed = h100().observed()
    for fields, finding in (
        ({"links": (), "mig": "on"}, {}),
        ({"links": ()}, {"nvlink": "gpu 2 (0000:52:00.0): all links inactive"}),
        ({"pcie_generation": 3, "idle": False, "virtual": True}, {}),
        # Another model may have other links.
        ({"model": "NVIDIA H200", "links": (GpuLink(0, "active", 50.0),)}, {}),
        ({"mig_pending": "on"}, {}),
    ):
        gpus = list(observed.nvidia)
        gpus[2] = replace(gpus[2], **fields)
        results = judged(replace(observed, nvidia=tuple(gpus)))
        results.pop("kernel_faults")
        assert bad(results) == finding


def test_equal_findings_stand_together():
    node = h100({n: {"ecc_uncorrectable": 1, "pcie_width": 8 if n < 4 else n} for n in range(8)})
    results = node.judged()
    assert results["ecc_errors"].actual == "gpus 0-7: 1 uncorrectable ECC errors"
    assert results["pcie"].actual == (
        "gpus 0-3: x8 of x16; gpu 4 (0000:9d:00.0): x4 of x16; gpu 5 (0000:c3:00.0): x5 of x16; "
        "gpu 6 (0000:d1:00.0): x6 of x16; and 1 more"
    )


def t4(**changes: str) -> Node:
    """Two T4, of which the first is busy and the second rests."""
    busy, idle = trees_of("Tesla T4", "515.105.01")[:2]
    busy["performance_state"] = "P0"
    busy["pci"]["pci_gpu_link_info"]["pcie_gen"]["current_link_gen"] = "3"
    busy["processes"] = "".join(
        f"<process_info><pid>{pid}</pid><type>{kind}</type><process_name>{name}</process_name>"
        "<used_memory>1005 MiB</used_memory></process_info>\n"
        for pid, kind, name in ((675, "G", "Xorg"), (5762, "C", "python"))
    )
    composed = node_of("Tesla T4", "515.105.01", [busy, idle])
    text = composed.smi.text
    for name, value in changes.items():
        text = re.sub(rf"(<{name}>)[^<]*", rf"\g<1>{value}", text)
    return replace(composed, smi=Output(text, 0))


def test_cards_without_nvlink_and_an_idle_one_with_a_lower_generation():
    observed = t4().observed()
    # A learnt policy fits its node.
    results = judged(observed, **gpus.learned(observed))
    results.pop("kernel_faults")
    assert bad(results) == {}
    assert verdict_of(results, "nvlink") == ("na", "these GPUs use no links")
    assert verdict_of(results, "fabric_manager") == ("na", "no NVSwitch")
    assert verdict_of(results, "remapped_rows")[0] == "na"
    # Xorg only draws.
    assert verdict_of(t4().judged(gpu_idle=True), "processes") == (
        "fail", "gpu 0 (0000:1b:00.0): pid 5762 python 1005 MiB",
    )  # fmt: skip
    guest = t4(virtualization_mode="Pass-Through", current_link_width="8x")
    assert verdict_of(guest.judged(), "pcie") == ("ok", "x8 in a virtual machine")


@pytest.mark.parametrize(("change", "problem"), [
    ({"memory_used_mb": 700}, ""), ({"memory_used_mb": 8155}, ""), ({"memory_used_mb": None}, ""),
    ({"memory_used_mb": 8156}, "8156 of 81559 MiB taken without a process"),
    # The kernel of a Grace processor uses the GPU's memory, too.
    ({"memory_used_mb": 8156, "c2c": "on"}, ""), ({"memory_used_mb": 8156, "mig": "on"}, ""),
])  # fmt: skip
def test_memory_that_no_shown_process_has(change, problem):
    observed = h100().observed()
    first, *others = observed.nvidia
    changed = replace(observed, nvidia=(replace(first, **change), *others))
    expected = ("fail", f"gpu 0 (0000:1b:00.0): {problem}") if problem else ("ok", "none")
    assert verdict_of(judged(changed, gpu_idle=True), "processes") == expected
    assert verdict_of(judged(changed), "processes")[0] == "na"


def test_facts_to_compare_and_to_learn():
    assert gpus.compared(h100().observed()) == {
        "driver": "535.129.03", "cuda": "12.2", "count": 8, "on_bus": 8,
        "model": "NVIDIA H100 80GB HBM3", "vbios": "96.00.89.00.01", "ecc": "on", "mig": "off",
        "persistence": "on", "pcie_width": "16", "links": "18 at 26.562 GB/s",
        "power_limit_w": "700",
    }  # fmt: skip
    assert gpus.learned(h100({0: {"vbios": "1.2", "ecc": "off"}}).observed()) == {
        "gpu_count": 8, "gpu_driver": "535.129.03", "gpu_vbios": ["1.2", "96.00.89.00.01"],
        "gpu_model": "NVIDIA H100 80GB HBM3", "gpu_mig": "off", "gpu_persistence": "on",
    }  # fmt: skip
    nothing = Node("", smi=NOTHING, links=NOTHING).observed()
    assert (gpus.compared(nothing), gpus.learned(nothing)) == ({}, {})
    assert verdict_of(h100().judged(gpu_driver="550.54.15"), "driver") == (
        "fail",
        "nvidia 535.129.03",
    )


def test_an_instinct_without_its_tool_is_still_a_gpu():
    bus = pci("0000:05:00.0", "0x1002", "0x74a1", "0x120000", driver="amdgpu")
    results = Node(bus, smi=NOTHING, links=NOTHING).judged()
    assert verdict_of(results, "tool") == ("warn", "amd-smi is not installed")
    assert verdict_of(results, "present")[0] == verdict_of(results, "ecc_errors")[0] == "unknown"
    assert verdict_of(results, "driver") == ("ok", "amdgpu loaded")


#: Eight on the bus, seven in the tool's answer.
LOST = built.smi(built.ADDRESSES[:7], {})
SEEN_BY_TOOL = {
    "model", "vbios", "recovery", "ecc_mode", "ecc_errors", "remapped_rows", "retired_pages",
    "pcie", "throttle", "temperature", "persistence", "mig", "processes", "nvlink",
}  # fmt: skip


def test_one_that_fell_off_the_bus():
    results = h100(smi=LOST).judged()
    assert verdict_of(results, "present") == ("fail", "0000:df:00.0: nvidia-smi does not show it")
    # One fault is one finding: what is shown is judged by itself.
    assert built.statuses(results, "fail") == {"present"}
    assert built.statuses(results, "unknown") & SEEN_BY_TOOL == set()
    assert built.statuses(h100(smi=built.smi([], {})).judged(), "ok") & SEEN_BY_TOOL == set()
    sick = built.smi(built.ADDRESSES[:7], {0: {"ecc_uncorrectable": 1}})
    assert h100(smi=sick).judged()["ecc_errors"].status == "fail"


@pytest.mark.parametrize(("answer", "status", "actual"), [
    (Output(f"{built.PREFIX}nr_stuck=77 3600\n", 0), "fail",
     "nvidia-smi stuck: pid 77 hangs in the kernel for 3600 s"),
    (Output(built.PREFIX, None), "fail", "nvidia-smi timed out: after 20 s"),
    (Output(f"{built.PREFIX}Unable to determine the device handle for GPU0: GPU is lost.\n", 15),
     "fail", "nvidia-smi failed: Unable to determine the device handle for GPU0: GPU is lost."),
    (NOTHING, "warn", "nvidia-smi is not installed"),
    (Output("nr_hidden=8\n", 0), "unknown",
     "nvidia-smi: hidden: 8 GPUs were not given to the step of Slurm's that looks"),
    (Output("nr_scanned=1\n<nvidia_smi_log>", 0), "unknown", "nvidia-smi: nonsense: no whole XML"),
    (Output("x" * 70000, None, truncated=True), "unknown", "nvidia-smi: nonsense: its answer"),
])  # fmt: skip
def test_a_broken_tool_hides_what_it_would_show_and_nothing_else(answer, status, actual):
    results = h100(smi=answer).judged(gpu_mig="off", gpu_idle=True, gpu_count=8)
    assert results["tool"].status == status
    assert results["tool"].actual.startswith(actual)
    assert {results[name].status for name in SEEN_BY_TOOL} == {"unknown"}
    assert verdict_of(results, "driver") == ("ok", "nvidia 535.129.03")
    assert results["present"].status == "unknown"
    assert verdict_of(results, "count") == ("ok", "8")
    lost = h100(smi=answer, bus=built.VERSION + "".join(map(pci, built.ADDRESSES[:7])))
    assert verdict_of(lost.judged(gpu_count=8), "count") == ("fail", "7 on the PCI bus")
    narrow = built.BUS.replace("current_link_width:16", "current_link_width:8", 1)
    results = h100(smi=answer, bus=built.VERSION + narrow).judged()
    assert verdict_of(results, "pcie") == ("fail", "0000:1b:00.0: x8, others x16")


def test_no_driver():
    bus = "".join(pci(address, driver="") for address in built.ADDRESSES)
    none = Output("nr_driver=none\n", 0)
    results = Node(bus, smi=none, links=none).judged()
    assert verdict_of(results, "driver") == ("fail", "nvidia is not loaded")
    assert verdict_of(results, "tool") == ("fail", "nvidia-smi failed: the driver is not loaded")
    words = ", ".join(f"{address}: no driver" for address in built.ADDRESSES[:4])
    assert verdict_of(results, "present") == ("fail", f"{words} and 4 more")
    nouveau = Node(pci("0000:01:00.0", driver="nouveau"), smi=NOTHING, links=NOTHING)
    assert verdict_of(nouveau.judged(), "present") == ("fail", "0000:01:00.0: driver nouveau")
    # One without a driver is named once.
    alone = "".join(map(pci, built.ADDRESSES[:7])) + pci(built.ADDRESSES[7], driver="")
    results = h100(smi=LOST, bus=built.VERSION + alone).judged()
    assert verdict_of(results, "present") == ("fail", "0000:df:00.0: no driver")


def test_a_tool_that_complains_and_shows_all_is_no_reason_to_doubt_the_rest():
    text = f"{h100().smi.text}WARNING: infoROM is corrupted at gpu 0000:1B:00.0\n"
    results = h100(smi=Output(text, 14)).judged()
    results.pop("kernel_faults")
    assert bad(results) == {
        "tool": "nvidia-smi failed: WARNING: infoROM is corrupted at gpu 0000:1B:00.0"
    }


def test_a_guest_may_have_only_some_of_a_boards_gpus():
    third = {(gpu, link) for gpu in range(8) for link in range(4)}
    links = Output(built.PREFIX + nvidia.nvlink_status(8, "a100", third), 0)
    observed = Node(built.VERSION + built.BUS, built.a100().smi, links).observed()
    assert verdict_of(judged(observed), "nvlink")[0] == "fail"
    guests = tuple(replace(gpu, virtual=True) for gpu in observed.nvidia)
    assert verdict_of(judged(replace(observed, nvidia=guests)), "nvlink") == ("ok", "8 per GPU")


def test_the_fabric_manager():
    dead = Output(h100().smi.text.replace("nr_fabric_manager=4711\n", ""), 0)
    assert verdict_of(h100(smi=dead).judged(), "fabric_manager") == (
        "fail", "4 NVSwitches, but nv-fabricmanager does not run",
    )  # fmt: skip
    unscanned = Output(h100().smi.text.replace("nr_scanned=1\n", ""), 0)
    assert verdict_of(h100(smi=unscanned).judged(), "fabric_manager")[0] == "unknown"
    # A guest sees no switches: the GPUs' own state counts, and no manager is asked for.
    guest = built.VERSION + built.BUS
    late = h100({1: {"fabric_state": "In Progress", "fabric_status": "N/A"}}, bus=guest)
    assert verdict_of(late.judged(), "fabric_manager")[0] == "fail"
    assert verdict_of(h100(smi=dead, bus=guest).judged(), "fabric_manager") == ("ok", "registered")
    never = {n: {"fabric_state": "Not Started", "fabric_status": "N/A"} for n in range(8)}
    assert verdict_of(h100(never, bus=guest).judged(), "fabric_manager")[0] == "na"


@pytest.mark.parametrize(("second", "policy", "status"), [
    ("NVIDIA H20-3e", "", "warn"),
    ("NVIDIA H20", "", "ok"),
    ("NVIDIA L40S", "", "ok"),
    ("NVIDIA H20-3e", "NVIDIA H20", "fail"),
])  # fmt: skip
def test_variants_of_one_model_are_a_warning_without_a_policy(second, policy, status):
    models = ("NVIDIA H20", second)
    shown = tuple(Gpu(n, "nvidia", f"0000:{n}a:00.0", model=m) for n, m in enumerate(models))
    observed = Gpus(
        pci=tuple(PciGpu(gpu.pci_address, "nvidia", "2329", "nvidia") for gpu in shown),
        nvidia=shown, nvidia_tool=Tool("nvidia-smi", "ok"),
    )  # fmt: skip
    assert model(observed, Policy(gpu_model=policy)).status == status

"""What the bus, the tools and the log say of GPUs together, and how it is judged."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nodeready import shell
from nodeready.lab import nvidia_smi
from nodeready.policy import Policy
from nodeready.probes import gpus, pci_gpus
from nodeready.probes.base import Output, ProbeError
from nodeready.probes.gpu import DeviceFile, PciGpu
from nodeready.results import Result
from tests.gpus.node import (
    ADDRESSES,
    DEVICES,
    PREFIX,
    SWITCHES,
    VERSION,
    Node,
    a100,
    h100,
    pci,
    smi,
    statuses,
    switch,
)

DATA = Path(__file__).parent / "data"
BUS = "".join(map(pci, ADDRESSES))
SERVER = pci("0000:03:00.0", "0x1a03", "0x2000", "0x030000", driver="ast")


def one(results: Mapping[str, Result], name: str) -> tuple[str, str]:
    return results[name].status, results[name].actual


def bad(results: Mapping[str, Result]) -> dict[str, str]:
    return {name: result.actual for name, result in results.items() if result.bad}


@pytest.mark.parametrize("node", [h100(), a100()], ids=["h100", "a100"])
def test_a_healthy_node_is_ready(node: Node) -> None:
    results = node.judged(gpu_count=8, gpu_mig="off", gpu_idle=True)
    # The kernel's log is another module's, here it is empty.
    assert set(bad(results)) <= {"kernel_faults"}
    for name in ("present", "tool", "count", "model", "driver", "vbios", "ecc_errors", "pcie"):
        assert results[name].status == "ok", results[name]
    assert one(results, "nvlink")[0] == one(results, "fabric_manager")[0] == "ok"


def test_what_the_bus_shows() -> None:
    seen = h100().seen()
    assert seen.pci[0] == PciGpu(
        "0000:1b:00.0", "nvidia", "2330", "nvidia", 0, 16, 16, "32.0 GT/s PCIe", "030200"
    )
    assert (len(seen.pci), seen.nvswitches, seen.driver) == (8, 4, "535.129.03")
    assert (seen.cuda, seen.fabric_manager) == ("12.2", "running")
    assert seen.device_files[-1] == DeviceFile("/dev/nvidiactl", "crw-rw-rw-", 0, 0)
    assert len(seen.gpus[7].links) == 18


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
        "0" if "virtual" not in reason else "0, and 8 of virtual machines",
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
    board = nvidia_smi.BOARDS[kind]
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


# Eight on the bus, seven in the tool's answer.
LOST = smi(ADDRESSES[:7], {})


def test_one_that_fell_off_the_bus() -> None:
    results = h100(smi=LOST).judged()
    assert one(results, "present") == ("fail", "0000:df:00.0: nvidia-smi does not show it")
    assert one(results, "count") == ("fail", "7")
    # What is not seen is not good, and what is seen is judged.
    assert one(results, "ecc_errors") == ("unknown", "nvidia-smi does not show 0000:df:00.0")
    assert not statuses(results, "ok") & {
        "ecc_errors",
        "pcie",
        "temperature",
        "nvlink",
        "throttle",
    }
    worse = replace(Node(), smi=smi(ADDRESSES[:7], {0: {"ecc_uncorrectable": 1}})).judged()
    assert worse["ecc_errors"].status == "fail"


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
    assert results["present"].status == results["count"].status == "unknown"
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


def nvlinks(text: str, rc: int | None = 0) -> Output:
    return Output(PREFIX + text, rc)


ALL = frozenset((3, link) for link in range(18))


@pytest.mark.parametrize(
    ("links", "status", "actual"),
    [
        (nvlinks(nvidia_smi.nvlink_status(8)), "ok", "18 per GPU"),
        (nvlinks(nvidia_smi.nvlink_status(8, inactive={(3, 2)})), "fail",
         "gpu 3 (0000:61:00.0): link 2 inactive"),
        (nvlinks(nvidia_smi.nvlink_status(8, inactive=ALL)), "fail",
         "gpu 3 (0000:61:00.0): all links inactive"),
        (nvlinks(nvidia_smi.nvlink_status(8).replace("26.562", "13.281", 1)), "fail",
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
    links = nvlinks(nvidia_smi.nvlink_status(8, "a100", inactive))
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
    # On an SXM board each link leads somewhere.
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


@pytest.mark.parametrize(
    "text",
    [
        "/sys/bus/pci/devices/../../etc/x/vendor:0x10de\n",
        "/sys/bus/pci/devices/0000:1b:00.0/vendor:0x10de\n",
        "/sys/bus/pci/devices/0000:1b:00.0/class:0x030200\n",
        BUS.replace("0x030200", "?"),
        "/proc/driver/nvidia/version:" + "9." * 50000 + "\n",
        "\x1b[31m\udcff\x00:1:\n" + "crw" * 20000,
        "c" + "rwx" * 3 + " 1 0 0 " + "1 " * 30000 + "/dev/x y\n",
    ],
)
def test_nonsense_on_the_bus_is_no_gpu(text: str) -> None:
    assert pci_gpus.parse(Output(text, 0)).gpus == ()


@pytest.mark.parametrize(
    "output", [Output("", None), Output("", 2), Output(BUS, None, truncated=True)]
)
def test_a_bus_that_cannot_be_read(output: Output) -> None:
    with pytest.raises(ProbeError):
        pci_gpus.parse(output)


def test_a_device_that_no_longer_answers() -> None:
    bus = pci("0000:1b:00.0", width=63).replace("numa_node:0", "numa_node:-1")
    (gpu,) = pci_gpus.parse(Output(bus, 0)).gpus
    assert (gpu.pcie_width, gpu.numa_node) == (None, None)


@pytest.mark.parametrize("shell_name", ["dash", "busybox ash", "bash --posix"])
def test_the_script_reads_only_gpus(shell_name: str, tmp_path: Path) -> None:
    root = tmp_path / "sys/bus/pci/devices"
    text = BUS + "".join(map(switch, SWITCHES)) + SERVER
    text += pci("0000:1b:00.1", device="0x10fa", kind="0x040300", driver="snd_hda_intel")
    text += pci("0000:1b:00.4")  # a virtual function
    files: dict[Path, list[str]] = {}
    for line in text.splitlines():
        path, _, rest = line.removeprefix("/sys/bus/pci/devices").rpartition("/")
        name, _, value = rest.partition(":")
        files.setdefault(Path(f"{root}{path}") / name, []).append(value)
    for path, lines in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    (root / "0000:1b:00.4" / "physfn").symlink_to("../0000:1b:00.0")
    script = pci_gpus.SECTION.script(Policy()).replace("/sys/", f"{tmp_path}/sys/")
    script = f"{shell.library('probe')}\n{shell.minify(script)}"
    done = subprocess.run(
        [*shell_name.split(), "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = pci_gpus.parse(Output(done.stdout.replace(str(tmp_path), ""), 0))
    assert tuple(gpu.address for gpu in found.gpus) == ADDRESSES
    assert found.nvswitches == 4
    assert found.gpus[0].driver == "nvidia"
    assert "0000:03:00.0" not in done.stdout

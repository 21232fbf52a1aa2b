"""One value of a healthy answer is another one: the verdict that an expert gives, and its source.

The answers are composed for many parts and drivers; recordings of real machines are read where
they lie beside the checkout. No word in the place of a value may make a node look healthier.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeready.lab import nvidia as lab
from nodeready.subjects.base import Output
from nodeready.subjects.gpus import facts, nvidia
from nodeready.subjects.result import Result
from tests import paths
from tests.builders.gpus import (
    ADDRESSES,
    DEVICES,
    PARTS,
    PREFIX,
    VERSION,
    Node,
    bad,
    combinations,
    node,
    nvlinks,
    one,
    pci,
    trees_of,
)

#: Policy settings with which every check has something to judge.
ALL: Mapping[str, Any] = {"gpu_mig": "off", "gpu_idle": True}
HEALTHY = ("ok", "na")


def verdicts(made: Node, **more: Any) -> dict[str, Result]:
    results = made.judged(**{**ALL, **more})
    # The kernel's log is another module's, here it is empty.
    results.pop("kernel_faults")
    return results


@pytest.mark.parametrize("part", PARTS)
def test_a_healthy_node_of_each_part_with_each_driver_is_well(part: str) -> None:
    for name, driver in combinations():
        if name == part:
            results = verdicts(node(name, driver), gpu_count=PARTS[name].count)
            assert bad(results) == {}, driver
            # What stands there is read, and not only left alone.
            for check in ("present", "tool", "model", "throttle", "persistence"):
                assert results[check].status == "ok", (driver, check)


# --- Mutations: one value of one GPU is another.

H100, A100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"
GB200, GB300, RUBIN = "NVIDIA GB200", "NVIDIA GB300", "NVIDIA Graphics Device"
V100, T4, L40S = "Tesla V100-SXM2-32GB", "Tesla T4", "NVIDIA L40S"
LATEST = "580.105.08"
#: Which of the node's GPUs differs.
AT = 1


def put(tree: dict[str, Any], path: str, value: str | None) -> None:
    """This text at the path; None: no such element."""
    *above, last = path.split("/")
    for name in above:
        tree = tree[name]
    if value is None:
        del tree[last]
    else:
        assert last in tree, path
        tree[last] = value


def mutated(part: str, driver: str, path: str, value: str | None, count: int = 8) -> Node:
    """The node, of which one GPU has this text at the path."""
    trees = trees_of(part, driver)[:count]
    put(trees[min(AT, len(trees) - 1)], path, value)
    return node(part, driver, trees)


def everywhere(part: str, driver: str, path: str, value: str | None) -> Node:
    """The node with two GPUs that both have this text at the path."""
    trees = trees_of(part, driver)[:2]
    for one_tree in trees:
        put(one_tree, path, value)
    return node(part, driver, trees)


LINKS = "pci/pci_gpu_link_info"
ECC = "ecc_errors"
ROWS, HISTOGRAM = "remapped_rows", "remapped_rows/row_remapper_histogram/row_remapper_histogram"
HEALTH = "fabric/health"
EVENT = "clocks_event_reasons/clocks_event_reason"
MAN = "nvidia-smi(1)"
NVML = "NVML API reference"
MEMORY = "NVIDIA GPU memory error management"

#: part, driver, path, value, check, status, what it says, source. The only finding.
MUTATIONS = [
    # The driver's own words.
    (H100, LATEST, "gpu_recovery_action", "Reset", "recovery", "fail", "asks for reset",
     f"{NVML}, nvmlDeviceGpuRecoveryAction_t"),
    (H100, LATEST, "gpu_recovery_action", "GPU Reset", "recovery", "fail", "asks for reset", NVML),
    (H100, LATEST, "gpu_recovery_action", "Reboot", "recovery", "fail", "asks for reboot", NVML),
    (H100, LATEST, "gpu_recovery_action", "Node Reboot", "recovery", "fail", "reboot", NVML),
    (H100, LATEST, "gpu_recovery_action", "Drain P2P", "recovery", "fail", "drain p2p", NVML),
    (H100, LATEST, "gpu_recovery_action", "Drain and Reset", "recovery", "fail",
     "drain and reset", NVML),
    (H100, LATEST, "gpu_recovery_action", "Reset Bus", "recovery", "fail", "reset bus", NVML),
    (H100, "575.57.08", "gpu_recovery_action", "Reset", "recovery", "fail", "reset", NVML),
    (H100, "535.183.06", "gpu_reset_status/reset_required", "Yes", "recovery", "fail", "reset",
     MAN),
    (A100, "550.163.01", "gpu_reset_status/drain_and_reset_recommended", "Yes", "recovery",
     "fail", "drain and reset", MAN),
    # Memory.
    (H100, LATEST, f"{ECC}/volatile/dram_uncorrectable", "1", "ecc_errors", "fail",
     "1 uncorrectable", "DeepOps; GCM"),
    (H100, LATEST, f"{ECC}/volatile/sram_uncorrectable_parity", "2", "ecc_errors", "fail",
     "2 uncorrectable", "gpud"),
    (H100, LATEST, f"{ECC}/volatile/sram_uncorrectable_secded", "3", "ecc_errors", "fail",
     "3 uncorrectable", "gpud"),
    (A100, "535.183.06", f"{ECC}/volatile/sram_uncorrectable", "1", "ecc_errors", "fail",
     "1 uncorrectable", "GCM"),
    (V100, "470.256.02", f"{ECC}/volatile/double_bit/total", "4", "ecc_errors", "fail",
     "4 uncorrectable", "GCM"),
    (H100, LATEST, f"{ECC}/volatile/dram_correctable", "99", "", "", "", "ECC corrected them"),
    (H100, LATEST, f"{ECC}/aggregate/dram_uncorrectable", "9", "", "", "", "of its lifetime"),
    (H100, LATEST, f"{ECC}/aggregate/sram_threshold_exceeded", "Yes", "ecc_errors", "fail",
     "SRAM error threshold exceeded", f"{NVML}, nvmlEccSramErrorStatus_t"),
    (B200, LATEST, f"{ECC}/aggregate/sram_threshold_exceeded", "Yes", "ecc_errors", "fail",
     "SRAM error threshold exceeded", NVML),
    (H100, LATEST, f"{ECC}/channel_repair_pending", "Yes", "remapped_rows", "fail",
     "repair pending", f"{NVML}, nvmlRepairStatus_t"),
    (GB200, LATEST, f"{ECC}/tpc_repair_pending", "Yes", "remapped_rows", "fail", "repair pending",
     NVML),
    (L40S, "595.58.03", f"{ECC}/unrepairable_memory", "Yes", "remapped_rows", "fail",
     "unrepairable memory", f"{NVML}, nvmlUnrepairableMemoryStatus_v1_t"),
    (RUBIN, "615.23", f"{ECC}/unrepairable_memory", "Yes", "remapped_rows", "fail",
     "unrepairable memory", NVML),
    (RUBIN, "615.23", "remapped_banks/bank_remapper_pending", "Yes", "remapped_rows", "fail",
     "repair pending", "recorded Rubin"),
    (RUBIN, "615.23", "remapped_banks/bank_remapper_histogram/bank_remapper_histogram_none",
     "1 group(s)", "remapped_rows", "warn", "1 memory banks without", "recorded Rubin"),
    (H100, LATEST, f"{ROWS}/remapped_row_pending", "Yes", "remapped_rows", "fail",
     "remap pending", MEMORY),
    (H100, LATEST, f"{ROWS}/remapped_row_failure", "Yes", "remapped_rows", "fail",
     "remapping failed", MEMORY),
    (H100, LATEST, f"{ROWS}/remapped_row_unc", "3", "", "", "", "remapped: spare rows are for it"),
    (H100, LATEST, f"{HISTOGRAM}_none", "1 bank(s)", "remapped_rows", "warn",
     "1 memory banks without a spare row", f"{NVML}, nvmlRowRemapperHistogramValues_t"),
    (H100, LATEST, f"{HISTOGRAM}_low", "1 bank(s)", "", "", "", "spare rows are left"),
    (A100, "535.183.06", f"{HISTOGRAM}_none", "2 bank(s)", "remapped_rows", "warn", "2 memory",
     NVML),
    (T4, "515.105.01", "retired_pages/pending_retirement", "Yes", "retired_pages", "fail",
     "page retirement pending", "NVIDIA Dynamic Page Retirement"),
    (V100, "470.256.02", "retired_pages/double_bit_retirement/retired_count", "60",
     "retired_pages", "fail", "60 pages retired", "NVIDIA Dynamic Page Retirement, RMA"),
    (V100, "470.256.02", "retired_pages/multiple_single_bit_retirement/retired_count", "59", "",
     "", "", "below the limit"),
    (H100, LATEST, "ecc_mode/current_ecc", "Disabled", "ecc_mode", "fail", "off", "policy"),
    (H100, LATEST, "ecc_mode/pending_ecc", "Disabled", "ecc_mode", "fail",
     "on, off after a reset", "policy"),
    # PCIe.
    (H100, LATEST, f"{LINKS}/link_widths/current_link_width", "8x", "pcie", "fail", "x8 of x16",
     "DeepOps"),
    (GB300, LATEST, f"{LINKS}/link_widths/current_link_width", "8x", "pcie", "fail", "x8 of x16",
     "DeepOps"),
    (H100, LATEST, f"{LINKS}/link_widths/max_link_width", "8x", "", "", "",
     "nvidia-smi's own maximum is below the width: nonsense, and no lane is missing"),
    (H100, LATEST, f"{LINKS}/pcie_gen/current_link_gen", "3", "pcie", "warn", "generation 3 of 5",
     "GCM"),
    (H100, LATEST, "pci/replay_counter", "150", "", "", "", "recorded H100"),
    # Heat and clocks.
    (H100, LATEST, f"{EVENT}_hw_slowdown", "Active", "throttle", "fail", "hw_slowdown", MAN),
    (H100, LATEST, f"{EVENT}_hw_thermal_slowdown", "Active", "throttle", "fail", "hw_thermal",
     MAN),
    (H100, LATEST, f"{EVENT}_hw_power_brake_slowdown", "Active", "throttle", "fail",
     "hw_power_brake_slowdown", MAN),
    (H100, LATEST, f"{EVENT}_sw_thermal_slowdown", "Active", "throttle", "warn", "sw_thermal",
     MAN),
    (H100, LATEST, f"{EVENT}_sw_power_cap", "Active", "", "", "", "how a busy GPU works"),
    (H100, LATEST, f"{EVENT}_sync_boost", "Active", "", "", "", "the owner's choice"),
    (T4, "515.105.01", "clocks_throttle_reasons/clocks_throttle_reason_hw_slowdown", "Active",
     "throttle", "fail", "hw_slowdown", MAN),
    (A100, "535.183.06", "temperature/gpu_temp", "93 C", "temperature", "fail", "93 C, limit 93",
     MAN),
    (A100, "535.183.06", "temperature/gpu_temp", "92 C", "", "", "", MAN),
    (A100, "535.183.06", "temperature/memory_temp", "95 C", "temperature", "fail", "memory 95 C",
     MAN),
    (H100, LATEST, "temperature/gpu_temp_tlimit", "-2 C", "temperature", "fail", "31 C, limit 31",
     f"{MAN}, T.Limit"),
    (H100, LATEST, "temperature/gpu_temp_tlimit", "-9 C", "temperature", "fail", "31 C, limit 24",
     f"{MAN}, T.Limit"),
    (H100, LATEST, "temperature/gpu_temp_tlimit", "0 C", "temperature", "warn",
     "0 C left to the limit", f"{MAN}, T.Limit"),
    (H100, LATEST, "temperature/gpu_temp_tlimit", "1 C", "", "", "", f"{MAN}, T.Limit"),
    # Modes.
    (H100, LATEST, "persistence_mode", "Disabled", "persistence", "fail", "off", "policy"),
    (H100, LATEST, "mig_mode/current_mig", "Enabled", "mig", "fail", "on", "policy"),
    (H100, LATEST, "mig_mode/pending_mig", "Enabled", "mig", "fail", "on after a reset", "policy"),
    (H100, LATEST, "compute_mode", "Prohibited", "device_access", "fail",
     "compute mode prohibited", MAN),
    (H100, LATEST, "compute_mode", "Exclusive_Process", "", "", "", "as MPS wants it"),
    # The NVLink fabric.
    (H100, LATEST, "fabric/state", "In Progress", "fabric_manager", "fail",
     "fabric in progress", "NVIDIA Fabric Manager user guide"),
    (H100, LATEST, "fabric/state", "Not Started", "fabric_manager", "fail", "fabric not started",
     "NVIDIA Fabric Manager user guide"),
    (B200, LATEST, "fabric/state", "Not Started", "fabric_manager", "fail", "fabric not started",
     "NVIDIA/gpu-operator, issue 2781"),
    (B200, LATEST, "fabric/status", "Unknown Error", "fabric_manager", "fail",
     "fabric completed: unknown error", "NVIDIA/NVSentinel, issue 883"),
    (GB200, LATEST, f"{HEALTH}/summary", "Unhealthy", "fabric_manager", "fail",
     "fabric unhealthy", f"{NVML}, NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY"),
    (GB200, LATEST, f"{HEALTH}/summary", "Degraded", "fabric_manager", "fail", "degraded", NVML),
    (GB200, LATEST, f"{HEALTH}/summary", "Limited Capacity", "fabric_manager", "fail",
     "limited capacity", f"{NVML}, NVML_GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY"),
    (GB200, LATEST, f"{HEALTH}/summary", "Vague", "fabric_manager", "unknown", "summary: Vague",
     "a word that nobody knows"),
    (B200, LATEST, f"{HEALTH}/bandwidth", "Degraded", "fabric_manager", "fail",
     "bandwidth degraded", f"{NVML}, DEGRADED_BW_TRUE"),
    (B200, LATEST, f"{HEALTH}/route_unhealthy", "True", "fabric_manager", "fail",
     "route unhealthy", f"{NVML}, ROUTE_UNHEALTHY_TRUE"),
    (GB300, LATEST, f"{HEALTH}/route_recovery_in_progress", "True", "fabric_manager", "fail",
     "route recovery in progress", NVML),
    (GB300, LATEST, f"{HEALTH}/access_timeout_recovery", "True", "fabric_manager", "fail",
     "access timeout recovery", NVML),
    (GB300, LATEST, f"{HEALTH}/incorrect_configuration", "Incorrect SysGUID", "fabric_manager",
     "fail", "incorrect configuration: incorrect sysguid", NVML),
    (GB300, LATEST, f"{HEALTH}/incorrect_configuration", "Insufficient NVLinks", "fabric_manager",
     "fail", "insufficient nvlinks", NVML),
    (GB300, LATEST, f"{HEALTH}/incorrect_configuration", "No Partition", "fabric_manager", "fail",
     "no partition", NVML),
    (RUBIN, "615.23", f"{HEALTH}/partition_assigned", "False", "fabric_manager", "fail",
     "no partition assigned", NVML),
    (RUBIN, "615.23", f"{HEALTH}/gfm_state", "Disconnected", "fabric_manager", "fail",
     "global fabric manager disconnected", f"{NVML}, GFM_STATE_DISCONNECTED"),
    (GB200, LATEST, "fabric/cliqueId", "2", "fabric_manager", "fail", "NVLink clique 2 of",
     "NVIDIA Multi-Node NVLink guide"),
    (GB200, LATEST, "fabric/clusterUuid", "00000009-0000-0000-0000-000000000009",
     "fabric_manager", "fail", "of 00000009-", "NVIDIA Multi-Node NVLink guide"),
    (GB200, LATEST, "c2c_mode", "Disabled", "nvlink", "fail", "NVLink-C2C to the processor off",
     "NVIDIA/k8s-test-infra, issue 639"),
    (B200, LATEST, "c2c_mode", "N/A", "", "", "", "no Grace processor"),
    (H100, LATEST, "product_name", "NVIDIA H200", "", "", "", "the policy names no model"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("part", "driver", "path", "value", "check", "status", "words", "source"),
    MUTATIONS,
    ids=[f"{m[0].split()[1]}-{m[2].rpartition('/')[2]}-{m[3]}" for m in MUTATIONS],
)
def test_one_value_that_differs(  # noqa: PLR0917 - the columns of the table
    part: str, driver: str, path: str, value: str, check: str, status: str, words: str, source: str
) -> None:
    results = verdicts(mutated(part, driver, path, value))
    found = bad(results)
    assert set(found) == ({check} if check else set()), (source, found)
    if check:
        assert results[check].status == status, source
        assert words in found[check], (source, found[check])
        assert results[check].fix or status == "unknown"


# --- What the tool cannot tell.

#: What stands in the place of a value that the tool cannot tell.
ERRORS = (
    "Unknown Error",
    "[Unknown Error]",
    "Insufficient Permissions",
    "[Insufficient Permissions]",
    "GPU is lost",
    "[GPU is lost]",
    "GPU requires reset",
    "[GPU requires reset]",
    "Reset required",
    "ERR!",
    "Unknown",
    "Function Not Found",
    "Timeout",
    "No data",
    "-",
    "",
)
NONE = ("N/A", "[N/A]", "Not Supported", "[Not Supported]")

#: Element -> the check that rests on it; the path below ``<gpu>``.
READ = {
    "product_name": "model",
    "uuid": "nvlink",
    "vbios_version": "vbios",
    "persistence_mode": "persistence",
    "mig_mode/current_mig": "mig",
    "mig_mode/pending_mig": "mig",
    "compute_mode": "device_access",
    "c2c_mode": "nvlink",
    "performance_state": "pcie",
    "gpu_recovery_action": "recovery",
    "gpu_virtualization_mode/virtualization_mode": "pcie",
    f"{LINKS}/pcie_gen/max_link_gen": "pcie",
    f"{LINKS}/pcie_gen/current_link_gen": "pcie",
    f"{LINKS}/link_widths/max_link_width": "pcie",
    f"{LINKS}/link_widths/current_link_width": "pcie",
    "ecc_mode/current_ecc": "ecc_mode",
    "ecc_mode/pending_ecc": "ecc_mode",
    f"{ECC}/volatile/sram_uncorrectable": "ecc_errors",
    f"{ECC}/volatile/sram_uncorrectable_parity": "ecc_errors",
    f"{ECC}/volatile/sram_uncorrectable_secded": "ecc_errors",
    f"{ECC}/volatile/dram_uncorrectable": "ecc_errors",
    f"{ECC}/volatile/double_bit/total": "ecc_errors",
    f"{ECC}/aggregate/sram_threshold_exceeded": "ecc_errors",
    f"{ECC}/aggregate/dram_uncorrectable": "tool",
    f"{ECC}/channel_repair_pending": "remapped_rows",
    f"{ECC}/tpc_repair_pending": "remapped_rows",
    f"{ECC}/unrepairable_memory": "remapped_rows",
    "retired_pages/pending_retirement": "retired_pages",
    "retired_pages/double_bit_retirement/retired_count": "retired_pages",
    "retired_pages/multiple_single_bit_retirement/retired_count": "retired_pages",
    f"{ROWS}/remapped_row_pending": "remapped_rows",
    f"{ROWS}/remapped_row_failure": "remapped_rows",
    f"{HISTOGRAM}_none": "remapped_rows",
    "remapped_banks/bank_remapper_pending": "remapped_rows",
    "temperature/gpu_temp": "temperature",
    "temperature/gpu_temp_tlimit": "temperature",
    "temperature/gpu_temp_slow_tlimit_threshold": "temperature",
    "temperature/gpu_temp_slow_threshold": "temperature",
    "temperature/memory_temp": "temperature",
    "fabric/state": "fabric_manager",
    "fabric/status": "fabric_manager",
    "fabric/cliqueId": "fabric_manager",
    "fabric/clusterUuid": "fabric_manager",
    **{
        f"{HEALTH}/{name}": "fabric_manager"
        for name in ("summary", "bandwidth", "route_unhealthy", "route_recovery_in_progress",
                     "access_timeout_recovery", "incorrect_configuration")
    },
    **{
        f"clocks_{kind}_reasons/clocks_{kind}_reason_{name}": check
        for kind in ("event", "throttle")
        for name, check in (
            ("gpu_idle", "pcie"),
            ("hw_slowdown", "throttle"),
            ("hw_thermal_slowdown", "throttle"),
            ("hw_power_brake_slowdown", "throttle"),
            ("sw_thermal_slowdown", "throttle"),
        )
    },
}  # fmt: skip
#: The same of a whole part of the answer, which then has no elements.
WHOLE = {
    "mig_mode": "mig",
    "ecc_mode": "ecc_mode",
    ECC: "ecc_errors",
    f"{ECC}/volatile": "ecc_errors",
    "retired_pages": "retired_pages",
    ROWS: "remapped_rows",
    "temperature": "temperature",
    "pci": "pcie",
    LINKS: "pcie",
    "fabric": "fabric_manager",
    HEALTH: "fabric_manager",
    "clocks_event_reasons": "throttle",
    "clocks_throttle_reasons": "throttle",
    "processes": "processes",
}
#: A part and a driver of each form of the answer.
FORMS = (
    (V100, "450.80.02"), (T4, "515.105.01"), (A100, "535.183.06"), (H100, "550.163.01"),
    (H100, "575.57.08"), (H100, LATEST), (GB300, "595.58.03"), (RUBIN, "615.23"),
)  # fmt: skip


#: What a GPU must have, what is a process's, and what each answer shows.
NEEDED = ("product_name", "uuid", "pci/pci_bus_id")
JOBS = ("processes", "accounted_processes")
CORE = (
    "product_name", "uuid", "vbios_version", "persistence_mode", "performance_state",
    "mig_mode/current_mig", "ecc_mode/current_ecc", f"{LINKS}/link_widths/current_link_width",
    f"{LINKS}/pcie_gen/max_link_gen", "temperature/gpu_temp", "retired_pages", "ecc_errors",
    "temperature", "pci", "processes",
)  # fmt: skip


def leaves(made: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in made.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}{name}/")
        else:
            yield f"{above}{name}"


def worse(before: Mapping[str, Result], after: Mapping[str, Result], what: object) -> None:
    """No verdict is healthier than it was."""
    order = ("ok", "na", "unknown", "warn", "fail")
    for name, result in before.items():
        if result.bad:
            assert order.index(after[name].status) >= 2, (what, name)


@pytest.mark.parametrize(("part", "driver"), FORMS)
def test_an_error_in_the_place_of_a_value_is_unknown(part: str, driver: str) -> None:
    found = [*leaves(trees_of(part, driver)[0])]
    tried = 0
    for path, check in {**READ, **WHOLE}.items():
        parts = any(one.startswith(f"{path}/") for one in found)
        for word in ERRORS if path in found or (path in WHOLE and parts) else ():
            # Without a process, that element is empty; what went wrong at the fabric is any text.
            if (path, word) in (("processes", ""), ("fabric/status", "-")):
                continue
            results = verdicts(mutated(part, driver, path, word, 2))
            assert results[check].status not in HEALTHY, (path, word, results[check].actual)
            tried += 1
    assert tried > 300


@pytest.mark.parametrize(("part", "driver"), FORMS)
def test_an_error_in_any_other_place_is_seen(part: str, driver: str) -> None:
    for path in leaves(trees_of(part, driver)[0]):
        for word in ("Unknown Error", "ERR!") if path not in JOBS else ():
            assert bad(verdicts(mutated(part, driver, path, word, 2))), (path, word)


@pytest.mark.parametrize(("part", "driver"), FORMS)
def test_a_value_that_the_device_does_not_have_is_no_fault(part: str, driver: str) -> None:
    # Of all GPUs: one that lacks what its peers have is unknown.
    for path in leaves(trees_of(part, driver)[0]):
        for word in ("N/A", "[Not Supported]") if path not in NEEDED else ():
            assert bad(verdicts(everywhere(part, driver, path, word))) == {}, (path, word)


@pytest.mark.parametrize(("part", "driver"), FORMS)
def test_a_value_that_each_answer_of_such_a_driver_has_is_missed(part: str, driver: str) -> None:
    later = {535: ("fabric", "fabric/state"), 515: (ROWS,)}
    since = [path for major, more in later.items() for path in more if int(driver[:3]) >= major]
    for path in (*CORE, *since):
        check = {**READ, **WHOLE}[path]
        results = verdicts(everywhere(part, driver, path, None))
        assert results[check].status == "unknown", (path, results[check].actual)


def test_a_value_of_another_name_is_not_missed() -> None:
    # Between 570 and 575 both stand there, and the old one says that it is no more.
    results = verdicts(node(H100, "575.57.08"))
    assert one(results, "recovery") == ("ok", "none")
    gone = mutated(H100, "575.57.08", "gpu_recovery_action", None)
    assert one(verdicts(gone), "recovery")[0] == "unknown"
    # The name that replaces driver_version.
    text = node(RUBIN, "615.23").smi.text.replace("driver_version>", "other>")
    made = replace(node(RUBIN, "615.23"), smi=Output(text, 0))
    assert one(verdicts(made), "tool") == ("ok", "nvidia-smi 615.23")


@pytest.mark.parametrize("name", [*ERRORS, *NONE, None])
def test_a_gpu_without_a_readable_name_is_not_skipped(name: str | None) -> None:
    made = mutated(H100, LATEST, "product_name", name)
    assert one(verdicts(made), "model")[0] == "unknown"
    # Nor is what is wrong with it, or what it does not say.
    text = made.smi.text
    start = text.index(f'<gpu id="0000{ADDRESSES[AT].upper()}">')
    sick = text[:start] + text[start:].replace("<gpu_temp>31 C", "<gpu_temp>N/A", 1)
    results = verdicts(replace(made, smi=Output(sick, 0)))
    assert one(results, "temperature")[0] == "unknown"
    sick = text[:start] + text[start:].replace("row_pending>No", "row_pending>Yes", 1)
    results = verdicts(replace(made, smi=Output(sick, 0)))
    assert one(results, "remapped_rows")[0] == "fail"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("31 C", 31), ("31", 31), ("31C", 31), ("-2 C", -2), ("16x", 16), ("2560 bank(s)", 2560),
        ("700.00 W", 700), ("0", 0),
        ("31 F", None), ("31 C?", None), ("0 Unknown Error", None), ("0x10", None), ("1e3", None),
        ("--", None), ("9" * 5000, None), ("٣١ C", None), ("None", None),
    ],
)  # fmt: skip
def test_a_number_is_one_or_it_is_unknown(text: str, value: int | None) -> None:
    assert nvidia.number(text) == value


#: What a register or a counter that could not be read leaves behind as a number: all ones.
ALL_ONES = ("-1", "65535", "4294967295")
#: Path, numbers that it cannot have, the check that rests on it.
IMPLAUSIBLE = (
    (f"{LINKS}/pcie_gen/current_link_gen", ("255", "8", *ALL_ONES), "pcie"),
    (f"{LINKS}/pcie_gen/max_link_gen", ("0", "255", *ALL_ONES), "pcie"),
    (f"{LINKS}/link_widths/current_link_width", ("63x", "255x", "-1x", *ALL_ONES), "pcie"),
    (f"{LINKS}/link_widths/max_link_width", ("0x", "63x", "255x", "-1x", *ALL_ONES), "pcie"),
    ("temperature/gpu_temp", ("255 C", "-128 C", "65535 C", "4294967295 C"), "temperature"),
    ("temperature/memory_temp", ("255 C", "-128 C", "65535 C"), "temperature"),
    ("temperature/gpu_temp_tlimit", ("255 C", "-32768 C", "65535 C"), "temperature"),
    ("temperature/gpu_temp_slow_tlimit_threshold", ("-255 C", "65535 C"), "temperature"),
    ("temperature/gpu_temp_slow_threshold", ("255 C", "65535 C", "4294967295 C"), "temperature"),
    ("temperature/gpu_temp_max_mem_threshold", ("255 C", "65535 C"), "temperature"),
    (f"{ECC}/volatile/sram_uncorrectable", ("-1", "4294967295"), "ecc_errors"),
    (f"{ECC}/volatile/dram_uncorrectable", ("-1", "18446744073709551615"), "ecc_errors"),
    (f"{ECC}/volatile/dram_correctable", ("-1", "4294967295"), "tool"),
    (f"{ECC}/aggregate/dram_uncorrectable", ("-1", "4294967295"), "tool"),
    (f"{HISTOGRAM}_none", ("-1 bank(s)", "4294967295 bank(s)"), "remapped_rows"),
    ("retired_pages/double_bit_retirement/retired_count", ("-1", "4294967295"), "retired_pages"),
)


@pytest.mark.parametrize(
    ("part", "driver"), [(V100, "450.80.02"), (A100, "535.183.06"), (H100, LATEST)]
)
def test_a_number_that_a_value_cannot_be_is_unknown(part: str, driver: str) -> None:
    found, tried, healthy = [*leaves(trees_of(part, driver)[0])], 0, []
    for path, numbers, check in IMPLAUSIBLE:
        for text in numbers if path in found else ():
            for make in (mutated, everywhere):
                if verdicts(make(part, driver, path, text))[check].status != "unknown":
                    healthy.append((make.__name__, path, text))
                tried += 1
    assert healthy == []
    assert tried > 40


@pytest.mark.parametrize("text", ["-1", "4294967295", "257", "Unknown Error", "ERR!", "", "x"])
def test_a_number_of_gpus_that_is_none_is_unknown(text: str) -> None:
    made = node(H100, LATEST)
    said = re.sub("(<attached_gpus>)[^<]*", rf"\g<1>{text}", made.smi.text)
    results = verdicts(replace(made, smi=Output(said, 0)))
    assert one(results, "tool")[0] == "unknown"


# --- What a process calls itself is its user's.

NAMES = [
    "python", "GPU is lost", "[GPU requires reset]", "Unknown Error", "ERR!", "N/A", "", " ",
    "a\nb", "a\n<b", "</process_name>", "</process_name><pid>1</pid>", "a & b", "&lt;", "]]>",
    "<![CDATA[", "<!--", "<?xml?>", "<process_info>", "</process_info>", "</gpu>", "<gpu>",
    "x</process_name>\n<used_memory>1 MiB</used_memory>\n</process_info>",
    "x</process_name><used_memory>1 MiB</used_memory></process_info></processes>",
    "x\n</process_name>\n<used_memory>1 MiB</used_memory>\n</process_info>\n</processes>\n</gpu>",
    "</nvidia_smi_log>",
    "x</process_name><used_memory>1 MiB</used_memory></process_info></processes>"
    '<gpu_recovery_action>Reset</gpu_recovery_action></gpu><gpu id="00000000:FF:00.0">'
    "<processes><process_info><pid>1</pid><process_name>y",
    "\x1b[31m", "\u202e", "\udcff", "x" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize("fault", [False, True])
def test_a_process_cannot_change_a_verdict_by_its_name(name: str, fault: bool) -> None:
    driver = LATEST

    def results(words: str) -> dict[str, tuple[str, str]]:
        trees = trees_of(H100, driver)
        trees[AT]["processes"] = (
            "<process_info><gpu_instance_id>N/A</gpu_instance_id>\n<pid>77</pid>\n<type>C</type>\n"
            f"<process_name>{words}</process_name>\n<used_memory>5 MiB</used_memory>\n"
            "</process_info>\n"
        )
        if fault:
            trees[5]["remapped_rows"]["remapped_row_pending"] = "Yes"
        judged = node(H100, driver, trees).judged()
        return {check: (one.status, one.actual) for check, one in judged.items()}

    assert results(name) == results("python")


# --- Links: what they say, and what the model says.


def links_of(part: str, driver: str, down: Mapping[int, range], **more: Any) -> dict[str, Result]:
    made = node(part, driver)
    text = "nr_scanned=1\n" + nvlinks(PARTS[part], down)
    return verdicts(replace(made, links=Output(text, 0), **more))


ONE, EVERY = {1: range(2, 3)}, {1: range(18)}


@pytest.mark.parametrize(
    ("part", "down", "status", "words"),
    [
        # No NVSwitch is to be seen on these (NVLink 5: gpu-operator, issue 2781; NVL72).
        (B200, ONE, "fail", "link 2 inactive"),
        (B200, EVERY, "fail", "all links inactive"),
        (GB200, ONE, "fail", "link 2 inactive"),
        (GB200, EVERY, "fail", "all links inactive"),
        ("NVIDIA B300 SXM6 AC", EVERY, "fail", "all links inactive"),
        (GB300, ONE, "fail", "link 2 inactive"),
        (H100, ONE, "fail", "link 2 inactive"),
        ("NVIDIA H200", ONE, "fail", "link 2 inactive"),
        ("NVIDIA H200", EVERY, "fail", "all links inactive"),
        ("NVIDIA H20", EVERY, "fail", "all links inactive"),
        ("NVIDIA H800", {1: range(8)}, "fail", "all links inactive"),
        (A100, {1: range(3, 4)}, "fail", "link 3 inactive"),
        (V100, {1: range(6)}, "fail", "all links inactive"),
        # Cards: a bridge has four links, and an NVL is a pair.
        ("NVIDIA H100 NVL", {0: range(1), 1: range(1)}, "warn", "11 active links"),
        ("NVIDIA H100 NVL", {n: range(1) for n in range(4)}, "warn", "11 active links"),
        ("NVIDIA H100 NVL", {n: range(18) for n in range(4)}, "warn", "without its bridges"),
        ("NVIDIA H100 NVL", {1: range(18)}, "warn", "without its bridges"),
        ("NVIDIA H100 PCIe", {n: range(12) for n in range(4)}, "na", "no links"),
        ("NVIDIA H100 PCIe", {n: range(4) for n in range(4)}, "ok", "8 per GPU"),
        ("NVIDIA A100-PCIE-40GB", {0: range(1), 1: range(1)}, "warn", "11 active links"),
        ("NVIDIA A40", {n: range(4) for n in range(4)}, "na", "no links"),
        ("NVIDIA GH200 480GB", {}, "na", "no links"),
    ],
)  # fmt: skip
def test_links_that_are_down(
    part: str, down: Mapping[int, range], status: str, words: str
) -> None:
    driver = next(d for p, d in reversed(combinations()) if p == part)
    # With and without switches to be seen, and where the fabric's state is not told (a guest).
    for without in (False, True):
        more: dict[str, Any] = {}
        if without:
            places = ADDRESSES[: PARTS[part].count]
            bus = VERSION + "".join(pci(p, device=f"0x{PARTS[part].device}") for p in places)
            text = re.sub(
                "<state>Completed|<status>Success", "<state>N/A", node(part, driver).smi.text
            )
            text = text.replace("<state>N/A</status>", "<status>N/A</status>")
            more = {"bus": bus + DEVICES, "smi": Output(text, 0)}
        result = links_of(part, driver, down, **more)["nvlink"]
        assert result.status == status, (without, result.actual)
        assert words in result.actual


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("53.125 GB/s", "ok", "18 per GPU"),
        ("<sleep>", "ok", "18 per GPU"),
        ("<inactive>", "fail", "link 2 inactive"),
        ("<Inactive>", "fail", "link 2 inactive"),
        ("inactive", "fail", "link 2 inactive"),
        ("50 GB/s", "fail", "link 2 at 50 of 53.125 GB/s"),
        ("26.562 GB/s", "fail", "link 2 at 26.562 of 53.125"),
        ("Unknown Error", "unknown", "link 2: Unknown Error"),
        ("ERR!", "unknown", "link 2: ERR!"),
        ("N/A", "unknown", "link 2: N/A"),
    ],
)
def test_the_state_of_a_link(text: str, status: str, words: str) -> None:
    made = node(B200, LATEST)
    lines = made.links.text.split("\n")
    at = lines.index(next(line for line in lines if lab.uuid(1) in line)) + 3
    lines[at] = f"\t Link 2: {text}"
    result = verdicts(replace(made, links=Output("\n".join(lines), 0)))["nvlink"]
    assert (result.status, words in result.actual) == (status, True), result.actual


def test_links_that_are_all_slow_or_of_which_nothing_is_told() -> None:
    made = node(H100, LATEST)
    slow = made.links.text.replace("26.562", "25")
    result = verdicts(replace(made, links=Output(slow, 0)))["nvlink"]
    assert (result.status, result.actual) == ("fail", "gpus 0-7: link 0 at 25 of 26.562 GB/s")
    # One GPU has an error, or is left out.
    for text in (
        re.sub(rf"({lab.uuid(1)}\))(\n\s+Link.*)+", r"\1\n\t NVML: GPU is lost", made.links.text),
        re.sub(r"GPU 1: .*(\n\s+Link.*)+\n", "", made.links.text),
    ):
        result = verdicts(replace(made, links=Output(text, 0)))["nvlink"]
        assert (result.status, result.actual[:6]) == ("unknown", "gpu 1 "), result.actual


@pytest.mark.parametrize("text", ["", "nr_scanned=1\n", PREFIX])
def test_an_empty_answer_on_links_is_that_of_a_card_without_them(text: str) -> None:
    for part in ("NVIDIA A10", "NVIDIA A10G", L40S):
        made = replace(node(part, "525.147.05"), links=Output(text, 0))
        assert one(verdicts(made), "nvlink") == ("na", "these GPUs use no links")
    for part in (H100, B200):
        made = replace(node(part, LATEST), links=Output(text, 0))
        assert one(verdicts(made), "nvlink")[0] == "unknown"


# --- The bus.


def aer(kind: str, words: str, above: bool = False) -> str:
    path = f"/sys/bus/pci/devices/{ADDRESSES[AT]}/{'../' if above else ''}aer_dev_{kind}"
    return "".join(f"{path}:{line}\n" for line in words.split(";"))


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        (aer("fatal", "DLP 1;TOTAL_ERR_FATAL 1"), "fail", "0000:43:00.0): 1 DLP (fatal)"),
        (aer("fatal", "SDES 2;TOTAL_ERR_FATAL 2", above=True), "fail", "2 SDES (fatal)"),
        (aer("nonfatal", "CmpltTO 3;TOTAL_ERR_NONFATAL 3"), "warn", "3 CmpltTO (nonfatal)"),
        (aer("nonfatal", "TLP 1;UnsupReq 4;TOTAL_ERR_NONFATAL 5"), "warn", "1 TLP (nonfatal)"),
        (aer("nonfatal", "UnsupReq 4;TOTAL_ERR_NONFATAL 4"), "ok", ""),
        (aer("fatal", "TOTAL_ERR_FATAL 2"), "fail", "2 TOTAL_ERR_FATAL"),
        (aer("fatal", "Undefined 0;DLP 0;TOTAL_ERR_FATAL 0"), "ok", ""),
        (aer("fatal", "DLP many;9 DLP;TLP -1;" + "x" * 500), "ok", ""),
    ],
)
def test_uncorrected_errors_of_a_link(lines: str, status: str, words: str) -> None:
    made = node(H100, LATEST)
    result = verdicts(replace(made, bus=f"{made.bus}\n{lines}"))["pcie"]
    assert (result.status, words in result.actual) == (status, True), result.actual
    # And where the tool does not answer.
    silent = replace(made, bus=f"{made.bus}\n{lines}", smi=Output("", None))
    assert verdicts(silent)["pcie"].status == ("unknown" if status == "ok" else status)


@pytest.mark.parametrize(
    ("part", "driver", "changes", "status"),
    [
        # The chip has 16 lanes and the card 8, which sysfs knows (recorded: a GTX 1050 Mobile).
        ("NVIDIA A2", "535.183.06", {}, "ok"),
        ("NVIDIA A2", "535.183.06", {"width": "4x"}, "fail"),
        # Idle, a Rubin uses two of its lanes (recorded); busy, it uses all.
        (RUBIN, "615.23", {}, "ok"),
        (RUBIN, "615.23", {"state": "P0"}, "fail"),
        (RUBIN, "615.23", {"state": "P0", "width": "16x"}, "ok"),
        (H100, LATEST, {"state": "P8", "width": "8x"}, "fail"),
        (GB300, LATEST, {"state": "P0", "width": "8x"}, "fail"),
        # One slot of eight with half the lanes of the others.
        (H100, LATEST, {"width": "8x", "most": "8x"}, "fail"),
        ("NVIDIA GeForce GTX 1650", "535.183.06", {}, "ok"),
    ],
)  # fmt: skip
def test_lanes(part: str, driver: str, changes: Mapping[str, str], status: str) -> None:
    trees = trees_of(part, driver)
    gpu = trees[min(AT, len(trees) - 1)]
    widths = gpu["pci"]["pci_gpu_link_info"]["link_widths"]
    gpu["performance_state"] = changes.get("state", gpu["performance_state"])
    widths["current_link_width"] = changes.get("width", widths["current_link_width"])
    widths["max_link_width"] = changes.get("most", widths["max_link_width"])
    result = verdicts(node(part, driver, trees))["pcie"]
    assert result.status == status, result.actual


def test_cliques_are_compared_between_nodes() -> None:
    found = facts.compared(node(GB300, "595.58.03").seen())
    assert found["fabric_clique"] == "32766 of 00000001-0000-0000-0000-000000000001"
    assert "fabric_clique" not in facts.compared(node(L40S, "595.58.03").seen())


# --- Recordings: what real machines print.

SAMPLES = paths.SAMPLES / "nvidia-smi"
RECORDED = sorted(SAMPLES.glob("*.xml")) if SAMPLES.is_dir() else []


def recorded(text: str, before: str = "") -> Node:
    """A node with this answer, and the bus and links that fit it, or the one ``before`` it."""
    gpus = nvidia.parse(Output(before or text, 0)).gpus
    bus = VERSION + "".join(pci(gpu.pci_address, width=gpu.pcie_width or 16) for gpu in gpus)
    lines = []
    for gpu in gpus:
        part = PARTS.get(gpu.model or "", PARTS[T4])
        lines.append(f"GPU {gpu.index}: {gpu.model} (UUID: {gpu.uuid})")
        active = 0 if gpu.mig == "on" or part.links is None else part.links[0]
        lines += [f"\t Link {n}: {part.gbps} GB/s" for n in range(active)]
    links = Output("\n".join(["nr_scanned=1", *lines]) + "\n", 0)
    return Node(bus + DEVICES, smi=Output(PREFIX + text, 0), links=links)


@pytest.mark.skipif(not RECORDED, reason="no recorded samples beside the checkout")
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_recorded_answers_are_judged_as_their_machines_are(path: Path) -> None:
    # Some of these machines have no persistence mode; one has MIG.
    results = recorded(path.read_text()).judged(gpu_persistence="any")
    results.pop("kernel_faults")
    if path.name == "gb200-fabric-degraded.xml":
        assert bad(results) == {
            "fabric_manager": "gpu 1 (0000:0b:00.0): fabric unhealthy, route unhealthy"
        }
    else:
        assert bad(results) == {}


def _small(text: str) -> str:
    """The answer with two GPUs at most, without processes and clocks: quicker to judge."""
    start, end = text.index("<nvidia_smi_log"), text.rindex("</nvidia_smi_log>")
    root = ElementTree.fromstring(text[start : end + len("</nvidia_smi_log>")])
    for gpu in root.findall("gpu")[2:]:
        root.remove(gpu)
    for gpu in root.findall("gpu"):
        for name in ("processes", "supported_clocks", "accounted_processes"):
            for child in gpu.findall(name):
                child.clear()
    return ElementTree.tostring(root, encoding="unicode")


@cache
def good() -> dict[str, tuple[str, dict[str, Result]]]:
    """The answers, and how they are judged."""
    texts = {" ".join(form): node(*form, trees_of(*form)[:2]).smi.text for form in FORMS}
    texts |= {path.name: path.read_text() for path in RECORDED}
    small = {name: _small(text) for name, text in texts.items()}
    return {name: (text, verdicts(recorded(text))) for name, text in small.items()}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_word_in_the_place_of_a_value_makes_a_node_healthier(data: st.DataObject) -> None:
    text, before = good()[data.draw(st.sampled_from(sorted(good())))]
    root = ElementTree.fromstring(text)
    gpus = root.findall("gpu")
    gpu = gpus[data.draw(st.integers(0, len(gpus) - 1))]
    found = {path: element for path in READ if (element := gpu.find(path)) is not None}
    path = data.draw(st.sampled_from(["", *sorted(found)]))
    inside = [*gpu.iter()]
    element = found[path] if path else inside[data.draw(st.integers(0, len(inside) - 1))]
    word = data.draw(st.sampled_from(ERRORS[:-2]))
    for child in list(element):
        element.remove(child)
    element.text = word
    after = verdicts(recorded(ElementTree.tostring(root, encoding="unicode"), text))
    worse(before, after, (element.tag, word))
    if path:
        assert after[READ[path]].status not in HEALTHY, (path, word, after[READ[path]].actual)


@pytest.mark.parametrize("word", ERRORS)
def test_a_whole_gpu_that_is_an_error(word: str) -> None:
    text = node(H100, LATEST).smi.text
    start = text.index(f'<gpu id="0000{ADDRESSES[AT].upper()}">')
    end = text.index("</gpu>", start)
    made = replace(
        node(H100, LATEST),
        smi=Output(text[: text.index(">", start) + 1] + word + text[end:], 0),
    )
    results = verdicts(made)
    seen = {READ[path] for path in READ} - {"retired_pages", "nvlink", "tool", "device_access"}
    assert {name for name in seen if results[name].status in HEALTHY} == set()
    if "lost" in word.lower() or "reset" in word.lower():
        assert results["recovery"].status == "fail"


# --- A GPU like one that was read before: what its lines tell is what the whole XML tells.

_VALUES = (
    *("31 C", "-5 C", "200 C", "0 C", "N/A", "[N/A]", "Unknown Error", "", "99999 MiB", "12.5 W"),
    *("GPU is lost", "4294967295", "-1", "2 C</gpu_temp><gpu_temp>3 C", "&amp;", "<x/>", "1 C\n"),
    *("</gpu><gpu id='0'>", "GPU-00000000-0000-0000-0000-000000000001", "1650522003999", "Yes"),
)
_PROCESS = (
    "<process_info><pid>{}</pid><type>C</type><process_name>{}</process_name>"
    "<used_memory>9 MiB</used_memory></process_info>"
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_the_lines_tell_is_what_the_whole_xml_tells(data: st.DataObject) -> None:
    name, driver = data.draw(st.sampled_from(list(combinations())))
    text = node(name, driver).smi.text
    nvidia._by_block(text)
    for _ in range(data.draw(st.integers(1, 6))):
        lines = text.split("\n")
        at = data.draw(st.integers(0, len(lines) - 1))
        leaf = re.fullmatch(r"(\s*<(\w+)>)[^<]*(</\2>)", lines[at])
        step = data.draw(st.sampled_from(("value", "value", "value", "drop", "twice", "process")))
        if step == "value" and leaf:
            value = data.draw(st.sampled_from(_VALUES))
            lines[at] = f"{leaf[1]}{value}{leaf[3]}"
        elif step == "drop":
            del lines[at]
        elif step == "twice":
            lines.insert(at, lines[at])
        elif step == "process":
            inside = data.draw(
                st.sampled_from(("python", "a<b", "</process_name>", "&", "x</gpu>"))
            )
            made = _PROCESS.format(data.draw(st.sampled_from(("7", "", "x"))), inside)
            lines = "\n".join(lines).replace("<processes>", f"<processes>{made}", 1).split("\n")
        text = "\n".join(lines)
        by_lines = nvidia._by_block(text)
        assert by_lines is None or by_lines == nvidia._whole(text)

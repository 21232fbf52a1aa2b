"""One NVIDIA GPU: the fields of a ``<gpu>`` in the output of ``nvidia-smi -q -x``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from nodeready.subjects.gpus.gpu import Gpu, GpuProcess, pci_address
from nodeready.subjects.gpus.nvidia_xml import (
    ABSENT,
    ACTIVE,
    ANY_DRIVER,
    BROKEN,
    DEGREES,
    DEGREES_LEFT,
    ERRORS,
    GENERATIONS,
    LANES,
    SWITCH,
    YES,
    Element,
    count,
    number,
    own_elements,
    plain_word,
)

_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")

_MAX_PROCESSES = 1024

#: The first major versions of the driver whose every answer has these parts, by recordings of 470
#: (MIG alone), 515 (rows) and 535 (fabric, reset).
_MIG, _ROWS, _FABRIC = 450, 515, 535
#: Whether the node is a virtual machine, by the words of its virtualization mode.
_VIRTUAL = {
    "none": False,
    "host vgpu": False,
    "host vsga": False,
    "pass-through": True,
    "vgpu": True,
    "vsga": True,
}

_COMPUTE_MODES = {
    name: name for name in ("default", "exclusive_process", "exclusive_thread", "prohibited")
}
_FABRIC_STATES = {name: name for name in ("completed", "in progress", "not started")}
_PAGES = [
    f"retired_pages/{kind}_bit_retirement/retired_count" for kind in ("multiple_single", "double")
]
#: Banks of memory without a spare row, and groups of banks without a spare bank.
_SPARELESS = [
    f"remapped_{kind}s/{kind}_remapper_histogram/{kind}_remapper_histogram_none"
    for kind in ("row", "bank")
]
#: The health of a GPU's attachment to its NVLink fabric (nvmlGpuFabricInfo_v3_t): element -> word
#: -> the fault, or "". NVML's constants name the conditions.
_HEALTH: Mapping[str, Mapping[str, str]] = {
    "summary": {
        "healthy": "",
        "unhealthy": "unhealthy",
        "degraded": "degraded",
        "limited capacity": "limited capacity",
    },
    "bandwidth": {"full": "", "degraded": "bandwidth degraded"},
    "route_unhealthy": {"false": "", "true": "route unhealthy"},
    "route_recovery_in_progress": {"false": "", "true": "route recovery in progress"},
    "access_timeout_recovery": {"false": "", "true": "access timeout recovery"},
    "incorrect_configuration": {"none": ""},
    "partition_assigned": {"true": "", "false": "no partition assigned"},
    "gfm_state": {"connected": "", "disconnected": "global fabric manager disconnected"},
}


def _faults(gpu: Element) -> tuple[str, ...]:
    """The faults of the GPU's attachment to its fabric; an unknown word is unread."""
    faults = []
    for name, words in _HEALTH.items():

        def parse(text: str, name: str = name, words: Mapping[str, str] = words) -> str | None:
            plain = plain_word(text)
            if name == "incorrect_configuration" and plain not in (*words, *ERRORS):
                return f"incorrect configuration: {text.lower()}"
            return words.get(plain)

        text = gpu.read("fabric_faults", parse, f"fabric/health/{name}", since=ANY_DRIVER)
        faults += [text[:80]] if text else []
    return tuple(faults)


_PERFORMANCE_STATES = {f"P{level}": f"P{level}" for level in range(16)}


def _throttle(gpu: Element) -> tuple[tuple[str, ...], bool | None, bool | None]:
    """The active reasons for a slow-down, whether there is one, and whether the GPU is idle."""
    active = {}
    for name in ("gpu_idle", *_REASONS):
        paths = [
            f"clocks_{kind}_reasons/clocks_{kind}_reason_{name}" for kind in ("event", "throttle")
        ]
        field = "idle" if name == "gpu_idle" else "throttle"
        active[name] = gpu.word(field, ACTIVE, *paths)
    reasons = tuple(name for name in _REASONS if active[name])
    is_shown = any(active[name] is not None for name in _REASONS)
    return reasons, bool(reasons) if is_shown else None, active["gpu_idle"]


def _slowdown(gpu: Element, current: int | None, degrees_left: int | None) -> int | None:
    """The temperature at which the GPU slows down.

    Ada and later print no such temperature. They print the degrees left to the limit, and the
    degrees left at which the slow-down begins, usually -2 (T.Limit; nvidia-smi(1)).
    """
    limit = "temperature/gpu_temp_slow_threshold"
    left_at_limit = "temperature/gpu_temp_slow_tlimit_threshold"
    name = "temperature_slowdown_c"
    if gpu.node.find(limit) is not None or gpu.node.find(left_at_limit) is None:
        return gpu.number(name, limit, among=DEGREES)
    begins = gpu.number(name, left_at_limit, among=DEGREES_LEFT)
    if degrees_left is None and gpu.node.find("temperature/gpu_temp_tlimit") is None:
        gpu.note_unread(name, "gpu_temp_tlimit", "not shown")
    if current is None or degrees_left is None or begins is None:
        return None
    return current + degrees_left - begins


def _recovery(gpu: Element) -> str | None:
    """The driver's recovery action: v13 names it, v12 tells whether a reset is needed."""
    if gpu.node.find("gpu_recovery_action") is not None:
        action = gpu.read(
            "recovery",
            lambda text: None if plain_word(text) in ERRORS else plain_word(text),
            "gpu_recovery_action",
        )
        return None if action is None else action.replace("gpu ", "")[:40]
    reset, drain = (
        gpu.word("recovery", YES, f"gpu_reset_status/{name}", since=_FABRIC)
        for name in ("reset_required", "drain_and_reset_recommended")
    )
    if reset:
        return "reset"
    return "drain and reset" if drain else None if reset is None else "none"


def _recovery_by_error(gpu: Element) -> str | None:
    """The action for a GPU with an error in place of its values (nvmlErrorString), or None."""
    words = {plain_word(node.text or "") for node in own_elements(gpu.node)}
    if "gpu is lost" in words:
        return "reboot"
    return "reset" if words & {"gpu requires reset", "reset required"} else None


def parse_processes(gpu: Element) -> Iterator[GpuProcess]:
    process_list = gpu.node.find("processes")
    if process_list is None:
        gpu.note_unread("processes", "processes", "not shown")
    elif not len(process_list):
        text = process_list.text or ""
        if plain_word(text) not in ("", "none", *ABSENT):
            gpu.note_unread("processes", "processes", text)
    for index, node in enumerate(gpu.node.iterfind("processes/process_info")):
        process = Element(node)
        pid = process.read("pid", number, "pid", needed=True)
        if pid is None:
            gpu.note_unread("processes", "pid", node.findtext("pid") or "")
        elif index < _MAX_PROCESSES:
            name = " ".join((node.findtext("process_name") or "").split())[:200] or "?"
            memory = number((node.findtext("used_memory") or "").strip())
            yield GpuProcess(pid, name, memory, process.text("type", "process_type"))


def parse_name(text: str) -> str | None:
    is_name = re.search("[A-Za-z0-9]", text) and plain_word(text) not in (*ERRORS, "none")
    return text[:200] if is_name else None


def _status(gpu: Element) -> str | None:
    """The outcome of the registration at the fabric.

    A failed registration has an error's text as its value (nvmlErrorString).
    """
    joined = plain_word(gpu.node.findtext("fabric/state") or "") not in ("", *ABSENT, *ERRORS)

    def parse(text: str) -> str | None:
        return None if not joined and plain_word(text) in ERRORS else text.lower()[:80]

    return gpu.read("fabric_status", parse, "fabric/status", since=_FABRIC)


def _uncorrectable(gpu: Element) -> int | None:
    """Uncorrectable errors of the GPU; in MIG mode also those of its instances."""
    name = "ecc_uncorrectable_volatile"
    gpu_errors = gpu.total(name, "ecc_errors/volatile", "uncorrectable", "double_bit")
    path = "ecc_error_count/volatile_count/sram_uncorrectable"
    parts = [count(instance.findtext(path) or "") or 0 for instance in gpu.node.iter("mig_device")]
    return gpu_errors if not any(parts) else max(gpu_errors or 0, sum(parts))


def _repairs(gpu: Element) -> bool | None:
    """Whether a repair waits for a reset: of a memory channel, a TPC or (Rubin) a bank."""
    parts = [f"ecc_errors/{part}_repair_pending" for part in ("channel", "tpc")]
    repairs = gpu.any("repair_pending", *parts, since=ANY_DRIVER)
    banks = gpu.word(
        "repair_pending", YES, "remapped_banks/bank_remapper_pending", since=ANY_DRIVER
    )
    return True if banks else repairs


def parse_gpu(index: int, gpu: Element) -> Gpu | None:
    """One ``<gpu>``; None when it has no PCI address."""
    address = pci_address(gpu.node.get("id", "")) or pci_address(gpu.text("pci/pci_bus_id") or "")
    if address is None:
        return None
    width, generation = "pci/pci_gpu_link_info/link_widths", "pci/pci_gpu_link_info/pcie_gen"
    throttle, throttled, idle = _throttle(gpu)
    current = gpu.number("temperature_c", "temperature/gpu_temp", among=DEGREES)
    degrees_left = None
    if gpu.node.find("temperature/gpu_temp_tlimit") is not None:
        degrees_left = gpu.number(
            "temperature_left_c", "temperature/gpu_temp_tlimit", among=DEGREES_LEFT
        )
    virtual = gpu.word("virtual", _VIRTUAL, "gpu_virtualization_mode/virtualization_mode")
    clique = gpu.read("fabric_clique", parse_name, "fabric/cliqueId", since=ANY_DRIVER)
    cluster = gpu.read("fabric_clique", parse_name, "fabric/clusterUuid", since=ANY_DRIVER)
    power = "gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit"
    parsed_gpu = Gpu(
        index=index,
        vendor="nvidia",
        pci_address=address,
        recovery_named=gpu.node.find("gpu_recovery_action") is not None,
        model=gpu.read("model", parse_name, "product_name", needed=True),
        uuid=gpu.read("uuid", parse_name, "uuid", needed=True),
        serial=gpu.text("serial"),
        vbios=gpu.read("vbios", parse_name, "vbios_version"),
        memory_total_mb=number(gpu.text("fb_memory_usage/total") or ""),
        memory_used_mb=number(gpu.text("fb_memory_usage/used") or ""),
        ecc=gpu.word("ecc", SWITCH, "ecc_mode/current_ecc"),
        ecc_pending=gpu.word("ecc_pending", SWITCH, "ecc_mode/pending_ecc"),
        ecc_uncorrectable_volatile=_uncorrectable(gpu),
        ecc_uncorrectable_aggregate=gpu.total(
            "tool aggregate", "ecc_errors/aggregate", "uncorrectable", "double_bit"
        ),
        ecc_correctable_volatile=gpu.total(
            "tool correctable", "ecc_errors/volatile", "correctable", "single_bit"
        ),
        remap_pending=gpu.word(
            "remap_pending", YES, "remapped_rows/remapped_row_pending", since=_ROWS
        ),
        remap_failed=gpu.word(
            "remap_failed", YES, "remapped_rows/remapped_row_failure", since=_ROWS
        ),
        remapped_uncorrectable=number(gpu.text("remapped_rows/remapped_row_unc") or ""),
        retired_pending=gpu.any(
            "retired_pending",
            "retired_pages/pending_retirement",
            "retired_pages/pending_blacklist",
        ),
        pcie_generation=gpu.number(
            "pcie_generation", f"{generation}/current_link_gen", among=GENERATIONS
        ),
        pcie_generation_max=gpu.number(
            "pcie_generation_max", f"{generation}/max_link_gen", among=GENERATIONS
        ),
        pcie_width=gpu.number("pcie_width", f"{width}/current_link_width", among=LANES),
        pcie_width_max=gpu.number("pcie_width_max", f"{width}/max_link_width", among=LANES),
        throttle=throttle,
        throttled=throttled,
        temperature_c=current,
        temperature_left_c=degrees_left,
        temperature_slowdown_c=_slowdown(gpu, current, degrees_left),
        memory_temperature_c=gpu.number(
            "memory_temperature_c", "temperature/memory_temp", among=DEGREES
        ),
        persistence=gpu.word("persistence", SWITCH, "persistence_mode"),
        mig=gpu.word("mig", SWITCH, "mig_mode/current_mig", since=_MIG),
        processes=tuple(parse_processes(gpu)),
        performance_state=gpu.read(
            "performance_state", _PERFORMANCE_STATES.get, "performance_state"
        ),
        idle=idle,
        virtual=bool(virtual),
        memory_temperature_max_c=gpu.number(
            "memory_temperature_c",
            "temperature/gpu_temp_max_mem_threshold",
            since=ANY_DRIVER,
            among=DEGREES,
        ),
        mig_pending=gpu.word("mig_pending", SWITCH, "mig_mode/pending_mig", since=_MIG),
        repair_pending=_repairs(gpu),
        recovery=_recovery(gpu),
        fabric_state=gpu.word("fabric_state", _FABRIC_STATES, "fabric/state", since=_FABRIC),
        fabric_status=_status(gpu),
        fabric_faults=_faults(gpu),
        fabric_clique=None if clique is None else f"{clique} of {cluster}",
        peer=(gpu.text("platformInfo/peer_type") or "").lower() or None,
        sram_exceeded=gpu.word(
            "sram_exceeded", YES, "ecc_errors/aggregate/sram_threshold_exceeded", since=ANY_DRIVER
        ),
        unrepairable=gpu.word(
            "unrepairable", YES, "ecc_errors/unrepairable_memory", since=ANY_DRIVER
        ),
        spareless_banks=gpu.sum("spareless_banks", _SPARELESS, since=ANY_DRIVER),
        retired_pages=gpu.sum("retired_pages", _PAGES, since=ANY_DRIVER),
        c2c=gpu.word("links", SWITCH, "c2c_mode", since=ANY_DRIVER),
        compute_mode=gpu.word("compute_mode", _COMPUTE_MODES, "compute_mode", since=ANY_DRIVER),
        power_limit_w=number(gpu.text(*power) or ""),
    )
    for name, current, maximum in (
        ("pcie_width_max", parsed_gpu.pcie_width, parsed_gpu.pcie_width_max),
        ("pcie_generation_max", parsed_gpu.pcie_generation, parsed_gpu.pcie_generation_max),
    ):
        if current and maximum == 0:
            gpu.note_unread(name, name, "0")
    # Errors in the place of values that no check reads: the driver is at fault.
    for node in own_elements(gpu.node):
        if node not in gpu.used and plain_word(node.text or "") in BROKEN:
            gpu.note_unread(f"tool {node.tag}", node.tag, node.text or "")
    return replace(
        parsed_gpu,
        recovery=_recovery_by_error(gpu) or parsed_gpu.recovery,
        unread=tuple(gpu.unread.items()),
    )

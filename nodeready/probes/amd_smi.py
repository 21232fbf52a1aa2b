"""amd-smi's JSON: ``static``, ``metric`` and ``xgmi``.

Formats: ROCm/amdsmi, amdsmi_cli/amdsmi_commands.py, versions 23 to 26. The first two print a list
of devices, or since ROCm 6.4 ``{"gpu_data": […]}``; ``xgmi`` prints two documents one after the
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nodeready.probes import amd_values as values
from nodeready.probes.amd_values import Json, entries, text, whole
from nodeready.probes.gpu import Gpu, Link
from nodeready.probes.instinct import MODELS
from nodeready.probes.kfd import Kfd, idle

# What amd-smi calls a violation, and the hardware's reason that every vendor's tool knows. Power
# (ppt) is not one: under load, a GPU is meant to run at its limit.
_THROTTLE = (
    ("prochot_violation_status", "hw_slowdown"),
    ("socket_thermal_violation_status", "hw_thermal_slowdown"),
    ("vr_thermal_violation_status", "hw_thermal_slowdown"),
    ("hbm_thermal_violation_status", "hw_thermal_slowdown"),
)
_XGMI = {"NO_ERRORS": 0, "ERROR": 1, "MULTIPLE_ERRORS": 2}


@dataclass(frozen=True)
class AmdGpu(Gpu):
    """One AMD device, with what only AMD's tools say.

    xgmi_errors:  errors of the links between GPUs: the uncorrectable ones that RAS counts, or
                  what the status of the links says (1, or 2 for several), which MI300 has not
    ecc_deferred: uncorrectable errors in data that nobody has used so far
    """

    xgmi_errors: int | None = None
    ecc_deferred: int | None = None


def _throttle(metric: Json) -> tuple[str, ...]:
    """The hardware's reasons for a lower clock that are active now."""
    seen = metric.get("throttle")
    if not isinstance(seen, dict):
        return ()
    active = [reason for key, reason in _THROTTLE if text(seen.get(key)) in ("ACTIVE", "True")]
    return tuple(dict.fromkeys(active))


def _ecc(static: Json, instinct: bool) -> str | None:
    """Whether memory has ECC: RAS of the memory controller. None: a board that has none at all."""
    state = values.at(static, "ras", "ecc_block_state")
    if not isinstance(state, dict) or "UMC" not in state:
        return None
    if text(state["UMC"]) == "ENABLED":
        return "on"
    any_block = any(text(value) == "ENABLED" for value in state.values())
    return "off" if any_block or instinct else None


def _xgmi_errors(metric: Json) -> int | None:
    """Errors of its links; None where nobody counts them."""
    counted = whole(values.at(metric, "ecc_blocks", "XGMI_WAFL", "uncorrectable_count"))
    said = (text(metric.get("xgmi_err")) or "").replace("AMDSMI_XGMI_STATUS_", "")
    status = _XGMI.get(said)
    known = [count for count in (counted, status) if count is not None]
    return max(known) if known else None


def _links(printed: str) -> dict[str, tuple[Link, ...]]:
    """The links of each device, by its address. X is one that is not there (to itself)."""
    states = {"U": "active", "D": "inactive"}
    found = {}
    for entry in entries(printed):
        status = entry.get("link_status")
        if isinstance(status, list):
            found[values.address(entry.get("bdf"))] = tuple(
                Link(index, states[word])
                for index, word in enumerate(status[:64])
                if isinstance(word, str) and word in states
            )
    return found


def _temperature(limits: Json, metric: Json, kind: str) -> tuple[int | None, int | None]:
    """Degrees of one sensor, and those at which it slows the GPU down."""
    seen = values.degrees(values.at(metric, "temperature", kind))
    return seen, values.degrees(limits.get(f"slowdown_{kind}_temperature"))


def _gpu(static: Json, metric: Json, more: Kfd, links: Mapping[str, Any]) -> AmdGpu:
    """One device of amd-smi."""
    asic, bus = values.table(static, "asic"), values.table(static, "bus")
    vbios = values.table(static, "vbios") or values.table(static, "ifwi")
    limits, ecc = values.table(static, "limit"), values.table(metric, "ecc")
    pcie, memory = values.table(metric, "pcie"), values.table(metric, "mem_usage")
    address = values.address(bus.get("bdf"))
    temperature, slowdown = _temperature(limits, metric, "hotspot")
    if temperature is None:
        temperature, slowdown = _temperature(limits, metric, "edge")
    total = values.megabytes(memory.get("total_vram"))
    if total is None:
        total = values.megabytes(values.at(static, "vram", "size"))
    device = (text(asic.get("device_id")) or "").lower()
    return AmdGpu(
        index=whole(static.get("gpu")) or 0,
        vendor="amd",
        pci_address=address,
        model=text(asic.get("market_name")),
        uuid=text(asic.get("asic_serial")),
        serial=text(values.at(static, "board", "product_serial")),
        vbios=text(vbios.get("part_number")) or text(vbios.get("version")),
        memory_total_mb=total,
        memory_used_mb=values.megabytes(memory.get("used_vram")),
        ecc=_ecc(static, device in MODELS),
        ecc_uncorrectable_volatile=whole(
            ecc.get("total_uncorrectable_count", ecc.get("total_uncorrectable"))
        ),
        ecc_correctable_volatile=whole(
            ecc.get("total_correctable_count", ecc.get("total_correctable"))
        ),
        ecc_deferred=whole(ecc.get("total_deferred_count", ecc.get("total_deferred"))),
        retired_pending=more.unreserved.get(address),
        pcie_generation=values.generation(pcie.get("speed", pcie.get("current_speed"))),
        pcie_generation_max=values.generation(bus.get("max_pcie_speed")),
        pcie_width=whole(pcie.get("width", pcie.get("current_lanes"))) or None,
        pcie_width_max=whole(bus.get("max_pcie_width")) or None,
        throttle=_throttle(metric),
        temperature_c=temperature,
        temperature_slowdown_c=slowdown,
        memory_temperature_c=values.degrees(values.at(metric, "temperature", "mem")),
        processes=more.processes.get(address, ()),
        idle=idle(more, address),
        links=links.get(address, ()),
        xgmi_errors=_xgmi_errors(metric),
        virtual=device in MODELS and MODELS[device].virtual,
    )


def parse(static: str, metric: str, xgmi: str, more: Kfd) -> Iterator[AmdGpu]:
    """The devices; of a GPU that is partitioned, the first one stands for it."""
    metrics = {whole(entry.get("gpu")): entry for entry in entries(metric)}
    links = _links(xgmi)
    seen = set()
    for entry in entries(static):
        gpu = _gpu(entry, metrics.get(whole(entry.get("gpu")), {}), more, links)
        if gpu.pci_address in seen or whole(values.at(entry, "partition", "partition_id")):
            continue
        seen.add(gpu.pci_address)
        yield gpu

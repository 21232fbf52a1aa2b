"""AMD's GPUs as amd-smi shows them: ``static``, ``metric`` and ``xgmi``.

Formats: ROCm/amdsmi, amdsmi_cli/amdsmi_commands.py, versions 23 to 26. The first two print a
list of devices, or since ROCm 6.4 ``{"gpu_data": […]}``; ``xgmi`` prints two documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nodeready.subjects.gpus.amd_gpu import (
    AmdGpu,
    hottest_sensor,
    is_server_board,
    partition_modes,
    performance_level,
    unread_fields,
)
from nodeready.subjects.gpus.amd_json import (
    Json,
    Reader,
    address,
    count,
    degrees,
    entries,
    error,
    generation,
    lanes,
    limit,
    megabytes,
    number,
    parse_name,
    text,
    value_at,
    whole_number,
)
from nodeready.subjects.gpus.gpu import Gpu, GpuLink
from nodeready.subjects.gpus.kfd import Kfd, idle
from nodeready.subjects.iommu.instincts import MODELS

# amd-smi's violation -> the reason for a lower clock, as `Gpu.throttle` names it. Power (ppt) is
# left out: under load, a GPU is meant to run at its power limit.
_THROTTLE = (
    ("prochot_violation_status", "hw_slowdown"),
    ("socket_thermal_violation_status", "hw_thermal_slowdown"),
    ("vr_thermal_violation_status", "hw_thermal_slowdown"),
    ("hbm_thermal_violation_status", "hw_thermal_slowdown"),
)

_XGMI = {"NO_ERRORS": 0, "ERROR": 1, "MULTIPLE_ERRORS": 2}


def throttle_reasons(entry: Json) -> tuple[str, ...]:
    """The active reasons for a lower clock, of one device's ``metric``."""
    return _throttle(Reader(entry))[0] + performance_level(entry.get("perf_level"))


def _throttle(reader: Reader) -> tuple[tuple[str, ...], bool | None]:
    """The active reasons for a lower clock, and whether there is one; None: not all are shown."""
    active, readable_count = [], 0
    for key, reason in _THROTTLE:
        value = reader.raw(f"throttle/{key}")
        word = (text(value) or "").upper().replace("_", " ")
        if word in ("ACTIVE", "TRUE", "1", "NOT ACTIVE", "FALSE", "0"):
            readable_count += 1
            active += [reason] if word in ("ACTIVE", "TRUE", "1") else []
            continue
        reader.note_error("throttle", value)
        # The part of the last moments in which the reason was active.
        share = number(reader.raw(f"throttle/{key.replace('_status', '_activity')}"))
        readable_count += share is not None
        active += [reason] if share else []
    reasons = tuple(dict.fromkeys(active))
    return reasons, bool(reasons) if readable_count == len(_THROTTLE) or reasons else None


#: Enabled, or the kind of error that the block has counted: amdsmi_ras_err_state_t.
_ON = ("ENABLED", "PARITY", "SING_C", "MULT_UC", "POISON")


def _ecc(reader: Reader, instinct: bool) -> str | None:
    """Whether memory has ECC, by the RAS of the memory controller; None: a board without RAS.

    The blocks are a dictionary, or in version 23 a list of ``{"block": …, "status": …}``.
    """
    state: Json | None = None
    for path in (("ras", "ecc_block_state"), ("ras",)):
        blocks = value_at(reader.entries[0], *path)
        if isinstance(blocks, list):
            blocks = {
                str(item.get("block")): item.get("status")
                for item in blocks
                if isinstance(item, dict)
            }
        if isinstance(blocks, dict) and "UMC" in blocks:
            state = blocks
            break
        if isinstance(blocks, str):
            reader.note_error("ecc", blocks)
    if state is None:
        return None
    word = text(state["UMC"])
    if word in _ON:
        return "on"
    if word != "DISABLED":
        reader.note_error("ecc", state["UMC"])
        return None
    any_block = any(text(value) == "ENABLED" for value in state.values())
    return "off" if any_block or instinct else None


def _blocks(metric: Json, word: str) -> int | None:
    """The sum of the counts of the device's blocks; None where no block counts."""
    tables = (metric.get(name) for name in ("ecc_blocks", "ecc_block"))
    blocks: Json = next((table for table in tables if isinstance(table, dict) and table), {})
    counts = [
        error_count
        for block in blocks.values()
        if isinstance(block, dict)
        and (error_count := count(block.get(f"{word}_count", block.get(word)))) is not None
    ]
    return sum(counts) if counts else None


def _errors(reader: Reader, metric: Json, word: str, instinct: bool) -> int | None:
    """The errors of this kind: the device's total, or the sum of its blocks where it is higher.

    Radeon boards count errors that never were: all ones in registers of 16 bits.
    """
    paths = (f"total_{word}_count", f"total_{word}", f"{word}_count", word)
    total = reader.get(f"ecc_{word}", count, *(f"ecc/{path}" for path in paths))
    blocks = _blocks(metric, word)
    counts = [error_count for error_count in (total, blocks) if error_count is not None]
    error_count = max(counts) if counts else None
    return None if error_count and not instinct and error_count % 65535 == 0 else error_count


def _xgmi_errors(reader: Reader) -> int | None:
    """Errors of the device's links; None where neither RAS nor the status counts them."""
    error_count = reader.get(
        "xgmi_errors",
        count,
        "ecc_blocks/XGMI_WAFL/uncorrectable_count",
        "ecc_block/XGMI_WAFL/uncorrectable",
    )
    raw = reader.raw("xgmi_err")
    word = (text(raw) or "").replace("AMDSMI_XGMI_STATUS_", "")
    status = _XGMI.get(word)
    if status is None and number(raw) in (0, 1, 2):
        status = whole_number(raw)
    if status is None:
        reader.note_error("xgmi_errors", raw)
    counts = [errors for errors in (error_count, status) if errors is not None]
    return max(counts) if counts else None


def _links(printed: str) -> dict[str, tuple[GpuLink, ...]]:
    """PCI address -> the links of that device. X (a device to itself) is no link.

    The state of a link with an error's text is unknown.
    """
    states = {"U": "active", "D": "inactive"}
    links_by_address = {}
    for entry in entries(printed):
        status = entry.get("link_status")
        if isinstance(status, list):
            links_by_address[address(entry.get("bdf"))] = tuple(
                GpuLink(index, states.get(word, "unknown"))
                for index, word in enumerate(status[:64])
                if isinstance(word, str) and word != "X" and (word in states or error(word))
            )
        elif error(status):
            links_by_address[address(entry.get("bdf"))] = (GpuLink(0, "unknown"),)
    return links_by_address


def _unread_links(gpu: Gpu) -> str:
    """The links whose states the tool could not read, in words."""
    links = [str(link.index) for link in gpu.links if link.state == "unknown"]
    return f"no state of the links {', '.join(links)}" if links else ""


def _sensor(reader: Reader, kind: str, old: str) -> tuple[int | None, int | None]:
    """The degrees of one sensor of amd-smi, and the degrees at which it slows the GPU down.

    old: the sensor's name in the limits of version 23
    """
    field = "memory_temperature_c" if kind == "mem" else "temperature_c"
    name = "vram" if kind == "mem" else kind
    return (
        reader.get(field, degrees, f"temperature/{kind}", f"temperature/{kind}_temperature"),
        reader.get(
            field.replace("_c", "_limit"),
            limit,
            f"limit/slowdown_{name}_temperature",
            f"limit/temperature_{old}",
        ),
    )


def _gpu(static: Json, metric: Json, kfd: Kfd, links: Mapping[str, Any]) -> AmdGpu:
    """One device of amd-smi."""
    reader = Reader(static, metric)
    pci_address = address(reader.raw("bus/bdf"))
    device = (text(reader.raw("asic/device_id")) or "").lower()
    instinct = is_server_board(device)
    temperature, slowdown = hottest_sensor(
        (_sensor(reader, "hotspot", "junction"), _sensor(reader, "edge", "edge"))
    )
    memory, memory_max = _sensor(reader, "mem", "vram")
    throttle, throttled = _throttle(reader)
    level = performance_level(reader.raw("perf_level"))
    width = reader.get(
        "pcie_width", lanes, *(f"pcie/{key}" for key in ("width", "current_lanes", "pcie_lanes"))
    )
    speed = reader.get(
        "pcie_generation",
        generation,
        *(f"pcie/{key}" for key in ("speed", "current_speed", "pcie_speed")),
    )
    return AmdGpu(
        index=whole_number(static.get("gpu")) or 0,
        vendor="amd",
        pci_address=pci_address,
        model=reader.get("model", parse_name, "asic/market_name"),
        uuid=text(reader.raw("asic/asic_serial")),
        serial=text(reader.raw("board/product_serial")),
        vbios=reader.get(
            "vbios",
            parse_name,
            *(f"{chip}/{key}" for chip in ("vbios", "ifwi") for key in ("part_number", "version")),
        ),
        memory_total_mb=reader.get(
            "memory_total_mb", megabytes, "mem_usage/total_vram", "mem_usage/vram", "vram/size"
        ),
        memory_used_mb=reader.get("memory_used_mb", megabytes, "mem_usage/used_vram"),
        ecc=_ecc(reader, instinct),
        ecc_uncorrectable_volatile=_errors(reader, metric, "uncorrectable", instinct),
        ecc_correctable_volatile=_errors(reader, metric, "correctable", instinct),
        ecc_deferred=_errors(reader, metric, "deferred", instinct),
        retired_pending=kfd.unreserved.get(pci_address),
        pcie_generation=speed,
        pcie_generation_max=reader.get(
            "pcie_generation_max", generation, "bus/max_pcie_speed", "bus/pcie_speed"
        ),
        pcie_width=width,
        pcie_width_max=reader.get(
            "pcie_width_max",
            lanes,
            *(f"bus/{key}" for key in ("max_pcie_width", "max_pcie_lanes", "pcie_lanes")),
        ),
        throttle=throttle + level,
        throttled=True if level else throttled,
        temperature_c=temperature,
        temperature_slowdown_c=slowdown,
        memory_temperature_c=memory,
        memory_temperature_max_c=memory_max,
        processes=kfd.processes.get(pci_address, ()),
        idle=idle(kfd, pci_address),
        links=links.get(pci_address, ()),
        xgmi_errors=_xgmi_errors(reader),
        partition=partition_modes(reader),
        power_limit_w=reader.get(
            "power_limit_w",
            whole_number,
            "limit/socket_power",
            "limit/current_power",
            "limit/power",
        ),
        virtual=device in MODELS and MODELS[device].virtual,
        unread=unread_fields(reader),
    )


def parse_amd_smi(
    static: str, metric: str, xgmi: str, kfd: Kfd, links_error: str = ""
) -> Iterator[AmdGpu]:
    """The devices; the first partition represents a partitioned GPU.

    links_error: why the tool could not read the links
    """
    metrics = {whole_number(entry.get("gpu")): entry for entry in entries(metric)}
    links = _links(xgmi)
    addresses = set()
    for entry in entries(static):
        gpu = _gpu(entry, metrics.get(whole_number(entry.get("gpu")), {}), kfd, links)
        later_partition = whole_number(value_at(entry, "partition", "partition_id"))
        if gpu.pci_address in addresses or later_partition:
            continue
        addresses.add(gpu.pci_address)
        if reason := links_error or _unread_links(gpu):
            gpu = replace(gpu, unread=(*gpu.unread, ("links", reason)))
        yield gpu

"""One GPU of AMD's, and the values that amd-smi and rocm-smi share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from nodeready.subjects.gpus.amd_json import Reader, text
from nodeready.subjects.gpus.gpu import Gpu, PciGpu
from nodeready.subjects.iommu.instincts import MODELS


@dataclass(frozen=True)
class AmdGpu(Gpu):
    """One AMD device, with the values that only AMD's tools print."""

    # errors of the links between GPUs: the uncorrectable ones that RAS counts, or the status of
    # the links (1: an error, 2: several), which MI300 does not have
    xgmi_errors: int | None = None
    ecc_deferred: int | None = None  # uncorrectable errors in data that no program has read yet
    # how the device is divided: ``SPX/NPS1`` is one GPU with one memory
    partition: str | None = None


#: Performance levels at which the GPU stays at its lowest clocks (Linux' amdgpu_pm.c).
_LOW = ("LOW", "PROFILE_MIN_SCLK", "PROFILE_MIN_MCLK", "STABLE_MIN_SCLK", "STABLE_MIN_MCLK")


def performance_level(value: Any) -> tuple[str, ...]:
    """The reason for a lower clock that an administrator has set, or none."""
    name = (text(value) or "").upper().replace("AMDSMI_DEV_PERF_LEVEL_", "")
    return (f"performance level {name.lower()}",) if name in _LOW else ()


def hottest_sensor(
    sensors: Iterable[tuple[int | None, int | None]],
) -> tuple[int | None, int | None]:
    """The degrees of one sensor, and the degrees at which the GPU slows down for that sensor.

    The first sensor at its limit; else the first with a limit; else the first with a reading.
    """
    readings = [(degrees, limit) for degrees, limit in sensors if degrees is not None]
    limited = [(degrees, limit) for degrees, limit in readings if limit is not None]
    hot = [(degrees, limit) for degrees, limit in limited if degrees >= limit]
    return next(iter(hot or limited or readings), (None, None))


def partition_modes(reader: Reader) -> str | None:
    """``SPX/NPS1``: how compute units and memory are divided."""
    compute = reader.raw(
        "partition/accelerator_partition", "partition/compute_partition", "compute partition"
    )
    memory = reader.raw("partition/memory_partition", "memory partition")
    words = [text(value) or "" for value in (compute, memory)]
    return "/".join(word for word in words if re.fullmatch("[A-Z]{2,4}[0-9]?", word)) or None


#: Boards of the years before the list of Instincts: MI50 and MI60 (pci.ids).
_OLDER = ("0x66a0", "0x66a1")


def is_server_board(device: str) -> bool:
    """Whether this device (``0x74a1``) is a board for servers: RAS counts, and all its lanes."""
    return device in MODELS or device in _OLDER


#: Name of a value that is read -> the field of `Gpu` whose verdict it decides.
_FIELDS = {
    "ecc_uncorrectable": "ecc_uncorrectable_volatile",
    "ecc_correctable": "tool correctable",
    "memory_total_mb": "tool memory",
    "memory_used_mb": "tool memory",
    "power_limit_w": "tool power limit",
    "temperature_limit": "temperature_slowdown_c",
    "memory_temperature_limit": "memory_temperature_c",
}


def unread_fields(reader: Reader) -> tuple[tuple[str, str], ...]:
    """The values that the tool could not read, by the fields of `Gpu`."""
    return tuple(dict.fromkeys((_FIELDS.get(name, name), words) for name, words in reader.unread))


#: How the device ids of a processor's own graphics begin (Linux' amdgpu_drv.c, AMD_IS_APU). The
#: MI300A is a processor, too, and an accelerator.
_INTEGRATED = ("11", "13", "15", "16", "19", "98")


def is_integrated(device: str) -> bool:
    """Whether this PCI device (four hex digits) is the graphics of a processor."""
    return device[:2] in _INTEGRATED and f"0x{device}" not in MODELS


def accelerators(gpus: Iterable[AmdGpu], bus: Iterable[PciGpu]) -> tuple[AmdGpu, ...]:
    """The accelerators among the GPUs, with the lanes that the PCI bus shows.

    The graphics of a processor are no accelerator. rocm-smi prints no maximum of lanes, and no
    tool shows a link behind the GPU that has lost lanes: the smaller number of bus and tool
    counts. A Radeon lowers its lanes when it is idle, and has a link inside of the board: its
    numbers of lanes are not judged.
    """
    bus_gpus = {bus_gpu.address: bus_gpu for bus_gpu in bus}
    accelerator_gpus = []
    for gpu in gpus:
        bus_gpu = bus_gpus.get(gpu.pci_address)
        if bus_gpu is None:
            accelerator_gpus.append(gpu)
        elif not is_integrated(bus_gpu.device):
            accelerator_gpus.append(_with_bus_width(gpu, bus_gpu))
    return tuple(accelerator_gpus)


def _with_bus_width(gpu: AmdGpu, bus_gpu: PciGpu) -> AmdGpu:
    if not is_server_board(f"0x{bus_gpu.device}"):
        return replace(gpu, pcie_width_max=None, pcie_generation_max=None)
    width_max = gpu.pcie_width_max or bus_gpu.pcie_width_max
    widths = [width for width in (gpu.pcie_width, bus_gpu.pcie_width) if width is not None]
    return replace(gpu, pcie_width=min(widths, default=None), pcie_width_max=width_max)

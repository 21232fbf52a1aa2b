"""AMD's GPUs as rocm-smi shows them, where the node has no amd-smi.

The keys differ in case between versions, and warnings stand before and after the JSON. Counts of
RAS come from sysfs: rocm-smi prints them only without ``--json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    Reader,
    address,
    degrees,
    documents,
    generation,
    lanes,
    number,
    parse_name,
    text,
    whole_number,
)
from nodeready.subjects.gpus.kfd import Kfd, idle


def cards(printed: str) -> dict[int, dict[str, Any]]:
    """Number -> that card of rocm-smi, with its keys in lower case."""
    cards_by_index: dict[int, dict[str, Any]] = {}
    for document in documents(printed):
        for name, card in document.items() if isinstance(document, dict) else ():
            match = re.fullmatch(r"card([0-9]{1,3})", name)
            if match and isinstance(card, dict):
                cards_by_index[int(match[1])] = {key.lower(): value for key, value in card.items()}
    return cards_by_index


def parse_rocm_smi(printed: str, kfd: Kfd) -> Iterator[AmdGpu]:
    """The devices in what rocm-smi printed."""
    for index, card in sorted(cards(printed).items()):
        reader = Reader(card)
        pci_address = address(card.get("pci bus"))
        link_text = reader.raw("pcie clock level")
        link = re.search(r"\(([0-9.]+)GT/s x([0-9]+)\)", text(link_text) or "")
        speed, width = (link[1], link[2]) if link else (None, None)
        if link is None:
            reader.note_error("pcie_width", link_text)
        else:
            if generation(speed) is None:
                reader.note_unreadable("pcie_generation", generation, speed)
            if lanes(width) is None:
                reader.note_unreadable("pcie_width", lanes, width)
        total = reader.get("memory_total_mb", number, "vram total memory (b)")
        used = reader.get("memory_used_mb", number, "vram total used memory (b)")
        # ROCm 5 calls the device's id "GPU ID"; since ROCm 6 this is another number.
        device = (text(reader.raw("device id", "gpu id")) or "").lower()
        instinct = is_server_board(device)
        # Radeon boards count millions of errors that never happened.
        ras = kfd.ras.get(pci_address) if instinct else None
        limits = kfd.limits.get(pci_address, {})
        junction, edge, memory = (
            reader.get(field, degrees, f"temperature (sensor {kind}) (c)")
            for field, kind in (
                ("temperature_c", "junction"),
                ("temperature_c", "edge"),
                ("memory_temperature_c", "memory"),
            )
        )
        temperature, slowdown = hottest_sensor(
            ((junction, limits.get("junction")), (edge, limits.get("edge")))
        )
        level = performance_level(reader.raw("performance level"))
        yield AmdGpu(
            index=index,
            vendor="amd",
            pci_address=pci_address,
            model=reader.get("model", parse_name, "card series", "device name"),
            uuid=text(card.get("unique id")),
            serial=text(card.get("serial number")),
            vbios=reader.get("vbios", parse_name, "vbios version"),
            memory_total_mb=None if total is None else int(total) >> 20,
            memory_used_mb=None if used is None else int(used) >> 20,
            ecc_uncorrectable_volatile=ras[0] if ras else None,
            ecc_correctable_volatile=ras[1] if ras else None,
            retired_pending=kfd.unreserved.get(pci_address),
            pcie_generation=generation(speed),
            pcie_width=lanes(width),
            throttle=level,
            throttled=True if level else None,
            temperature_c=temperature,
            temperature_slowdown_c=slowdown,
            memory_temperature_c=memory,
            memory_temperature_max_c=limits.get("mem"),
            processes=kfd.processes.get(pci_address, ()),
            idle=idle(kfd, pci_address),
            partition=partition_modes(reader),
            power_limit_w=reader.get(
                "power_limit_w", whole_number, "max graphics package power (w)"
            ),
            unread=unread_fields(reader),
        )

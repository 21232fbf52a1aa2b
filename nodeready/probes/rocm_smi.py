"""rocm-smi's JSON (ROCm/rocm_smi_lib).

Its keys differ in case between versions, and warnings stand before and after it. RAS counts come
from sysfs: it prints them only without ``--json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from nodeready.probes import amd_values as values
from nodeready.probes.amd_smi import AmdGpu
from nodeready.probes.amd_values import number, text, whole
from nodeready.probes.instinct import MODELS
from nodeready.probes.kfd import Kfd, idle


def cards(printed: str) -> dict[int, dict[str, Any]]:
    """The cards of rocm-smi by number, their keys in lower case."""
    found: dict[int, dict[str, Any]] = {}
    for document in values.documents(printed):
        for name, card in document.items() if isinstance(document, dict) else ():
            match = re.fullmatch(r"card([0-9]{1,3})", name)
            if match and isinstance(card, dict):
                found[int(match[1])] = {key.lower(): value for key, value in card.items()}
    return found


def parse(printed: str, more: Kfd) -> Iterator[AmdGpu]:
    """The devices."""
    for index, card in sorted(cards(printed).items()):
        address = values.address(card.get("pci bus"))
        link = re.search(r"\(([0-9.]+)GT/s x([0-9]+)\)", text(card.get("pcie clock level")) or "")
        total = number(card.get("vram total memory (b)"))
        used = number(card.get("vram total used memory (b)"))
        device = (text(card.get("device id")) or "").lower()
        # Radeon boards are known to count a million errors where there are none.
        ras = more.ras.get(address) if device in MODELS else None
        junction = values.degrees(card.get("temperature (sensor junction) (c)"))
        edge = values.degrees(card.get("temperature (sensor edge) (c)"))
        yield AmdGpu(
            index=index,
            vendor="amd",
            pci_address=address,
            model=text(card.get("card series")) or text(card.get("device name")),
            uuid=text(card.get("unique id")),
            serial=text(card.get("serial number")),
            vbios=text(card.get("vbios version")),
            memory_total_mb=None if total is None else int(total) >> 20,
            memory_used_mb=None if used is None else int(used) >> 20,
            ecc_uncorrectable_volatile=ras[0] if ras else None,
            ecc_correctable_volatile=ras[1] if ras else None,
            retired_pending=more.unreserved.get(address),
            pcie_generation=values.generation(link[1]) if link else None,
            pcie_width=whole(link[2]) if link else None,
            temperature_c=edge if junction is None else junction,
            memory_temperature_c=values.degrees(card.get("temperature (sensor memory) (c)")),
            processes=more.processes.get(address, ()),
            idle=idle(more, address),
        )

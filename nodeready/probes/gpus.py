"""The GPUs of a node: what the bus, the vendors' tools and the kernel's log say, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from nodeready.policy import Policy
from nodeready.probes import amd, kernel_log, nvidia, nvlink, pci_gpus
from nodeready.probes.base import Output, Probe
from nodeready.probes.gpu import Gpu, Gpus
from nodeready.probes.nvidia import NvidiaSmi
from nodeready.probes.pci_gpus import Pci


def _fabric_manager(pci: Pci, smi: NvidiaSmi) -> str:
    if not pci.nvswitches and not any(gpu.fabric_state for gpu in smi.gpus):
        return "not needed"
    if smi.fabric_manager is None:
        return "not looked for"
    return "running" if smi.fabric_manager else "not running"


def parse(outputs: Mapping[str, Output], policy: Policy) -> Gpus:
    """Raises ProbeError when the PCI bus could not be read; a tool that fails is a result."""
    pci = pci_gpus.parse(outputs[pci_gpus.SECTION.name])
    smi = nvidia.parse(outputs[nvidia.SECTION.name])
    links = nvlink.parse(outputs[nvlink.SECTION.name])
    amd_gpus, amd_tool, amd_driver = amd.parse_amd(outputs[amd.SECTION.name])
    faults, log = kernel_log.parse_kernel_log(outputs[kernel_log.SECTION.name])
    return Gpus(
        pci=pci.gpus,
        nvswitches=pci.nvswitches,
        nvidia=tuple(replace(gpu, links=links.links.get(gpu.uuid or "", ())) for gpu in smi.gpus),
        amd=amd_gpus,
        nvidia_tool=smi.tool,
        nvlink_tool=links.tool,
        amd_tool=amd_tool,
        driver=pci.driver or smi.driver,
        amd_driver=amd_driver,
        cuda=smi.cuda,
        fabric_manager=_fabric_manager(pci, smi),
        device_files=pci.device_files,
        kernel_faults=faults,
        kernel_log=log,
    )


def _several(gpus: Iterable[Gpu], value: Callable[[Gpu], Any]) -> str | None:
    """The different values, sorted; None when a GPU does not say its own."""
    found = [value(gpu) for gpu in gpus]
    if not found or None in found:
        return None
    return ", ".join(sorted({str(one) for one in found}))


def _links(gpu: Gpu) -> str | None:
    active = [link for link in gpu.links if link.state == "active"]
    if not active:
        return None
    speeds = sorted({link.speed_gbps for link in active if link.speed_gbps is not None})
    at = " at " + "/".join(f"{speed:g}" for speed in speeds) + " GB/s" if speeds else ""
    return f"{len(active)}{at}"


def compared(seen: Gpus) -> dict[str, str | int | float]:
    """What nodes of a group should have in common."""
    gpus = seen.gpus
    facts = {
        "driver": seen.driver,
        "amd_driver": seen.amd_driver,
        "cuda": seen.cuda,
        "count": len(gpus) or None,
        "on_bus": len(seen.pci) or None,
        "model": _several(gpus, lambda gpu: gpu.model),
        "vbios": _several(gpus, lambda gpu: gpu.vbios),
        "ecc": _several(gpus, lambda gpu: gpu.ecc),
        "mig": _several(gpus, lambda gpu: gpu.mig),
        "persistence": _several(gpus, lambda gpu: gpu.persistence),
        "pcie_width": _several(gpus, lambda gpu: gpu.pcie_width),
        "links": _several(gpus, _links),
    }
    return {name: value for name, value in facts.items() if value is not None}


def learned(seen: Gpus) -> dict[str, Any]:
    """The policy that this node would fit: what all of its GPUs agree on."""
    gpus = seen.gpus
    if not gpus:
        return {}
    settings: dict[str, Any] = {"gpu_count": len({gpu.pci_address for gpu in gpus})}
    drivers = {driver for driver in (seen.driver, seen.amd_driver) if driver}
    if len(drivers) == 1:
        settings["gpu_driver"] = drivers.pop()
    firmware = {gpu.vbios for gpu in gpus}
    if None not in firmware:
        settings["gpu_vbios"] = sorted(str(one) for one in firmware)
    for key, values in (
        ("gpu_model", {gpu.model for gpu in gpus}),
        ("gpu_ecc", {gpu.ecc for gpu in gpus}),
        ("gpu_mig", {gpu.mig for gpu in gpus}),
        ("gpu_persistence", {gpu.persistence for gpu in gpus}),
    ):
        value = values.pop()
        if not values and value is not None:
            settings[key] = value
    return settings


PROBE = Probe(
    "gpus",
    (
        pci_gpus.SECTION,
        nvidia.SECTION,
        nvlink.SECTION,
        amd.SECTION,
        kernel_log.SECTION,
    ),
    parse,
)

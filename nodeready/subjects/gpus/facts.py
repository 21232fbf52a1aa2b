"""The GPUs of a node: on the PCI bus, in the vendors' tools, and in the kernel's log."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from nodeready.policy import Policy
from nodeready.subjects.base import Output, Probe
from nodeready.subjects.fleet import ALONE, FleetFacts
from nodeready.subjects.gpus import amd, amd_gpu, kernel_log, nvidia, nvlink
from nodeready.subjects.gpus.gpu import Gpu, Gpus
from nodeready.subjects.gpus.nvidia import NvidiaSmi
from nodeready.subjects.gpus.nvlink import NvLinks
from nodeready.subjects.gpus.pci_bus import SECTION, Pci, parse_pci
from nodeready.subjects.parsed_template import fast_replace


def _fabric_manager(pci: Pci, smi: NvidiaSmi) -> str:
    if not pci.nvswitches and not any(gpu.fabric_state for gpu in smi.gpus):
        return "not needed"
    if smi.fabric_manager is None:
        return "not looked for"
    return "running" if smi.fabric_manager else "not running"


def _with_links(gpu: Gpu, links: NvLinks, shown_models: Container[str | None]) -> Gpu:
    """The GPU with its links; the links are unread where they must exist and are not shown.

    shown_models: the models that have a GPU with links
    """
    uuid = gpu.uuid or ""
    words = links.unread.get(uuid, "")
    has_answered = links.tool.works or links.tool.state == "missing"
    if (
        has_answered
        and uuid not in links.links
        and (gpu.model in shown_models or nvlink.is_on_board(gpu))
    ):
        words = "nvidia-smi nvlink does not show it"
    unread = (("links", words),) if words else ()
    return fast_replace(gpu, links=links.links.get(uuid, ()), unread=gpu.unread + unread)


def parse(outputs: Mapping[str, Output], policy: Policy) -> Gpus:
    """The GPUs. A tool that fails is a `Tool`; raises ProbeError when the bus was not read."""
    pci = parse_pci(outputs[SECTION.name])
    smi = nvidia.parse(outputs[nvidia.SECTION.name])
    links = nvlink.parse_nvlink(outputs[nvlink.NVLINK_SECTION.name])
    shown_models = {gpu.model for gpu in smi.gpus if links.links.get(gpu.uuid or "")}
    amd_gpus, amd_tool, amd_driver = amd.parse(outputs[amd.SECTION.name])
    faults, log = kernel_log.parse(outputs[kernel_log.SECTION.name])
    return Gpus(
        pci=pci.gpus,
        nvswitches=pci.nvswitches,
        nvidia=tuple(_with_links(gpu, links, shown_models) for gpu in smi.gpus),
        amd=amd_gpu.accelerators(amd_gpus, pci.gpus),
        nvidia_tool=smi.tool,
        nvlink_tool=links.tool,
        amd_tool=amd_tool,
        driver=pci.driver or smi.driver,
        amd_driver=amd_driver,
        cuda=smi.cuda,
        fabric_manager=_fabric_manager(pci, smi),
        device_files=pci.device_files,
        kernel_faults=kernel_log.faults_of_gpus(faults, (gpu.address for gpu in pci.gpus)),
        kernel_log=log,
    )


PROBE = Probe(
    "gpus",
    (SECTION, nvidia.SECTION, nvlink.NVLINK_SECTION, amd.SECTION, kernel_log.SECTION),
    parse,
)


# --- What the GPUs of a group's nodes should have in common, and the policy that they would fit.


_COMPARED = ("model", "vbios", "ecc", "mig", "persistence", "pcie_width")


def _several(values: Iterable[Any]) -> str | None:
    """The different values, sorted; None when a GPU has no value."""
    different = set(values)
    return None if not different or None in different else ", ".join(sorted(map(str, different)))


def _links(gpu: Gpu) -> str | None:
    active = [link for link in gpu.links if link.state == "active"]
    if not active:
        return None
    speeds = sorted({link.speed_gbps for link in active if link.speed_gbps is not None})
    text = "/".join(f"{speed:g}" for speed in speeds)
    return f"{len(active)} at {text} GB/s" if speeds else str(len(active))


def compared(observed: Gpus, fleet: FleetFacts = ALONE) -> dict[str, str | int | float]:
    """What nodes of a group should have in common."""
    gpus = observed.gpus
    facts = {
        "driver": observed.driver,
        "amd_driver": observed.amd_driver,
        "cuda": observed.cuda,
        "count": len(gpus) or None,
        "on_bus": len(observed.pci) or None,
        **{field: _several(getattr(gpu, field) for gpu in gpus) for field in _COMPARED},
        "links": _several(map(_links, gpus)),
        "power_limit_w": _several(gpu.power_limit_w for gpu in gpus),
        "fabric_clique": _several(gpu.fabric_clique for gpu in gpus),
    }
    return {name: value for name, value in facts.items() if value is not None}


def learned(observed: Gpus) -> dict[str, Any]:
    """The policy that this node would fit: what all of its GPUs agree on."""
    gpus = observed.gpus
    if not gpus:
        return {}
    settings: dict[str, Any] = {"gpu_count": len({gpu.pci_address for gpu in gpus})}
    drivers = {driver for driver in (observed.driver, observed.amd_driver) if driver}
    if len(drivers) == 1:
        settings["gpu_driver"] = drivers.pop()
    firmware = {gpu.vbios for gpu in gpus}
    if None not in firmware:
        settings["gpu_vbios"] = sorted(str(version) for version in firmware)
    for field in ("model", "ecc", "mig", "persistence"):
        values = {getattr(gpu, field) for gpu in gpus}
        if len(values) == 1 and None not in values:
            settings[f"gpu_{field}"] = values.pop()
    return settings

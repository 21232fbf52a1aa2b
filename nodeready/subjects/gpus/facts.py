"""The GPUs of a node: on the PCI bus, in the vendors' tools, and in the kernel's log."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from nodeready.core import shell
from nodeready.core.base import Output, Probe, Section
from nodeready.core.parsed_template import fast_replace
from nodeready.core.policy import Policy
from nodeready.core.result import ALONE, FleetFacts
from nodeready.subjects.gpus import amd_gpu, kernel_log, nvidia, peers
from nodeready.subjects.gpus.gpu import DeviceFile, Gpu, Gpus, PciGpu
from nodeready.subjects.gpus.nvidia import NvidiaSmi, NvLinks

# --- The PCI bus, the drivers of its GPUs, and the device files that jobs open.
#
# The bus is read before any tool: a GPU on the bus with a broken driver is a fault, while a node
# without a GPU has nothing to judge.

#: PCI vendor ids (pci.ids).
VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
#: PCI classes: VGA, 3D and other display controllers, processing accelerators (pci.ids).
CLASSES = ("0300", "0302", "0380", "1200")
#: PCI class "other bridge": with NVIDIA's vendor id, an NVSwitch.
_SWITCH_CLASS = "0680"
_DEVICES = "/sys/bus/pci/devices"
# A PCI address has colons, so that line numbers would hide where the path ends.
_LINE = re.compile(
    rf"{_DEVICES}/([0-9a-f]{{4,8}}:[0-9a-f]{{2}}:[0-9a-f]{{2}}\.[0-7])"
    r"/((?:\.\./)?\w{1,40}):(.*)",
    re.S,
)

_VERSION = "/proc/driver/nvidia/version"
_MODULE_VERSION = "/sys/module/nvidia/version"


# The configuration of a port is at most 14 KiB of text.
SECTION = Section("pci_gpus", lambda policy: shell.library("gpus"), cap_bytes=1 << 20)


def _number(text: str | None) -> int | None:
    match = re.fullmatch(r"\s*(-?[0-9]{1,9})\s*", text or "")
    return int(match[1]) if match else None


def _width(text: str | None) -> int | None:
    """Lanes; None for 63 (the device no longer answers) and for 0 (it has no link)."""
    lanes = _number(text)
    return lanes if lanes is not None and 1 <= lanes <= 32 else None


def _driver(lines: Iterable[str]) -> str | None:
    for line in lines:
        path, _, words = line.partition(":")
        match = re.search(r"(?:^|\s)([0-9]{2,5}\.[0-9]{1,5}(?:\.[0-9]{1,5})?)(?:\s|$)", words)
        if path in (_VERSION, _MODULE_VERSION) and match:
            return match[1]
    return None


#: Errors that a sound bus has as well: the search for devices requests functions that do not exist
#: (PCIe base specification, Unsupported Request).
_HARMLESS = ("UnsupReq", "Undefined")
_AER = re.compile(r"([A-Za-z_]{2,24}) ([0-9]{1,9})")


def _aer(counts: Mapping[str, list[str]]) -> tuple[tuple[str, str, int], ...]:
    """The kernel's counters of uncorrected errors (ABI sysfs-bus-pci-devices-aer_stats).

    counts: ``aer_dev_fatal``, ``aer_dev_nonfatal`` -> their lines, those with 0 left out
    """
    counts_by_error: dict[tuple[str, str], int] = {}
    for name, lines in counts.items():
        matches = [match for line in lines if (match := _AER.fullmatch(line.strip()))]
        named = [match for match in matches if not match[1].startswith("TOTAL")]
        for match in named or matches:
            if match[1] not in _HARMLESS and int(match[2]):
                key = (name.rpartition("_")[2], match[1])
                counts_by_error[key] = max(counts_by_error.get(key, 0), int(match[2]))
    return tuple((kind, error, count) for (kind, error), count in counts_by_error.items())


def _gpu(address: str, values: Mapping[str, str], errors: Mapping[str, list[str]]) -> PciGpu:
    node = _number(values.get("numa_node"))
    return PciGpu(
        address=address,
        vendor=VENDORS[values["vendor"]],
        device=values.get("device", "")[2:6],
        driver=values.get("driver"),
        # -1: the firmware names no node.
        numa_node=node if node is not None and node >= 0 else None,
        pcie_width=_width(values.get("current_link_width")),
        pcie_width_max=_width(values.get("max_link_width")),
        pcie_speed=values.get("current_link_speed"),
        pci_class=values.get("class", "")[2:8],
        aer=_aer(errors),
    )


# The bus of thousands of nodes is the same.
@lru_cache(maxsize=16)
def parse_pci(text: str) -> Gpus:
    """The bus and /dev alone, as the section showed them."""
    lines = text.split("\n")
    devices: dict[str, dict[str, str]] = {}
    errors: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        if (match := _LINE.match(line)) is None:
            continue
        address, name, words = match.groups()
        values = devices.setdefault(address, {})
        if "aer_" in name:
            errors.setdefault(address, {}).setdefault(name, []).append(words[:80])
        elif name != "uevent":
            values.setdefault(name, words.strip()[:80])
        elif words.startswith("DRIVER="):
            values["driver"] = words[len("DRIVER=") :].strip()[:80]
    gpus, nvswitches = [], 0
    for address, values in sorted(devices.items()):
        vendor, pci_class = values.get("vendor"), values.get("class", "")[2:6]
        if vendor in VENDORS and pci_class in CLASSES:
            gpus.append(_gpu(address, values, errors.get(address, {})))
        elif vendor == "0x10de" and pci_class == _SWITCH_CLASS:
            nvswitches += 1
    listed_files = re.finditer(
        # Without a slash and bounded: a line of blanks would be tried in all ways.
        r"^(c[rwxsStT-]{9})[.+@]? +[0-9]+ +([0-9]{1,10}) +([0-9]{1,10}) [^/\n]{1,200} (/dev/\S+)$",
        text,
        re.M,
    )
    files = tuple(DeviceFile(m[4], m[1], int(m[2]), int(m[3])) for m in listed_files)
    return Gpus(
        pci=tuple(gpus),
        nvswitches=nvswitches,
        driver=_driver(lines),
        device_files=files,
        peers=peers.parse(text),
    )


# --- All sources together.


def _fabric_manager(bus: Gpus, smi: NvidiaSmi) -> str:
    if not bus.nvswitches and not any(gpu.fabric_state for gpu in smi.gpus):
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
        and (gpu.model in shown_models or nvidia.is_on_board(gpu))
    ):
        words = "nvidia-smi nvlink does not show it"
    unread = (("links", words),) if words else ()
    return fast_replace(gpu, links=links.links.get(uuid, ()), unread=gpu.unread + unread)


def parse(outputs: Mapping[str, Output], policy: Policy) -> Gpus:
    """The GPUs. A tool that fails is a `Tool`; raises ProbeError when the bus was not read."""
    bus = parse_pci(outputs[SECTION.name].require())
    smi = nvidia.parse(outputs[nvidia.SECTION.name])
    links = nvidia.parse_nvlink(outputs[nvidia.NVLINK_SECTION.name])
    shown_models = {gpu.model for gpu in smi.gpus if links.links.get(gpu.uuid or "")}
    amd_gpus, amd_tool, amd_driver = amd_gpu.parse(outputs[amd_gpu.SECTION.name])
    faults, log = kernel_log.parse(outputs[kernel_log.SECTION.name])
    return replace(
        bus,
        nvidia=tuple(_with_links(gpu, links, shown_models) for gpu in smi.gpus),
        amd=amd_gpu.accelerators(amd_gpus, bus.pci),
        nvidia_tool=smi.tool,
        nvlink_tool=links.tool,
        amd_tool=amd_tool,
        driver=bus.driver or smi.driver,
        amd_driver=amd_driver,
        cuda=smi.cuda,
        fabric_manager=_fabric_manager(bus, smi),
        kernel_faults=kernel_log.faults_of_gpus(faults, (gpu.address for gpu in bus.pci)),
        kernel_log=log,
    )


PROBE = Probe(
    "gpus",
    (SECTION, nvidia.SECTION, nvidia.NVLINK_SECTION, amd_gpu.SECTION, kernel_log.SECTION),
    parse,
)


# --- What the GPUs of a group's nodes should have in common, and the policy that they would fit.


_COMPARED = ("model", "vbios", "ecc", "mig", "persistence", "pcie_width")


def _several(values: Iterable[Any]) -> str | None:
    """The different values, sorted; None when a GPU has no value."""
    different = set(values)
    return None if not different or None in different else ", ".join(sorted(map(str, different)))


def _links(gpu: Gpu) -> str | None:
    if not (active := [link for link in gpu.links if link.state == "active"]):
        return None
    speeds = sorted({link.speed_gbps for link in active if link.speed_gbps is not None})
    text = "/".join(f"{speed:g}" for speed in speeds)
    return f"{len(active)} at {text} GB/s" if speeds else str(len(active))


def compared(observed: Gpus, fleet: FleetFacts = ALONE) -> dict[str, str | int | float]:
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
        "gpus_beside_adapter": observed.peers.count_beside_adapter(),
        "peer_modules": " ".join(observed.peers.modules) or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def learned(observed: Gpus) -> dict[str, Any]:
    if not (gpus := observed.gpus):
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

"""The GPUs that the PCI bus shows, the drivers that have them and the files that jobs open.

The bus is asked before any tool: a device that is there with a broken driver is a fault, and no
device is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nodeready.policy import Policy
from nodeready.probes.base import Output, Section
from nodeready.probes.gpu import DeviceFile, PciGpu

#: PCI vendor ids (pci.ids).
VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}

#: PCI classes: VGA, 3D and other display controllers, processing accelerators (pci.ids).
CLASSES = ("0300", "0302", "0380", "1200")
#: A bridge of another kind: with NVIDIA's vendor id, an NVSwitch.
_SWITCH_CLASS = "0680"

_DEVICES = "/sys/bus/pci/devices"
_ATTRIBUTES = (
    "vendor",
    "class",
    "device",
    "uevent",
    "numa_node",
    "current_link_width",
    "max_link_width",
    "current_link_speed",
)
# The address has colons itself, so line numbers would make it ambiguous where the path ends.
_LINE = re.compile(
    rf"{_DEVICES}/([0-9a-f]{{4,8}}:[0-9a-f]{{2}}:[0-9a-f]{{2}}\.[0-7])/(\w{{1,40}}):(.*)", re.S
)
_VERSION = "/proc/driver/nvidia/version"
_MODULE_VERSION = "/sys/module/nvidia/version"


def _script(policy: Policy) -> str:
    files = " ".join(f'"$nr_device/{name}"' for name in _ATTRIBUTES)
    return rf"""
    set --
    for nr_vendor in $(grep -lsE '^0x(10de|1002)' {_DEVICES}/*/vendor); do
        nr_device=${{nr_vendor%/vendor}}
        # A virtual function of a card of this host: a guest's.
        if [ -e "$nr_device/physfn" ]; then continue; fi
        nr_class=
        {{ read -r nr_class <"$nr_device/class"; }} 2>/dev/null
        case $nr_class in
        0x03* | 0x12* | 0x0680*) set -- "$@" {files} ;;
        esac
    done
    if [ -e {_VERSION} ]; then set -- "$@" {_VERSION}; fi
    if [ -e {_MODULE_VERSION} ]; then set -- "$@" {_MODULE_VERSION}; fi
    if [ $# -gt 0 ]; then grep -asH '' "$@"; fi
    set --
    for nr_file in /dev/nvidia* /dev/kfd /dev/dri/renderD*; do
        if [ -c "$nr_file" ]; then set -- "$@" "$nr_file"; fi
    done
    if [ $# -gt 0 ]; then ls -ln -- "$@" 2>/dev/null; fi
    :
    """


SECTION = Section("pci_gpus", _script)


@dataclass(frozen=True)
class Pci:
    """``driver``: the version of NVIDIA's kernel module; None: not loaded."""

    gpus: tuple[PciGpu, ...]
    nvswitches: int
    driver: str | None
    device_files: tuple[DeviceFile, ...]


def _number(text: str | None) -> int | None:
    match = re.fullmatch(r"\s*(-?[0-9]{1,9})\s*", text or "")
    return int(match[1]) if match else None


def _width(text: str | None) -> int | None:
    """Lanes; a device that no longer answers reads as 63, one without a link as 0."""
    lanes = _number(text)
    return lanes if lanes is not None and 1 <= lanes <= 32 else None


def _driver(lines: Iterable[str]) -> str | None:
    for line in lines:
        path, _, words = line.partition(":")
        match = re.search(r"(?:^|\s)([0-9]{2,5}\.[0-9]{1,5}(?:\.[0-9]{1,5})?)(?:\s|$)", words)
        if path in (_VERSION, _MODULE_VERSION) and match:
            return match[1]
    return None


def _gpu(address: str, values: Mapping[str, str]) -> PciGpu:
    node = _number(values.get("numa_node"))
    return PciGpu(
        address=address,
        vendor=VENDORS[values["vendor"]],
        device=values.get("device", "")[2:6],
        driver=values.get("driver"),
        # -1: the firmware does not say.
        numa_node=node if node is not None and node >= 0 else None,
        pcie_width=_width(values.get("current_link_width")),
        pcie_width_max=_width(values.get("max_link_width")),
        pcie_speed=values.get("current_link_speed"),
        pci_class=values.get("class", "")[2:8],
    )


def parse(output: Output) -> Pci:
    """Raises ProbeError when the section did not end well."""
    text = output.require()
    lines = text.split("\n")
    devices: dict[str, dict[str, str]] = {}
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        address, name, words = match.groups()
        values = devices.setdefault(address, {})
        if name != "uevent":
            values.setdefault(name, words.strip()[:80])
        elif words.startswith("DRIVER="):
            values["driver"] = words[len("DRIVER=") :].strip()[:80]
    known = {a: v for a, v in devices.items() if v.get("vendor") in VENDORS}
    gpus = [_gpu(a, v) for a, v in sorted(known.items()) if v.get("class", "")[2:6] in CLASSES]
    switches = [
        values
        for values in known.values()
        if values["vendor"] == "0x10de" and values.get("class", "")[2:6] == _SWITCH_CLASS
    ]
    listed = re.finditer(
        r"^(c[rwxsStT-]{9})[.+@]? +[0-9]+ +([0-9]{1,10}) +([0-9]{1,10}) +.* (/dev/\S+)$",
        text,
        re.M,
    )
    files = tuple(DeviceFile(m[4], m[1], int(m[2]), int(m[3])) for m in listed)
    return Pci(tuple(gpus), len(switches), _driver(lines), files)

"""The kernel's counts for AMD's GPUs: their processes, bad pages and RAS errors.

``/sys/class/kfd/kfd/proc/PID/vram_ID`` holds the bytes that a process has on the GPU with that
id, and the topology gives the PCI address of each id (Linux' drivers/gpu/drm/amd/amdkfd).
``ras/gpu_vram_bad_pages`` lists bad pages as ``ADDRESS : SIZE : FLAG``: R is retired, P waits
for its retirement, F could not be retired (Linux' amdgpu_ras.c). ``hwmon/hwmonN/tempM_crit`` is
where a sensor slows the GPU down, in thousandths of a degree (Linux' amdgpu_pm.c).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from nodeready.subjects.gpus.amd_json import degrees
from nodeready.subjects.gpus.gpu import GpuProcess

_ROOT = "/sys/class/kfd/kfd"
DRIVER = "/sys/bus/pci/drivers/amdgpu"
#: The script starts two programs for any number of GPUs and processes.
KFD_SCRIPT = rf"""
    if [ -d {_ROOT} ]; then
        grep -asHE '^([0-9]+|(location_id|domain) [0-9]+)$' {_ROOT}/topology/nodes/*/gpu_id \
            {_ROOT}/topology/nodes/*/properties {_ROOT}/proc/[0-9]*/vram_*
        grep -asHc ' : [PF]' {DRIVER}/*/ras/gpu_vram_bad_pages
        for nr_file in {_ROOT}/proc/[0-9]*; do
            nr_pid=${{nr_file##*/}} nr_comm=
            {{ read -r nr_comm <"/proc/$nr_pid/comm"; }} 2>/dev/null || continue
            printf 'process=%s %s\n' "$nr_pid" "$nr_comm"
        done
    fi
"""


@dataclass(frozen=True)
class Kfd:
    """The kernel's counts by the PCI address of the GPU (kfd: amdgpu's part for computing)."""

    devices: tuple[str, ...] = ()  # the addresses of the GPUs that can compute
    # address -> the processes with memory on the GPU
    processes: Mapping[str, tuple[GpuProcess, ...]] = field(default_factory=dict)
    # address -> whether a bad page is still in use
    unreserved: Mapping[str, bool] = field(default_factory=dict)
    # address -> uncorrectable and correctable errors of all blocks
    ras: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # address -> sensor (``edge``, ``junction``, ``mem``) -> where it slows the GPU down
    limits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def _addresses(printed: str) -> dict[str, str]:
    """A GPU's id -> its PCI address; a node of the topology with id 0 is a processor."""
    nodes: dict[str, dict[str, str]] = {}
    for node, name, value in re.findall(
        rf"^{_ROOT}/topology/nodes/([0-9]+)/(?:gpu_id:|properties:(location_id|domain) )"
        r"([0-9]{1,10})$",
        printed,
        re.M,
    ):
        nodes.setdefault(node, {}).setdefault(name or "gpu_id", value)
    addresses = {}
    for node in nodes.values():
        if node.get("gpu_id", "0") != "0" and "location_id" in node:
            location, domain = int(node["location_id"]), int(node.get("domain", "0")) & 0xFFFF
            bus, device, function = location >> 8 & 0xFF, location >> 3 & 31, location & 7
            addresses[node["gpu_id"]] = f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
    return addresses


_SENSORS = {"1": "edge", "2": "junction", "3": "mem"}


def _limits(printed: str) -> dict[str, dict[str, int]]:
    """Address -> sensor -> the degrees at which it slows the GPU down."""
    limits_by_address: dict[str, dict[str, int]] = {}
    labels: dict[tuple[str, str], str] = {}
    crit: list[tuple[str, str, str]] = []
    for address, sensor, kind, value in re.findall(
        rf"^{DRIVER}/([0-9a-f:.]+)/hwmon/hwmon[0-9]+/temp([1-9])_(label|crit):([a-z0-9]{{1,20}})$",
        printed,
        re.M,
    ):
        if kind == "label":
            labels[address, sensor] = value
        elif value.isdigit():
            crit.append((address, sensor, value))
    for address, sensor, value in crit:
        name = labels.get((address, sensor)) or _SENSORS.get(sensor)
        limit = degrees(int(value) // 1000)
        if name and limit is not None:
            limits_by_address.setdefault(address, {})[name] = limit
    return limits_by_address


def parse_kfd(printed: str) -> Kfd:
    """The GPUs in what KFD_SCRIPT printed; other lines are passed over."""
    addresses = _addresses(printed)
    names = dict(re.findall(r"^process=([0-9]{1,9}) (.*)$", printed, re.M))
    processes: dict[str, list[GpuProcess]] = {}
    for pid, gpu, size in re.findall(
        rf"^{_ROOT}/proc/([0-9]{{1,9}})/vram_([0-9]+):([0-9]{{1,18}})$", printed, re.M
    ):
        # A process that opens the driver has a file for each GPU, with 0 for an unused one.
        if int(size) and gpu in addresses:
            process = GpuProcess(int(pid), names.get(pid, ""), int(size) >> 20)
            processes.setdefault(addresses[gpu], []).append(process)
    pages = re.findall(
        rf"^{DRIVER}/([0-9a-f:.]+)/ras/gpu_vram_bad_pages:([0-9]{{1,9}})$", printed, re.M
    )
    ras: dict[str, tuple[int, int]] = {}
    for address, kind, count in re.findall(
        rf"^{DRIVER}/([0-9a-f:.]+)/ras/[a-z0-9_]+_err_count:(ue|ce): ([0-9]{{1,18}})$",
        printed,
        re.M,
    ):
        bad, healed = ras.get(address, (0, 0))
        ras[address] = (bad + int(count), healed) if kind == "ue" else (bad, healed + int(count))
    return Kfd(
        tuple(addresses.values()),
        {address: tuple(gpu_processes) for address, gpu_processes in processes.items()},
        {address: int(count) > 0 for address, count in pages},
        ras,
        _limits(printed),
    )


def idle(observed: Kfd, address: str) -> bool | None:
    """Whether no process has memory on this GPU; None where the driver does not list the GPU."""
    return address not in observed.processes if address in observed.devices else None

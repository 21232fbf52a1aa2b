"""What the kernel itself says of AMD's GPUs: their processes, bad pages and RAS counts.

``/sys/class/kfd/kfd/proc/PID/vram_ID`` holds the bytes that a process has on the GPU with that id,
and the topology says where on the PCI bus that one is (Linux' drivers/gpu/drm/amd/amdkfd).
``ras/gpu_vram_bad_pages`` lists bad pages as ``ADDRESS : SIZE : FLAG``: R is retired, P waits for
its retirement, F could not be retired (Linux' amdgpu_ras.c).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from nodeready.probes.gpu import GpuProcess

_ROOT = "/sys/class/kfd/kfd"
_DRIVER = "/sys/bus/pci/drivers/amdgpu"

#: Two programs, whatever the number of GPUs; the names of processes cost none.
SCRIPT = rf"""
    if [ -d {_ROOT} ]; then
        grep -asHE '^([0-9]+|(location_id|domain) [0-9]+)$' {_ROOT}/topology/nodes/*/gpu_id \
            {_ROOT}/topology/nodes/*/properties {_ROOT}/proc/[0-9]*/vram_*
        grep -asHc ' : [PF]' {_DRIVER}/*/ras/gpu_vram_bad_pages
        for nr_file in {_ROOT}/proc/[0-9]*; do
            nr_pid=${{nr_file##*/}} nr_comm=
            {{ read -r nr_comm <"/proc/$nr_pid/comm"; }} 2>/dev/null || continue
            printf 'process=%s %s\n' "$nr_pid" "$nr_comm"
        done
    fi
"""


@dataclass(frozen=True)
class Kfd:
    """By PCI address.

    devices:    the GPUs that the driver gives to computing
    processes:  those with memory on the GPU
    unreserved: whether a bad page is still in use
    ras:        uncorrectable and correctable errors of all blocks
    """

    devices: tuple[str, ...] = ()
    processes: Mapping[str, tuple[GpuProcess, ...]] = field(default_factory=dict)
    unreserved: Mapping[str, bool] = field(default_factory=dict)
    ras: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def _addresses(printed: str) -> dict[str, str]:
    """The PCI address of each GPU by its id; a processor is a node of the topology with id 0."""
    nodes: dict[str, dict[str, str]] = {}
    for node, name, value in re.findall(
        rf"^{_ROOT}/topology/nodes/([0-9]+)/(?:gpu_id:|properties:(location_id|domain) )"
        r"([0-9]{1,10})$",
        printed,
        re.M,
    ):
        nodes.setdefault(node, {}).setdefault(name or "gpu_id", value)
    found = {}
    for node in nodes.values():
        if node.get("gpu_id", "0") != "0" and "location_id" in node:
            place, domain = int(node["location_id"]), int(node.get("domain", "0"))
            found[node["gpu_id"]] = (
                f"{domain & 0xFFFF:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 31:02x}.{place & 7}"
            )
    return found


def parse(printed: str) -> Kfd:
    """What SCRIPT printed; anything else is passed over."""
    addresses = _addresses(printed)
    names = dict(re.findall(r"^process=([0-9]{1,9}) (.*)$", printed, re.M))
    processes: dict[str, list[GpuProcess]] = {}
    for pid, gpu, size in re.findall(
        rf"^{_ROOT}/proc/([0-9]{{1,9}})/vram_([0-9]+):([0-9]{{1,18}})$", printed, re.M
    ):
        # Whoever opens the driver has a file for each GPU, with 0 where it uses none of it.
        if int(size) and gpu in addresses:
            process = GpuProcess(int(pid), names.get(pid, ""), int(size) >> 20)
            processes.setdefault(addresses[gpu], []).append(process)
    pages = re.findall(
        rf"^{_DRIVER}/([0-9a-f:.]+)/ras/gpu_vram_bad_pages:([0-9]{{1,9}})$", printed, re.M
    )
    ras: dict[str, tuple[int, int]] = {}
    for address, kind, count in re.findall(
        rf"^{_DRIVER}/([0-9a-f:.]+)/ras/[a-z0-9_]+_err_count:(ue|ce): ([0-9]{{1,18}})$",
        printed,
        re.M,
    ):
        bad, healed = ras.get(address, (0, 0))
        ras[address] = (bad + int(count), healed) if kind == "ue" else (bad, healed + int(count))
    return Kfd(
        tuple(addresses.values()),
        {address: tuple(found) for address, found in processes.items()},
        {address: int(count) > 0 for address, count in pages},
        ras,
    )


def idle(seen: Kfd, address: str) -> bool | None:
    """Whether no process has memory on this GPU; None where the driver does not say."""
    return address not in seen.processes if address in seen.devices else None

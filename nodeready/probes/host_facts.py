"""What of a host its peers should share, and the policy that it would fit."""

from __future__ import annotations

import re
from typing import Any

from nodeready.probes.cmdline import option, tokens
from nodeready.probes.host import Host, same_zone

#: Kernel options that name one machine's disk, address or boot.
_OWN = frozenset(
    (
        "BOOT_IMAGE", "BOOTIF", "bootif", "hostname", "ifname", "initrd", "ip", "ostree",
        "rd.luks.uuid", "rd.lvm.lv", "rd.md.uuid", "resume", "root", "systemd.hostname",
        "systemd.machine_id", "ds", "cryptdevice", "nfsroot",
    )
)  # fmt: skip
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-|([0-9a-f]{2}[:-]){5}[0-9a-f]{2}", re.I)


def shared_cmdline(text: str) -> str:
    """The kernel's command line without what belongs to one machine."""
    kept = [word for word in tokens(text) if option(word) not in _OWN and not _UUID.search(word)]
    return " ".join(kept)


def compared(seen: Host) -> dict[str, str | int | float]:
    """The facts that nodes of a group should share."""
    network = sorted(mount.path for mount in seen.mounts if mount.network)
    gib = None if seen.memory_total_mb is None else round(seen.memory_total_mb / 1024)
    facts: dict[str, str | int | float | None] = {
        "os": seen.os_release,
        "kernel": seen.kernel_release,
        "architecture": seen.architecture,
        "cmdline": shared_cmdline(seen.cmdline),
        "cpus": seen.cpus,
        "cpu_model": seen.cpu_model,
        "numa_nodes": seen.numa_nodes,
        "memory_gib": gib,
        "swap": None if seen.swap_total_mb is None else ("on" if seen.swap_total_mb else "off"),
        "hugepages": seen.hugepages_total,
        "transparent_hugepage": seen.transparent_hugepage,
        "numa_balancing": seen.numa_balancing,
        "lsm": seen.lsm,
        "timezone": same_zone(seen.timezone),
        "network_mounts": None if seen.looked else " ".join(network) or "none",
        **seen.versions,
    }
    return {name: value for name, value in facts.items() if value is not None and value != ""}


def learned(seen: Host) -> dict[str, Any]:
    """The policy that this node would fit: key of Policy -> value."""
    found: dict[str, Any] = {
        "kernel_release": seen.kernel_release,
        "os_release": seen.os_release,
        "timezone": same_zone(seen.timezone),
    }
    if not seen.looked:
        # What the policy takes for a path (nodeready.policy.fields).
        paths = (m.path for m in seen.mounts if m.network and m.fstype != "autofs")
        found["mounts"] = [path for path in paths if re.fullmatch(r"/[^:\s'\"]*", path)]
    if seen.shm is not None and seen.shm.size_mb:
        found["shm_min_mb"] = _rounded(seen.shm.size_mb)
    if seen.memory_total_mb:
        found["memory_min_mb"] = _rounded(seen.memory_total_mb)
    if seen.hugepages_total is not None:
        found["hugepages"] = seen.hugepages_total
    if seen.swap_total_mb is not None:
        found["swap"] = "any" if seen.swap_total_mb else "off"
    return {key: value for key, value in found.items() if value != ""}


def _rounded(size_mb: int) -> int:
    """Down to whole GiB: nodes of one kind differ by what the firmware keeps."""
    return size_mb // 1024 * 1024 if size_mb >= 2048 else size_mb

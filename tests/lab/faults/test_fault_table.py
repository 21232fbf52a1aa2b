"""Each fault of the lab shows in exactly the checks that it should, and in no other.

A healthy node of each profile has nothing to complain of: a check that fails there is a false
alarm, and one that stays ok on a broken node a false pass. What `ready` says is judged beside the
checks: its proofs, the verdict on the node, and that its healthy peers are not named for it.

The nodes of a batch have a fault each, and one `ready` tells of all of them.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nodeready.lab import Lab, down
from nodeready.lab.faults import FAULTS
from nodeready.lab.profiles import PROFILES
from nodeready.subjects.registry import SUBJECTS
from tests.lab.faults.bench import WAIVERS, Bench, Told

#: What only a GPU's tool can tell: of a device that it does not show, nobody knows.
_TOLD = (
    "present", "model", "vbios", "recovery", "ecc_mode", "ecc_errors", "remapped_rows",
    "retired_pages", "pcie", "throttle", "temperature", "persistence", "nvlink",
)  # fmt: skip
UNTOLD = {f"gpus.{name}": "unknown" for name in _TOLD}
NVIDIA_UNTOLD = {**UNTOLD, "gpus.fabric_manager": "unknown"}
AMD_UNTOLD = {**UNTOLD, "gpus.xgmi_errors": "unknown"}
FAILED = {"gpus.tool": "fail", **NVIDIA_UNTOLD}
AMD_FAILED = {"gpus.tool": "fail", **AMD_UNTOLD}


@dataclass(frozen=True)
class Row:
    """What a fault changes: check -> its status.

    says:   is in what the first of them found
    proofs: what it changes of what `ready` proves
    policy: by which its node is judged; the checks of a healthy node are all ok by it
    """

    changes: dict[str, str]
    says: str = ""
    proofs: dict[str, str] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)

    @property
    def go(self) -> bool:
        """Whether such a node may have a job: a warning stops none."""
        found = {*self.changes.values(), *self.proofs.values()}
        return not found & {"fail", "unknown"}


def _one(check: str, says: str, status: str = "fail", **policy: Any) -> Row:
    """A fault that one check sees, and no proof."""
    return Row({check: status}, says, policy=policy)


_LOG = "gpus.kernel_faults"
_SYSTEM = platform.freedesktop_os_release()
_RELEASE = f"{_SYSTEM['ID']} {_SYSTEM.get('VERSION_ID', '')}".strip()
_PY_SPY = "debug_tools.py_spy"
_NO_PY_SPY = {"proof.attach": "fail", "proof.attach_nonblocking": "fail"}

_NO_SSH = {"ssh_client.installed": "fail"}
_NO_PDSH = {"pdsh.installed": "fail", "debug_tools.packages": "fail"}

TABLE = {
    # NVIDIA's GPUs: there, and shown by their tool.
    "gpu-gone": _one("gpus.present", "0000:"),
    "gpu-unplugged": _one("gpus.count", "7 on the PCI bus", gpu_count=8),
    "gpu-unbound": _one("gpus.present", "no driver"),
    "no-driver": Row(
        {**FAILED, "gpus.driver": "fail", "gpus.present": "fail", "gpus.device_access": "na"},
        "the driver is not loaded",
    ),
    "other-model": _one("gpus.model", "gpu 3", gpu_model="NVIDIA H100 80GB HBM3"),
    "other-vbios": _one("gpus.vbios", "96.00.30.00.01", gpu_vbios=["96.00.89.00.01"]),
    "nvidia-smi-hangs": Row(FAILED, "timed out"),
    "nvidia-smi-fails": Row(FAILED, "Driver/library version mismatch"),
    "nvidia-smi-handle": Row(FAILED, "Unable to determine the device handle"),
    "nvidia-smi-no-devices": Row(FAILED, "No devices were found"),
    "nvidia-smi-permissions": Row(FAILED, "Insufficient Permissions"),
    "nvidia-smi-cut": Row(FAILED, "exit status 139"),
    "nvidia-smi-gone": Row({**FAILED, "gpus.tool": "warn"}, "not installed"),
    "device-files": _one("gpus.device_access", "/dev/nvidia0 crw-------"),
    # NVIDIA's GPUs: memory.
    "gpu-ecc": _one("gpus.ecc_errors", "gpu 3"),
    "gpu-ecc-sram": _one("gpus.ecc_errors", "gpu 3"),
    "sram-threshold": _one("gpus.ecc_errors", "gpu 3"),
    "ecc-unreadable": _one("gpus.ecc_errors", "gpu 3", "unknown"),
    "ecc-off": _one("gpus.ecc_mode", "gpu 3"),
    "ecc-pending-off": _one("gpus.ecc_mode", "on, off after a reset"),
    "ecc-mode-unreadable": _one("gpus.ecc_mode", "gpu 3", "unknown"),
    "remap-pending": _one("gpus.remapped_rows", "gpu 3"),
    "remap-failed": _one("gpus.remapped_rows", "remapping failed"),
    "remap-unreadable": _one("gpus.remapped_rows", "gpu 3", "unknown"),
    "repair-pending": _one("gpus.remapped_rows", "repair pending"),
    "retired-pending": _one("gpus.retired_pages", "gpu 3"),
    # NVIDIA's GPUs: bus, heat, settings, what the driver asks for.
    "pcie-half-width": _one("gpus.pcie", "x8 of x16"),
    "pcie-one-lane": _one("gpus.pcie", "x1 of x16"),
    "pcie-old-generation": _one("gpus.pcie", "generation 3 of 5"),
    "pcie-unreadable": _one("gpus.pcie", "gpu 3", "unknown"),
    "gpu-hot": Row({"gpus.temperature": "fail", "gpus.throttle": "fail"}, "92 C"),
    "memory-hot": _one("gpus.temperature", "memory 97 C"),
    "temperature-unreadable": _one("gpus.temperature", "gpu 3", "unknown"),
    "power-brake": _one("gpus.throttle", "hw_power_brake_slowdown"),
    "slow-by-driver": _one("gpus.throttle", "sw_thermal_slowdown", "warn"),
    "no-persistence": _one("gpus.persistence", "gpus 0-7"),
    "mig-left-on": _one("gpus.mig", "gpu 3", gpu_mig="off"),
    "gpu-busy": _one("gpus.processes", "pid 4711", gpu_idle=True),
    "reset-required": _one("gpus.recovery", "gpu 3"),
    "drain-recommended": _one("gpus.recovery", "gpu 3"),
    "reboot-required": _one("gpus.recovery", "reboot"),
    "name-unreadable": _one("gpus.model", "gpu 3", "unknown"),
    # NVIDIA's GPUs: the links between them.
    "nvlink-down": _one("gpus.nvlink", "gpu 3"),
    "nvlink-down-b200": _one("gpus.nvlink", "link 4 inactive"),
    "nvlink-unreadable": _one("gpus.nvlink", "Unknown Error", "unknown"),
    "no-fabric-manager": _one("gpus.fabric_manager", "nv-fabricmanager"),
    "fabric-waits": _one("gpus.fabric_manager", "gpu 3"),
    "fabric-failed": _one("gpus.fabric_manager", "failure"),
    "fabric-unhealthy": _one("gpus.fabric_manager", "gpu 3"),
    "fabric-degraded": _one("gpus.fabric_manager", "gpu 3"),
    "fabric-route": _one("gpus.fabric_manager", "gpu 3"),
    "fabric-clique": _one("gpus.fabric_manager", "gpu 3"),
    # NVIDIA: the kernel's log. The actions are those of NVIDIA's Xid catalog.
    "xid": _one(_LOG, "Xid 79"),
    "xid-48": _one(_LOG, "Xid 48"),
    "xid-54": _one(_LOG, "Xid 54"),
    "xid-62": _one(_LOG, "Xid 62"),
    "xid-63": _one(_LOG, "Xid 63", "warn"),
    "xid-64": _one(_LOG, "Xid 64"),
    "xid-74": _one(_LOG, "Xid 74"),
    "xid-94": _one(_LOG, "Xid 94", "warn"),
    "xid-95": _one(_LOG, "Xid 95"),
    "xid-109": _one(_LOG, "Xid 109"),
    "xid-119": _one(_LOG, "Xid 119"),
    "xid-145": Row({_LOG: "fail", "gpus.recovery": "fail"}, "Xid 145"),
    "xid-154": _one(_LOG, "Xid 154"),
    "xid-unknown": _one(_LOG, "unknown Xid 999", "warn"),
    "xid-of-a-job": Row({}),
    "sxid-fatal": _one(_LOG, "20034"),
    "sxid": _one(_LOG, "12028", "warn"),
    "gpu-did-not-start": Row({_LOG: "fail", "gpus.present": "fail"}, "RmInitAdapter failed"),
    "aer": _one(_LOG, "0000:61:00.0"),
    # AMD's GPUs.
    "amd-gpu-gone": _one("gpus.present", "0000:65"),
    "amd-gpu-unplugged": _one("gpus.count", "7 on the PCI bus", gpu_count=8),
    "amd-gpu-unbound": _one("gpus.present", "no driver"),
    "amd-other-vbios": _one("gpus.vbios", "113-M3000100-102", gpu_vbios=["113-M3000100-103"]),
    "amd-smi-hangs": Row(AMD_FAILED, "timed out"),
    "amd-smi-fails": Row(AMD_FAILED, "Unable to detect any GPU devices"),
    "amd-smi-broken": Row(AMD_FAILED, "No module named 'amdsmi'"),
    "amd-smi-gone": Row({**AMD_FAILED, "gpus.tool": "warn"}, "not installed"),
    "amd-device-files": _one("gpus.device_access", "/dev/kfd crw-------"),
    "amd-no-kfd": _one("gpus.device_access", "/dev/kfd is missing"),
    "amd-ecc": _one("gpus.ecc_errors", "gpu 3"),
    "amd-ecc-off": _one("gpus.ecc_mode", "gpu 3"),
    # The links are a block of those that count.
    "amd-ecc-unreadable": Row(
        {"gpus.ecc_errors": "unknown", "gpus.xgmi_errors": "unknown"}, "gpu 3"
    ),
    "amd-half-width": _one("gpus.pcie", "x8 of x16"),
    "amd-hot": _one("gpus.temperature", "101 C, limit 100 C"),
    "amd-memory-hot": _one("gpus.temperature", "106 C, limit 105 C"),
    "amd-throttled": _one("gpus.throttle", "gpu 3"),
    "amd-prochot": _one("gpus.throttle", "gpu 3"),
    "amd-xgmi-down": _one("gpus.nvlink", "gpus 3,5"),
    "amd-xgmi-errors": Row({"gpus.xgmi_errors": "fail", "gpus.ecc_errors": "fail"}, "4 XGMI"),
    "amd-hang": _one(_LOG, "ring sdma0 timeout"),
    "amd-hang-over": _one(_LOG, "ring sdma0 timeout", "warn"),
    "amd-reset-failed": _one(_LOG, "GPU reset(1) failed"),
    "amd-log-uncorrectable": _one(_LOG, "2 uncorrectable hardware errors"),
    "amd-log-poison": _one(_LOG, "poison is consumed"),
    "amd-bad-pages": _one(_LOG, "exceed threshold"),
    "amd-did-not-start": Row(
        {_LOG: "fail", "gpus.present": "fail"}, "Fatal error during GPU init"
    ),
    "amd-page-fault": Row({}),
    "numa-balancing": _one("host.numa_balancing", "1", "warn"),
    # InfiniBand and RoCE ports.
    "ib-down": _one("rdma.state", "mlx5_3/1: DOWN, Polling"),
    # A port that somebody switched off is in use only where the policy says so.
    "ib-disabled": _one("rdma.state", "mlx5_3/1: DOWN, Disabled", rdma_ports={"mlx5_3/1": {}}),
    "ib-init": _one("rdma.state", "no subnet manager"),
    "ib-armed": _one("rdma.state", "no subnet manager"),
    "ib-recovers": _one("rdma.state", "LinkErrorRecovery"),
    "hca-half-lanes": _one("rdma.pcie", "mlx5_3"),
    "hca-one-lane": _one("rdma.pcie", "mlx5_3"),
    "hca-old-generation": _one("rdma.pcie", "mlx5_3"),
    "hca-unreadable": _one("rdma.pcie", "mlx5_3", "unknown"),
    "ib-half-rate": _one("rdma.rate", "200 Gb/sec (2X NDR) on mlx5_3/1"),
    "ib-old-speed": _one("rdma.rate", "200 Gb/sec (4X HDR) on mlx5_3/1"),
    "ib-one-lane": _one("rdma.rate", "100 Gb/sec (1X NDR) on mlx5_3/1"),
    "ib-firmware": _one("rdma.firmware", "28.36.1010 on mlx5_3", "warn"),
    "ib-ethernet": _one(
        "rdma.link_layer",
        "Ethernet on mlx5_3/1",
        rdma_ports={"mlx5_3/1": {"link_layer": "InfiniBand"}},
    ),
    "ib-lost": _one("rdma.expected", "mlx5_3/1", rdma_ports={"mlx5_3/1": {}, "mlx5_0/1": {}}),
    "ib-unbound": _one("rdma.devices", "0000:5e:00.0 has no driver"),
    "ib-no-verbs": _one("rdma.devices", "uverbs"),
    "roce-down": _one("rdma.state", "mlx5_3/1: DOWN, Disabled"),
    "roce-no-address": _one("rdma.gids", "no GID on mlx5_3/1"),
    "roce-v1": _one("rdma.gids", "RoCE v1 on mlx5_3/1"),
    "roce-half-rate": _one("rdma.rate", "200 Gb/sec", rdma_ports={"mlx5_3/1": {"rate_gbps": 400}}),
    # Interfaces and routes.
    "bond-half": _one("nics.link", "ens1f1np1: no link"),
    "bond-slow-port": _one("nics.speed", "25000 Mbit/s on ens1f1np1"),
    "bond-port-mtu": _one("nics.mtu", "ens1f1np1"),
    "bond-mii": _one("nics.bond", "ens1f1np1"),
    "bond-down": _one("nics.link", "bond0"),
    "half-duplex": _one("nics.duplex", "ens1f1np1"),
    "wrong-mtu": _one("nics.mtu", "1400", nics={"eth0": {"mtu": 1500}}),
    "no-route": Row({}, "cannot log in", {"proof.ssh": "fail", "proof.mesh": "fail"}),
    "hosts-wrong": Row({}, "cannot log in", {"proof.ssh": "fail", "proof.mesh": "fail"}),
    # TCP ports and the packet filter.
    "port-taken": Row({"ports.range": "fail"}, "29500 by tensorboard", {"proof.ports": "warn"}),
    "port-taken-by-user": Row({"ports.range": "warn"}, "29503", {"proof.ports": "warn"}),
    "ports-all-taken": Row({"ports.range": "warn"}, "29500", {"proof.ports": "fail"}),
    "ephemeral": _one("ports.ephemeral", "15000-61000"),
    "ephemeral-at-boot": _one("ports.ephemeral", "15000-61000"),
    # The listeners of the proof are root's where root asks.
    "privileged": _one("ports.privileged", "30000"),
    "firewall": Row({"ports.firewall": "fail"}, "29500-29510 dropped", {"proof.mesh": "fail"}),
    "firewall-reject": Row({"ports.firewall": "fail"}, "29500-29510", {"proof.mesh": "fail"}),
    "firewall-one-port": Row({"ports.firewall": "fail"}, "29505", {"proof.mesh": "fail"}),
    "firewall-replies": Row({"ports.firewall": "fail"}, "29500", {"proof.mesh": "fail"}),
    "firewall-foreign": Row({"ports.firewall": "fail"}, "29500", {"proof.mesh": "fail"}),
    "firewall-other-interface": Row({"ports.firewall": "fail"}, "29500", {"proof.mesh": "fail"}),
    "firewall-open": Row({}),
    # The host.
    "clock": _one("host.clock", "not synchronised"),
    "clock-chrony": _one("host.clock", "not synchronised"),
    "disk-full": _one("host.space", "/scratch: 0 % free"),
    "inodes": _one("host.inodes", "/scratch"),
    "read-only": Row({"host.read_only": "fail", "core_dumps.directory": "fail"}, "is read-only"),
    "read-only-data": _one("host.read_only", "/data"),
    "not-mounted": _one("host.mounts", "/scratch", "warn"),
    "dead-mount": _one("host.dead_mounts", "/nas"),
    "other-kernel": _one("host.kernel", "5.4.0-1-generic", kernel_release=os.uname().release),
    "other-system": _one("host.os", "3.1", os_release=_RELEASE),
    "other-timezone": _one("host.timezone", "Asia/Tokyo", timezone="Etc/UTC"),
    # Whoever hangs for a minute is a failure; it has just begun.
    "stuck-process": _one("host.stuck", "train", "warn"),
    "zombies": _one("host.zombies", "python3", "warn"),
    "no-shm": _one("host.shm", "not mounted"),
    "small-shm": _one("host.shm", "64 MiB", shm_min_mb=128),
    "hugepages": _one("host.hugepages", "12", hugepages=0),
    "memory": _one("host.memory", "1024", memory_min_mb=1500),
    "swap": _one("host.swap", "8191", swap="off"),
    "file-handles": _one("host.file_handles", "9990"),
    "pids": _one("host.pids", "of"),
    "numa-balancing-on": _one("host.numa_balancing", "1", numa_balancing=0),
    # Who may attach. A lab shares its kernel, so its proofs do not meet a node's own value.
    "yama-live": _one("ptrace.scope", "1"),
    "yama-2": _one("ptrace.scope", "2"),
    "yama-3": _one("ptrace.scope", "3"),
    "yama-at-boot": _one("ptrace.scope", "1"),
    "yama-glob": _one("ptrace.scope", "next boot"),
    "yama-sysctl-conf": _one("ptrace.sysctl_conf", "1", "warn"),
    # Core dumps.
    "core-pattern": _one("core_dumps.pattern", "core"),
    "core-apport": _one("core_dumps.pattern", "apport"),
    "core-pattern-at-boot": _one("core_dumps.pattern", "/tmp/core"),
    "core-no-directory": _one("core_dumps.directory", "no such directory"),
    "core-directory-mode": _one("core_dumps.directory", "755"),
    "core-directory-sticky": _one("core_dumps.directory", "777", "warn"),
    "core-directory-file": _one("core_dumps.directory", ""),
    "core-directory-link": _one("core_dumps.directory", ""),
    "core-directory-read-only": _one("core_dumps.directory", "read-only"),
    "core-no-rule": _one("core_dumps.retention", "no rule"),
    # Limits.
    "limits-core-zero": Row({"limits.core": "fail"}, "0", {"proof.limits": "fail"}),
    "limits-nofile": Row({"limits.nofile": "fail"}, "1024", {"proof.limits": "fail"}),
    "limits-memlock": Row({"limits.memlock": "fail"}, "64", {"proof.limits": "fail"}),
    "limits-soft": Row({"limits.nofile": "fail"}, "1024", {"proof.limits": "fail"}),
    "limits-user": Row({"limits.exceptions": "warn"}, "ml", {"proof.limits": "fail"}),
    "limits-group": Row({"limits.exceptions": "warn"}, "@ml", {"proof.limits": "fail"}),
    "limits-range": Row({"limits.exceptions": "fail"}, "1000:", {"proof.limits": "fail"}),
    "limits-gone": Row(
        {"limits.core": "fail", "limits.memlock": "fail", "limits.nofile": "fail"},
        "unset",
        {"proof.limits": "fail"},
    ),
    "limits-not-by-ssh": Row({"limits.pam": "fail"}, "sshd", {"proof.limits": "fail"}),
    "limits-not-by-su": Row({"limits.pam": "warn"}, "su", {"proof.limits": "fail"}),
    "limits-other-file": Row({"limits.pam": "fail"}, "sshd", {"proof.limits": "fail"}),
    "limits-other-file-su": Row({"limits.pam": "warn"}, "su", {"proof.limits": "fail"}),
    "limits-profile": Row({}, "the profile lowers nofile", {"proof.limits": "fail"}),
    "limits-own-profile": Row({}, "core", {"proof.limits": "fail"}),
    # Logins of a job's user.
    "no-user": Row({}, "no such user", {"proof.user": "fail"}),
    "account-expired": Row({}, "expired", {"proof.user": "fail"}),
    "nologin": Row({}, "/etc/nologin is there", {"proof.user": "fail", "proof.ssh": "fail"}),
    "no-home": Row({}, "no key of ml is accepted", {"proof.ssh": "fail"}),
    "home-not-own": Row({}, "no key of ml is accepted", {"proof.ssh": "fail"}),
    "no-shell": Row({}, "cannot log in", {"proof.ssh": "fail"}),
    "shell-nologin": Row({}, "the login shell of ml there is nologin", {"proof.ssh": "fail"}),
    "profile-exits": Row({}, "no session", {"proof.user": "fail"}),
    "profile-hangs": Row({}, "timed out", {"proof.user": "fail"}),
    "profile-talks": Row({}),
    "keys-refused": Row({}, "no key of ml is accepted", {"proof.ssh": "fail"}),
    "no-keys": Row({}, "no key of ml is accepted", {"proof.ssh": "fail"}),
    # ssh between the nodes.
    "known-hosts-gone": Row({"ssh_client.known_hosts": "fail"}, "no file", {"proof.ssh": "fail"}),
    "known-hosts-mode": Row({"ssh_client.known_hosts": "fail"}, "600", {"proof.ssh": "fail"}),
    "known-hosts-cut": Row({"ssh_client.known_hosts": "fail"}, "missing", {"proof.ssh": "fail"}),
    "known-hosts-old-key": Row(
        {"ssh_client.known_hosts": "fail"}, "missing", {"proof.ssh": "fail"}
    ),
    # ssh is content with one file that has the right key (sshconnect.c).
    "known-hosts-own-old-key": Row({}),
    "ssh-gone": Row({"ssh_client.installed": "fail"}, "is gone", {"proof.ssh": "fail"}),
    "ssh-mode": Row({"ssh_client.installed": "fail"}, "700", {"proof.ssh": "fail"}),
    "ssh-bad-option": Row(_NO_SSH, "50-site.conf: line 2: Bad", {"proof.ssh": "fail"}),
    "ssh-config-mode": Row(_NO_SSH, "Permission denied", {"proof.ssh": "fail"}),
    "ssh-other-known-hosts": Row({}, "host key is unknown", {"proof.ssh": "fail"}),
    "ssh-proxy": Row({}, "cannot log in", {"proof.ssh": "fail"}),
    "ssh-other-port": Row({}, "connection refused", {"proof.ssh": "fail"}),
    "ssh-key-gone": Row({}, "no key of ml is accepted", {"proof.ssh": "fail"}),
    "ssh-key-mode": Row({}, "private key that others may read", {"proof.ssh": "fail"}),
    "sshd-no-users": Row({}, "no key of ml is accepted", {"proof.ssh": "fail"}),
    # pdsh.
    # Where the shell reads no profile; a session has the right one from our file in profile.d.
    "pdsh-rsh": Row({"pdsh.rcmd": "fail"}, "rcmd_default"),
    "pdsh-rsh-environment": Row({"pdsh.rcmd": "fail"}, "environment"),
    "pdsh-rsh-profile": Row({"pdsh.rcmd": "fail"}, "profile.d", {"proof.pdsh": "fail"}),
    "pdsh-rsh-bashrc": Row({"pdsh.conflicts": "warn"}, "bash.bashrc:1", {"proof.pdsh": "fail"}),
    "pdsh-rsh-own": Row({}, "rsh", {"proof.pdsh": "fail"}),
    "pdsh-gone": Row(_NO_PDSH, "not installed", {"proof.pdsh": "fail"}),
    "pdsh-mode": Row(_NO_PDSH, "700", {"proof.pdsh": "fail"}),
    "pdsh-no-ssh": Row({"pdsh.installed": "warn"}, "sshcmd.so", {"proof.pdsh": "fail"}),
    # Debugging tools.
    "gdb-gone": Row({"debug_tools.packages": "fail"}, "gdb", {"proof.gdb": "fail"}),
    "gdb-mode": Row({"debug_tools.packages": "fail"}, "gdb", {"proof.gdb": "fail"}),
    "gdb-broken": Row({"debug_tools.packages": "fail"}, "gdb", {"proof.gdb": "fail"}),
    "strace-gone": Row({"debug_tools.packages": "fail"}, "strace", {"proof.strace": "fail"}),
    "strace-mode": Row({"debug_tools.packages": "fail"}, "strace", {"proof.strace": "fail"}),
    "py-spy-gone": Row({_PY_SPY: "fail"}, "not installed", _NO_PY_SPY),
    "py-spy-version": Row({_PY_SPY: "fail"}, "0.3.14", _NO_PY_SPY),
    "py-spy-mode": Row({_PY_SPY: "fail"}, "700", _NO_PY_SPY),
    "py-spy-writable": _one(_PY_SPY, "others can change"),
    "py-spy-cut": Row({_PY_SPY: "fail"}, "", _NO_PY_SPY),
    "py-spy-hangs": Row({_PY_SPY: "fail"}, "", _NO_PY_SPY),
    "programs-writable": _one(_PY_SPY, "/usr/local/bin"),
    # Kernel arguments.
    "iommu-not-set": Row({"iommu.live": "warn", "iommu.args": "fail"}, "iommu=pt missing"),
    "iommu-soft": Row({"iommu.live": "warn", "iommu.args": "fail"}, "iommu=soft contradicts"),
    "iommu-off": _one("iommu.off", "amd_iommu=off", "warn"),
    # The node's own check.
    "gate-gone": Row({"gate.bundle": "fail", "gate.timer": "fail"}, "no /usr/local/lib"),
    "gate-other-policy": _one("gate.policy", "/etc/nodeready/policy.json"),
    "gate-no-timer": _one("gate.timer", "no /etc/cron.d"),
    "gate-writable": _one("gate.bundle", "can be written by others"),
}

#: The proofs that start debuggers: only these groups of faults can touch them.
DEBUGGERS = "proof.attach,proof.attach_nonblocking,proof.attach_native,proof.gdb,proof.strace"
_TOUCHED = ("session", "tools")

#: Faults that no session and no packet of a job meets: the look alone stops the node.
BY_LOOK = ("nvidia", "amd", "rdma", "host", "ptrace", "cores", "iommu", "gate")

#: Every fault takes ten minutes of two cores: in CI, and with NODEREADY_FAULTS=all.
ALL = os.environ.get("NODEREADY_FAULTS") == "all"

#: So many faults are looked at together, beside healthy partners.
BATCH, PARTNERS = 12, 3


def _skipped(group: str) -> str:
    """What of `ready` a fault of this group cannot touch."""
    if group in BY_LOOK:
        return "proof"
    return "proof.attach_native" if group in _TOUCHED else DEBUGGERS


#: The profile, what `ready` skips, the faults.
_Batch = tuple[str, str, tuple[str, ...]]


def _batches() -> list[_Batch]:
    """The batches, or one of each kind.

    A fault is tried on its first profile.
    """
    kinds: dict[tuple[str, str, int], list[str]] = {}
    for name, fault in FAULTS.items():
        # Where many cannot log in, the others are too few to tell who is at fault.
        size = BATCH // 3 if fault.group in ("session", "ssh") else BATCH
        kinds.setdefault((fault.profiles[0], _skipped(fault.group), size), []).append(name)
    return [
        (profile, skipped, tuple(names[at : at + size]))
        for (profile, skipped, size), names in kinds.items()
        for at in range(0, len(names) if ALL else 1, size)
    ]


BATCHES = _batches()


class Benches:
    """A bench per profile, and what was found on them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.made: dict[str, Bench] = {}
        self.healthy: dict[tuple[str, str], dict[str, str]] = {}

    def name(self, profile: str) -> str:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        return f"test-{worker}-{os.getpid()}-table{profile}"

    def bench(self, profile: str) -> Bench:
        """Deployed nodes, healthy so far, and what they say by each policy of the table."""
        if profile in self.made:
            return self.made[profile]
        batches = [faults for where, _, faults in BATCHES if where == profile]
        count = max((len(faults) for faults in batches), default=0)
        lab = Lab.up(self.name(profile), PARTNERS + count, profile)
        names = [name for faults in batches for name in faults]
        bench = self.made[profile] = Bench(self.home / profile, lab, PARTNERS)
        policies = [{}, *(TABLE[name].policy for name in names if TABLE[name].policy)]
        for at in range(0, len(policies), len(lab.nodes)):
            some = dict(zip((node.name for node in lab.nodes), policies[at:], strict=False))
            told = bench.ready(some, "--skip", "proof")
            for node, policy in some.items():
                statuses = {check: one["status"] for check, one in told[node].ready.items()}
                self.healthy[profile, repr(policy)] = statuses
        return bench

    def end(self) -> None:
        for profile in self.made:
            down(self.name(profile))


@pytest.fixture(scope="module")
def benches(lab_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Benches]:
    made = Benches(tmp_path_factory.mktemp("benches"))
    try:
        yield made
    finally:
        made.end()


def test_every_fault_is_in_the_table() -> None:
    assert set(TABLE) == set(FAULTS)
    assert len(TABLE) >= 150


def complaints(told: Told) -> dict[str, tuple[str, str]]:
    """What is not well: check -> its status, and what was found."""
    return {
        check: (one["status"], one["actual"])
        for check, one in told.ready.items()
        if one["status"] not in ("ok", "na")
        and check not in WAIVERS
        and (check, one["status"]) != ("host.stuck", "warn")
    }


def _is_well(bench: Bench) -> None:
    """After a deploy, neither the audit nor what `ready` proves has anything to complain of."""
    names = ",".join(node.name for node in bench.partners)
    told = bench.ready({}, "--limit", names)
    for node in told.values():
        assert not complaints(node)
        assert node.go
        assert {check.partition(".")[0] for check in node.ready} == set(SUBJECTS)


def _wrong(fault: str, told: Told, before: dict[str, str]) -> str:
    """What of this fault's row is not so; "": nothing."""
    row = TABLE[fault]
    wanted = {**row.changes, **row.proofs}
    changed = {
        check: one["status"]
        for check, one in told.ready.items()
        if check in wanted
        or (
            one["status"] in ("fail", "warn", "unknown")
            and one["status"] != before.get(check)
            # A node whose policy is another than that of its deploy has another file of it.
            and not (row.policy and check == "gate.policy")
            # On a machine that is busy, a process of the look waits in the kernel for a second.
            and (check, one["status"]) != ("host.stuck", "warn")
        )
    }
    if changed != wanted:
        found = {check: (status, told.ready[check]["actual"]) for check, status in changed.items()}
        return f"wanted {wanted}, found {found}"
    if told.go != (row.go and not row.policy):
        return f"go is {told.go}: {told.reasons}"
    if wanted and row.says not in told.ready[next(iter(wanted))]["actual"]:
        return f"{row.says!r} is not in {told.ready[next(iter(wanted))]['actual']!r}"
    for check, status in wanted.items():
        one = told.ready[check]
        if status in ("fail", "warn") and not one["fix"] and check != "gpus.model":
            return f"{check} has no fix"
        if FAULTS[fault].group == "amd" and "nvidia" in f"{one['source']} {one['fix']}".lower():
            return f"{check} speaks of NVIDIA: {one}"
    return ""


def _shown_wrong(
    benches: Benches, profile: str, skipped: str, faults: tuple[str, ...]
) -> dict[str, str]:
    """The faults of a batch that do not show as their rows say, and in which way."""
    bench = benches.bench(profile)
    given = bench.break_([name for name in faults if all(map(shutil.which, FAULTS[name].needs))])
    policies = {node.name: TABLE[name].policy for name, node in given.items()}
    found: dict[str, str] = {}
    # On an overloaded machine a section of a look may reach its time limit: what is wrong is asked
    # once more.
    for _ in range(2):
        told = bench.ready(policies, "--skip", skipped)
        for name, node in given.items():
            before = benches.healthy[profile, repr(TABLE[name].policy)]
            found[name] = _wrong(name, told[node.name], before)
        # Who is healthy is not named for the faults of others.
        for node in bench.partners:
            bad = complaints(told[node.name])
            found[node.name] = f"{bad}" if bad or not told[node.name].go else ""
        if not any(found.values()):
            break
    return {name: why for name, why in found.items() if why}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_healthy_node_is_well_and_each_fault_shows_where_it_should_and_nowhere_else(
    benches: Benches, profile: str
) -> None:
    """One test, for the nodes of a profile's bench are made once."""
    _is_well(benches.bench(profile))
    found: dict[str, str] = {}
    for where, skipped, faults in BATCHES:
        if where == profile:
            found |= _shown_wrong(benches, profile, skipped, faults)
    assert not found, "\n".join(f"{name}: {why}" for name, why in found.items())

"""What a machine needs for a lab: programs, parts of the kernel, limits that root may raise."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

from nodeready.lab.programs import environment, run
from nodeready.lab.state import LabUnavailable

# Program: its package on Debian and Ubuntu, on Fedora and RHEL, on SUSE.
_PROGRAMS = {
    "ip": ("iproute2", "iproute", "iproute2"),
    "sshd": ("openssh-server", "openssh-server", "openssh-server"),
    "ssh": ("openssh-client", "openssh-clients", "openssh-clients"),
    "nsenter": ("util-linux", "util-linux-core", "util-linux"),
}
_INSTALLERS = (("apt-get", 0), ("dnf", 1), ("zypper", 2))

# <linux/capability.h>
_CAP_SYS_RESOURCE = 24

# What a node needs from the kernel, in namespaces that vanish with the trial.
_TRIAL = """
mount -t tmpfs lab /mnt && mkdir /mnt/u /mnt/w /mnt/m || { echo 'mount a tmpfs'; exit 1; }
mount -t overlay lab -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/m ||
    { echo 'mount an overlay of /'; exit 1; }
mount -t proc lab /mnt/m/proc || { echo 'mount /proc'; exit 1; }
ip link add name lab0 type bridge && ip link add name lab1 type veth peer name lab2 ||
    { echo 'make a bridge'; exit 1; }
"""


def check_needs() -> None:
    """Raise LabUnavailable, in one line, unless this machine can run a lab."""
    if os.geteuid() != 0:
        raise LabUnavailable("the lab makes namespaces and mounts: run it as root (sudo)")
    path = environment()["PATH"]
    if missing := [name for name in _PROGRAMS if not shutil.which(name, path=path)]:
        installed = (item for item in _INSTALLERS if shutil.which(item[0], path=path))
        installer, column = next(installed, ("", 0))
        packages = sorted({_PROGRAMS[name][column] for name in missing})
        how = f"{installer} install" if installer else "install"
        raise LabUnavailable(f"not installed: {', '.join(missing)}; {how} {' '.join(packages)}")


def check_kernel() -> None:
    """Raise LabUnavailable unless the kernel allows all parts of a node."""
    flags = ["--mount", "--pid", "--net", "--uts", "--ipc", "--fork"]
    done = run(["unshare", *flags, "sh", "-c", _TRIAL], timeout=None)
    if done.returncode:
        refusal = done.stdout.strip() or "make namespaces"
        errors = done.stderr.strip().splitlines()
        reason = errors[-1] if errors else "no reason given"
        raise LabUnavailable(
            f"this machine does not let root {refusal} ({reason}); a lab needs a real or virtual"
            " machine, a privileged container, or a chroot that is a mount point (mount --bind)"
        )


def can_raise_limits() -> bool:
    """Whether root may raise a hard limit here: it needs CAP_SYS_RESOURCE.

    Without it the sessions of a node cannot exceed this machine's hard limits.
    """
    words = Path("/proc/self/status").read_text().split()
    return bool(int(words[words.index("CapEff:") + 1], 16) >> _CAP_SYS_RESOURCE & 1)


def node_settings() -> dict[str, Any]:
    """The policy of the nodes of a lab here: what they cannot reach is not asked of them.

    The nodes are processes of this machine. Its kernel writes cores by its own core_pattern, not
    by the one that a node shows and changes.
    """
    waivers = {
        "proof.core": "lab nodes share this machine's kernel and its core_pattern",
        "proof.backtrace": "see proof.core",
    }
    return {**reachable_limits(), "waivers": waivers}


def reachable_limits() -> dict[str, int]:
    """The policy's limits that the nodes of a lab here can reach; {} if root may raise limits.

    They are this machine's hard limits, where those are lower than the policy's defaults.
    """
    if can_raise_limits():
        return {}
    limits: dict[str, int] = {}
    _, nofile = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if nofile != resource.RLIM_INFINITY:
        limits["limit_nofile"] = min(nofile, 1048576)
    if memlock != resource.RLIM_INFINITY:
        limits["limit_memlock"] = memlock // 1024
    return limits

"""What a machine must have to run a lab, and who provides it."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

from nodeready.lab.state import LabUnavailable

# Program: its package on Debian and Ubuntu, on Fedora and RHEL, on SUSE.
_PROGRAMS = {
    "ip": ("iproute2", "iproute", "iproute2"),
    "sshd": ("openssh-server", "openssh-server", "openssh-server"),
    "ssh": ("openssh-client", "openssh-clients", "openssh-clients"),
    "nsenter": ("util-linux", "util-linux-core", "util-linux"),
}
# What Slurm on a lab needs besides.
_SLURM_PROGRAMS = {
    "slurmctld": ("slurmctld", "slurm-slurmctld", "slurm"),
    "slurmd": ("slurmd", "slurm-slurmd", "slurm-node"),
    "sinfo": ("slurm-client", "slurm", "slurm"),
    "munged": ("munge", "munge", "munge"),
}
_INSTALLERS = (("apt-get", 0), ("dnf", 1), ("zypper", 2))

# <linux/capability.h>
_CAP_SYS_RESOURCE = 24

# Everything that a node needs from the kernel, in namespaces that vanish with the trial.
_TRIAL = """
mount -t tmpfs lab /mnt && mkdir /mnt/u /mnt/w /mnt/m || { echo 'mount a tmpfs'; exit 1; }
mount -t overlay lab -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/m ||
    { echo 'mount an overlay of /'; exit 1; }
mount -t proc lab /mnt/m/proc || { echo 'mount /proc'; exit 1; }
ip link add name lab0 type bridge && ip link add name lab1 type veth peer name lab2 ||
    { echo 'make a bridge'; exit 1; }
"""


def environment() -> dict[str, str]:
    """Our environment, with the administrator's programs on the path also after a plain `su`."""
    path = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"
    return {**os.environ, "PATH": path, "LC_ALL": "C"}


def missing_programs(slurm: bool = False) -> list[str]:
    """The programs of a lab (and of Slurm) that are not installed."""
    path = environment()["PATH"]
    names = [*_PROGRAMS, *(_SLURM_PROGRAMS if slurm else ())]
    return [name for name in names if not shutil.which(name, path=path)]


def check(slurm: bool = False) -> None:
    """Raise LabUnavailable, in one line, unless this machine can run a lab (with Slurm)."""
    if os.geteuid() != 0:
        raise LabUnavailable("the lab makes namespaces and mounts: run it as root (sudo)")
    missing = missing_programs(slurm)
    if missing:
        installer, column = next(
            (
                (name, at)
                for name, at in _INSTALLERS
                if shutil.which(name, path=environment()["PATH"])
            ),
            ("", 0),
        )
        known = {**_PROGRAMS, **_SLURM_PROGRAMS}
        packages = sorted({known[name][column] for name in missing})
        how = f"{installer} install" if installer else "install"
        raise LabUnavailable(f"not installed: {', '.join(missing)}; {how} {' '.join(packages)}")


def check_kernel() -> None:
    """Raise LabUnavailable unless the kernel lets us make what a node is made of."""
    flags = ["--mount", "--pid", "--net", "--uts", "--ipc", "--fork"]
    done = subprocess.run(
        ["unshare", *flags, "sh", "-c", _TRIAL],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    if done.returncode:
        what = done.stdout.strip() or "make namespaces"
        why = done.stderr.strip().splitlines()
        raise LabUnavailable(
            f"this machine does not let root {what}"
            f" ({why[-1] if why else 'no reason given'}); a lab needs a real or virtual machine"
            " or a privileged container"
        )


def can_raise_limits() -> bool:
    """May root here raise a hard limit? Not without CAP_SYS_RESOURCE, as in some sandboxes.

    Then a node's sessions cannot get more than this machine's own hard limits.
    """
    words = Path("/proc/self/status").read_text().split()
    return bool(int(words[words.index("CapEff:") + 1], 16) >> _CAP_SYS_RESOURCE & 1)


def reachable_limits() -> dict[str, int]:
    """Policy settings that the nodes of a lab here can reach: none where root may raise limits.

    Without CAP_SYS_RESOURCE they are this machine's own hard limits, where those are lower than
    the policy's defaults.
    """
    if can_raise_limits():
        return {}
    found: dict[str, int] = {}
    _, nofile = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if nofile != resource.RLIM_INFINITY:
        found["limit_nofile"] = min(nofile, 1048576)
    if memlock != resource.RLIM_INFINITY:
        found["limit_memlock"] = memlock // 1024
    return found

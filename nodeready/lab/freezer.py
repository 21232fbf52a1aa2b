"""The cgroups of a lab with Slurm: each node has a group of the v1 freezer, below which Slurm
puts what belongs to a job.

There is one freezer for the whole machine, so the groups are in it and outlive the nodes; a lab's
are below a group of its name, and go with it. This machine's own mounts are not needed: each look
mounts the freezer in a mount namespace that is gone afterwards.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from nodeready.lab import syscalls as k
from nodeready.lab.errors import LabError
from nodeready.lab.needs import environment

# Where a node has its cgroups, the freezer among them (cgroup.conf(5), CgroupMountpoint).
ROOT = "/sys/fs/cgroup"

_PREFIX = "nodeready-lab-"

_MOUNT = "mount -t cgroup -o freezer freezer /mnt || exit 32\n"

# A frozen process does not even end when it is killed.
_THAW = """
find "/mnt$1" -name freezer.state -exec sh -c 'for f; do echo THAWED >"$f"; done' sh {} +
"""

# A process that has just ended may be in its group for a moment more.
_REMOVE = """
for i in $(seq 100); do
    [ -d "/mnt$1" ] || exit 0
    find "/mnt$1" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.05
done
exit 1
"""


def available() -> bool:
    """Can nodes have the v1 freezer here?"""
    return os.path.isdir(ROOT) and _freezer("", "").returncode == 0


def group(lab: str, node: str = "") -> str:
    """The group of a node, or the one above those of all the lab's nodes."""
    return f"/{_PREFIX}{lab}/{node}".rstrip("/")


def group_of(pid: int) -> str:
    """The group of the node whose process 1 this is; "" when it has none."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "freezer" and path.startswith(f"/{_PREFIX}"):
            return path
    return ""


def join(path: str) -> None:
    """Put this process, which has a mount namespace of its own, into a new group.

    The group is the root of the freezer that it mounts and of what /proc says about its
    descendants (cgroup_namespaces(7)). Raises OSError.
    """
    k.mount("cgroup", ROOT, "tmpfs", k.NOSUID | k.NODEV | k.NOEXEC, "mode=755")
    freezer = f"{ROOT}/freezer"
    os.mkdir(freezer)
    k.mount("freezer", freezer, "cgroup", 0, "freezer")
    os.makedirs(freezer + path, exist_ok=True)
    Path(freezer + path, "cgroup.procs").write_text("0")
    k.unshare(k.NEWCGROUP)
    k.umount(freezer)
    k.mount("freezer", freezer, "cgroup", k.NOSUID | k.NODEV | k.NOEXEC, "freezer")


def thaw(path: str) -> None:
    """Let everything below this group go on, to whatever end."""
    _freezer(_THAW, path)


def remove(path: str) -> None:
    """Remove this group and all below it; nothing lives in them. Raises LabError."""
    if _freezer(_REMOVE, path).returncode == 1:
        raise LabError(f"the cgroup {path} (v1, freezer) cannot be removed: who is in it?")


def _freezer(script: str, path: str) -> subprocess.CompletedProcess[str]:
    """Run a script that finds the freezer at /mnt; exit status 32: it could not be mounted."""
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", _MOUNT + script, "sh", path],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )

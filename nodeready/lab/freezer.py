"""The freezer cgroups (v1) of a lab with Slurm: one group per node, below which Slurm puts jobs.

A machine has one freezer, so the groups outlive the nodes: a lab's groups are below one group, and
go with it. Each command mounts the freezer in its own mount namespace.
"""

from __future__ import annotations

import os
from pathlib import Path

from nodeready.lab import syscalls
from nodeready.lab.programs import Done, run
from nodeready.lab.state import LabError

# The directory of a node's cgroups (cgroup.conf(5), CgroupMountpoint).
CGROUP_ROOT = "/sys/fs/cgroup"

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


def is_available() -> bool:
    """Whether nodes can have the v1 freezer here."""
    return os.path.isdir(CGROUP_ROOT) and _freezer("", "").returncode == 0


def group_path(lab: str, node: str = "") -> str:
    """The group of a node, or the group above those of all the lab's nodes."""
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
    """Put this process into a new group. It needs its own mount namespace. Raises OSError.

    The group is the root of the freezer that the node mounts, and of the paths in /proc of its
    processes (cgroup_namespaces(7)).
    """
    safe = syscalls.NOSUID | syscalls.NODEV | syscalls.NOEXEC
    syscalls.mount("cgroup", CGROUP_ROOT, "tmpfs", safe, "mode=755")
    freezer = f"{CGROUP_ROOT}/freezer"
    os.mkdir(freezer)
    syscalls.mount("freezer", freezer, "cgroup", 0, "freezer")
    os.makedirs(freezer + path, exist_ok=True)
    Path(freezer + path, "cgroup.procs").write_text("0")
    syscalls.unshare(syscalls.NEWCGROUP)
    syscalls.umount(freezer)
    syscalls.mount("freezer", freezer, "cgroup", safe, "freezer")


def thaw(path: str) -> None:
    """Thaw this group and all below it."""
    _freezer(_THAW, path)


def remove(path: str) -> None:
    """Remove this group and all below it; no process is in them. Raises LabError."""
    if _freezer(_REMOVE, path).returncode == 1:
        raise LabError(f"the cgroup {path} (v1, freezer) cannot be removed: a process is in it")


def _freezer(script: str, path: str) -> Done:
    """Run a script that finds the freezer at /mnt; exit status 32: it could not be mounted."""
    return run(["unshare", "--mount", "sh", "-c", _MOUNT + script, "sh", path], timeout=None)

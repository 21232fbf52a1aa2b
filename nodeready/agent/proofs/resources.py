"""Prove that the job's user can use directories, shared memory and device files as a job does.

Each directory is tried with a file of 1 MiB that has no name.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import grp
import mmap
import os
import pwd
import stat
import tempfile
from pathlib import Path

from nodeready.agent.proc import user_name
from nodeready.agent.runtime import ProcessSupervisor
from nodeready.subjects.proof.facts import SHM, DeviceNode, JobDirectory, ProofConfig, Resources

#: The files that CUDA, ROCm, NCCL and MPI open.
_DEVICES = (
    "/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/kfd",
    "/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm",
)  # fmt: skip
#: Bytes that are written, more than a file system reserves for a small file.
_BYTES = 1 << 20


def prove(supervisor: ProcessSupervisor, config: ProofConfig) -> Resources:
    """Write to the directories, map the files, and try to open the device files."""
    home = pwd.getpwuid(os.geteuid()).pw_dir
    places = dict.fromkeys(("/tmp", SHM, home))
    devices = sorted(path for pattern in _DEVICES for path in glob.glob(pattern))
    if os.path.exists("/dev/kfd"):
        devices += sorted(glob.glob("/dev/dri/renderD*"))
    return Resources(
        tuple(_place(path) for path in places if os.path.isabs(path)),
        tuple(filter(None, map(_device, devices))),
        home,
        _memory_bytes("/"),
    )


def _place(path: str) -> JobDirectory:
    """Whether files in a directory can be written, mapped and executed."""
    number = -1
    try:
        # A file without a name leaves nothing behind, even if this process is killed.
        number = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o700)
    except OSError as problem:
        # Network file systems do not support files without a name.
        if isinstance(problem, (PermissionError, FileNotFoundError, NotADirectoryError)):
            return JobDirectory(path, _words(problem))
    try:
        if number < 0:
            number, name = tempfile.mkstemp(prefix=".nodeready-", dir=path)
            os.unlink(name)
        os.posix_fallocate(number, 0, _BYTES)
        with mmap.mmap(number, _BYTES) as shared:
            shared[:1] = b"x"
        free = os.fstatvfs(number)
    except OSError as problem:
        return JobDirectory(path, _words(problem))
    else:
        return JobDirectory(path, "", _executes(number), free.f_bavail * free.f_frsize)
    finally:
        if number >= 0:
            os.close(number)


def _memory_bytes(root: str) -> int | None:
    """The free memory and swap, at most the lowest memory.max of this session's cgroups (v2). A
    cgroup's current use is ignored, because it counts files that the kernel can drop. None:
    /proc/meminfo cannot be read.
    root: the directory of /proc and /sys"""
    try:
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        names = ("MemAvailable", "SwapFree")
        memory_bytes = sum(int(fields[name].split()[0]) << 10 for name in names)
    except (OSError, ValueError, KeyError):
        return None
    with contextlib.suppress(OSError, UnicodeError):
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8") as file:
            groups = [line[3:].strip() for line in file if line.startswith("0::/")]
        for group in groups:
            parts = group.strip("/").split("/")
            for depth in range(len(parts)):
                path = Path(root, "sys/fs/cgroup", *parts[: depth + 1], "memory.max")
                # There is no limit if the file is missing or has "max".
                with contextlib.suppress(OSError, ValueError):
                    memory_bytes = min(memory_bytes, int(path.read_text(encoding="ascii")))
    return memory_bytes


def _executes(number: int) -> str:
    """Why the loader cannot map code from a file; "": it can."""
    try:
        mmap.mmap(number, _BYTES, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as problem:
        return _words(problem)
    return ""


def _words(problem: OSError) -> str:
    return problem.strerror or str(problem)


def _device(path: str) -> DeviceNode | None:
    """A device file whose mode or ACL excludes the user; None: the user may open it. A cgroup that
    reserves a device for other jobs gives EPERM, which is no fault of the file."""
    if os.access(path, os.R_OK | os.W_OK):
        return None
    try:
        # The kernel refuses before it calls the driver, so the device is not opened.
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError as problem:
        if problem.errno != errno.EACCES:
            return None
        status = os.stat(path)
        owner = f"{user_name(status.st_uid)}:{_group(status.st_gid)}"
        return DeviceNode(path, f"{stat.S_IMODE(status.st_mode):04o} {owner}")
    except OSError:
        return None
    return None


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)

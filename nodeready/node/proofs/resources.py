"""Prove that the job's user has what a job uses: directories, shared memory, device files.

Each is tried as a job tries it, with a file of our own of 1 MiB that has no name before or after.
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

from nodeready.node.proofs.session import name_of
from nodeready.node.runtime import ProcessSupervisor
from nodeready.subjects.proof.facts import SHM, DeviceNode, JobDirectory, ProofConfig, Resources

#: The files that CUDA, ROCm, NCCL and MPI open.
_DEVICES = (
    "/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/kfd",
    "/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm",
)  # fmt: skip
#: Bytes that are written: more than a file system keeps back for its own use of a small file.
_BYTES = 1 << 20


def prove(supervisor: ProcessSupervisor, config: ProofConfig) -> Resources:
    """Write to the directories, map what was written, and ask for the device files."""
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
    """What can be done in a directory."""
    number = -1
    try:
        # Without a name, nothing is left whatever ends us.
        number = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o700)
    except OSError as problem:
        # A file system of the network has no such files.
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
    """What is free of memory and swap, or the lowest memory.max of this session's cgroups (v2).

    Not what a cgroup has left: its use counts files that the kernel gives up when asked. None:
    /proc/meminfo cannot be read. root: the directory of /proc and /sys.
    """
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
                # "max", no controller of memory, and a file that is not there limit nothing.
                with contextlib.suppress(OSError, ValueError):
                    memory_bytes = min(memory_bytes, int(path.read_text(encoding="ascii")))
    return memory_bytes


def _executes(number: int) -> str:
    """Why code cannot be mapped from a file, as the loader maps it; "": it can."""
    try:
        mmap.mmap(number, _BYTES, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as problem:
        return _words(problem)
    return ""


def _words(problem: OSError) -> str:
    return problem.strerror or str(problem)


def _device(path: str) -> DeviceNode | None:
    """A device file that its mode or its ACL keeps from the user; None: it does not.

    A cgroup that keeps a device for other jobs says EPERM, and is no fault of the file.
    """
    if os.access(path, os.R_OK | os.W_OK):
        return None
    try:
        # The kernel refuses before the driver is asked: nothing is opened.
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError as problem:
        if problem.errno != errno.EACCES:
            return None
        status = os.stat(path)
        owner = f"{name_of(status.st_uid)}:{_group(status.st_gid)}"
        return DeviceNode(path, f"{stat.S_IMODE(status.st_mode):04o} {owner}")
    except OSError:
        return None
    return None


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)

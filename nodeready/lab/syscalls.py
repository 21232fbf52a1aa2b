"""The system calls for namespaces, mounts and processes, by libc."""

from __future__ import annotations

import ctypes
import os
import platform

# <linux/sched.h>
NEWNS = 0x00020000
NEWUTS = 0x04000000
NEWIPC = 0x08000000
NEWPID = 0x20000000
NEWNET = 0x40000000

# <linux/mount.h>
RDONLY = 1
NOSUID = 2
NODEV = 4
NOEXEC = 8
BIND = 4096
REC = 16384
PRIVATE = 1 << 18
DETACH = 2

# <linux/prctl.h> and <linux/capability.h>
_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_CAP_SYS_MODULE = 16
_CAP_SYS_RAWIO = 17
_CAP_SYS_TIME = 25

# pivot_root has no wrapper in libc. The generic table (41) serves aarch64, riscv64, loongarch64.
_PIVOT_ROOT = {"x86_64": 155, "ppc64le": 203, "s390x": 217}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, doing: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{doing}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces (NEWPID: its next children)."""
    _check(_libc.unshare(flags), "new namespaces")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace that `fd` (a /proc/PID/ns file) stands for."""
    _check(_libc.setns(fd, kind), "enter a namespace")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    done = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    _check(done, f"mount {kind or 'bind'} on {target}")


def umount(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_libc.umount2(target.encode(), flags), f"unmount {target}")


def pivot_root(new: str) -> None:
    """Make `new`, a mount point, the root of this mount namespace and let the old one go."""
    os.chdir(new)
    number = _PIVOT_ROOT.get(platform.machine(), 41)
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), f"pivot_root to {new}")
    # Both are now stacked on "/": what is detached here is the old root.
    umount(".", DETACH)
    os.chdir("/")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this signal when the parent ends; 0: no longer."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "follow the parent")


def drop_machine_capabilities() -> None:
    """Take away what would reach the whole machine from a node: modules, raw I/O, the clock."""
    for capability in (_CAP_SYS_MODULE, _CAP_SYS_RAWIO, _CAP_SYS_TIME):
        _check(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), "drop a capability")

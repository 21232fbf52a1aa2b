"""Processes that are a fault of a node: one hangs, one has a job's port, one serves a dead mount.

`python -m nodeready.lab.culprits PID stuck`, `… PID listener PORT` or `… PID dead_mount PATH`
starts the process on the node whose process 1 is PID, waits until it is ready, and prints its pid
on this machine. The process dies with the node.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from nodeready.lab import host
from nodeready.lab.processes import detach

# <sys/prctl.h>: the name in /proc/PID/comm.
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None)

#: The mount in /proc/mounts: a type that every site calls a network file system.
KIND = "fuse.sshfs"
SOURCE = "nas:/export"

# <linux/fuse.h>: the first request and the layout of its answer, protocol 7.31.
_INIT = 26
_IN_HEADER = struct.Struct("=IIQQIIIHH")
_OUT_HEADER = struct.Struct("=IiQ")
_INIT_OUT = struct.Struct("=IIIIHHIIHHI28x")
_BUFFER = 1 << 17
_DEVICE = os.makedev(10, 229)


def stuck(ready: Callable[[], None]) -> NoReturn:
    """Stay in state D.

    A parent waits in state D until its vfork(2) child runs a program or ends, which this child
    does not. SIGKILL ends it: a process that cannot be killed would outlive the lab.
    """
    _name("train")
    ready()
    if _libc.vfork() == 0:
        # It only sleeps: the memory is the parent's.
        while True:
            time.sleep(86400)
    os._exit(0)


def listener(ready: Callable[[], None], port: str) -> NoReturn:
    """Listen, as a forgotten server does, on a port of jobs."""
    _name("tensorboard")
    with socket.create_server(("", int(port))):
        ready()
        while True:
            time.sleep(86400)


def _open_device() -> int:
    """A descriptor of /dev/fuse, through a temporary device file: a node may have none."""
    path = f"/run/.fuse-{os.getpid()}"
    os.mknod(path, stat.S_IFCHR | 0o600, _DEVICE)
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.unlink(path)


def dead_mount(ready: Callable[[], None], path: str) -> NoReturn:
    """Serve a network mount whose server has died: a process that uses it hangs in state D.

    This process mounts a FUSE file system, answers the kernel's first request, and reads every
    later one without an answer. A process cannot give up a request that the server has read
    (Linux, fs/fuse/dev.c, request_wait_answer), as with a hard NFS mount. When this server or its
    node is killed, the kernel ends all requests with ENOTCONN.
    """
    os.makedirs(path, exist_ok=True)
    device = _open_device()
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    host.mount(SOURCE, path, KIND, host.NOSUID | host.NODEV, options)
    while True:
        request = os.read(device, _BUFFER)
        _length, opcode, unique, *_ = _IN_HEADER.unpack_from(request)
        if opcode == _INIT:
            body = _INIT_OUT.pack(7, 31, 65536, 0, 12, 9, 65536, 1, 0, 0, 0)
            os.write(device, _OUT_HEADER.pack(_OUT_HEADER.size + len(body), 0, unique) + body)
            ready()


CULPRITS: dict[str, Callable[..., NoReturn]] = {
    "stuck": stuck,
    "listener": listener,
    "dead_mount": dead_mount,
}


def start(pid: int, kind: str, *words: str) -> int:
    """Start a culprit in the node of this process 1, and wait until it is ready.

    Returns its pid on this machine. Raises OSError.
    """
    namespaces = {"pid": host.NEWPID, "net": host.NEWNET, "mnt": host.NEWNS}
    for name, flag in namespaces.items():
        handle = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        host.setns(handle, flag)
        os.close(handle)
    status, child_status = os.pipe()
    culprit = os.fork()
    if culprit == 0:
        try:
            os.close(status)
            detach()
            CULPRITS[kind](lambda: _report(child_status, b"ready"), *words)
        except Exception as error:  # noqa: BLE001 - the caller reports any error
            _report(child_status, str(error).encode())
        finally:
            os._exit(1)
    os.close(child_status)
    answer = os.read(status, 4096)
    if answer != b"ready":
        raise OSError(answer.decode() or f"{kind} ended at once")
    return culprit


def _report(pipe: int, message: bytes) -> None:
    os.write(pipe, message)
    os.close(pipe)


def _name(name: str) -> None:
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    try:
        print(start(int(sys.argv[1]), *sys.argv[2:]))
    except OSError as error:
        sys.exit(str(error))

"""A network mount whose server has died: whoever looks into it waits, and cannot be killed.

`python -m nodeready.lab.dead_mount PID PATH` mounts a FUSE file system in the node whose process
1 is PID, answers the kernel's greeting, reads every request from then on and answers none. A
request that the server has read can be given up by nobody (Linux, fs/fuse/dev.c,
request_wait_answer): the process stays in state D, as with a hard NFS mount. The server is a
process of the node: when it or the node is killed, the kernel ends all requests with ENOTCONN.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import sys
from typing import NoReturn

from nodeready.lab import syscalls as k
from nodeready.lab.processes import detach

#: What the mount shows in /proc/mounts: a kind that every site calls a network file system.
KIND = "fuse.sshfs"
SOURCE = "nas:/export"

# <linux/fuse.h>: the greeting and the layout of its answer, protocol 7.31.
_INIT = 26
_IN_HEADER = struct.Struct("=IIQQIIIHH")
_OUT_HEADER = struct.Struct("=IiQ")
_INIT_OUT = struct.Struct("=IIIIHHIIHHI28x")
_BUFFER = 1 << 17
_DEVICE = os.makedev(10, 229)


def mount(pid: int, path: str) -> int:
    """Have the dead mount at `path` of the node; the pid of its server here. Raises OSError."""
    spaces = [
        (os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC), kind)
        for name, kind in (("pid", k.NEWPID), ("mnt", k.NEWNS))
    ]
    for handle, kind in spaces:
        k.setns(handle, kind)
    ready, child_ready = os.pipe()
    server = os.fork()
    if server == 0:
        try:
            os.close(ready)
            _serve(path, child_ready)
        except Exception as error:  # noqa: BLE001 - its last words, whatever they are
            os.write(child_ready, str(error).encode())
        finally:
            os._exit(1)
    os.close(child_ready)
    problem = os.read(ready, 4096)
    if problem != b"mounted":
        raise OSError(problem.decode() or "the mount's server ended")
    return server


def _open_device() -> int:
    """/dev/fuse; a node may have none, so through one of our own that is gone again at once."""
    own = f"/run/.fuse-{os.getpid()}"
    os.mknod(own, stat.S_IFCHR | 0o600, _DEVICE)
    try:
        return os.open(own, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.unlink(own)


def _serve(path: str, ready: int) -> NoReturn:
    detach()
    os.makedirs(path, exist_ok=True)
    device = _open_device()
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    k.mount(SOURCE, path, KIND, k.NOSUID | k.NODEV, options)
    while True:
        request = os.read(device, _BUFFER)
        _length, opcode, unique, *_ = _IN_HEADER.unpack_from(request)
        if opcode == _INIT:
            body = _INIT_OUT.pack(7, 31, 65536, 0, 12, 9, 65536, 1, 0, 0, 0)
            os.write(device, _OUT_HEADER.pack(_OUT_HEADER.size + len(body), 0, unique) + body)
            os.write(ready, b"mounted")
            os.close(ready)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            print(mount(int(sys.argv[1]), sys.argv[2]))
        except OSError as error:
            sys.exit(str(error))

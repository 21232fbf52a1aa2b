"""Processes that are a node's fault: one that hangs in the kernel, one that has a job's port.

`python -m nodeready.lab.culprits PID stuck` or `… PID listener PORT` starts it on the node whose
process 1 is PID, and ends when it is there. It dies with the node.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from nodeready.lab import syscalls as k
from nodeready.lab.processes import detach

# As <sys/prctl.h> has it: the name in /proc/PID/comm.
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None)


def stuck(ready: Callable[[], None]) -> NoReturn:
    """A process in state D, for good.

    A parent waits in state D until its vfork(2) child runs a program or ends, which this one
    does not. SIGKILL ends it, as it should: what cannot be killed would outlive the lab.
    """
    _name("train")
    ready()
    if _libc.vfork() == 0:
        # Nothing but sleep: the memory is the parent's.
        while True:
            time.sleep(86400)
    os._exit(0)


def listener(ready: Callable[[], None], port: str) -> NoReturn:
    """Somebody's forgotten server on a port that jobs want."""
    _name("tensorboard")
    with socket.create_server(("", int(port))):
        ready()
        while True:
            time.sleep(86400)


CULPRITS: dict[str, Callable[..., NoReturn]] = {"stuck": stuck, "listener": listener}


def start(pid: int, kind: str, *words: str) -> None:
    """Start it in the node of this process 1, and wait until it is there. Raises OSError."""
    for name, flag in (("pid", k.NEWPID), ("net", k.NEWNET), ("mnt", k.NEWNS)):
        handle = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        k.setns(handle, flag)
        os.close(handle)
    heard, said = os.pipe()
    if os.fork() == 0:
        try:
            os.close(heard)
            detach()
            CULPRITS[kind](lambda: _say(said, b"ready"), *words)
        except Exception as error:  # noqa: BLE001 - its last words, whatever they are
            _say(said, str(error).encode())
        finally:
            os._exit(1)
    os.close(said)
    answer = os.read(heard, 4096)
    if answer != b"ready":
        raise OSError(answer.decode() or f"{kind} ended at once")


def _say(pipe: int, what: bytes) -> None:
    os.write(pipe, what)
    os.close(pipe)


def _name(name: str) -> None:
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    try:
        start(int(sys.argv[1]), *sys.argv[2:])
    except OSError as error:
        sys.exit(str(error))

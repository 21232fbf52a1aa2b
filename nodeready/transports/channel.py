"""One command on one connection: bytes in, bytes out, and never more of them than we can hold.

What a node prints before our script runs (`.bashrc`, a banner) is not ours to cap on the node, so
it is capped here. The bytes are decoded without loss: one that is no UTF-8 drops nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any, cast

import gevent
from gevent import subprocess

#: Output in front of the answer: a login that prints more than this is broken. Small, because
#: hundreds of nodes may do so at once.
NOISE_BYTES = 1 << 20
#: A whole answer: a snapshot is some 20 KB, and at most 8 MB before it is packed.
ANSWER_BYTES = 16 << 20
#: Standard error of which the first bytes are kept; the rest is read and dropped.
ERROR_BYTES = 64 << 10
_PIECE = 64 << 10


class TooMuchOutput(Exception):
    """The node printed more than we hold; ``first`` are its first bytes."""

    def __init__(self, first: bytes) -> None:
        super().__init__("too much output")
        self.first = first[:40]


@dataclass(frozen=True)
class Said:
    """What a command said. status: its exit status; None: ended by a signal, or nobody knows."""

    status: int | None
    stdout: str
    stderr: str


class _Kept:
    """Standard output so far: a little until ``mark`` has come, then as much as an answer is."""

    def __init__(self, mark: bytes) -> None:
        self.data, self.mark = bytearray(), mark
        self.limit = NOISE_BYTES if mark else ANSWER_BYTES

    def add(self, piece: bytes) -> None:
        self.data += piece
        if len(self.data) <= self.limit:
            return
        if self.limit < ANSWER_BYTES and self.mark in self.data:
            self.limit = ANSWER_BYTES
        else:
            raise TooMuchOutput(bytes(self.data[:200]))


def _text(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "surrogateescape")


def _errors(read: Callable[[int], bytes], kept: bytearray) -> bool:
    """Read standard error to its end, keeping its first bytes; False when it has no end."""
    total = 0
    while piece := read(_PIECE):
        total += len(piece)
        if total > ANSWER_BYTES:
            return False
        kept += piece[: ERROR_BYTES - len(kept)]
    return True


def over_ssh(transport: Any, command: str, stdin: bytes = b"", mark: bytes = b"") -> Said:
    """Run a command over a paramiko Transport; blocks until it has ended.

    mark: the bytes with which the answer begins, whatever stands before them.
    Raises TooMuchOutput, and what paramiko raises when the connection is lost.
    """
    channel = transport.open_session()
    kept, errors = _Kept(mark), bytearray()
    helpers: list[Any] = []
    endless: list[bytes] = []

    def stderr() -> None:
        if not _errors(channel.recv_stderr, errors):
            endless.append(bytes(errors[:200]))
            channel.close()

    def feed() -> None:
        # A command that ends without reading its input is no failure.
        with contextlib.suppress(OSError):
            channel.sendall(stdin)
            channel.shutdown_write()

    try:
        channel.exec_command(command)
        if stdin:
            helpers.append(gevent.spawn(feed))
        else:
            channel.shutdown_write()
        # Both streams share the channel's window: one that nobody reads would stop the other.
        drain = gevent.spawn(stderr)
        helpers.append(drain)
        while piece := channel.recv(_PIECE):
            kept.add(piece)
        drain.join()
        if endless:
            raise TooMuchOutput(endless[0])
        status = channel.recv_exit_status()
    finally:
        gevent.killall(helpers, block=False)
        channel.close()
    return Said(status if status >= 0 else None, _text(kept.data), _text(errors))


def here(command: str, stdin: bytes = b"", mark: bytes = b"") -> Said:
    """The same on this machine, in a session of its own: a Ctrl-C is for us to hand on."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    to, stdout, complaints = (
        cast("BufferedIOBase", s) for s in (process.stdin, process.stdout, process.stderr)
    )
    kept, errors = _Kept(mark), bytearray()
    endless: list[bytes] = []

    def end() -> None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)

    def stderr() -> None:
        if not _errors(complaints.read1, errors):
            endless.append(bytes(errors[:200]))
            end()

    def feed() -> None:
        with contextlib.suppress(OSError):
            to.write(stdin)
            to.close()

    drain = gevent.spawn(stderr)
    helpers = [drain, gevent.spawn(feed)]
    try:
        while piece := stdout.read1(_PIECE):
            kept.add(piece)
        drain.join()
        if endless:
            raise TooMuchOutput(endless[0])
        status = process.wait()
    except (TooMuchOutput, gevent.Timeout):
        end()
        raise
    finally:
        gevent.killall(helpers)
        for stream in (to, stdout, complaints):
            with contextlib.suppress(OSError):
                stream.close()
    return Said(status if status >= 0 else None, _text(kept.data), _text(errors))

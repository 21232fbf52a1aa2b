"""A command on a node that is spoken with, line by line, while it runs.

Only lines with the mark count: what a login prints in between is passed over. Every wait has its
limit, and so has what is kept. The command's input ends when the dialogue does, or when this
machine dies: a command that reads it to the end leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from io import BufferedIOBase
from typing import Any, Protocol, cast

import gevent
from gevent import subprocess
from paramiko import SSHException
from pyinfra.api import Host
from pyinfra.connectors.local import LocalConnector
from pyinfra.connectors.ssh import SSHConnector

from nodeready.transports.answer import sudo_error
from nodeready.transports.connection import transport_of
from nodeready.transports.connector import Become, become, with_rights

#: One line, and all lines together; more than that is no answer of ours.
_LINE_BYTES = 256 << 10
_ALL_BYTES = 16 << 20
#: What was said without the mark, kept to tell why the command ended.
_NOISE_BYTES = 4 << 10
_PIECE = 64 << 10
#: Seconds in which a node must take a line, or a new channel.
_SEND_S = 15


class _Stream(Protocol):
    """The two directions of a running command. Raise OSError, EOFError or SSHException."""

    def read(self) -> bytes: ...
    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...


class _OverSsh:
    def __init__(self, transport: Any, command: str) -> None:
        self.channel = transport.open_session(timeout=_SEND_S)
        # One stream: two share a window, and one that nobody reads would stop the other.
        self.channel.set_combine_stderr(True)
        self.channel.exec_command(command)

    def read(self) -> bytes:
        return cast("bytes", self.channel.recv(_PIECE))

    def write(self, data: bytes) -> None:
        self.channel.sendall(data)

    def close(self) -> None:
        self.channel.close()


class _Here:
    def __init__(self, command: str) -> None:
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.to, self.out = (
            cast("BufferedIOBase", one) for one in (self.process.stdin, self.process.stdout)
        )

    def read(self) -> bytes:
        return self.out.read1(_PIECE)

    def write(self, data: bytes) -> None:
        self.to.write(data)
        self.to.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.to.close()
        try:
            self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.out.close()


class Dialogue:
    """A running command. Never raises for a node's fault: ``error`` says what ended it.

    error: one line; "" while it is well
    """

    def __init__(self, host: Host, command: str, mark: str, rights: Become | None = None) -> None:
        """Start a command of shell.command() on a connected node.

        mark: what each of its lines that counts begins with
        """
        self.error = ""
        self._mark = mark.encode()
        self._kept, self._noise, self._total = bytearray(), bytearray(), 0
        self._stream: _Stream | None = None
        rights = rights or become(host)
        self._sudo = rights.sudo
        line = with_rights(host, command, rights)
        if not self._guard(lambda: self._open(host, line), _SEND_S):
            self._end(f"no channel in {_SEND_S} s")
        if rights.sudo and rights.password:
            self.say(rights.password)

    def _open(self, host: Host, command: str) -> None:
        if isinstance(host.connector, SSHConnector):
            transport = transport_of(host)
            if transport is None:
                raise EOFError("not connected")
            self._stream = _OverSsh(transport, command)
        elif isinstance(host.connector, LocalConnector):
            self._stream = _Here(command)
        else:
            self.error = "needs ssh"

    def _guard(self, work: Callable[[], None], limit_s: float) -> bool:
        """Do it; False when it took too long. Trouble is the end of the dialogue."""
        limit = gevent.Timeout(limit_s)
        try:
            with limit:
                work()
                return True
        except gevent.Timeout as over:
            if over is not limit:
                raise
        except (SSHException, OSError, EOFError) as problem:
            self._end(f"connection lost ({str(problem) or type(problem).__name__})")
        return False

    def _end(self, error: str) -> None:
        self.error = self.error or error
        self.close()

    def say(self, line: str) -> None:
        """Send a line. Without an end of line in it: it is the command's only mark of one."""
        stream = self._stream
        if stream is None:
            return
        data = line.encode("utf-8", "surrogateescape") + b"\n"
        if not self._guard(lambda: stream.write(data), _SEND_S):
            self._end("takes no input")

    def hear(self, limit_s: float) -> str | None:
        """The next line with the mark; None: none within the limit, or the end (see ``error``)."""
        until = time.monotonic() + limit_s
        while True:
            line = self._next()
            if line is not None:
                return line
            left = until - time.monotonic()
            if self._stream is None or left <= 0:
                return None
            self._guard(self._more, left)

    def _next(self) -> str | None:
        """The first whole line with the mark among what came; what is in front of it is noise."""
        at = self._kept.find(self._mark)
        # The mark itself may not be there to its end: a line that has none yet stays.
        start = at if at >= 0 else self._kept.rfind(b"\n") + 1
        self._noise = (self._noise + self._kept[:start])[-_NOISE_BYTES:]
        del self._kept[:start]
        end = self._kept.find(b"\n") if at >= 0 else -1
        if end < 0:
            return None
        row = bytes(self._kept[:end])
        del self._kept[: end + 1]
        return row.decode("utf-8", "replace")

    def _more(self) -> None:
        assert self._stream is not None
        piece = self._stream.read()
        self._kept += piece
        self._total += len(piece)
        if not piece:
            self._noise += self._kept
            self._end(self._why())
        elif len(self._kept) > _LINE_BYTES + _PIECE or self._total > _ALL_BYTES:
            self._end("too much output")

    def _why(self) -> str:
        """Why the command ended before it was told to."""
        said = self._noise[-_NOISE_BYTES:].decode("utf-8", "replace")
        if self._sudo and (error := sudo_error(said)[0]):
            return error
        rows = [row.strip() for row in said.splitlines() if row.strip()]
        return f"ended by itself: {rows[-1][:200]}" if rows else "ended by itself"

    def close(self) -> None:
        """End it: its input ends, and with that the command."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(Exception, gevent.Timeout), gevent.Timeout(3):
                stream.close()

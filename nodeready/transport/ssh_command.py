"""One command over a node's ssh connection, with bounds on its output."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import gevent
from paramiko import ChannelException, SSHException
from pyinfra.api import Host
from pyinfra.api.exceptions import ConnectError

from nodeready.transport import connection
from nodeready.transport.base import ANSWER_BYTES, ERROR_BYTES
from nodeready.transport.connector import SshConnector, error_text, transport_of
from nodeready.transport.dialogue import PIECE, SEND_S
from nodeready.transport.local import Pipes, read_piece

#: Output in front of the answer: a login that prints more than this is broken. Small, because
#: hundreds of nodes may do so at once.
NOISE_BYTES = 1 << 20


class OutputTooLarge(Exception):
    """The node printed more than we hold; ``first`` are its first bytes."""

    def __init__(self, first: bytes) -> None:
        super().__init__("too much output")
        self.first = first[:40]


@dataclass(frozen=True)
class CommandOutput:
    """A command's output. status: its exit status; None: a signal ended it, or nobody knows."""

    status: int | None
    stdout: str
    stderr: str


class _AnswerBuffer:
    """Standard output so far: up to NOISE_BYTES before ``mark``, then up to ``max_bytes``."""

    def __init__(self, mark: bytes, max_bytes: int) -> None:
        self.data, self.mark, self.max_bytes = bytearray(), mark, max_bytes
        self.limit = min(NOISE_BYTES, max_bytes) if mark else max_bytes

    def add(self, piece: bytes) -> None:
        self.data += piece
        if len(self.data) <= self.limit:
            return
        if self.limit < self.max_bytes and self.mark in self.data:
            self.limit = self.max_bytes
        else:
            raise OutputTooLarge(bytes(self.data[:200]))


def max_received_bytes(max_bytes: int) -> int:
    """Bytes that a node may send for one answer: both streams, and what stands around them."""
    return NOISE_BYTES + max_bytes + ANSWER_BYTES + (max_bytes >> 2)


def decode_output(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "surrogateescape")


def _read_errors(read: Callable[[int], bytes], buffer: bytearray) -> bool:
    """Read standard error to its end, keeping its first bytes; False when it has no end."""
    total = 0
    while piece := read(PIECE):
        total += len(piece)
        if total > ANSWER_BYTES:
            return False
        buffer += piece[: ERROR_BYTES - len(buffer)]
    return True


@contextlib.contextmanager
def session(host: Host, limit_s: float | None = None) -> Iterator[Any]:
    """A paramiko Channel for one command: of the node's connection, or of a further one where
    sshd refuses a second session in it (MaxSessions). Raises SSHException, EOFError, OSError."""
    transport = transport_of(host)
    if transport is None:
        raise EOFError("not connected")
    with contextlib.ExitStack() as after:
        try:
            channel = transport.open_session(timeout=limit_s)
        except ChannelException:
            if not isinstance(host.connector, SshConnector):
                raise
            try:
                client = host.connector.another()
            except (ConnectError, SSHException, OSError, EOFError) as problem:
                raise OSError(
                    "sshd refuses a second session (MaxSessions), and a second connection fails: "
                    f"{error_text(problem)}"
                ) from None
            after.callback(client.close)
            channel = client.get_transport().open_session(timeout=limit_s)
        after.callback(channel.close)
        yield channel


def run_over_ssh(
    host: Host,
    command: str,
    stdin: bytes,
    mark: bytes = b"",
    max_bytes: int = ANSWER_BYTES,
) -> CommandOutput:
    """Run a command over a node's connection of paramiko's; blocks until it has ended.

    mark: the bytes with which the answer begins, whatever stands before them
    max_bytes: of the answer

    Raises TooMuchOutput, and what paramiko raises when the connection is lost.
    """
    buffer, errors = _AnswerBuffer(mark, max_bytes), bytearray()
    helpers: list[Any] = []
    endless: list[bytes] = []
    with session(host) as channel:
        connection.allow(channel.get_transport(), max_received_bytes(max_bytes))

        def stderr() -> None:
            if not _read_errors(channel.recv_stderr, errors):
                endless.append(bytes(errors[:200]))
                channel.close()

        def feed() -> None:
            # A command that ends without reading its input is no failure.
            with contextlib.suppress(OSError):
                channel.sendall(stdin)
                channel.shutdown_write()

        try:
            channel.exec_command(command)
            helpers.append(gevent.spawn(feed))
            # Both streams share the channel's window: one that nobody reads would stop the other.
            drain = gevent.spawn(stderr)
            helpers.append(drain)
            while piece := channel.recv(PIECE):
                buffer.add(piece)
            drain.join()
            if endless:
                raise OutputTooLarge(endless[0])
            status = channel.recv_exit_status()
        finally:
            gevent.killall(helpers, block=False)
    return CommandOutput(
        status if status >= 0 else None, decode_output(buffer.data), decode_output(errors)
    )


class MasterUnavailable(OSError):
    """The master does not take the command, which has not begun."""


#: What ssh says when it cannot use the master's connection, and may make none of its own.
_NOT_BEGUN = re.compile(r"UNKNOWN port|kex_exchange_identification|Connection closed by remote")


class MasterStream(Pipes):
    """A command over the connection of a master, by `ssh`, as a Stream.

    apart: standard error has a pipe of its own
    """

    def __init__(self, connector: SshConnector, command: str, *, apart: bool = False) -> None:
        settings = connector.ways.settings(connector.login())
        self._master = connector.master
        super().__init__(
            subprocess.Popen(
                [*connection.by_socket(settings, self._master), "--", settings.name, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if apart else subprocess.STDOUT,
                start_new_session=True,
                cwd="/",
            )
        )

    def read(self, limit_s: float | None) -> bytes:
        """See Stream."""
        piece = super().read(limit_s)
        if not piece and (why := self.lost("")):
            raise EOFError(why)
        return piece

    def read_out(self) -> bytes:
        """What the command printed; b"": its output has ended, whyever."""
        return super().read(None)

    def read_err(self, _: int) -> bytes:
        return read_piece(cast("IO[bytes]", self._process.stderr), None)

    def status(self) -> int:
        return self._process.wait()

    def lost(self, said: str) -> str:
        """Why ssh itself ended; "" when its command did."""
        if self._process.wait() != _SSH_FAILED:
            return ""
        if _NOT_BEGUN.search(said):
            raise MasterUnavailable(said.strip().splitlines()[-1])
        return "" if connection.answers(self._master) else "the master of ssh has ended"

    def close(self) -> None:
        super().close()
        if self._process.stderr is not None:
            self._process.stderr.close()


#: ssh's exit status for what goes wrong with ssh itself.
_SSH_FAILED = 255


def run_over_master(
    connector: SshConnector, command: str, stdin: bytes, mark: bytes, max_bytes: int
) -> CommandOutput:
    """As `over_ssh`. Raises TooMuchOutput, EOFError when the master ends, _NoMaster."""
    stream = MasterStream(connector, command, apart=True)
    buffer, errors = _AnswerBuffer(mark, max_bytes), bytearray()
    endless: list[bytes] = []

    def stderr() -> None:
        if not _read_errors(stream.read_err, errors):
            endless.append(bytes(errors[:200]))
            stream.close()

    def feed() -> None:
        with contextlib.suppress(OSError):
            stream.write(stdin, None)
        stream.end_input()

    helpers = [gevent.spawn(feed), gevent.spawn(stderr)]
    try:
        while piece := stream.read_out():
            buffer.add(piece)
        helpers[1].join()
        if endless:
            raise OutputTooLarge(endless[0])
        if why := stream.lost(decode_output(errors)):
            raise EOFError(why)
        status = stream.status()
    finally:
        gevent.killall(helpers, block=False)
        stream.close()
    return CommandOutput(
        status if status >= 0 else None, decode_output(buffer.data), decode_output(errors)
    )


class SshStream:
    """A command over SSH as a Stream."""

    def __init__(self, host: Host, command: str) -> None:
        with _as_connection_lost(), contextlib.ExitStack() as after:
            self.channel = after.enter_context(session(host, SEND_S))
            connection.allow(self.channel.get_transport(), max_received_bytes(ANSWER_BYTES))
            # One stream: two would share a window, and an unread one would stop the other.
            self.channel.set_combine_stderr(True)
            self.channel.settimeout(SEND_S)
            self.channel.exec_command(command)
            self._session = after.pop_all()

    def read(self, limit_s: float) -> bytes:
        with _as_connection_lost():
            self.channel.settimeout(limit_s)
            return cast("bytes", self.channel.recv(PIECE))

    def write(self, data: bytes, limit_s: float) -> None:
        with _as_connection_lost():
            self.channel.settimeout(limit_s)
            self.channel.sendall(data)

    def close(self) -> None:
        with contextlib.suppress(gevent.Timeout), gevent.Timeout(3):
            self._session.close()


@contextlib.contextmanager
def _as_connection_lost() -> Iterator[None]:
    """paramiko's own exception is a lost connection like others."""
    try:
        yield
    except SSHException as problem:
        if "timeout" in str(problem).lower():
            raise TimeoutError from None
        raise OSError(str(problem)) from None

"""One command over a node's ssh connection, with bounds on its output."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from select import PIPE_BUF
from typing import IO, Any, Protocol, cast

import gevent
from gevent import select, subprocess
from paramiko import ChannelException, SSHException
from pyinfra.api import Host
from pyinfra.api.exceptions import ConnectError

from nodeready.agent.asking import ANSWER_BYTES, ERROR_BYTES, Answer
from nodeready.agent.local import READ_BYTES, SEND_S, end_session
from nodeready.fleet.transport import connection
from nodeready.fleet.transport.connector import SshConnector, transport_of

#: Output in front of the answer: a login that prints more than this is broken. Small, because
#: hundreds of nodes may do so at once.
NOISE_BYTES = 1 << 20


class OutputTooLarge(Exception):
    """The node printed more than the maximum. data: its output, or its errors"""

    def __init__(self, data: bytes) -> None:
        super().__init__("too much output")
        self.data = data


class AnswerBuffer:
    """Standard output so far: up to NOISE_BYTES before ``mark``, then up to ``max_bytes``."""

    def __init__(self, mark: bytes, max_bytes: int) -> None:
        self.data, self.mark, self.max_bytes = bytearray(), mark, max_bytes
        self.limit = min(NOISE_BYTES, max_bytes) if mark else max_bytes

    def add(self, data: bytes) -> None:
        """Raises OutputTooLarge."""
        self.data += data
        if len(self.data) <= self.limit:
            return
        if self.limit < self.max_bytes and self.mark in self.data:
            self.limit = self.max_bytes
        else:
            raise OutputTooLarge(bytes(self.data))


def max_received_bytes(max_bytes: int) -> int:
    """Bytes that a node may send for one answer: both streams, and a quarter more for packets."""
    return NOISE_BYTES + max_bytes + ANSWER_BYTES + (max_bytes >> 2)


class RunningCommand(Protocol):
    """A command whose standard output and error are read separately; both end with b""."""

    def read_output(self) -> bytes: ...
    def read_errors(self) -> bytes: ...
    def send_input(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def status(self, errors: str) -> int:
        """The exit status, negative for a signal. Raises EOFError when the connection ended."""


def reply_of(command: RunningCommand, stdin: bytes, buffer: AnswerBuffer) -> Answer:
    """Wait for the command to end. Raises OutputTooLarge, and what its methods raise."""
    errors, flood = bytearray(), list[bytes]()

    def read_errors() -> None:
        total = 0
        while data := command.read_errors():
            total += len(data)
            if total > ANSWER_BYTES:
                flood.append(bytes(errors))
                command.close()
                return
            errors.extend(data[: ERROR_BYTES - len(errors)])

    # An ssh channel's outputs share one window: an unread output would block both.
    helpers: list[Any] = [gevent.spawn(command.send_input, stdin), gevent.spawn(read_errors)]
    try:
        while data := command.read_output():
            buffer.add(data)
        helpers[1].join()
        if flood:
            raise OutputTooLarge(flood[0])
        stderr = errors.decode("utf-8", "surrogateescape")
        status = command.status(stderr)
    finally:
        gevent.killall(helpers, block=False)
    stdout = buffer.data.decode("utf-8", "surrogateescape")
    return Answer(stdout, stderr, rc=status if status >= 0 else None)


@contextlib.contextmanager
def session(host: Host, limit_s: float | None = None) -> Iterator[Any]:
    """A paramiko Channel for one command, over the node's connection, or over a new one if sshd
    refuses a second session (MaxSessions). Raises SSHException, EOFError, OSError.
    """
    transport = transport_of(host)
    if transport is None:
        raise EOFError("not connected")
    with contextlib.ExitStack() as stack:
        try:
            channel = transport.open_session(timeout=limit_s)
        except ChannelException:
            if not isinstance(host.connector, SshConnector):
                raise
            try:
                client = host.connector.open_second_client()
            except (ConnectError, SSHException, OSError, EOFError) as problem:
                raise OSError(
                    "sshd refuses a second session (MaxSessions), and a second connection fails: "
                    f"{connection.error_text(problem)}"
                ) from None
            stack.callback(client.close)
            channel = client.get_transport().open_session(timeout=limit_s)
        stack.callback(channel.close)
        yield channel


class _ChannelCommand:
    def __init__(self, channel: Any, command: str, max_bytes: int) -> None:
        self._channel = channel
        connection.allow_bytes(channel.get_transport(), max_received_bytes(max_bytes))
        channel.exec_command(command)

    def read_output(self) -> bytes:
        return cast("bytes", self._channel.recv(READ_BYTES))

    def read_errors(self) -> bytes:
        return cast("bytes", self._channel.recv_stderr(READ_BYTES))

    def send_input(self, data: bytes) -> None:
        # A command that ends without reading its input is no failure.
        with contextlib.suppress(OSError):
            self._channel.sendall(data)
            self._channel.shutdown_write()

    def status(self, errors: str) -> int:
        return cast("int", self._channel.recv_exit_status())

    def close(self) -> None:
        self._channel.close()


def run_over_ssh(host: Host, command: str, stdin: bytes, buffer: AnswerBuffer) -> Answer:
    """Run a command over a node's paramiko connection; see `reply_of`."""
    with session(host) as channel:
        return reply_of(_ChannelCommand(channel, command, buffer.max_bytes), stdin, buffer)


#: ssh's exit status for its own errors (ssh(1)).
SSH_FAILED = 255


class MasterUnavailable(OSError):
    """The master refused the command, which has not begun."""


#: What ssh prints when it cannot use the master's connection, and must not connect itself.
_NOT_BEGUN = re.compile(r"UNKNOWN port|kex_exchange_identification|Connection closed by remote")


class SshProgram:
    """A running `ssh`, as a Stream and as a `RunningCommand`.

    separate_errors: standard error has its own pipe
    """

    def __init__(self, argv: Sequence[str], *, separate_errors: bool) -> None:
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if separate_errors else subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "LC_ALL": "C"},
        )

    def _read(self, file: Any, limit_s: float | None) -> bytes:
        if not select.select([file], [], [], limit_s)[0]:
            raise TimeoutError
        return os.read(file.fileno(), READ_BYTES)

    def read(self, limit_s: float | None) -> bytes:
        """See Stream; None: without a limit. Raises TimeoutError, OSError."""
        return self._read(self._process.stdout, limit_s)

    def read_output(self) -> bytes:
        return self._read(self._process.stdout, None)

    def read_errors(self) -> bytes:
        return self._read(self._process.stderr, None)

    def write(self, data: bytes, limit_s: float | None) -> None:
        """See Stream; None: without a limit. Raises TimeoutError, OSError."""
        until = None if limit_s is None else time.monotonic() + limit_s
        stdin, remaining = cast("IO[bytes]", self._process.stdin), memoryview(data)
        while remaining:
            wait_s = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([], [stdin], [], wait_s)[1]:
                raise TimeoutError
            remaining = remaining[os.write(stdin.fileno(), remaining[:PIPE_BUF]) :]

    def send_input(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.write(data, None)
        self._close(self._process.stdin)

    def status(self, errors: str) -> int:
        return self._process.wait()

    def close(self) -> None:
        """End its input, and a second later the program."""
        self._close(self._process.stdin)
        end_session(self._process)
        self._close(self._process.stdout)
        self._close(self._process.stderr)

    @staticmethod
    def _close(file: Any) -> None:
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


class MasterStream(SshProgram):
    """A command over the connection of a master, by `ssh`."""

    def __init__(
        self, connector: SshConnector, command: str, *, separate_errors: bool = False
    ) -> None:
        settings = connector.ssh_logins.settings(connector.login())
        self._master = connector.master
        argv = [*connection.master_argv(settings, self._master), "--", settings.name, command]
        super().__init__(argv, separate_errors=separate_errors)

    def read(self, limit_s: float | None) -> bytes:
        """See Stream. Raises EOFError when the master has ended."""
        data = super().read(limit_s)
        if not data and (reason := self._ssh_error("")):
            raise EOFError(reason)
        return data

    def status(self, errors: str) -> int:
        """The command's exit status. Raises EOFError when ssh itself ended."""
        if reason := self._ssh_error(errors):
            raise EOFError(reason)
        return self._process.wait()

    def _ssh_error(self, errors: str) -> str:
        """Why ssh itself ended; "": the command ended. Raises MasterUnavailable."""
        if self._process.wait() != SSH_FAILED:
            return ""
        if _NOT_BEGUN.search(errors):
            raise MasterUnavailable(errors.strip().splitlines()[-1])
        return "" if connection.is_listening(self._master) else "the master of ssh has ended"


def run_over_master(
    connector: SshConnector, command: str, stdin: bytes, buffer: AnswerBuffer
) -> Answer:
    """As `run_over_ssh`. Raises EOFError when the master ends, MasterUnavailable."""
    stream = MasterStream(connector, command, separate_errors=True)
    try:
        return reply_of(stream, stdin, buffer)
    finally:
        stream.close()


class SshStream:
    def __init__(self, host: Host, command: str) -> None:
        with _as_connection_lost(), contextlib.ExitStack() as stack:
            self.channel = stack.enter_context(session(host, SEND_S))
            connection.allow_bytes(self.channel.get_transport(), max_received_bytes(ANSWER_BYTES))
            # One stream for both outputs, which share one window.
            self.channel.set_combine_stderr(True)
            self.channel.settimeout(SEND_S)
            self.channel.exec_command(command)
            self._session = stack.pop_all()

    def read(self, limit_s: float) -> bytes:
        with _as_connection_lost():
            self.channel.settimeout(limit_s)
            return cast("bytes", self.channel.recv(READ_BYTES))

    def write(self, data: bytes, limit_s: float) -> None:
        with _as_connection_lost():
            self.channel.settimeout(limit_s)
            self.channel.sendall(data)

    def close(self) -> None:
        with contextlib.suppress(gevent.Timeout), gevent.Timeout(3):
            self._session.close()


@contextlib.contextmanager
def _as_connection_lost() -> Iterator[None]:
    """Turn paramiko's exceptions into those of a Stream."""
    try:
        yield
    except SSHException as problem:
        if "timeout" in str(problem).lower():
            raise TimeoutError from None
        raise OSError(str(problem)) from None

"""A node's ssh connection, made within one deadline, and one command over it with bounds."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import gevent
from gevent import select, subprocess
from paramiko import AuthenticationException, ChannelException, SSHException
from paramiko.agent import AgentRequestHandler
from pyinfra.api import Host, Inventory
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.connectors.ssh import SSHConnector

from nodeready.agent.asking import ANSWER_BYTES, CONNECT_TIMEOUT_S, ERROR_BYTES, Answer, SshPeer
from nodeready.agent.local import READ_BYTES, SEND_S, Pipes
from nodeready.core.outcome import UNREACHABLE, Gap
from nodeready.fleet.transport import connection, logins
from nodeready.fleet.transport.ssh_config import Login, SshConfigError

_SSH_PORT = 22  # sshd's port (RFC 4253, section 4.1)


def set_timeouts(inventory: Inventory) -> None:
    """Give every node's connection a deadline (paramiko may wait up to an hour), bounds, and ssh's
    configuration.

    Must be called before pyinfra's State takes the inventory.
    """
    # Longer than our own deadline, whose error says how far the connection came.
    limits: dict[str, Any] = dict.fromkeys(
        ("timeout", "banner_timeout", "auth_timeout", "channel_timeout"), CONNECT_TIMEOUT_S + 5
    )
    for host in inventory:
        arguments = host.data.get("ssh_paramiko_connect_kwargs") or {}
        host.data.ssh_paramiko_connect_kwargs = {**limits, **arguments}
        if host.connector_cls is SSHConnector:
            host.connector_cls = SshConnector


class SshConnector(SSHConnector):
    """pyinfra's connector, whose connections are made as ssh makes them.

    master: the socket of ssh's own connection to the node, used in place of a new connection
    """

    ssh_logins: logins.SshLogins
    deadline: logins.PausableDeadline
    client: Any = None
    master = ""

    def login(self) -> Login:
        data, host_data = self.data, self.host.data
        return Login(
            name=str(data["ssh_hostname"] or self.host.name),
            config=str(data["ssh_config_file"] or ""),
            user=str(data["ssh_user"] or ""),
            port=int(data["ssh_port"] or 0),
            key=self._key_file(str(data["ssh_key"] or "")),
            passphrase=str(data["ssh_key_password"] or ""),
            password=str(data["ssh_password"] or ""),
            uses_agent=bool(data["ssh_allow_agent"]),
            uses_default_keys=bool(data["ssh_look_for_keys"]),
            known_hosts=str(data["ssh_known_hosts_file"] or ""),
            # pyinfra's own default would hide what ssh_config says.
            host_key_checking=str(host_data.get("ssh_strict_host_key_checking") or ""),
        )

    def _key_file(self, path: str) -> str:
        """The path of a key, which may be relative to the directory of the deploy."""
        expanded = os.path.expanduser(path)
        in_deploy = os.path.join(self.state.cwd or "", expanded)
        is_in_deploy = path and not os.path.exists(expanded) and os.path.exists(in_deploy)
        return in_deploy if is_in_deploy else path

    def _connect(self) -> None:
        self.client = logins.Client()
        self.client.stage = connection.ASKING
        self.master = connection.master_socket(self.ssh_logins.settings(self.login()))
        if self.master:
            self.client = None
        else:
            self.connect_directly()

    def connect_directly(self) -> None:
        """Connect without ssh's master. Raises ConnectError, SSHException, OSError, EOFError."""
        self.master, self.client = "", logins.Client()
        self._log_in(self.client)
        if self.data["ssh_forward_agent"]:
            AgentRequestHandler(self.client.get_transport().open_session())

    def open_second_client(self) -> Any:
        """The client of a second connection. Raises as `connect_directly`, and OSError after
        CONNECT_TIMEOUT_S.
        """
        client, deadline = logins.Client(), logins.PausableDeadline(CONNECT_TIMEOUT_S)
        self.deadline = deadline
        try:
            with deadline:
                self._log_in(client)
        except BaseException as problem:
            client.close()
            if isinstance(problem, gevent.Timeout) and deadline.owns(problem):
                raise OSError("timed out") from None
            raise
        return client

    def _log_in(self, client: logins.Client) -> None:
        arguments = self.data["ssh_paramiko_connect_kwargs"] or {}
        try:
            self.ssh_logins.connect(client, self.login(), self.deadline, **arguments)
        except AuthenticationException as problem:
            raise ConnectError(f"Authentication error ({problem})") from None
        connection.set_keepalive(client.get_transport())

    def failure_text(self, text: str) -> str:
        return self.ssh_logins.failure_text(self.client or logins.Client(), self.login(), text)


def connect(host: Host) -> Gap | None:
    """Connect within CONNECT_TIMEOUT_S, not counting waits for other connections' turns.

    Returns the failure, or None. Never raises for a node's fault.
    """
    deadline = logins.PausableDeadline(CONNECT_TIMEOUT_S)
    if isinstance(host.connector, SshConnector):
        host.connector.deadline = deadline
    try:
        with deadline:
            host.connect(show_errors=False, raise_exceptions=True)
    except gevent.Timeout as timeout:
        if not deadline.owns(timeout):
            raise
        return _unreachable(host, _connection_stage(host))
    except SshConfigError as problem:
        return _unreachable(host, "", str(problem))
    except (ConnectError, PyinfraError, SSHException, OSError, EOFError, ValueError) as error:
        return _unreachable(host, connection.error_text(error))
    transport = transport_of(host)
    if transport is not None and not isinstance(host.connector, SshConnector):
        connection.set_keepalive(transport)
    return None


def transport_of(host: Host) -> Any:
    client = getattr(host.connector, "client", None)
    return client.get_transport() if client is not None else None


def ssh_peer(host: Host) -> SshPeer | None:
    """The node's sshd, as the connection saw it; None: there is no ssh connection."""
    transport = transport_of(host)
    key = getattr(transport, "host_key", None)
    if key is None:
        return None
    address = ""
    sock = getattr(transport, "sock", None)
    if isinstance(sock, socket.socket) and sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            peer_address, port = sock.getpeername()[:2]
            # At another port, a machine may forward to many nodes.
            address = str(peer_address) if port == _SSH_PORT else ""
    return SshPeer(address, f"{key.get_name()} {key.get_base64()}")


def _connection_stage(host: Host) -> str:
    """How far the connection had come at the deadline."""
    client, transport = getattr(host.connector, "client", None), transport_of(host)
    if transport is not None and transport.remote_version:
        return connection.TALKING
    if isinstance(client, logins.Client):
        return client.stage
    return connection.CONNECTING if transport is None else connection.BANNER


def _unreachable(host: Host, text: str, error: str = "") -> Gap:
    """Close the failed connection. Returns the failure.

    error: its text; "": made of ``text``
    """
    data, client = host.data, getattr(host.connector, "client", None)
    if not error and isinstance(host.connector, SshConnector):
        error = host.connector.failure_text(text)
    if not error:
        port, address = int(data.get("ssh_port") or 22), str(data.get("ssh_hostname") or host.name)
        error = connection.connect_error(
            text,
            address if port == 22 else f"[{address}]:{port}",
            user=str(data.get("ssh_user") or getpass.getuser()),
            key=str(data.get("ssh_key") or "any key of the agent"),
            known_hosts=str(data.get("ssh_known_hosts_file") or "~/.ssh/known_hosts"),
            limit_s=CONNECT_TIMEOUT_S,
        )
    if client is not None:
        client.close()
    return Gap(UNREACHABLE, error)


# --- One command over a node's ssh connection, with bounds on its output.

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
                text = "sshd refuses a second session (MaxSessions), and a second connection fails"
                raise OSError(f"{text}: {connection.error_text(problem)}") from None
            stack.callback(client.close)
            channel = client.get_transport().open_session(timeout=limit_s)
        stack.callback(channel.close)
        yield channel


class ChannelCommand:
    """A command over a node's paramiko connection, as a `RunningCommand`."""

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


SSH_FAILED = 255  # ssh's exit status for its own errors (ssh(1))


class MasterUnavailable(OSError):
    """The master refused the command, which has not begun."""


#: What ssh prints when it cannot use the master's connection, and must not connect itself.
_NOT_BEGUN = re.compile(r"UNKNOWN port|kex_exchange_identification|Connection closed by remote")


class PipedProgram(Pipes):
    """A running program such as `ssh`, as a Stream and as a `RunningCommand`.

    separate_errors: standard error has its own pipe
    environment:     None: ours, in English
    """

    select = staticmethod(select.select)

    def __init__(
        self,
        argv: Sequence[str],
        *,
        separate_errors: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if separate_errors else subprocess.STDOUT,
            # Ctrl-C must not reach it: `close` ends it.
            start_new_session=True,
            cwd="/",
            env=environment or {**os.environ, "LC_ALL": "C"},
        )
        super().__init__(process)
        self.stderr: Any = process.stderr

    def read_output(self) -> bytes:
        return super().read(None)

    def read_errors(self) -> bytes:
        return self.read_from(self.stderr, None)

    def send_input(self, data: bytes) -> None:
        # A program that ends without reading its input is no failure.
        with contextlib.suppress(OSError):
            self.write(data, None)
        with contextlib.suppress(OSError):
            self.stdin.close()

    def status(self, errors: str) -> int:
        return self.process.wait()

    def close(self) -> None:
        super().close()
        if self.stderr is not None:
            with contextlib.suppress(OSError):
                self.stderr.close()


class MasterStream(PipedProgram):
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
        return self.process.wait()

    def _ssh_error(self, errors: str) -> str:
        """Why ssh itself ended; "": the command ended. Raises MasterUnavailable."""
        if self.process.wait() != SSH_FAILED:
            return ""
        if _NOT_BEGUN.search(errors):
            raise MasterUnavailable(errors.strip().splitlines()[-1])
        return "" if connection.is_listening(self._master) else "the master of ssh has ended"


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

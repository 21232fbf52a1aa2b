"""pyinfra's connectors as the carrier: connections to many nodes, and what is said over them.

One deadline over all of connecting, a limit on every command, a bound on every answer. A node that
is unreachable, dies or hangs costs that node; the others go on.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, Any, cast

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from gevent.pool import Pool
from gevent.queue import Empty, Queue
from paramiko import AuthenticationException, ChannelException, SSHException
from paramiko.agent import AgentRequestHandler
from paramiko.ssh_exception import NoValidConnectionsError
from pyinfra.api import Config, Host, Inventory, State, StringCommand
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.connectors.local import LocalConnector
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.util import extract_control_arguments, make_unix_command_for_host
from pyinfra.context import ctx_host, ctx_state

from nodeready import shell
from nodeready.inventory.endpoints import endpoint
from nodeready.policy import Policy
from nodeready.shell import KILL_AFTER_S, quote
from nodeready.subjects.context import FleetContext, expectations
from nodeready.subjects.ssh_client import known_hosts
from nodeready.transport import bundle, connection, local, logins
from nodeready.transport.base import (
    ANSWER_BYTES,
    ERROR_BYTES,
    FAILED,
    HUNG,
    LATE,
    LATE_WORDS,
    LOST,
    OUTPUT,
    TIMED_OUT,
    TIMEOUT,
    UNREACHABLE,
    Answer,
    Carrier,
    Conversation,
    Exchange,
    Failure,
    Found,
    Key,
    Met,
    Reply,
    Request,
    interrupted,
    mistake,
    node_of,
    sudo_error,
    with_sudo,
)
from nodeready.transport.dialogue import PIECE, SEND_S, Dialogue, Stream
from nodeready.transport.local import Pipes, piped, read_piece
from nodeready.transport.look import Look
from nodeready.transport.processes import Peer, Processes, forked
from nodeready.transport.ssh_config import Login, Unusable

#: Nodes worked on at once. Each costs one socket and little memory; beyond this the controller's
#: own CPU is the limit.
MAX_PARALLEL = 256

#: One deadline over name resolution, TCP, banner, authentication and channel.
CONNECT_TIMEOUT_S = 15
#: sshd's port (RFC 4253, section 4.1).
_SSH = 22

#: Output in front of the answer: a login that prints more than this is broken. Small, because
#: hundreds of nodes may do so at once.
NOISE_BYTES = 1 << 20

#: Arguments of pyinfra's that put something around a command; without them it goes as it is.
_AROUND = ("_env", "_chdir", "_sudo", "_su_user", "_doas", "_dzdo")


# --- Connections: made within one deadline, or the reason why not, in one line.


def set_timeouts(inventory: Inventory) -> None:
    """Give every node's connection a deadline (paramiko's own can wait up to an hour), bounds, and
    the ways of ssh.

    Must be called before pyinfra's State takes the inventory.
    """
    # Longer than our own deadline, which tells how far the connection came.
    limits: dict[str, Any] = dict.fromkeys(
        ("timeout", "banner_timeout", "auth_timeout", "channel_timeout"), CONNECT_TIMEOUT_S + 5
    )
    for host in inventory:
        own = host.data.get("ssh_paramiko_connect_kwargs") or {}
        host.data.ssh_paramiko_connect_kwargs = {**limits, **own}
        if host.connector_cls is SSHConnector:
            host.connector_cls = Connector


class Connector(SSHConnector):
    """pyinfra's connector, whose connections are made as ssh makes them.

    master: the socket of ssh's own connection to the node, which is used instead of one of ours
    """

    ways: logins.Ways
    patience: logins.Patience
    client: Any = None
    master = ""

    def login(self) -> Login:
        """What the inventory says about the way to the node."""
        data, own = self.data, self.host.data
        return Login(
            name=str(data["ssh_hostname"] or self.host.name),
            config=str(data["ssh_config_file"] or ""),
            user=str(data["ssh_user"] or ""),
            port=int(data["ssh_port"] or 0),
            key=self._key_file(str(data["ssh_key"] or "")),
            phrase=str(data["ssh_key_password"] or ""),
            password=str(data["ssh_password"] or ""),
            agent=bool(data["ssh_allow_agent"]),
            usual=bool(data["ssh_look_for_keys"]),
            known=str(data["ssh_known_hosts_file"] or ""),
            # pyinfra's own default would hide what ssh_config says.
            strict=str(own.get("ssh_strict_host_key_checking") or ""),
        )

    def _key_file(self, path: str) -> str:
        """The path of a key, which may be relative to where the deploy is."""
        there = os.path.expanduser(path)
        beside = os.path.join(self.state.cwd or "", there)
        return beside if path and not os.path.exists(there) and os.path.exists(beside) else path

    def _connect(self) -> None:
        self.client = logins.Client()
        self.client.stage = connection.ASKING
        self.master = connection.master(self.ways.settings(self.login()))
        if self.master:
            self.client = None
        else:
            self.connect_ourselves()

    def connect_ourselves(self) -> None:
        """A connection of our own. Raises ConnectError, SSHException, OSError, EOFError."""
        self.master, self.client = "", logins.Client()
        self._log_in(self.client)
        if self.data["ssh_forward_agent"]:
            AgentRequestHandler(self.client.get_transport().open_session())

    def another(self) -> Any:
        """The client of a further connection. Raises as `connect_ourselves`, and OSError when it
        takes CONNECT_TIMEOUT_S."""
        client, patience = logins.Client(), logins.Patience(CONNECT_TIMEOUT_S)
        self.patience = patience
        try:
            with patience:
                self._log_in(client)
        except BaseException as problem:
            client.close()
            if isinstance(problem, gevent.Timeout) and patience.owns(problem):
                raise OSError("timed out") from None
            raise
        return client

    def _log_in(self, client: logins.Client) -> None:
        how = self.data["ssh_paramiko_connect_kwargs"] or {}
        try:
            self.ways.connect(client, self.login(), self.patience, **how)
        except AuthenticationException as problem:
            raise ConnectError(f"Authentication error ({problem})") from None
        connection.keep(client.get_transport())

    def words(self, text: str) -> str:
        """Why there is no connection, in one line."""
        return self.ways.words(self.client or logins.Client(), self.login(), text)


def connect(host: Host) -> Failure | None:
    """Connect, or say why not. Never raises for a node's fault, and takes CONNECT_TIMEOUT_S, but
    for the time in which others have their turn."""
    patience = logins.Patience(CONNECT_TIMEOUT_S)
    if isinstance(host.connector, Connector):
        host.connector.patience = patience
    try:
        with patience:
            host.connect(show_errors=False, raise_exceptions=True)
    except gevent.Timeout as timeout:
        if not patience.owns(timeout):
            raise
        return _unreachable(host, _stage(host))
    except Unusable as problem:
        return _unreachable(host, "", str(problem))
    except (ConnectError, PyinfraError, SSHException, OSError, EOFError, ValueError) as error:
        return _unreachable(host, _words(error))
    transport = transport_of(host)
    if transport is not None and not isinstance(host.connector, Connector):
        connection.keep(transport)
    return None


def transport_of(host: Host) -> Any:
    client = getattr(host.connector, "client", None)
    return client.get_transport() if client is not None else None


def _met(host: Host) -> Met | None:
    """What the connection saw of the node's sshd; None: it is none of ssh's, or was never made."""
    transport = transport_of(host)
    key = getattr(transport, "host_key", None)
    if transport is None or key is None:
        return None
    address = ""
    sock = getattr(transport, "sock", None)
    if isinstance(sock, socket.socket) and sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            found, port = sock.getpeername()[:2]
            # Of another port, the address may be that of a machine in front of many nodes.
            address = str(found) if port == _SSH else ""
    return Met(address, f"{key.get_name()} {key.get_base64()}")


def _words(error: BaseException) -> str:
    """The error's text; of a connection that no address took, the reason of the last of them."""
    cause = error.__context__ or error
    if isinstance(cause, NoValidConnectionsError):
        return str(list(cause.errors.values())[-1])
    return str(error) or type(error).__name__


def _stage(host: Host) -> str:
    """What the node had done when the time was up."""
    client = getattr(host.connector, "client", None)
    if isinstance(client, logins.Client):
        transport = client.get_transport()
        talked = transport is not None and transport.remote_version
        return "stopped during the handshake" if talked else client.stage
    transport = transport_of(host)
    if transport is None:
        return "timed out"
    return "stopped during the handshake" if transport.remote_version else "banner"


def _unreachable(host: Host, text: str, error: str = "") -> Failure:
    """A connection that was not made: in words, and without what is left of it.

    error: the words, where they are known
    """
    data, client = host.data, getattr(host.connector, "client", None)
    if not error and isinstance(host.connector, Connector):
        error = host.connector.words(text)
    if not error:
        # What ssh_config added to the inventory's data.
        config = getattr(client, "_ssh_config", {})
        port = int(data.get("ssh_port") or config.get("port") or 22)
        address = str(data.get("ssh_hostname") or host.name)
        files = data.get("ssh_key") or config.get("key_filename") or "any key of the agent"
        known = data.get("ssh_known_hosts_file") or getattr(client, "_host_keys_filename", None)
        error = connection.connect_error(
            text,
            address if port == 22 else f"[{address}]:{port}",
            user=str(data.get("ssh_user") or config.get("username") or getpass.getuser()),
            key=", ".join(files) if isinstance(files, list) else str(files),
            known_hosts=str(known or "~/.ssh/known_hosts"),
            limit_s=CONNECT_TIMEOUT_S,
        )
    if client is not None:
        client.close()
    return Failure(kind=UNREACHABLE, error=error)


# --- One command over one connection, with bounds on what it prints.


class TooMuchOutput(Exception):
    """The node printed more than we hold; ``first`` are its first bytes."""

    def __init__(self, first: bytes) -> None:
        super().__init__("too much output")
        self.first = first[:40]


@dataclass(frozen=True)
class Output:
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
            raise TooMuchOutput(bytes(self.data[:200]))


def _room(max_bytes: int) -> int:
    """Bytes that a node may send for one answer: both streams, and what stands around them."""
    return NOISE_BYTES + max_bytes + ANSWER_BYTES + (max_bytes >> 2)


def _text(data: bytes | bytearray) -> str:
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
            if not isinstance(host.connector, Connector):
                raise
            try:
                client = host.connector.another()
            except (ConnectError, SSHException, OSError, EOFError) as problem:
                raise OSError(
                    "sshd refuses a second session (MaxSessions), and a second connection fails: "
                    f"{_words(problem)}"
                ) from None
            after.callback(client.close)
            channel = client.get_transport().open_session(timeout=limit_s)
        after.callback(channel.close)
        yield channel


def over_ssh(
    host: Host,
    command: str,
    stdin: bytes,
    mark: bytes = b"",
    max_bytes: int = ANSWER_BYTES,
) -> Output:
    """Run a command over a node's connection of paramiko's; blocks until it has ended.

    mark: the bytes with which the answer begins, whatever stands before them
    max_bytes: of the answer

    Raises TooMuchOutput, and what paramiko raises when the connection is lost.
    """
    buffer, errors = _AnswerBuffer(mark, max_bytes), bytearray()
    helpers: list[Any] = []
    endless: list[bytes] = []
    with session(host) as channel:
        connection.allow(channel.get_transport(), _room(max_bytes))

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
                raise TooMuchOutput(endless[0])
            status = channel.recv_exit_status()
        finally:
            gevent.killall(helpers, block=False)
    return Output(status if status >= 0 else None, _text(buffer.data), _text(errors))


# --- The same over a connection of ssh's own, which a master holds (ControlMaster).


class _NoMaster(OSError):
    """The master does not take the command, which has not begun."""


#: What ssh says when it cannot use the master's connection, and may make none of its own.
_NOT_BEGUN = re.compile(r"UNKNOWN port|kex_exchange_identification|Connection closed by remote")


class _OverMaster(Pipes):
    """A command over the connection of a master, by `ssh`, as a Stream.

    apart: standard error has a pipe of its own
    """

    def __init__(self, connector: Connector, command: str, *, apart: bool = False) -> None:
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
            raise _NoMaster(said.strip().splitlines()[-1])
        return "" if connection.answers(self._master) else "the master of ssh has ended"

    def close(self) -> None:
        super().close()
        if self._process.stderr is not None:
            self._process.stderr.close()


#: ssh's exit status for what goes wrong with ssh itself.
_SSH_FAILED = 255


def over_master(
    connector: Connector, command: str, stdin: bytes, mark: bytes, max_bytes: int
) -> Output:
    """As `over_ssh`. Raises TooMuchOutput, EOFError when the master ends, _NoMaster."""
    stream = _OverMaster(connector, command, apart=True)
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
            raise TooMuchOutput(endless[0])
        if why := stream.lost(_text(errors)):
            raise EOFError(why)
        status = stream.status()
    finally:
        gevent.killall(helpers, block=False)
        stream.close()
    return Output(status if status >= 0 else None, _text(buffer.data), _text(errors))


# --- The rights with which a command runs on a node, and one request with its answer.


@dataclass(frozen=True)
class Become:
    """How commands get their rights on a node: sudo to root by us, anything else by pyinfra."""

    sudo: bool
    password: str
    others: dict[str, Any]


def become(host: Host) -> Become:
    """The node's rights as its data and pyinfra's configuration give them."""
    arguments = cast("dict[str, Any]", pop_global_arguments(host.state, host, {})[0])
    others = {key: arguments[key] for key in CONNECTOR_ARGUMENT_KEYS if key in arguments}
    ours = bool(others.get("_sudo")) and not others.get("_sudo_user")
    password = str(others.get("_sudo_password") or "") if ours else ""
    if ours:
        others.update(_sudo=False, _sudo_password=None)
    return Become(ours, password, others)


def _around(host: Host, command: str, others: dict[str, Any]) -> str:
    """The command with what pyinfra puts around it, where we use the connector directly."""
    if not any(others.get(name) for name in _AROUND):
        return command
    arguments = dict(others)
    extract_control_arguments(cast("Any", arguments))
    made = make_unix_command_for_host(host.state, host, StringCommand(command), **arguments)
    return made.get_raw_value()


def with_rights(host: Host, command: str, rights: Become) -> str:
    """``command`` with the node's rights; sudo's password is then the first line of its input."""
    if rights.sudo:
        command = with_sudo(command, rights.password)
    return _around(host, command, rights.others)


def _speak(host: Host, line: str, stdin: str, request: Request, others: dict[str, Any]) -> Answer:
    """Run the line through the node's connector, and return its answer."""
    connector = host.connector
    if isinstance(connector, SSHConnector):
        data, mark = stdin.encode("utf-8", "surrogateescape"), request.mark.encode()
        words, said = _around(host, line, others), None
        if isinstance(connector, Connector) and connector.master:
            try:
                said = over_master(connector, words, data, mark, request.max_bytes)
            except _NoMaster:
                connector.patience = logins.Patience(CONNECT_TIMEOUT_S)
                with connector.patience:
                    connector.connect_ourselves()
        if said is None:
            said = over_ssh(host, words, data, mark, request.max_bytes)
        return Reply(said.stdout, said.stderr, rc=said.status)
    if isinstance(connector, LocalConnector):
        command = shell.ShellCommand(_around(host, line, others), stdin)
        return local.run(command, request.limit_s, request.max_bytes)
    ok, output = host.run_shell_command(StringCommand(line), **{**others, "_stdin": stdin})
    return Reply(output.stdout, output.stderr, rc=0 if ok else 1)


def carry(host: Host, request: Request, tag: str, rights: Become | None = None) -> Answer:
    """Ask a connected node, and wait for its answer. Never raises for a node's fault.

    The wait here is a little longer than the limit on the node: a node's own `timeout` may no
    longer work.
    """
    rights = rights or become(host)
    limit_s = request.limit_s
    line, stdin = shell.command(request.script, limit_s, tag, request.payload)
    if rights.sudo:
        line = with_sudo(line, rights.password)
        if rights.password:
            stdin = f"{rights.password}\n{stdin}"
    started = time.monotonic()
    try:
        with gevent.Timeout(limit_s + 2 * KILL_AFTER_S):
            said = _speak(host, line, stdin, request, rights.others)
    except (gevent.Timeout, TimeoutError):
        return Failure(kind=HUNG, error=f"no answer in {limit_s} s")
    except TooMuchOutput as problem:
        first = problem.first.decode("utf-8", "replace")
        return Failure(kind=OUTPUT, error=f"{problem}, beginning with {first!r}")
    except (PyinfraError, SSHException, OSError, EOFError) as problem:
        why = _jump_words(host) or str(problem) or type(problem).__name__
        return Failure(kind=LOST, error=f"connection lost ({why})")
    seconds = time.monotonic() - started
    if not isinstance(said, Reply):
        return said
    if said.rc is None and _gone(host):
        why = f": {connection.ENDLESS}" if connection.endless(transport_of(host)) else ""
        why = f" ({_jump_words(host)})" if _jump_words(host) else why
        return Failure(said.stdout, said.stderr, seconds, LOST, f"connection lost{why}")
    if said.rc in TIMED_OUT and seconds >= limit_s:
        return Failure(said.stdout, said.stderr, seconds, TIMEOUT, f"ended after {limit_s} s")
    if rights.sudo and said.rc:
        error, kind = sudo_error(said.stderr)
        if error:
            return Failure(said.stdout, said.stderr, seconds, kind, error)
    return replace(said, seconds=seconds)


def _gone(host: Host) -> bool:
    """Whether the connection itself ended, and not only the command."""
    transport = transport_of(host)
    if transport is None:
        return False
    # paramiko's reader closes the channels first, and marks the transport as ended after that.
    transport.join(0.5)
    return not transport.is_active()


def _jump_words(host: Host) -> str:
    """That the jump host is the one that is lost; "" when it is not."""
    client = getattr(host.connector, "client", None)
    if isinstance(client, logins.Client) and client.jump and client.jump_is_gone:
        return f"jump host {client.jump.name}: connection lost"
    return ""


class _OverSsh:
    """A command over SSH as a Stream."""

    def __init__(self, host: Host, command: str) -> None:
        with _as_lost(), contextlib.ExitStack() as after:
            self.channel = after.enter_context(session(host, SEND_S))
            connection.allow(self.channel.get_transport(), _room(ANSWER_BYTES))
            # One stream: two would share a window, and an unread one would stop the other.
            self.channel.set_combine_stderr(True)
            self.channel.settimeout(SEND_S)
            self.channel.exec_command(command)
            self._session = after.pop_all()

    def read(self, limit_s: float) -> bytes:
        with _as_lost():
            self.channel.settimeout(limit_s)
            return cast("bytes", self.channel.recv(PIECE))

    def write(self, data: bytes, limit_s: float) -> None:
        with _as_lost():
            self.channel.settimeout(limit_s)
            self.channel.sendall(data)

    def close(self) -> None:
        with contextlib.suppress(gevent.Timeout), gevent.Timeout(3):
            self._session.close()


@contextlib.contextmanager
def _as_lost() -> Iterator[None]:
    """paramiko's own exception is a lost connection like others."""
    try:
        yield
    except SSHException as problem:
        if "timeout" in str(problem).lower():
            raise TimeoutError from None
        raise OSError(str(problem)) from None


# --- The carriers: all nodes of a pyinfra run, or of an inventory.


@dataclass
class _Link:
    """A node and its connection, which the first conversation with the node makes.

    met:   what that connection saw
    users: conversations and channels that go on over it
    """

    host: Host
    rights: Become | None = None
    failure: Failure | None = None
    met: Met | None = None
    users: int = 0
    making: BoundedSemaphore = field(default_factory=BoundedSemaphore)

    def connect(self, again: bool = True) -> Failure | None:
        """Connect if needed. Never raises for a node's fault.

        again: try once more after a connection that failed
        """
        with self.making:
            if self.failure is not None and not again:
                return self.failure
            if not self.host.connected:
                self.failure = connect(self.host)
                self.met = _met(self.host) if self.failure is None else None
            else:
                self.failure = None
            if self.failure is None and self.rights is None:
                self.rights = become(self.host)
            return self.failure


#: The answer of a node that this machine has no descriptor for.
_NO_ROOM = Failure(
    kind=UNREACHABLE, error="too many open files here: raise the limit (ulimit -n), or take fewer"
)


class _Room:
    """How many nodes may be connected at once; idle ones make room for others.

    most: the number
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._inside: dict[int, _Link] = {}
        self._left = Event()

    def enter(self, link: _Link, *, wait: bool = True) -> bool:
        """Count a conversation with the node, as soon as there is room for the connection.

        wait: until one of the others is idle; else False when none is
        """
        link.users += 1
        while id(link) not in self._inside and len(self._inside) >= self.most:
            idle = next((key for key, one in self._inside.items() if not one.users), None)
            if idle is not None:
                one = self._inside.pop(idle)
                _disconnect(one.host)
                one.host.connected = False
            elif wait:
                self._left.clear()
                self._left.wait()
            else:
                link.users -= 1
                return False
        self._inside.setdefault(id(link), link)
        return True

    def leave(self, link: _Link) -> None:
        """The conversation is over; the connection stays while nobody else wants its room."""
        link.users -= 1
        if not link.users:
            # The idle one that was used last is the last to go.
            self._inside.pop(id(link), None)
            if link.host.connected:
                self._inside[id(link)] = link
        self._left.set()


class _Held:
    """A Stream that says when it is closed."""

    def __init__(self, stream: Stream, closed: Callable[[], None]) -> None:
        self._stream, self._closed, self._over = stream, closed, False
        self.read, self.write = stream.read, stream.write

    def close(self) -> None:
        """See Stream."""
        try:
            self._stream.close()
        finally:
            if not self._over:
                self._over = True
                self._closed()


class Connected(Carrier):
    """Nodes whose connections belong to another program, such as pyinfra's own command.

    hosts: of an inventory that a State uses
    run:   the word for the run; "": a new one
    """

    def __init__(self, hosts: Iterable[Host], run: str = "") -> None:
        self._links = {str(host.name): _Link(host) for host in hosts}
        super().__init__(self._links, run)
        # How many nodes are asked at once, over all calls of `converse`.
        self._slots = BoundedSemaphore(MAX_PARALLEL)
        self._room = _Room(len(self._links) + 1)

    def _connected(self) -> list[_Link]:
        return [link for link in self._links.values() if link.host.connected]

    def converse(
        self, conversations: Mapping[Key, Conversation[Found]], deadline: float | None = None
    ) -> Iterator[tuple[Key, Found | Failure]]:
        exchanges = {key: Exchange(conversation) for key, conversation in conversations.items()}
        by_node: dict[str, list[Key]] = {}
        for key in conversations:
            by_node.setdefault(node_of(key), []).append(key)
        over: Queue[Key] = Queue()
        jobs: list[Any] = []
        stopped = False
        try:
            for name, keys in by_node.items():
                # One slot for a node, however many conversations go on with it.
                first = Event()
                for key in keys:
                    connects_first = key is keys[0]
                    jobs.append(
                        gevent.spawn(self._hold, name, exchanges[key], first, connects_first)
                    )
                    jobs[-1].link(partial(_put, over, key))
            while exchanges:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                key = over.get(timeout=left)
                yield key, exchanges.pop(key).value
        except Empty:
            gevent.killall(jobs, block=False)
            if any(self._links[node_of(key)].host.connected for key in exchanges):
                self.end(2)
            yield from _all(exchanges, self._late)
        except KeyboardInterrupt:
            self.interrupted = stopped = True
            gevent.killall(jobs, block=False)
            yield from _all(exchanges, lambda key: interrupted())
        finally:
            gevent.killall(jobs, block=False)
            if stopped:
                self.end()

    def _late(self, key: Key) -> Failure:
        reached = self._links[node_of(key)].host.connected
        return Failure(kind=LATE if reached else UNREACHABLE, error=LATE_WORDS)

    def _hold(self, name: str, one: Exchange[Found], first: Event, connects_first: bool) -> None:
        """One conversation, from its first question to its end.

        first: set when the node is connected, or could not be; connects_first: this conversation
               makes the connection, the others of the node wait for it
        """
        link = self._links[name]
        with contextlib.ExitStack() as after:
            if connects_first:
                after.enter_context(self._slots)
                after.callback(first.set)
            else:
                first.wait()
            began = time.monotonic()
            self._room.enter(link)
            after.callback(self._room.leave, link)
            try:
                failure = link.connect(again=connects_first)
                first.set()
                self._answer(link, one, began, failure)
            except Exception as error:  # noqa: BLE001 - a mistake of ours costs this node alone
                one.end(Failure(kind=FAILED, error=mistake(error)))

    def _answer(
        self, link: _Link, one: Exchange[Found], began: float, failure: Failure | None
    ) -> None:
        """Answer all questions of the conversation; failure: why the node cannot be asked."""
        with ctx_host.use(link.host):
            one.begin()
            while not one.over:
                assert one.request is not None
                answer = failure or carry(link.host, one.request, self.tag, link.rights)
                one.answer(replace(answer, seconds=time.monotonic() - began))
                began = time.monotonic()

    def open(self, request: Request) -> Dialogue:
        """See Carrier. The node is connected when it was not."""
        link = self._links[request.node]
        failure = link.connect() if self._room.enter(link, wait=False) else _NO_ROOM
        rights = link.rights or Become(False, "", {})
        line, stdin = shell.command(request.script, request.limit_s, self.tag, request.payload)

        def begin() -> Stream:
            if failure is not None:
                raise ValueError(failure.error)
            with ctx_host.use(link.host):
                words = with_rights(link.host, line, rights)
            if isinstance(link.host.connector, Connector) and link.host.connector.master:
                return _OverMaster(link.host.connector, words)
            if isinstance(link.host.connector, SSHConnector):
                return _OverSsh(link.host, words)
            if isinstance(link.host.connector, LocalConnector):
                return piped(words)
            raise ValueError("needs ssh")

        def held() -> Stream:
            try:
                return _Held(begin(), partial(self._room.leave, link))
            except BaseException:
                if failure is not _NO_ROOM:
                    self._room.leave(link)
                raise

        first = f"{rights.password}\n{stdin}" if rights.sudo and rights.password else stdin
        return Dialogue(held, first, request.mark, sudo=rights.sudo)

    def met(self) -> Mapping[str, Met]:
        found = {name: link.met or _met(link.host) for name, link in self._links.items()}
        return {name: one for name, one in found.items() if one is not None}

    def use_password(self, password: str, nodes: Iterable[str]) -> None:
        for name in nodes:
            link = self._links[name]
            if link.rights is not None:
                link.rights = Become(True, password, link.rights.others)

    def end(self, limit_s: float = 5) -> None:
        # In brackets, so that the search does not find its own command line.
        script = f"{shell.library('end')}nr_end {quote(f'[n]odeready:{self.run}')}"

        def end(link: _Link) -> None:
            with ctx_host.use(link.host):
                carry(link.host, Request(link.host.name, script, 3), "nodeready:end", link.rights)

        closing = Pool(64)
        for link in self._connected():
            closing.spawn(end, link)
        closing.join(timeout=limit_s)


class Fleet(Connected):
    """The nodes of an inventory, which are connected when they are asked. Leaving it disconnects.

    inventory: pyinfra's, not yet used by a State
    hosts:     the selected ones
    run:       the word for the run; "": a new one
    tell:      says one line to the user; None: on standard error
    """

    def __init__(
        self,
        inventory: Inventory,
        hosts: Iterable[Host],
        config: Config | None = None,
        run: str = "",
        *,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        set_timeouts(inventory)
        super().__init__(hosts, run)
        tell = tell or _say
        parallel = max(1, min(len(self.nodes), MAX_PARALLEL))
        if any(issubclass(one.host.connector_cls, SSHConnector) for one in self._links.values()):
            self._room, parallel = _room_for(len(self.nodes), parallel, tell)
            self._slots = BoundedSemaphore(parallel)
        config = config or Config()
        config.PARALLEL = parallel
        self._state = State(inventory, config, check_for_changes=False)
        self._ways = logins.Ways(CONNECT_TIMEOUT_S, tell)
        for link in self._links.values():
            if isinstance(link.host.connector, Connector):
                link.host.connector.ways = self._ways

    def __enter__(self) -> Fleet:
        self._context = ctx_state.use(self._state)
        self._context.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        closing = Pool(64)
        for link in self._connected():
            closing.spawn(_disconnect, link.host)
        closing.join(timeout=5)
        self._ways.close()
        self._context.__exit__(None, None, None)


#: Descriptors of one connection: its socket, and what a ProxyCommand has beside it.
_PER_NODE = 2
#: Descriptors that this process needs besides: pipes of what it starts, DNS, files it writes.
_BESIDES = 24


def _say(line: str) -> None:
    print(f"nodeready: {line}", file=sys.stderr)


def _room_for(nodes: int, parallel: int, tell: Callable[[str], None]) -> tuple[_Room, int]:
    """Room for as many nodes as this machine lets us have descriptors, and how many at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) + _BESIDES
    wanted = used + _PER_NODE * nodes
    top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < top:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
            soft = top
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return _Room(nodes + 1), parallel
    most = max(1, (soft - used) // _PER_NODE)
    if most < parallel:
        tell(
            f"{most} nodes at once and not {parallel}: this machine allows {soft} open files; "
            f"raise the limit (ulimit -n {wanted})"
        )
    return _Room(most), min(parallel, most)


def _nothing(line: str) -> None:
    """Say nothing."""


class Sharded(Processes):
    """The same nodes, shared between processes: a Fleet in each.

    count: of the processes
    """

    def __init__(
        self, inventory: Inventory, hosts: Iterable[Host], config: Config | None, count: int
    ) -> None:
        self._inventory, self._config = inventory, config
        self._hosts = tuple(hosts)
        self._count = count
        super().__init__(str(host.name) for host in self._hosts)

    def start(self) -> list[Peer]:
        peers: list[Peer] = []
        for at in range(self._count):
            share = self._hosts[at :: self._count]
            names = [str(host.name) for host in share]
            # What one of them has to say about this machine is said once.
            tell = _nothing if at else None
            made = partial(Fleet, self._inventory, share, self._config, self.run, tell=tell)
            peers.append(forked(names, made))
        return peers


def _put(over: Queue[Key], key: Key, _: object) -> None:
    over.put(key)


def _all(
    exchanges: Mapping[Key, Exchange[Found]], failure: Callable[[Key], Failure]
) -> Iterator[tuple[Key, Found | Failure]]:
    """The results of these conversations; one that has not ended gets a failure as its answer."""
    for key, one in exchanges.items():
        if not one.over:
            one.end(failure(key))
        yield key, one.value


def _disconnect(host: Host) -> None:
    client = getattr(host.connector, "client", None)
    try:
        host.connector.disconnect()
        if client is not None:
            client.close()
    except Exception:  # noqa: BLE001 - the connection goes away either way
        return


def fleet_context(
    carrier: Carrier, wanted: Mapping[str, Policy], looks: Iterable[Look], inventory: Inventory
) -> FleetContext:
    """The policies, completed by what only all nodes together tell: host keys, the gate's program.

    carrier: of the same run: a block of known hosts that was too large for a look is fetched
    """
    snapshots = {one.name: one.snapshot for one in looks if one.snapshot is not None}

    def block(name: str) -> str:
        request = Request(name, known_hosts.READ_BLOCK, 30)
        return "".join(answer.stdout for _, answer in carrier.ask([request]))

    endpoints = {host.name: endpoint(host) for host in inventory}
    for name, seen in carrier.met().items():
        endpoints[name] = endpoints[name]._replace(reached=seen.address, key=seen.key)
    policies = expectations(wanted, snapshots, endpoints, bundle.program, block)
    return FleetContext(policies)

"""The transport by pyinfra's connectors: connections to many nodes, and conversations over them.

A connection has a deadline, a command a time limit, an answer a size limit. A node that is
unreachable, dies or hangs fails alone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from gevent.pool import Pool
from gevent.queue import Empty, Queue
from paramiko import SSHException
from pyinfra.api import Config, Host, Inventory, State, StringCommand
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.api.exceptions import PyinfraError
from pyinfra.connectors.local import LocalConnector
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.util import extract_control_arguments, make_unix_command_for_host
from pyinfra.context import ctx_host, ctx_state

from nodeready.agent import local
from nodeready.agent.asking import (
    CONNECT_TIMEOUT_S,
    INTERRUPT,
    Answer,
    Conversation,
    Exchange,
    Key,
    Outcomes,
    Request,
    ResultT,
    SshPeer,
    Transport,
    end_all,
    end_script,
    exchanges_of,
    late,
    node_of,
)
from nodeready.agent.local import LineChannel, Stream, as_root, judge_reply, piped
from nodeready.agent.runtime import bug_text
from nodeready.core import shell
from nodeready.core.outcome import FAILED, HUNG, LOST, OUTPUT, UNREACHABLE, Gap
from nodeready.fleet.transport import Note, connectors, logins
from nodeready.fleet.transport.connection import ENDLESS, sent_without_end
from nodeready.fleet.transport.processes import Child, WorkerTransport, fork_transport

# --- The rights with which a command runs on a node: sudo to root, or another method of
# pyinfra's.

#: pyinfra's arguments that wrap a command.
_WRAPPING_ARGUMENTS = ("_env", "_chdir", "_sudo", "_su_user", "_doas", "_dzdo")


@dataclass(frozen=True)
class HostRights:
    sudo: bool  # nodeready itself calls sudo, to root
    password: str  # of that sudo; "": none
    arguments: dict[str, Any]  # pyinfra's, for any other method

    def apply(self, command: shell.ShellCommand) -> shell.ShellCommand:
        return as_root(command, self.password) if self.sudo else command


def rights_of(host: Host) -> HostRights:
    """The node's rights as pyinfra's current operation has them, or else as the node's data and
    pyinfra's configuration give them.
    """
    global_arguments: Any = host.current_op_global_arguments
    if global_arguments is None:
        global_arguments = pop_global_arguments(host.state, host, {})[0]
    arguments = {k: global_arguments[k] for k in CONNECTOR_ARGUMENT_KEYS if k in global_arguments}
    if not arguments.get("_sudo") or arguments.get("_sudo_user"):
        return HostRights(False, "", arguments)
    password = str(arguments.get("_sudo_password") or "")
    return HostRights(True, password, {**arguments, "_sudo": False, "_sudo_password": None})


def wrap_command(host: Host, command: str, arguments: dict[str, Any]) -> str:
    """The command with pyinfra's wrapping, for a connector that is used directly."""
    if not any(arguments.get(name) for name in _WRAPPING_ARGUMENTS):
        return command
    arguments = dict(arguments)
    extract_control_arguments(cast("Any", arguments))
    wrapped = make_unix_command_for_host(host.state, host, StringCommand(command), **arguments)
    return wrapped.get_raw_value()


# --- Conversations with many nodes in parallel, each in a greenlet.


#: For each conversation, a function that holds it from its first question to its end.
Holders = Iterator[tuple[Key, Callable[[], None]]]


class ParallelTransport(Transport):
    @abstractmethod
    def holders(self, exchanges: Mapping[Key, Exchange[ResultT]]) -> Holders:
        """See Holders."""

    @abstractmethod
    def is_reached(self, key: Key) -> bool:
        """Whether the node of this conversation is connected."""

    def converse(
        self, conversations: Mapping[Key, Conversation[ResultT]], deadline: float | None = None
    ) -> Outcomes[ResultT]:
        exchanges = exchanges_of(conversations)
        ended_keys: Queue[Key] = Queue()
        jobs: list[Any] = []
        is_interrupted = False

        def hold_to_end(key: Key, hold: Callable[[], None]) -> None:
            try:
                hold()
            except Exception as error:  # noqa: BLE001 - our bug fails only this node
                exchanges[key].end(Answer(gap=Gap(FAILED, bug_text(error))))
            finally:
                ended_keys.put(key)

        try:
            for key, hold in self.holders(dict(exchanges)):
                jobs.append(gevent.spawn(hold_to_end, key, hold))
            while exchanges:
                remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                key = ended_keys.get(timeout=remaining_s)
                yield key, exchanges.pop(key).outcome
        except Empty:
            reached = {key for key in exchanges if self.is_reached(key)}
            gevent.killall(jobs, block=False)
            if reached:
                self.end(2)
            yield from end_all(exchanges, lambda key: late(key in reached))
        except KeyboardInterrupt:
            self.interrupted = is_interrupted = True
            gevent.killall(jobs, block=False)
            yield from end_all(exchanges, lambda key: INTERRUPT)
        finally:
            gevent.killall(jobs, block=False)
            if is_interrupted:
                self.end()


# --- The transport.

#: Nodes asked at once. Each needs one socket and little memory; more would only share the CPU of
#: this machine.
MAX_PARALLEL = 256


def _run(
    host: Host, command: shell.ShellCommand, request: Request, arguments: dict[str, Any]
) -> Answer:
    connector = host.connector
    if isinstance(connector, SSHConnector):
        data, mark = command.stdin.encode("utf-8", "surrogateescape"), request.mark.encode()
        words = wrap_command(host, command.line, arguments)
        if isinstance(connector, connectors.SshConnector) and connector.master:
            buffer = connectors.AnswerBuffer(mark, request.max_bytes)
            try:
                stream = connectors.MasterStream(connector, words, separate_errors=True)
                with contextlib.closing(stream):
                    return connectors.reply_of(stream, data, buffer)
            except connectors.MasterUnavailable:
                connector.deadline = logins.PausableDeadline(CONNECT_TIMEOUT_S)
                with connector.deadline:
                    connector.connect_directly()
        buffer = connectors.AnswerBuffer(mark, request.max_bytes)
        with connectors.session(host) as channel:
            running = connectors.ChannelCommand(channel, words, buffer.max_bytes)
            return connectors.reply_of(running, data, buffer)
    if isinstance(connector, LocalConnector):
        wrapped = shell.ShellCommand(wrap_command(host, command.line, arguments), command.stdin)
        return local.run(wrapped, request.limit_s, request.max_bytes)
    how = {**arguments, "_stdin": command.stdin}
    ok, output = host.run_shell_command(StringCommand(command.line), **how)
    return Answer(output.stdout, output.stderr, rc=0 if ok else 1)


def ask_host(host: Host, request: Request, tag: str, rights: HostRights | None = None) -> Answer:
    """Ask a connected node, and wait for its answer. Never raises for a node's fault.

    The wait here is a little longer than the limit on the node, whose `timeout` may be broken.
    """
    rights = rights or rights_of(host)
    limit_s = request.limit_s
    command = rights.apply(shell.command(request.script, limit_s, tag, request.payload))
    started = time.monotonic()
    try:
        with gevent.Timeout(limit_s + 2 * shell.KILL_AFTER_S):
            answer = _run(host, command, request, rights.arguments)
    except (gevent.Timeout, TimeoutError):
        return Answer(gap=Gap(HUNG, f"no answer in {limit_s} s"))
    except connectors.OutputTooLarge as problem:
        first = problem.data[:40].decode("utf-8", "replace")
        return Answer(gap=Gap(OUTPUT, f"{problem}, beginning with {first!r}"))
    except (PyinfraError, SSHException, OSError, EOFError) as problem:
        reason = _jump_host_error(host) or str(problem) or type(problem).__name__
        return Answer(gap=Gap(LOST, f"connection lost ({reason})"))
    seconds = time.monotonic() - started
    if answer.gap is not None:
        return answer
    if answer.rc is None and _is_connection_lost(host):
        reason = f": {ENDLESS}" if sent_without_end(connectors.transport_of(host)) else ""
        if jump_error := _jump_host_error(host):
            reason = f" ({jump_error})"
        return replace(answer, seconds=seconds, gap=Gap(LOST, f"connection lost{reason}"))
    return judge_reply(replace(answer, seconds=seconds), limit_s, rights.sudo)


def _is_connection_lost(host: Host) -> bool:
    """Whether the whole connection ended, not only the command."""
    transport = connectors.transport_of(host)
    if transport is None:
        return False
    # paramiko's reader closes the channels before it marks the transport as ended.
    transport.join(0.5)
    return not transport.is_active()


def _jump_host_error(host: Host) -> str:
    """The error if the jump host is lost, or ""."""
    client = getattr(host.connector, "client", None)
    if isinstance(client, logins.Client) and client.jump_host and client.jump_is_gone:
        return f"jump host {client.jump_host.name}: connection lost"
    return ""


# --- The transports: all nodes of a pyinfra run, or of an inventory.


@dataclass
class NodeConnection:
    """A node and its connection, which the first conversation with the node makes."""

    host: Host
    rights: HostRights | None = None
    failure: Gap | None = None
    peer: SshPeer | None = None
    users: int = 0  # number of conversations and channels over it
    connect_lock: BoundedSemaphore = field(default_factory=BoundedSemaphore)

    def connect(self, again: bool = True) -> Gap | None:
        """Connect if needed. Never raises for a node's fault.

        again: also after an earlier failure
        """
        with self.connect_lock:
            if self.failure is not None and not again:
                return self.failure
            if not self.host.connected:
                self.failure = connectors.connect(self.host)
                self.peer = connectors.ssh_peer(self.host) if self.failure is None else None
            else:
                self.failure = None
            if self.failure is None and self.rights is None:
                self.rights = rights_of(self.host)
            return self.failure


#: The gap of a node for which this machine has no file descriptor.
_NO_DESCRIPTOR = Gap(
    UNREACHABLE, "too many open files here: raise the limit (ulimit -n), or take fewer"
)


class ConnectionSlots:
    """The nodes that are connected at once. An idle node is disconnected for another.

    maximum: number of connected nodes
    """

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._connected_by_id: dict[int, NodeConnection] = {}
        self._has_room = Event()

    def enter(self, node: NodeConnection, *, wait: bool = True) -> bool:
        """Count a conversation with the node, once there is room for the connection.

        wait: until another node is idle; otherwise return False if none is
        """
        node.users += 1
        while id(node) not in self._connected_by_id and len(self._connected_by_id) >= self.maximum:
            connected = self._connected_by_id.values()
            idle = next((candidate for candidate in connected if not candidate.users), None)
            if idle is not None:
                del self._connected_by_id[id(idle)]
                _disconnect(idle.host)
            elif wait:
                self._has_room.clear()
                self._has_room.wait()
            else:
                node.users -= 1
                return False
        self._connected_by_id.setdefault(id(node), node)
        return True

    def leave(self, node: NodeConnection) -> None:
        """End a conversation; the connection stays until another node needs the room."""
        node.users -= 1
        if not node.users:
            # Moved to the end: the node that was used last is disconnected last.
            self._connected_by_id.pop(id(node), None)
            if node.host.connected:
                self._connected_by_id[id(node)] = node
        self._has_room.set()


class SlotStream:
    """A Stream that calls ``on_close`` after it is closed."""

    def __init__(self, stream: Stream, on_close: Callable[[], None]) -> None:
        self._stream, self._on_close = stream, on_close
        self.read, self.write = stream.read, stream.write

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._on_close()


class ConnectedHosts(ParallelTransport):
    """Nodes whose connections belong to another program, such as pyinfra's own command.

    hosts: of an inventory that a State uses
    run:   the word for the run; "": a new one
    """

    def __init__(self, hosts: Iterable[Host], run: str = "") -> None:
        self._connections = {str(host.name): NodeConnection(host) for host in hosts}
        super().__init__(self._connections, run)
        # How many nodes are asked at once, over all calls of `converse`.
        self._parallel = BoundedSemaphore(MAX_PARALLEL)
        self._slots = ConnectionSlots(len(self._connections) + 1)

    def _connected(self) -> list[NodeConnection]:
        return [node for node in self._connections.values() if node.host.connected]

    def adopt_sudo(self, host: Host) -> bool:
        """Ask this node by sudo from now on if pyinfra's current operation has it; whether the
        node was asked without it before.
        """
        node, rights = self._connections[str(host.name)], rights_of(host)
        if not rights.sudo or node.rights is None or node.rights.sudo:
            return False
        node.rights = rights
        return True

    def holders(self, exchanges: Mapping[Key, Exchange[ResultT]]) -> Holders:
        connecting: dict[str, Event] = {}
        for key, exchange in exchanges.items():
            name = node_of(key)
            connects = name not in connecting
            is_connected = connecting.setdefault(name, Event())
            yield key, partial(self._run_conversation, name, exchange, is_connected, connects)

    def is_reached(self, key: Key) -> bool:
        return bool(self._connections[node_of(key)].host.connected)

    def _run_conversation(
        self, name: str, exchange: Exchange[ResultT], is_connected: Event, connects: bool
    ) -> None:
        """One conversation, from its first question to its end.

        is_connected: set when the node is connected, or could not be
        connects:     this conversation makes the connection, the node's others wait for it. All of
                      them count as one node that is asked
        """
        node = self._connections[name]
        with contextlib.ExitStack() as stack:
            if connects:
                stack.enter_context(self._parallel)
                stack.callback(is_connected.set)
            else:
                is_connected.wait()
            began = time.monotonic()
            self._slots.enter(node)
            stack.callback(self._slots.leave, node)
            is_kept = bool(node.host.connected)
            failure = node.connect(again=connects)
            is_connected.set()
            self._answer(node, exchange, began, failure, is_kept=is_kept)

    def _answer(
        self,
        node: NodeConnection,
        exchange: Exchange[ResultT],
        began: float,
        failure: Gap | None,
        *,
        is_kept: bool,
    ) -> None:
        """Answer all questions of the conversation.

        failure: why the node cannot be asked
        is_kept: an earlier conversation has made the connection: the node may have been restarted
        """
        with ctx_host.use(node.host):
            exchange.start()
            while not exchange.is_over:
                assert exchange.request is not None
                answer = Answer(gap=failure)
                if not failure:
                    answer = ask_host(node.host, exchange.request, self.tag, node.rights)
                if is_kept and answer.has_gap(LOST) and exchange.request.reads:
                    is_kept = False
                    _disconnect(node.host)
                    failure = node.connect()
                    continue
                exchange.answer(replace(answer, seconds=time.monotonic() - began))
                began = time.monotonic()

    def open(self, request: Request) -> LineChannel:
        node = self._connections[request.node]
        failure = node.connect() if self._slots.enter(node, wait=False) else _NO_DESCRIPTOR
        rights = node.rights or HostRights(False, "", {})
        script, limit_s, payload = request.script, request.limit_s, request.payload
        command = rights.apply(shell.command(script, limit_s, self.tag, payload))

        def open_stream() -> Stream:
            if failure is not None:
                raise ValueError(failure.reason)
            with ctx_host.use(node.host):
                words = wrap_command(node.host, command.line, rights.arguments)
            if (
                isinstance(node.host.connector, connectors.SshConnector)
                and node.host.connector.master
            ):
                return connectors.MasterStream(node.host.connector, words)
            if isinstance(node.host.connector, SSHConnector):
                return connectors.SshStream(node.host, words)
            if isinstance(node.host.connector, LocalConnector):
                return piped(words)
            raise ValueError("needs ssh")

        def open_counted_stream() -> Stream:
            try:
                return SlotStream(open_stream(), partial(self._slots.leave, node))
            except BaseException:
                if failure is not _NO_DESCRIPTOR:
                    self._slots.leave(node)
                raise

        return LineChannel(open_counted_stream, command.stdin, request.mark, sudo=rights.sudo)

    def ssh_peers(self) -> Mapping[str, SshPeer]:
        connections = self._connections.items()
        peers = {name: node.peer or connectors.ssh_peer(node.host) for name, node in connections}
        return {name: peer for name, peer in peers.items() if peer is not None}

    def use_password(self, password: str, nodes: Iterable[str]) -> None:
        for name in nodes:
            node = self._connections[name]
            if node.rights is not None:
                node.rights = HostRights(True, password, node.rights.arguments)

    def end(self, limit_s: float = 5) -> None:
        script = end_script(self.run)

        def end(node: NodeConnection) -> None:
            request = Request(node.host.name, script, 3)
            with ctx_host.use(node.host):
                ask_host(node.host, request, "nodeready:end", node.rights)

        closing = Pool(64)
        for node in self._connected():
            closing.spawn(end, node)
        closing.join(timeout=limit_s)


class SshTransport(ConnectedHosts):
    """The nodes of an inventory, which are connected when they are asked.

    inventory: pyinfra's, not yet used by a State
    hosts:     the selected hosts
    run:       the word for the run; "": a new one
    notify:    shows the user a line; None: on standard error
    """

    def __init__(
        self,
        inventory: Inventory,
        hosts: Iterable[Host],
        config: Config | None = None,
        run: str = "",
        *,
        notify: Note | None = None,
    ) -> None:
        connectors.set_timeouts(inventory)
        super().__init__(hosts, run)
        notify = notify or _warn
        parallel = max(1, min(len(self.nodes), MAX_PARALLEL))
        kinds = {node.host.connector_cls for node in self._connections.values()}
        if any(issubclass(kind, SSHConnector) for kind in kinds):
            self._slots, parallel = _connection_slots(len(self.nodes), parallel, notify)
            self._parallel = BoundedSemaphore(parallel)
        config = config or Config()
        config.PARALLEL = parallel
        self._state = State(inventory, config, check_for_changes=False)
        self._ssh_logins = logins.SshLogins(CONNECT_TIMEOUT_S, notify)
        for node in self._connections.values():
            if isinstance(node.host.connector, connectors.SshConnector):
                node.host.connector.ssh_logins = self._ssh_logins

    def __enter__(self) -> SshTransport:
        self._context = ctx_state.use(self._state)
        self._context.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        closing = Pool(64)
        for node in self._connected():
            closing.spawn(_disconnect, node.host)
        closing.join(timeout=5)
        self._ssh_logins.close()
        self._context.__exit__(None, None, None)


#: File descriptors of one connection: its socket, and the standard error of a ProxyCommand.
_DESCRIPTORS_PER_NODE = 2
#: Other file descriptors of this process: pipes to its children, DNS, files that it writes.
_OTHER_DESCRIPTORS = 24


def _warn(line: str) -> None:
    print(f"nodeready: {line}", file=sys.stderr)


def _connection_slots(nodes: int, parallel: int, notify: Note) -> tuple[ConnectionSlots, int]:
    """Room for as many nodes as there are file descriptors, and how many to ask at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used_count = len(os.listdir("/proc/self/fd")) + _OTHER_DESCRIPTORS
    needed = used_count + _DESCRIPTORS_PER_NODE * nodes
    new_limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < new_limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
            soft = new_limit
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return ConnectionSlots(nodes + 1), parallel
    maximum = max(1, (soft - used_count) // _DESCRIPTORS_PER_NODE)
    if maximum < parallel:
        few = f"{maximum} nodes at once and not {parallel}: this machine allows {soft} open files"
        notify(f"{few}; raise the limit (ulimit -n {needed})")
    return ConnectionSlots(maximum), min(parallel, maximum)


class ShardedSsh(WorkerTransport):
    """Nodes that are shared between ``count`` processes: an SshTransport in each."""

    def __init__(
        self, inventory: Inventory, hosts: Iterable[Host], config: Config | None, count: int
    ) -> None:
        self._inventory, self._config = inventory, config
        self._hosts = tuple(hosts)
        self._count = count
        super().__init__(str(host.name) for host in self._hosts)

    def note(self, text: str) -> None:
        _warn(text)

    def start(self) -> list[Child]:
        def fork_share(index: int) -> Child:
            share = self._hosts[index :: self._count]

            def make_transport(note: Note) -> Transport:
                # Only the first one warns about this machine.
                notify = (lambda line: None) if index else note
                return SshTransport(self._inventory, share, self._config, self.run, notify=notify)

            return fork_transport([str(host.name) for host in share], make_transport)

        return [fork_share(index) for index in range(self._count)]


def _disconnect(host: Host) -> None:
    client = getattr(host.connector, "client", None)
    # A later conversation connects again.
    host.connected = False
    try:
        host.connector.disconnect()
        if client is not None:
            client.close()
    except Exception:  # noqa: BLE001 - the connection goes away either way
        return

"""The transport by pyinfra's connectors: connections to many nodes, and conversations over them.

One deadline over all of connecting, a limit on every command, a bound on every answer. A node that
is unreachable, dies or hangs fails alone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from gevent.pool import Pool
from gevent.queue import Empty, Queue
from paramiko import SSHException
from pyinfra.api import Config, Host, Inventory, State, StringCommand
from pyinfra.api.exceptions import PyinfraError
from pyinfra.connectors.local import LocalConnector
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.context import ctx_host, ctx_state

from nodeready import shell
from nodeready.shell import KILL_AFTER_S, quote
from nodeready.transport import connection, local, logins
from nodeready.transport.base import (
    CONNECT_TIMEOUT_S,
    FAILED,
    HUNG,
    LOST,
    OUTPUT,
    UNREACHABLE,
    Answer,
    Conversation,
    Exchange,
    Failure,
    Key,
    Reply,
    Request,
    ResultT,
    SshPeer,
    Transport,
    bug_text,
    end_all,
    interrupted,
    late,
    node_of,
)
from nodeready.transport.connector import (
    SshConnector,
    connect,
    set_timeouts,
    ssh_peer,
    transport_of,
)
from nodeready.transport.line_channel import LineChannel, Stream
from nodeready.transport.local import piped
from nodeready.transport.processes import WorkerProcess, WorkerTransport, fork_worker
from nodeready.transport.rights import HostRights, rights_of, wrap_command
from nodeready.transport.ssh_command import (
    MasterStream,
    MasterUnavailable,
    OutputTooLarge,
    SshStream,
    run_over_master,
    run_over_ssh,
)
from nodeready.transport.sudo import judge_reply

#: Nodes asked at once. Each costs one socket and little memory; beyond this number the CPU of this
#: machine is the limit.
MAX_PARALLEL = 256


def _run(
    host: Host, command: shell.ShellCommand, request: Request, arguments: dict[str, Any]
) -> Answer:
    """Run the command through the node's connector, and return its answer."""
    connector = host.connector
    if isinstance(connector, SSHConnector):
        data, mark = command.stdin.encode("utf-8", "surrogateescape"), request.mark.encode()
        words = wrap_command(host, command.line, arguments)
        if isinstance(connector, SshConnector) and connector.master:
            try:
                return run_over_master(connector, words, data, mark, request.max_bytes)
            except MasterUnavailable:
                connector.deadline = logins.PausableDeadline(CONNECT_TIMEOUT_S)
                with connector.deadline:
                    connector.connect_directly()
        return run_over_ssh(host, words, data, mark, request.max_bytes)
    if isinstance(connector, LocalConnector):
        wrapped = shell.ShellCommand(wrap_command(host, command.line, arguments), command.stdin)
        return local.run(wrapped, request.limit_s, request.max_bytes)
    ok, output = host.run_shell_command(
        StringCommand(command.line), **{**arguments, "_stdin": command.stdin}
    )
    return Reply(output.stdout, output.stderr, rc=0 if ok else 1)


def ask_host(host: Host, request: Request, tag: str, rights: HostRights | None = None) -> Answer:
    """Ask a connected node, and wait for its answer. Never raises for a node's fault.

    The wait here is a little longer than the limit on the node: a node's own `timeout` may no
    longer work.
    """
    rights = rights or rights_of(host)
    limit_s = request.limit_s
    command = rights.apply(shell.command(request.script, limit_s, tag, request.payload))
    started = time.monotonic()
    try:
        with gevent.Timeout(limit_s + 2 * KILL_AFTER_S):
            answer = _run(host, command, request, rights.arguments)
    except (gevent.Timeout, TimeoutError):
        return Failure(kind=HUNG, error=f"no answer in {limit_s} s")
    except OutputTooLarge as problem:
        first = problem.first.decode("utf-8", "replace")
        return Failure(kind=OUTPUT, error=f"{problem}, beginning with {first!r}")
    except (PyinfraError, SSHException, OSError, EOFError) as problem:
        reason = _jump_host_error(host) or str(problem) or type(problem).__name__
        return Failure(kind=LOST, error=f"connection lost ({reason})")
    seconds = time.monotonic() - started
    if not isinstance(answer, Reply):
        return answer
    if answer.rc is None and _is_connection_lost(host):
        reason = (
            f": {connection.ENDLESS}" if connection.sent_without_end(transport_of(host)) else ""
        )
        reason = f" ({_jump_host_error(host)})" if _jump_host_error(host) else reason
        return Failure(answer.stdout, answer.stderr, seconds, LOST, f"connection lost{reason}")
    return judge_reply(replace(answer, seconds=seconds), limit_s, rights.sudo)


def _is_connection_lost(host: Host) -> bool:
    """Whether the connection itself ended, and not only the command."""
    transport = transport_of(host)
    if transport is None:
        return False
    # paramiko's reader closes the channels first, and marks the transport as ended after that.
    transport.join(0.5)
    return not transport.is_active()


def _jump_host_error(host: Host) -> str:
    """The error where the jump host is lost; "" where it is not."""
    client = getattr(host.connector, "client", None)
    if isinstance(client, logins.Client) and client.jump_host and client.jump_is_gone:
        return f"jump host {client.jump_host.name}: connection lost"
    return ""


# --- The transports: all nodes of a pyinfra run, or of an inventory.


@dataclass
class NodeConnection:
    """A node and its connection, which the first conversation with the node makes.

    peer:  the node's sshd, as the connection saw it
    users: number of conversations and channels over it
    """

    host: Host
    rights: HostRights | None = None
    failure: Failure | None = None
    peer: SshPeer | None = None
    users: int = 0
    connect_lock: BoundedSemaphore = field(default_factory=BoundedSemaphore)

    def connect(self, again: bool = True) -> Failure | None:
        """Connect if needed. Never raises for a node's fault.

        again: try once more after a connection that failed
        """
        with self.connect_lock:
            if self.failure is not None and not again:
                return self.failure
            if not self.host.connected:
                self.failure = connect(self.host)
                self.peer = ssh_peer(self.host) if self.failure is None else None
            else:
                self.failure = None
            if self.failure is None and self.rights is None:
                self.rights = rights_of(self.host)
            return self.failure


#: The answer of a node that this machine has no descriptor for.
_NO_DESCRIPTOR = Failure(
    kind=UNREACHABLE, error="too many open files here: raise the limit (ulimit -n), or take fewer"
)


class ConnectionSlots:
    """The nodes that are connected at once. An idle node makes room for another.

    maximum: of connected nodes
    """

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._connected_by_id: dict[int, NodeConnection] = {}
        self._has_room = Event()

    def enter(self, link: NodeConnection, *, wait: bool = True) -> bool:
        """Count a conversation with the node, as soon as there is room for the connection.

        wait: until another node is idle; else False when none is
        """
        link.users += 1
        while id(link) not in self._connected_by_id and len(self._connected_by_id) >= self.maximum:
            idle = next(
                (key for key, link_ in self._connected_by_id.items() if not link_.users), None
            )
            if idle is not None:
                idle_link = self._connected_by_id.pop(idle)
                _disconnect(idle_link.host)
                idle_link.host.connected = False
            elif wait:
                self._has_room.clear()
                self._has_room.wait()
            else:
                link.users -= 1
                return False
        self._connected_by_id.setdefault(id(link), link)
        return True

    def leave(self, link: NodeConnection) -> None:
        """End a conversation; the connection stays until another node needs its room."""
        link.users -= 1
        if not link.users:
            # The node that was used last is disconnected last.
            self._connected_by_id.pop(id(link), None)
            if link.host.connected:
                self._connected_by_id[id(link)] = link
        self._has_room.set()


class SlotStream:
    """A Stream that calls ``on_close`` once."""

    def __init__(self, stream: Stream, on_close: Callable[[], None]) -> None:
        self._stream, self._on_close, self._is_closed = stream, on_close, False
        self.read, self.write = stream.read, stream.write

    def close(self) -> None:
        """See Stream."""
        try:
            self._stream.close()
        finally:
            if not self._is_closed:
                self._is_closed = True
                self._on_close()


class ConnectedHosts(Transport):
    """Nodes whose connections belong to another program, such as pyinfra's own command.

    hosts: of an inventory that a State uses
    run:   the word for the run; "": a new one
    """

    def __init__(self, hosts: Iterable[Host], run: str = "") -> None:
        self._links = {str(host.name): NodeConnection(host) for host in hosts}
        super().__init__(self._links, run)
        # How many nodes are asked at once, over all calls of `converse`.
        self._parallel = BoundedSemaphore(MAX_PARALLEL)
        self._slots = ConnectionSlots(len(self._links) + 1)

    def _connected(self) -> list[NodeConnection]:
        return [link for link in self._links.values() if link.host.connected]

    def converse(
        self, conversations: Mapping[Key, Conversation[ResultT]], deadline: float | None = None
    ) -> Iterator[tuple[Key, ResultT | Failure]]:
        exchanges = {key: Exchange(conversation) for key, conversation in conversations.items()}
        by_node: dict[str, list[Key]] = {}
        for key in conversations:
            by_node.setdefault(node_of(key), []).append(key)
        ended_keys: Queue[Key] = Queue()
        jobs: list[Any] = []
        is_interrupted = False
        try:
            for name, keys in by_node.items():
                # One slot for a node with all its conversations.
                first = Event()
                for key in keys:
                    connects_first = key is keys[0]
                    jobs.append(
                        gevent.spawn(
                            self._run_conversation, name, exchanges[key], first, connects_first
                        )
                    )
                    jobs[-1].link(partial(_put, ended_keys, key))
            while exchanges:
                remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                key = ended_keys.get(timeout=remaining_s)
                yield key, exchanges.pop(key).value
        except Empty:
            gevent.killall(jobs, block=False)
            if any(self._links[node_of(key)].host.connected for key in exchanges):
                self.end(2)
            yield from end_all(exchanges, self._late)
        except KeyboardInterrupt:
            self.interrupted = is_interrupted = True
            gevent.killall(jobs, block=False)
            yield from end_all(exchanges, lambda key: interrupted())
        finally:
            gevent.killall(jobs, block=False)
            if is_interrupted:
                self.end()

    def _late(self, key: Key) -> Failure:
        return late(self._links[node_of(key)].host.connected)

    def _run_conversation(
        self, name: str, exchange: Exchange[ResultT], first: Event, connects_first: bool
    ) -> None:
        """One conversation, from its first question to its end.

        first: set when the node is connected, or could not be; connects_first: this conversation
               makes the connection, the node's other conversations wait
        """
        link = self._links[name]
        with contextlib.ExitStack() as after:
            if connects_first:
                after.enter_context(self._parallel)
                after.callback(first.set)
            else:
                first.wait()
            began = time.monotonic()
            self._slots.enter(link)
            after.callback(self._slots.leave, link)
            try:
                failure = link.connect(again=connects_first)
                first.set()
                self._answer(link, exchange, began, failure)
            except Exception as error:  # noqa: BLE001 - a mistake of ours costs this node alone
                exchange.end(Failure(kind=FAILED, error=bug_text(error)))

    def _answer(
        self,
        link: NodeConnection,
        exchange: Exchange[ResultT],
        began: float,
        failure: Failure | None,
    ) -> None:
        """Answer all questions of the conversation; failure: why the node cannot be asked."""
        with ctx_host.use(link.host):
            exchange.start()
            while not exchange.is_over:
                assert exchange.request is not None
                answer = failure or ask_host(link.host, exchange.request, self.tag, link.rights)
                exchange.answer(replace(answer, seconds=time.monotonic() - began))
                began = time.monotonic()

    def open(self, request: Request) -> LineChannel:
        """See Transport. The node is connected when it was not."""
        link = self._links[request.node]
        failure = link.connect() if self._slots.enter(link, wait=False) else _NO_DESCRIPTOR
        rights = link.rights or HostRights(False, "", {})
        command = rights.apply(
            shell.command(request.script, request.limit_s, self.tag, request.payload)
        )

        def open_stream() -> Stream:
            if failure is not None:
                raise ValueError(failure.error)
            with ctx_host.use(link.host):
                words = wrap_command(link.host, command.line, rights.arguments)
            if isinstance(link.host.connector, SshConnector) and link.host.connector.master:
                return MasterStream(link.host.connector, words)
            if isinstance(link.host.connector, SSHConnector):
                return SshStream(link.host, words)
            if isinstance(link.host.connector, LocalConnector):
                return piped(words)
            raise ValueError("needs ssh")

        def open_counted_stream() -> Stream:
            try:
                return SlotStream(open_stream(), partial(self._slots.leave, link))
            except BaseException:
                if failure is not _NO_DESCRIPTOR:
                    self._slots.leave(link)
                raise

        return LineChannel(open_counted_stream, command.stdin, request.mark, sudo=rights.sudo)

    def ssh_peers(self) -> Mapping[str, SshPeer]:
        peers = {name: link.peer or ssh_peer(link.host) for name, link in self._links.items()}
        return {name: peer for name, peer in peers.items() if peer is not None}

    def use_password(self, password: str, nodes: Iterable[str]) -> None:
        for name in nodes:
            link = self._links[name]
            if link.rights is not None:
                link.rights = HostRights(True, password, link.rights.arguments)

    def end(self, limit_s: float = 5) -> None:
        # In brackets, so that the search does not find its own command line.
        script = f"{shell.library('end')}nr_end {quote(f'[n]odeready:{self.run}')}"

        def end(link: NodeConnection) -> None:
            with ctx_host.use(link.host):
                ask_host(
                    link.host, Request(link.host.name, script, 3), "nodeready:end", link.rights
                )

        closing = Pool(64)
        for link in self._connected():
            closing.spawn(end, link)
        closing.join(timeout=limit_s)


class SshTransport(ConnectedHosts):
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
        tell = tell or _warn
        parallel = max(1, min(len(self.nodes), MAX_PARALLEL))
        if any(issubclass(link.host.connector_cls, SSHConnector) for link in self._links.values()):
            self._slots, parallel = _connection_slots(len(self.nodes), parallel, tell)
            self._parallel = BoundedSemaphore(parallel)
        config = config or Config()
        config.PARALLEL = parallel
        self._state = State(inventory, config, check_for_changes=False)
        self._ssh_logins = logins.SshLogins(CONNECT_TIMEOUT_S, tell)
        for link in self._links.values():
            if isinstance(link.host.connector, SshConnector):
                link.host.connector.ssh_logins = self._ssh_logins

    def __enter__(self) -> SshTransport:
        self._context = ctx_state.use(self._state)
        self._context.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        closing = Pool(64)
        for link in self._connected():
            closing.spawn(_disconnect, link.host)
        closing.join(timeout=5)
        self._ssh_logins.close()
        self._context.__exit__(None, None, None)


#: Descriptors of one connection: its socket, and what a ProxyCommand has beside it.
_DESCRIPTORS_PER_NODE = 2
#: Descriptors that this process needs besides: pipes of what it starts, DNS, files it writes.
_OTHER_DESCRIPTORS = 24


def _warn(line: str) -> None:
    print(f"nodeready: {line}", file=sys.stderr)


def _connection_slots(
    nodes: int, parallel: int, tell: Callable[[str], None]
) -> tuple[ConnectionSlots, int]:
    """Room for as many nodes as this machine lets us have descriptors, and how many at once."""
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
        tell(
            f"{maximum} nodes at once and not {parallel}: this machine allows {soft} open files; "
            f"raise the limit (ulimit -n {needed})"
        )
    return ConnectionSlots(maximum), min(parallel, maximum)


class ShardedSsh(WorkerTransport):
    """The same nodes, shared between processes: an SshTransport in each.

    count: of the processes
    """

    def __init__(
        self, inventory: Inventory, hosts: Iterable[Host], config: Config | None, count: int
    ) -> None:
        self._inventory, self._config = inventory, config
        self._hosts = tuple(hosts)
        self._count = count
        super().__init__(str(host.name) for host in self._hosts)

    def start(self) -> list[WorkerProcess]:
        peers: list[WorkerProcess] = []
        for at in range(self._count):
            share = self._hosts[at :: self._count]
            names = [str(host.name) for host in share]
            # A note about this machine comes from one of them alone.
            tell = (lambda line: None) if at else None
            make_transport = partial(
                SshTransport, self._inventory, share, self._config, self.run, tell=tell
            )
            peers.append(fork_worker(names, make_transport))
        return peers


def _put(over: Queue[Key], key: Key, _: object) -> None:
    over.put(key)


def _disconnect(host: Host) -> None:
    client = getattr(host.connector, "client", None)
    try:
        host.connector.disconnect()
        if client is not None:
            client.close()
    except Exception:  # noqa: BLE001 - the connection goes away either way
        return

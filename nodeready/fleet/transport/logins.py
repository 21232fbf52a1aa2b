"""Logins to the nodes of a run, as ssh would make them.

Names with the same address take turns there. All nodes behind a jump host share a few connections
to it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import getpass
import inspect
import math
import os
import random
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import gevent
from gevent.lock import BoundedSemaphore, Semaphore
from paramiko import SSHClient, SSHException
from paramiko.channel import Channel
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.ssh_util import _patch_paramiko_sk_key_support

from nodeready.core import shell
from nodeready.fleet.transport import Note, connection, ignore
from nodeready.fleet.transport.keys import Agent, HostKeyPolicy, KnownHostsFiles, LoginKeys
from nodeready.fleet.transport.ssh_config import (
    Login,
    SshConfig,
    SshConfigError,
    SshSettings,
    expand,
    jump_of,
    parse_jump_host,
)

#: Handshakes with one address at once. From ten on, sshd drops some (MaxStartups 10:30:100), and
#: other users log in there, too.
HANDSHAKES = 3
#: Tries at an address whose sshd hangs up before its banner: one that several names share, and one
#: of a single node, where other users' logins may be too many.
TRIES, TRIES_ALONE = 5, 3
#: Forwards over one connection to a jump host: its sshd has 1,024 descriptors, one for each.
FORWARDS = 250
DOWN_S = 60.0  # seconds until a jump host that could not be reached is tried again
_MAX_HOPS = 8  # jump hosts in a row; more is a circle


# --- Turns at an address.


class PausableDeadline:
    """A deadline that pauses while other connections have their turn."""

    def __init__(self, seconds: float) -> None:
        self._remaining_s, self._started = seconds, 0.0
        self._timer: gevent.Timeout | None = None

    def __enter__(self) -> PausableDeadline:
        self._started = time.monotonic()
        self._timer = gevent.Timeout.start_new(max(0.001, self._remaining_s))
        return self

    def __exit__(self, *problem: object) -> None:
        if self._timer is not None:
            self._timer.close()
        self._remaining_s -= time.monotonic() - self._started

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def owns(self, timeout: gevent.Timeout) -> bool:
        return timeout is self._timer


#: Errors that every connection to the address would have.
_ADDRESS_ERRORS = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}


class HandshakeLimiter:
    """The turns at one address.

    failed: when the address failed for every connection, and why
    shared: several names of the run have this address
    sshd_dropped: it dropped this turn's connection: too many handshakes at once
    """

    def __init__(self) -> None:
        self._turns = Semaphore(HANDSHAKES)
        self._turn_count = HANDSHAKES
        self._clients: set[int] = set()
        self.sshd_dropped = False
        self.failed: tuple[float, str] | None = None

    @property
    def shared(self) -> bool:
        return len(self._clients) > 1

    @contextlib.contextmanager
    def turn(self, client: Client, deadline: PausableDeadline) -> Iterator[None]:
        """Wait for a turn. Raises OSError if the address failed in the meantime."""
        self._clients.add(id(client))
        asked_s = time.monotonic()
        with deadline.paused():
            self._turns.acquire()
        try:
            if self.failed is not None and self.failed[0] >= asked_s:
                raise OSError(self.failed[1])
            yield
        except gevent.Timeout:
            if client.stage in (connection.CONNECTING, connection.BANNER):
                self.failed = (time.monotonic(), client.stage)
            raise
        except OSError as problem:
            if client.stage == connection.CONNECTING and problem.errno in _ADDRESS_ERRORS:
                self.failed = (time.monotonic(), str(problem))
            raise
        finally:
            if self.sshd_dropped and self._turn_count > 1:
                # One turn less from now on.
                self._turn_count -= 1
            else:
                self._turns.release()
            self.sshd_dropped = False


# --- One login, and the jump host in front of it.


class Client(SSHClient):
    """paramiko's client, with the route of its connection.

    stage:       how far the connection has come, in the words of `connect_error`
    jump_host:   the jump host in front of the node
    jump_client: the connection to it that is used
    """

    stage = connection.CONNECTING
    settings: SshSettings | None = None
    known_hosts_file = ""
    tried_keys = ""
    jump_host: JumpHost | None = None
    jump_client: Client | None = None
    proxy: connection.Proxy | None = None

    @property
    def jump_is_gone(self) -> bool:
        return self.jump_client is not None and not _alive(self.jump_client)

    def close(self) -> None:
        super().close()
        if self.proxy is not None:
            self.proxy.close()
            self.proxy = None


class JumpHost:
    """A jump host, and the connections to it that all nodes behind it share."""

    def __init__(self, logins: SshLogins, login: Login, route: tuple[str, ...]) -> None:
        self._logins, self._login, self._route = logins, login, route
        self._clients: list[Client] = []
        self._max_forwards: dict[int, int] = {}
        self._connect_lock = BoundedSemaphore()
        self._down: tuple[float, str] | None = None

    @property
    def name(self) -> str:
        return self._login.name

    def _client_with_room(self, deadline: PausableDeadline) -> Client:
        """A client with room for another forward, or a new one. Raises SshConfigError."""
        client = self._free_client()
        if client is not None:
            return client
        with deadline.paused(), self._connect_lock:
            client = self._free_client()
            if client is None:
                if self._down is not None and time.monotonic() - self._down[0] < DOWN_S:
                    raise SshConfigError(self._down[1])
                try:
                    client = self._new_client()
                except SshConfigError as problem:
                    self._down = (time.monotonic(), str(problem))
                    raise
                self._clients.append(client)
            return client

    def _free_client(self) -> Client | None:
        self._clients = [client for client in self._clients if _alive(client)]
        limits = {client: self._max_forwards.get(id(client), FORWARDS) for client in self._clients}
        return next((c for c, limit in limits.items() if self.forward_count(c) < limit), None)

    @staticmethod
    def forward_count(client: Client) -> int:
        return len(cast("Any", client.get_transport())._channels)

    def _new_client(self) -> Client:
        client = Client()
        try:
            with PausableDeadline(self._logins.limit_s) as deadline:
                self._logins.connect(client, self._login, deadline, self._route, shared=True)
        except gevent.Timeout as timeout:
            if not deadline.owns(timeout):
                client.close()
                raise
            reason = self._logins.failure_text(client, self._login, client.stage)
        except SshConfigError as problem:
            reason = str(problem)
        except (ConnectError, SSHException, OSError, EOFError, ValueError) as problem:
            reason = self._logins.failure_text(client, self._login, connection.error_text(problem))
        else:
            transport: Any = client.get_transport()
            connection.set_keepalive(transport)
            # The readers of the forwards bound their own output.
            transport.packetizer.bounds.remaining_bytes = math.inf
            return client
        client.close()
        if client.settings is not None:
            host, port = client.settings.hostname, client.settings.port
            reason = reason.removeprefix(f"{host}: ").removeprefix(f"[{host}]:{port}: ")
        reason = reason.removeprefix(f"{self.name}: ")
        is_named = reason.startswith("jump host ")
        raise SshConfigError(reason if is_named else f"jump host {self.name}: {reason}")

    def proxy_by_master(self, target: SshSettings) -> connection.Proxy | None:
        """A proxy over ssh's own connection to the jump host; None: ssh has none."""
        settings = self._logins.settings(self._login)
        path = connection.master_socket(settings)
        if not path:
            return None
        argv = connection.master_argv(settings, path)
        argv += ["-W", f"[{target.hostname}]:{target.port}", "--", settings.name]
        error = f"jump host {self.name}: the master of ssh does not let us through"
        return connection.Proxy(shell.join(argv), error)

    def open(self, settings: SshSettings, client: Client, deadline: PausableDeadline) -> Channel:
        """A channel to the host. Raises SshConfigError, SSHException, OSError, EOFError."""
        host = settings.hostname
        while True:
            jump_client = self._client_with_room(deadline)
            transport = cast("connection.BoundedTransport", jump_client.get_transport())
            client.jump_host = self
            try:
                channel = transport.open_forward(host, settings.port, self._logins.limit_s)
            except connection.JumpRefusal as refusal:
                if refusal.code == _CONNECT_FAILED:
                    raise OSError(str(refusal)) from None
                if count := self.forward_count(jump_client):
                    # The jump host refuses one more forward, to any target.
                    self._max_forwards[id(jump_client)] = count
                    continue
                raise SshConfigError(
                    f"jump host {self.name}: refuses to forward to {host} ({refusal})"
                ) from None
            except EOFError:
                if not _alive(jump_client):
                    raise SshConfigError(f"jump host {self.name}: connection lost") from None
                raise
            client.jump_client, client.stage = jump_client, connection.BANNER
            return channel

    def close(self) -> None:
        for client in self._clients:
            client.close()


_CONNECT_FAILED = 2  # RFC 4254, section 5.1: SSH_OPEN_CONNECT_FAILED


def _alive(client: Client | None) -> bool:
    transport = client.get_transport() if client is not None else None
    return transport is not None and transport.is_active()


# --- What the nodes of a run share.

#: Maximum simultaneous lookups of names, each in a thread; gevent's default is 10. An unanswered
#: lookup takes 10 s (resolv.conf(5)), and the names behind it would miss their deadline.
_MAX_LOOKUPS = 256


class SshLogins:
    """The logins of a run, and what they share.

    limit_s: seconds for one connection
    notify:  shows the user a line
    """

    def __init__(self, limit_s: float, notify: Note = ignore) -> None:
        self.limit_s = limit_s
        self._config_by_path: dict[str, SshConfig] = {}
        self._known_hosts: dict[tuple[str, ...], KnownHostsFiles] = {}
        self._limiters: defaultdict[Any, HandshakeLimiter] = defaultdict(HandshakeLimiter)
        self._jump_hosts: dict[Login, JumpHost] = {}
        self._agents: dict[str, Agent] = {}
        self._neighbours = connection.Neighbours(notify)
        pool = gevent.get_hub().threadpool
        pool.maxsize = max(pool.maxsize, _MAX_LOOKUPS)

    def settings(self, login: Login) -> SshSettings:
        """The settings of ssh_config for this login. Raises SshConfigError."""
        if login.config not in self._config_by_path:
            self._config_by_path[login.config] = SshConfig(login.config)
        return self._config_by_path[login.config].settings_of(login.name, login.user, login.port)

    def agent(self, path: str) -> Agent:
        return self._agents.setdefault(path, Agent(path))

    def close(self) -> None:
        for jump in self._jump_hosts.values():
            jump.close()
        for agent in self._agents.values():
            agent.close()

    def failure_text(self, client: Client, login: Login, text: str) -> str:
        """Why there is no connection; see `connect_error`."""
        settings = client.settings
        port = login.port or (settings.port if settings else 22)
        host = settings.hostname if settings else login.name
        return connection.connect_error(
            text,
            host if port == 22 else f"[{host}]:{port}",
            user=login.user or (settings.user if settings else "") or getpass.getuser(),
            key=login.key or client.tried_keys or "any key of the agent or ~/.ssh",
            known_hosts=client.known_hosts_file or "~/.ssh/known_hosts",
            limit_s=round(self.limit_s),
        )

    def connect(
        self,
        client: Client,
        login: Login,
        deadline: PausableDeadline,
        route: tuple[str, ...] = (),
        shared: bool = False,
        **arguments: Any,
    ) -> None:
        """Connect and log in, as `ssh` would.

        route:     the node and the jump hosts before this one, in their order
        shared:    several nodes wait for this connection
        arguments: of paramiko's SSHClient.connect
        Raises SshConfigError, ConnectError, SSHException, OSError, EOFError.
        """
        # Of an older paramiko: those of GSSAPI, which paramiko 5 lacks.
        unknown = arguments.keys() - inspect.signature(SSHClient.connect).parameters.keys()
        if unknown:
            lacking = f"paramiko here has no {', '.join(sorted(unknown))}"
            advice = "correct ssh_paramiko_connect_kwargs in the inventory"
            raise SshConfigError(f"{login.name}: {lacking}: {advice}")
        _patch_paramiko_sk_key_support()
        settings = client.settings = self.settings(login)
        for attempt in range(1, TRIES + 1):
            client.stage = connection.CONNECTING
            with self._open_socket(client, login, settings, deadline, route) as (sock, limiter):
                try:
                    self._log_in(client, login, settings, sock, arguments)
                    return
                except (SSHException, OSError, EOFError) as problem:
                    if client.stage != connection.BANNER:
                        raise
                    limiter.sshd_dropped = True
                    max_tries = TRIES_ALONE if str(problem).startswith(connection.HUNG_UP) else 1
                    if shared or limiter.shared:
                        max_tries = TRIES
                    if attempt >= max_tries:
                        if client.proxy is not None:
                            raise SshConfigError(client.proxy.failure_text()) from None
                        raise
            # sshd dropped the connection, because too many others have not logged in yet.
            client.close()
            with deadline.paused():
                gevent.sleep(random.uniform(0.2, 0.6) * attempt)

    @contextlib.contextmanager
    def _open_socket(
        self,
        client: Client,
        login: Login,
        settings: SshSettings,
        deadline: PausableDeadline,
        route: tuple[str, ...],
    ) -> Iterator[tuple[Any, HandshakeLimiter]]:
        """A fresh connection to the sshd, and the turn at its address."""
        jumps = login.jumps if login.jumps is not None else settings.value("proxyjump")
        command = "" if jumps else settings.value("proxycommand")
        if command:
            jumps, file = jump_of(command)
            login = replace(login, config=file) if jumps else login
        if jumps and jumps != login.name:
            jump = self._jump_host(jumps, login, route)
            limiter = self._limiters[jump, settings.hostname, settings.port]
            with limiter.turn(client, deadline):
                client.proxy = jump.proxy_by_master(settings)
                client.stage = connection.BANNER
                if client.proxy is None:
                    client.stage = connection.CONNECTING
                    yield jump.open(settings, client, deadline), limiter
                else:
                    yield client.proxy.sock, limiter
            return
        if command:
            if settings.value("proxyusefdpass") == "yes":
                raise SshConfigError(f"{login.name}: nodeready has no ProxyUseFdpass")
            limiter = self._limiters["command", command]
            with limiter.turn(client, deadline):
                error = f"{login.name}: the ProxyCommand of the ssh configuration here fails"
                client.proxy = connection.Proxy(expand(command, settings.tokens()), error)
                client.stage = connection.BANNER
                yield client.proxy.sock, limiter
            return
        addresses = self._addresses(settings)
        binding = settings.value("bindaddress"), settings.value("bindinterface")
        limiter = self._limiters[addresses[0][1][:2], binding]
        with limiter.turn(client, deadline):
            sock = connection.open_tcp(addresses, settings, self.limit_s)
            client.stage = connection.BANNER
            yield sock, limiter

    def _addresses(self, settings: SshSettings) -> list[tuple[int, Any]]:
        """The addresses of the host, in the resolver's order. Raises OSError, SshConfigError."""
        families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
        family_name = settings.value("addressfamily")
        family = families.get(family_name, socket.AF_UNSPEC)
        resolve = functools.partial(socket.getaddrinfo, settings.hostname, settings.port)
        try:
            addresses = resolve(family, socket.SOCK_STREAM)
        except socket.gaierror:
            # The resolver raises the same for an unknown name.
            if not family or not resolve(socket.AF_UNSPEC, socket.SOCK_STREAM):
                raise
            option = f"AddressFamily {family_name} of the ssh configuration here"
            text = f"{settings.name}: {option} leaves {settings.hostname} no address"
            raise SshConfigError(text) from None
        self._neighbours.add(str(addresses[0][4][0]))
        return [(address[0], address[4]) for address in addresses]

    def _jump_host(self, jumps: str, login: Login, route: tuple[str, ...]) -> JumpHost:
        earlier_hops, _, last_hop = jumps.rpartition(",")
        user, host, port = parse_jump_host(last_hop)
        new_route = (*route, login.name)
        if host in route or len(new_route) > _MAX_HOPS:
            raise SshConfigError(
                f"{login.name}: ProxyJump of the ssh configuration goes in a circle"
            )
        checking = "yes" if login.host_key_checking == "yes" else ""
        hop = Login(host, login.config, user, port, host_key_checking=checking)
        known_hosts = login.known_hosts or login.extra_known_hosts
        hop = replace(hop, extra_known_hosts=known_hosts, jumps=earlier_hops or None)
        return self._jump_hosts.setdefault(hop, JumpHost(self, hop, new_route))

    def _host_key_policy(self, login: Login, settings: SshSettings) -> HostKeyPolicy:
        alias = settings.value("hostkeyalias")
        host, port = settings.hostname.lower(), settings.port
        if login.known_hosts:
            files: tuple[str, ...] = (os.path.expanduser(login.known_hosts),)
        else:
            files = settings.paths("userknownhostsfile") + settings.paths("globalknownhostsfile")
            if login.extra_known_hosts:
                files += (os.path.expanduser(login.extra_known_hosts),)
        if files not in self._known_hosts:
            global_files = settings.paths("globalknownhostsfile")
            self._known_hosts[files] = KnownHostsFiles(files, global_files)
        strict = login.host_key_checking or settings.value("stricthostkeychecking")
        if not login.host_key_checking:
            # A user cannot answer questions about 1,000 nodes.
            strict = "yes" if strict in ("yes", "true") else "accept-new"
        name = alias or (host if port == 22 else f"[{host}]:{port}")
        return HostKeyPolicy(self._known_hosts[files], name, alias or host, strict)

    def _log_in(
        self,
        client: Client,
        login: Login,
        settings: SshSettings,
        sock: Any,
        arguments: Mapping[str, Any],
    ) -> None:
        policy = self._host_key_policy(login, settings)
        keys = LoginKeys(self.agent, login, settings)
        client.known_hosts_file = policy.known_hosts.files[0] if policy.known_hosts.files else ""

        def bounded_transport(sock: Any, **options: Any) -> Any:
            make = arguments.get("transport_factory") or connection.BoundedTransport
            transport = make(sock, **options)
            connection.restrict_algorithms(transport, settings)
            if isinstance(transport, connection.BoundedTransport):
                transport.host_key_order = policy.order(transport._preferred_keys)
            return transport

        client.set_missing_host_key_policy(policy)
        own_arguments = {"transport_factory": bounded_transport, "auth_strategy": keys}
        if set(arguments) & _PARAMIKO_LOGIN:
            del own_arguments["auth_strategy"]
        try:
            own_arguments |= {"port": settings.port, "username": settings.user, "sock": sock}
            client.connect(settings.hostname, **{**arguments, **own_arguments})
        finally:
            transport = client.get_transport()
            if transport is not None and transport.remote_version:
                client.stage = connection.TALKING
            client.tried_keys = ", ".join(keys.names)


#: Arguments of `SSHClient.connect` that need paramiko's own login.
_PARAMIKO_LOGIN = frozenset({"gss_auth", "gss_kex", "pkey", "key_filename", "auth_strategy"})

"""Logins to the nodes of a run, as ssh would make them.

Names that lead to one address take turns there. All nodes behind a jump host share a few logins
at it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import getpass
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import gevent
from gevent.lock import BoundedSemaphore, Semaphore
from paramiko import SSHClient, SSHException
from paramiko.channel import Channel
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.ssh_util import _patch_paramiko_sk_key_support

from nodeready import shell
from nodeready.transport.connection import (
    BANNER,
    CONNECTING,
    HUNG_UP,
    TALKING,
    Bounded,
    JumpRefusal,
    Neighbours,
    Proxy,
    by_socket,
    carries_others,
    connect_error,
    connected,
    error_text,
    keep,
    master,
    restrict,
)
from nodeready.transport.host_keys import HostKey, KnownHostsFiles
from nodeready.transport.identities import Agent, Keys
from nodeready.transport.ssh_config import (
    Login,
    SshConfig,
    SshConfigError,
    SshSettings,
    expand,
    jump_of,
    place,
)

#: Handshakes with one address at once. sshd drops some of ten that have not logged in yet
#: (MaxStartups 10:30:100), and others log in there, too.
HANDSHAKES = 3
#: Tries at an address that several names share, while it hangs up before its banner; and at one of
#: a single node, which other people's logins can fill.
TRIES, TRIES_ALONE = 5, 3
#: Ways on over one connection to a jump host: its sshd holds a descriptor for each, of 1,024.
FORWARDS = 250
#: Seconds for which a jump host that could not be reached is not tried again.
DOWN_S = 60.0
#: Jump hosts in a row; more is a circle.
_MOST_HOPS = 8


# --- Turns at an address.


class Patience:
    """A deadline that stands still while others have their turn."""

    def __init__(self, seconds: float) -> None:
        self._left, self._began = seconds, 0.0
        self._timer: gevent.Timeout | None = None

    def __enter__(self) -> Patience:
        self._began = time.monotonic()
        self._timer = gevent.Timeout.start_new(max(0.001, self._left))
        return self

    def __exit__(self, *problem: object) -> None:
        if self._timer is not None:
            self._timer.close()
        self._left -= time.monotonic() - self._began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Meanwhile, no time passes."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def owns(self, timeout: gevent.Timeout) -> bool:
        """Whether this deadline raised that timeout."""
        return timeout is self._timer


#: Errors of an address, for every connection to it.
_NOBODY = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}


class HandshakeLimiter:
    """One address, and the turns at it.

    failed: when, and why no connection succeeds
    shared: several of the run's names lead there
    """

    def __init__(self) -> None:
        self._turns = Semaphore(HANDSHAKES)
        self._left = HANDSHAKES
        self._clients: set[int] = set()
        self._dropped = False
        self.failed: tuple[float, str] | None = None

    @property
    def shared(self) -> bool:
        return len(self._clients) > 1

    @contextlib.contextmanager
    def turn(self, client: Client, patience: Patience) -> Iterator[None]:
        """Wait for a turn. Raises OSError when an earlier turn found that the address is dead."""
        self._clients.add(id(client))
        asked_s = time.monotonic()
        if self._turns.locked():
            with patience.paused():
                self._turns.acquire()
        else:
            self._turns.acquire()
        try:
            if self.failed is not None and self.failed[0] >= asked_s:
                raise OSError(self.failed[1])
            yield
        except gevent.Timeout:
            if client.stage in (CONNECTING, BANNER):
                self.failed = (time.monotonic(), client.stage)
            raise
        except OSError as problem:
            if client.stage == CONNECTING and problem.errno in _NOBODY:
                self.failed = (time.monotonic(), str(problem))
            raise
        finally:
            if self._dropped and self._left > 1:
                # Even these were too many at once: one turn less from now on.
                self._left -= 1
            else:
                self._turns.release()
            self._dropped = False

    def was_dropped(self) -> None:
        """The sshd dropped the connection of this turn: it takes no more at once."""
        self._dropped = True


# --- One login, and the jump host in front of it.


class Client(SSHClient):
    """paramiko's client, and the way that its connection goes.

    stage: how far it has come, in the words of `connect_error`
    """

    def __init__(self) -> None:
        super().__init__()
        self.stage = CONNECTING
        self.settings: SshSettings | None = None
        self.known = ""
        self.identities = ""
        #: The jump host in front of the node, and the connection to it that is used.
        self.jump: Jump | None = None
        self.line: Client | None = None
        self.proxy: Proxy | None = None

    @property
    def jump_is_gone(self) -> bool:
        """Whether the connection ended because that to the jump host did."""
        return self.line is not None and not _alive(self.line)

    def close(self) -> None:
        super().close()
        if self.proxy is not None:
            self.proxy.close()
            self.proxy = None


class Jump:
    """A jump host, and the connections to it that all nodes behind it share."""

    def __init__(self, logins: SshLogins, login: Login, before: tuple[str, ...]) -> None:
        self._logins, self._login, self._before = logins, login, before
        self._lines: list[Client] = []
        self._full: dict[int, int] = {}
        self._making = BoundedSemaphore()
        self._down: tuple[float, str] | None = None

    @property
    def name(self) -> str:
        return self._login.name

    def _line(self, patience: Patience) -> Client:
        """A connection with room, or a new one. Raises SshConfigError."""
        connection = self._free()
        if connection is not None:
            return connection
        with patience.paused(), self._making:
            connection = self._free()
            if connection is None:
                if self._down is not None and time.monotonic() - self._down[0] < DOWN_S:
                    raise SshConfigError(self._down[1])
                try:
                    connection = self._new_connection()
                except SshConfigError as problem:
                    self._down = (time.monotonic(), str(problem))
                    raise
                self._lines.append(connection)
            return connection

    def _free(self) -> Client | None:
        self._lines = [line for line in self._lines if _alive(line)]
        for line in self._lines:
            if self.count(line) < self._full.get(id(line), FORWARDS):
                return line
        return None

    @staticmethod
    def count(line: Client) -> int:
        """The ways on over this connection."""
        return len(cast("Any", line.get_transport())._channels)

    def _new_connection(self) -> Client:
        client = Client()
        try:
            with Patience(self._logins.limit_s) as patience:
                self._logins.connect(client, self._login, patience, self._before, shared=True)
        except gevent.Timeout as timeout:
            if not patience.owns(timeout):
                client.close()
                raise
            words = self._logins.words(client, self._login, client.stage)
        except SshConfigError as problem:
            words = str(problem)
        except (ConnectError, SSHException, OSError, EOFError, ValueError) as problem:
            words = self._logins.words(client, self._login, error_text(problem))
        else:
            transport = client.get_transport()
            keep(transport)
            carries_others(transport)
            return client
        client.close()
        if client.settings is not None:
            host, port = client.settings.hostname, client.settings.port
            words = words.removeprefix(f"{host}: ").removeprefix(f"[{host}]:{port}: ")
        words = words.removeprefix(f"{self.name}: ")
        raise SshConfigError(
            words if words.startswith("jump host ") else f"jump host {self.name}: {words}"
        )

    def by_master(self, target: SshSettings) -> Proxy | None:
        """A way on over the connection that ssh has to the jump host already; None: it has none.

        Raises SshConfigError.
        """
        settings = self._logins.settings(self._login)
        path = master(settings)
        if not path:
            return None
        words = [*by_socket(settings, path), "-W", f"[{target.hostname}]:{target.port}"]
        blame = f"jump host {self.name}: the master of ssh does not let us through"
        return Proxy(shell.join([*words, "--", settings.name]), blame)

    def open(self, settings: SshSettings, client: Client, patience: Patience) -> Channel:
        """A way on to the host. Raises SshConfigError, SSHException, OSError, EOFError."""
        host = settings.hostname
        while True:
            line = self._line(patience)
            transport = cast("Bounded", line.get_transport())
            client.jump = self
            try:
                channel = transport.forward(host, settings.port, self._logins.limit_s)
            except JumpRefusal as refusal:
                count = self.count(line)
                if refusal.code != _CONNECT_FAILED and count > 0:
                    # Not for what is asked: there are others, and it is one too many.
                    self._full[id(line)] = count
                    continue
                if refusal.code != _CONNECT_FAILED:
                    raise SshConfigError(
                        f"jump host {self.name}: lets nobody through to {host} ({refusal})"
                    ) from None
                raise OSError(str(refusal)) from None
            except EOFError:
                if not _alive(line):
                    raise SshConfigError(f"jump host {self.name}: connection lost") from None
                raise
            client.line, client.stage = line, BANNER
            return channel

    def close(self) -> None:
        for line in self._lines:
            line.close()


#: RFC 4254, section 5.1: SSH_OPEN_CONNECT_FAILED.
_CONNECT_FAILED = 2


def _alive(client: Client | None) -> bool:
    transport = client.get_transport() if client is not None else None
    return transport is not None and transport.is_active()


# --- What the nodes of a run share.


class SshLogins:
    """The ways from this machine to the nodes of a run, and what they share.

    limit_s: seconds of our own for one connection
    tell:    says one line to the user
    """

    def __init__(self, limit_s: float, tell: Callable[[str], None] = lambda line: None) -> None:
        self.limit_s, self._tell = limit_s, tell
        self._configs: dict[str, SshConfig] = {}
        self._known: dict[tuple[str, ...], KnownHostsFiles] = {}
        self._gates: dict[Any, HandshakeLimiter] = {}
        self._jumps: dict[Login, Jump] = {}
        self._agents: dict[str, Agent] = {}
        self._neighbours = Neighbours(tell)

    def settings(self, login: Login) -> SshSettings:
        """What ssh_config says about it. Raises SshConfigError."""
        if login.config not in self._configs:
            self._configs[login.config] = SshConfig(login.config)
        return self._configs[login.config].about(login.name, login.user, login.port)

    def agent(self, path: str) -> Agent:
        if path not in self._agents:
            self._agents[path] = Agent(path)
        return self._agents[path]

    def close(self) -> None:
        """End what the nodes shared."""
        for jump in self._jumps.values():
            jump.close()
        for agent in self._agents.values():
            agent.close()

    def words(self, client: Client, login: Login, text: str) -> str:
        """Why there is no connection: see `connect_error`."""
        settings = client.settings
        port = login.port or (settings.port if settings else 22)
        host = settings.hostname if settings else login.name
        return connect_error(
            text,
            host if port == 22 else f"[{host}]:{port}",
            user=login.user or (settings.user if settings else "") or getpass.getuser(),
            key=login.key or client.identities or "any key of the agent or ~/.ssh",
            known_hosts=client.known or "~/.ssh/known_hosts",
            limit_s=round(self.limit_s),
        )

    def connect(
        self,
        client: Client,
        login: Login,
        patience: Patience,
        before: tuple[str, ...] = (),
        shared: bool = False,
        **how: Any,
    ) -> None:
        """Connect and log in, as `ssh` would.

        before: the names for which this is a jump host, in their order
        shared: several nodes wait for it
        how:    further arguments of paramiko's SSHClient.connect
        Raises SshConfigError, ConnectError, SSHException, OSError, EOFError.
        """
        _patch_paramiko_sk_key_support()
        settings = client.settings = self.settings(login)
        for attempt in range(1, TRIES + 1):
            client.stage = CONNECTING
            with self._sock(client, login, settings, patience, before) as (sock, gate):
                try:
                    self._log_in(client, login, settings, sock, how)
                    return
                except (SSHException, OSError, EOFError) as problem:
                    proxy = client.proxy
                    max_tries = TRIES_ALONE if str(problem).startswith(HUNG_UP) else 1
                    if shared or (gate is not None and gate.shared):
                        max_tries = TRIES
                    if gate is not None and client.stage == BANNER:
                        gate.was_dropped()
                    if client.stage != BANNER or attempt >= max_tries:
                        if proxy is not None and client.stage == BANNER:
                            raise SshConfigError(proxy.words()) from None
                        raise
            # Dropped before its banner: sshd has too many at once that have not logged in yet.
            client.close()
            with patience.paused():
                gevent.sleep(random.uniform(0.2, 0.6) * attempt)

    @contextlib.contextmanager
    def _sock(
        self,
        client: Client,
        login: Login,
        settings: SshSettings,
        patience: Patience,
        before: tuple[str, ...],
    ) -> Iterator[tuple[Any, HandshakeLimiter | None]]:
        """A connection to the sshd, not yet spoken over, and the turn at its address."""
        jumps = login.jumps if login.jumps is not None else settings.first("proxyjump")
        command = "" if jumps else settings.first("proxycommand")
        if command:
            jumps, file = jump_of(command)
            login = replace(login, config=file) if jumps else login
        if jumps and jumps != login.name:
            jump = self._jump(jumps, login, before)
            gate = self._gates.setdefault(
                (jump, settings.hostname, settings.port), HandshakeLimiter()
            )
            with gate.turn(client, patience):
                client.proxy = jump.by_master(settings)
                client.stage = BANNER
                if client.proxy is None:
                    client.stage = CONNECTING
                    yield jump.open(settings, client, patience), gate
                else:
                    yield client.proxy.sock, gate
            return
        if command:
            if settings.first("proxyusefdpass") == "yes":
                raise SshConfigError(f"{login.name}: nodeready has no ProxyUseFdpass")
            gate = self._gates.setdefault(("command", command), HandshakeLimiter())
            with gate.turn(client, patience):
                blame = f"{login.name}: the ProxyCommand of the ssh configuration here fails"
                client.proxy = Proxy(expand(command, settings.tokens()), blame)
                client.stage = BANNER
                yield client.proxy.sock, gate
            return
        places = self._places(settings)
        binding = settings.first("bindaddress"), settings.first("bindinterface")
        gate = self._gates.setdefault((places[0][1][:2], binding), HandshakeLimiter())
        with gate.turn(client, patience):
            sock = connected(places, settings, self.limit_s)
            client.stage = BANNER
            yield sock, gate

    def _places(self, settings: SshSettings) -> list[tuple[int, Any]]:
        """The addresses of the host, in the resolver's order. Raises OSError, SshConfigError."""
        families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
        family_name = settings.first("addressfamily")
        family = families.get(family_name, socket.AF_UNSPEC)
        ask = functools.partial(socket.getaddrinfo, settings.hostname, settings.port)
        try:
            addresses = ask(family, socket.SOCK_STREAM)
        except socket.gaierror:
            # The resolver raises the same for an unknown name.
            if not family or not ask(socket.AF_UNSPEC, socket.SOCK_STREAM):
                raise
            raise SshConfigError(
                f"{settings.name}: AddressFamily {family_name} of the ssh configuration here "
                f"leaves {settings.hostname} no address"
            ) from None
        self._neighbours.add(str(addresses[0][4][0]))
        return [(address[0], address[4]) for address in addresses]

    def _jump(self, jumps: str, login: Login, before: tuple[str, ...]) -> Jump:
        earlier_hops, _, last = jumps.rpartition(",")
        user, host, port = place(last)
        chain = (*before, login.name)
        if host in before or len(chain) > _MOST_HOPS:
            raise SshConfigError(
                f"{login.name}: ProxyJump of the ssh configuration goes in a circle"
            )
        hop = Login(
            host,
            login.config,
            user,
            port,
            further=login.known_hosts or login.further,
            strict="yes" if login.strict == "yes" else "",
            jumps=earlier_hops or None,
        )
        if hop not in self._jumps:
            self._jumps[hop] = Jump(self, hop, chain)
        return self._jumps[hop]

    def _host_key(self, login: Login, settings: SshSettings) -> HostKey:
        alias = settings.first("hostkeyalias")
        host, port = settings.hostname.lower(), settings.port
        if login.known_hosts:
            files: tuple[str, ...] = (os.path.expanduser(login.known_hosts),)
        else:
            files = settings.files("userknownhostsfile") + settings.files("globalknownhostsfile")
            files += (os.path.expanduser(login.further),) if login.further else ()
        if files not in self._known:
            self._known[files] = KnownHostsFiles(files, settings.files("globalknownhostsfile"))
        strict = login.strict or settings.first("stricthostkeychecking")
        if not login.strict:
            # No user answers questions about 1,000 nodes.
            strict = "yes" if strict in ("yes", "true") else "accept-new"
        name = alias or (host if port == 22 else f"[{host}]:{port}")
        return HostKey(self._known[files], name, alias or host, strict)

    def _log_in(
        self,
        client: Client,
        login: Login,
        settings: SshSettings,
        sock: Any,
        how: Mapping[str, Any],
    ) -> None:
        judge = self._host_key(login, settings)
        keys = Keys(self.agent, login, settings)
        client.known = judge.known.files[0] if judge.known.files else ""

        def bounded_transport(sock: Any, **words: Any) -> Any:
            transport = (how.get("transport_factory") or Bounded)(sock, **words)
            restrict(transport, settings)
            if isinstance(transport, Bounded):
                transport.host_key_order = judge.order(transport._preferred_keys)  # type: ignore[attr-defined]
            return transport

        client.set_missing_host_key_policy(judge)
        arguments = {"transport_factory": bounded_transport, "auth_strategy": keys}
        if set(how) & _PARAMIKOS_OWN:
            del arguments["auth_strategy"]
        try:
            client.connect(
                settings.hostname,
                port=settings.port,
                username=settings.user,
                sock=sock,
                **{**how, **arguments},
            )
        finally:
            transport = client.get_transport()
            if transport is not None and transport.remote_version:
                client.stage = TALKING
            client.identities = ", ".join(keys.names)


#: Arguments of `SSHClient.connect` that its own way of logging in alone understands.
_PARAMIKOS_OWN = frozenset({"gss_auth", "gss_kex", "pkey", "key_filename", "auth_strategy"})

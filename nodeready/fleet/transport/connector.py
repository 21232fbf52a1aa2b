"""A node's ssh connection, made within one deadline, or the reason for its failure in one line."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
from typing import Any

import gevent
from paramiko import AuthenticationException, SSHException
from paramiko.agent import AgentRequestHandler
from pyinfra.api import Host, Inventory
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.connectors.ssh import SSHConnector

from nodeready.agent.asking import CONNECT_TIMEOUT_S, SshPeer
from nodeready.core.outcome import UNREACHABLE, Gap
from nodeready.fleet.transport import connection, logins
from nodeready.fleet.transport.ssh_config import Login, SshConfigError

#: sshd's port (RFC 4253, section 4.1).
_SSH_PORT = 22


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

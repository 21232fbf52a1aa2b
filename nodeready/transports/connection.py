"""Connections: one deadline over all of connecting, and a reason when there is none."""

from __future__ import annotations

import getpass
import socket
from typing import Any

import gevent
from paramiko import SSHException
from paramiko.ssh_exception import NoValidConnectionsError
from pyinfra.api import Host, Inventory
from pyinfra.api.exceptions import ConnectError, PyinfraError

from nodeready.transports.answer import UNREACHABLE, Answer, connect_error

#: One deadline over name resolution, TCP, banner, authentication and channel.
CONNECT_TIMEOUT_S = 15
#: A node that dies in the middle is noticed after this: unacknowledged data or keepalives for
#: this long end the connection (TCP_USER_TIMEOUT, tcp(7)); TCP's own limit is 15 minutes.
DEAD_AFTER_S = 25
KEEPALIVE_S = 5


def set_timeouts(inventory: Inventory) -> None:
    """Give every node's connection a deadline; paramiko's own can wait up to an hour.

    Must be called before pyinfra's State takes the inventory.
    """
    # Behind our own deadline, which ends them all and knows how far the node came.
    limits = dict.fromkeys(
        ("timeout", "banner_timeout", "auth_timeout", "channel_timeout"), CONNECT_TIMEOUT_S + 5
    )
    for host in inventory:
        own = host.data.get("ssh_paramiko_connect_kwargs") or {}
        host.data.ssh_paramiko_connect_kwargs = {**limits, **own}


def connect(host: Host) -> Answer:
    """Connect, or say why not. Never raises for a node's fault, and takes CONNECT_TIMEOUT_S."""
    try:
        with gevent.Timeout(CONNECT_TIMEOUT_S):
            host.connect(show_errors=False, raise_exceptions=True)
    except gevent.Timeout:
        return _unreachable(host, _stage(host))
    except (ConnectError, PyinfraError, SSHException, OSError, EOFError, ValueError) as error:
        return _unreachable(host, _words(error))
    transport = transport_of(host)
    if transport is not None:
        transport.set_keepalive(KEEPALIVE_S)
        sock = getattr(transport, "sock", None)
        if isinstance(sock, socket.socket):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
    return Answer(True)


def transport_of(host: Host) -> Any:
    client = getattr(host.connector, "client", None)
    return client.get_transport() if client is not None else None


def _words(error: BaseException) -> str:
    """The error's text; of a connection that no address took, the reason of the last of them."""
    cause = error.__context__ or error
    if isinstance(cause, NoValidConnectionsError):
        return str(list(cause.errors.values())[-1])
    return str(error) or type(error).__name__


def _stage(host: Host) -> str:
    """What the node had done when the time was up."""
    transport = transport_of(host)
    if transport is None:
        return "timed out"
    return "stopped during the handshake" if transport.remote_version else "banner"


def _unreachable(host: Host, text: str) -> Answer:
    """A connection that was not made: in words, and without what is left of it."""
    data, client = host.data, getattr(host.connector, "client", None)
    # What ssh_config added to the inventory's data.
    config = getattr(client, "_ssh_config", {})
    port = int(data.get("ssh_port") or config.get("port") or 22)
    address = str(data.get("ssh_hostname") or host.name)
    files = data.get("ssh_key") or config.get("key_filename") or "any key of the agent or ~/.ssh"
    known_hosts = data.get("ssh_known_hosts_file") or getattr(client, "_host_keys_filename", None)
    error = connect_error(
        text,
        address if port == 22 else f"[{address}]:{port}",
        user=str(data.get("ssh_user") or config.get("username") or getpass.getuser()),
        key=", ".join(files) if isinstance(files, list) else str(files),
        known_hosts=str(known_hosts or "~/.ssh/known_hosts"),
        limit_s=CONNECT_TIMEOUT_S,
    )
    if client is not None:
        client.close()
    return Answer(False, error=error, kind=UNREACHABLE)

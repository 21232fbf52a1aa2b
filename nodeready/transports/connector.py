"""pyinfra's connectors as the carrier: connect under one deadline, run one command, one answer."""

from __future__ import annotations

import getpass
import os
import socket
from dataclasses import dataclass
from typing import Any, cast

import gevent
from paramiko import SSHException
from pyinfra.api import Host, Inventory, StringCommand
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.api.exceptions import ConnectError, PyinfraError

from nodeready.shell import KILL_AFTER_S, quote
from nodeready.transports.answer import LOST, SUDO, TIMEOUT, UNREACHABLE, Answer, connect_error

#: One deadline over name resolution, TCP, banner, authentication and channel.
CONNECT_TIMEOUT_S = 15
#: A node that dies in the middle is noticed after this: unacknowledged data or keepalives for
#: this long end the connection (TCP_USER_TIMEOUT, tcp(7)); TCP's own limit is 15 minutes.
DEAD_AFTER_S = 25
KEEPALIVE_S = 5
#: Our own exit status when sudo wants a password: before any work, and without a prompt.
SUDO_STATUS_WORDS = "nodeready: sudo wants a password"


def set_timeouts(inventory: Inventory) -> None:
    """Give every node's connection a deadline; paramiko's own can wait up to an hour.

    Must be called before pyinfra's State takes the inventory.
    """
    limits = dict.fromkeys(
        ("timeout", "banner_timeout", "auth_timeout", "channel_timeout"), CONNECT_TIMEOUT_S
    )
    for host in inventory:
        own = host.data.get("ssh_paramiko_connect_kwargs") or {}
        host.data.ssh_paramiko_connect_kwargs = {**limits, **own}


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


def connect(host: Host) -> Answer:
    """Connect, or say why not. Never raises for a node's fault, and takes CONNECT_TIMEOUT_S."""
    data = host.data
    address = str(data.get("ssh_hostname") or host.name)
    try:
        with gevent.Timeout(CONNECT_TIMEOUT_S):
            host.connect(show_errors=False, raise_exceptions=True)
    except gevent.Timeout:
        return Answer(
            False, error=f"{address}: no answer in {CONNECT_TIMEOUT_S} s", kind=UNREACHABLE
        )
    except (ConnectError, PyinfraError, SSHException, OSError, EOFError, ValueError) as error:
        user = str(data.get("ssh_user") or getpass.getuser())
        key = str(data.get("ssh_key") or "any key of the agent or ~/.ssh")
        known_hosts = str(data.get("ssh_known_hosts_file") or "~/.ssh/known_hosts")
        text = connect_error(str(error), address, user, key, known_hosts)
        return Answer(False, error=text, kind=UNREACHABLE)
    transport = _transport(host)
    if transport is not None:
        transport.set_keepalive(KEEPALIVE_S)
        sock = getattr(transport, "sock", None)
        if isinstance(sock, socket.socket):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
    return Answer(True)


def _transport(host: Host) -> Any:
    client = getattr(host.connector, "client", None)
    return client.get_transport() if client is not None else None


def _with_sudo(command: str, password: str) -> str:
    if password:
        # -k: always read the password, so that it never becomes the command's input.
        return f"exec sudo -k -S -p '' -H {command}"
    return (
        f"if sudo -n -H true 2>/dev/null; then exec sudo -n -H {command}; "
        f"else echo {quote(SUDO_STATUS_WORDS)} >&2; exit 77; fi"
    )


def carry(
    host: Host, command: str, timeout_s: int, stdin: str = "", rights: Become | None = None
) -> Answer:
    """Run a command of shell.command() on a connected node and wait for its answer.

    timeout_s: the limit that the command has on the node; here it is a little more, for a node
    whose own `timeout` no longer works. Never raises for a node's fault.
    """
    rights = rights or become(host)
    if rights.sudo:
        command = _with_sudo(command, rights.password)
        if rights.password:
            stdin = f"{rights.password}\n{stdin}"
    try:
        with gevent.Timeout(timeout_s + 2 * KILL_AFTER_S):
            arguments = {**rights.others, "_stdin": stdin or None}
            ok, output = host.run_shell_command(StringCommand(command), **arguments)
    except (gevent.Timeout, TimeoutError):
        return Answer(False, error=f"no answer in {timeout_s} s", kind=TIMEOUT)
    except (PyinfraError, SSHException, OSError, EOFError) as error:
        return Answer(False, error=f"connection lost ({error or type(error).__name__})", kind=LOST)
    stderr = output.stderr
    transport = _transport(host)
    if not ok and transport is not None and not transport.is_active():
        return Answer(False, output.stdout, stderr, "connection lost", LOST)
    if (
        not ok
        and rights.sudo
        and (
            SUDO_STATUS_WORDS in stderr or "incorrect password" in stderr or "Sorry, try" in stderr
        )
    ):
        wrong = "refused the password" if rights.password else "wants a password"
        return Answer(False, output.stdout, stderr, f"sudo {wrong}", SUDO)
    return Answer(ok, output.stdout, stderr)


def who() -> str:
    """Who runs this and from where, for the holder's line of a node's lock."""
    return f"{getpass.getuser()}@{os.uname().nodename}"

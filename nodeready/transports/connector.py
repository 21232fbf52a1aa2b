"""pyinfra's connectors as the carrier: one command to a connected node, one answer back."""

from __future__ import annotations

import getpass
import os
import time
from dataclasses import dataclass
from typing import Any, cast

import gevent
from paramiko import SSHException
from pyinfra.api import Host, StringCommand
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.api.exceptions import PyinfraError
from pyinfra.connectors.local import LocalConnector
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.util import extract_control_arguments, make_unix_command_for_host

from nodeready.shell import KILL_AFTER_S, quote
from nodeready.transports import channel
from nodeready.transports.answer import (
    HUNG,
    LOST,
    OUTPUT,
    TIMEOUT,
    Answer,
    sudo_error,
)
from nodeready.transports.channel import Said, TooMuchOutput
from nodeready.transports.connection import transport_of

#: How `timeout` ends: by TERM, by KILL, or killed by its own KILL to the whole group.
TIMED_OUT = (124, 137, None)
#: Arguments of pyinfra's that put something around a command; without them it goes as it is.
_AROUND = ("_env", "_chdir", "_sudo", "_su_user", "_doas", "_dzdo")


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


def _with_sudo(command: str, password: str) -> str:
    """``command`` as root. In English, so that a refusal can be told from the command's own words.

    With a password, which is the first line of the input, and of no command line: a node that
    wants none would leave it to the command, hence the first test there.
    """
    if not password:
        return f"env LC_ALL=C sudo -n -H {command}"
    line = (
        "LC_ALL=C; export LC_ALL; "
        "if sudo -n -k -H true 2>/dev/null; "
        'then read -r nr_password; exec sudo -n -H "$@"; fi; '
        'exec sudo -k -S -p "" -H "$@"'
    )
    return f"sh -c {quote(line)} sh {command}"


def _around(host: Host, command: str, others: dict[str, Any]) -> str:
    """What pyinfra puts around a command, for a connector that is ours to speak with."""
    if not any(others.get(name) for name in _AROUND):
        return command
    arguments = dict(others)
    extract_control_arguments(cast("Any", arguments))
    made = make_unix_command_for_host(host.state, host, StringCommand(command), **arguments)
    return made.get_raw_value()


def with_rights(host: Host, command: str, rights: Become) -> str:
    """``command`` with the node's rights; sudo's password is then the first line of its input."""
    if rights.sudo:
        command = _with_sudo(command, rights.password)
    return _around(host, command, rights.others)


def _speak(host: Host, command: str, stdin: str, mark: str, others: dict[str, Any]) -> Said:
    """The command through the node's connector, and what it said."""
    connector = host.connector
    if not isinstance(connector, SSHConnector | LocalConnector):
        arguments = {**others, "_stdin": stdin or None}
        ok, output = host.run_shell_command(StringCommand(command), **arguments)
        return Said(0 if ok else 1, output.stdout, output.stderr)
    command = _around(host, command, others)
    data, start = stdin.encode("utf-8", "surrogateescape"), mark.encode()
    if isinstance(connector, LocalConnector):
        return channel.here(command, data, start)
    return channel.over_ssh(transport_of(host), command, data, start)


def carry(
    host: Host,
    command: str,
    timeout_s: int,
    *,
    stdin: str = "",
    rights: Become | None = None,
    mark: str = "",
) -> Answer:
    """Run a command of shell.command() on a connected node and wait for its answer.

    timeout_s: the limit that the command has on the node; here it is a little more, for a node
    whose own `timeout` no longer works
    mark:      the text with which the answer begins, whatever the login prints before it
    Never raises for a node's fault.
    """
    rights = rights or become(host)
    if rights.sudo:
        command = _with_sudo(command, rights.password)
        if rights.password:
            stdin = f"{rights.password}\n{stdin}"
    started = time.monotonic()
    try:
        with gevent.Timeout(timeout_s + 2 * KILL_AFTER_S):
            said = _speak(host, command, stdin, mark, rights.others)
    except (gevent.Timeout, TimeoutError):
        return Answer(False, error=f"no answer in {timeout_s} s", kind=HUNG)
    except TooMuchOutput as problem:
        first = problem.first.decode("utf-8", "replace")
        return Answer(False, error=f"{problem}, beginning with {first!r}", kind=OUTPUT)
    except (PyinfraError, SSHException, OSError, EOFError) as problem:
        why = str(problem) or type(problem).__name__
        return Answer(False, error=f"connection lost ({why})", kind=LOST)
    if said.status is None and _gone(host):
        return Answer(False, said.stdout, said.stderr, "connection lost", LOST)
    if said.status in TIMED_OUT and time.monotonic() - started >= timeout_s:
        return Answer(False, said.stdout, said.stderr, f"ended after {timeout_s} s", TIMEOUT)
    if rights.sudo and said.status:
        error, kind = sudo_error(said.stderr)
        if error:
            return Answer(False, said.stdout, said.stderr, error, kind)
    return Answer(said.status == 0, said.stdout, said.stderr, status=said.status)


def _gone(host: Host) -> bool:
    """Whether the connection itself ended, and not only the command."""
    transport = transport_of(host)
    if transport is None:
        return False
    # Its reader tells the channels first, and marks itself as ended after that.
    transport.join(0.5)
    return not transport.is_active()


def who() -> str:
    """Who runs this and from where, for the holder's line of a node's lock."""
    return f"{getpass.getuser()}@{os.uname().nodename}"

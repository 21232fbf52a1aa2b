"""The rights with which a command runs on a node: sudo to root, or another method of pyinfra's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from pyinfra.api import Host, StringCommand
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.connectors.util import extract_control_arguments, make_unix_command_for_host

from nodeready.agent.local import as_root
from nodeready.core import shell

#: pyinfra's arguments that wrap a command.
_WRAPPING_ARGUMENTS = ("_env", "_chdir", "_sudo", "_su_user", "_doas", "_dzdo")


@dataclass(frozen=True)
class HostRights:
    """How commands get their rights on a node."""

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
    arguments = {
        key: global_arguments[key] for key in CONNECTOR_ARGUMENT_KEYS if key in global_arguments
    }
    sudo = bool(arguments.get("_sudo")) and not arguments.get("_sudo_user")
    password = str(arguments.get("_sudo_password") or "") if sudo else ""
    if sudo:
        arguments.update(_sudo=False, _sudo_password=None)
    return HostRights(sudo, password, arguments)


def wrap_command(host: Host, command: str, arguments: dict[str, Any]) -> str:
    """The command with pyinfra's wrapping, for a connector that is used directly."""
    if not any(arguments.get(name) for name in _WRAPPING_ARGUMENTS):
        return command
    arguments = dict(arguments)
    extract_control_arguments(cast("Any", arguments))
    wrapped = make_unix_command_for_host(host.state, host, StringCommand(command), **arguments)
    return wrapped.get_raw_value()

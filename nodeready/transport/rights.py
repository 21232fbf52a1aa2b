"""The rights with which a command runs on a node: sudo to root, or pyinfra's other ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from pyinfra.api import Host, StringCommand
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.connectors.util import extract_control_arguments, make_unix_command_for_host

from nodeready import shell
from nodeready.transport.sudo import as_root

#: Arguments of pyinfra's that put something around a command; without them it goes as it is.
_WRAPPING_ARGUMENTS = ("_env", "_chdir", "_sudo", "_su_user", "_doas", "_dzdo")


@dataclass(frozen=True)
class Rights:
    """How commands get their rights on a node: sudo to root by us, anything else by pyinfra."""

    sudo: bool
    password: str
    others: dict[str, Any]

    def apply(self, command: shell.Command) -> shell.Command:
        """The command as root, where that is our part."""
        return as_root(command, self.password) if self.sudo else command


def rights_of(host: Host) -> Rights:
    """The node's rights as its data and pyinfra's configuration give them."""
    arguments = cast("dict[str, Any]", pop_global_arguments(host.state, host, {})[0])
    others = {key: arguments[key] for key in CONNECTOR_ARGUMENT_KEYS if key in arguments}
    ours = bool(others.get("_sudo")) and not others.get("_sudo_user")
    password = str(others.get("_sudo_password") or "") if ours else ""
    if ours:
        others.update(_sudo=False, _sudo_password=None)
    return Rights(ours, password, others)


def wrap_command(host: Host, command: str, others: dict[str, Any]) -> str:
    """The command with what pyinfra puts around it, where we use the connector directly."""
    if not any(others.get(name) for name in _WRAPPING_ARGUMENTS):
        return command
    arguments = dict(others)
    extract_control_arguments(cast("Any", arguments))
    made = make_unix_command_for_host(host.state, host, StringCommand(command), **arguments)
    return made.get_raw_value()

"""The defaults of a command line: options from files, and the inventory that it does not name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import click

from nodeready.cli.options import ScreenOptions
from nodeready.core.exit_codes import Refused
from nodeready.runs import user_files
from nodeready.runs.options import ConnectionOptions, options_of

#: In the order of precedence: the variable, the key of config.toml, the file.
VARIABLE = "NODEREADY_INVENTORY"
KEY = "default_inventory"
FILE = "inventory.py"
_HERE = "of this directory"


class NodeOptions(Protocol):
    """What is read here of the options of a command that contacts nodes."""

    @property
    def trust_inventory(self) -> bool: ...
    @property
    def quiet(self) -> bool: ...


def find_inventory(
    inventory: str | None, options: NodeOptions, *, elsewhere: bool = False
) -> str | None:
    """INVENTORY; without one the default inventory, which is then printed; None: there is none.

    elsewhere: other words already name the nodes (``--local``, ``--from``)
    Raises Refused for an inventory.py that another user could have written.
    """
    if inventory is not None or elsewhere:
        return inventory
    default = default_inventory(click.get_current_context())
    if default is None:
        return None
    text, source = default
    if source == _HERE:
        user_files.refuse_strangers(FILE, trusted=options.trust_inventory)
    if not options.quiet:
        click.echo(f"nodeready: inventory: {text} ({source})", err=True)
    return text


def default_inventory(context: click.Context) -> tuple[str, str] | None:
    """The default inventory, and where it comes from; None: there is none."""
    named = {VARIABLE: os.environ.get(VARIABLE), "config.toml": context.lookup_default(KEY)}
    for source, text in named.items():
        if text:
            return str(text), source
    return (FILE, _HERE) if os.path.lexists(FILE) else None


def require_inventory(inventory: str | None, options: NodeOptions) -> str:
    """As `find_inventory`. Raises UsageError when there is none."""
    word = find_inventory(inventory, options)
    if word is None:
        raise click.UsageError(
            f"Missing INVENTORY: name it, or set {VARIABLE}.", click.get_current_context()
        )
    return word


# --- Options.


def defaults_of(command: click.Command, commands: Iterable[str]) -> dict[str, Any]:
    """The command's defaults from both files, for click's default map.

    A top-level key is an option that all commands share (``limit = "gpu[001-064]"``), or
    ``inventory``. A table has the options of one command (``[deploy]``).

    commands: names of all commands
    Raises Refused for a file that cannot be used, and for root if a variable names a directory
    that another user can change: the py-spy for the nodes, and the list of failed nodes are there.
    """
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        if directory := os.environ.get(variable):
            user_files.refuse_unsafe(directory, f"{variable}: ")
    options = {param.name: param for param in command.params if isinstance(param, click.Option)}
    options["inventory"] = click.Option(["--inventory"], callback=_checked_inventory)
    shared = (
        "inventory",
        *(
            option.key
            for kind in (ConnectionOptions, ScreenOptions)
            for option in options_of(kind).values()
        ),
    )
    context = click.Context(command)
    defaults: dict[str, Any] = {}
    for path in user_files.paths():
        data = user_files.read(path)
        for key, value in data.items():
            if not isinstance(value, dict):
                name = user_files.option_name(path, key, shared)
                if name in options:
                    defaults[name] = _option_value(path, key, options[name], value, context)
            elif key not in (*commands, user_files.MEMORY):
                raise Refused(f"{path}: [{key}] is no command of nodeready")
        for key, value in data.get(str(command.name), {}).items():
            name = user_files.option_name(path, key, options)
            shown = f"[{command.name}] {key}"
            defaults[name] = _option_value(path, shown, options[name], value, context)
    if "inventory" in defaults:
        # Not the name of the argument: click would take it for a word of the command line.
        defaults[KEY] = defaults.pop("inventory")
    return defaults


def _option_value(
    path: Path, key: str, option: click.Option, value: Any, context: click.Context
) -> Any:
    """The value as click takes it. Raises Refused, with the file and the key, for a wrong one.

    A list gives an option that may be repeated its values, and another option its words, which are
    then separated by commas.
    """
    if option.multiple:
        value = tuple(map(str, value)) if isinstance(value, list) else (str(value),)
    elif isinstance(value, list):
        value = ",".join(map(str, value))
    try:
        return option.process_value(context, value)
    except click.BadParameter as error:
        raise Refused(f"{path}: {key}: {error.message}") from None


def _checked_inventory(context: click.Context, option: click.Parameter, value: str) -> str:
    """Refuse a relative path: it would mean a file of whatever directory the user is in."""
    if value.startswith(("/", "~", "@")) or not ("/" in value or value.endswith(".py")):
        return os.path.expanduser(value)
    raise click.BadParameter(f"{value}: write the whole path")

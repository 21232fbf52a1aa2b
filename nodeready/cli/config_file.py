"""Defaults of options from files; the user's file precedes the system's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from nodeready.cli.default_inventory import KEY
from nodeready.cli.options import Refused, shared_option_names
from nodeready.core.files import read_regular

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: The table of the memory, which is of no command.
MEMORY = "memory"

SYSTEM = Path("/etc/nodeready/config.toml")


def user_file() -> Path:
    """``$XDG_CONFIG_HOME/nodeready/config.toml``, or under ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "nodeready" / "config.toml"


def defaults_of(command: click.Command, commands: Iterable[str]) -> dict[str, Any]:
    """The command's defaults from both files, for click's default map.

    A top-level key is an option that all commands share (``limit = "gpu[001-064]"``), or
    ``inventory``. A table has the options of one command (``[deploy]``).

    commands: names of all commands
    Raises Refused for a file that cannot be used.
    """
    _refuse_unsafe_directories()
    options = {param.name: param for param in command.params if isinstance(param, click.Option)}
    options["inventory"] = click.Option(["--inventory"], callback=_checked_inventory)
    shared = (*shared_option_names(), "inventory")
    context = click.Context(command)
    defaults: dict[str, Any] = {}
    for path in (SYSTEM, user_file()):
        data = _read(path)
        for key, value in data.items():
            if not isinstance(value, dict):
                name = _option_name(path, key, shared)
                if name in options:
                    defaults[name] = _option_value(path, key, options[name], value, context)
            elif key not in (*commands, MEMORY):
                raise Refused(f"{path}: [{key}] is no command of nodeready")
        for key, value in data.get(str(command.name), {}).items():
            name = _option_name(path, key, options)
            shown = f"[{command.name}] {key}"
            defaults[name] = _option_value(path, shown, options[name], value, context)
    if "inventory" in defaults:
        # Not the name of the argument: click would take it for a word of the command line.
        defaults[KEY] = defaults.pop("inventory")
    return defaults


def memory_settings() -> dict[str, str]:
    """The keys of ``[memory]`` in both files, then NODEREADY_MEMORY and NODEREADY_MEMORY_KEY, as
    texts. Raises Refused for a key that means nothing."""
    keys = ("file", "days", "megabytes")
    settings: dict[str, str] = {}
    for path in (SYSTEM, user_file()):
        table = _read(path).get(MEMORY, {})
        settings.update(
            {_option_name(path, key, keys): str(value) for key, value in table.items()}
        )
    for key, name in zip(keys, ("", "_DAYS", "_MEGABYTES"), strict=True):
        if value := os.environ.get(f"NODEREADY_MEMORY{name}"):
            settings[key] = value
    return settings


def _refuse_unsafe(path: str | Path, prefix: str = "") -> None:
    """For root: raise Refused, with this prefix, for a path that another user can write."""
    from nodeready.fleet.inventory import trust

    reason = trust.distrust(path, remedy=trust.SET_VARIABLE)
    if reason:
        raise Refused(f"{prefix}{reason}")


def _refuse_unsafe_directories() -> None:
    """For root: raise Refused if a variable names a directory that another user can change.

    nodeready trusts its own files there: the py-spy for the nodes, and the list of failed nodes.
    """
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        if directory := os.environ.get(name):
            _refuse_unsafe(directory, f"{name}: ")


def _read(path: Path) -> dict[str, Any]:
    _refuse_unsafe(path)
    try:
        data: dict[str, Any] = tomllib.loads(read_regular(path).decode("utf-8"))
        return data
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"{path}: {error}") from None


def _option_name(path: Path, key: str, options: Iterable[str]) -> str:
    """The option of a key. Raises Refused, with the most similar option, for an unknown key."""
    name = key.replace("-", "_")
    if name not in options:
        from nodeready.core.policy.fields import suggestion

        raise Refused(f"{path}: unknown option {key}: {suggestion(name, options)}")
    return name


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

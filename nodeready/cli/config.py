"""Defaults from files: the user's wins over the system's, a flag or variable over both."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SYSTEM = Path("/etc/nodeready/config.toml")


def user_file() -> Path:
    """``$XDG_CONFIG_HOME/nodeready/config.toml``, or under ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "nodeready" / "config.toml"


def defaults(commands: list[str]) -> dict[str, dict[str, Any]]:
    """click's default map: per command the option values of both files.

    Top-level keys are options of all commands (``limit = "gpu[001-064]"``), a table is one
    command's (``[deploy]``). Raises click.UsageError for a file that cannot be used.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in commands}
    for path in (SYSTEM, user_file()):
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"{path}: {error}") from None
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise click.UsageError(f"{path}: {error}") from None
        for key, value in data.items():
            if not isinstance(value, dict):
                for options in found.values():
                    options[key.replace("-", "_")] = value
        for key, value in data.items():
            if isinstance(value, dict):
                if key not in found:
                    raise click.UsageError(f"{path}: [{key}] is no command of nodeready")
                found[key].update({k.replace("-", "_"): v for k, v in value.items()})
    return found

"""The inventory of a command line that names none."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import click

from nodeready.cli.options import Refused

if TYPE_CHECKING:
    from nodeready.cli.targets import TargetOptions

#: In the order of precedence: the variable, the key of config.toml, the file.
VARIABLE = "NODEREADY_INVENTORY"
KEY = "default_inventory"
FILE = "inventory.py"
_HERE = "of this directory"


def find_inventory(
    inventory: str | None, options: TargetOptions, *, elsewhere: bool = False
) -> str | None:
    """INVENTORY; without one the default inventory, which is then printed; None: there is none.

    elsewhere: other words already name the nodes (``--local``, ``--from``)
    Raises Refused for an inventory.py that another user may have put there.
    """
    if inventory is not None or elsewhere:
        return inventory
    default = default_inventory(click.get_current_context())
    if default is None:
        return None
    text, source = default
    if source == _HERE:
        refuse_stranger(FILE, f"name it: ./{FILE}")
    options.warn(f"inventory: {text} ({source})")
    return text


def default_inventory(context: click.Context) -> tuple[str, str] | None:
    """The default inventory, and where it comes from; None: there is none."""
    named = {VARIABLE: os.environ.get(VARIABLE), "config.toml": context.lookup_default(KEY)}
    for source, text in named.items():
        if text:
            return str(text), source
    return (FILE, _HERE) if os.path.lexists(FILE) else None


def require_inventory(inventory: str | None, options: TargetOptions) -> str:
    """As `find_inventory`. Raises UsageError when there is none."""
    word = find_inventory(inventory, options)
    if word is None:
        raise click.UsageError(
            f"Missing INVENTORY: name it, or set {VARIABLE}.", click.get_current_context()
        )
    return word


def refuse_stranger(path: str, remedy: str) -> None:
    """Raises Refused unless the user or root alone could have put this here.

    Nobody named it, and it runs with the user's rights. What root may run, `inventory.trust` says.
    """
    trusted = {0, os.geteuid()}
    try:
        entries = os.lstat(path), os.stat(path)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    if any(entry.st_uid not in trusted for entry in entries) or entries[1].st_mode & stat.S_IWOTH:
        raise Refused(f"{path} of this directory may be another user's: to use it, {remedy}")

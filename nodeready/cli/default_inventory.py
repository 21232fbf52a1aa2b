"""The inventory of a command line that names none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from nodeready.cli.options import Refused
from nodeready.core.text import sanitise
from nodeready.fleet.inventory.trust import distrust

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
    Raises Refused for an inventory.py that another user could have written.
    """
    if inventory is not None or elsewhere:
        return inventory
    default = default_inventory(click.get_current_context())
    if default is None:
        return None
    text, source = default
    if source == _HERE:
        refuse_strangers(FILE, options)
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


def refuse_strangers(name: str, options: TargetOptions) -> None:
    """Raises Refused for a file or directory of the current one, which nobody named, if another
    user could have written it."""
    reason = "" if options.trust_inventory else distrust(name, authors=())
    if reason:
        raise Refused(sanitise(reason))

"""The hosts of an inventory that ``--limit`` selects."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from pyinfra.api import Host, Inventory
from pyinfra.api.connectors import get_all_connectors
from pyinfra.api.exceptions import InventoryError

from nodeready.core.text import sanitise
from nodeready.fleet.inventory import connectors, nodeset
from nodeready.fleet.inventory.connectors import is_connector
from nodeready.fleet.inventory.nodeset import NodeSetError, expand_one, fold, split


def sanitised(text: str) -> str:
    return sanitise(text, 200)


def group_members(part: str) -> list[str]:
    """The nodes of one part of a list: ``@word`` is a connector, else a group of ClusterShell's.

    Raises NodeSetError; InventoryError when one of nodeready's connectors finds no nodes.
    """
    if is_connector(part):
        return connectors.names(part)
    members = None if part[1:] in get_all_connectors() else nodeset.group(part)
    return expand_one(part) if members is None else members


def names(hosts: Iterable[Host]) -> list[str]:
    """The names of these hosts, in their order."""
    return [str(host.name) for host in hosts]


def select_hosts(
    inventory: Inventory, expression: str, named: Mapping[str, Iterable[str]] | None = None
) -> list[Host]:
    """The hosts that a ``--limit`` selects, in the inventory's order.

    expression: a comma list of names, node sets, groups (``h100``, or ``@h100``), ``all``, globs
        over names (``gpu*``), ClusterShell's groups (``@rack1``, ``@slurm:debug``), and
        nodeready's connectors (``@slurm/4711``)
    named: further words -> their nodes (``{"@last-failed": [...]}``); nodes that have left the
        inventory are ignored
    Raises InventoryError for a node or group that is not there, with the closest one that is,
    and when nothing is selected.
    """
    chosen: set[str] = set()
    missing: list[str] = []
    for part in split(expression):
        if named is not None and part in named:
            chosen.update(name for name in named[part] if name in inventory.hosts)
            continue
        members = _group(inventory, part)
        if members is not None:
            chosen.update(members)
            continue
        try:
            if part.startswith("@") and part not in inventory.hosts:
                # A group of the whole cluster may have nodes outside the inventory.
                present = [name for name in group_members(part) if name in inventory.hosts]
                chosen.update(present)
                missing.extend([] if present else [part])
                continue
            expanded = expand_one(part, globs=True)
        except NodeSetError as error:
            if part.startswith("@") and ":" not in part:
                missing.append(part)
                continue
            raise InventoryError(f"--limit: {error}") from None
        for name in expanded:
            if name in inventory.hosts:
                chosen.add(name)
                continue
            globbed = "*" in name or "?" in name
            matching = [n for n in inventory.hosts if fnmatchcase(n, name)] if globbed else []
            chosen.update(matching)
            if not matching:
                missing.append(name)
    if missing:
        raise InventoryError(_not_there(inventory, missing))
    if not chosen:
        raise InventoryError(f"--limit {sanitised(expression)!r} selects no node of the inventory")
    return [host for host in inventory if host.name in chosen]


def _group(inventory: Inventory, word: str) -> list[str] | None:
    """The names in the group ``word`` (or ``@word``); None when there is no such group."""
    if word in inventory.hosts:
        return None
    for group in (word, word[1:] if word.startswith("@") else word):
        if group == "all":
            return list(inventory.hosts)
        members = inventory.groups.get(group)
        if members:
            return names(members)
    return None


def _not_there(inventory: Inventory, missing: Sequence[str]) -> str:
    groups = [name for name, members in inventory.groups.items() if members]
    close = difflib.get_close_matches(missing[0], [*groups, *inventory.hosts], n=1)
    if close:
        hint = f"did you mean {close[0]}?"
    else:
        hint = f"its nodes are {sanitised(fold(inventory.hosts))}"
        hint += f"; its groups are {sanitised(', '.join(groups))}" if groups else ""
    return f"--limit: no node or group {sanitised(fold(missing))} in the inventory; {hint}"

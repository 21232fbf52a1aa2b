"""The policy of each node, from the data of its groups and host as pyinfra merges them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from pyinfra.api import Host, Inventory
from pyinfra.api.connectors import get_all_connectors

from nodeready.inventory.endpoints import connection_problems
from nodeready.policy import Policy
from nodeready.policy.policy import PolicyError, check_settings
from nodeready.subjects import waivers
from nodeready.subjects.registry import check_ids

#: Host data of pyinfra or of an inventory, which is never a misspelt setting.
_INVENTORY_KEYS = frozenset({"slots", "ssh_names"})


@lru_cache(maxsize=1)
def _foreign() -> frozenset[str]:
    keys = set(_INVENTORY_KEYS)
    for connector in get_all_connectors().values():
        keys.update(getattr(connector, "data_meta", {}) or {})
    return frozenset(keys)


def _origin(inventory: Inventory, group: str) -> str:
    """The files that set a group's data, or the group's name when pyinfra itself loaded them."""
    files = getattr(inventory, "group_files", {}).get(group, ())
    return ", ".join(str(path) for path in files) or f"group {group}"


def checked_data(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The validated settings among pyinfra's data of one origin.

    Raises PolicyError with every problem of this origin.
    """
    problems = connection_problems(data, source)
    try:
        checked = check_settings(data, source, _foreign())
    except PolicyError as error:
        raise PolicyError([*problems, *error.problems]) from None
    if "waivers" in checked:
        waived = waivers.waiver_problems(Policy(waivers=checked["waivers"]), check_ids())
        problems += [f"{source}: {problem}" for problem in waived]
    if problems:
        raise PolicyError(problems)
    return checked


def declared_settings(inventory: Inventory, hosts: Iterable[Host]) -> dict[str, dict[str, Any]]:
    """The settings of each of these hosts, by name, from group and host data as pyinfra merges
    them. Hosts of the same groups and settings share one dict.

    Raises PolicyError with the problems of all origins, each with its file or host, before any
    node is touched.
    """
    problems: list[str] = []
    cache: dict[tuple[Any, ...], dict[str, Any]] = {}

    def settings(data: Mapping[str, Any], source: str) -> dict[str, Any]:
        try:
            return checked_data(data, source)
        except PolicyError as error:
            problems.extend(error.problems)
            return {}

    everywhere = settings(inventory.get_data(), _origin(inventory, "all"))
    by_group = {
        group: settings(inventory.get_group_data(group), _origin(inventory, group))
        for group in inventory.groups.keys() | inventory.group_data.keys()
    }
    override = settings(inventory.get_override_data(), "command line")
    settings_of: dict[str, dict[str, Any]] = {}
    for host in hosts:
        host_settings = settings(inventory.get_host_data(host.name), f"host {host.name}")
        key = (tuple(host.groups), tuple(sorted(host_settings.items())))
        if key not in cache:
            merged = dict(everywhere)
            for group in host.groups:
                merged.update(by_group.get(group, {}))
            cache[key] = {**merged, **host_settings, **override}
        settings_of[host.name] = cache[key]
    if problems:
        raise PolicyError(list(dict.fromkeys(problems)))
    return settings_of


def policies(inventory: Inventory, hosts: Iterable[Host]) -> dict[str, Policy]:
    """The policy of each of these hosts, by name. Raises PolicyError, see `declared_settings`."""
    made: dict[int, Policy] = {}
    policy_of: dict[str, Policy] = {}
    for name, settings in declared_settings(inventory, hosts).items():
        if id(settings) not in made:
            made[id(settings)] = Policy(**settings)
        policy_of[name] = made[id(settings)]
    return policy_of

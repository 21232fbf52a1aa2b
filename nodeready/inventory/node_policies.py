"""The policy of each node, from the data of its groups and host as pyinfra merges them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def _foreign() -> frozenset[str]:
    keys = set(_INVENTORY_KEYS)
    for connector in get_all_connectors().values():
        keys.update(getattr(connector, "data_meta", {}) or {})
    return frozenset(keys)


def _origin(inventory: Inventory, group: str) -> str:
    """The files that set a group's data, or the group's name when pyinfra itself loaded them."""
    files = getattr(inventory, "group_files", {}).get(group, ())
    return ", ".join(str(path) for path in files) or f"group {group}"


def policies(inventory: Inventory, hosts: Iterable[Host]) -> dict[str, Policy]:
    """The policy of each of these hosts, by name, from group and host data as pyinfra merges them.

    Raises PolicyError with the problems of all origins, each with its file or host, before any
    node is touched.
    """
    foreign, ids = _foreign(), check_ids()
    problems: list[str] = []
    cache: dict[tuple[Any, ...], Policy] = {}

    def settings(data: Mapping[str, Any], source: str) -> dict[str, Any]:
        problems.extend(connection_problems(data, source))
        try:
            checked = check_settings(data, source, foreign)
        except PolicyError as error:
            problems.extend(error.problems)
            return {}
        waived = waivers.waiver_problems(Policy(waivers=checked.get("waivers", ())), ids)
        problems.extend(f"{source}: {problem}" for problem in waived)
        return checked

    everywhere = settings(inventory.get_data(), _origin(inventory, "all"))
    by_group = {
        group: settings(inventory.get_group_data(group), _origin(inventory, group))
        for group in inventory.groups.keys() | inventory.group_data.keys()
    }
    override = settings(inventory.get_override_data(), "command line")
    policy_of: dict[str, Policy] = {}
    for host in hosts:
        host_settings = settings(inventory.get_host_data(host.name), f"host {host.name}")
        key = (tuple(host.groups), tuple(sorted(host_settings.items())))
        if key not in cache:
            merged = dict(everywhere)
            for group in host.groups:
                merged.update(by_group.get(group, {}))
            cache[key] = Policy(**{**merged, **host_settings, **override})
        policy_of[host.name] = cache[key]
    if problems:
        raise PolicyError(list(dict.fromkeys(problems)))
    return policy_of

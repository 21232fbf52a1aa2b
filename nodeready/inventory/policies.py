"""The nodes' policies, as pyinfra merges group and host data, and where their sshd is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pyinfra.api import Inventory
from pyinfra.api.connectors import get_all_connectors
from pyinfra.api.host import Host

from nodeready.policy import Policy
from nodeready.policy.load import PolicyError, check_settings
from nodeready.subjects import snapshot
from nodeready.subjects.registry import check_ids
from nodeready.subjects.ssh_client.known_hosts import Endpoint

#: Host data that is pyinfra's or an inventory's, and never a misspelt setting of ours.
_INVENTORY_KEYS = frozenset({"slots"})


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

    def settings(data: Mapping[str, Any], where: str) -> dict[str, Any]:
        try:
            found = check_settings(data, where, foreign)
        except PolicyError as error:
            problems.extend(error.problems)
            return {}
        waived = snapshot.problems(Policy(waivers=found.get("waivers", ())), ids)
        problems.extend(f"{where}: {problem}" for problem in waived)
        return found

    everywhere = settings(inventory.get_data(), _origin(inventory, "all"))
    by_group = {
        group: settings(inventory.get_group_data(group), _origin(inventory, group))
        for group in inventory.groups.keys() | inventory.group_data.keys()
    }
    override = settings(inventory.get_override_data(), "command line")
    made: dict[str, Policy] = {}
    for host in hosts:
        own = settings(inventory.get_host_data(host.name), f"host {host.name}")
        key = (tuple(host.groups), tuple(sorted(own.items())))
        if key not in cache:
            merged = dict(everywhere)
            for group in host.groups:
                merged.update(by_group.get(group, {}))
            cache[key] = Policy(**{**merged, **own, **override})
        made[host.name] = cache[key]
    if problems:
        raise PolicyError(list(dict.fromkeys(problems)))
    return made


def endpoint(inventory: Inventory, name: str) -> Endpoint:
    """The address and the port of a node's sshd, as the inventory has them; "": its name."""
    data = inventory.get_host(name).data
    return str(data.get("ssh_hostname") or ""), int(data.get("ssh_port") or 22)

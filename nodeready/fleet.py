"""The nodes' policies, and what follows for each node from all nodes of the run together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pyinfra.api import Inventory
from pyinfra.api.connectors import get_all_connectors
from pyinfra.api.host import Host

from nodeready import gate, known_hosts, waivers
from nodeready.policy import Policy
from nodeready.policy.load import PolicyError, check_settings
from nodeready.snapshot import Snapshot
from nodeready.subjects import check_ids

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
        waived = waivers.problems(Policy(waivers=found.get("waivers", ())), ids)
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


def expectations(
    wanted: Mapping[str, Policy],
    snapshots: Mapping[str, Snapshot],
    inventory: Inventory,
    fetch: Callable[[str], str],
) -> dict[str, Policy]:
    """The policies, completed by what all nodes of the run showed, every node's host keys, and by
    what this nodeready makes of them (gate.complete).

    fetch: runs known_hosts.READ_BLOCK on the node of that name and returns what it printed; only
           called for blocks that were too large to come along and differ from what is wanted
    """
    lines: dict[tuple[str, ...], tuple[str, ...]] = {}
    made: dict[str, Policy] = {}
    endpoints = {name: _endpoint(inventory, name) for name in snapshots}
    for name, policy in wanted.items():
        if policy.ssh_client_mode != "known_hosts":
            made[name] = gate.complete(policy, policy)
            continue
        extra = policy.ssh_known_hosts
        if extra not in lines:
            lines[extra] = _known_hosts(snapshots, extra, endpoints, fetch)
        told = replace(policy, ssh_known_hosts=lines[extra])
        made[name] = gate.complete(told, policy)
    return made


def _endpoint(inventory: Inventory, name: str) -> known_hosts.Endpoint:
    data = inventory.get_host(name).data
    return str(data.get("ssh_hostname") or ""), int(data.get("ssh_port") or 22)


def _known_hosts(
    snapshots: Mapping[str, Snapshot],
    extra: tuple[str, ...],
    endpoints: Mapping[str, known_hosts.Endpoint],
    fetch: Callable[[str], str],
) -> tuple[str, ...]:
    lines = known_hosts.fleet_lines(snapshots, extra, endpoints)
    missing = known_hosts.unsent(snapshots, lines)
    blocks: dict[str, tuple[str, ...]] = {}
    for digest, node in missing.items():
        try:
            blocks[digest] = known_hosts.read_block(fetch(node), digest)
        except ValueError:
            continue
    return known_hosts.fleet_lines(snapshots, extra, endpoints, blocks) if blocks else lines

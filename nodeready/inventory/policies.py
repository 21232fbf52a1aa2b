"""The nodes' policies, as pyinfra merges group and host data, and where their sshd is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pyinfra.api import Inventory
from pyinfra.api.connectors import get_all_connectors
from pyinfra.api.host import Host
from pyinfra.connectors.local import LocalConnector

from nodeready.inventory.nodeset import NodeSetError, host_name
from nodeready.policy import Policy
from nodeready.policy.fields import shown
from nodeready.policy.policy import PolicyError, check_settings
from nodeready.subjects import snapshot
from nodeready.subjects.registry import check_ids
from nodeready.subjects.ssh_client.facts import clean_address
from nodeready.subjects.ssh_client.known_hosts import Endpoint, Names

#: Host data that is pyinfra's or an inventory's, and never a misspelt setting of ours.
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

    def settings(data: Mapping[str, Any], where: str) -> dict[str, Any]:
        problems.extend(_connection(data, where))
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


# --- Where the nodes' sshd are, and how to log in: pyinfra's keys, and ssh_names.

_NO_USER = re.compile(r"-|.*[\s\x00-\x1f\x7f]")


def _port(value: object) -> str:
    if type(value) is int and 0 < value < 65536:
        return ""
    return "must be a whole number from 1 to 65535, without quotes"


def _user(value: object) -> str:
    if isinstance(value, str) and value and not _NO_USER.match(value):
        return ""
    return "must be the name of a user"


def _key(value: object) -> str:
    if isinstance(value, str | os.PathLike) and str(value) and "\0" not in str(value):
        return ""
    return "must be the path of a private key"


def _host(value: object) -> str:
    try:
        connector = host_name(value if isinstance(value, str) else "").startswith("@")
    except NodeSetError:
        connector = True
    return "must be a host name or an address" if connector else ""


def _names(value: object) -> str:
    if isinstance(value, list | tuple) and not any(map(_host, value)):
        return ""
    return "must be a list of host names and addresses"


#: Key -> what is wrong with a value, or "". None and "" are as if the key were not there.
_CONNECTION: dict[str, Callable[[object], str]] = {
    "ssh_port": _port,
    "ssh_user": _user,
    "ssh_key": _key,
    "ssh_hostname": _host,
    "ssh_names": _names,
}


def _connection(data: Mapping[str, Any], where: str) -> list[str]:
    """What is wrong with the connection data of one origin, a line each."""
    found = []
    for key, wrong in _CONNECTION.items():
        value = data.get(key)
        if value not in (None, "") and (why := wrong(value)):
            found.append(f"{where}: {key} = {shown(value)}: {why}")
    return found


def endpoint(host: Host) -> Endpoint:
    """Where a node's sshd is and what the node is called, as the inventory has it.

    Under pyinfra's own command nothing has checked the values.
    """
    data = host.data
    address, port, names = data.get("ssh_hostname"), data.get("ssh_port"), data.get("ssh_names")
    return Endpoint(
        "" if _host(address) else str(address),
        22 if _port(port) else int(port),
        () if _names(names) else tuple(names),
        local=issubclass(host.connector_cls, LocalConnector),
    )


def given_addresses(inventory: Iterable[Host]) -> dict[str, str]:
    """Address -> the node to which the inventory gives it: as its name, ``ssh_hostname``, or in
    ``ssh_names``. What it gives to several nodes, or with a port of its own, is not there."""
    given = Names({host.name: endpoint(host) for host in inventory}).given
    return {one: node for one, node in given.items() if node and clean_address(one)}

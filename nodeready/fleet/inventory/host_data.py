"""Host data: each node's login and policy, and the fleet's context that they give.

The keys of a login are pyinfra's ``ssh_port``, ``ssh_user``, ``ssh_key`` and ``ssh_hostname``, and
``ssh_names`` of nodeready.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pyinfra.api import Host, Inventory
from pyinfra.api.connectors import get_all_connectors
from pyinfra.connectors.local import LocalConnector

from nodeready.agent.asking import SshPeer
from nodeready.core import result
from nodeready.core.outcome import Outcome
from nodeready.core.policy import FOLDER, Policy, PolicyError, SiteCheck, check_settings
from nodeready.core.settings import Waiver, value_text
from nodeready.fleet.inventory import site_files
from nodeready.fleet.inventory.load import NodeInventory
from nodeready.fleet.inventory.nodeset import NodeSetError, expand, host_name
from nodeready.subjects.context import addresses_of, unique_addresses
from nodeready.subjects.registry import check_ids
from nodeready.subjects.site.facts import script_size
from nodeready.subjects.snapshot import Snapshot
from nodeready.subjects.ssh_client.facts import clean_address
from nodeready.subjects.ssh_client.known_hosts import Endpoint, Names

_NOT_A_USER = re.compile(r"-|.*[\s\x00-\x1f\x7f]")


def _is_port(value: object) -> bool:
    return type(value) is int and 0 < value < 65536


def _is_user(value: object) -> bool:
    return isinstance(value, str) and value != "" and not _NOT_A_USER.match(value)


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike) and str(value) != "" and "\0" not in str(value)


def _is_host(value: object) -> bool:
    try:
        # A name with an @ is one of pyinfra's connectors.
        return not host_name(value if isinstance(value, str) else "").startswith("@")
    except NodeSetError:
        return False


def _are_hosts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_host, value))


#: Key for ssh -> whether a value is right, and what it must be.
_KEYS: dict[str, tuple[Callable[[object], bool], str]] = {
    "ssh_port": (_is_port, "a whole number from 1 to 65535, without quotes"),
    "ssh_user": (_is_user, "the name of a user"),
    "ssh_key": (_is_path, "the path of a private key"),
    "ssh_hostname": (_is_host, "a host name or an address"),
    "ssh_names": (_are_hosts, "a list of host names and addresses"),
}


def connection_problems(data: Mapping[str, Any], source: str) -> list[str]:
    """A line for each wrong value of the keys for ssh in this data. source: of the data

    A key with None or "" is as if it were missing.
    """
    problems = []
    for key, (is_right, words) in _KEYS.items():
        value = data.get(key)
        if value not in (None, "") and not is_right(value):
            problems.append(f"{source}: {key} = {value_text(value)}: must be {words}")
    return problems


def endpoint(host: Host) -> Endpoint:
    """The address of a node's sshd and the node's names, from the inventory.

    A wrong value is left out, because pyinfra's own command does not check the values.
    """
    data = host.data
    address, port, names = data.get("ssh_hostname"), data.get("ssh_port"), data.get("ssh_names")
    address = str(address) if _is_host(address) else ""
    names = tuple(names) if _are_hosts(names) else ()
    local = issubclass(host.connector_cls, LocalConnector)
    return Endpoint(address, int(port) if _is_port(port) else 22, names, local=local)


def given_addresses(inventory: Iterable[Host]) -> dict[str, str]:
    """Address -> the node to which the inventory gives it.

    The node's name, its ``ssh_hostname`` and its ``ssh_names`` may be addresses. An address of
    several nodes, or with a port, is left out.
    """
    node_by_address = Names({host.name: endpoint(host) for host in inventory}).owners
    owners = node_by_address.items()
    return {address: node for address, node in owners if node and clean_address(address)}


# --- The policy of each node, from the data of its groups and host as pyinfra merges them.

#: Host data of pyinfra or of an inventory, which is never a misspelt setting.
_INVENTORY_KEYS = frozenset({"slots", "ssh_names"})


#: Linux passes at most 128 KiB in one variable (execve(2), MAX_ARG_STRLEN).
_MAX_SCRIPT_BYTES = 96 * 1024


@lru_cache(maxsize=1)
def _foreign() -> frozenset[str]:
    """The keys of host data that are pyinfra's or the inventory's own."""
    keys = set(_INVENTORY_KEYS)
    for connector in get_all_connectors().values():
        keys.update(getattr(connector, "data_meta", {}) or {})
    return frozenset(keys)


def _origin(inventory: Inventory, group: str) -> str:
    """The files that set a group's data, or the group's name when pyinfra itself loaded them."""
    files = getattr(inventory, "group_files", {}).get(group, ())
    return ", ".join(str(path) for path in files) or f"group {group}"


def checked_data(
    data: Mapping[str, Any], source: str, file_checks: tuple[SiteCheck, ...] = ()
) -> dict[str, Any]:
    """The validated settings among pyinfra's data of one origin.

    file_checks: those of `checks.d`, which a waiver may name
    Raises PolicyError with every problem of this origin.
    """
    problems = connection_problems(data, source)
    try:
        checked = check_settings(data, source, _foreign())
    except PolicyError as error:
        raise PolicyError([*problems, *error.problems]) from None
    if "waivers" in checked:
        declared = Policy(site_checks=(*file_checks, *checked.get("site_checks", ())))
        waiver_policy = Policy(waivers=checked["waivers"])
        unusable = result.waiver_problems(waiver_policy, check_ids([declared]))
        problems += [f"{source}: {problem}" for problem in unusable]
        problems += [f"{source}: {problem}" for problem in _node_set_problems(checked["waivers"])]
    if problems:
        raise PolicyError(problems)
    return checked


@lru_cache(maxsize=256)
def _names(nodes: str) -> frozenset[str]:
    """The names of a node set. Raises NodeSetError."""
    return frozenset(expand(nodes))


def _node_set_problems(waivers: Iterable[Waiver]) -> list[str]:
    problems = []
    for waiver in waivers:
        try:
            _names(waiver.nodes)
        except NodeSetError as error:
            problems.append(f"waivers: {waiver.check!r}: nodes: {error}")
    return problems


def waivers_of(node: str, waivers: Iterable[Waiver]) -> tuple[Waiver, ...]:
    """The waivers for this node, without their node sets: a set that gets another node leaves the
    policy of this one as it is.
    """
    of_node = (waiver for waiver in waivers if not waiver.nodes or node in _names(waiver.nodes))
    return tuple(replace(waiver, nodes="") if waiver.nodes else waiver for waiver in of_node)


def _checks_of(host: Host, declared: tuple[SiteCheck, ...]) -> tuple[SiteCheck, ...]:
    """The checks of the host's groups. Raises PolicyError."""
    groups = {"all", *host.groups}
    checks = tuple(check for check in declared if not check.groups or groups & {*check.groups})
    places: dict[str, str] = {}
    for check in checks:
        if check.name in places:
            first = places[check.name]
            raise PolicyError([f"site_checks: {check.name} is in {first}, too"])
        places[check.name] = check.source
    if script_size(checks) > _MAX_SCRIPT_BYTES:
        limit = f"{_MAX_SCRIPT_BYTES} bytes of commands: put long ones into scripts on the nodes"
        subject = f"host {host.name}: its {len(checks)} site checks"
        raise PolicyError([f"{subject} have more than {limit}"])
    return checks


def declared_settings(inventory: Inventory, hosts: Iterable[Host]) -> dict[str, dict[str, Any]]:
    """The settings of each of these hosts, by name, from group and host data as pyinfra merges
    them, with the checks of `checks.d`. Hosts of the same groups and settings share one dict.

    Raises PolicyError with the problems of all origins, each with its file or host, before any
    node is touched.
    """
    if isinstance(inventory, NodeInventory):
        checks, problems = inventory.site_checks, [*inventory.check_problems]
    else:
        # pyinfra's own inventory has not read them.
        checks, problems = site_files.read([Path.cwd() / FOLDER])
    file_checks = tuple(checks)
    cache: dict[tuple[Any, ...], dict[str, Any]] = {}

    def settings(data: Mapping[str, Any], source: str) -> dict[str, Any]:
        try:
            return checked_data(data, source, file_checks)
        except PolicyError as error:
            problems.extend(error.problems)
            return {}

    settings_of_all = settings(inventory.get_data(), _origin(inventory, "all"))
    by_group = {}
    for group in inventory.groups.keys() | inventory.group_data.keys():
        by_group[group] = settings(inventory.get_group_data(group), _origin(inventory, group))
    override = settings(inventory.get_override_data(), "command line")
    settings_of: dict[str, dict[str, Any]] = {}
    for host in hosts:
        host_settings = settings(inventory.get_host_data(host.name), f"host {host.name}")
        key = (tuple(host.groups), tuple(sorted(host_settings.items())))
        if key not in cache:
            merged = dict(settings_of_all)
            for group in host.groups:
                merged.update(by_group.get(group, {}))
            cache[key] = {**merged, **host_settings, **override}
            declared = (*file_checks, *cache[key].get("site_checks", ()))
            if declared:
                try:
                    cache[key]["site_checks"] = _checks_of(host, declared)
                except PolicyError as error:
                    problems.extend(error.problems)
        settings_of[host.name] = cache[key]
    if problems:
        raise PolicyError(list(dict.fromkeys(problems)))
    return settings_of


def policies(inventory: Inventory, hosts: Iterable[Host]) -> dict[str, Policy]:
    """The policy of each of these hosts, by name. Raises PolicyError, see `declared_settings`."""
    return share_policies(declared_settings(inventory, hosts), lambda settings: Policy(**settings))


def declared_waivers(inventory: Inventory) -> dict[Waiver, list[str]]:
    """Each waiver of the inventory -> the nodes to which it applies; []: its node set has no node
    that has the policy. Raises PolicyError.
    """
    nodes: dict[Waiver, list[str]] = {}
    for name, settings in declared_settings(inventory, list(inventory)).items():
        for waiver in settings.get("waivers", ()):
            applies = waivers_of(name, [waiver])
            nodes.setdefault(waiver, []).extend([name] if applies else [])
    return nodes


def share_policies(
    declared: Mapping[str, Mapping[str, Any]], make: Callable[[Mapping[str, Any]], Policy]
) -> dict[str, Policy]:
    """Node -> its policy, with the waivers for this node. Nodes that share a dict of
    `declared_settings`, and the waivers, share one policy.
    """
    distinct = {id(settings): settings for settings in declared.values()}
    policy_by_id = {key: make(settings) for key, settings in distinct.items()}
    policies: dict[str, Policy] = {}
    shared: dict[tuple[int, tuple[Waiver, ...]], Policy] = {}
    for name, settings in declared.items():
        policy = policy_by_id[id(settings)]
        key = id(settings), waivers_of(name, policy.waivers)
        if key not in shared:
            shared[key] = policy if key[1] == policy.waivers else replace(policy, waivers=key[1])
        policies[name] = shared[key]
    return policies


# --- The nodes' addresses.


def addresses_of_nodes(
    outcomes: Iterable[Outcome[Snapshot]], peers: Mapping[str, SshPeer]
) -> tuple[str, ...] | None:
    """The addresses of the nodes that were probed; see `unique_addresses`."""
    claimed = [addresses_of(outcome.value) for outcome in outcomes if outcome.value is not None]
    reached = {peer.address for peer in peers.values()}
    return unique_addresses([addresses for addresses in claimed if addresses is not None], reached)

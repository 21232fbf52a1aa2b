"""Where the nodes' sshd are, and how to log in: pyinfra's keys, and ssh_names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pyinfra.api import Host
from pyinfra.connectors.local import LocalConnector

from nodeready.inventory.nodeset import NodeSetError, host_name
from nodeready.policy.fields import value_text
from nodeready.subjects.ssh_client.identity import clean_address
from nodeready.subjects.ssh_client.known_hosts import Endpoint, Names

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


def connection_problems(data: Mapping[str, Any], source: str) -> list[str]:
    """What is wrong with the connection data of one origin, a line each."""
    problems = []
    for key, problem_of in _CONNECTION.items():
        value = data.get(key)
        if value not in (None, "") and (problem := problem_of(value)):
            problems.append(f"{source}: {key} = {value_text(value)}: {problem}")
    return problems


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
    ``ssh_names``. Addresses of several nodes, or with another port, are left out."""
    node_by_address = Names({host.name: endpoint(host) for host in inventory}).owners
    return {
        address: node
        for address, node in node_by_address.items()
        if node and clean_address(address)
    }

"""The host data for ssh: the address of a node's sshd, the login, and the names of the node.

The keys are pyinfra's ``ssh_port``, ``ssh_user``, ``ssh_key`` and ``ssh_hostname``, and
``ssh_names`` of nodeready.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pyinfra.api import Host
from pyinfra.connectors.local import LocalConnector

from nodeready.core.settings import value_text
from nodeready.fleet.inventory.nodeset import NodeSetError, host_name
from nodeready.subjects.ssh_client.facts import clean_address
from nodeready.subjects.ssh_client.known_hosts import Endpoint, Names

_NOT_A_USER = re.compile(r"-|.*[\s\x00-\x1f\x7f]")

# Each function returns the problem of one key's value, or "".


def _port_problem(value: object) -> str:
    if type(value) is int and 0 < value < 65536:
        return ""
    return "must be a whole number from 1 to 65535, without quotes"


def _user_problem(value: object) -> str:
    if isinstance(value, str) and value and not _NOT_A_USER.match(value):
        return ""
    return "must be the name of a user"


def _key_problem(value: object) -> str:
    if isinstance(value, str | os.PathLike) and str(value) and "\0" not in str(value):
        return ""
    return "must be the path of a private key"


def _host_problem(value: object) -> str:
    try:
        # A name with an @ is one of pyinfra's connectors.
        is_host = not host_name(value if isinstance(value, str) else "").startswith("@")
    except NodeSetError:
        is_host = False
    return "" if is_host else "must be a host name or an address"


def _names_problem(value: object) -> str:
    if isinstance(value, list | tuple) and not any(map(_host_problem, value)):
        return ""
    return "must be a list of host names and addresses"


_PROBLEM_OF_KEY: dict[str, Callable[[object], str]] = {
    "ssh_port": _port_problem,
    "ssh_user": _user_problem,
    "ssh_key": _key_problem,
    "ssh_hostname": _host_problem,
    "ssh_names": _names_problem,
}


def connection_problems(data: Mapping[str, Any], source: str) -> list[str]:
    """A line for each wrong value of the keys for ssh in this data. source: of the data

    A key with None or "" is as if it were missing.
    """
    problems = []
    for key, problem_of in _PROBLEM_OF_KEY.items():
        value = data.get(key)
        if value not in (None, "") and (problem := problem_of(value)):
            problems.append(f"{source}: {key} = {value_text(value)}: {problem}")
    return problems


def endpoint(host: Host) -> Endpoint:
    """The address of a node's sshd and the node's names, from the inventory.

    A wrong value is left out, because pyinfra's own command does not check the values.
    """
    data = host.data
    address, port, names = data.get("ssh_hostname"), data.get("ssh_port"), data.get("ssh_names")
    return Endpoint(
        "" if _host_problem(address) else str(address),
        22 if _port_problem(port) else int(port),
        () if _names_problem(names) else tuple(names),
        local=issubclass(host.connector_cls, LocalConnector),
    )


def given_addresses(inventory: Iterable[Host]) -> dict[str, str]:
    """Address -> the node to which the inventory gives it.

    The node's name, its ``ssh_hostname`` and its ``ssh_names`` may be addresses. An address of
    several nodes, or with a port, is left out.
    """
    node_by_address = Names({host.name: endpoint(host) for host in inventory}).owners
    return {
        address: node
        for address, node in node_by_address.items()
        if node and clean_address(address)
    }

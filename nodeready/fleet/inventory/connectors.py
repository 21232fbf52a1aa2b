"""Names of nodes for pyinfra: ``@slurm/4711``, ``@nodeset/gpu[1-4]``, ``@hostfile``, ``@lab``.

pyinfra finds the connectors by the entry points of this package (``pyinfra.connectors``). They
only name nodes; pyinfra then connects to each of them by ssh.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from pyinfra.api.exceptions import InventoryError
from pyinfra.connectors.base import BaseConnector
from typing_extensions import override

from nodeready.core.text import sanitise
from nodeready.fleet.inventory import hostfile, labs, nodeset, slurm
from nodeready.fleet.inventory.trust import SET_VARIABLE, distrust

_LAB_NAME = re.compile(r"[a-z][a-z0-9-]*")

#: A node's name, its data, and its groups.
_Node = tuple[str, dict[str, Any], list[str]]


class SlurmConnector(BaseConnector):
    """``@slurm/4711``: the nodes of this Slurm job. ``@slurm``: as `inventories/slurm.py`.

    The groups of a node are its job's partitions; for ``@slurm``, all partitions of the node.
    """

    @override
    @staticmethod
    def make_names_data(name: str | None = None) -> Iterator[_Node]:
        groups = slurm.job_inventory(name) if name else slurm.inventory()
        for node in groups["all"]:
            partitions = [group for group, nodes in groups.items() if node in nodes]
            yield node, {}, [group for group in partitions if group != "all"]


class NodesetConnector(BaseConnector):
    """``@nodeset/gpu[001-064]``: the nodes of this node set."""

    @override
    @staticmethod
    def make_names_data(name: str | None = None) -> Iterator[_Node]:
        """As pyinfra's. Raises InventoryError, one line."""
        text = name or ""
        try:
            nodes = nodeset.nodes(text)
        except InventoryError as error:
            if text.count("[") <= text.count("]"):
                raise
            # pyinfra divides an inventory at each comma, also within brackets.
            hint = "no comma within brackets: write @nodeset/gpu[1-3],@nodeset/gpu7"
            raise InventoryError(f"{error}; {hint}") from None
        for node in nodes:
            yield node, {}, []


class HostfileConnector(BaseConnector):
    """``@hostfile/PATH``: the nodes of this hostfile; ``@hostfile``: as `hostfile.find`.

    The data of a node is its slots.
    """

    @override
    @staticmethod
    def make_names_data(name: str | None = None) -> Iterator[_Node]:
        hosts = hostfile.read(name or hostfile.find(), remedy=SET_VARIABLE)
        for node, data in hostfile.with_data(hosts):
            yield node, dict(data), []


class LabConnector(BaseConnector):
    """``@lab/NAME``: the nodes of this lab on this machine (``nodeready lab up``).

    ``@lab`` is the lab of NODEREADY_LAB, else the lab ``lab``, else the only one.
    """

    @override
    @staticmethod
    def make_names_data(name: str | None = None) -> Iterator[_Node]:
        """As pyinfra's. Raises InventoryError, one line."""
        name = name or os.environ.get("NODEREADY_LAB") or _usual_lab()
        if not _LAB_NAME.fullmatch(name):
            raise InventoryError(f"@lab/{sanitise(name, 60)}: is no name of a lab")
        if reason := distrust(labs.file_of(name), remedy=SET_VARIABLE):
            raise InventoryError(reason)
        try:
            nodes = labs.read(name)
        except (FileNotFoundError, NotADirectoryError):
            option = "" if name == "lab" else f" --name {name}"
            text = f"the lab {name!r} does not run; start it: nodeready lab up{option}"
            raise InventoryError(text) from None
        except (OSError, ValueError) as error:
            raise InventoryError(f"the lab {name} cannot be read: {error}") from None
        for node, data in nodes.items():
            yield node, data, ["lab"]


def _usual_lab() -> str:
    """The lab that ``@lab`` without a name means. Raises InventoryError if there are several."""
    running = labs.lab_names()
    if "lab" in running or not running:
        return "lab"
    if len(running) > 1:
        raise InventoryError(f"several labs run: {', '.join(f'@lab/{name}' for name in running)}")
    return running[0]


_CONNECTORS: dict[str, Any] = {
    "slurm": SlurmConnector,
    "nodeset": NodesetConnector,
    "hostfile": HostfileConnector,
    "lab": LabConnector,
}


def is_connector(word: str) -> bool:
    """Whether the word names nodes by one of these connectors: ``@slurm/4711``."""
    return word.startswith("@") and word[1:].partition("/")[0] in _CONNECTORS


def names(word: str) -> list[str]:
    """The nodes that a connector's word names. Raises InventoryError, one line."""
    connector, _, argument = word[1:].partition("/")
    return [node for node, _, _ in _CONNECTORS[connector].make_names_data(argument or None)]

"""The nodes on which Slurm runs a job, and the inventory's nodes that are not among them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class JobPlacement:
    """A job in Slurm's records."""

    user: str = ""  # uid of the job's user; "": Slurm knows no such job
    # Slurm's names of the job's nodes; (): not known, as of a job that waits
    nodes: tuple[str, ...] = ()
    # nodes of the inventory on which Slurm does not run the job; without nodes whose name in Slurm
    # is unknown
    other_nodes: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()  # numbers of the further parts of a heterogeneous job


def other_nodes(
    names: Iterable[str], job_nodes: Collection[str], aliases: Mapping[str, Collection[str]]
) -> frozenset[str]:
    """The names, from an inventory, of nodes that are none of the job's nodes.

    job_nodes: Slurm's names of the job's nodes
    aliases:   Slurm's name of each of its nodes -> host name and address

    The inventory may name a node by its name in Slurm, its host name, its address, or one of these
    with or without a domain. A name that fits several nodes must fit none of the job's nodes.

    >>> sorted(other_nodes(["gpu1", "gpu2.site", "x9"], ["gpu1"], {"gpu1": [], "gpu2": []}))
    ['gpu2.site']
    """
    nodes_by_name: dict[str, set[str]] = defaultdict(set)
    nodes_by_label: dict[str, set[str]] = defaultdict(set)
    for node in {*job_nodes, *aliases}:
        for alias in (node, *aliases.get(node, ())):
            nodes_by_name[alias.lower()].add(node)
            nodes_by_label[_first_label(alias)].add(node)
    outside_names = set()
    for name in names:
        slurm_nodes = nodes_by_name.get(name.lower()) or nodes_by_label.get(_first_label(name))
        if slurm_nodes and slurm_nodes.isdisjoint(job_nodes):
            outside_names.add(name)
    return frozenset(outside_names)


def _first_label(name: str) -> str:
    """A host name without its domain; an address stays whole."""
    label = name.lower().partition(".")[0]
    return name if label.isdecimal() or ":" in label else label

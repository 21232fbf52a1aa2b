"""From the looks at all nodes to the document that the reports show."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from nodeready.audit import history, peers
from nodeready.audit.document import Audit, NodeReport
from nodeready.policy import Policy
from nodeready.policy.policy import digest
from nodeready.subjects.context import counted
from nodeready.subjects.nics.facts import Nics
from nodeready.subjects.registry import COUNTING, Selection
from nodeready.text import now
from nodeready.transport.base import Met
from nodeready.transport.look import NOT_LOOKED_AT, Look

if TYPE_CHECKING:
    from pyinfra.api import Inventory

    from nodeready.subjects.context import FleetContext, Judged


def looked_at(selection: Selection) -> tuple[str, ...]:
    """The subjects that have to be observed to judge these checks."""
    subjects = selection.subjects
    counting = any(subject in COUNTING for subject in subjects)
    return tuple(dict.fromkeys((*subjects, "host"))) if counting else subjects


def combined(
    context: FleetContext, looks: Iterable[Look], met: Mapping[str, Met] = MappingProxyType({})
) -> FleetContext:
    """The context with the nodes' addresses, and with the counters of the looks before these.

    met: what this run's connections saw; an address there stays its node's, whoever claims it
    """
    told: list[set[str]] = []
    counting = []
    for one in looks:
        subjects = one.snapshot.subjects if one.snapshot else {}
        if any(name in subjects for name in COUNTING):
            counting.append(one.name)
        nics = subjects.get("nics")
        if isinstance(nics, Nics):
            told.append(
                {
                    address.partition("/")[0]
                    for found in nics.interfaces.values()
                    for address in found.addresses or ()
                }
            )
    return replace(
        context,
        addresses=_addresses(told, met) if len(told) > 1 else None,
        earlier=history.previous(counting),
        moment=time.time(),
    )


def _addresses(told: list[set[str]], met: Mapping[str, Met]) -> tuple[str, ...]:
    """The addresses that exactly one of the nodes has.

    told: what each node says that it has. An address that several have, such as a container
          bridge's, leads to none of them. A node that says more than most do has no more voice in
          where the others' ways lead.
    """
    most = statistics.median_high(map(len, told))
    counts = Counter(one for own in told for one in sorted(own)[:most])
    reached = {one.address for one in met.values()} & counts.keys()
    return tuple(sorted({one for one, count in counts.items() if count == 1} | reached))


def remember(looks: Iterable[Look], context: FleetContext) -> str:
    """Keep the counters of these looks, on this machine; no node is written to.

    Returns a line about what could not be kept, or "".
    """
    kept = {}
    for one in looks:
        if one.snapshot and any(name in one.snapshot.subjects for name in COUNTING):
            found = counted(one.snapshot, context.moment)
            if found is not None:
                kept[one.name] = found
    return history.remember(kept)


def groups(inventory: Inventory, name: str, total: int) -> tuple[str, ...]:
    """The groups that tell this node from others: not those that hold every node."""
    found = inventory.get_host(name).groups
    return tuple(group for group in found if len(inventory.get_group(group)) < total)


def audit_of(
    nodes: Iterable[Judged],
    selection: Selection,
    started: str,
    inventory: Inventory,
    declared: Mapping[str, Policy],
    *,
    complete: bool = True,
) -> Audit:
    """The audit of nodes that were looked at and judged. declared: their policies as written."""
    total = len(inventory)
    reports = []
    for node in nodes:
        error = node.error or ("" if node.reached else NOT_LOOKED_AT)
        reports.append(
            NodeReport.of(
                node.name,
                selection.of(node.results),
                snapshot=node.snapshot,
                seconds=round(node.seconds, 3),
                error=error,
                unreachable=node.unreachable,
                groups=groups(inventory, node.name, total),
            )
        )
    return Audit(
        started,
        now(),
        digest(declared.values()),
        tuple(reports),
        peers.find(reports, selection.subjects),
        complete,
    )

"""From the looks at all nodes to the document that the reports show."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from nodeready import history, outliers
from nodeready.audit import NOT_LOOKED_AT, Audit, NodeReport, now
from nodeready.policy.load import digest
from nodeready.probes import nics as nics_probe
from nodeready.probes.nics import Nics
from nodeready.selection import Selection
from nodeready.subjects import COUNTING

if TYPE_CHECKING:
    from pyinfra.api import Inventory

    from nodeready.session import NodeRun, Session


def looked_at(selection: Selection) -> tuple[str, ...]:
    """The subjects that have to be observed to judge these checks."""
    subjects = selection.subjects
    counting = any(subject in COUNTING for subject in subjects)
    return tuple(dict.fromkeys((*subjects, "host"))) if counting else subjects


def with_peers(nodes: Iterable[NodeRun]) -> None:
    """Complete what each node's network shows by where the other nodes are."""
    seen = {
        node.name: (node, nics)
        for node in nodes
        if node.snapshot and isinstance(nics := node.snapshot.subjects.get("nics"), Nics)
    }
    if len(seen) < 2:
        return
    # An address that several nodes have, such as a container bridge's, leads to none of them.
    counts = Counter(
        address.partition("/")[0]
        for _, nics in seen.values()
        for one in nics.interfaces.values()
        for address in one.addresses or ()
    )
    own = tuple(sorted(address for address, count in counts.items() if count == 1))
    for node, nics in seen.values():
        assert node.snapshot is not None
        subjects = {**node.snapshot.subjects, "nics": nics_probe.with_peers(nics, own)}
        node.snapshot = replace(node.snapshot, subjects=subjects)


def with_history(nodes: Iterable[NodeRun]) -> str:
    """Put the counters of each node's last look beside those of this one, and keep these.

    The history is this machine's, no node is written to. Returns a line about what could not be
    kept, or "".
    """
    moment = time.time()
    seen = {
        node.name: node
        for node in nodes
        if node.snapshot and any(name in node.snapshot.subjects for name in COUNTING)
    }
    earlier = history.previous(seen)
    looks = {}
    for name, node in seen.items():
        assert node.snapshot is not None
        look = history.look(node.snapshot, moment)
        if look is not None:
            looks[name] = look
        node.snapshot = history.with_history(node.snapshot, earlier.get(name), moment)
    return history.remember(looks)


def groups(inventory: Inventory, name: str, total: int) -> tuple[str, ...]:
    """The groups that tell this node from others: not those that hold every node."""
    found = inventory.get_host(name).groups
    return tuple(group for group in found if len(inventory.get_group(group)) < total)


def report(
    session: Session, selection: Selection, started: str, *, complete: bool = True
) -> Audit:
    """The audit of a session whose nodes were looked at and judged."""
    inventory = session.state.inventory
    total = len(inventory)
    reports = []
    for node in session.nodes:
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
        digest(session.declared.values()),
        tuple(reports),
        outliers.find(reports, selection.subjects),
        complete,
    )

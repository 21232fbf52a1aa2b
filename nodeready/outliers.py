"""Nodes that differ from their peers, with or without a policy. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nodeready.audit import NodeReport, Outlier
from nodeready.probes.base import Unknown
from nodeready.snapshot import Snapshot
from nodeready.subjects import SUBJECTS

#: Fewer nodes than this have no majority worth the name: of two that differ, either may be right.
FEWEST = 3
#: The group of nodes that are in none.
ALL = "all"


def compared(snapshot: Snapshot, subjects: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Subject -> its facts that peers should share; a subject that was not observed is missing."""
    found: dict[str, dict[str, Any]] = {}
    for name in subjects:
        seen = snapshot.subjects.get(name)
        if seen is None or isinstance(seen, Unknown):
            continue
        try:
            found[name] = dict(SUBJECTS[name].compared(seen))
        except Exception:  # noqa: BLE001 - a node's answer must never end the run
            continue
    return found


def _in_group(group: str, facts: Mapping[str, dict[str, dict[str, Any]]]) -> Iterator[Outlier]:
    """The outliers among these nodes; facts: node -> subject -> fact -> value."""
    for subject in SUBJECTS:
        seen = {node: found[subject] for node, found in facts.items() if subject in found}
        for fact in dict.fromkeys(name for values in seen.values() for name in values):
            # What a node does not tell differs from nobody: that is the checks' business.
            values = {node: known[fact] for node, known in seen.items() if fact in known}
            (most, count), *_ = Counter(values.values()).most_common(1)
            if len(values) < FEWEST or count * 2 <= len(values):
                continue
            differs = {node: value for node, value in values.items() if value != most}
            if differs:
                yield Outlier(f"{subject}.{fact}", group, most, count, differs)


def find(nodes: Iterable[NodeReport], subjects: Iterable[str]) -> tuple[Outlier, ...]:
    """What nodes of the same groups do not have in common with most of them.

    Nodes are peers when they are in the same groups of the inventory. A fact has a majority when
    more than half of the peers that tell it have one value.
    """
    chosen = tuple(subjects)
    peers: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for node in nodes:
        if node.snapshot is not None:
            group = ",".join(node.groups) or ALL
            peers.setdefault(group, {})[node.name] = compared(node.snapshot, chosen)
    return tuple(outlier for group in peers for outlier in _in_group(group, peers[group]))

"""Nodes that differ from the majority of their peers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nodeready.agent.audit_document import Outlier
from nodeready.core.base import Unknown
from nodeready.core.result import FleetFacts
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.snapshot import Snapshot

#: Fewer nodes have no majority: of two that differ, either may be right.
_MIN_PEERS = 3
#: The group of nodes without a group.
ALL = "all"


def compared(
    snapshot: Snapshot, fleet: FleetFacts, subjects: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Subject -> its facts that peers should share; a subject that was not observed is missing."""
    facts: dict[str, dict[str, Any]] = {}
    for name in subjects:
        observed = snapshot.subjects.get(name)
        if observed is None or isinstance(observed, Unknown):
            continue
        try:
            facts[name] = dict(SUBJECTS[name].compared(observed, fleet))
        except Exception:  # noqa: BLE001 - a node's answer must never end the run
            continue
    return facts


#: Subject -> its facts. Equal facts of thousands of nodes are one object and are counted at once.
Facts = Mapping[str, Mapping[str, Any]]


def _in_group(group: str, facts: Mapping[str, Facts]) -> Iterator[Outlier]:
    """The outliers among these nodes, by name."""
    names = list(facts)
    for subject in SUBJECTS:
        kinds: dict[int, tuple[Mapping[str, Any], list[int]]] = {}
        for number, node_facts in enumerate(facts.values()):
            subject_facts = node_facts.get(subject)
            if subject_facts:
                kinds.setdefault(id(subject_facts), (subject_facts, []))[1].append(number)
        # An absent fact is not a difference: the checks judge absence.
        names_of_facts = (fact for subject_facts, _ in kinds.values() for fact in subject_facts)
        for fact in dict.fromkeys(names_of_facts):
            counts: Counter[Any] = Counter()
            for subject_facts, numbers in kinds.values():
                if fact in subject_facts:
                    counts[subject_facts[fact]] += len(numbers)
            (majority, count), *_ = counts.most_common(1)
            total = sum(counts.values())
            if total < _MIN_PEERS or count * 2 <= total:
                continue
            differs = sorted(
                (number, subject_facts[fact])
                for subject_facts, numbers in kinds.values()
                if fact in subject_facts and subject_facts[fact] != majority
                for number in numbers
            )
            if differs:
                values = {names[number]: value for number, value in differs}
                yield Outlier(f"{subject}.{fact}", group, majority, count, values)


def find_outliers(peers: Mapping[str, Mapping[str, Facts]]) -> tuple[Outlier, ...]:
    """The facts in which nodes differ from the majority of their group; by group, then by name."""
    return tuple(outlier for group in peers for outlier in _in_group(group, peers[group]))


def key_of(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """A key that equal facts share; True and 1 differ."""
    return (*facts.items(), *map(type, facts.values()))

"""What most nodes of a fleet have in common: who differs from it, and it as a policy. Pure."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

from nodeready.audit.document import Outlier
from nodeready.inventory.nodeset import fold
from nodeready.policy.policy import PolicyError, check_settings, kind_of, reason
from nodeready.subjects.base import Unknown
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.snapshot import Snapshot
from nodeready.text import sanitise

#: Fewer nodes than this have no majority worth the name: of two that differ, either may be right.
FEWEST = 3
#: In a learnt file, so many of the names that only few nodes have are told: a node can have any.
_MOST_FEW = 20
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


#: Subject -> its facts. Of thousands of nodes, equal ones are one object, and are counted at once.
Facts = Mapping[str, Mapping[str, Any]]


def _in_group(group: str, facts: Mapping[str, Facts]) -> Iterator[Outlier]:
    """The outliers among these nodes, by name."""
    names = list(facts)
    for subject in SUBJECTS:
        kinds: dict[int, tuple[Mapping[str, Any], list[int]]] = {}
        for number, found in enumerate(facts.values()):
            own = found.get(subject)
            if own:
                kinds.setdefault(id(own), (own, []))[1].append(number)
        # A fact that a node does not tell is no difference: the checks judge that.
        for fact in dict.fromkeys(fact for own, _ in kinds.values() for fact in own):
            counts: Counter[Any] = Counter()
            for own, numbers in kinds.values():
                if fact in own:
                    counts[own[fact]] += len(numbers)
            (most, count), *_ = counts.most_common(1)
            total = sum(counts.values())
            if total < FEWEST or count * 2 <= total:
                continue
            differs = sorted(
                (number, own[fact])
                for own, numbers in kinds.values()
                if fact in own and own[fact] != most
                for number in numbers
            )
            if differs:
                told = {names[number]: value for number, value in differs}
                yield Outlier(f"{subject}.{fact}", group, most, count, told)


def differing(peers: Mapping[str, Mapping[str, Facts]]) -> tuple[Outlier, ...]:
    """What nodes of a group do not have in common with most of it; by group, then by name."""
    return tuple(outlier for group in peers for outlier in _in_group(group, peers[group]))


def key_of(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """What equal facts have in common: True is none of 1."""
    return (*facts.items(), *map(type, facts.values()))


# --- `nodeready learn`: the majority as a group_data file for a person to review.
#
# Snapshots go in, and a Python text comes out that validates as it is.

#: Columns of the file; a comment goes on in the next line.
WIDTH = 88


@dataclass
class Learned:
    """One setting of the fleet.

    value:  what most nodes have, as group_data holds it; None: there is no such majority
    notes:  how many nodes have it, and who has what else
    """

    key: str
    value: Any = None
    notes: list[str] = field(default_factory=list)


def _plain(value: Any) -> Any:
    """A value that can be counted: lists as tuples."""
    return tuple(value) if isinstance(value, list) else value


def _majority(values: Mapping[str, Any]) -> tuple[Any, str]:
    """The value that more than half of the nodes have, or None; and who has which."""
    counts = Counter(values.values())
    (most, count), *_ = counts.most_common(1)
    if count * 2 <= len(values):
        return None, f"no majority among {len(values)} nodes: {_who(values, None)}"
    others = {name: value for name, value in values.items() if value != most}
    text = f"{count} of {len(values)} nodes"
    return most, f"{text}; {_who(others, most)}" if others else text


def _who(values: Mapping[str, Any], most: Any) -> str:
    found: dict[Any, list[str]] = {}
    for name, value in values.items():
        found.setdefault(value, []).append(name)
    ranked = sorted(found.items(), key=lambda item: -len(item[1]))
    texts = [f"{fold(names)}: {value!r}" for value, names in ranked[:4]]
    return "; ".join(texts) + ("; …" if len(ranked) > len(texts) else "")


def _table(key: str, rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Learned:
    """A setting that maps names to columns: each name and each column has its own majority."""
    found = Learned(key, {})
    told: dict[str, dict[str, Mapping[str, Any]]] = {}
    for node, table in rows.items():
        for name, row in table.items():
            told.setdefault(name, {})[node] = row
    few = 0
    for name, having in told.items():
        if len(having) * 2 <= len(rows):
            few += 1
            if few <= _MOST_FEW:
                found.notes.append(f"{name} is left out: only on {fold(having)}")
            continue
        missing = [node for node in rows if node not in having]
        if missing:
            found.notes.append(f"{name} is missing on {fold(missing)}")
        found.value[name] = {}
        for column in dict.fromkeys(column for row in having.values() for column in row):
            values = {node: row[column] for node, row in having.items() if column in row}
            most, note = _majority(values)
            if most is not None:
                found.value[name][column] = most
            if most is None or len(set(values.values())) > 1:
                found.notes.append(f"{name} {column}: {note}")
    if few > _MOST_FEW:
        found.notes.append(f"and {few - _MOST_FEW} more that few nodes have are left out")
    if found.value and not found.notes:
        found.notes.append(f"{len(rows)} of {len(rows)} nodes")
    return found


def majority(snapshots: Mapping[str, Snapshot]) -> list[Learned]:
    """The settings that these nodes, by name, have in common; in the order of the subjects."""
    seen: dict[str, dict[str, Any]] = {}
    for subject in SUBJECTS.values():
        for node, snapshot in snapshots.items():
            observed = snapshot.subjects.get(subject.name)
            if observed is None or isinstance(observed, Unknown):
                continue
            try:
                settings = subject.learned(observed)
            except Exception:  # noqa: BLE001 - a node's answer must never end the run
                continue
            for key, value in settings.items():
                seen.setdefault(key, {})[node] = value
    found = []
    for key, values in seen.items():
        if kind_of(key).named:
            found.append(_table(key, values))
            continue
        most, note = _majority({node: _plain(value) for node, value in values.items()})
        found.append(Learned(key, most, [note]))
    return [_valid(one) for one in found]


def _valid(one: Learned) -> Learned:
    """The setting, without its value where that would not be accepted as it is."""
    if one.value in (None, {}):
        one.value = None
        return one
    try:
        check_settings({one.key: one.value}, "learned")
    except PolicyError as error:
        one.notes.append(f"left out, it is no valid setting: {error.problems[0]}")
        one.value = None
    return one


def _comment(text: str) -> list[str]:
    # Sanitised, a node's own words cannot end the comment.
    return wrap(sanitise(text), WIDTH, initial_indent="# ", subsequent_indent="#   ")


def _assigned(one: Learned) -> list[str]:
    if not isinstance(one.value, dict):
        return [f"{one.key} = {one.value!r}"]
    rows = [f"    {name!r}: {row!r}," for name, row in sorted(one.value.items())]
    return [f"{one.key} = {{", *rows, "}"]


def render(learned: Sequence[Learned], nodes: Sequence[str], when: str) -> str:
    """The group_data file. It is data: evaluating it runs nothing of a node's."""
    head = f"What most of {fold(nodes)} ({len(nodes)} nodes) had in common on {when}."
    lines = [
        *_comment(head),
        *_comment("Review it: what is common is not always right. Then name it after the group."),
    ]
    for one in learned:
        lines.append("")
        # Its first sentence; "e.g." ends none.
        meaning = re.split(r"(?<=[.]) (?=[A-Z])", reason(one.key))[0]
        for text in (meaning, *one.notes):
            lines += _comment(text)
        lines += _assigned(one) if one.value is not None else [f"# {one.key} is not set."]
    text = "\n".join(lines) + "\n"
    check_settings(_read(text), "learned")
    return text


def _read(text: str) -> dict[str, Any]:
    """The settings of such a file, as pyinfra would find them."""
    return {
        ast.unparse(statement.targets[0]): ast.literal_eval(statement.value)
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Assign)
    }

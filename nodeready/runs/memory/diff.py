"""The document of `nodeready diff`: the changes of all nodes, the likely cause of failures first.

Pure: looks go in. Equal changes of many nodes are one change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from nodeready.core.fact_kinds import COUNTER, HARDWARE
from nodeready.core.json_types import Count, MomentOrEmpty, Name, Names
from nodeready.core.outcome import NodeGaps, gaps_code
from nodeready.core.result import STATUSES
from nodeready.runs.memory.changes import KINDS, POLICY, RESULT, Change, is_failing
from nodeready.runs.memory.look import NodeLook, Value

_Value = Annotated[Value, {"type": ["string", "number", "boolean", "null"]}]


@dataclass(frozen=True)
class NodeChanges:
    """The changes of one node."""

    node: str
    changes: tuple[Change, ...]
    was_failing: bool  # whether the node could get no job before and after
    is_failing: bool  # likewise

    @classmethod
    def of(cls, before: NodeLook, after: NodeLook, changes: tuple[Change, ...]) -> NodeChanges:
        """The changes, with both states of the node."""
        return cls(after.node, changes, is_failing(before), is_failing(after))


@dataclass(frozen=True)
class FleetChange:
    """One change, and the nodes that have it."""

    # of the change: the status of a check; hardware, version, setting, counter; reboot; policy:
    # what the nodes are compared with, no change of a node
    kind: Annotated[str, {"enum": KINDS}]
    # the fact, ``SUBJECT.PATH``, with the names of elements in brackets; of several elements with
    # the same change ``[*]``; the check; ``answer``: the node answered or not; the settings of the
    # policy
    key: Name
    elements: tuple[str, ...]  # the names that ``[*]`` stands for
    before: _Value  # value or status; null: it was not there, or it differs among the nodes
    after: _Value  # as before
    note: str  # what the values do not show: a part's move, a check's value, a counter's growth
    part: str  # what was replaced, added or removed: before and after identify it; "": no part
    nodes: Names  # that have the change
    failing: Count = 0  # number of these nodes that fail
    healthy: Count = 0  # number of these nodes that do not fail
    # the change is more common on failing nodes than on healthy nodes, and most nodes that have it
    # fail
    suspect: bool = False
    since: MomentOrEmpty = ""  # when it was first seen, UTC; "": unknown


@dataclass(frozen=True)
class Side:
    """One of the two sides that are compared."""

    source: str  # a file, the nodes now, the memory, a node or a group
    time: MomentOrEmpty  # of the oldest look of it, UTC; "": it has none


@dataclass(frozen=True)
class Diff:
    """The document of `nodeready diff`. Text is one line without control characters."""

    SCHEMA: ClassVar = "diff"
    VERSION: ClassVar = 2

    before: Side  # the earlier side, or the model
    after: Side  # the later side
    compared: Count  # number of nodes that both sides have
    healthy: Count  # number of these nodes that do not fail after
    # nodes whose failure the changes may explain: they fail after, and did not before; without
    # any, the nodes that fail after
    failing: tuple[str, ...]
    only_before: tuple[str, ...]  # nodes that only the first side has
    only_after: tuple[str, ...]  # nodes that only the second side has
    changes: tuple[FleetChange, ...]  # suspects first, then results, then other changes
    gaps: NodeGaps = ()  # the nodes that gave no answer for this comparison
    complete: bool = True  # False when it was interrupted


def diff_code(diff: Diff, *, is_strict: bool) -> int:
    """The exit code; ``is_strict``: a difference is a finding."""
    return gaps_code(
        [gap for gap in diff.gaps if gap.gap.is_unreached],
        complete=diff.complete,
        usage=not diff.compared,
        check=is_strict and any(change.kind != POLICY for change in diff.changes),
    )


def compare(pairs: Iterable[NodeChanges], before: Side, after: Side, **values: Any) -> Diff:
    """The document of these nodes. values: its fields without the changes"""
    every = list(pairs)
    failing = {node.node for node in every if node.is_failing and not node.was_failing}
    failing = failing or {node.node for node in every if node.is_failing}
    healthy = {node.node for node in every if not node.is_failing}
    rows = [(node.node, change) for node in every for change in node.changes]
    folded = _elements_folded(_nodes_folded(_moves_folded(rows)))
    judged = []
    for change in folded:
        bad, good = (len(nodes.intersection(change.nodes)) for nodes in (failing, healthy))
        is_suspect = change.kind != RESULT and bad > good and bool(healthy)
        is_suspect = is_suspect and bad * len(healthy) > good * len(failing)
        judged.append(replace(change, failing=bad, healthy=good, suspect=is_suspect))
    judged.sort(key=lambda change: _order(change, len(failing), len(healthy)))
    return Diff(
        before,
        after,
        compared=len(every),
        healthy=len(healthy),
        failing=tuple(node.node for node in every if node.node in failing),
        changes=tuple(judged),
        **values,
    )


def _order(change: FleetChange, failing: int, healthy: int) -> tuple[object, ...]:
    # Youden's index: 1 separates the failing nodes from the healthy nodes, 0 tells nothing.
    index = change.failing / failing - change.healthy / healthy if change.suspect else 0.0
    status = STATUSES.index(change.after) if change.after in STATUSES else -1
    urgency = not change.suspect, -index, KINDS.index(change.kind)
    return (*urgency, status if change.kind == RESULT else 0, -len(change.nodes), change.key)


# --- Equal changes as one.

_Pairs = Iterable[tuple[str, Change]]


def _moves_folded(pairs: _Pairs) -> list[tuple[tuple[str, ...], Change]]:
    """(nodes, change); the two halves of a part's move are one change of both nodes.

    A part that came where another part went is a replacement, unless either is elsewhere now.
    """
    rows: list[tuple[tuple[str, ...], Change]] = []
    parts: list[tuple[str, Change]] = []
    for node, change in pairs:
        if change.part and change.kind == HARDWARE:
            parts.append((node, change))
        else:
            rows.append(((node,), change))
    gone = _unique_places(parts, [change.before for _, change in parts])
    came = _unique_places(parts, [change.after for _, change in parts])
    moved = [identity for identity in gone if identity in came]
    for identity in moved:
        (old_node, old), (new_node, new) = gone[identity], came[identity]
        places = f"{old_node} {old.key}", f"{new_node} {new.key}"
        change = Change(HARDWARE, new.key, *places, f"{identity} moved", new.part)
        rows.append((tuple(dict.fromkeys((old_node, new_node))), change))
    for node, change in parts:
        before = None if change.before in moved else change.before
        after = None if change.after in moved else change.after
        if before is not None or after is not None:
            note = change.note
            if (before, after) != (change.before, change.after):
                note = "new" if before is None else "gone"
            rows.append(((node,), replace(change, before=before, after=after, note=note)))
    return rows


def _unique_places(
    parts: Sequence[tuple[str, Change]], identities: Sequence[Value]
) -> dict[Value, tuple[str, Change]]:
    """Identity -> its node and change, of the parts that are in one place only."""
    counts, places = Counter(identities), zip(identities, parts, strict=True)
    return {i: part for i, part in places if i is not None and counts[i] == 1}


def _nodes_folded(rows: Iterable[tuple[tuple[str, ...], Change]]) -> list[FleetChange]:
    """A change for all nodes that have it. Counters may have grown by different amounts."""
    groups: dict[object, list[tuple[tuple[str, ...], Change]]] = {}
    for nodes, change in rows:
        key: object = (change.kind, change.key, type(change.before), change.before, change.after)
        if change.kind == COUNTER:
            key = (change.kind, change.key, change.note.lstrip("0123456789"))
        elif change.part:
            key = (change, nodes)
        groups.setdefault(key, []).append((nodes, change))
    folded = []
    for group in groups.values():
        change = group[0][1]
        notes = list(dict.fromkeys(change.note for _, change in group))
        note = notes[0]
        if len(notes) > 1 and change.kind == COUNTER:
            amounts = sorted(notes, key=lambda text: int(text.partition(" ")[0]))
            note = f"{amounts[0].partition(' ')[0]} to {amounts[-1]}"
        elif len(notes) > 1:
            note = f"e.g. {note}"
        values = {(change.before, change.after) for _, change in group}
        before, after = values.pop() if len(values) == 1 else (None, None)
        names = tuple(dict.fromkeys(name for nodes, _ in group for name in nodes))
        words = (), before, after, note, change.part, names
        folded.append(FleetChange(change.kind, change.key, *words))
    return folded


def _elements_folded(changes: Iterable[FleetChange]) -> list[FleetChange]:
    """A change for all elements of a list that have it on the same nodes."""
    groups: dict[object, list[tuple[str, FleetChange]]] = {}
    for change in changes:
        head, bracket, tail = change.key.partition("[")
        name, _, inner = tail.partition("]")
        key: object = id(change)
        if bracket and inner and not change.part:
            key = (change.kind, head, inner, type(change.before), change.before, change.after)
            key = (key, change.note, change.nodes)
        groups.setdefault(key, []).append((name, change))
    folded = []
    for group in groups.values():
        name, change = group[0]
        if len(group) > 1:
            key = change.key.replace(f"[{name}]", "[*]", 1)
            change = replace(change, key=key, elements=tuple(name for name, _ in group))
        folded.append(change)
    return folded

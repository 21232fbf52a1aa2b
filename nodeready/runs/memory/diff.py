"""The document of `nodeready diff`: the changes of all nodes, the likely cause of failures first.

Equal changes of many nodes are one change. Below, the looks that are compared.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar

from nodeready.core import wire
from nodeready.core.exit_codes import Refused
from nodeready.core.files import only_regular
from nodeready.core.json_types import Count, MomentOrEmpty, Name, Names
from nodeready.core.outcome import NodeGaps, gaps_code
from nodeready.core.result import COUNTER, HARDWARE, SETTING, STATUSES, Result
from nodeready.core.text import utc_moment
from nodeready.runs.memory.changes import (
    KINDS,
    POLICY,
    RESULT,
    Change,
    changes,
    differences,
    is_failing,
)
from nodeready.runs.memory.look import NodeLook, Value, compared_facts
from nodeready.runs.memory.store import Memory

_Value = Annotated[Value, {"type": ["string", "number", "boolean", "null"]}]


@dataclass(frozen=True)
class NodeChanges:
    node: str
    changes: tuple[Change, ...]
    was_failing: bool  # whether the node could get no job before and after
    is_failing: bool  # likewise

    @classmethod
    def of(cls, before: NodeLook, after: NodeLook, changes: tuple[Change, ...]) -> NodeChanges:
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


@dataclass(frozen=True, kw_only=True)
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
    only_before: tuple[str, ...] = ()  # nodes that only the first side has
    only_after: tuple[str, ...] = ()  # nodes that only the second side has
    changes: tuple[FleetChange, ...]  # suspects first, then results, then other changes
    gaps: NodeGaps = ()  # the nodes that gave no answer for this comparison
    complete: bool = True  # False when it was interrupted


def diff_code(diff: Diff, *, is_strict: bool) -> int:
    """The exit code; ``is_strict``: a difference is a finding."""
    gaps = [gap for gap in diff.gaps if gap.gap.is_unreached]
    check = is_strict and any(change.kind != POLICY for change in diff.changes)
    return gaps_code(gaps, complete=diff.complete, usage=not diff.compared, check=check)


def compare(pairs: Iterable[NodeChanges], before: Side, after: Side, **values: Any) -> Diff:
    """The document of these nodes. values: of its further fields"""
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
        before=before, after=after, compared=len(every), healthy=len(healthy),
        failing=tuple(node.node for node in every if node.node in failing), changes=tuple(judged),
        **values,
    )  # fmt: skip


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


# --- The looks with which nodes are compared: of a time, when they were good, of peers, of files.

#: Maximum nodes whose lives are read for the times of changes, and of one change: 0.5 s.
_MAX_DATED, _MAX_DATED_OF_CHANGE = 256, 4
#: Changes of a node after which none of them has a time: a node may change at every look.
_MAX_TIMES = 10_000

_BEFORE_S = 0.001  # seconds before a look at which the memory still has the look before it

_Pair = tuple[NodeLook | None, NodeLook]


def looks_since(
    memory: Memory, names: Iterable[str], since_s: float, until_s: float
) -> Iterator[_Pair]:
    """(before, after) of each of these nodes that the memory has; before: None for a new node."""
    changed = memory.changed(since_s, until_s)
    for after in memory.nodes(names, until_s):
        yield memory.node(after.node, since_s) if after.node in changed else after, after


def looks_since_good(memory: Memory, names: Iterable[str], until_s: float) -> Iterator[_Pair]:
    """As `looks_since`, from each node's last look without a failure. Nodes that are good are
    compared since the earliest of these times, so that they show which changes are harmless.
    before: None for a node that was never good.
    """
    after = {look.node: look for look in memory.nodes(names, until_s)}
    failing = [name for name, look in after.items() if is_failing(look)]
    before: dict[str, NodeLook | None] = {}
    for name in failing:
        life = [look for look in memory.life(name) if look.time_s <= until_s]
        good = [number for number, look in enumerate(life[:-1]) if not is_failing(look)]
        moment_s = life[good[-1] + 1].time_s - _BEFORE_S if good else 0.0
        before[name] = memory.node(name, moment_s) if good else None
    since_s = min((look.time_s for look in before.values() if look is not None), default=until_s)
    healthy = [name for name in after if name not in before]
    earlier = {look.node: old for old, look in looks_since(memory, healthy, since_s, until_s)}
    for name, look in after.items():
        yield before[name] if name in before else earlier.get(name), look


def since_changes(pairs: Iterable[_Pair]) -> Iterator[NodeChanges]:
    """The changes of each node between its two looks, of the nodes that have both."""
    for before, after in pairs:
        if before is not None:
            yield NodeChanges.of(before, after, changes(before, after))


def peer_differences(model: NodeLook, nodes: Iterable[NodeLook]) -> Iterator[NodeChanges]:
    for node in nodes:
        yield NodeChanges(node.node, differences(model, node), False, is_failing(node))


def setting_differences(
    node: str, model: Mapping[str, Any], settings: Mapping[str, Any]
) -> NodeChanges:
    """In what a node differs from the settings of a file, as `learned` has them. A setting of
    several values allows each of them. A setting that is only in one is no difference: a person
    chooses what the file has.
    """
    every, allowed = [], _flat(model)
    for key, value in _flat(settings).items():
        expected = allowed.get(key, value)
        is_allowed = expected == value
        if isinstance(expected, (list, tuple)):
            is_allowed = {*expected} >= ({*value} if isinstance(value, (list, tuple)) else {value})
        if not is_allowed:
            every.append(Change(SETTING, key, _shown(expected), _shown(value)))
    return NodeChanges(node, tuple(every), False, False)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Key -> value; a table's cells have keys such as ``nics[eth0].mtu``."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            for name, row in value.items():
                cells = row if isinstance(row, Mapping) else {}
                flat.update({f"{key}[{name}].{column}": cell for column, cell in cells.items()})
        else:
            flat[key] = value
    return flat


def _shown(value: Any) -> Value:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def majority(looks: Collection[NodeLook]) -> NodeLook:
    """A look with the facts and results that more than half of these nodes have."""
    answered = [look for look in looks if not look.error]
    facts: Counter[tuple[str, type, Value]] = Counter()
    results: Counter[tuple[str, str]] = Counter()
    for look in answered:
        facts.update((key, type(value), value) for key, value in look.facts.items())
        results.update((check, result.status) for check, result in look.results.items())
    least = len(answered) / 2
    time_s = min((look.time_s for look in answered), default=0.0)
    error = "" if answered else "no node of the group answered"
    common_facts = {key: value for (key, _, value), count in facts.items() if count > least}
    rows = ((check, r) for look in reversed(answered) for check, r in look.results.items())
    common_results = {r.check: r for check, r in rows if results[check, r.status] > least}
    return NodeLook("", time_s, "", 0, error, common_facts, {}, common_results)


# --- When a change was seen.


def dated(diff: Diff, memory: Memory, since_s: float, until_s: float) -> Diff:
    """The diff with the times at which its changes were first seen, of as many as a second allows.

    An error counter is dated from its first growth, anything else from its present value.
    """
    times: dict[str, _Times] = {}
    dated_changes = []
    for change in diff.changes:
        moments = []
        for name in change.nodes[-_MAX_DATED_OF_CHANGE:]:
            if name not in times and len(times) < _MAX_DATED:
                times[name] = _times(memory, name, since_s, until_s)
            elements = [f"[{element}]" for element in change.elements] or ["[*]"]
            keys = (change.key.replace("[*]", element, 1) for element in elements)
            moments += [times.get(name, {}).get((change.kind, key)) for key in keys]
        times_s = [moment for moment in moments if moment is not None]
        since = utc_moment(min(times_s)) if times_s else ""
        dated_changes.append(replace(change, since=since))
    return replace(diff, changes=tuple(dated_changes))


_Times = dict[tuple[str, str], float]  # (kind, key) of each change of a node -> its time


def _times(memory: Memory, name: str, since_s: float, until_s: float) -> _Times:
    times: _Times = {}
    earlier = memory.node(name, since_s)
    for look in memory.life(name):
        if since_s < look.time_s <= until_s:
            for change in changes(earlier, look) if earlier is not None else ():
                if change.kind != COUNTER or (change.kind, change.key) not in times:
                    times[change.kind, change.key] = look.time_s
            earlier = look
        if len(times) > _MAX_TIMES:
            return {}
    return times


# --- Looks from the documents of audit and ready in files.

_MAX_FILE = 2 << 30  # bytes of a file; 30,000 nodes have some 1 GB
#: Bytes of memory for a document without a line for each node; a node has another bound.
_MAX_WHOLE = 1 << 30
_SCHEMA = re.compile(r"nodeready\.(audit|ready)/[12]\Z")
#: A node in the layout in which the reports write JSON, and the rows around the nodes.
_ROW = re.compile(rb'\{"name":("(?:[^"\\]|\\.)*")')
_FIRST, _LAST = b'"nodes": [', b"],"


class DocumentError(Refused):
    """A file that is no document of audit or ready: one line."""


class AuditFile:
    """The nodes of a JSON file of `audit` or `ready`. A node is read when it is asked for.
    started: when the audit began, UTC. names: in the order of the file. Raises DocumentError.
    """

    def __init__(self, source: str, data: bytes) -> None:
        self._source = source
        # Node -> its row; a row that has a line in the file stays a line.
        self._rows: dict[str, Any] = {}
        document = self._decoded(self._without_rows(data), _MAX_WHOLE)
        if not isinstance(document, dict) or not _SCHEMA.match(str(document.get("schema"))):
            advice = "make it with --format json -o FILE"
            raise DocumentError(f"{source}: no document of audit or ready: {advice}")
        with self._defects("nodes"):
            self._rows |= {str(row["name"]): row for row in document["nodes"]}
            # Node -> why it gave no answer; a document of version 1 has it in the node's row.
            self._reasons = {gap["node"]: gap["reason"] for gap in document.get("gaps", ())}
        self.names = tuple(self._rows)
        self.started = str(document.get("started"))
        with self._defects("started"):
            moment = datetime.fromisoformat(self.started.replace("Z", "+00:00"))
            self._time_s = moment.timestamp()

    @classmethod
    def read(cls, path: Path) -> AuditFile:
        """The document of this file. Raises DocumentError."""
        try:
            with open(path, "rb", opener=only_regular) as file:
                data = file.read(_MAX_FILE + 1)
        except OSError as error:
            raise DocumentError(f"{path}: {error.strerror}") from None
        if len(data) > _MAX_FILE:
            raise DocumentError(f"{path}: larger than {_MAX_FILE >> 30} GiB")
        return cls(str(path), data)

    def _without_rows(self, data: bytes) -> bytes:
        """The document without the nodes that have a line each."""
        lines = data.split(b"\n")
        if _FIRST not in lines:
            return data
        first = lines.index(_FIRST) + 1
        last = lines.index(_LAST, first) if _LAST in lines[first:] else first
        for row in lines[first:last]:
            if match := _ROW.match(row):
                self._rows[str(self._decoded(match[1], wire.MAX_COST))] = row.rstrip(b",")
        return b"\n".join((*lines[:first], *lines[last:]))

    def _decoded(self, data: bytes, max_cost: int) -> Any:
        with self._defects(""):
            return wire.load_json(data, max_cost)

    @contextlib.contextmanager
    def _defects(self, part: str) -> Iterator[None]:
        """Data of another shape in this part, as DocumentError."""
        try:
            yield
        except wire.DecodeError as error:
            part = error.defect
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError):
            pass
        else:
            return
        raise DocumentError(f"{self._source}: is no document of audit or ready ({part})")

    def look(self, name: str) -> NodeLook:
        """The look at one of ``names``. Raises DocumentError."""
        row = self._rows[name]
        if isinstance(row, bytes):
            row = self._decoded(row, wire.MAX_COST)
        stable: dict[str, Value] = {}
        totals: dict[str, int] = {}
        with self._defects(f"node {name[:80]}"):
            for subject, facts in row["facts"].items():
                compared = compared_facts(subject, facts)
                stable.update(compared.stable)
                totals.update(compared.counters)
            results = {}
            for result in row["results"]:
                check, status, actual = result["check"], result["status"], result.get("actual", "")
                if status in STATUSES:
                    results[check] = Result(check, status, actual=str(actual))
            boot_id = str(row["facts"].get("host", {}).get("boot_id") or "")
            error = str(self._reasons.get(name) or row.get("error", ""))
        return NodeLook(name, self._time_s, boot_id, 0, error, stable, totals, results)

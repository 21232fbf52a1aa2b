"""The looks with which nodes are compared: of a time, of when they were good, of their peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nodeready.core.fact_kinds import COUNTER, SETTING
from nodeready.core.text import utc_moment
from nodeready.runs.memory.changes import Change, changes, differences, is_failing
from nodeready.runs.memory.diff import Diff, NodeChanges
from nodeready.runs.memory.look import NodeLook, Value
from nodeready.runs.memory.store import Memory

#: Maximum nodes whose lives are read for the times of changes, and of one change: 0.5 s.
_MAX_DATED, _MAX_DATED_OF_CHANGE = 256, 4
#: Changes of a node after which none of them has a time: a node may change at every look.
_MAX_TIMES = 10_000

#: Seconds before a look at which the memory still has the look before it.
_BEFORE_S = 0.001

_Pair = tuple[NodeLook | None, NodeLook]


def looks_since(
    memory: Memory, names: Iterable[str], since_s: float, until_s: float
) -> Iterator[_Pair]:
    """(before, after) of each of these nodes that the memory has; before: None for a new node."""
    changed = memory.changed(since_s, until_s)
    for after in memory.nodes(names, until_s):
        yield memory.node(after.node, since_s) if after.node in changed else after, after


def looks_since_good(memory: Memory, names: Iterable[str], until_s: float) -> Iterator[_Pair]:
    """As `looks_since`, from each node's last look without a failure.

    Nodes that are good are compared since the earliest of these times, so that they show which
    changes are harmless. before: None for a node that was never good.
    """
    after = {look.node: look for look in memory.nodes(names, until_s)}
    failing = [name for name, look in after.items() if is_failing(look)]
    before = {name: _last_good(memory, name, until_s) for name in failing}
    since_s = min((look.time_s for look in before.values() if look is not None), default=until_s)
    healthy = [name for name in after if name not in before]
    earlier = {look.node: old for old, look in looks_since(memory, healthy, since_s, until_s)}
    for name, look in after.items():
        yield before[name] if name in before else earlier.get(name), look


def _last_good(memory: Memory, name: str, until_s: float) -> NodeLook | None:
    """A node that fails, when it was last good."""
    life = [look for look in memory.life(name) if look.time_s <= until_s]
    good = [number for number, look in enumerate(life[:-1]) if not is_failing(look)]
    return memory.node(name, life[good[-1] + 1].time_s - _BEFORE_S) if good else None


def since_changes(pairs: Iterable[_Pair]) -> Iterator[NodeChanges]:
    """The changes of each node between its two looks, of the nodes that have both."""
    for before, after in pairs:
        if before is not None:
            yield NodeChanges.of(before, after, changes(before, after))


def peer_differences(model: NodeLook, nodes: Iterable[NodeLook]) -> Iterator[NodeChanges]:
    """In what each node differs from the model."""
    for node in nodes:
        yield NodeChanges(node.node, differences(model, node), False, is_failing(node))


def setting_differences(
    node: str, model: Mapping[str, Any], settings: Mapping[str, Any]
) -> NodeChanges:
    """In what a node differs from the settings of a file, as `learned` has them.

    A setting of several values allows each of them. A setting that is only in one is no
    difference: a person chooses what the file has.
    """
    every, allowed = [], _flat(model)
    for key, value in _flat(settings).items():
        expected = allowed.get(key, value)
        if isinstance(expected, (list, tuple)):
            is_allowed = {*expected} >= ({*value} if isinstance(value, (list, tuple)) else {value})
        else:
            is_allowed = expected == value
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
    common_results = {
        result.check: result
        for look in reversed(answered)
        for check, result in look.results.items()
        if results[check, result.status] > least
    }
    return NodeLook("", time_s, "", 0, error, common_facts, {}, common_results)


# --- When a change was seen.


def dated(diff: Diff, memory: Memory, since_s: float, until_s: float) -> Diff:
    """The diff with the times at which its changes were first seen, of as many as a second allows.

    An error counter is dated from its first growth, anything else from its present value.
    """
    times: dict[str, dict[tuple[str, str], float]] = {}
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


def _times(
    memory: Memory, name: str, since_s: float, until_s: float
) -> dict[tuple[str, str], float]:
    """(kind, key) of each change of the node -> its time."""
    times: dict[tuple[str, str], float] = {}
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

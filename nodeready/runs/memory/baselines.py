"""The looks with which nodes are compared: of a time, when they were good, of peers, of files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from nodeready.core import wire
from nodeready.core.fact_kinds import COUNTER, SETTING
from nodeready.core.files import only_regular
from nodeready.core.result import STATUSES, Result
from nodeready.core.text import utc_moment
from nodeready.runs.memory.changes import Change, changes, differences, is_failing
from nodeready.runs.memory.diff import Diff, NodeChanges
from nodeready.runs.memory.facts import compared_facts
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


# --- Looks from the documents of audit and ready in files.


#: Bytes of a file; 30,000 nodes have some 1 GB.
_MAX_FILE = 2 << 30
#: Bytes of memory for a document without a line for each node; a node has another bound.
_MAX_WHOLE = 1 << 30
_SCHEMA = re.compile(r"nodeready\.(audit|ready)/[12]\Z")
#: A node in the layout in which the reports write JSON, and the rows around the nodes.
_ROW = re.compile(rb'\{"name":("(?:[^"\\]|\\.)*")')
_FIRST, _LAST = b'"nodes": [', b"],"


class DocumentError(Exception):
    """A file that is no document of audit or ready: one line."""


class AuditFile:
    """The nodes of a JSON file of `audit` or `ready`. A node is read when it is asked for.

    started: when the audit began, UTC
    names:   of the nodes, in the order of the file

    Raises DocumentError.
    """

    def __init__(self, source: str, data: bytes) -> None:
        self._source = source
        self._rows: dict[str, Any] = {}
        document = self._decoded(self._without_rows(data), _MAX_WHOLE)
        if not isinstance(document, dict) or not _SCHEMA.match(str(document.get("schema"))):
            raise DocumentError(
                f"{source}: no document of audit or ready: make it with --format json -o FILE"
            )
        nodes = document.get("nodes")
        for row in nodes if isinstance(nodes, list) else ():
            if isinstance(row, dict):
                self._rows[str(row.get("name"))] = row
        gaps = document.get("gaps")
        #: Node -> why it gave no answer; a document of version 1 has it in the node's row.
        self._reasons = {
            str(gap.get("node")): str(gap.get("reason"))
            for gap in (gaps if isinstance(gaps, list) else ())
            if isinstance(gap, dict)
        }
        self.started = str(document.get("started"))
        self.names = tuple(self._rows)
        try:
            moment = datetime.fromisoformat(self.started.replace("Z", "+00:00"))
            self._time_s = moment.timestamp()
        except (ValueError, OverflowError):
            raise self._defect("started") from None

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
        """The document without the nodes that have a line each: these are kept as lines."""
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
        try:
            return wire.load_json(data, max_cost)
        except wire.DecodeError as error:
            raise self._defect(error.defect) from None

    def _defect(self, defect: str) -> DocumentError:
        return DocumentError(f"{self._source}: is no document of audit or ready ({defect})")

    def look(self, name: str) -> NodeLook:
        """The look at one of ``names``. Raises DocumentError."""
        row = self._rows[name]
        if isinstance(row, bytes):
            row = self._decoded(row, wire.MAX_COST)
        facts, results = row.get("facts"), row.get("results")
        if not isinstance(facts, dict) or not isinstance(results, list):
            raise self._defect(f"node {name[:80]}")
        stable: dict[str, Value] = {}
        totals: dict[str, int] = {}
        for subject, subject_facts in facts.items():
            compared = compared_facts(subject, subject_facts)
            stable.update(compared.stable)
            totals.update(compared.counters)
        by_check = {}
        for result in filter(lambda result: isinstance(result, dict), results):
            check, status = result.get("check"), result.get("status")
            if isinstance(check, str) and status in STATUSES:
                by_check[check] = Result(check, status, actual=str(result.get("actual", "")))
        host = facts.get("host")
        boot_id = host.get("boot_id") if isinstance(host, dict) else None
        error = self._reasons.get(name) or str(row.get("error", ""))
        return NodeLook(name, self._time_s, str(boot_id or ""), 0, error, stable, totals, by_check)

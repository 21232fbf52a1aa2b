"""`nodeready learn`: the majority of the nodes' facts as a group_data file for a person to review.

Snapshots go in, and a Python text comes out that is valid as it is.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

from nodeready.core.base import Unknown
from nodeready.core.outcome import NodeGaps, gaps_of
from nodeready.core.policy import PolicyError, check_settings, reason, setting_kind
from nodeready.core.result import Subject
from nodeready.core.text import sanitise, utc_now
from nodeready.fleet.inventory.nodeset import fold
from nodeready.runs import targets
from nodeready.runs.options import LearnOptions
from nodeready.runs.targets import keep_gaps, probe_nodes
from nodeready.runs.tell import Tell
from nodeready.subjects.registry import LEARNED, SUBJECTS
from nodeready.subjects.snapshot import Snapshot

_MAX_RARE_NAMES = 20  # maximum of listed names that few nodes have: a node can invent any number
WIDTH = 88  # columns of the file; a longer comment is wrapped


@dataclass
class LearnedSetting:
    key: str
    value: Any = None  # of the majority, as in group_data; None: no majority
    # the number of nodes with it, and the values of other nodes
    notes: list[str] = field(default_factory=list)


def _majority(values: Mapping[str, Any]) -> tuple[Any, str]:
    """The value that more than half of the nodes have, or None; and a note on the counts."""
    counts = Counter(values.values())
    (majority_value, count), *_ = counts.most_common(1)
    if count * 2 <= len(values):
        return None, f"no majority among {len(values)} nodes: {_nodes_by_value(values)}"
    deviating = {name: value for name, value in values.items() if value != majority_value}
    text = f"{count} of {len(values)} nodes"
    return majority_value, f"{text}; {_nodes_by_value(deviating)}" if deviating else text


def _nodes_by_value(values: Mapping[str, Any]) -> str:
    names_of: dict[Any, list[str]] = {}
    for name, value in values.items():
        names_of.setdefault(value, []).append(name)
    ranked = sorted(names_of.items(), key=lambda item: -len(item[1]))
    texts = [f"{fold(names)}: {value!r}" for value, names in ranked[:4]]
    return "; ".join(texts) + ("; …" if len(ranked) > len(texts) else "")


def _table(key: str, tables: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> LearnedSetting:
    """A setting of names and columns, by majority. tables: node -> name -> column -> value"""
    setting = LearnedSetting(key, {})
    rows_of: dict[str, dict[str, Mapping[str, Any]]] = {}
    for node, table in tables.items():
        for name, row in table.items():
            rows_of.setdefault(name, {})[node] = row
    rare_count = 0
    for name, rows in rows_of.items():
        if len(rows) * 2 <= len(tables):
            rare_count += 1
            if rare_count <= _MAX_RARE_NAMES:
                setting.notes.append(f"{name} is left out: only on {fold(rows)}")
            continue
        missing = [node for node in tables if node not in rows]
        if missing:
            setting.notes.append(f"{name} is missing on {fold(missing)}")
        setting.value[name] = {}
        for column in dict.fromkeys(column for row in rows.values() for column in row):
            values = {node: row[column] for node, row in rows.items() if column in row}
            majority_value, note = _majority(values)
            if majority_value is not None:
                setting.value[name][column] = majority_value
            if majority_value is None or len(set(values.values())) > 1:
                setting.notes.append(f"{name} {column}: {note}")
    if rare_count > _MAX_RARE_NAMES:
        unlisted = rare_count - _MAX_RARE_NAMES
        setting.notes.append(f"and {unlisted} more that few nodes have are left out")
    if setting.value and not setting.notes:
        setting.notes.append(f"{len(tables)} of {len(tables)} nodes")
    return setting


def majority(snapshots: Mapping[str, Snapshot]) -> list[LearnedSetting]:
    """The settings of the majority of these nodes, in the order of the subjects."""
    values_of: dict[str, dict[str, Any]] = {}
    for subject in SUBJECTS.values():
        for node, snapshot in snapshots.items():
            for key, value in _learned(subject, snapshot).items():
                values_of.setdefault(key, {})[node] = value
    learned = []
    for key, values in values_of.items():
        if setting_kind(key).named:
            setting = _table(key, values)
        else:
            pairs = values.items()
            countable = {node: tuple(v) if isinstance(v, list) else v for node, v in pairs}
            value, note = _majority(countable)
            setting = LearnedSetting(key, value, [note])
        _drop_invalid(setting)
        learned.append(setting)
    return learned


def _drop_invalid(setting: LearnedSetting) -> None:
    if setting.value in (None, {}):
        setting.value = None
        return
    try:
        check_settings({setting.key: setting.value}, "learned")
    except PolicyError as error:
        setting.notes.append(f"left out, it is no valid setting: {error.problems[0]}")
        setting.value = None


def _comment(text: str) -> list[str]:
    # Sanitised, so that text from a node cannot end the comment.
    return wrap(sanitise(text), WIDTH, initial_indent="# ", subsequent_indent="#   ")


def _assigned(setting: LearnedSetting) -> list[str]:
    if not isinstance(setting.value, dict):
        return [f"{setting.key} = {setting.value!r}"]
    rows = [f"    {name!r}: {row!r}," for name, row in sorted(setting.value.items())]
    return [f"{setting.key} = {{", *rows, "}"]


def settings_of(snapshot: Snapshot) -> dict[str, Any]:
    """The settings that this node would pass."""
    settings: dict[str, Any] = {}
    for subject in SUBJECTS.values():
        settings.update(_learned(subject, snapshot))
    return settings


def _learned(subject: Subject, snapshot: Snapshot) -> Mapping[str, Any]:
    observed = snapshot.subjects.get(subject.name)
    if observed is None or isinstance(observed, Unknown):
        return {}
    try:
        return subject.learned(observed)
    except Exception:  # noqa: BLE001 - a node's answer must never end the run
        return {}


def read_settings(text: str) -> dict[str, Any]:
    """The settings of a group_data file of `learn`, without running it. Raises ValueError."""
    try:
        rows = (row for row in ast.parse(text).body if isinstance(row, ast.Assign))
        return {ast.unparse(row.targets[0]): ast.literal_eval(row.value) for row in rows}
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"is no file of learn: {type(error).__name__}") from None


def render(learned: Sequence[LearnedSetting], nodes: Sequence[str], when: str) -> str:
    """The group_data file. Its values are literals: loading it runs no code from a node."""
    head = f"What most of {fold(nodes)} ({len(nodes)} nodes) had in common on {when}."
    advice = "Review it: what is common is not always right. Then name it after the group."
    lines = [*_comment(head), *_comment(advice)]
    for setting in learned:
        lines.append("")
        # The first sentence; "e.g." does not end it.
        meaning = re.split(r"(?<=[.]) (?=[A-Z])", reason(setting.key))[0]
        for text in (meaning, *setting.notes):
            lines += _comment(text)
        unset = [f"# {setting.key} is not set."]
        lines += unset if setting.value is None else _assigned(setting)
    text = "\n".join(lines) + "\n"
    check_settings(read_settings(text), "learned")
    return text


# --- The run of `nodeready learn`.


def run(inventory: str, options: LearnOptions, tell: Tell) -> tuple[str, NodeGaps]:
    """The policy of most nodes, or ""; the gaps. Raises Refused, KeyboardInterrupt."""
    nodes = targets.select_targets(inventory, options, job=options.job, tell=tell.note)
    with nodes.transport:
        outcomes = probe_nodes(nodes, tell, LEARNED)
        if nodes.transport.interrupted:
            raise KeyboardInterrupt
    gaps = gaps_of(outcomes)
    keep_gaps(nodes, tell, gaps)
    snapshots = {outcome.node: outcome.value for outcome in outcomes if outcome.value}
    text = render(majority(snapshots), list(snapshots), utc_now()) if snapshots else ""
    return text, gaps

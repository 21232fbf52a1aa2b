"""The document of `nodeready history`: the life of a node or of a part, or the looks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, ClassVar

from nodeready.agent.audit_document import FAILED, UNREACHABLE
from nodeready.core.json_types import Count, Moment, MomentOrEmpty, Name
from nodeready.core.result import STATUSES, worst
from nodeready.core.text import sanitise, utc_moment
from nodeready.runs.memory.accounting import NodeJob, node_drains, node_jobs
from nodeready.runs.memory.changes import ANSWER, POLICY, RESULT, Change, changes
from nodeready.runs.memory.facts import shown_value
from nodeready.runs.memory.look import Event, Look, NodeLook, PartSpan
from nodeready.runs.memory.store import Memory

STATUS, PART, EVENT, JOB = "status", "part", "event", "job"
#: The statuses of a node for which its checks are the cause.
_WITH_CAUSE = ("fail", "unknown", "warn")
#: Entries after which no earlier change of a node is read: a node may change at every look.
MAX_ENTRIES = 10_000
#: A result is one of these where it depends on whether there are counters of an earlier look.
_QUIET = frozenset(("ok", "na"))


@dataclass(frozen=True)
class HistoryEntry:
    """One entry of a life."""

    time: Moment  # UTC; of a span, its beginning
    # ``status``: a span of looks with one status; ``part``: a span in one place; ``event``;
    # ``job``: of Slurm; else a change: ``result``, ``hardware``, ``version``, ``setting``,
    # ``counter``, ``reboot``; or ``policy``: other settings, and the results that follow
    kind: Name
    text: str  # one line
    until: MomentOrEmpty = ""  # the end of a span, UTC; "": no span, or it lasts
    status: str = ""  # of the node, for ``status``; of the check, for ``result``; "": another kind
    looks: Count = 0  # number of looks at the node in the span that made one of these checks
    checks: tuple[Name, ...] = ()  # that cause the status; of a result: its check
    node: str = ""  # of a part's entry, and of its events
    serial: str = ""  # of the part; "": the node itself


@dataclass(frozen=True)
class KeptLook:
    """One look of the memory."""

    id: Count
    time: Moment  # when its nodes had answered, UTC
    command: str
    inventory: str
    complete: bool  # False: it was interrupted
    code: int  # its exit status
    # number of nodes by status; a status without nodes is left out
    nodes: Mapping[str, Annotated[int, {"minimum": 1}]]


@dataclass(frozen=True)
class History:
    """The document of `nodeready history`. Text is one line without control characters."""

    SCHEMA: ClassVar = "history"

    name: str  # the node, or the serial number of the part; "": all looks
    about: str  # what a part is and where: ``GPU GPU-5269b708 in gpu004 at 0000:1b:00.0``
    first_seen: MomentOrEmpty  # UTC; "": it was not seen
    last_seen: MomentOrEmpty  # UTC
    count: Count  # number of looks at the node, or in the memory
    size_bytes: Count  # of the memory's file
    entries: tuple[HistoryEntry, ...] = ()  # the newest first
    looks: tuple[KeptLook, ...] = ()  # the newest first; without a name
    missing: Mapping[str, str] = field(default_factory=dict)  # source -> why it gave nothing


def read_history(memory: Memory, name: str, since_s: float = 0.0) -> History | None:
    """The history of a node or a part since a time; None: no look has seen this name.

    name: "": the looks
    Raises MemoryUnavailable.
    """
    if not name:
        looks = memory.looks(since_s)
        rows = tuple(map(kept_look, looks))
        first, last = (rows[-1].time, rows[0].time) if rows else ("", "")
        return History("", "", first, last, len(rows), memory.size_bytes, looks=rows)
    life = [*memory.life(name)]
    if life:
        last_look = memory.last_seen(name) or (life[-1].time_s, life[-1].number, {})
        last_s, count, _ = last_look
        begin_s = max(since_s, life[0].time_s)
        jobs, problem = node_jobs(name, begin_s)
        events = [*memory.events(name), *node_drains(begin_s, [name])[0]]
        entries = node_entries(life, last_look, events, jobs)
        first_s, about = life[0].time_s, ""
        missing = {"jobs": problem} if problem else {}
        if len(entries) > MAX_ENTRIES:
            missing["earlier changes"] = f"more than {MAX_ENTRIES} entries"
    else:
        spans = memory.parts(name)
        if not spans:
            return None
        newest, count, missing = spans[0], 0, dict[str, str]()
        first_s, last_s = spans[-1].first_s, max(span.last_s for span in spans)
        entries = part_entries(spans, memory.events(serial=newest.serial))
        about = _about(newest)
    since = utc_moment(since_s)
    shown = tuple(entry for entry in entries if entry.time >= since or entry.until > since)
    seen = utc_moment(first_s), utc_moment(last_s), count, memory.size_bytes
    return History(sanitise(name), about, *seen, shown, missing=missing)


def read_parts_history(memory: Memory, name: str) -> list[HistoryEntry]:
    """The entries of a node, without jobs, and of the parts that are in it, the newest first.

    Raises MemoryUnavailable.
    """
    life, newest = [*memory.life(name)], memory.last_seen(name)
    entries = node_entries(life, newest, memory.events(name)) if newest else []
    for part in memory.parts_of(name):
        if part.is_there:
            spans = memory.parts(part.serial or part.uuid)
            entries += part_entries(spans, memory.events(serial=part.serial))
    return _sorted(dict.fromkeys(entries))


def _about(span: PartSpan) -> str:
    """``GPU GPU-5269b708 in gpu004 at 0000:1b:00.0``."""
    words = "GPU" if span.kind == "gpu" else "RDMA adapter"
    uuid = f" {span.uuid}" if span.uuid and span.uuid != span.serial else ""
    place = "in" if span.is_there else "last in"
    return sanitise(f"{words}{uuid} {place} {span.node} at {span.slot}")


def status_of(look: NodeLook) -> str:
    """The status of the node, as in an audit."""
    if look.error:
        return UNREACHABLE if look.unreachable else FAILED
    return worst(look.results.values())


def causes(look: NodeLook) -> tuple[str, ...]:
    """The checks that cause the node's status."""
    status, results = status_of(look), look.results.items()
    return tuple(c for c, r in results if r.status == status and status in _WITH_CAUSE)


def node_entries(
    life: Sequence[NodeLook],
    newest: tuple[float, int, Mapping[str, int]],
    events: Iterable[Event] = (),
    jobs: Iterable[NodeJob] = (),
) -> list[HistoryEntry]:
    """The entries of a node, the newest first.

    life:   the node at each look at which something changed, the oldest first
    newest: `Memory.last_seen` of it
    """
    entries = [*_spans(life, *newest), *map(_event, events)]
    for job in jobs:
        text = sanitise(f"{job.id} of {job.user}: {job.state}")
        until = "" if job.end_s is None else utc_moment(job.end_s)
        entries.append(HistoryEntry(utc_moment(job.start_s), JOB, text, until))
    for after, before in pairwise(reversed(life)):
        if len(entries) > MAX_ENTRIES:
            break
        for change in changes(before, after):
            # A span says the same, or the result came or went as earlier counters do.
            is_quiet = change.key == ANSWER or {change.before, change.after} <= _QUIET
            if change.kind != RESULT or not is_quiet:
                entries.append(_change(change, after.time_s))
    return _sorted(entries)


def part_entries(spans: Iterable[PartSpan], events: Iterable[Event]) -> list[HistoryEntry]:
    """The entries of a part, the newest first: every node that it was in."""
    entries = [
        HistoryEntry(
            utc_moment(span.first_s),
            PART,
            f"in {sanitise(span.node)} at {sanitise(span.slot)}",
            "" if span.is_there else utc_moment(span.last_s),
            node=sanitise(span.node),
            serial=sanitise(span.serial),
        )
        for span in spans
    ]
    return _sorted([*entries, *map(_event, events)])


def kept_look(look: Look) -> KeptLook:
    nodes = {status: number for status, number in look.summary.get("nodes", {}).items() if number}
    place = look.id, utc_moment(look.time_s), look.command, sanitise(look.inventory)
    return KeptLook(*place, look.complete, look.code, nodes)


def _spans(
    life: Sequence[NodeLook], last_s: float, count: int, missed: Mapping[str, int]
) -> Iterator[HistoryEntry]:
    """The spans of looks with one status, by the same checks."""
    start = 0
    for index in range(1, len(life) + 1):
        is_last = index == len(life)
        if not is_last and _cause(life[index]) == _cause(life[start]):
            continue
        first = life[start]
        status, checks = status_of(first), causes(first)
        end = (count + 1, missed) if is_last else (life[index].number, life[index].missed)
        texts = [first.results[check].actual for check in checks[:1]] or [first.error]
        yield HistoryEntry(
            utc_moment(first.time_s),
            STATUS,
            sanitise(texts[0]),
            utc_moment(last_s if is_last else life[index].time_s),
            status,
            _look_count(first, *end),
            checks,
        )
        start = index


def _cause(look: NodeLook) -> tuple[str, frozenset[str]]:
    return status_of(look), frozenset(causes(look))


def _look_count(first: NodeLook, number: int, missed: Mapping[str, int]) -> int:
    """The number of looks from the first one to the one before ``number`` that made one of the
    checks that cause the status of the first one.

    missed: as `NodeLook.missed`, of the look with this number
    """
    owners = {check if check in missed else check.partition(".")[0] for check in causes(first)}
    misses = [missed.get(owner, 0) - first.missed.get(owner, 0) for owner in owners]
    return number - first.number - min(misses, default=0)


def _change(change: Change, time_s: float) -> HistoryEntry:
    values = [
        None if value is None else shown_value(change.key, value)
        for value in (change.before, change.after)
    ]
    if values == [None, None]:
        text = change.note
    elif None in values:
        text = (
            f"{change.key}: {values[values[0] is None]}, {'new' if values[0] is None else 'gone'}"
        )
    else:
        text = f"{change.key}: {values[0]} -> {values[1]}"
    if change.kind == POLICY:
        text = f"{change.key}: {change.note}"
    elif change.note and text != change.note:
        text = f"{text}: {change.note}"
    if change.part:
        text = f"{change.part} {text}"
    entry = HistoryEntry(utc_moment(time_s), change.kind, sanitise(text))
    if change.kind != RESULT:
        return entry
    status = str(change.after) if change.after in STATUSES else ""
    return replace(entry, status=status, checks=(change.key,))


def _event(event: Event) -> HistoryEntry:
    text = sanitise(f"{event.kind}: {event.text}")
    entry = HistoryEntry(utc_moment(event.time_s), EVENT, text, node=sanitise(event.node))
    return replace(entry, serial=sanitise(event.serial))


def _sorted(entries: Iterable[HistoryEntry]) -> list[HistoryEntry]:
    """The newest first; of one time, the node's status first."""
    ordered = sorted(entries, key=lambda entry: entry.kind != STATUS)
    return sorted(ordered, key=lambda entry: entry.time, reverse=True)

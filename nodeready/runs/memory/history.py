"""The document of `nodeready history`: the life of a node or a part, the looks, Slurm's jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from typing import Annotated, ClassVar

from nodeready.agent.audit_document import FAILED, UNREACHABLE
from nodeready.core.json_types import Count, Moment, MomentOrEmpty, Name
from nodeready.core.result import STATUSES, worst
from nodeready.core.shell import find_program
from nodeready.core.text import sanitise, utc_moment
from nodeready.runs.memory.changes import ANSWER, POLICY, RESULT, Change, changes
from nodeready.runs.memory.look import Event, Look, NodeLook, PartSpan, shown_value
from nodeready.runs.memory.store import Memory
from nodeready.subjects.gate.facts import PENDING

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
    """The history of a node or a part since a time; None: no look has seen this name. name: "":
    all looks. Raises MemoryUnavailable.
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
    times = utc_moment(first_s), utc_moment(last_s), count, memory.size_bytes
    return History(sanitise(name), about, *times, shown, missing=missing)


def read_parts_history(memory: Memory, name: str) -> list[HistoryEntry]:
    """The entries of a node and of its parts, newest first. Raises MemoryUnavailable."""
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
    status, results = status_of(look), look.results.items()
    return tuple(c for c, r in results if r.status == status and status in _WITH_CAUSE)


def node_entries(
    life: Sequence[NodeLook], newest: tuple[float, int, Mapping[str, int]],
    events: Iterable[Event] = (), jobs: Iterable[HistoryEntry] = (),
) -> list[HistoryEntry]:  # fmt: skip
    """The entries of a node, the newest first. life: the node at each look at which something
    changed, the oldest first. newest: `Memory.last_seen` of it
    """
    entries = [*_spans(life, *newest), *map(_event, events), *jobs]
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
    entries = [*map(_event, events)]
    for span in spans:
        node, slot, serial = map(sanitise, (span.node, span.slot, span.serial))
        time, until = utc_moment(span.first_s), "" if span.is_there else utc_moment(span.last_s)
        text = f"in {node} at {slot}"
        entries.append(HistoryEntry(time, PART, text, until, node=node, serial=serial))
    return _sorted(entries)


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
        until = utc_moment(last_s if is_last else life[index].time_s)
        entry = HistoryEntry(utc_moment(first.time_s), STATUS, sanitise(texts[0]), until, status)
        yield replace(entry, looks=_look_count(first, *end), checks=checks)
        start = index


def _cause(look: NodeLook) -> tuple[str, frozenset[str]]:
    return status_of(look), frozenset(causes(look))


def _look_count(first: NodeLook, number: int, missed: Mapping[str, int]) -> int:
    """The number of looks before ``number``, from the first look on, that made a check that causes
    the first look's status. missed: as `NodeLook.missed`, of the look with this number
    """
    owners = {check if check in missed else check.partition(".")[0] for check in causes(first)}
    misses = [missed.get(owner, 0) - first.missed.get(owner, 0) for owner in owners]
    return number - first.number - min(misses, default=0)


def _change(change: Change, time_s: float) -> HistoryEntry:
    values = (change.before, change.after)
    before, after = (None if v is None else shown_value(change.key, v) for v in values)
    if change.kind == POLICY:
        text = f"{change.key}: {change.note}"
    elif before is None and after is None:
        text = change.note
    else:
        text = f"{change.key}: {before} -> {after}"
        if before is None or after is None:
            value, word = (after, "new") if before is None else (before, "gone")
            text = f"{change.key}: {value}, {word}"
        text += f": {change.note}" if change.note else ""
    text = f"{change.part} {text}" if change.part else text
    entry = HistoryEntry(utc_moment(time_s), change.kind, sanitise(text))
    if change.kind != RESULT:
        return entry
    status = str(change.after) if change.after in STATUSES else ""
    return replace(entry, status=status, checks=(change.key,))


def _event(event: Event) -> HistoryEntry:
    text, node, serial = map(sanitise, (f"{event.kind}: {event.text}", event.node, event.serial))
    return HistoryEntry(utc_moment(event.time_s), EVENT, text, node=node, serial=serial)


def _sorted(entries: Iterable[HistoryEntry]) -> list[HistoryEntry]:
    """The newest first; of one time, the node's status first."""
    ordered = sorted(entries, key=lambda entry: entry.kind != STATUS)
    return sorted(ordered, key=lambda entry: entry.time, reverse=True)


# --- The jobs and the drains of nodes, by Slurm's accounting.

#: A job's user chooses the last field, which may have any character.
_FIELDS = "JobID,User,State,Start,End"
_LOST = ("DRAIN", "DOWN", "FAIL")  # states of a node that gets no job: sacctmgr(1), of events
_TIMEOUT_S = 20  # seconds for `sacct`: a large accounting database answers in some seconds
_MAX_JOBS = 1000  # maximum jobs, the newest ones


def node_jobs(node: str, since_s: float) -> tuple[list[HistoryEntry], str]:
    """The newest jobs on a node since a time, the oldest first; why there are none, or ""."""
    words = ["sacct", f"--nodelist={node}", f"--starttime={_time(since_s)}", "--allusers"]
    words += ["--allocations", "--parsable2", f"--format={_FIELDS}"]
    text, problem = _run(words)
    return parse_jobs(text)[-_MAX_JOBS:], problem


def node_drains(since_s: float, nodes: Collection[str]) -> tuple[list[Event], str]:
    """Slurm's records of drains and losses of nodes since a time; what failed, or ""."""
    words = ["sacctmgr", "--noheader", "--parsable2", "list", "event", f"start={_time(since_s)}"]
    words += [f"nodes={','.join(nodes)}", "format=NodeName,Start,State,Reason"]
    text, problem = _run(words)
    return parse_drains(text), problem


def _run(argv: list[str]) -> tuple[str, str]:
    """What a command of Slurm prints; why it prints nothing, or ""."""
    if not find_program(argv[0]):
        return "", f"{argv[0]} is not installed here"
    # Imported only here, because they import pyinfra, which is slow.
    from pyinfra.api.exceptions import InventoryError

    from nodeready.fleet.inventory.slurm import ask

    try:
        return ask(argv, _TIMEOUT_S), ""
    except InventoryError as error:
        return "", str(error)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(timespec="seconds")


def parse_jobs(text: str) -> list[HistoryEntry]:
    """The jobs in the table of `sacct`, in order of their start. Other lines are left out."""
    jobs = []
    for line in text.splitlines()[1:]:
        fields = line.split("|")
        if len(fields) == len(_FIELDS.split(",")):
            job, user, state, start, end = (field[:60] for field in fields)
            start_s, end_s = _seconds(start), _seconds(end)  # no end: it runs
            if start_s is None:
                continue
            until = "" if end_s is None else utc_moment(end_s)
            words = sanitise(f"{job} of {user}: {state}")
            jobs.append(HistoryEntry(utc_moment(start_s), JOB, words, until))
    return sorted(jobs, key=lambda job: job.time)


def parse_drains(text: str) -> list[Event]:
    """Drains and losses in rows ``NODE|START|STATE|REASON``, but for a gate's pending ones."""
    drains = []
    for line in text.splitlines():
        # Anyone who may drain a node chooses the reason, which may have any character.
        node, start, state, reason = [*line.split("|", 3), "", "", ""][:4]
        start_s = _seconds(start)
        is_pending = reason.startswith(PENDING)
        if node and start_s is not None and state.startswith(_LOST) and not is_pending:
            words = f"{state[:20]}: {reason[:200]}"
            drains.append(Event(start_s, node[:255], "", "drain", words))
    return drains


def _seconds(text: str) -> float | None:
    """A time of Slurm, which is in this machine's time zone; None: "Unknown", "None"."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None

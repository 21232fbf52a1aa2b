"""The tables of what is kept: changes, histories, lemons and waivers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import groupby
from textwrap import wrap

from nodeready.core.result import COUNTER, join_first
from nodeready.core.text import counted, sanitise, span
from nodeready.reports.lines import (
    MAX_TEXT,
    STYLES,
    RowSection,
    StyledLine,
    TableLayout,
    fitted,
    line,
    node_set,
    node_set_or_count,
    show_gaps,
)
from nodeready.reports.registry import PLAIN, Options
from nodeready.runs.audit.waiver_list import (
    ENDS,
    EXPIRED,
    HOLDS,
    NO_NODE,
    STATES,
    UNUSED,
    ListedWaiver,
    WaiverList,
)
from nodeready.runs.memory.changes import ANSWER, POLICY, REBOOT, RESULT
from nodeready.runs.memory.diff import Diff, FleetChange, Side
from nodeready.runs.memory.history import EVENT, JOB, STATUS, History, HistoryEntry, KeptLook
from nodeready.runs.memory.lemons import FALSE_ALARM, MIN_DAYS, Lemon, Lemons
from nodeready.runs.memory.look import shown_value

# --- `history`: an entry per line, the newest first.

_MAX_EQUAL = 5  # entries of one kind and time that are shown without -v
_MAX_CHECKS = 3  # checks that are named without -v
_WORD = 11
_TEXT = 31  # the column of the text


def history(document: History, options: Options = PLAIN) -> Iterator[StyledLine]:
    return _life(document, options) if document.name else _looks(document, options)


def _minute(moment: str) -> str:
    return moment[:16].replace("T", " ")


def _span(first: str, last: str) -> str:
    """``12 days``: the time between two moments."""
    start, end = (datetime.fromisoformat(text[:19]) for text in (first, last))
    return span((end - start).total_seconds())


def _life(document: History, options: Options) -> Iterator[StyledLine]:
    looks = f", {counted(document.count, 'look')}" if document.count else ""
    about = f"{document.about}, " if document.about else ""
    first, last = map(_minute, (document.first_seen, document.last_seen))
    yield line((document.name, "bold"), f"  {about}seen from {first} to {last} UTC{looks}")
    is_whole = bool(options.verbose) or not options.lines
    entries = document.entries if is_whole else document.entries[: options.lines]
    causes = {(entry.time, check) for entry in entries if entry.kind == STATUS
              for check in entry.checks}  # fmt: skip
    for (moment, kind), group in groupby(entries, key=lambda entry: (entry.time, entry.kind)):
        # The line of the status names the results that cause it.
        equal = [entry for entry in group if kind != RESULT
                 or any((moment, check) not in causes for check in entry.checks)]  # fmt: skip
        shown = equal if is_whole else equal[:_MAX_EQUAL]
        for entry in shown:
            yield from _entry(entry, document.name, options)
        if len(equal) > len(shown):
            yield line(" " * _TEXT, f"and {len(equal) - len(shown)} more (-v shows them)")
    if len(document.entries) > len(entries):
        yield line(f"and {len(document.entries) - len(entries)} earlier ones (-v shows them)")
    if options.verbose:
        for source, reason in document.missing.items():
            yield line((f"no {source}: {reason}", "dim"))


def _entry(entry: HistoryEntry, name: str, options: Options) -> Iterator[StyledLine]:
    """The entry in a line; on a terminal that is too narrow, in several below its text."""
    word, text = entry.kind, entry.text
    if entry.kind == STATUS:
        word = entry.status
        looks = counted(entry.looks, "look")
        text = f"for {_span(entry.time, entry.until)}, {looks}{_cause(entry, options.verbose)}"
    elif entry.kind == JOB and entry.until:
        text = f"{text}, {_span(entry.time, entry.until)}"
    elif entry.until:
        text = f"{text}, until {_minute(entry.until)}"
    if entry.kind == EVENT and entry.serial:
        text += f" (GPU {entry.serial})" if entry.node == name else f" (on {entry.node})"
    style = STYLES.get(entry.status, "")
    parts = wrap(text, options.width - _TEXT, break_on_hyphens=False) if options.lines else [text]
    for number, part in enumerate(parts):
        head = (f"{_minute(entry.time)}  ", (f"{word:<{_WORD}}", style), "  ")
        yield line(*(head if not number else (" " * _TEXT,)), part)


def _cause(entry: HistoryEntry, verbose: int) -> str:
    """``: gpus.ecc: 7 errors``; of several checks only their names."""
    if not entry.checks:
        return f": {entry.text}" if entry.text else ""
    if len(entry.checks) == 1:
        return f": {entry.checks[0]}: {entry.text}"
    shown = entry.checks if verbose else entry.checks[:_MAX_CHECKS]
    remaining = len(entry.checks) - len(shown)
    return f": {', '.join(shown)}" + (f" and {remaining} more" if remaining else "")


def _looks(document: History, options: Options) -> Iterator[StyledLine]:
    is_whole = bool(options.verbose) or not options.lines
    looks = document.looks if is_whole else document.looks[: options.lines]
    width = max((len(look.command) for look in looks), default=0)
    number_width = max((len(str(look.id)) for look in looks), default=0)
    for look in looks:
        number = f"{look.id:>{number_width}}  ", "dim"
        place = f"{_minute(look.time)}  {look.command:<{width}}  "
        yield line(number, place, *_nodes(look), look.inventory)
    if len(document.looks) > len(looks):
        yield line(f"and {len(document.looks) - len(looks)} earlier ones (-v shows them)")
    since = f" since {_minute(document.first_seen)} UTC" if document.first_seen else ""
    yield line(f"{counted(document.count, 'look')}{since}, {document.size_bytes / 1e6:.1f} MB")


def _nodes(look: KeptLook) -> Iterator[tuple[str, str]]:
    """``1 fail, 99 ok``, each in its style."""
    for index, (status, count) in enumerate(look.nodes.items()):
        yield f"{', ' if index else ''}{count} {status}", STYLES.get(status, "")
    text = "" if look.complete else " interrupted"
    yield f"{text}{'  ' if look.nodes or text else ''}", ""


# --- `diff`: the likely cause of failures first, then results, then other changes.

_SHORT_NODES = 24  # columns of a node set in a short line


class _DiffTable(TableLayout):
    indent = 10

    def __init__(self, diff: Diff, options: Options) -> None:
        super().__init__(options)
        self.diff = diff

    def first_line(self, change: FleetChange) -> StyledLine:
        word, style = change.kind, "change"
        if change.suspect:
            word = style = "suspect"
        elif change.kind == RESULT:
            style = str(change.after) if change.after in STYLES else "unreachable"
        elements = f" ({join_first(change.elements, ', ')})" if change.elements else ""
        first = self.head(word, style, (_subject(change), "bold"), elements, _values(change))
        return first if self.is_whole else first.cut(MAX_TEXT)

    def full(self, change: FleetChange) -> Iterator[StyledLine]:
        yield self.first_line(change)
        failing = f"  {change.failing} of {len(self.diff.failing)} failing"
        healthy = f", {change.healthy} of {self.diff.healthy} healthy"
        counts = f"{failing}{healthy}" if change.suspect else ""
        since = f"  since {_minute(change.since)}" if change.since else ""
        yield self.detail(self.names(change.nodes), f"{counts}{since}")

    def short(self, change: FleetChange) -> StyledLine:
        names = node_set_or_count(change.nodes, _SHORT_NODES)
        return self.first_line(change).with_text(f"  {names}")


def _subject(change: FleetChange) -> str:
    if change.key == ANSWER:
        return "the node's answer"
    if change.kind == REBOOT:
        return "boot"
    return f"{change.part} {change.key}" if change.part else change.key


def _values(change: FleetChange) -> str:
    """``  9000 -> 1500  (why)``; of different values only what they have in common."""
    if change.kind in (COUNTER, REBOOT, POLICY) and change.after is None:
        return f"  {change.note}"
    before, after = (shown_value(change.key, value) for value in (change.before, change.after))
    text = f"  {before} -> {after}"
    return f"{text}  ({change.note})" if change.note else text


def _side(side: Side) -> str:
    return f"{side.source} ({_minute(side.time)})" if side.time else side.source


def diff_lines(diff: Diff, options: Options = PLAIN) -> Iterator[StyledLine]:
    """Suspects, results, then changes of other kinds."""
    table = _DiffTable(diff, options)
    sections = [
        RowSection(list(changes), table.full, table.short, table.count_line)
        for _, changes in groupby(diff.changes, lambda change: (change.suspect, change.kind))
    ]
    end = list(_end(table, diff))
    room = 0 if table.is_whole else max(10, options.lines - len(end))
    yield from fitted(sections, room, options.width)
    yield from end


def _end(table: _DiffTable, diff: Diff) -> Iterator[StyledLine]:
    if diff.changes:
        yield line("")
    for side, names in ((diff.before, diff.only_before), (diff.after, diff.only_after)):
        if names:
            yield line("only in ", side.source, ": ", table.names(names))
    yield line(f"before: {_side(diff.before)}")
    yield line(f"after:  {_side(diff.after)}")
    count = counted(len(diff.changes), "difference") if diff.changes else "no difference"
    yield line(f"{counted(diff.compared, 'node')}, {count}")


# --- `lemons`: the lemons with their incidents, then further units in short.

#: Incidents of a lemon, and units without a verdict, that are shown without -v.
_MAX_INCIDENTS, _MAX_UNITS = 5, 10


def lemons(document: Lemons, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The lemons, each with its newest incidents; with -v all incidents of all units."""
    named = document.lemons
    style = STYLES["fail" if named else "ok"]
    units = f"{counted(document.node_count, 'node')} and {counted(document.gpu_count, 'GPU')}"
    period = f"from {document.since[:10]} to {document.until[:10]}"
    yield line((counted(len(named), "lemon"), style), f" among {units} {period}")
    for lemon in named:
        yield from _unit(lemon, options)
    unsuspicious = [unit for unit in document.units if not unit.is_lemon]
    shown = unsuspicious if options.verbose else unsuspicious[:_MAX_UNITS]
    if shown:
        yield line("")
        yield line(("within the rate of their peers", "bold"))
    for unit in shown:
        if options.verbose:
            yield from _unit(unit, options)
        else:
            last = unit.incidents[0]
            yield line(f"  {unit}", f": {last.time[:10]} {last.kind}"[:MAX_TEXT])
    if len(unsuspicious) > len(shown):
        yield line(f"  and {len(unsuspicious) - len(shown)} more: -v")
    if document.shared:
        incidents = counted(document.shared, "incident")
        verb = "counts" if document.shared == 1 else "count"
        yield line(f"{incidents} of many nodes at once {verb} for no node")
    if named:
        chance = f"a chance below {FALSE_ALARM:.0%} in a fleet of equals"
        yield line(f"rule: incidents on {MIN_DAYS} days or more, and {chance}")


def _place(lemon: Lemon) -> str:
    """Where a GPU is, and where its incidents were, if elsewhere too."""
    earlier = [name for name in lemon.nodes if name != lemon.node]
    if not lemon.node:
        return f"was in {node_set(earlier)}"
    place = f"now in {sanitise(lemon.node)}"
    return f"{place}, before in {node_set(earlier)}" if earlier else place


def _unit(lemon: Lemon, options: Options) -> Iterator[StyledLine]:
    style = STYLES["fail"] if lemon.is_lemon else ""
    yield line("")
    yield line((str(lemon), style))
    if lemon.kind == "gpu":
        yield line(f"  {_place(lemon)}")
    shown = lemon.incidents if options.verbose else lemon.incidents[:_MAX_INCIDENTS]
    for incident in shown:
        place = f"{incident.node}  " if lemon.kind == "gpu" else ""
        text = sanitise(incident.text, MAX_TEXT)
        yield line(f"  {_minute(incident.time)}  {place}{incident.kind}  {text}")
    if len(lemon.incidents) > len(shown):
        yield line(f"  and {len(lemon.incidents) - len(shown)} earlier: -v")


# --- `waivers` on a terminal: a waiver with its end and reason, and what it hides.

#: State -> the style of its word.
_STYLES = {EXPIRED: "fail", NO_NODE: "warn", UNUSED: "warn", ENDS: "warn", HOLDS: "waived"}
#: State -> what to do.
_ADVICE = {
    EXPIRED: "its finding counts again: repair it, or extend the waiver",
    NO_NODE: "its node set has no node that has this policy: correct or remove it",
    UNUSED: "hides nothing: remove it",
}


def _end_of_waiver(row: ListedWaiver) -> str:
    """``until 2027-01-31, 66 days left``."""
    if row.days_left is None:
        return "does not end"
    if row.days_left < 0:
        return f"expired {row.waiver.until}, {counted(-row.days_left, 'day')} ago"
    return f"until {row.waiver.until}, {counted(row.days_left, 'day')} left"


class _WaiverTable(TableLayout):
    def row(self, row: ListedWaiver) -> Iterator[StyledLine]:
        names = self.names(row.nodes) if row.nodes else row.waiver.nodes
        yield self.head(row.state, _STYLES[row.state], (row.waiver.check, "bold"), "  ", names)
        owner = f", {row.waiver.owner}" if row.waiver.owner else ""
        yield self.sentence(f"{_end_of_waiver(row)}{owner}: {row.waiver.reason}")
        for finding in row.findings:
            yield self.detail(
                (finding.status, STYLES[finding.status]), "  ", self.names(finding.nodes), "  ",
                finding.actual,
            )  # fmt: skip
        if row.state in _ADVICE:
            yield self.sentence(_ADVICE[row.state])


def waivers(document: WaiverList, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The waivers, the most urgent first; the nodes without an answer; the counts."""
    table = _WaiverTable(options)
    for row in document.waivers:
        yield from table.row(row)
    yield from show_gaps(document.gaps, options)
    states = [row.state for row in document.waivers]
    counts = [f"{states.count(state)} {state}" for state in STATES if state in states]
    yield line(f"{counted(len(states), 'waiver')}{': ' if counts else ''}{', '.join(counts)}")

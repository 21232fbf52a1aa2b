"""`history` on a terminal: an entry per line, the newest first."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import groupby
from textwrap import wrap

from nodeready.core.text import counted, span
from nodeready.reports.lines import STYLES, StyledLine, line
from nodeready.reports.registry import PLAIN, Options
from nodeready.runs.memory.changes import RESULT
from nodeready.runs.memory.history import EVENT, JOB, STATUS, History, HistoryEntry, KeptLook

#: Entries of one kind and time that are shown without -v.
_MAX_EQUAL = 5
#: Checks that are named without -v.
_MAX_CHECKS = 3
_WORD = 11
#: The column of the text.
_TEXT = 31


def show(document: History, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The life of a node or a part; or the looks, and the size of the memory."""
    if document.name:
        yield from _life(document, options)
    else:
        yield from _looks(document, options)


def _minute(moment: str) -> str:
    return moment[:16].replace("T", " ")


def _span(first: str, last: str) -> str:
    """``12 days``: the time between two moments."""
    start, end = (datetime.fromisoformat(text[:19]) for text in (first, last))
    return span((end - start).total_seconds())


def _life(document: History, options: Options) -> Iterator[StyledLine]:
    looks = f", {counted(document.count, 'look')}" if document.count else ""
    about = f"{document.about}, " if document.about else ""
    period = (
        f"{about}seen from {_minute(document.first_seen)} to {_minute(document.last_seen)} UTC"
    )
    yield line((document.name, "bold"), f"  {period}{looks}")
    is_whole = bool(options.verbose) or not options.lines
    entries = document.entries if is_whole else document.entries[: options.lines]
    causes = {(entry.time, check) for entry in entries if entry.kind == STATUS
              for check in entry.checks}  # fmt: skip
    for (moment, kind), group in groupby(entries, key=lambda entry: (entry.time, entry.kind)):
        # The line of the status names the results that cause it.
        equal = [
            entry
            for entry in group
            if kind != RESULT or any((moment, check) not in causes for check in entry.checks)
        ]
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
        yield line(
            (f"{look.id:>{number_width}}  ", "dim"),
            f"{_minute(look.time)}  {look.command:<{width}}  ",
            *_nodes(look),
            look.inventory,
        )
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

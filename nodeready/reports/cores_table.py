"""The cores on a terminal: where each kind of crash happened, the first to crash first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nodeready.reports.registry import (
    PLAIN,
    STYLES,
    Alike,
    Line,
    Options,
    Part,
    Section,
    alike,
    fits,
    fitted,
    line,
    nodes,
    reasons,
)
from nodeready.text import counted, sanitise
from nodeready.triage.cores import CoreGroup, Cores, Crash, crashed_in, signal_name
from nodeready.triage.stacks.document import fold_ranks

#: Groups, frames and lines of Python's own stack that are shown without -v.
_GROUPS, _FRAMES, _PYTHON = 20, 14, 6
#: So many kinds of crashes, reasons and notes are shown whole, however long they are.
_FEW = 4
#: Columns of the words on the left; at most of a function, and of a node set.
_INDENT, _NAME, _NODES = 9, 44, 120
#: Characters of a text that are shown without -v.
_TEXT = 500
_WHOLE = 1_000_000
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size(number: int) -> str:
    """``5.2 MiB``."""
    value, unit = float(number), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else counted(number, "byte")


def process(crash: Crash) -> str:
    """``pid 4711, rank 3, user ada, 37 threads, 5.2 MiB``: what is known of a process."""
    core = crash.core
    known = [
        "" if crash.pid is None else f"pid {crash.pid}",
        "" if core.rank is None else f"rank {core.rank}",
        f"job {core.job}" if core.job else "",
        f"user {core.user}" if core.user else "" if core.uid is None else f"uid {core.uid}",
        counted(core.threads, "thread") if core.threads else "",
        size(crash.found.file.size_bytes),
    ]
    return ", ".join(filter(None, known))


class _Table:
    """The layout of one table."""

    def __init__(self, options: Options) -> None:
        self.verbose, self.width = options.verbose, options.width
        self.whole = bool(options.verbose) or not options.lines

    def head(self, word: str, style: str, text: str, names: Iterable[str]) -> Line:
        start = f"{word:<{_INDENT - 1}} "
        room = max(20, min(self.width - len(start) - len(text) - 2, _NODES))
        who = nodes(names, _WHOLE if self.whole else room)
        return line((start, STYLES[style]), text, "  " if text else "", (who, "bold"))

    def below(self, *parts: Part) -> Line:
        text = line(" " * _INDENT, *parts)
        return text if self.whole else text.cut(_TEXT)

    def group(self, group: CoreGroup) -> Iterator[Line]:
        """What crashed where, its frames, and one core to look at."""
        first = group.crashes[0]
        top = group.headline
        where = ""
        if top:
            how = "in" if crashed_in(group.frames, top) else "below"
            where = f" {how} {sanitise(top.function, _NAME)}"
        names = list(dict.fromkeys(crash.node for crash in group.crashes))
        word = signal_name(group.signal)
        yield self.head(word, "fail", f"{group.program or '?'}{where}", names)
        ranks = sorted({c.core.rank for c in group.crashes if c.core.rank is not None})
        jobs = sorted({crash.core.job for crash in group.crashes if crash.core.job})
        told = [counted(len(group.crashes), "core")]
        if ranks:
            told.append(f"rank{'s' * (len(ranks) > 1)} {fold_ranks(ranks)}")
        if jobs:
            told.append(f"job {', '.join(jobs[:4])}")
        since = f"first {first.when} on {first.node}" if len(group.crashes) > 1 else first.when
        yield self.below(f"{', '.join(told)}; {since}")
        yield from self.frames(group)
        yield from self.python(first)
        for crash in group.crashes if self.verbose else group.crashes[:1]:
            yield self.core(crash)
        yield line("")

    def short(self, group: CoreGroup) -> Line:
        """A kind of crash in one line."""
        return next(self.group(group)).with_(f"  {counted(len(group.crashes), 'core')}")

    def more(self, count: int) -> Line:
        more = counted(count, "more kind of crash", "more kinds of crash")
        return line((f"and {more} (-v shows them)", "bold"))

    def core(self, crash: Crash) -> Line:
        """The core file, its process, and what is doubtful about the core."""
        doubt = f"; {crash.core.warning}" if crash.core.warning else ""
        if crash.core.cut:
            doubt += "; gdb's words were more than is kept"
        text = f"{crash.node}: {crash.found.file.path} ({process(crash)})"
        return self.below((text, "dim"), (doubt, STYLES["warn"]))

    def frames(self, group: CoreGroup) -> Iterator[Line]:
        rows = group.frames if self.verbose else group.frames[:_FRAMES]
        names = [sanitise(frame.function, 200 if self.verbose else _NAME) for frame in rows]
        width = max(map(len, names), default=0)
        for number, (name, frame) in enumerate(zip(names, rows)):
            style = "bold" if frame == group.headline else ""
            padded = f"{name:<{width}}  " if frame.place else name
            yield self.below(f"#{number:<3} ", (padded, style), frame.place)
        if group.frames[len(rows) :]:
            more = counted(len(group.frames) - len(rows), "more frame")
            yield self.below((f"     {more} (-v shows them)", "dim"))

    def python(self, crash: Crash) -> Iterator[Line]:
        """The stack as Python has it (py-bt)."""
        rows = crash.backtrace.python
        for row in rows if self.verbose else rows[:_PYTHON]:
            yield self.below(row)

    def unread(self, crashes: Sequence[Crash]) -> Section:
        """Cores without a backtrace, cores with nearly the same reason together."""
        # A number is no word of a reason: what is alike has no node of its own.
        pairs = (((one.core.unread,), f"\0{at}") for at, one in enumerate(crashes))

        def head(row: Alike) -> tuple[Line, list[Crash]]:
            some = [crashes[int(name[1:])] for name in row.names]
            names = list(dict.fromkeys(crash.node for crash in some))
            return self.head("unread", "unknown", counted(len(some), "core"), names), some

        def full(row: Alike) -> Iterator[Line]:
            first, some = head(row)
            yield first
            yield self.below((row.said or row.instance)[0])
            for crash in some if self.verbose else some[:1]:
                yield self.core(crash)

        def short(row: Alike) -> Line:
            return head(row)[0].with_(f"  {(row.said or row.instance)[0]}")

        rows = alike(pairs, _WHOLE if self.verbose else 3)
        return Section(rows, full, short, self.more_rows)

    def more_rows(self, count: int) -> Line:
        return self.below((f"and {count} more (-v shows them)", "bold"))

    def lost(self, cores: Cores, kind: str) -> Section:
        """The nodes that gave no answer."""
        found = [
            (node, why)
            for node, why in cores.errors.items()
            if (node in cores.unreachable) == (kind == "unreachable")
        ]

        def full(row: tuple[str, list[str]]) -> Iterator[Line]:
            yield line((f"{kind:<{_INDENT - 1}} ", STYLES[kind]), (self.names(row[1]), "bold"))
            yield self.below(row[0])

        def short(row: tuple[str, list[str]]) -> Line:
            start = (f"{kind:<{_INDENT - 1}} ", STYLES[kind])
            return line(start, (fits(row[1], 30), "bold"), f"  {row[0]}")

        return Section(reasons(found, self.verbose), full, short, self.more_rows)

    def names(self, names: list[str]) -> str:
        return nodes(names, _WHOLE if self.whole else 60)

    def notes(self, cores: Cores) -> Section:
        """What kept nodes from looking somewhere."""
        found = ((node, one) for node, rows in cores.notes.items() for one in rows)

        def full(row: tuple[str, list[str]]) -> Iterator[Line]:
            yield self.head("note", "warn", "", row[1])
            yield self.below(row[0])

        def short(row: tuple[str, list[str]]) -> Line:
            start = (f"{'note':<{_INDENT - 1}} ", STYLES["warn"])
            return line(start, (fits(row[1], 30), "bold"), f"  {row[0]}")

        return Section(reasons(found, self.verbose), full, short, self.more_rows)


def show(cores: Cores, options: Options = PLAIN) -> Iterator[Line]:
    """Each kind of crash with its backtrace, then what could not be read, and why.

    With ``verbose`` every frame and every core is shown.
    """
    table = _Table(options)
    sections = [
        Section(cores.groups, table.group, table.short, table.more, _GROUPS),
        table.unread(cores.unread),
        table.lost(cores, "unreachable"),
        table.lost(cores, "failed"),
        table.notes(cores),
    ]
    room = 0 if table.whole else options.lines - 3
    yield from fitted(sections, room, options.width, _FEW)
    older = sum(cores.more.values())
    if older:
        text = f"{counted(older, 'older core')} not read (--since, --limit: fewer at once)"
        yield table.head("more", "warn", text, cores.more)
    if not cores.complete:
        yield line(("partial  ", STYLES["warn"]), "interrupted: not all cores were looked at")
    yield line(summary(cores))


def summary(cores: Cores) -> str:
    """``4 cores on 2 nodes: 3 read, of 1 kind; 1 not read``."""
    if not cores.crashes:
        return f"no core found on {counted(len(cores.asked) - len(cores.errors), 'node')}"
    where = counted(len({crash.node for crash in cores.crashes}), "node")
    told = f"{counted(len(cores.crashes), 'core')} on {where}: {len(cores.read)} read"
    if cores.groups:
        told += f", of {counted(len(cores.groups), 'kind')}"
    return f"{told}; {len(cores.unread)} not read" if cores.unread else told

"""The cores on a terminal: where each kind of crash happened, the first to crash first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nodeready.core.text import counted, sanitise
from nodeready.reports.lines import STYLES, StyledLine, line
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.sections import RowSection, fitted
from nodeready.reports.similar_texts import SimilarTexts, fold_similar, reasons
from nodeready.reports.table_layout import NO_LIMIT, TableLayout
from nodeready.runs.cores import CoreGroup, Cores, Crash, crashed_in
from nodeready.runs.stacks.document import fold_ranks

#: Maximum groups, frames and lines of Python's own stack without -v.
_GROUPS, _FRAMES, _PYTHON = 20, 14, 6
#: Maximum rows of a section that are shown in full.
_FULL_ROWS = 4
#: Maximum columns of a function, and of a node set.
_NAME, _NODES = 44, 120
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size(number: int) -> str:
    """``5.2 MiB``."""
    value, unit = float(number), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else counted(number, "byte")


def process(crash: Crash) -> str:
    """``pid 4711, rank 3, user ada, 37 threads, 5.2 MiB``: the known values of a process."""
    core = crash.core
    parts = [
        "" if crash.pid is None else f"pid {crash.pid}",
        "" if core.rank is None else f"rank {core.rank}",
        f"job {core.job}" if core.job else "",
        f"user {core.user}" if core.user else "" if core.uid is None else f"uid {core.uid}",
        counted(core.threads, "thread") if core.threads else "",
        size(crash.location.file.size_bytes),
    ]
    return ", ".join(filter(None, parts))


class _CoresTable(TableLayout):
    def named(self, word: str, style: str, text: str, names: Iterable[str]) -> StyledLine:
        """The first line of a row: its text and its nodes."""
        word = f"{word:<{self.indent - 1}} "
        room = max(20, min(self.width - len(word) - len(text) - 2, _NODES))
        return self.head(word, style, text, "  " if text else "", self.names(names, room))

    def group(self, group: CoreGroup) -> Iterator[StyledLine]:
        """The program and place of a crash, its frames, and one core to look at."""
        first = group.crashes[0]
        top = group.headline
        place = ""
        if top:
            preposition = "in" if crashed_in(group.frames, top) else "below"
            place = f" {preposition} {sanitise(top.function, _NAME)}"
        yield self.named(group.signal_name, "fail", f"{group.program or '?'}{place}", group.nodes)
        jobs = sorted({crash.core.job for crash in group.crashes if crash.core.job})
        parts = [counted(len(group.crashes), "core")]
        if group.ranks:
            parts.append(f"rank{'s' * (len(group.ranks) > 1)} {fold_ranks(group.ranks)}")
        if jobs:
            parts.append(f"job {', '.join(jobs[:4])}")
        since = f"first {first.when} on {first.node}" if len(group.crashes) > 1 else first.when
        yield self.detail(f"{', '.join(parts)}; {since}")
        yield from self.frames(group)
        yield from self.python(first)
        for crash in group.crashes if self.verbose else group.crashes[:1]:
            yield self.core(crash)
        yield line("")

    def short(self, group: CoreGroup) -> StyledLine:
        """A kind of crash in one line."""
        return next(self.group(group)).with_text(f"  {counted(len(group.crashes), 'core')}")

    def more_kinds(self, count: int) -> StyledLine:
        kinds = counted(count, "more kind of crash", "more kinds of crash")
        return line((f"and {kinds} (-v shows them)", "bold"))

    def core(self, crash: Crash) -> StyledLine:
        """The core file, its process, and any doubt about the core."""
        doubt = f"; {crash.core.warning}" if crash.core.warning else ""
        if crash.core.cut:
            doubt += "; gdb's output was cut"
        text = f"{crash.node}: {crash.location.file.path} ({process(crash)})"
        return self.detail((text, "dim"), (doubt, STYLES["warn"]))

    def frames(self, group: CoreGroup) -> Iterator[StyledLine]:
        rows = group.frames if self.verbose else group.frames[:_FRAMES]
        names = [sanitise(frame.function, 200 if self.verbose else _NAME) for frame in rows]
        width = max(map(len, names), default=0)
        for number, (name, frame) in enumerate(zip(names, rows)):
            style = "bold" if frame == group.headline else ""
            padded = f"{name:<{width}}  " if frame.place else name
            yield self.detail(f"#{number:<3} ", (padded, style), frame.place)
        if group.frames[len(rows) :]:
            hidden = counted(len(group.frames) - len(rows), "more frame")
            yield self.detail((f"     {hidden} (-v shows them)", "dim"))

    def python(self, crash: Crash) -> Iterator[StyledLine]:
        """The stack as Python has it (py-bt)."""
        rows = crash.backtrace.python
        for row in rows if self.verbose else rows[:_PYTHON]:
            yield self.detail(row)

    def unread(self, crashes: Sequence[Crash]) -> RowSection:
        """Cores without a backtrace, by similar reasons."""
        # Numbers stand in place of node names, because a reason may contain a node's name.
        pairs = (((crash.core.unread,), f"\0{index}") for index, crash in enumerate(crashes))

        def head(row: SimilarTexts) -> tuple[StyledLine, list[Crash]]:
            members = [crashes[int(name[1:])] for name in row.names]
            names = list(dict.fromkeys(crash.node for crash in members))
            return self.named("unread", "unknown", counted(len(members), "core"), names), members

        def full(row: SimilarTexts) -> Iterator[StyledLine]:
            first, members = head(row)
            yield first
            yield self.detail(row.texts[0])
            for crash in members if self.verbose else members[:1]:
                yield self.core(crash)

        def short(row: SimilarTexts) -> StyledLine:
            return head(row)[0].with_text(f"  {row.texts[0]}")

        rows = fold_similar(pairs, NO_LIMIT if self.verbose else 3)
        return RowSection(rows, full, short, self.count_line)

    def notes(self, cores: Cores) -> RowSection:
        """Directories that a node could not search, and why."""
        notes = ((node, note) for node, notes in cores.notes.items() for note in notes)
        return self.by_reason("note", "warn", reasons(notes, self.verbose))


def show(cores: Cores, options: Options = PLAIN) -> Iterator[StyledLine]:
    """Each kind of crash with its backtrace, then the unread cores and the failed nodes.

    With ``verbose`` every frame and every core is shown.
    """
    table = _CoresTable(options)
    sections = [
        RowSection(cores.groups, table.group, table.short, table.more_kinds, _GROUPS),
        table.unread(cores.unread),
        *table.gaps(cores.gaps),
        table.notes(cores),
    ]
    room = 0 if table.is_whole else options.lines - 3
    yield from fitted(sections, room, options.width, _FULL_ROWS)
    older = sum(cores.unlisted.values())
    if older:
        text = f"{counted(older, 'older core')} not read (--since, --limit: fewer at once)"
        yield table.named("more", "warn", text, cores.unlisted)
    if not cores.complete:
        yield table.partial()
    yield line(summary(cores))


def summary(cores: Cores) -> str:
    """``4 cores on 2 nodes: 3 read, of 1 kind; 1 not read``."""
    if not cores.crashes:
        return f"no core found on {counted(len(cores.nodes) - len(cores.gaps), 'node')}"
    node_count = counted(len({crash.node for crash in cores.crashes}), "node")
    text = f"{counted(len(cores.crashes), 'core')} on {node_count}: {len(cores.read)} read"
    if cores.groups:
        text += f", of {counted(len(cores.groups), 'kind')}"
    return f"{text}; {len(cores.unread)} not read" if cores.unread else text

"""The last lines on a terminal: what is missing, who stopped first, then the smallest group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nodeready.reports.registry import (
    PLAIN,
    STYLES,
    Line,
    Options,
    Part,
    Section,
    fits,
    fitted,
    line,
    nodes,
    reasons,
)
from nodeready.reports.stacks_table import ranks
from nodeready.text import counted, span
from nodeready.triage.logs import LogGroup, LogReport, TailDocument

#: Columns of the words on the left; groups that are shown without -v.
_INDENT, _MOST = 13, 20
#: Columns at most of a node set and of ranks; none under -v.
_NODES, _RANKS, _WHOLE = 60, 40, 1_000_000
#: Characters of a line that are shown without -v.
_TEXT = 500
_WORDS = {"no-file": ("no file", "fail"), "unreadable": ("unreadable", "fail"),
          "stopped": ("stopped", "fail"), "skipped": ("skipped", "na")}  # fmt: skip


class _Table:
    def __init__(self, tail: TailDocument, options: Options) -> None:
        self.tail, self.verbose = tail, options.verbose
        self.whole = bool(options.verbose) or not options.lines

    def head(self, word: str, style: str, *parts: Part) -> Line:
        return line((f"{word:<{_INDENT}}", style), *parts)

    def below(self, *parts: Part) -> Line:
        text = line(" " * _INDENT, *parts)
        return text if self.whole else text.cut(_TEXT)

    def names(self, names: tuple[str, ...] | list[str]) -> tuple[str, str]:
        return nodes(names, _WHOLE if self.whole else _NODES), "bold"

    def trouble(self, word: str, style: str, found: Mapping[str, str]) -> Section:
        """The nodes that have no whole answer, nodes with the same reason together."""

        def full(row: tuple[str, list[str]]) -> Iterator[Line]:
            yield self.head(word, STYLES[style], self.names(row[1]))
            yield self.below(row[0])

        def short(row: tuple[str, list[str]]) -> Line:
            return self.head(word, STYLES[style], (fits(row[1], 30), "bold"), f"  {row[0]}")

        return Section(reasons(found.items(), self.verbose), full, short, self.more)

    def more(self, count: int) -> Line:
        return self.below((f"and {counted(count, 'more group')} (-v shows them)", "bold"))

    def short(self, group: LogGroup) -> Line:
        """A group in one line: its last line of all."""
        last = group.lines[-1] if group.lines else group.why
        return next(self.whole_of(group)).with_(f"  {last}" if last else "")

    def whole_of(self, group: LogGroup) -> Iterator[Line]:
        return self.lines(group) if group.kind in ("stopped", "lines") else self.unread(group)

    def groups(self, *kinds: str) -> list[Section]:
        """The groups of these kinds; the largest one of files that were read stands apart: the
        others are compared with it, and it is shown in any case."""
        rows = [group for group in self.tail.groups if group.kind in kinds]
        last = rows[-1:] if "lines" in kinds else []
        rest = rows[: len(rows) - len(last)]
        return [
            Section(some, self.whole_of, self.short, self.more, _MOST - len(last))
            for some in (rest, last)
        ]

    def who(self, group: LogGroup) -> str:
        """The ranks of a group's files, as far as the paths name them."""
        found = sorted({file.rank for file in group.files if file.rank is not None})
        local = sorted({file.local_rank for file in group.files if file.local_rank is not None})
        limit = _WHOLE if self.verbose else _RANKS
        if found:
            return f"  {ranks(found, limit)}"
        return f"  local {ranks(local, limit)}" if local else ""

    def eg(self, group: LogGroup) -> str:
        return "e.g. " if len(group.files) > 1 else ""

    def unread(self, group: LogGroup) -> Iterator[Line]:
        """Files that were not read, or nodes without any."""
        word, style = _WORDS[group.kind]
        count = f"  {counted(len(group.files), 'path')}" if group.files else ""
        yield self.head(word, STYLES[style], self.names(group.nodes), self.who(group), count)
        where = f"{self.eg(group)}{group.example}: " if group.example else ""
        yield self.below(where, group.why)

    def lines(self, group: LogGroup) -> Iterator[Line]:
        """A group of files: its nodes and ranks, when it was last written, its last lines."""
        word = f"{len(group.files)} of {self.tail.files}"
        style = STYLES["warn"] if len(group.files) * 2 < self.tail.files else ""
        if group.kind in _WORDS:
            word, style = _WORDS[group.kind][0], STYLES[_WORDS[group.kind][1]]
        yield self.head(
            word, style, self.names(group.nodes), self.who(group), f"  {self.state(group)}"
        )
        yield self.below((f"{self.eg(group)}{group.example}", "dim"))
        for text in group.lines:
            yield self.below(("| ", "dim"), text)
        if not group.lines:
            yield self.below(("no line" if self.tail.grep else "empty", "dim"))

    def reports(self) -> Iterator[Line]:
        """What the watchdogs say, the rank that is least far first; equal ones are one row."""
        equal: dict[str, list[int]] = {}
        for one in self.tail.reports:
            known = equal.setdefault(_said(one), [])
            if one.rank is not None and one.rank not in known:
                known.append(one.rank)
        rows = list(equal.items())
        most = len(rows) if self.verbose else _MOST
        for at, (words, found) in enumerate(rows[:most]):
            who = ranks(sorted(found), _WHOLE if self.verbose else _RANKS) or "a rank"
            said = ((who, "bold"), f"  {words}")
            yield self.below(*said) if at else self.head("watchdog", STYLES["warn"], *said)
        if len(rows) > most:
            yield self.below((f"and {len(rows) - most} more (-v shows them)", "bold"))

    def state(self, group: LogGroup) -> str:
        parts = [counted(len(group.files), "file")]
        if self.tail.grep:
            found = sum(file.matches or 0 for file in group.files)
            parts.append(counted(found, "match", "matches"))
        parts.append(f"written {span(min(file.age_s or 0 for file in group.files))} ago")
        if group.kind == "stopped":
            behind = sorted(file.behind_s or 0 for file in group.files)
            least, most = span(behind[0]), span(behind[-1])
            far = least if least == most else f"{least} to {most}"
            parts.append(f"{far} before the others")
        return ", ".join(parts)


def _said(one: LogReport) -> str:
    """``default_pg: ALLREDUCE 7 timed out, 9 enqueued, 6 completed``."""
    number = "" if one.sequence is None else f" {one.sequence}"
    what = f"{one.operation or 'collective'}{number}"
    words = {
        "timeout": f"{what} timed out",
        "status": "",
        "missing": f"has not come to {what}",
        "reached": f"has come to {what}, others have not",
        "lost": "its connection to another rank broke",
        "mismatch": f"has called {what}, others another one",
        "stuck": "its watchdog hangs (in CUDA, in NCCL, or it waits for the GIL)",
    }[one.kind]
    counts = (
        f"{count} {what}"
        for count, what in ((one.enqueued, "enqueued"), (one.completed, "completed"))
        if count is not None
    )
    text = ", ".join(filter(None, (words, *counts)))
    return f"{one.group}: {text}" if one.group else text


def show(tail: TailDocument, options: Options = PLAIN) -> Iterator[Line]:
    """Nodes and files without an answer, then the groups of lines: the odd one out on top.

    With ``verbose`` nothing is cut or left out.
    """
    table = _Table(tail, options)
    rows = sum(group.kind in ("stopped", "lines") for group in tail.groups)
    after = [*table.reports(), *_end(tail, rows)]
    sections = [
        table.trouble("unreachable", "unreachable", tail.unreachable),
        table.trouble("failed", "failed", tail.failed),
        table.trouble("partial", "warn", tail.notes),
        *table.groups("no-file", "unreadable"),
        *table.groups("stopped", "lines"),
        *table.groups("skipped"),
    ]
    room = 0 if table.whole else max(_MOST, options.lines - len(after))
    yield from fitted(sections, room, options.width)
    yield from after


def _end(tail: TailDocument, groups: int) -> Iterator[Line]:
    where = {node for g in tail.groups if g.kind in ("stopped", "lines") for node in g.nodes}
    yield line("")
    if not tail.complete:
        yield line(("partial      ", STYLES["warn"]), "interrupted: not all nodes answered")
    if tail.left_out:
        left = counted(tail.left_out, "file matches", "files match")
        yield line(f"{left}, too, and were written before these: --max-files takes more")
    yield line(
        f"{counted(tail.files, 'file')} on {counted(len(where), 'node')}, "
        f"{counted(groups, 'group')}"
    )
    if groups > _MOST and groups * 2 > tail.files:
        yield line("few lines are equal: -n 1 compares only the last one, --grep chooses lines")

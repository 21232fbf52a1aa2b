"""The last lines on a terminal: what is missing, who stopped first, then the smallest group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nodeready.reports.registry import PLAIN, STYLES, Line, Options, Part, grouped, line, nodes
from nodeready.reports.stacks_table import ranks
from nodeready.text import counted
from nodeready.triage.logs import Group, Report, Tail

#: Columns of the words on the left; groups that are shown without -v.
_INDENT, _MOST = 13, 20
#: Columns at most of a node set and of ranks; none under -v.
_NODES, _RANKS, _WHOLE = 60, 40, 1_000_000
#: Characters of a line that are shown without -v.
_TEXT = 500
_WORDS = {"no-file": ("no file", "fail"), "unreadable": ("unreadable", "fail"),
          "stopped": ("stopped", "fail"), "skipped": ("skipped", "na")}  # fmt: skip


def span(seconds: float) -> str:
    """``12 s``, ``4 min 10 s``, ``3 h 5 min``, ``2 days``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    if whole < 48 * 3600:
        rest = whole % 3600 // 60
        return f"{whole // 3600} h" + (f" {rest} min" if rest else "")
    return f"{whole // 86400} days"


class _Table:
    def __init__(self, tail: Tail, verbose: int) -> None:
        self.tail, self.verbose = tail, verbose

    def head(self, word: str, style: str, *parts: Part) -> Line:
        return line((f"{word:<{_INDENT}}", style), *parts)

    def below(self, *parts: Part) -> Line:
        text = line(" " * _INDENT, *parts)
        return text if self.verbose else text.cut(_TEXT)

    def names(self, names: tuple[str, ...] | list[str]) -> tuple[str, str]:
        return nodes(names, _WHOLE if self.verbose else _NODES), "bold"

    def trouble(self, word: str, style: str, found: Mapping[str, str]) -> Iterator[Line]:
        """The nodes that have no whole answer, nodes with the same reason together."""
        for why, names in grouped((why, node) for node, why in found.items()):
            yield self.head(word, STYLES[style], self.names(names))
            yield self.below(why)

    def who(self, group: Group) -> str:
        """The ranks of a group's files, as far as the paths name them."""
        found = sorted({file.rank for file in group.files if file.rank is not None})
        local = sorted({file.local_rank for file in group.files if file.local_rank is not None})
        limit = _WHOLE if self.verbose else _RANKS
        if found:
            return f"  {ranks(found, limit)}"
        return f"  local {ranks(local, limit)}" if local else ""

    def eg(self, group: Group) -> str:
        return "e.g. " if len(group.files) > 1 else ""

    def unread(self, group: Group) -> Iterator[Line]:
        """Files that were not read, or nodes without any."""
        word, style = _WORDS[group.kind]
        count = f"  {counted(len(group.files), 'path')}" if group.files else ""
        yield self.head(word, STYLES[style], self.names(group.nodes), self.who(group), count)
        where = f"{self.eg(group)}{group.example}: " if group.example else ""
        yield self.below(where, group.why)

    def lines(self, group: Group) -> Iterator[Line]:
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

    def state(self, group: Group) -> str:
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


def _said(one: Report) -> str:
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


def show(tail: Tail, options: Options = PLAIN) -> Iterator[Line]:
    """Nodes and files without an answer, then the groups of lines: the odd one out on top.

    With ``verbose`` nothing is cut or left out.
    """
    verbose = options.verbose
    table = _Table(tail, verbose)
    yield from table.trouble("unreachable", "unreachable", tail.unreachable)
    yield from table.trouble("failed", "failed", tail.failed)
    yield from table.trouble("partial", "warn", tail.notes)
    for group in tail.groups:
        if group.kind in ("no-file", "unreadable"):
            yield from table.unread(group)
    rows = [group for group in tail.groups if group.kind in ("stopped", "lines")]
    hidden = 0 if verbose else max(0, len(rows) - _MOST)
    for at, group in enumerate(rows):
        # The largest group is shown in any case: the others are compared with it.
        if hidden and _MOST - 1 <= at < len(rows) - 1:
            if at == _MOST - 1:
                yield table.below((f"and {hidden} more groups (-v shows them)", "bold"))
            continue
        yield from table.lines(group)
    for group in tail.groups:
        if group.kind == "skipped":
            yield from table.unread(group)
    yield from table.reports()
    yield from _end(tail, len(rows))


def _end(tail: Tail, groups: int) -> Iterator[Line]:
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

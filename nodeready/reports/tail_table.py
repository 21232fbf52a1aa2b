"""The last lines of logs on a terminal: missing nodes and files, stopped files, equal lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nodeready.core.text import counted, span
from nodeready.reports.lines import StyledLine, line
from nodeready.reports.rank_groups import ranks
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.sections import RowSection, fitted
from nodeready.reports.table_layout import NO_LIMIT, TableLayout
from nodeready.runs.tail import BEHIND_S, LogGroup, LogReport, RankFile, TailDocument

#: Maximum groups without -v.
_MAX_GROUPS = 20
#: Maximum columns of a set of ranks without -v.
_RANKS = 40
#: Kind of group -> its word and its style.
_WORDS = {"no-file": ("no file", "fail"), "unreadable": ("unreadable", "fail"),
          "stopped": ("stopped", "fail"), "skipped": ("skipped", "na")}  # fmt: skip


class _TailTable(TableLayout):
    indent = 13

    def __init__(self, tail: TailDocument, options: Options) -> None:
        super().__init__(options)
        self.tail = tail

    def count_line(self, count: int) -> StyledLine:
        return self.detail((f"and {counted(count, 'more group')} (-v shows them)", "bold"))

    def short(self, group: LogGroup) -> StyledLine:
        """A group in one line, with the last line of its files."""
        last = group.lines[-1] if group.lines else group.reason
        return next(self.full(group)).with_text(f"  {last}" if last else "")

    def full(self, group: LogGroup) -> Iterator[StyledLine]:
        return self.lines(group) if group.kind in ("stopped", "lines") else self.unread(group)

    def groups(self, *kinds: str) -> list[RowSection]:
        """The groups of these kinds.

        The largest group of read files, with which all groups are compared, is a section of its
        own, so that it is always shown.
        """
        rows = [group for group in self.tail.groups if group.kind in kinds]
        last = rows[-1:] if "lines" in kinds else []
        smaller = rows[: len(rows) - len(last)]
        return [
            RowSection(section, self.full, self.short, self.count_line, _MAX_GROUPS - len(last))
            for section in (smaller, last)
        ]

    def rank_text(self, group: LogGroup) -> str:
        """The known ranks of a group's files, and the nodes that a mixed log names."""
        hosts = {file.host: None for file in group.files if file.host and not file.is_here}
        return self.ranks_of(group) + (f" of {self.names(hosts)[0]}" if hosts else "")

    def ranks_of(self, group: LogGroup) -> str:
        """The known ranks of a group's files."""
        global_ranks = sorted({file.rank for file in group.files if file.rank is not None})
        local = sorted({file.local_rank for file in group.files if file.local_rank is not None})
        limit = NO_LIMIT if self.verbose else _RANKS
        if global_ranks:
            return f"  {ranks(global_ranks, limit)}"
        return f"  local {ranks(local, limit)}" if local else ""

    def example_word(self, group: LogGroup) -> str:
        return "e.g. " if len(group.files) > 1 else ""

    def unread(self, group: LogGroup) -> Iterator[StyledLine]:
        """Files that were not read, or nodes without a file."""
        word, style = _WORDS[group.kind]
        count = f"  {counted(len(group.files), 'path')}" if group.files else ""
        yield self.head(word, style, self.names(group.nodes), self.rank_text(group), count)
        example = f"{self.example_word(group)}{group.example}: " if group.example else ""
        yield self.detail(example, group.reason)

    def lines(self, group: LogGroup) -> Iterator[StyledLine]:
        """A group of files: its nodes and ranks, the time of its last write, its last lines."""
        word = f"{len(group.files)} of {self.tail.files}"
        style = "warn" if len(group.files) * 2 < self.tail.files else ""
        if group.kind in _WORDS:
            word, style = _WORDS[group.kind]
        elif not any(file.is_known for file in group.files):
            word, style = "no rank", ""
        yield self.head(
            word, style, self.names(group.nodes), self.rank_text(group), f"  {self.state(group)}"
        )
        yield self.detail((f"{self.example_word(group)}{group.example}", "dim"))
        for text in group.lines:
            yield self.detail(("| ", "dim"), text)
        if not group.lines:
            has_lines = self.tail.grep or any(file.is_mixed for file in group.files)
            yield self.detail(
                ("no line in the part that was read" if has_lines else "empty", "dim")
            )

    def reports(self) -> Iterator[StyledLine]:
        """The watchdogs' reports, the rank with least progress first; equal texts share a row."""
        ranks_by_text: dict[str, list[int]] = {}
        for report in self.tail.reports:
            report_ranks = ranks_by_text.setdefault(_watchdog_text(report), [])
            if report.rank is not None and report.rank not in report_ranks:
                report_ranks.append(report.rank)
        rows = list(ranks_by_text.items())
        maximum = len(rows) if self.verbose else _MAX_GROUPS
        for index, (text, report_ranks) in enumerate(rows[:maximum]):
            rank_text = (
                ranks(sorted(report_ranks), NO_LIMIT if self.verbose else _RANKS) or "a rank"
            )
            parts = ((rank_text, "bold"), f"  {text}")
            yield self.detail(*parts) if index else self.head("watchdog", "warn", *parts)
        if len(rows) > maximum:
            yield self.detail((f"and {len(rows) - maximum} more (-v shows them)", "bold"))

    def end(self, groups: int) -> Iterator[StyledLine]:
        """What was left out, and the counts."""
        tail = self.tail
        read = [file for g in tail.groups if g.kind in ("stopped", "lines") for file in g.files]
        names = {file.node for file in read}
        yield line("")
        if not tail.complete:
            yield self.partial()
        if tail.left_out:
            files = counted(tail.left_out, "file matches", "files match")
            yield line(f"{files}, too, and were written before these: --max-files takes more")
        yield line(
            f"{_counted_files(read)} on {counted(len(names), 'node')}, {counted(groups, 'group')}"
        )
        if groups > _MAX_GROUPS and groups * 2 > tail.files:
            yield line(
                "few lines are equal: -n 1 compares only the last one, --grep chooses lines"
            )

    def state(self, group: LogGroup) -> str:
        paths = counted(len({(file.node, file.path) for file in group.files}), "file")
        parts = [f"in {paths}" if any(file.is_mixed for file in group.files) else paths]
        if self.tail.grep:
            matches = sum(file.matches or 0 for file in group.files)
            parts.append(counted(matches, "match", "matches"))
        parts.append(f"written {span(min(file.age_s or 0 for file in group.files))} ago")
        is_late = any((file.behind_s or 0) > BEHIND_S for file in group.files)
        after = [file.lines_after or 0 for file in group.files if file.is_mixed and not is_late]
        if group.kind == "stopped" and after:
            parts.append(f"{min(after):,} lines of other ranks since")
        elif group.kind == "stopped":
            behind = sorted(file.behind_s or 0 for file in group.files)
            minimum, maximum = span(behind[0]), span(behind[-1])
            gap = minimum if minimum == maximum else f"{minimum} to {maximum}"
            parts.append(f"{gap} before most files")
        return ", ".join(parts)


def _counted_files(files: Sequence[RankFile]) -> str:
    """``3 files``; of mixed logs ``512 ranks in 1 file``."""
    paths = counted(len({(file.node, file.path) for file in files}), "file")
    if not any(file.is_mixed for file in files):
        return paths
    return f"{counted(sum(file.is_known for file in files), 'rank')} in {paths}"


def _watchdog_text(report: LogReport) -> str:
    """``default_pg: ALLREDUCE 7 timed out, 9 enqueued, 6 completed``."""
    number = "" if report.sequence is None else f" {report.sequence}"
    collective = f"{report.operation or 'collective'}{number}"
    words = {
        "timeout": f"{collective} timed out",
        "status": "",
        "missing": f"has not called {collective}",
        "reached": f"has called {collective}, other ranks have not",
        "lost": "its connection to another rank broke",
        "mismatch": f"has called {collective}, other ranks a different one",
        "stuck": "its watchdog hangs (in CUDA, in NCCL, or it waits for the GIL)",
    }[report.kind]
    counts = (
        f"{count} {state}"
        for count, state in ((report.enqueued, "enqueued"), (report.completed, "completed"))
        if count is not None
    )
    text = ", ".join(filter(None, (words, *counts)))
    return f"{report.group}: {text}" if report.group else text


def show(tail: TailDocument, options: Options = PLAIN) -> Iterator[StyledLine]:
    """Nodes and files without an answer, then the groups of lines, the smallest first.

    With ``verbose`` nothing is cut or left out.
    """
    table = _TailTable(tail, options)
    rows = sum(group.kind in ("stopped", "lines") for group in tail.groups)
    after = [*table.reports(), *table.end(rows)]
    sections = [
        *table.gaps(tail.gaps),
        *table.groups("no-file", "unreadable"),
        *table.groups("stopped", "lines"),
        *table.groups("skipped"),
    ]
    room = 0 if table.is_whole else max(_MAX_GROUPS, options.lines - len(after))
    yield from fitted(sections, room, options.width)
    yield from after

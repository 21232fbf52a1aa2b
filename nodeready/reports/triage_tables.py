"""`cores`, `tail`, `postmortem`, `incident`, `jobs` and `undrain` on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from nodeready.agent.gate.undrain import leftover_text
from nodeready.core.outcome import reasons_of
from nodeready.core.text import counted, sanitise, span
from nodeready.reports.lines import (
    MAX_TEXT,
    NO_LIMIT,
    STYLES,
    RowSection,
    SimilarTexts,
    StyledLine,
    TableLayout,
    columns,
    fitted,
    fold_similar,
    grouped,
    line,
    node_set,
    reasons,
    show_gaps,
    with_inventory,
)
from nodeready.reports.rank_groups import ranks
from nodeready.reports.registry import PLAIN, Options
from nodeready.runs.cores import CoreGroup, Cores, Crash, crashed_in
from nodeready.runs.incident import Incident, Part
from nodeready.runs.jobs import MAX_NAME, Jobs
from nodeready.runs.postmortem.document import FailureGroup, NodeEvent, Postmortem
from nodeready.runs.stacks.document import fold_ranks
from nodeready.runs.tail import BEHIND_S, LogGroup, LogReport, RankFile, TailDocument
from nodeready.runs.undrain import OUTCOMES, Undrain, next_commands

# --- `cores`: where each kind of crash happened, the first to crash first.

#: Maximum groups, frames and lines of Python's own stack without -v.
_GROUPS, _FRAMES, _PYTHON = 20, 14, 6
_FULL_ROWS = 4  # maximum rows of a section that are shown in full
_CORE_NAME, _CORE_NODES = 44, 120  # maximum columns of a function, and of a node set
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size(number: int) -> str:
    """``5.2 MiB``."""
    value, unit = float(number), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else counted(number, "byte")


def crash_process(crash: Crash) -> str:
    """``pid 4711, rank 3, user ada, 37 threads, 5.2 MiB``: the known values of a crash_process."""
    core = crash.core
    numbers = {"pid": crash.pid, "rank": core.rank, "job": core.job or None}
    numbers |= {"user": core.user} if core.user else {"uid": core.uid}
    parts = [f"{word} {value}" for word, value in numbers.items() if value is not None]
    parts += [counted(core.threads, "thread")] if core.threads else []
    return ", ".join([*parts, size(crash.location.file.size_bytes)])


class _CoresTable(TableLayout):
    def named(self, word: str, style: str, text: str, names: Iterable[str]) -> StyledLine:
        """The first line of a row: its text and its nodes."""
        word = f"{word:<{self.indent - 1}} "
        room = max(20, min(self.width - len(word) - len(text) - 2, _CORE_NODES))
        return self.head(word, style, text, "  " if text else "", self.names(names, room))

    def group(self, group: CoreGroup) -> Iterator[StyledLine]:
        """The program and place of a crash, its frames, and one core to look at."""
        first = group.crashes[0]
        top = group.headline
        preposition = "in" if top and crashed_in(group.frames, top) else "below"
        place = f" {preposition} {sanitise(top.function, _CORE_NAME)}" if top else ""
        program = group.program or "?"
        yield self.named(group.signal_name, "fail", f"{program}{place}", group.nodes)
        jobs = sorted({crash.core.job for crash in group.crashes if crash.core.job})
        parts = [counted(len(group.crashes), "core"), *filter(None, [ranks(group.ranks)])]
        parts += [f"job {', '.join(jobs[:4])}"] if jobs else []
        since = f"first {first.when} on {first.node}" if len(group.crashes) > 1 else first.when
        yield self.detail(f"{', '.join(parts)}; {since}")
        yield from self.frames(group)
        yield from self.python(first)
        for crash in group.crashes if self.verbose else group.crashes[:1]:
            yield self.core(crash)
        yield line("")

    def short(self, group: CoreGroup) -> StyledLine:
        return next(self.group(group)).with_text(f"  {counted(len(group.crashes), 'core')}")

    def more_kinds(self, count: int) -> StyledLine:
        kinds = counted(count, "more kind of crash", "more kinds of crash")
        return line((f"and {kinds} (-v shows them)", "bold"))

    def core(self, crash: Crash) -> StyledLine:
        """The core file, its crash_process, and any doubt about the core."""
        doubt = f"; {crash.core.warning}" if crash.core.warning else ""
        doubt += "; gdb's output was cut" if crash.core.cut else ""
        text = f"{crash.node}: {crash.location.file.path} ({crash_process(crash)})"
        return self.detail((text, "dim"), (doubt, STYLES["warn"]))

    def frames(self, group: CoreGroup) -> Iterator[StyledLine]:
        rows = group.frames if self.verbose else group.frames[:_FRAMES]
        names = [sanitise(frame.function, 200 if self.verbose else _CORE_NAME) for frame in rows]
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
        yield from map(self.detail, rows if self.verbose else rows[:_PYTHON])

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


def cores_lines(cores: Cores, options: Options = PLAIN) -> Iterator[StyledLine]:
    """Each kind of crash with its backtrace, then the unread cores and the failed nodes.

    With ``verbose`` every frame and every core is shown.
    """
    table = _CoresTable(options)
    groups = RowSection(cores.groups, table.group, table.short, table.more_kinds, _GROUPS)
    # Directories that a node could not search, and why.
    pairs = ((node, note) for node, notes in cores.notes.items() for note in notes)
    notes = table.by_reason("note", "warn", reasons(pairs, table.verbose))
    sections = [groups, table.unread(cores.unread), *table.gaps(cores.gaps), notes]
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


# --- `tail`: missing nodes and files, stopped files, equal lines.

_MAX_LOG_GROUPS = 20  # maximum groups without -v
_LOG_RANKS = 40  # maximum columns of a set of ranks without -v
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
        last = group.lines[-1] if group.lines else group.reason
        return next(self.full(group)).with_text(f"  {last}" if last else "")

    def full(self, group: LogGroup) -> Iterator[StyledLine]:
        return self.lines(group) if group.kind in ("stopped", "lines") else self.unread(group)

    def groups(self, *kinds: str) -> list[RowSection]:
        """The groups of these kinds. The largest group of read files, with which all groups are
        compared, is a separate section, so that it is always shown.
        """
        rows = [group for group in self.tail.groups if group.kind in kinds]
        last = rows[-1:] if "lines" in kinds else []
        smaller = rows[: len(rows) - len(last)]
        functions, maximum = (self.full, self.short, self.count_line), _MAX_LOG_GROUPS - len(last)
        return [RowSection(section, *functions, maximum) for section in (smaller, last)]

    def rank_text(self, group: LogGroup) -> str:
        """The known ranks of a group's files, and the nodes that a mixed log names."""
        global_ranks = sorted({file.rank for file in group.files if file.rank is not None})
        local = sorted({file.local_rank for file in group.files if file.local_rank is not None})
        limit = NO_LIMIT if self.verbose else _LOG_RANKS
        text = f"  local {ranks(local, limit)}" if local else ""
        text = f"  {ranks(global_ranks, limit)}" if global_ranks else text
        hosts = {file.host: None for file in group.files if file.host and not file.is_here}
        return text + (f" of {self.names(hosts)[0]}" if hosts else "")

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
        state = f"  {self.state(group)}"
        yield self.head(word, style, self.names(group.nodes), self.rank_text(group), state)
        yield self.detail((f"{self.example_word(group)}{group.example}", "dim"))
        for text in group.lines:
            yield self.detail(("| ", "dim"), text)
        if not group.lines:
            has_lines = self.tail.grep or any(file.is_mixed for file in group.files)
            text = "no line in the part that was read" if has_lines else "empty"
            yield self.detail((text, "dim"))

    def reports(self) -> Iterator[StyledLine]:
        """The watchdogs' reports, the rank with least progress first; equal texts share a row."""
        ranks_by_text: dict[str, list[int]] = {}
        for report in self.tail.reports:
            report_ranks = ranks_by_text.setdefault(_watchdog_text(report), [])
            if report.rank is not None and report.rank not in report_ranks:
                report_ranks.append(report.rank)
        rows = list(ranks_by_text.items())
        maximum = len(rows) if self.verbose else _MAX_LOG_GROUPS
        limit = NO_LIMIT if self.verbose else _LOG_RANKS
        for index, (text, report_ranks) in enumerate(rows[:maximum]):
            parts = ((ranks(sorted(report_ranks), limit) or "a rank", "bold"), f"  {text}")
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
        nodes = counted(len(names), "node")
        yield line(f"{_counted_files(read)} on {nodes}, {counted(groups, 'group')}")
        if groups > _MAX_LOG_GROUPS and groups * 2 > tail.files:
            text = "few lines are equal: -n 1 compares only the last one, --grep chooses lines"
            yield line(text)

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
    counts = (report.enqueued, "enqueued"), (report.completed, "completed")
    texts = (f"{count} {state}" for count, state in counts if count is not None)
    text = ", ".join(filter(None, (words, *texts)))
    return f"{report.group}: {text}" if report.group else text


def tail_lines(tail: TailDocument, options: Options = PLAIN) -> Iterator[StyledLine]:
    """Nodes and files without an answer, then the groups of lines, the smallest first.

    With ``verbose`` nothing is cut or left out.
    """
    table = _TailTable(tail, options)
    rows = sum(group.kind in ("stopped", "lines") for group in tail.groups)
    after = [*table.reports(), *table.end(rows)]
    kinds = ("no-file", "unreadable"), ("stopped", "lines"), ("skipped",)
    sections = [*table.gaps(tail.gaps), *(row for words in kinds for row in table.groups(*words))]
    room = 0 if table.is_whole else max(_MAX_LOG_GROUPS, options.lines - len(after))
    yield from fitted(sections, room, options.width)
    yield from after


# --- `postmortem`: the cause first, then who only lost a peer.

#: Maximum groups, ranks of one group in words, sources and reasons without -v.
_MAX_FAILURES, _FAILED_RANKS, _MAX_ROWS = 8, 30, 4
#: Role -> its style; other roles: na.
_ROLE_STYLES = {"failed": "fail", "lost": "victim", "waited": "blocked"}
_OFFSET_S = 0.5  # offsets of clocks from which on they are shown, in seconds


class _PostmortemTable(TableLayout):
    indent = 12

    def cause(self, document: Postmortem) -> Iterator[StyledLine]:
        cause = document.cause
        style = "unknown" if cause.kind == "unclear" else "fail"
        yield self.head(cause.kind, style, (cause.text, "bold"))
        place = [f"at {cause.frame}" if cause.frame else "", cause.time.replace("T", " ")]
        if any(place):
            yield self.detail(", ".join(filter(None, place)))
        for number, suspect in enumerate(cause.suspects[: None if self.is_whole else 3]):
            # One of several.
            if number or (suspect.ranks, suspect.nodes) != (cause.ranks, cause.nodes):
                subject = self.subject(suspect.ranks, suspect.nodes)
                yield self.detail(("or " if number else "either ", "dim"), (subject, "bold"))
            for word, texts in (("for", suspect.for_), ("against", suspect.against)):
                for text in texts:
                    yield self.sentence((f"{word:<8}", "dim"), text)
        for text in dict.fromkeys(cause.missing):
            yield self.sentence(("missing ", "dim"), text)

    def subject(self, numbers: tuple[int, ...], nodes: tuple[str, ...]) -> str:
        limit = NO_LIMIT if self.is_whole else _FAILED_RANKS
        parts = [ranks(list(numbers), limit) if numbers else ""]
        if nodes:
            parts.append(f"({self.names(nodes)[0]})" if numbers else self.names(nodes)[0])
        return " ".join(filter(None, parts))

    def group(self, group: FailureGroup) -> Iterator[StyledLine]:
        subject = self.subject(group.ranks, group.nodes) or "unknown ranks"
        count = f", {group.count} times" if group.count > max(1, len(group.ranks)) else ""
        style = _ROLE_STYLES.get(group.role, "na")
        yield self.head(group.role, style, (subject, "bold"), count)
        yield self.detail(group.text or group.kind)
        yield self.detail(("e.g. " if group.count > 1 else "", "dim"), (group.example, "dim"))

    def event(self, event: NodeEvent) -> Iterator[StyledLine]:
        when = f", {event.time.replace('T', ' ')}" if event.time else ""
        subject = self.subject(event.ranks, (event.node,))
        yield self.head(event.kind, "warn", (subject, "bold"), when)
        yield self.detail(event.text)


def postmortem(document: Postmortem, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The cause with its evidence, all failures, and the sources. -v leaves nothing out."""
    table = _PostmortemTable(options)
    yield from fitted(table.gaps(document.gaps), 0, options.width)
    yield from table.cause(document)
    yield line("")
    groups = [group for group in document.failures if table.is_whole or group.role != "report"]
    yield from table.limited(groups, _MAX_FAILURES, table.group)
    yield from table.limited(document.nodes, _MAX_ROWS, table.event)
    if groups or document.nodes:
        yield line("")
    sources = ", ".join(f"{name}: {text}" for name, text in document.sources.items())
    if sources:
        yield table.head("read", "", sources)
    missing = [f"{name}: {reason}" for name, reason in document.missing.items()]
    yield from table.limited(missing, _MAX_ROWS, lambda row: [table.head("missing", "warn", row)])
    ahead = {node: clock for node, clock in document.clocks.items() if abs(clock[0]) > _OFFSET_S}
    for node, clock in list(ahead.items())[: None if table.is_whole else _MAX_ROWS]:
        text = f"{node}'s clock is {clock.offset_s:+.1f} s (±{clock.uncertainty_s:.1f} s)"
        yield table.head("clock", "warn", text)
    if not document.complete:
        yield table.partial()
    if document.logs == 0:
        yield line(counted(0, "log"))


# --- `incident`: its verdict, and its parts with their files.

#: Status of a part -> its style in `STYLES`.
_PART_STYLES = {"kept": "ok", "partial": "warn", "empty": "na", "missing": "fail"}
_NAME_WIDTH = 10  # columns of the names of parts
_MAX_FILES = 4  # maximum files of a part without -v
#: Part -> how to read it.
_READERS = {
    "stacks": "nodeready stacks --from {}/stacks, or stacks.html in a browser",
    "logs": "the last lines of the ranks' logs; the newest last",
    "cores": "cores.json, and a backtrace per file",
    "audit": "audit.txt, and audit.json for a program",
}


def incident_index(incident: Incident, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The job, the verdict, and each part with its files."""
    owner = f" of {incident.user}" if incident.user else ""
    yield line((f"job {incident.job}{owner}", "bold"), f", {incident.started}: {incident.reason}")
    if not incident.complete:
        yield line(("PARTIAL: interrupted", STYLES["warn"]))
    verdict = incident.verdict
    if verdict is None:
        yield line("no verdict: there are no stacks")
    else:
        yield line((f"{verdict.kind}: ", "bold"), verdict.text)
        for suspect in verdict.suspects[:4]:
            suspected = ranks(suspect.ranks) or "no rank"
            place = f" on {node_set(suspect.nodes)}" if suspect.nodes else ""
            reason = f": {suspect.for_[0]}" if suspect.for_ else ""
            yield line(f"{'':<{_NAME_WIDTH}}suspect: {suspected}{place}{reason}")
    for row in incident.advice:
        yield line(f"{'':<{_NAME_WIDTH}}{with_inventory(row, options.inventory)}")
    yield line("")
    directory = incident.archive.rpartition("/")[2].removesuffix(".tar.gz") or "DIR"
    for part in incident.parts:
        yield from _part(part, directory, options)
    yield line("")
    archive = "archive of all files: ", (incident.archive, "bold")
    yield line(*archive) if incident.archive else line(("there is no archive", STYLES["fail"]))


def _part(part: Part, directory: str, options: Options) -> Iterator[StyledLine]:
    text = "; ".join(filter(None, (part.content, part.reason)))
    status = part.status, STYLES[_PART_STYLES[part.status]]
    name = f"{part.name:<{_NAME_WIDTH}}", "bold"
    yield line(name, status, f": {text}" if text else "")
    if part.files:
        yield line(f"{'':<{_NAME_WIDTH}}{_READERS[part.name].format(directory)}")
        few = part.files if options.verbose else part.files[:_MAX_FILES]
        hidden = len(part.files) - len(few)
        files = ", ".join(name.partition("/")[2] for name in few)
        count = f" and {counted(hidden, 'more file')}" if hidden else ""
        yield line(" " * _NAME_WIDTH, files, count)
    for reason, names in reasons(reasons_of(part.gaps).items(), options.verbose):
        yield line(" " * _NAME_WIDTH, (node_set(names), "bold"), f": {reason}")


# --- `jobs` on a terminal: a job per line, with its nodes.

_HEAD = ("JOB", "USER", "RANKS", "SINCE (UTC)")
_NODES = 160  # maximum columns of a node set


def jobs(document: Jobs, options: Options = PLAIN) -> Iterator[StyledLine]:
    """A job per line; with -v its ranks and its command, too."""
    limit = NO_LIMIT if options.verbose or not options.lines else _NODES
    rows = []
    for job in document.jobs:
        names = (sanitise(name)[:MAX_NAME] or "-" for name in (job.job, job.user))
        rows.append((*names, job.rank_count, job.since.replace("T", " ")[:16] or "-"))
    head, *texts = columns(_HEAD, rows)
    if rows:
        yield line((f"{head}  NODES", "bold"))
        for job, text in zip(document.jobs, texts):
            yield line(text, "  ", node_set(job.nodes, limit))
            if options.verbose:
                ranks = f"ranks {fold_ranks(job.ranks)}: " if job.ranks else ""
                yield line(f"    {ranks}{sanitise(job.command)[:MAX_TEXT]}")
    else:
        nodes = node_set(document.nodes, limit) if document.nodes else "0 nodes"
        yield line("no ranks on ", nodes)
    yield from show_gaps(document.gaps, options)


# --- `undrain` on a terminal: equal nodes in one row, with what holds them, and the next commands.

_DRAIN_HEAD = ("STATE", "SINCE (UTC)", "REASON")
_DRAIN_WORDS = {outcome: outcome.replace("_", " ") for outcome in OUTCOMES}
_HELD_LINES = 4  # maximum leftovers of a node that are shown without -v


def undrain(document: Undrain, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The drained nodes: why they stay, and what to do."""
    limit = NO_LIMIT if options.verbose or not options.lines else _NODES
    pairs = []
    for node in document.nodes:
        since = node.since.replace("T", " ")[:16] or "-"
        cells = _DRAIN_WORDS[node.outcome], since, sanitise(node.reason, MAX_TEXT) or "-"
        obstacle = [sanitise(node.obstacle)] if node.obstacle else []
        pairs.append(((cells, (*obstacle, *map(leftover_text, node.leftovers))), node.name))
    rows = grouped(pairs)
    head, *texts = columns(_DRAIN_HEAD, (cells for (cells, _), _ in rows))
    if rows:
        yield line((f"{head}  NODES", "bold"))
    for text, ((_, held), names) in zip(texts, rows):
        yield line(text, "  ", node_set(names, limit))
        lines = held if options.verbose or not options.lines else held[:_HELD_LINES]
        yield from (line(f"    {text}") for text in lines)
        if len(lines) < len(held):
            yield line(f"    and {len(held) - len(lines)} more: -v")
    for node in document.nodes:
        if node.incident:
            yield line(f"evidence of what was ended: {node.name}:{node.incident}")
    yield from show_gaps(document.gaps, options)
    counts = Counter(_DRAIN_WORDS[node.outcome] for node in document.nodes)
    parts = [f"{counts[word]} {word}" for word in _DRAIN_WORDS.values() if counts[word]]
    total = counted(len(document.nodes), "drained node")
    yield line(f"{total}: {', '.join(parts)}" if parts else "no node is drained")
    for command in next_commands(document, options.inventory):
        yield line("next: ", (command, "cyan"))

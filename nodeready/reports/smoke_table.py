"""A smoke test on a terminal: the verdict, the suspects with evidence, the nodes to exclude."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from nodeready.core.shell import quote
from nodeready.core.text import counted, sanitise
from nodeready.fleet.inventory.nodeset import fold
from nodeready.reports.lines import (
    MAX_WIDTH,
    NO_LIMIT,
    STYLES,
    Part,
    RowSection,
    Safe,
    StyledLine,
    TableLayout,
    fitted,
    fold_similar,
    grouped,
    line,
    node_set,
    reasons,
)
from nodeready.reports.monitoring import duration_s
from nodeready.reports.registry import PLAIN, Options
from nodeready.runs.smoke.document import (
    UNREACHABLE,
    UNTESTED,
    LinkBandwidth,
    SmokeReport,
    describe,
)
from nodeready.runs.smoke.knowledge import NODE, PAIR, SCALE, SmokeSuspect

#: Maximum suspects, pieces of evidence of a suspect, and reasons for untested nodes, without -v.
_MAX_SUSPECTS, _MAX_EVIDENCE, _MAX_REASONS = 30, 4, 8
_FEW = 5  # maximum suspects, warnings and reasons that are all shown whole
_MAX_EXCLUDE = 1200  # maximum characters of the --exclude option without -v: some lines to paste
_CLASSES = {"inside": "inside nodes", "between": "between nodes"}


def _figure(gbps: float) -> str:
    """``381``, ``14.2``, ``1.32``, ``0.95``, ``0.0012``: two or three significant digits."""
    if gbps >= 100:
        return f"{gbps:.0f}"
    return f"{gbps:.1f}" if gbps >= 10 else f"{gbps:.2f}" if gbps >= 0.1 else f"{gbps:.2g}"


_SuspectRow = tuple[SmokeSuspect, tuple[str, ...]]  # a suspect, and its nodes


def _merge_similar(rows: list[_SuspectRow]) -> list[_SuspectRow]:
    """The rows, with one row for nodes with similar evidence."""
    single_rows = (row for row in rows if row[0].kind == NODE and len(row[1]) == 1)
    suspect_of_node = {names[0]: suspect for suspect, names in single_rows}
    similar = fold_similar((suspect.evidence, name) for name, suspect in suspect_of_node.items())
    merged = {row.names[0]: row for row in similar}
    merged_rows: list[_SuspectRow] = []
    for suspect, names in rows:
        if suspect_of_node.get(names[0]) is not suspect:
            merged_rows.append((suspect, names))
        elif row := merged.get(names[0]):
            merged_rows.append((replace(suspect, evidence=row.texts), tuple(row.names)))
    return merged_rows


class _SmokeTable(TableLayout):
    def __init__(self, smoke: SmokeReport, options: Options) -> None:
        super().__init__(options)
        self.smoke = smoke
        self.width = min(options.width, MAX_WIDTH)

    def names_beside(self, names: Iterable[str], columns: int = 9) -> tuple[str, str]:
        """A node set, cut where it does not fit beside other text of ``columns``."""
        return self.names(names, max(20, self.width - columns))

    def summary(self) -> str:
        """``2 suspects among 64 nodes, 512 GPUs``, or what was tested."""
        smoke = self.smoke
        tested = counted(len(smoke.nodes), "node")
        gpus = sum(len(node.gpus) for node in smoke.nodes)
        ranks = sum(node.ranks for node in smoke.nodes)
        all_ranks = counted(gpus, "GPU") if gpus else counted(ranks, "rank") if ranks else ""
        tested += f", {all_ranks}" if all_ranks else ""
        if smoke.suspects:
            return f"{counted(len(smoke.suspects), 'suspect')} among {tested}"
        untested = [f"{smoke.summary[status]} {status}" for status in (UNREACHABLE, UNTESTED)]
        untested = [text for text in untested if not text.startswith("0 ")]
        if not smoke.tests and not smoke.single_node_tests:
            return f"nothing was tested on {tested}"
        return f"{' and '.join(untested)} of {tested}" if untested else tested

    def verdict(self) -> Iterator[StyledLine]:
        """The verdict, the result and the engine, in several lines if one is too short."""
        smoke = self.smoke
        counts = f"{counted(smoke.tests, 'test')}, {counted(smoke.rounds, 'round')}"
        length = f"{duration_s(smoke.started, smoke.finished):.0f} s"
        parts = [self.summary(), *filter(None, [smoke.engine]), f"{counts}, {length}"]
        rows = [""]
        for part in parts:
            joined = f"{rows[-1]} · {part}" if rows[-1] else part
            if rows[-1] and self.indent + len(joined) > max(80, self.width):
                rows.append(part)
            else:
                rows[-1] = joined
        yield self.head(smoke.verdict, "ok" if smoke.good else "fail", (rows[0], "bold"))
        for row in rows[1:]:
            yield self.detail(row)
        if not smoke.complete:
            yield self.head("partial", "warn", smoke.stopped or "interrupted")
        elif smoke.stopped:
            yield self.head("stopped", "warn", smoke.stopped)
        for finding in smoke.environment:
            style = "fail" if finding.weight > 1 else "warn"
            yield self.head("variable", style, finding.text)
            columns = self.indent + len(finding.advice) + 2
            yield self.sentence(f"{finding.advice}  ", self.names_beside(finding.nodes, columns))

    def suspect(self, row: _SuspectRow) -> Iterator[StyledLine]:
        suspect, names = row
        count = f"  {counted(len(names), 'node')}"
        names_part: list[Part] = [self.names_beside(names, self.indent + len(count))]
        if suspect.kind == PAIR and len(names) == 2:
            names_part = [self.names_beside(names[:1]), " with ", self.names_beside(names[1:])]
        elif suspect.gpus:
            word = "GPU" if len(suspect.gpus) == 1 else "GPUs"
            names_part.append((f"  {word} {', '.join(map(str, suspect.gpus))}", "bold"))
        elif suspect.kind == SCALE:
            names_part = ["no node alone, only several of them together"]
        elif len(names) > 1:
            names_part.append(count)
        yield self.head(suspect.kind, "suspect", *names_part)
        yield from self.limited(suspect.evidence, _MAX_EVIDENCE, lambda row: [self.sentence(row)])

    def short(self, row: _SuspectRow) -> StyledLine:
        return next(self.suspect(row)).with_text(f"  {'; '.join(row[0].evidence[:1])}")

    def suspects(self) -> RowSection:
        """The suspects; those of one kind with the same evidence are one row."""
        equal: dict[object, _SuspectRow] = {}
        for index, suspect in enumerate(self.smoke.suspects):
            is_single = suspect.kind in (PAIR, SCALE)
            key = index if is_single else (suspect.kind, suspect.gpus, suspect.evidence)
            first, names = equal.get(key, (suspect, ()))
            equal[key] = (first, names + suspect.nodes)
        rows = list(equal.values())
        if len(rows) > _MAX_SUSPECTS and not self.verbose:
            rows = _merge_similar(rows)
        return RowSection(rows, self.suspect, self.short, self.count_line, _MAX_SUSPECTS)

    def warnings(self) -> RowSection:
        pairs = [(node.name, text) for node in self.smoke.nodes for text in node.warnings]
        return self.by_reason("warn", "warn", reasons(pairs, self.verbose))

    def untested(self) -> RowSection:
        """The nodes that answered and were not tested, by their reason."""
        untested = (n for n in self.smoke.nodes if n.status == UNTESTED and not n.gap)
        pairs = [(node.name, node.reason) for node in untested]
        section = self.by_reason(UNTESTED, "unknown", reasons(pairs, self.verbose))
        return section._replace(max_rows=_MAX_REASONS)

    def engines(self) -> Iterator[StyledLine]:
        """The engines of the nodes, where they differ; what a pass proves."""
        smoke = self.smoke
        rows = grouped((node.engine, node.name) for node in smoke.nodes if node.engine)
        if len(rows) > 1 or (rows and self.verbose):
            for engine, names in rows:
                shown = self.names_beside(names, self.indent + len(engine) + 2)
                yield self.head("engine", "na", shown, f"  {engine}")
        yield from self.networks()
        if smoke.control and self.verbose:
            yield self.head("control", "na", smoke.control)
        if smoke.proves:
            yield self.head("proves" if smoke.good else "tried", "na", smoke.proves)

    def networks(self) -> Iterator[StyledLine]:
        """The networks that NCCL chose, with their nodes where they differ."""
        nodes = [node for node in self.smoke.nodes if node.network]
        words = {
            node.name: describe(node.network, node.interface, node.hcas, node.gdr)
            for node in nodes
        }
        rows = grouped((text, name) for name, text in words.items())
        for index, (network, names) in enumerate(rows):
            shown = self.names_beside(names, self.indent + len(network) + 2)
            parts = [shown, f"  {network}"] if rows[1:] else [network]
            yield self.head("" if index else "network", "na", *parts)

    def links(self) -> Iterator[StyledLine]:
        for index, link in enumerate(self.smoke.links):
            yield self.head("" if index else "Gbit/s", "na", *self.link(link))

    def link(self, link: LinkBandwidth) -> Iterator[Part]:
        yield f"{_CLASSES.get(link.name, link.name)}: median {_figure(link.median_gbps)}, "
        is_slow = link.least_gbps < link.floor_gbps
        yield (f"least {_figure(link.least_gbps)}", STYLES["warn"] if is_slow else "")
        if link.slowest_nodes:
            yield " ("
            yield node_set(link.slowest_nodes, NO_LIMIT if self.verbose else 40)
            yield ")"
        if link.floor_gbps:
            yield f", {'below the ' if is_slow else ''}floor {_figure(link.floor_gbps)}"
        yield f"; {counted(link.tests, 'test')}"

    def result(self) -> Iterator[StyledLine]:
        """The nodes that remain, and the words for srun and sbatch that exclude the rest."""
        smoke = self.smoke
        if smoke.good or not smoke.go:
            return
        count = counted(len(smoke.go), "node")
        if any(suspect.kind == SCALE for suspect in smoke.suspects):
            word, count = "passed", f"{count}, fewer at a time"
        else:
            word = "GO" if smoke.complete and not smoke.stopped else "passed"
        names = self.names_beside(smoke.go, self.indent + len(count) + 2)
        yield self.head(word, "ok", names, f"  {count}")
        if smoke.exclude:
            words = f"--exclude={quote(fold(smoke.exclude))}"
            if len(words) > _MAX_EXCLUDE and not self.is_whole:
                words = counted(len(smoke.exclude), "node")
                words += ": --exclude-out FILE writes them, --limit @last-failed tests them again"
            yield self.head("without", "na", (Safe(sanitise(words, len(words))), "bold"))


def show(smoke: SmokeReport, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The verdict; then suspects, nodes that were not tested and warnings, and what is left."""
    table = _SmokeTable(smoke, options)
    head = list(table.verdict())
    end = [*table.engines(), *table.links(), *table.result()]
    sections = [table.suspects(), *table.gaps(smoke.gaps), table.untested(), table.warnings()]
    # At least a line for each shown suspect, and one for the number of hidden ones.
    room = max(_MAX_SUSPECTS + 1, options.lines - len(head) - len(end) - 2)
    middle = list(fitted(sections, 0 if table.is_whole else room, options.width, _FEW))
    yield from head
    yield from (line(""), *middle) if middle else ()
    yield from (line(""), *end) if middle and end else end

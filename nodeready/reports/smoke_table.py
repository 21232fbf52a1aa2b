"""A smoke test on a terminal: the verdict, who spoils it and why, and the line to paste."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime

from nodeready.inventory.nodeset import fold
from nodeready.reports.registry import (
    PLAIN,
    STYLES,
    Line,
    Options,
    Part,
    Safe,
    Section,
    alike,
    fits,
    fitted,
    grouped,
    line,
    nodes,
    reasons,
)
from nodeready.shell import quote
from nodeready.smoke.document import UNREACHABLE, UNTESTED, LinkBandwidth, SmokeReport
from nodeready.smoke.knowledge import NODE, PAIR, SCALE, SmokeSuspect
from nodeready.text import counted, sanitise

#: Columns of the words on the left.
_INDENT = 9
#: Columns beyond which a node set is cut even where nothing wraps; none under -v.
_WIDEST, _WHOLE = 160, 1_000_000
#: Suspects, pieces of evidence of one, and reasons why nodes were not tested, without -v.
_SUSPECTS, _EVIDENCE, _REASONS = 30, 4, 8
#: So many suspects, warnings and reasons are shown whole, however long they are.
_FEW = 5
#: Characters of the list of nodes to leave out that are shown without -v: some lines to paste.
_PASTED = 1200
#: Characters of a text that are shown without -v.
_TEXT = 500
_CLASSES = {"inside": "inside nodes", "between": "between nodes"}


def _seconds(found: SmokeReport) -> int:
    """How long it took."""
    first, last = (
        datetime.fromisoformat(moment.replace("Z", "+00:00"))
        for moment in (found.started, found.finished)
    )
    return max(0, round((last - first).total_seconds()))


def _figure(gbps: float) -> str:
    """``381``, ``14.2``, ``1.32``, ``0.95``, ``0.0012``: three digits that count."""
    if gbps >= 100:
        return f"{gbps:.0f}"
    return f"{gbps:.1f}" if gbps >= 10 else f"{gbps:.2f}" if gbps >= 0.1 else f"{gbps:.2g}"


def _alike(
    rows: list[tuple[SmokeSuspect, tuple[str, ...]]],
) -> list[tuple[SmokeSuspect, tuple[str, ...]]]:
    """The same with one row for nodes against which nearly the same speaks."""
    nodes_ = {names[0]: one for one, names in rows if one.kind == NODE and len(names) == 1}
    found = alike((one.evidence, name) for name, one in nodes_.items())
    merged = {row.names[0]: row for row in found}
    made: list[tuple[SmokeSuspect, tuple[str, ...]]] = []
    for one, names in rows:
        row = merged.get(names[0])
        if nodes_.get(names[0]) is not one:
            made.append((one, names))
        elif row is not None:
            made.append((replace(one, evidence=row.said or row.instance), tuple(row.names)))
    return made


class _Table:
    def __init__(self, found: SmokeReport, options: Options) -> None:
        self.found, self.verbose = found, options.verbose
        self.width = min(options.width, _WIDEST)
        self.whole = bool(options.verbose) or not options.lines

    def names(self, names: Iterable[str], beside: int = _INDENT) -> tuple[str, str]:
        """A node set, cut where it does not fit beside so many columns of other text."""
        room = _WHOLE if self.whole else max(20, self.width - beside)
        return nodes(names, room), "bold"

    def head(self, word: str, style: str, *parts: Part) -> Line:
        return line((f"{word:<{_INDENT}}", STYLES[style]), *parts)

    def below(self, *parts: Part) -> Line:
        text = line(" " * _INDENT, *parts)
        return text if self.whole else text.cut(_TEXT)

    def more(self, count: int) -> Line:
        return self.below((f"and {count} more (-v shows them)", "bold"))

    def subject(self) -> str:
        """What was found, in a few words."""
        found = self.found
        whole = counted(len(found.nodes), "node")
        gpus = sum(len(node.gpus) for node in found.nodes)
        ranks = sum(node.ranks for node in found.nodes)
        all_ranks = counted(gpus, "GPU") if gpus else counted(ranks, "rank") if ranks else ""
        whole += f", {all_ranks}" if all_ranks else ""
        if found.suspects:
            return f"{counted(len(found.suspects), 'suspect')} among {whole}"
        left = [f"{found.summary[one]} {one}" for one in (UNREACHABLE, UNTESTED)]
        left = [text for text in left if not text.startswith("0 ")]
        if not found.tests and not found.alone:
            return f"nothing was tested on {whole}"
        return f"{' and '.join(left)} of {whole}" if left else whole

    def verdict(self) -> Iterator[Line]:
        """The verdict, what was found, and by what; a second line where one has no room."""
        found = self.found
        pieces = [self.subject()]
        if found.engine:
            pieces.append(found.engine)
        pieces.append(
            f"{counted(found.tests, 'test')}, {counted(found.rounds, 'round')}, "
            f"{_seconds(found)} s"
        )
        rows = [""]
        for piece in pieces:
            joined = f"{rows[-1]} · {piece}" if rows[-1] else piece
            if rows[-1] and _INDENT + len(joined) > max(80, self.width):
                rows.append(piece)
            else:
                rows[-1] = joined
        yield self.head(found.verdict, "ok" if found.good else "fail", (rows[0], "bold"))
        for row in rows[1:]:
            yield self.below(row)
        if not found.complete:
            yield self.head("partial", "warn", found.stopped or "interrupted")
        elif found.stopped:
            yield self.head("stopped", "warn", found.stopped)

    def suspect(self, found: tuple[SmokeSuspect, tuple[str, ...]]) -> Iterator[Line]:
        """A suspect: its kind and names, then what speaks against it."""
        one, names = found
        count = f"  {counted(len(names), 'node')}"
        who: list[Part] = [self.names(names, _INDENT + len(count))]
        if one.kind == PAIR and len(names) == 2:
            who = [self.names(names[:1]), " with ", self.names(names[1:])]
        elif one.gpus:
            word = "GPU" if len(one.gpus) == 1 else "GPUs"
            who.append((f"  {word} {', '.join(map(str, one.gpus))}", "bold"))
        elif one.kind == SCALE:
            who = ["no node alone, only so many of them together"]
        elif len(names) > 1:
            who.append(count)
        yield self.head(one.kind, "suspect", *who)
        most = len(one.evidence) if self.whole else _EVIDENCE
        for text in one.evidence[:most]:
            yield self.below(text)
        if one.evidence[most:]:
            yield self.more(len(one.evidence) - most)

    def short(self, found: tuple[SmokeSuspect, tuple[str, ...]]) -> Line:
        """A suspect in one line, with what speaks against it most."""
        return next(self.suspect(found)).with_(f"  {'; '.join(found[0].evidence[:1])}")

    def suspects(self) -> Section:
        """All of them; nodes with the same evidence are one."""
        equal: dict[object, tuple[SmokeSuspect, tuple[str, ...]]] = {}
        for place, one in enumerate(self.found.suspects):
            key = (one.kind, one.gpus, one.evidence) if one.kind not in (PAIR, SCALE) else place
            first, names = equal.get(key, (one, ()))
            equal[key] = (first, names + one.nodes)
        rows = list(equal.values())
        if len(rows) > _SUSPECTS and not self.verbose:
            rows = _alike(rows)
        return Section(rows, self.suspect, self.short, self.more, _SUSPECTS)

    def warnings(self) -> Section:
        """What got worse on nodes meanwhile, equal warnings once."""

        def full(row: tuple[str, list[str]]) -> Iterator[Line]:
            yield self.head("warn", "warn", self.names(row[1]))
            yield self.below(row[0])

        def short(row: tuple[str, list[str]]) -> Line:
            return self.head("warn", "warn", (fits(row[1], 30), "bold"), f"  {row[0]}")

        pairs = [(node.name, text) for node in self.found.nodes for text in node.warnings]
        return Section(reasons(pairs, self.verbose), full, short, self.more, _SUSPECTS)

    def untested(self) -> Iterator[Section]:
        """The nodes of which nothing is known, and why; equal reasons once."""
        for status, style in ((UNREACHABLE, "unreachable"), (UNTESTED, "unknown")):
            yield self.unknown(
                (f"{status}  ", STYLES[style]),
                [(one.name, one.why) for one in self.found.nodes if one.status == status],
            )

    def unknown(self, word: tuple[str, str], found: list[tuple[str, str]]) -> Section:
        """A line for each reason."""

        def one(row: tuple[str, list[str]]) -> Line:
            why, names = row
            beside = len(word[0]) + min(len(why) + 2, self.width // 2)
            text = line(word, self.names(names, beside), f"  {why}" if why else "")
            return text if self.whole else text.cut(_TEXT)

        rows = reasons(found, self.verbose)
        return Section(rows, lambda row: [one(row)], one, self.more, _REASONS)

    def engines(self) -> Iterator[Line]:
        """What the nodes have, where they differ; what a pass proves."""
        found = self.found
        rows = grouped((node.engine, node.name) for node in found.nodes if node.engine)
        if len(rows) > 1 or (rows and self.verbose):
            for engine, names in rows:
                shown = self.names(names, _INDENT + len(engine) + 2)
                yield self.head("engine", "na", shown, f"  {engine}")
        if found.control and self.verbose:
            yield self.head("control", "na", found.control)
        if found.proves:
            yield self.head("proves" if found.good else "tried", "na", found.proves)

    def links(self) -> Iterator[Line]:
        """The bandwidth of each class, with the test that had the least."""
        for at, one in enumerate(self.found.links):
            yield self.head("" if at else "Gbit/s", "na", *self.link(one))

    def link(self, one: LinkBandwidth) -> Iterator[Part]:
        yield f"{_CLASSES.get(one.name, one.name)}: median {_figure(one.median_gbps)}, "
        slow = one.least_gbps < one.floor_gbps
        yield (f"least {_figure(one.least_gbps)}", STYLES["warn"] if slow else "")
        if one.where:
            yield " ("
            yield nodes(one.where, _WHOLE if self.verbose else 40)
            yield ")"
        if one.floor_gbps:
            yield f", {'below the ' if slow else ''}floor {_figure(one.floor_gbps)}"
        yield f"; {counted(one.tests, 'test')}"

    def result(self) -> Iterator[Line]:
        """The nodes that are left, and the words for srun and sbatch without the others."""
        found = self.found
        if found.good or not found.go:
            return
        count = counted(len(found.go), "node")
        if any(one.kind == SCALE for one in found.suspects):
            word, count = "passed", f"{count}, fewer at a time"
        else:
            word = "GO" if found.complete and not found.stopped else "passed"
        names = self.names(found.go, _INDENT + len(count) + 2)
        yield self.head(word, "ok", names, f"  {count}")
        if found.exclude:
            words = f"--exclude={quote(fold(found.exclude))}"
            if len(words) > _PASTED and not self.whole:
                words = counted(len(found.exclude), "node")
                words += ": --exclude-out FILE writes them, --limit @last-failed tests them again"
            yield self.head("without", "na", (Safe(sanitise(words, len(words))), "bold"))


def show(found: SmokeReport, options: Options = PLAIN) -> Iterator[Line]:
    """The verdict; then suspects, warnings and nodes that were not tested, and what is left."""
    table = _Table(found, options)
    head = list(table.verdict())
    end = [*table.engines(), *table.links(), *table.result()]
    sections = [table.suspects(), table.warnings(), *table.untested()]
    # Room for every suspect that is shown, and for the number of the others.
    room = max(_SUSPECTS + 1, options.lines - len(head) - len(end) - 2)
    middle = list(fitted(sections, 0 if table.whole else room, options.width, _FEW))
    yield from head
    yield from (line(""), *middle) if middle else ()
    yield from (line(""), *end) if middle and end else end

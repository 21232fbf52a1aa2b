"""A postmortem on a terminal: the cause first, then who only lost a peer."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.core.text import counted
from nodeready.reports.lines import StyledLine, line
from nodeready.reports.rank_groups import ranks
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.sections import fitted
from nodeready.reports.table_layout import NO_LIMIT, TableLayout
from nodeready.runs.postmortem.document import FailureGroup, Postmortem

#: Maximum groups, ranks of one group in words, sources and reasons without -v.
_MAX_GROUPS, _RANKS, _MAX_ROWS = 8, 30, 4
#: Role -> its style.
_STYLES = {"failed": "fail", "lost": "victim", "waited": "blocked", "ended": "na", "report": "na"}
#: Offsets of clocks from which on they are shown, in seconds.
_OFFSET_S = 0.5


class _PostmortemTable(TableLayout):
    indent = 12

    def cause(self, document: Postmortem) -> Iterator[StyledLine]:
        """The first failure with its evidence."""
        cause = document.cause
        style = "unknown" if cause.kind == "unclear" else "fail"
        yield self.head(cause.kind, style, (cause.text, "bold"))
        place = [f"at {cause.frame}" if cause.frame else "", cause.time.replace("T", " ")]
        if any(place):
            yield self.detail(", ".join(filter(None, place)))
        for number, suspect in enumerate(cause.suspects[: None if self.is_whole else 3]):
            is_one_of_several = (suspect.ranks, suspect.nodes) != (cause.ranks, cause.nodes)
            if number or is_one_of_several:
                word = "or " if number else "either "
                subject = self.subject(suspect.ranks, suspect.nodes)
                yield self.detail((word, "dim"), (subject, "bold"))
            for word, texts in (("for", suspect.for_), ("against", suspect.against)):
                for text in texts:
                    yield self.sentence((f"{word:<8}", "dim"), text)
        for text in dict.fromkeys(cause.missing):
            yield self.sentence(("missing ", "dim"), text)

    def subject(self, numbers: tuple[int, ...], nodes: tuple[str, ...]) -> str:
        limit = NO_LIMIT if self.is_whole else _RANKS
        parts = [ranks(list(numbers), limit) if numbers else ""]
        if nodes:
            parts.append(f"({self.names(nodes)[0]})" if numbers else self.names(nodes)[0])
        return " ".join(filter(None, parts))

    def group(self, group: FailureGroup) -> Iterator[StyledLine]:
        """Equal failures: who, how many, and one of them."""
        subject = self.subject(group.ranks, group.nodes) or "unknown ranks"
        count = f", {group.count} times" if group.count > max(1, len(group.ranks)) else ""
        yield self.head(group.role, _STYLES[group.role], (subject, "bold"), count)
        yield self.detail(group.text or group.kind)
        yield self.detail(("e.g. " if group.count > 1 else "", "dim"), (group.example, "dim"))


def show(document: Postmortem, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The cause with its evidence, all failures, and the sources. -v leaves nothing out."""
    table = _PostmortemTable(options)
    yield from fitted(table.gaps(document.gaps), 0, options.width)
    yield from table.cause(document)
    yield line("")
    groups = [group for group in document.failures if table.is_whole or group.role != "report"]
    count = len(groups) if table.is_whole else _MAX_GROUPS
    for group in groups[:count]:
        yield from table.group(group)
    if len(groups) > count:
        yield table.count_line(len(groups) - count)
    events = document.nodes if table.is_whole else document.nodes[:_MAX_ROWS]
    for event in events:
        when = f", {event.time.replace('T', ' ')}" if event.time else ""
        yield table.head(
            event.kind, "warn", (table.subject(event.ranks, (event.node,)), "bold"), when
        )
        yield table.detail(event.text)
    if len(document.nodes) > len(events):
        yield table.count_line(len(document.nodes) - len(events))
    if groups or events:
        yield line("")
    sources = ", ".join(f"{name}: {text}" for name, text in document.sources.items())
    if sources:
        yield table.head("read", "", sources)
    rows = list(document.missing.items())
    for name, reason in rows if table.is_whole else rows[:_MAX_ROWS]:
        yield table.head("missing", "warn", f"{name}: {reason}")
    if not table.is_whole and len(rows) > _MAX_ROWS:
        yield table.count_line(len(rows) - _MAX_ROWS)
    ahead = {node: clock for node, clock in document.clocks.items() if abs(clock[0]) > _OFFSET_S}
    for node, clock in list(ahead.items())[: None if table.is_whole else _MAX_ROWS]:
        text = f"{node}'s clock is {clock.offset_s:+.1f} s (±{clock.uncertainty_s:.1f} s)"
        yield table.head("clock", "warn", text)
    if not document.complete:
        yield table.partial()
    if document.logs == 0:
        yield line(counted(0, "log"))

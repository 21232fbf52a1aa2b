"""`waivers` on a terminal: a waiver with its end and reason, and what it hides."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.core.text import counted
from nodeready.reports.lines import STYLES, StyledLine, line
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.table_layout import TableLayout, show_gaps
from nodeready.runs.audit.waiver_list import (
    ENDS,
    EXPIRED,
    HOLDS,
    NO_NODE,
    STATES,
    UNUSED,
    ListedWaiver,
    WaiverList,
)

#: State -> the style of its word.
_STYLES = {EXPIRED: "fail", NO_NODE: "warn", UNUSED: "warn", ENDS: "warn", HOLDS: "waived"}
#: State -> what to do.
_ADVICE = {
    EXPIRED: "its finding counts again: repair it, or extend the waiver",
    NO_NODE: "its node set has no node that has this policy: correct or remove it",
    UNUSED: "hides nothing: remove it",
}


def _end(row: ListedWaiver) -> str:
    """``until 2027-01-31, 66 days left``."""
    if row.days_left is None:
        return "does not end"
    if row.days_left < 0:
        return f"expired {row.waiver.until}, {counted(-row.days_left, 'day')} ago"
    return f"until {row.waiver.until}, {counted(row.days_left, 'day')} left"


class _WaiverTable(TableLayout):
    def row(self, row: ListedWaiver) -> Iterator[StyledLine]:
        names = self.names(row.nodes) if row.nodes else row.waiver.nodes
        yield self.head(row.state, _STYLES[row.state], (row.waiver.check, "bold"), "  ", names)
        owner = f", {row.waiver.owner}" if row.waiver.owner else ""
        yield self.sentence(f"{_end(row)}{owner}: {row.waiver.reason}")
        for finding in row.findings:
            yield self.detail(
                (finding.status, STYLES[finding.status]), "  ", self.names(finding.nodes), "  ",
                finding.actual,
            )  # fmt: skip
        if row.state in _ADVICE:
            yield self.sentence(_ADVICE[row.state])


def show(document: WaiverList, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The waivers, the most urgent first; the nodes without an answer; the counts."""
    table = _WaiverTable(options)
    for row in document.waivers:
        yield from table.row(row)
    yield from show_gaps(document.gaps, options)
    states = [row.state for row in document.waivers]
    counts = [f"{states.count(state)} {state}" for state in STATES if state in states]
    yield line(f"{counted(len(states), 'waiver')}{': ' if counts else ''}{', '.join(counts)}")

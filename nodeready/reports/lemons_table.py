"""`lemons` on a terminal: the lemons with their incidents, then the other units in short."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.core.text import counted, sanitise
from nodeready.reports.lines import STYLES, StyledLine, line, node_set
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.table_layout import MAX_TEXT
from nodeready.runs.memory.lemons import FALSE_ALARM, MIN_DAYS, HardwareIncident, Lemon, Lemons

#: Incidents of a lemon, and units without a verdict, that are shown without -v.
_MAX_INCIDENTS, _MAX_UNITS = 5, 10


def lemons(document: Lemons, options: Options = PLAIN) -> Iterator[StyledLine]:
    """The lemons, each with its newest incidents; with -v all incidents of all units."""
    named = document.lemons
    yield line(
        (counted(len(named), "lemon"), STYLES["fail" if named else "ok"]),
        f" among {counted(document.node_count, 'node')} and {counted(document.gpu_count, 'GPU')}"
        f" from {document.since[:10]} to {document.until[:10]}",
    )
    for lemon in named:
        yield from _unit(lemon, options)
    unsuspicious = [unit for unit in document.units if not unit.is_lemon]
    shown = unsuspicious if options.verbose else unsuspicious[:_MAX_UNITS]
    if shown:
        yield line("")
        yield line(("within the rate of their peers", "bold"))
    for unit in shown:
        if options.verbose:
            yield from _unit(unit, options)
        else:
            yield line(f"  {unit}", f": {_last(unit.incidents[0])}"[:MAX_TEXT])
    if len(unsuspicious) > len(shown):
        yield line(f"  and {len(unsuspicious) - len(shown)} more: -v")
    if document.shared:
        verb = "counts" if document.shared == 1 else "count"
        yield line(
            f"{counted(document.shared, 'incident')} of many nodes at once {verb} for no node"
        )
    if named:
        yield line(
            f"rule: incidents on {MIN_DAYS} days or more, and a chance below {FALSE_ALARM:.0%} "
            "in a fleet of equals"
        )


def _place(lemon: Lemon) -> str:
    """Where a GPU is, and where its incidents were, if elsewhere too."""
    earlier = [name for name in lemon.nodes if name != lemon.node]
    if not lemon.node:
        return f"was in {node_set(earlier)}"
    place = f"now in {sanitise(lemon.node)}"
    return f"{place}, before in {node_set(earlier)}" if earlier else place


def _last(incident: HardwareIncident) -> str:
    return f"{incident.time[:10]} {incident.kind}"


def _unit(lemon: Lemon, options: Options) -> Iterator[StyledLine]:
    style = STYLES["fail"] if lemon.is_lemon else ""
    yield line("")
    yield line((str(lemon), style))
    if lemon.kind == "gpu":
        yield line(f"  {_place(lemon)}")
    shown = lemon.incidents if options.verbose else lemon.incidents[:_MAX_INCIDENTS]
    for incident in shown:
        place = f"{incident.node}  " if lemon.kind == "gpu" else ""
        text = sanitise(incident.text, MAX_TEXT)
        yield line(f"  {incident.time[:16].replace('T', ' ')}  {place}{incident.kind}  {text}")
    if len(lemon.incidents) > len(shown):
        yield line(f"  and {len(lemon.incidents) - len(shown)} earlier: -v")

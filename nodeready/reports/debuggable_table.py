"""`stacks --check` on a terminal: an item per line, and what to do for the next run."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.reports.lines import STYLES, Line, line, nodes
from nodeready.reports.rank_groups import ranks
from nodeready.reports.registry import PLAIN, Options
from nodeready.reports.similar_texts import reasons
from nodeready.reports.table_layout import MAX_TEXT, NO_LIMIT
from nodeready.text import counted, sanitise
from nodeready.triage.stacks.debuggable import Debuggable

#: Columns of the ranks and of the nodes of an item; of a node set without an answer.
_WHO, _NODES = 30, 160


def debuggable(found: Debuggable, options: Options = PLAIN) -> Iterator[Line]:
    """An item per line, with whose it is where that is not everybody, and what to do."""
    everybody = max((one.processes for one in found.findings), default=0)
    places = {node for one in found.findings for node in one.nodes}
    job = f"job {sanitise(found.job)[:60]}: " if found.job else ""
    many = counted(everybody, "process", "processes")
    yield line(f"{job}{many} on {counted(len(places), 'node')}")
    for one in found.findings:
        if options.quiet and one.result == "ok":
            continue
        whose = ""
        if one.processes < everybody:
            whole = options.verbose > 0
            whose = ranks(one.ranks, NO_LIMIT if whole else _WHO) or counted(
                one.processes, "process", "processes"
            )
            whose += f" on {nodes(one.nodes, NO_LIMIT if whole else _WHO)}: "
        word_ = (f"{one.result:<9}", STYLES[one.result])
        yield line(word_, f"{one.item:<13}{whose}{sanitise(one.found)[:MAX_TEXT]}")
        if one.fix and one.result != "ok":
            yield line(" " * 22, f"{sanitise(one.fix)[:MAX_TEXT]}")
    for why, names in reasons(found.errors.items(), options.verbose):
        who_ = nodes(names, NO_LIMIT if options.verbose or not options.lines else _NODES)
        yield line(("unknown  ", STYLES["unknown"]), f"{who_}: {sanitise(why)[:MAX_TEXT]}")

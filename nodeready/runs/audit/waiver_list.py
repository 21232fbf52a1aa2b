"""The document of `nodeready waivers`: each waiver, and the findings that it hides now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from nodeready.agent.audit_document import Audit
from nodeready.core.exit_codes import Refused
from nodeready.core.json_types import Count, Moment, Name, Names
from nodeready.core.outcome import NodeGaps, gaps_code
from nodeready.core.policy import AUDIT
from nodeready.core.result import STATUSES, WAIVABLE, Result, last_ending
from nodeready.core.settings import ENDING_DAYS, Waiver
from nodeready.core.text import utc_now
from nodeready.runs import targets
from nodeready.runs.audit.command import look_at_nodes
from nodeready.runs.audit.workers import AuditWorkers
from nodeready.runs.options import WaiversOptions
from nodeready.runs.tell import Tell
from nodeready.subjects.registry import LOOKED_AT, CheckSelection

EXPIRED, NO_NODE, UNUSED, ENDS, HOLDS = "expired", "no node", "unused", "ends", "holds"
#: The states of a waiver, the most urgent first; those of MISTAKES are to be repaired.
STATES = (EXPIRED, NO_NODE, UNUSED, ENDS, HOLDS)
MISTAKES = (EXPIRED, NO_NODE, UNUSED)


@dataclass(frozen=True)
class WaivedFinding:
    """A value that the check of a waiver has found, and the nodes that have it."""

    # waived; warn: the waiver ends soon; after its end, that of the finding itself
    status: Annotated[str, {"enum": STATUSES}]
    actual: str
    nodes: Names


@dataclass(frozen=True)
class ListedWaiver:
    """One waiver of the inventory."""

    JSON: ClassVar = (
        *("waiver.check", "state", "nodes", "waiver.owner", "waiver.reason", "waiver.until"),
        *("days_left", "findings"),
    )

    waiver: Waiver  # its check, owner ("": none), reason, and last day ("": it does not end)
    # expired; no node: its node set has no node of the inventory; unused: its nodes have no such
    # finding, or have a waiver that ends later (never with a part of its nodes selected);
    # ends: in the next 14 days
    state: Annotated[str, {"enum": STATES}]
    nodes: tuple[Name, ...]  # to which it applies, of those that were selected
    days_left: int | None  # until the last day, negative after it; None: it does not end
    findings: tuple[WaivedFinding, ...] = ()  # now, on the nodes that answered


@dataclass(frozen=True)
class WaiverList:
    """The document of `nodeready waivers`. Text is one line."""

    SCHEMA: ClassVar = "waivers"
    VERSION: ClassVar = 2

    started: Moment  # when the command began, UTC
    finished: Moment  # when it ended, UTC
    complete: bool  # False when it was interrupted
    answered: Count  # the number of nodes that were asked and answered; 0 with --offline
    waivers: tuple[ListedWaiver, ...]  # the most urgent first
    gaps: NodeGaps  # the nodes that gave no answer


def list_waivers(
    declared: Mapping[Waiver, Sequence[str]], names: Iterable[str], audit: Audit | None, day: str
) -> tuple[ListedWaiver, ...]:
    """The waivers that concern the selected nodes, and those that concern no node at all.

    declared: waiver -> the nodes of the inventory to which it applies
    names:    of the selected nodes
    audit:    None: no node was asked
    day:      today, ``2027-01-31``
    """
    checks = {waiver.check for waiver in declared}
    judged = ((node.name, row) for node in (audit.nodes if audit else ()) for row in node.results)
    results = {(node, row.check): row for node, row in judged if row.check in checks}
    waivers_of: dict[str, list[Waiver]] = {}
    for waiver, nodes in declared.items():
        for node in nodes:
            waivers_of.setdefault(node, []).append(waiver)
    counting = {node: last_ending(waivers) for node, waivers in waivers_of.items()}
    selected_names = {*names}
    rows = []
    for waiver, nodes in declared.items():
        selected = tuple(node for node in nodes if node in selected_names)
        if selected or not nodes:
            counted = [node for node in selected if counting[node][waiver.check] == waiver]
            of_nodes = {node: results.get((node, waiver.check)) for node in counted}
            is_whole = len(selected) == len(nodes)
            rows.append(_listed(waiver, selected, of_nodes, waiver.days_left(day), is_whole))
    return tuple(sorted(rows, key=lambda row: (STATES.index(row.state), row.waiver)))


def _listed(
    waiver: Waiver,
    nodes: tuple[str, ...],
    results: Mapping[str, Result | None],
    days_left: int | None,
    is_whole: bool,
) -> ListedWaiver:
    """results: of the nodes on which the waiver counts; None: the check was not judged there
    is_whole: all nodes of the waiver were selected
    """
    nodes_of: dict[tuple[str, str], list[str]] = {}
    for node, result in results.items():
        if result and result.status in (*WAIVABLE, "waived"):
            nodes_of.setdefault((result.status, result.actual), []).append(node)
    # Where the check was not judged there could be a finding.
    is_unused = is_whole and all(r and r.status in ("ok", "na") for r in results.values())
    state = HOLDS
    if days_left is not None and days_left < 0:
        state = EXPIRED
    elif not nodes:
        state = NO_NODE
    elif is_unused:
        state = UNUSED
    elif days_left is not None and days_left <= ENDING_DAYS:
        state = ENDS
    findings = sorted(nodes_of.items(), key=lambda item: -len(item[1]))
    rows = (WaivedFinding(*key, tuple(members)) for key, members in findings)
    return ListedWaiver(waiver, state, nodes, days_left, tuple(rows))


def waivers_code(document: WaiverList) -> int:
    """The exit code: 3 if a waiver has expired, concerns no node or hides nothing."""
    is_mistaken = any(row.state in MISTAKES for row in document.waivers)
    return gaps_code(document.gaps, complete=document.complete, check=is_mistaken)


# --- The run of `nodeready waivers`.


def run(inventory: str, options: WaiversOptions, tell: Tell) -> WaiverList:
    """The waivers of the inventory, and what they hide now. Raises Refused."""
    from nodeready.fleet.inventory.host_data import declared_waivers

    started, audit = utc_now(), None
    if options.offline:
        if options.via != "ssh" or options.job is not None:
            raise Refused("--offline: contacts no node: remove --via and --job")
        loaded, _, policies = targets.load_targets(inventory, options, tell.note)
        declared = declared_waivers(loaded)
    else:
        nodes = targets.select_targets(inventory, options, job=options.job, tell=tell.note)
        assert nodes.inventory is not None
        declared, policies = declared_waivers(nodes.inventory), dict(nodes.policies)
        checks = dict.fromkeys(waiver.check for waiver in sorted(declared))
        looked_at = (check for check in checks if check.partition(".")[0] in LOOKED_AT)
        selection = CheckSelection(tuple(looked_at))
        if selection.checks:
            nodes = nodes.at(AUDIT).chosen(selection)
            with AuditWorkers(nodes.policies) as workers, nodes.transport:
                audit = look_at_nodes(nodes, tell, selection, options.timeout, workers)
                # The workers' files have the nodes.
                audit = replace(audit, nodes=tuple(audit.nodes))
    gaps = audit.gaps if audit else ()
    answered = len(audit.nodes) - len(gaps) if audit else 0
    rows = list_waivers(declared, [*policies], audit, started[:10])
    is_complete = audit is None or audit.complete
    return WaiverList(started, utc_now(), is_complete, answered, rows, gaps)

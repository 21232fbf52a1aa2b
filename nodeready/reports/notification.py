"""The body of `--notify`: the nodes whose status has changed, and their findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from nodeready.audit.document import NODE_STATUSES, Audit, AuditSummary
from nodeready.reports.findings import AuditFinding, errors, findings
from nodeready.reports.json_report import render
from nodeready.reports.lines import grouped, node_set, with_inventory
from nodeready.subjects.json_types import Count, Moment, Name, Positive
from nodeready.subjects.severity import SEVERITIES
from nodeready.text import sanitise

#: Maximum bytes of a body: chat servers and alert routers refuse larger ones.
MAX_BYTES = 64 << 10
#: Maximum characters of a node set, of one in the sentence, and of a text from a node.
_NODES, _FEW_NODES, _TEXT = 600, 60, 400
#: Statuses of a node for which nobody acts are one status here.
_GOOD = ("ok", "na", "waived")
_OK = "ok"
_SEVERITIES = (*SEVERITIES, "")


@dataclass(frozen=True)
class StatusChange:
    """Nodes with one change of their status; na and waived count as ok.

    before: at the last notification of this address; ok, if there was none
    after:  now
    nodes:  the folded node set; a long one ends with the count
    count:  the number of these nodes
    """

    before: Annotated[str, {"enum": NODE_STATUSES}]
    after: Annotated[str, {"enum": NODE_STATUSES}]
    nodes: Name
    count: Positive


@dataclass(frozen=True)
class NotifiedFinding:
    """A finding on the nodes whose status has changed.

    status:   of the result, or of nodes that could not be probed
    check:    its id; empty for nodes that could not be probed
    nodes:    the folded node set; a long one ends with the count
    count:    the number of these nodes
    text:     the actual value, the expected value, the source
    fix:      the repair
    severity: what it costs a job; empty for nodes that could not be probed
    """

    status: Annotated[str, {"enum": NODE_STATUSES}]
    check: str
    nodes: Name
    count: Positive
    text: str
    fix: str
    severity: Annotated[str, {"enum": _SEVERITIES}] = ""


@dataclass(frozen=True)
class Notification:
    """The JSON that `--notify` sends, of at most 64 KiB. Text is one line.

    text:      the changes in a sentence, which chat servers show
    command:   audit or ready
    inventory: as the command line names it
    finished:  when the look ended, UTC
    summary:   of all nodes of the look
    changes:   the nodes whose status has changed
    findings:  of these nodes, the worst first; equal ones once
    left_out:  the number of further findings, for which there was no room
    """

    SCHEMA: ClassVar = "notification"

    text: str
    command: Name
    inventory: str
    finished: Moment
    summary: AuditSummary
    changes: tuple[StatusChange, ...]
    findings: tuple[NotifiedFinding, ...]
    left_out: Count = 0

    def body(self) -> bytes:
        """Its JSON, without the last findings where it would be too long."""
        notification = self
        while len(body := "".join(render(notification)).encode()) > MAX_BYTES:
            findings = notification.findings[: len(notification.findings) // 2]
            left_out = len(self.findings) - len(findings)
            notification = replace(notification, findings=findings, left_out=left_out)
        return body


def bad_statuses(audit: Audit) -> dict[str, str]:
    """Node -> its status, of the nodes that are not ok."""
    return {node.name: node.status for node in audit.nodes if node.status not in _GOOD}


def notification(
    audit: Audit, before: Mapping[str, str], command: str, inventory: str
) -> Notification | None:
    """What has changed since the last notification; None: nothing.

    before: `bad_statuses` at the last notification
    """
    after = bad_statuses(audit)
    pairs = [
        ((before.get(node.name, _OK), after.get(node.name, _OK)), node.name)
        for node in audit.nodes
        if before.get(node.name, _OK) != after.get(node.name, _OK)
    ]
    if not pairs:
        return None
    changed = {name for _, name in pairs}
    shown = replace(audit, nodes=tuple(node for node in audit.nodes if node.name in changed))
    rows = [*errors(shown), *findings(shown, ("fail", "unknown", "warn"))]
    rows_of_change = sorted(grouped(pairs), key=lambda row: _rank(row[0]))
    changes = tuple(
        StatusChange(*change, node_set(names, _NODES), len(names))
        for change, names in rows_of_change
    )
    return Notification(
        _sentence(command, rows_of_change),
        command,
        sanitise(inventory, _TEXT),
        audit.finished,
        audit.summary,
        changes,
        tuple(_finding(row, inventory) for row in rows),
    )


def _rank(change: tuple[str, str]) -> tuple[int, int]:
    before, after = change
    return NODE_STATUSES.index(after), NODE_STATUSES.index(before)


def _sentence(command: str, changes: Iterable[tuple[tuple[str, str], list[str]]]) -> str:
    """``nodeready audit: gpu[001-004]: ok -> fail; gpu009: fail -> ok``."""
    texts = (
        f"{node_set(names, _FEW_NODES)}: {before} -> {after}" for (before, after), names in changes
    )
    return f"nodeready {command}: {'; '.join(texts)}"


def _finding(row: AuditFinding, inventory: str) -> NotifiedFinding:
    names = node_set(row.names, _NODES)
    text = sanitise(row.text or row.example, _TEXT)
    fix = sanitise(with_inventory(row.fix, inventory))
    return NotifiedFinding(row.status, row.title, names, len(row.names), text, fix, row.severity)

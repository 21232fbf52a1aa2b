"""`audit --watch`: what changed from one look to the next, a line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nodeready.agent.audit_document import NODE_STATUSES, Audit
from nodeready.core.result import result_text
from nodeready.reports.lines import STYLES, StyledLine, grouped, line, node_set

#: (node, check) -> its status and text; the check "": the node itself could not be probed.
Findings = Mapping[tuple[str, str], tuple[str, str]]
_GOOD = ("ok", "na", "waived")


def findings_of(audit: Audit, before: Findings) -> Findings:
    """The findings of an audit. A node that could not be probed keeps those of before."""
    findings: dict[tuple[str, str], tuple[str, str]] = {}
    lost = set()
    for node in audit.nodes:
        if node.error:
            lost.add(node.name)
            findings[node.name, ""] = node.status, node.error
        for result in node.results:
            if result.status not in _GOOD:
                findings[node.name, result.check] = result.status, result_text(result)
    findings |= {key: text for key, text in before.items() if key[0] in lost and key[1]}
    return findings


def changes(before: Findings, after: Findings, moment: str) -> Iterator[StyledLine]:
    """A line for each new status, with its nodes; what is well again comes last.

    A finding whose value alone has changed is no change: ages and counts change at every look.
    """
    new = [
        ((*after[key], key[1]), key[0])
        for key in after
        if before.get(key, ("",))[0] != after[key][0]
    ]
    gone = [(("ok", "", key[1]), key[0]) for key in before if key not in after]
    # The worst status first, and of one status the change of most nodes.
    rows = sorted(grouped(new), key=lambda row: NODE_STATUSES.index(row[0][0]))
    for (status, text, check), names in [*rows, *grouped(gone)]:
        subject = check or ("answers again" if status == "ok" else "")
        head = f"{moment}  ", (f"{status:<13}", STYLES.get(status, ""))
        name = f"{subject}  " if subject else ""
        yield line(*head, name, (node_set(names), "bold"), f"  {text}" if text else "")

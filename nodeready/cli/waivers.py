"""`nodeready waivers`: each waiver of the policy, its end, and what it hides now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nodeready.agent.audit_document import Audit
from nodeready.cli.default_inventory import require_inventory
from nodeready.cli.options import (
    Refused,
    command,
    inventory_argument,
    option,
    report_options,
    srun_job_option,
    timeout_option,
    transport_options,
)
from nodeready.cli.outputs import read_outputs
from nodeready.cli.screen import Screen
from nodeready.cli.targets import TargetOptions, Targets, load_targets, select_targets
from nodeready.core.outcome import gaps_of, interrupted_nodes
from nodeready.core.policy.site_checks import AUDIT
from nodeready.core.text import utc_now
from nodeready.runs.audit.fleet import probed_subjects
from nodeready.runs.audit.waiver_list import MISTAKES, WaiverList, list_waivers, waivers_code
from nodeready.subjects.registry import LOOKED_AT, CheckSelection


def _audit(nodes: Targets, screen: Screen, selection: CheckSelection, timeout_s: int) -> Audit:
    """An audit of the waived checks."""
    from nodeready.cli.audit_run import audit_document
    from nodeready.cli.conversations import probe_nodes
    from nodeready.runs.audit.workers import AuditWorkers

    nodes = nodes.at(AUDIT).chosen(selection)
    with AuditWorkers(nodes.policies) as workers, nodes.transport:
        started, subjects = utc_now(), probed_subjects(selection)
        outcomes = probe_nodes(nodes, screen, subjects, timeout_s, read=workers.read)
        if nodes.transport.interrupted:
            screen.say_partial(interrupted_nodes(gaps_of(outcomes)))
        audit = audit_document(
            nodes, screen, selection, outcomes, started=started, workers=workers
        )
        # The workers' files have the nodes.
        return replace(audit, nodes=tuple(audit.nodes))


@command()
@inventory_argument
@option("--offline", is_flag=True, help="Only the list: contact no node.", general=False)
@report_options("waivers")
@timeout_option()
@srun_job_option
@transport_options
def waivers(
    inventory: str | None,
    *,
    offline: bool,
    format: str,
    output: tuple[str, ...],
    timeout: int,
    job: str | None,
    **shared: Any,
) -> int:
    """List the waivers of INVENTORY, their ends, and the findings that they hide now.

    A waiver that has expired, that concerns no node of the inventory, or that hides nothing is a
    mistake (exit status 3). Only the waived checks are made. Never writes to a node.

    \b
    Examples:
      nodeready waivers inventories/prod.py
      nodeready waivers inventories/prod.py --offline
      nodeready waivers inventories/prod.py --format json -o waivers.json
    """
    from nodeready.fleet.inventory.node_policies import declared_waivers

    options = TargetOptions(**shared)
    inventory = require_inventory(inventory, options)
    if offline and (options.via != "ssh" or job is not None):
        raise Refused("--offline: contacts no node: remove --via and --job")
    outputs = read_outputs("waivers", format, output)
    screen, started, audit = options.screen(), utc_now(), None
    if offline:
        loaded, _, policies = load_targets(inventory, options)
    else:
        nodes = select_targets(inventory, options, job=job, tell=screen.note)
        assert nodes.inventory is not None
        loaded, policies = nodes.inventory, dict(nodes.policies)
    declared = declared_waivers(loaded)
    checks = dict.fromkeys(waiver.check for waiver in sorted(declared))
    selection = CheckSelection(
        tuple(check for check in checks if check.partition(".")[0] in LOOKED_AT)
    )
    if not offline and selection.checks:
        audit = _audit(nodes, screen, selection, timeout)
    gaps = audit.gaps if audit else ()
    document = WaiverList(
        started,
        utc_now(),
        audit is None or audit.complete,
        len(audit.nodes) - len(gaps) if audit else 0,
        list_waivers(declared, [*policies], audit, started[:10]),
        gaps,
    )
    is_silent = screen.quiet and not any(row.state in MISTAKES for row in document.waivers)
    outputs.show(document, screen, silent=is_silent and not gaps)
    return waivers_code(document)

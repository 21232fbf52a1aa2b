"""What `nodeready audit` does when it runs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nodeready.agent.audit_document import FAILED, UNREACHABLE, Audit, audit_code, nagios_code
from nodeready.cli.conversations import probe_nodes
from nodeready.cli.default_inventory import require_inventory
from nodeready.cli.kept_looks import LookKeeper
from nodeready.cli.options import Refused
from nodeready.cli.outputs import Outputs, read_outputs
from nodeready.cli.recorded import check_recorded, recorded_audit
from nodeready.cli.screen import Screen
from nodeready.cli.targets import TargetOptions, Targets, select_targets
from nodeready.core.exit_codes import INTERRUPTED as INTERRUPTED_CODE
from nodeready.core.outcome import Outcome, gaps_of, interrupted_nodes
from nodeready.core.policy import Policy
from nodeready.core.policy.site_checks import AUDIT
from nodeready.core.text import utc_now
from nodeready.reports.registry import Options
from nodeready.runs.audit.fleet import distinguishing_groups, probed_subjects
from nodeready.subjects.registry import CheckSelection, SelectionError, select
from nodeready.subjects.snapshot import Snapshot

if TYPE_CHECKING:
    from nodeready.runs.audit.workers import AuditWorkers

#: The statuses of the nodes that ``--limit @last-failed`` means.
FAILING = (UNREACHABLE, FAILED, "fail", "unknown", "warn")


def audit_document(
    targets: Targets,
    screen: Screen,
    selection: CheckSelection,
    outcomes: list[Outcome[Snapshot]],
    *,
    started: str,
    workers: AuditWorkers,
    keeper: LookKeeper | None = None,
) -> Audit:
    """The audit of a probe of targets with an inventory.

    outcomes: without the snapshots that the workers hold
    keeper:   has the earlier counters; None: of a look that is not kept
    """
    from nodeready.fleet.transport.fleet_context import fleet_context
    from nodeready.subjects.context import FleetContext

    assert targets.inventory is not None
    transport, inventory = targets.transport, targets.inventory
    outcomes = workers.settle(outcomes)
    context = FleetContext(targets.policies)
    if not any(outcome.is_interrupted for outcome in outcomes):
        context = fleet_context(transport, targets.gate_policies, outcomes, inventory)
    return workers.audit(
        outcomes,
        workers.complete(context, transport.ssh_peers()),
        selection,
        started,
        lambda name: distinguishing_groups(inventory, name, len(inventory)),
        complete=not transport.interrupted,
        earlier_counters=(keeper or LookKeeper(screen)).earlier_counters,
    )


def look_at_nodes(
    nodes: Targets,
    screen: Screen,
    selection: CheckSelection,
    timeout_s: int,
    workers: AuditWorkers,
    *,
    keeper: LookKeeper,
) -> Audit:
    """The audit of one look at the nodes. It connects to them anew: a node may be back."""
    started = utc_now()
    subjects = probed_subjects(selection)
    with nodes.transport:
        outcomes = probe_nodes(nodes, screen, subjects, timeout_s, read=workers.read)
        if nodes.transport.interrupted:
            screen.say_partial(interrupted_nodes(gaps_of(outcomes)))
        return audit_document(
            nodes, screen, selection, outcomes, started=started, workers=workers, keeper=keeper
        )


def _watch(
    nodes: Targets,
    screen: Screen,
    selection: CheckSelection,
    timeout_s: int,
    first: Audit,
    *,
    keeper: LookKeeper,
    checks: Iterable[str],
    every_s: float,
) -> int:
    """Look every ``every_s`` seconds and print what changed, until a signal. Returns the code."""
    from nodeready.reports.audit_table import changes, findings_of
    from nodeready.runs.audit.workers import AuditWorkers

    findings = findings_of(first, {})
    # Progress would stand between the lines.
    quiet = Screen("never", quiet=True)
    try:
        while True:
            time.sleep(every_s)
            writer = keeper.section_writer(checks)
            with AuditWorkers(nodes.policies, None, 0, writer) as workers:
                audit = look_at_nodes(nodes, quiet, selection, timeout_s, workers, keeper=keeper)
                if not audit.complete:
                    return INTERRUPTED_CODE
                before, findings = findings, findings_of(audit, findings)
                lines = [*changes(before, findings, audit.finished)]
                if lines:
                    keeper.keep_audit(audit, audit_code(audit), workers)
            screen.show(lines)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED_CODE


def _refuse_with_watch(outputs: Outputs, recorded: str | None) -> None:
    """Raises Refused for what --watch cannot do."""
    if recorded:
        raise Refused("--watch: asks the nodes; remove --recorded")
    if outputs.form != "table" or outputs.files:
        raise Refused("--watch: prints lines; remove --format and -o")


def run_audit(
    inventory: str | None,
    *,
    format: str,
    output: tuple[str, ...],
    only: str | None,
    skip: str | None,
    fail_on: str,
    timeout: int,
    recorded: str | None,
    every: float | None,
    job: str | None,
    **shared: Any,
) -> int:
    """Run `nodeready audit`. Returns the exit code. Raises Refused."""
    options = TargetOptions(**shared)
    inventory = require_inventory(inventory, options)
    if recorded:
        check_recorded(recorded)

    def select_checks(policies: Iterable[Policy]) -> CheckSelection:
        try:
            return select(policies, only, skip)
        except SelectionError as error:
            raise Refused(str(error)) from None

    outputs = read_outputs("audit", format, output)
    if every is not None:
        _refuse_with_watch(outputs, recorded)
    screen = options.screen()
    keeper = LookKeeper(screen, "audit", inventory)
    checks: frozenset[str] = frozenset()
    workers: AuditWorkers | None = None
    with contextlib.ExitStack() as exit_stack:
        if recorded:
            document, nodes = recorded_audit(inventory, options, recorded, timeout, select_checks)
        else:
            nodes = select_targets(inventory, options, job=job, tell=screen.note).at(AUDIT)
            selection = select_checks(nodes.policies.values())
            nodes = nodes.chosen(selection)
            from nodeready.runs.audit.workers import AuditWorkers

            # Of a subject that was probed, the memory has all results.
            checks = selection.results | select(nodes.gate_policies.values(), None, skip).results
            # The workers are forked before any connection is made.
            workers = exit_stack.enter_context(
                AuditWorkers(
                    nodes.policies, outputs.write_facts, None, keeper.section_writer(checks)
                )
            )
            document = look_at_nodes(nodes, screen, selection, timeout, workers, keeper=keeper)
        code = audit_code(document, fail_on)
        keeper.keep_audit(document, code, workers)
        failing = [node.name for node in document.nodes if node.status in FAILING]
        outputs.show(
            document,
            screen,
            silent=screen.quiet and not failing,
            options=Options(
                fail_on=fail_on,
                inventory=options.words(inventory),
                looks=keeper.looks,
                history=keeper.history,
            ),
        )
        nodes.remember_failed(failing)
        if every is not None and document.complete:
            return _watch(
                nodes,
                screen,
                selection,
                timeout,
                document,
                keeper=keeper,
                checks=checks,
                every_s=every,
            )
        return nagios_code(document) if outputs.form == "nagios" else code

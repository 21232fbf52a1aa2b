"""What `nodeready ready` does when it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nodeready.agent.audit_document import Audit, Ready, nagios_code, ready_code, slots
from nodeready.cli.audit_run import audit_document
from nodeready.cli.conversations import ask_password
from nodeready.cli.default_inventory import find_inventory
from nodeready.cli.kept_looks import LookKeeper, earlier_failures
from nodeready.cli.options import Refused
from nodeready.cli.outputs import read_outputs
from nodeready.cli.screen import Screen, refuse_unwritable, write_hostfile
from nodeready.cli.targets import TargetOptions, Targets, local_policy, select_targets
from nodeready.cli.values import policy_settings
from nodeready.core.outcome import INTERRUPTED, Outcome
from nodeready.core.policy import Policy
from nodeready.core.policy.site_checks import READY
from nodeready.core.text import counted, span, utc_now
from nodeready.reports.lines import node_set
from nodeready.reports.registry import Options
from nodeready.runs.audit.fleet import probed_subjects
from nodeready.subjects.registry import LOOKED_AT, SUBJECTS, CheckSelection, SelectionError, select
from nodeready.subjects.snapshot import Snapshot

if TYPE_CHECKING:
    from nodeready.runs.audit.workers import AuditWorkers
    from nodeready.runs.ready.run import ReadyTask, WantedProofs
    from nodeready.subjects.proof.facts import ProvedCollective

#: Seconds of the budget to end the processes that still run on the nodes, and to report.
_RESERVE_S = 3
#: Seconds between two looks of ``--wait``.
_PAUSE_S = 10


def _select_checks(
    policies: Iterable[Policy], only: str | None, skip: str | None
) -> CheckSelection:
    try:
        selection = select(policies, only, skip, SUBJECTS)
    except SelectionError as error:
        raise Refused(str(error)) from None
    checks = selection.checks
    if any(check.startswith("proof.") for check in checks) and "proof.user" not in checks:
        # Without the user's session all other proofs are na, which would look like success.
        checks = (*checks, "proof.user")
    return CheckSelection(checks)


def _prove_fleet(
    nodes: Targets, screen: Screen, subjects: tuple[str, ...], request: WantedProofs, budget_s: int
) -> list[Outcome[Snapshot]]:
    """Probe the nodes and prove them, within the budget."""
    from nodeready.fleet.inventory.endpoints import given_addresses
    from nodeready.runs.ready.run import ReadyTask, prove

    deadline = time.monotonic() + budget_s - min(_RESERVE_S, budget_s / 4)
    addresses = given_addresses(nodes.inventory) if nodes.inventory is not None else {}
    pending = {"snapshot": set(nodes.policies), "proofs": set(nodes.policies)}
    with ExitStack() as shown:
        progress = {
            "snapshot": shown.enter_context(screen.progress("probing", pending["snapshot"]))
        }

        def on_done(name: str, stage: str) -> None:
            pending[stage].discard(name)
            if stage in progress:
                progress[stage](name)
            if stage == "snapshot" and not pending["snapshot"] and "proofs" not in progress:
                shown.close()
                progress["proofs"] = shown.enter_context(
                    screen.progress("proving", pending["proofs"])
                )

        def ask(names: list[str]) -> bool:
            shown.close()
            return ask_password(nodes.transport, names)

        def prove_collective(names: tuple[str, ...]) -> Mapping[str, ProvedCollective]:
            shown.close()
            return _prove_collective(task, names, screen)

        histories = earlier_failures(nodes.policies) if request.history else None
        task = ReadyTask(
            nodes.transport,
            nodes.policies,
            subjects,
            request,
            budget_s,
            deadline,
            addresses,
            prove_collective,
            histories,
        )
        return prove(task, on_done, ask)


def _fleet_audit(
    targets: Targets,
    screen: Screen,
    selection: CheckSelection,
    workers: AuditWorkers,
    keeper: LookKeeper,
    *,
    budget_s: int,
    nodes_needed: int | None,
    full_mesh: bool,
) -> tuple[Audit, dict[str, int]]:
    """The audit with the proofs of all nodes, and their slots. Raises Refused."""
    from nodeready.runs.ready.run import WantedProofs

    started = utc_now()
    subjects = tuple(name for name in probed_subjects(selection) if name in LOOKED_AT)
    if nodes_needed is not None and nodes_needed > len(targets.policies):
        count = len(targets.policies)
        raise Refused(
            f"--nodes-needed {nodes_needed}: {counted(count, 'node')} "
            f"{'is' if count == 1 else 'are'} selected"
        )
    request = WantedProofs.of(selection.checks, full=full_mesh)
    with targets.transport:
        outcomes = _prove_fleet(targets, screen, subjects, request, budget_s)
        audit = audit_document(
            targets, screen, selection, outcomes, started=started, workers=workers, keeper=keeper
        )
    if targets.transport.interrupted:
        screen.say_partial(
            node.name
            for node in audit.nodes
            if node.error or any(result.actual == INTERRUPTED for result in node.results)
        )
    return audit, {probed.node: slots(probed.value) for probed in outcomes} | targets.slots


def _look_until_ready(
    look: Callable[[], tuple[Ready, dict[str, int]]], wait_s: float, screen: Screen
) -> tuple[Ready, dict[str, int]]:
    """The last look: enough nodes are ready, or the time is over, or a signal came."""
    deadline, shown = time.monotonic() + wait_s, ""
    while True:
        document, slots_of = look()
        remaining_s = deadline - time.monotonic()
        if document.enough or not document.audit.complete or remaining_s <= 0:
            return document, slots_of
        total = counted(len(document.audit.nodes), "node")
        text = f"{len(document.go)} of {total} ready, not {node_set(document.no_go)}"
        if text != shown:
            screen.note(f"{text}; probing again for {span(remaining_s)}")
        shown = text
        try:
            time.sleep(min(_PAUSE_S, remaining_s))
        except KeyboardInterrupt:
            return replace(document, audit=replace(document.audit, complete=False)), slots_of


def _prove_collective(
    task: ReadyTask, names: tuple[str, ...], screen: Screen
) -> Mapping[str, ProvedCollective]:
    """Each node's proof from a smoke test of these nodes, which has the deadline of the task."""
    from nodeready.runs.smoke import run
    from nodeready.runs.smoke.participants import SmokeTask

    policies = {name: task.policies[name] for name in names}
    smoke_task = SmokeTask(
        task.transport,
        policies,
        task.deadline,
        task.budget_s,
        inventory_addresses=task.inventory_addresses,
    )
    return run.collective_proofs(run.smoke(smoke_task, screen.note, screen.progress))


def run_ready(
    inventory: str | None,
    *,
    local: bool,
    budget: int,
    user: str | None,
    ports: str | None,
    gpus: int | None,
    nodes_needed: int | None,
    wait_s: int,
    hostfile_out: str | None,
    hostfile_format: str,
    full_mesh: bool,
    only: str | None,
    skip: str | None,
    format: str,
    output: tuple[str, ...],
    job: str | None,
    **shared: Any,
) -> int:
    """Run `nodeready ready`. Returns the exit code. Raises Refused."""
    options = TargetOptions(**shared)
    inventory = find_inventory(inventory, options, elsewhere=local)
    settings = policy_settings(ports, user)
    if gpus is not None:
        settings["gpu_count"] = gpus
    if local == (inventory is not None):
        raise Refused("give either an INVENTORY or --local")
    outputs = read_outputs("ready", format, output)
    refuse_unwritable(hostfile_out, "--hostfile-out")
    screen = options.screen()
    keeper = LookKeeper(screen, "ready", inventory or "")
    with ExitStack() as exit_stack:
        if inventory is None:
            if options.limit is not None:
                raise Refused("--limit: cannot be combined with --local")
            from nodeready.agent.gate import here

            policy = replace(local_policy(options), **settings)
            selection = _select_checks([policy.at(READY)], only, skip)

            def look() -> tuple[Ready, dict[str, int]]:
                audit = here.ready(policy, selection, budget).audit
                slots_of = {node.name: slots(node.snapshot) for node in audit.nodes}
                return Ready(audit, budget, nodes_needed), slots_of
        else:
            from nodeready.runs.audit.workers import AuditWorkers

            targets = select_targets(inventory, options, settings, job=job, tell=screen.note).at(
                READY
            )
            selection = _select_checks(targets.policies.values(), only, skip)
            targets = targets.chosen(selection)
            # Of a subject that was probed, the memory has all results. Not each proof was made.
            probed = _select_checks(targets.gate_policies.values(), None, skip).results
            checks = selection.results | {check for check in probed if check[:6] != "proof."}
            last_look = exit_stack.enter_context(ExitStack())
            workers: AuditWorkers

            def look() -> tuple[Ready, dict[str, int]]:
                # The document reads the files of its workers.
                nonlocal workers
                last_look.close()
                writer = keeper.section_writer(checks)
                workers = AuditWorkers(targets.policies, outputs.write_facts, 0, writer)
                audit, slots_of = _fleet_audit(
                    targets,
                    screen,
                    selection,
                    last_look.enter_context(workers),
                    keeper,
                    budget_s=budget,
                    nodes_needed=nodes_needed,
                    full_mesh=full_mesh,
                )
                return Ready(audit, budget, nodes_needed), slots_of

        document, slots_of = _look_until_ready(look, wait_s, screen)
        if inventory is not None:
            keeper.keep_audit(document.audit, ready_code(document), workers)
            targets.remember_failed(document.no_go)
        write_hostfile(
            hostfile_out,
            hostfile_format,
            {name: slots_of[name] for name in document.go},
            document.no_go,
            screen,
            complete=document.audit.complete,
        )
        silent = screen.quiet and document.enough and not document.no_go
        shown = Options(inventory=options.words(inventory), looks=keeper.looks)
        outputs.show(document, screen, silent=silent, options=shown)
        return nagios_code(document.audit) if outputs.form == "nagios" else ready_code(document)

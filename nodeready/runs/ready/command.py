"""The run of `nodeready ready`: proves the nodes until enough of them are ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nodeready.agent.audit_document import Audit, Ready, ready_code, slots
from nodeready.agent.gate import here
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import INTERRUPTED, Outcome
from nodeready.core.policy import READY, Policy
from nodeready.core.text import counted, span, utc_now
from nodeready.fleet.inventory.nodeset import folded
from nodeready.runs import targets
from nodeready.runs.audit.command import audit_document, probed_subjects
from nodeready.runs.audit.workers import AuditWorkers
from nodeready.runs.memory.kept_looks import LookKeeper, earlier_failures
from nodeready.runs.options import ReadyOptions, SmokeOptions
from nodeready.runs.targets import Targets, ask_password
from nodeready.runs.tell import Tell
from nodeready.runs.values import policy_settings
from nodeready.subjects.proof.active import ACTIVE_CHECKS, NETWORK_CHECKS
from nodeready.subjects.registry import LOOKED_AT, SUBJECTS, CheckSelection, select
from nodeready.subjects.snapshot import Snapshot

if TYPE_CHECKING:
    from nodeready.runs.ready.run import ReadyTask, WantedProofs
    from nodeready.subjects.proof.facts import ProvedCollective

_RESERVE_S = 3  # seconds of the budget to end what still runs on the nodes, and to report
_PAUSE_S = 10  # seconds between two looks of ``--wait``


@dataclass(frozen=True)
class ReadyLook:
    """The last look at the nodes. Its document is whole within the context of `run`."""

    document: Ready
    slots: Mapping[str, int]  # node -> its slots
    keeper: LookKeeper


@contextmanager
def run(
    inventory: str | None,
    options: ReadyOptions,
    tell: Tell,
    *,
    write_facts: Callable[[Any], str] | None = None,
) -> Iterator[ReadyLook]:
    """The last look: enough nodes are ready, the time is over, or a signal came. inventory: None:
    this machine; write_facts: makes the text of an observation. Raises Refused.
    """
    settings = policy_settings(options.ports, options.user)
    if options.gpus is not None:
        settings["gpu_count"] = options.gpus
    if options.local == (inventory is not None):
        raise Refused("give either an INVENTORY or --local")
    keeper = LookKeeper(tell, "ready", inventory or "")
    if inventory is None:
        yield _local_look(options, settings, keeper, tell)
        return
    nodes = targets.select_targets(inventory, options, settings, job=options.job, tell=tell.note)
    nodes = nodes.at(READY)
    selection = _select_checks(nodes.policies.values(), options.only, options)
    nodes = nodes.chosen(selection)
    # Of a subject that was probed, the memory has all results. Not each proof was made.
    probed = _select_checks(nodes.gate_policies.values(), None, options).results
    checks = selection.results | {check for check in probed if check[:6] != "proof."}
    with ExitStack() as last_look:
        workers: AuditWorkers

        def look() -> ReadyLook:
            # The document reads the files of its workers.
            nonlocal workers
            last_look.close()
            writer = keeper.section_writer(checks)
            workers = last_look.enter_context(AuditWorkers(nodes.policies, write_facts, 0, writer))
            audit, slots_of = _prove(nodes, tell, selection, options, workers, keeper=keeper)
            return ReadyLook(Ready(audit, options.budget, options.nodes_needed), slots_of, keeper)

        last = _look_until_ready(look, options.wait_s, tell)
        keeper.keep_audit(last.document.audit, ready_code(last.document), workers)
        nodes.remember_failed(last.document.no_go)
        yield last


def _local_look(
    options: ReadyOptions, settings: dict[str, Any], keeper: LookKeeper, tell: Tell
) -> ReadyLook:
    """The last look at this machine, which the memory does not keep."""
    if options.limit is not None:
        raise Refused("--limit: cannot be combined with --local")
    policy = replace(targets.local_policy(options, tell.note), **settings)
    selection = _select_checks([policy.at(READY)], options.only, options)

    def look() -> ReadyLook:
        audit = here.ready(policy, selection, options.budget, level=options.active or 1).audit
        slots_of = {node.name: slots(node.snapshot) for node in audit.nodes}
        return ReadyLook(Ready(audit, options.budget, options.nodes_needed), slots_of, keeper)

    return _look_until_ready(look, options.wait_s, tell)


def _select_checks(
    policies: Iterable[Policy], only: str | None, options: ReadyOptions
) -> CheckSelection:
    level = options.active or 0
    named = (ACTIVE_CHECKS if level else ()) + (NETWORK_CHECKS if level > 1 else ())
    checks = select(policies, only, options.skip, SUBJECTS, named).checks
    if any(check.startswith("proof.") for check in checks) and "proof.user" not in checks:
        # Without the user's session all other proofs are na, which would look like success.
        checks = (*checks, "proof.user")
    return CheckSelection(checks)


def _look_until_ready(look: Callable[[], ReadyLook], wait_s: float, tell: Tell) -> ReadyLook:
    """The last look: enough nodes are ready, or the time is over, or a signal came."""
    deadline, shown = time.monotonic() + wait_s, ""
    while True:
        last = look()
        document = last.document
        remaining_s = deadline - time.monotonic()
        if document.enough or not document.audit.complete or remaining_s <= 0:
            return last
        total = counted(len(document.audit.nodes), "node")
        text = f"{len(document.go)} of {total} ready, not {folded(document.no_go)}"
        if text != shown:
            tell.note(f"{text}; probing again for {span(remaining_s)}")
        shown = text
        try:
            time.sleep(min(_PAUSE_S, remaining_s))
        except KeyboardInterrupt:
            audit = replace(document.audit, complete=False)
            return replace(last, document=replace(document, audit=audit))


def _prove(
    nodes: Targets,
    tell: Tell,
    selection: CheckSelection,
    options: ReadyOptions,
    workers: AuditWorkers,
    *,
    keeper: LookKeeper,
) -> tuple[Audit, dict[str, int]]:
    """The audit with the proofs of all nodes, and their slots. Raises Refused."""
    started = utc_now()
    subjects = tuple(name for name in probed_subjects(selection) if name in LOOKED_AT)
    needed = options.nodes_needed
    if needed is not None and needed > len(nodes.policies):
        selected = counted(len(nodes.policies), "node is", "nodes are")
        raise Refused(f"--nodes-needed {needed}: {selected} selected")
    from nodeready.runs.ready.run import WantedProofs

    level = options.active or 1
    request = WantedProofs.of(selection.checks, full=options.full_mesh, level=level)
    with nodes.transport:
        outcomes = _prove_fleet(nodes, tell, subjects, request, options.budget)
        audit = audit_document(
            nodes, tell, selection, outcomes, started=started, workers=workers, keeper=keeper
        )
    if nodes.transport.interrupted:
        tell.say_partial(
            node.name
            for node in audit.nodes
            if node.error or any(result.actual == INTERRUPTED for result in node.results)
        )
    return audit, {probed.node: slots(probed.value) for probed in outcomes} | nodes.slots


def _prove_fleet(
    nodes: Targets, tell: Tell, subjects: tuple[str, ...], request: WantedProofs, budget_s: int
) -> list[Outcome[Snapshot]]:
    # Imported only here: they import pyinfra, which this machine alone does not need.
    from nodeready.fleet.inventory.host_data import given_addresses
    from nodeready.runs.ready.run import ReadyTask, prove

    deadline = time.monotonic() + budget_s - min(_RESERVE_S, budget_s / 4)
    pending = {"snapshot": set(nodes.policies), "proofs": set(nodes.policies)}
    with ExitStack() as shown:
        progress = {"snapshot": shown.enter_context(tell.progress("probing", pending["snapshot"]))}

        def on_done(name: str, stage: str) -> None:
            pending[stage].discard(name)
            if stage in progress:
                progress[stage](name)
            if stage == "snapshot" and not pending["snapshot"] and "proofs" not in progress:
                shown.close()
                progress["proofs"] = shown.enter_context(
                    tell.progress("proving", pending["proofs"])
                )

        def ask(names: list[str]) -> bool:
            shown.close()
            return ask_password(nodes.transport, names, tell)

        def prove_collective(names: tuple[str, ...]) -> Mapping[str, ProvedCollective]:
            shown.close()
            return _prove_collective(task, names, tell)

        addresses = given_addresses(nodes.inventory) if nodes.inventory is not None else {}
        failures = earlier_failures(nodes.policies) if request.history else None
        task = ReadyTask(
            *(nodes.transport, nodes.policies, subjects, request, budget_s, deadline),
            *(addresses, prove_collective, failures),
        )
        return prove(task, on_done, ask)


def _prove_collective(
    task: ReadyTask, names: tuple[str, ...], tell: Tell
) -> Mapping[str, ProvedCollective]:
    """Each node's proof from a smoke test of these nodes, which has the deadline of the task."""
    from nodeready.runs.smoke import participants
    from nodeready.runs.smoke import run as smoke_run

    policies = {name: task.policies[name] for name in names}
    further = task.deadline, task.inventory_addresses, SmokeOptions(budget=task.budget_s)
    smoke_task = participants.SmokeTask(task.transport, policies, *further)
    return smoke_run.collective_proofs(smoke_run.smoke(smoke_task, tell.note, tell.progress))

"""The run of `nodeready audit`: looks at the nodes, or at the verdicts that they have recorded."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nodeready import __version__
from nodeready.agent.audit_document import FAILED, UNREACHABLE, Audit, audit_code
from nodeready.agent.local import Local
from nodeready.agent.verdict import SourceError
from nodeready.core.exit_codes import FAILED as FAILED_CODE
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import Outcome, gaps_of, interrupted_nodes
from nodeready.core.policy import AUDIT, GATE, digest
from nodeready.core.text import counted, sanitise, utc_now
from nodeready.fleet.inventory.nodeset import folded
from nodeready.runs import targets
from nodeready.runs.audit import recorded
from nodeready.runs.audit.workers import AuditWorkers
from nodeready.runs.memory.kept_looks import LookKeeper
from nodeready.runs.options import AuditOptions
from nodeready.runs.targets import Targets, probe_nodes
from nodeready.runs.tell import Tell
from nodeready.subjects.registry import COUNTING, SUBJECTS, CheckSelection, select
from nodeready.subjects.snapshot import Snapshot

if TYPE_CHECKING:
    from pyinfra.api import Inventory


# --- The subjects and groups of the nodes of a run.


def probed_subjects(selection: CheckSelection) -> tuple[str, ...]:
    subjects = selection.subjects
    has_counters = any(subject in COUNTING for subject in subjects)
    return tuple(dict.fromkeys((*subjects, "host"))) if has_counters else subjects


def distinguishing_groups(inventory: Inventory, name: str) -> tuple[str, ...]:
    """The node's groups, without those that contain all nodes of the inventory."""
    groups, total = inventory.get_host(name).groups, len(inventory)
    return tuple(group for group in groups if len(inventory.get_group(group)) < total)


# --- The run.

#: Seconds for which `--watch` keeps a connection, whose limits and groups are of its beginning.
_KEPT_S = 600.0
#: Seconds after which `--watch` judges even unchanged nodes again, because a waiver may end.
_FULL_S = 3600.0
#: The statuses of the nodes that ``--limit @last-failed`` means.
FAILING = (UNREACHABLE, FAILED, "fail", "unknown", "warn")


@dataclass(frozen=True)
class AuditLook:
    """One look at the nodes. Its document is whole until the next look."""

    audit: Audit
    code: int  # the exit code
    keeper: LookKeeper
    workers: AuditWorkers | None  # that have judged it; None: the nodes have

    @property
    def failing(self) -> list[str]:
        """The nodes that ``--limit @last-failed`` means."""
        return [node.name for node in self.audit.nodes if node.status in FAILING]

    def keep(self) -> None:
        self.keeper.keep_audit(self.audit, self.code, self.workers)


def run(
    inventory: str,
    options: AuditOptions,
    tell: Tell,
    *,
    write_facts: Callable[[Any], str] | None = None,
) -> Generator[AuditLook, None, None]:
    """The look at the nodes, which is kept; with `AuditOptions.every`, looks until a signal.
    Raises Refused. write_facts: makes the text of an observation, for the document
    """
    keeper = LookKeeper(tell, "audit", inventory)
    if options.recorded:
        audit, nodes = recorded_audit(inventory, options, tell)
        look = AuditLook(audit, audit_code(audit, options.fail_on), keeper, None)
        look.keep()
        nodes.remember_failed(look.failing)
        yield look
        return
    local = targets.undeclared_local(inventory, options) if options.job is None else None
    nodes = local or targets.select_targets(inventory, options, job=options.job, tell=tell.note)
    nodes = nodes.at(AUDIT)
    selection = select(nodes.policies.values(), options.only, options.skip)
    nodes = nodes.chosen(selection)
    # Of a subject that was probed, the memory has all results.
    checks = selection.results
    checks |= select(nodes.gate_policies.values(), None, options.skip).results
    is_first, full_at_s, connect_at_s = True, 0.0, 0.0
    with contextlib.ExitStack() as judging, contextlib.ExitStack() as connections:
        while True:
            now_s = time.monotonic()
            if now_s >= full_at_s:
                # The workers are forked before any connection is made.
                connections.close()
                judging.close()
                texts, is_watch = keeper.section_writer(checks), options.every is not None
                workers = AuditWorkers(nodes.policies, write_facts, None, texts, is_watch=is_watch)
                judging.enter_context(workers)
                full_at_s, connect_at_s = now_s + _FULL_S, now_s
            else:
                workers.begin_look()
            if now_s >= connect_at_s:
                connections.close()
                connections.enter_context(nodes.transport)
                connect_at_s = now_s + _KEPT_S
            audit = look_at_nodes(nodes, tell, selection, options.timeout, workers, keeper=keeper)
            look = AuditLook(audit, audit_code(audit, options.fail_on), keeper, workers)
            if is_first:
                look.keep()
                nodes.remember_failed(look.failing)
            elif not audit.complete:
                return
            yield look
            if options.every is None or not audit.complete:
                return
            is_first, tell = False, tell.without_progress()
            time.sleep(options.every)


def look_at_nodes(
    nodes: Targets,
    tell: Tell,
    selection: CheckSelection,
    timeout_s: int,
    workers: AuditWorkers,
    *,
    keeper: LookKeeper | None = None,
) -> Audit:
    """The audit of one look at the nodes, whose transport is entered. It connects to those to
    which it has no connection, or no longer: a node may be back.
    """
    started = utc_now()
    subjects = probed_subjects(selection)
    outcomes = probe_nodes(nodes, tell, subjects, timeout_s, read=workers.read)
    if nodes.transport.interrupted:
        tell.say_partial(interrupted_nodes(gaps_of(outcomes)))
    return audit_document(
        nodes, tell, selection, outcomes, started=started, workers=workers, keeper=keeper
    )


def audit_document(
    nodes: Targets,
    tell: Tell,
    selection: CheckSelection,
    outcomes: list[Outcome[Snapshot]],
    *,
    started: str,
    workers: AuditWorkers,
    keeper: LookKeeper | None = None,
) -> Audit:
    """The audit of a probe of nodes.

    outcomes: without the snapshots that the workers hold
    keeper:   has the earlier counters; None: of a look that is not kept
    """
    from nodeready.subjects.context import FleetContext

    transport, inventory = nodes.transport, nodes.inventory
    outcomes = workers.settle(outcomes)
    context = FleetContext(nodes.policies)
    if not any(outcome.is_interrupted for outcome in outcomes):
        context = targets.fleet_context(transport, nodes.gate_policies, outcomes, inventory)
    return workers.audit(
        outcomes,
        workers.complete(context, transport.ssh_peers()),
        selection,
        started,
        lambda name: () if inventory is None else distinguishing_groups(inventory, name),
        complete=not transport.interrupted,
        earlier_counters=(keeper or LookKeeper(tell)).earlier_counters,
    )


def recorded_audit(inventory: str, options: AuditOptions, tell: Tell) -> tuple[Audit, Targets]:
    """The audit from the nodes' last verdicts, and the nodes. Raises Refused."""
    from nodeready.fleet.inventory.host_data import endpoint
    from nodeready.subjects.gate.files import node_policy
    from nodeready.subjects.ssh_client.known_hosts import Names

    started, directory = utc_now(), str(options.recorded)
    loaded, _, policies = targets.load_targets(inventory, options, tell.note)
    at_gate = {id(policy): policy.at(GATE) for policy in policies.values()}.values()
    selection = select(at_gate, options.only, options.skip)
    if not any(
        check in recorded.OF_VERDICTS or SUBJECTS[check.partition(".")[0]].judged_on_node
        for check in selection.checks
    ):
        raise Refused("--only: no node judges its own gate: ask the nodes, without --recorded")
    endpoints = {host.name: endpoint(host) for host in loaded}
    for name, node_endpoint in endpoints.items():
        if node_endpoint.local:
            names = *node_endpoint.names, os.uname().nodename
            endpoints[name] = node_endpoint._replace(names=names)
    try:
        recorded_verdicts = recorded.directory_records(directory, len(policies), options.timeout)
    except SourceError as problem:
        raise Refused(str(problem), FAILED_CODE) from None
    verdicts, strangers = recorded.assign_to_nodes(recorded_verdicts, Names(endpoints))
    question = recorded.RecordedQuestion(policies, node_policy, selection, __version__)
    groups, place = partial(distinguishing_groups, loaded), sanitise(directory, 200)
    node_reports, about = recorded.reports(verdicts, question, groups, place, time.time())
    if strangers:
        count, hosts = counted(len(strangers), "host"), folded(strangers)
        tell.note(f"verdicts of {count} that are no node of the inventory: {hosts}")
    audit = Audit(started, utc_now(), digest(policies.values()), node_reports, recorded=about)
    return audit, Targets(Local(), policies, loaded)

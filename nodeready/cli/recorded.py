"""`nodeready audit --recorded`: the verdicts that the nodes gave themselves."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable

import click

from nodeready import __version__
from nodeready.agent.audit_document import Audit
from nodeready.agent.local import Local
from nodeready.agent.verdict import SourceError
from nodeready.cli.interrupts import interrupt_on_signals
from nodeready.cli.options import Refused
from nodeready.cli.targets import TargetOptions, Targets, load_targets
from nodeready.core.policy import Policy
from nodeready.core.policy.policy import digest
from nodeready.core.policy.site_checks import GATE
from nodeready.core.text import counted, sanitise, utc_now
from nodeready.reports.lines import node_set
from nodeready.runs.audit.fleet import distinguishing_groups
from nodeready.runs.audit.recorded import (
    OF_VERDICTS,
    RecordedQuestion,
    assign_to_nodes,
    directory_records,
    reports,
)
from nodeready.subjects.registry import SUBJECTS, CheckSelection

#: The options that say how a node is contacted.
_CONTACT_OPTIONS = (
    *("sudo", "ssh_user", "ssh_key"),
    *("via", "job", "salloc", "topology", "ssh_processes"),
)


def check_recorded(directory: str) -> None:
    """Raises Refused if ``--recorded`` names no directory, or for options of a connection."""
    context = click.get_current_context()
    options_given = {
        name
        for name in context.params
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    for name in _CONTACT_OPTIONS:
        if name in options_given:
            raise Refused(f"--{name.replace('_', '-')}: no node is asked with --recorded")
    # The text is not shown: a URL may hold a password.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", directory):
        raise Refused("--recorded: must be a directory, not a URL")


def recorded_audit(
    inventory: str,
    options: TargetOptions,
    directory: str,
    limit_s: int,
    select_checks: Callable[[Iterable[Policy]], CheckSelection],
) -> tuple[Audit, Targets]:
    """The audit from the nodes' last verdicts, and the nodes, which are not contacted.

    select_checks: the policies of the nodes -> the selection of --only and --skip
    Raises Refused, and ClickException where the verdicts cannot be collected.
    """
    from nodeready.fleet.inventory.endpoints import endpoint
    from nodeready.subjects.gate.files import node_policy
    from nodeready.subjects.ssh_client.known_hosts import Names

    interrupt_on_signals()
    started, screen = utc_now(), options.screen()
    loaded, _, policies = load_targets(inventory, options)
    at_gate = {id(policy): policy.at(GATE) for policy in policies.values()}.values()
    selection = select_checks(at_gate)
    if not any(
        check in OF_VERDICTS or SUBJECTS[check.partition(".")[0]].judged_on_node
        for check in selection.checks
    ):
        raise Refused("--only: no node judges its own gate: ask the nodes, without --recorded")
    endpoints = {host.name: endpoint(host) for host in loaded}
    for name, node_endpoint in endpoints.items():
        if node_endpoint.local:
            endpoints[name] = node_endpoint._replace(
                names=(*node_endpoint.names, os.uname().nodename)
            )
    question = RecordedQuestion(policies, node_policy, selection, __version__)
    names, total = Names(endpoints), len(loaded)
    try:
        recorded_verdicts = directory_records(directory, len(policies), limit_s)
    except SourceError as problem:
        raise click.ClickException(str(problem)) from None
    verdicts, strangers = assign_to_nodes(recorded_verdicts, names)
    node_reports, about = reports(
        verdicts,
        question,
        lambda name: distinguishing_groups(loaded, name, total),
        sanitise(directory, 200),
        time.time(),
    )
    if strangers:
        screen.note(
            f"verdicts of {counted(len(strangers), 'host')} that are no node of the inventory: "
            f"{node_set(strangers)}"
        )
    audit = Audit(started, utc_now(), digest(policies.values()), node_reports, recorded=about)
    return audit, Targets(Local(), policies, loaded)

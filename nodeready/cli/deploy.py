"""`nodeready deploy`: probe every node, show the plan, run it, probe again."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from nodeready.cli.conversations import converse, probe_nodes
from nodeready.cli.default_inventory import require_inventory
from nodeready.cli.options import (
    Refused,
    command,
    format_option,
    inventory_argument,
    only_option,
    option,
    shared_options,
)
from nodeready.cli.screen import Screen, show
from nodeready.cli.targets import TargetOptions, Targets, ssh_targets
from nodeready.core.text import counted, utc_now
from nodeready.reports.deploy_table import show_plan
from nodeready.reports.lines import node_set
from nodeready.reports.registry import Options, find_format
from nodeready.runs.deploy.document import Deploy, DeployedNode, deploy_code
from nodeready.subjects.registry import CHANGED, SelectionError, select_whole

if TYPE_CHECKING:
    from nodeready.agent.asking import Conversation
    from nodeready.runs.deploy.plan import NodePlan, PlanRun
    from nodeready.subjects.context import Judged

_STOPPING = "interrupted: ending what runs on the nodes (again: leave at once)"


@command()
@inventory_argument
@option("--check", is_flag=True, help="Only show what would change; write nothing.")
@option("--diff", is_flag=True, help="Show the differences of the files.")
@only_option("Only these subjects, e.g. ptrace,limits.", "SUBJECT,...")
@format_option("deploy", general=False)
@option("--yes", "-y", is_flag=True, help="Do not ask before the first change.")
@shared_options
def deploy(
    inventory: str | None,
    *,
    check: bool,
    diff: bool,
    only: str | None,
    format: str,
    yes: bool,
    **shared: Any,
) -> int:
    """Configure every node of INVENTORY by the policy.

    Probes all nodes at once, prints what would change on each node and why, asks on a terminal,
    makes only these changes, and probes again. Never reboots; restarts only services that the
    policy names.

    \b
    Examples:
      nodeready deploy inventories/prod.py --check --diff
      nodeready deploy 'gpu[001-064]' --only ptrace,limits --yes
      nodeready deploy inventories/prod.py --limit @last-failed --yes
      nodeready deploy inventories/prod.py --check --format json
    """
    options = TargetOptions(**shared)
    inventory = require_inventory(inventory, options)
    try:
        chosen = select_whole(only, CHANGED)
    except SelectionError as error:
        raise Refused(str(error)) from None
    shown = Options(diff=diff, quiet=options.quiet, inventory=options.words(inventory))
    report = _Report(options.screen(), format, chosen, shown, utc_now(), check)
    nodes = ssh_targets(inventory, options)
    with nodes.transport:
        return _deploy(nodes, report, check=check, yes=yes)


@dataclass(frozen=True)
class _Report:
    """Where and how one run of the command is reported."""

    screen: Screen
    form: str  # the value of --format
    subjects: tuple[str, ...]  # the chosen subjects
    options: Options
    started: str
    check: bool  # only the plan is reported: --check was given, or the user declined

    @property
    def styled(self) -> bool:
        """Whether the format is for a person, not for a program."""
        return find_format("deploy", self.form).styled

    def show_plan(self, nodes: Iterable[DeployedNode], *, asks: bool) -> None:
        """Show the plan to a person, before the changes. asks: the person has to confirm them"""
        screen = self.screen
        options = replace(
            self.options, verbose=screen.verbose, width=screen.width, lines=screen.lines
        )
        if self.styled:
            if not screen.quiet:
                screen.show(show_plan(nodes, options))
        elif asks and sys.stdin.isatty():
            screen.show_on_stderr(show_plan(nodes, options))

    def show(
        self, nodes: Iterable[DeployedNode], *, complete: bool = True, silent: bool = False
    ) -> int:
        """Show the document. Returns the exit code."""
        document = Deploy(
            self.started, utc_now(), self.check, self.subjects, tuple(nodes), complete
        )
        if not silent:
            show("deploy", self.form, document, self.screen, options=self.options)
        return deploy_code(document)


def _deploy(nodes: Targets, report: _Report, *, check: bool, yes: bool) -> int:
    """Probe, plan, ask the user, change and report. Returns the exit code."""
    screen = report.screen
    nodes_judged = _judge(nodes, report)
    plans = _plans(nodes_judged, report.subjects)
    planned = {name: _node(node, plans.get(name)) for name, node in nodes_judged.items()}
    plans = {name: plan for name, plan in plans.items() if plan.changes or plan.refused}
    if nodes.transport.interrupted:
        return _nothing_done(report, planned.values())
    if check:
        return report.show(planned.values())
    asks = any(plan.changes for plan in plans.values()) and not yes
    report.show_plan(planned.values(), asks=asks)
    if asks:
        is_confirmed = _confirm(screen, plans)
        if is_confirmed is None:
            return _nothing_done(report, planned.values())
        if not is_confirmed:
            screen.say("nothing was changed")
            # A person has seen the plan already. A program gets it now.
            return replace(report, check=True).show(planned.values(), silent=report.styled)
    runs = _run_plans(nodes, report, nodes_judged, plans)
    done = [
        _with_outcome(planned[name], runs[name]) if name in runs else planned[name]
        for name in nodes_judged
    ]
    finish = _finish_interrupted if nodes.transport.interrupted else _finish
    return finish(report, done, nodes)


def _judge(nodes: Targets, report: _Report) -> dict[str, Judged]:
    """Probe all nodes, and judge them."""
    from nodeready.fleet.transport.fleet_context import fleet_context
    from nodeready.subjects.context import FleetContext, judge_nodes

    outcomes = probe_nodes(nodes, report.screen, report.subjects, on_interrupt=_STOPPING)
    context = FleetContext(nodes.policies)
    if not nodes.transport.interrupted:
        assert nodes.inventory is not None
        context = fleet_context(nodes.transport, nodes.policies, outcomes, nodes.inventory)
    return {node.name: node for node in judge_nodes(outcomes, context)}


def _run_plans(
    nodes: Targets, report: _Report, judged: Mapping[str, Judged], plans: Mapping[str, NodePlan]
) -> dict[str, PlanRun]:
    """Change the nodes that have a plan."""
    from nodeready.runs.deploy.plan import run_of, run_plan

    def conversation(name: str) -> Conversation[PlanRun]:
        return run_plan(judged[name], plans[name], nodes.transport.run, report.subjects)

    outcomes = converse(
        *(nodes.transport, report.screen, "changing", conversation, plans), on_interrupt=_STOPPING
    )
    return {
        name: run_of(judged[name], plan.refused, outcomes[name]) for name, plan in plans.items()
    }


def _plans(judged: Mapping[str, Judged], chosen: tuple[str, ...]) -> dict[str, NodePlan]:
    """The plans of the nodes that were probed without an error."""
    from nodeready.runs.deploy.plan import plan

    return {
        name: plan(node, chosen)
        for name, node in judged.items()
        if node.snapshot is not None and not node.gap
    }


def _node(node: Judged, plan: NodePlan | None) -> DeployedNode:
    """A node of the document, with its plan, if it has one."""
    from nodeready.runs.deploy.plan import NodePlan

    report = DeployedNode.of(node.name, plan or NodePlan(), node.results)
    return replace(report, gap=node.gap)


def _with_outcome(node: DeployedNode, run: PlanRun) -> DeployedNode:
    """A node of the document, with the outcome of its plan."""
    return replace(node, outcome=run.outcome, gap=run.node.gap).judged(run.node.results)


def _confirm(screen: Screen, plans: Mapping[str, NodePlan]) -> bool | None:
    """Ask the user to confirm; None: interrupted. Raises Refused without a terminal."""
    changes = sum(len(plan.changes) for plan in plans.values())
    if not sys.stdin.isatty():
        raise Refused("no terminal to ask on: add --yes, or --check to only look")
    question = f"Make {counted(changes, 'change')} on {counted(len(plans), 'node')}?"
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        screen.err.print()
        return None


def _nothing_done(report: _Report, nodes: Iterable[DeployedNode]) -> int:
    """Report an interrupt before the first change. Returns the exit code."""
    code = report.show(nodes, complete=False)
    report.screen.say("nothing was changed")
    return code


def _finish_interrupted(report: _Report, nodes: Sequence[DeployedNode], targets: Targets) -> int:
    """Report the changes before an interrupt, and remember the nodes to retry.

    Returns the exit code.
    """
    code = report.show(nodes, complete=False)
    planned = [node for node in nodes if node.outcome is not None]
    undone = [node.name for node in planned if node.outcome and not node.outcome.complete]
    targets.remember_failed([*undone, *_nodes_to_retry(nodes)])
    report.screen.say(
        f"partial: {len(planned) - len(undone)} of {len(planned)} nodes were completed"
        + (f"; not {node_set(undone)} (--limit @last-failed)" if undone else "")
    )
    return code


def _nodes_to_retry(nodes: Sequence[DeployedNode]) -> list[str]:
    failed = [node.name for node in nodes if node.failed]
    return failed + [node.name for node in nodes if node.gap and node.gap.is_unreached]


def _finish(report: _Report, nodes: Sequence[DeployedNode], targets: Targets) -> int:
    """Report a run that was not interrupted, and remember the nodes to retry.

    Returns the exit code.
    """
    code = report.show(nodes)
    to_retry = _nodes_to_retry(nodes)
    targets.remember_failed(to_retry)
    if to_retry:
        report.screen.say("retry failed nodes: --limit @last-failed")
    return code

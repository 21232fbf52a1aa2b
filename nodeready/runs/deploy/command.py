"""The run of `nodeready deploy`: probe every node, plan, change, probe again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from nodeready.agent.asking import Conversation
from nodeready.core.text import utc_now
from nodeready.fleet.inventory.host_data import fleet_context
from nodeready.runs import targets
from nodeready.runs.conversations import converse, probe_nodes
from nodeready.runs.deploy.document import Deploy, DeployedNode
from nodeready.runs.deploy.plan import NodePlan, PlanRun, plan, run_of, run_plan
from nodeready.runs.options import DeployOptions
from nodeready.runs.targets import Targets
from nodeready.runs.tell import Tell
from nodeready.subjects.context import FleetContext, Judged, judge_nodes
from nodeready.subjects.registry import CHANGED, select_whole

_STOPPING = "interrupted: ending what runs on the nodes (again: leave at once)"


def run(
    inventory: str,
    options: DeployOptions,
    tell: Tell,
    confirm: Callable[[Deploy], bool | None] = lambda plan: True,
) -> Deploy:
    """Change the nodes until the checks of the chosen subjects pass. Raises Refused.

    confirm: gets the plan; False: nothing is changed; None: the user interrupted
    """
    started, subjects = utc_now(), select_whole(options.only, CHANGED)

    def document(nodes: Iterable[DeployedNode], *, check: bool, complete: bool = True) -> Deploy:
        return Deploy(started, utc_now(), check, subjects, tuple(nodes), complete)

    targeted = targets.ssh_targets(inventory, options, tell.note)
    with targeted.transport as transport:
        judged = _judge(targeted, tell, subjects)
        plans = {
            name: plan(node, subjects)
            for name, node in judged.items()
            if node.snapshot is not None and not node.gap
        }
        nodes = {
            name: replace(
                DeployedNode.of(name, plans.get(name, NodePlan()), node.results), gap=node.gap
            )
            for name, node in judged.items()
        }
        if transport.interrupted:
            return document(nodes.values(), check=options.check, complete=False)
        if options.check:
            return document(nodes.values(), check=True)
        is_confirmed = confirm(document(nodes.values(), check=False))
        if is_confirmed is None:
            return document(nodes.values(), check=False, complete=False)
        if not is_confirmed:
            return document(nodes.values(), check=True)
        plans = {name: plan for name, plan in plans.items() if plan.changes or plan.refused}
        for name, done in _run_plans(targeted, tell, subjects, judged, plans).items():
            nodes[name] = _with_outcome(nodes[name], done)
        _remember(targeted, nodes.values())
        return document(nodes.values(), check=False, complete=not transport.interrupted)


def _judge(nodes: Targets, tell: Tell, subjects: tuple[str, ...]) -> dict[str, Judged]:
    """Probe all nodes, and judge them."""
    outcomes = probe_nodes(nodes, tell, subjects, on_interrupt=_STOPPING)
    context = FleetContext(nodes.policies)
    if not nodes.transport.interrupted:
        assert nodes.inventory is not None
        context = fleet_context(nodes.transport, nodes.policies, outcomes, nodes.inventory)
    return {node.name: node for node in judge_nodes(outcomes, context)}


def _run_plans(
    nodes: Targets,
    tell: Tell,
    subjects: tuple[str, ...],
    judged: Mapping[str, Judged],
    plans: Mapping[str, NodePlan],
) -> dict[str, PlanRun]:
    """Change the nodes that have a plan."""

    def conversation(name: str) -> Conversation[PlanRun]:
        return run_plan(judged[name], plans[name], nodes.transport.run, subjects)

    outcomes = converse(
        nodes.transport, tell, "changing", conversation, plans, on_interrupt=_STOPPING
    )
    return {
        name: run_of(judged[name], plan.refused, outcomes[name]) for name, plan in plans.items()
    }


def _with_outcome(node: DeployedNode, run: PlanRun) -> DeployedNode:
    """A node of the document, with the outcome of its plan."""
    return replace(node, outcome=run.outcome, gap=run.node.gap).judged(run.node.results)


def undone(nodes: Iterable[DeployedNode]) -> list[str]:
    """The nodes whose plan was begun, or waited, when the run was interrupted."""
    return [node.name for node in nodes if node.outcome and not node.outcome.complete]


def nodes_to_retry(nodes: Iterable[DeployedNode]) -> list[str]:
    """The nodes that failed, or that were not reached."""
    nodes = list(nodes)
    failed = [node.name for node in nodes if node.failed]
    return failed + [node.name for node in nodes if node.gap and node.gap.is_unreached]


def _remember(targeted: Targets, nodes: Iterable[DeployedNode]) -> None:
    nodes = list(nodes)
    unfinished = undone(nodes) if targeted.transport.interrupted else []
    targeted.remember_failed([*unfinished, *nodes_to_retry(nodes)])

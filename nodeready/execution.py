"""Run the planned changes on the nodes, each node on its own, and look again until all is done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nodeready import shell
from nodeready.actions import Change
from nodeready.planning import Plan, plan
from nodeready.results import Result
from nodeready.session import NodeRun, Progress, Session
from nodeready.snapshot import judge
from nodeready.transports.answer import HUNG, LOST, OVER, Answer
from nodeready.transports.connector import who

#: A change can bring the next one to light (a package that brings a configuration file, apport
#: that resets core_pattern when it stops). What is not done after this many looks is reported.
MAX_PASSES = 3
#: What nr_lock says (sh/change.sh).
NOT_ROOT = "not root: run with sudo"


@dataclass
class Outcome:
    """What a deploy did to one node.

    done:   steps that ran well, in order
    failed: step -> one line why
    cut:    the step during which the connection was lost or the run was interrupted, or ""; what
            it was doing to a file is done whole or not at all
    left:   fixable results that are still there after the last look
    """

    node: NodeRun
    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    cut: str = ""
    left: list[Result] = field(default_factory=list)
    complete: bool = False


def _run(session: Session, node: NodeRun, change: Change) -> Answer:
    """One change on one node."""
    want = node.policy
    limit = change.timeout_s + want.lock_wait_s
    script = change.script(session.run, who(), want.lock_wait_s)
    return session.carry(node, shell.command(script, limit, session.tag), limit, change.stdin())


def deploy_node(
    session: Session, outcome: Outcome, first: Plan, subjects: Iterable[str] | None
) -> None:
    """Make one node as its policy wants it. A step that fails does not stop the others."""
    node, todo = outcome.node, first
    for _ in range(MAX_PASSES):
        touched: set[str] = set()
        outcome.failed.update(todo.refused)
        for change in todo.changes:
            if change.step in outcome.failed:
                continue
            if session.interrupted:
                return
            outcome.cut = change.step
            answer = _run(session, node, change)
            touched.update(change.touches)
            if answer.kind in OVER:
                kind = LOST if answer.kind == HUNG else answer.kind
                node.error, node.kind = f"{answer.reason()} in {change.step}", kind
                return
            outcome.cut = ""
            if not answer.ok:
                outcome.failed[change.step] = answer.reason()
                if answer.reason() == NOT_ROOT:
                    # No later step can do better: say it once.
                    return
            elif change.step not in outcome.done:
                outcome.done.append(change.step)
        if not touched:
            break
        session.look(node, touched)
        if node.snapshot is None or node.error:
            return
        node.results = judge(node.snapshot, node.policy)
        todo = plan(node.snapshot, node.policy, subjects)
    outcome.left = [r for r in node.results if r.fixable and _chosen(r, subjects)]
    outcome.complete = True


def _chosen(result: Result, subjects: Iterable[str] | None) -> bool:
    return subjects is None or result.check.partition(".")[0] in set(subjects)


def deploy(
    session: Session,
    plans: dict[str, Plan],
    subjects: Iterable[str] | None,
    done: Progress,
    outcomes: dict[str, Outcome],
) -> None:
    """Run the plans of the nodes that have one, in parallel. ``outcomes`` is filled as it goes,
    so that an interrupt finds what was done."""
    chosen = None if subjects is None else tuple(subjects)
    session.each(
        lambda node: deploy_node(session, outcomes[node.name], plans[node.name], chosen),
        [node for node in session.nodes if node.name in plans],
        done,
    )

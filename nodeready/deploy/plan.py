"""A deploy: the changes that each node's failing checks ask for, and the run of them.

`plan` is pure. `run_plan` is the conversation with one node: change it, look again, until all is
done.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace

from nodeready.deploy.actions import PlanError, StepChange
from nodeready.operations import STEPS
from nodeready.policy import Policy
from nodeready.subjects.context import Judged
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.result import Result
from nodeready.subjects.snapshot import Snapshot, judge
from nodeready.transport.base import (
    HUNG,
    INTERRUPTED,
    LOST,
    OVER,
    UNREACHED,
    Answer,
    Conversation,
    Failure,
    Request,
)
from nodeready.transport.look import PROBE_TIMEOUT_S, look_at


@dataclass(frozen=True)
class NodePlan:
    """The changes for one node in order, and the steps that could not be planned, with why."""

    changes: tuple[StepChange, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)


def plan(
    seen: Snapshot,
    want: Policy,
    results: Iterable[Result],
    subjects: Iterable[str] | None = None,
) -> NodePlan:
    """The plan for a node that looks like ``seen`` and was judged; ``subjects`` limits it (None:
    all).
    """
    results = tuple(results)
    chosen = None if subjects is None else set(subjects)
    changes: list[StepChange] = []
    refused: dict[str, str] = {}
    for step in STEPS:
        if chosen is not None and step.subject not in chosen:
            continue
        try:
            change = step.plan(seen, want, results)
        except PlanError as error:
            refused[step.name] = str(error)
            continue
        except Exception as error:  # noqa: BLE001 - a fact that nobody foresaw costs this step
            refused[step.name] = f"internal error: {type(error).__name__}: {error}"
            continue
        if change is not None:
            changes.append(change)
    return NodePlan(tuple(changes), refused)


# --- The run of a plan on one node.

#: A change can bring the next one to light (a package that brings a configuration file, apport
#: that resets core_pattern when it stops). What is not done after this many looks is reported.
MAX_PASSES = 3
#: The words of nr_lock (sh/change.sh).
NOT_ROOT = "not root: run with sudo"


@dataclass(frozen=True)
class PlanRun:
    """The run of a plan on one node.

    node:     as it was seen last
    done:     steps that ran well, in order
    failed:   step -> one line why
    cut:      the step during which the connection was lost or the run was interrupted, or "";
              what it was doing to a file is done whole or not at all
    left:     fixable results of the chosen subjects' own steps that are still there after the last
              look
    complete: the conversation came to its own end
    """

    node: Judged
    done: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    cut: str = ""
    left: tuple[Result, ...] = ()
    complete: bool = False


def run_plan(
    node: Judged,
    first: NodePlan,
    run: str,
    subjects: Iterable[str] | None = None,
    limit_s: int = PROBE_TIMEOUT_S,
) -> Conversation[PlanRun]:
    """The conversation that changes a node until its policy's checks pass.

    A step that fails does not stop the others.

    run:      the word for this run in the node's lock
    subjects: those that may be changed; None: all
    limit_s:  seconds for a look
    """
    chosen = None if subjects is None else frozenset(subjects)
    made, todo = PlanRun(node, failed=dict(first.refused)), first
    for _ in range(MAX_PASSES):
        made = replace(made, failed={**made.failed, **todo.refused})
        made, touched, goes_on = yield from _changes(made, todo, run)
        if not goes_on:
            return made
        if not touched:
            break
        seen = yield from look_at(node.name, node.policy, touched, limit_s)
        if seen.kind == INTERRUPTED:
            return made
        if seen.snapshot is None or seen.error:
            return replace(
                made, node=replace(made.node, error=seen.error, unreachable=seen.unreachable)
            )
        made = replace(made, node=_again(made.node, seen.snapshot))
        assert made.node.snapshot is not None
        todo = plan(made.node.snapshot, node.policy, made.node.results, chosen)
    left = (r for r in made.node.results if r.fixable and _chosen(r, chosen))
    return replace(made, left=tuple(left), complete=True)


def _changes(
    made: PlanRun, todo: NodePlan, run: str
) -> Generator[Request, Answer, tuple[PlanRun, set[str], bool]]:
    """Make these changes: the outcome so far, the subjects touched, and whether to go on."""
    touched: set[str] = set()
    node = made.node
    for change in todo.changes:
        if change.step in made.failed:
            continue
        answer = yield change.request(node.name, run, node.policy.lock_wait_s)
        touched.update(change.touches)
        if isinstance(answer, Failure) and answer.kind in OVER:
            if answer.kind != INTERRUPTED:
                kind = LOST if answer.kind == HUNG else answer.kind
                node = replace(
                    node,
                    error=f"{answer.reason()} in {change.step}",
                    unreachable=kind in UNREACHED,
                )
            return replace(made, node=node, cut=change.step), touched, False
        if not answer.ok:
            failed = {**made.failed, change.step: answer.reason()}
            made = replace(made, failed=failed)
            if answer.reason() == NOT_ROOT:
                # No later step can do better: say it once.
                return made, touched, False
        elif change.step not in made.done:
            made = replace(made, done=(*made.done, change.step))
    return made, touched, True


def _again(node: Judged, newer: Snapshot) -> Judged:
    """The node with the newer snapshot merged in, judged again."""
    seen = node.snapshot.merged(newer) if node.snapshot else newer
    return replace(node, snapshot=seen, results=tuple(judge(seen, node.policy)))


def _chosen(result: Result, subjects: frozenset[str] | None) -> bool:
    """Whether a step of these subjects repairs the result; None: of any subject."""
    subject = result.check.partition(".")[0]
    if subjects is None or subject not in subjects:
        return subjects is None
    checks = SUBJECTS[subject].checks if subject in SUBJECTS else ()
    return any(one.fixed_by for one in checks if one.id == result.check)


def run_of(node: Judged, refused: dict[str, str], found: PlanRun | Failure) -> PlanRun:
    """The run that a conversation with this node came to; a failed conversation has one, too.

    refused: the steps that could not be planned
    """
    if isinstance(found, PlanRun):
        return found
    if found.kind != INTERRUPTED:
        node = replace(node, error=found.error, unreachable=found.kind in UNREACHED)
    return PlanRun(node, failed=refused)

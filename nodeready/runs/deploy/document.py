"""The document of a deploy: per node its plan, the outcome, and what is left for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar

from nodeready.core.json_types import Count, Moment
from nodeready.core.outcome import Gap, NodeGap, NodeGaps, gaps_code
from nodeready.core.result import STATUSES as RESULT_STATUSES
from nodeready.core.result import Result
from nodeready.runs.deploy import actions
from nodeready.subjects.registry import SUBJECTS

if TYPE_CHECKING:
    from nodeready.runs.deploy.command import NodePlan

#: Statuses of a node: see `DeployedNode.status`.
STATUSES = ("unreachable", "failed", "to-change", "changed", "unknown", "for-a-person", "ok")
#: Kinds of actions: on a file, a directory, a command, or a shell library's script.
KINDS = ("create", "change", "remove", "directory", "run", "script")


@dataclass(frozen=True)
class PlannedAction:
    """One thing that a change does."""

    kind: Annotated[str, {"enum": KINDS}]  # one of KINDS
    text: str  # the action in one line
    path: str = ""  # the file or directory; "" for a command
    command: tuple[str, ...] = ()  # its words; () for a file

    @classmethod
    def of(cls, action: actions.Action) -> PlannedAction:
        if isinstance(action, actions.RunCommand | actions.Script):
            return cls(action.kind, action.describe(), command=action.argv)
        return cls(action.kind, action.describe(), action.path)


@dataclass(frozen=True)
class PlannedChange:
    """The planned or completed actions of one operation on one node."""

    step: str  # the operation, ``SUBJECT.NOUN``
    # the failing results that it repairs, as they were when it was planned
    checks: tuple[Result, ...]
    actions: tuple[PlannedAction, ...]  # in order
    diff: tuple[str, ...] = ()  # of the files, a line each; () where no text changes


@dataclass(frozen=True)
class DeployOutcome:
    """The outcome of the plan on one node."""

    JSON_KEYS: ClassVar = {"interrupted_step": "cut", "unrepaired": "left"}

    # steps that succeeded, in order; a later snapshot can ask for more than were planned
    done: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)  # step -> the reason, one line
    # the step during which the connection was lost or the run was interrupted, or ""
    interrupted_step: str = ""
    unrepaired: tuple[Result, ...] = ()  # results that the operations should have repaired
    complete: bool = False  # the node was probed again after its last change


_Results = Annotated[Mapping[str, Count], {"propertyNames": {"enum": RESULT_STATUSES}}]


@dataclass(frozen=True)
class DeployedNode:
    """One node of a deploy."""

    JSON: ClassVar = (
        *("name", "status", "changes", "refused", "outcome", "for_a_person", "results"),
    )

    name: str
    # why it could not be probed, or the connection was lost; None: it was probed
    gap: Gap | None = None
    changes: tuple[PlannedChange, ...] = ()  # the plan, in order
    # steps that cannot be planned -> the reason, one line
    refused: Mapping[str, str] = field(default_factory=dict)
    # None: nothing was changed, because there is no plan, or only the plan was wanted
    outcome: DeployOutcome | None = None
    # bad results of the latest probe that no step of this run repairs
    for_a_person: tuple[Result, ...] = ()
    # how many results of the latest probe have each status; empty: there was none
    results: _Results = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, plan: NodePlan, results: Iterable[Result]) -> DeployedNode:
        """A node that was probed, with its plan and the results that the plan repairs."""
        rows = tuple(results)
        changes = []
        for change in plan.changes:
            checks = tuple(result for result in rows if result.check in change.fixes)
            planned, diff = map(PlannedAction.of, change.actions), change.diff().splitlines()
            changes.append(PlannedChange(change.step, checks, tuple(planned), tuple(diff)))
        return cls(name, changes=tuple(changes), refused=dict(plan.refused)).judged(rows)

    def judged(self, results: Iterable[Result]) -> DeployedNode:
        """The node with the results of a later snapshot."""
        rows = tuple(results)
        counts = Counter(result.status for result in rows)
        covered = self._covered_checks()
        remaining = (row for row in rows if row.bad and not (row.fixable and row.check in covered))
        by_status = {status: counts[status] for status in RESULT_STATUSES}
        return replace(self, for_a_person=tuple(remaining), results=by_status)

    def _covered_checks(self) -> set[str]:
        """The checks whose steps were planned, failed, or repaired nothing.

        Checks of subjects that were not chosen are not among them: a person has to see these.
        """
        outcome = self.outcome or DeployOutcome()
        steps = {*self.refused, *outcome.failed}
        planned = {result.check for change in self.changes for result in change.checks}
        remaining = {result.check for result in outcome.unrepaired}
        checks = (check for subject in SUBJECTS.values() for check in subject.checks)
        return planned | remaining | {check.id for check in checks if check.fixed_by in steps}

    @property
    def planned(self) -> bool:
        """Whether there is something to change, or something that could not be planned."""
        return bool(self.changes or self.refused)

    @property
    def failed(self) -> bool:
        """Whether something failed that is not the connection."""
        if self.outcome and (self.outcome.failed or self.outcome.unrepaired):
            return True
        return self.gap is not None and not self.gap.is_unreached

    @property
    def is_untouched(self) -> bool:
        """Whether its plan was not begun."""
        not_begun = (None, DeployOutcome(failed=self.refused))
        return self.planned and self.gap is None and self.outcome in not_begun

    @property
    def status(self) -> Annotated[str, {"enum": STATUSES}]:
        """unreachable: not reached, or the connection was lost; failed: not probed for another
        reason, or a step failed, or did not repair what it should; to-change: a change is planned
        and was not made; changed: all were made. Where nothing is planned, unknown: a check could
        not be observed; for-a-person: a bad result that no operation repairs; ok: no bad one.
        """
        if self.gap:
            return self.gap.word
        if self.failed:
            return "failed"
        if self.outcome and self.outcome.complete and self.outcome.done:
            return "changed"
        if self.planned:
            return "to-change"
        if self.results.get("unknown"):
            return "unknown"
        bad = any(self.results.get(status) for status in ("fail", "warn"))
        return "for-a-person" if bad else "ok"


@dataclass(frozen=True)
class Deploy:
    """The document of `nodeready deploy`: the plan of every node and, without --check, its
    outcome.

    gaps:     the nodes that were not probed, or whose connection was lost
    """

    SCHEMA: ClassVar = "deploy"
    VERSION: ClassVar = 2
    JSON: ClassVar = (
        *("started", "finished", "check", "complete", "stopped", "untouched"),
        *("subjects", "gaps", "nodes", "summary"),
    )

    started: Moment  # when it began, UTC
    finished: Moment  # when it ended, UTC
    check: bool  # only the plan: changes were not wanted, or not confirmed
    subjects: tuple[str, ...]  # the subjects that were chosen
    nodes: tuple[DeployedNode, ...]
    # False when it was interrupted: some nodes were not probed or not completed
    complete: bool = True
    stopped: str = ""  # why it stopped before the last wave of nodes, one line; "": it did not

    @cached_property
    def untouched(self) -> tuple[str, ...]:
        """The nodes whose plan was not begun; () with --check."""
        return tuple(node.name for node in self.nodes if node.is_untouched and not self.check)

    @cached_property
    def gaps(self) -> NodeGaps:
        return tuple(NodeGap(node.name, *node.gap) for node in self.nodes if node.gap)

    @cached_property
    def summary(self) -> Annotated[dict[str, Count], {"keys": STATUSES}]:
        """Nodes by status, with every status."""
        counts = Counter(node.status for node in self.nodes)
        return {status: counts[status] for status in STATUSES}


def deploy_code(deploy: Deploy) -> int:
    """The exit code of ``deploy``; 0: nothing is left to change, and no check is bad."""
    nodes = deploy.nodes
    planned = any(node.planned and node.outcome is None for node in nodes)
    bad = any(node.results.get(status) for node in nodes for status in ("fail", "unknown"))
    failed = any(node.failed for node in nodes)
    return gaps_code(deploy.gaps, complete=deploy.complete, failed=failed, check=planned or bad)

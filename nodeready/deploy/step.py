"""A step: an operation that yields actions when one of its checks fails.

A step is written as a generator of actions. ``@step`` turns it into a pyinfra operation, for
``pyinfra INVENTORY deploy.py``, that also has ``plan``, for ``nodeready deploy``. ``plan`` decides
for both: a step acts exactly when one of its checks fails and nodeready may repair it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pyinfra import host
from pyinfra.api import StringCommand, operation

from nodeready.deploy import pyinfra
from nodeready.deploy.actions import Action, PlanError, StepChange
from nodeready.policy import Policy
from nodeready.subjects.base import Unknown
from nodeready.subjects.fleet import ALONE, FleetFacts
from nodeready.subjects.judging import judge
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.result import Result
from nodeready.subjects.snapshot import Snapshot

#: (snapshot, policy) -> actions; with the fleet as third argument where the step needs it.
MakeActions = Callable[..., Iterator[Action]]


@dataclass(frozen=True)
class DeployStep:
    """One operation: a callable for deploy.py, with the plan that ``nodeready deploy`` runs.

    name:         ``subject.noun``
    fixes:        ids of the checks that it makes pass
    make_actions: the generator function that ``@step`` decorates
    touches:      the subjects that it makes stale
    timeout_s:    limit of the whole change on the node
    needs_fleet:  ``make_actions`` has the fleet as third argument
    operation:    the pyinfra operation
    """

    name: str
    fixes: tuple[str, ...]
    make_actions: MakeActions
    touches: tuple[str, ...]
    timeout_s: int
    needs_fleet: bool
    operation: Any

    @property
    def subject(self) -> str:
        return self.name.partition(".")[0]

    @property
    def does(self) -> str:
        """What the step does, in one sentence."""
        return (self.make_actions.__doc__ or "").split("\n")[0]

    def actions(
        self, snapshot: Snapshot, policy: Policy, fleet: FleetFacts = ALONE
    ) -> tuple[Action, ...]:
        """The actions for a node on which a check of the step fails."""
        if self.needs_fleet:
            return tuple(self.make_actions(snapshot, policy, fleet))
        return tuple(self.make_actions(snapshot, policy))

    def plan(
        self,
        snapshot: Snapshot,
        policy: Policy,
        fleet: FleetFacts = ALONE,
        results: Iterable[Result] | None = None,
    ) -> StepChange | None:
        """The change that this step would make to a node; None: no change.

        A subject that could not be observed is not changed.

        results: of the snapshot; None: the snapshot is judged here
        """
        if isinstance(snapshot.subjects.get(self.subject, Unknown("")), Unknown):
            return None
        if results is None:
            results = judge(snapshot, policy, fleet, (self.subject,))
        failing = tuple(
            result.check for result in results if result.check in self.fixes and result.fixable
        )
        if not failing:
            return None
        actions = self.actions(snapshot, policy, fleet)
        return StepChange(self.name, failing, actions, self.touches, self.timeout_s)

    def __call__(self, **arguments: Any) -> Any:
        return self.operation(**arguments)


def step(
    touches: Iterable[str] = (), timeout_s: int = 60, *, needs_fleet: bool = False
) -> Callable[[MakeActions], DeployStep]:
    """A decorator that makes a DeployStep of a generator function of actions.

    The step's name is ``module.function``. It fixes the checks of its subject that have this name
    as ``fixed_by``. Raises ValueError if no check has.
    """

    def wrap(make_actions: MakeActions) -> DeployStep:
        subject = make_actions.__module__.rpartition(".")[2]
        name = f"{subject}.{make_actions.__name__}"
        fixes = tuple(check.id for check in SUBJECTS[subject].checks if check.fixed_by == name)
        if not fixes:
            raise ValueError(f"no check of {subject} is fixed by {name}")

        def run() -> Generator[StringCommand, None, None]:
            node = pyinfra.judged(host)
            assert node.snapshot is not None
            observation = node.snapshot[subject]
            if isinstance(observation, Unknown):
                yield pyinfra.refuse(f"{subject} could not be observed: {observation.reason}")
                return
            try:
                change = deploy_step.plan(node.snapshot, node.policy, node.fleet, node.results)
            except PlanError as error:
                yield pyinfra.refuse(f"{name}: {error}")
                return
            if change is None:
                host.noop(f"{name} is as the policy wants it")
                return
            yield pyinfra.command(host, change)
            pyinfra.forget(host, change.touches)

        run.__name__, run.__module__ = make_actions.__name__, make_actions.__module__
        run.__doc__ = make_actions.__doc__
        deploy_step = DeployStep(
            *(name, fixes, make_actions, (subject, *touches), timeout_s, needs_fleet),
            operation=operation()(run),
        )
        return deploy_step

    return wrap

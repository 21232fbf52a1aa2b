"""A step: an operation that yields actions when one of its checks fails.

A step is written as a generator of actions. ``@step`` turns it into a pyinfra operation, for
``pyinfra INVENTORY deploy.py``, that also has ``plan``, for ``nodeready deploy``. ``plan`` decides
for both: a step acts exactly when one of its checks fails and nodeready may repair it.

As an operation, a step takes the settings that decide it as keyword arguments, beside the
arguments that pyinfra gives every operation: ``ptrace.scope(ptrace_scope=1, _sudo=True)``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import WRAPPER_ASSIGNMENTS
from typing import Any

from pyinfra import host
from pyinfra.api import StringCommand, operation
from pyinfra.api.arguments import all_argument_meta

from nodeready.core.base import Unknown
from nodeready.core.policy import Policy
from nodeready.core.result import ALONE, FleetFacts, Result
from nodeready.runs.deploy import pyinfra
from nodeready.runs.deploy.actions import Action, PlanError, StepChange
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.snapshot import Snapshot, judge

#: (snapshot, policy) -> actions; with the fleet as third argument where the step needs it.
MakeActions = Callable[..., Iterator[Action]]


def own_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call without those that pyinfra gives every operation."""
    return {key: value for key, value in arguments.items() if key not in all_argument_meta}


@dataclass(frozen=True)
class DeployStep:
    """One operation: a callable for deploy.py, with the plan that ``nodeready deploy`` runs."""

    name: str  # ``subject.noun``
    fixes: tuple[str, ...]  # ids of the checks that it makes pass
    # the fields of Policy that decide it, in the order of Policy: its arguments
    settings: tuple[str, ...]
    make_actions: MakeActions  # the generator function that ``@step`` decorates
    touches: tuple[str, ...]  # the subjects that it makes stale
    timeout_s: int  # limit of the whole change on the node
    needs_fleet: bool  # ``make_actions`` has the fleet as third argument
    operation: Any  # the pyinfra operation

    def __post_init__(self) -> None:
        # pyinfra's command, and its other operations, take an operation by the attributes of a
        # function: its name, its docstring, `_inner`.
        vars(self).update(vars(self.operation))
        vars(self).update({name: getattr(self.operation, name) for name in WRAPPER_ASSIGNMENTS})

    @property
    def subject(self) -> str:
        return self.name.partition(".")[0]

    @property
    def does(self) -> str:
        """What the step does: the first paragraph of its docstring."""
        return " ".join((self.make_actions.__doc__ or "").split("\n\n")[0].split())

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

    def __call__(self, *words: Any, **arguments: Any) -> Any:
        """Call the pyinfra operation. arguments: settings, and pyinfra's own"""
        # pyinfra runs the operation later, once per host: a mistake has to end the run before.
        own_settings = own_arguments(arguments)
        pyinfra.call_settings(host, self.name, self.settings, own_settings, words)
        return self.operation(**arguments)


def step(
    touches: Iterable[str] = (),
    timeout_s: int = 60,
    *,
    settings: Iterable[str] = (),
    needs_fleet: bool = False,
) -> Callable[[MakeActions], DeployStep]:
    """A decorator that makes a DeployStep of a generator function of actions.

    The step's name is ``subject.function``. The subject is the one whose module of operations has
    the function. The step fixes the checks of its subject that have this name as ``fixed_by``.
    Raises ValueError if no check has.

    settings: the fields of Policy that only the actions read, and no check that it fixes
    """

    def wrap(make_actions: MakeActions) -> DeployStep:
        subject = make_actions.__module__.rpartition(".")[2]
        name = f"{subject}.{make_actions.__name__}"
        checks = SUBJECTS[subject].checks if subject in SUBJECTS else ()
        fixed = [check for check in checks if check.fixed_by == name]
        if not fixed:
            raise ValueError(f"no check of {subject} in subjects/registry.py is fixed by {name}")
        # No operation repairs some checks of the subject: each of its operations warns of them.
        warned_checks = {check.id for check in checks if check.fixed_by in ("", name)}
        deciding = {*settings, *(key for check in fixed for key in check.settings)}
        setting_names = tuple(field.name for field in fields(Policy) if field.name in deciding)

        def run(**arguments: Any) -> Generator[StringCommand, None, None]:
            call = pyinfra.call_settings(host, name, setting_names, arguments)
            node = pyinfra.judged(host, call)
            assert node.snapshot is not None
            observation = node.snapshot[subject]
            if isinstance(observation, Unknown):
                yield pyinfra.refuse(f"{subject} could not be observed: {observation.reason}")
                return
            rows = (row for row in node.results if row.check in warned_checks and row.bad)
            pyinfra.warn(host, (row for row in rows if not row.fixable))
            try:
                change = deploy_step.plan(node.snapshot, node.policy, node.fleet, node.results)
            except PlanError as error:
                yield pyinfra.refuse(f"{name}: {error}")
                return
            if change is None:
                host.noop(f"{name} is as the policy wants it")
                return
            if host.state.config.DIFF:
                pyinfra.show_differences(host, change)
            yield pyinfra.command(host, change, node.policy.lock_wait_s)
            pyinfra.forget(host, change.touches)

        run.__name__ = make_actions.__name__
        # pyinfra shows an operation as MODULE.NAME.
        run.__module__ = f"{make_actions.__module__.rpartition('.')[0]}.{subject}"
        run.__doc__ = make_actions.__doc__
        deploy_step = DeployStep(
            name,
            tuple(check.id for check in fixed),
            setting_names,
            make_actions,
            (subject, *touches),
            timeout_s,
            needs_fleet,
            operation=operation()(run),
        )
        return deploy_step

    return wrap

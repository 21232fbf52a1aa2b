"""What a check or a step declares is held against what it does, whenever a test runs it."""

from dataclasses import fields
from functools import lru_cache
from typing import Any

import pytest

from nodeready.core.policy import Policy
from nodeready.core.result import ADMIN, ALONE, DEPLOY, PERSON, Check, FleetFacts, Result
from nodeready.runs.deploy.actions import Action
from nodeready.runs.deploy.pyinfra import DeployStep
from nodeready.subjects.snapshot import Snapshot


@lru_cache(maxsize=2)
def _recording(kind: type) -> type:
    """A Policy, or FleetFacts, whose instances keep which of their fields were read."""
    names = frozenset(field.name for field in fields(kind))

    def read(self: Any, name: str) -> Any:
        if name in names:
            object.__getattribute__(self, "__dict__").setdefault("read", set()).add(name)
        return object.__getattribute__(self, name)

    # Whoever looks a policy up in a cache reads no setting of it.
    by_identity = {"__eq__": object.__eq__, "__hash__": object.__hash__}
    body = {"__getattribute__": read, "of": kind, **by_identity}
    return type(f"Recording{kind.__name__}", (kind,), body)


def recorded(value: Any) -> Any:
    """The same Policy, or FleetFacts, as a recording of what is read of it."""
    kind = _recording(getattr(type(value), "of", type(value)))
    recorded = object.__new__(kind)
    recorded.__dict__.update(vars(value), read=set())
    return recorded


def read(value: Any) -> frozenset[str]:
    """The fields of this recording that were read."""
    return frozenset(value.__dict__["read"])


def wrong(check: Check, read: frozenset[str], result: Result) -> list[str]:
    """What this check did and does not declare. read: the fields of the policy and the fleet"""
    found = [f"reads {name}" for name in sorted(read - {*check.settings, *check.fleet})]
    whos = {remedy.actor for remedy in check.remedies}
    if result.check != check.id:
        found.append(f"gives the result {result.check}")
    if result.fixable and not check.fixed_by and DEPLOY not in whos:
        found.append("says that a deploy repairs it")
    if result.owner == ADMIN and result.fix and PERSON not in whos:
        found.append(f"asks a person: {result.fix}")
    found += [
        f"names the action {action}"
        for action in result.actions
        if action not in check.cost.actions
    ]
    return found


def judged(check: Check, seen: Any, want: Policy, fleet: FleetFacts = ALONE) -> Result:
    """The check's result. The test fails, whatever it asks for, when the check does what it does
    not declare.
    """
    arguments = (recorded(want), recorded(fleet))
    result = check.judge(seen, *arguments[: 2 if check.fleet else 1])
    fields_read = frozenset().union(*map(read, arguments))
    for outer, argument in zip((want, fleet), arguments, strict=True):
        if "of" in vars(type(outer)):
            # One check asks another: what that reads decides this one, too.
            outer.__dict__["read"].update(argument.__dict__["read"])
    found = wrong(check, fields_read, result)
    if found:
        # Not an exception: a mistake in a check becomes a result elsewhere.
        pytest.fail(f"{check.id} {', and '.join(found)}, and does not declare it")
    return check.rated(result)


def acted(
    step: DeployStep, snapshot: Snapshot, policy: Policy, fleet: FleetFacts = ALONE
) -> tuple[Action, ...]:
    """The step's actions. The test fails when they read a setting that the step does not take."""
    recording = recorded(policy)
    actions = tuple(step.make_actions(snapshot, recording, *(fleet,) * step.needs_fleet))
    found = read(recording) - {*step.settings}
    if found:
        pytest.fail(f"{step.name} reads {', '.join(sorted(found))}, and does not declare it")
    return actions

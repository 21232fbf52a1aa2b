"""What the checks of one subject say of what was seen.

`checks` is the subject's module: `from nodeready.subjects.limits import checks`. A test that asks
often binds it: `judged = partial(by_id, checks)`.
"""

from typing import Any

from nodeready.core.policy import Policy
from nodeready.core.result import ALONE, FleetFacts, Result
from nodeready.runs.deploy.actions import Action
from nodeready.runs.deploy.pyinfra import DeployStep
from nodeready.subjects.snapshot import Snapshot

POLICY = Policy()


def judge_all(
    checks: Any, observed: Any, policy: Policy = POLICY, fleet: FleetFacts = ALONE
) -> list[Result]:
    """The results in the order of the reports."""
    return [check(observed, policy, fleet) for check in checks.SUBJECT.checks]


def by_id(
    checks: Any, observed: Any, policy: Policy = POLICY, fleet: FleetFacts = ALONE
) -> dict[str, Result]:
    """The results by id: `limits.nofile`."""
    return {result.check: result for result in judge_all(checks, observed, policy, fleet)}


def by_name(
    checks: Any, observed: Any, policy: Policy = POLICY, fleet: FleetFacts = ALONE
) -> dict[str, Result]:
    """The results by what an id says after its subject: `nofile`."""
    results = judge_all(checks, observed, policy, fleet)
    return {result.check.partition(".")[2]: result for result in results}


def wrong(
    checks: Any, observed: Any, policy: Policy = POLICY, fleet: FleetFacts = ALONE
) -> dict[str, str]:
    """The statuses of the checks that are not satisfied, by name."""
    found = by_name(checks, observed, policy, fleet)
    return {name: result.status for name, result in found.items() if result.bad}


def actions_of(
    step: DeployStep,
    observed: Any,
    policy: Policy = POLICY,
    files: dict[str, bytes] | None = None,
) -> tuple[Action, ...]:
    """What the step does on a node with this observation of its subject, and these own files."""
    change = step.plan(Snapshot({step.subject: observed}, files or {}), policy)
    return tuple(change.actions) if change else ()


def assert_wrong(
    checks: Any,
    observed: Any,
    expected: dict[str, str],
    policy: Policy = POLICY,
    fleet: FleetFacts = ALONE,
) -> None:
    """These checks, and no other, have the status, and the words behind it: "fail: too few"."""
    found = {name: r for name, r in by_name(checks, observed, policy, fleet).items() if r.bad}
    parts = {name: verdict.partition(": ") for name, verdict in expected.items()}
    assert {name: result.status for name, result in found.items()} == {
        name: status for name, (status, _, _) in parts.items()
    }
    for name, (_, _, words) in parts.items():
        assert words in found[name].actual

"""A node as the checks of some subjects judge it, and what the steps of one make of it."""

from collections.abc import Iterable

from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.lab import LabNode
from nodeready.runs.deploy.pyinfra import DeployStep
from nodeready.subjects.snapshot import judge
from tests.helpers import apply, observe, on, plan


def judged(node: LabNode, policy: Policy, *subjects: str) -> dict[str, Result]:
    """The results of these subjects' checks."""
    seen = observe(on(node), policy, subjects)
    return {result.check: result for result in judge(seen, policy, subjects=subjects)}


def statuses(node: LabNode, policy: Policy, *subjects: str) -> dict[str, str]:
    return {check: result.status for check, result in judged(node, policy, *subjects).items()}


def deploy(
    node: LabNode, policy: Policy, steps: Iterable[DeployStep], *subjects: str
) -> list[str]:
    """Do what is to do; which steps that was."""
    changes = plan(observe(on(node), policy, subjects), policy, steps)
    apply(on(node), changes)
    return [change.step for change in changes]

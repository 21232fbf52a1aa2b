"""What each check declares of the cost of its failure, and of the actions that repair it."""

import pytest

from nodeready.core.result import DEPLOY, Check
from nodeready.core.severity import ACTIONS, HARDWARE, SEVERITIES, loses_job
from nodeready.subjects.registry import SUBJECTS
from tests.builders.results import fail, fixable, ok, unknown, warn

CHECKS = [check for subject in SUBJECTS.values() for check in subject.checks]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_each_check_declares_its_severity_and_its_ladder(check):
    cost = check.cost
    assert cost.severity in SEVERITIES
    # In the fixed order, the mildest first, each once.
    assert cost.actions == tuple(action for action in ACTIONS if action in cost.actions)
    assert bool(cost.source) is any(action in HARDWARE for action in cost.actions)
    by_deploy = bool(check.fixed_by) or DEPLOY in {remedy.actor for remedy in check.remedies}
    assert by_deploy is ("deploy" in cost.actions)
    if any(remedy.actor != DEPLOY for remedy in check.remedies):
        assert set(cost.actions) - {"deploy"}


COST = loses_job("deploy", "reset_gpu", "reboot", source="S")
LADDER = Check("a.b", COST, "", (), "", (), lambda *_: None)


@pytest.mark.parametrize(
    ("result", "severity", "actions"),
    [
        (ok("a.b"), "", ()),
        (fixable("a.b", "", ""), "loses_job", ("deploy", "reset_gpu", "reboot")),
        (fail("a.b", "", ""), "loses_job", ("reset_gpu", "reboot")),
        (warn("a.b", "", "", actions=("reboot",)), "loses_job", ("reboot",)),
        (unknown("a.b", "late"), "loses_job", ("inspect",)),
    ],
    ids=lambda value: getattr(value, "status", None),
)
def test_a_result_begins_on_the_rung_that_can_repair_it(result, severity, actions):
    rated = LADDER.rated(result)
    assert (rated.severity, rated.actions) == (severity, actions)

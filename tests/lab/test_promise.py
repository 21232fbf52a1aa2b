"""The promise of ``fixable``, both ways: deploy repairs what is called so, and nothing else.

Each node has one state for each of a few checks. Where the audit says fixable, a deploy makes the
check pass. Where it does not, a deploy leaves the check alone, and the step that repairs the check
would not have made it pass either: it is run all the same, and fails or changes nothing.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nodeready.core import shell
from nodeready.core.policy import Policy
from nodeready.operations import STEPS
from nodeready.runs.deploy.actions import StepChange
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.snapshot import judge
from tests.builders.proof import put_py_spy
from tests.cases import cases
from tests.helpers import apply, observe, on, plan
from tests.lab.looks import judged

# Values below the usual hard limits: a machine that runs the lab may not be allowed to raise them.
POLICY = Policy(limit_memlock="1024", limit_nofile=4096)
CHOSEN = ("ptrace", "core_dumps", "limits")
ALL = [step for step in STEPS if step.subject in CHOSEN]


def results(seen):
    return {result.check: result for result in judge(seen, POLICY)}


def forced(seen, check):
    """The change that the check's step would make, whether the check asks for it or not."""
    page = next(one for subject in SUBJECTS.values() for one in subject.checks if one.id == check)
    (step,) = [one for one in STEPS if one.name == page.fixed_by]
    return StepChange(
        step.name, (check,), step.actions(seen, POLICY), step.touches, step.timeout_s
    )


@pytest.mark.parametrize("case", cases(__file__, "promise.json"))
def test_what_is_called_fixable_is_what_a_deploy_repairs(fresh_node, case):
    """A case: check -> what makes the state, where the check is fixable, and where it is not."""
    makes = {**case.get("fixable", {}), **case.get("not_fixable", {})}
    states = {check: check in case.get("fixable", {}) for check in makes}
    for make in makes.values():
        fresh_node.enter(["sh", "-ec", make])
    run = on(fresh_node)
    seen = observe(run, POLICY, CHOSEN)
    before = results(seen)
    told = {check: (before[check].bad, before[check].fixable) for check in states}
    assert told == {check: (True, fixable) for check, fixable in states.items()}

    apply(run, plan(seen, POLICY, ALL))
    again = observe(run, POLICY, CHOSEN)
    after = results(again)
    left = {check: after[check].bad for check in states}
    assert left == {check: not fixable for check, fixable in states.items()}
    assert not any(result.fixable for result in after.values())
    if not any(left.values()):
        return
    for check in (check for check, bad in left.items() if bad):
        assert after[check].fix, check
        change = forced(again, check)
        run(*shell.command(change.script("test", "root@test", 5), 60, "nodeready:test"))
    last = results(observe(run, POLICY, CHOSEN))
    assert {check: last[check].bad for check in states} == left


def test_what_is_asked_of_a_person_is_enough(fresh_node):
    """Everything is broken at once, and each fix is done as its text says.

    A row: ``do``, the commands that the text of the fix asks for; without, the text itself.
    """
    rows = json.loads(Path(__file__).with_name("fixes.json").read_text())
    policy = replace(POLICY, numa_balancing=0)
    subjects = [subject for subject in SUBJECTS if subject != "proof"]
    put_py_spy(fresh_node)
    for row in rows:
        fresh_node.enter(["sh", "-ec", row["make"]])
    before = judged(fresh_node, policy, *subjects)
    told = {row["check"]: (before[row["check"]].bad, before[row["check"]].fix) for row in rows}
    assert told == {row["check"]: (True, row["fix"]) for row in rows}
    for row in rows:
        fresh_node.enter(["sh", "-ec", row.get("do", row["fix"])])
    apply(on(fresh_node), plan(observe(on(fresh_node), policy, CHOSEN), policy, ALL))
    after = judged(fresh_node, policy, *subjects)
    assert [row["check"] for row in rows if after[row["check"]].bad] == []

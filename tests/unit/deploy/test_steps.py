"""The steps of a deploy: their order, and the checks that they repair."""

from __future__ import annotations

from nodeready.operations import STEPS
from nodeready.subjects.registry import CHANGED


def test_every_step_repairs_checks_of_its_own_subject():
    assert tuple(dict.fromkeys(step.subject for step in STEPS)) == CHANGED
    for step in STEPS:
        assert step.fixes
        assert all(check.startswith(f"{step.subject}.") for check in step.fixes), step.name
        assert step.make_actions.__doc__

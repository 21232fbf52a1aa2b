"""The steps of a deploy: their order, and the checks that they repair."""

from __future__ import annotations

import re

from nodeready.operations import STEPS
from nodeready.subjects.registry import CHANGED
from tests.paths import ROOT


def test_deploy_py_lists_the_operations_in_their_order():
    calls = re.findall(r"^(\w+\.\w+)\(\)$", (ROOT / "deploy.py").read_text(), re.M)
    assert calls == [step.name for step in STEPS]
    assert len(calls) == len({*calls})


def test_every_step_repairs_checks_of_its_own_subject():
    assert tuple(dict.fromkeys(step.subject for step in STEPS)) == CHANGED
    for step in STEPS:
        assert step.fixes
        assert all(check.startswith(f"{step.subject}.") for check in step.fixes), step.name
        assert step.make_actions.__doc__

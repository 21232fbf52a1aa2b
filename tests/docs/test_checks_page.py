"""docs/checks.md has every check that can be given, and no other."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

import nodeready.checks
from nodeready import snapshot
from nodeready.operations import STEPS
from nodeready.policy import Policy
from nodeready.subjects import SUBJECTS
from tests.docs.pages import DOCS
from tests.helpers import here, observe

PAGE = (DOCS / "checks.md").read_text()
IDS = re.findall(r"^### (\w+\.\w+)$", PAGE, re.M)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_id_in_the_code_has_its_entry(subject):
    source = Path(nodeready.checks.__path__[0], f"{subject}.py").read_text()
    named = {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(rf"{subject}\.[a-z_]+", node.value)
    }
    listed = {check for check in IDS if check.startswith(f"{subject}.")}
    assert named <= listed
    # limits.core and its like are put together from an item's name.
    assert listed == named or "{item}" in source


def test_every_check_that_a_machine_gives_has_its_entry():
    wants = (
        Policy(),
        replace(
            Policy(), ssh_client_mode="no", ssh_client_hosts=("a*",), iommu_args=("iommu=pt",)
        ),
        replace(Policy(), core_handler="systemd-coredump", pdshrc_users=("root",)),
    )
    for want in wants:
        seen = observe(here, want)
        given = [result.check for result in snapshot.judge(seen, want)]
        assert {check.partition(".")[0] for check in given} == set(SUBJECTS)
        assert set(given) - {f"{subject}.observed" for subject in SUBJECTS} <= set(IDS)


def test_what_an_operation_repairs_is_said_where_the_check_is_explained():
    assert len(IDS) == len(set(IDS))
    for step in STEPS:
        for check in step.fixes:
            entry = PAGE.partition(f"### {check}\n")[2].partition("\n### ")[0]
            assert f"`{step.name}`" in entry, check


def test_no_entry_is_without_words():
    for check in IDS:
        entry = PAGE.partition(f"### {check}\n\n")[2].partition("\n#")[0]
        assert len(entry.split()) > 5, check
        assert not re.search(r"(?:person|by): *$", entry, re.M), check

"""docs/checks.md has every check that can be given, and no other."""

from __future__ import annotations

import re
from dataclasses import replace

from nodeready.operations import STEPS
from nodeready.policy import Policy
from nodeready.subjects import snapshot
from nodeready.subjects.registry import LOOKED_AT, SUBJECTS, check_ids
from tests.helpers import here, observe
from tests.unit.docs.pages import DOCS

PAGE = (DOCS / "checks.md").read_text()
IDS = re.findall(r"^### (\w+\.\w+)$", PAGE, re.M)


def test_every_check_has_its_entry_in_the_order_of_the_reports():
    assert check_ids() == IDS


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
        assert {check.partition(".")[0] for check in given} == set(LOOKED_AT)
        # Each check gives its own id, and exactly one result.
        observed = {f"{subject}.observed" for subject in SUBJECTS}
        known = [check for check in given if check not in observed]
        assert known == [check for check in IDS if check in known]


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

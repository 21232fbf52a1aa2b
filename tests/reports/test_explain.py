"""`nodeready explain` and the catalogue behind it: every check has its words, without a node."""

from __future__ import annotations

from dataclasses import fields

import pytest

from nodeready import catalog
from nodeready.operations import STEPS
from nodeready.policy import Policy
from nodeready.subjects import SUBJECTS, check_ids
from tests.helpers import nodeready


@pytest.mark.parametrize("check", check_ids())
def test_every_check_can_be_explained(check):
    entry = catalog.entry(check)
    assert len(entry.brief.split()) > 3
    assert "\n" not in entry.brief
    assert {name for name, _ in entry.repairs} == {s.name for s in STEPS if check in s.fixes}
    assert set(entry.settings) <= {field.name for field in fields(Policy)}
    for act in entry.acts:
        who, _, what = act.partition(": ")
        assert who in ("By a person", "Repaired by")
        assert what.strip()


def test_who_repairs_and_what_decides_is_read_from_the_code():
    scope = catalog.entry("ptrace.scope")
    assert scope.settings == ("ptrace_scope",)
    assert "By a person: reboot the node" in scope.acts
    assert catalog.entry("limits.core").settings[0] == "limit_core"
    # A helper's argument, a list that grows, a choice between fail and warn.
    assert "By a person: check which module is loaded" in catalog.entry("nics.driver").acts
    assert "By a person: ip link set NAME up" in catalog.entry("nics.link").acts
    assert any("openssh-client" in act for act in catalog.entry("ssh_client.installed").acts)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("ptrace.scop", "ptrace.scope"), ("ptrase.scope", "ptrace.scope"), ("limit", "limits")],
)
def test_a_misspelt_id_has_its_likely_meaning(word, meant):
    assert catalog.meant(word) == meant


def test_the_command_prints_a_check_and_a_subject_and_everything():
    done = nodeready("explain", "ptrace.scope")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ptrace.scope\n")
    assert "nodeready deploy INVENTORY --only ptrace" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 90
    done = nodeready("explain", "limits", "ptrace.observed")
    assert "limits.memlock" in done.stdout
    assert "could not be observed" in done.stdout
    done = nodeready("explain")
    assert all(check in done.stdout for check in (*SUBJECTS, *check_ids()))


def test_an_unknown_check_is_a_mistake_of_usage():
    done = nodeready("explain", "ptrace.scop")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean ptrace.scope?" in done.stderr

"""`nodeready explain` and what the checks declare: every check has its words, without a node."""

from dataclasses import fields

import pytest

from nodeready.core.policy import Policy
from nodeready.core.result import Remedy, check
from nodeready.core.severity import drifts
from nodeready.operations import STEPS
from nodeready.subjects import registry
from nodeready.subjects.registry import SUBJECTS, check_ids
from tests.builders.results import fail, fixable, ok

COST = drifts("inspect")


@pytest.mark.parametrize("check_id", check_ids())
def test_every_check_can_be_explained(check_id):
    page = registry.page(check_id)
    assert len(page.brief.split()) > 3
    assert "\n" not in page.brief
    assert {step.name for step in STEPS if check_id in step.fixes} == {page.fixed_by} - {""}
    keys = [field.name for field in fields(Policy)]
    assert [key for key in keys if key in page.settings] == list(page.settings)
    assert all(remedy.action.strip() for remedy in page.remedies)


def test_who_repairs_and_what_decides_is_what_the_check_declares():
    scope = registry.page("ptrace.scope")
    assert (scope.settings, scope.fixed_by) == (("ptrace_scope",), "ptrace.scope")
    assert Remedy("By a person", "reboot the node") in scope.remedies
    assert registry.page("limits.core").settings[0] == "limit_core"
    driver = registry.page("nics.driver")
    remedies = [str(remedy) for remedy in driver.remedies]
    assert remedies == ["By a person: check which module is loaded"]


def test_an_id_is_of_the_subject_that_has_the_check():
    for name, subject in SUBJECTS.items():
        assert {check.subject for check in (*subject.checks, subject.observed)} == {name}


def _of(declared, does):
    """What is said of a check of the policy's job_user that declares and does this."""

    @declared
    def user(seen, want):
        return does(want)

    with pytest.raises(pytest.fail.Exception) as failed:
        user(None, Policy())
    return str(failed.value)


def test_a_check_that_does_what_it_does_not_declare_fails_whatever_test_it_is_in():
    plain = check("host.user", COST)
    assert "reads job_user" in _of(plain, lambda want: ok("host.user", want.job_user or "any"))
    assert "reads limit_core" in _of(plain, lambda want: ok("host.user", asking(None, want).check))
    assert "gives the result host.os" in _of(plain, lambda want: ok("host.os"))
    assert "a deploy repairs it" in _of(plain, lambda want: fixable("host.user", "a", "b"))
    said = _of(plain, lambda want: fail("host.user", "a", "b", fix="reboot"))
    assert "asks a person: reboot" in said
    person = check("host.user", COST, settings=("job_user",), fix=("reboot",))
    honest = person(lambda seen, want: fail("host.user", want.job_user, "b", fix="reboot"))
    assert honest(None, Policy()).status == "fail"


@check("host.asking", COST, settings=("limit_core",))
def asking(seen, want):
    """A check that another one asks."""
    return ok("host.asking", want.limit_core)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("ptrace.scop", "ptrace.scope"), ("ptrase.scope", "ptrace.scope"), ("limit", "limits")],
)
def test_a_misspelt_id_has_its_likely_meaning(word, meant):
    assert registry.meant(word) == meant


def test_the_command_prints_a_check_and_a_subject_and_everything(tool):
    done = tool("explain", "ptrace.scope")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("ptrace.scope\n")
    assert "nodeready deploy INVENTORY --only ptrace" in done.out
    assert "hides cause: a job runs" in done.out
    assert "  deploy, then configure, then reboot\n" in done.out
    assert max(map(len, done.out.splitlines())) <= 90
    done = tool("explain", "limits", "ptrace.observed")
    assert "limits.memlock" in done.out
    assert "could not be observed" in done.out
    done = tool("explain")
    assert all(check in done.out for check in (*SUBJECTS, *check_ids()))
    done = tool("explain", "ptrace.scop")
    assert (done.status, done.out) == (2, "")
    assert "did you mean ptrace.scope?" in done.err

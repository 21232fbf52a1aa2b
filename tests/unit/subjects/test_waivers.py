"""A waiver accepts a finding that is known, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from nodeready.policy import Policy
from nodeready.subjects.result import fail, fixable, ok, unknown, warn
from nodeready.subjects.waivers import waive, waiver_problems

WANT = replace(Policy(), waivers=(("limits.core", "batch nodes"), ("ptrace.scope", "ticket 4711")))
IDS = ["ptrace.scope", "ptrace.selinux", "limits.core"]


def test_a_known_finding_is_waived_and_keeps_what_was_seen():
    for finding in (
        fail("ptrace.scope", "0", "1", "/etc/x:1", "edit it"),
        fixable("ptrace.scope", "0", "1", "/etc/x:1"),
        warn("ptrace.scope", "0", "1", "/etc/x:1", "edit it"),
    ):
        (result,) = waive([finding], WANT)
        assert (result.status, result.expected, result.actual) == ("waived", "0", "1")
        assert (result.source, result.fix) == ("/etc/x:1", "waived: ticket 4711")
        assert result.fix == "waived: ticket 4711"
        assert not result.bad
        assert not result.fixable


def test_nothing_else_is_waived():
    findings = [
        ok("ptrace.scope", "0"),
        unknown("ptrace.scope", "timed out"),
        fail("ptrace.selinux", "off", "on"),
    ]
    assert waive(findings, WANT) == findings
    assert waive(findings, Policy()) == findings


def test_a_waiver_of_no_check_is_a_problem_that_says_what_was_meant():
    assert waiver_problems(WANT, IDS) == []
    for check, meant in (
        ("ptrace.scop", "did you mean ptrace.scope?"),
        ("limits.zzzzzzz", "there are limits.core"),
        ("nothing.like_it", "no such check"),
        ("ptrace.observed", "cannot be waived"),
    ):
        (problem,) = waiver_problems(replace(Policy(), waivers=((check, "why"),)), IDS)
        assert check in problem
        assert meant in problem

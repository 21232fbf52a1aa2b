"""A waiver accepts a finding that is known, and nothing else."""

from dataclasses import replace

import pytest

from nodeready.core.policy import Policy
from nodeready.core.result import waive, waiver_problems
from nodeready.core.settings import Waiver
from tests.builders.results import fail, fixable, ok, unknown, warn
from tests.cases import read_table

WAIVERS = Waiver("limits.core", "batch nodes"), Waiver("ptrace.scope", "ticket 4711")
WANT = replace(Policy(), waivers=WAIVERS)
TODAY = "2027-01-15"
IDS = ["ptrace.scope", "ptrace.selinux", "limits.core"]


def test_a_known_finding_is_waived_and_keeps_what_was_seen():
    for finding in (
        fail("ptrace.scope", "0", "1", "/etc/x:1", "edit it"),
        fixable("ptrace.scope", "0", "1", "/etc/x:1"),
        warn("ptrace.scope", "0", "1", "/etc/x:1", "edit it"),
    ):
        (result,) = waive([finding], WANT, TODAY)
        assert (result.status, result.expected, result.actual) == ("waived", "0", "1")
        assert (result.source, result.fix) == ("/etc/x:1", "waived: ticket 4711")
        assert not result.bad
        assert not result.fixable


#: The state of a waiver until 2027-01-31 on a day -> (status, words of fix, words of actual).
DAYS = [
    ("2027-01-16", "waived", "waived until 2027-01-31 (ana): ticket 1", "1"),
    ("2027-01-17", "warn", "ticket 1; it ends within 14 days: extend or remove it", "1"),
    ("2027-01-31", "warn", "ticket 1; it ends within 14 days: extend or remove it", "1"),
    ("2027-02-01", "fail", "edit it", "1; the waiver of ana expired after 2027-01-31"),
]


@pytest.mark.parametrize(("today", "status", "fix", "actual"), DAYS)
def test_a_waiver_that_ends_warns_two_weeks_before_and_then_hides_nothing(
    today, status, fix, actual
):
    ends = Waiver("ptrace.scope", "ticket 1", "ana", "2027-01-31")
    policy = replace(Policy(), waivers=(ends,))
    (result,) = waive([fail("ptrace.scope", "0", "1", "", "edit it")], policy, today)
    assert (result.status, result.actual) == (status, actual)
    assert result.fix.endswith(fix)
    # The ladder that repairs a finding is not shown with the text of its waiver.
    rung = replace(fail("ptrace.scope", "0", "1"), actions=("reboot",))
    assert bool(waive([rung], policy, today)[0].actions) is (status == "fail")
    # A deploy repairs only what is waived no more.
    (result,) = waive([fixable("ptrace.scope", "0", "1")], policy, today)
    assert result.fixable is (status == "fail")
    # Of two waivers of one check, the later end counts.
    endless = replace(policy, waivers=(Waiver("ptrace.scope", "for ever"), ends))
    assert waive([fail("ptrace.scope", "0", "1")], endless, today)[0].status == "waived"


def test_nothing_else_is_waived():
    findings = [ok("ptrace.scope", "0"), unknown("ptrace.scope", "timed out")]
    findings.append(fail("ptrace.selinux", "off", "on"))
    assert waive(findings, WANT, TODAY) == findings
    assert waive(findings, Policy(), TODAY) == findings


def test_a_waiver_of_no_check_is_a_problem_that_says_what_was_meant():
    assert waiver_problems(WANT, IDS) == []
    for check, meant in read_table(__file__, "no_checks"):
        (problem,) = waiver_problems(replace(Policy(), waivers=(Waiver(check, "why"),)), IDS)
        assert check in problem
        assert meant in problem

"""Whether the job's user can look into a process: every way in which it may fail, and is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeready.policy import Policy
from nodeready.subjects.base import Unknown
from nodeready.subjects.proof import checks as proof
from nodeready.subjects.proof.facts import (
    NO_START,
    UNFINISHED,
    Attempt,
    Control,
    Guards,
    Proved,
    User,
)
from tests.builders.proof import (
    AS_ROOT,
    GOOD,
    NO_GUARDS,
    SPY,
    WELL,
    judged,
    statuses,
)

FIVE = ("attach", "attach_nonblocking", "attach_native", "gdb", "strace")
REFUSED = replace(GOOD, good=False, rc=1, said="Error: Permission Denied", refused=True)
DEPLOY = "nodeready deploy INVENTORY --only"


def seen(attempt, guards=NO_GUARDS, root=GOOD, root_guards=AS_ROOT, uid=2000) -> Proved:
    """py-spy's three modes fared like this, and root's control like that."""
    attach = replace(
        WELL.attach, guards=guards, blocking=attempt, nonblocking=attempt, native=attempt
    )
    tracers = replace(WELL.tracers, guards=guards, gdb=attempt, strace=attempt)
    control = Control(root_guards, "", root) if root else None
    return replace(
        WELL, user=User("ml", uid, True, ""), attach=attach, tracers=tracers, control=control
    )


def guards(yama=None, deny=None, capable=False, bounded=False):
    return Guards(yama, deny, capable, bounded)


CAUSES = {
    "Yama": (seen(REFUSED, guards(1)), "refused: Yama's ptrace_scope is 1 (root can)"),
    "Yama, nobody was root": (
        seen(REFUSED, guards(2), root=None),
        "refused: Yama's ptrace_scope is 2",
    ),
    "Yama 3": (
        seen(REFUSED, guards(3), REFUSED),
        "refused, to root too: Yama's ptrace_scope is 3",
    ),
    "SELinux": (
        seen(REFUSED, guards(0, deny=True), REFUSED),
        "refused, to root too: SELinux's deny_ptrace is on",
    ),
    "SELinux and Yama": (
        seen(REFUSED, guards(1, deny=True), REFUSED),
        "refused, to root too: SELinux's deny_ptrace is on and Yama's ptrace_scope is 1",
    ),
    "a container and Yama": (
        seen(REFUSED, guards(1, bounded=True), REFUSED, guards(1, bounded=True)),
        "refused, to root too: Yama's ptrace_scope is 1 and CAP_SYS_PTRACE is missing",
    ),
    "a container": (
        seen(REFUSED, guards(bounded=True), REFUSED, guards(bounded=True)),
        "refused, to root too: CAP_SYS_PTRACE is missing",
    ),
    "not dumpable": (
        seen(REFUSED, guards(0)),
        "refused (root can): not by Yama, SELinux or a missing capability",
    ),
    "something else": (
        seen(REFUSED, guards(0), REFUSED),
        "refused, to root too: not by Yama, SELinux or a missing capability",
    ),
    "root itself": (
        seen(REFUSED, guards(2, bounded=True), REFUSED, uid=0),
        "refused: Yama's ptrace_scope is 2 and CAP_SYS_PTRACE is missing",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_refusal_says_which_of_the_known_causes_it_is(name):
    proved, cause = CAUSES[name]
    found = judged(proved)
    assert {found[check] for check in FIVE} == {("fail", cause)}


@pytest.mark.parametrize(
    ("name", "fix", "fixable"),
    [
        ("Yama", f"{DEPLOY} ptrace", True),
        ("SELinux", f"{DEPLOY} ptrace", True),
        ("Yama 3", f"{DEPLOY} ptrace, then reboot the node", False),
        ("a container", "give the container CAP_SYS_PTRACE (--cap-add SYS_PTRACE)", False),
    ],
)
def test_a_refusal_says_what_repairs_it(name, fix, fixable):
    result = proof.attach(CAUSES[name][0], Policy())
    assert (result.fix, result.fixable) == (fix, fixable)


def test_a_policy_that_asks_for_yama_is_what_has_to_change():
    result = proof.attach(CAUSES["Yama"][0], Policy(ptrace_scope=1))
    assert result.status == "fail"
    assert "policy" in result.fix


def test_a_value_of_yama_that_refuses_nothing_is_no_failure():
    assert set(statuses(seen(GOOD, guards(1))).values()) <= {"ok", "na"}


@pytest.mark.parametrize(
    ("attempt", "root", "status", "actual"),
    [
        (replace(GOOD, rc=None, good=False), GOOD, "fail", "timed out after 10 s (root can)"),
        (
            replace(GOOD, rc=None, good=False, answers=False, state="T"),
            None,
            "fail",
            "timed out after 10 s; its target stays stopped (state T)",
        ),
        (replace(GOOD, rc=None, good=False, full=False), GOOD, "unknown", UNFINISHED),
        (None, GOOD, "unknown", UNFINISHED),
        (
            replace(GOOD, rc=1, good=False, said="Failed to find python version"),
            replace(GOOD, rc=1, good=False, said="Failed to find python version"),
            "fail",
            "Failed to find python version (root's too)",
        ),
        (
            replace(GOOD, good=False, said="its output is no JSON of stacks"),
            None,
            "fail",
            "its output is no JSON of stacks",
        ),
        (Attempt(SPY, NO_START, "Exec format error"), None, "fail", f"{SPY} does not start: "),
        (replace(GOOD, tracer=77), GOOD, "fail", "its target is still traced, by process 77"),
        (replace(GOOD, answers=False, state="T"), GOOD, "fail", "its target stays stopped"),
        (replace(GOOD, answers=False, state="D"), GOOD, "fail", "its target stays hanging"),
        (replace(GOOD, answers=False, state="Z"), GOOD, "fail", "its target ended"),
        (Attempt(""), GOOD, "fail", "py-spy is not installed"),
    ],
)
def test_what_else_goes_wrong_is_named(attempt, root, status, actual):
    found = judged(seen(attempt, root=root))
    for check in FIVE[:3]:
        assert found[check][0] == status
        assert found[check][1].startswith(actual)


def test_tools_that_the_policy_does_not_want_may_be_missing():
    want = Policy(packages=("pdsh",), py_spy_version="")
    found = judged(seen(Attempt("")), want)
    assert {found[check][0] for check in FIVE} == {"na"}
    found = judged(seen(GOOD), want)
    assert {found[check][0] for check in FIVE} == {"ok"}


def test_what_was_not_seen_is_not_ok():
    lost = Unknown("timed out", "the first words")
    found = judged(replace(WELL, attach=lost, tracers=lost))
    assert {found[check] for check in FIVE} == {("unknown", "timed out: the first words")}
    none = replace(WELL.attach, error="python3 does not run", blocking=None)
    found = judged(replace(WELL, attach=none))
    assert found["attach"] == ("unknown", "no process to look at: python3 does not run")
    assert judged(Proved(WELL.user)).keys() == {"user"}
    found = judged(Proved(User("ml", 2000, True, "no session: go away")))
    assert {found[check] for check in FIVE} == {("na", "no session: see proof.user")}

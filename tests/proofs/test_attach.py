"""Whether the job's user can look into a process: every way in which it may fail, and is named."""

from __future__ import annotations

import time
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
from tests.command import wait_for, written
from tests.proofs.canaries import (
    AS_ROOT,
    GOOD,
    NO_GUARDS,
    SPY,
    WELL,
    configured,
    judged,
    line,
    processes,
    prove,
    put_py_spy,
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


@pytest.mark.lab
@pytest.mark.parametrize(
    ("login", "user"), [("root", "ml"), ("ml", ""), ("ml", "ml"), ("root", "root")]
)
def test_all_ways_in_lead_to_a_stack(fresh_node, login, user):
    put_py_spy(fresh_node)
    before = written(fresh_node)
    found = statuses(prove(fresh_node, login, user=user))
    assert found == dict.fromkeys(["user", "limits", *FIVE], "ok")
    assert written(fresh_node) == before


@pytest.mark.lab
@pytest.mark.parametrize("tmp", ["ro", "size=4k"], ids=["read-only", "full"])
def test_no_writable_place_is_needed(fresh_node, tmp):
    put_py_spy(fresh_node)
    for path in ("/tmp", "/var/tmp", "/home/ml", "/dev/shm"):
        fresh_node.enter(["mount", "-t", "tmpfs", "-o", tmp, "tmpfs", path])
        fresh_node.enter(["sh", "-c", f"cat /dev/zero >{path}/fill"], check=False)
    found = statuses(prove(fresh_node))
    assert found == dict.fromkeys(["user", "limits", *FIVE], "ok")


# Stand-ins for a py-spy that misbehaves: $4 and so on are the target's options.
STAND_INS = {
    "missing": (None, "fail", "py-spy is not installed"),
    "hangs": ("sleep 300 & exec sleep 301", "unknown", UNFINISHED),
    "prints 1 GB": ("head -c 1000000000 /dev/zero", "fail", "its output is no JSON of stacks"),
    "complains 1 GB": (
        "head -c 1000000000 /dev/zero >&2; exit 1",
        "fail",
        "\0" * 20,
    ),
    "deep": ("head -c 200000 /dev/zero | tr '\\0' '['", "fail", "its output is no JSON of stacks"),
    "odd": ("echo '[{\"frames\": 5}]'", "fail", "its output is no JSON of stacks"),
    "another": ("echo '[]'", "fail", "its stacks lack the target's function"),
    "crashes": ("kill -SEGV $$", "fail", "ended by signal 11"),
    "stops": (
        'for last; do :; done; /bin/kill -STOP "$last"; echo "[]"',
        "fail",
        "its stacks lack the target's function (root's too); its target stays stopped (state T)",
    ),
    "kills": (
        'for last; do :; done; /bin/kill -KILL "$last"; echo "[]"',
        "fail",
        "its stacks lack the target's function (root's too); its target ended",
    ),
}


@pytest.mark.lab
@pytest.mark.parametrize("name", STAND_INS)
def test_a_py_spy_that_misbehaves_costs_nothing_else(fresh_node, name):
    script, status, actual = STAND_INS[name]
    if script is not None:
        fresh_node.write(SPY, f"#!/bin/sh\n{script}\n", mode=0o755)
    before = written(fresh_node)
    found = judged(prove(fresh_node, limit_s=8 if name == "hangs" else 40))
    for check in FIVE[:3]:
        assert found[check][0] == status
        assert found[check][1].startswith(actual)
    assert {found[check][0] for check in ("user", "limits", "gdb", "strace")} == {"ok"}
    assert written(fresh_node) == before


@pytest.mark.lab
def test_a_py_spy_that_only_root_may_run(fresh_node):
    put_py_spy(fresh_node)
    fresh_node.enter(["chmod", "700", SPY])
    found = judged(prove(fresh_node))
    assert found["attach"] == ("fail", f"{SPY} does not start: Permission denied")


@pytest.mark.lab
@pytest.mark.parametrize("login", ["root", "ml"])
@pytest.mark.parametrize("number", ["KILL", "TERM", "HUP"])
def test_killed_in_the_middle_nothing_is_left(fresh_node, login, number):
    """By an administrator, or by what ends a run's remote commands."""
    fresh_node.write(SPY, "#!/bin/sh\ntouch /run/user/began\nexec sleep 300\n", mode=0o755)
    fresh_node.enter(["sh", "-c", "mkdir -p -m 1777 /run/user; chmod 1777 /run/user"])
    before = processes(fresh_node)
    command = line(configured(user="ml"))
    fresh_node.write("/run/user/in", command.stdin)
    fresh_node.run(f"({command.line}) >/run/user/out 2>&1 </run/user/in &", user=login)
    began = ["test", "-e", "/run/user/began"]
    wait_for(lambda: fresh_node.enter(began, check=False).returncode == 0)
    # The oldest is the program that the login started.
    ours = [row.split() for row in processes(fresh_node) if "import os, sys" in row]
    pid = next(pid for pid, name, *_ in ours if name.startswith("python"))
    fresh_node.enter(["kill", f"-{number}", pid])
    for _ in range(50):
        if processes(fresh_node) == before:
            break
        time.sleep(0.1)
    assert processes(fresh_node) == before
    assert "Traceback" not in fresh_node.read("/run/user/out")

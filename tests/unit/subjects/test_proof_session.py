"""The session of the job's user: opened as a login is, with the limits that it really has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeready.policy import Policy
from nodeready.subjects.base import Unknown
from nodeready.subjects.proof import checks as proof
from nodeready.subjects.proof.facts import Limit, Proved, User
from tests.builders.proof import LIMITS, WELL

NONE = Limit(-1, -1)
LOW = Limit(1024, 1048576)


@pytest.mark.parametrize(
    ("user", "status", "actual", "fix"),
    [
        (User("ml", 2000, True, ""), "ok", "a session of ml", ""),
        (User("ml", 2000, False, ""), "ok", "a session of ml", ""),
        (User("root", 0, True, ""), "ok", "a session of root", ""),
        (
            User("root", 0, False, ""),
            "warn",
            "proved as root, whom Yama does not stop",
            "--user NAME proves it for the job's user",
        ),
        (
            User("x", -1, True, "no such user: x"),
            "fail",
            "no such user: x",
            "create x on the node, or name another user",
        ),
        (
            User("x", 9, True, "no session: Permission denied"),
            "fail",
            "no session: Permission denied",
            "`su - x -c id`, as root on the node, has to work",
        ),
        (
            User("x", 9, True, "logged in as ml, who cannot become x: log in as root"),
            "fail",
            "logged in as ml, who cannot become x: log in as root",
            "log in as root, or name no user",
        ),
        (Unknown("did not finish in time"), "unknown", "did not finish in time", ""),
        (Unknown("timed out", "hello"), "unknown", "timed out: hello", ""),
    ],
)
def test_whose_session_it_is(user, status, actual, fix):
    result = proof.user(Proved(user), Policy())
    assert (result.status, result.actual, result.fix) == (status, actual, fix)


@pytest.mark.parametrize(
    ("limits", "status", "actual"),
    [
        (LIMITS, "ok", "core unlimited, memlock unlimited, nofile 1048576"),
        (
            replace(LIMITS, nofile=Limit(2097152, 2097152), nr_open=2097152),
            "ok",
            "core unlimited, memlock unlimited, nofile 1048576",
        ),
        (replace(LIMITS, nofile=LOW), "fail", "nofile 1024/1048576"),
        (
            replace(LIMITS, memlock=Limit(8388608, 8388608), nofile=LOW),
            "fail",
            "memlock 8192, nofile 1024/1048576",
        ),
        (replace(LIMITS, core=Limit(0, -1)), "fail", "core 0/unlimited"),
        # PAM gave it, and it is gone.
        (
            replace(LIMITS, nofile=Limit(512, 512), before=(NONE, NONE, LIMITS.nofile)),
            "fail",
            "nofile 512: the profile lowers nofile",
        ),
        (
            replace(LIMITS, nofile=Limit(512, 512), before=(NONE, NONE, LOW)),
            "fail",
            "nofile 512",
        ),
        # What the kernel refuses, the subject limits tells.
        (
            replace(LIMITS, nofile=LOW, nr_open=524288),
            "ok",
            "core unlimited, memlock unlimited",
        ),
        (
            replace(LIMITS, memlock=Limit(0, 65536), ceiling=(-1, 65536, 1048576)),
            "ok",
            "core unlimited, nofile 1048576",
        ),
        (replace(LIMITS, nofile=LOW, ceiling=(-1, -1, 1048576)), "fail", "nofile 1024/1048576"),
        (Unknown("the proof's answer makes no sense", "[]"), "unknown", "the proof's answer"),
    ],
)
def test_limits(limits, status, actual):
    result = proof.limits(replace(WELL, limits=limits), Policy())
    assert result.status == status
    assert result.actual.startswith(actual)


def test_nothing_that_the_kernel_gives_is_not_ok():
    limits = replace(LIMITS, ceiling=(0, 0, 512))
    assert proof.limits(replace(WELL, limits=limits), Policy()).status == "na"


def test_who_repairs_a_limit():
    low = replace(WELL, limits=replace(LIMITS, nofile=LOW))
    result = proof.limits(low, Policy())
    assert (result.fixable, result.fix) == (True, "nodeready deploy INVENTORY --only limits")
    before = (NONE, NONE, LIMITS.nofile)
    lowered = replace(WELL, limits=replace(LIMITS, nofile=LOW, before=before))
    result = proof.limits(lowered, Policy())
    assert (result.fixable, "ulimit of nofile from ml's profile" in result.fix) == (False, True)

"""The session of the job's user: opened as a login is, with the limits that it really has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeready.node import payload
from nodeready.policy import Policy
from nodeready.shell import quote
from nodeready.subjects.base import Unknown
from nodeready.subjects.proof import checks as proof
from nodeready.subjects.proof.facts import Limit, Proved, User
from tests.capture.targets import put_python
from tests.command import written
from tests.proofs.canaries import LIMITS, WELL, judged, prove, put_py_spy

PROFILE = "/home/ml/.profile"
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


@pytest.mark.lab
@pytest.mark.parametrize(
    ("profile", "user", "limits"),
    [
        ("", "ok", "ok"),
        ("echo noise; echo more >&2; printf 'half a line'", "ok", "ok"),
        ("head -c 300000000 /dev/zero; head -c 3000000 /dev/zero >&2", "ok", "ok"),
        ("ulimit -n 200", "ok", "fail"),
        ("exec <&-; exec 2>&-; cd /nowhere; set -u; trap '' TERM", "ok", "ok"),
        ("PATH=/nowhere", "ok", "ok"),
        ("echo go away; exit 3", "fail", "na"),
        ("echo going; sleep 300 & setsid sleep 301 & exec sleep 302", "fail", "na"),
    ],
    ids=["none", "noise", "1 GB", "ulimit", "odd", "no PATH", "exit", "hang"],
)
def test_whatever_the_profile_does(fresh_node, profile, user, limits):
    fresh_node.write(PROFILE, f"{profile}\n")
    found = judged(prove(fresh_node, limit_s=6 if "sleep" in profile else 40, wanted=("limits",)))
    assert (found["user"][0], found["limits"][0]) == (user, limits), found
    words = {"200": "the profile lowers nofile", "exit": "no session: go away"}
    words["sleep"] = "no session: timed out; it said: going"
    for mark, word in words.items():
        assert mark not in profile or word in found["user"][1] + found["limits"][1]


ACCOUNTS = {
    "nobodysuch": ("", "no such user: nobodysuch"),
    "expired": ("useradd -m -e 1970-01-02 expired", "expired"),
    "nologin": ("useradd -m -s /usr/sbin/nologin nologin", ""),
    "homeless": ("useradd -M homeless", ""),
    "must": ("useradd -m must && chage -d 0 must", "You are required to change your password"),
}


@pytest.mark.lab
@pytest.mark.parametrize("name", ACCOUNTS)
def test_accounts(fresh_node, name):
    """One whose shell is nologin runs jobs all the same: a batch system asks for no shell."""
    script, error = ACCOUNTS[name]
    fresh_node.enter(["sh", "-c", script])
    found = judged(prove(fresh_node, user=name, wanted=("limits",), limit_s=6))
    assert found["user"][0] == ("fail" if error else "ok")
    assert error in found["user"][1]
    assert found["limits"][0] == ("na" if error else "ok")


@pytest.mark.lab
@pytest.mark.parametrize("options", ["!use_pty", "use_pty"])
def test_who_called_sudo_is_found(fresh_node, options):
    """sudo takes the core limit away from what it runs: the session shall have the caller's."""
    fresh_node.write("/etc/sudoers.d/zz-test", f"Defaults {options}\n", mode=0o440)
    for name, source in payload.closure(["nodeready.node.proofs.session"]).items():
        file = "/__init__.py" if payload.is_package(name) else ".py"
        fresh_node.write(f"/opt/test/{name.replace('.', '/')}{file}", source)
    code = (
        "import sys; sys.path.insert(0, '/opt/test'); from nodeready.node.proofs import session; "
        "print(session._above_sudo())"
    )
    script = f"echo $$; sudo -n sh -c {quote(f'timeout 9 python3 -B -c {quote(code)}; :')}; :"
    words = fresh_node.run(f"sh -c {quote(script)}", user="ml").stdout.split()
    assert words[0] == words[1]


@pytest.mark.lab
def test_a_python_that_only_root_may_run(fresh_node):
    fresh_node.enter(["sh", "-c", 'chmod o-x "$(readlink -f /usr/bin/python3)"'])
    found = judged(prove(fresh_node, wanted=("limits", "attach")))
    words = "no session: no Python 3.9 or newer that ml may run"
    assert found["user"] == ("fail", words)


@pytest.mark.lab
def test_only_root_opens_a_session_for_another(fresh_node):
    fresh_node.enter(["useradd", "-m", "other"])
    found = judged(prove(fresh_node, "ml", user="other", wanted=("limits",)))
    assert found["user"] == (
        "fail",
        "logged in as ml, who cannot become other: log in as root",
    )


@pytest.mark.lab
@pytest.mark.parametrize("version", ["3.9", "3.13"])
@pytest.mark.parametrize(("login", "user"), [("root", "ml"), ("root", "root"), ("ml", "ml")])
def test_the_oldest_and_the_newest_python(fresh_node, version, login, user):
    where = put_python(fresh_node, version)
    if not where:
        pytest.skip(f"no Python {version} in ~/.pyenv")
    put_py_spy(fresh_node)
    fresh_node.enter(["ln", "-s", f"{where}/bin/python3", "/usr/local/bin/python3"])
    fresh_node.write("/etc/ld.so.conf.d/test.conf", f"{where}/lib\n")
    fresh_node.enter(["ldconfig"])
    assert f" {version}." in fresh_node.run("python3 --version", user=login).stdout
    before = written(fresh_node)
    statuses = {status for status, _ in judged(prove(fresh_node, login, user=user)).values()}
    assert statuses == {"ok"}
    assert written(fresh_node) == before


@pytest.mark.lab
def test_root_without_a_name_is_told_so(fresh_node):
    found = judged(prove(fresh_node, user="", wanted=("limits",)))
    assert (found["user"][0], found["limits"][0]) == ("warn", "ok")

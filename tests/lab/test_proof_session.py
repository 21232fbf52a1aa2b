"""The session of the job's user: opened as a login is, with the limits that it really has."""

from __future__ import annotations

import pytest

from nodeready.node import payload
from nodeready.shell import quote
from tests.builders.proof import judged, prove, put_py_spy
from tests.command import written
from tests.lab.targets import put_python

PROFILE = "/home/ml/.profile"


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


@pytest.mark.parametrize("name", ACCOUNTS)
def test_accounts(fresh_node, name):
    """One whose shell is nologin runs jobs all the same: a batch system asks for no shell."""
    script, error = ACCOUNTS[name]
    fresh_node.enter(["sh", "-c", script])
    found = judged(prove(fresh_node, user=name, wanted=("limits",), limit_s=6))
    assert found["user"][0] == ("fail" if error else "ok")
    assert error in found["user"][1]
    assert found["limits"][0] == ("na" if error else "ok")


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


def test_a_python_that_only_root_may_run(fresh_node):
    fresh_node.enter(["sh", "-c", 'chmod o-x "$(readlink -f /usr/bin/python3)"'])
    found = judged(prove(fresh_node, wanted=("limits", "attach")))
    words = "no session: no Python 3.9 or newer that ml may run"
    assert found["user"] == ("fail", words)


def test_only_root_opens_a_session_for_another(fresh_node):
    fresh_node.enter(["useradd", "-m", "other"])
    found = judged(prove(fresh_node, "ml", user="other", wanted=("limits",)))
    assert found["user"] == (
        "fail",
        "logged in as ml, who cannot become other: log in as root",
    )


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


def test_root_without_a_name_is_told_so(fresh_node):
    found = judged(prove(fresh_node, user="", wanted=("limits",)))
    assert (found["user"][0], found["limits"][0]) == ("warn", "ok")

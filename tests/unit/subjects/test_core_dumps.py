"""core_dumps: the pattern, its directory, retention, and who would rewrite it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from nodeready.policy import Policy
from nodeready.subjects.base import Line, Output, ProbeError
from nodeready.subjects.core_dumps import checks
from nodeready.subjects.core_dumps import facts as core_dumps
from nodeready.subjects.sysctl import Boot, Setting
from tests.builders import judging
from tests.builders.judging import judge_all

WANT = Policy()
STORE = Policy(core_handler="systemd-coredump")
PACKAGED = "|/usr/lib/systemd/systemd-coredump %P %u %g %s %t %c %h"


def seen(**changes):
    """A node on which all is well, except for these."""
    good = core_dumps.CoreDumps(
        live=WANT.core_pattern,
        boot=Boot(Setting(WANT.core_pattern, "/etc/sysctl.d/99-zz-nodeready-core_dumps.conf:3")),
        directory_mode=0o1777,
        retention=Line(
            "/etc/tmpfiles.d/00-nodeready-cores.conf", 3, "d /var/crash 1777 root root 14d"
        ),
        rewriters=(),
        systemd=True,
        coredump_binary="",
        coredump={},
        packaged=None,
    )
    return replace(good, **changes)


wrong = partial(judging.wrong, checks)


# name, what differs, policy, the checks that say so
CASES = [
    ("all is well", {}, WANT, {}),
    ("a group-sticky directory serves as well", {"directory_mode": 0o3777}, WANT, {}),
    ("apport has the pattern", {"live": "|/usr/share/apport/apport"}, WANT, {"pattern": "fail"}),
    ("nothing for the next boot", {"boot": Boot(None)}, WANT, {"pattern": "fail"}),
    ("no directory", {"directory_mode": None}, WANT, {"directory": "fail"}),
    ("not for everybody", {"directory_mode": 0o755}, WANT, {"directory": "fail"}),
    ("not sticky", {"directory_mode": 0o777}, WANT, {"directory": "fail"}),
    ("no rule", {"retention": None}, WANT, {"retention": "fail"}),
    ("apport is not masked", {"rewriters": ("apport.service",)}, WANT, {"rewriters": "fail"}),
    ("systemd-coredump is not installed", {}, STORE, {"pattern": "fail", "size": "fail"}),
    (
        "systemd-coredump with its defaults",
        {
            "packaged": Setting(PACKAGED, "/x:1"),
            "live": PACKAGED,
            "boot": Boot(Setting(PACKAGED, "/x:1")),
        },
        STORE,
        {"size": "fail"},
    ),
    (
        "a line in sysctl.conf",
        {"boot": Boot(Setting(WANT.core_pattern, "/a:1"), Setting("core", "/etc/sysctl.conf:4"))},
        WANT,
        {"sysctl_conf": "warn"},
    ),
]


@pytest.mark.parametrize(
    ("changes", "want", "findings"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_each_fault_gives_its_own_finding_and_no_other(changes, want, findings):
    assert wrong(seen(**changes), want) == findings


def test_an_uninstalled_systemd_coredump_is_a_persons_to_install():
    (result,) = [r for r in judge_all(checks, seen(), STORE) if r.check == "core_dumps.pattern"]
    assert not result.fixable
    assert "systemd-coredump" in result.fix


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "cannot be read"), ("live=core\ndirectory=drwx\n", "mode is no mode")],
)
def test_an_answer_without_sense_is_refused(text, reason):
    with pytest.raises(ProbeError, match=reason):
        core_dumps.parse({"core_dumps": Output(text, 0), "sysctl": Output("", 0)}, WANT)

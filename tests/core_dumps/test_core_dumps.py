"""core_dumps: the pattern, its directory, retention, and who would rewrite it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeready.operations import core_dumps as operation
from nodeready.policy import Policy
from nodeready.subjects.base import Line, Output, ProbeError
from nodeready.subjects.core_dumps import checks
from nodeready.subjects.core_dumps import facts as core_dumps
from nodeready.subjects.sysctl import Boot, Setting
from tests.helpers import apply, judge_all, observe, on, plan

WANT = Policy()
STORE = Policy(core_handler="systemd-coredump")
PACKAGED = "|/usr/lib/systemd/systemd-coredump %P %u %g %s %t %c %h"
STEPS = [operation.rewriters, operation.directory, operation.pattern, operation.size]


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


def wrong(observed, want=WANT):
    """The checks that are not ok, by name, with their status."""
    return {
        result.check.partition(".")[2]: result.status
        for result in judge_all(checks, observed, want)
        if result.bad
    }


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


DIRTY = {
    "/etc/sysctl.d/50-coredump.conf": "kernel.core_pattern=|/bin/false\n",
    "/etc/sysctl.d/zz-site.conf": "kernel.core_pattern = /tmp/core.%p",
    "/etc/tmpfiles.d/crash.conf": "d /var/crash 0755 root root 3d\n",
    "/usr/lib/systemd/system/apport.service": "[Unit]\nDescription=apport\n",
    "/etc/sysctl.conf": "kernel.core_pattern = core\n",
}


@pytest.mark.lab
def test_on_a_dirty_node_cores_go_where_the_policy_says(fresh_nodes):
    (node,) = fresh_nodes(1, files=DIRTY)
    before = {path: node.run(f"sha256sum {path}").stdout for path in DIRTY}
    apply(on(node), plan(observe(on(node), WANT), WANT, STEPS))

    assert node.run("cat /proc/sys/kernel/core_pattern").stdout.strip() == WANT.core_pattern
    host = node.testinfra()
    directory = host.file("/var/crash")
    assert (directory.is_directory, directory.mode) == (True, 0o1777)
    masked = host.file("/etc/systemd/system/apport.service")
    assert (masked.is_symlink, masked.linked_to) == (True, "/dev/null")
    node.run("su -s /bin/sh ml -c 'touch /var/crash/core.x'")
    # systemd-tmpfiles itself takes our rule, not the other one.
    node.run("rmdir /var/crash 2>/dev/null || rm -r /var/crash")
    node.run("systemd-tmpfiles --create --prefix=/var/crash 2>/dev/null || :")
    assert host.file("/var/crash").mode == 0o1777

    assert before == {path: node.run(f"sha256sum {path}").stdout for path in DIRTY}
    again = observe(on(node), WANT)
    assert plan(again, WANT, STEPS) == []
    assert wrong(again["core_dumps"]) == {"sysctl_conf": "warn"}


@pytest.mark.lab
def test_changing_the_handler_takes_our_pattern_away_again(fresh_nodes):
    packaged = {
        "/usr/lib/sysctl.d/50-coredump.conf": f"kernel.core_pattern={PACKAGED}\n",
        "/usr/lib/systemd/systemd-coredump": "#!/bin/sh\n",
    }
    (node,) = fresh_nodes(1, files=packaged)
    apply(on(node), plan(observe(on(node), WANT), WANT, STEPS))
    apply(on(node), plan(observe(on(node), STORE), STORE, STEPS))
    assert node.run("cat /proc/sys/kernel/core_pattern").stdout.strip() == PACKAGED
    assert node.run("ls /etc/sysctl.d | grep -c nodeready", check=False).stdout == "0\n"
    limits = node.run("cat /etc/systemd/coredump.conf.d/zz-nodeready.conf").stdout
    assert "ProcessSizeMax=infinity" in limits
    assert plan(observe(on(node), STORE), STORE, STEPS) == []

"""ptrace: which file wins at boot, for which reader, and what a deploy makes of it."""

from __future__ import annotations

import pytest

from nodeready.operations import ptrace as operation
from nodeready.policy import Policy
from nodeready.subjects import sysctl
from nodeready.subjects.base import Output, ProbeError
from nodeready.subjects.ptrace import checks
from nodeready.subjects.ptrace import facts as ptrace
from nodeready.subjects.snapshot import Snapshot
from tests.builders.judging import by_name, judge_all

WANT = Policy()
ETC, RUN, USR = "/etc/sysctl.d", "/run/sysctl.d", "/usr/lib/sysctl.d"
KEY = "kernel.yama.ptrace_scope"


def outputs(live: str, files: dict[str, str], systemd: bool = True, more: str = ""):
    """What the node's shell would print for these files."""
    text = "".join(f"file={path}\n" for path in files)
    text += "reader=systemd\n" if systemd else ""
    for path, content in files.items():
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip() and line.strip()[0] not in "#;":
                text += f"{path}:{number}:{line}\n"
    seen = f"proc=1\n{more}" + (f"live={live}\n" if live else "")
    return {"ptrace": Output(seen, 0), "sysctl": Output(text, 0)}


def judged(*args, **kwargs):
    seen = ptrace.parse(outputs(*args, **kwargs), WANT)
    return by_name(checks, seen, WANT)


# name, live, files, systemd, status of scope, source of the winner
BOOT = [
    ("all is well", "0", {f"{ETC}/10-ptrace.conf": f"{KEY} = 0"}, True, "ok", "10-ptrace.conf:1"),
    ("only live", "0", {}, True, "fail", ""),
    ("only next boot", "1", {f"{ETC}/10-p.conf": f"{KEY}=0"}, True, "fail", "10-p.conf:1"),
    (
        "a later name wins over an earlier one, whatever the directory",
        "0",
        {f"{ETC}/10-a.conf": f"{KEY}=0", f"{USR}/50-hardening.conf": f"# x\n{KEY} = 1"},
        True,
        "fail",
        "50-hardening.conf:2",
    ),
    (
        "a file in /etc masks the one of the same name",
        "0",
        {f"{ETC}/50-h.conf": f"{KEY}=0", f"{USR}/50-h.conf": f"{KEY}=2"},
        True,
        "ok",
        "/etc/sysctl.d/50-h.conf:1",
    ),
    (
        "slashes, a dash, no spaces, and the last line of a file",
        "0",
        {f"{ETC}/1.conf": f"{KEY}=2\n-kernel/yama/ptrace_scope=0"},
        True,
        "ok",
        "1.conf:2",
    ),
    ("a glob sets it too", "0", {f"{ETC}/9.conf": "kernel.yama.* = 1"}, True, "fail", "9.conf:1"),
    (
        "comments and similar keys do not count",
        "0",
        {f"{ETC}/1.conf": f"{KEY}=0", f"{ETC}/2.conf": f"# {KEY}=1\n; {KEY}=1\nx.{KEY} = 1"},
        True,
        "ok",
        "1.conf:1",
    ),
    (
        "systemd does not read /etc/sysctl.conf",
        "0",
        {f"{ETC}/1.conf": f"{KEY}=0", "/etc/sysctl.conf": f"{KEY}=1"},
        True,
        "ok",
        "1.conf:1",
    ),
    (
        "procps reads /etc/sysctl.conf last of all: nothing of ours can win",
        "0",
        {f"{ETC}/zz.conf": f"{KEY}=0", "/etc/sysctl.conf": f"{KEY}=1"},
        False,
        "fail",
        "/etc/sysctl.conf:1",
    ),
    (
        "Debian's link 99-sysctl.conf is a file like others",
        "0",
        {f"{ETC}/99-a.conf": f"{KEY}=0", f"{ETC}/99-sysctl.conf": f"{KEY}=1"},
        True,
        "fail",
        "99-sysctl.conf:1",
    ),
    (
        "a name behind every z cannot be beaten: its line is named",
        "0",
        {f"{ETC}/10-a.conf": f"{KEY}=0", f"{ETC}/~last.conf": f"{KEY}=1"},
        True,
        "fail",
        "~last.conf:1",
    ),
    ("scope 3", "3", {f"{ETC}/1.conf": f"{KEY}=0"}, True, "fail", "1.conf:1"),
]


@pytest.mark.parametrize(
    ("live", "files", "systemd", "status", "source"),
    [row[1:] for row in BOOT],
    ids=[row[0] for row in BOOT],
)
def test_the_winner_of_the_next_boot_is_named(live, files, systemd, status, source):
    scope = judged(live, files, systemd)["scope"]
    assert scope.status == status
    assert scope.source.endswith(source)


def test_scope_3_needs_a_reboot_and_nothing_else_is_tried():
    files = {f"{ETC}/1.conf": f"{KEY}=0"}
    seen = ptrace.parse(outputs("3", files), WANT)
    (scope, *_) = judge_all(checks, seen, WANT)
    assert "reboot needed" in scope.actual
    assert scope.fix == "reboot the node"
    assert operation.scope.plan(Snapshot({"ptrace": seen}), WANT) is None


def test_what_cannot_be_beaten_is_left_to_a_person():
    files = {f"{ETC}/~last.conf": f"{KEY}=1"}
    seen = Snapshot({"ptrace": ptrace.parse(outputs("0", files), WANT)})
    (scope, *_) = judge_all(checks, seen["ptrace"], WANT)
    assert scope.fix == f"remove the line {ETC}/~last.conf:1"
    assert operation.scope.plan(seen, WANT) is None
    # What is live alone would be gone with the next boot: a person's too.
    seen = Snapshot({"ptrace": ptrace.parse(outputs("1", files), WANT)})
    assert operation.scope.plan(seen, WANT) is None


def test_a_value_that_the_kernel_takes_for_the_wanted_one_is_right():
    assert judged("0", {f"{ETC}/1.conf": f"{KEY} = 0 # for py-spy"})["scope"].status == "ok"
    assert judged("0", {f"{ETC}/1.conf": f'{KEY} = "0"'})["scope"].status == "fail"


def test_a_masked_systemd_sysctl_is_a_persons():
    text = "reader=systemd\nmasked=/etc/systemd/system/systemd-sysctl.service\n"
    seen = ptrace.parse({"ptrace": Output("proc=1\nlive=0\n", 0), "sysctl": Output(text, 0)}, WANT)
    (scope, *_) = judge_all(checks, seen, WANT)
    assert (scope.status, scope.fixable) == ("fail", False)
    assert scope.fix == "systemctl unmask systemd-sysctl.service"


def test_no_yama_does_not_apply():
    assert {result.status for result in judged("", {}).values()} == {"na"}


def test_a_line_in_sysctl_conf_is_named_with_its_fix():
    files = {f"{ETC}/1.conf": f"{KEY}=0", "/etc/sysctl.conf": f"#\n{KEY} = 1"}
    conflict = judged("0", files)["sysctl_conf"]
    assert (conflict.status, conflict.source) == ("warn", "/etc/sysctl.conf:2")
    assert conflict.fix == "remove the line /etc/sysctl.conf:2"


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ("deny_ptrace=0 0\nenforcing=1\n", "ok"),
        ("deny_ptrace=1 1\nenforcing=1\n", "fail"),
        ("deny_ptrace=1 1\nenforcing=0\n", "ok"),
        ("", "na"),
    ],
)
def test_selinux_counts_while_it_enforces(more, status):
    files = {f"{ETC}/1.conf": f"{KEY}=0"}
    assert judged("0", files, more=more)["selinux"].status == status


@pytest.mark.parametrize("live", ["abc", "7", "-1", "\x1b[31m0", "0; reboot", "9" * 5000])
def test_a_value_that_yama_does_not_have_is_refused_with_evidence(live):
    with pytest.raises(ProbeError) as problem:
        ptrace.parse(outputs(live, {}), WANT)
    assert problem.value.evidence == live[:200]


@pytest.mark.parametrize(
    ("last", "name"),
    [
        ("", "99-zz-nodeready-ptrace.conf"),
        ("10-ptrace.conf", "99-zz-nodeready-ptrace.conf"),
        ("99-sysctl.conf", "99-zz-nodeready-ptrace.conf"),
        ("99-zzz-cis.conf", "z-nodeready-ptrace.conf"),
        ("zzz-hardening.conf", "zzz-nodeready-ptrace.conf"),
    ],
)
def test_our_file_sorts_behind_every_other(last, name):
    boot = sysctl.Boot(sysctl.Setting("1", "/x:1"), last_name=last)
    change = operation.scope.plan(Snapshot({"ptrace": ptrace.Ptrace(1, boot)}), WANT)
    assert change is not None
    path = change.actions[0].path
    assert path == f"{ETC}/{name}"
    assert path.rpartition("/")[2] > last

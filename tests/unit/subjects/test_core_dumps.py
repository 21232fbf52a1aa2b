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

SIZES = {name: Setting("infinity", "/c:2") for name in checks.SIZE_LIMITS}
COREDUMP = {
    "packaged": Setting(PACKAGED, "/x:1"),
    "live": PACKAGED,
    "boot": Boot(Setting(PACKAGED, "/x:1")),
}

# name, what differs, policy, the checks that say so
CASES = [
    ("all is well", {}, WANT, {}),
    ("a group-sticky directory serves as well", {"directory_mode": 0o3777}, WANT, {}),
    ("apport has the pattern", {"live": "|/usr/share/apport/apport"}, WANT, {"pattern": "fail"}),
    ("nothing for the next boot", {"boot": Boot(None)}, WANT, {"pattern": "fail"}),
    ("no directory", {"directory_mode": None}, WANT, {"directory": "fail"}),
    ("not for everybody", {"directory_mode": 0o755}, WANT, {"directory": "fail"}),
    (
        "not sticky: users may remove each other's cores",
        {"directory_mode": 0o777},
        WANT,
        {"directory": "warn"},
    ),
    ("root's alone", {"directory_mode": 0o700}, WANT, {"directory": "fail"}),
    ("a group's alone", {"directory_mode": 0o1770}, WANT, {"directory": "fail"}),
    ("readable, not writable", {"directory_mode": 0o1775}, WANT, {"directory": "fail"}),
    ("a parent without x", {"closed": ("/var",)}, WANT, {"directory": "fail"}),
    ("a read-only mount", {"blocked": ("/var/crash", "fixed", 0)}, WANT, {"directory": "fail"}),
    (
        "a file in its place",
        {"blocked": ("/var/crash", "nodir", 0), "directory_mode": None},
        WANT,
        {"directory": "fail"},
    ),
    (
        "a dangling link",
        {"blocked": ("/var/crash", "nowhere", 0), "directory_mode": None},
        WANT,
        {"directory": "fail"},
    ),
    (
        "another's, with a mode of its own",
        {"directory_mode": 0o755, "directory_owner": 1000},
        WANT,
        {"directory": "fail"},
    ),
    ("another's, open to all", {"directory_owner": 65534}, WANT, {}),
    (
        "Storage=none",
        {**COREDUMP, "coredump": {**SIZES, "Storage": Setting("none", "/c:3")}},
        STORE,
        {"size": "fail"},
    ),
    (
        "Storage=journal",
        {**COREDUMP, "coredump": {**SIZES, "Storage": Setting("journal", "/c:3")}},
        STORE,
        {"size": "fail"},
    ),
    (
        "Storage=external",
        {**COREDUMP, "coredump": {**SIZES, "Storage": Setting("external", "/c")}},
        STORE,
        {},
    ),
    ("systemd-coredump of any size", {**COREDUMP, "coredump": SIZES}, STORE, {}),
    (
        "a unit file in the way of a mask",
        {"rewriters": ("apport.service",), "in_place": ("/etc/systemd/system/apport.service",)},
        WANT,
        {"rewriters": "fail"},
    ),
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
    [("", "cannot be read"), ("live=core\nway=drwx 0 /var\n", "mode is no mode")],
)
def test_an_answer_without_sense_is_refused(text, reason):
    with pytest.raises(ProbeError, match=reason):
        core_dumps.parse({"core_dumps": Output(text, 0), "sysctl": Output("", 0)}, WANT)


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"closed": ("/var", "/var/x")}, "chmod o+x /var /var/x"),
        ({"blocked": ("/var/crash", "nodir", 0), "directory_mode": None}, "remove /var/crash"),
        ({"blocked": ("/var", "fixed", 0), "directory_mode": None}, "make /var writable"),
        ({"directory_mode": 0o755, "directory_owner": 7}, "chmod 1777 /var/crash, as its owner"),
        ({"rewriters": ("apport.service",), "in_place": ("/etc/systemd/system/apport.service",)},
         "remove /etc/systemd/system/apport.service, then systemctl mask apport.service"),
    ],
)  # fmt: skip
def test_what_a_deploy_refuses_is_a_persons(changes, fix):
    (result,) = [r for r in judge_all(checks, seen(**changes), WANT) if r.bad]
    assert result.fix.startswith(fix)
    assert (result.status, result.fixable) == ("fail", False)


# What stands in coredump.conf and its drop-ins, and what counts (coredump.conf(5)).
@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"/etc/systemd/coredump.conf": "[Coredump]\nStorage=none"}, {"Storage": "none"}),
        ({"/etc/systemd/coredump.conf": "[Coredump]\nStorage=none",
          "/usr/lib/systemd/coredump.conf.d/a.conf": "[Coredump]\nStorage=external"},
         {"Storage": "external"}),
        # One of its name in /etc masks it, an empty one too.
        ({"/etc/systemd/coredump.conf.d/a.conf": "",
          "/usr/lib/systemd/coredump.conf.d/a.conf": "[Coredump]\nStorage=none"}, {}),
        ({"/etc/systemd/coredump.conf.d/a.conf": "[Coredump]\nStorage=none",
          "/usr/lib/systemd/coredump.conf.d/a.conf": "[Coredump]\n#\nStorage=external"},
         {"Storage": "none"}),
        ({"/run/systemd/coredump.conf.d/z.conf": "[Coredump]\nStorage=none",
          "/etc/systemd/coredump.conf.d/a.conf": "[Coredump]\nStorage=external"},
         {"Storage": "none"}),
        # Another section says nothing.
        ({"/etc/systemd/coredump.conf": "[Other]\nStorage=none"}, {}),
    ],
)  # fmt: skip
def test_the_settings_of_systemd_coredump(files, found):
    text = "live=core\n" + "".join(f"file={path}\n" for path in files)
    for path, content in files.items():
        for number, line in enumerate(content.split("\n"), 1):
            text += f"{path}:{number}:{line}\n"
    cores = core_dumps.parse({"core_dumps": Output(text, 0), "sysctl": Output("", 0)}, STORE)
    assert {name: setting.value for name, setting in cores.coredump.items()} == found

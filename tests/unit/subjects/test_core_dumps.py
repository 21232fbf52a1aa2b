"""core_dumps: the pattern, its directory, retention, and who would rewrite it."""

from dataclasses import replace
from typing import Any

import pytest

from nodeready.core.base import Line, Output, ProbeError
from nodeready.core.policy import Policy
from nodeready.core.sysctl import BootSetting, Setting
from nodeready.subjects.core_dumps import checks
from nodeready.subjects.core_dumps import facts as core_dumps
from tests.builders.judging import by_name
from tests.builders.printed import grep_lines
from tests.cases import cases

POLICY = Policy()
STORE = Policy(core_handler="systemd-coredump")
PACKAGED = "|/usr/lib/systemd/systemd-coredump %P %u %g %s %t %c %h"
_OURS = "/etc/sysctl.d/99-zz-nodeready-core_dumps.conf:3"
_RULE = "d /var/crash 1777 root root 14d"
GOOD = core_dumps.CoreDumps(
    live=POLICY.core_pattern, boot=BootSetting(Setting(POLICY.core_pattern, _OURS)),
    directory_mode=0o1777, retention=Line("/etc/tmpfiles.d/00-nodeready-cores.conf", 3, _RULE),
    rewriters=(), systemd=True, coredump_binary="", coredump={}, packaged=None,
)  # fmt: skip
STORED = replace(
    GOOD,
    packaged=Setting(PACKAGED, "/x:1"),
    live=PACKAGED,
    boot=BootSetting(Setting(PACKAGED, "/x:1")),
)


def node(case: dict[str, Any]) -> core_dumps.CoreDumps:
    changes: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in case.get("change", {}).items()
    }
    if "mode" in case:
        changes["directory_mode"] = case["mode"] and int(case["mode"], 8)
    if "boot" in case:
        winner, conflict = case["boot"]
        changes["boot"] = BootSetting(
            winner and Setting(POLICY.core_pattern, winner),
            conflict and Setting("core", conflict),
            remedy=case.get("remedy", ""),
        )
    if "rule" in case:
        changes["retention"] = case["rule"] and Line(*case["rule"])
    settings = {name: Setting(value, "/c:2") for name, value in case.get("coredump", {}).items()}
    good = STORED if case.get("packaged") else GOOD
    return replace(good, coredump=settings, **changes)


@pytest.mark.parametrize("case", cases(__file__, "data/core_dumps.json", "verdict"))
def test_each_fault_gives_its_own_finding_and_no_other(case):
    """findings: the check, its status, and the fix where a person must act."""
    policy = STORE if case.get("store") else POLICY
    results = by_name(checks, node(case), policy)
    bad = {name: result for name, result in results.items() if result.bad}
    assert {name: result.status for name, result in bad.items()} == {
        name: status for name, (status, _) in case["bad"].items()
    }
    for name, (_, fix) in case["bad"].items():
        assert bad[name].fixable is (fix == "")
        assert bad[name].fix.startswith(fix)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "cannot be read"), ("live=core\nway=drwx 0 /var\n", "mode is no mode")],
)
def test_an_answer_without_sense_is_refused(text, reason):
    with pytest.raises(ProbeError, match=reason):
        core_dumps.parse({"core_dumps": Output(text, 0), "sysctl": Output("", 0)}, POLICY)


@pytest.mark.parametrize("case", cases(__file__, "data/core_dumps.json", "coredump.conf"))
def test_the_settings_of_systemd_coredump(case):
    """coredump.conf(5)."""
    files = {
        f"{directory}/systemd/coredump.conf{name}": text for directory, name, text in case["files"]
    }
    printed = "live=core\n" + "".join(f"file={path}\n" for path in files) + grep_lines(files)
    cores = core_dumps.parse({"core_dumps": Output(printed, 0), "sysctl": Output("", 0)}, STORE)
    assert {name: setting.value for name, setting in cores.coredump.items()} == case["settings"]

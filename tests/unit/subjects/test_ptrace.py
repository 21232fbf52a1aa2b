"""ptrace: Yama's scope now and at the next boot, SELinux, and what a deploy makes of it."""

from typing import Any

import pytest

from nodeready.core import sysctl
from nodeready.core.base import Output, ProbeError
from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.operations import ptrace as operation
from nodeready.subjects.ptrace import checks
from nodeready.subjects.ptrace import facts as ptrace
from tests.builders.judging import actions_of, by_name
from tests.builders.printed import grep_lines
from tests.cases import cases

POLICY = Policy()
KEY = "kernel.yama.ptrace_scope"
RIGHT = {"/etc/sysctl.d/1.conf": f"{KEY} = 0 # for py-spy"}


def observe(live: str, files: dict[str, str], ptrace_lines: str = "", more: str = "") -> Any:
    listed = "".join(f"file={path}\n" for path in files)
    scope = f"proc=1\n{ptrace_lines}" + (f"live={live}\n" if live else "")
    printed = f"{listed}reader=systemd\n{more}{grep_lines(files)}"
    return ptrace.parse({"ptrace": Output(scope, 0), "sysctl": Output(printed, 0)}, POLICY)


def judged(*args: Any, **kwargs: Any) -> dict[str, Result]:
    return by_name(checks, observe(*args, **kwargs), POLICY)


@pytest.mark.parametrize("case", cases(__file__, "data/ptrace.json"))
def test_the_scope_live_and_at_the_next_boot(case):
    files = {f"/etc/sysctl.d/{name}": text for name, text in case["files"].items()}
    observed = observe(case["live"], files)
    result = by_name(checks, observed, POLICY)["scope"]
    assert (result.status, result.source.rpartition("/")[2]) == (case["status"], case["source"])
    assert ("reboot needed" in result.actual) == (case["fix"] == "reboot the node")
    assert result.fix == case["fix"] or case["fix"] == "deploy"
    actions = actions_of(operation.scope, observed)
    assert (bool(actions), result.fixable) == (case["fix"] == "deploy",) * 2
    commands = [action for action in actions if hasattr(action, "argv")]
    assert bool(commands) == (result.fixable and case["live"] == "1")


def test_a_line_in_sysctl_conf_is_named_with_its_fix():
    where = "/etc/sysctl.conf:2"
    for live, text, status in (("0", "1", "warn"), ("0", "0 # x", "ok"), ("", "1", "na")):
        result = judged(live, {**RIGHT, "/etc/sysctl.conf": f"#\n{KEY} = {text}"})["sysctl_conf"]
        told = (where, f"remove the line {where}") if status == "warn" else ("", "")
        assert (result.status, result.source, result.fix) == (status, *told)


def test_selinux_counts_while_it_enforces():
    for denies, enforcing, status in ((0, 1, "ok"), (1, 1, "fail"), (1, 0, "ok")):
        lines = f"deny_ptrace={denies} {denies}\nenforcing={enforcing}\n"
        assert judged("0", RIGHT, lines)["selinux"].status == status
    assert judged("0", RIGHT)["selinux"].status == "na"
    masked = "masked=/etc/systemd/system/systemd-sysctl.service\n"
    result = judged("0", {}, more=masked)["scope"]
    assert (result.status, result.fixable) == ("fail", False)
    deploy = "nodeready deploy INVENTORY --only ptrace"
    assert result.fix == f"systemctl unmask systemd-sysctl.service, then {deploy}"


def test_a_value_that_yama_does_not_have_is_refused_with_evidence():
    for live in ("abc", "4", "-1", "\x1b[31m0", "0; reboot", "9" * 5000):
        with pytest.raises(ProbeError) as problem:
            observe(live, {})
        assert problem.value.evidence == live[:200]


def test_our_file_sorts_behind_every_other():
    ours = "99-zz-nodeready-ptrace.conf"
    names = {"": ours, "10-ptrace.conf": ours, "99-sysctl.conf": ours}
    names |= {"99-zzz-cis.conf": "z-nodeready-ptrace.conf"}
    names |= {"zzz.conf": "zzzz-nodeready-ptrace.conf"}
    for last, name in names.items():
        boot = sysctl.BootSetting(sysctl.Setting("1", "/x:1"), last_name=last)
        write, *_ = actions_of(operation.scope, ptrace.Ptrace(1, boot))
        assert write.path == f"/etc/sysctl.d/{name}"

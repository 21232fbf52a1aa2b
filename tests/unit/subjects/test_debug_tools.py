"""What a node shows, what is judged, and what would be done: without a node."""

from __future__ import annotations

import pytest

from nodeready.deploy import py_spy_binary
from nodeready.deploy.actions import PlanError, Run, Script, WriteFile
from nodeready.operations import debug_tools
from nodeready.policy import Policy
from nodeready.subjects.base import Output, ProbeError
from nodeready.subjects.debug_tools import checks
from nodeready.subjects.debug_tools import facts as probe
from nodeready.subjects.debug_tools.facts import DebugTools
from nodeready.subjects.snapshot import Snapshot
from tests.builders.judging import judge_all

GOOD = "have=apt-get\nmachine=x86_64\nmode=755\nversion=py-spy 0.4.3\n"


def parse(text: str, **policy: object) -> DebugTools:
    return probe.parse({"debug_tools": Output(text, 0)}, Policy(**policy))


def plan(step, seen: DebugTools, **policy: object):
    change = step.plan(Snapshot({"debug_tools": seen}), Policy(**policy))
    return change.actions if change else ()


def statuses(seen: DebugTools, **policy: object) -> list[str]:
    return [result.status for result in judge_all(checks, seen, Policy(**policy))]


@pytest.mark.parametrize(
    ("text", "policy", "expected"),
    [
        (GOOD, {}, ["ok", "ok"]),
        ("missing=gdb\n" + GOOD, {}, ["fail", "ok"]),
        # The node cannot make us think of a package that the policy does not name.
        ("missing=evil\n" + GOOD, {}, ["ok", "ok"]),
        ("machine=x86_64\n", {}, ["ok", "fail"]),
        ("machine=riscv64\n", {}, ["ok", "na"]),
        ("machine=x86_64\nmode=755\nversion=py-spy 0.4.0\n", {}, ["ok", "fail"]),
        ("machine=x86_64\nmode=755\nversion=\n", {}, ["ok", "fail"]),
        ("machine=x86_64\nmode=700\nversion=py-spy 0.4.3\n", {}, ["ok", "fail"]),
        ("machine=x86_64\nmode=755\nversion=py-spy \x1b[2J0.4.3\n", {}, ["ok", "fail"]),
        ("", {"packages": (), "py_spy_version": ""}, ["na", "na"]),
    ],
)
def test_judged(text, policy, expected):
    assert statuses(parse(text, **policy), **policy) == expected


@pytest.mark.parametrize(
    "text", ["", "machine=\n", "machine=$(reboot)\n", GOOD.replace("mode=755", "mode=rwx")]
)
def test_answers_that_make_no_sense(text):
    with pytest.raises(ProbeError):
        parse(text)


def test_the_preferred_package_manager_of_several():
    assert parse("have=dnf\nhave=zypper\n" + GOOD).manager == "apt-get"
    assert parse("have=dnf\nhave=zypper\nmachine=x86_64\n").manager == "zypper"


def test_missing_packages_are_one_script_with_the_policy_s_wait():
    seen = parse("missing=gdb\nmissing=pdsh\n" + GOOD)
    (script,) = plan(debug_tools.packages, seen, package_lock_wait_s=7)
    assert isinstance(script, Script)
    assert script.argv == ("nr_packages", "apt-get", "7", "gdb", "pdsh")
    assert script.describe() == "install gdb pdsh with apt-get"


def test_without_a_package_manager_a_person_has_to_install():
    seen = parse("missing=gdb\nmachine=x86_64\n")
    (result, _) = judge_all(checks, seen, Policy())
    assert (result.owner, result.actual.split(";")[0]) == ("admin", "missing: gdb")
    assert plan(debug_tools.packages, seen) == ()


@pytest.mark.parametrize("there", [None, "0.4.0", ""])
def test_py_spy_is_written_whole_with_its_bits(monkeypatch, there):
    monkeypatch.setattr(
        py_spy_binary, "binary", lambda version, machine: f"{version} {machine}".encode()
    )
    seen = DebugTools(machine="aarch64", py_spy=there, mode=0o755)
    (write,) = plan(debug_tools.py_spy, seen)
    assert isinstance(write, WriteFile)
    assert (write.path, write.mode, write.large) == ("/usr/local/bin/py-spy", "0755", True)
    assert write.content == b"0.4.3 aarch64"
    assert write.describe().startswith("create" if there is None else "change")


def test_a_right_one_that_nobody_may_run_only_gets_its_bits(monkeypatch):
    monkeypatch.delattr(py_spy_binary, "binary")
    seen = DebugTools(machine="x86_64", py_spy="0.4.3", mode=0o600)
    assert plan(debug_tools.py_spy, seen) == (Run(("chmod", "0755", "/usr/local/bin/py-spy")),)


def test_no_binary_on_the_control_machine_fails_this_one_step(monkeypatch):
    def none(version: str, machine: str) -> bytes:
        raise py_spy_binary.PySpyError("no wheel: put one there")

    monkeypatch.setattr(py_spy_binary, "binary", none)
    with pytest.raises(PlanError, match="no wheel: put one there"):
        plan(debug_tools.py_spy, DebugTools(machine="x86_64"))


def test_the_binary_is_not_touched_when_nothing_is_to_be_done(monkeypatch):
    monkeypatch.delattr(py_spy_binary, "binary")
    assert plan(debug_tools.py_spy, parse(GOOD)) == ()


def test_a_package_name_stays_one_word_in_the_shell():
    text = probe.PROBE.sections[0].script(Policy(packages=("gdb; reboot", "$(x)")))
    assert "for nr_name in 'gdb; reboot' '$(x)'; do" in text

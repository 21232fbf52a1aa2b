"""What a node shows, what is judged, and what would be done: without a node."""

from __future__ import annotations

import pytest

from nodeready.deploy import py_spy_binary
from nodeready.deploy.actions import PlanError, RemoveFile, Run, Script, WriteFile
from nodeready.operations import debug_tools
from nodeready.policy import Policy
from nodeready.subjects.base import Output, ProbeError
from nodeready.subjects.debug_tools import checks
from nodeready.subjects.debug_tools import facts as probe
from nodeready.subjects.debug_tools.facts import DebugTools
from nodeready.subjects.snapshot import Snapshot
from tests.builders.judging import judge_all

DIRECTORIES = "".join(
    f"at=0 0 755 {path}\n" for path in ("/", "/usr/local/bin", "/usr/local", "/usr")
)
NOTE = Script(
    "note", ("nr_note", probe.PY_SPY, probe.PY_SPY_NOTE), f"note the sha256 of {probe.PY_SPY}"
)
KNOWN = probe.DIGESTS["0.4.3", "x86_64"]
OTHER = "0" * 64


def there(row: str = "0 0 755", sha256: str = KNOWN, before: str = DIRECTORIES) -> str:
    """A py-spy with these owner, group and mode, in these directories."""
    return f"machine=x86_64\n{before}at={row} {probe.PY_SPY}\nsha256={sha256}\n"


GOOD = f"have=apt-get\n{there()}"


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
        (f"{there(sha256=OTHER)}version=py-spy 0.4.0\n", {}, ["ok", "fail"]),
        # The right words, and another program.
        (f"{there(sha256=OTHER)}version=py-spy 0.4.3\n", {}, ["ok", "fail"]),
        # A version of which no digest is known counts by its word.
        (f"{there(sha256=OTHER)}version=py-spy 0.3.9\n", {"py_spy_version": "0.3.9"}, ["ok"] * 2),
        (f"{there(sha256=OTHER)}version=\n", {}, ["ok", "fail"]),
        (there("0 0 700"), {}, ["ok", "fail"]),
        (f"{there(sha256=OTHER)}version=py-spy \x1b[2J0.4.3\n", {}, ["ok", "fail"]),
        # Others can change it, or what it stands in.
        (there("1000 0 755"), {}, ["ok", "fail"]),
        (there("0 0 757"), {}, ["ok", "fail"]),
        (there("0 50 775"), {}, ["ok", "fail"]),
        (there(before="at=1000 0 755 /usr/local/bin\n"), {}, ["ok", "fail"]),
        (there(before="at=0 1000 2775 /usr/local/bin\n"), {}, ["ok", "fail"]),
        # Debian's group for that directory.
        (there(before="at=0 50 2775 /usr/local/bin\n"), {}, ["ok", "ok"]),
        ("link=/opt/x\nhops=1\n" + there(), {}, ["ok", "fail"]),
        ("link=/opt/x\n" + there(), {}, ["ok", "ok"]),
        ("link=\nmachine=x86_64\n", {}, ["ok", "fail"]),
        # Without root it may be unreadable, and is not run.
        (there("0 0 755", sha256=""), {}, ["ok", "fail"]),
        ("", {"packages": (), "py_spy_version": ""}, ["na", "na"]),
    ],
)
def test_judged(text, policy, expected):
    assert statuses(parse(text, **policy), **policy) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "machine=\n",
        "machine=$(reboot)\n",
        GOOD.replace("at=0 0 755", "at=0 0 rwx"),
        there(sha256="x"),
    ],
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
    write, note = plan(debug_tools.py_spy, seen)
    assert isinstance(write, WriteFile)
    assert note == NOTE
    assert (write.path, write.mode, write.large) == ("/usr/local/bin/py-spy", "0755", True)
    assert write.content == b"0.4.3 aarch64"
    assert write.describe().startswith("create" if there is None else "change")


def test_a_right_one_that_nobody_may_run_only_gets_its_bits(monkeypatch):
    monkeypatch.delattr(py_spy_binary, "binary")
    seen = DebugTools(machine="x86_64", py_spy="0.4.3", mode=0o600, sha256=KNOWN)
    assert plan(debug_tools.py_spy, seen) == (Run(("chmod", "0755", probe.PY_SPY)), NOTE)


@pytest.mark.parametrize(
    "seen", [{"exposed": (probe.PY_SPY,), "mode": 0o755}, {"linked": True, "py_spy": ""}]
)
def test_what_others_can_change_goes_before_root_s_is_written(monkeypatch, seen):
    """A link would lead to where they want, and a file keeps its owner when it is written."""
    monkeypatch.setattr(py_spy_binary, "binary", lambda version, machine: b"")
    first, write, _ = plan(
        debug_tools.py_spy, DebugTools(**{"machine": "x86_64", "py_spy": "0.4.3", **seen})
    )
    assert first == RemoveFile(probe.PY_SPY)
    assert isinstance(write, WriteFile)
    assert write.old is None


def test_a_directory_of_theirs_is_for_a_person():
    seen = parse(there(before="at=1000 0 755 /usr/local/bin\n"))
    result = judge_all(checks, seen, Policy())[1]
    assert result.owner == "admin"
    assert result.fix == "chown root /usr/local/bin; chmod go-w /usr/local/bin"
    assert plan(debug_tools.py_spy, seen) == ()


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

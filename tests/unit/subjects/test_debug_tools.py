"""What a node shows of its debuggers, what is judged, and what would be done: without a node."""

from __future__ import annotations

from typing import Any

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
THEIRS = there(before="at=1000 0 755 /usr/local/bin\n")


def parse(text: str, **policy: Any) -> DebugTools:
    return probe.parse({"debug_tools": Output(text, 0)}, Policy(**policy))


def plan(step: Any, observed: DebugTools, **policy: Any) -> tuple[Any, ...]:
    change = step.plan(Snapshot({"debug_tools": observed}), Policy(**policy))
    return tuple(change.actions) if change else ()


@pytest.mark.parametrize(
    ("text", "policy", "statuses"),
    [
        (GOOD, {}, "ok ok"),
        ("missing=gdb\n" + GOOD, {}, "fail ok"),
        # The node cannot make us think of a package that the policy does not name.
        ("missing=evil\n" + GOOD, {}, "ok ok"),
        ("machine=x86_64\n", {}, "ok fail"),
        ("machine=riscv64\n", {}, "ok na"),
        (f"{there(sha256=OTHER)}version=py-spy 0.4.0\n", {}, "ok fail"),
        # The right words, and another program.
        (f"{there(sha256=OTHER)}version=py-spy 0.4.3\n", {}, "ok fail"),
        # A version of which no digest is known counts by its word.
        (f"{there(sha256=OTHER)}version=py-spy 0.3.9\n", {"py_spy_version": "0.3.9"}, "ok ok"),
        (f"{there(sha256=OTHER)}version=\n", {}, "ok fail"),
        (there("0 0 700"), {}, "ok fail"),
        (f"{there(sha256=OTHER)}version=py-spy \x1b[2J0.4.3\n", {}, "ok fail"),
        # Others can change it, or what it stands in.
        (there("1000 0 755"), {}, "ok fail"),
        (there("0 0 757"), {}, "ok fail"),
        (there("0 50 775"), {}, "ok fail"),
        (THEIRS, {}, "ok fail"),
        (there(before="at=0 1000 2775 /usr/local/bin\n"), {}, "ok fail"),
        # Debian's group for that directory.
        (there(before="at=0 999 2775 /usr/local/bin\n"), {}, "ok ok"),
        ("link=/opt/x\nhops=1\n" + there(), {}, "ok fail"),
        ("link=/opt/x\n" + there(), {}, "ok ok"),
        ("link=\nmachine=x86_64\n", {}, "ok fail"),
        # Without root it may be unreadable, and is not run.
        (there(sha256=""), {}, "ok fail"),
        ("", {"packages": (), "py_spy_version": ""}, "na na"),
    ],
)
def test_judged(text, policy, statuses):
    results = judge_all(checks, parse(text, **policy), Policy(**policy))
    assert [result.status for result in results] == statuses.split()


@pytest.mark.parametrize(
    "text",
    ["", "machine=\n", "machine=$(reboot)\n", GOOD.replace("at=0 0 755", "at=0 0 rwx"),
     there(sha256="x")],
)  # fmt: skip
def test_answers_that_make_no_sense(text):
    with pytest.raises(ProbeError):
        parse(text)


def test_missing_packages_are_one_script_of_the_preferred_manager():
    assert parse("have=dnf\nhave=zypper\nmachine=x86_64\n").manager == "zypper"
    observed = parse("have=dnf\nmissing=gdb\nmissing=pdsh\n" + GOOD)
    (script,) = plan(debug_tools.packages, observed, package_lock_wait_s=7)
    assert script.argv == ("nr_packages", "apt-get", "7", "gdb", "pdsh")
    assert script.describe() == "install gdb pdsh with apt-get"
    # A package's name stays one word in the shell.
    text = probe.PROBE.sections[0].script(Policy(packages=("gdb; reboot", "$(x)")))
    assert "for nr_name in 'gdb; reboot' '$(x)'; do" in text


@pytest.mark.parametrize(
    ("text", "step", "number", "actual", "fix"),
    [
        ("missing=gdb\nmachine=x86_64\n", debug_tools.packages, 0, "missing: gdb; none of",
         "install gdb the way this distribution does"),
        (THEIRS, debug_tools.py_spy, 1, "others can change /usr/local/bin",
         "chown root /usr/local/bin; chmod go-w /usr/local/bin"),
    ],
)  # fmt: skip
def test_what_no_deploy_repairs_is_a_persons(text, step, number, actual, fix):
    observed = parse(text)
    result = judge_all(checks, observed, Policy())[number]
    assert (result.owner, result.fix) == ("admin", fix)
    assert result.actual.startswith(actual)
    assert plan(step, observed) == ()


@pytest.fixture
def binary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control machine's py-spy, in a few bytes."""
    monkeypatch.setattr(py_spy_binary, "binary", lambda *names: " ".join(names).encode())


@pytest.mark.usefixtures("binary")
def test_py_spy_is_written_whole_with_its_bits():
    for version in (None, "0.4.0", ""):
        observed = DebugTools(machine="aarch64", py_spy=version, mode=0o755)
        write, note = plan(debug_tools.py_spy, observed)
        assert note == NOTE
        assert (write.path, write.mode, write.large) == (probe.PY_SPY, "0755", True)
        assert write.content == b"0.4.3 aarch64"
        assert write.describe().startswith("create" if version is None else "change")


@pytest.mark.parametrize(
    "changes", [{"exposed": (probe.PY_SPY,), "mode": 0o755}, {"linked": True, "py_spy": ""}]
)
@pytest.mark.usefixtures("binary")
def test_what_others_can_change_goes_before_root_s_is_written(changes):
    """A link would lead to where they want, and a file keeps its owner when it is written."""
    tools = DebugTools(**{"machine": "x86_64", "py_spy": "0.4.3", **changes})
    remove, write, _ = plan(debug_tools.py_spy, tools)
    assert remove == RemoveFile(probe.PY_SPY)
    assert isinstance(write, WriteFile)
    assert write.old is None


def test_the_binary_is_read_only_where_it_is_to_be_written(monkeypatch):
    def none(*names: str) -> bytes:
        raise py_spy_binary.PySpyError("no wheel: put one there")

    monkeypatch.setattr(py_spy_binary, "binary", none)
    assert plan(debug_tools.py_spy, parse(GOOD)) == ()
    # The right program that nobody may run gets only its bits.
    observed = DebugTools(machine="x86_64", py_spy="0.4.3", mode=0o600, sha256=KNOWN)
    assert plan(debug_tools.py_spy, observed) == (Run(("chmod", "0755", probe.PY_SPY)), NOTE)
    with pytest.raises(PlanError, match="no wheel: put one there"):
        plan(debug_tools.py_spy, DebugTools(machine="x86_64"))

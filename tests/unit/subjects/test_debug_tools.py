"""What a node shows of its debuggers, what is judged, and what would be done: without a node."""

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from nodeready.core import shell
from nodeready.core.base import Output, ProbeError
from nodeready.core.policy import Policy
from nodeready.operations import debug_tools
from nodeready.runs.deploy import py_spy_binary
from nodeready.runs.deploy.actions import PlanError, RemoveFile, RunCommand, Script, WriteFile
from nodeready.subjects.debug_tools import checks
from nodeready.subjects.debug_tools import facts as probe
from nodeready.subjects.debug_tools.facts import DebugTools, RankProgram
from tests.builders.judging import actions_of, judge_all
from tests.builders.verdicts import policy_of
from tests.cases import cases, read_table
from tests.helpers import executable

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


PYTHON = "python=python3 3.11 a70d0d0a\n"
GOOD = f"have=apt-get\n{there()}"
THEIRS = there(before="at=1000 0 755 /usr/local/bin\n")


def parse(text: str, **policy: Any) -> DebugTools:
    return probe.parse({"debug_tools": Output(text, 0)}, Policy(**policy))


@pytest.mark.parametrize("case", cases(__file__, "data/debug_tools.json"))
def test_judged(case):
    """The packages, and py-spy: of which digest, whose, and in whose directories."""
    names = {"DIRECTORIES": DIRECTORIES.rstrip(), "KNOWN": KNOWN, "OTHER": OTHER}
    names["RUN"] = probe.digest()
    text = "".join(f"{line}\n" for line in case["printed"]).replace("PY_SPY", probe.PY_SPY)
    text += PYTHON
    for name, value in names.items():
        text = text.replace(name, value)
    policy = policy_of(case)
    results = judge_all(checks, probe.parse({"debug_tools": Output(text, 0)}, policy), policy)
    assert [result.status for result in results] == case["statuses"].split()


@pytest.mark.parametrize(("text", "status", "actual", "fix"), read_table(__file__, "pythons"))
def test_the_python_that_starts_the_programs(text, status, actual, fix):
    result = judge_all(checks, parse(f"machine=x86_64\n{text}"), Policy())[2]
    assert (result.check, result.status, result.actual) == ("debug_tools.python", status, actual)
    assert fix in result.fix


@pytest.mark.parametrize(
    "text",
    ["", "machine=\n", "machine=$(reboot)\n", GOOD.replace("at=0 0 755", "at=0 0 rwx"),
     there(sha256="x"), "machine=x86_64\nrun=0 rwx\n"],
)  # fmt: skip
def test_answers_that_make_no_sense(text):
    with pytest.raises(ProbeError):
        parse(text)


def test_missing_packages_are_one_script_of_the_preferred_manager():
    assert parse("have=dnf\nhave=zypper\nmachine=x86_64\n").manager == "zypper"
    observed = parse("have=dnf\nmissing=gdb\nmissing=pdsh\n" + GOOD)
    (script,) = actions_of(debug_tools.packages, observed, Policy(package_lock_wait_s=7))
    assert script.argv == ("nr_packages", "apt-get", "7", "gdb", "pdsh")
    assert script.describe() == "install gdb pdsh with apt-get"
    # A package's name stays one word in the shell.
    text = probe.PROBE.sections[0].script(Policy(packages=("gdb; reboot", "$(x)")))
    assert "for nr_name in 'gdb; reboot' '$(x)'; do" in text


@pytest.mark.parametrize(("text", "step", "number", "actual", "fix"), [
    ("missing=gdb\nmachine=x86_64\n", debug_tools.packages, 0, "missing: gdb; none of",
     "install gdb the way this distribution does"),
    (THEIRS, debug_tools.py_spy, 1, "others can change /usr/local/bin",
     "chown root /usr/local/bin; chmod go-w /usr/local/bin"),
    ("machine=x86_64\nno_file=/usr/local/bin/py-spy\n", debug_tools.py_spy, 1, "a directory",
     "remove /usr/local/bin/py-spy, then nodeready deploy"),
    (f"{PYTHON}machine=x86_64\nno_file=/usr/local/bin/nodeready-run\n", debug_tools.run, 3,
     "a directory", "remove /usr/local/bin/nodeready-run, then nodeready deploy"),
])  # fmt: skip
def test_what_no_deploy_repairs_is_a_persons(text, step, number, actual, fix):
    observed = parse(text)
    result = judge_all(checks, observed, Policy())[number]
    assert (result.owner, result.fix) == ("admin", fix)
    assert result.actual.startswith(actual)
    assert actions_of(step, observed) == ()


@pytest.fixture
def binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(py_spy_binary, "binary", lambda *names: " ".join(names).encode())


@pytest.mark.usefixtures("binary")
def test_py_spy_is_written_whole_with_its_bits():
    for version in (None, "0.4.0", ""):
        observed = DebugTools(machine="aarch64", py_spy=version, mode=0o755)
        write, note = actions_of(debug_tools.py_spy, observed)
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
    remove, write, _ = actions_of(debug_tools.py_spy, tools)
    assert remove == RemoveFile(probe.PY_SPY)
    assert isinstance(write, WriteFile)
    assert write.old is None


def test_the_binary_is_read_only_where_it_is_to_be_written(monkeypatch):
    def none(*names: str) -> bytes:
        raise py_spy_binary.PySpyError("no wheel: put one there")

    monkeypatch.setattr(py_spy_binary, "binary", none)
    assert actions_of(debug_tools.py_spy, parse(GOOD)) == ()
    # The right program that nobody may run gets only its bits.
    observed = DebugTools(machine="x86_64", py_spy="0.4.3", mode=0o600, sha256=KNOWN)
    chmod = RunCommand(("chmod", "0755", probe.PY_SPY))
    assert actions_of(debug_tools.py_spy, observed) == (chmod, NOTE)
    with pytest.raises(PlanError, match="no wheel: put one there"):
        actions_of(debug_tools.py_spy, DebugTools(machine="x86_64"))


WRITTEN = WriteFile(
    probe.RUN,
    probe.content(),
    None,
    mode="0755",
    validator=("sh", "-c", 'sh "$0" --help >/dev/null || { echo "it does not run"; exit 1; }'),
    large=True,
)


@pytest.mark.parametrize(("program", "actions"), [
    (None, (WRITTEN,)),
    (RankProgram(0, 0o755, OTHER), (replace(WRITTEN, old=b""),)),
    (RankProgram(1000, 0o755, OTHER), (RemoveFile(probe.RUN), WRITTEN)),
    (RankProgram(0, 0o4700, probe.digest()), (RunCommand(("chmod", "0755", probe.RUN)),)),
    (RankProgram(0, 0o755, probe.digest()), ()),
])  # fmt: skip
def test_the_program_that_starts_a_rank(program, actions):
    assert actions_of(debug_tools.run, DebugTools(python="python3", run=program)) == actions


def test_no_program_starts_a_rank_without_python():
    assert judge_all(checks, DebugTools(), Policy())[3].status == "na"


def test_the_magic_numbers_are_those_of_the_pythons_here(pythons):
    ask = "import importlib.util; print(importlib.util.MAGIC_NUMBER.hex())"
    for (major, minor), python in pythons.items():
        if (major, minor) >= shell.OLDEST:
            done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
            # A release that is newer than the table is started.
            magic = done.stdout.strip()
            assert shell.MAGICS.get(f"{major}.{minor}", magic) == magic


@pytest.mark.parametrize(("release", "has_module", "found"), [
    ("python3.11", True, "python3 3.11 a70d0d0a"),
    ("python3.11", False, "python3 7.7"),
    ("python3.99", True, "python3 7.7"),
    ("", True, "python3 7.7"),
])  # fmt: skip
def test_only_a_release_with_its_files_is_not_started(
    posix_sh, tmp_path, release, has_module, found
):
    executable(tmp_path / "bin" / (release or "python3"), "echo 7.7")
    if release:
        (tmp_path / "bin/python3").symlink_to(release)
    module = tmp_path / "lib64/python3.11/encodings/__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text("1\n" if has_module else "")
    done = subprocess.run(
        [*(f"/bin/{word}" for word in posix_sh[:1]), *posix_sh[1:], "-c", shell.SCRIPT],
        capture_output=True, text=True, check=True, env={"PATH": f"{tmp_path}/bin"},
    )  # fmt: skip
    assert done.stdout.splitlines()[0] == f"python={found}"

"""Another user of the control machine, into whose directory root has gone, runs nothing as root.

The directory is full of traps: each is named like something that Python, a shell, pip, gdb or
pyinfra looks for, and leaves a mark when it runs.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases import read_table
from tests.lab.rows import rows
from tests.paths import ROOT

OTHER = 4001
BIN = Path(sys.executable).parent
#: Modules of the standard library, of what is installed beside us, and what is looked for in vain.
MODULES = read_table(__file__, "MODULES")
PROGRAMS = read_table(__file__, "PROGRAMS")
#: What names a program or a module to import, in a file of its own.
FILES = read_table(__file__, "FILES")


class Traps:
    """The directory, and which of its traps have run."""

    def __init__(self, place: Path, marks: Path) -> None:
        self.place, self.marks = place, marks
        marks.mkdir(mode=0o755)
        place.mkdir(mode=0o755)
        for name in MODULES:
            (place / f"{name}.py").write_text(self._python(name))
        for name in PROGRAMS:
            (place / name).write_text(f"#!/bin/sh\n: >{marks}/{name}.program\nexit 1\n")
            (place / name).chmod(0o755)
        for name, text in FILES.items():
            (place / name).write_text(text.replace("MARKS", str(marks)))
        self._give()

    def _python(self, name: str) -> str:
        return f"open({str(self.marks / name)!r}, 'w').close()\n"

    def add(self, name: str, mark: str) -> None:
        (self.place / name).parent.mkdir(exist_ok=True)
        (self.place / name).write_text(self._python(mark))
        self._give()

    def _give(self) -> None:
        for path in (self.place, *self.place.rglob("*")):
            os.chown(path, OTHER, OTHER)

    def take(self) -> list[str]:
        """The names of the traps that have run; they are set again."""
        found = sorted(self.marks.iterdir())
        for path in found:
            path.unlink()
        return [path.name for path in found]


@pytest.fixture
def traps(tmp_path: Path) -> Traps:
    if os.geteuid():
        pytest.skip("only root can give a directory to another user")
    return Traps(tmp_path / "theirs", tmp_path / "marks")


@pytest.fixture
def run(traps: Traps, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A command of root's with her directory as the current one."""
    home = tmp_path / "home"
    home.mkdir()

    def run(*words: object, path: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        clean = {"HOME": str(home), "PATH": f"{path}{BIN}:{os.environ['PATH']}", **more}
        return subprocess.run(
            [*map(str, words)],
            cwd=traps.place,
            env={"PYTHONDONTWRITEBYTECODE": "1", "PIP_NO_INDEX": "1", **clean},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


#: Where PATH leads -> how the command is started.
OWN = [BIN / "nodeready"]
STARTS = {"../theirs:": OWN, ":": OWN, ".:": [sys.executable, "-I", "-m", "nodeready"]}


def test_the_traps_would_run(traps, run):
    """Each kind does where nobody takes care."""
    run(sys.executable, "-m", "pip", "--version")
    run(sys.executable, "-c", "import sitecustomize, click", PYTHONPATH=":/nowhere")
    run("/bin/sh", "-c", "sinfo", path=".:")
    assert {"pip", "sitecustomize", "click", "sinfo.program"} <= {*traps.take()}


@pytest.mark.parametrize("path", rows(STARTS, "../theirs:"))
def test_no_code_of_the_current_directory_runs(traps, run, fresh_node, fleet, path):
    """Of any command, wherever PATH leads: a deploy that needs pip, an inventory of Slurm's."""
    # A py-spy which no control machine has.
    inventory = fleet([fresh_node], py_spy_version="0.3.99")
    sprung = []
    for words in (
        ("audit", inventory, "--format", "json"),
        ("deploy", inventory, "--yes", "--only", "ptrace,debug_tools"),
        ("stacks", "--local", "--pid", "1"),
        ("ready", "--local", "--only", "proof.limits,proof.attach"),
        ("audit", ROOT / "inventories" / "slurm.py"),
        ("lab", "status"),
        ("bundle", "-o", traps.marks.parent / "nodeready.pyz"),
    ):
        done = run(*STARTS[path], *words, path=path)
        assert "Traceback" not in done.stdout + done.stderr, (words, done)
        sprung += [(words[0], name) for name in traps.take()]
    assert sprung == []
    assert fresh_node.run("sysctl -n kernel.yama.ptrace_scope").stdout == "0\n"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 looks for runpy there first")
@pytest.mark.parametrize("path", [".:", pytest.param("", marks=pytest.mark.nightly)])
def test_nor_by_the_module(traps, run, path):
    """`python -m nodeready`, but for a package of our very name: Python finds that before ours."""
    (traps.place / "nodeready.py").unlink()
    for words in (("--version",), ("audit", "@local", "--only", "host"), ("lab", "status")):
        done = run(sys.executable, "-m", "nodeready", *words, path=path)
        assert "Traceback" not in done.stdout + done.stderr, done
        assert traps.take() == [], (words, done)
    assert "nodeready, version" in run(sys.executable, "-m", "nodeready", "--version").stdout


def test_an_inventory_imports_nothing_from_there(traps, run, tmp_path):
    """pyinfra lets an inventory import from the current directory: not from another user's."""
    traps.add("site_names.py", "site_names")
    inventory = tmp_path / "inventory.py"
    inventory.write_text(
        "try:\n    from site_names import nodes\nexcept ImportError:\n    nodes = ['@local']\n"
    )
    done = run(BIN / "nodeready", "audit", inventory, "--only", "host")
    assert traps.take() == [], done
    assert "1 node" in done.stdout, done


def test_no_group_data_of_there_is_run(traps, run, fresh_node, fleet):
    """It is refused by name, before a node is asked; in a directory of root's it is run."""
    traps.add("group_data/all.py", "group_data")
    for words in (("audit", fleet([fresh_node])), ("deploy", "@local", "--check")):
        done = run(BIN / "nodeready", *words)
        assert done.returncode == 2, done
        assert f"{traps.place}/group_data/all.py is not taken by root" in done.stderr, done
        assert traps.take() == []
    for path in (traps.place, *traps.place.rglob("*")):
        os.chown(path, 0, 0)
    assert run(BIN / "nodeready", "audit", "@local", "--only", "host").returncode in {0, 3}
    assert traps.take() == ["group_data"]


def test_the_node_s_own_program_runs_nothing_of_there(traps, run, tmp_path):
    """The one file that `nodeready bundle` makes, by hand."""
    program = tmp_path / "nodeready.pyz"
    run(BIN / "nodeready", "bundle", "-o", program)
    for words in (("audit",), ("ready",), ("--version",)):
        for path in ("", ".:"):
            python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
            done = run(python, "-I", program, *words, path=path)
            assert "Traceback" not in done.stdout + done.stderr, done
            assert traps.take() == [], (words, done)

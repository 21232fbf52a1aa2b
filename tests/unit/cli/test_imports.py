"""What a command imports before it does anything."""

import json
import subprocess
import sys
from typing import Any

import pytest

from nodeready.cli import _COMMANDS
from nodeready.core.exit_codes import Refused
from nodeready.runs import targets
from tests.cases import read_table

#: Packages that take long to load: only commands that talk to nodes or show a table need them.
HEAVY = {"pyinfra", "gevent", "paramiko", "rich", "jinja2"}
#: The commands whose help is asked for most load no check: that takes three times as long.
QUICK = ("audit", "ready", "diff", "history", "lemons")
CHECKS = "nodeready.subjects.registry"

# Argument 1: (words, environment) of each command line as JSON, one after the other.
_RUN = """
import contextlib, io, json, os, sys
from nodeready.cli import main
heavy, rows = set(json.loads(sys.argv[2])), []
for words, environment in json.loads(sys.argv[1]):
    os.environ.update(environment)
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with contextlib.redirect_stdout(out):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code
    loaded = heavy & ({name.partition(".")[0] for name in sys.modules} | {*sys.modules})
    rows.append([code, out.buffer.getvalue().decode(), sorted(loaded)])
print(json.dumps(rows))
"""


def run_lines(
    *lines: tuple[list[str] | None, dict[str, str]], heavy: set[str] = HEAVY
) -> tuple[list[Any], str]:
    """Exit code, output and loaded modules of ``heavy`` of each command line; standard error."""
    argv = [sys.executable, "-c", _RUN, json.dumps(lines), json.dumps(sorted(heavy))]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), done.stderr


def test_help_imports_nothing_that_talks_to_nodes():
    words = [["--help"], ["--version"], ["-h"], *([name, "--help"] for name in _COMMANDS)]
    rows, errors = run_lines(*((line, {}) for line in words))
    assert errors == ""
    for line, (code, out, heavy) in zip(words, rows, strict=True):
        assert (code, heavy) == (0, []), line
        assert out, line


def test_the_help_of_the_daily_commands_loads_no_check():
    rows, _ = run_lines(*(([name, "--help"], {}) for name in QUICK), heavy={CHECKS})
    assert [heavy for _, _, heavy in rows] == [[]] * len(QUICK)


@pytest.mark.parametrize(
    ("words", "most"), [(["--version"], 55), (["--help"], 106), (["audit", "--help"], 138)]
)
def test_the_start_imports_few_modules(words, most):
    argv = [sys.executable, "-X", "importtime", "-m", "nodeready", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr.count("import time:") <= most


def test_an_audit_of_this_machine_imports_neither_pyinfra_nor_other_commands():
    words = ["audit", "@local", "--only", "ptrace.scope"]
    heavy = {"pyinfra", "paramiko", "jinja2", "nodeready.agent.failures.rules"}
    ((code, out, loaded),), errors = run_lines((words, {"NODEREADY_MEMORY": "off"}), heavy=heavy)
    assert (code in (0, 3), loaded, errors) == (True, [], "")
    assert "@local" in out


def test_this_machine_is_the_same_with_and_without_pyinfra(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    plain = targets.undeclared_local("@local", targets.TargetOptions())
    assert plain is not None
    loaded = targets.select_targets("@local", targets.TargetOptions(), job=None, tell=print)
    assert (plain.policies, plain.transport.nodes) == (loaded.policies, loaded.transport.nodes)
    for inventory, options in read_table(__file__, "declared"):
        assert targets.undeclared_local(inventory, targets.TargetOptions(**options)) is None
    (tmp_path / "group_data").mkdir()
    assert targets.undeclared_local("@local", targets.TargetOptions()) is None


def test_completion_imports_nothing_that_talks_to_nodes_and_says_what_the_help_says():
    lines = {f"nodeready {name} --": "--help" for name in _COMMANDS}
    lines |= {"nodeready au": "audit", "nodeready audit --format js": "json"}
    lines |= {"nodeready explain ptrace.s": "ptrace.scope", "nodeready audit @loc": "@local"}
    lines |= {"nodeready lab up --fault no-dr": "no-driver"}
    lines |= {"nodeready audit -l @l": "@last-failed"}
    requests = [
        (None, {"_NODEREADY_COMPLETE": "zsh_complete", "COMP_WORDS": line,
                "COMP_CWORD": str(len(line.split()) - 1)})
        for line in lines
    ]  # fmt: skip
    rows, errors = run_lines(*requests)
    assert errors == ""
    for (line, word), (code, out, heavy) in zip(lines.items(), rows, strict=True):
        assert (code, heavy) == (0, []), line
        assert word in out.splitlines(), line
        if line == "nodeready au":
            assert _COMMANDS["audit"] in out


@pytest.mark.parametrize("name", ["audit", "stacks"])
def test_what_talks_to_nodes_is_imported_into_a_patched_library(name):
    """gevent would warn of modules that were there before it, on standard error."""
    ((code, _, heavy),), errors = run_lines(([name, "--nosuch"], {}))
    assert code == 2
    assert errors == f"nodeready: No such option '--nosuch'.\nTry 'nodeready {name} --help'.\n"
    assert "gevent" in heavy


def test_a_user_without_a_name_is_told_before_any_node_is_asked(monkeypatch, tmp_path):
    """A container's ``-u``: ssh says the same. This machine can be looked at without a name."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(targets.os, "getuid", lambda: 4_000_000)
    common = targets.TargetOptions()
    for ask, given in (
        (targets.ssh_targets, {"note": print}),
        (targets.select_targets, {"job": None, "tell": print}),
    ):
        with pytest.raises(Refused, match="no user has the id 4000000: ssh needs a name"):
            ask("gpu001", common, **given)
        assert [*ask("@local", common, **given).policies] == ["@local"]

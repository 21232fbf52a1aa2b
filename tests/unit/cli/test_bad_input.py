"""A user's mistake: one line that says where it is and what to do, exit 2, and no node touched."""

from __future__ import annotations

import re

import pytest

GOOD = "gpu = ['gpu001', 'gpu002']\nlogin = ['login1']\n"

#: files, words of the command, what the one line says
MISTAKES = {
    "no inventory": ({}, ["deploy", "nosuch.py"], r"no such inventory file: nosuch\.py"),
    "a similar one": (
        {"prod.py": GOOD},
        ["deploy", "prd.py"],
        r"no such inventory file: prd\.py; did you mean prod\.py\?",
    ),
    "an empty one": ({"x.py": "lab = []\n"}, ["deploy", "x.py"], r".*x\.py.* names no node.*"),
    "an empty file": ({"x.py": ""}, ["audit", "x.py"], r".*x\.py.* names no node.*"),
    "an empty name": ({}, ["audit", ""], r".*names no node.*"),
    "a syntax error": ({"x.py": "a = 1\nlab = [\n"}, ["audit", "x.py"], r".*x\.py:2: .+"),
    "it raises": (
        {"x.py": "import os\nlab = [1 / 0]\n"},
        ["audit", "x.py"],
        r".*x\.py:2: ZeroDivisionError: division by zero",
    ),
    "it exits": ({"x.py": "raise SystemExit(0)\n"}, ["audit", "x.py"], r".*x\.py:1: SystemExit.*"),
    "it is no text": ({"x.py": "\x00\x01"}, ["audit", "x.py"], r".*x\.py.*"),
    "a directory": ({"x/y": ""}, ["audit", "x"], r".*is a directory: name an inventory file.*"),
    "a misspelt setting": (
        {"x.py": GOOD, "group_data/all.py": "ptrace_scop = 0\n"},
        ["deploy", "x.py"],
        r".*group_data/all\.py: unknown setting ptrace_scop: did you mean ptrace_scope\?",
    ),
    "a setting of one group": (
        {"x.py": GOOD, "group_data/gpu.py": "port_range = (2, 1)\n"},
        ["deploy", "x.py"],
        r".*group_data/gpu\.py: port_range = \(2, 1\): is the wrong way round.*",
    ),
    "a group_data file that fails": (
        {"x.py": GOOD, "group_data/gpu.py": "x = undefined\n"},
        ["deploy", "x.py"],
        r".*group_data/gpu\.py:1: NameError: .*",
    ),
    "a port in words": (
        {"x.py": "gpu = [('gpu001', {'ssh_port': 'x'})]\n"},
        ["deploy", "x.py"],
        r"host gpu001: ssh_port = 'x': must be a whole number from 1 to 65535.*",
    ),
    "a port for a group": (
        {"x.py": GOOD, "group_data/gpu.py": "ssh_port = 70000\n"},
        ["deploy", "x.py"],
        r".*group_data/gpu\.py: ssh_port = 70000: must be a whole number from 1 to 65535.*",
    ),
    "a user that is none": (
        {"x.py": GOOD},
        ["deploy", "x.py", "--ssh-user", "-l root"],
        r"command line: ssh_user = '-l root': must be the name of a user",
    ),
    "an unknown node": (
        {"x.py": GOOD},
        ["deploy", "x.py", "--limit", "gpu001,gpu02"],
        r"--limit: no node or group gpu02 in the inventory; did you mean gpu002\?",
    ),
    "no node": ({"x.py": GOOD}, ["deploy", "x.py", "--limit", ""], r"--limit.* selects no node.*"),
    "a broken node set": ({"x.py": GOOD}, ["audit", "x.py", "--limit", "gpu[1-"], r"--limit: .*"),
    "none failed last time": (
        {"x.py": GOOD},
        ["deploy", "x.py", "--limit", "@last-failed"],
        r"--limit @last-failed: no node failed in the last run",
    ),
    "an unknown subject": (
        {"x.py": GOOD},
        ["deploy", "x.py", "--only", "ptrase"],
        r"--only ptrase: no such check or subject; did you mean ptrace\?",
    ),
    "no subject": (
        {"x.py": GOOD},
        ["deploy", "x.py", "--only", ","],
        r"--only: no check or subject named",
    ),
    "no such key": (
        {"x.py": GOOD},
        ["deploy", "x.py", "--ssh-key", "nosuch"],
        r".*'--ssh-key'.*: File 'nosuch' does not exist\.",
    ),
    "an unknown option": ({}, ["deploy", "--nosuch"], r"No such option.*--nosuch.*"),
    "an unknown command": ({}, ["deplyo", "x"], r"No such command 'deplyo'.*"),
    "an argument missing": ({}, ["deploy"], r"Missing argument 'INVENTORY'\."),
    "one too many": ({}, ["deploy", "a", "b"], r"Got unexpected extra argument.*"),
    "a choice": ({}, ["deploy", "a", "--color", "x"], r".*'--color'.*: 'x' is not one of .*"),
    "a broken user file": (
        {"home/.config/nodeready/config.toml": "limit =\n"},
        ["deploy", "x.py"],
        r".*config\.toml: .*line 1.*",
    ),
    "an unknown table in it": (
        {"home/.config/nodeready/config.toml": "[deplyo]\nlimit = 'x'\n"},
        ["deploy", "x.py"],
        r".*config\.toml: \[deplyo\] is no command.*",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_one_line_and_exit_2(case, tool, tmp_path):
    files, words, pattern = MISTAKES[case]
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    done = tool(*words, cwd=tmp_path)
    assert (done.status, done.out) == (2, ""), done
    first, *rest = done.lines
    assert re.fullmatch(f"nodeready: {pattern}", first), done
    # Where the command line itself is wrong, its help helps.
    assert all(re.fullmatch(r"Try 'nodeready.* --help'\.", line) for line in rest), done
    assert len(rest) <= 1, done
    assert not (tool.home / ".local").exists()


def test_every_problem_of_a_policy_is_told(tool, tmp_path):
    (tmp_path / "x.py").write_text(GOOD)
    (tmp_path / "group_data").mkdir()
    (tmp_path / "group_data" / "all.py").write_text("ptrace_scope = 7\ncore_pattern = 'core'\n")
    (tmp_path / "group_data" / "login.py").write_text("limit_core = -1\n")
    done = tool("deploy", "x.py", cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    for problem in (
        "all.py: ptrace_scope = 7: must be between 0 and 2",
        "all.py: core_pattern = 'core': must be an absolute path",
        "login.py: limit_core = -1: must be",
    ):
        assert sum(problem in line for line in done.lines) == 1, (problem, done)
    assert all(line.startswith("nodeready: ") for line in done.lines), done

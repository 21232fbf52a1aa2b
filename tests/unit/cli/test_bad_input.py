"""A user's mistake: one line that says where it is and what to do, exit 2, and no node touched."""

import os
import re

import pytest

from tests.cases import cases, read_table

GOOD = "gpu = ['gpu001', 'gpu002']\nlogin = ['login1']\n"


@pytest.mark.parametrize("case", cases(__file__, "data/bad_input.json"))
def test_a_mistake_is_one_line_and_exit_2(case, tool, tmp_path):
    """A file with the content GOOD is an inventory without a mistake; `says`: a pattern."""
    for name, content in case["files"].items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(GOOD if content == "GOOD" else content)
    done = tool(*case["words"], cwd=tmp_path)
    assert (done.status, done.out) == (2, ""), done
    first, *rest = done.lines
    assert re.fullmatch(f"nodeready: {case['says']}", first), done
    # Where the command line itself is wrong, its help helps.
    assert all(re.fullmatch(r"Try 'nodeready.* --help'\.", line) for line in rest), done
    assert len(rest) <= 1, done
    assert not (tool.home / ".local").exists()


def test_every_problem_of_a_policy_is_a_line(tool, tmp_path):
    (tmp_path / "x.py").write_text(GOOD)
    (tmp_path / "group_data").mkdir()
    (tmp_path / "group_data" / "all.py").write_text("ptrace_scope = 7\ncore_pattern = 'core'\n")
    (tmp_path / "group_data" / "login.py").write_text("limit_core = -1\n")
    done = tool("deploy", "x.py", cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    for problem in ("all.py: ptrace_scope = 7: ", "core_pattern = 'core': ", "limit_core = -1: "):
        assert sum(problem in line for line in done.lines) == 1, (problem, done)
    assert all(line.startswith("nodeready: ") for line in done.lines), done


#: Words of a command -> the file, beside an inventory, that they make it read.
READ_FILES = read_table(__file__, "READ_FILES")


@pytest.mark.parametrize("words", READ_FILES)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(words, tool, tmp_path):
    (tmp_path / "x.py").write_text(GOOD)
    name = READ_FILES[words]
    path = tool.home / name[3:] if name.startswith("../") else tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    done = tool(*words.split(), cwd=tmp_path)
    assert (done.status, done.out, len(done.lines)) == (2, "", 1), done
    assert path.name in done.err

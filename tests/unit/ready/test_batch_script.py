"""What is wrong in a batch script. Each row of knowledge/batch_scripts.toml has its examples."""

import json

import pytest

from nodeready.runs.ready.batch_script import RULES, check, lines_of
from tests.cases import read_table

RIGHT = read_table(__file__, "RIGHT")
LINES = read_table(__file__, "LINES")


@pytest.mark.parametrize("script", RIGHT.values(), ids=RIGHT)
def test_a_right_script_has_no_finding(script):
    assert check("\n".join(script)) == ()


@pytest.mark.parametrize(("script", "lines"), LINES)
def test_a_variable_is_expanded_by_the_script_or_by_the_task(script, lines):
    assert [text for _, text in lines_of(script)[1:]] == list(lines)


def test_a_long_script_is_read_in_time():
    """A command has a bound, and so have the values of its variables."""
    for part in (
        "srun x $A ",
        "srun bash -c '$A' ",
        "\\\n",
        "A=$A$A\n",
        "<<E ",
    ):
        check("#!/bin/bash\n#SBATCH -N 2\n" + part * (60_000 // len(part)))


def test_the_command_says_where_and_what_to_do(tmp_path, tool):
    script = tmp_path / "train.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --gpus=16 -N 2\nsrun torchrun t.py\n")
    wrong = tool("env", "--check", script)
    first, advice, _ = wrong.out.split("\n")
    assert first == f"{script}:3: without --nnodes each node runs a job of its own"
    assert (wrong.status, advice[:24]) == (3, "    torchrun --nnodes $S")
    document = json.loads(tool("env", "--check", script, "--format", "json").out)
    assert document["rules"] == len(RULES)
    assert [finding["rule"] for finding in document["findings"]] == ["one-job-per-node"]
    script.write_text("#!/bin/bash\nhostname\n")
    right = tool("env", "--check", script)
    assert (right.status, right.out) == (0, f"{script}: right by all {len(RULES)} rules\n")
    script.write_bytes(b"\x7fELF\0")
    for words in ([script], [tmp_path], [tmp_path / "none"], [script, "gpu1"]):
        refused = tool("env", "--check", *words)
        assert (refused.status, refused.err.count("\n")) == (2, 1)

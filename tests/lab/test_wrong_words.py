"""A wrong word ends a command before it asks a node: one line that names it, and exit status 2."""

import json
import shlex
from pathlib import Path

from tests.lab.batch import Line, run_batch

#: Command line -> a part of its one line.
ROWS = json.loads(Path(__file__).with_name("wrong_words.json").read_text())


def test_a_wrong_word_is_one_line_and_exit_2(tool, tmp_path):
    (tool.home / "text").write_text("hello\n")
    # Without srun.
    ended = run_batch(tool, [Line(shlex.split(row)) for row in ROWS], env={"PATH": str(tmp_path)})
    wrong = {}
    for (row, part), done in zip(ROWS.items(), ended, strict=True):
        lines = [line for line in done.lines if not line.startswith("Try ")]
        if (done.status, done.out, len(lines)) != (2, "", 1) or part not in done.err:
            wrong[row] = done
    assert wrong == {}

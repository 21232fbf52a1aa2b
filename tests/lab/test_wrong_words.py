"""A wrong word ends a command before it asks a node: one line that names it, and exit status 2."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

#: Command line -> a part of its one line.
ROWS = json.loads(Path(__file__).with_name("wrong_words.json").read_text())

#: One interpreter for all lines: each runs in a child of its own.
EACH = """
import json, os, sys
import click
from nodeready.cli import cli
lines, ended = json.loads(sys.argv[1]), []
for name in {words[0] for words in lines}:
    cli.get_command(click.Context(cli), name)
for words in lines:
    out, err = os.memfd_create("out"), os.memfd_create("err")
    if not (child := os.fork()):
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.argv[1:] = words
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ended.append([status, *(os.pread(file, 1 << 20, 0).decode() for file in (out, err))])
else:
    print(json.dumps(ended))
    sys.exit()
"""


def test_a_wrong_word_is_one_line_and_exit_2(tool, tmp_path):
    (tool.home / "text").write_text("hello\n")
    lines = json.dumps([shlex.split(line) for line in ROWS])
    # Without srun.
    done = tool(lines, first=EACH, env={"PATH": str(tmp_path)})
    assert done.status == 0, done
    wrong = {}
    for (line, part), (status, out, err) in zip(ROWS.items(), json.loads(done.out), strict=True):
        rest = [row for row in err.splitlines() if not row.startswith("Try ")]
        if (status, out, len(rest)) != (2, "", 1) or part not in err:
            wrong[line] = (status, out, err)
    assert wrong == {}

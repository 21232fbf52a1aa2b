"""Many command lines in one interpreter, for commands that end before they ask a node."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.command import Done, Tool

#: Each line runs in a child of its own, as the rest of the program.
_FORK = """
import json, os, sys
import click
from nodeready.cli import cli
import nodeready.fleet.inventory.host_data  # once, not in each child
lines, ended = json.loads(sys.argv[1]), []
for name in {words[0] for words, _, _ in lines}:
    cli.get_command(click.Context(cli), name)
for words, directory, variables in lines:
    out, err = os.memfd_create("out"), os.memfd_create("err")
    if not (child := os.fork()):
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(directory)
        os.environ.update(variables)
        sys.argv[1:] = words
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ended.append([status, *(os.pread(file, 1 << 20, 0).decode() for file in (out, err))])
else:
    print(json.dumps(ended))
    sys.exit()
"""


@dataclass
class Line:
    """A command line: its words, its directory ("": the home of `tool`), and its environment."""

    words: Iterable[object]
    directory: Path | str = ""
    env: dict[str, str] = field(default_factory=dict)


def run_batch(tool: Tool, lines: Iterable[Line], **how: Any) -> list[Done]:
    """How each line ended, in their order."""
    told = [
        [[str(word) for word in line.words], str(line.directory or tool.home), line.env]
        for line in lines
    ]
    done = tool(json.dumps(told), first=_FORK, **how, status=0)
    return [Done(*ended) for ended in json.loads(done.out)]

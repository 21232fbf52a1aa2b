"""The command in a fork of the tests' process, which has imported what it talks to nodes with.

A command line that talks to nodes takes most of its time to import that. Another command line, and
one with streams of the test's own (a terminal), is a process of its own as in tests/command.py.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

import nodeready.cli
from nodeready.cli import cli, main
from tests.command import Done, Tool

#: The first words of the command lines that fork: commands that talk to nodes, and others.
TALKING = ("audit", "ready", "deploy", "tail", "stacks", "cores", "diff", "lemons")
WARM = (*TALKING, "env", "learn", "explain", "--version", "--help")


@pytest.fixture(scope="session")
def warm() -> None:
    """Import the commands, and what they import when they are at it."""
    for name in TALKING:
        cli.get_command(None, name)  # type: ignore[arg-type]
    for name in (
        "cli.screen", "fleet.inventory.load", "fleet.transport.ssh", "subjects.gate.files",
        "runs.cores", "runs.tail", "reports.triage_tables",
    ):  # fmt: skip
        importlib.import_module(f"nodeready.{name}")


class ForkedTool(Tool):
    """`nodeready`, forked where its first word is one of WARM."""

    def __call__(self, *words: object, **how: Any) -> Done:
        said = [str(word) for word in words]
        # scripts/mutation.py: which test a line belongs to, a process of its own knows.
        is_cold = "NODEREADY_COLD" in os.environ
        if is_cold or not said or said[0] not in WARM or how.keys() - {"cwd", "env"}:
            return super().__call__(*words, **how)
        streams = [os.devnull, *(str(self.home.parent / name) for name in ("out", "err"))]
        pid = os.fork()
        if not pid:
            self._become(said, streams, how)
        _, status = os.waitpid(pid, 0)
        texts = [Path(name).read_bytes().decode(errors="surrogateescape") for name in streams[1:]]
        return Done(os.waitstatus_to_exitcode(status), *texts)

    def _become(self, words: list[str], streams: list[str], how: dict[str, Any]) -> NoReturn:
        status: Any = 1
        try:
            for number, name in enumerate(streams):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
            sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), "rww")
            # Nobody waits here for many nodes: gevent would look at all that the tests have made.
            nodeready.cli.patch = lambda: None
            environment = self.environment(**(how.get("env") or {}))
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(how.get("cwd", self.home))
            main(words)
        except SystemExit as end:
            status = end.code or 0
        except BaseException:  # noqa: BLE001 - it ends here, in words
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


@pytest.fixture
def tool(tmp_path: Path, warm: None) -> Iterator[ForkedTool]:
    """`nodeready` in an empty home; tests/command.py has one that is always its own process."""
    home = tmp_path / "home"
    home.mkdir()
    tool = ForkedTool(home)
    yield tool
    tool.finish()

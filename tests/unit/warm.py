"""The command in a process that is forked from one with everything imported.

A command line that talks to nodes takes most of its time to import what it talks with. Here it is
imported once; what is asked runs in a child of that process, with an environment, a directory and
streams of its own, from the command line to the exit code. Another command line, and one with
streams of the test's own (a terminal), is a process of its own as in tests/command.py.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import LIMIT_S, Done, Tool
from tests.paths import ROOT

#: Commands that talk to nodes, and the first words of the command lines that fork.
_COMMANDS = ["audit", "ready", "deploy", "tail", "stacks", "cores"]
WARM = (*_COMMANDS, "env", "learn", "explain", "--version", "--help")

_SERVER = f"""
import importlib, json, os, socket, sys, traceback
from nodeready.cli import cli, main, patch
patch()
from gevent.monkey import get_original
for name in {_COMMANDS}:
    cli.get_command(None, name)
# What those import when they are at it.
for name in (
    "cli.screen", "fleet.inventory.load", "fleet.transport.ssh", "subjects.gate.files",
    "runs.cores", "runs.tail", "reports.triage_tables",
):
    importlib.import_module("nodeready." + name)
waitpid = get_original("os", "waitpid")
asked = socket.socket(fileno=int(sys.argv[1]))
while True:
    data, fds, _, _ = socket.recv_fds(asked, 1 << 20, 3)
    if not data:
        break
    pid = os.fork()
    if pid:
        _, status = waitpid(pid, 0)
        for fd in fds:
            os.close(fd)
        asked.sendall(b"%d\\n" % os.waitstatus_to_exitcode(status))
        continue
    code = 1
    try:
        asked.close()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        told = json.loads(data)
        os.environ.clear()
        os.environ.update(told["environment"])
        os.chdir(told["cwd"])
        main(told["words"])
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
"""


class Server:
    """The process with everything imported."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(LIMIT_S)
        argv = [sys.executable, "-c", _SERVER, str(theirs.fileno())]
        self._process = subprocess.Popen(argv, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()

    def run(self, words: list[str], environment: dict[str, str], cwd: Path, at: Path) -> Done:
        """What the command says, and how it ends. at: a directory for its output."""
        told = {"words": words, "environment": environment, "cwd": str(cwd)}
        paths = at / "stdout", at / "stderr"
        with open(os.devnull) as nothing, paths[0].open("wb") as out, paths[1].open("wb") as err:
            fds = [file.fileno() for file in (nothing, out, err)]
            socket.send_fds(self._socket, [json.dumps(told).encode()], fds)
        status = int(self._socket.recv(64))
        texts = [path.read_bytes().decode(errors="surrogateescape") for path in paths]
        return Done(status, *texts)

    def end(self) -> None:
        self._socket.close()
        self._process.wait(timeout=LIMIT_S)


class WarmTool(Tool):
    """`nodeready`, forked where its first word is one of WARM."""

    def __init__(self, home: Path, server: Server, at: Path) -> None:
        super().__init__(home)
        self._server, self._at = server, at

    def __call__(self, *words: object, **how: Any) -> Done:
        said = [str(word) for word in words]
        # scripts/mutation.py: which test a line belongs to, a process of its own knows.
        is_cold = "NODEREADY_COLD" in os.environ
        if is_cold or not said or said[0] not in WARM or how.keys() - {"cwd", "env"}:
            return super().__call__(*words, **how)
        environment = self.environment(**(how.get("env") or {}))
        return self._server.run(said, environment, how.get("cwd", self.home), self._at)


@pytest.fixture(scope="session")
def warm() -> Iterator[Server]:
    server = Server()
    yield server
    server.end()


@pytest.fixture
def tool(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, warm: Server
) -> Iterator[WarmTool]:
    """`nodeready` in an empty home; tests/command.py has one that is always its own process."""
    home = tmp_path / "home"
    home.mkdir()
    tool = WarmTool(home, warm, tmp_path_factory.mktemp("said"))
    yield tool
    tool.finish()

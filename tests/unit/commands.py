"""A whole command on nodes that answer as a test says: its output, and its exit code."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from nodeready.agent.asking import Answer, Request
from nodeready.cli import cli
from nodeready.core.outcome import LOST, UNREACHABLE
from nodeready.core.policy import Policy
from nodeready.fleet.inventory import load as inventory
from nodeready.runs import targets
from tests.builders.hostile import recorded, shows
from tests.fake import Does, Fake, fails

#: Nobody could connect.
AWAY = fails(UNREACHABLE, "n: no answer in 15 s")
#: The connection ended in the middle.
DIES = fails(LOST, "connection lost")
#: A recorded node.
SOUND = shows(recorded("h100"))


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    transport: Fake


def pyinfra(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    argv = [Path(sys.executable).with_name("pyinfra"), *words]
    return subprocess.run(
        argv, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def looks(then: Does, look: Does = SOUND) -> Does:
    """A node that was recorded, and does that when it is asked for more than a snapshot."""
    return lambda request: (look if request.mark.startswith("nodeready/1 ") else then)(request)


def program(answer: Callable[[str], str]) -> Does:
    """A node whose program prints this, made of the nonce that the program was told."""

    def does(request: Request) -> Answer:
        _, _, rest = (request.payload or "").partition("'nonce': '")
        return Answer(answer(rest.partition("'")[0]))

    return does


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: Any) -> Callable[..., Done]:
    """``run(nodes, command, *words)``; ``policy`` is every node's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")

    def go(
        nodes: Mapping[str, Does], name: str, *words: str, policy: Policy | None = None
    ) -> Done:
        transport = Fake(nodes)
        policies = dict.fromkeys(nodes, policy or Policy())
        nodes_of = targets.Targets(transport, policies, inventory.load(",".join(nodes)))
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        way = "ssh_targets" if name == "deploy" else "select_targets"
        monkeypatch.setattr(targets, way, lambda *given, **how: nodes_of)
        code = command.main(["nodes", *words], standalone_mode=False)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err
        return Done(code, printed.out, printed.err, transport)

    return go

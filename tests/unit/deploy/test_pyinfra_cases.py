"""Recorded answers of nodes through pyinfra's own facts and operations, a JSON file per case.

The folders are those of pyinfra's tests and of its package pyinfra-testing: `facts/FACT/CASE.json`
with `arg` and `fact`; `operations/OPERATION/CASE.json` with `kwargs` and words of its `commands`.
`sections` is what the node prints, by section of the probe.

pyinfra-testing itself cannot run these: it gives a fact's `process` the recorded output of the
fact's command, and an operation the recorded facts of a stand-in for a host. A fact of nodeready
asks the node itself, because pyinfra has no standard input for a fact's command, and an operation
judges the snapshot. So the host here is a real one of pyinfra, with a connector that answers.
"""

import base64
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api import Inventory, State
from pyinfra.api.connect import connect_all
from pyinfra.connectors.base import BaseConnector
from pyinfra.connectors.util import CommandOutput, OutputLine
from pyinfra.context import ctx_host, ctx_state

from nodeready.core.probe_script import mark

CASES = Path(__file__).parents[1] / "pyinfra_cases"
FILES = sorted(CASES.glob("*/*/*.json"))


class RecordedConnector(BaseConnector):
    """A node that answers every probe with the sections in its host data."""

    handles_execution = True

    @staticmethod
    def make_names_data(name: str | None = None) -> Any:
        raise NotImplementedError

    def connect(self) -> None: ...
    def get_file(self, *_: Any, **__: Any) -> Any: ...
    def put_file(self, *_: Any, **__: Any) -> Any: ...

    def run_shell_command(self, command: Any, *_: Any, **arguments: Any) -> Any:
        sections, text = self.host.data.sections, str(arguments.get("_stdin") or "")
        found = re.search(r"\bNR=([0-9a-f]+)", text)
        if found is None or not sections:
            return True, CommandOutput([OutputLine("stdout", "")])
        nonce = found[1]
        printed = "".join(
            f"@{nonce} begin {name}\n{lines}\n@{nonce} rc 0\n" for name, lines in sections.items()
        )
        packed = base64.b64encode(printed.encode()).decode()
        lines = [f"{mark(nonce)} plain", packed, f"{mark(nonce)} end"]
        return True, CommandOutput([OutputLine("stdout", line) for line in lines])


@pytest.fixture
def case(request):
    return request.param.parent.name, json.loads(request.param.read_text())


@pytest.mark.parametrize(
    "case", FILES, indirect=True, ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_a_recorded_case(case):
    name, wanted = case
    called = pkgutil.resolve_name(name)
    inventory = Inventory((["gpu001"], {"sections": wanted["sections"]}))
    (host,) = inventory
    host.connector_cls = RecordedConnector
    state = State(inventory)
    connect_all(state)
    with ctx_state.use(state), ctx_host.use(host):
        if "fact" in wanted:
            assert host.get_fact(called, **wanted.get("arg", {})) == wanted["fact"]
            return
        commands = [str(line) for line in called._inner(**wanted.get("kwargs", {}))]
    assert len(commands) == len(wanted["commands"]), commands
    for line, words in zip(commands, wanted["commands"], strict=True):
        assert words in line

"""`stacks --from` reads what `py-spy dump` printed, collected by others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.command import Tool
from tests.paths import ROOT

DUMPS = ROOT / "tests/unit/triage/dumps"


@pytest.mark.parametrize("dump", sorted(DUMPS.glob("*.txt")), ids=lambda path: path.stem)
def test_every_text_becomes_groups(tool: Tool, dump: Path) -> None:
    done = tool("stacks", "--from", dump)
    # 3: a node of pdsh.txt says that py-spy failed there.
    assert done.status == (3 if dump.stem == "pdsh" else 0), done
    assert "train.py:5" in done.out or "<string>" in done.out


def test_a_file_of_a_directory_names_its_node(tool: Tool, tmp_path: Path) -> None:
    for name in ("trace-gpu001.out", "gpu002.txt"):
        shutil.copy(DUMPS / "locals.txt", tmp_path / name)
    shutil.copy(__file__, tmp_path / "trace-gpu003.out")
    done = tool("stacks", "--from", tmp_path, "--format", "json")
    document = json.loads(done.out)
    assert {process["node"] for process in document["processes"]} == {"gpu001", "gpu002"}
    assert "gpu003" in done.out

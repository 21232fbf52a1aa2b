"""`stacks --from` reads what `py-spy dump` printed, collected by others."""

import json
import shutil

from tests.paths import ROOT

DUMPS = ROOT / "tests/unit/triage/dumps"


def test_a_file_of_a_directory_names_its_node(tool, tmp_path):
    for name in ("trace-gpu001.out", "gpu002.txt"):
        shutil.copy(DUMPS / "locals.txt", tmp_path / name)
    shutil.copy(__file__, tmp_path / "trace-gpu003.out")
    done = tool("stacks", "--from", tmp_path, "--format", "json")
    assert done.status == 3, done
    document = json.loads(done.out)
    assert {process["node"] for process in document["processes"]} == {"gpu001", "gpu002"}
    assert "gpu003" in done.out

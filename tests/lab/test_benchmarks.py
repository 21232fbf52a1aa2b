"""Each benchmark runs to its end and reports every contender. No number is judged here."""

import os
import subprocess

import pytest

from tests.cases import read_table
from tests.paths import ROOT

pytestmark = pytest.mark.nightly

#: benchmark -> its further words, and what rows begin with, as often as they must.
BENCHMARKS = read_table(__file__, "BENCHMARKS")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_contender_is_in_the_table(name, own_lab, tmp_path):
    more, rows = BENCHMARKS[name]
    document = tmp_path / "benchmarks.md"
    document.write_text(f"# Numbers\n\nkept\n\n<!-- begin {name} -->old<!-- end {name} -->\n")
    argv = [str(ROOT / "benchmarks" / "run"), name, "--name", own_lab, "-o", str(document)]
    argv += ["--without-ansible"]
    argv += ["--repeat", "1"] if name != "simulated" else []
    argv += ["--nodes", "2"] if name not in ("local", "start") else []
    how = {"capture_output": True, "text": True, "env": {**os.environ, "LC_ALL": "C.UTF-8"}}
    done = subprocess.run([*argv, *more], timeout=300, check=False, **how)
    assert done.returncode == 0, done.stderr
    text = document.read_text()
    assert text.startswith("# Numbers\n\nkept\n")
    assert "old<" not in text
    lines = text.splitlines()
    for start in rows:
        assert sum(line.startswith(start) for line in lines) >= rows.count(start), start

"""`-o`: which report goes into which file, and whether the screen has one, too."""

import json
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from nodeready.cli import cli
from nodeready.cli.screen import read_outputs
from tests.cases import read_table

_AUDIT = cli.get_command(cli.make_context("nodeready", ["audit"], resilient_parsing=True), "audit")

#: words -> the format of the screen or of the first file, the files, whether the screen has it
OUTPUTS = read_table(__file__, "OUTPUTS")


@pytest.mark.parametrize("row", OUTPUTS, ids=[row[0] or "none" for row in OUTPUTS])
def test_a_report_goes_where_the_words_say(row, monkeypatch, tmp_path):
    words, form, files, on_screen = row
    monkeypatch.chdir(tmp_path)
    for name in ("FORMAT", "OUTPUT", "AUDIT_FORMAT", "AUDIT_OUTPUT"):
        monkeypatch.delenv(f"NODEREADY_{name}", raising=False)
    variables = [word for word in words.split() if word.startswith("FORMAT=")]
    for variable in variables:
        monkeypatch.setenv("NODEREADY_FORMAT", variable.partition("=")[2])
    arguments = ["x", *(word for word in words.split() if word not in variables)]
    assert _AUDIT is not None
    with _AUDIT.make_context("audit", arguments) as context:
        outputs = read_outputs("audit", SimpleNamespace(**context.params))
    assert (outputs.form, outputs.files, outputs.on_screen) == (form, files, on_screen)


def test_one_run_writes_every_form(tool, tmp_path):
    words = ("audit", "@local", "--only", "ptrace")
    done = tool(*words, "-o", "json:a.json", "-o", "junit:a.xml", cwd=tmp_path)
    data = json.loads((tmp_path / "a.json").read_text())
    (node,) = data["nodes"]
    assert node["facts"]["ptrace"]
    assert ElementTree.parse(tmp_path / "a.xml").getroot().tag == "testsuites"
    assert "1 node: " in done.out
    only_file = tool(*words, "-o", "b.json", cwd=tmp_path)
    assert (only_file.status, only_file.out) == (done.status, "")

"""The first failure of dead jobs: each file in postmortem_cases is a job and its verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nodeready.reports import json_report
from nodeready.reports.registry import Options, find_format
from nodeready.triage.postmortem.collect import postmortem_of
from nodeready.triage.postmortem.directory import read_directory
from nodeready.triage.postmortem.document import Postmortem
from tests.cases import tomllib
from tests.paths import schema

SCHEMA = schema("postmortem")
CASES = sorted((Path(__file__).parent / "postmortem_cases").glob("*.toml"))


def lay(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def document(directory: Path) -> Postmortem:
    started = "2026-03-01T12:00:00Z"
    return postmortem_of(read_directory(directory), started=started, source="DIR")


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_first_failure_is_named_and_never_a_victim(path, tmp_path):
    case: dict[str, Any] = tomllib.loads(path.read_text())
    found = document(lay(tmp_path, case["files"]))
    cause = found.cause
    assert cause.kind == case["kind"], found
    if case["ranks"]:
        assert list(cause.ranks) == case["ranks"], found
    jsonschema.validate(json.loads("".join(json_report.render(found))), SCHEMA)
    shown = "".join(find_format("postmortem", "table").render(found, Options(verbose=1)))
    assert case["text"].lower() in shown.lower(), found
    assert shown.startswith(case["kind"])
    assert "\x1b" not in shown

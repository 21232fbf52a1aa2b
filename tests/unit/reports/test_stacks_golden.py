"""Stacks of every outcome in the formats that are read by eye, byte for byte: golden_stacks/.

A change that is meant: NODEREADY_GOLDEN=write .venv/bin/python -m pytest tests/unit/reports,
then read the difference.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest

from nodeready.reports import json_report
from nodeready.reports.registry import Options, find
from nodeready.reports.stacks_table import branches, show
from nodeready.text import sanitise
from nodeready.triage.stacks.document import Frame, Group, Rank, Stacks
from tests.builders.stack_fleets import FLEETS, job, stack, stages
from tests.paths import schema

GOLDEN = Path(__file__).parent / "golden_stacks"
SMALL = ("missing", "prefix", "nobody", "hostile")


def lines(stacks: Stacks, verbose: int = 0, width: int = 80) -> list[str]:
    return [line.plain for line in show(stacks, Options(verbose, width))]


def body(stacks: Stacks) -> list[str]:
    """The page between its style sheet and its script, which have their own tests."""
    text = "".join(find("stacks", "html").render(stacks))
    return [text[text.index("<main>") : text.index("<script>")]]


FORMATS = {
    "table": lambda stacks: (f"{line}\n" for line in lines(stacks)),
    "verbose": lambda stacks: (f"{line}\n" for line in lines(stacks, 1)),
    "json": json_report.stacks,
    "body": body,
}
# 512 processes, each in a line, are no golden file.
CASES = [(name, form) for name in FLEETS for form in FORMATS if form == "table" or name in SMALL]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_report_is_as_its_golden_file(name, form):
    path = GOLDEN / f"{name}.{form}"
    made = "".join(FORMATS[form](FLEETS[name]())).encode()
    old = path.read_bytes() if path.is_file() else b""
    if os.environ.get("NODEREADY_GOLDEN") == "write" and made != old:
        path.write_bytes(made)
        pytest.fail(f"{path.name} is written anew: read the difference")
    assert made == old


def test_no_golden_file_is_without_its_fleet():
    assert {path.name for path in GOLDEN.iterdir()} == {f"{n}.{form}" for n, form in CASES}


@pytest.mark.parametrize("name", FLEETS)
def test_every_line_is_safe_and_ends_without_blanks(name):
    for verbose in (0, 1):
        for line in lines(FLEETS[name](), verbose):
            assert line == sanitise(line, 1_000_000)
            assert line == line.rstrip()


@pytest.mark.parametrize("name", sorted(set(FLEETS) - {"hostile"}))
def test_the_screen_at_night_has_80_columns_and_a_page_or_two(name):
    shown = lines(FLEETS[name]())
    assert len(shown) <= 60
    # A hint is a sentence, which goes on below on a terminal.
    rows = [line for line in shown if "hint: " not in line and not line.startswith("next")]
    assert max(map(len, rows)) <= 80


def test_forty_groups_are_cut_with_the_largest_in_sight():
    shown = lines(FLEETS["many"]())
    assert "             and 23 more groups (-v shows them)" in shown
    assert any(line.startswith("blocked      ranks 0,40-511  gpu[001,006-064]") for line in shown)
    every = lines(FLEETS["many"](), 1)
    assert sum(line.startswith("blocked") for line in every) == 40


def test_131072_ranks_fit():
    shown = lines(stages())
    assert len(shown) < 30
    assert "ranks 0-131064/8" in "\n".join(shown)
    assert max(map(len, shown)) <= 85


@pytest.mark.parametrize("name", FLEETS)
def test_the_json_is_as_its_schema_says(name):
    text = "".join(json_report.stacks(FLEETS[name]()))
    jsonschema.Draft202012Validator(schema("stacks")).validate(json.loads(text))


def test_the_json_has_every_field_and_is_one_line_per_process():
    stacks = FLEETS["missing"]()
    text = "".join(json_report.stacks(stacks))
    data = json.loads(text)
    assert set(data) == {"schema", *(f.name for f in fields(Stacks))}
    assert set(data["groups"][0]) == {f.name for f in fields(Group)}
    assert set(data["processes"][0]) == set(Rank._fields)
    assert data["groups"][3]["frames"][0] == {
        "function": "<module>",
        "file": "train.py",
        "line": 131,
    }
    assert len(text.splitlines()) < len(stacks.processes) + len(stacks.groups) + 20
    assert text.isascii()


def test_ranks_deep_in_a_recursion_are_a_tree_that_can_be_shown():
    """Each of 1500 ranks one call deeper than the one before: as many branches."""
    calls = tuple(Frame("solve", "tree.py", 7) for _ in range(1500))
    groups = [(stack(calls[: depth + 1], [depth]), "R") for depth in range(1500)]
    stacks = job(*groups, size=1500)
    assert len(lines(stacks)) < 60
    *_, last = branches(stacks, most=9999, deepest=9999)
    assert (last.ranks, last.depth, last.ends) == ((1499,), 1499, 1)

"""The formats: one registry, one signature, and nothing imported before it is asked for."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import click
import pytest

import nodeready.cli
from nodeready.reports.registry import FORMATS, Format, Options, find, names
from nodeready.transport import bundle
from tests.builders import stack_fleets
from tests.builders.fleets import outcomes

ROWS = [row for rows in FORMATS.values() for row in rows.values()]
IDS = [f"{row.document}-{row.name}" for row in ROWS]
CLI = Path(nodeready.cli.__path__[0])


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_every_renderer_has_the_one_signature(row):
    function = getattr(importlib.import_module(row.module), row.renderer.partition(":")[2])
    (_, options) = inspect.signature(function).parameters.values()
    assert (options.name, options.annotation, options.default) == ("options", "Options", Options())
    returned = "Iterator[Line]" if row.styled else "Iterator[str]"
    assert inspect.signature(function).return_annotation == returned


def test_what_stacks_shows_of_a_check_it_offers():
    assert set(names("debuggable")) <= set(names("stacks"))


@pytest.mark.parametrize("document", [name for name in FORMATS if name != "debuggable"])
def test_a_command_offers_what_the_registry_has(document):
    command = importlib.import_module(f"nodeready.cli.{document}")
    (option,) = [one for one in getattr(command, document).params if one.name == "format"]
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == names(document)
    assert option.default == names(document)[0]


def test_no_command_names_a_renderer_of_its_own():
    """What a command still imports of the reports is words, and lines beside a document."""
    renderers = {row.module for row in ROWS}
    functions = {row.renderer.partition(":")[2] for row in ROWS}
    for path in CLI.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in renderers:
                assert not functions & {alias.name for alias in node.names}, path.name


def test_the_node_carries_its_formats_and_no_other():
    carried = {name for name in bundle.modules() if name.startswith("nodeready.reports.")}
    wanted = {row.module for row in ROWS if row.on_node}
    shared = {"nodeready.reports.registry"}
    assert carried == wanted | shared


def test_help_imports_no_renderer():
    code = (
        "import sys, nodeready.cli.audit, nodeready.cli.stacks\n"
        "print(*[name for name in sys.modules if name.startswith('nodeready.reports')])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    assert "nodeready.reports.registry" in ran.stdout
    heavy = ("junit", "stacks_html", "exports")
    assert not [name for name in ran.stdout.split() if name.endswith(heavy)]


def test_a_file_of_a_table_is_its_lines_without_their_styles():
    made = outcomes()["fail"]
    table = find("audit", "table")
    lines = [line.plain for line in table.lines(made)]
    assert "".join(table.render(made)) == "".join(f"{line}\n" for line in lines)
    with pytest.raises(ValueError, match="audit as json"):
        find("audit", "json").lines(made)


def test_a_format_can_show_a_part():
    stacks = stack_fleets.FLEETS["one"]()

    class Whole:
        inside = stacks

    row = Format("stacks", "json", "json_report:stacks", ".json", part="inside")
    assert list(row.render(Whole())) == list(find("stacks", "json").render(stacks))

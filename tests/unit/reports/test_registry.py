"""The formats: one registry, one signature, and each module imported when it is needed."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import click
import pytest

import nodeready.cli
from nodeready.cli import cli
from nodeready.fleet.transport import bundle
from nodeready.reports.registry import FORMATS, Format, find_format, format_names
from tests.builders import stack_fleets

ROWS = [row for rows in FORMATS.values() for row in rows.values()]


#: The documents of `--check` -> their commands.
PARTS = {"debuggable": "stacks", "script": "env"}


@pytest.mark.parametrize("document", [name for name in FORMATS if name not in PARTS])
def test_a_command_offers_the_formats_of_the_registry(document):
    command = cli.get_command(click.Context(cli), document)
    assert command is not None
    (option,) = [p for p in command.params if p.name == "format"]
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == format_names(document)
    assert option.default == format_names(document)[0]


@pytest.mark.parametrize(("document", "command"), PARTS.items())
def test_a_command_offers_the_formats_of_its_other_document(document, command):
    assert set(format_names(document)) <= set(format_names(command))


def test_no_command_imports_a_renderer():
    """A command imports only words of the reports, and lines beside a document."""
    renderers = {row.module for row in ROWS}
    functions = {row.renderer.partition(":")[2] for row in ROWS}
    for path in Path(nodeready.cli.__path__[0]).glob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.ImportFrom) and statement.module in renderers:
                assert not functions & {alias.name for alias in statement.names}, path.name
    code = (
        "import sys, nodeready.cli.audit, nodeready.cli.stacks\n"
        "print(*[name for name in sys.modules if name.startswith('nodeready.reports')])"
    )
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "nodeready.reports.registry" in loaded
    heavy = ("exports", "stacks_html")
    assert not [name for name in loaded if name.endswith(heavy)]


def test_the_program_of_the_node_has_its_formats_and_no_other():
    modules = {name for name in bundle.modules() if name.startswith("nodeready.reports.")}
    own = {row.module for row in ROWS if row.on_node}
    assert own <= modules
    assert modules.isdisjoint({row.module for row in ROWS} - own)
    # Jinja is not on a node.
    rooms = Path(importlib.import_module("nodeready.reports").__path__[0])
    using = {path.stem for path in rooms.glob("*.py") if "jinja2" in path.read_text()}
    assert using == {"html_page"}


def test_a_format_can_show_a_part():
    stacks = stack_fleets.FLEETS["one"]()

    class Whole:
        inside = stacks

    row = Format("stacks", "json", "json_report:render", ".json", part="inside")
    assert list(row.render(Whole())) == list(find_format("stacks", "json").render(stacks))

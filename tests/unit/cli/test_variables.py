"""Options from variables: the command's own, and a general one as far as the command takes it."""

from __future__ import annotations

import os

import click
import pytest

from nodeready.cli import cli
from nodeready.cli.options import FORMS, Option


def commands() -> dict[str, click.Command]:
    root = click.Context(cli, **cli.context_settings)
    found = {name: cli.get_command(root, name) for name in cli.list_commands(root)}
    return {name: command for name, command in found.items() if command is not None}


COMMANDS = commands()


def options() -> list[tuple[str, Option]]:
    return [(n, p) for n, c in COMMANDS.items() for p in c.params if isinstance(p, Option)]


def value(name: str, option: str) -> object:
    """What the command takes for an option that is not on its command line."""
    root = click.Context(cli, info_name="nodeready", **cli.context_settings)
    words = ["x", "/x"] if name in ("tail", "audit", "ready", "env", "learn") else []
    with COMMANDS[name].make_context(name, words[: 2 if name == "tail" else 1], root) as found:
        return found.params[option]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("NODEREADY")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("word", "formats"),
    [
        ("prometheus", {"audit": "prometheus", "ready": "prometheus", "cores": "table"}),
        ("json", {"audit": "json", "ready": "json", "cores": "json"}),
        ("html", {"audit": "table", "ready": "table", "cores": "table"}),
        # Of commands whose output is a program's input, or a form of their own.
        ("json", {"env": "sh", "stacks": "table", "tail": "table"}),
    ],
)
def test_a_general_format_counts_where_the_command_has_it(monkeypatch, word, formats):
    monkeypatch.setenv("NODEREADY_FORMAT", word)
    assert {name: value(name, "format") for name in formats} == formats


def test_a_format_that_no_command_has_is_a_mistake(monkeypatch):
    monkeypatch.setenv("NODEREADY_FORMAT", "jsno")
    for name in ("audit", "cores"):
        with pytest.raises(click.BadParameter, match="'jsno' is not one of"):
            value(name, "format")


def test_every_format_is_known_as_one():
    found = [p.type.choices for _, p in options() if p.name == "format"]
    assert {*FORMS} == {form for forms in found for form in forms}


@pytest.mark.parametrize(
    ("path", "outputs"),
    [
        ("report", {"audit": "report", "tail": "report", "cores": None, "stacks": None}),
        ("there", {"audit": None, "bundle": "nodeready.pyz", "cores": "there", "stacks": None}),
        ("new/", {"audit": None, "cores": "new/", "stacks": None}),
    ],
)
def test_a_general_output_is_a_file_for_some_and_a_directory_for_others(
    monkeypatch, tmp_path, path, outputs
):
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("NODEREADY_OUTPUT", path)
    assert {name: value(name, "output") for name in outputs} == outputs


@pytest.mark.parametrize("name", ["audit", "cores", "env", "stacks", "tail"])
def test_the_commands_own_variable_beats_the_general_one(monkeypatch, name):
    monkeypatch.setenv("NODEREADY_FORMAT", "table")
    monkeypatch.setenv(f"NODEREADY_{name.upper()}_FORMAT", "json")
    assert value(name, "format") == "json"
    monkeypatch.setenv(f"NODEREADY_{name.upper()}_OUTPUT", "mine")
    assert value(name, "output") == "mine"


def test_a_mistake_in_the_commands_own_variable_is_one(monkeypatch):
    monkeypatch.setenv("NODEREADY_CORES_FORMAT", "prometheus")
    with pytest.raises(click.BadParameter) as mistake:
        value("cores", "format")
    assert "NODEREADY_CORES_FORMAT" in mistake.value.format_message()


def test_no_two_options_have_one_variable_of_their_own():
    own = [option.variables[0] for _, option in options()]
    general = {name for _, option in options() for name in option.variables[1:]}
    assert len({*own}) == len(own)
    assert not general & {*own}
    for name, option in options():
        assert option.variables[0].startswith(f"NODEREADY_{name.upper()}_")


def test_options_that_share_a_variable_take_the_same_words():
    """Or say which of them count."""
    kinds: dict[str, set[str]] = {}
    for _, option in options():
        for name in option.variables[1:]:
            if option.takes is None:
                kinds.setdefault(name, set()).add(repr(option.type.to_info_dict()))
    assert [name for name, found in kinds.items() if len(found) > 1] == []

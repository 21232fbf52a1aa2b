"""Manners of the command line: what is asked, where it is written, and how it looks."""

from __future__ import annotations

import re

import pytest

import nodeready
from tests.command import Terminal

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def test_version_and_help(tool):
    done = tool("--version")
    assert (done.status, done.out, done.err) == (
        0,
        f"nodeready, version {nodeready.__version__}\n",
        "",
    )
    for words in (["-h"], ["deploy", "--help"], ["audit", "--help"]):
        done = tool(*words)
        assert (done.status, done.err) == (0, ""), done
    assert "130" in tool("--help").out
    assert re.search(r"--limit NODES .*?NODEREADY_LIMIT", tool("deploy", "--help").out, re.S)
    nothing = tool()
    assert (nothing.status, nothing.out) == (2, ""), nothing
    assert "Usage: nodeready" in nothing.err


#: environment, options, on a terminal -> whether there are colours
COLOURS = [
    ({}, [], False, False),
    ({}, [], True, True),
    ({"NO_COLOR": "1"}, [], True, False),
    ({"NO_COLOR": ""}, [], True, True),
    ({"TERM": "dumb"}, [], True, False),
    ({"CLICOLOR_FORCE": "1"}, [], False, True),
    ({"CLICOLOR_FORCE": "0"}, [], False, False),
    ({"CLICOLOR_FORCE": "1", "NO_COLOR": "1"}, [], False, False),
    ({}, ["--color", "always"], False, True),
    ({"NO_COLOR": "1"}, ["--color", "always"], False, True),
    ({"CLICOLOR_FORCE": "1"}, ["--color", "never"], True, False),
    ({"NODEREADY_COLOR": "never"}, [], True, False),
    ({"NODEREADY_COLOR": "never"}, ["--color", "always"], False, True),
]


@pytest.mark.parametrize(("environment", "options", "on_terminal", "coloured"), COLOURS)
def test_colours(environment, options, on_terminal, coloured, tool):
    """Flag before environment before terminal; the words are the same either way."""
    words = ("audit", "@local", "--only", "ptrace", *options)
    if on_terminal:
        terminal = Terminal(tool, *words, **environment)
        plain, text = terminal.end().out, terminal.text
    else:
        done = tool(*words, env=environment)
        text, plain = done.out, COLOUR.sub("", done.out)
    assert bool(COLOUR.search(text)) is coloured, text
    assert "1 node: " in plain
    if environment.get("TERM") == "dumb":
        assert "\x1b" not in text

"""Manners of the command line: what is asked, where it is written, and how it looks."""

import io
import os
import re
import sys

import pytest

import nodeready
from nodeready.cli import screen
from nodeready.cli.screen import NodeProgress
from nodeready.core.exit_codes import Refused
from nodeready.reports.lines import StyledLine
from tests.cases import with_table
from tests.command import Terminal

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def test_version_and_help(tool):
    done = tool("--version")
    version = f"nodeready, version {nodeready.__version__}\n"
    assert (done.status, done.out, done.err) == (0, version, "")
    assert "130" in tool("--help").out
    assert "NODEREADY_DEPLOY_OPTION, else NODEREADY_OPTION" in tool("deploy", "-h").out
    nothing = tool()
    assert (nothing.status, nothing.out) == (2, ""), nothing
    assert "Usage: nodeready" in nothing.err


# environment, --color, on a terminal -> whether there are colours
@with_table("environment, color, on_terminal, coloured")
def test_an_option_outranks_the_environment_and_that_the_terminal(
    environment, color, on_terminal, coloured, monkeypatch
):
    for name in ("NO_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: on_terminal
    monkeypatch.setattr(sys, "stdout", stream)
    screen.Screen(color).show([StyledLine((("failed", "bold red"), (" 1 node", "")))])
    text = stream.getvalue()
    assert bool(COLOUR.search(text)) is coloured, text
    # The words are the same either way.
    assert COLOUR.sub("", text) == "failed 1 node\n"
    if environment.get("TERM") == "dumb":
        assert "\x1b" not in text


def test_a_command_on_a_terminal(tool):
    terminal = Terminal(tool, "audit", "@local", "--only", "ptrace")
    assert "1 node: " in terminal.end().out
    assert COLOUR.search(terminal.text), terminal.text


@pytest.mark.parametrize(("name", "checked"), [("file", "."), ("new", "."), ("pipe", "pipe")])
def test_an_unwritable_output_is_refused(name, checked, tmp_path, monkeypatch):
    """A file is replaced, so its directory counts; a pipe is written to."""
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    denied = []
    monkeypatch.setattr(os, "access", lambda path, mode: bool(denied.append(path)))
    with pytest.raises(Refused, match="cannot write to"):
        screen.refuse_unwritable(str(tmp_path / name))
    assert denied == [tmp_path / checked]


@pytest.mark.parametrize(("name", "words"), [("", "is a directory"), ("a/b", "no directory")])
def test_an_output_that_cannot_be_a_file_is_refused(name, words, tmp_path):
    with pytest.raises(Refused, match=words):
        screen.refuse_unwritable(str(tmp_path / name))


# --- Progress: the line for 10,000 nodes while they are asked.


def asked(total: int, left: list[int], seconds: float, failed: int = 0) -> NodeProgress:
    """A progress of `total` nodes, of which all but `left` are done after `seconds`."""
    names = [f"gpu{number:05d}" for number in range(total)]
    waiting = NodeProgress("probing", set(names), lambda: 0.0)
    waiting.clock = lambda: seconds
    for place, number in enumerate(sorted({*range(total)} - {*left})):
        waiting(names[number], place < failed)
    return waiting


LATE = [17, 231, 9998]


@pytest.mark.parametrize(
    ("nodes", "width", "line"),
    [
        ((2, [1], 1, 0), 79, "probing  1/2  0:01  waiting for gpu00001"),
        ((10_000, range(4000), 10, 12), 79,
         "probing  6000/10000  60 %  600/s  12 failed  0:10, 0:07 left"),
        ((10_000, range(4000), 10, 12), 39, "probing  6000/10000  60 %  12 failed"),
        ((10_000, range(9960), 30, 0), 79, "probing  40/10000  0 %  1.3/s  0:30, 2:04:30 left"),
        ((10_000, LATE, 44, 12), 79,
         "probing  9997/10000  12 failed  0:44  waiting for 3: gpu[00017,00231,09998]"),
        ((10_000, LATE, 44, 12), 59, "probing  9997/10000  12 failed  waiting for 3: gpu[00..."),
        ((10_000, LATE, 44, 12), 24, "probing  9997/10000"),
        ((10_000, [], 44, 12), 79, "probing  10000/10000  100 %  227/s  12 failed  0:44"),
    ],
)  # fmt: skip
def test_the_line_of_progress_has_what_matters_in_its_width(nodes, width, line):
    total, left, seconds, failed = nodes
    shown = asked(total, [*left], seconds, failed).line(width)
    assert shown == line
    assert len(shown) <= width


def test_how_long_the_last_nodes_are_silent_is_said():
    waiting = asked(10_000, LATE, 44)
    waiting.clock = lambda: 85.0
    assert waiting.slow_nodes(60) == "waiting for 3: gpu[00017,00231,09998], 41 s"
    assert waiting.line(79).endswith("  1:25  waiting for 3: gpu[00017,00231,09998], 41 s")
    words = "probing: 9997 of 10000 nodes, 118/s. waiting for 3: gpu[00017,00231,09998], 41 s"
    assert waiting.sentence() == words
    # A node that is told twice is one, and of another question none.
    for name in ("gpu00000", "login1"):
        waiting(name, failed=True)
    assert (waiting.done, waiting.failed) == (9997, 0)


def test_no_node_is_named_while_others_have_not_had_their_turn():
    assert asked(10_000, [*range(300)], 9).slow_nodes(60) == ""
    slow = asked(10_000, [*range(0, 400, 2)], 9).slow_nodes(40)
    assert slow == "waiting for 200: gpu[00000,00002,0000..."


def test_ten_thousand_nodes_that_are_done_draw_nothing(monkeypatch):
    """Names are folded when the line is drawn, not for every node."""
    folded = []
    monkeypatch.setattr(screen, "fold", lambda names: folded.append(names) or "")
    asked(10_000, [], 9)
    assert folded == []

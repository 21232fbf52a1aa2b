"""Commands of this machine: they are answered, and never waited for longer than their limit."""

from dataclasses import replace
from pathlib import Path

import pytest

from nodeready.agent import local
from nodeready.agent.asking import Answer
from nodeready.core import shell
from nodeready.core.outcome import HUNG, OUTPUT, Gap
from tests.command import wait_for

_FLOOD = "too much output, beginning with " + repr("y\n" * 20)
#: command -> its input, the answer
COMMANDS = {
    "echo a; echo b >&2; exit 3": ("", Answer("a\n", "b\n", rc=3)),
    "wc -c": ("x" * 200_000, Answer("200000\n")),
    "kill -KILL $$": ("", Answer(rc=None)),
    "echo a; exec >&- 2>&-; sleep 0.2; exit 4": ("", Answer("a\n", rc=4)),
    "yes": ("", Answer(gap=Gap(OUTPUT, _FLOOD))),
}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_answered(line):
    given, expected = COMMANDS[line]
    answer = local.run(shell.ShellCommand(line, given), 10, 100_000)
    assert replace(answer, seconds=0.0) == expected
    assert answer.seconds < 10


def test_a_command_that_never_ends_is_ended_at_its_limit(monkeypatch):
    monkeypatch.setattr(shell, "KILL_AFTER_S", 0)
    monkeypatch.setattr(local, "PATIENCE_S", 0.2)
    answer = local.run(shell.ShellCommand("trap '' TERM; echo $$; sleep 600; :", ""), 1, 100)
    assert answer.gap
    assert (answer.gap.kind, answer.gap.reason) == (HUNG, "no answer in 1 s")
    wait_for(lambda: not Path("/proc", answer.stdout.strip()).exists())

"""Mistakes in the words of `nodeready cores --local`."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(("words", "error"), [
    ("", "an INVENTORY or --local, one of both"),
    ("@local --local", "an INVENTORY or --local, one of both"),
    ("--local --limit x", "--limit: --local is about this machine alone"),
    ("--local --since soon", "--since soon: must be a moment or a span"),
    ("a,b --gcore 77 --yes", "--gcore 77: choose one node with --limit"),
    ("a --gcore 77 -o x", "-o: with --gcore only for --local"),
    ("--local -o /dev/null", "-o /dev/null: is no directory"),
    ("--local -o /none/x", "-o /none/x: No such file or directory"),
    ("--local --gcore 1", "--gcore"),
])  # fmt: skip
def test_a_users_mistake_is_one_line(tool, words, error):
    done = tool("cores", *words.split())
    assert (done.status, done.out) == (2, ""), done
    assert error in done.err

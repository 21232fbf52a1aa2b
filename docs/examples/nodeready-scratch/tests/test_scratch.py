"""The scratch directory: what df prints, and what is judged of it."""

from __future__ import annotations

import pytest
from nodeready_scratch import checks, facts

from nodeready.policy import Policy
from nodeready.subjects.base import Output, ProbeError

POLICY = Policy()
HEAD = "Filesystem 1024-blocks Used Available Capacity Mounted on\n"


def observe(mode: str, df: str) -> facts.Scratch:
    return facts.parse({"scratch": Output(mode, 0), "scratch_usage": Output(df, 0)}, POLICY)


@pytest.mark.parametrize(
    ("mode", "used_pct", "directory", "room"),
    [("1777", 90, "ok", "ok"), ("755", 91, "fail", "warn"), ("", None, "fail", "na")],
)
def test_results(mode, used_pct, directory, room):
    observed = facts.Scratch(mode, used_pct)
    assert checks.directory(observed, POLICY).status == directory
    assert checks.room(observed, POLICY).status == room


def test_output_of_df():
    assert observe("mode=1777\n", f"{HEAD}/dev/sda1 9 6 3 67% /\n") == facts.Scratch("1777", 67)
    assert observe("", "") == facts.Scratch("", None)
    with pytest.raises(ProbeError, match="capacity"):
        observe("mode=1777\n", "df: no file systems processed\n")

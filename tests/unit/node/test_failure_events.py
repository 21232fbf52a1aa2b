"""The events in the lines of dead jobs' logs: each row of failure_events.toml is a log."""

from pathlib import Path

import pytest

from nodeready.agent.failures.log_file import read_lines
from tests.cases import tomllib

CASES = tomllib.loads((Path(__file__).parent / "cases/failure_events.toml").read_text())


@pytest.mark.parametrize("name", CASES)
def test_a_log_has_these_events_and_no_others(name):
    lines = [line for line in CASES[name]["log"].splitlines() if line.strip()]
    events = read_lines(lines, 2026).events
    expected = CASES[name]["events"]
    assert [[event.role, event.kind, *_place(event)] for event in events] == [
        [role, kind, ranks, local] for role, kind, _, ranks, local in expected
    ], events
    for event, (_, _, words, _, _) in zip(events, expected, strict=True):
        assert words in event.text


def _place(event):
    return list(event.ranks), -1 if event.local_rank is None else event.local_rank

"""For `scripts/mutation.py map`: every line counts for the test that executes it.

A pytest plugin. COVERAGE_PROCESS_START names the configuration; processes that a test starts read
it, too, and take the test's name from PYTEST_CURRENT_TEST.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

_RC = os.environ["COVERAGE_PROCESS_START"]
# A worker of pytest-xdist measures itself, before the product is imported.
_measured = coverage.Coverage.current() or coverage.Coverage(config_file=_RC)
_measured.start()
_seconds: dict[str, float] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _measured.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        _measured.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0) + report.duration


def pytest_sessionfinish() -> None:
    _measured.stop()
    _measured.save()
    path = Path(_RC).parent / f"durations-{os.getpid()}.json"
    path.write_text(json.dumps(_seconds))

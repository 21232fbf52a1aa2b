"""Limits that decide what hangs are long here: a busy machine is slow, and nothing else."""

import pytest

from nodeready.agent import tail
from nodeready.agent.stacks import processes, waits
from nodeready.agent.witnesses import logs


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        *((processes, name) for name in ("_PATIENCE_S", "_NEXT_PATIENCE_S")),
        *((waits, "_ENDS_S"), (logs, "_SEARCH_S"), (tail, "PATIENCE_S")),
    ):
        monkeypatch.setattr(module, name, 30.0)

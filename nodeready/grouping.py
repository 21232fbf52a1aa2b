"""Ranks that stand at the same place, from the raw traces of all nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nodeready.stacks import Stacks


def group(
    traces: Iterable[Mapping[str, Any]],
    errors: Mapping[str, str],
    *,
    all_threads: bool = False,
    started: str = "",
    finished: str = "",
    complete: bool = True,
) -> Stacks:
    """All traces as one document. Each trace is used once and not kept.

    errors: node -> why it gave no answer; looked at after all traces (see `traces.load`)
    all_threads: ranks are together only when their other threads stand at the same places too
    """
    raise NotImplementedError

"""Raw traces: what one node's processes showed, as plain data (``nodeready.trace/1``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = "nodeready.trace/1"

#: A trace as it came from JSON: see docs/schema/trace-1.json.
Trace = dict[str, Any]


class TraceError(ValueError):
    """What is no trace. One line: which, and what is wrong with it."""


def read(data: Any, where: str) -> Trace:
    """``data`` when it is a trace. Raises TraceError. where: its file or node."""
    raise NotImplementedError


def parse(text: str | bytes, where: str) -> Trace:
    """The trace that this JSON text is. Raises TraceError."""
    raise NotImplementedError


def load(directory: Path) -> tuple[Iterator[Trace], dict[str, str]]:
    """The traces of ``trace-NODE.json``, node names in natural order, and what is wrong.

    Files are read while the first is iterated over, one at a time, so that a large fleet's need
    not be in memory together; the second, node -> one line, is complete after that.
    Raises TraceError when the directory cannot be read or holds no trace.
    """
    raise NotImplementedError

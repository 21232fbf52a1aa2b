"""Readiness: whether a node may get a job, and why not. Pure; on the node and here alike."""

from __future__ import annotations

from collections.abc import Iterable

from nodeready.results import Result
from nodeready.sanitise import sanitise

#: The statuses with which a node gets no job. What nobody could observe is no pass.
STOPPING: tuple[str, ...] = ("fail", "unknown")
#: Characters of one reason: Slurm and a prolog's log have a line for all of them.
_LENGTH = 160


def go(results: Iterable[Result]) -> bool:
    """Whether nothing failed and nothing is unknown, after waivers; a warning stops no job."""
    return not any(result.status in STOPPING for result in results)


def reasons(results: Iterable[Result]) -> list[str]:
    """Why not: a short line ``check: actual`` for each result that stops, failures first."""
    found = [
        (STOPPING.index(result.status), _line(result))
        for result in results
        if result.status in STOPPING
    ]
    return [line for _, line in sorted(found, key=lambda row: row[0])]


def _line(result: Result) -> str:
    actual = " ".join(sanitise(result.actual).split()) or result.status
    text = f"{result.check}: {actual}"
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 3]}..."

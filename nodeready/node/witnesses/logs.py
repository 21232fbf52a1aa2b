"""The log that a rank writes: its last lines, and the lines of PyTorch's watchdog as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """One line of the watchdog of ProcessGroupNCCL (or of gloo's), as data.

    rank:      the global rank that it is about; None: the line does not say
    group:     description of the process group (``default_pg``); "": not told
    kind:      "timeout": a collective took too long; "status": how far the group is
    sequence:  number of the collective that timed out; None: not told
    operation: ``ALLREDUCE``; "": not told
    enqueued:  number of the last collective that was enqueued; None: not told
    completed: number of the last one that was completed; None: not told
    """

    rank: int | None
    group: str
    kind: str
    sequence: int | None
    operation: str
    enqueued: int | None
    completed: int | None


@dataclass(frozen=True)
class Log:
    """What the standard output and error of a process show.

    absent:  why there is none, one line; "": there is one
    path:    the file that is written
    age_s:   whole seconds since it was last written
    lines:   its last lines, the oldest first, at most `MOST_LINES`; no escape is taken out
    reports: of the watchdog, in its last `LOOKED_AT` bytes, at most `MOST_REPORTS`
    """

    absent: str = ""
    path: str = ""
    age_s: int = 0
    lines: tuple[str, ...] = ()
    reports: tuple[Report, ...] = ()

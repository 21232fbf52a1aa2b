"""A failure that a dead job's log reports, and what one file reports.

An event says what its own file reports, and never more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nodeready.agent.failures import rules
from nodeready.agent.log_variables import LogFacts
from nodeready.agent.witnesses.flight_recorder import Recording
from nodeready.agent.witnesses.logs import WatchdogReport
from nodeready.core import wire

#: The source of an error that a launcher, or a script that starts the ranks, raises itself.
LAUNCHERS_OWN = "launcher's own"
#: The source of a rank's error that its peers quote.
OF_PEERS = "its peers"
#: The source of an event that only warns.
WARNING = "warning"
#: The source of an error before any rank is started.
NOT_LAUNCHED = "not launched"
#: The kinds of errors that end a process, although they are of one request.
OF_PROCESS = "gpu", "segfault", "signal"
#: Maximum characters of an event's text.
MAX_TEXT = 400


@dataclass(frozen=True)
class FailureEvent:
    """One failure that a log reports."""

    kind: wire.Name  # see `nodeready.agent.failures.rules`
    role: wire.Name  # likewise
    # who reports it: a reporter of the tables, ``torchrun-root`` (its first observed failure),
    # ``error-file``; "": the rank itself; `WARNING`: it only warns
    source: wire.Name
    text: wire.Line  # the exception or the line
    frame: wire.Line  # innermost call of the user's code, ``train.py:12 in step``; "": none
    ranks: tuple[wire.Number, ...]  # global ranks; (): not known
    local_rank: wire.Number | None  # None: not known
    host: wire.Name  # that the line names; ""
    pid: wire.Number  # 0: not known
    code: int  # exit status, or minus the signal; 0: not known
    time_s: float | None  # of the line, in seconds since 1970; None: it has none
    after_s: float | None  # of the last line with a time before it; None: there is none
    line: wire.Number  # number of the line in the file; 0: not of a line
    lines_after: wire.Number  # lines of the same rank after it that belong to no failure
    call: wire.Name = ""  # function of torch.distributed that raised it, ``all_reduce``; "": none
    went_on: bool = False  # its rank wrote lines after it like those before it
    steps_on: bool = False  # the lines that it stands in end with growing steps
    # the line after it, or its level, says so, and more lines come; or the job was started again
    handled: bool = False
    last_words: wire.Line = ""  # of an end: why, by the last words before it
    is_last: bool = False  # its process has ended by it, and the log has no work after it

    @property
    def is_warning(self) -> bool:
        return self.source == WARNING

    def has_phrase(self, phrase: str) -> bool:
        """Whether its text has the words of a row of `PHRASES`."""
        return rules.PHRASES[phrase].search(self.text) is not None


@dataclass(frozen=True)
class LogStream:
    """The lines of one rank in one file."""

    rank: wire.Number | None  # None: the lines name none
    local_rank: wire.Number | None  # likewise
    host: wire.Name  # "": the lines name none
    lines: wire.Number  # their number
    last: wire.Line  # the last line that belongs to no failure
    last_s: float | None  # time of the last line that has one; None: none has
    complaint: wire.Line = ""  # the last words of an error, after all steps; "": none
    is_cut: bool = False  # they are of an error that ends its program, and the lines end then
    is_last: bool = False  # no line of the file shows progress after the words of an error


@dataclass(frozen=True)
class FileFailures:
    """What one file reports."""

    path: wire.Path  # "": not set yet
    size_bytes: wire.Number = 0
    mtime_s: float = 0.0  # of its last change; 0: not known
    skipped: wire.Number = 0  # bytes in its middle that were not read
    events: tuple[FailureEvent, ...] = ()
    streams: tuple[LogStream, ...] = ()
    reports: tuple[WatchdogReport, ...] = ()  # of PyTorch's watchdog
    facts: LogFacts = LogFacts()  # of the ranks' environments
    recording: Recording | None = None  # a dump of the flight recorder, in place of lines
    left_out: wire.Number = 0  # number of events beyond the maximum of a file or of a rank
    note: wire.Line = ""  # why a part of it was not unpacked or not counted; ""
    # number of the first line with a traceback behind an unknown prefix that may tell its rank; 0:
    # no line has one
    unknown_prefix: wire.Number = 0

    @cached_property
    def ranks(self) -> frozenset[int]:
        """The ranks that its lines name."""
        return frozenset(stream.rank for stream in self.streams if stream.rank is not None)

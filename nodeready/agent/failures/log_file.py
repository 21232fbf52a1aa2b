"""What one file of a dead job reports: a log, or an error file of torchelastic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from nodeready.agent import log_ranks
from nodeready.agent.failures import rules
from nodeready.agent.failures.events import FileFailures
from nodeready.agent.failures.reader import FailureReader
from nodeready.agent.log_lines import STAMP_CHARACTERS, Calendar, node_calendar
from nodeready.agent.log_variables import read_facts
from nodeready.core import wire

#: Lines at the beginning and at the end of a file from which its prefixes and year are learned.
_LEARNED = 2000
#: In a time of ISO 8601, or of glog, whose fatal lines may lack it.
_YEAR = re.compile(
    r"\b(?:(?=20\d\d[-/]\d\d[-/]\d\d[T _])|[IWEF](?=20\d{6} ))(20\d\d)[-/\d]{4,6}[T _]"
    r"\d\d:\d\d:\d\d"
)


def read_lines(
    lines: Sequence[str],
    year: int,
    calendar: Calendar = node_calendar,
    path: str = "",
    rank_pattern: str = "",
) -> FileFailures:
    """What the lines of one file report. year: of times without one, where no line has one;
    rank_pattern: as of `learn_ranks`
    """
    learned = lines if len(lines) < 2 * _LEARNED else [*lines[:_LEARNED], *lines[-_LEARNED:]]
    ranks = log_ranks.learn_ranks(learned, pattern=rank_pattern, path=path)
    # A file has the time of its copy: the year in its lines says more.
    matches = (_YEAR.search(line, 0, STAMP_CHARACTERS) for line in reversed(learned))
    year = next((int(match[1]) for match in matches if match), year)
    reader = FailureReader(year, calendar, ranks)
    for line in lines:
        reader.feed(line)
    facts = read_facts(lines, ranks.read)
    failures = replace(reader.failures(), path=path, facts=facts)
    if failures.ranks == {0} and facts.renamed_rank:
        failures = _renamed(failures, facts.renamed_rank)
    if facts.served:
        # A server that was started again, and answers, has survived all before.
        events = tuple(
            replace(event, handled=True)
            if event.line < facts.served and log_ranks.host_node(event.host) == facts.server
            else event
            for event in failures.events
        )
        failures = replace(failures, events=events)
    is_of_rank = log_ranks.path_ranks(path) != log_ranks.FileRanks(None, None)
    return replace(failures, unknown_prefix=0) if is_of_rank else failures


def _renamed(failures: FileFailures, rank: int) -> FileFailures:
    """The failures of the only task of a step, which is task 0 of its launcher, as a rank's."""
    events = [replace(e, ranks=(rank,)) if e.ranks == (0,) else e for e in failures.events]
    streams = [replace(s, rank=rank) if s.rank == 0 else s for s in failures.streams]
    return replace(failures, events=tuple(events), streams=tuple(streams))


# --- The error files of torchelastic (TORCHELASTIC_ERROR_FILE).


def read_error_file(text: str, calendar: Calendar = node_calendar) -> FileFailures | None:
    """The exception in an error file; None: it is no error file."""
    try:
        data = wire.load_json(text)
    except wire.DecodeError:
        return None
    message = data.get("message") if isinstance(data, dict) else None
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    stack = extra.get("py_callstack") if isinstance(extra, dict) else ""
    words = message.get("message") if isinstance(message, dict) else message
    if not isinstance(words, str) or not isinstance(stack, str):
        return None
    moment = str((extra if isinstance(extra, dict) else data).get("timestamp", ""))
    candidates = read_lines(stack.splitlines() or [words], 1970, calendar)
    seconds = float(moment) if re.fullmatch(r"\d{9,11}", moment) else None
    events = [event for event in candidates.events if event.role != rules.REPORT][-1:]
    if not events:
        return None
    event = replace(events[0], source="error-file", time_s=seconds)
    return replace(candidates, events=(event,), streams=())

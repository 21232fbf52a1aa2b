"""How the lines of a file end: which errors its programs have survived."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from nodeready.agent.failures import rules
from nodeready.agent.failures.events import MAX_TEXT, OF_PROCESS, FailureEvent, LogStream
from nodeready.agent.failures.plain_lines import (
    COMPLAINTS,
    STEP,
    complaint,
    goes_on,
    is_handled,
    is_work,
    shape_counts,
    shape_of,
    without_survived,
)
from nodeready.agent.failures.rank_stream import LAST_WORDS, LEVEL, UNKNOWN, RankStream
from nodeready.agent.log_lines import TIMED
from nodeready.agent.log_variables import ends_well
from nodeready.core.text import excerpt

#: The rank that a line of a program names, and the characters in which it does.
_RANKS, _HEAD = re.compile(r"(?i)\b(?:rank|task|process|pe)[ =#:]{0,2}(\d{1,7})\b"), 80
#: The roles of errors that another process has caused.
_OF_OTHERS = rules.LOST, rules.CONSEQUENCE
#: Maximum processes that are asked whether a program continues.
_WRITERS = 4


class FileEnd:
    """How the lines of a file end. restarts: numbers of the lines that start the job again"""

    def __init__(self, streams: Sequence[RankStream], restarts: Sequence[int]) -> None:
        #: The last line that belongs to no failure.
        self.at = max((stream.last_at for stream in streams), default=0)
        #: The last plain lines of the file, each behind its number.
        self._last_lines = sorted(
            row for stream in streams for row in stream.tail if row[0] > self.at - LAST_WORDS
        )
        # Some processes of a program, beside its helpers, write its steps.
        self._step_writers = [
            s for s in streams if s.steps_since(0)
            if s.is_process or s.key == UNKNOWN or s.key[1] is not None
        ][:_WRITERS]  # fmt: skip
        last_steps = (stream.last_at for stream in streams if STEP.search(stream.last))
        self._last_step_at = max(last_steps, default=0)
        self._last_complaints = self._find_last_complaints()
        self._closing_at = self._find_closing()
        progress = (number for number, text in self._last_lines if goes_on(text))
        self._last_progress_at = max(progress, default=0)
        self._last_work_at, self._without_work = self._find_last_work()
        self._last_failed_at = max((
            event.line for s in streams for event in s.events
            if event.role == rules.FAILED and event.line not in s.handled
        ), default=0)  # fmt: skip
        # The last attempt that has come to a step or to an error.
        last_at = max(self._last_step_at, self._last_work_at, self._last_failed_at)
        self._again_at = max((number for number in restarts if number < last_at), default=0)

    def events(self, stream: RankStream) -> list[FailureEvent]:
        """The events of a stream, with what came after each."""
        # An error like one after which the rank went on was handled, too.
        handled: dict[str, int] = {}
        for event in stream.events:
            if event.line in stream.went_on:
                handled.setdefault(event.text, event.lines_after)
        repeats = stream.went_on - stream.unhandled
        aborts, survived = self._aborts(stream), self._survived(stream)
        overcome, steps_on = self._overcome(stream), stream.steps_on
        writers = self._step_writers if self._is_part(stream) else []
        ends = stream.unhandled | stream.aborts
        events = []
        for event in stream.events:
            line, after = event.line, stream.plain - event.lines_after
            if line in repeats:
                after = stream.plain - handled[event.text]
            works = steps_on or line in survived
            # While a rank waits in a collective, no other one comes to a step.
            further = self._step_writers if event.role == rules.WAITED else writers
            works = works or any(w is not stream and w.steps_since(line) for w in further)
            completed = replace(
                event,
                # An event keeps the number of plain lines before it until now.
                lines_after=0 if line in aborts else after,
                went_on=event.text in handled and line not in aborts,
                steps_on=works and line not in stream.unhandled | aborts,
                handled=line in overcome or line < self._again_at,
                is_last=line in self._without_work and (line in ends or _ends_process(event)),
            )
            events.append(completed)
        return events

    @staticmethod
    def _is_part(stream: RankStream) -> bool:
        """Whether its lines may be of any process. Nodes, pods and ranks work until they miss one
        of them.
        """
        return stream.is_process or stream.key == UNKNOWN

    @staticmethod
    def _aborts(stream: RankStream) -> set[int]:
        """The lines by which the program of a stream ends itself."""
        # Another rank may write on for long, and a restart writes as before.
        steps_on = stream.steps_on
        last_ranks = {int(number) for number in _RANKS.findall(stream.last[:_HEAD])}
        return {
            event.line
            for event in stream.events
            if event.line in stream.aborts
            and (not steps_on or (last_ranks and last_ranks.isdisjoint(event.ranks)))
        }

    def _survived(self, stream: RankStream) -> set[int]:
        """The lines of errors that ended no process, as the program closes as usual."""
        is_part = self._is_part(stream)
        survived = stream.requests | {
            e.line for e in stream.events if 0 < self._closing_at <= e.line + 1 < self.at
            if e.frame or e.is_warning or e.line in stream.handled or e.role in _OF_OTHERS
            if e.kind not in OF_PROCESS and (is_part or stream.last_at > e.line)
        }  # fmt: skip
        texts = {e.text for e in stream.events if e.line in survived}
        return survived | {e.line for e in stream.events if e.text in texts and not e.code}

    def _overcome(self, stream: RankStream) -> set[int]:
        """The lines of errors that the program says it has handled, and works on."""
        last_at = max(self._last_step_at, self._last_failed_at)
        is_of_rank = stream.key[1] is not None
        return {
            # A step, two other lines or another failure came.
            line for line, plain in stream.handled.items() if line not in stream.unhandled
            if last_at > line or stream.plain - plain > 1
        } | {
            line for line in stream.announced
            if line < self._last_work_at and (not is_of_rank or line < stream.last_at)
        } | {
            # A traceback of code without a file, such as a model's answer, is quoted.
            e.line for e in stream.events if e.frame[:1] == "<" and e.line < self._last_progress_at
        } | {
            # The script continues, and ends with words of progress.
            line for line in stream.after_end if line < stream.last_at and goes_on(stream.last)
        }  # fmt: skip

    def stream(self, stream: RankStream, last_s: float | None) -> LogStream:
        """What the lines of a stream are. last_s: the time of the last one that has one"""
        words = stream.last_words(self._last_step_at) or stream.last * stream.is_torn
        return LogStream(
            *(stream.key[1], stream.key[2], stream.key[0], stream.lines),
            *(excerpt(stream.last, MAX_TEXT), last_s, excerpt(words, MAX_TEXT)),
            stream.is_torn or stream.is_cut(self._last_step_at, self.at),
            not self._last_complaints.isdisjoint(number for number, _ in stream.tail),
        )

    def _find_last_complaints(self) -> set[int]:
        """The lines with words of an error after which no line of the file shows progress: none is
        of a logger or of a step, speaks of progress or is like one before it.
        """
        rows = without_survived(self._last_lines)
        counts = Counter(shape_of(text) for _, text in rows)
        levels = {at for at, text in rows if rules.PHRASES["logs"].search(text, 0, LEVEL)}
        lines = set[int]()
        for number, text in reversed(rows):
            shape, weight = shape_of(text), complaint(text)
            counts[shape] -= 1
            # What the system answers is no end by itself.
            is_own = any(rules.PHRASES[name].search(text) for _, name in COMPLAINTS[1:])
            if weight > 1 and is_own and not (levels and TIMED.search(text)):
                lines.add(number)
            is_usual = bool(shape) and counts[shape] > 0
            if not weight and (is_usual or number in levels or goes_on(text)):
                break
        return lines

    def _find_closing(self) -> int:
        """The first of the last lines with progress, if the very last one speaks of it, and none
        of an end or an error; 0: not.
        """
        rows, names = self._last_lines, ("ends", "other-status")
        if not rows or not goes_on(rows[-1][1]):
            return 0
        return 1 + max((
            number for number, text in rows
            if complaint(text) or any(rules.PHRASES[name].search(text) for name in names)
        ), default=0)  # fmt: skip

    def _find_last_work(self) -> tuple[int, range]:
        """The last line that is of a step, 0 if none of the last ones is; and the lines after all
        that are of steps or tell that a failure was handled, to the first that says that the job
        has ended well.
        """
        rows = self._last_lines
        counts = shape_counts(rows)
        work_at = [at for at, text in rows if is_work(text, counts)]
        handled_at = [at for at, text in rows if is_handled(text)]
        first = max((*work_at, *handled_at), default=rows[0][0] if rows else 0)
        last = next((at for at, text in rows if ends_well(text)), self.at + 1)
        return max(work_at, default=0), range(first + 1, last)


def _ends_process(event: FailureEvent) -> bool:
    """Whether an event says that a process, or the job, has ended, and not well."""
    is_limit = (event.role, event.kind) == (rules.ENDED, "limit")
    is_fatal = event.role == rules.FAILED and event.has_phrase("last-level")
    is_end = event.role == rules.REPORT and rules.signal_of(event.code) not in rules.STOPS
    return is_limit or is_fatal or is_end

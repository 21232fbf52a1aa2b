"""The lines of one rank in one file while they are read."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile

from nodeready.agent.failures import rules
from nodeready.agent.failures.events import FailureEvent
from nodeready.agent.failures.plain_lines import (
    EXPLAINED,
    STEP,
    complaint,
    goes_on,
    is_handled,
    is_work,
    shape_counts,
    shape_of,
    without_survived,
)
from nodeready.agent.log_lines import TIMED

#: The stream of lines without a prefix.
UNKNOWN = ("", None, None)
#: Plain lines before a failure with which those after it are compared, the number of the latter,
#: and how often a line with few letters comes in a log of such lines.
RECENT, WATCHED, USUAL = 8, 500, 3
#: The rank that complains, by the words of a line without a prefix.
_COMPLAINING = re.compile(
    r"(?i)(?:\[[\d.: -]{1,30}\] {0,2})?(?:MPI )?(?:rank|task|process|pe)[ #]{0,2}(\d{1,7}): "
)
#: The different numbers of steps that show a job at work.
_STEPS = 4
#: Plain lines of a rank after words of an error in which these may be why it ends itself.
LAST_WORDS = 40
#: Characters of a line that have its level.
LEVEL = 60
#: A line of a box.
_FRAMED = re.compile(r"\s*([|*#!])\s+(\S.*?)\s*\1\s*$")


def _without_frame(text: str) -> str:
    """A line without the blanks around it, and without the sides of its box."""
    match = _FRAMED.match(text)
    return match[2] if match else text.strip()


@dataclass
class ReadException:
    """An exception while its lines are read."""

    event: FailureEvent
    is_known: bool
    has_user_frame: bool
    explains: bool  # the errors before it are its effects
    is_cause: bool = False  # the next one names it as its direct cause
    is_telemetry: bool = False  # of what sends a run's numbers to a server, beside the program


@dataclass
class RankStream:
    """The lines of one rank, and the state of reading them."""

    key: tuple[str, int | None, int | None]
    lines: int = 0
    plain: int = 0
    last: str = ""
    timed: str = ""
    events: list[FailureEvent] = field(default_factory=list)
    mode: str = ""
    #: The prefix of the lines of a traceback that is not learned, and its last text.
    prefix: re.Pattern[str] | None = None
    last_prefix: str = ""
    frames: list[tuple[str, str, str]] = field(default_factory=list)
    #: The exceptions of a chain; the details of the last one.
    chain: list[ReadException] = field(default_factory=list)
    #: The exception that the last lines of a traceback raise; "".
    raised: str = ""
    is_chained: bool = False
    is_ignored: bool = False
    details: list[str] = field(default_factory=list)
    #: The width of the box that Rich draws around a traceback, and wraps its message at; 0: none.
    width: int = 0
    spawned: int | None = None
    #: Whether the traceback is one that an exception of this process quotes.
    is_quoted: bool = False
    #: The fields of torchrun's report; the parts of the next report of each reporter.
    block: dict[str, str] = field(default_factory=dict)
    parts: dict[str, dict[str, str]] = field(default_factory=dict)
    #: Key of a row and its ranks -> number of plain lines before its last line.
    repeated: dict[tuple[str, str], int] = field(default_factory=dict)
    is_root: bool = False
    in_group: bool = False
    #: The last plain lines with text, each behind its number.
    tail: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=LAST_WORDS))
    #: Number of an event's line -> the shapes of the plain lines before it, each with such a line;
    #: the events after which a line of such a shape came that is no copy.
    watched: dict[int, dict[str, str]] = field(default_factory=dict)
    went_on: set[int] = field(default_factory=set)
    watched_until: int = 0
    #: Number of plain lines with text since the last event.
    since: int = 0
    #: The lines of exceptions that no code has handled.
    unhandled: set[int] = field(default_factory=set)
    #: The lines in which a program says that it ends itself: further ones are of other processes.
    aborts: set[int] = field(default_factory=set)
    #: Number of an event's line -> number of plain lines when it was handled; whether the level of
    #: the traceback that is read is of a warning.
    handled: dict[int, int] = field(default_factory=dict)
    is_warning: bool = False
    #: Whether that traceback is of what still runs when the program has ended.
    is_at_exit: bool = False
    #: Whether the line before that traceback says that its error was handled; the lines of such
    #: errors that would end a program otherwise, as that of an import does.
    is_announced: bool = False
    announced: set[int] = field(default_factory=set)
    #: The lines of errors of requests to a server, which end no process.
    requests: set[int] = field(default_factory=set)
    is_of_request: bool = False
    #: The lines of errors of a launcher itself after words that the job has ended well.
    after_end: set[int] = field(default_factory=set)
    #: The rank that the line before a traceback names.
    failing: tuple[int, ...] = ()
    last_at: int = 0

    @property
    def recent(self) -> list[tuple[int, str]]:
        return list(self.tail)[-RECENT:]

    def add_plain(self, text: str, number: int) -> None:
        """Count a line that belongs to no failure."""
        self.plain += 1
        if not text.strip():
            return
        self.last, self.last_at = text, number
        # A line that a program draws says nothing.
        self.since += self.since > 0 or any(map(str.isalnum, text))
        if self.since == 1 and self.events and is_handled(text):
            self.handled[self.events[-1].line] = self.plain
        last = self.events[-1] if self.events else None
        if last and last.is_warning and (goes_on(text) or is_handled(text)):
            # The peers that were missing have come.
            lost = (e for e in self.events if e.kind in ("network", "timeout"))
            self.handled |= {e.line: self.plain - 2 for e in lost if e.is_warning}
        if self.watched and self.plain > self.watched_until:
            self.watched = {}
        if self.watched:
            shape = shape_of(text, 0)
            self.went_on |= {
                line for line, shapes in self.watched.items() if shapes.get(shape, text) != text
            }
            self.watched = {
                line: shapes for line, shapes in self.watched.items() if line not in self.went_on
            }
        self.tail.append((number, text))

    def last_words(self, line: int = 0) -> str:
        """The last words of an error after a line of the file that no steps have survived, the
        first of several that stand together, but for lines with few letters; "".
        """
        lines: list[str] = []
        steps = 0
        rows = without_survived(self.tail)
        counts = shape_counts(rows)
        for number, text in reversed(rows):
            steps += is_work(text, counts)
            if number <= line or steps >= _STEPS:
                break
            weight = complaint(text)
            # A call within the failed call says less, unless it has the answer of the system.
            is_inner = weight < EXPLAINED and rules.PHRASES["inner-call"].search(text)
            lines += [_without_frame(text)] if not is_inner and (weight or shape_of(text)) else []
        weights = [complaint(text) for text in lines]
        weight = max(weights, default=0)
        last = weights.index(weight) if weight else 0
        first = last + len(list(takewhile(weight.__eq__, weights[last:]))) - 1
        if not weight:
            return ""
        # The line after a first line that says nothing says it.
        is_vague = first > 0 and rules.VAGUE.search(lines[first])
        return f"{lines[first]} {lines[first - 1]}" if is_vague else lines[first]

    def cause(self, line: int) -> str:
        """What the system has answered before the line of an error, but for further words of an
        error; "".
        """
        for number, text in reversed(self.recent):
            weight = complaint(text)
            if number < line and weight == EXPLAINED and rules.meaning(text).kind != "exception":
                return text.strip()
            is_between = weight or not shape_of(text) or rules.PHRASES["no-complaint"].search(text)
            if number < line and (goes_on(text) or not is_between):
                break
        return ""

    def words_before(self, line: int) -> str:
        """The first of the words of an error that stand right before a line of the file; ""."""
        rows = (text for number, text in reversed(self.recent) if number < line and shape_of(text))
        complaints = list(takewhile(complaint, rows))
        return complaints[-1].strip() if complaints else ""

    def complaining(self, words: str, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """The ranks that the words of an error right before an abort name in place of those that
        call it, and the first of these words; else the arguments. words: the last ones of an error
        """
        texts = [_without_frame(text) for _, text in reversed(self.recent)]
        block = takewhile(complaint, texts[texts.index(words) :] if words in texts else ())
        named = {int(match[1]): text for text in block if (match := _COMPLAINING.match(text))}
        if not named or not named.keys().isdisjoint(ranks):
            return ranks, words
        return tuple(sorted(named)), [*named.values()][-1]

    def last_block(self) -> str:
        """What a program says where its progress ends, before it ends itself; ""."""
        counts = Counter(shape_of(text, 0) for _, text in set(self.tail))
        words, no_complaint = "", rules.PHRASES["no-complaint"]
        for _, text in reversed(self.tail):
            is_drawn = not any(map(str.isalnum, text))
            if is_drawn and not (words and no_complaint.search(text)):
                continue
            is_usual = counts[shape_of(text, 0)] >= USUAL or no_complaint.search(text)
            if is_usual or STEP.search(text[:400]):
                return words
            words = _without_frame(text) if shape_of(text) else words
        return self.last.strip()

    def is_cut(self, line: int, end: int) -> bool:
        """Whether the lines end in an error that ends its program, after a line of the file.
        end: the last line of the file
        """
        # A logger's error ends none, unless its level says so, and it logs nothing then.
        logs, recent = rules.PHRASES["logs"], without_survived(self.recent)
        levels = [number for number, text in recent if logs.search(text, 0, LEVEL)]
        names = ("last-level",) if levels else ("last-level", "cries")
        progress = [number for number, text in recent if goes_on(text) and not complaint(text)]
        after, itself = max([line, *levels[-1:], *progress[-1:]]), rules.PHRASES["ends-itself"]
        return any(
            # What says that its program ends is followed by what the program closes.
            number > (line if itself.search(text) else after) and complaint(text)
            for number, text in recent
            if any(rules.PHRASES[name].search(text) for name in names)
            # The very last line of a program without a logger.
            or (not levels and number == end and not TIMED.search(text) and complaint(text) >= 2)
        )

    def set_host(self, task_hosts: Mapping[str, str]) -> None:
        """Name the node in place of the task of it that the prefix names. task_hosts: by task"""
        task, rank, local_rank = self.key
        if host := task_hosts.get(task):
            self.key = host, rank, local_rank
            self.events = [
                replace(event, host=host) if event.host == task else event for event in self.events
            ]

    @property
    def is_torn(self) -> bool:
        """Whether the lines end within the traceback of an error that nothing has handled."""
        is_fatal = not (self.is_ignored or self.is_warning or self.is_of_request)
        return is_fatal and self.mode == "traceback" and bool(self.frames)

    @property
    def is_process(self) -> bool:
        """Whether the prefix of the lines has the number of a process, and no rank."""
        return "pid " in self.key[0] and self.key[1] is None

    def steps_since(self, line: int, last: int = RECENT) -> bool:
        """Whether the last lines, those after a line of the file, are of growing steps, one of the
        very last, too.
        """
        # A bar, an epoch and a loop count each for itself.
        counts: dict[str, list[float]] = {}
        texts = [text for number, text in self.recent if number > line]
        row = rules.PHRASES["table-row"]
        matches = [[*STEP.finditer(text[:400])] or [*row.finditer(text[:400])] for text in texts]
        for match in chain.from_iterable(matches):
            number = match.lastindex or 0
            word = match[0][: match.start(number) - match.start()].strip().lower()
            counts.setdefault(word, []).append(float(match[number]))
        is_growing = all(a <= b for c in counts.values() for a, b in zip(c, c[1:]))
        has_steps = any(len(set(numbers)) >= _STEPS for numbers in counts.values())
        return has_steps and is_growing and any(matches[-last:])

    @property
    def steps_on(self) -> bool:
        """Whether the last lines, all after the last event, are of growing steps."""
        return self.since >= RECENT and self.steps_since(0, 2)

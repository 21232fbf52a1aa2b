"""The failures that the lines of a dead job's logs report: events with their rank, kind and time.

Pure, and the same code on a node and on the control machine. An event says what its own file
reports, and never more.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import takewhile

from nodeready.agent import failure_rules as rules
from nodeready.agent import log_ranks
from nodeready.agent.log_lines import STAMP_CHARACTERS, TIMED, Calendar, node_calendar, stamp
from nodeready.agent.log_ranks import ranks_in
from nodeready.agent.log_variables import LogFacts, ends_well, read_facts
from nodeready.agent.witnesses.flight_recorder import Recording
from nodeready.agent.witnesses.logs import WatchdogReport, reports
from nodeready.core import wire
from nodeready.core.text import excerpt

#: The source of an error that a launcher, or a script that starts the ranks, raises itself.
LAUNCHERS_OWN = "launcher's own"
#: The source of a rank's error that its peers quote.
OF_PEERS = "its peers"
#: The source of an event that only warns.
WARNING = "warning"
#: The source of an error before any rank is started.
NOT_LAUNCHED = "not launched"
#: Maximum characters of an event's text.
MAX_TEXT = 400
#: Maximum events of one file; of one stream, the first and the last.
_MAX_EVENTS, _MAX_OF_STREAM = 4000, 12
#: Maximum lines in which reports of the watchdog are searched.
_MAX_CANDIDATES = 20_000


@dataclass(frozen=True)
class FailureEvent:
    """One failure that a log reports."""

    kind: wire.Name  # see `failure_rules`
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


_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
#: What pytest writes before the lines of an error.
_PYTEST = re.compile(r"^E {3}(?: {4})?")
_HEADER = re.compile(
    r"(?P<prefix>.*?(?:^|[\s|:\])>]))(?:Original )?Traceback \(most recent call last\):"
    # Behind it, a checkpoint of torch.distributed names the rank that it quotes.
    r"\s*(?:\(RANK (?P<rank>\d{1,7})\)\s*)?$"
)
_FRAME = re.compile(r'^>?\s*(?:\| *)?File "([^"]{1,1000})", line (\d{1,7})(?:,? in (.{1,200}))?')
#: A frame behind what a logger or a launcher writes before each line.
_FRAME_WITHIN = re.compile(r'(?:^|(?<=\s)) {2}File "[^"]{1,1000}", line \d')
#: Fortran's list-directed output begins with one blank.
_FORTRAN = re.compile(r" [A-Za-z*(]")
#: The beginning and a frame of a traceback that Rich draws.
_RICH = "╭", "Traceback (most recent call last) ─"
_RICH_FRAME = re.compile(r"^│ (\S.{0,999}?):(\d{1,7}) in (\S{1,200})")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
#: An exception without its traceback, and with it.
_NAMED = re.compile(
    r"^(?:(?:[A-Za-z_][\w.]*[\w.])(?:Error|Exception)(?:\([\w.]+\))?|KeyboardInterrupt|StopIteration)"
    r"(?::\s.*|:?\s*$)"
)
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:\([\w.]+\))?(?::\s.*|:?\s*$)")
#: A word of another program than Python, which names its exceptions with their modules.
_C_NAME = re.compile(r"[a-z]\w*:")
_SPAWNED = re.compile(
    r"(?:^|.{0,160}[\s\]:|>])-- Process (\d{1,7}) terminated with the following error:"
)
#: An exception that only announces a quoted one.
_ANNOUNCES = re.compile(
    r"(?:^|\.)(?:Exception|[A-Z]\w+Exception):\s*$|\bcaught \w{1,80} with message:\s*$"
)
_WATCHDOG = re.compile(r"(?:\[E[^\]]{1,80}\] )?\[Rank (\d{1,7})\] Watchdog caught")
#: The line of the program that raises an exception with a message.
_RAISES = re.compile(r"""\braise (\w[\w.]{0,100})\((["'])([^"'{}%]{1,200})\2\)\s*$""")
_CODE = re.compile(r" {4}[A-Za-z_]\w*(?:\(| = |\.\w+[(.])|\s+(?:at \S|\.\.\. \d+ more)")
#: The text of an exception of C++, without a time at its beginning.
_WHAT = re.compile(r"^\s*what\(\):\s*(?:\[\d\d:\d\d:\d\d\] )?(?P<text>.*)")
#: The directory of the line in a library that raises an exception.
_PATH = re.compile(r"(?<= )(?:[\w.-]*/)+(?=\w+\.(?:cpp|cc|cu|h):\d)")
#: Maximum further lines of an exception's message.
_DETAILS = 12
#: The margin of an exception group's lines, and its exception.
_MARGIN = re.compile(r" *(?:\| ?|\+ ?)+")
_GROUP = re.compile(r"(?:\S+\.)?(?:Base)?ExceptionGroup: ")
#: Plain lines before a failure with which those after it are compared, the number of the latter,
#: and letters of such a line; how often a line with fewer letters comes in a log of such lines.
_RECENT, _WATCHED, _LETTERS, _USUAL = 8, 500, 8, 3
#: The rank that complains, by the words of a line without a prefix.
_COMPLAINING = re.compile(
    r"(?i)(?:\[[\d.: -]{1,30}\] {0,2})?(?:MPI )?(?:rank|task|process|pe)[ #]{0,2}(\d{1,7}): "
)
#: Equal lines but for their numbers that show a program at work.
_ALIKE = 8
#: The rank that a line of a program names, and the characters in which it does.
_RANKS, _HEAD = re.compile(r"(?i)\b(?:rank|task|process|pe)[ =#:]{0,2}(\d{1,7})\b"), 80
#: The different numbers of steps that show a job at work.
_STEP, _STEPS = rules.PHRASES["step"], 4
#: Characters in which two lines with words of an error are alike.
_SAME = 32
#: Plain lines of a rank after words of an error in which these may be why it ends itself.
_LAST_WORDS = 40
#: The words of an error: those that say so weigh more than those of what is not as it should be.
_EXPLAINED, _COMPLAINTS = 3, ((3, "system"), (2, "complains"), (1, "objects"))
#: The kinds of errors that end a process, although they are of one request.
_OF_PROCESS = "gpu", "segfault", "signal"
#: The kinds of errors that a server causes.
_OF_SERVERS = "exception", "network", "timeout", "limit"
#: The roles of errors that another process has caused.
_OF_OTHERS = rules.LOST, rules.CONSEQUENCE
#: Maximum processes that are asked whether a program continues.
_WRITERS = 4
#: Characters of a line that have its level; the outermost calls of an error that nothing has
#: handled, after which come at most the steps that were still in a buffer.
_LEVEL = 60
_OUTERMOST = "<module>", "_bootstrap", "_wrap", "_run_module_as_main"
#: Characters in which a line's time ends, if it begins with it.
_TIME_END = 28


@dataclass
class _Exception:
    """An exception while its lines are read."""

    event: FailureEvent
    is_known: bool
    has_user_frame: bool
    explains: bool  # the errors before it are its effects
    is_cause: bool = False  # the next one names it as its direct cause
    is_telemetry: bool = False  # of what sends a run's numbers to a server, beside the program


@dataclass
class _RankStream:
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
    chain: list[_Exception] = field(default_factory=list)
    #: The exception that the last lines of a traceback raise; "".
    raised: str = ""
    is_chained: bool = False
    is_ignored: bool = False
    details: list[str] = field(default_factory=list)
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
    tail: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=_LAST_WORDS))
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
        return list(self.tail)[-_RECENT:]

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
        if last and last.is_warning and (_goes_on(text) or is_handled(text)):
            # The peers that were missing have come.
            lost = (e for e in self.events if e.kind in ("network", "timeout"))
            self.handled |= {e.line: self.plain - 2 for e in lost if e.is_warning}
        if self.watched and self.plain > self.watched_until:
            self.watched = {}
        if self.watched:
            shape = _shape(text, 0)
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
        rows = _without_survived(self.tail)
        counts = _counts(rows)
        for number, text in reversed(rows):
            steps += _is_work(text, counts)
            if number <= line or steps >= _STEPS:
                break
            weight = complaint(text)
            # A call within the failed call says less, unless it has the answer of the system.
            is_inner = weight < _EXPLAINED and rules.PHRASES["inner-call"].search(text)
            lines += [text.strip()] if not is_inner and (weight or _shape(text)) else []
        weights = [complaint(text) for text in lines]
        weight = max(weights, default=0)
        last = weights.index(weight) if weight else 0
        first = last + len(list(takewhile(weight.__eq__, weights[last:]))) - 1
        if not weight:
            return ""
        # The line after a first line that says nothing says it.
        is_vague = first > last and rules.VAGUE.search(lines[first])
        return f"{lines[first]} {lines[first - 1]}" if is_vague else lines[first]

    def cause(self, line: int) -> str:
        """What the system has answered before the line of an error, but for further words of an
        error; "".
        """
        for number, text in reversed(self.recent):
            weight = complaint(text)
            if number < line and weight == _EXPLAINED and rules.meaning(text).kind != "exception":
                return text.strip()
            is_between = weight or not _shape(text) or rules.PHRASES["no-complaint"].search(text)
            if number < line and (_goes_on(text) or not is_between):
                break
        return ""

    def words_before(self, line: int) -> str:
        """The first of the words of an error that stand right before a line of the file; ""."""
        rows = (text for number, text in reversed(self.recent) if number < line and _shape(text))
        complaints = list(takewhile(complaint, rows))
        return complaints[-1].strip() if complaints else ""

    def complaining(self, words: str, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """The ranks that the words of an error right before an abort name in place of those that
        call it, and the first of these words; else the arguments. words: the last ones of an error
        """
        texts = [text.strip() for _, text in reversed(self.recent)]
        block = takewhile(complaint, texts[texts.index(words) :] if words in texts else ())
        named = {int(match[1]): text for text in block if (match := _COMPLAINING.match(text))}
        if not named or not named.keys().isdisjoint(ranks):
            return ranks, words
        return tuple(sorted(named)), [*named.values()][-1]

    def last_block(self) -> str:
        """What a program says where its progress ends, before it ends itself; ""."""
        counts = Counter(_shape(text, 0) for _, text in set(self.tail))
        words, no_complaint = "", rules.PHRASES["no-complaint"]
        for _, text in reversed(self.tail):
            is_usual = counts[_shape(text, 0)] >= _USUAL or no_complaint.search(text)
            if is_usual or _STEP.search(text[:400]):
                return words
            words = text.strip() if _shape(text) else words
        return self.last.strip()

    def is_cut(self, line: int, end: int) -> bool:
        """Whether the lines end in an error that ends its program, after a line of the file.
        end: the last line of the file
        """
        # A logger's error ends none, unless its level says so, and it logs nothing then.
        logs, recent = rules.PHRASES["logs"], _without_survived(self.recent)
        levels = [number for number, text in recent if logs.search(text, 0, _LEVEL)]
        names = ("last-level",) if levels else ("last-level", "cries")
        progress = [number for number, text in recent if _goes_on(text) and not complaint(text)]
        return any(
            number > max([line, *levels[-1:], *progress[-1:]]) and complaint(text)
            for number, text in recent
            if any(rules.PHRASES[name].search(text) for name in names)
            # The very last line of a program without a logger.
            or (not levels and number == end and not TIMED.search(text) and complaint(text) >= 2)
        )

    @property
    def is_torn(self) -> bool:
        """Whether the lines end within the traceback of an error that nothing has handled."""
        is_fatal = not (self.is_ignored or self.is_warning or self.is_of_request)
        return is_fatal and self.mode == "traceback" and bool(self.frames)

    @property
    def is_process(self) -> bool:
        """Whether the prefix of the lines has the number of a process, and no rank."""
        return "pid " in self.key[0] and self.key[1] is None

    def steps_since(self, line: int, last: int = _RECENT) -> bool:
        """Whether the last lines, those after a line of the file, are of growing steps, one of the
        very last, too.
        """
        # A bar, an epoch and a loop count each for itself.
        counts: dict[str, list[float]] = {}
        texts = [text for number, text in self.recent if number > line]
        matches = [list(_STEP.finditer(text[:400])) for text in texts]
        for match in (match for row in matches for match in row):
            word = match[0][: match.start(1) - match.start()].lower() if match[1] else ""
            counts.setdefault(word, []).append(float(match[1] or match[2]))
        is_growing = all(a <= b for c in counts.values() for a, b in zip(c, c[1:]))
        has_steps = any(len(set(numbers)) >= _STEPS for numbers in counts.values())
        return has_steps and is_growing and any(matches[-last:])

    @property
    def steps_on(self) -> bool:
        """Whether the last lines, all after the last event, are of growing steps."""
        return self.since >= _RECENT and self.steps_since(0, 2)


def _is_of_request(text: str) -> bool:
    """Whether the error below a line is of a request to a server, which it may have answered."""
    answer = rules.PHRASES["answers"].search(text[:600])
    is_refused = answer and answer[answer.lastindex or 0] in ("4", "5")
    return bool(is_refused or rules.PHRASES["of-a-request"].search(text))


def is_handled(text: str) -> bool:
    """Whether a line says that its program has handled an error, and continues."""
    head = text[:400]
    return bool(rules.PHRASES["handles"].search(head)) and not rules.PHRASES["ends"].search(head)


def _counts(rows: Iterable[tuple[int, str]]) -> Counter[str]:
    """How often each shape of a line comes that has no word of an error."""
    return Counter(_shape(text) for _, text in rows if not complaint(text))


def _is_work(text: str, counts: Mapping[str, int]) -> bool:
    """Whether a line is of a step, also of a program that has no word for its steps."""
    shape = _shape(text)
    return bool(_STEP.search(text[:400]) or (shape and counts.get(shape, 0) >= _ALIKE))


def _goes_on(text: str) -> bool:
    """Whether a line is of a step, or speaks of progress."""
    return bool(_STEP.search(text[:400]) or rules.PHRASES["progresses"].search(text[:400]))


def _without_survived(lines: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """The lines, without the words of an error that begin like those before a line of progress."""
    new, survived, rows = set[str](), set[str](), []
    for number, text in lines:
        head = _shape(text, 0)[:_SAME] if complaint(text) else None
        if head not in survived:
            rows.append((number, text))
        if head is not None:
            new.add(head)
        elif new and _goes_on(text):
            survived |= new
    return rows


@lru_cache(maxsize=1 << 10)
def complaint(text: str) -> int:
    """How much a line that no row explains tells of an error that ends a program; 0: nothing."""
    weights = (weight for weight, words in _COMPLAINTS if rules.PHRASES[words].search(text))
    weight = next(weights, 0)
    is_none = any(rules.PHRASES[name].search(text) for name in ("no-complaint", "warns"))
    if not weight or is_none or is_handled(text):
        return 0
    # Words that a row explains say most, unless they only announce others.
    if rules.VAGUE.search(text):
        return min(weight, _EXPLAINED - 1)
    return _EXPLAINED if rules.meaning(text).is_known else weight


#: The stream of lines without a prefix; the reader of a log in which they are not known.
_UNKNOWN, _NO_PREFIXES = ("", None, None), log_ranks.RankReader()


class FailureReader:
    """Reads the lines of one file, one at a time.

    year:   of times without a year
    reader: takes the prefix off a line
    candidates: the lines that may be of a failure or of the watchdog
    unknown_prefix: see `FileFailures`
    """

    def __init__(
        self,
        year: int,
        calendar: Calendar = node_calendar,
        reader: log_ranks.RankReader = _NO_PREFIXES,
    ) -> None:
        self.year, self.calendar, self.reader = year, calendar, reader
        self.streams: dict[tuple[str, int | None, int | None], _RankStream] = {}
        self.streams_of_rank: dict[int | None, list[_RankStream]] = {}
        self.number = 0
        self.candidates: list[str] = []
        self.room = log_ranks.MAX_RANKS
        self.left_out = self.unknown_prefix = 0
        self.timed = ""  # the last line with a time
        #: The lines that say that the job is started again.
        self.restarts: list[int] = []
        #: The stream of the last traceback behind a prefix, and the number of its first line; 0:
        #: its further lines have no prefix.
        self.header: tuple[_RankStream | None, int] = None, 0

    def feed(self, line: str) -> None:
        """Read one line."""
        self.number += 1
        line, moment = log_ranks.unwrapped(line) if self.reader.is_contained else (line, "")
        if line[:1] == "{" and (rows := _structured(line)):
            for row in rows:
                self._feed(row, moment)
        else:
            self._feed(line, moment)

    def _feed(self, line: str, moment: str) -> None:
        plain = self.streams.get(_UNKNOWN)
        is_quiet = plain is not None and not plain.mode and self.reader.is_plain
        if (
            plain is not None
            and is_quiet
            and line[:1] not in ("[", "(", "f", "w", "\t")
            and "\r" not in line
            and not rules.has_needle(line)
        ):
            # Nearly all lines of most logs.
            plain.lines += 1
            plain.add_plain(line, self.number)
            if TIMED.search(moment or line, 0, STAMP_CHARACTERS):
                plain.timed = self.timed = moment or line
            return
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        if line[:4] == "E   ":
            line = _PYTEST.sub("", line)
        origin = self.reader.read(line[: 2 * rules.MAX_LINE].rstrip())
        text, moment = origin.text[: rules.MAX_LINE], moment or origin.time
        after = log_ranks.after_bars(text) if rules.has_needle(text) else text
        if after is not text and rules.has_needle(after):
            text = after
        stream = self._continued(origin.key, text) or self.streams.get(origin.key)
        if stream is None:
            stream = self.streams[origin.key] = _RankStream(origin.key)
            self.streams_of_rank.setdefault(origin.key[1], []).append(stream)
        stream.lines += 1
        if stream.in_group:
            margin = _MARGIN.match(text)
            stream.in_group = margin is not None
            text = text[margin.end() :] if margin else text
        if stream.mode and stream.prefix:
            text = _without_prefix(stream, text)
        is_plain = (
            not stream.mode and not rules.has_needle(text) and not text.startswith(rules.SKIPPED)
        )
        if is_plain or not self._read(stream, text, line):
            if stream.key == _UNKNOWN and not is_plain and is_handled(text):
                self._handle(text, stream.last_at)
            if not is_plain and rules.PHRASES["starts-again"].search(text):
                self.restarts.append(self.number)
            stream.add_plain(text, self.number)
        # Parsed only when an event needs it.
        if TIMED.search(moment or text, 0, STAMP_CHARACTERS):
            stream.timed = self.timed = moment or text

    def _handle(self, text: str, line: int) -> None:
        """A line without a rank says that the errors of ranks right before it, of its kind, are
        handled. line: the last plain line before it
        """
        kind = rules.kind_of_words(text)
        for stream in self.streams.values() if kind != "exception" else ():
            if stream.key[1] is not None:
                self._end_chain(stream)
                lines = [e.line for e in stream.events[-1:] if e.kind == kind and e.line > line]
                stream.handled |= dict.fromkeys(lines, stream.plain - 2)

    def _continued(self, key: tuple[str, int | None, int | None], text: str) -> _RankStream | None:
        """The stream of a traceback whose first line alone has a prefix, as loggers write it."""
        stream, line = self.header
        if stream is None or key != _UNKNOWN:
            return None
        is_next = line == self.number - 1 and _FRAME.match(text)
        is_over = line or TIMED.search(text, 0, _TIME_END)
        if not is_next and (is_over or not (stream.mode or stream.is_chained)):
            self.header = None, 0
            return None
        self.header = stream, 0
        return stream

    # --- One line of a stream. Whether it belongs to a failure.

    def _read(self, stream: _RankStream, text: str, line: str) -> bool:
        if stream.mode == "traceback" and self._in_traceback(stream, text):
            return True
        if stream.mode == "block" and self._in_block(stream, text):
            return True
        if stream.mode == "fatal" and self._in_fatal(stream, text):
            return True
        if (
            _FORTRAN.match(text)
            and not stream.mode
            and self._line(stream, text[1:], rules.LINE_ROWS)
        ):
            return True
        is_indented = not text or text[0] in " \t|+"
        if is_indented and "raceback" not in text:
            return (
                self._frame(stream, text)
                or self._line(stream, text, rules.INDENTED_ROWS)
                or self._detail(stream, text)
                or text.startswith(rules.SKIPPED)
            )
        if text.startswith(_CHAINED):
            stream.is_chained = True
            self._end_details(stream)
            for item in stream.chain[-1:]:
                item.is_cause = text.startswith(_CHAINED[1])
            return True
        if rules.PHRASES["ignores"].search(text):
            stream.is_ignored = True
            return True
        if len(self.candidates) < _MAX_CANDIDATES:
            rank = stream.key[1]
            self.candidates.append(line if rank is None else f"[rank{rank}]: {text}")
        header = _HEADER.match(text)
        if header or (text.startswith(_RICH[0]) and _RICH[1] in text):
            self._begin_traceback(stream, text, line, header)
            return True
        if text.startswith(rules.SKIPPED) and not is_handled(text):
            return True
        if match := _SPAWNED.match(text):
            stream.spawned = int(match[1])
            return True
        if block := _BLOCK.match(text):
            self._end_chain(stream)
            stream.mode, stream.block = "block", {}
            stream.is_root = block["name"].startswith("Root")
            if block["prefix"]:
                stream.prefix = log_ranks.prefix_pattern(block["prefix"])
            return True
        if self._frame(stream, text) or self._line(stream, text, rules.LINE_ROWS):
            return True
        # A result of a C library explains the exception before it.
        is_named = _NAMED.match(text) and not (stream.mode == "details" and _C_NAME.match(text))
        if is_named and stream.is_ignored:
            stream.is_ignored = False
            return True
        if is_named and not is_handled(text):
            self._end_chain(stream)
            before = self._before(stream)
            stream.failing = stream.failing or _failing(before)
            self._add_exception(stream, text)
            if is_handled(before) or rules.PHRASES["warns"].search(before[:_LEVEL]):
                stream.handled[self.number] = stream.plain
            stream.mode = "details"
            return True
        return self._detail(stream, text)

    def _before(self, stream: _RankStream) -> str:
        """The line right before, where it belongs to no failure; ""."""
        return stream.last if stream.last_at == self.number - 1 else ""

    def _begin_traceback(
        self, stream: _RankStream, text: str, line: str, header: re.Match[str] | None
    ) -> None:
        """The first line of a traceback. header: its parts; None: Rich draws it"""
        prefix = header["prefix"] if header else ""
        self._end_details(stream)
        if stream.chain and _ANNOUNCES.search(stream.chain[-1].event.text):
            stream.chain.pop()
        is_original = "Original Traceback" in text or stream.in_group
        stream.in_group = stream.in_group or "Exception Group Traceback" in text
        if is_original and stream.chain:
            stream.is_chained = True
        stream.mode, stream.frames, stream.is_quoted = "traceback", [], False
        # A logger writes the traceback below its line.
        before = self._before(stream)
        is_warning = bool(rules.PHRASES["warns"].search(prefix or before[:_LEVEL]))
        stream.is_announced = is_handled(before)
        stream.is_at_exit = rules.PHRASES["at-exit"].search(before) is not None
        stream.is_warning = is_warning or stream.is_announced
        stream.is_ignored |= bool(rules.PHRASES["ignores"].search(before))
        # A logger names the rank above a traceback that has no prefix.
        lines = (s.last for s in self.streams.values() if s.last_at == self.number - 1)
        stream.failing = _failing(next(lines, ""))
        if header and header["rank"]:
            stream.failing, stream.is_quoted = (int(header["rank"]),), True
        is_further = stream.is_chained and stream.is_of_request
        # A row may explain the line above.
        earlier = before or "".join(
            e.text for e in stream.events[-1:] if e.line == self.number - 1
        )
        stream.is_of_request = is_further or _is_of_request(earlier)
        host, rank, local = stream.key
        is_unknown = (rank, local) == (None, None) and host[:1] in ("", "[")
        if is_unknown and (host or log_ranks.may_tell_rank(prefix)):
            self.unknown_prefix = self.unknown_prefix or self.number
        if prefix:
            stream.prefix, stream.last_prefix = log_ranks.prefix_pattern(prefix), prefix.rstrip()
        elif text == line.rstrip():
            stream.prefix = None
        if stream.key != _UNKNOWN:
            self.header = stream, self.number

    def _frame(self, stream: _RankStream, text: str) -> bool:
        """A frame without the beginning of its traceback, such as that of a quoted error."""
        is_quoted = stream.chain and stream.chain[-1].event.role == rules.CONSEQUENCE
        match = _FRAME_WITHIN.search(text)
        if (stream.chain and not is_quoted) or not (match or _FRAME.match(text)):
            return False
        stream.is_quoted = any(item.event.has_phrase("wraps") for item in stream.chain[-1:])
        self._end_chain(stream)
        stream.mode, stream.frames = "traceback", []
        if match and match.start():
            stream.prefix = log_ranks.prefix_pattern(text[: match.start()])
            text = _without_prefix(stream, text)
        return self._in_traceback(stream, text)

    def _detail(self, stream: _RankStream, text: str) -> bool:
        """A further line of an exception's message."""
        if stream.mode != "details":
            return False
        message = stream.chain[-1].event.text if stream.chain else ""
        # A line that begins with a time, or of a step, is no further line of a message.
        is_vague = not stream.details and rules.VAGUE.search(message)
        shape = _shape(text)
        is_usual = shape and any(_shape(line) == shape for _, line in stream.recent)
        is_step = _STEP.search(text) or is_handled(text) or rules.PHRASES["answers"].search(text)
        is_plain = not is_vague and (is_usual or is_step)
        is_item = rules.PHRASES["item"].search(text)
        logs = rules.PHRASES["logs"]
        is_logged = TIMED.search(text, 0, _TIME_END) or logs.search(text, 0, _LEVEL)
        is_plain = bool(is_plain or (is_logged and not is_item))
        # The text of an exception of C++ may begin with a time itself.
        is_plain = is_plain and (bool(stream.details) or not _WHAT.match(text))
        is_listed = bool(shape) and [_shape(line) for line in stream.details[-1:]] == [shape]
        heads = message, *stream.details[:_DETAILS]
        is_listed = is_listed and any(map(rules.LISTS.search, heads))
        is_full = len(stream.details) >= (log_ranks.MAX_RANKS if is_listed else _DETAILS)
        if is_full or is_plain:
            self._end_chain(stream)
            return False
        # Code, as below a frame, is of another rank's traceback, whose lines are between these.
        if not _CODE.match(text):
            stream.details.append(text.strip())
        return True

    # --- Tracebacks.

    def _in_traceback(self, stream: _RankStream, text: str) -> bool:
        if match := _FRAME.match(text) or _RICH_FRAME.match(text):
            if len(stream.frames) < 1000:
                stream.frames.append((match[1], match[2], match[3] or ""))
            return True
        if not text.strip() or text[0] in " \t│╰":
            if call := _RAISES.search(text):
                stream.raised = f"{call[1]}: {call[3]}"
            return True
        if _C_NAME.match(text):
            return False  # Slurm and other programs write into the same file.
        stream.mode = ""
        raised, stream.raised = stream.raised, ""
        message = raised.partition(": ")[2]
        is_other = not _RAISED.match(text) or _FRAME_WITHIN.search(text) is not None
        if raised and message in text and (is_other or text.count(message) > 1):
            # The words of several ranks are mixed.
            is_other, text = False, raised
        if _HEADER.match(text) or is_other:
            return False
        path, _, function = stream.frames[0] if stream.frames else ("", "", "")
        is_printed = stream.is_at_exit or bool(rules.PRINTED_CALLS.search(f"{path} {function}"))
        is_printed = is_printed and rules.meaning(text).kind == "exception"
        if stream.is_ignored or is_printed or rules.PHRASES["at-exit"].search(text):
            stream.is_ignored = False
            return True
        has_user_frame = any(not rules.LIBRARY_FILES.search(path) for path, _, _ in stream.frames)
        report = rules.find_row(rules.REPORT_ROWS, text)
        if report and not (report[0].is_own and has_user_frame):
            # A launcher's own traceback, below the errors of its ranks.
            stream.is_chained, stream.frames = False, []
            return self._line(stream, text, rules.REPORT_ROWS)
        # A text that only quotes a traceback, such as a model's answer, has no files.
        is_quoted = all(path[0] == "<" for path, _, _ in stream.frames)
        stream.announced |= {self.number} if is_quoted else set()
        self._add_exception(stream, text)
        stream.mode = "details"
        return True

    def _add_exception(self, stream: _RankStream, text: str) -> None:
        if not stream.is_chained:
            self._end_chain(stream)
        stream.is_chained, text = False, rules.quoted(text)
        user = [frame for frame in stream.frames if not rules.LIBRARY_FILES.search(frame[0])]
        frame = _frame_text(*(user or stream.frames or [("", "", "")])[-1])
        text_meaning = rules.meaning(text)
        is_outside = rules.OUTSIDE_FILES.search(" ".join(path for path, _, _ in stream.frames))
        if text_meaning.role == rules.LOST and is_outside:
            text_meaning = text_meaning._replace(role=rules.FAILED)
        event = self._event(stream, text_meaning.role, text_meaning.kind, _compact(text))
        event = replace(event, frame=frame, call=_collective(stream.frames))
        if text_meaning.role == rules.FAILED and not event.ranks:
            event = replace(event, ranks=_failing(text) or stream.failing)
        paths = [path for path, _, _ in stream.frames if not rules.STANDARD_FILES.search(path)]
        if rules.EXIT_STATUS.search(text) or any(map(rules.LAUNCHER_FILES.search, paths[-1:])):
            event = replace(event, source=LAUNCHERS_OWN)
        if not user and rules.BEFORE_RANKS.search(" ".join(call for _, _, call in stream.frames)):
            is_again = any(e.role == rules.REPORT for e in stream.events)
            event = replace(event, source=LAUNCHERS_OWN if is_again else NOT_LAUNCHED)
        if (
            not user
            and rules.is_of_launcher(paths)
            and any(ends_well(t) for _, t in stream.recent)
        ):
            stream.after_end.add(event.line)
        if stream.frames and stream.frames[0][2] in _OUTERMOST:
            stream.unhandled.add(event.line)
            stream.announced |= {event.line} if stream.is_announced else set()
        elif stream.frames and stream.is_warning:
            stream.handled[event.line] = stream.plain
        elif stream.frames and stream.is_of_request and event.role in (rules.FAILED, rules.LOST):
            is_lasting = event.kind in _OF_PROCESS or event.has_phrase("reported-late")
            is_lasting = is_lasting or bool(event.call)
            stream.requests |= set() if is_lasting else {event.line}
        if stream.spawned is not None:
            event = replace(event, local_rank=stream.spawned)
            stream.unhandled.add(event.line)
            stream.spawned = None
        if stream.is_quoted:
            # It is of the process of another rank, or of none.
            source = OF_PEERS if stream.failing else event.source
            event = replace(event, ranks=stream.failing, local_rank=None, host="", source=source)
            stream.is_quoted = False
        stream.chain.append(
            _Exception(
                event, text_meaning.is_known, bool(user), text_meaning.explains,
                is_telemetry=not user and any(map(rules.TELEMETRY_FILES.search, paths[:1])),
            )
        )  # fmt: skip
        stream.frames, stream.details, stream.failing = [], [], ()

    def _end_details(self, stream: _RankStream) -> None:
        """Complete the last exception by the lines after it."""
        if not stream.chain:
            return
        last, lines = stream.chain[-1], [rules.quoted(line) for line in stream.details if line]
        message = last.event.text
        is_vague = bool(rules.VAGUE.search(last.event.text))
        if lines and (match := _WHAT.match(lines[0])):
            # Several ranks have named theirs before the first text follows.
            while stream.events and stream.events[-1].text == message:
                stream.events.pop()
            text = f"{message}: {match['text']}"
            text_meaning = rules.meaning("\n".join([text, *lines[1:]]))
            last.event = replace(
                last.event, role=text_meaning.role, kind=text_meaning.kind, text=text
            )
            is_vague = bool(rules.VAGUE.search(text)) and not rules.PHRASES["check"].search(text)
            last.is_known, lines = text_meaning.is_known, lines[1:]
        if lines and is_vague:
            text_meaning = rules.meaning("\n".join(lines))
            # NCCL repeats its last warning at the end.
            refers = rules.PHRASES["says-below"]
            after = max((at for at, line in enumerate(lines, 1) if refers.search(line)), default=0)
            words = [line for line in lines[after:] if any(map(str.isalpha, line))]
            messages = [line for line in words if not rules.VAGUE.search(line)] or lines[-1:]
            checks = [line for line in messages if rules.PHRASES["check"].search(line)]
            explained = (line for line in messages if rules.meaning(line).is_known)
            text = _PATH.sub("", last.event.text)
            text = f"{text} {next(explained, (checks or messages)[0])}"
            last.event = replace(last.event, text=text)
            if not last.is_known or (text_meaning.is_known and text_meaning.role == rules.FAILED):
                is_vague = not text_meaning.is_known and text_meaning.kind == "exception"
                kind = last.event.kind if is_vague else text_meaning.kind
                last.event = replace(last.event, role=text_meaning.role, kind=kind)
                last.is_known = text_meaning.is_known
        matches = filter(None, map(rules.PHRASES["caused"].search, lines))
        causes = [match[match.lastindex or 0] for match in matches]
        if causes and (not last.is_known or last.event.role == rules.CONSEQUENCE):
            text_meaning = rules.meaning(causes[-1])
            text = message = _cause_and_effect(causes[-1], last.event.text)
            last.event = replace(
                last.event, role=text_meaning.role, kind=text_meaning.kind, text=text
            )
            last.is_known = text_meaning.is_known
        names = _listed_names([message, *lines])
        text = f"{last.event.text[: MAX_TEXT // 2]} {names}"
        if not names or len(text) > MAX_TEXT:
            # A part of the names would be wrong.
            text = message if names else last.event.text
        last.event = replace(last.event, text=excerpt(text, MAX_TEXT))
        stream.details = []
        if stream.mode == "details":
            stream.mode = ""

    def _end_chain(self, stream: _RankStream) -> None:
        """Add the event of a chain of exceptions: what began it, then what it became."""
        self._end_details(stream)
        chain, stream.chain = stream.chain, []
        # The program itself works without its server.
        if not chain or all(i.is_telemetry and i.event.kind in _OF_SERVERS for i in chain):
            return
        # Further errors say that their cause is elsewhere, without saying where.
        causes = [item for item in chain if item.event.role != rules.CONSEQUENCE or item.explains]
        if any(item.is_known or item.has_user_frame or item.is_cause for item in causes):
            chain = causes
        first, last = chain[0], chain[-1]
        event = first.event
        if last.event.source == NOT_LAUNCHED:
            first.event = event = replace(event, source=NOT_LAUNCHED)
        if first is not last:
            # A loader's worker reports the original exception after its own.
            is_wrapped = event.text.partition(": ")[2].startswith("Caught ") or bool(
                _GROUP.match(event.text)
            )
            if is_wrapped:
                first, last = last, first
                local = last.event.local_rank if event is last.event else None
                event = first.event = replace(first.event, local_rank=local)
            elif last.explains or (
                not first.is_known and not first.has_user_frame and last.is_known
            ):
                # The loader finds its worker dead behind a broken pipe between them, or says first
                # which signal ended it.
                signals = (i for i in chain if i.explains and i.event.role == rules.FAILED)
                event = next(signals, last).event
            text = event.text
            if last.event.text != text and event is first.event:
                text = _cause_and_effect(text, last.event.text)
            frames = [item.event.frame for item in chain if item.has_user_frame]
            event = replace(event, frame=next(iter(frames), event.frame))
            kinds = [item.event.kind for item in chain if item.event.role == event.role]
            # What has timed out became an error of a connection.
            kinds = [kind for kind in kinds if kind != "exception"]
            kind = next((kind for kind in kinds if kind != "timeout"), "")
            kind = kind or next(iter(kinds), event.kind)
            event = replace(
                event, text=text, kind=kind if event.role == rules.FAILED else event.kind
            )
        self._add(stream, event)

    def _end_cut(self, stream: _RankStream) -> None:
        """The file ends in a traceback: below a collective, of a lost peer; else of an error that
        is not known.
        """
        frame = _frame_text(*stream.frames[-1])
        text = f"a traceback that is cut off at {frame}"
        if call := _collective(stream.frames):
            event = self._event(stream, rules.LOST, "network", text)
            self._add(stream, replace(event, frame=frame, call=call))
        else:
            stream.last = text

    def _in_fatal(self, stream: _RankStream, text: str) -> bool:
        """The stack that faulthandler writes: the innermost call first."""
        match = _FRAME.match(text)
        if match and stream.events:
            if match[1].endswith(rules.COLLECTIVE_FILES) and stream.events[-1].kind == "timeout":
                waits = replace(stream.events[-1], role=rules.WAITED, call=match[3] or "")
                stream.events[-1] = waits
            if not rules.LIBRARY_FILES.search(match[1]) and not stream.events[-1].frame:
                frame = _frame_text(match[1], match[2], match[3] or "")
                stream.events[-1] = replace(stream.events[-1], frame=frame)
            return True
        if not text or "most recent call first" in text or text.startswith(("Extension mod", " ")):
            return True
        stream.mode = ""
        return False

    # --- torchrun's report.

    def _in_block(self, stream: _RankStream, text: str) -> bool:
        if re.match(r"^(?:\[\d+\]:|-{5,}|={5,}|\*{5,})", text) or _BLOCK.match(text):
            self._end_block(stream)
            if text.startswith(("=", "*")):
                stream.mode = ""
            elif text.endswith(":") and not text.startswith("["):
                stream.is_root = text.startswith("Root")
            return True
        if match := re.match(r"^  (time|host|rank|exitcode|error_file|traceback) *: ?(.*)", text):
            stream.block[match[1]] = match[2]
        elif not text or text.startswith(" "):
            if "traceback" in stream.block and _RAISED.match(text[2:]):
                stream.block["exception"] = text[2:]
        else:
            self._end_block(stream)
            stream.mode = ""
            return False
        return True

    def _end_block(self, stream: _RankStream) -> None:
        block, stream.block = stream.block, {}
        rank = re.match(r"(\d{1,7})(?: \(local_rank: (\d{1,5})\))?", block.get("rank", ""))
        code = re.match(r"(-?\d{1,5})(?: *\(pid: (\d{1,10})\))?", block.get("exitcode", ""))
        if not rank or not code:
            return
        status = int(code[1])
        text = block.get("exception", "")
        event = replace(
            self._event(stream, rules.REPORT, rules.kind_of_code(status), text),
            source="torchrun-root" if stream.is_root else "torchrun",
            ranks=(int(rank[1]),),
            local_rank=int(rank[2]) if rank[2] else None,
            host=block.get("host", "")[:255],
            pid=int(code[2] or 0),
            code=status,
            time_s=stamp(block.get("time", ""), self.year, self.calendar),
            last_words=self._last_words(stream, (int(rank[1]),)),
        )
        self._add(stream, event)
        if text:
            text_meaning = rules.meaning(text)
            self._add(
                stream, replace(event, role=text_meaning.role, kind=text_meaning.kind, code=0)
            )

    # --- Events.

    def _line(self, stream: _RankStream, text: str, rows: rules.Rows) -> bool:
        """A line that a row explains."""
        match = rules.find_row(rows, text, stream.parts)
        if match is None:
            return False
        row, groups = match
        if row.completes:
            part = stream.parts.pop(row.reporter)
            text = ": ".join(g["text"] for g in (part, groups) if "text" in g) or text
            groups = {**part, **groups, "text": text}
        if row.role == rules.PART or row.begins:
            stream.parts[row.reporter] = groups
        if row.role == rules.PART:
            # One that is an error by itself is a plain line, too.
            return not rules.PHRASES["cries"].search(text)
        words = rules.quoted(groups.get("text", text))
        text_meaning = rules.meaning(words)
        if row.role == rules.TEXT and not (text_meaning.is_known or row.details):
            return False
        if row.role in (rules.TEXT, rules.FAILED, rules.LOST) and is_handled(words):
            return False
        self._end_chain(stream)
        if row.completes and _is_named(stream, words, groups):
            return True
        if row.completes and "code" in groups:
            words = f"exit status {groups['code']}"
        role = text_meaning.role if row.role == rules.TEXT else row.role
        kind = row.kind or rules.kind_of_groups(groups, text_meaning.kind)
        ranks = ranks_in(groups["ranks"]) if "ranks" in groups else _stream_ranks(stream)
        is_own = row.aborts and text_meaning.role != rules.LOST
        last_words = self._last_words(stream, ranks) if is_own else ""
        if last_words and stream.key[1] is None:
            ranks, last_words = stream.complaining(last_words, ranks)
        if last_words:
            words, complained = _cause_and_effect(last_words, words), rules.meaning(last_words)
            role, kind = complained.role, complained.kind
        code = rules.code_of(groups)
        if row.role == rules.REPORT and not code:
            return True
        if row.repeats and self._is_repeated(stream, row.key, groups.get("ranks", "")):
            return True
        event = replace(
            self._event(stream, role, kind, words),
            time_s=self._moment(text),
            source="" if row.is_own else row.reporter,
            ranks=ranks,
            local_rank=int(groups["local"]) if "local" in groups else stream.key[2],
            host=groups.get("host", stream.parts.get(row.reporter, {}).get("host", stream.key[0])),
            pid=int(groups.get("pid", 0)),
            code=code,
        )
        if row.role == rules.REPORT:
            event = replace(event, last_words=self._last_words(stream, ranks))
        elif (
            row.aborts
            and not (last_words or row.completes)
            and all(e.is_warning for e in stream.events)
        ):
            event = replace(event, last_words=stream.last_block())
        if not event.source and event.role == rules.FAILED and rules.EXIT_STATUS.search(words):
            event = replace(event, source=LAUNCHERS_OWN)
        if row.details:
            stream.chain = [_Exception(event, text_meaning.is_known, False, False)]
            stream.frames, stream.details = [], []
        else:
            self._add(stream, event)
        if row.aborts or rules.PHRASES["fatal-log"].search(text):
            stream.aborts.add(self.number)
        # A shell runs its next command.
        stream.announced |= {self.number} if event.has_phrase("of-a-shell") else set()
        stream.mode = "details" if row.details else "fatal" if row.stack else stream.mode
        return True

    def _last_words(self, stream: _RankStream, ranks: Sequence[int]) -> str:
        """The last words of an error before ranks end: theirs, or those of unknown ranks; ""."""
        streams = [other for rank in ranks for other in self.streams_of_rank.get(rank, [])]
        return next((words for other in (*streams, stream) if (words := other.last_words())), "")

    @staticmethod
    def _is_repeated(stream: _RankStream, key: str, ranks: str) -> bool:
        """Whether a line of this row came shortly before; it counts as the last one then."""
        last = stream.repeated.get((key, ranks))
        stream.repeated[key, ranks] = stream.plain
        return last is not None and stream.plain - last <= _WATCHED

    def _moment(self, text: str) -> float | None:
        return stamp(text, self.year, self.calendar)

    def _event(self, stream: _RankStream, role: str, kind: str, text: str) -> FailureEvent:
        host, _, local = stream.key
        shown, ranks = excerpt(text.strip(), MAX_TEXT), _stream_ranks(stream)
        # A line that names no rank comes after all lines before it, and not only after its like.
        timed = self.timed if stream.key == _UNKNOWN else stream.timed
        return FailureEvent(
            *(kind, role, "", shown, "", ranks, local, host, 0, 0),
            *(None, self._moment(timed), self.number, stream.plain),
        )

    def _add(self, stream: _RankStream, event: FailureEvent) -> None:
        is_vague = (event.role, event.kind, event.source) == (rules.FAILED, "exception", "")
        is_vague = is_vague and not any(map(event.has_phrase, ("system", "of-the-program")))
        if is_vague and (cause := stream.cause(event.line)):
            means = rules.meaning(cause)
            text = _cause_and_effect(cause, event.text)
            event = replace(event, text=text, role=means.role, kind=means.kind)
        elif event.source == LAUNCHERS_OWN and (words := stream.words_before(event.line)):
            # The words of the command tell why it failed.
            text = _cause_and_effect(words, event.text)
            event = replace(event, text=text, kind=rules.meaning(words).kind)
        if len(event.ranks) > self.room:
            event = replace(event, ranks=())
        self.room -= len(event.ranks)
        if event.role != rules.REPORT and len(stream.watched) < _MAX_OF_STREAM:
            shapes = Counter(_shape(text, 0) for _, text in stream.recent)
            stream.watched[event.line] = {
                shape: text for _, text in stream.recent
                # Another rank announces its error as this one does.
                if not rules.PHRASES["of-rank"].search(text)
                if (shape := _shape(text)) or shapes[(shape := _shape(text, 0))] >= _USUAL
            }  # fmt: skip
            stream.watched_until = stream.plain + _WATCHED
        stream.since = self.streams.get(_UNKNOWN, stream).since = 0
        stream.events.append(event)
        if len(stream.events) > 2 * _MAX_OF_STREAM:
            del stream.events[_MAX_OF_STREAM]
            self.left_out += 1

    def _last_complaints(self, end: int) -> set[int]:
        """The lines with words of an error after which no line of the file shows progress: none is
        of a logger or of a step, speaks of progress or is like one before it. end: the last line
        """
        rows = _without_survived(self._last_lines(end))
        counts = Counter(_shape(text) for _, text in rows)
        levels = {at for at, text in rows if rules.PHRASES["logs"].search(text, 0, _LEVEL)}
        lines = set[int]()
        for number, text in reversed(rows):
            shape, weight = _shape(text), complaint(text)
            counts[shape] -= 1
            # What the system answers is no end by itself.
            is_own = any(rules.PHRASES[name].search(text) for _, name in _COMPLAINTS[1:])
            if weight > 1 and is_own and not (levels and TIMED.search(text)):
                lines.add(number)
            is_usual = bool(shape) and counts[shape] > 0
            if not weight and (is_usual or number in levels or _goes_on(text)):
                break
        return lines

    def _last_lines(self, end: int) -> list[tuple[int, str]]:
        """The last plain lines of the file, each behind its number. end: the last one's number"""
        tails = (row for stream in self.streams.values() for row in stream.tail)
        return sorted(row for row in tails if row[0] > end - _LAST_WORDS)

    def _closing(self, end: int) -> int:
        """The first of the last lines with progress, if the very last one speaks of it, and none
        of an end or an error; 0: not.
        """
        rows, names = self._last_lines(end), ("ends", "other-status")
        if not rows or not _goes_on(rows[-1][1]):
            return 0
        return 1 + max((
            number for number, text in rows
            if complaint(text) or any(rules.PHRASES[name].search(text) for name in names)
        ), default=0)  # fmt: skip

    def _last_work(self, end: int) -> tuple[int, range]:
        """The last line that is of a step, 0 if none of the last ones is; and the lines after all
        that are of steps or tell that a failure was handled, to the first that says that the job
        has ended well. end: the last line
        """
        rows = self._last_lines(end)
        counts = _counts(rows)
        work_at = [at for at, text in rows if _is_work(text, counts)]
        handled_at = [at for at, text in rows if is_handled(text)]
        first = max((*work_at, *handled_at), default=rows[0][0] if rows else 0)
        last = next((at for at, text in rows if ends_well(text)), end + 1)
        return max(work_at, default=0), range(first + 1, last)

    def _end_messages(self) -> None:
        """End what each stream is in the middle of: the file has no further line."""
        for stream in self.streams.values():
            if stream.mode == "traceback" and stream.frames:
                self._end_cut(stream)
            details, failed = [*filter(None, stream.details)], rules.PHRASES["other-status"]
            self._end_chain(stream)
            is_over = bool(details) and _goes_on(details[-1]) and stream.last_at < self.number
            if is_over and not any(map(failed.search, details)):
                # The lines to the end were none of the message.
                stream.add_plain(details[-1], self.number)
            if stream.mode == "block":
                self._end_block(stream)

    def failures(self) -> FileFailures:
        """What the lines so far report."""
        self._end_messages()
        events = []
        # Of the task of a node, torchrun's own report has the node.
        task_hosts = {
            stream.key[0]: event.host
            for stream in self.streams.values()
            for event in stream.events
            if event.source == "torchrun-root" and stream.key[0]
        }
        # Some processes of a program, beside its helpers, write its steps.
        step_writers = [
            s for s in self.streams.values() if s.steps_since(0)
            if s.is_process or s.key == _UNKNOWN or s.key[1] is not None
        ][:_WRITERS]  # fmt: skip
        last_steps = (s.last_at for s in self.streams.values() if _STEP.search(s.last))
        last_step_at = max(last_steps, default=0)
        end_at = max((s.last_at for s in self.streams.values()), default=0)
        last_complaints = self._last_complaints(end_at)
        closing_at = self._closing(end_at)
        last_work_at, without_work = self._last_work(end_at)
        last_failed_at = max((
            event.line for s in self.streams.values() for event in s.events
            if event.role == rules.FAILED and event.line not in s.handled
        ), default=0)  # fmt: skip
        # The last attempt that has come to a step or to an error.
        last_at = max(last_step_at, last_work_at, last_failed_at)
        again_at = max((number for number in self.restarts if number < last_at), default=0)
        for stream in self.streams.values():
            host, rank, local = stream.key
            if task_host := task_hosts.get(host):
                stream.key = task_host, rank, local
                stream.events = [
                    replace(event, host=task_host if event.host == host else event.host)
                    for event in stream.events
                ]
            # An error like one after which the rank went on was handled, too.
            handled: dict[str, int] = {}
            for event in stream.events:
                if event.line in stream.went_on:
                    handled.setdefault(event.text, event.lines_after)
            repeats = stream.went_on - stream.unhandled
            # Nodes, pods and ranks work until they miss one of them.
            is_part = stream.is_process or stream.key == _UNKNOWN
            steps_on = stream.steps_on
            # Another rank may write on for long, and a restart writes as before.
            last_ranks = {int(number) for number in _RANKS.findall(stream.last[:_HEAD])}
            aborts = {
                event.line
                for event in stream.events
                if event.line in stream.aborts
                and (not steps_on or (last_ranks and last_ranks.isdisjoint(event.ranks)))
            }
            survived = stream.requests | {
                e.line for e in stream.events if 0 < closing_at <= e.line + 1 < end_at
                if e.frame or e.is_warning or e.line in stream.handled or e.role in _OF_OTHERS
                if e.kind not in _OF_PROCESS and (is_part or stream.last_at > e.line)
            }  # fmt: skip
            texts = {e.text for e in stream.events if e.line in survived}
            survived |= {e.line for e in stream.events if e.text in texts and not e.code}
            # The program says so, and works on: a step, two other lines or another failure came.
            overcome = {
                line for line, plain in stream.handled.items() if line not in stream.unhandled
                if max(last_step_at, last_failed_at) > line or stream.plain - plain > 1
            }  # fmt: skip
            overcome |= {
                line for line in stream.announced
                if line < last_work_at and (rank is None or line < stream.last_at)
            } | {
                # The script continues, and ends with words of progress.
                line for line in stream.after_end
                if line < stream.last_at and _goes_on(stream.last)
            }  # fmt: skip
            # An event keeps the number of plain lines before it until now.
            events += [
                replace(
                    event,
                    lines_after=0
                    if event.line in aborts
                    else stream.plain
                    - (handled[event.text] if event.line in repeats else event.lines_after),
                    went_on=event.text in handled and event.line not in aborts,
                    steps_on=event.line not in stream.unhandled | aborts
                    and (
                        steps_on
                        or any(
                            writer is not stream and writer.steps_since(event.line)
                            for writer in (step_writers if is_part else ())
                        )
                        or event.line in survived
                    ),
                    handled=event.line in overcome or event.line < again_at,
                    is_last=event.line in without_work
                    and (event.line in stream.unhandled | stream.aborts or _ends_process(event)),
                )
                for event in stream.events
            ]
        # Before 2.2, only the watchdog's own words name the rank: not if two groups contradict.
        file_reports = reports(self.candidates)
        waiting = {report.rank for report in file_reports if report.kind == "timeout"}
        for index, event in enumerate(events):
            match = None if event.ranks else _WATCHDOG.match(event.text)
            if match and int(match[1]) in waiting:
                events[index] = replace(event, ranks=(int(match[1]),))
        events.sort(key=lambda event: event.line)
        half = _MAX_EVENTS // 2
        if len(events) > _MAX_EVENTS:
            self.left_out += len(events) - _MAX_EVENTS
            events = events[:half] + events[-half:]
        streams = tuple(
            LogStream(
                *(stream.key[1], stream.key[2], stream.key[0], stream.lines),
                *(excerpt(stream.last, MAX_TEXT), self._moment(stream.timed)),
                excerpt(stream.last_words(last_step_at) or stream.last * stream.is_torn, MAX_TEXT),
                stream.is_torn or stream.is_cut(last_step_at, end_at),
                not last_complaints.isdisjoint(number for number, _ in stream.tail),
            )
            for stream in self.streams.values()
        )
        return FileFailures(
            "", events=tuple(events), streams=streams, reports=file_reports,
            left_out=self.left_out, unknown_prefix=self.unknown_prefix,
        )  # fmt: skip


#: The beginnings of the parts of torchrun's report, also behind a time or a name.
_BLOCK = re.compile(
    r"^(?P<prefix>(?=.{0,120}[\d|[]).{0,120}[\s|\]:>])?"
    r"(?P<name>Failures|Other Failures|Root Cause(?: \(first observed failure\))?):$"
)


def _is_named(stream: _RankStream, words: str, groups: Mapping[str, str]) -> bool:
    """Whether a report repeats the last error of an unknown rank, which gets its rank then."""
    last = stream.events[-1] if stream.events else None
    if last is None or last.ranks or "ranks" not in groups or not last.text.startswith(words):
        return False
    stream.events[-1] = replace(last, ranks=ranks_in(groups["ranks"]))
    return True


def _ends_process(event: FailureEvent) -> bool:
    """Whether an event says that a process, or the job, has ended, and not well."""
    is_limit = (event.role, event.kind) == (rules.ENDED, "limit")
    is_fatal = event.role == rules.FAILED and event.has_phrase("last-level")
    is_end = event.role == rules.REPORT and rules.signal_of(event.code) not in rules.STOPS
    return is_limit or is_fatal or is_end


def _without_prefix(stream: _RankStream, text: str) -> str:
    """A line of a traceback without the prefix of its first line."""
    match = stream.prefix.match(text) if stream.prefix else None
    if match is None:
        if _FRAME.match(text):
            # Only the first line has it.
            stream.prefix = None
        return text
    last, stream.last_prefix = stream.last_prefix, match[0].rstrip()
    # After the exception, a line of another time is no further line of its message.
    return text if stream.mode == "details" and last != stream.last_prefix else text[match.end() :]


def _cause_and_effect(cause: str, effect: str) -> str:
    """The text of an error, and of that which it became; a long cause keeps the most room."""
    effect = excerpt(effect, max(100, MAX_TEXT - len(cause) - len("; then ")))
    return f"{excerpt(cause, MAX_TEXT - len(effect) - len('; then '))}; then {effect}"


_DIGITS = re.compile(r"\d+(?:\.\d+)?")


def _listed_names(lines: Sequence[str]) -> str:
    """The names in the lines of a message below the beginning of a list; ""."""
    at = next((at for at, line in enumerate(lines[:-1], 1) if rules.LISTS.search(line)), 0)
    match = rules.LISTS.search(lines[at - 1])
    if not at or not match:
        return ""
    shape = _shape(lines[at])
    names = list(takewhile(lambda name: _shape(name) == shape, lines[at:]))
    prefix = names[0].rstrip("0123456789")
    numbers = [name[len(prefix) :] for name in names if name.startswith(prefix)]
    if len(numbers) < len(names) or not all(map(str.isdigit, numbers)):
        return f"{match[0]} {', '.join(names)}"
    return f"{match[0]} {prefix}{','.join(map(str, sorted(map(int, numbers))))}"


def _shape(text: str, letters: int = _LETTERS) -> str:
    """A line without its numbers, to compare it with others; "": it has fewer letters."""
    shape = _DIGITS.sub("0", text[:160])
    return shape if sum(map(str.isalpha, shape)) >= letters else ""


def _collective(frames: Sequence[tuple[str, str, str]]) -> str:
    """The function of torch.distributed in which a traceback ends; ""."""
    if any(path.endswith(rules.FIRST_CALL_FILES) for path, _, _ in frames):
        return rules.FIRST_CALL
    names = [name for path, _, name in frames if path.endswith(rules.COLLECTIVE_FILES)]
    return next((name for name in reversed(names) if not name.startswith("_")), "")


_FINGERPRINT = re.compile(
    r"Rank (\d{1,7}) is running (?:inconsistent )?collective: "
    r"CollectiveFingerPrint\(([^()]{0,400})"
)
_PART = re.compile(r"(?:OpType|TensorShape|TensorDtypes)=(\w+|\[[\d, ]{0,200}\])")


def _compact(text: str) -> str:
    """An exception's text; of a mismatch of collectives (ProcessGroupWrapper.cpp), the two calls:
    ``Rank 0 calls ALLREDUCE [64] Float, rank 2 calls BROADCAST [64] Float``.
    """
    calls = [
        f"rank {rank} calls {' '.join(_PART.findall(parts))}"
        for rank, parts in _FINGERPRINT.findall(text)[:2]
    ]
    return f"{text.partition('.')[0]}: {', '.join(calls)}" if len(calls) > 1 else text


def _frame_text(path: str, number: str, function: str) -> str:
    """A call as reports write it: ``train.py:12 in step``; "": none."""
    place = f" in {function}" if function else ""
    return f"{path.rpartition('/')[2]}:{number}{place}"[:MAX_TEXT] if path else ""


def _stream_ranks(stream: _RankStream) -> tuple[int, ...]:
    return () if stream.key[1] is None else (stream.key[1],)


def _failing(text: str) -> tuple[int, ...]:
    """The rank that failed by the words of an error; (): none."""
    match = rules.PHRASES["of-rank"].search(text[:MAX_TEXT])
    return (int(match[match.lastindex or 0]),) if match else ()


#: Maximum characters of a line of JSON, and the keys of its rank.
_MAX_JSON, _RANK_KEYS = 1 << 16, ("rank", "global_rank", "RANK")


def _structured(line: str) -> list[str]:
    """The lines in the texts of a logger's JSON object, with its rank; []: it has none."""
    if len(line) > _MAX_JSON or not rules.has_needle(line):
        return []
    try:
        data = wire.load_json(line)
    except wire.DecodeError:
        return []
    rank = next((data[key] for key in _RANK_KEYS if type(data.get(key)) is int), None)
    prefix = "" if rank is None else f"[rank{rank}]: "
    inner = [value for part in data.values() if isinstance(part, dict) for value in part.values()]
    texts = [value for value in (*data.values(), *inner) if isinstance(value, str)]
    head = " ".join(text for text in texts if "\n" not in text)
    rows = [row for text in texts if "\n" in text for row in text.split("\n")]
    return [prefix + row for row in (head, *rows)]


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

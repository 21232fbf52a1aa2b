"""Reads the lines of one file of a dead job, one at a time, and finds the failures in them.

Pure, and the same code on a node and on the control machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from nodeready.agent import log_ranks
from nodeready.agent.failures import rules
from nodeready.agent.failures.events import (
    LAUNCHERS_OWN,
    MAX_TEXT,
    NOT_LAUNCHED,
    OF_PEERS,
    OF_PROCESS,
    FailureEvent,
    FileFailures,
)
from nodeready.agent.failures.file_end import FileEnd
from nodeready.agent.failures.plain_lines import (
    STEP,
    goes_on,
    is_handled,
    is_of_request,
    shape_of,
)
from nodeready.agent.failures.rank_stream import (
    LEVEL,
    UNKNOWN,
    USUAL,
    WATCHED,
    RankStream,
    ReadException,
)
from nodeready.agent.log_lines import STAMP_CHARACTERS, TIMED, Calendar, node_calendar, stamp
from nodeready.agent.log_ranks import ranks_in
from nodeready.agent.log_variables import ends_well
from nodeready.agent.witnesses.logs import reports
from nodeready.core import wire
from nodeready.core.text import excerpt

#: Maximum events of one file; of one stream, the first and the last.
_MAX_EVENTS, _MAX_OF_STREAM = 4000, 12
#: Maximum lines in which reports of the watchdog are searched.
_MAX_CANDIDATES = 20_000

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
#: The kinds of errors that a server causes.
_OF_SERVERS = "exception", "network", "timeout", "limit"
#: The outermost calls of an error that nothing has handled, after which come at most the steps
#: that were still in a buffer.
_OUTERMOST = "<module>", "_bootstrap", "_wrap", "_run_module_as_main"
#: Characters in which a line's time ends, if it begins with it.
_TIME_END = 28


#: The reader of a log in which no prefix is known.
_NO_PREFIXES = log_ranks.RankReader()


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
        self.streams: dict[tuple[str, int | None, int | None], RankStream] = {}
        self.streams_of_rank: dict[int | None, list[RankStream]] = {}
        self.number = 0
        self.candidates: list[str] = []
        self.room = log_ranks.MAX_RANKS
        self.left_out = self.unknown_prefix = 0
        self.timed = ""  # the last line with a time
        #: The lines that say that the job is started again.
        self.restarts: list[int] = []
        #: The stream of the last traceback behind a prefix, and the number of its first line; 0:
        #: its further lines have no prefix.
        self.header: tuple[RankStream | None, int] = None, 0

    def feed(self, line: str) -> None:
        """Read one line."""
        self.number += 1
        line, moment = log_ranks.unwrapped(line) if self.reader.is_contained else (line, "")
        if (line[:1] == "{" or " msg=" in line) and (rows := _structured(line)):
            for row in rows:
                self._feed(row, moment)
        else:
            self._feed(line, moment)

    def _feed(self, line: str, moment: str) -> None:
        plain = self.streams.get(UNKNOWN)
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
            stream = self.streams[origin.key] = RankStream(origin.key)
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
            if stream.key == UNKNOWN and not is_plain and is_handled(text):
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

    def _continued(self, key: tuple[str, int | None, int | None], text: str) -> RankStream | None:
        """The stream of a traceback whose first line alone has a prefix, as loggers write it."""
        stream, line = self.header
        if stream is None or key != UNKNOWN:
            return None
        is_next = line == self.number - 1 and _FRAME.match(text)
        is_over = line or TIMED.search(text, 0, _TIME_END)
        if not is_next and (is_over or not (stream.mode or stream.is_chained)):
            self.header = None, 0
            return None
        self.header = stream, 0
        return stream

    # --- One line of a stream. Whether it belongs to a failure.

    def _read(self, stream: RankStream, text: str, line: str) -> bool:
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
            self._end_announced(stream)
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
            stream.is_quoted = _wraps(stream)
            self._end_chain(stream)
            before = self._before(stream)
            stream.failing = stream.failing or _failing(before)
            stream.is_of_request = is_of_request(before or self._event_above(stream))
            self._add_exception(stream, text)
            if is_handled(before) or rules.PHRASES["warns"].search(before[:LEVEL]):
                stream.handled[self.number] = stream.plain
            stream.mode = "details"
            return True
        return self._detail(stream, text)

    def _before(self, stream: RankStream) -> str:
        """The line right before, where it belongs to no failure; ""."""
        return stream.last if stream.last_at == self.number - 1 else ""

    def _event_above(self, stream: RankStream) -> str:
        """The text of the event of the line right before; "": it has none."""
        return "".join(e.text for e in stream.events[-1:] if e.line == self.number - 1)

    def _begin_traceback(
        self, stream: RankStream, text: str, line: str, header: re.Match[str] | None
    ) -> None:
        """The first line of a traceback. header: its parts; None: Rich draws it"""
        prefix = header["prefix"] if header else ""
        self._end_announced(stream)
        is_original = "Original Traceback" in text or stream.in_group
        stream.in_group = stream.in_group or "Exception Group Traceback" in text
        if is_original and stream.chain:
            stream.is_chained = True
        stream.mode, stream.frames, stream.is_quoted = "traceback", [], False
        stream.width = 0 if header else len(text.rstrip())
        # A logger writes the traceback below its line.
        before = self._before(stream)
        is_warning = bool(rules.PHRASES["warns"].search(prefix or before[:LEVEL]))
        stream.is_announced = is_handled(prefix) or is_handled(before)
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
        stream.is_of_request = is_further or is_of_request(before or self._event_above(stream))
        host, rank, local = stream.key
        is_unknown = (rank, local) == (None, None) and host[:1] in ("", "[")
        if is_unknown and (host or log_ranks.may_tell_rank(prefix)):
            self.unknown_prefix = self.unknown_prefix or self.number
        if prefix:
            stream.prefix, stream.last_prefix = log_ranks.prefix_pattern(prefix), prefix.rstrip()
        elif text == line.rstrip():
            stream.prefix = None
        if stream.key != UNKNOWN:
            self.header = stream, self.number

    def _frame(self, stream: RankStream, text: str) -> bool:
        """A frame without the beginning of its traceback, such as that of a quoted error."""
        is_quoted = stream.chain and stream.chain[-1].event.role == rules.CONSEQUENCE
        match = _FRAME_WITHIN.search(text)
        if (stream.chain and not is_quoted) or not (match or _FRAME.match(text)):
            return False
        stream.is_quoted = _wraps(stream)
        self._end_chain(stream)
        stream.mode, stream.frames = "traceback", []
        if match and match.start():
            stream.prefix = log_ranks.prefix_pattern(text[: match.start()])
            text = _without_prefix(stream, text)
        return self._in_traceback(stream, text)

    def _detail(self, stream: RankStream, text: str) -> bool:
        """A further line of an exception's message."""
        if stream.mode != "details":
            return False
        message = stream.chain[-1].event.text if stream.chain else ""
        # A line that begins with a time, or of a step, is no further line of a message, unless the
        # line before says that it follows.
        is_vague = rules.VAGUE.search([message, *stream.details][-1])
        shape = shape_of(text)
        is_usual = shape and any(shape_of(line) == shape for _, line in stream.recent)
        is_step = STEP.search(text) or is_handled(text) or rules.PHRASES["answers"].search(text)
        is_plain = not is_vague and (is_usual or is_step)
        is_item = rules.PHRASES["item"].search(text)
        logs = rules.PHRASES["logs"]
        is_logged = TIMED.search(text, 0, _TIME_END) or logs.search(text, 0, LEVEL)
        is_plain = bool(is_plain or (is_logged and not is_item))
        # The text of an exception of C++ may begin with a time itself.
        is_plain = is_plain and (bool(stream.details) or not _WHAT.match(text))
        is_listed = bool(shape) and [shape_of(line) for line in stream.details[-1:]] == [shape]
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

    def _in_traceback(self, stream: RankStream, text: str) -> bool:
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

    def _add_exception(self, stream: RankStream, text: str) -> None:
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
            # The line that announces it is one of those that tell.
            stream.handled[event.line] = stream.plain - stream.is_announced
        elif stream.is_of_request and event.role in (rules.FAILED, rules.LOST):
            is_lasting = event.kind in OF_PROCESS or event.has_phrase("reported-late")
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
            ReadException(
                event, text_meaning.is_known, bool(user), text_meaning.explains,
                is_telemetry=not user and any(map(rules.TELEMETRY_FILES.search, paths[:1])),
            )
        )  # fmt: skip
        stream.frames, stream.details, stream.failing = [], [], ()

    def _end_details(self, stream: RankStream) -> None:
        """Complete the last exception by the lines after it."""
        if not stream.chain:
            return
        last, lines = stream.chain[-1], [rules.quoted(line) for line in stream.details if line]
        message = _unwrap(last.event.text, lines, stream.width)
        if message != last.event.text:
            _reword(last, message, rules.meaning(message))
        is_vague = _is_vague(message)
        # Other lines of its process may stand before the text.
        texts = ((at, match) for at, line in enumerate(lines) if (match := _WHAT.match(line)))
        if first := next(texts, None):
            number, match = first
            # Several ranks have named theirs before the first text follows.
            while stream.events and stream.events[-1].text == message:
                stream.events.pop()
            text = f"{message}: {match['text']}"
            lines = [*lines[:number], *lines[number + 1 :]]
            _reword(last, text, rules.meaning("\n".join([text, *lines])))
            is_vague = _is_vague(text)
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
            message = _cause_and_effect(causes[-1], last.event.text)
            _reword(last, message, rules.meaning(causes[-1]))
        names = _listed_names([message, *lines])
        text = f"{last.event.text[: MAX_TEXT // 2]} {names}"
        if not names or len(text) > MAX_TEXT:
            # A part of the names would be wrong.
            text = message if names else last.event.text
        last.event = replace(last.event, text=excerpt(text, MAX_TEXT))
        stream.details = []
        if stream.mode == "details":
            stream.mode = ""

    def _end_announced(self, stream: RankStream) -> None:
        """Complete the last exception, unless it only announces the one that follows."""
        self._end_details(stream)
        if stream.chain and _ANNOUNCES.search(stream.chain[-1].event.text):
            stream.chain.pop()

    def _end_chain(self, stream: RankStream) -> None:
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

    def _end_cut(self, stream: RankStream) -> None:
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

    def _in_fatal(self, stream: RankStream, text: str) -> bool:
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

    def _in_block(self, stream: RankStream, text: str) -> bool:
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

    def _end_block(self, stream: RankStream) -> None:
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

    def _line(self, stream: RankStream, text: str, rows: rules.Rows) -> bool:
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
            stream.chain = [ReadException(event, text_meaning.is_known, False, False)]
            stream.frames, stream.details = [], []
        else:
            self._add(stream, event)
        if row.aborts or rules.PHRASES["fatal-log"].search(text):
            stream.aborts.add(self.number)
        if event.role == rules.LOST and is_of_request(text):
            stream.requests.add(self.number)
        # A shell runs its next command.
        stream.announced |= {self.number} if event.has_phrase("of-a-shell") else set()
        stream.mode = "details" if row.details else "fatal" if row.stack else stream.mode
        return True

    def _last_words(self, stream: RankStream, ranks: Sequence[int]) -> str:
        """The last words of an error before ranks end: theirs, or those of unknown ranks; ""."""
        streams = [other for rank in ranks for other in self.streams_of_rank.get(rank, [])]
        return next((words for other in (*streams, stream) if (words := other.last_words())), "")

    @staticmethod
    def _is_repeated(stream: RankStream, key: str, ranks: str) -> bool:
        """Whether a line of this row came shortly before; it counts as the last one then."""
        last = stream.repeated.get((key, ranks))
        stream.repeated[key, ranks] = stream.plain
        return last is not None and stream.plain - last <= WATCHED

    def _moment(self, text: str) -> float | None:
        return stamp(text, self.year, self.calendar)

    def _event(self, stream: RankStream, role: str, kind: str, text: str) -> FailureEvent:
        host, _, local = stream.key
        shown, ranks = excerpt(text.strip(), MAX_TEXT), _stream_ranks(stream)
        # A line that names no rank comes after all lines before it, and not only after its like.
        timed = self.timed if stream.key == UNKNOWN else stream.timed
        return FailureEvent(
            *(kind, role, "", shown, "", ranks, local, host, 0, 0),
            *(None, self._moment(timed), self.number, stream.plain),
        )

    def _add(self, stream: RankStream, event: FailureEvent) -> None:
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
            shapes = Counter(shape_of(text, 0) for _, text in stream.recent)
            stream.watched[event.line] = {
                shape: text for _, text in stream.recent
                # Another rank announces its error as this one does.
                if not rules.PHRASES["of-rank"].search(text)
                if (shape := shape_of(text)) or shapes[(shape := shape_of(text, 0))] >= USUAL
            }  # fmt: skip
            stream.watched_until = stream.plain + WATCHED
        stream.since = self.streams.get(UNKNOWN, stream).since = 0
        stream.events.append(event)
        if len(stream.events) > 2 * _MAX_OF_STREAM:
            del stream.events[_MAX_OF_STREAM]
            self.left_out += 1

    def _end_messages(self) -> None:
        """End what each stream is in the middle of: the file has no further line."""
        for stream in self.streams.values():
            if stream.mode == "traceback" and stream.frames:
                self._end_cut(stream)
            details, failed = [*filter(None, stream.details)], rules.PHRASES["other-status"]
            self._end_chain(stream)
            progress = [*filter(goes_on, details)] if stream.last_at < self.number else []
            if progress and not any(map(failed.search, details)):
                # The lines to the end were none of the message.
                stream.add_plain(progress[-1], self.number)
            if stream.mode == "block":
                self._end_block(stream)

    def failures(self) -> FileFailures:
        """What the lines so far report."""
        self._end_messages()
        streams = list(self.streams.values())
        # Of the task of a node, torchrun's own report has the node.
        task_hosts = {
            stream.key[0]: event.host
            for stream in streams
            for event in stream.events
            if event.source == "torchrun-root" and stream.key[0]
        }
        file_end = FileEnd(streams, self.restarts)
        for stream in streams:
            stream.set_host(task_hosts)
        events = [event for stream in streams for event in file_end.events(stream)]
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
        moments = [self._moment(stream.timed) for stream in streams]
        return FileFailures(
            "", events=tuple(events), streams=tuple(map(file_end.stream, streams, moments)),
            reports=file_reports,
            left_out=self.left_out, unknown_prefix=self.unknown_prefix,
        )  # fmt: skip


#: The beginnings of the parts of torchrun's report, also behind a time or a name.
_BLOCK = re.compile(
    r"^(?P<prefix>(?=.{0,120}[\d|[]).{0,120}[\s|\]:>])?"
    r"(?P<name>Failures|Other Failures|Root Cause(?: \(first observed failure\))?):$"
)


def _is_named(stream: RankStream, words: str, groups: Mapping[str, str]) -> bool:
    """Whether a report repeats the last error of an unknown rank, which gets its rank then."""
    last = stream.events[-1] if stream.events else None
    if last is None or last.ranks or "ranks" not in groups or not last.text.startswith(words):
        return False
    stream.events[-1] = replace(last, ranks=ranks_in(groups["ranks"]))
    return True


def _without_prefix(stream: RankStream, text: str) -> str:
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


def _is_vague(message: str) -> bool:
    """Whether the first line of a message says nothing, and names no condition that is false."""
    return bool(rules.VAGUE.search(message)) and not rules.PHRASES["check"].search(message)


def _reword(error: ReadException, text: str, text_meaning: rules.Meaning) -> None:
    error.event = replace(error.event, role=text_meaning.role, kind=text_meaning.kind, text=text)
    error.is_known = text_meaning.is_known


def _unwrap(message: str, lines: list[str], width: int) -> str:
    """A message with those of its further lines that Rich has wrapped at the width of its box."""
    last = message
    while lines and len(last) + 1 + len(lines[0].partition(" ")[0]) > width > 0:
        last = lines.pop(0)
        message = f"{message} {last}"
    return message


def _cause_and_effect(cause: str, effect: str) -> str:
    """The text of an error, and of that which it became; a long cause keeps the most room."""
    effect = excerpt(effect, max(100, MAX_TEXT - len(cause) - len("; then ")))
    return f"{excerpt(cause, MAX_TEXT - len(effect) - len('; then '))}; then {effect}"


def _listed_names(lines: Sequence[str]) -> str:
    """The names in the lines of a message below the beginning of a list; ""."""
    at = next((at for at, line in enumerate(lines[:-1], 1) if rules.LISTS.search(line)), 0)
    match = rules.LISTS.search(lines[at - 1])
    if not at or not match:
        return ""
    shape = shape_of(lines[at])
    names = list(takewhile(lambda name: shape_of(name) == shape, lines[at:]))
    prefix = names[0].rstrip("0123456789")
    numbers = [name[len(prefix) :] for name in names if name.startswith(prefix)]
    if len(numbers) < len(names) or not all(map(str.isdigit, numbers)):
        return f"{match[0]} {', '.join(names)}"
    return f"{match[0]} {prefix}{','.join(map(str, sorted(map(int, numbers))))}"


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


def _stream_ranks(stream: RankStream) -> tuple[int, ...]:
    return () if stream.key[1] is None else (stream.key[1],)


def _failing(text: str) -> tuple[int, ...]:
    """The rank that failed by the words of an error; (): none."""
    match = rules.PHRASES["of-rank"].search(text[:MAX_TEXT])
    return (int(match[match.lastindex or 0]),) if match else ()


def _wraps(stream: RankStream) -> bool:
    """Whether the exception right before quotes the error of another process."""
    return any(item.event.has_phrase("wraps") for item in stream.chain[-1:])


#: Maximum characters of a line of JSON or logfmt, and the keys of its rank.
_MAX_STRUCTURED, _RANK_KEYS = 1 << 16, ("rank", "global_rank", "RANK")
#: The first pair of a line of logfmt with a level before its message; any pair.
_LOGFMT = re.compile(
    r"(?:^|(?<=\s))(?:[\w.]{1,40}=\S{1,200} ){0,4}level=\w{4,8} (?=(?:\S+ ){0,4}msg=)"
)
_PAIR = re.compile(r'(?:^|(?<=\s))([\w.]{1,40})=("(?:[^"\\]|\\.)*"|\S*)')


def _structured(line: str) -> list[str]:
    """The lines in the texts of a logger's JSON object or logfmt, with its rank; []: none."""
    if len(line) > _MAX_STRUCTURED or not rules.has_needle(line):
        return []
    if line[:1] != "{":
        return _message(line)
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


def _message(line: str) -> list[str]:
    """The lines of a message in logfmt, as a logger of plain lines writes them; []: it has none.

    >>> _message('time="2024-03-01T12:00:00Z" level=error msg="no disk" error="write: EIO" pod=a')
    ['2024-03-01T12:00:00Z [ERROR] no disk: write: EIO']
    """
    if not (match := _LOGFMT.search(line)):
        return []
    pairs = {key: value.strip('"') for key, value in _PAIR.findall(line, match.start())}
    error = pairs.get("error") or pairs.get("err") or "<nil>"
    text = pairs["msg"] + f": {error}" * (error != "<nil>")
    text = text.replace("\\n", "\n").replace('\\"', '"').replace("\\t", "\t")
    rank = next((f"[rank{pairs[key]}]: " for key in _RANK_KEYS if key in pairs), "")
    moment = pairs.get("time") or pairs.get("ts") or ""
    head = f"{line[: match.start()]}{moment} [{pairs['level'].upper()}] ".lstrip()
    first, *rows = text.split("\n")
    return [f"{rank}{head}{first}", *(rank + row for row in rows)]

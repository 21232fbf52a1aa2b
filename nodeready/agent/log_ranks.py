"""The origin of each line of a log in which many processes write: its rank, node or process.

A reader learns the prefixes from the lines of a file, and gives the origin of each line::

    reader = learn_ranks(lines)             # of the file's beginning and its end
    if reader.is_mixed:
        host, rank, local_rank, text, time = reader.read(line)

A prefix is a column: it repeats over the lines with few values, also behind a time, colours or a
progress bar. The rows of ``nodeready/knowledge/launchers.toml`` say what its values are. A prefix
that names its value (``[rank3]:``, ``[1,3]<stdout>:``) counts at once. A bare number (``3:``)
counts if the numbers are ranks: from 0 on without large gaps, several lines each, the same numbers
at the beginning and at the end, in no order; or if srun itself reports these tasks. Numbers that
only grow are steps, dates or line numbers; numbers in turns may be GPUs. A launcher's number
outranks one ``[rank3]:``, which any program may print.

Pure, bounded by the lines that it is given; its patterns cannot backtrack without a bound.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from nodeready import knowledge
from nodeready.core import wire

#: Maximum ranks that a text, or the launchers' reports in a file, name.
MAX_RANKS = 100_000


def ranks_in(text: str) -> tuple[int, ...]:
    """The ranks of ``3``, ``0-2,5``; at most MAX_RANKS."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        end = min(int(last or first) + 1, int(first) + MAX_RANKS - len(numbers))
        numbers += range(int(first), end)
    return tuple(numbers)


# --- The rank of a log file, by its path and its lines.


class FileRanks(NamedTuple):
    """The ranks of a log file; None: not known."""

    rank: int | None
    local_rank: int | None


_RANK_NAME = re.compile(r"(?i)(?<![a-z])(?:([a-z]+)[_-]|(local))?rank[._=-]?(\d{1,7})(?!\d)")
#: Words before "rank" for numbers that are not the global rank; of a name, a node's number.
NODE_WORDS = "node", "host", "machine", "nid"
_LOCAL, _GROUP_WORDS = (
    "local",
    (
        *(*NODE_WORDS, "group", "dp", "tp", "pp", "cp", "ep", "mp", "sp"),
        *("data", "tensor", "pipeline", "context", "expert", "model", "parallel", "stage"),
    ),
)
#: torchrun --log-dir: RUN/attempt_0/LOCAL_RANK/stdout.log; Paddle's launcher: workerlog.LOCAL_RANK
_OF_LAUNCHERS = re.compile(
    r"/attempt_\d+/(\d{1,7})/(?:stdout\.log|stderr\.log|error\.json)$"
    r"|(?:^|/)workerlog\.(\d{1,7})$"
)
#: train.7.out, and no address; more digits are a date or a job; rsl.error.0007 of WRF.
_NUMBERED = re.compile(
    r"(?:\d{1,3}\.){3}\d{1,3}\.\w+$|\.(\d{1,5})\.(?:out|err|log|txt)$|(?:^|/)rsl\.(?:error|out)\.(\d{4,7})$"
)


#: A number with zeros in front, at the end of a name.
_DIGITS, _PADDED = re.compile(r"\d+"), re.compile(r"\.0\d*(?:\.\w+)?$")


def path_ranks(path: str) -> FileRanks:
    """The ranks in ``rank_7.log``, ``nccl_trace_rank_7``, ``rank.07/stdout``, ``local_rank3.err``,
    ``attempt_0/3/stdout.log`` (torchrun), ``workerlog.3`` (Paddle), ``train.7.out`` and
    ``rsl.error.0007`` (WRF); of several, the last.
    """
    ranks = named_ranks(path)
    match = _NUMBERED.search(path) if ranks == FileRanks(None, None) else None
    number = match and (match[1] or match[2])
    return FileRanks(int(number), None) if number else ranks


def ranks_of_names(paths: Iterable[str]) -> dict[str, FileRanks]:
    """Path -> its ranks, of the logs of a job. A lone number may be that of the job, unless it is
    padded (``rsl.error.0007``): it counts where another path differs in numbers alone.
    """
    names = set(paths)
    shapes = Counter(_DIGITS.sub("#", path) for path in names)
    return {
        path: path_ranks(path)
        if shapes[_DIGITS.sub("#", path)] > 1 or _PADDED.search(path)
        else named_ranks(path)
        for path in names
    }


def named_ranks(path: str) -> FileRanks:
    """The ranks of a path that says that they are ranks."""
    rank = local = None
    for name in _RANK_NAME.finditer(path):
        if _is_global(name):
            rank = int(name[3])
        elif (name[1] or name[2]).lower() == _LOCAL:
            local = int(name[3])
    if match := _OF_LAUNCHERS.search(path):
        local = int(match[match.lastindex or 0])
    return FileRanks(rank, local)


def _is_global(name: re.Match[str]) -> bool:
    """Whether a match of `_RANK_NAME` is of the global rank."""
    return (name[1] or name[2] or "").lower() not in (_LOCAL, *_GROUP_WORDS)


# PyTorch's logging and its excepthook (2.2 on) put the global rank before each line.
GLOBAL_RANK = re.compile(r"\[rank(\d{1,7})\]:")


def file_ranks(by_path: FileRanks, lines: Iterable[str]) -> FileRanks:
    """The ranks of a file: by ``[rank7]:`` before its lines, if all lines have one rank, else by
    its path.

    With ``[rank7]:`` the rank in the path may be local: torchrun's directories have the local
    rank, and ``rank_0.log`` may be on each node.
    """
    reader = RankReader()
    ranks = (
        int(match[1]) if (match := GLOBAL_RANK.search(line)) else reader.read(line).rank
        for line in lines
    )
    global_ranks = {rank for rank in ranks if rank is not None}
    if len(global_ranks) != 1:
        return by_path
    (rank,) = global_ranks
    other = by_path.rank if by_path.rank != rank else None
    return FileRanks(rank, by_path.local_rank if by_path.local_rank is not None else other)


# --- The prefixes of lines, as data.


class LineOrigin(NamedTuple):
    """Where a line of a mixed log comes from."""

    # the node's name or address as the line has it; ``task 3``: the task of a launcher that starts
    # one process per node; ``gpu1 pid 7``, ``pid 7``: a process of unknown rank; "": not known
    host: str
    rank: int | None  # the global rank; None: not known
    local_rank: int | None  # the rank on its node; None: not known
    text: str  # the line without the prefixes
    time: str = ""  # that stands before a prefix

    @property
    def is_known(self) -> bool:
        """Whether anything is known of the writer."""
        return bool(self.host) or self.rank is not None or self.local_rank is not None

    @property
    def key(self) -> tuple[str, int | None, int | None]:
        """Equal for the lines of one rank: the rank alone if it is known."""
        return (self.host, None, self.local_rank) if self.rank is None else ("", self.rank, None)


#: What a `LineOrigin.host` has beside the node: a process, or a column of unknown meaning.
_PROCESS = re.compile(r"(?:^| )(?:(?:pid|task) \d{1,10}|\[.*\])$")


def host_node(host: str) -> str:
    """The node of a `LineOrigin.host`; "": not known.

    >>> host_node("gpu1 pid 7")
    'gpu1'
    """
    return _PROCESS.sub("", host)


#: A number; colours, and those that lost their escape in a copy.
_NUMBER, _COLOUR = r"\d{1,7}", r"(?:\x1b\[[\d;?]{0,16}[A-Za-z]|\[(?:\d{1,2};){0,4}\d{1,2}m)*"
_ONE_COLOUR = re.compile(_COLOUR[:-1])
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?![.,:]?\d)"
#: A time before a prefix: ISO 8601 as log shippers write it, ctime(3) as Open MPI and syslog do,
#: ts(1), a time of the day; a container engine names the stream, too.
_TIME = (
    rf"(?P<time>\[?(?:\d{{4}}[-/]\d\d[-/]\d\d[T _]{_CLOCK}(?:Z| UTC|[+-]\d\d:?\d\d)?"
    rf"|(?:[A-Z][a-z]{{2}} ){{1,2}}[ \d]\d {_CLOCK}(?: \d{{4}})?|(?:\d\d[-/]\d\d )?{_CLOCK})"
    r"\]?(?: \||:| -)? ?)?(?:std(?:out|err) [FP] )?"
)
_FILES = "py", "cc", "cu", "cpp", "hpp", "c", "h", "rs", "go"
_LEVELS = "TRACE|DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL|SUCCESS"
#: A value of a column that a logger writes: a level, or a file of the program.
_LOGGER = re.compile(rf"^\[?(?:{_LEVELS})\]?$|\.(?:{'|'.join(_FILES)})\b", re.I)
#: The words of the patterns of `nodeready/knowledge/launchers.toml`.
_WORDS = {
    "number": _NUMBER,
    "colour": _COLOUR,
    "host": r"(?!(?i:epoch|step|iter|iteration|batch|layer|stage|phase|round|fold|seed)[_-]?\d)"
    r"(?=[A-Za-z.-]{0,60}\d)(?=[\d.-]{0,60}[A-Za-z])[A-Za-z0-9][\w.-]{0,200}",
    "name": r"(?=[\d.-]{0,60}[A-Za-z])[A-Za-z0-9][\w.-]{0,200}",
    "address": r"(?:\d{1,3}\.){3}\d{1,3}",
    "file": "".join(rf"(?<!\.{end})" for end in _FILES),
    "level": rf"(?:[\[(<]?(?:{_LEVELS})[\])>]?:? {{1,4}}(?:- )?)?",
}


class _Form(NamedTuple):
    """A form of prefix: a row of `nodeready/knowledge/launchers.toml`."""

    name: str
    pattern: re.Pattern[str]
    learned: str = ""
    within: frozenset[str] = frozenset()
    is_process: bool = False
    is_inside: bool = False
    values: frozenset[str] = frozenset()  # of the column, that count; empty: all

    def match(self, text: str) -> re.Match[str] | None:
        """The prefix of a line."""
        match = self.pattern.match(text)
        return None if match and self.values and _value(match) not in self.values else match


def _form(name: str, row: Mapping[str, Any]) -> _Form:
    pattern = re.sub(r"%(\w+)%", lambda match: _WORDS[match[1]], row["pattern"])
    is_inside = row.get("inside", False)
    compiled = re.compile(pattern if is_inside else _COLOUR + _TIME + pattern + _COLOUR)
    within, is_process = frozenset(row.get("within", ())), row.get("process", False)
    return _Form(name, compiled, row.get("learned", ""), within, is_process, is_inside)


FORMS = tuple(_form(name, row) for name, row in knowledge.rows("launchers").items())
#: Prefixes, which are removed from the text. A line may have several, the launcher's outermost.
_PREFIXES = tuple(form for form in FORMS if not form.is_inside)
#: Prefixes that a process writes itself, and that count where nothing was learned.
_EXACT = tuple(form for form in _PREFIXES if form.is_process and not form.learned)
#: The own rank within a line, in the order of preference. These stay in the text.
_HEAD = 240
_FIELDS = tuple(form for form in FORMS if form.is_inside and not form.learned)
#: A progress bar, after which a prefix may stand on the same line: | 12/100 [00:03<00:20, 4.1it/s]
_BAR = re.compile(r"[^\[\]]{0,300}\[[\d:?]{4,12}[<,][^\[\]]{1,200}\] ?")
#: The beginning of one, on which another process writes: 33%|###Memory access fault by GPU
_TORN_BAR = re.compile(r" *\d{1,3}%\|[^\w\[\]|]{0,200}(?=[A-Z])")


def after_bars(line: str) -> str:
    """What stands behind the progress bars of a line; the line itself if it has none."""
    text = line
    while ("/s" in text or "s/" in text) and (match := _BAR.match(text)):
        text = text[match.end() :]
    return text[match.end() :] if (match := _TORN_BAR.match(text)) else text


#: The beginning of a traceback, behind a prefix.
_TRACEBACK = re.compile(r"(?P<prefix>[^\"']{1,120}?)Traceback \(most recent call last\):")
#: What a line itself says of its process, of a rank, or of its launcher.
_TEST, _NCCL, _NCCL_RANK, _RAY_WORKER, _NCCL_TESTS, _SRUN_TASKS, _AGENT, _LAUNCHER = (
    form.pattern for form in FORMS if form.learned == "facts"
)


# --- Learning.

#: Maximum lines that are learned from, the first and the last; maximum prefixes of a line; maximum
#: forms of prefixes of tracebacks.
MAX_LINES, _MAX_DEPTH, _MAX_FORMS = 20_000, 3, 16


class _Writer(NamedTuple):
    """What the prefixes of a line say of its process."""

    host: str = ""
    label: int | None = None
    local: int | None = None
    pid: int | None = None

    def is_node(self, label_kind: str) -> bool:
        """Whether it names no process, but at most a node."""
        is_process = self.label is not None and label_kind != "task"
        return not is_process and self.local is None and self.pid is None


_UNKNOWN = _Writer()


class _Prefixes(NamedTuple):
    """The prefixes of one line: its process, the global rank if they have one, and the rest."""

    writer: _Writer
    rank: int | None
    text: str
    time: str


@dataclass(frozen=True)
class RankReader:
    """Reads the rank of each line; made by `learn_ranks`."""

    # several ranks, or several nodes, write into the file, or a launcher's prefixes say which do
    is_mixed: bool = False
    # the known origins of the lines that were learned, with an empty text, each with its number of
    # lines
    origins: Mapping[LineOrigin, int] = field(default_factory=dict)
    layers: tuple[tuple[_Form, ...], ...] = (_EXACT,)  # the forms of prefixes, the outermost first
    fields: tuple[_Form, ...] = ()  # of the own rank within a line
    is_contained: bool = False  # a container engine puts a time before each line
    reads_within: bool = False  # a line may name its process or rank within itself
    pattern: re.Pattern[str] | None = None  # of the user, in place of all others
    # the rank of each process that is known
    ranks: Mapping[_Writer, int] = field(default_factory=dict)
    # what a form's label is: "rank", "local" rank, or the number of a "task"
    label_kind: str = "rank"
    has_devices: bool = True  # whether NCCL's device tells the processes of a node apart

    @property
    def is_plain(self) -> bool:
        """Whether no line that was learned has an origin."""
        return not self.origins and self.pattern is None

    def read(self, line: str) -> LineOrigin:
        """The time, the origin and the text of a line. A line without a prefix has no rank.

        Of a progress bar, it is the text of the last state; the first has the prefix, or the last.
        """
        line, moment = unwrapped(line) if self.is_contained else (line, "")
        states = [state for state in line.split("\r") if state.strip()] or [line]
        origin = self._read_state(states[0])
        if len(states) > 1:
            last = self._read_state(states[-1])
            origin = last if last.is_known else origin._replace(text=last.text)
        return origin._replace(time=moment) if moment else origin

    def _read_state(self, line: str) -> LineOrigin:
        origin = self._read(line)
        if not origin.is_known and (text := after_bars(line)) and text is not line:
            after = self._read(text)
            return after if after.is_known else origin
        return origin

    def split(self, line: str) -> LineOrigin:
        """As `read`, with the time in the text."""
        origin = self.read(line)
        text = f"{origin.time} {origin.text}" if origin.time else origin.text
        return origin._replace(text=text, time="")

    def _read(self, line: str) -> LineOrigin:
        if self.pattern:
            return _split_by_pattern(self.pattern, line)
        writer, rank, text, moment = _strip(self.layers, line)
        if writer.label is not None and self.label_kind == "rank":
            rank = writer.label
        elif rank is None and self.reads_within and writer.is_node(self.label_kind):
            inner, rank = _within(self.fields, text)
            writer = inner if inner.host else writer
        if rank is None:
            rank = self.ranks.get(writer)
        host, label, local, pid = writer
        if pid is not None and not self.has_devices:
            local = None
        if label is not None and self.label_kind == "local":
            local = label
        elif label is not None and self.label_kind == "task" and not host:
            host = f"task {label}"
        if rank is None and local is None and pid is not None:
            host = f"{host} pid {pid}".lstrip()
        return LineOrigin(host, rank, local, text, moment)


def learn_ranks(lines: Iterable[str], *, pattern: str = "", path: str = "") -> RankReader:
    """The reader for a file with these lines, such as those of its beginning and of its end.

    pattern: a regular expression that finds the rank in a line, in place of what is learned: its
             group ``rank``, else its first group; groups ``host`` and ``local_rank`` are optional
    path:    of the file: a path with a rank has the lines of one rank, also those that quote,
             unless a launcher's prefixes say otherwise
    """
    lines = iter(lines)
    rows = [*islice(lines, MAX_LINES // 2), *deque(lines, MAX_LINES // 2)]
    # The first line may be the head of a table.
    if any(unwrapped(row)[1] for row in rows[:3]):
        bare = (unwrapped(row)[0] for row in rows)
        return replace(learn_ranks(bare, pattern=pattern, path=path), is_contained=True)
    if pattern:
        return _with_origins(RankReader(pattern=re.compile(pattern)), rows)
    is_of_rank = named_ranks(path) != FileRanks(None, None)
    layers = _learn_layers(rows, 0.9 if is_of_rank else 0.25)
    is_launchers = any(not form.is_process for layer in layers for form in layer)
    if not is_launchers and is_of_rank:
        return RankReader()
    # An exception may stand where nothing was learned.
    layers = (
        *layers,
        (*_EXACT, *islice(dict.fromkeys(_traceback_forms(rows, layers)), _MAX_FORMS)),
    )
    stripped = [_strip(layers, row) for row in rows]
    fields = _learn_fields(stripped)
    reader = RankReader(is_launchers, layers=layers, fields=fields, reads_within=True)
    return _with_origins(_learn_processes(reader, stripped), rows)


def _traceback_forms(rows: Iterable[str], layers: Sequence[tuple[_Form, ...]]) -> Iterator[_Form]:
    """The prefixes of tracebacks that name their rank by that word. The further lines of a
    traceback have the prefix of its first line.
    """
    for row in rows:
        stripped = _strip((*layers, _EXACT), row) if "Traceback (" in row else None
        if stripped and stripped.rank is None and (match := _TRACEBACK.match(stripped.text)):
            prefix = re.sub(_COLOUR + _TIME, "", match["prefix"], count=1)
            if word := _rank_word(prefix):
                begin, end = word.span(3)
                before, after = map(_any_number, (prefix[:begin], prefix[end:].rstrip()))
                blank = "(?: |$)" if prefix.endswith(" ") else ""
                pattern = rf"{_COLOUR}{_TIME}{before}(?P<rank>{_NUMBER}){after}{blank}"
                yield _Form("traceback", re.compile(pattern), is_process=True)


#: As `_RANK_NAME`, in a line.
_RANK_WORD = re.compile(
    r"(?i)(?<![a-z])(?:([a-z]+)[ _-]|(local))?rank[ :._=-]{0,2}(\d{1,7})(?!\d)"
)


def _rank_word(prefix: str) -> re.Match[str] | None:
    """The place of a prefix that names one global rank by that word; None: it names none."""
    words = [word for word in _RANK_WORD.finditer(prefix) if _is_global(word)]
    return words[0] if len(words) == 1 else None


def _any_number(text: str) -> str:
    """The pattern of a text whose numbers may be others."""
    parts = (re.sub(r"\d+", r"\\d{1,20}", re.escape(part)) for part in _ONE_COLOUR.split(text))
    return _COLOUR.join(parts)


def _with_origins(reader: RankReader, rows: Sequence[str]) -> RankReader:
    """The reader, with the origins that these lines have."""
    origins = _origins(reader, rows)
    ranks = {origin.rank for origin in origins if origin.rank is not None}
    rankless = [origin for origin in origins if origin.rank is None]
    local = {origin[:3] for origin in rankless if origin.local_rank is not None}
    hosts = {origin.host for origin in rankless if origin.host}
    is_mixed = reader.is_mixed or bool(reader.pattern and ranks)
    is_mixed = is_mixed or any(len(names) > 1 for names in (ranks, local, hosts))
    if not is_mixed:
        reader = replace(reader, reads_within=False)
        origins = _origins(reader, rows)
    return replace(reader, is_mixed=is_mixed, origins=origins)


def _origins(reader: RankReader, rows: Sequence[str]) -> dict[LineOrigin, int]:
    """The known origins of these lines, each with its number of lines."""
    counts = Counter(reader.read(row)._replace(text="", time="") for row in rows)
    return {origin: count for origin, count in counts.items() if origin.is_known}


def _learn_layers(rows: Sequence[str], share: float) -> tuple[tuple[_Form, ...], ...]:
    """The forms of prefixes that the lines have, the outermost first.
    share: the minimum part of the lines that has a bare number; a batch script may write many
           lines before the launcher's
    """
    tests = {match["test"] for row in rows if (match := _TEST.match(row))}
    runner = re.compile(rf"(?P<time>)(?:{'|'.join(tests)}): ")
    layers: list[tuple[_Form, ...]] = []
    layers += [(_Form("test", runner, is_process=True),)] if tests else []
    outer: set[str] = set()
    texts = [runner.sub("", row, 1) if tests else row for row in rows if not _LAUNCHER.match(row)]
    tasks = {
        task
        for row in rows
        if (match := _SRUN_TASKS.match(row))
        for task in ranks_in(match["tasks"])
    }  # fmt: skip
    while texts and len(layers) < _MAX_DEPTH:
        explicit = tuple(
            form
            for form in _PREFIXES
            if not form.learned and any(form.pattern.match(text) for text in texts)
        )
        count = sum(any(form.pattern.match(text) for form in explicit) for text in texts)
        # A column of unknown words is weaker than prefixes that most lines have.
        learned = (
            form for form in _PREFIXES
            if form.learned and outer <= form.within
            and not (form.learned == "words" and 2 * count > len(texts))
        )  # fmt: skip
        columns = (_column(form, texts, share, tasks) for form in learned)
        layer = tuple(islice(filter(None, columns), 1)) or explicit
        if not layer:
            break
        layers.append(layer)
        outer |= {form.name for form in layer}
        texts = [stripped.text for text in texts if (stripped := _strip_layer(layer, text))]
    return tuple(layers)


def _column(form: _Form, texts: Sequence[str], share: float, tasks: Set[int]) -> _Form | None:
    """The form if what it finds are ranks, nodes, or processes: a column of a launcher.
    tasks: that srun itself reports
    """
    # A column stands in many lines, so that a sample tells quickly whether there is one.
    sample = texts[:: max(1, len(texts) // 256)]
    if 4 * sum(map(bool, map(form.pattern.match, sample))) < share * len(sample):
        return None
    if form.learned != "words":
        return form if _is_column(form, texts, share, tasks) else None
    counts = Counter(_value(match) for text in texts if (match := form.pattern.match(text)))
    largest = max(counts.values(), default=0)
    form = form._replace(
        values=frozenset(value for value, count in counts.items() if 3 * count >= largest)
    )
    is_logger = any(_LOGGER.search(value) for value in form.values)
    return form if not is_logger and _is_column(form, texts, share, tasks) else None


def _value(match: re.Match[str]) -> str:
    """The value of a column of names."""
    return _host(match.groupdict()) + (match.groupdict().get("pid") or "")


def _is_column(form: _Form, texts: Sequence[str], share: float, tasks: Set[int]) -> bool:
    """Whether the values that a form finds repeat like those of a launcher; see `_column`."""
    numbers: list[int] = []
    names: set[str] = set()
    hosts: set[str] = set()
    is_word = False
    owners: dict[str, set[int]] = defaultdict(set)
    values: dict[str, int] = {}
    widths: set[int] = set()
    for text in texts:
        if match := form.match(text):
            groups = match.groupdict()
            before = text[: match.start("label")] if form.name == "srun" else ""
            widths.add(len(before) - len(before.rstrip()) + len(groups.get("label") or ""))
            if form.learned == "numbers":
                number = int(groups.get("label") or groups.get("local") or groups["rank"])
            else:
                number = values.setdefault(_value(match), len(values))
            numbers.append(number)
            names.add(groups.get("role") or groups.get("world") or "")
            hosts.add(groups.get("host") or "")
            is_word = is_word or not re.search(r"\d", groups.get("host") or "0")
            owners[text[match.end() :]].add(number)
    distinct = set(numbers)
    changes = [pair for pair in zip(numbers, numbers[1:]) if pair[0] != pair[1]]
    falls = [after for before, after in changes if after < before]
    # srun writes all labels equally wide, and reports the ends of some tasks alone.
    width = len(str(max(tasks, default=0)))
    is_wide = width > 1 and len(widths) == 1 and width <= min(widths)
    if form.name == "srun" and distinct and (distinct <= tasks or (tasks and is_wide and falls)):
        # Three that only grow may be steps: those are hardly padded, each in several lines.
        is_padded = is_wide and len(str(min(distinct))) < width
        is_repeated = is_padded and len(numbers) > 4 * len(distinct)
        is_clear = len(distinct) < 3 or bool(falls) or is_repeated
        return len(numbers) >= share * len(texts) and is_clear
    # Such a launcher writes all lines.
    share = share if form.learned == "numbers" else max(share, 0.8)
    is_frequent = len(numbers) >= max(2 * len(distinct), share * len(texts))
    # A word before a number may be a module, and the number that of its line.
    gaps = 1 if is_word else 4
    # A number of one line may be no rank's.
    counts = Counter(numbers)
    largest = max((number for number in distinct if counts[number] > 1), default=0)
    is_dense = form.learned != "numbers" or gaps * len(distinct) > largest
    if len(distinct) < 2 or not is_frequent or not is_dense or len(names) > 2:
        return False
    if form.name == "world" and (len(names) > 1 or max(distinct) >= int(*names)):
        return False
    half = len(numbers) // 2
    first, last = set(numbers[:half]), set(numbers[half:])
    # Ranks of named nodes that all say the same need not say it twice.
    is_same = len(hosts) > 1 and any(
        _is_sentence(text) and 3 * len(values) > 2 * len(distinct) > 4
        for text, values in owners.items()
    )
    if not is_same and 2 * len(first & last) < min(len(first), len(last)):
        return False
    if form.learned == "words":
        return 4 * len(falls) > len(changes) and _say_the_same(owners, len(counts))
    turn = numbers[: len(distinct)]
    is_table = turn in (sorted(turn), sorted(turn, reverse=True)) and (
        numbers[len(turn) :] == numbers[: -len(turn)]
    )
    if is_table or (4 * len(falls) < len(changes) and {*falls} <= {min(distinct)}):
        # In turns: ranks, the steps of epochs, or the GPUs of a monitor. Ranks say the same words.
        if form.name == "world" and not any("Traceback (" in text for text in owners):
            return False
        shared = [text for text, numbers in owners.items() if len(numbers) > 1]
        return bool(falls) and 5 * sum(map(_is_sentence, shared)) >= len(owners)
    return bool(falls)


def _say_the_same(owners: Mapping[str, Set[int]], count: int) -> bool:
    """Whether most values of a column stand before the same texts.
    owners: text -> the values before it; count: of all values
    """
    shared = [text for text, values in owners.items() if 3 * len(values) > 2 * count]
    return len(shared) > 2 and 2 * len(shared) >= len(owners) / count


def _is_sentence(text: str) -> bool:
    """Whether a text has two words: more than a value and its unit."""
    return "%" not in text and len(re.findall(r"[A-Za-z]{3,}", text[:_HEAD])) > 1


def _learn_fields(stripped: Iterable[_Prefixes]) -> tuple[_Form, ...]:
    """The fields with the own rank that lines without a rank have, with at least two ranks."""
    texts = [prefixes.text for prefixes in stripped if prefixes.rank is None]
    fields = []
    for form in _FIELDS:
        line_ranks = (_within((form,), text)[1] for text in texts)
        ranks = [rank for rank in line_ranks if rank is not None]
        distinct = set(ranks)
        falls = any(after < before for before, after in zip(ranks, ranks[1:]))
        if falls and 4 * len(distinct) > max(distinct):
            fields.append(form)
    return tuple(fields)


def _learn_processes(reader: RankReader, stripped: Sequence[_Prefixes]) -> RankReader:
    """The reader, with the meaning of labels and the ranks of processes that the lines tell."""
    kind = _label_kind(reader.layers, stripped)
    certain: dict[_Writer, set[int]] = defaultdict(set)
    likely: dict[_Writer, set[int]] = defaultdict(set)
    communicators: dict[int, dict[_Writer, set[int]]] = defaultdict(lambda: defaultdict(set))
    pids: dict[tuple[str, int | None], set[int | None]] = defaultdict(set)
    for outer, rank, text, _ in stripped:
        if worker := _RAY_WORKER.search(text):
            for host in (worker["host"], ""):
                certain[_Writer(host, pid=int(worker["pid"]))].add(int(worker["rank"]))
        if worker := _NCCL_TESTS.match(text):
            pid, local = int(worker["pid"]), int(worker["local"])
            certain[_Writer(worker["host"], local=local, pid=pid)].add(int(worker["rank"]))
        inner, field_rank = _within(_FIELDS, text)
        writer = inner if outer.is_node(kind) else outer
        if inner.host:
            pids[inner.host, inner.local].add(inner.pid)
        if writer == _UNKNOWN:
            continue
        if rank is not None:
            certain[writer].add(rank)
        elif "NCCL" in text and (match := _NCCL_RANK.search(text)):
            communicators[int(match["world"])][writer].add(int(match["rank"]))
        elif field_rank is not None:
            likely[writer].add(field_rank)
    # The largest communicator is that of the whole job.
    for writer, names in communicators.get(max(communicators, default=0), {}).items():
        certain[writer] |= names
    times_named = Counter(rank for names in likely.values() for rank in names)
    ranks = {}
    for writer in {*certain, *likely}:
        (rank, *further) = certain.get(writer) or likely[writer]
        if not further and (writer in certain or times_named[rank] == 1):
            ranks[writer] = rank
    ranks |= _ranks_of_groups({prefixes.writer for prefixes in stripped})
    # Several nodes may write the same local ranks into one file: their ranks are known if all
    # local ranks tell those of one node.
    local_only = {
        writer
        for writer in {prefixes.writer for prefixes in stripped}
        if writer == _Writer(local=writer.local) != _UNKNOWN
    }
    bases = {ranks[writer] - (writer.local or 0) for writer in local_only if writer in ranks}
    if len(bases) > 1 or not local_only <= {*ranks}:
        ranks = {writer: rank for writer, rank in ranks.items() if writer not in local_only}
    has_devices = all(len(numbers) == 1 for numbers in pids.values())
    return replace(reader, ranks=ranks, label_kind=kind, has_devices=has_devices)


#: A group of SGLang's processes, with the number in it: TP13, DP1, ATTN_CP0.
_GROUP = re.compile(r"([A-Z_]{2,8})(\d{1,4})")


def _ranks_of_groups(writers: Iterable[_Writer]) -> dict[_Writer, int]:
    """The ranks of SGLang's processes, if their number in TP is the rank: no two have the same,
    and DP numbers parts of TP. Where DP numbers copies of the model, each copy has all of TP.
    """
    rows = ((writer, dict(_GROUP.findall(writer.host))) for writer in writers)
    numbers = {
        writer: (int(groups["TP"]), int(groups.get("DP", 0)), int(groups.get("PP", 0)))
        for writer, groups in rows if writer.host[:1] == "[" and "TP" in groups
    }  # fmt: skip
    parts = [part for _, part, _ in sorted(numbers.values())]
    is_whole = len({rank for rank, *_ in numbers.values()}) == len(numbers)
    is_whole &= parts == sorted(parts) and (len(set(parts)) > 1 or not any(parts))
    is_whole &= all(part <= rank and not stage for rank, part, stage in numbers.values())
    return {writer: rank for writer, (rank, *_) in numbers.items()} if is_whole else {}


def _label_kind(layers: Iterable[Iterable[_Form]], stripped: Iterable[_Prefixes]) -> str:
    """What the labels of the prefixes are; see `RankReader`."""
    hosts: dict[int, set[str]] = defaultdict(set)
    processes: dict[int, set[int | None]] = defaultdict(set)
    differ, same, is_agent = 0, 0, False
    for (host, label, local, _), rank, text, _ in stripped:
        if label is None:
            continue
        hosts[label].add(host)
        is_agent = is_agent or bool(_AGENT.search(text))
        inner, _ = _within((), text)
        if local is not None or inner.host:
            processes[label].add(inner.local if local is None else local)
        # Task 0 of the nodes has rank 0, too. Any program may print one such line.
        differ, same = differ + (rank not in (None, label)), same + (rank == label != 0)
    names = set().union(*hosts.values()) - {""}
    if differ > max(1, same) or any(len(numbers) > 1 for numbers in processes.values()):
        return "local" if names else "task"
    if same:
        return "rank"
    if is_agent and not names:
        return "task"
    if len(names) == 1:
        # torchrun's prefix has the local rank, those of further launchers the rank.
        is_local = any(form.name == "host-local" for layer in layers for form in layer)
    else:
        is_local = any(len(labelled) > 1 for labelled in hosts.values())
    return "local" if is_local else "rank"


# --- The prefix of a traceback that is not learned.

#: What tells no rank in a prefix: times, levels, files with their lines.
_DATE = r"\d{4}[-/]\d\d[-/]\d\d|(?<!\d)\d\d[-/]\d\d(?= \d\d:)"
_NO_RANK = re.compile(
    rf"{_DATE}|{_CLOCK}|[IWEF]\d{{4}} |\b[A-Z][a-z]{{2}} [ \d]\d |(?i:pid|line)\W{{0,2}}\d+"
    rf"|\w+\.(?:{'|'.join(_FILES)})\b[ :(]*\d+"
)
#: Likewise the end of a time that was torn: ``056444Z``.
_MOMENT = re.compile(rf"(?:{_DATE}|{_CLOCK}|\b\d{{6,9}}(?=Z))")


def may_tell_rank(prefix: str) -> bool:
    """Whether a prefix has a number that is no part of a time, of a file or of a process."""
    return any(map(str.isdigit, _NO_RANK.sub("", prefix)))


def prefix_pattern(prefix: str) -> re.Pattern[str]:
    """The pattern of the prefix of the further lines of a traceback: that of its first line, at
    another time.
    """
    blank = prefix[-1:] == " "
    parts = map(re.escape, _MOMENT.split(prefix[:-1] if blank else prefix))
    return re.compile(r"[\d:.,/-]{4,20}".join(parts) + ("(?: |$)" if blank else ""))


# --- Reading a line.

#: What a container engine writes before a line: CRI, `kubectl logs --timestamps`; and a table of a
#: cloud's console.
_CONTAINER = re.compile(
    r"(?: *\| (?=.{20,32} \| ))?(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3,9}(?:Z|[+-]\d\d:\d\d)) "
    r"(?:\| |std(?:out|err) [FP] )?"
)


def unwrapped(line: str) -> tuple[str, str]:
    """A line as its program wrote it, and the time that a container engine added; ""."""
    if match := _CONTAINER.match(line):
        return line[match.end() :], match[1]
    if line.startswith('{"log":'):
        with contextlib.suppress(wire.DecodeError):
            row = wire.load_json(line)
            return str(row["log"]).rstrip("\n"), str(row.get("time", ""))
    return line, ""


def _host(groups: Mapping[str, str | None]) -> str:
    """The host of a prefix, or its column of unknown meaning in brackets."""
    column = (groups.get("column") or "").strip("[]()<> ")
    return groups.get("host") or groups.get("instance") or (f"[{column}]" if column else "")


def _strip_layer(layer: Iterable[_Form], text: str) -> _Prefixes | None:
    """The text without a prefix of these forms; None: it has none."""
    for form in layer:
        if match := form.match(text):
            groups = match.groupdict()
            label, local, pid, rank = (
                None if groups.get(name) is None else int(groups[name])
                for name in ("label", "local", "pid", "rank")
            )
            host, word = _host(groups), _rank_word(groups.get("column") or "")
            host, rank = ("", int(word[3])) if word else (host, rank)
            rest_of_line = text[match.end() :]
            if tag := groups.get("tag"):
                rest_of_line = rest_of_line.replace(tag, "")
            moment = (groups["time"] or "").rstrip()
            # SGLang has the rank within the brackets.
            moment += "]" if moment[:1] == "[" and "]" not in moment else ""
            return _Prefixes(_Writer(host, label, local, pid), rank, rest_of_line, moment)
    return None


def _strip(layers: Iterable[Iterable[_Form]], line: str) -> _Prefixes:
    """The line without its prefixes; an inner prefix knows more than an outer one."""
    values: list[Any] = [*_UNKNOWN, None]
    text, moments = line, []
    for layer in layers:
        if stripped := _strip_layer(layer, text):
            text = stripped.text
            moments.append(stripped.time)
            for index, value in enumerate((*stripped.writer, stripped.rank)):
                if value not in (None, ""):
                    values[index] = value
    return _Prefixes(_Writer(*values[:-1]), values[-1], text, " ".join(filter(None, moments)))


def _within(fields: Iterable[_Form], text: str) -> tuple[_Writer, int | None]:
    """The process, or the rank, that a line names within itself."""
    # loguru colours each word.
    head = _ONE_COLOUR.sub("", text[: 2 * _HEAD])[:_HEAD] if "\x1b" in text else text[:_HEAD]
    if "NCCL " in head and (match := _NCCL.match(head)):
        return _Writer(match["host"], local=int(match["local"]), pid=int(match["pid"])), None
    for form in fields:
        if match := form.pattern.search(head):
            return _UNKNOWN, int(match["rank"])
    return _UNKNOWN, None


def _split_by_pattern(pattern: re.Pattern[str], line: str) -> LineOrigin:
    """The origin by the user's pattern; a match at the beginning is removed from the text."""
    match = pattern.search(line)
    if match is None:
        return LineOrigin("", None, None, line)
    groups = match.groupdict()
    rank = groups.get("rank") if "rank" in groups or not pattern.groups else match[1]
    text = line[match.end() :] if match.start() == 0 and match.end() < len(line) else line
    return LineOrigin(
        groups.get("host") or "", _number(rank), _number(groups.get("local_rank")), text
    )


def _number(digits: str | None) -> int | None:
    is_number = digits and digits.isascii() and digits.isdigit() and len(digits) < 8
    return int(digits) if digits and is_number else None

"""The last lines of all nodes' files, grouped: how far every rank is by its own words.

Files that were last written more than a minute before the others are a group of their own: who
stopped first is usually the culprit, and all others wait for it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, NamedTuple

from nodeready.inventory.nodeset import natural
from nodeready.node import payload
from nodeready.node.tail import NodeTail, TailConfig
from nodeready.node.witnesses import logs as witness
from nodeready.subjects import wire
from nodeready.subjects.base import ProbeError
from nodeready.subjects.json_types import Count
from nodeready.transport.base import FAILED, UNREACHED, Conversation, Failure, new_nonce, request

# --- The rank of a log file, by its path and its lines.


class Ranks(NamedTuple):
    """The ranks that a path tells; None: it does not."""

    rank: int | None
    local_rank: int | None


_NAMED = re.compile(r"(?i)(?<![a-z])(?:([a-z]+)[_-]|(local))?rank[._=-]?(\d{1,7})(?!\d)")
#: The word before "rank", where the number is another than the global rank.
_LOCAL, _OTHERS = "local", ("node", "group", "dp", "tp", "pp", "cp", "ep", "mp", "sp")
#: torchrun --log-dir: RUN/attempt_0/LOCAL_RANK/stdout.log
_TORCHRUN = re.compile(r"/attempt_\d+/(\d{1,7})/(?:stdout|stderr)\.log$")
#: train.7.out; more digits are a date or a job.
_LAST = re.compile(r"\.(\d{1,5})\.(?:out|err|log|txt)$")


def ranks_of(path: str) -> Ranks:
    """The ranks in ``rank_7.log``, ``nccl_trace_rank_7``, ``rank.07/stdout``, ``local_rank3.err``,
    ``attempt_0/3/stdout.log`` (torchrun) and ``train.7.out``; of several, the last.
    """
    rank = local = None
    for before, joined, number in _NAMED.findall(path):
        word = (before or joined).lower()
        if word == _LOCAL:
            local = int(number)
        elif word not in _OTHERS:
            rank = int(number)
    if match := _TORCHRUN.search(path):
        local = int(match[1])
    elif rank is None and local is None and (match := _LAST.search(path)):
        rank = int(match[1])
    return Ranks(rank, local)


# PyTorch's logging and its excepthook (2.2 on) put the global rank before each line.
_GLOBAL = re.compile(r"\[rank(\d{1,7})\]:")


def ranks_in(path: str, lines: Iterable[str]) -> Ranks:
    """The ranks of a file: by ``[rank7]:`` before its lines, where all are of one rank, else by
    its path.

    What a path calls a rank is then another one: torchrun's directories have the local rank, and
    ``rank_0.log`` may lie on each node.
    """
    path_ranks = ranks_of(path)
    global_ranks = {int(match[1]) for line in lines if (match := _GLOBAL.search(line))}
    if len(global_ranks) != 1:
        return path_ranks
    (rank,) = global_ranks
    other = path_ranks.rank if path_ranks.rank != rank else None
    return Ranks(rank, path_ranks.local_rank if path_ranks.local_rank is not None else other)


# --- Log lines without what always differs between ranks: times, processes, the own rank and node.
#
# What tells something stays: steps, sequence numbers, losses, sizes, other nodes, other
# ranks.

_CLOCK = r"\d{1,2}:\d\d:\d\d(?:[.,]\d+)?"
_ZONE = r"(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d)(?![A-Za-z]))?"

#: What is replaced by what, in this order; before it, what a line has in any case if it is there:
#: to look for that is much quicker.
_ROWS = tuple(
    (needle, re.compile(pattern), into)
    for needle, pattern, into in (
        # loguru, rich and others colour whole lines.
        ("\x1b", r"\x1b\[[0-9;]*m", ""),
        # glog, as c10d writes it: E0301 12:00:00.123456 4711 ProcessGroupNCCL.cpp:616]
        (
            ":",
            rf"(?<![A-Za-z0-9])([IWEFVD])\d{{4}} {_CLOCK}(?:\s+\d+(?= \S+:\d+\]))?",
            r"\1<time>",
        ),
        ("", rf"\b\d{{4}}[-/]\d\d[-/]\d\d(?:[T ]{_CLOCK}{_ZONE})?", "<time>"),
        (":", rf"\b\d{{8}}[T ]{_CLOCK}{_ZONE}", "<time>"),
        (
            ":",
            r"\b(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? )?"
            rf"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d{{1,2}} {_CLOCK}"
            r"(?: \d{4})?",
            "<time>",
        ),
        # tqdm: [05:23<06:33,  1.40it/s]
        ("<", r"\[\d{1,9}:\d\d(?::\d\d)?<[^\]]{0,500}\]", "[<time>]"),
        (":", rf"\b{_CLOCK}{_ZONE}", "<time>"),
        # Seconds since 1970, from 2017 to 2033.
        ("1", r"(?<![\w.])1[5-9]\d{8}(?:\.\d+|\d{3}|\d{6}|\d{9})?(?![\w.])", "<time>"),
        (
            "",
            r"(?<![\w.])\d+(?:\.\d+)? ?"
            r"(?:ns|us|ms|s|secs?|seconds?|milliseconds?|microseconds?|minutes?)\b(?!/)",
            "<time>",
        ),
        # NCCL: host:pid:thread [device] NCCL INFO
        ("<host>:", r"<host>:\d+:\d+ \[\d+\]", "<host>:<pid>:<pid> [<rank>]"),
        # torchrun with several nodes: [host:rank]
        ("[<host>:", r"\[<host>:\d+\]", "[<host>:<rank>]"),
        ("", r"\b((?i:pid|tid|lwp|thread|process))([ =:#]{0,3})\d+\b", r"\1\2<pid>"),
        # syslog: python[4711]:
        ("]:", r"(?<=[\w)])\[\d{2,7}\](?=:)", "[<pid>]"),
        ("0x", r"\b0x[0-9a-fA-F]{4,}\b", "<address>"),
        # A connection: [10.0.0.7]:47301, 10.0.0.7:47301, [2001:db8::1]:8594. Its port is any, and
        # in a ring or a tree each rank has other peers.
        (
            ":",
            r"\[?(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}\]?:\d{2,5}\b"
            r"|\[[0-9a-fA-F:.]{2,45}(?:%\w{1,15})?\]:\d{2,5}\b",
            "<peer>",
        ),
        # c10d's sockets: addr=[gpu001]:47301
        ("]:", r"(?<=\]):\d{4,5}\b", ":<port>"),
        ("fd=", r"\bfd=\d{1,6}\b", "fd=<fd>"),
        ("cuda:", r"\bcuda:\d+\b", "cuda:<rank>"),
    )
)
# [rank7]: Rank 7, rank=7, local_rank 3, GLOBAL_RANK: 7
_RANK = re.compile(
    r"(?i)(?<![a-z])((?:(?:local|global|world)[_ -]?)?rank[ \t_:=#(\[]{0,3})(\d+)\b"
)
# At the beginning: [7]: and [default7]: of torchrun, 7: of srun -l
_FIRST = re.compile(r"^(\[(?:[a-z]+)?|\s*)(\d+)(?=\]:|: )")


def _rank_of(digits: str) -> int:
    """The number; -1 for one of more digits than a rank can have (and than Python would read)."""
    return int(digits) if len(digits) < 20 else -1


def node_names(*names: str) -> re.Pattern[str]:
    """Finds a node's names, with a domain or without, in its own lines."""
    found = {name.partition(".")[0] for name in names if not _is_address(name)} | {*names}
    # A letter alone would be found in other words.
    patterns = sorted((re.escape(name) for name in found if len(name) > 1), key=len, reverse=True)
    return re.compile(rf"(?<![\w.-])(?:{'|'.join(patterns) or '(?!)'})(?:\.[\w.-]*\w)?(?![\w-])")


def _is_address(name: str) -> bool:
    return ":" in name or name.replace(".", "").isdigit()


def normalised(lines: Iterable[str], names: re.Pattern[str], ranks: Ranks) -> tuple[str, ...]:
    """The lines with placeholders for times, addresses, processes, the node and its own rank.

    names: of the node, from `node_names`
    ranks: of the file; where its path tells none, every number behind the word rank is replaced
    """
    rows = list(lines)
    ranks_here = {number for number in ranks if number is not None}
    globally = {ranks.rank} if ranks.rank is not None else ranks_here
    if ranks.rank is None and ranks_here:
        # torchrun's directory has the local rank; its program may print the global one.
        row_ranks = {_rank_of(match[2]) for row in rows for match in _RANK.finditer(row)}
        globally = ranks_here | row_ranks if len(row_ranks) == 1 else ranks_here

    def rank(match: re.Match[str]) -> str:
        of = ranks_here if match[1][:5].lower() == _LOCAL else globally
        is_mine = not ranks_here or _rank_of(match[2]) in of
        return f"{match[1]}<rank>" if is_mine else match[0]

    def first(match: re.Match[str]) -> str:
        # A bare number at the beginning may be a step.
        bracket = match[1].startswith("[")
        is_mine = _rank_of(match[2]) in ranks_here if ranks_here else bracket
        return ("[<rank>" if bracket else "<rank>") if is_mine else match[0]

    reports = []
    for line in rows:
        text = names.sub("<host>", line)
        for needle, pattern, into in _ROWS:
            if needle in text:
                text = pattern.sub(into, text)
        text = _FIRST.sub(first, text)
        reports.append(_RANK.sub(rank, text))
    return tuple(reports)


# --- The document, and the grouping that makes it.

#: Seconds by which a file must be older than half of the others to have stopped before them.
BEHIND_S = 60

#: Kinds of groups, in the order of the report: nodes where no file matches; what could not be
#: read; files that stopped before the others; the others; what is no file for us (a directory).
KINDS = ("no-file", "unreadable", "stopped", "lines", "skipped")


@dataclass(frozen=True)
class RankFile:
    """One file of one node.

    rank, local_rank: as its path tells, or None
    mtime_s:  when it was written last, in seconds since 1970; None for what was not read
    age_s:    how long ago that was, by the clock of the node; None for what was not read
    behind_s: how much longer ago than the median of all files
    matches:  of --grep, in the last 256 KB; None without one
    """

    node: str
    path: str
    rank: int | None
    local_rank: int | None
    size_bytes: int | None = None
    mtime_s: float | None = None
    age_s: float | None = None
    behind_s: float | None = None
    matches: int | None = None


@dataclass(frozen=True)
class LogGroup:
    """Files with equal last lines, or that were not read for the same reason.

    kind:    no-file: nodes where no file matches; unreadable: what could not be read; stopped:
             files last written more than a minute before the others; lines: the others; skipped:
             what is no file to read, such as a directory
    nodes:   each once
    lines:   of the example, the oldest first
    example: NODE:PATH, or empty for no-file
    why:     why it was not read, or empty
    """

    kind: Annotated[str, {"enum": KINDS}]
    nodes: Annotated[tuple[str, ...], {"minItems": 1}]
    files: tuple[RankFile, ...]
    lines: tuple[str, ...] = ()
    example: str = ""
    why: str = ""


@dataclass(frozen=True)
class LogReport:
    """What PyTorch's watchdog, or gloo, says of a rank in a log.

    rank:      the global rank that it is about; None: nobody knows
    group:     description of the process group, or empty
    kind:      timeout: a collective took too long; status: how far the group is; missing: others
               say that this rank has not come; reached: it has come, and others have not; lost:
               its connection to another rank broke; mismatch: it has called another collective
               than others; stuck: its watchdog itself hangs
    sequence:  number of the collective; None: not told
    operation: of the collective, or empty
    enqueued:  number of the last collective that was enqueued; None: not told
    completed: number of the last one that was completed; None: not told
    example:   NODE:PATH of one file that says it
    """

    rank: int | None
    group: str
    kind: Annotated[str, {"enum": witness.KINDS}]
    sequence: int | None
    operation: str
    enqueued: int | None
    completed: int | None
    example: str


@dataclass(frozen=True)
class TailDocument:
    """The document of `nodeready tail`. Text is without control characters: they stand in it as
    visible escapes.

    started:     ISO 8601, UTC
    finished:    ISO 8601, UTC
    grep:        the regular expression, or empty
    groups:      by kind, within a kind the smallest first
    left_out:    matching files beyond --max-files of their node
    notes:       node -> what is wrong with its whole answer
    unreachable: node -> why it could not be reached
    failed:      node -> why it gave no answer although it was reached
    complete:    False when it was interrupted
    reports:     of PyTorch's watchdogs: of each process group the slowest rank first
    """

    SCHEMA: ClassVar = "tail"
    JSON: ClassVar = (
        *("started", "finished", "pattern", "grep", "complete", "left_out"),
        *("groups", "reports", "notes", "unreachable", "failed"),
    )

    started: str
    finished: str
    pattern: str
    grep: str
    groups: tuple[LogGroup, ...]
    left_out: Count
    notes: Mapping[str, str]
    unreachable: Mapping[str, str]
    failed: Mapping[str, str]
    complete: bool = True
    reports: tuple[LogReport, ...] = ()

    @property
    def files(self) -> int:
        """How many were read."""
        return sum(len(g.files) for g in self.groups if g.kind in ("stopped", "lines"))

    @property
    def whole(self) -> bool:
        """Whether every node has a file, and all could be read."""
        return not self.notes and not any(g.kind in ("no-file", "unreadable") for g in self.groups)


@dataclass
class _Shape:
    """All files whose lines are alike. Of the lines only the newest and the oldest are kept."""

    files: list[RankFile] = field(default_factory=list)
    newest: tuple[RankFile, tuple[str, ...]] | None = None
    oldest: tuple[RankFile, tuple[str, ...]] | None = None

    def add(self, file: RankFile, lines: tuple[str, ...]) -> None:
        self.files.append(file)
        if self.newest is None or _age(file) < _age(self.newest[0]):
            self.newest = file, lines
        if self.oldest is None or _age(file) > _age(self.oldest[0]):
            self.oldest = file, lines


class Grouping:
    """Takes the nodes' answers one by one."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self._unread: dict[tuple[str, str], list[RankFile]] = {}
        self._without: dict[str, list[str]] = {}
        self._left_out = 0
        self._reports: dict[witness.WatchdogReport, str] = {}
        self.notes: dict[str, str] = {}

    def add(self, node: str, tail: NodeTail) -> None:
        """One node's answer."""
        names = node_names(node, tail.host)
        if tail.error:
            self.notes[node] = tail.error
        for one in tail.files:
            ranks = ranks_in(one.path, one.lines)
            file = RankFile(
                *(node, one.path, *ranks, one.size_bytes, one.mtime_s, one.age_s),
                matches=one.matches,
            )
            for report in one.reports:
                self._reports.setdefault(_of(report, ranks), f"{node}:{one.path}")
            shape = normalised(one.lines, names, ranks)
            self._shapes.setdefault(shape, _Shape()).add(file, one.lines)
        for other in tail.unread:
            kind = "unreadable" if other.fault else "skipped"
            file = RankFile(node, other.path, *ranks_of(other.path))
            self._unread.setdefault((kind, other.reason), []).append(file)
        faults = any(other.fault for other in tail.unread)
        if not (tail.files or faults or tail.error):
            reason = (
                "the files that match were written before" if tail.older else "no file matches"
            )
            self._without.setdefault(reason, []).append(node)
        self._left_out += max(0, tail.left_out)

    def done(
        self,
        *,
        started: str,
        finished: str,
        pattern: str,
        grep: str = "",
        unreachable: Mapping[str, str],
        failed: Mapping[str, str],
        complete: bool = True,
    ) -> TailDocument:
        """The document: within each kind, the smallest group first."""
        groups = [
            LogGroup("no-file", tuple(sorted(nodes, key=natural)), (), why=reason)
            for reason, nodes in self._without.items()
        ]
        groups += [
            _group(kind, files, reason=reason, first=(files[0], ()))
            for (kind, reason), files in self._unread.items()
        ]
        groups += self._of_lines()
        # Of equally many, whoever fell silent first: the others may have followed.
        groups.sort(
            key=lambda group: (
                KINDS.index(group.kind),
                len(group.files or group.nodes),
                -max(map(_age, group.files), default=0.0),
            )
        )
        return TailDocument(
            *(started, finished, pattern, grep, tuple(groups), self._left_out),
            notes=dict(self.notes),
            unreachable=dict(unreachable),
            failed=dict(failed),
            complete=complete,
            reports=self._said(),
        )

    def _said(self) -> tuple[LogReport, ...]:
        """All reports, those of each group together: whom others name, then the rank that is
        least far."""
        reports = [
            LogReport(**vars(key_report), example=example)
            for key_report, example in self._reports.items()
        ]

        def order(report: LogReport) -> tuple[object, ...]:
            numbers = (report.completed, report.enqueued, report.sequence, report.rank)
            named = report.kind in ("missing", "mismatch", "stuck")
            return report.group, not named, *((number is None, number or 0) for number in numbers)

        return tuple(sorted(reports, key=order))

    def _of_lines(self) -> Iterable[LogGroup]:
        ages = [_age(file) for shape in self._shapes.values() for file in shape.files]
        usual = statistics.median_low(ages) if ages else 0.0
        for shape in self._shapes.values():
            files = [_compared(file, usual) for file in shape.files]
            stopped = [file for file in files if (file.behind_s or 0) > BEHIND_S]
            current_files = [file for file in files if (file.behind_s or 0) <= BEHIND_S]
            if stopped and shape.oldest:
                yield _group("stopped", stopped, first=shape.oldest)
            if current_files and shape.newest:
                yield _group("lines", current_files, first=shape.newest)


def _of(report: witness.WatchdogReport, ranks: Ranks) -> witness.WatchdogReport:
    """The report, with the rank of the file where it is about whoever wrote it."""
    writers = report.kind not in ("missing", "mismatch")
    return replace(report, rank=ranks.rank) if report.rank is None and writers else report


def _age(file: RankFile) -> float:
    return file.age_s or 0.0


def _compared(file: RankFile, usual: float) -> RankFile:
    fields = {name: getattr(file, name) for name in file.__dataclass_fields__}
    return RankFile(**{**fields, "behind_s": round(_age(file) - usual, 3)})


def _group(
    kind: str, files: list[RankFile], *, first: tuple[RankFile, tuple[str, ...]], reason: str = ""
) -> LogGroup:
    files = sorted(files, key=_place)
    nodes = tuple(dict.fromkeys(sorted((file.node for file in files), key=natural)))
    example, lines = first
    return LogGroup(kind, nodes, tuple(files), lines, f"{example.node}:{example.path}", reason)


def _place(file: RankFile) -> tuple[bool, int, object, str]:
    return file.rank is None, file.rank or 0, natural(file.node), file.path


# --- The request for a node's last lines, and its answer.

#: Bytes of a node's answer, unpacked, that are looked at.
MAX_UNPACKED = 4 << 20


def read(text: str, nonce: str) -> NodeTail:
    """The tail in what a node printed. Raises ProbeError, one line, when there is none."""
    for name, data in wire.lines(text, nonce):
        if name == "tail" and isinstance(data, str):
            return wire.decode(NodeTail, wire.load_json(wire.unpack(data, MAX_UNPACKED)))
    if f"{nonce} {payload.NO_PYTHON}" in text:
        raise ProbeError(payload.NO_PYTHON)
    raise ProbeError("the node gave no answer", text[:200])


@dataclass(frozen=True)
class Fetched:
    """The result of one node. error: one line when there is no tail, and its kind."""

    tail: NodeTail | None = None
    error: str = ""
    kind: str = ""

    @property
    def unreachable(self) -> bool:
        return self.kind in UNREACHED


def fetch_tail(node: str, config: TailConfig, tag: str) -> Conversation[Fetched]:
    """The conversation with one node.

    config: gets the run's tag here, and a nonce where it has none
    """
    with_nonce = replace(config, nonce=config.nonce or new_nonce(), tag=tag)
    answer = yield request(node, "nodeready.node.tail", with_nonce)
    if answer.error:
        return Fetched(error=answer.error, kind=answer.kind)
    try:
        return Fetched(read(answer.stdout, with_nonce.nonce))
    except ProbeError as error:
        reason = "" if answer.ok else f": {answer.reason()}"
        return Fetched(error=f"{error}{reason}", kind=FAILED)


def fetched(answer: Fetched | Failure) -> Fetched:
    """The result of a conversation, also of a failed one."""
    return Fetched(error=answer.error, kind=answer.kind) if isinstance(answer, Failure) else answer

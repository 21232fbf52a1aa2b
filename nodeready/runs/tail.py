"""The last lines of all nodes' files, grouped: the progress of every rank by its own log.

Files that were last written more than a minute before most files are a separate group: the rank
that stopped first is usually the cause, and all other ranks wait for it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from nodeready.agent.asking import Conversation, new_nonce, no_answer, request
from nodeready.agent.log_ranks import (
    FileRanks,
    file_ranks,
    host_node,
    named_ranks,
    path_ranks,
    ranks_of_names,
)
from nodeready.agent.tail import NodeTail, TailConfig
from nodeready.agent.witnesses import logs as witness
from nodeready.core import wire
from nodeready.core.base import ProbeError
from nodeready.core.exit_codes import Refused
from nodeready.core.json_types import Count
from nodeready.core.outcome import (
    INCOMPLETE,
    INVALID,
    NO_PYTHON,
    Gap,
    GapError,
    NodeGaps,
    node_gaps,
)
from nodeready.core.policy import Policy
from nodeready.core.text import utc_now
from nodeready.fleet.inventory.nodeset import folded, natural
from nodeready.runs import targets
from nodeready.runs.options import TailOptions
from nodeready.runs.targets import Targets, converse, keep_gaps
from nodeready.runs.tell import Tell
from nodeready.runs.values import checked_pattern

# --- Log lines without the values that always differ between ranks: times, processes, the file's
# own rank and node. Informative values stay: steps, sequence numbers, losses, sizes, other nodes,
# other ranks.

_CLOCK = r"\d{1,2}:\d\d:\d\d(?:[.,]\d+)?"
_ZONE = r"(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d)(?![A-Za-z]))?"

#: (text that each match contains, pattern, replacement), in this order: the search for the text is
#: much quicker than the pattern.
_REPLACEMENTS = tuple(
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
        # A connection: [10.0.0.7]:47301, 10.0.0.7:47301, [2001:db8::1]:8594. Its port is random,
        # and in a ring or a tree each rank has different peers.
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
_RANK_PREFIX = re.compile(r"^(\[(?:[a-z]+)?|\s*)(\d+)(?=\]:|: )")


def _rank_of(digits: str) -> int:
    """The number; -1 for more digits than a rank can have, which Python may refuse to parse."""
    return int(digits) if len(digits) < 20 else -1


def node_names(*names: str) -> re.Pattern[str]:
    """The pattern of a node's names, with or without a domain, in its own lines."""
    labels = {name.partition(".")[0] for name in names if not _is_address(name)} | {*names}
    # A name of one letter would match in other words.
    patterns = sorted((re.escape(name) for name in labels if len(name) > 1), key=len, reverse=True)
    return re.compile(rf"(?<![\w.-])(?:{'|'.join(patterns) or '(?!)'})(?:\.[\w.-]*\w)?(?![\w-])")


def _is_address(name: str) -> bool:
    return ":" in name or name.replace(".", "").isdigit()


def normalise(lines: Iterable[str], names: re.Pattern[str], ranks: FileRanks) -> tuple[str, ...]:
    """The lines with placeholders for times, addresses, processes, the node and its own rank.

    names: of the node, from `node_names`
    ranks: of the file; if both are unknown, every number after the word rank is replaced
    """
    rows = list(lines)
    own_ranks = {number for number in ranks if number is not None}
    own_global = {ranks.rank} if ranks.rank is not None else own_ranks
    if ranks.rank is None and own_ranks:
        # torchrun's directory has the local rank; its program may print the global rank.
        printed = {_rank_of(match[2]) for row in rows for match in _RANK.finditer(row)}
        own_global = own_ranks | printed if len(printed) == 1 else own_ranks

    def replace_rank(match: re.Match[str]) -> str:
        is_local = match[1][:5].lower() == "local"
        is_own = not own_ranks or _rank_of(match[2]) in (own_ranks if is_local else own_global)
        return f"{match[1]}<rank>" if is_own else match[0]

    def replace_prefix(match: re.Match[str]) -> str:
        # A number without a bracket may be a step.
        has_bracket = match[1].startswith("[")
        is_own = _rank_of(match[2]) in own_ranks if own_ranks else has_bracket
        return ("[<rank>" if has_bracket else "<rank>") if is_own else match[0]

    normal_rows = []
    for row in rows:
        text = names.sub("<host>", row)
        for needle, pattern, replacement in _REPLACEMENTS:
            if needle in text:
                text = pattern.sub(replacement, text)
        text = _RANK_PREFIX.sub(replace_prefix, text)
        normal_rows.append(_RANK.sub(replace_rank, text))
    return tuple(normal_rows)


# --- The document, and the grouping that makes it.

BEHIND_S = 60  # a file has stopped if it is older than the median file by more than these seconds
#: A rank in a mixed log has stopped if its last line is followed by more than this number of lines
#: for each rank of the file, and by more than four times the lines of the median rank.
SILENT_LINES = 20

#: A node as a log names it, which is a user's text.
_HOST = re.compile(r"[A-Za-z0-9][\w.: -]{0,254}", re.A)

#: Kinds of groups, in the order of the report (`LogGroup.kind`).
KINDS = ("no-file", "unreadable", "stopped", "lines", "skipped")


@dataclass(frozen=True)
class RankFile:
    """One file of one node, or the lines of one rank in a mixed log."""

    node: str
    path: str
    rank: int | None  # by its lines or its path; None: not known
    local_rank: int | None  # likewise
    size_bytes: int | None = None
    mtime_s: float | None = None  # time of the last write, in seconds since 1970; None: not read
    # seconds since the last write, by the clock of the node; None: not read
    age_s: float | None = None
    behind_s: float | None = None  # age_s minus the median age of all files
    # number of matches of --grep in the part that was read; None: no --grep
    matches: int | None = None
    host: str | None = None  # node by the lines of a mixed log; None: not known
    # in a mixed log, number of lines of all ranks after its last line; None: the file has one rank
    lines_after: int | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether other ranks write into the file, too."""
        return self.lines_after is not None

    @property
    def is_here(self) -> bool:
        """Whether the host in the lines is the file's node."""
        return (self.host or "").partition(".")[0] == self.node.partition(".")[0]

    @property
    def is_known(self) -> bool:
        """Whether it is not the lines without a prefix in a mixed log."""
        is_ranked = self.rank is not None or self.local_rank is not None
        return is_ranked or self.host is not None or not self.is_mixed


@dataclass(frozen=True)
class LogGroup:
    """Files with equal last lines, or that were not read for the same reason."""

    JSON_KEYS: ClassVar = {"reason": "why"}

    # no-file: nodes where no file matches; unreadable: files that could not be read; stopped:
    # files last written more than a minute before most files, and ranks of a mixed log that no
    # longer write; lines: all further files and ranks; skipped: no readable files, such as
    # directories
    kind: Annotated[str, {"enum": KINDS}]
    nodes: Annotated[tuple[str, ...], {"minItems": 1}]  # each once
    files: tuple[RankFile, ...]
    lines: tuple[str, ...] = ()  # of the example, the oldest first
    example: str = ""  # NODE:PATH, or empty for no-file
    reason: str = ""  # why they were not read, or empty


@dataclass(frozen=True)
class LogReport:
    """What PyTorch's watchdog, or gloo, reports about a rank in a log."""

    rank: int | None  # the global rank that it is about; None: not known
    group: str  # description of the process group, or empty
    # timeout: a collective took too long; status: progress of the group; missing: other ranks
    # report that this rank has not called it; reached: this rank has called it and other ranks
    # have not; lost: its connection to another rank broke; mismatch: it has called a different
    # collective; stuck: its watchdog itself hangs
    kind: Annotated[str, {"enum": witness.KINDS}]
    sequence: int | None  # number of the collective; None: not known
    operation: str  # of the collective, or empty
    enqueued: int | None  # number of the last enqueued collective; None: not known
    completed: int | None  # number of the last completed collective; None: not known
    example: str  # NODE:PATH of one file with the report


@dataclass(frozen=True)
class TailDocument:
    """The document of `nodeready tail`. Control characters in texts are visible escapes."""

    SCHEMA: ClassVar = "tail"
    VERSION: ClassVar = 2
    JSON: ClassVar = (
        *("started", "finished", "pattern", "grep", "complete", "left_out"),
        *("groups", "reports", "gaps"),
    )

    started: str  # ISO 8601, UTC
    finished: str  # ISO 8601, UTC
    pattern: str
    grep: str  # the regular expression, or empty
    groups: tuple[LogGroup, ...]  # by kind, within a kind the smallest first
    left_out: Count  # matching files beyond --max-files of their node
    gaps: NodeGaps  # the nodes that gave no answer, or only a part of it
    complete: bool = True  # False when it was interrupted
    # of PyTorch's watchdogs: of each process group the slowest rank first
    reports: tuple[LogReport, ...] = ()

    @property
    def files(self) -> int:
        """The number of files that were read; of mixed logs, the number of ranks."""
        read = (group for group in self.groups if group.kind in ("stopped", "lines"))
        return sum(file.is_known for group in read for file in group.files)

    @property
    def has_all_files(self) -> bool:
        """Whether every node that answered has a file, and all could be read."""
        return not any(group.kind in ("no-file", "unreadable") for group in self.groups)


@dataclass
class _EqualFiles:
    """All files with equal lines. Keeps only the lines of the newest and the oldest file."""

    files: list[RankFile] = field(default_factory=list)
    newest: tuple[RankFile, tuple[str, ...]] | None = None
    oldest: tuple[RankFile, tuple[str, ...]] | None = None

    def add(self, file: RankFile, lines: tuple[str, ...]) -> None:
        self.files.append(file)
        if self.newest is None or _age(file) < _age(self.newest[0]):
            self.newest = file, lines
        if self.oldest is None or _age(file) > _age(self.oldest[0]):
            self.oldest = file, lines


def _paths(tail: NodeTail) -> list[str]:
    """The paths of all files of an answer."""
    return [file.path for file in tail.files] + [entry.path for entry in tail.unread]


class Grouping:
    """Takes the nodes' answers one at a time."""

    def __init__(self) -> None:
        self._equal_files: dict[tuple[str, ...], _EqualFiles] = {}
        self._unread: dict[tuple[str, str], list[RankFile]] = {}
        self._nodes_without: dict[str, list[str]] = {}
        self._nodes_of_other_ranks: list[str] = []
        #: Node and path of a mixed log -> the lines after the last line of each rank.
        self._lines_after: dict[tuple[str, str], list[int]] = {}
        self._left_out = 0
        #: The answers with numbers in names that may be ranks.
        self._numbered: list[tuple[str, NodeTail]] = []
        self._reports: dict[witness.WatchdogReport, str] = {}
        #: Of the answers that are not complete.
        self.gaps: dict[str, Gap] = {}

    def add(self, node: str, tail: NodeTail) -> None:
        if tail.error:
            self.gaps[node] = Gap(INCOMPLETE, tail.error)
        if any(path_ranks(path) != named_ranks(path) for path in _paths(tail)):
            # Whether the number in such a name is a rank, the names of all nodes tell.
            self._numbered.append((node, tail))
        else:
            self._add(node, tail, {})

    def _add(self, node: str, tail: NodeTail, by_path: Mapping[str, FileRanks]) -> None:
        """Add an answer. by_path: path -> its ranks, where its words do not tell"""
        names = {"": node_names(node, tail.host)}
        for log in tail.files:
            ranks = file_ranks(by_path.get(log.path) or named_ranks(log.path), log.lines)
            if log.is_mixed:
                ranks = FileRanks(log.rank, log.local_rank)
                if log.rank is not None or log.local_rank is not None:
                    key = (node, log.path)
                    self._lines_after.setdefault(key, []).append(log.lines_after)
            file = RankFile(
                *(node, log.path, *ranks, log.size_bytes, log.mtime_s, log.age_s),
                matches=log.matches,
                host=log.host if _HOST.fullmatch(log.host) else None,
                lines_after=log.lines_after if log.is_mixed else None,
            )
            host = file.host or ""
            if host not in names:
                names[host] = node_names(node, tail.host, host_node(host))
            for report in log.reports:
                self._reports.setdefault(
                    witness.with_writer(report, ranks.rank), f"{node}:{log.path}"
                )
            lines = normalise(log.lines, names[host], ranks)
            self._equal_files.setdefault(lines, _EqualFiles()).add(file, log.lines)
        for entry in tail.unread:
            kind = "unreadable" if entry.fault else "skipped"
            file = RankFile(
                node, entry.path, *(by_path.get(entry.path) or named_ranks(entry.path))
            )
            self._unread.setdefault((kind, entry.reason), []).append(file)
        faults = any(entry.fault for entry in tail.unread)
        if tail.other_ranks and not tail.files:
            self._nodes_of_other_ranks.append(node)
        elif not (tail.files or faults or tail.error):
            older = "the files that match were written before"
            self._nodes_without.setdefault(older if tail.older else "no file matches", []).append(
                node
            )
        self._left_out += max(0, tail.left_out)

    def document(
        self,
        *,
        started: str,
        finished: str,
        pattern: str,
        grep: str = "",
        gaps: NodeGaps,
        complete: bool = True,
    ) -> TailDocument:
        """The document: within each kind, the smallest group first."""
        numbered, self._numbered = self._numbered, []
        by_path = ranks_of_names(path for _, tail in numbered for path in _paths(tail))
        for node, tail in numbered:
            self._add(node, tail, by_path)
        nodes_without = dict(self._nodes_without)
        if self._nodes_of_other_ranks and not self._equal_files:
            nodes_without["no file has lines of these ranks"] = self._nodes_of_other_ranks
        groups = [
            LogGroup("no-file", tuple(sorted(nodes, key=natural)), (), reason=reason)
            for reason, nodes in nodes_without.items()
        ]
        groups += [
            _group(kind, files, reason=reason, first=(files[0], ()))
            for (kind, reason), files in self._unread.items()
        ]
        groups += self._read_groups()

        # Of groups of equal size, the group that stopped first: later groups may have followed it.
        def order(group: LogGroup) -> tuple[int, int, float]:
            size = len(group.files or group.nodes)
            return KINDS.index(group.kind), size, -max(map(_age, group.files), default=0.0)

        groups.sort(key=order)
        return TailDocument(
            *(started, finished, pattern, grep, tuple(groups), self._left_out),
            gaps=gaps,
            complete=complete,
            reports=self._sorted_reports(),
        )

    def _sorted_reports(self) -> tuple[LogReport, ...]:
        """All reports by group: ranks that other ranks name, then the rank with least progress."""
        reports = [
            LogReport(**vars(report), example=example) for report, example in self._reports.items()
        ]

        def order(report: LogReport) -> tuple[object, ...]:
            is_named = report.kind in ("missing", "mismatch", "stuck")
            numbers = (report.completed, report.enqueued, report.sequence, report.rank)
            known_first = ((number is None, number or 0) for number in numbers)
            return report.group, not is_named, *known_first

        return tuple(sorted(reports, key=order))

    def _read_groups(self) -> Iterable[LogGroup]:
        ages = [_age(file) for equal in self._equal_files.values() for file in equal.files]
        median = statistics.median_low(ages) if ages else 0.0
        silent_lines = {
            key: max(SILENT_LINES * len(counts), 4 * statistics.median_low(counts))
            for key, counts in self._lines_after.items()
        }
        for equal in self._equal_files.values():
            stopped: list[RankFile] = []
            current: list[RankFile] = []
            for file in equal.files:
                behind_s = round(_age(file) - median, 3)
                maximum = silent_lines.get((file.node, file.path), 0)
                is_ranked = file.rank is not None or file.local_rank is not None
                is_silent = is_ranked and file.is_mixed and (file.lines_after or 0) > maximum
                is_stopped = is_silent or behind_s > BEHIND_S
                (stopped if is_stopped else current).append(replace(file, behind_s=behind_s))
            if stopped and equal.oldest:
                yield _group("stopped", stopped, first=equal.oldest)
            if current and equal.newest:
                yield _group("lines", current, first=equal.newest)


def _age(file: RankFile) -> float:
    return file.age_s or 0.0


def _group(
    kind: str, files: list[RankFile], *, first: tuple[RankFile, tuple[str, ...]], reason: str = ""
) -> LogGroup:
    files = sorted(files, key=_rank_order)
    nodes = tuple(dict.fromkeys(sorted((file.node for file in files), key=natural)))
    example, lines = first
    return LogGroup(kind, nodes, tuple(files), lines, f"{example.node}:{example.path}", reason)


def _rank_order(file: RankFile) -> tuple[bool, int, object, str]:
    return file.rank is None, file.rank or 0, natural(file.node), file.path


# --- The request for a node's last lines, and its answer.

MAX_UNPACKED = 4 << 20  # maximum bytes of a node's unpacked answer


def parse_tail(text: str, nonce: str) -> NodeTail:
    """The tail in a node's output. Raises ProbeError, one line, if it has none."""
    if tail := wire.packed_answer(NodeTail, text, nonce, "tail", MAX_UNPACKED):
        return tail
    if f"{nonce} {wire.NO_PYTHON}" in text:
        raise ProbeError(wire.PYTHON_MISSING)
    raise ProbeError("the node gave no answer", text[:200])


def fetch_tail(node: str, config: TailConfig, tag: str) -> Conversation[NodeTail]:
    """The conversation with one node. config: without the tag. Raises GapError."""
    with_nonce = replace(config, nonce=config.nonce or new_nonce(), tag=tag)
    answer = yield request(node, "nodeready.agent.tail", with_nonce)
    if answer.gap:
        raise GapError(answer.gap)
    try:
        return parse_tail(answer.stdout, with_nonce.nonce)
    except ProbeError as error:
        reason = "" if answer.ok else f": {answer.reason()}"
        gap = no_answer(answer, with_nonce)
        if gap.kind != NO_PYTHON:
            gap = Gap(INVALID, f"{error}{reason}", error.evidence)
        raise GapError(gap) from None


# --- The run of `nodeready tail`.


def run(inventory: str | None, pattern: str, options: TailOptions, tell: Tell) -> TailDocument:
    """The last lines of the matching files. inventory: None: this machine. Raises Refused."""
    if options.local and options.limit is not None:
        raise Refused("--limit: cannot be combined with --local")
    config = TailConfig(
        *("", "", checked_pattern(pattern), options.lines, options.grep, options.newer_s or 0),
        since_s=options.since_s,
        max_files=options.max_files,
        ranks=options.ranks,
        rank_pattern=options.rank_pattern,
    )
    if inventory is None:
        nodes = targets.local_targets(Policy(), sudo=options.sudo)
    else:
        nodes = targets.select_targets(inventory, options, job=options.job, tell=tell.note)
    with nodes.transport:
        document = _fetch(nodes, config, tell)
    if reason := _no_file_reason(document):
        raise Refused(reason)
    return document


def _fetch(nodes: Targets, config: TailConfig, tell: Tell) -> TailDocument:
    """The document of all nodes' answers; after an interrupt, of the answers so far."""
    grouping, started, transport = Grouping(), utc_now(), nodes.transport
    if transport.one_text:
        config = replace(config, nonce=new_nonce())

    def converse_with(name: str) -> Conversation[None]:
        tail = yield from fetch_tail(name, config, transport.tag)
        # Grouped now, so that equal lines of many nodes are in memory only once.
        grouping.add(name, tail)

    outcomes = converse(transport, tell, "reading", converse_with)
    lost = {name: outcome.gap for name, outcome in outcomes.items() if outcome.gap}
    gaps, complete = node_gaps({**grouping.gaps, **lost}), not transport.interrupted
    keep_gaps(nodes, tell, gaps, complete=complete)
    return grouping.document(
        started=started,
        finished=utc_now(),
        pattern=config.pattern,
        grep=config.grep,
        gaps=gaps,
        complete=complete,
    )


def _no_file_reason(tail: TailDocument) -> str:
    """One line that says why no node has a file; "" if a node has one, or may have one."""
    kinds = {group.kind for group in tail.groups}
    if tail.gaps or not tail.complete or kinds & {"lines", "stopped", "unreadable"}:
        return ""
    skipped = [group for group in tail.groups if group.kind == "skipped"]
    if skipped:
        return f"{tail.pattern}: no file to read: {skipped[0].example} {skipped[0].reason}"
    reasons = {group.reason for group in tail.groups if group.kind == "no-file"}
    names = folded([node for group in tail.groups for node in group.nodes])
    return f"{tail.pattern}: {' or '.join(sorted(reasons))}, on {names}"

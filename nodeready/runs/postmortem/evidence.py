"""The evidence on a dead job: its logs' failures, the kernel's faults, Slurm's records."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nodeready import knowledge
from nodeready.agent.failures.events import FailureEvent, FileFailures
from nodeready.agent.failures.rules import FAILED, PHRASES, REPORT
from nodeready.agent.log_ranks import NODE_WORDS, FileRanks, host_node, named_ranks, ranks_of_names
from nodeready.agent.log_variables import script_variables
from nodeready.core.text import counted
from nodeready.runs.postmortem.clocks import ClockStep, JobClocks, NodeClock
from nodeready.subjects.environment_rules import EnvironmentFinding
from nodeready.subjects.environment_table import EnvironmentFacts, RankVariables


class JobFile(NamedTuple):
    """What a log or an error file reports. node: "": not known"""

    node: str
    failures: FileFailures


class NodeFault(NamedTuple):
    """A line of a node's kernel log about a fault that ends jobs."""

    node: str
    kind: str  # as of `KernelMessage`
    time_s: float | None  # since 1970, by the node's clock; None: not known
    pid: int  # 0: none
    text: str


class SlurmStep(NamedTuple):
    """A job or a step in Slurm's records."""

    step: str  # ``4711``, ``4711.0``, ``4711.batch``
    state: str  # ``OUT_OF_MEMORY``, ``TIMEOUT``
    code: int  # exit status; signal: that ended it
    signal: int
    nodes: str  # as Slurm lists them


@dataclass
class SlurmRecords:
    """Slurm's records of one job."""

    steps: list[SlurmStep] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)  # patterns of the files of its output
    since_s: float = 0  # its start, in seconds since 1970; 0: not known
    nodes: tuple[str, ...] = ()  # (): not known
    uid: int | None = None  # of its user; None: not known
    # name of the tool -> what it gave; missing: -> why it gave nothing
    sources: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    is_running: bool = False  # Slurm says that it runs
    script: str = ""  # the job's batch script; "": not known


class LiveRank(NamedTuple):
    """A rank of the job that still ran when its node was asked, and its environment."""

    node: str
    pid: int
    rank: int | None
    local_rank: int | None
    variables: RankVariables


class NodeRecord(NamedTuple):
    """What a node keeps beside the logs: a core file, or a no-go of its gate."""

    node: str
    kind: str  # ``core``, ``gate``
    time_s: float  # since 1970, by this machine's clock
    text: str  # one line
    path: str = ""
    rank: int | None = None  # of a core; None: not known
    pid: int | None = None  # likewise
    signal: int | None = None  # likewise


@dataclass
class JobEvidence:
    """All evidence on a job."""

    files: list[JobFile] = field(default_factory=list)
    kernel: list[NodeFault] = field(default_factory=list)
    steps: list[SlurmStep] = field(default_factory=list)
    clocks: dict[str, NodeClock] = field(default_factory=dict)
    clock_steps: dict[str, list[ClockStep]] = field(default_factory=dict)  # node -> its steps
    # name of a source -> what it gave, in words
    sources: dict[str, str] = field(default_factory=dict)
    # name of a source -> why it gave nothing
    missing: dict[str, str] = field(default_factory=dict)
    records: list[NodeRecord] = field(default_factory=list)  # of the nodes, in the job's time
    nodes: tuple[str, ...] = ()  # of the job, by Slurm; (): not known
    script: str = ""  # where the batch script is, in words; script_variables: that it sets
    script_variables: Mapping[str, str] = field(default_factory=dict)
    live_ranks: list[LiveRank] = field(default_factory=list)  # that still run
    # node -> its facts that decide about an environment
    environment_facts: dict[str, EnvironmentFacts] = field(default_factory=dict)
    environment_findings: tuple[EnvironmentFinding, ...] = ()  # of the stacks of an incident

    def add_script(self, name: str, text: str) -> None:
        """Add the batch script of the job. name: as reports write it"""
        if variables := script_variables(text):
            self.script, self.script_variables = f"in {name}", variables
            self.sources[name] = counted(len(variables), "variable")


#: Who reports failures: source of an event -> what it sees.
_REPORTERS = knowledge.rows("reporters")
#: Who reports a rank that sent no heartbeat.
COORDINATOR = "the coordinator"


def reporter_of(source: str) -> Mapping[str, Any]:
    """The properties of who reports events of this source; {}: it has none."""
    properties: Mapping[str, Any] = _REPORTERS.get(source, {})
    return properties


class RankFailure(NamedTuple):
    """An event with its place."""

    rank: int | None  # None: not known
    node: str  # "": not known
    file: int  # index of its file in the evidence
    path: str
    event: FailureEvent
    # of the event, at least the time of the line before it, by this machine's clock
    time_s: float | None
    # the bounds of the time, if the clock is right; infinite: not known
    early_s: float = -math.inf
    late_s: float = math.inf
    slack_s: float = 0.0  # uncertainty of the clock

    def is_by(self, property_: str) -> bool:
        """Whether its reporter has a property: see the table of reporters."""
        return bool(reporter_of(self.event.source).get(property_))

    @property
    def went_on(self) -> bool:
        # In a log that several ranks share, another one may have written on, unless its lines name
        # the process. A launcher's report of an end is the last word of its rank.
        is_end = self.event.source in ("mpirun", "the launcher")
        is_process = "pid " in self.event.host and self.event.lines_after > 0
        return self.event.went_on and (self.rank is not None or is_process) and not is_end

    @property
    def earliest_s(self) -> float:
        return self.early_s - self.slack_s

    @property
    def latest_s(self) -> float:
        return self.late_s + self.slack_s

    @property
    def example(self) -> str:
        """``NODE:PATH:LINE``."""
        return place_text(self.node, self.path, self.event.line)


def left_out(files: Sequence[JobFile]) -> dict[str, str]:
    """What was not read, or not understood, of these files -> why."""
    failures = [file.failures for file in files]
    skipped, count = (sum(f.skipped for f in failures), sum(f.left_out for f in failures))
    texts = {
        place_text(f.node, f.failures.path, 0): f.failures.note for f in files if f.failures.note
    }
    if skipped:
        logs = counted(sum(f.skipped > 0 for f in failures), "log")
        texts[f"the middle of {logs}"] = f"{skipped:,} bytes, beyond the first and the last lines"
    if count:
        logs = counted(sum(f.left_out > 0 for f in failures), "log")
        reason = "beyond the first and the last of a rank and of a log"
        texts[f"{counted(count, 'failure')} in {logs}"] = reason
    unknown = [file for file in files if file.failures.unknown_prefix]
    for node, file in unknown[:1]:
        place = place_text(node, file.path, file.unknown_prefix)
        texts[f"the rank of {place}"] = "a Traceback with an unknown prefix: --rank-pattern REGEX"
    return texts


def place_text(node: str, path: str, line: int) -> str:
    """``NODE:PATH:LINE``; without a node that the path begins with. line: 0: of a core file"""
    prefix = f"{node}:" if node and not path.startswith(f"{node}/") else ""
    return f"{prefix}{path}{f':{line}' if line else ''}"


#: Seconds that an event without a time may be after the line before it, and before the last write
#: of its log.
_AFTER_S, _END_S = 10.0, 1.0
#: Seconds after, and before, its last line at which a log's time is that of a copy.
_COPIED_S, _EARLY_S = 3600, 5.0


class RankFinder:
    """Finds the rank of each event: by its line, its file's name, or a launcher's report."""

    def __init__(self, evidence: JobEvidence) -> None:
        self.evidence = evidence
        self.by_local: dict[tuple[str, int], int] = {}
        self.by_pid: dict[tuple[str, int], int] = {}
        self.nodes = {_label(file.node) for file in evidence.files if file.node}
        self.by_path, is_of_nodes = _ranks_of_names(evidence.files)
        ends: dict[str, list[float]] = {}
        for file in evidence.files:
            lasts = [s.last_s for s in file.failures.streams if s.last_s is not None]
            ends.setdefault(file.node, []).extend(lasts)
        self.clocks = JobClocks(evidence.clocks, evidence.clock_steps, ends)
        #: Whether each task of Slurm starts the ranks of its node, and so is no rank itself.
        self.has_node_launchers = any(
            any(reporter_of(event.source).get("of_node") for event in file.failures.events)
            # As `log_ranks` names a task whose lines are of other ranks.
            or any(stream.host.startswith("task ") for stream in file.failures.streams)
            for file in evidence.files
        )
        launchers = [
            (file.node or number, event.ranks, event.local_rank)
            for number, file in enumerate(evidence.files)
            for event in file.failures.events
            if event.role == REPORT and event.local_rank is not None
        ]
        # Of the prefixes of lines.
        hosts = {
            _label(name) for file in evidence.files for stream in file.failures.streams
            if (name := host_node(stream.host)) and "[" not in name
        }  # fmt: skip
        places = {place for place, *_ in launchers}
        # As many ranks write as there are before them: they are those of a later node, unless the
        # store, which is on the first node, is on theirs, or a launcher has started more.
        named = {s.rank for f in evidence.files for s in f.failures.streams if s.rank is not None}
        started = [pid.local_rank or 0 for f in evidence.files for pid in f.failures.facts.pids]
        size = max(len(named), 1 + max(started, default=0))
        is_later = len(named) > 1 and size <= min(named) and not min(named) % len(named)
        is_later &= not any(
            event.has_phrase("same-node") for f in evidence.files for event in f.failures.events
        )
        is_later &= named.isdisjoint(local for *_, local in launchers)
        #: Whether a local rank may be the rank.
        self.is_one_node = (
            not is_of_nodes
            and not is_later
            and max(len(self.nodes), len(places), len(hosts)) < 2
            and all(ranks in ((), (local,)) for _, ranks, local in launchers)
        )  # fmt: skip
        for file in evidence.files:
            for event in file.failures.events:
                if len(event.ranks) != 1:
                    continue
                node = self._node_of(file, event)
                if event.local_rank is not None:
                    self.by_local.setdefault((_label(node), event.local_rank), event.ranks[0])
                # A launcher may name its node otherwise than the directory of its log.
                for name in {node, file.node or node} if event.pid else ():
                    self.by_pid.setdefault((_label(name), event.pid), event.ranks[0])
        self._add_pids_of_logs()

    def _add_pids_of_logs(self) -> None:
        """Add the processes that a single rank's log names; a fault's node by its own name."""
        ranks_of: dict[tuple[str, int], set[int | None]] = {}
        for file in self.evidence.files:
            file_rank = self.file_rank(file)
            for pid in file.failures.facts.pids:
                key = _label(node := self.node_of(file, pid.host)), pid.pid
                local, rank = pid.local_rank, pid.rank
                by_local = None if local is None else self.global_rank(node, local)
                rank = by_local if rank is None else rank
                ranks_of.setdefault(key, set()).add(file_rank if rank is None else rank)
            for event in file.failures.events:
                if event.pid:
                    ranks_of.setdefault((_label(self._node_of(file, event)), event.pid), {None})
        #: The node, "" for not known, and the number of each process that a log names.
        self.pids = frozenset(ranks_of)
        for key, ranks in ranks_of.items():
            if len(ranks) == 1 and (rank := ranks.pop()) is not None:
                self.by_pid.setdefault(key, rank)
        by_node: dict[int, dict[str, int]] = {}
        for (node, number), known_rank in self.by_pid.items():
            by_node.setdefault(number, {})[node] = known_rank
        for fault in self.evidence.kernel:
            named = by_node.get(fault.pid, {})
            nodes = (_label(fault.node), "") if fault.node else tuple(named)[: len(named) == 1]
            for node in (node for node in nodes if node in named):
                self.by_pid.setdefault((fault.node, fault.pid), named[node])
        # A launcher's line without its node, of a process that only one node's report names.
        for number, named in by_node.items():
            if len(named) == 1:
                self.by_pid.setdefault(("", number), *named.values())

    def is_named(self, fault: NodeFault) -> bool:
        """Whether a log names the process of a kernel's fault."""
        nodes = {_label(fault.node), ""} if fault.node else {node for node, _ in self.pids}
        return any((node, fault.pid) in self.pids for node in nodes)

    def node_of(self, file: JobFile, line_host: str, *, is_report: bool = False) -> str:
        """The node of a line: the host in it if a launcher reports it or the host is known."""
        host = host_node(line_host)
        if host and (not file.node or is_report or _label(host) in self.nodes):
            is_set = "[" in host
            name = host if host[0].isdigit() else host.partition(".")[0]
            return file.node if is_set else name
        return file.node

    def _node_of(self, file: JobFile, event: FailureEvent) -> str:
        return self.node_of(file, event.host, is_report=event.role == REPORT)

    def failures(self) -> Iterator[RankFailure]:
        """Every event, once for each of its ranks."""
        for number, file in enumerate(self.evidence.files):
            by_path = self.by_path[file.node, file.failures.path]
            for event in file.failures.events:
                is_foreign = bool(event.ranks) and by_path.rank not in (None, *event.ranks)
                if is_foreign and event.source and event.source != COORDINATOR:
                    continue  # A rank's own log is no launcher's.
                # A coordinator is a process of a rank, and names one that is elsewhere.
                node = "" if event.source == COORDINATOR else self._node_of(file, event)
                time_s, *bounds = self._moments(file, event)
                offset_s, slack_s = self.clocks.at(file.node, time_s)
                shown_s = None if time_s is None else time_s - offset_s
                early_s, late_s = (bound - offset_s for bound in bounds)
                is_task = event.source == "srun" and self.has_node_launchers
                ranks = (None,) if is_task else event.ranks
                for rank in ranks or (self.rank_of(node, event, by_path),):
                    place = rank, node, number, file.failures.path
                    yield RankFailure(*place, event, shown_s, early_s, late_s, slack_s)

    @staticmethod
    def _moments(file: JobFile, event: FailureEvent) -> tuple[float | None, float, float]:
        """The time of an event by its node's clock, and its bounds."""
        if event.time_s is not None:
            return event.time_s, event.time_s, event.time_s
        end_s, after_s = file.failures.mtime_s, event.after_s
        early_s = -math.inf if after_s is None else after_s
        is_copy = not end_s or not -_EARLY_S < end_s - (after_s or end_s) < _COPIED_S
        if event.lines_after == 0 and not is_copy and len(file.failures.ranks) < 2:
            # A rank's log ends with its error. The clock of a shared file system is another one.
            early_s = early_s if file.node else -math.inf
            if event.line == file.failures.events[-1].line:
                early_s = max(early_s, end_s - _END_S)
            return end_s, min(early_s, end_s), end_s
        return after_s, early_s, math.inf if after_s is None else after_s + _AFTER_S

    def file_rank(self, file: JobFile) -> int | None:
        """The rank that writes a file; None: several, or not known."""
        ranks = file.failures.ranks
        by_path = self.by_path[file.node, file.failures.path]
        if by_path.rank is None and ranks:
            # A launcher reports the ranks whose lines it gathers.
            reports = (e.ranks for e in file.failures.events if e.role == REPORT)
            named = ranks.union(*reports)
            return next(iter(ranks)) if len(named) == 1 else None
        return self._by_path(file.node, by_path)

    def _by_path(self, node: str, by_path: FileRanks) -> int | None:
        if by_path.rank is not None or by_path.local_rank is None:
            return by_path.rank
        return self.global_rank(node, by_path.local_rank)

    def global_rank(self, node: str, local_rank: int) -> int | None:
        """The rank of a node's local rank: by a report; on the only node, the same number."""
        known_rank = self.by_local.get((_label(node), local_rank))
        return local_rank if known_rank is None and self.is_one_node else known_rank

    def rank_of(self, node: str, event: FailureEvent, by_path: FileRanks) -> int | None:
        """The rank of an event whose line names none; None: not known."""
        known_rank = self.by_pid.get((_label(node), event.pid)) if event.pid else None
        if known_rank is None and event.host and reporter_of(event.source).get("of_pods"):
            known_rank = self._rank_of_pod(event.host)
        if known_rank is not None:
            return known_rank
        if by_path.rank is None and event.local_rank is not None:
            return self.global_rank(node, event.local_rank)
        return self._by_path(node, by_path)

    def _rank_of_pod(self, pod: str) -> int | None:
        """The rank of the only log that is named after a pod, whose name may begin with that of
        its job and end with a random suffix; None: not known.
        """
        ranks = {
            self.file_rank(file) for file in self.evidence.files
            if (stem := _STEM.search(file.failures.path))
            and re.search(rf"(?:^|-){re.escape(stem[1])}(?:-\w{{5}})?$", pod)
        }  # fmt: skip
        return ranks.pop() if len(ranks) == 1 else None

    def ranks(self, failed: Iterable[int]) -> frozenset[int]:
        """All ranks that a log, a name of a file or a report names. failed: of the failures"""
        ranks = set(failed)
        for file in self.evidence.files:
            rank = self.file_rank(file)
            ranks |= {rank} if rank is not None else set()
            ranks |= {s.rank for s in file.failures.streams if s.rank is not None}
        return frozenset(ranks)


def _label(name: str) -> str:
    """A host name without its domain, for comparisons."""
    return name if name[:1].isdigit() else name.partition(".")[0].lower()


def _ranks_of_names(
    files: Sequence[JobFile],
) -> tuple[dict[tuple[str, str], FileRanks], bool]:
    """Node and path -> the ranks of a file's name.

    Of names that differ in one number alone (``train-0.log`` to ``train-7.log``), that is the rank
    if the numbers begin with 0 and have no gap, or are those of the ranks that aborted; on several
    nodes with the same numbers, the local rank. Where the lines of such a file name another rank,
    or its name says so, the numbers are of nodes: then there are several: the second result.
    """
    names = {(f.node, f.failures.path): f.failures.path.removeprefix(f"{f.node}/") for f in files}
    by_name = ranks_of_names(names.values())
    ranks = {key: by_name[name] for key, name in names.items()}
    ranks |= {key: by for key in names if (by := named_ranks(key[1])) != _UNNAMED}
    similar_names: dict[str, dict[tuple[str, str], list[tuple[str, int]]]] = {}
    # The ranks that the prefixes of a file's lines, or a launcher's reports in it, name.
    inside = {
        (f.node, f.failures.path): f.failures.ranks.union(
            f.failures.facts.own_ranks,
            *(e.ranks for e in f.failures.events
              if e.role == REPORT or e.source not in ("", COORDINATOR)),
            (int(match[1]) for event in f.failures.events if (match := _OWN.search(event.text))),
        )
        for f in files
    }  # fmt: skip
    #: The files in which a launcher reports another rank of its node than the first.
    of_nodes = {
        (f.node, f.failures.path)
        for f in files for event in f.failures.events
        if event.role == REPORT and event.local_rank and not event.ranks
    }  # fmt: skip
    for key, name in names.items():
        numbers = [(word, int(digits)) for word, digits in _NUMBERS.findall(name)]
        similar_names.setdefault(_DIGITS.sub("#", name), {})[key] = numbers
    aborted = {
        rank for f in files for event in f.failures.events
        if (event.role, event.source) == (FAILED, "mpirun") for rank in event.ranks
    }  # fmt: skip
    is_of_nodes = False
    for shape, named in similar_names.items():
        is_named = any(ranks[key] != _UNNAMED or _ROTATED.search(key[1]) for key in named)
        # The master of a PyTorchJob is rank 0, before its workers.
        masters = similar_names.get(_WORKER.sub("master", shape), named)
        masters = {} if masters is named or len(masters) > 1 else masters
        numbered = {} if is_named else _varying_numbers(named, len(masters), aborted)
        ranks |= numbered | (dict.fromkeys(masters, FileRanks(0, None)) if numbered else {})
        with_ranks = [key for key in named if inside[key]]
        contradicted = [key for key in with_ranks if inside[key] - {ranks[key].rank}]
        reported = [key for key in named if key in of_nodes and len(named) > 1]
        contradicted += reported
        is_of_nodes |= bool(reported) or _varying(named)[0] in NODE_WORDS
        # A name says "rank"; one log may quote another one.
        is_rank = all(named_ranks(path).rank is not None for _, path in named)
        is_quoted = contradicted != with_ranks or 2 * len(contradicted) <= len(named)
        if contradicted and not (is_rank and is_quoted):
            ranks |= {key: _UNNAMED for key in named if ranks[key].rank is not None}
    # Each log names one rank, and these have no gap: of several ranks on a node, more would write,
    # or the first of the next node would not have the next number.
    by_lines = {
        (f.node, f.failures.path): f.failures.ranks.union(f.failures.facts.own_ranks)
        for f in files
    }
    rank_by_log = {
        key: next(iter(named))
        for key, named in inside.items() if len(named) == 1 and named == by_lines[key]
    }  # fmt: skip
    is_one_each = len(rank_by_log) == sum(map(bool, inside.values())) > 1
    is_one_each &= len({*rank_by_log.values()}) == len(rank_by_log)
    events = [event for file in files for event in file.failures.events]
    if is_one_each and not any(event.local_rank for event in events):
        ranks |= {key: FileRanks(rank, None) for key, rank in rank_by_log.items()}
    return ranks, is_of_nodes


def _varying(
    named: Mapping[tuple[str, str], list[tuple[str, int]]],
) -> tuple[str, dict[tuple[str, str], int]]:
    """The only number in which names differ, and the word before it; {}: several, or no number."""
    if len({len(numbers) for numbers in named.values()}) > 1:
        return "", {}
    columns = list(zip(*named.values(), strict=True))
    varying = [at for at, column in enumerate(columns) if len(set(column)) > 1]
    if len(varying) != 1:
        return "", {}
    at = varying[0]
    return columns[at][0][0].lower(), {key: numbers[at][1] for key, numbers in named.items()}


def _varying_numbers(
    named: Mapping[tuple[str, str], list[tuple[str, int]]], first: int, aborted: set[int]
) -> dict[tuple[str, str], FileRanks]:
    """The ranks of names that differ in one number alone; {}: it is no rank.

    first:   the rank of number 0
    aborted: the ranks that say that they end themselves; a program may write a file for each
    """
    word, values = _varying(named)
    different = set(values.values())
    if word in NODE_WORDS or different not in (set(range(len(different))), aborted):
        return {}
    is_global = len(different) == len(values) or len({node for node, _ in values}) == 1
    return {
        key: FileRanks(value + first, None) if is_global else FileRanks(None, value)
        for key, value in values.items()
    }


_UNNAMED, _DIGITS = FileRanks(None, None), re.compile(r"\d+")
#: The numbers of a name, each with the word before it; no date and no job.
_NUMBERS = re.compile(r"([A-Za-z]*)[._-]?(?<!\d)(\d{1,5})(?!\d)")
#: The words of an error with the rank that writes them.
_OWN = PHRASES["own-rank"]
#: The name of a log without its end, if it has a word.
_STEM = re.compile(r"([^/.]*[A-Za-z][^/.]*)(?:\.\w+)*$")
_WORKER = re.compile(r"\bworker(?=-#)")
_ROTATED = re.compile(r"\.(?:log|out|err|txt)\.\d+$")

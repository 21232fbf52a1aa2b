"""Keeps the answers of the witnesses beside the stacks, compactly, while traces are read.

A trace's witnesses are the dataclasses of `nodeready.agent.witnesses` as plain data. Ranks of a
hung job give nearly equal answers, so equal values are decoded once and known by a number.
"""

from __future__ import annotations

import contextlib
import marshal
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from nodeready.agent.witnesses.flight_recorder import ProcessGroup, RecorderEntry, Recording
from nodeready.agent.witnesses.gpus import WitnessedGpus
from nodeready.agent.witnesses.kernel_log import KernelLog
from nodeready.agent.witnesses.logs import RankLog, WatchdogReport
from nodeready.agent.witnesses.nccl_log import NcclRank
from nodeready.agent.witnesses.nccl_ras import Ras
from nodeready.agent.witnesses.ports import Network
from nodeready.core import wire
from nodeready.core.text import counted
from nodeready.fleet.inventory.nodeset import fold, natural
from nodeready.runs.stacks.document import Statement, Witness, fold_ranks, say
from nodeready.runs.stacks.trace import Trace
from nodeready.subjects.environment_rules import EnvironmentFinding
from nodeready.subjects.environment_table import EnvironmentFacts, RankVariables

#: Maximum characters of a line of output of a process or a node.
MAX_LINE = 160

#: Called with version 2 of marshal, in which equal values have equal bytes.
_bytes = marshal.dumps


class ValueTable:
    """Decoded values of one dataclass, each different one once, known by its number. The key is
    its bytes, without field names: comparing those costs a tenth of decoding it again. differing:
    the fields that differ from rank to rank, and the values that they get
    """

    def __init__(self, kind: type[Any], **differing: Any) -> None:
        self.kind, self._differing = kind, differing
        self.all: list[Any] = []
        self._numbers: dict[bytes, int] = {}
        self._kept: dict[Any, int] = {}
        self._names = {field.name for field in fields(kind)}
        self._common = itemgetter(*(f.name for f in fields(kind) if f.name not in differing))

    def number(self, value: Any) -> int:
        """The number of a value. Raises DecodeError."""
        if type(value) is not dict or value.keys() != self._names:
            raise wire.DecodeError(f"no {self.kind.__name__}")
        key = _bytes(self._common(value), 2)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self.keep(
                wire.decode(self.kind, {**value, **self._differing})
            )
        return number

    def keep(self, value: Any) -> int:
        number = self._kept.setdefault(value, len(self.all))
        if number == len(self.all):
            self.all.append(value)
        return number

    def value(self, value: Any) -> Any:
        """The value, shared by all that are equal. Raises DecodeError."""
        return self.all[self.number(value)]


class KeptLog(NamedTuple):
    """The log of one rank."""

    head: RankLog  # without what differs from rank to rank
    reports: tuple[WatchdogReport, ...] = ()
    path: str = ""
    age_s: int = 0
    last: str = ""  # its last line
    error: str = ""  # the last error among its last lines; "": none
    nccl: NcclRank | None = None  # what NCCL says about it; None: nothing


class KeptRecording(NamedTuple):
    """The recording of one rank."""

    head: Recording  # without what differs from rank to rank
    age_s: int
    calls: int  # number of the pair (numbers of its groups, numbers of its entries)


class Evidence:
    """Reads the witnesses of each trace, and keeps only what the verdict needs."""

    def __init__(self) -> None:
        self.logs: dict[tuple[str, int], KeptLog] = {}
        self.recordings: dict[tuple[str, int], KeptRecording] = {}
        self.gpus: dict[str, WitnessedGpus] = {}
        self.networks: dict[str, Network] = {}
        self.kernels: dict[str, KernelLog] = {}
        self.ras: dict[str, Ras] = {}
        self.environment_facts: dict[str, EnvironmentFacts] = {}
        self.environments: dict[tuple[str, int], RankVariables] = {}
        #: Node and process -> the rank with its `NcclRank.calls`.
        self.nccl_calls: dict[tuple[str, int], NcclRank] = {}
        self.groups, self.entries = ValueTable(ProcessGroup), ValueTable(RecorderEntry)
        self.calls: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._logs = ValueTable(RankLog, path="", age_s=0, lines=[], reports=[], nccl=None)
        self._nccl = ValueTable(
            NcclRank, rank=None, host="", pid=0, device=None, address="", calls=[]
        )
        self._recordings = ValueTable(Recording, path="", age_s=0, groups=[], entries=[])
        self._reports: dict[bytes, tuple[WatchdogReport, ...]] = {}
        self._variables = ValueTable(RankVariables)

    def __bool__(self) -> bool:
        return bool(
            self.logs or self.recordings or self.gpus or self.networks or self.kernels or self.ras
            or self.environments
        )  # fmt: skip

    def read(self, trace: Trace) -> None:
        """Keep the answers of one trace's witnesses; an invalid answer is an absent witness."""
        for name, kind, values in (
            ("gpus", WitnessedGpus, self.gpus), ("network", Network, self.networks),
            ("kernel", KernelLog, self.kernels), ("nccl_ras", Ras, self.ras),
            ("environment", EnvironmentFacts, self.environment_facts),
        ):  # fmt: skip
            if name in trace.witnesses:
                value = trace.witnesses[name]
                values[trace.node] = _or_absent(kind, partial(wire.decode, kind), value)
        for process in trace.processes:
            observed = process.witnesses
            key = (trace.node, process.pid)
            if "logs" in observed:
                self._keep_calls(key, observed["logs"])
                self.logs[key] = self._log(observed["logs"])
            if "flight_recorder" in observed:
                self.recordings[key] = self._recording(observed["flight_recorder"])
            if "variables" in observed:
                variables = observed["variables"]
                self.environments[key] = _or_absent(
                    RankVariables, self._variables.value, variables
                )

    def keep_log(
        self, key: tuple[str, int], path: str, reports: tuple[WatchdogReport, ...],
        recording: Recording | None,
    ) -> None:  # fmt: skip
        """Keep what a rank of a dead job has left: the watchdog's lines, and its recorder's dump.
        key: node and pid, as of `logs`
        """
        if reports:
            self.logs[key] = KeptLog(RankLog(), reports, path)
        if recording is not None:
            groups = tuple(map(self.groups.keep, recording.groups))
            entries = tuple(map(self.entries.keep, recording.entries))
            self.recordings[key] = self._recorded(recording, recording.age_s, groups, entries)

    def _recorded(
        self, head: Recording, age_s: int, groups: tuple[int, ...], entries: tuple[int, ...]
    ) -> KeptRecording:
        calls = self.calls.setdefault((groups, entries), len(self.calls))
        return KeptRecording(head, age_s, calls)

    def _keep_calls(self, key: tuple[str, int], value: Any) -> None:
        """Keep the collectives that a rank has called by NCCL's lines."""
        nccl = value.get("nccl") if isinstance(value, dict) else None
        if isinstance(nccl, dict):
            # Traces of earlier versions have no such keys.
            for name, default in (("calls", []), ("calls_size", 0), ("choices", [])):
                nccl.setdefault(name, default)
            if nccl["calls"]:
                with contextlib.suppress(wire.DecodeError):
                    self.nccl_calls[key] = wire.decode(NcclRank, nccl)

    def _log(self, value: Any) -> KeptLog:
        try:
            lines, path, age = value["lines"], value["path"], value["age_s"]
            last = lines[-1] if lines else ""
            if type(path) is not str or type(age) is not int or type(last) is not str:
                raise wire.DecodeError("no Log")
            # Traces of earlier versions have no such keys.
            nccl, _ = value.setdefault("nccl", None), value.setdefault("is_own", False)
            # Ranks that write into one file share its reports. A single one is mostly one rank's.
            values = value["reports"]
            key = _bytes(values, 2) if len(values) > 1 else b""
            if (reports := self._reports.get(key)) is None:
                reports = tuple(wire.decode(WatchdogReport, report) for report in values)
                if key:
                    self._reports[key] = reports
            return KeptLog(
                self._logs.value(value), reports, path[:MAX_LINE], age, last[:MAX_LINE],
                _error(lines)[:MAX_LINE], None if nccl is None else self._nccl.value(nccl),
            )  # fmt: skip
        except _UNREADABLE as problem:
            return KeptLog(RankLog(_absence(value, problem)))

    def _recording(self, value: Any) -> KeptRecording:
        try:
            age = value["age_s"]
            if type(age) is not int:
                raise wire.DecodeError("no Recording")
            groups = tuple(map(self.groups.number, value["groups"]))
            entries = tuple(map(self.entries.number, value["entries"]))
            return self._recorded(self._recordings.value(value), age, groups, entries)
        except _UNREADABLE as problem:
            return self._recorded(Recording(_absence(value, problem)), 0, (), ())


#: Exceptions of reading an answer of another form.
_UNREADABLE = (wire.DecodeError, TypeError, KeyError, AttributeError, ValueError)


def _or_absent(kind: type[Any], decode: Callable[[Any], Any], value: Any) -> Any:
    try:
        return decode(value)
    except _UNREADABLE as problem:
        return kind(_absence(value, problem))


#: Every error contains one of these words; the patterns of errors.
_ERROR_WORDS = ("rror", "xception", "out of memory", "Segmentation")
_ERROR = re.compile(
    r"^\S*(?:Error|Exception)\b|\bCUDA error|\b\w+Error: |out of memory|Segmentation fault"
)


def _error(lines: Sequence[str]) -> str:
    """The last line that is an error; "": none."""
    for line in reversed(lines):
        if any(word in line for word in _ERROR_WORDS) and _ERROR.search(line):
            return line
    return ""


def _absence(value: Any, problem: Exception) -> str:
    """Why a witness has no answer: its own reason, else that its answer has another form."""
    if type(value) is dict and [*value] == ["absent"] and type(value["absent"]) is str:
        return value["absent"][:MAX_LINE]
    place = problem.defect if isinstance(problem, wire.DecodeError) else "of another form"
    return f"its answer makes no sense ({place[:MAX_LINE]})"


# --- What the witnesses state about the ranks: lags behind peers, signs for and against each.

#: Maximum characters of a name from a process or a node.
MAX_NAME = 40
#: Maximum statements of one witness, the weightiest; and reasons why a witness is absent.
_MAX_STATEMENTS, _MAX_REASONS = 64, 8


class Lag(NamedTuple):
    """Ranks that have not called the collective in which their peers wait, or a different one."""

    witness: str  # name of the witness
    ranks: tuple[int, ...]  # the lagging ranks
    waiting: tuple[int, ...]  # the ranks that wait
    call: str  # ``all_reduce #42 of default_pg``
    site: str = ""  # call site of the waiting ranks; "": not known
    other: str = ""  # what the lagging ranks have called instead (`disagree`); ""
    behind: int = 1  # number of collectives
    weight: int = 2  # as of a Statement
    # they wait in another group for ranks that are late there, so are not the root
    chained: bool = False
    silent: bool = False  # this witness has no record of them
    elsewhere: str = ""  # the call of another group in which they wait for unknown ranks; ""


class CallProgress(NamedTuple):
    """The progress of a rank in a group."""

    top: int | None  # number of its last call; None: not known
    at: int | None  # number of the oldest call that has not completed; None: all have


class CallDifference(NamedTuple):
    """The first call in which ranks of a group wait for others."""

    first: int  # its number
    late: tuple[int, ...]  # the ranks that have not called it and are the furthest behind
    waiting: tuple[int, ...]  # the further ranks that wait, in any call
    behind: int  # number of calls between the first rank and the last


def call_difference(calls: Iterable[tuple[CallProgress, Sequence[int]]]) -> CallDifference | None:
    """Where a group's ranks differ; None: no rank waits. calls: progress -> the ranks with it. If
    a rank has completed a call, all ranks have made it, and a record of it as pending is old:
    gloo's of a call that has just ended, NCCL's until the watchdog polls again.
    """
    states = list(calls)
    inside = [call.at for call, _ in states if call.at is not None]
    if not inside:
        return None
    done = [call.top if call.at is None else call.at - 1 for call, _ in states]
    passed = max(number for number in done if number is not None)
    first = min((at for at in inside if at > passed), default=min(inside))
    tops = [call.top for call, _ in states if call.top is not None]
    least = min(tops, default=first)
    late = {r for call, ranks in states for r in ranks if call.top == least and least < first}
    waiting = {rank for call, ranks in states for rank in ranks if call.at is not None} - late
    behind = max(tops, default=first) - least
    return CallDifference(first, tuple(sorted(late)), tuple(sorted(waiting)), behind)


def root_lags(lags: Iterable[Lag]) -> list[Lag]:
    """The lags; `chained` is set where the ranks wait for the ranks of another lag."""
    all_lags = list(lags)
    for at, lag in enumerate(all_lags):
        held = {rank for other in all_lags if other is not lag for rank in other.waiting}
        free = tuple(rank for rank in lag.ranks if rank not in held)
        all_lags[at] = lag._replace(ranks=free or lag.ranks, chained=lag.chained or not free)
    return all_lags


@dataclass
class WitnessReport:
    """The reports of all witnesses on one job."""

    witnesses: tuple[Witness, ...] = ()  # as they are shown; () where none was asked
    # ranks that are late or have called a different collective, by any witness
    lags: list[Lag] = field(default_factory=list)
    # ranks that have called every awaited collective, by the recorder -> the collective
    called: dict[int, str] = field(default_factory=dict)
    # ranks without a recording, where other ranks have one
    without_recording: tuple[int, ...] = ()
    # the collective in which all ranks of the job wait, by the recorder; "": none
    common: str = ""
    bytes_per_s: float | None = None  # of all ports that carry the job, together; None: not known
    # rank -> the last line of its log, where that is unlike most logs
    last: dict[int, str] = field(default_factory=dict)
    # rank -> the error at the end of its log that no other rank's end has caused
    raised: dict[int, str] = field(default_factory=dict)
    # the gravest findings about the ranks' environment: the job cannot work
    environment: tuple[EnvironmentFinding, ...] = ()

    def of(self, name: str) -> Witness:
        """The witness of this name; an empty one if it was not asked."""
        return next((witness for witness in self.witnesses if witness.name == name), Witness(name))


class RankPlace(NamedTuple):
    """A process of the job."""

    node: str
    pid: int
    rank: int | None
    local_rank: int | None = None


class StatementBuilder:
    """The statements of the witnesses on one job. moving: most ranks progress by the stacks"""

    def __init__(self, evidence: Evidence, places: Sequence[RankPlace], moving: bool) -> None:
        self.evidence, self.moving = evidence, moving
        self.places = places
        self.nodes = list(dict.fromkeys(place.node for place in places))
        claims = Counter(place.rank for place in places)
        #: Ranks that exactly one process claims.
        self.ranked = [p for p in places if p.rank is not None and claims[p.rank] == 1]
        self.rank_of = {(place.node, place.pid): place.rank for place in self.ranked}
        self.all_ranks = frozenset(place.rank for place in self.ranked if place.rank is not None)
        self.ranks_of_node: dict[str, list[int]] = defaultdict(list)
        for place in self.ranked:
            if place.rank is not None:
                self.ranks_of_node[place.node].append(place.rank)
        self.report = WitnessReport()
        self.statements: dict[str, list[Statement]] = defaultdict(list)
        self.absent: dict[str, dict[str, list[RankPlace | str]]]
        self.absent = defaultdict(lambda: defaultdict(list))
        #: The weight of evidence that would be enough for a verdict on a job that stands.
        self.strong = 0 if moving else 2

    def witnesses(self, names: Iterable[str]) -> tuple[Witness, ...]:
        return tuple(
            Witness(name, tuple(self._reasons(name)), self._folded(name)) for name in names
        )

    def _reasons(self, name: str) -> Iterator[str]:
        by_rank = name in ("logs", "flight_recorder", "environment")
        total = len(self.places if by_rank else self.nodes)
        reasons = self.absent[name]
        for reason, absent_places in list(reasons.items())[:_MAX_REASONS]:
            if len(absent_places) == total or name == "nccl_ras":
                yield reason
                continue
            nodes = [place for place in absent_places if isinstance(place, str)]
            numbers = (place.rank for place in absent_places if isinstance(place, RankPlace))
            ranks = [rank for rank in numbers if rank is not None]
            yield f"{reason} ({ranks_of(ranks) if ranks else nodes_of(nodes)})"

    def _folded(self, name: str) -> tuple[Statement, ...]:
        """Equal statements once, with the ranks and nodes of all; the weightiest first."""
        merged: dict[tuple[str, int, bool], tuple[list[int], list[str]]] = {}
        for statement in self.statements[name]:
            key = statement.text, statement.weight, statement.against
            ranks, nodes = merged.setdefault(key, ([], []))
            ranks += statement.ranks
            nodes += statement.nodes
        statements = []
        for (text, weight, against), (ranks, nodes) in merged.items():
            subjects = tuple(sorted(set(ranks))), tuple(sorted(set(nodes), key=natural))
            statements.append(Statement(text, *subjects, weight, against))
        statements.sort(key=lambda s: (-s.weight, s.against, len(s.ranks), s.ranks[:1]))
        return tuple(statements[:_MAX_STATEMENTS])

    def add_statement(
        self, name: str, text: str, ranks: Iterable[int] = (), nodes: Iterable[str] = (),
        *, weight: int = 0, against: bool = False,
    ) -> None:  # fmt: skip
        self.statements[name].append(Statement(text, tuple(ranks), tuple(nodes), weight, against))

    def add_lags(self, lags: Iterable[Lag]) -> None:
        """Keep the lags, and a statement on each about its late and its waiting ranks."""
        for lag in root_lags(lags):
            self.report.lags.append(lag)
            site = f" ({lag.site})" if lag.site else ""
            wait = f"{ranks_of(lag.waiting)} {say('{waits|wait}', len(lag.waiting))} in"
            text = f"has not called {lag.call}{site}, which {wait}"
            if lag.other:
                text = f"has called {lag.other} where {ranks_of(lag.waiting)} called {lag.call}"
                text += site
            if lag.elsewhere:
                text += f", and waits in {lag.elsewhere} itself"
            if lag.silent:
                text = f"has no record, while {wait} {lag.call}{site}"
            elif lag.behind > 1 and not lag.other:
                text += f"; {lag.behind} behind"
            if lag.chained:
                text += "; but it is kept waiting elsewhere"
            weight = 0 if lag.chained else lag.weight
            self.add_statement(lag.witness, text, lag.ranks, weight=weight)
            if not lag.other and lag.witness == "flight_recorder":
                text, weight = f"has called {lag.call}{site}, and waits in it", min(1, lag.weight)
                self.add_statement(lag.witness, text, lag.waiting, weight=weight, against=True)


def ranks_of(ranks: Iterable[int], nodes: Sequence[str] = ()) -> str:
    """Ranks, their nodes, or both in words; a long scattered set is counted.

    >>> ranks_of([3], ["gpu2"]), ranks_of([0, 1, 2]), ranks_of([], ["gpu1", "gpu2"])
    ('rank 3 (gpu2)', 'ranks 0-2', 'gpu[1-2]')
    """
    numbers, place = sorted(set(ranks)), nodes_of(nodes) if nodes else ""
    if not numbers:
        return place or "a process"
    text = f"rank{'s' if len(numbers) != 1 else ''} {fold_ranks(numbers)}"
    if len(text) > MAX_NAME:
        text = f"{len(numbers)} ranks"
    return f"{text} ({place})" if place else text


def nodes_of(nodes: Sequence[str]) -> str:
    text = fold(nodes)
    return text if len(text) <= MAX_NAME else counted(len(nodes), "node")

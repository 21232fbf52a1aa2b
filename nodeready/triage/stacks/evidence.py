"""What the witnesses beside the stacks have said, kept small while traces are read.

A trace's witnesses are the dataclasses of `nodeready.node.witnesses` as plain data. Ranks of a
hung job say nearly the same, so equal values are decoded once and known by a number.
"""

from __future__ import annotations

import marshal
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import itemgetter
from typing import Any, NamedTuple

from nodeready.inventory.nodeset import fold, natural
from nodeready.node.witnesses.devices import Gpu, Gpus, Kernel, Network, Port
from nodeready.node.witnesses.flight_recorder import Entry, ProcessGroup, Recording
from nodeready.node.witnesses.logs import Log, Report
from nodeready.node.witnesses.nccl_ras import Ras
from nodeready.subjects import wire
from nodeready.text import counted
from nodeready.triage.stacks.document import Statement, Witness, fold_ranks

#: Characters of a line that a process or a node said.
LINE = 160

#: Version 2 of marshal: equal values have equal bytes.
_bytes = marshal.dumps


class Known:
    """Decoded values of one dataclass, each different one once, known by its number.

    A value is known by its bytes, without the names of its fields: comparing those costs a tenth
    of decoding it again.
    """

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self.all: list[Any] = []
        self._numbers: dict[bytes, int] = {}
        self._names = {one.name for one in fields(kind)}
        self._said = itemgetter(*(one.name for one in fields(kind)))

    def number(self, value: Any) -> int:
        """Raises DecodeError."""
        return self.numbers([value])[0]

    def numbers(self, values: Iterable[Any]) -> tuple[int, ...]:
        """As `number`, of many. Raises DecodeError."""
        known = self._numbers.get
        found = []
        for value in values:
            if type(value) is not dict or value.keys() != self._names:
                raise wire.DecodeError(f"no {self.kind.__name__}")
            key = _bytes(self._said(value), 2)
            number = known(key)
            found.append(self._new(key, value) if number is None else number)
        return tuple(found)

    def _new(self, key: bytes, value: Any) -> int:
        made = wire.decode(self.kind, value)
        number = self._numbers[key] = len(self.all)
        self.all.append(made)
        return number


class Heads(Known):
    """Values without what everybody has an own of.

    own: what stands in place of that
    """

    def __init__(self, kind: type[Any], **own: Any) -> None:
        super().__init__(kind)
        self._own = own
        self._rest = itemgetter(*(one.name for one in fields(kind) if one.name not in own))

    def number(self, value: Any) -> int:
        """Only what is left makes the key: a dict without the rest costs as much as decoding.

        Raises DecodeError.
        """
        if value.keys() != self._names:
            raise wire.DecodeError(f"no {self.kind.__name__}")
        key = _bytes(self._rest(value), 2)
        number = self._numbers.get(key)
        return self._new(key, {**value, **self._own}) if number is None else number


class KeptLog(NamedTuple):
    """The log of one rank.

    head:    number of the log without what differs from rank to rank
    reports: number of the tuple of (rank, number of the report without its rank)
    last:    its last line
    error:   the last one of its last lines that is an error; "": none is
    """

    head: int
    reports: int
    path: str
    age_s: int
    last: str
    error: str


class KeptRecording(NamedTuple):
    """The recording of one rank.

    head:  number of the recording without what differs from rank to rank
    calls: number of the pair (numbers of its groups, numbers of its entries)
    """

    head: int
    age_s: int
    calls: int


class KeptGpu(NamedTuple):
    """One GPU. head: number of the GPU without what changes all the time"""

    head: int
    sm: int | None
    memory: int | None
    power: int | None
    pids: tuple[int, ...]


class KeptNetwork(NamedTuple):
    """The ports of one node. ports: (number of the port without its bytes, bytes both ways)"""

    absent: str
    seconds: float
    ports: tuple[tuple[int, int], ...]


class Evidence:
    """Reads the witnesses of one trace after the other, and keeps of each only what is needed."""

    def __init__(self) -> None:
        self.logs: dict[tuple[str, int], KeptLog] = {}
        self.recordings: dict[tuple[str, int], KeptRecording] = {}
        self.gpus: dict[str, tuple[str, tuple[KeptGpu, ...]]] = {}
        self.networks: dict[str, KeptNetwork] = {}
        self.kernels: dict[str, int] = {}
        self.ras: dict[str, Ras] = {}
        self.log_heads = Heads(Log, path="", age_s=0, lines=[], reports=[])
        self.recording_heads = Heads(Recording, path="", age_s=0, groups=[], entries=[])
        self.groups, self.entries = Known(ProcessGroup), Known(Entry)
        self.calls: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self.reports = Heads(Report, rank=None)
        self.report_lists: dict[tuple[tuple[int | None, int], ...], int] = {(): 0}
        self._report_keys: dict[bytes, int] = {}
        self.gpu_heads = Heads(Gpu, sm_percent=None, memory_percent=None, power_w=None, pids=[])
        self.gpus_heads = Heads(Gpus, devices=[])
        self.network_heads = Heads(Network, seconds=0.0, ports=[])
        self.ports, self.kernel_logs = Heads(Port, received=0, sent=0), Known(Kernel)

    def __bool__(self) -> bool:
        return bool(
            self.logs or self.recordings or self.gpus or self.networks or self.kernels or self.ras
        )

    def read(self, trace: Mapping[str, Any]) -> None:
        """Keep what the witnesses of one trace say; what makes no sense is an absent witness."""
        node, beside = trace["node"], trace.get("witnesses")
        if beside:
            self._read_node(node, beside)
        for process in trace["processes"]:
            said = process.get("witnesses")
            if not said:
                continue
            key = (node, process["pid"])
            if "logs" in said:
                self.logs[key] = self._log(said["logs"])
            if "flight_recorder" in said:
                self.recordings[key] = self._recording(said["flight_recorder"])

    def _log(self, value: Any) -> KeptLog:
        try:
            lines, path, age = value["lines"], value["path"], value["age_s"]
            last = lines[-1] if lines else ""
            if type(path) is not str or type(age) is not int or type(last) is not str:
                raise wire.DecodeError("no Log")
            reports = self._reports(value["reports"])
            head = self.log_heads.number(value)
            return KeptLog(head, reports, path[:LINE], age, last[:LINE], _error(lines)[:LINE])
        except _UNREAD as problem:
            head = self.log_heads.number(wire.plain(Log(_senseless(problem))))
            return KeptLog(head, self.report_lists.setdefault((), 0), "", 0, "", "")

    def _reports(self, values: list[Any]) -> int:
        """The number of the reports. Ranks that write one file have the same ones."""
        if not values:
            return 0
        # A single one is mostly of the rank alone.
        key = _bytes(values, 2) if len(values) > 1 else b""
        number = self._report_keys.get(key)
        if number is None:
            made = []
            for one in values:
                rank = one["rank"]
                if rank is not None and type(rank) is not int:
                    raise wire.DecodeError("no Report")
                made.append((rank, self.reports.number(one)))
            number = self.report_lists.setdefault(tuple(made), len(self.report_lists))
            if key:
                self._report_keys[key] = number
        return number

    def _recording(self, value: Any) -> KeptRecording:
        try:
            age = value["age_s"]
            if type(age) is not int:
                raise wire.DecodeError("no Recording")
            head = self.recording_heads.number(value)
            groups = self.groups.numbers(value["groups"])
            entries = self.entries.numbers(value["entries"])
            calls = self.calls.setdefault((groups, entries), len(self.calls))
            return KeptRecording(head, age, calls)
        except _UNREAD as problem:
            head = self.recording_heads.number(wire.plain(Recording(_senseless(problem))))
            return KeptRecording(head, 0, self.calls.setdefault(((), ()), len(self.calls)))

    def _read_node(self, node: str, beside: Mapping[str, Any]) -> None:
        if "gpus" in beside:
            self.gpus[node] = self._gpus(beside["gpus"])
        if "network" in beside:
            self.networks[node] = self._network(beside["network"])
        if "kernel" in beside:
            try:
                self.kernels[node] = self.kernel_logs.number(beside["kernel"])
            except _UNREAD as problem:
                absent = {"absent": _senseless(problem), "messages": []}
                self.kernels[node] = self.kernel_logs.number(absent)
        if "nccl_ras" in beside:
            try:
                self.ras[node] = wire.decode(Ras, beside["nccl_ras"])
            except wire.DecodeError as problem:
                self.ras[node] = Ras(_senseless(problem))

    def _gpus(self, value: Any) -> tuple[str, tuple[KeptGpu, ...]]:
        try:
            head = self.gpus_heads.all[self.gpus_heads.number(value)]
            return head.absent, tuple(map(self._gpu, value["devices"]))
        except _UNREAD as problem:
            return _senseless(problem), ()

    def _gpu(self, value: Mapping[str, Any]) -> KeptGpu:
        sm, memory, power = value["sm_percent"], value["memory_percent"], value["power_w"]
        pids = tuple(value["pids"])
        # Sets of their types take three times as long.
        for number in (sm, memory, power, *pids):
            if type(number) is not int and number is not None:
                raise wire.DecodeError("no Gpu")
        if None in pids:
            raise wire.DecodeError("no Gpu")
        return KeptGpu(self.gpu_heads.number(value), sm, memory, power, pids)

    def _network(self, value: Any) -> KeptNetwork:
        try:
            head = self.network_heads.all[self.network_heads.number(value)]
            seconds, ports = value["seconds"], []
            if type(seconds) not in (int, float) or not 0 <= seconds < 1e6:
                raise wire.DecodeError("no Network")
            for port in value["ports"]:
                received, sent = port["received"], port["sent"]
                if type(received) is not int or type(sent) is not int:
                    raise wire.DecodeError("no Port")
                number = self.ports.number(port)
                ports.append((number, max(0, received) + max(0, sent)))
            return KeptNetwork(head.absent, seconds, tuple(ports))
        except _UNREAD as problem:
            return KeptNetwork(_senseless(problem), 0.0, ())


#: What reading an answer of another form raises.
_UNREAD = (wire.DecodeError, TypeError, KeyError, AttributeError, ValueError)


#: Words of which one stands in every error, and the errors.
_HINTS = ("rror", "xception", "out of memory", "Segmentation")
_ERROR = re.compile(
    r"^\S*(?:Error|Exception)\b|\bCUDA error|\b\w+Error: |out of memory|Segmentation fault"
)


def _error(lines: Sequence[str]) -> str:
    """The last line that is an error; "": none is."""
    for line in reversed(lines):
        if any(word in line for word in _HINTS) and _ERROR.search(line):
            return line
    return ""


def _senseless(problem: Exception) -> str:
    what = problem.what if isinstance(problem, wire.DecodeError) else "of another form"
    return f"its answer makes no sense ({what[:LINE]})"


#: Characters of a name that a process or a node said.
NAME = 40


class Lag(NamedTuple):
    """Ranks that have not called what others wait in, or have called something else there.

    witness: who says so
    ranks:   of whom
    waiting: the ranks that wait
    what:    ``all_reduce #42 of default_pg``
    site:    where those that wait have called it; "": not told
    other:   what the ranks have called instead (`disagree`), ""
    behind:  how many collectives
    weight:  as of a Statement
    chained: they wait in another group themselves, for ranks that are late there: no root
    silent:  nothing is known of them by this witness
    elsewhere: what they wait in themselves, in another group, for nobody knows whom; ""
    """

    witness: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    what: str
    site: str = ""
    other: str = ""
    behind: int = 1
    weight: int = 2
    chained: bool = False
    silent: bool = False
    elsewhere: str = ""


class Call(NamedTuple):
    """How far a rank is in a group.

    top: number of its last call; None: not told
    at:  number of the oldest call that has not completed; None: there is none
    """

    top: int | None
    at: int | None


class Difference(NamedTuple):
    """The first call in which ranks of a group wait for others.

    first:   its number
    late:    the ranks that have not called it and are the furthest behind
    waiting: the other ranks that wait, in any call
    behind:  how many calls the first rank is before the last
    """

    first: int
    late: tuple[int, ...]
    waiting: tuple[int, ...]
    behind: int


def difference(calls: Iterable[tuple[Call, Sequence[int]]]) -> Difference | None:
    """Where a group's ranks differ; None: no rank waits. calls: how far, and which ranks are so
    far.

    What one rank has completed, all have called: whoever is still in that call by its record waits
    for nobody there. Records come later than what they tell: gloo's of a call that has just ended,
    and NCCL's until the watchdog looks again.
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
    late = {
        rank for call, ranks in states for rank in ranks if call.top == least and least < first
    }  # fmt: skip
    waiting = {rank for call, ranks in states for rank in ranks if call.at is not None} - late
    behind = max(tops, default=first) - least
    return Difference(first, tuple(sorted(late)), tuple(sorted(waiting)), behind)


def rooted(lags: Iterable[Lag]) -> list[Lag]:
    """The lags, each told whether its ranks are themselves kept waiting by another lag's."""
    found = list(lags)
    for at, lag in enumerate(found):
        held = {rank for other in found if other is not lag for rank in other.waiting}
        free = tuple(rank for rank in lag.ranks if rank not in held)
        found[at] = lag._replace(ranks=free or lag.ranks, chained=lag.chained or not free)
    return found


@dataclass
class Testimony:
    """What all witnesses say of one job.

    witnesses: as they are shown; () where none was asked
    lags:      who is late or has called something else, by any witness
    called:    ranks that have called all that anybody waits in, by the recorder -> what
    unheard:   ranks without a recording, while others have one
    common:    what all ranks of the job have called and wait in, by the recorder; "": nothing
    bytes_per_s: of all ports that carry the job, together; None: not known
    last:      rank -> the last line of its own log, where that is unlike most others'
    raised:    rank -> the error at the end of its own log that no other rank's end has caused
    """

    witnesses: tuple[Witness, ...] = ()
    lags: list[Lag] = field(default_factory=list)
    called: dict[int, str] = field(default_factory=dict)
    unheard: tuple[int, ...] = ()
    common: str = ""
    bytes_per_s: float | None = None
    last: dict[int, str] = field(default_factory=dict)
    raised: dict[int, str] = field(default_factory=dict)

    def of(self, name: str) -> Witness:
        """The witness of this name; one that says nothing where it was not asked."""
        return next((one for one in self.witnesses if one.name == name), Witness(name))

    @property
    def accused(self) -> frozenset[int]:
        """The ranks that a strong statement of who is late names as the root."""
        return frozenset(
            rank for lag in self.lags if lag.weight > 1 and not lag.chained for rank in lag.ranks
        )


class Place(NamedTuple):
    """A process of the job."""

    node: str
    pid: int
    rank: int | None


#: Statements of one witness that are kept, the weightiest; reasons why one is absent.
_MOST, _REASONS = 64, 8


class Bench:
    """Where the witnesses of one job are heard: it collects their statements.

    moving: the stacks say that most ranks go on: counts of a moment say nothing then
    """

    def __init__(self, evidence: Evidence, places: Sequence[Place], moving: bool) -> None:
        self.seen, self.moving = evidence, moving
        self.places = places
        self.nodes = list(dict.fromkeys(place.node for place in places))
        claims = Counter(place.rank for place in places)
        #: Ranks that one process alone claims.
        self.ranked = [one for one in places if one.rank is not None and claims[one.rank] == 1]
        self.rank_of = {(one.node, one.pid): one.rank for one in self.ranked}
        self.all = frozenset(one.rank for one in self.ranked if one.rank is not None)
        self.of_node: dict[str, list[int]] = defaultdict(list)
        for one in self.ranked:
            if one.rank is not None:
                self.of_node[one.node].append(one.rank)
        self.found = Testimony()
        self.says: dict[str, list[Statement]] = defaultdict(list)
        self.absent: dict[str, dict[str, list[Place | str]]] = defaultdict(dict)

    def witnesses(self, asked: Iterable[str]) -> tuple[Witness, ...]:
        """Those that were asked, with all that they said."""
        return tuple(
            Witness(name, tuple(self._reasons(name)), self._folded(name)) for name in asked
        )

    def _reasons(self, name: str) -> Iterator[str]:
        everybody = len(self.places if name in ("logs", "flight_recorder") else self.nodes)
        reasons = self.absent[name]
        for why, who in list(reasons.items())[:_REASONS]:
            if len(who) == everybody or name == "nccl_ras":
                yield why
                continue
            ranks = [one.rank for one in who if isinstance(one, Place) and one.rank is not None]
            nodes = [one for one in who if isinstance(one, str)]
            yield f"{why} ({ranks_of(ranks) if ranks else nodes_of(nodes)})"

    def _folded(self, name: str) -> tuple[Statement, ...]:
        """Equal statements once, with the ranks and nodes of all; the weightiest first."""
        merged: dict[tuple[str, int, bool], tuple[list[int], list[str]]] = {}
        for one in self.says[name]:
            ranks, nodes = merged.setdefault((one.text, one.weight, one.against), ([], []))
            ranks += one.ranks
            nodes += one.nodes
        made = [
            Statement(
                text,
                tuple(sorted(set(ranks))),
                tuple(sorted(set(nodes), key=natural)),
                weight,
                against,
            )
            for (text, weight, against), (ranks, nodes) in merged.items()
        ]
        made.sort(key=lambda one: (-one.weight, one.against, len(one.ranks), one.ranks[:1]))
        return tuple(made[:_MOST])

    def say(
        self, name: str, text: str, ranks: Iterable[int] = (), nodes: Iterable[str] = (),
        *, weight: int = 0, against: bool = False,
    ) -> None:  # fmt: skip
        """Keep one statement of this witness."""
        self.says[name].append(Statement(text, tuple(ranks), tuple(nodes), weight, against))

    def accuse(self, lags: Iterable[Lag]) -> None:
        """Keep the lags, and say of each who is late and who waits."""
        for lag in rooted(lags):
            self.found.lags.append(lag)
            site = f" ({lag.site})" if lag.site else ""
            wait = f"{ranks_of(lag.waiting)} {'waits' if len(lag.waiting) == 1 else 'wait'} in"
            text = (
                f"has called {lag.other} where {ranks_of(lag.waiting)} called {lag.what}{site}"
                if lag.other
                else f"has not called {lag.what}{site}, which {wait}"
            )
            if lag.elsewhere:
                text += f", and waits in {lag.elsewhere} itself"
            if lag.silent:
                text = f"says nothing, while {wait} {lag.what}{site}"
            elif lag.behind > 1 and not lag.other:
                text += f"; {lag.behind} behind"
            if lag.chained:
                text += "; but it is kept waiting elsewhere"
            self.say(lag.witness, text, lag.ranks, weight=0 if lag.chained else lag.weight)
            if not lag.other and lag.witness == "flight_recorder":
                self.say(
                    lag.witness, f"has called {lag.what}{site}, and waits in it", lag.waiting,
                    weight=min(1, lag.weight), against=True,
                )  # fmt: skip


def ranks_of(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2,4``; many that fold badly are counted."""
    numbers = sorted(set(ranks))
    text = fold_ranks(numbers)
    if len(text) > NAME:
        return f"{len(numbers)} ranks"
    return f"rank{'s' if len(numbers) != 1 else ''} {text}"


def nodes_of(nodes: Sequence[str]) -> str:
    text = fold(nodes)
    return text if len(text) <= NAME else counted(len(nodes), "node")

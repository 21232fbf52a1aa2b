"""What the witnesses beside the stacks have said: kept small while traces are read, then as
statements.

A trace's witnesses are the dataclasses of `nodeready.node.witnesses` as plain data. Ranks of a
hung job say nearly the same, so equal values are decoded once and known by a number.

Sources of the rules: PyTorch's torch/distributed/flight_recorder/components/{builder,types}.py
(which calls match; a group's name is unique only together with its ranks; the peers of a send are
numbers within the group), FlightRecorder.hpp (a group's status), ProcessGroupNCCL.cpp (the
watchdog's lines); NVIDIA's documentation of NCCL's RAS (counts are launches); the catalogue of
Xids in `nodeready.subjects.gpus.kernel_log`.
"""

from __future__ import annotations

import itertools
import marshal
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nodeready.inventory.nodeset import fold, natural
from nodeready.node.witnesses.devices import Gpu, Gpus, Kernel, Message, Network, Port
from nodeready.node.witnesses.flight_recorder import Entry, ProcessGroup, Recording
from nodeready.node.witnesses.logs import Log, Report
from nodeready.node.witnesses.nccl_ras import Ras
from nodeready.subjects import wire
from nodeready.subjects.gpus import kernel_log
from nodeready.text import counted
from nodeready.triage.stacks.document import Statement, Witness, fold_ranks

# --- What is kept of every trace until all are read.

#: The witnesses of a process, and those of a node, by their names in a trace.
_OF_PROCESS, _OF_NODE = ("logs", "flight_recorder"), ("nccl_ras", "gpus", "network", "kernel")
#: Characters of a name, and of a line, that a process or a node said.
_NAME, _LINE = 40, 160


class _Known:
    """Decoded values of one dataclass, each different one once, known by its number.

    A value is known by its bytes: comparing those costs a tenth of decoding it again.
    """

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        self.all: list[Any] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, value: Any) -> int:
        """Raises DecodeError. Version 2 of marshal: equal values have equal bytes."""
        key = marshal.dumps(value, 2)
        number = self._numbers.get(key)
        if number is None:
            made = wire.decode(self.kind, value)
            number = self._numbers[key] = len(self.all)
            self.all.append(made)
        return number


class _Log(NamedTuple):
    """head: number of the log without what differs from rank to rank"""

    head: int
    path: str
    age_s: int
    last: str


class _Recording(NamedTuple):
    """head: number of the recording without what differs; groups, entries: their numbers"""

    head: int
    age_s: int
    groups: tuple[int, ...]
    entries: tuple[int, ...]


class _Gpu(NamedTuple):
    """head: number of the GPU without what changes all the time"""

    head: int
    sm: int | None
    memory: int | None
    power: int | None
    pids: tuple[int, ...]


class _Network(NamedTuple):
    """ports: (number of the port without its bytes, bytes received and sent)"""

    absent: str
    seconds: float
    ports: tuple[tuple[int, int], ...]


class Evidence:
    """Reads the witnesses of one trace after the other, and keeps of each only what is needed."""

    def __init__(self) -> None:
        self.logs: dict[tuple[str, int], _Log] = {}
        self.recordings: dict[tuple[str, int], _Recording] = {}
        self.gpus: dict[str, tuple[str, tuple[_Gpu, ...]]] = {}
        self.networks: dict[str, _Network] = {}
        self.kernels: dict[str, int] = {}
        self.ras: dict[str, Ras] = {}
        self.log_heads, self.recording_heads = _Known(Log), _Known(Recording)
        self.groups, self.entries = _Known(ProcessGroup), _Known(Entry)
        self.gpu_heads, self.gpus_heads = _Known(Gpu), _Known(Gpus)
        self.ports, self.network_heads, self.kernel_logs = (
            _Known(Port), _Known(Network), _Known(Kernel)
        )  # fmt: skip

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

    def _log(self, value: Any) -> _Log:
        try:
            head = self.log_heads.number({**value, "path": "", "age_s": 0, "lines": []})
            path, age, lines = value["path"], value["age_s"], value["lines"]
            last = lines[-1] if lines else ""
            if type(path) is not str or type(age) is not int or type(last) is not str:
                raise wire.DecodeError("no Log")
            return _Log(head, path[:_LINE], age, last[:_LINE])
        except (wire.DecodeError, TypeError, KeyError, ValueError) as problem:
            absent = {"absent": _senseless(problem), "path": "", "age_s": 0}
            return _Log(self.log_heads.number({**absent, "lines": [], "reports": []}), "", 0, "")

    def _recording(self, value: Any) -> _Recording:
        try:
            head = {**value, "path": "", "age_s": 0, "groups": [], "entries": []}
            age = value["age_s"]
            if type(age) is not int:
                raise wire.DecodeError("no Recording")
            groups = tuple(map(self.groups.number, value["groups"]))
            entries = tuple(map(self.entries.number, value["entries"]))
            return _Recording(self.recording_heads.number(head), age, groups, entries)
        except (wire.DecodeError, TypeError, KeyError, ValueError) as problem:
            absent = {"absent": _senseless(problem), "path": "", "age_s": 0, "version": ""}
            head = {**absent, "partial": False, "groups": [], "entries": []}
            return _Recording(self.recording_heads.number(head), 0, (), ())

    def _read_node(self, node: str, beside: Mapping[str, Any]) -> None:
        if "gpus" in beside:
            self.gpus[node] = self._gpus(beside["gpus"])
        if "network" in beside:
            self.networks[node] = self._network(beside["network"])
        if "kernel" in beside:
            try:
                self.kernels[node] = self.kernel_logs.number(beside["kernel"])
            except (wire.DecodeError, ValueError) as problem:
                absent = {"absent": _senseless(problem), "messages": []}
                self.kernels[node] = self.kernel_logs.number(absent)
        if "nccl_ras" in beside:
            try:
                self.ras[node] = wire.decode(Ras, beside["nccl_ras"])
            except wire.DecodeError as problem:
                self.ras[node] = Ras(_senseless(problem))

    def _gpus(self, value: Any) -> tuple[str, tuple[_Gpu, ...]]:
        try:
            head = self.gpus_heads.all[self.gpus_heads.number({**value, "devices": []})]
            return head.absent, tuple(map(self._gpu, value["devices"]))
        except (wire.DecodeError, TypeError, KeyError, ValueError) as problem:
            return _senseless(problem), ()

    def _gpu(self, value: Mapping[str, Any]) -> _Gpu:
        now = (value["sm_percent"], value["memory_percent"], value["power_w"])
        pids = value["pids"]
        if not {*map(type, now)} <= {int, type(None)} or not {*map(type, pids)} <= {int}:
            raise wire.DecodeError("no Gpu")
        head = {**value, "sm_percent": None, "memory_percent": None, "power_w": None, "pids": []}
        return _Gpu(self.gpu_heads.number(head), *now, tuple(pids))

    def _network(self, value: Any) -> _Network:
        try:
            head = self.network_heads.all[
                self.network_heads.number({**value, "seconds": 0.0, "ports": []})
            ]
            seconds, ports = value["seconds"], []
            if type(seconds) not in (int, float) or not 0 <= seconds < 1e6:
                raise wire.DecodeError("no Network")
            for port in value["ports"]:
                received, sent = port["received"], port["sent"]
                if type(received) is not int or type(sent) is not int:
                    raise wire.DecodeError("no Port")
                number = self.ports.number({**port, "received": 0, "sent": 0})
                ports.append((number, max(0, received) + max(0, sent)))
            return _Network(head.absent, seconds, tuple(ports))
        except (wire.DecodeError, TypeError, KeyError, ValueError) as problem:
            return _Network(_senseless(problem), 0.0, ())


def _senseless(problem: Exception) -> str:
    what = problem.what if isinstance(problem, wire.DecodeError) else "of another form"
    return f"its answer makes no sense ({what[:_LINE]})"


# --- Who has not called what the others wait in.


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


class Call(NamedTuple):
    """How far a rank is in a group.

    top: number of its last call; None: not told
    at:  number of the oldest call that has not completed; None: there is none
    """

    top: int | None
    at: int | None


def first_difference(calls: Mapping[int, Call]) -> tuple[int | None, list[int], list[int]]:
    """The first number that a rank waits in, who has not called it, and who waits in it.

    The number is None when no rank waits.
    """
    first = min((call.at for call in calls.values() if call.at is not None), default=None)
    if first is None:
        return None, [], []
    late = [rank for rank, call in calls.items() if call.top is not None and call.top < first]
    waiting = [rank for rank, call in calls.items() if call.at is not None]
    return first, sorted(late), sorted(waiting)


def rooted(lags: Iterable[Lag]) -> list[Lag]:
    """The lags, each told whether its ranks are themselves kept waiting by another lag's."""
    found = list(lags)
    for at, lag in enumerate(found):
        held = {rank for other in found if other is not lag for rank in other.waiting}
        free = tuple(rank for rank in lag.ranks if rank not in held)
        found[at] = lag._replace(ranks=free or lag.ranks, chained=not free)
    return found


# --- All that the witnesses say of one job.


@dataclass
class Testimony:
    """What all witnesses say of one job.

    witnesses: as they are shown; () where none was asked
    lags:      who is late or has called something else, by any witness
    called:    ranks that have called all that anybody waits in, by the recorder -> what
    unheard:   ranks without a recording, while others have one
    common:    what all ranks of the job have called and wait in, by the recorder; "": nothing
    bytes_per_s: of all ports that carry the job, together; None: not known
    last:      rank -> the last line of its own log
    """

    witnesses: tuple[Witness, ...] = ()
    lags: list[Lag] = field(default_factory=list)
    called: dict[int, str] = field(default_factory=dict)
    unheard: tuple[int, ...] = ()
    common: str = ""
    bytes_per_s: float | None = None
    last: dict[int, str] = field(default_factory=dict)

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


class _Court:
    """Makes the statements for one job.

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
        self.named: dict[tuple[str, str], set[int]] = defaultdict(set)
        self.says: dict[str, list[Statement]] = defaultdict(list)
        self.absent: dict[str, dict[str, list[Place | str]]] = defaultdict(dict)

    def hear(self) -> Testimony:
        for listen in (self.recorder, self.logs, self.ras, self.gpus, self.network, self.kernel):
            listen()
        asked = {
            "logs": self.seen.logs, "flight_recorder": self.seen.recordings,
            "nccl_ras": self.seen.ras, "gpu": self.seen.gpus, "network": self.seen.networks,
            "kernel": self.seen.kernels,
        }  # fmt: skip
        self.found.witnesses = tuple(
            Witness(name, tuple(self._reasons(name)), self._folded(name))
            for name, answers in asked.items()
            if answers
        )
        return self.found

    def _reasons(self, name: str) -> Iterator[str]:
        everybody = len(self.places if name in _OF_PROCESS else self.nodes)
        reasons = self.absent[name]
        for why, who in list(reasons.items())[:_REASONS]:
            if len(who) == everybody or name == "nccl_ras":
                yield why
                continue
            ranks = [one.rank for one in who if isinstance(one, Place) and one.rank is not None]
            nodes = [one for one in who if isinstance(one, str)]
            yield f"{why} ({_ranks(ranks) if ranks else _nodes(nodes)})"

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

    def _say(
        self, name: str, text: str, ranks: Iterable[int] = (), nodes: Iterable[str] = (),
        *, weight: int = 0, against: bool = False,
    ) -> None:  # fmt: skip
        self.says[name].append(Statement(text, tuple(ranks), tuple(nodes), weight, against))

    def _accuse(self, lags: Iterable[Lag]) -> None:
        """Keep the lags, and say of each who is late and who waits."""
        for lag in rooted(lags):
            self.found.lags.append(lag)
            site = f" ({lag.site})" if lag.site else ""
            wait = f"{_ranks(lag.waiting)} {'waits' if len(lag.waiting) == 1 else 'wait'} in"
            text = (
                f"has called {lag.other} where {_ranks(lag.waiting)} called {lag.what}{site}"
                if lag.other
                else f"has not called {lag.what}{site}, which {wait}"
            )
            if lag.silent:
                text = f"says nothing, while {wait} {lag.what}{site}"
            elif lag.behind > 1 and not lag.other:
                text += f"; {lag.behind} behind"
            if lag.chained:
                text += "; but it is kept waiting elsewhere"
            self._say(lag.witness, text, lag.ranks, weight=0 if lag.chained else lag.weight)
            if not lag.other and lag.witness == "flight_recorder":
                self._say(
                    lag.witness, f"has called {lag.what}{site}, and waits in it", lag.waiting,
                    weight=min(1, lag.weight), against=True,
                )  # fmt: skip

    # --- The flight recorder.

    def recorder(self) -> None:
        heads = self.seen.recording_heads.all
        dumps: dict[int, _Recording] = {}
        for place in self.places:
            found = self.seen.recordings.get(place[:2])
            if found is None:
                continue
            head = heads[found.head]
            if head.absent:
                self.absent["flight_recorder"].setdefault(head.absent, []).append(place)
            elif self.rank_of.get(place[:2]) is not None and place.rank is not None:
                dumps[place.rank] = found
        if not dumps:
            return
        self.found.unheard = tuple(sorted(self.all - dumps.keys()))
        partial = sorted(rank for rank, one in dumps.items() if heads[one.head].partial)
        if partial:
            self._say("flight_recorder", "its dump is cut off: calls may be missing", partial)
        lags, common, waits = [], [], set()
        for members in self._communicators(dumps):
            made, all_called = self._compare(members, dumps, frozenset(partial))
            lags += made
            common += all_called
            for rank, own in members.calls.items():
                if own.at is not None:
                    waits.add(rank)
        lags += self._unmatched(dumps)
        late = {rank for lag in lags for rank in lag.ranks}
        for lag in lags:
            for rank in lag.waiting:
                if rank not in late and lag.weight > 1:
                    self.found.called[rank] = lag.what
        if not lags and common:
            # The group with the most ranks says the most.
            what, ranks = max(common, key=lambda one: len(one[1]))
            if len(ranks) == len(self.all):
                self.found.common = what
                self.found.called = dict.fromkeys(ranks, what)
            self._say("flight_recorder", f"has called {what}, as all of its group", ranks)
        if not lags and not waits:
            self._say("flight_recorder", "waits in nothing: all that was called has completed",
                      dumps)  # fmt: skip
        self._accuse(lags)

    def _communicators(self, dumps: Mapping[int, _Recording]) -> list[_Members]:
        """The process groups of all ranks, each with how far its ranks are.

        Two groups may have one name (split_group): the name and the ranks together are the key.
        """
        groups, entries = self.seen.groups.all, self.seen.entries.all
        made: dict[tuple[str, tuple[int, ...]], _Members] = {}
        for rank, one in dumps.items():
            calls: dict[str, list[Entry]] = {}
            for number in one.entries:
                entry = entries[number]
                if entry.state != "completed":
                    calls.setdefault(entry.group, []).append(entry)
            known = {groups[number].name: groups[number] for number in one.groups}
            for name in {**known, **calls}:
                group = known.get(name) or ProcessGroup(name, "", (), None, None, None)
                members = made.get((name, group.ranks))
                if members is None:
                    members = made[name, group.ranks] = _Members(group)
                members.add(rank, group, calls.get(name, ()))
        return list(made.values())

    def _compare(
        self, members: _Members, dumps: Mapping[int, _Recording], partial: frozenset[int]
    ) -> tuple[list[Lag], list[tuple[str, list[int]]]]:
        """Who is late in a group or has called something else; what all of it have called."""
        first, late, waiting = first_difference(members.calls)
        if first is None:
            return [], []
        entries = {
            rank: entry for rank, entry in members.entries.items() if entry.sequence == first
        }
        kinds: dict[str, list[int]] = defaultdict(list)
        for rank, entry in entries.items():
            kinds[entry.operation].append(rank)
        usual = max(kinds, key=lambda one: len(kinds[one]), default="a collective")
        what = f"{usual[:_NAME]} #{first} of {members.name}"
        site = _site(entries[rank] for rank in kinds.get(usual, ()))
        if late:
            weight = self._weight(late, waiting, dumps, partial)
            if members.vague:
                weight = min(1, weight)
            lowest = min(members.calls[rank].top or 0 for rank in late)
            highest = max(call.top or 0 for call in members.calls.values())
            # Of ranks that are late, the last is the first to look at.
            last = [rank for rank in late if (members.calls[rank].top or 0) == lowest]
            return [
                Lag("flight_recorder", tuple(last), tuple(waiting), what, site,
                    behind=highest - lowest, weight=weight)
            ], []  # fmt: skip
        odd = self._mismatches(kinds, usual, entries)
        if odd:
            return [
                Lag("flight_recorder", tuple(sorted(ranks)), tuple(sorted(set(kinds[usual]) - set(ranks))), what,
                    site, f"{other} ({_site(entries[r] for r in ranks) or 'site not told'})",
                    weight=min(weight, self._weight(ranks, waiting, dumps, partial)))
                for other, ranks, weight in odd
            ], []  # fmt: skip
        # Ranks of the group that are in the job and of which nothing is known.
        silent = sorted(
            rank
            for rank in (members.group.ranks or (self.all if members.whole else ()))
            if rank in self.all and (members.calls.get(rank) or Call(None, None)).top is None
        )
        if silent and len(silent) < len(waiting):
            return [
                Lag(
                    "flight_recorder",
                    tuple(silent),
                    tuple(waiting),
                    what,
                    site,
                    weight=1,
                    silent=True,
                )
            ], []
        return [], [] if silent else [(what, sorted(members.calls))]

    def _mismatches(
        self, kinds: Mapping[str, list[int]], usual: str, entries: Mapping[int, Entry]
    ) -> Iterator[tuple[str, list[int], int]] | list[tuple[str, list[int], int]]:
        """Ranks that are in another operation at the same number, or with other sizes or types."""
        found = [(name[:_NAME], ranks, 2) for name, ranks in kinds.items() if name != usual]
        if found or usual.partition(":")[2] in _UNEVEN or usual in _UNEVEN:
            return found
        for value, weight in (("sizes", 2), ("types", 1)):
            said: dict[str, list[int]] = defaultdict(list)
            for rank in kinds.get(usual, ()):
                said[getattr(entries[rank], value)].append(rank)
            most = max(said, key=lambda one: len(said[one]), default="")
            found += [
                (f"{usual[:_NAME]} with {value} {other[:_NAME] or 'not told'}, "
                 f"not {most[:_NAME]}", ranks, weight if usual in _EVEN else 1)
                for other, ranks in said.items()
                if other != most and other and most
            ]  # fmt: skip
            if found:
                break
        return found

    def _unmatched(self, dumps: Mapping[int, _Recording]) -> Iterator[Lag]:
        """Sends and receives whose partner has not called its part. A peer is named by its number
        in the group; ``?`` is any."""
        groups, entries = self.seen.groups.all, self.seen.entries.all
        posted: dict[tuple[str, str, int, int], dict[int, Entry]] = defaultdict(dict)
        for rank, one in dumps.items():
            names = {groups[number].name: groups[number] for number in one.groups}
            for number in one.entries:
                entry = entries[number]
                pair = _PAIR.fullmatch(entry.operation) if entry.is_p2p else None
                if pair is None or entry.state == "completed":
                    continue
                group = names.get(entry.group)
                ranks = sorted(group.ranks) if group and group.ranks else sorted(self.all)
                one_end, other_end = int(pair[2]), int(pair[4])
                if max(one_end, other_end) >= len(ranks):
                    continue
                ends = (ranks[one_end], ranks[other_end])
                sender, receiver = ends if pair[1] == "send" else ends[::-1]
                posted[entry.group, group.desc if group else "", sender, receiver][rank] = entry
        for (name, desc, sender, receiver), called in posted.items():
            for rank, entry in called.items():
                peer = receiver if rank == sender else sender
                if peer in called or rank not in (sender, receiver) or peer not in self.all:
                    continue
                verb = "recv from" if rank == sender else "send to"
                weight = self._weight([peer], [rank], dumps, frozenset()) if peer in dumps else 1
                yield Lag(
                    "flight_recorder", (peer,), (rank,),
                    f"{verb} rank {rank} of {(desc or name)[:_NAME]}", entry.site[:_LINE],
                    weight=weight, silent=peer not in dumps,
                )  # fmt: skip

    def _weight(
        self, late: Iterable[int], waiting: Iterable[int], dumps: Mapping[int, _Recording],
        partial: frozenset[int],
    ) -> int:  # fmt: skip
        """How much a dump's word is worth: an early one does not know what came later."""
        if self.moving:
            return 0
        late = [rank for rank in late if rank in dumps]
        if partial & set(late):
            return 1
        oldest = max((dumps[rank].age_s for rank in late), default=0)
        newest = min((dumps[rank].age_s for rank in waiting if rank in dumps), default=0)
        return 1 if oldest > newest + _SAME_DUMP_S else 2

    # --- The logs.

    def logs(self) -> None:
        heads = self.seen.log_heads.all
        status: dict[str, dict[int, Call]] = defaultdict(dict)
        caught: dict[str, dict[int, tuple[int, str]]] = defaultdict(dict)
        ends: dict[int, bool] = {}
        own: dict[int, _Log] = {}
        files = Counter(
            (place.node, log.path)
            for place in self.places
            if (log := self.seen.logs.get(place[:2])) and log.path
        )
        done: set[int] = set()
        for place in self.places:
            log = self.seen.logs.get(place[:2])
            if log is None:
                continue
            head = heads[log.head]
            if head.absent:
                self.absent["logs"].setdefault(head.absent, []).append(place)
                continue
            if place.rank in self.all and place.rank is not None:
                if files[place.node, log.path] == 1:
                    own[place.rank] = log
                    self.found.last[place.rank] = log.last
                if log.head in done and all(one.rank is not None for one in head.reports):
                    continue
                done.add(log.head)
                for report in head.reports:
                    self._report(report, place.rank, status, caught)
                ends[place.rank] = bool(_WATCHDOG.search(log.last)) or not head.reports
        self._watchdog(status, caught)
        self._named()
        self._silence(own)
        for rank, log in own.items():
            if _ERROR.search(log.last):
                text = f"its log ends in an error: {log.last[:_LINE]}"
                self._say("logs", text, [rank], weight=1)

    def _report(
        self, report: Report, own: int, status: dict[str, dict[int, Call]],
        caught: dict[str, dict[int, tuple[int, str]]],
    ) -> None:  # fmt: skip
        rank = own if report.rank is None else report.rank
        if rank not in self.all:
            return
        name = report.group[:_NAME] or "a process group"
        if report.kind in _NAMED:
            what = f"{report.operation[:_NAME]} " if report.operation else ""
            self.named[report.kind, f"{what}of {name}"].add(rank)
        if report.kind == "timeout" and report.sequence is not None:
            caught[name][rank] = (report.sequence, report.operation[:_NAME])
        top, done = report.enqueued, report.completed
        if top is not None:
            at = done + 1 if done is not None and done < top else None
            # A later line of the same rank replaces an earlier one.
            status[name][rank] = Call(top, at)

    def _watchdog(
        self, status: Mapping[str, Mapping[int, Call]],
        caught: Mapping[str, Mapping[int, tuple[int, str]]],
    ) -> None:  # fmt: skip
        lags = []
        for name in {**status, **caught}:
            timeouts = caught.get(name, {})
            calls = {
                rank: Call(sequence, sequence) for rank, (sequence, _) in timeouts.items()
            } | dict(status.get(name, {}))
            first, late, waiting = first_difference(calls)
            if first is None:
                continue
            words = {word for at, word in timeouts.values() if at == first and word}
            what = f"{min(words, default='collective')} #{first} of {name}"
            weight = 0 if self.moving else 2
            if not late and timeouts and name.startswith("default_pg"):
                # A rank that waits in nothing writes nothing: a sign, and no proof.
                late, weight = sorted(self.all - calls.keys()), min(1, weight)
                late = late if len(late) < len(waiting) else []
            if late:
                lowest = min(calls[rank].top or 0 for rank in late) if late[0] in calls else first
                last = [
                    rank for rank in late if rank not in calls or (calls[rank].top or 0) == lowest
                ]
                top = max(call.top or 0 for call in calls.values())
                lags.append(
                    Lag("logs", tuple(last), tuple(waiting), what, behind=max(1, top - lowest),
                        weight=weight, silent=last[0] not in calls)
                )  # fmt: skip
            for rank, call in status.get(name, {}).items():
                done = call.at - 1 if call.at is not None else call.top
                text = f"watchdog: last completed {done}, enqueued {call.top} of {name}"
                self._say("logs", text, [rank])
            for rank, (sequence, word) in timeouts.items():
                text = f"watchdog: {word or 'collective'} #{sequence} of {name} has timed out"
                self._say("logs", text, [rank])
        self._accuse(lags)

    def _named(self) -> None:
        """Ranks that an error names: of a monitored barrier, of a collective that is compared."""
        lags = []
        for (kind, what), ranks in self.named.items():
            late = tuple(sorted(ranks))
            come = self.named.get(("reached", what), self.all - ranks)
            rest = tuple(sorted(come - ranks))
            weight = 0 if self.moving else 2
            if kind == "missing":
                lags.append(Lag("logs", late, rest, what, weight=weight))
            elif kind == "mismatch":
                if len(ranks) * 2 < len(self.all) or len(self.all) == 2:
                    lags.append(Lag("logs", late, rest, what, other="another collective",
                                    weight=min(1, weight)))  # fmt: skip
            elif kind != "reached":
                self._say("logs", _NAMED[kind], late, weight=1 if kind == "stuck" else 0)
        self._accuse(lags)

    def _silence(self, own: Mapping[int, _Log]) -> None:
        """Few ranks whose own log has ended long before the others'."""
        if len(own) < 4 or self.moving:
            return
        order = sorted(own, key=lambda rank: -own[rank].age_s)
        few = max(1, len(order) // 8)
        gaps = [
            own[one].age_s - own[after].age_s
            for one, after in itertools.pairwise(order[: few + 1])
        ]
        at = max(range(len(gaps)), key=gaps.__getitem__)
        rest = [own[rank].age_s for rank in order[at + 1 :]]
        # The others have to stop together: else ranks simply write when they like.
        if gaps[at] >= _SILENT_S and rest[0] - rest[-1] <= gaps[at] / 2:
            text = f"wrote last {gaps[at]} s before the others"
            self._say("logs", text, order[: at + 1], weight=1)

    # --- NCCL's RAS port.

    def ras(self) -> None:
        by_name: dict[tuple[str, int], list[int]] = defaultdict(list)
        for (node, pid), rank in self.rank_of.items():
            if rank is not None:
                by_name[_host(node), pid].append(rank)
        lags: list[Lag] = []
        for node, answer in self.seen.ras.items():
            if node not in self.of_node:
                continue
            if answer.absent:
                self.absent["nccl_ras"].setdefault(answer.absent, []).append(node)
                continue
            for communicator in answer.communicators:
                counts: dict[int, dict[str, int]] = {}
                for member in communicator.members:
                    ranks = by_name.get((_host(member.host), member.pid), [])
                    where = f"process {member.pid} on {member.host[:_NAME]}"
                    if len(ranks) == 1:
                        counts[ranks[0]] = dict(member.counts)
                        where = "its process"
                    host = [one for one in self.nodes if _host(one) == _host(member.host)]
                    for word in filter(None, (member.missing, member.problem)):
                        strong = word == "dead" and not ranks
                        self._say("nccl_ras", f"{where} is {word[:_LINE]} for NCCL", ranks,
                                  host[:1], weight=2 if strong else 1)  # fmt: skip
                lags += self._counts(counts, dict(communicator.usual), communicator.hash[:_NAME])
            if answer.timeouts:
                peers = counted(answer.timeouts, "peer")
                self._say("nccl_ras", f"{peers} gave the port no answer")
        self._accuse(lags)

    def _counts(
        self, counts: Mapping[int, Mapping[str, int]], usual: Mapping[str, int], name: str
    ) -> Iterator[Lag]:
        """Who has launched less than the others. Counts of ranks that go on differ anyway.

        usual: what most members have, of whom not all are told
        """
        if self.moving or not counts:
            return
        names = sorted({operation for own in (*counts.values(), usual) for operation in own})
        for operation in names:
            numbers = {rank: own.get(operation, 0) for rank, own in counts.items()}
            rest = [usual[operation]] if operation in usual else []
            least, most = min([*numbers.values(), *rest]), max([*numbers.values(), *rest])
            late = sorted(rank for rank, number in numbers.items() if number == least)
            ahead = sorted(rank for rank, number in numbers.items() if number > least)
            if least == most or not late:
                continue
            more = [
                other
                for other in names
                if other != operation
                and min(counts[rank].get(other, 0) for rank in late)
                > max([usual.get(other, 0), *(counts[rank].get(other, 0) for rank in ahead)])
            ]
            instead = f"{more[0][:_NAME]}" if more else ""
            few = len(late) < len(ahead) or len(numbers) == 2 or bool(rest and rest[0] > least)
            yield Lag(
                "nccl_ras", tuple(late), tuple(ahead) or tuple(sorted(self.all - {*late})),
                f"{operation[:_NAME]} #{most} of communicator {name}", other=instead,
                behind=most - least, weight=2 if few else 1,
            )  # fmt: skip
            if more:
                return

    # --- GPUs, ports, the kernel.

    def gpus(self) -> None:
        heads = self.seen.gpu_heads.all
        spins: list[int] = []
        works: dict[int, str] = {}
        idle: list[int] = []
        for node in self.nodes:
            absent, devices = self.seen.gpus.get(node, ("", ()))
            if absent:
                self.absent["gpu"].setdefault(absent, []).append(node)
            for one in devices:
                head = heads[one.head]
                ranks = [
                    rank for pid in one.pids if (rank := self.rank_of.get((node, pid))) is not None
                ]
                for xid in head.xids:
                    self._xid("gpu", xid, node, ranks)
                if one.sm is None or not ranks:
                    continue
                low = one.power is None or not head.limit_w or one.power <= 0.6 * head.limit_w
                if one.sm >= 90 and (one.memory or 0) <= 5 and low:
                    spins += ranks
                elif one.sm <= 5:
                    idle += ranks
                elif one.sm >= 50:
                    works |= dict.fromkeys(ranks, f"SM {one.sm} %, memory {one.memory or 0} %")
        if spins:
            text = "SM busy, memory idle, low power: a kernel that spins in a collective"
            self._say("gpu", text, spins, weight=1, against=True)
        few = max(1, len(spins) // 3)
        if idle and len(idle) <= few and spins:
            text = f"its GPU is idle while those of {_ranks(spins)} spin in a collective"
            self._say("gpu", text, idle, weight=1)
        elif idle:
            self._say("gpu", "its GPU is idle", idle)
        if works and len(works) <= few and spins:
            text = f"its GPU computes while those of {_ranks(spins)} spin in a collective"
            self._say("gpu", text, works, weight=1)
        elif works:
            self._say("gpu", "its GPU computes", works)

    def _xid(self, name: str, code: int, node: str, ranks: Sequence[int], when: str = "") -> None:
        known = kernel_log.XIDS.get(code)
        meaning = known.meaning if known else "unknown"
        action = known.action if known else kernel_log.MONITOR
        grave = action in (kernel_log.ISOLATE, kernel_log.REBOOT, kernel_log.RESET)
        weight = 2 if grave else 1 if action == kernel_log.APPLICATION else 0
        text = f"Xid {code} {meaning}{when} ({action})"
        self._say(name, text, ranks, [node], weight=weight)

    def network(self) -> None:
        ports = self.seen.ports.all
        total, known = 0.0, False
        quiet: dict[str, list[str]] = defaultdict(list)
        states: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for node in self.nodes:
            found = self.seen.networks.get(node)
            if found is None:
                continue
            if found.absent:
                self.absent["network"].setdefault(found.absent, []).append(node)
                continue
            rdma = any(ports[at].kind in _RDMA for at, _ in found.ports)
            carry, silent = 0, []
            for at, moved in found.ports:
                port = ports[at]
                states[port.name[:_NAME]][port.state[:_NAME]].append(node)
                if port.errors:
                    rose = ", ".join(f"{name[:_NAME]} +{by}" for name, by in port.errors[:4])
                    fatal = any("link_downed" in name for name, _ in port.errors)
                    text = f"errors of {port.name[:_NAME]} rise: {rose}"
                    self._say("network", text, nodes=[node], weight=2 if fatal else 1)
                if port.state != "up" or (rdma and port.kind not in _RDMA):
                    continue
                carry += moved
                silent += [port.name[:_NAME]] if not moved else []
            if found.seconds > 0 and found.ports:
                known = True
                total += carry / found.seconds
                if silent:
                    names = ", ".join(silent[:8])
                    quiet[f"no bytes on {names} in {found.seconds:.0f} s"].append(node)
                elif carry / found.seconds >= MOVING_BYTES_PER_S:
                    self._say("network", f"bytes move on its {'RDMA ' if rdma else ''}ports",
                              nodes=[node])  # fmt: skip
        for text, nodes in quiet.items():
            self._say("network", text, nodes=nodes)
        for name, by_state in states.items():
            up = len(by_state.pop("up", []))
            for state, nodes in by_state.items():
                # A port that is down nearly everywhere is one that nobody has connected.
                if up > len(nodes):
                    text = f"port {name} is {state}, and up on {counted(up, 'other node')}"
                    self._say("network", text, nodes=nodes, weight=1)
        if known:
            self.found.bytes_per_s = total

    def kernel(self) -> None:
        logs = self.seen.kernel_logs.all
        for node, number in self.seen.kernels.items():
            found = logs[number]
            if found.absent and node in self.of_node:
                self.absent["kernel"].setdefault(found.absent, []).append(node)
            for message in found.messages:
                self._message(message, node)

    def _message(self, message: Message, node: str) -> None:
        rank = self.rank_of.get((node, message.pid)) if message.pid else None
        ranks = [rank] if rank is not None else []
        when = f" {ago(message.ago_s)} ago"
        code = _XID.search(message.text) if message.kind == "xid" else None
        if code:
            self._xid("kernel", int(code[1]), node, ranks, when)
            return
        words = _MESSAGES.get(message.kind, message.kind[:_NAME])
        named = f" of pid {message.pid}" if message.pid else ""
        weight = 2 if message.kind == "oom" or ranks else 1
        if message.kind == "memory" and not ranks:
            weight = 0
        text = f"{words}{named}{when}: {message.text[:_LINE]}"
        self._say("kernel", text, ranks, [node], weight=weight)


class _Members:
    """The ranks of a process group with how far they are in it."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.name = (group.desc or group.name or "a group")[:_NAME]
        if group.desc in ("", "undefined"):
            self.name = f"group {group.name[:_NAME]}"
        self.calls: dict[int, Call] = {}
        self.entries: dict[int, Entry] = {}

    @property
    def whole(self) -> bool:
        """Whether all ranks of the job are in it, as far as is known."""
        return self.group.desc == "default_pg" or self.group.name == "0"

    @property
    def vague(self) -> bool:
        """Whether two groups of one name may be in it: so large a group's ranks are not told."""
        return not self.group.ranks and not self.whole and len(self.calls) > MOST_RANKS

    def add(self, rank: int, group: ProcessGroup, entries: Sequence[Entry]) -> None:
        """Entries are more than the status: that counts sends and receives in with the rest."""
        calls = [entry for entry in entries if not entry.is_p2p]
        if calls:
            first = min(calls, key=lambda entry: entry.sequence)
            self.entries[rank] = first
            self.calls[rank] = Call(max(entry.sequence for entry in calls), first.sequence)
            return
        top = group.enqueued
        if len(entries) > len(calls):
            top = None
        # -1: nothing was enqueued yet.
        self.calls[rank] = Call(None if top is None else max(0, top), None)


#: Operations in which sizes legitimately differ between ranks.
_UNEVEN = {
    "all_to_all", "all_to_all_single", "all_to_all_v_single", "scatter", "gather", "coalesced",
    "all_gather_v", "reduce_scatter_v", "barrier", "all_reduce_barrier", "alltoall",
    "alltoall_base",
}  # fmt: skip
#: Operations that hang, or spoil their result, when sizes differ.
_EVEN = {
    "all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base",
    "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor",
    "reduce_scatter_tensor",
}  # fmt: skip
#: A dump that is so many seconds older than another one is of another moment.
_SAME_DUMP_S = 60
#: Seconds that a log must have ended before the others' to be told.
_SILENT_S = 60
#: Bytes per second of all ports above which something moves: heartbeats and ssh are below.
MOVING_BYTES_PER_S = 1e6
#: Ranks of a process group, of more none is told (`nodeready.node.witnesses.flight_recorder`).
MOST_RANKS = 512
_RDMA = ("infiniband", "roce")
_PAIR = re.compile(r"(?:\w+:)?(send|recv) (\d{1,7})(->|<-)(\d{1,7})")
_WATCHDOG = re.compile(r"[Ww]atchdog|ProcessGroup|\[PG ID")
_ERROR = re.compile(
    r"^\S*(?:Error|Exception)\b|\bCUDA error|\b\w+Error: |out of memory|Segmentation fault"
)
#: Kinds of reports that name a rank, and what they say of it.
_NAMED = {
    "missing": "has not come", "reached": "has come", "mismatch": "has called another collective",
    "lost": "has lost its connection to another rank", "stuck": "its watchdog itself is stuck",
}  # fmt: skip
_XID = re.compile(r"\bXid\b\s*(?:\([^)]*\))?:\s*(\d{1,4})\b")
_MESSAGES = {
    "oom": "out of memory: the kernel has killed a process", "xid": "Xid", "link": "link",
    "filesystem": "file system", "hung": "hung in the kernel", "memory": "memory error",
    "segfault": "crashed",
}  # fmt: skip


def ago(seconds: int) -> str:
    """``40 s``, ``12 min``, ``3 h``."""
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def _host(name: str) -> str:
    return name if name.replace(".", "").isdigit() else name.partition(".")[0]


def _site(entries: Iterable[Entry]) -> str:
    """The call site of most."""
    sites = Counter(entry.site for entry in entries if entry.site)
    return max(sites, key=lambda one: sites[one])[:_LINE] if sites else ""


def _ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2,4``; many that fold badly are counted."""
    numbers = sorted(set(ranks))
    text = fold_ranks(numbers)
    if len(text) > _NAME:
        return f"{len(numbers)} ranks"
    return f"rank{'s' if len(numbers) != 1 else ''} {text}"


def _nodes(nodes: Sequence[str]) -> str:
    text = fold(nodes)
    return text if len(text) <= _NAME else counted(len(nodes), "node")


def hear(evidence: Evidence, places: Iterable[Any], moving: bool) -> Testimony:
    """All that the witnesses say of the job with these processes (node, pid, rank)."""
    if not evidence:
        return Testimony()
    return _Court(evidence, [Place(*one[:3]) for one in places], moving).hear()

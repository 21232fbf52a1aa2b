"""Which ranks have called which collectives, and which lag: flight recorder, watchdog lines, RAS.

Sources of the rules: PyTorch's torch/distributed/flight_recorder/components/{builder,types}.py
(which calls match; a group's name is unique only together with its ranks; the peers of a send are
numbers within the group), FlightRecorder.hpp (a group's status), ProcessGroupNCCL.cpp (the
watchdog's lines); NVIDIA's documentation of NCCL's RAS (counts are launches).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from nodeready.agent.witnesses.flight_recorder import MAX_RANKS, ProcessGroup, RecorderEntry
from nodeready.agent.witnesses.logs import WatchdogReport
from nodeready.agent.witnesses.nccl_ras import Communicator
from nodeready.core.text import counted
from nodeready.runs.stacks import evidence, hints
from nodeready.runs.stacks.evidence import MAX_LINE, MAX_NAME, CallProgress, Lag, call_difference

_Value = TypeVar("_Value")
#: Seconds between two dumps from which they count as different moments.
_SAME_DUMP_S = 60
#: Names of the process group of all ranks in the watchdog's lines.
_DEFAULT_GROUP_NAMES = ("default_pg", "a process group")
_P2P = re.compile(r"(?:\w+:)?(send|recv) (\d{1,7})(->|<-)(\d{1,7})")
#: Kinds of reports that name a rank -> what the report means for it.
_REPORT_TEXTS = {
    "missing": "has not come", "reached": "has come", "mismatch": "has called another collective",
    "lost": "has lost its connection to another rank", "stuck": "its watchdog itself is stuck",
}  # fmt: skip


class ProcessGroupMembers:
    """The ranks of a process group with their progress in it."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        is_unnamed = group.desc in ("", "undefined")
        self.name = f"group {group.name[:MAX_NAME]}" if is_unnamed else group.desc[:MAX_NAME]
        #: Progress, and the entries not completed, the oldest first -> the ranks with both.
        self.states: dict[tuple[CallProgress, tuple[RecorderEntry, ...]], list[int]] = {}
        # All known ranks of the job are in it.
        self.is_default = group.desc == "default_pg" or group.name == "0"

    def add(self, group: ProcessGroup, entries: list[RecorderEntry], ranks: list[int]) -> None:
        calls = [entry for entry in entries if not entry.is_p2p]
        calls.sort(key=lambda entry: entry.sequence)
        # The status of a group counts sends and receives, too. -1: nothing was enqueued yet.
        top = None if group.enqueued is None or entries else max(0, group.enqueued)
        numbers = (calls[-1].sequence, calls[0].sequence) if calls else (top, None)
        self.states.setdefault((CallProgress(*numbers), tuple(calls)), []).extend(ranks)

    def difference(self) -> evidence.CallDifference | None:
        return call_difference((call, ranks) for (call, _), ranks in self.states.items())

    def awaited_call(self) -> str:
        """The call of the first waiting rank, as in ``all_reduce #1 of tp (train.py:31 main)``."""
        entry = next(calls[0] for _, calls in self.states if calls)
        site = f" ({entry.site[:MAX_LINE]})" if entry.site else ""
        return f"{entry.operation[:MAX_NAME]} #{entry.sequence} of {self.name}{site}"


class CollectiveReader(evidence.StatementBuilder):
    """Reads the witnesses that report the collectives which ranks have called."""

    # --- The flight recorder.

    def recorder(self) -> None:
        """Read the dumps of the flight recorder."""
        dumps = dict[int, evidence.KeptRecording]()
        for place in self.places:
            recording = self.evidence.recordings.get(place[:2])
            if recording is not None and recording.head.absent:
                self.absent["flight_recorder"][recording.head.absent].append(place)
            elif recording is not None and place.rank is not None and place.rank in self.all_ranks:
                dumps[place.rank] = recording
        if not dumps:
            return
        self.dumps = dumps
        self.report.without_recording = tuple(sorted(self.all_ranks - dumps.keys()))
        self.partial = {rank for rank, dump in dumps.items() if dump.head.partial}
        if self.partial:
            text = "its dump is cut off: calls may be missing"
            self.add_statement("flight_recorder", text, sorted(self.partial))
        #: Ranks whose call has begun: gloo only reports that a call was scheduled, even if it has
        #: just ended, which clears no rank that stands elsewhere.
        self.started: set[int] = set()
        lags, common, elsewhere = list[Lag](), list[tuple[str, list[int]]](), dict[int, str]()
        waits = [(m, difference) for m in self._communicators() if (difference := m.difference())]
        for members, difference in waits:
            group_lags, call = self._compare(members, difference)
            lags += group_lags
            common += call
            # No further rank of the group is known: the awaited rank is not shown.
            if not (group_lags or members.group.ranks or members.is_default):
                elsewhere.update(dict.fromkeys(difference.waiting, members.awaited_call()))
        for at, lag in enumerate(lags):
            # A late rank that waits in another group is not the root.
            calls = {elsewhere.get(rank, "") for rank in lag.ranks}
            if not lag.other and any(set(lag.ranks) <= set(ranks) for _, ranks in common):
                lags[at] = lag._replace(chained=True)
            elif len(calls) == 1 and not lag.silent:
                lags[at] = lag._replace(elsewhere=calls.pop())
        lags += self._unmatched()
        late = {rank for lag in lags for rank in lag.ranks}
        for lag in lags:
            if lag.weight > 1:
                self.report.called.update(dict.fromkeys(set(lag.waiting) - late, lag.call))
        if common and all(lag.chained for lag in lags):
            # The group with the most ranks is the most informative.
            name, ranks = max(common, key=lambda call_ranks: len(call_ranks[1]))
            if len(ranks) == len(self.all_ranks) or lags:
                self.report.common = name
                self.report.called.update(dict.fromkeys(self.started.intersection(ranks), name))
            self.add_statement("flight_recorder", f"has called {name}, as all of its group", ranks)
        if not lags and not waits:
            text = "waits in no call: all its calls have completed"
            self.add_statement("flight_recorder", text, dumps)
        self.add_lags(lags)

    def _communicators(self) -> Iterable[ProcessGroupMembers]:
        """The process groups in which a rank waits, each with the progress of all its ranks. Two
        groups may have one name (split_group): the name and the ranks together are the key.
        """
        groups, entries = self.evidence.groups.all, self.evidence.entries.all
        by_number = list(self.evidence.calls)
        pending: dict[tuple[int, ...], dict[str, tuple[int, ...]]] = {}
        for _, numbers in by_number:
            calls = pending.setdefault(numbers, {})
            for number in numbers if not calls else ():
                if entries[number].state != "completed":
                    name = entries[number].group
                    calls[name] = (*calls.get(name, ()), number)
        # Nearly every rank has private groups; a group without a waiting rank is irrelevant.
        names = {name for calls in pending.values() for name in calls}
        held = {at for at, group in enumerate(groups) if group.name in names}
        #: Group, or its name where it is not listed, and its pending entries -> the ranks.
        ranks_of: dict[tuple[int | str, tuple[int, ...]], list[int]] = defaultdict(list)
        for rank, dump in self.dumps.items():
            own_groups, numbers = by_number[dump.calls]
            calls = dict(pending[numbers])
            for at in own_groups:
                if at in held:
                    ranks_of[at, calls.pop(groups[at].name, ())].append(rank)
            for name, posted in calls.items():
                ranks_of[name, posted].append(rank)
        communicators: dict[tuple[str, tuple[int, ...]], ProcessGroupMembers] = {}
        for (at_or_name, numbers), ranks in ranks_of.items():
            unlisted = ProcessGroup(str(at_or_name), "", (), None, None, None)
            group = groups[at_or_name] if isinstance(at_or_name, int) else unlisted
            key = group.name, group.ranks
            members = communicators.setdefault(key, ProcessGroupMembers(group))
            members.add(group, [entries[number] for number in numbers], ranks)
        return communicators.values()

    def _compare(
        self, members: ProcessGroupMembers, difference: evidence.CallDifference
    ) -> tuple[list[Lag], list[tuple[str, list[int]]]]:
        """The ranks that are late in a group or differ; else the call that all of it have made."""
        first, late, waiting, behind = difference
        entries: dict[int, RecorderEntry] = {}
        for (_, calls), ranks in members.states.items():
            # An earlier call may have ended without being marked yet.
            entry = next((entry for entry in calls if entry.sequence == first), None)
            entries.update(dict.fromkeys(ranks, entry) if entry else {})
            self.started.update(ranks if entry and entry.state != "scheduled" else ())
        usual, mismatches = _mismatches(entries)
        agreeing = [rank for rank, entry in entries.items() if entry.operation == usual]
        call = f"{usual[:MAX_NAME] or 'a collective'} #{first} of {members.name}"
        lag = Lag("flight_recorder", late, waiting, call, _site(entries, agreeing), behind=behind)
        expected = members.group.ranks or (self.all_ranks if members.is_default else ())
        if late:
            # Two groups of one name may be mixed: the ranks of so large a group are not listed.
            is_vague = not expected and sum(map(len, members.states.values())) > MAX_RANKS
            weight = min(1 if is_vague else 2, self._weight(late, waiting))
            return [lag._replace(weight=weight)], []
        lags = []
        for other, ranks, weight in mismatches:
            called = f"{other} ({_site(entries, ranks) or 'site not known'})"
            peers = tuple(sorted({*agreeing} - {*ranks}))
            lags.append(lag._replace(
                ranks=tuple(sorted(ranks)), waiting=peers, other=called,
                weight=min(weight, self._weight(ranks, waiting)),
            ))  # fmt: skip
        if lags:
            return lags, []
        # Ranks of the group in the job without a recording.
        states = [(call.top, ranks) for (call, _), ranks in members.states.items()]
        recorded = [rank for top, ranks in states if top is not None for rank in ranks]
        silent = tuple(sorted(self.all_ranks.intersection(expected).difference(recorded)))
        if silent and len(silent) < len(waiting):
            return [lag._replace(ranks=silent, weight=1, silent=True)], []
        return [], [(call, sorted(recorded))] if expected and not silent else []

    def _unmatched(self) -> Iterator[Lag]:
        """Note sends and receives without the peer's call. Peers: their numbers; ``?``: any"""
        groups, entries = self.evidence.groups.all, self.evidence.entries.all
        by_number = list(self.evidence.calls)
        pairs = {
            at: pair for at, entry in enumerate(entries)
            if entry.is_p2p and entry.state != "completed"
            and (pair := _P2P.fullmatch(entry.operation))
        }  # fmt: skip
        posted: dict[tuple[str, str, int, int], dict[int, RecorderEntry]] = defaultdict(dict)
        for rank, dump in self.dumps.items() if pairs else ():
            numbers, posts = by_number[dump.calls]
            own_groups = {groups[at].name: groups[at] for at in numbers}
            for number in pairs.keys() & posts:
                entry, pair = entries[number], pairs[number]
                group = own_groups.get(entry.group)
                ranks = sorted(group.ranks if group and group.ranks else self.all_ranks)
                ends = [int(pair[2]), int(pair[4])][:: 1 if pair[1] == "send" else -1]
                if max(ends) < len(ranks):
                    key = entry.group, group.desc if group else "", ranks[ends[0]], ranks[ends[1]]
                    posted[key][rank] = entry
        for (name, desc, sender, receiver), called in posted.items():
            for rank, entry in called.items():
                peer = receiver if rank == sender else sender
                if peer in called or rank not in (sender, receiver) or peer not in self.all_ranks:
                    continue
                verb = "recv from" if rank == sender else "send to"
                yield Lag(
                    "flight_recorder", (peer,), (rank,),
                    f"{verb} rank {rank} of {(desc or name)[:MAX_NAME]}", entry.site[:MAX_LINE],
                    weight=self._weight([peer], [rank]) if peer in self.dumps else 1,
                    silent=peer not in self.dumps,
                )  # fmt: skip

    def _weight(self, late: Iterable[int], waiting: Iterable[int]) -> int:
        """The weight of a dump: an early one does not show later calls."""
        ages = [self.dumps[rank].age_s for rank in late if rank in self.dumps]
        newest = min((self.dumps[r].age_s for r in waiting if r in self.dumps), default=0)
        is_early = max(ages, default=0) > newest + _SAME_DUMP_S
        return min(self.strong, 1 if is_early or self.partial.intersection(late) else 2)

    # --- The logs.

    def logs(self) -> dict[int, evidence.KeptLog]:
        """Read the watchdog's lines; the logs of one writer, and those of many with own lines."""
        #: (Kind of report, call) -> the ranks that it names.
        self.named: dict[tuple[str, str], dict[int, None]] = defaultdict(dict)
        #: Process group -> the progress of each rank, and the calls that have timed out.
        self.status: dict[str, dict[int, CallProgress]] = defaultdict(dict)
        self.caught: dict[str, dict[int, tuple[int, str]]] = defaultdict(dict)
        logs = [(p, log) for p in self.places if (log := self.evidence.logs.get(p[:2]))]
        #: A file of a node -> number of processes whose log it is.
        files = Counter((place.node, log.path) for place, log in logs)
        own_logs, done = dict[int, evidence.KeptLog](), set[int]()
        for place, log in logs:
            if log.head.absent:
                self.absent["logs"][log.head.absent].append(place)
            elif place.rank is not None and place.rank in self.all_ranks:
                if (log.path and files[place.node, log.path] == 1) or log.head.is_own:
                    own_logs[place.rank] = log
                for report in log.reports if id(log.reports) not in done else ():
                    rank = place.rank if report.rank is None else report.rank
                    # A later line of the same rank replaces an earlier one.
                    for ranks, value in self._targets(report) if rank in self.all_ranks else ():
                        ranks[rank] = value
                # Ranks that write into one file share its reports.
                if all(report.rank is not None for report in log.reports):
                    done.add(id(log.reports))
        self._watchdog()
        self._named()
        return own_logs

    def _targets(self, report: WatchdogReport) -> Iterator[tuple[dict[int, Any], Any]]:
        """Where the ranks of a report are kept, and the value."""
        name, operation = report.group[:MAX_NAME] or "a process group", report.operation[:MAX_NAME]
        top, done = report.enqueued, report.completed
        if report.kind in _REPORT_TEXTS:
            yield self.named[report.kind, f"{operation or 'a collective'} of {name}"], None
        if report.kind == "timeout" and report.sequence is not None:
            yield self.caught[name], (report.sequence, operation)
        if top is not None:
            at = done + 1 if done is not None and done < top else None
            yield self.status[name], CallProgress(top, at)

    def _watchdog(self) -> None:
        lags = []
        for name in {**self.status, **self.caught}:
            timeouts, status = self.caught.get(name, {}), self.status.get(name, {})
            words = {word for _, word in timeouts.values() if word}
            calls = {rank: CallProgress(at, at) for rank, (at, _) in timeouts.items()} | status
            difference = call_difference(_ranks_by((c, r) for r, c in calls.items()).items())
            # There may be many groups with other names, each with separate numbers.
            if difference is not None and name.startswith(_DEFAULT_GROUP_NAMES):
                first, late, waiting, behind = difference
                call = f"{min(words, default='collective')} #{first} of {name}"
                lag = Lag("logs", late, waiting, call, behind=behind, weight=self.strong)
                silent = tuple(sorted(self.all_ranks - calls.keys()))
                if late:
                    lags.append(lag)
                elif timeouts and silent and len(silent) < len(waiting):
                    # A rank that waits in no collective writes nothing: a sign, not a proof.
                    weight = min(1, self.strong)
                    lags.append(lag._replace(ranks=silent, weight=weight, silent=True))
            for (top, at), ranks in _ranks_by((c, r) for r, c in status.items()).items():
                done = top if at is None else at - 1
                text = f"watchdog: last completed {done}, enqueued {top} of {name}"
                self.add_statement("logs", text, ranks)
            for rank, (number, word) in timeouts.items():
                text = f"watchdog: {word or 'collective'} #{number} of {name} has timed out"
                self.add_statement("logs", text, [rank])
        self.add_lags(lags)

    def _named(self) -> None:
        """Note the ranks that an error names: of a monitored barrier, of a checked collective."""
        lags = []
        # Who waited itself is not late: its watchdog hangs after its timeout.
        waited = {rank for timeouts in self.caught.values() for rank in timeouts}
        for (kind, call), named in self.named.items():
            ranks = {r: named[r] for r in named if kind != "stuck" or r not in waited}
            come = self.named.get(("reached", call)) or self.all_ranks
            peers = set(come) - ranks.keys()
            lag = Lag("logs", tuple(sorted(ranks)), tuple(sorted(peers)), call)
            if kind == "missing" and ranks:
                lags.append(lag._replace(weight=self.strong))
            elif kind == "mismatch" and ranks:
                if len(ranks) * 2 < len(self.all_ranks) or len(self.all_ranks) == 2:
                    weight = min(1, self.strong)
                    lags.append(lag._replace(other="another collective", weight=weight))
            elif kind != "reached" and ranks:
                weight = 1 if kind == "stuck" else 0
                self.add_statement("logs", _REPORT_TEXTS[kind], lag.ranks, weight=weight)
        self.add_lags(lags)

    # --- NCCL's RAS port.

    def ras(self) -> None:
        """Read the answers of NCCL's RAS ports."""
        #: Host and pid -> the ranks of that process.
        by_name: dict[tuple[str, int], list[int]] = defaultdict(list)
        for (node, pid), rank in self.rank_of.items() if self.evidence.ras else ():
            by_name[host_of(node), pid] += [rank] if rank is not None else []
        lags: list[Lag] = []
        for node, answer in self.evidence.ras.items():
            if node not in self.ranks_of_node:
                continue
            if answer.absent:
                self.absent["nccl_ras"][answer.absent].append(node)
                continue
            for communicator in answer.communicators:
                counts = self._launches(communicator, by_name)
                # Counts of progressing ranks differ anyway.
                lags += [] if self.moving else self._count_lags(counts, communicator)
            if answer.timeouts:
                peers = counted(answer.timeouts, "peer")
                self.add_statement("nccl_ras", f"{peers} gave the port no answer")
        self.add_lags(lags)

    def _launches(
        self, communicator: Communicator, by_name: Mapping[tuple[str, int], list[int]]
    ) -> dict[int, dict[str, int]]:
        """Rank -> its launches in a communicator. Adds a statement on each faulty member."""
        counts: dict[int, dict[str, int]] = {}
        for member in communicator.members:
            ranks = by_name.get((host_of(member.host), member.pid), [])
            if member.world_rank in self.all_ranks:
                # NCCL names a node by an address.
                ranks = [member.world_rank]
            place = f"process {member.pid} on {member.host[:MAX_NAME]}"
            if len(ranks) == 1:
                counts[ranks[0]] = dict(member.counts)
                place = "its process"
            host = [node for node in self.nodes if host_of(node) == host_of(member.host)]
            for word in filter(None, (member.missing, member.problem)):
                weight = 2 if word == "dead" and not ranks else 1
                text = f"{place} is {word[:MAX_LINE]} for NCCL"
                self.add_statement("nccl_ras", text, ranks, host[:1], weight=weight)
        return counts

    def _count_lags(
        self, counts: Mapping[int, Mapping[str, int]], communicator: Communicator
    ) -> Iterator[Lag]:
        """Note ranks with fewer launches than most."""
        # The count of most members, which are not all listed.
        usual = dict(communicator.usual) if counts else {}
        name = communicator.hash[:MAX_NAME]
        names = sorted({name for rank_counts in (*counts.values(), usual) for name in rank_counts})
        for operation in names:
            numbers = {rank: rank_counts.get(operation, 0) for rank, rank_counts in counts.items()}
            all_counts = [*numbers.values(), *([usual[operation]] if operation in usual else [])]
            least, highest = min(all_counts), max(all_counts)
            late = tuple(sorted(rank for rank, number in numbers.items() if number == least))
            ahead = tuple(sorted(numbers.keys() - late))
            if least == highest or not late:
                continue
            instead = next((
                other[:MAX_NAME] for other in names
                if other != operation and min(counts[rank].get(other, 0) for rank in late)
                > max([usual.get(other, 0), *(counts[rank].get(other, 0) for rank in ahead)])
            ), "")  # fmt: skip
            is_few = len(late) < len(ahead) or len(numbers) == 2 or usual.get(operation, 0) > least
            yield Lag(
                "nccl_ras", late, ahead or tuple(sorted(self.all_ranks.difference(late))),
                f"{operation[:MAX_NAME]} #{highest} of communicator {name}",
                other=instead, behind=highest - least, weight=2 if is_few else 1,
            )  # fmt: skip
            if instead:
                return


def _ranks_by(rows: Iterable[tuple[_Value, int]]) -> dict[_Value, list[int]]:
    ranks_of: dict[_Value, list[int]] = defaultdict(list)
    for value, rank in rows:
        ranks_of[value].append(rank)
    return ranks_of


def _mismatches(
    entries: Mapping[int, RecorderEntry],
) -> tuple[str, list[tuple[str, list[int], int]]]:
    """The operation of most ranks; (call, ranks, maximum weight) of ranks whose call differs."""
    operation, rows = "", list[tuple[str, list[int], int]]()
    for name in ("operation", "sizes", "types"):
        ranks_of = _ranks_by((getattr(entry, name), rank) for rank, entry in entries.items())
        usual = max(ranks_of, key=lambda value: len(ranks_of[value]), default="")
        operation = operation or usual
        is_weak = name == "types" or (name == "sizes" and operation not in hints.EVEN_OPERATIONS)
        peers = "" if name == "operation" else f", not {usual[:MAX_NAME]}"
        start = f"{operation[:MAX_NAME]} with {name} " if peers else ""
        for value, ranks in ranks_of.items():
            if value and usual and value != usual:
                rows.append((f"{start}{value[:MAX_NAME]}{peers}", ranks, 1 if is_weak else 2))
        if rows or {operation, operation.partition(":")[2]} & hints.UNEVEN_OPERATIONS:
            break
    return operation, rows


def host_of(name: str) -> str:
    return name if name.replace(".", "").isdigit() else name.partition(".")[0]


def _site(entries: Mapping[int, RecorderEntry], ranks: Collection[int]) -> str:
    """The call site of most of these ranks."""
    sites = Counter(entries[rank].site for rank in ranks if entries[rank].site)
    return max(sites, key=lambda site: sites[site])[:MAX_LINE] if sites else ""

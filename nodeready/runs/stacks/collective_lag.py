"""Which ranks have called which collectives, and which lag: flight recorder, watchdog lines, RAS.

Sources of the rules: PyTorch's torch/distributed/flight_recorder/components/{builder,types}.py
(which calls match; a group's name is unique only together with its ranks; the peers of a send are
numbers within the group), FlightRecorder.hpp (a group's status), ProcessGroupNCCL.cpp (the
watchdog's lines); NVIDIA's documentation of NCCL's RAS (counts are launches).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nodeready.agent.witnesses.flight_recorder import ProcessGroup, RecorderEntry
from nodeready.agent.witnesses.logs import WatchdogReport
from nodeready.agent.witnesses.nccl_ras import Communicator
from nodeready.core.text import counted
from nodeready.runs.stacks.evidence import (
    MAX_LINE,
    MAX_NAME,
    CallDifference,
    CallProgress,
    Evidence,
    KeptLog,
    KeptRecording,
    Lag,
    RankPlace,
    StatementBuilder,
    call_difference,
)


class CollectiveReader(StatementBuilder):
    """Reads the witnesses that report the collectives which ranks have called."""

    def __init__(self, evidence: Evidence, places: Sequence[RankPlace], moving: bool) -> None:
        super().__init__(evidence, places, moving)
        #: (Kind of report, call) -> the ranks that it names.
        self.named: dict[tuple[str, str], dict[int, None]] = defaultdict(dict)
        #: Process group -> the progress of each rank, and the calls that have timed out.
        self.status: dict[str, dict[int, CallProgress]] = defaultdict(dict)
        self.caught: dict[str, dict[int, tuple[int, str]]] = defaultdict(dict)
        #: Ranks whose call has begun by a recorder.
        self._started: set[int] = set()
        #: Number of a report -> where its rank is kept, and the value.
        self._targets_of: dict[int, list[tuple[dict[int, Any], Any]]] = {}

    # --- The flight recorder.

    def recorder(self) -> None:
        """Read the dumps of the flight recorder."""
        heads = self.evidence.recording_heads.all
        absent = [head.absent for head in heads]
        dumps: dict[int, KeptRecording] = {}
        for place in self.places:
            recording = self.evidence.recordings.get(place[:2])
            if recording is None:
                continue
            rank = place.rank
            if absent[recording.head]:
                self.absent["flight_recorder"].setdefault(absent[recording.head], []).append(place)
            elif rank in self.all_ranks and rank is not None:
                dumps[rank] = recording
        if not dumps:
            return
        self.report.without_recording = tuple(sorted(self.all_ranks - dumps.keys()))
        partial = sorted(rank for rank, dump in dumps.items() if heads[dump.head].partial)
        if partial:
            self.add_statement(
                "flight_recorder", "its dump is cut off: calls may be missing", partial
            )
        lags, common, waits = [], [], False
        elsewhere: dict[int, str] = {}
        for members in self._communicators(dumps):
            difference = call_difference(
                (call, ranks) for (call, _), ranks in members.states.items()
            )
            if difference is None:
                continue
            waits = True
            group_lags, group_calls = self._compare(members, difference, dumps, frozenset(partial))
            lags += group_lags
            common += group_calls
            # No further rank of the group is known: the recorder does not show the awaited rank.
            if not group_lags and not members.group.ranks and not members.is_default_group:
                elsewhere.update(
                    dict.fromkeys(difference.waiting, members.waits(self.evidence.entries.all))
                )
        lags = self._kept_waiting(lags, common, elsewhere)
        lags += self._unmatched(dumps)
        late = {rank for lag in lags for rank in lag.ranks}
        for lag in lags:
            if lag.weight > 1:
                self.report.called.update(dict.fromkeys(set(lag.waiting) - late, lag.call))
        if common and all(lag.chained for lag in lags):
            # The group with the most ranks is the most informative.
            call, ranks = max(common, key=lambda call_ranks: len(call_ranks[1]))
            if len(ranks) == len(self.all_ranks) or lags:
                self.report.common = call
                # gloo only reports that a call was scheduled, even if it has just ended: that
                # clears no rank that stands elsewhere.
                started = (rank for rank in ranks if rank in self._started)
                self.report.called.update(dict.fromkeys(started, call))
            self.add_statement("flight_recorder", f"has called {call}, as all of its group", ranks)
        if not lags and not waits:
            self.add_statement(
                "flight_recorder", "waits in no call: all its calls have completed", dumps
            )
        self.add_lags(lags)

    @staticmethod
    def _kept_waiting(
        lags: Iterable[Lag],
        common: Sequence[tuple[str, Sequence[int]]],
        elsewhere_of: Mapping[int, str],
    ) -> list[Lag]:
        """The lags; a late rank that waits in another group is marked as chained."""
        kept_lags = []
        for lag in lags:
            stuck = [call for call, ranks in common if set(lag.ranks) <= set(ranks)]
            elsewhere = {elsewhere_of.get(rank, "") for rank in lag.ranks}
            if stuck and not lag.other:
                kept_lags.append(lag._replace(chained=True))
            elif len(elsewhere) == 1 and not lag.silent:
                kept_lags.append(lag._replace(elsewhere=elsewhere.pop()))
            else:
                kept_lags.append(lag)
        return kept_lags

    def _communicators(self, dumps: Mapping[int, KeptRecording]) -> list[ProcessGroupMembers]:
        """The process groups in which a rank waits, each with the progress of all its ranks.

        Two groups may have one name (split_group): the name and the ranks together are the key.
        """
        communicators: dict[tuple[str, tuple[int, ...]], ProcessGroupMembers] = {}
        by_number = list(self.evidence.calls)
        #: Ranks with equal calls in equal groups are in the same lists.
        rows: dict[tuple[tuple[int, ...], tuple[int, ...]], list[list[int]]] = {}
        lists_of: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        different = {entries for _, entries in by_number}
        pending = {entries: self._pending(entries) for entries in different}
        # Nearly every rank has private groups; a group without a waiting rank is irrelevant.
        names = {name for calls in pending.values() for name in calls}
        held = {at for at, group in enumerate(self.evidence.groups.all) if group.name in names}
        for rank, dump in dumps.items():
            groups, entries = by_number[dump.calls]
            key = (tuple([number for number in groups if number in held]), entries)
            lists = rows.get(key)
            if lists is None:
                calls = pending[entries]
                lists = rows[key] = self._rank_lists(communicators, lists_of, key[0], calls)
            for ranks in lists:
                ranks.append(rank)
        return list(communicators.values())

    def _pending(self, entries: Iterable[int]) -> dict[str, tuple[int, ...]]:
        """Name of a group -> its entries that have not completed."""
        calls: dict[str, tuple[int, ...]] = {}
        for number in entries:
            entry = self.evidence.entries.all[number]
            if entry.state != "completed":
                calls[entry.group] = (*calls.get(entry.group, ()), number)
        return calls

    def _rank_lists(
        self, communicators: dict[tuple[str, tuple[int, ...]], ProcessGroupMembers],
        lists_of: dict[tuple[int, tuple[int, ...]], list[int]],
        groups: Iterable[int], pending: Mapping[str, tuple[int, ...]],
    ) -> list[list[int]]:  # fmt: skip
        """For each group of one recording, the list of the ranks with equal progress in it.

        lists_of: number of a group and of the entries in it -> their list
        pending:  entries of the recording that have not completed
        """
        calls = dict(pending)
        made_lists = []
        for number in groups:
            group = self.evidence.groups.all[number]
            key = (number, calls.pop(group.name, ()))
            ranks = lists_of.get(key)
            if ranks is None:
                ranks = lists_of[key] = self._ranks_with(communicators, group, key[1])
            made_lists.append(ranks)
        for name, numbers in calls.items():
            group = ProcessGroup(name, "", (), None, None, None)
            made_lists.append(self._ranks_with(communicators, group, numbers))
        return made_lists

    def _ranks_with(
        self,
        communicators: dict[tuple[str, tuple[int, ...]], ProcessGroupMembers],
        group: ProcessGroup,
        numbers: Sequence[int],
    ) -> list[int]:
        members = communicators.get((group.name, group.ranks))
        if members is None:
            members = communicators[group.name, group.ranks] = ProcessGroupMembers(group)
        return members.ranks_with(group, numbers, self.evidence.entries.all)

    def _compare(
        self, members: ProcessGroupMembers, difference: CallDifference,
        dumps: Mapping[int, KeptRecording],
        partial: frozenset[int],
    ) -> tuple[list[Lag], list[tuple[str, list[int]]]]:  # fmt: skip
        """Note the ranks that are late in a group or differ, and the call that all have made."""
        first, waiting = difference.first, difference.waiting
        entries: dict[int, RecorderEntry] = {}
        kinds: dict[str, list[int]] = defaultdict(list)
        for (_, calls), ranks in members.states.items():
            # An earlier call may have ended without being marked yet.
            known_entries = (self.evidence.entries.all[number] for number in calls)
            entry = next((entry for entry in known_entries if entry.sequence == first), None)
            if entry is not None:
                kinds[entry.operation] += ranks
                entries.update(dict.fromkeys(ranks, entry))
                if entry.state != "scheduled":
                    self._started.update(ranks)
        usual = max(kinds, key=lambda kind: len(kinds[kind]), default="a collective")
        call = f"{usual[:MAX_NAME]} #{first} of {members.name}"
        site = _common_site(entries[rank] for rank in kinds.get(usual, ()))
        if difference.late:
            weight = self._weight(difference.late, waiting, dumps, partial)
            if members.is_vague:
                weight = min(1, weight)
            lag = Lag("flight_recorder", difference.late, waiting, call, site)
            return [lag._replace(behind=difference.behind, weight=weight)], []
        lags = []
        for other, ranks, maximum_weight in self._mismatches(kinds, usual, entries):
            agreeing = tuple(sorted(set(kinds[usual]) - set(ranks)))
            called = (
                f"{other} ({_common_site(entries[rank] for rank in ranks) or 'site not known'})"
            )
            weight = min(maximum_weight, self._weight(ranks, waiting, dumps, partial))
            lag = Lag("flight_recorder", tuple(sorted(ranks)), agreeing, call, site, called)
            lags.append(lag._replace(weight=weight))
        if lags:
            return lags, []
        # Ranks of the group in the job without a recording.
        known_ranks = [rank for (call, _), ranks in members.states.items() for rank in ranks
                if call.top is not None]  # fmt: skip
        expected = members.group.ranks or (self.all_ranks if members.is_default_group else ())
        silent = tuple(sorted(self.all_ranks.intersection(expected).difference(known_ranks)))
        if silent and len(silent) < len(waiting):
            lag = Lag("flight_recorder", silent, waiting, call, site, weight=1, silent=True)
            return [lag], []
        return [], [(call, sorted(known_ranks))] if expected and not silent else []

    def _mismatches(
        self, kinds: Mapping[str, list[int]], usual: str, entries: Mapping[int, RecorderEntry]
    ) -> list[tuple[str, list[int], int]]:
        """(Operation, ranks, maximum weight) of ranks whose call differs from the usual one."""
        mismatches = [
            (name[:MAX_NAME], ranks, 2) for name, ranks in kinds.items() if name != usual
        ]
        if (
            mismatches
            or usual.partition(":")[2] in _UNEVEN_OPERATIONS
            or usual in _UNEVEN_OPERATIONS
        ):
            return mismatches
        for value, weight in (("sizes", 2), ("types", 1)):
            ranks_of_value: dict[str, list[int]] = defaultdict(list)
            for rank in kinds.get(usual, ()):
                ranks_of_value[getattr(entries[rank], value)].append(rank)
            majority = max(ranks_of_value, key=lambda item: len(ranks_of_value[item]), default="")
            mismatches += [
                (f"{usual[:MAX_NAME]} with {value} {other[:MAX_NAME] or 'not known'}, "
                 f"not {majority[:MAX_NAME]}", ranks, weight if usual in _EVEN_OPERATIONS else 1)
                for other, ranks in ranks_of_value.items()
                if other != majority and other and majority
            ]  # fmt: skip
            if mismatches:
                break
        return mismatches

    def _unmatched(self, dumps: Mapping[int, KeptRecording]) -> Iterator[Lag]:
        """Note sends and receives without the peer's matching call. A peer is named by its number
        in the group; ``?`` is any.
        """
        groups, entries = self.evidence.groups.all, self.evidence.entries.all
        by_number = list(self.evidence.calls)
        pairs = {
            at for at, entry in enumerate(entries)
            if entry.is_p2p and entry.state != "completed" and _P2P.fullmatch(entry.operation)
        }  # fmt: skip
        posted: dict[tuple[str, str, int, int], dict[int, RecorderEntry]] = defaultdict(dict)
        for rank, dump in dumps.items() if pairs else ():
            numbers, posts = by_number[dump.calls]
            if pairs.isdisjoint(posts):
                continue
            names = {groups[number].name: groups[number] for number in numbers}
            for number in pairs.intersection(posts):
                entry = entries[number]
                pair = _P2P.fullmatch(entry.operation)
                if pair is None:
                    continue
                group = names.get(entry.group)
                ranks = sorted(group.ranks) if group and group.ranks else sorted(self.all_ranks)
                one_end, other_end = int(pair[2]), int(pair[4])
                if max(one_end, other_end) >= len(ranks):
                    continue
                ends = (ranks[one_end], ranks[other_end])
                sender, receiver = ends if pair[1] == "send" else ends[::-1]
                posted[entry.group, group.desc if group else "", sender, receiver][rank] = entry
        for (name, desc, sender, receiver), called in posted.items():
            for rank, entry in called.items():
                peer = receiver if rank == sender else sender
                if peer in called or rank not in (sender, receiver) or peer not in self.all_ranks:
                    continue
                verb = "recv from" if rank == sender else "send to"
                weight = self._weight([peer], [rank], dumps, frozenset()) if peer in dumps else 1
                yield Lag(
                    "flight_recorder", (peer,), (rank,),
                    f"{verb} rank {rank} of {(desc or name)[:MAX_NAME]}", entry.site[:MAX_LINE],
                    weight=weight, silent=peer not in dumps,
                )  # fmt: skip

    def _weight(
        self, late: Iterable[int], waiting: Iterable[int], dumps: Mapping[int, KeptRecording],
        partial: frozenset[int],
    ) -> int:  # fmt: skip
        """The weight of a dump: an early one does not show later calls."""
        if self.moving:
            return 0
        late = [rank for rank in late if rank in dumps]
        if partial & set(late):
            return 1
        oldest = max((dumps[rank].age_s for rank in late), default=0)
        newest = min((dumps[rank].age_s for rank in waiting if rank in dumps), default=0)
        return 1 if oldest > newest + _SAME_DUMP_S else 2

    # --- The logs.

    def logs(self) -> dict[int, KeptLog]:
        """Read the watchdog's lines in the ranks' logs.

        Returns the logs to which only one rank writes, and those of many with own lines.
        """
        heads = self.evidence.log_heads.all
        lists = list(self.evidence.report_lists)
        logs = self.evidence.logs
        known_logs = [(place, log) for place in self.places if (log := logs.get(place[:2]))]
        #: A file of a node -> number of processes whose log it is.
        files = Counter([(place.node, log.path) for place, log in known_logs if log.path])
        absent = [head.absent for head in heads]
        own_logs: dict[int, KeptLog] = {}
        done = {0}
        for place, log in known_logs:
            node, rank = place.node, place.rank
            if absent[log.head]:
                self.absent["logs"].setdefault(absent[log.head], []).append(place)
            elif rank is not None and rank in self.all_ranks:
                if files.get((node, log.path)) == 1 or log.is_own:
                    own_logs[rank] = log
                if log.reports not in done:
                    self._reports(lists[log.reports], rank)
                    # Ranks that write into one file share its reports.
                    if None not in dict(lists[log.reports]):
                        done.add(log.reports)
        self._watchdog()
        self._named()
        return own_logs

    def _reports(self, reports: Iterable[tuple[int | None, int]], own_rank: int) -> None:
        for rank, number in reports:
            of = own_rank if rank is None else rank
            if of in self.all_ranks:
                targets = self._targets_of.get(number)
                if targets is None:
                    report = self.evidence.reports.all[number]
                    targets = self._targets_of[number] = self._targets(report)
                # A later line of the same rank replaces an earlier one.
                for ranks, item in targets:
                    ranks[of] = item

    def _targets(self, report: WatchdogReport) -> list[tuple[dict[int, Any], Any]]:
        """Where the ranks of a report are kept, and the value; equal reports are parsed once."""
        targets: list[tuple[dict[int, Any], Any]] = []
        name = report.group[:MAX_NAME] or "a process group"
        if report.kind in _REPORT_TEXTS:
            operation = report.operation[:MAX_NAME] or "a collective"
            targets.append((self.named[report.kind, f"{operation} of {name}"], None))
        if report.kind == "timeout" and report.sequence is not None:
            targets.append((self.caught[name], (report.sequence, report.operation[:MAX_NAME])))
        top, done = report.enqueued, report.completed
        if top is not None:
            at = done + 1 if done is not None and done < top else None
            targets.append((self.status[name], CallProgress(top, at)))
        return targets

    def _watchdog(self) -> None:
        lags = []
        for name in {**self.status, **self.caught}:
            timeouts, status = self.caught.get(name, {}), self.status.get(name, {})
            words = {word for _, word in timeouts.values() if word}
            calls = {rank: CallProgress(at, at) for rank, (at, _) in timeouts.items()} | dict(
                status
            )
            states: dict[CallProgress, list[int]] = defaultdict(list)
            for rank, call in calls.items():
                states[call].append(rank)
            difference = call_difference(states.items())
            # There may be many groups with other names, each with separate numbers.
            if difference is not None and name.startswith(_DEFAULT_GROUP_NAMES):
                first, late, waiting, behind = difference
                call_text = f"{min(words, default='collective')} #{first} of {name}"
                weight = 0 if self.moving else 2
                lag = Lag("logs", late, waiting, call_text, behind=behind, weight=weight)
                if not late and timeouts:
                    # A rank that waits in no collective writes nothing: a sign, not a proof.
                    silent = tuple(sorted(self.all_ranks - calls.keys()))
                    lag = lag._replace(ranks=silent if len(silent) < len(waiting) else (),
                                       weight=min(1, weight), behind=1, silent=True)  # fmt: skip
                lags += [lag] if lag.ranks else []
            ranks_of_call: dict[CallProgress, list[int]] = defaultdict(list)
            for rank, call in status.items():
                ranks_of_call[call].append(rank)
            for call, ranks in ranks_of_call.items():
                done = call.at - 1 if call.at is not None else call.top
                text = f"watchdog: last completed {done}, enqueued {call.top} of {name}"
                self.add_statement("logs", text, ranks)
            for rank, (at, word) in timeouts.items():
                text = f"watchdog: {word or 'collective'} #{at} of {name} has timed out"
                self.add_statement("logs", text, [rank])
        self.add_lags(lags)

    def _named(self) -> None:
        """Note the ranks that an error names: of a monitored barrier, of a checked collective."""
        lags = []
        for (kind, call), ranks in self.named.items():
            late = tuple(sorted(ranks))
            come = self.named.get(("reached", call))
            missing = tuple(
                sorted((self.all_ranks if come is None else come.keys()) - ranks.keys())
            )
            weight = 0 if self.moving else 2
            if kind == "missing":
                lags.append(Lag("logs", late, missing, call, weight=weight))
            elif kind == "mismatch":
                if len(ranks) * 2 < len(self.all_ranks) or len(self.all_ranks) == 2:
                    lags.append(Lag("logs", late, missing, call, other="another collective",
                                    weight=min(1, weight)))  # fmt: skip
            elif kind != "reached":
                self.add_statement(
                    "logs", _REPORT_TEXTS[kind], late, weight=1 if kind == "stuck" else 0
                )
        self.add_lags(lags)

    # --- NCCL's RAS port.

    def ras(self) -> None:
        """Read the answers of NCCL's RAS ports."""
        by_name: dict[tuple[str, int], list[int]] = defaultdict(list)
        for (node, pid), rank in self.rank_of.items() if self.evidence.ras else ():
            if rank is not None:
                by_name[host_of(node), pid].append(rank)
        lags: list[Lag] = []
        for node, answer in self.evidence.ras.items():
            if node not in self.ranks_of_node:
                continue
            if answer.absent:
                self.absent["nccl_ras"].setdefault(answer.absent, []).append(node)
                continue
            for communicator in answer.communicators:
                counts = self._launches(communicator, by_name)
                lags += self._count_lags(
                    counts, dict(communicator.usual), communicator.hash[:MAX_NAME]
                )
            if answer.timeouts:
                peers = counted(answer.timeouts, "peer")
                self.add_statement("nccl_ras", f"{peers} gave the port no answer")
        self.add_lags(lags)

    def _launches(
        self, communicator: Communicator, by_name: Mapping[tuple[str, int], list[int]]
    ) -> dict[int, dict[str, int]]:
        """Rank -> its launches in a communicator. Adds a statement on each faulty member.

        by_name: host and pid -> the ranks of that process
        """
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
                strong = word == "dead" and not ranks
                text, weight = f"{place} is {word[:MAX_LINE]} for NCCL", 2 if strong else 1
                self.add_statement("nccl_ras", text, ranks, host[:1], weight=weight)
        return counts

    def _count_lags(
        self, counts: Mapping[int, Mapping[str, int]], usual: Mapping[str, int], name: str
    ) -> Iterator[Lag]:
        """Note ranks with fewer launches than most. Counts of progressing ranks differ anyway.

        usual: the count of most members, which are not all listed
        """
        if self.moving or not counts:
            return
        names = sorted(
            {operation for rank_counts in (*counts.values(), usual) for operation in rank_counts}
        )
        for operation in names:
            numbers = {rank: rank_counts.get(operation, 0) for rank, rank_counts in counts.items()}
            usual_count = [usual[operation]] if operation in usual else []
            all_counts = [*numbers.values(), *usual_count]
            least, highest = min(all_counts), max(all_counts)
            late = sorted(rank for rank, number in numbers.items() if number == least)
            ahead = sorted(rank for rank, number in numbers.items() if number > least)
            if least == highest or not late:
                continue
            further = [
                other
                for other in names
                if other != operation
                and min(counts[rank].get(other, 0) for rank in late)
                > max([usual.get(other, 0), *(counts[rank].get(other, 0) for rank in ahead)])
            ]
            instead = further[0][:MAX_NAME] if further else ""
            few = (
                len(late) < len(ahead)
                or len(numbers) == 2
                or bool(usual_count and usual_count[0] > least)
            )
            yield Lag(
                "nccl_ras", tuple(late), tuple(ahead) or tuple(sorted(self.all_ranks - {*late})),
                f"{operation[:MAX_NAME]} #{highest} of communicator {name}", other=instead,
                behind=highest - least, weight=2 if few else 1,
            )  # fmt: skip
            if further:
                return


class ProcessGroupMembers:
    """The ranks of a process group with their progress in it."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.name = (group.desc or group.name or "a group")[:MAX_NAME]
        if group.desc in ("", "undefined"):
            self.name = f"group {group.name[:MAX_NAME]}"
        #: Progress, and the numbers of the entries not completed, the oldest first -> the ranks
        #: with that progress.
        self.states: dict[tuple[CallProgress, tuple[int, ...]], list[int]] = {}

    @property
    def is_default_group(self) -> bool:
        """Whether all known ranks of the job are in it."""
        return self.group.desc == "default_pg" or self.group.name == "0"

    @property
    def is_vague(self) -> bool:
        """Whether it may mix two groups of one name: ranks of so large a group are not listed."""
        size = sum(map(len, self.states.values()))
        return not self.group.ranks and not self.is_default_group and size > MAX_GROUP_RANKS

    def waits(self, entries: Sequence[RecorderEntry]) -> str:
        """The call of the first waiting rank, as in ``all_reduce #1 of tp (train.py:31 main)``."""
        number = min((calls[0] for _, calls in self.states if calls), default=None)
        if number is None:
            return ""
        entry = entries[number]
        site = f" ({entry.site[:MAX_LINE]})" if entry.site else ""
        return f"{entry.operation[:MAX_NAME]} #{entry.sequence} of {self.name}{site}"

    def ranks_with(
        self, group: ProcessGroup, numbers: Sequence[int], entries: Sequence[RecorderEntry]
    ) -> list[int]:
        """The list of the ranks with the progress of this group and these entries.

        Entries show more than the status, which counts sends and receives with the collectives.
        """
        calls = [number for number in numbers if not entries[number].is_p2p]
        calls.sort(key=lambda number: entries[number].sequence)
        if calls:
            top, first = entries[calls[-1]].sequence, entries[calls[0]].sequence
            return self.states.setdefault((CallProgress(top, first), tuple(calls)), [])
        # -1: nothing was enqueued yet.
        enqueued = None if group.enqueued is None or numbers else max(0, group.enqueued)
        return self.states.setdefault((CallProgress(enqueued, None), ()), [])


#: Operations in which sizes legitimately differ between ranks.
_UNEVEN_OPERATIONS = {
    "all_to_all", "all_to_all_single", "all_to_all_v_single", "scatter", "gather", "coalesced",
    "all_gather_v", "reduce_scatter_v", "barrier", "all_reduce_barrier", "alltoall",
    "alltoall_base",
}  # fmt: skip
#: Operations that hang, or spoil their result, when sizes differ.
_EVEN_OPERATIONS = {
    "all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base",
    "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor",
    "reduce_scatter_tensor",
}  # fmt: skip
#: Seconds between two dumps from which they count as different moments.
_SAME_DUMP_S = 60
#: Maximum ranks of a listed process group (`nodeready.agent.witnesses.flight_recorder`).
MAX_GROUP_RANKS = 512
#: Names of the process group of all ranks in the watchdog's lines.
_DEFAULT_GROUP_NAMES = ("default_pg", "a process group")
_P2P = re.compile(r"(?:\w+:)?(send|recv) (\d{1,7})(->|<-)(\d{1,7})")
#: Kinds of reports that name a rank -> what the report means for it.
_REPORT_TEXTS = {
    "missing": "has not come", "reached": "has come", "mismatch": "has called another collective",
    "lost": "has lost its connection to another rank", "stuck": "its watchdog itself is stuck",
}  # fmt: skip


def host_of(name: str) -> str:
    return name if name.replace(".", "").isdigit() else name.partition(".")[0]


def _common_site(entries: Iterable[RecorderEntry]) -> str:
    """The call site of most ranks."""
    sites = Counter(entry.site for entry in entries if entry.site)
    return max(sites, key=lambda site: sites[site])[:MAX_LINE] if sites else ""

"""Who has called what, and who has not: by the flight recorder, the watchdog's lines, NCCL's RAS.

Sources of the rules: PyTorch's torch/distributed/flight_recorder/components/{builder,types}.py
(which calls match; a group's name is unique only together with its ranks; the peers of a send are
numbers within the group), FlightRecorder.hpp (a group's status), ProcessGroupNCCL.cpp (the
watchdog's lines); NVIDIA's documentation of NCCL's RAS (counts are launches).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nodeready.node.witnesses.devices import Message
from nodeready.node.witnesses.flight_recorder import Entry, ProcessGroup
from nodeready.node.witnesses.logs import Report
from nodeready.subjects.gpus import xids
from nodeready.text import counted
from nodeready.triage.stacks.evidence import (
    LINE,
    NAME,
    Bench,
    Call,
    Difference,
    Evidence,
    KeptLog,
    KeptRecording,
    Lag,
    Place,
    Testimony,
    difference,
    ranks_of,
)


class Calls(Bench):
    """Hears those witnesses that know who has called what."""

    def __init__(self, evidence: Evidence, places: Sequence[Place], moving: bool) -> None:
        super().__init__(evidence, places, moving)
        #: By the kind of report and by the call: the ranks that are named.
        self.named: dict[tuple[str, str], dict[int, None]] = defaultdict(dict)
        #: By process group: how far each rank is, and what has timed out there.
        self.status: dict[str, dict[int, Call]] = defaultdict(dict)
        self.caught: dict[str, dict[int, tuple[int, str]]] = defaultdict(dict)
        #: Ranks of which a recorder says that the call has begun.
        self._started: set[int] = set()
        #: By the number of a report: where its rank is kept, and with what.
        self._kept: dict[int, list[tuple[dict[int, Any], Any]]] = {}

    # --- The flight recorder.

    def recorder(self) -> None:
        heads = self.seen.recording_heads.all
        absent = [one.absent for one in heads]
        dumps: dict[int, KeptRecording] = {}
        for place in self.places:
            found = self.seen.recordings.get(place[:2])
            if found is None:
                continue
            rank = place.rank
            if absent[found.head]:
                self.absent["flight_recorder"].setdefault(absent[found.head], []).append(place)
            elif rank in self.all and rank is not None:
                dumps[rank] = found
        if not dumps:
            return
        self.found.unheard = tuple(sorted(self.all - dumps.keys()))
        partial = sorted(rank for rank, one in dumps.items() if heads[one.head].partial)
        if partial:
            self.say("flight_recorder", "its dump is cut off: calls may be missing", partial)
        lags, common, waits = [], [], False
        alone: dict[int, str] = {}
        for members in self._communicators(dumps):
            apart = difference((call, ranks) for (call, _), ranks in members.states.items())
            if apart is None:
                continue
            waits = True
            made, whole = self._compare(members, apart, dumps, frozenset(partial))
            lags += made
            common += whole
            # Nobody else of the group is known: for whom these wait, the recorder cannot tell.
            if not made and not members.group.ranks and not members.whole:
                alone.update(dict.fromkeys(apart.waiting, members.waits(self.seen.entries.all)))
        lags = self._kept_waiting(lags, common, alone)
        lags += self._unmatched(dumps)
        late = {rank for lag in lags for rank in lag.ranks}
        for lag in lags:
            if lag.weight > 1:
                self.found.called.update(dict.fromkeys(set(lag.waiting) - late, lag.what))
        if common and all(lag.chained for lag in lags):
            # The group with the most ranks says the most.
            what, ranks = max(common, key=lambda one: len(one[1]))
            if len(ranks) == len(self.all) or lags:
                self.found.common = what
                # gloo tells no more than that it was scheduled, also of what has just ended: that
                # clears nobody who stands elsewhere.
                started = (rank for rank in ranks if rank in self._started)
                self.found.called.update(dict.fromkeys(started, what))
            self.say("flight_recorder", f"has called {what}, as all of its group", ranks)
        if not lags and not waits:
            self.say("flight_recorder", "waits in nothing: all that was called has completed",
                     dumps)  # fmt: skip
        self.accuse(lags)

    @staticmethod
    def _kept_waiting(
        lags: Iterable[Lag], common: Sequence[tuple[str, Sequence[int]]], alone: Mapping[int, str]
    ) -> list[Lag]:
        """The lags; where a late rank waits in another group itself, it is no root."""
        made = []
        for lag in lags:
            stuck = [what for what, ranks in common if set(lag.ranks) <= set(ranks)]
            elsewhere = {alone.get(rank, "") for rank in lag.ranks}
            if stuck and not lag.other:
                made.append(lag._replace(chained=True))
            elif len(elsewhere) == 1 and not lag.silent:
                made.append(lag._replace(elsewhere=elsewhere.pop()))
            else:
                made.append(lag)
        return made

    def _communicators(self, dumps: Mapping[int, KeptRecording]) -> list[_Members]:
        """The process groups in which somebody waits, each with how far all its ranks are.

        Two groups may have one name (split_group): the name and the ranks together are the key.
        """
        made: dict[tuple[str, tuple[int, ...]], _Members] = {}
        by_number = list(self.seen.calls)
        #: Ranks that have called the same in the same groups stand in the same lists.
        rows: dict[tuple[tuple[int, ...], tuple[int, ...]], list[list[int]]] = {}
        lists_of: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        different = {entries for _, entries in by_number}
        pending = {entries: self._pending(entries) for entries in different}
        # Nearly every rank has groups that nobody else has; those where nobody waits say nothing.
        names = {name for calls in pending.values() for name in calls}
        held = {at for at, group in enumerate(self.seen.groups.all) if group.name in names}
        for rank, one in dumps.items():
            groups, entries = by_number[one.calls]
            key = (tuple([number for number in groups if number in held]), entries)
            lists = rows.get(key)
            if lists is None:
                lists = rows[key] = self._lists(made, lists_of, key[0], pending[entries])
            for ranks in lists:
                ranks.append(rank)
        return list(made.values())

    def _pending(self, entries: Iterable[int]) -> dict[str, tuple[int, ...]]:
        """By the name of their group: the entries that have not completed."""
        calls: dict[str, tuple[int, ...]] = {}
        for number in entries:
            entry = self.seen.entries.all[number]
            if entry.state != "completed":
                calls[entry.group] = (*calls.get(entry.group, ()), number)
        return calls

    def _lists(
        self, made: dict[tuple[str, tuple[int, ...]], _Members],
        lists_of: dict[tuple[int, tuple[int, ...]], list[int]],
        groups: Iterable[int], pending: Mapping[str, tuple[int, ...]],
    ) -> list[list[int]]:  # fmt: skip
        """For each group of one recording, the list of the ranks that are as far in it.

        lists_of: number of a group and of the entries in it -> their list
        pending:  what of the recording has not completed
        """
        calls = dict(pending)
        made_lists = []
        for number in groups:
            group = self.seen.groups.all[number]
            key = (number, calls.pop(group.name, ()))
            found = lists_of.get(key)
            if found is None:
                found = lists_of[key] = self._like(made, group, key[1])
            made_lists.append(found)
        for name, numbers in calls.items():
            group = ProcessGroup(name, "", (), None, None, None)
            made_lists.append(self._like(made, group, numbers))
        return made_lists

    def _like(
        self, made: dict[tuple[str, tuple[int, ...]], _Members], group: ProcessGroup,
        numbers: Sequence[int],
    ) -> list[int]:  # fmt: skip
        members = made.get((group.name, group.ranks))
        if members is None:
            members = made[group.name, group.ranks] = _Members(group)
        return members.like(group, numbers, self.seen.entries.all)

    def _compare(
        self, members: _Members, found: Difference, dumps: Mapping[int, KeptRecording],
        partial: frozenset[int],
    ) -> tuple[list[Lag], list[tuple[str, list[int]]]]:  # fmt: skip
        """Who is late in a group or has called something else; what all of it have called."""
        first, waiting = found.first, found.waiting
        entries: dict[int, Entry] = {}
        kinds: dict[str, list[int]] = defaultdict(list)
        for (_, calls), ranks in members.states.items():
            # An earlier call may have ended, and not be marked so yet.
            known = (self.seen.entries.all[number] for number in calls)
            entry = next((one for one in known if one.sequence == first), None)
            if entry is not None:
                kinds[entry.operation] += ranks
                entries.update(dict.fromkeys(ranks, entry))
                if entry.state != "scheduled":
                    self._started.update(ranks)
        usual = max(kinds, key=lambda one: len(kinds[one]), default="a collective")
        what = f"{usual[:NAME]} #{first} of {members.name}"
        site = _site(entries[rank] for rank in kinds.get(usual, ()))
        if found.late:
            weight = self._weight(found.late, waiting, dumps, partial)
            if members.vague:
                weight = min(1, weight)
            lag = Lag("flight_recorder", found.late, waiting, what, site)
            return [lag._replace(behind=found.behind, weight=weight)], []
        lags = []
        for other, ranks, most in self._mismatches(kinds, usual, entries):
            others = tuple(sorted(set(kinds[usual]) - set(ranks)))
            called = f"{other} ({_site(entries[rank] for rank in ranks) or 'site not told'})"
            weight = min(most, self._weight(ranks, waiting, dumps, partial))
            lag = Lag("flight_recorder", tuple(sorted(ranks)), others, what, site, called)
            lags.append(lag._replace(weight=weight))
        if lags:
            return lags, []
        # Ranks of the group that are in the job and of which nothing is known.
        told = [rank for (call, _), ranks in members.states.items() for rank in ranks
                if call.top is not None]  # fmt: skip
        expected = members.group.ranks or (self.all if members.whole else ())
        silent = tuple(sorted(self.all.intersection(expected).difference(told)))
        if silent and len(silent) < len(waiting):
            lag = Lag("flight_recorder", silent, waiting, what, site, weight=1, silent=True)
            return [lag], []
        return [], [(what, sorted(told))] if expected and not silent else []

    def _mismatches(
        self, kinds: Mapping[str, list[int]], usual: str, entries: Mapping[int, Entry]
    ) -> Iterator[tuple[str, list[int], int]] | list[tuple[str, list[int], int]]:
        """Ranks that are in another operation at the same number, or with other sizes or types."""
        found = [(name[:NAME], ranks, 2) for name, ranks in kinds.items() if name != usual]
        if found or usual.partition(":")[2] in _UNEVEN or usual in _UNEVEN:
            return found
        for value, weight in (("sizes", 2), ("types", 1)):
            said: dict[str, list[int]] = defaultdict(list)
            for rank in kinds.get(usual, ()):
                said[getattr(entries[rank], value)].append(rank)
            most = max(said, key=lambda one: len(said[one]), default="")
            found += [
                (f"{usual[:NAME]} with {value} {other[:NAME] or 'not told'}, "
                 f"not {most[:NAME]}", ranks, weight if usual in _EVEN else 1)
                for other, ranks in said.items()
                if other != most and other and most
            ]  # fmt: skip
            if found:
                break
        return found

    def _unmatched(self, dumps: Mapping[int, KeptRecording]) -> Iterator[Lag]:
        """Sends and receives whose partner has not called its part. A peer is named by its number
        in the group; ``?`` is any."""
        groups, entries = self.seen.groups.all, self.seen.entries.all
        by_number = list(self.seen.calls)
        pairs = {
            at for at, entry in enumerate(entries)
            if entry.is_p2p and entry.state != "completed" and _PAIR.fullmatch(entry.operation)
        }  # fmt: skip
        posted: dict[tuple[str, str, int, int], dict[int, Entry]] = defaultdict(dict)
        for rank, one in dumps.items() if pairs else ():
            numbers, posts = by_number[one.calls]
            if pairs.isdisjoint(posts):
                continue
            names = {groups[number].name: groups[number] for number in numbers}
            for number in pairs.intersection(posts):
                entry = entries[number]
                pair = _PAIR.fullmatch(entry.operation)
                if pair is None:
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
                    f"{verb} rank {rank} of {(desc or name)[:NAME]}", entry.site[:LINE],
                    weight=weight, silent=peer not in dumps,
                )  # fmt: skip

    def _weight(
        self, late: Iterable[int], waiting: Iterable[int], dumps: Mapping[int, KeptRecording],
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
        lists = list(self.seen.report_lists)
        kept = self.seen.logs
        heard = [(place, log) for place in self.places if (log := kept.get(place[:2]))]
        #: A file of a node -> of how many processes it is the log.
        files = Counter([(place.node, log.path) for place, log in heard if log.path])
        absent = [one.absent for one in heads]
        own: dict[int, KeptLog] = {}
        done = {0}
        for place, log in heard:
            node, _, rank = place
            if absent[log.head]:
                self.absent["logs"].setdefault(absent[log.head], []).append(place)
            elif rank is not None and rank in self.all:
                if files.get((node, log.path)) == 1:
                    own[rank] = log
                if log.reports not in done:
                    self._reports(lists[log.reports], rank)
                    # Ranks that write one file say the same of all.
                    if None not in dict(lists[log.reports]):
                        done.add(log.reports)
        self._watchdog()
        self._named()
        self.own_logs(own)

    def own_logs(self, own: Mapping[int, KeptLog]) -> None:
        """What the logs say that one rank alone writes."""

    def _reports(self, reports: Iterable[tuple[int | None, int]], own: int) -> None:
        for rank, number in reports:
            of = own if rank is None else rank
            if of in self.all:
                kept = self._kept.get(number)
                if kept is None:
                    kept = self._kept[number] = self._keep(self.seen.reports.all[number])
                # A later line of the same rank replaces an earlier one.
                for ranks, said in kept:
                    ranks[of] = said

    def _keep(self, report: Report) -> list[tuple[dict[int, Any], Any]]:
        """Where the ranks of a report are kept, and with what: equal ones are read once."""
        kept: list[tuple[dict[int, Any], Any]] = []
        name = report.group[:NAME] or "a process group"
        if report.kind in _NAMED:
            what = report.operation[:NAME] or "a collective"
            kept.append((self.named[report.kind, f"{what} of {name}"], None))
        if report.kind == "timeout" and report.sequence is not None:
            kept.append((self.caught[name], (report.sequence, report.operation[:NAME])))
        top, done = report.enqueued, report.completed
        if top is not None:
            at = done + 1 if done is not None and done < top else None
            kept.append((self.status[name], Call(top, at)))
        return kept

    def _watchdog(self) -> None:
        lags = []
        for name in {**self.status, **self.caught}:
            timeouts, status = self.caught.get(name, {}), self.status.get(name, {})
            words = {word for _, word in timeouts.values() if word}
            calls = {rank: Call(at, at) for rank, (at, _) in timeouts.items()} | dict(status)
            states: dict[Call, list[int]] = defaultdict(list)
            for rank, call in calls.items():
                states[call].append(rank)
            found = difference(states.items())
            # Groups of other names may be many, each with numbers of its own.
            if found is not None and name.startswith(_WHOLE):
                first, late, waiting, behind = found
                what = f"{min(words, default='collective')} #{first} of {name}"
                weight = 0 if self.moving else 2
                lag = Lag("logs", late, waiting, what, behind=behind, weight=weight)
                if not late and timeouts:
                    # A rank that waits in nothing writes nothing: a sign, and no proof.
                    silent = tuple(sorted(self.all - calls.keys()))
                    lag = lag._replace(ranks=silent if len(silent) < len(waiting) else (),
                                       weight=min(1, weight), behind=1, silent=True)  # fmt: skip
                lags += [lag] if lag.ranks else []
            told: dict[Call, list[int]] = defaultdict(list)
            for rank, call in status.items():
                told[call].append(rank)
            for call, ranks in told.items():
                done = call.at - 1 if call.at is not None else call.top
                text = f"watchdog: last completed {done}, enqueued {call.top} of {name}"
                self.say("logs", text, ranks)
            for rank, (at, word) in timeouts.items():
                text = f"watchdog: {word or 'collective'} #{at} of {name} has timed out"
                self.say("logs", text, [rank])
        self.accuse(lags)

    def _named(self) -> None:
        """Ranks that an error names: of a monitored barrier, of a collective that is compared."""
        lags = []
        for (kind, what), ranks in self.named.items():
            late = tuple(sorted(ranks))
            come = self.named.get(("reached", what))
            rest = tuple(sorted((self.all if come is None else come.keys()) - ranks.keys()))
            weight = 0 if self.moving else 2
            if kind == "missing":
                lags.append(Lag("logs", late, rest, what, weight=weight))
            elif kind == "mismatch":
                if len(ranks) * 2 < len(self.all) or len(self.all) == 2:
                    lags.append(Lag("logs", late, rest, what, other="another collective",
                                    weight=min(1, weight)))  # fmt: skip
            elif kind != "reached":
                self.say("logs", _NAMED[kind], late, weight=1 if kind == "stuck" else 0)
        self.accuse(lags)

    # --- NCCL's RAS port.

    def ras(self) -> None:
        by_name: dict[tuple[str, int], list[int]] = defaultdict(list)
        for (node, pid), rank in self.rank_of.items() if self.seen.ras else ():
            if rank is not None:
                by_name[host_of(node), pid].append(rank)
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
                    ranks = by_name.get((host_of(member.host), member.pid), [])
                    if member.world_rank in self.all:
                        # NCCL names a node by an address.
                        ranks = [member.world_rank]
                    where = f"process {member.pid} on {member.host[:NAME]}"
                    if len(ranks) == 1:
                        counts[ranks[0]] = dict(member.counts)
                        where = "its process"
                    host = [one for one in self.nodes if host_of(one) == host_of(member.host)]
                    for word in filter(None, (member.missing, member.problem)):
                        strong = word == "dead" and not ranks
                        self.say("nccl_ras", f"{where} is {word[:LINE]} for NCCL", ranks,
                                  host[:1], weight=2 if strong else 1)  # fmt: skip
                lags += self._counts(counts, dict(communicator.usual), communicator.hash[:NAME])
            if answer.timeouts:
                peers = counted(answer.timeouts, "peer")
                self.say("nccl_ras", f"{peers} gave the port no answer")
        self.accuse(lags)

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
            instead = f"{more[0][:NAME]}" if more else ""
            few = len(late) < len(ahead) or len(numbers) == 2 or bool(rest and rest[0] > least)
            yield Lag(
                "nccl_ras", tuple(late), tuple(ahead) or tuple(sorted(self.all - {*late})),
                f"{operation[:NAME]} #{most} of communicator {name}", other=instead,
                behind=most - least, weight=2 if few else 1,
            )  # fmt: skip
            if more:
                return


class _Members:
    """The ranks of a process group with how far they are in it."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.name = (group.desc or group.name or "a group")[:NAME]
        if group.desc in ("", "undefined"):
            self.name = f"group {group.name[:NAME]}"
        #: How far, and the numbers of the entries not completed, the oldest first -> the ranks
        #: that are so far.
        self.states: dict[tuple[Call, tuple[int, ...]], list[int]] = {}

    @property
    def whole(self) -> bool:
        """Whether all ranks of the job are in it, as far as is known."""
        return self.group.desc == "default_pg" or self.group.name == "0"

    @property
    def vague(self) -> bool:
        """Whether two groups of one name may be in it: so large a group's ranks are not told."""
        size = sum(map(len, self.states.values()))
        return not self.group.ranks and not self.whole and size > MOST_RANKS

    def waits(self, entries: Sequence[Entry]) -> str:
        """``all_reduce #1 of tp (train.py:31 main)``: what the first that waits is in."""
        number = min((calls[0] for _, calls in self.states if calls), default=None)
        if number is None:
            return ""
        one = entries[number]
        site = f" ({one.site[:LINE]})" if one.site else ""
        return f"{one.operation[:NAME]} #{one.sequence} of {self.name}{site}"

    def like(
        self, group: ProcessGroup, numbers: Sequence[int], entries: Sequence[Entry]
    ) -> list[int]:
        """The list of the ranks that are as far as one with this group and these entries.

        Entries are more than the status: that counts sends and receives in with the rest.
        """
        calls = [number for number in numbers if not entries[number].is_p2p]
        calls.sort(key=lambda number: entries[number].sequence)
        if calls:
            top, first = entries[calls[-1]].sequence, entries[calls[0]].sequence
            return self.states.setdefault((Call(top, first), tuple(calls)), [])
        # -1: nothing was enqueued yet.
        known = None if group.enqueued is None or numbers else max(0, group.enqueued)
        return self.states.setdefault((Call(known, None), ()), [])


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
#: Ranks of a process group, of more none is told (`nodeready.node.witnesses.flight_recorder`).
MOST_RANKS = 512
#: Names of the process group that all ranks are in, by the watchdog's lines.
_WHOLE = ("default_pg", "a process group")
_PAIR = re.compile(r"(?:\w+:)?(send|recv) (\d{1,7})(->|<-)(\d{1,7})")
#: Kinds of reports that name a rank, and what they say of it.
_NAMED = {
    "missing": "has not come", "reached": "has come", "mismatch": "has called another collective",
    "lost": "has lost its connection to another rank", "stuck": "its watchdog itself is stuck",
}  # fmt: skip


def host_of(name: str) -> str:
    return name if name.replace(".", "").isdigit() else name.partition(".")[0]


def _site(entries: Iterable[Entry]) -> str:
    """The call site of most."""
    sites = Counter(entry.site for entry in entries if entry.site)
    return max(sites, key=lambda one: sites[one])[:LINE] if sites else ""


class _Court(Calls):
    """Hears all witnesses."""

    def own_logs(self, own: Mapping[int, KeptLog]) -> None:
        """Errors at the end of a rank's own log; few logs that ended long before the others."""
        errors = {rank: log.error for rank, log in own.items() if log.error}
        first = {rank: error for rank, error in errors.items() if not _CAUSED.search(error)}
        for rank, error in errors.items():
            # What the end of another rank causes says nothing of this one, where that is known.
            weight = 1 if rank in first or not first else 0
            self.say("logs", f"its log ends in an error: {error}", [rank], weight=weight)
        self.found.raised = first
        if len(own) < 4 or self.moving:
            return
        shapes = {rank: _NUMBERS.sub("0", log.last) for rank, log in own.items() if log.last}
        usual, count = Counter(shapes.values()).most_common(1)[0] if shapes else ("", 0)
        if 4 * count >= 3 * len(own):
            for rank, shape in shapes.items():
                if shape != usual:
                    self.found.last[rank] = own[rank].last
                    text = f"its last line is unlike the others': {own[rank].last}"
                    self.say("logs", text, [rank])
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
            self.say("logs", text, order[: at + 1], weight=1)

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
                # A GPU on which only others compute is another job's.
                if head.throttle and (ranks or not one.pids):
                    why = ", ".join(head.throttle)[:LINE]
                    text = f"the hardware slows a GPU down: {why}"
                    self.say("gpu", text, ranks, [node], weight=1)
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
            self.say("gpu", text, spins, weight=1, against=True)
        few = max(1, len(spins) // 3)
        if idle and len(idle) <= few and spins:
            text = f"its GPU is idle while those of {ranks_of(spins)} spin in a collective"
            self.say("gpu", text, idle, weight=1)
        elif idle:
            self.say("gpu", "its GPU is idle", idle)
        if works and len(works) <= few and spins:
            text = f"its GPU computes while those of {ranks_of(spins)} spin in a collective"
            self.say("gpu", text, works, weight=1)
        elif works:
            self.say("gpu", COMPUTES, works)

    def _xid(self, name: str, code: int, node: str, ranks: Sequence[int], when: str = "") -> None:
        known = xids.XIDS.get(code)
        meaning = known.meaning if known else "unknown"
        action = known.action if known else xids.MONITOR
        grave = action in (xids.ISOLATE, xids.REBOOT, xids.RESET)
        weight = 2 if grave else 1 if action == xids.APPLICATION else 0
        text = f"Xid {code} {meaning}{when} ({action})"
        self.say(name, text, ranks, [node], weight=weight)

    def network(self) -> None:
        ports = self.seen.ports.all
        total, known = 0.0, False
        quiet: dict[str, list[str]] = defaultdict(list)
        states: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        rates: dict[str, dict[float, list[str]]] = defaultdict(lambda: defaultdict(list))
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
                states[port.name[:NAME]][port.state[:NAME]].append(node)
                if port.gbps and port.state == "up":
                    rates[port.name[:NAME]][port.gbps].append(node)
                if port.errors:
                    rose = ", ".join(f"{name[:NAME]} +{by}" for name, by in port.errors[:4])
                    fatal = any("link_downed" in name for name, _ in port.errors)
                    text = f"errors of {port.name[:NAME]} rise: {rose}"
                    self.say("network", text, nodes=[node], weight=2 if fatal else 1)
                if port.state != "up" or (rdma and port.kind not in _RDMA):
                    continue
                carry += moved
                silent += [port.name[:NAME]] if not moved else []
            if found.seconds > 0 and found.ports:
                known = True
                total += carry / found.seconds
                if silent:
                    names = ", ".join(silent[:8])
                    quiet[f"no bytes on {names} in {found.seconds:.0f} s"].append(node)
                elif carry / found.seconds >= MOVING_BYTES_PER_S:
                    self.say("network", f"bytes move on its {'RDMA ' if rdma else ''}ports",
                              nodes=[node])  # fmt: skip
        for text, nodes in quiet.items():
            self.say("network", text, nodes=nodes)
        for name, by_state in states.items():
            up = len(by_state.pop("up", []))
            for state, nodes in by_state.items():
                # A port that is down nearly everywhere is one that nobody has connected.
                if up > len(nodes):
                    text = f"port {name} is {state}, and up on {counted(up, 'other node')}"
                    self.say("network", text, nodes=nodes, weight=1)
        for name, by_rate in rates.items():
            usual = max(by_rate, key=lambda rate: (len(by_rate[rate]), rate))
            for rate, nodes in by_rate.items():
                if rate < usual and len(nodes) < len(by_rate[usual]):
                    most = counted(len(by_rate[usual]), "other node")
                    text = f"port {name} runs at {rate:g} Gb/s, and at {usual:g} on {most}"
                    self.say("network", text, nodes=nodes, weight=1)
        # Ranks of one node speak through its memory, and its ports are somebody else's.
        if known and len(self.nodes) > 1:
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
        words = _MESSAGES.get(message.kind, message.kind[:NAME])
        named = f" (pid {message.pid})" if message.pid else ""
        weight = 2 if message.kind == "oom" or ranks else 1
        if message.kind == "memory" and not ranks:
            weight = 0
        text = f"{words}{named}{when}: {message.text[:LINE]}"
        self.say("kernel", text, ranks, [node], weight=weight)


#: Seconds that a log must have ended before the others' to be told.
_SILENT_S = 60
#: Bytes per second of all ports above which something moves: heartbeats and ssh are below.
MOVING_BYTES_PER_S = 1e6
_RDMA = ("infiniband", "roce")
#: What is said of a GPU that works.
COMPUTES = "its GPU computes"
#: Errors that the end of another rank causes: gloo's and NCCL's of a connection, the launcher's.
_CAUSED = re.compile(
    r"(?i)connection (?:closed|reset|refused|was)|broken pipe|reset by peer"
    r"|remote (?:process|peer)|abort|SIGTERM|Signal(?:s\.SIGTERM)? 15|ChildFailedError"
    r"|timed? ?out|failed on Socket"
    r"|NCCL error|ncclRemoteError|EOFError|end of file"
)
_NUMBERS = re.compile(r"\d+(?:\.\d+)?")
_XID = re.compile(r"\bXid\b\s*(?:\([^)]*\))?:\s*(\d{1,4})\b")
_MESSAGES = {
    "oom": "killed for memory", "xid": "Xid", "link": "link",
    "filesystem": "file system", "hung": "hung in the kernel", "memory": "memory error",
    "segfault": "crashed",
}  # fmt: skip


def ago(seconds: int) -> str:
    """``40 s``, ``12 min``, ``3 h``."""
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def hear(evidence: Evidence, places: Iterable[Any], moving: bool) -> Testimony:
    """All that the witnesses say of the job with these processes (node, pid, rank)."""
    if not evidence:
        return Testimony()
    court = _Court(evidence, [Place(*one[:3]) for one in places], moving)
    for listen in (court.recorder, court.logs, court.ras, court.gpus, court.network, court.kernel):
        listen()
    answers = {
        "logs": evidence.logs, "flight_recorder": evidence.recordings, "nccl_ras": evidence.ras,
        "gpu": evidence.gpus, "network": evidence.networks, "kernel": evidence.kernels,
    }  # fmt: skip
    court.found.witnesses = court.witnesses(name for name, said in answers.items() if said)
    return court.found

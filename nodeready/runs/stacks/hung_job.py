"""The groups of a hung job with all evidence on them, and what a rule finds, in words. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from nodeready.agent.witnesses.software import NO_NCCL
from nodeready.core.text import counted
from nodeready.fleet.inventory.nodeset import natural
from nodeready.runs.stacks import causes
from nodeready.runs.stacks.document import Group, Statement, Suspect, Verdict, say
from nodeready.runs.stacks.evidence import Lag, WitnessReport, ranks_of

#: Maximum statements for and against a suspect; and suspects.
_MAX_STATEMENTS, _MAX_SUSPECTS = 8, 8
#: Activities that keep no rank waiting; that end only when a user acts.
_NEUTRAL_ACTIVITIES, _USER_ACTIVITIES = ("idle", "agent", "worker"), ("debugger", "input", "core")
#: A reason that names its remedy, or has none; the options that would help.
_SETTLED = re.compile(r"--| has none")
_OPTION_HINTS = {"flight_recorder": "; --dump asks for a live one", "nccl_ras": "; --ras asks it"}


class OddRanks(NamedTuple):
    """Differences between the environments of the ranks."""

    ranks: tuple[int, ...]  # few ranks with other values than most, and the values
    reason: str
    unasked: tuple[int, ...]  # ranks that the options in `part` left out
    part: str


class GroupLinks(NamedTuple):
    """What else is known of the waits of a group's ranks."""

    calls: frozenset[str] = frozenset()  # the collectives in which further threads wait
    # the ranks for which all of them wait; a process without a rank has a negative number
    waits_for: tuple[int, ...] = ()
    clients: Mapping[int, str] = {}  # the ranks for which further threads wait -> a thread's name


class HungJob:
    """The groups of a job by their indexes, their roles by the rules, and all evidence on them."""

    def __init__(
        self, groups: Sequence[Group], report: WitnessReport, places: Iterable[tuple[Any, ...]],
        odd: OddRanks, links: Sequence[GroupLinks],
    ) -> None:  # fmt: skip
        self.groups, self.report, self.odd = list(groups), report, odd
        self.links = links
        self.roles = [group.role for group in groups]
        self.at = {rank: at for at, group in enumerate(groups) for rank in group.ranks}
        self.node_of = {rank: node for node, _, rank, *_ in places}
        self.nodes = {node for group in groups for node in group.nodes}
        self.statements = [
            (witness.name, statement)
            for witness in report.witnesses
            for statement in witness.statements
            # A variable of all nodes is no sign for or against one of them.
            if witness.name != "environment" or not self.nodes <= {*statement.nodes}
        ]
        self.has_nccl = report.of("nccl_ras").absent[:1] != (NO_NCCL,)
        self.victims = self.of_role("victim")
        self.total, waiting = self.size(range(len(groups))), self.size(self.victims)
        self.waits = f"{waiting} {say('{rank waits|ranks wait}', waiting)} for it"
        #: The first of the groups that wait; bytes a second between the nodes.
        self.first = groups[self.victims[0]] if self.victims else groups[0]
        self.rate = report.bytes_per_s or 0.0
        #: Nodes without an answer, for any reason; all groups that are gone, and why.
        self.silent = [
            at for at, g in enumerate(groups) if g.kind == "no-data" and not g.processes
        ]
        self.gone = [at for at, group in enumerate(groups)
                     if group.kind in ("missing", "dead") or at in self.silent]  # fmt: skip
        #: What moving groups, or what they have started, did between the samples.
        self.work = {at: group.work for at, group in enumerate(groups)
                     if group.verdict == "progressing" and group.work}  # fmt: skip
        self.ends = {at: end for at in self.gone if (end := self._end_of(at))}
        self.suspects = [at for at in self.of_role("suspect") if at not in self.gone]
        #: Groups that, by the recorder, have called the awaited collective.
        self.cleared = [
            at for at, group in enumerate(groups)
            if group.kind == "stack" and group.ranks and report.called.keys() >= {*group.ranks}
        ]  # fmt: skip
        #: What speaks against the suspects.
        self.notes: list[str] = []
        self.lags = self._strongest()

    def of_role(self, role: str | None) -> list[int]:
        return [at for at, own_role in enumerate(self.roles) if own_role == role]

    def size(self, indexes: Iterable[int]) -> int:
        return sum(self.groups[at].processes for at in indexes)

    def ranks_of(self, indexes: Iterable[int]) -> set[int]:
        return {rank for at in indexes for rank in self.groups[at].ranks}

    def nodes_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The nodes of ranks, in natural order."""
        nodes = {self.node_of[rank] for rank in ranks if rank in self.node_of}
        return tuple(sorted(nodes, key=natural))

    def name(self, indexes: Sequence[int], *, nodes: bool = True) -> str:
        """The first group in words, and how many there are beside it."""
        group = self.groups[indexes[0]]
        further = f" (and {counted(len(indexes) - 1, 'other group')})" if indexes[1:] else ""
        return ranks_of(group.ranks, group.nodes if nodes else ()) + further

    def set_role(self, at: int, role: str | None, reason: str) -> None:
        self.groups[at] = replace(self.groups[at], role=role, reason=reason)

    def _end_of(self, at: int) -> Statement | None:
        """The gravest statement about the nodes or ranks of a group."""
        ranks, nodes = {*self.groups[at].ranks}, set(self.groups[at].nodes) or self.nodes
        errors = [
            statement for name, statement in self.statements
            if name in ("kernel", "nccl_ras", "gpu")
            and statement.weight > 1 and not statement.against
            and (ranks.intersection(statement.ranks) or nodes.intersection(statement.nodes))
        ]  # fmt: skip
        return max(errors, key=lambda statement: statement.weight, default=None)

    def _strongest(self) -> list[Lag]:
        """The lags of the best witness; a witness that names other ranks is noted."""
        best: list[Lag] = []
        lags = [lag for lag in self.report.lags if not lag.chained]
        for name in ("flight_recorder", "nccl_ras", "logs"):
            strong = [lag for lag in lags if lag.witness == name and lag.weight > 1]
            ranks = {rank for lag in strong for rank in lag.ranks}
            if best and strong and ranks.isdisjoint(r for lag in best for r in lag.ranks):
                self.notes.append(f"{name}: names {ranks_of(strong[0].ranks)} instead")
            best = best or strong
        # Two weak witnesses that agree about a rank are as good as a strong one.
        weak = [lag for lag in lags if lag.weight == 1 and not best]
        for lag in weak:
            ranks = {*lag.ranks}
            witnesses = {other.witness for other in weak if ranks.intersection(other.ranks)}
            signs = {
                name for name, statement in self.statements
                if statement.weight and not statement.against and name != "environment"
                and ranks.intersection(statement.ranks)
            }  # fmt: skip
            roles = {self.roles[self.at[rank]] for rank in lag.ranks if rank in self.at}
            if witnesses - {lag.witness} or len(signs) > 1 or roles == {"suspect"}:
                return [lag]
        return best

    def unknown(self) -> list[int]:
        """Groups that may wait; those that keep no rank waiting only where there are no others."""
        groups = [(at, self.groups[at]) for at in self.of_role(None) if at not in self.cleared]
        groups = [(at, group) for at, group in groups if group.processes]
        active = [at for at, group in groups if group.activity not in _NEUTRAL_ACTIVITIES]
        return active or [at for at, _ in groups]

    def slow(self, at: int) -> str:
        """``, or it may be slow``: a step that is longer than the samples stands still as well."""
        group = self.groups[at]
        is_certain = group.kind != "stack" or group.activity in _USER_ACTIVITIES
        is_certain |= group.verdict == "progressing" or causes.waits_for_held_child(group)
        is_certain |= bool(causes.left_lock(group))
        pronoun = say("{it|they}", max(1, len(group.ranks)))
        return "" if is_certain else f", or {pronoun} may be slow"

    def suspect(
        self, ranks: Iterable[int], nodes: Iterable[str] | None = None, reason: str = ""
    ) -> Suspect:
        """A suspect with all evidence for and against it. nodes: None: those of the ranks"""
        rank_set, node_set = set(ranks), set(self.nodes_of(ranks) if nodes is None else nodes)
        for_, against = [reason] if reason else [], list(self.notes)
        for name, statement in self.statements:
            is_about = (rank_set if statement.ranks else node_set).intersection
            if is_about(statement.ranks or statement.nodes):
                side = against if statement.against else for_ if statement.weight else []
                side.append(f"{name}: {statement.text}")
        last = {rank: self.report.last.get(rank) for rank in sorted(rank_set)[:2]}
        for_ += [
            f'logs: last line of rank {rank}, unlike the others\': "{line}"'
            for rank, line in last.items()
            if line and len(rank_set) <= 2 and not any(line in text for text in for_)
        ]
        sides = (tuple(dict.fromkeys(side))[:_MAX_STATEMENTS] for side in (for_, against))
        return Suspect(tuple(sorted(rank_set)), tuple(sorted(node_set, key=natural)), *sides)

    def suspects_of(self, indexes: Iterable[int]) -> list[Suspect]:
        groups = [(self.groups[at], self.roles[at] == "suspect") for at in indexes]
        reasons = [g.reason or (causes.cause_of(g).action if is_known else "")
                   for g, is_known in groups]  # fmt: skip
        return [self.suspect(g.ranks, g.nodes, reason)
                for (g, _), reason in zip(groups, reasons, strict=True)]  # fmt: skip

    def order(self, suspects: Sequence[Suspect]) -> tuple[int, ...]:
        """The groups of the first suspect first, those of only suspects before mixed ones."""

        def place(at: int) -> tuple[int, float]:
            group = self.groups[at]
            for number, suspect in enumerate(suspects):
                shared = len({*group.ranks} & {*suspect.ranks})
                is_nodes = not (group.ranks or suspect.ranks) and {*group.nodes} & {*suspect.nodes}
                if shared or is_nodes:
                    return number, 1 - shared / max(1, len(group.ranks))
            return len(suspects), 0.0

        return tuple(sorted(range(len(self.groups)), key=place))

    def signs(self) -> list[tuple[int, str, set[int], set[str]]]:
        """(Strength, text, ranks, nodes) of the statements about some but not all, the strongest
        first. Two witnesses with a statement about one node are as good as a strong one.
        """
        rows_of: dict[str, list[tuple[str, Statement]]] = defaultdict(list)
        for name, statement in self.statements:
            nodes = set(statement.nodes) & self.nodes or set(self.nodes_of(statement.ranks))
            # A sign on all nodes comes from the job, not from a node.
            is_common = len(nodes) > max(1, len(self.nodes) // 2) and statement.weight < 2
            is_common |= 2 * len(statement.ranks) > self.total > 2
            for node in nodes if statement.weight and not (statement.against or is_common) else ():
                rows_of[node].append((name, statement))
        merged: dict[tuple[int, str], tuple[set[int], set[str]]] = {}
        for node, rows in rows_of.items():
            first = max((statement for _, statement in rows), key=lambda row: row.weight)
            strength = 2 if first.weight > 1 or len({name for name, _ in rows}) > 1 else 1
            ranks, nodes = merged.setdefault((strength, first.text), (set(), set()))
            ranks.update(rank for _, statement in rows for rank in statement.ranks)
            nodes.add(node)
        signs = [(*key, *subjects) for key, subjects in merged.items()]
        return sorted(signs, key=lambda sign: (-sign[0], len(sign[3]), sorted(sign[3])))


@dataclass
class HangFinding:
    """What a rule has found: the words of its sentence, and the suspects."""

    words: dict[str, str] = field(default_factory=dict)
    suspects: Sequence[Suspect] = ()
    number: int = 1  # how many the subject of the sentence is
    kind: str = ""  # "": as of the rule
    sentence: str = ""  # likewise
    missing: tuple[str, ...] | None = None  # None: likewise
    leads: bool = False  # the groups of its suspects come first


class HangRule(NamedTuple):
    """A kind of verdict, what finds it, its sentence (`say`), the witnesses that would help."""

    kind: str
    evidence: Callable[[HungJob], HangFinding | Literal[False] | None]
    sentence: str
    missing: tuple[str, ...] = ()

    def verdict(self, job: HungJob, finding: HangFinding) -> Verdict:
        call, ranks = job.report.common or causes.called(job.first), f"all {job.total} ranks wait"
        stuck = sum(rank_call == call for rank_call in job.report.called.values())
        of_all = f", {stuck} in {call} with all of it" if 0 < stuck < job.total else f" in {call}"
        words = {"call": call, "summary": ranks + of_all, "waits": job.waits}
        words |= {"wait": f"; {job.waits}" if job.victims else "", **finding.words}
        text = say(finding.sentence or self.sentence, finding.number, **words)
        if job.odd.unasked:
            text += f"; {ranks_of(job.odd.unasked)} not looked at ({job.odd.part})"
        # Only NCCL's groups dump on request, and only they have a port.
        useless = () if job.has_nccl else ("flight_recorder", "nccl_ras")
        missing = tuple(
            f"{name}: {reason}{'' if _SETTLED.search(reason) else _OPTION_HINTS.get(name, '')}"
            for name in (self.missing if finding.missing is None else finding.missing)
            for reason in job.report.of(name).absent[:1]
            if name not in useless
        )
        suspects = tuple(finding.suspects)[:_MAX_SUSPECTS]
        return Verdict(finding.kind or self.kind, text, suspects, missing)

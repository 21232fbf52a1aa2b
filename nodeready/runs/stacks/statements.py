"""What the witnesses state about the ranks: lags behind peers, signs for and against each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nodeready.core.text import counted
from nodeready.fleet.inventory.nodeset import fold, natural
from nodeready.runs.stacks.document import Statement, Witness, fold_ranks, say
from nodeready.runs.stacks.evidence import Evidence
from nodeready.subjects.environment_rules import EnvironmentFinding

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
    """Where a group's ranks differ; None: no rank waits. calls: progress -> the ranks with it.

    All ranks have made a call that one rank has completed: a rank with that call pending waits for
    no rank there. Such records are out of date: gloo's of a call that has just ended, and NCCL's
    until the watchdog polls again.
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
    }
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
    """Collects the statements of the witnesses on one job.

    moving: by the stacks most ranks progress, so momentary counts prove nothing
    """

    def __init__(self, evidence: Evidence, places: Sequence[RankPlace], moving: bool) -> None:
        self.evidence, self.moving = evidence, moving
        self.places = places
        self.nodes = list(dict.fromkeys(place.node for place in places))
        claims = Counter(place.rank for place in places)
        #: Ranks that exactly one process claims.
        self.ranked = [
            place for place in places if place.rank is not None and claims[place.rank] == 1
        ]
        self.rank_of = {(place.node, place.pid): place.rank for place in self.ranked}
        self.all_ranks = frozenset(place.rank for place in self.ranked if place.rank is not None)
        self.ranks_of_node: dict[str, list[int]] = defaultdict(list)
        for place in self.ranked:
            if place.rank is not None:
                self.ranks_of_node[place.node].append(place.rank)
        self.report = WitnessReport()
        self.statements: dict[str, list[Statement]] = defaultdict(list)
        self.absent: dict[str, dict[str, list[RankPlace | str]]] = defaultdict(dict)

    def witnesses(self, names: Iterable[str]) -> tuple[Witness, ...]:
        """The witnesses that were asked, with their statements."""
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
            ranks = [
                p.rank for p in absent_places if not isinstance(p, str) and p.rank is not None
            ]
            yield f"{reason} ({ranks_of(ranks) if ranks else nodes_of(nodes)})"

    def _folded(self, name: str) -> tuple[Statement, ...]:
        """Equal statements once, with the ranks and nodes of all; the weightiest first."""
        merged: dict[tuple[str, int, bool], tuple[list[int], list[str]]] = {}
        for statement in self.statements[name]:
            ranks, nodes = merged.setdefault(
                (statement.text, statement.weight, statement.against), ([], [])
            )
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
        """Add a statement of this witness."""
        self.statements[name].append(Statement(text, tuple(ranks), tuple(nodes), weight, against))

    def add_lags(self, lags: Iterable[Lag]) -> None:
        """Keep the lags, and a statement on each about its late and its waiting ranks."""
        for lag in root_lags(lags):
            self.report.lags.append(lag)
            site = f" ({lag.site})" if lag.site else ""
            wait = f"{ranks_of(lag.waiting)} {say('{waits|wait}', len(lag.waiting))} in"
            text = (
                f"has called {lag.other} where {ranks_of(lag.waiting)} called {lag.call}{site}"
                if lag.other
                else f"has not called {lag.call}{site}, which {wait}"
            )
            if lag.elsewhere:
                text += f", and waits in {lag.elsewhere} itself"
            if lag.silent:
                text = f"has no record, while {wait} {lag.call}{site}"
            elif lag.behind > 1 and not lag.other:
                text += f"; {lag.behind} behind"
            if lag.chained:
                text += "; but it is kept waiting elsewhere"
            self.add_statement(
                lag.witness, text, lag.ranks, weight=0 if lag.chained else lag.weight
            )
            if not lag.other and lag.witness == "flight_recorder":
                self.add_statement(
                    lag.witness, f"has called {lag.call}{site}, and waits in it", lag.waiting,
                    weight=min(1, lag.weight), against=True,
                )  # fmt: skip


def ranks_of(ranks: Iterable[int]) -> str:
    """Ranks in words, as in ``rank 3``, ``ranks 0-2,4``; a long scattered set is counted."""
    numbers = sorted(set(ranks))
    text = fold_ranks(numbers)
    if len(text) > MAX_NAME:
        return f"{len(numbers)} ranks"
    return f"rank{'s' if len(numbers) != 1 else ''} {text}"


def nodes_of(nodes: Sequence[str]) -> str:
    text = fold(nodes)
    return text if len(text) <= MAX_NAME else counted(len(nodes), "node")

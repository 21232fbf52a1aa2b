"""What NCCL says, compared over the ranks of a job: who differs, and the errors. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from nodeready.agent.witnesses.nccl_errors import CAUSE, FOLLOWS, NOTE, VICTIM, NcclMeaning, by_key
from nodeready.agent.witnesses.nccl_log import NcclRank
from nodeready.fleet.inventory.nodeset import fold
from nodeready.runs.stacks.document import fold_ranks

#: The order of errors by role: what a reader wants first.
ROLES = (CAUSE, VICTIM, FOLLOWS, NOTE)


class PlacedRank(NamedTuple):
    """A rank of a job and what NCCL says about it."""

    node: str
    rank: int | None  # global; None: unknown
    nccl: NcclRank


class NcclDifference(NamedTuple):
    """Ranks that differ from most of their peers in one fact."""

    fact: str  # of `FACTS`: ``network``
    value: str  # theirs, and that of most ranks
    usual: str  # likewise
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]

    @property
    def line(self) -> str:
        """``network Socket, its peers IB``"""
        pronoun = "its" if len(self.ranks or self.nodes) == 1 else "their"
        return f"{FACTS[self.fact]} {self.value}, {pronoun} peers {self.usual}"


class FoldedError(NamedTuple):
    """One kind of error over all ranks."""

    meaning: NcclMeaning
    text: str  # the line of the first rank
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    peers: tuple[str, ...]  # the named peers, the most frequent first


#: The facts that are compared, the gravest first, in words.
FACTS: Mapping[str, str] = {
    "network": "network",
    "provider": "libfabric's provider",
    "gdr": "GPUDirect RDMA",
    "gid": "GID index",
    "state": "communicator",
    "completed": "last collective",
    "version": "version",
    "hcas": "HCAs:",
    "interface": "interface",
    "channels": "channels:",
    "tuner": "tuner",
    "profiler": "profiler",
}
_STATES = {"init": "not complete", "ready": "complete", "aborted": "aborted"}


def _value(fact: str, nccl: NcclRank) -> str:
    """A fact of a rank in a word; "": the log does not say it."""
    if fact == "hcas":
        # Ranks of one node may use different HCAs: their number and kind is compared.
        kinds = Counter(hca.rpartition("/")[2] for hca in nccl.hcas)
        return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    if fact == "gdr":
        return "" if nccl.gdr is None else "on" if nccl.gdr else "off"
    if fact == "state":
        return _STATES.get(nccl.state, "")
    value = getattr(nccl, fact)
    return "" if value is None else str(value)


def differences(ranks: Iterable[PlacedRank]) -> tuple[NcclDifference, ...]:
    """The ranks that differ from most, fact by fact; only where more than half are equal."""
    placed = list(ranks)
    rows = []
    for fact in FACTS:
        members: dict[str, list[PlacedRank]] = {}
        for rank in placed:
            if value := _value(fact, rank.nccl):
                members.setdefault(value, []).append(rank)
        total = sum(map(len, members.values()))
        usual = max(members, key=lambda value: len(members[value]), default="")
        if len(members) < 2 or 2 * len(members[usual]) <= total:
            continue
        rows += [
            NcclDifference(fact, value, usual, _numbers(group), _nodes(group))
            for value, group in members.items()
            if value != usual
        ]
    return tuple(rows)


def fold_errors(ranks: Iterable[PlacedRank]) -> tuple[FoldedError, ...]:
    """The errors of all ranks, equal kinds once, causes first, then the rarest."""
    members: dict[str, list[PlacedRank]] = {}
    texts: dict[str, str] = {}
    peers: dict[str, Counter[str]] = {}
    for rank in ranks:
        for error in rank.nccl.errors:
            members.setdefault(error.key, []).append(rank)
            texts.setdefault(error.key, error.text)
            peers.setdefault(error.key, Counter()).update([error.peer] if error.peer else [])
    errors = [
        FoldedError(
            by_key(key), texts[key], _numbers(group), _nodes(group),
            tuple(peer for peer, _ in peers[key].most_common(8)),
        )
        for key, group in members.items()
    ]  # fmt: skip
    return tuple(
        sorted(errors, key=lambda error: (ROLES.index(error.meaning.role), len(error.ranks)))
    )


def names(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """Ranks with their nodes in a sentence.

    >>> names([3], ["gpu2"]), names([], ["gpu1", "gpu2"])
    ('rank 3 (gpu2)', 'gpu[1-2]')
    """
    node_set = fold(nodes)
    if not ranks:
        return node_set
    return f"rank{'s' * (len(ranks) > 1)} {fold_ranks(ranks)} ({node_set})"


def _numbers(group: Iterable[PlacedRank]) -> tuple[int, ...]:
    return tuple(sorted({rank.rank for rank in group if rank.rank is not None}))


def _nodes(group: Iterable[PlacedRank]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(rank.node for rank in group))

"""Who is to blame when attempts between nodes fail: a node, its direction, or one pair. Pure.

One node with a wrong firewall fails every pair that it is part of. Named is the smallest
explanation: greedily the node and the direction that explain most of what failed and is not yet
explained; what then remains is between two nodes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

TARGET, SOURCE, BOTH, PAIR = "target", "source", "both", "pair"


@dataclass(frozen=True)
class Attempt:
    """One node tried to reach another.

    what:  that was tried: a port, a way of login
    cause: why it failed; "" when it did not
    """

    source: str
    target: str
    what: str
    ok: bool
    cause: str = ""


@dataclass(frozen=True)
class Finding:
    """What one cause explains.

    kind:  ``target``: others do not reach the node; ``source``: it does not reach others;
           ``both``; ``pair``: the node does not reach its one peer, and neither is to blame
    peers: the others of the attempts that failed, sorted
    tried: how many others tried in that direction, of ``both`` in either
    cause: the most common one among what it explains
    back:  of a target or source whether all attempts in the other direction passed, of a pair
           whether the way back did: True makes it asymmetric; None: nobody tried
    """

    kind: str
    node: str
    peers: tuple[str, ...]
    tried: int
    what: tuple[str, ...]
    cause: str
    back: bool | None = None


#: A node and the direction in which it takes part in an attempt.
_Side = tuple[str, str]
_Edge = tuple[str, str]
_Weight = tuple[int, bool, float]
#: Node -> direction -> what that explains.
_Named = dict[str, dict[str, list[_Edge]]]


def attribute(attempts: Iterable[Attempt]) -> list[Finding]:
    """The findings: nodes first, by how much they explain, then pairs. Ports that show the same
    are one finding. The same attempts in another order give the same findings.

    A target is blamed when two sources or more, and at least half of those that are not to blame
    themselves, do not reach it; a source likewise. So is a target that two sources or more do not
    reach which have no other trouble: else a node could fail others, a few at a time, that have
    done nothing. With two nodes, everything is a pair. Of
    several attempts of the same, the last counts.
    """
    by_what: dict[str, dict[_Edge, Attempt]] = {}
    for one in attempts:
        by_what.setdefault(one.what, {})[one.source, one.target] = one
    merged: dict[Finding, list[str]] = {}
    for what, tried in sorted(by_what.items()):
        for found in _Greedy(tried).findings():
            merged.setdefault(found, []).append(what)
    found_all = [replace(found, what=tuple(what)) for found, what in merged.items()]
    return sorted(found_all, key=_rank)


def _rank(found: Finding) -> tuple[object, ...]:
    return found.kind == PAIR, -len(found.peers), found.node, found.peers, found.kind, found.what


def _ends(edge: _Edge) -> tuple[_Side, _Side]:
    return (edge[1], TARGET), (edge[0], SOURCE)


class _Greedy:
    """The explanation of what failed of one kind of attempt."""

    def __init__(self, tried: dict[_Edge, Attempt]) -> None:
        self.tried = tried
        self.failing = {edge: one.cause for edge, one in tried.items() if not one.ok}
        self.failing_of: dict[_Side, set[_Edge]] = {}
        # What somebody else is to blame for is no attempt of this side any more.
        self.count: Counter[_Side] = Counter()
        self.all: dict[_Side, set[str]] = {}
        if not self.failing:
            return
        for edge in tried:
            for side, peer in zip(_ends(edge), edge, strict=True):
                self.count[side] += 1
                self.all.setdefault(side, set()).add(peer)
                if edge in self.failing:
                    self.failing_of.setdefault(side, set()).add(edge)

    def _weight(self, side: _Side, named: _Named) -> _Weight | None:
        """How well this side explains what is left: smaller is better; None: not at all."""
        failing, tried = len(self.failing_of.get(side, ())), self.count[side]
        known = side[0] in named
        if (failing >= 2 and 2 * failing >= tried) or (known and failing == tried > 0):
            # Of equals the node that is to blame anyway, then the one that fails more of its own.
            return -failing, not known, -failing / tried
        return None

    def findings(self) -> list[Finding]:
        named: _Named = {}
        left = {side: self._weight(side, named) for side in self.failing_of}
        heap = [(weight, side) for side, weight in left.items() if weight is not None]
        heapq.heapify(heap)
        while heap:
            old, side = heapq.heappop(heap)
            weight = self._weight(side, named)
            if weight is None:
                continue
            if weight != old:
                # Meanwhile others explain a part of it: it only ever becomes less.
                heapq.heappush(heap, (weight, side))
                continue
            node, way = side
            named.setdefault(node, {})[way] = self._explain(side)
            other = (node, SOURCE if way == TARGET else TARGET)
            weight = self._weight(other, named)
            if weight is not None:
                heapq.heappush(heap, (weight, other))
        for node in self._alone():
            named.setdefault(node, {})[TARGET] = self._explain((node, TARGET))
        return [self._node(node, ways) for node, ways in named.items()] + self._pairs()

    def _alone(self) -> list[str]:
        """The targets that are all of what is left of several sources."""
        return sorted(
            node
            for (node, way), edges in self.failing_of.items()
            if way == TARGET
            and len(edges) > 1
            and all(len(self.failing_of[source, SOURCE]) == 1 for source, _ in edges)
        )

    def _explain(self, side: _Side) -> list[_Edge]:
        edges = sorted(self.failing_of.pop(side))
        self.count[side] -= len(edges)
        for edge in edges:
            for end in _ends(edge):
                if end != side:
                    self.failing_of[end].discard(edge)
                    self.count[end] -= 1
        return edges

    def _node(self, node: str, ways: dict[str, list[_Edge]]) -> Finding:
        edges = [edge for found in ways.values() for edge in found]
        peers = {edge[edge[0] == node] for edge in edges}
        tried: set[str] = set().union(*(self.all[node, way] for way in ways))
        kind, back = BOTH, None
        if len(ways) == 1:
            kind = next(iter(ways))
            opposite = (node, SOURCE if kind == TARGET else TARGET)
            back = self._all_passed(opposite)
        return Finding(kind, node, tuple(sorted(peers)), len(tried), (), self._cause(edges), back)

    def _all_passed(self, side: _Side) -> bool | None:
        """Whether this side's attempts passed, as far as nobody else is to blame for them."""
        return not self.failing_of.get(side) if self.count[side] else None

    def _cause(self, edges: list[_Edge]) -> str:
        causes = Counter(self.failing[edge] for edge in edges)
        return min(causes, key=lambda cause: (-causes[cause], cause))

    def _pairs(self) -> list[Finding]:
        found = []
        left = {edge for edges in self.failing_of.values() for edge in edges}
        for source, target in sorted(left):
            back = self.tried.get((target, source))
            if (target, source) in left and target < source:
                # Both ways: told once, by the other.
                continue
            passed = back.ok if back is not None else None
            cause = self.failing[source, target]
            found.append(Finding(PAIR, source, (target,), 1, (), cause, passed))
        return found

"""The cause of failed attempts between nodes: a node, its direction, or one pair. Pure.

One node with a wrong firewall fails every pair that it is part of, so the smallest explanation is
reported: repeatedly the node and direction that explain most of the remaining failures; what then
remains are pairs. `reach` uses it for logins, too: a node that no node can log in to is reported
once, and the nodes that tried are excused.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

TARGET, SOURCE, BOTH, PAIR = "target", "source", "both", "pair"


@dataclass(frozen=True)
class ReachAttempt:
    """One node's attempt to reach another."""

    source: str
    target: str
    channel: str  # a port, or a kind of login
    ok: bool
    cause: str = ""  # why it failed; "": it did not


@dataclass(frozen=True)
class ReachFinding:
    """The failed attempts that one node, direction or pair explains."""

    # ``target``: peers do not reach the node; ``source``: it does not reach peers; ``both``;
    # ``pair``: the node does not reach its one peer, and neither explains more
    kind: str
    node: str
    peers: tuple[str, ...]  # of the failed attempts, sorted
    tried: int  # the number of peers tried in that direction, of ``both`` in either
    channels: tuple[str, ...]
    cause: str  # the most common cause of these failures
    # whether all attempts in the opposite direction passed (of a pair, the opposite one); None:
    # there was none
    back: bool | None = None


#: A node and the direction in which it takes part in an attempt.
_Side = tuple[str, str]
_Edge = tuple[str, str]
_Weight = tuple[int, bool, float]
#: Node -> direction -> the failed attempts that it explains.
_Named = dict[str, dict[str, list[_Edge]]]


def attribute(attempts: Iterable[ReachAttempt]) -> list[ReachFinding]:
    """The findings: nodes first, by how much they explain, then pairs. Ports with the same result
    are one finding. Of attempts with the same ends and channel, the last counts.

    A target is a cause if two sources or more, and half of the sources that are no cause
    themselves, do not reach it; a source likewise. A target is also a cause if it is the only
    failure of two sources: else one node could make several sources look faulty. With two nodes,
    every failure is a pair.
    """
    by_channel: dict[str, dict[_Edge, ReachAttempt]] = {}
    for attempt in attempts:
        by_channel.setdefault(attempt.channel, {})[attempt.source, attempt.target] = attempt
    merged: dict[ReachFinding, list[str]] = {}
    for channel, tried in sorted(by_channel.items()):
        for finding in _Greedy(tried).findings():
            merged.setdefault(finding, []).append(channel)
    findings = [replace(finding, channels=tuple(channels)) for finding, channels in merged.items()]
    findings.sort(key=lambda f: (f.node, f.peers, f.kind, f.channels))
    return sorted(findings, key=lambda finding: (finding.kind == PAIR, -len(finding.peers)))


def _ends(edge: _Edge) -> tuple[_Side, _Side]:
    return (edge[1], TARGET), (edge[0], SOURCE)


class _Greedy:
    def __init__(self, tried: dict[_Edge, ReachAttempt]) -> None:
        self.tried = tried
        self.failing = {edge: attempt.cause for edge, attempt in tried.items() if not attempt.ok}
        self.failing_of: dict[_Side, set[_Edge]] = {}
        # Of each side: the number of attempts that no earlier finding explains, and all peers.
        self.count: Counter[_Side] = Counter()
        self.peers: dict[_Side, set[str]] = {}
        if not self.failing:
            return
        for edge in tried:
            for side, peer in zip(_ends(edge), edge, strict=True):
                self.count[side] += 1
                self.peers.setdefault(side, set()).add(peer)
                if edge in self.failing:
                    self.failing_of.setdefault(side, set()).add(edge)

    def _weight(self, side: _Side, named: _Named) -> _Weight | None:
        """How well this side explains the remaining failures; smaller is better. None: it explains
        none."""
        failing, tried = len(self.failing_of.get(side, ())), self.count[side]
        is_named = side[0] in named
        if (failing >= 2 and 2 * failing >= tried) or (is_named and failing == tried > 0):
            # Of equals the node with an earlier finding, then the side with more failures.
            return -failing, not is_named, -failing / tried
        return None

    def findings(self) -> list[ReachFinding]:
        named: _Named = {}
        weights = {side: self._weight(side, named) for side in self.failing_of}
        heap = [(weight, side) for side, weight in weights.items() if weight is not None]
        heapq.heapify(heap)
        while heap:
            old, side = heapq.heappop(heap)
            weight = self._weight(side, named)
            if weight is None:
                continue
            if weight != old:
                # Earlier findings explain a part of it: the weight only becomes less.
                heapq.heappush(heap, (weight, side))
                continue
            node, direction = side
            named.setdefault(node, {})[direction] = self._explain(side)
            other = (node, SOURCE if direction == TARGET else TARGET)
            weight = self._weight(other, named)
            if weight is not None:
                heapq.heappush(heap, (weight, other))
        # The targets that are the only remaining failure of several sources.
        sole_failures = sorted(
            node
            for (node, direction), edges in self.failing_of.items()
            if direction == TARGET
            and len(edges) > 1
            and all(len(self.failing_of[source, SOURCE]) == 1 for source, _ in edges)
        )
        for node in sole_failures:
            named.setdefault(node, {})[TARGET] = self._explain((node, TARGET))
        return [self._node(node, directions) for node, directions in named.items()] + self._pairs()

    def _explain(self, side: _Side) -> list[_Edge]:
        edges = sorted(self.failing_of.pop(side))
        self.count[side] -= len(edges)
        for edge in edges:
            for end in _ends(edge):
                if end != side:
                    self.failing_of[end].discard(edge)
                    self.count[end] -= 1
        return edges

    def _node(self, node: str, by_direction: dict[str, list[_Edge]]) -> ReachFinding:
        edges = [edge for side_edges in by_direction.values() for edge in side_edges]
        peers = {edge[edge[0] == node] for edge in edges}
        tried: set[str] = set().union(*(self.peers[node, direction] for direction in by_direction))
        kind, back = BOTH, None
        if len(by_direction) == 1:
            kind = next(iter(by_direction))
            opposite = (node, SOURCE if kind == TARGET else TARGET)
            # The count and the failures are those that no finding explains.
            if self.count[opposite]:
                back = not self.failing_of.get(opposite)
        causes = Counter(self.failing[edge] for edge in edges)
        cause = min(causes, key=lambda cause: (-causes[cause], cause))
        return ReachFinding(kind, node, tuple(sorted(peers)), len(tried), (), cause, back)

    def _pairs(self) -> list[ReachFinding]:
        findings = []
        remaining = {edge for edges in self.failing_of.values() for edge in edges}
        for source, target in sorted(remaining):
            if (target, source) in remaining and target < source:
                # The finding of the opposite direction stands for both.
                continue
            opposite = self.tried.get((target, source))
            back = None if opposite is None else opposite.ok
            cause = self.failing[source, target]
            findings.append(ReachFinding(PAIR, source, (target,), 1, (), cause, back))
        return findings

"""The reach of each node: its logins and pdsh answers, and the causes of failed attempts. Pure."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from nodeready.subjects.proof.facts import Missing, PdshRun, Peers, Reach, Same, SshTry, Trouble
from nodeready.subjects.ssh_client.checks import cause_of

#: (source, target) -> (key of the cause, output); ("", "") for a login that worked.
_Logins = Mapping["tuple[str, str]", "tuple[str, str]"]
_WORKED = ("", "")


def reach(
    peers_by_node: Mapping[str, Peers], unreachable: Collection[str] = ()
) -> dict[str, Reach]:
    """The Reach of each node that tried or was tried.

    peers_by_node: node -> its attempts; without the nodes whose proofs ended without an answer
    unreachable:   nodes that are down: attempts to reach them do not count
    """
    logins = {
        (source, attempt.name): _login_result(attempt, peers_by_node.get(attempt.name))
        for source, peers in peers_by_node.items()
        for attempt in peers.ssh
        if attempt.name not in unreachable
    }
    troubles = _troubles(logins)
    for name, namesakes in _namesakes(peers_by_node).items():
        troubles[name].insert(0, Trouble("namesake", namesakes, len(namesakes), "namesake"))
    to, by = Counter(source for source, _ in logins), Counter(target for _, target in logins)
    excused: dict[str, list[str]] = defaultdict(list)
    for (source, target), (cause, _) in logins.items():
        if cause and not any(target in trouble.peers for trouble in troubles.get(source, ())):
            excused[source].append(target)
    blamed = _blamed_for_pdsh(peers_by_node, logins)
    return {
        name: replace(
            _pdsh(name, peers_by_node, logins, blamed), pdsh_by=blamed.get(name, ()), to=to[name],
            by=by[name], ssh=tuple(troubles.get(name, ())), excused=tuple(excused.get(name, ())),
        )
        for name in dict.fromkeys([*peers_by_node, *(target for _, target in logins)])
    }  # fmt: skip


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


def _login_result(attempt: SshTry, peer: Peers | None) -> tuple[str, str]:
    """The cause of a login's failure, and its evidence."""
    is_named = peer is None or _short(peer.host) == _short(attempt.answer)
    if attempt.rc == 0 and attempt.answer and is_named:
        return _WORKED
    if attempt.overrides:
        return "own_config", ", ".join(attempt.overrides)
    if attempt.forced:
        return "forced", attempt.forced
    if attempt.rc == 0 and attempt.answer:
        return "other_host", attempt.answer
    # A login shell that refuses logins prints that on its standard output.
    cause, line = cause_of(attempt.messages or attempt.answer)
    if attempt.rc is None and cause == "other":
        return "timeout", "timed out"
    if attempt.rc == 0 or (cause == "other" and attempt.rc != 255):
        return "shell", line if attempt.messages or attempt.answer else f"exit status {attempt.rc}"
    return cause, line


def _namesakes(peers_by_node: Mapping[str, Peers]) -> dict[str, tuple[str, ...]]:
    """Node -> its peers with the same host name. The node that the inventory calls so is left out:
    only a node that takes its name fails.
    """
    by_host: dict[str, list[str]] = defaultdict(list)
    for name, peers in peers_by_node.items():
        by_host[_short(peers.host)].append(name)
    namesakes: dict[str, tuple[str, ...]] = {}
    for host, names in by_host.items():
        owners = [name for name in names if _short(name) == host]
        for name in names:
            if len(names) > 1 and owners != [name]:
                namesakes[name] = tuple(other for other in names if other != name)
    return namesakes


def _troubles(logins: _Logins) -> defaultdict[str, list[Trouble]]:
    troubles: defaultdict[str, list[Trouble]] = defaultdict(list)
    attempts = [
        ReachAttempt(source, target, "ssh", not cause, cause)
        for (source, target), (cause, _) in logins.items()
    ]
    findings = attribute(attempts)
    for finding in findings:
        troubles[finding.node].append(_trouble(finding, logins))
    blamed = {finding.node for finding in findings if finding.kind != PAIR}
    for finding in findings:
        is_explained = bool({finding.node, *finding.peers} & blamed)
        if finding.kind == PAIR and finding.back is False and not is_explained:
            # The finding is the pair's, but each end has its own keys and configuration.
            (peer,) = finding.peers
            cause, output = logins[peer, finding.node]
            troubles[peer].append(Trouble("pair", (finding.node,), 1, cause, output, False))
    _nothing_proved(logins, troubles)
    return troubles


def _trouble(finding: ReachFinding, logins: _Logins) -> Trouble:
    node, cause = finding.node, finding.cause
    edges = [edge for peer in finding.peers for edge in ((peer, node), (node, peer))]
    output = (logins[edge][1] for edge in edges if edge in logins and logins[edge][0] == cause)
    row = finding.kind, finding.peers, finding.tried, cause, next(output, ""), finding.back
    return Trouble(*row)


def _nothing_proved(logins: _Logins, troubles: defaultdict[str, list[Trouble]]) -> None:
    """Add a trouble for each node without any working login. Where every login fails (no node has
    a key), the peers' troubles explain the node's failures, but nothing proves that it works.
    """
    failed: dict[str, list[tuple[str, str]]] = defaultdict(list)
    works = {name for edge, result in logins.items() if result == _WORKED for name in edge}
    for source, target in logins:
        failed[source].append((source, target))
    for source, edges in failed.items():
        if source not in works and source not in troubles:
            cause, output = logins[edges[0]]
            peers = tuple(target for _, target in edges)
            troubles[source].append(Trouble("source", peers, len(peers), cause, output))


def _answers(name: str, peers_by_node: Mapping[str, Peers], logins: _Logins) -> dict[str, str]:
    """The output of pdsh on this node for each peer that ssh reaches; "": nothing."""
    run = peers_by_node[name].pdsh if name in peers_by_node else None
    if run is None:
        return {}
    peers = [peer for peer in run.targets if logins.get((name, peer), _WORKED) == _WORKED]
    texts = {answer.label: answer.text for answer in run.answers if answer.text}
    # pdsh leaves out the domain when all names have the same.
    return {peer: texts.get(peer, texts.get(peer.partition(".")[0], "")) for peer in peers}


def _blamed_for_pdsh(
    peers_by_node: Mapping[str, Peers], logins: _Logins
) -> dict[str, tuple[str, ...]]:
    """Node -> its peers, two or more, whose ssh works but whose pdsh gets no answer from it or a
    wrong host name: a faulty node must not fail all its peers. A node without a good answer from
    any peer proves nothing about its peers.
    """
    attempts = []
    for source in peers_by_node:
        good = {
            peer: bool(text)
            and (peer not in peers_by_node or _short(text) == _short(peers_by_node[peer].host))
            for peer, text in _answers(source, peers_by_node, logins).items()
        }
        if any(good.values()):
            attempts += [ReachAttempt(source, p, "pdsh", ok) for p, ok in good.items()]
    return {
        finding.node: finding.peers
        for finding in attribute(attempts)
        if finding.kind == TARGET and len(finding.peers) > 1
    }


def _pdsh(
    name: str,
    peers_by_node: Mapping[str, Peers],
    logins: _Logins,
    blamed: Mapping[str, tuple[str, ...]],
) -> Reach:
    """The pdsh part of a node's Reach. blamed: node -> nodes that it does not answer, excused"""
    run = peers_by_node[name].pdsh if name in peers_by_node else None
    if run is None:
        return Reach()
    answers = {
        peer: text
        for peer, text in _answers(name, peers_by_node, logins).items()
        if name not in blamed.get(peer, ())
    }
    by_answer: dict[str, list[str]] = defaultdict(list)
    for peer, answer in answers.items():
        if answer:
            by_answer[answer].append(peer)
    hosts = {node: _short(peers.host) for node, peers in peers_by_node.items()}
    same = tuple(
        Same(answer, tuple(names))
        for answer, names in by_answer.items()
        # That nodes have one host name is a separate trouble.
        if len(names) > 1 and len({hosts.get(name, name) for name in names}) > 1
    )
    missing = tuple(Missing(peer, _line(run, peer)) for peer, text in answers.items() if not text)
    lines = [line for line in run.messages.splitlines() if line.strip()]
    message = lines[0].strip() if lines and not run.answers else ""
    return Reach(
        pdsh_targets=len(answers), distinct=len(by_answer), missing=missing, same=same,
        pdsh_said=message,
    )  # fmt: skip


def _line(run: PdshRun, peer: str) -> str:
    """The first line of pdsh about this peer."""
    marks = (f"{peer}: ", f"{peer.partition('.')[0]}: ")
    for line in run.messages.splitlines():
        for mark in marks:
            _, separator, text = line.partition(mark)
            if separator and text.strip():
                return text.strip()
    return "timed out" if run.rc is None else ""


# --- The cause of failed attempts: a node, its direction, or one pair. The smallest explanation.


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
    """The failed attempts that a single node, direction or pair explains."""

    # ``target``: peers do not reach the node; ``source``: it does not reach peers; ``both``;
    # ``pair``: the node does not reach its one peer, and neither explains more
    kind: str
    node: str
    peers: tuple[str, ...]  # of the failed attempts, sorted
    tried: int  # the number of peers tried in that direction, of ``both`` in either
    channels: tuple[str, ...]
    cause: str  # the most common cause of these failures
    # whether all attempts in the opposite direction passed (a pair has one); None: no attempt
    back: bool | None = None


_Side = tuple[str, str]  # a node and the direction in which it takes part in an attempt
_Edge = tuple[str, str]
_Weight = tuple[int, bool, float]
_Named = dict[str, dict[str, list[_Edge]]]  # node -> direction -> what it explains


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
        """How well this side explains what still fails; smaller is better. None: not at all."""
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
            if (weight := self._weight(other, named)) is not None:
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

"""Who is to blame when attempts between nodes fail: a node, its direction, or one pair. Pure.

One node with a wrong firewall fails every pair that it is part of. Named is the smallest
explanation: greedily the node and the direction that explain most of what failed and is not yet
explained; what then remains is between two nodes. So it is for logins, too: a node that nobody
gets into is named once, and the others that tried are excused (`reach`).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from nodeready.subjects.proof.facts import Missing, PdshRun, Peers, Reach, Same, SshTry, Trouble
from nodeready.subjects.ssh_client.login_failures import cause_of

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


#: (source, target) -> (key of the cause, what was said); ("", "") for a login that worked.
_Logins = Mapping["tuple[str, str]", "tuple[str, str]"]
_WORKED = ("", "")


def reach(seen: Mapping[str, Peers], unreachable: Collection[str] = ()) -> dict[str, Reach]:
    """Each node's Reach, of those that tried and of those that were tried.

    seen:        what each node saw; one whose proofs ended without an answer is missing
    unreachable: nodes that nobody can be expected to reach: attempts to them do not count
    """
    logins = {
        (source, one.name): _judged(one, seen.get(one.name))
        for source, peers in seen.items()
        for one in peers.ssh
        if one.name not in unreachable
    }
    troubles = _troubles(logins)
    for name, others in _namesakes(seen).items():
        troubles[name].insert(0, Trouble("namesake", others, len(others), "namesake"))
    to, by = _counted(source for source, _ in logins), _counted(target for _, target in logins)
    excused: dict[str, list[str]] = defaultdict(list)
    for (source, target), (cause, _) in logins.items():
        if cause and not any(target in one.peers for one in troubles.get(source, ())):
            excused[source].append(target)
    blamed = _blamed_for_pdsh(seen, logins)
    return {
        name: replace(
            _pdsh(name, seen, logins, blamed),
            pdsh_by=blamed.get(name, ()),
            to=to[name],
            by=by[name],
            ssh=tuple(troubles.get(name, ())),
            excused=tuple(excused.get(name, ())),
        )
        for name in dict.fromkeys([*seen, *(target for _, target in logins)])
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for name in names:
        found[name] += 1
    return found


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


def _judged(one: SshTry, peer: Peers | None) -> tuple[str, str]:
    """The cause and what tells it."""
    if one.rc == 0 and one.answer and (peer is None or _short(peer.host) == _short(one.answer)):
        return _WORKED
    if one.overrides:
        return "own_config", ", ".join(one.overrides)
    if one.forced:
        return "forced", one.forced
    if one.rc == 0 and one.answer:
        return "other_host", one.answer
    # A login shell that lets nobody in says so on its standard output.
    cause, line = cause_of(one.messages or one.answer)
    if one.rc is None and cause == "other":
        return "timeout", "timed out"
    if one.rc == 0 or (cause == "other" and one.rc != 255):
        return "shell", line if one.messages or one.answer else f"exit status {one.rc}"
    return cause, line


def _namesakes(seen: Mapping[str, Peers]) -> dict[str, tuple[str, ...]]:
    """The nodes that call themselves as others do, with these others. Whom the inventory calls so
    is not among them: another node that takes its name costs itself."""
    by_host: dict[str, list[str]] = defaultdict(list)
    for name, peers in seen.items():
        by_host[_short(peers.host)].append(name)
    found: dict[str, tuple[str, ...]] = {}
    for host, names in by_host.items():
        rightly = [name for name in names if _short(name) == host]
        for name in names:
            if len(names) > 1 and rightly != [name]:
                found[name] = tuple(other for other in names if other != name)
    return found


def _troubles(logins: _Logins) -> defaultdict[str, list[Trouble]]:
    """Each node's troubles, of those that it is to blame for."""
    found: defaultdict[str, list[Trouble]] = defaultdict(list)
    attempts = [
        Attempt(source, target, "ssh", not cause, cause)
        for (source, target), (cause, _) in logins.items()
    ]
    findings = attribute(attempts)
    for one in findings:
        found[one.node].append(_trouble(one, logins))
    alone = {one.node for one in findings if one.kind != PAIR}
    for one in findings:
        if one.kind == PAIR and one.back is False and not {one.node, *one.peers} & alone:
            # blame tells such a pair once; here each end has its own keys and configuration.
            (other,) = one.peers
            cause, said = logins[other, one.node]
            found[other].append(Trouble("pair", (one.node,), 1, cause, said, False))
    _nothing_proved(logins, found)
    return found


def _trouble(one: Finding, logins: _Logins) -> Trouble:
    edges = [edge for peer in one.peers for edge in ((peer, one.node), (one.node, peer))]
    said = (logins[edge][1] for edge in edges if edge in logins and logins[edge][0] == one.cause)
    return Trouble(one.kind, one.peers, one.tried, one.cause, next(said, ""), one.back)


def _nothing_proved(logins: _Logins, found: defaultdict[str, list[Trouble]]) -> None:
    """A node between which and all others nothing works is not excused: where everything fails
    (no key is known anywhere), the others' troubles explain its own, but nobody saw it work."""
    failed: dict[str, list[tuple[str, str]]] = defaultdict(list)
    works = {name for edge, result in logins.items() if result == _WORKED for name in edge}
    for edge in logins:
        failed[edge[0]].append(edge)
    for source, edges in failed.items():
        if source not in works and source not in found:
            cause, said = logins[edges[0]]
            peers = tuple(target for _, target in edges)
            found[source].append(Trouble("source", peers, len(peers), cause, said))


def _answers(name: str, seen: Mapping[str, Peers], logins: _Logins) -> dict[str, str]:
    """What pdsh on this node brought from each of the peers that ssh reaches; "": nothing."""
    run = seen[name].pdsh if name in seen else None
    if run is None:
        return {}
    asked = [peer for peer in run.targets if logins.get((name, peer), _WORKED) == _WORKED]
    texts = {answer.label: answer.text for answer in run.answers if answer.text}
    # pdsh leaves out the domain when all names have the same.
    return {peer: texts.get(peer, texts.get(peer.partition(".")[0], "")) for peer in asked}


def _blamed_for_pdsh(seen: Mapping[str, Peers], logins: _Logins) -> dict[str, tuple[str, ...]]:
    """The nodes that answer ssh and not the pdsh of several others, or call themselves something
    else there, with these others: a node must not fail all that ask it. Of a node that gets a
    good answer from nobody, nothing is known of the others."""
    attempts = []
    for source in seen:
        good = {
            peer: bool(text) and (peer not in seen or _short(text) == _short(seen[peer].host))
            for peer, text in _answers(source, seen, logins).items()
        }
        if any(good.values()):
            attempts += [Attempt(source, p, "pdsh", ok) for p, ok in good.items()]
    return {
        one.node: one.peers
        for one in attribute(attempts)
        if one.kind == TARGET and len(one.peers) > 1
    }


def _pdsh(
    name: str,
    seen: Mapping[str, Peers],
    logins: _Logins,
    blamed: Mapping[str, tuple[str, ...]],
) -> Reach:
    """The part of a node's Reach that pdsh shows, of the peers that ssh reaches.

    blamed: node -> those whose pdsh it does not answer; these are excused
    """
    run = seen[name].pdsh if name in seen else None
    if run is None:
        return Reach()
    everyone = _answers(name, seen, logins)
    answers = {p: text for p, text in everyone.items() if name not in blamed.get(p, ())}
    asked = list(answers)
    by_answer: dict[str, list[str]] = defaultdict(list)
    for peer, answer in answers.items():
        if answer:
            by_answer[answer].append(peer)
    same = tuple(
        Same(answer, tuple(names))
        for answer, names in by_answer.items()
        if len(names) > 1 and not _one_host(names, seen)
    )
    missing = tuple(Missing(peer, _line(run, peer)) for peer in asked if not answers[peer])
    lines = [line for line in run.messages.splitlines() if line.strip()]
    nothing = lines[0].strip() if lines and not run.answers else ""
    return Reach(
        pdsh_targets=len(asked),
        distinct=len(by_answer),
        missing=missing,
        same=same,
        pdsh_said=nothing,
    )


def _one_host(names: Iterable[str], seen: Mapping[str, Peers]) -> bool:
    """Whether these nodes call themselves the same: that is their own trouble."""
    hosts = {_short(seen[name].host) if name in seen else name for name in names}
    return len(hosts) == 1


def _line(run: PdshRun, peer: str) -> str:
    """What pdsh said of this peer."""
    marks = (f"{peer}: ", f"{peer.partition('.')[0]}: ")
    for line in run.messages.splitlines():
        for mark in marks:
            _, found, rest = line.partition(mark)
            if found and rest.strip():
                return rest.strip()
    return "timed out" if run.rc is None else ""

"""The rounds between the nodes: their pattern, their results, and the causes of failures. Pure.

Ports that were not ordered, invalid addresses and impossible times in a node's answer are dropped.
"""

from __future__ import annotations

import ipaddress
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType

from nodeready.agent.asking import SshPeer
from nodeready.agent.proofs import mesh as program
from nodeready.runs.ready import reach
from nodeready.runs.ready.reach import BOTH, PAIR, SOURCE, TARGET, ReachAttempt, ReachFinding
from nodeready.subjects.proof.facts import Blocked, Mesh

# --- Why a connection failed, in words, from what the connecting node saw.

_DROPPED = "timed out: dropped"
_CAUSES = {
    # Our listener is there: its kernel did not refuse the connection.
    program.REFUSED: "refused: rejected on the way",
    program.TIMEOUT: _DROPPED,
    program.FOREIGN: "another program answers",
    program.SILENT: "connected, then silence: another program answers, or the node hangs",
}


def address(text: str) -> str:
    """An address in its usual form; "" for an invalid one."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


def port_cause(attempt: program.Try, skipped: bool) -> str:
    """Why it failed. skipped: the first ports timed out, so that others were not tried"""
    if skipped and attempt.outcome in (program.TIMEOUT, program.SKIPPED):
        return f"{_DROPPED}; the first {program.MAX_TIMEOUTS} ports stand for all"
    if attempt.outcome == program.UNREACHABLE:
        return f"unreachable: {attempt.error}"
    return _CAUSES.get(attempt.outcome) or attempt.error or "failed"


def known_owners(
    inventory_addresses: Mapping[str, str], peers: Mapping[str, SshPeer]
) -> dict[str, str]:
    """Address -> its node, by the inventory and by this run's connections; "": two nodes have it,
    because they are one machine.
    """
    owners = {address(text): name for text, name in inventory_addresses.items()}
    connected: dict[str, str] = {}
    for name, peer in peers.items():
        text = address(peer.address)
        connected[text] = "" if text in connected else name
    owners.update(connected)
    owners.pop("", None)
    return owners


_MAX_NAMED = 3  # maximum named nodes that claim one address


class Owners:
    """The owner of each address. An unknown address has none where several nodes claim it, such as
    a container bridge's.
    known_owners: address -> its node by this run's connections and the inventory. No other node
                  can claim it.
    """

    def __init__(
        self, claimed: Mapping[str, Iterable[str]], known_owners: Mapping[str, str]
    ) -> None:
        self._known = known_owners
        # Node -> the addresses that it claims, in their usual form, each once.
        self.claimed = {
            name: tuple(dict.fromkeys(filter(None, map(address, addresses))))
            for name, addresses in claimed.items()
        }
        self._claimers: dict[str, list[str]] = {}
        for name, addresses in self.claimed.items():
            for text in addresses:
                self._claimers.setdefault(text, []).append(name)

    def addresses_of(self, name: str) -> tuple[str, ...]:
        """The addresses that the node claims and owns."""
        return tuple(text for text in self.claimed[name] if self.of(text) == name)

    def of(self, address: str) -> str:
        """The node that has the address; "": no node, or several claim it."""
        claimers = self._claimers.get(address, [])
        if (owner := self._known.get(address)) is not None:
            return owner if owner in claimers else ""
        return claimers[0] if len(claimers) == 1 else ""

    def claimers(self, address: str) -> str:
        """The nodes that claim it, in words."""
        names = self._claimers.get(address, [])
        suffix = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
        return " and ".join(filter(None, (", ".join(names[:_MAX_NAMED]), *suffix)))


def name_cause(
    owners: Owners, source: str, target: str, resolved: Iterable[str], error: str
) -> str:
    """Why the target's name, as the source resolves it, does not lead to the target."""
    addresses = [text for text in map(address, resolved) if text]
    if not addresses:
        return f"{target} does not resolve ({error or 'no address'})"
    first = addresses[0]
    owner, claimers = owners.of(first), owners.claimers(first)
    if ipaddress.ip_address(first).is_loopback:
        reason = "which is loopback"
    elif owner == source:
        reason = f"which is {source}'s own"
    elif owner:
        reason = f"which is {owner}'s"
    elif "," in claimers:
        reason = f"which several nodes have ({claimers})"
    else:
        reason = f"which is not {target}'s"
    return f"{target} resolves to {first}, {reason}"


def own_name_cause(listening: program.Listening) -> str:
    """Why a node's host name does not lead to the node on the node itself; "": it does.

    gloo binds to the first bindable address of the name, which may be loopback, and else to
    loopback (PyTorch, ProcessGroupGloo::createDefaultDevice).
    """
    addresses = [text for text in map(address, listening.resolved) if text]
    own_addresses = {*map(address, listening.addresses)}
    loopback = {text for text in addresses if ipaddress.ip_address(text).is_loopback}
    first = next((text for text in addresses if text in own_addresses | loopback), "")
    if not listening.host or first in own_addresses:
        return ""
    if not addresses:
        return f"{listening.host} does not resolve ({listening.error or 'no address'})"
    reason = "which is loopback" if first else "which is not its own"
    return f"{listening.host} resolves to {first or addresses[0]}, {reason}"


# --- The results of all rounds, and the mesh of each node.

MOST_PORTS = 32  # maximum of a range to try: each is a listener and a connection per pair

_Edge = tuple[str, str]
_Count = Counter[tuple[str, str]]  # counts by node and direction
#: A node, direction and port that are not tried again; None: no port, because the name is wrong.
_Skip = tuple[str, str, int | None]


def chosen_ports(first: int, last: int) -> tuple[int, ...]:
    """The ports of a range to try: all, or the first, the last and evenly between."""
    count = last - first + 1
    if count <= MOST_PORTS:
        return tuple(range(first, last + 1))
    return tuple(first + step * (count - 1) // (MOST_PORTS - 1) for step in range(MOST_PORTS))


@dataclass(frozen=True)
class _PairResult:
    passed: tuple[int, ...]
    failing: Mapping[int, str]  # port -> the cause
    name: str  # why the target's name is wrong; "": it is right
    host: str  # why the target's host name is wrong; "": it is right, or the same name


@dataclass
class _Handshakes:
    """The handshakes of one node's own connections, in ms."""

    all: array[float] = field(default_factory=lambda: array("f"))
    worst: float = 0.0
    peer: str = ""

    def add(self, ms: float, peer: str) -> None:
        # Impossible: a clock that jumped, or an invented time.
        if not math.isfinite(ms) or not 0 <= ms < 60_000:
            return
        self.all.append(ms)
        if ms >= self.worst:
            self.worst, self.peer = ms, peer


_CROWD = 1000  # strangers' connections to a node's listeners are reported above this number


def _adjacent(bad: Iterable[_Edge], edges: Iterable[_Edge]) -> set[_Edge]:
    nodes = {name for edge in bad for name in edge}
    return {edge for edge in edges if edge[0] in nodes or edge[1] in nodes}


class Rounds:
    """The results of the rounds so far.
    total:        the number of nodes that were ordered to take part
    listening:    node -> its first line, of those that take part
    known_owners: see `Owners`
    """

    def __init__(
        self,
        total: int,
        span: tuple[int, int],
        listening: Mapping[str, program.Listening],
        known_owners: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.total, self.span = total, span
        ports = chosen_ports(*span)
        self.ports = {
            name: tuple(port for port in ports if port in {*first_line.ports})
            for name, first_line in listening.items()
        }
        claimed = {name: first_line.addresses for name, first_line in listening.items()}
        self._owners = Owners(claimed, known_owners)
        self._listening = listening
        self.addresses = {name: self._owners.addresses_of(name) for name in listening}
        self.connections = 0
        self._round_count = 0
        self._accepted: dict[str, int] = {}
        self._pairs: dict[_Edge, _PairResult] = {}
        self._times: dict[str, _Handshakes] = {}
        self._skipped: set[_Skip] = set()
        self._has_new_failures = False

    def ports_to_try(self, source: str, target: str) -> tuple[int, ...]:
        """The ports of the target that this source has to try."""
        if {(source, SOURCE, None), (target, TARGET, None)} & self._skipped:
            return ()
        return tuple(
            port
            for port in self.ports[target]
            if not {(source, SOURCE, port), (target, TARGET, port)} & self._skipped
        )

    def add(
        self, source: str, target: str, ordered_ports: tuple[int, ...], answer: program.MeshRound
    ) -> None:
        failing: dict[int, str] = {}
        passed = []
        self._round_count = max(self._round_count, answer.number + 1)
        self._accepted[source] = max(self._accepted.get(source, 0), answer.accepted_count)
        times = self._times.setdefault(source, _Handshakes())
        self.connections += sum(attempt.outcome != program.SKIPPED for attempt in answer.tries)
        skipped = any(attempt.outcome == program.SKIPPED for attempt in answer.tries)
        for attempt in answer.tries:
            if attempt.port not in ordered_ports:
                continue
            if attempt.outcome == program.OK:
                passed.append(attempt.port)
                times.add(attempt.ms, target)
            else:
                failing[attempt.port] = port_cause(attempt, skipped)
        # Nearly all pairs have equal ports: one object saves memory.
        ports = self.ports[target] if tuple(passed) == self.ports[target] else tuple(passed)
        name = host = ""
        if answer.address not in self.addresses[target]:
            name = name_cause(self._owners, source, target, answer.resolved, answer.error)
        host_name, resolved = self._listening[target].host, answer.host_resolved
        is_reached = not {*map(address, resolved)}.isdisjoint(self.addresses[target])
        if host_name not in ("", target) and not is_reached:
            host = name_cause(self._owners, source, host_name, resolved, answer.host_error)
        self._pairs[source, target] = _PairResult(ports, failing, name, host)
        self._has_new_failures = self._has_new_failures or bool(failing or name)

    def _crowd(self, name: str) -> int:
        """The connections to a node's listeners, if most came from strangers; else 0.

        A user of that node can connect in a loop, so that no peer gets through: no node is the
        cause of such a failure.
        """
        accepted = self._accepted.get(name, 0)
        expected = self._round_count * len(self.ports.get(name, ()))
        return accepted if accepted > _CROWD + 4 * expected else 0

    def drop(self, name: str) -> None:
        """Remove a lost node: failures to reach it prove nothing."""
        self._pairs = {edge: pair for edge, pair in self._pairs.items() if name not in edge}
        self.ports.pop(name, None)

    def skip_explained(self) -> None:
        """Skip from now on the attempts that a finding explains: each would cost a time-out."""
        if not self._has_new_failures:
            return
        self._has_new_failures = False
        for finding, ports in self._findings():
            possible = self.ports[finding.node]
            if finding.kind != TARGET:
                possible = tuple(sorted({p for peer in finding.peers for p in self.ports[peer]}))
            # Three peers are evidence. Two are where every port fails, which costs the most time.
            if finding.kind != PAIR and (len(finding.peers) > 2 or ports in ((), possible)):
                directions = (SOURCE, TARGET) if finding.kind == BOTH else (finding.kind,)
                self._skipped |= {*product((finding.node,), directions, ports or (None,))}

    def opposite_pairs(self) -> dict[str, str]:
        """Source -> target of a round that tries the opposite direction of pairs that fail.

        A node is a source once and a target once; pairs that do not fit are left out.
        """
        pairs: dict[str, str] = {}
        for finding, ports in self._findings():
            source, target = finding.peers[0], finding.node
            is_untried = finding.kind == PAIR and ports and finding.back is None
            is_free = source not in pairs and target not in pairs.values()
            if is_untried and is_free and self.ports_to_try(source, target):
                pairs[source] = target
        return pairs

    def _columns(self) -> Iterator[tuple[tuple[int, ...], dict[_Edge, str], set[_Edge]]]:
        """Groups of ports with the same result: the ports, the failed edges with their causes, and
        the passed edges of nodes with a failed edge. The names' group is first, without a port.
        """
        if bad := {edge: pair.name for edge, pair in self._pairs.items() if pair.name}:
            yield (), bad, _adjacent(bad, self._pairs.keys() - bad.keys())
        failing: dict[int, dict[_Edge, str]] = {}
        for edge, pair in self._pairs.items():
            if pair.failing and self._crowd(edge[1]):
                continue
            for port, cause in pair.failing.items():
                failing.setdefault(port, {})[edge] = cause
        by_result: dict[object, tuple[list[int], dict[_Edge, str], set[_Edge]]] = {}
        for port, bad in sorted(failing.items()):
            passed = (edge for edge, pair in self._pairs.items() if port in pair.passed)
            good = _adjacent(bad, passed)
            key = (frozenset(bad.items()), frozenset(good))
            by_result.setdefault(key, ([], bad, good))[0].append(port)
        for ports, bad, good in by_result.values():
            yield tuple(ports), bad, good

    def _findings(self) -> list[tuple[ReachFinding, tuple[int, ...]]]:
        attempts: list[ReachAttempt] = []
        columns: dict[str, tuple[int, ...]] = {}
        for number, (ports, bad, good) in enumerate(self._columns()):
            # The order of the texts is the order of the columns.
            key = f"{number:02}"
            columns[key] = ports
            attempts += [ReachAttempt(*edge, key, False, cause) for edge, cause in bad.items()]
            attempts += [ReachAttempt(*edge, key, True) for edge in good]
        return [
            (finding, tuple(sorted(port for key in finding.channels for port in columns[key])))
            for finding in reach.attribute(attempts)
        ]

    def _host_names(self) -> list[ReachFinding]:
        bad = {edge: pair.host for edge, pair in self._pairs.items() if pair.host}
        attempts = [ReachAttempt(*edge, "", False, cause) for edge, cause in bad.items()]
        good = _adjacent(bad, self._pairs.keys() - bad.keys())
        return reach.attribute([*attempts, *(ReachAttempt(*edge, "", True) for edge in good)])

    def meshes(self) -> dict[str, Mesh]:
        """The Mesh of each node that took part to the end."""
        blocked = _blocked_by_node(self._findings())
        names = _blocked_by_node((finding, ()) for finding in self._host_names())
        tried, reached = _Count(), _Count()
        for (source, target), pair in self._pairs.items():
            if pair.passed or pair.failing or pair.name:
                tried.update([(source, SOURCE), (target, TARGET)])
            if pair.passed and not pair.failing:
                reached.update([(source, SOURCE), (target, TARGET)])
        meshes, ordered = dict[str, Mesh](), chosen_ports(*self.span)
        for name, listening in self.ports.items():
            times = self._times.get(name, _Handshakes())
            median = worst = None
            if times.all:
                median, worst = round(statistics.median(times.all), 3), round(times.worst, 3)
            missed = any(pair.failing for (_, to), pair in self._pairs.items() if to == name)
            first_line = self._listening[name]
            busy = tuple(busy for busy in first_line.busy if busy.port in ordered)
            meshes[name] = Mesh(
                self.total, *self.span, listening, busy,
                to=tried[name, SOURCE], by=tried[name, TARGET],
                reached=reached[name, SOURCE], reached_by=reached[name, TARGET],
                blocked=tuple(blocked.get(name, ())), names=tuple(names.get(name, ())),
                median_ms=median, worst_ms=worst, worst_peer=times.peer,
                crowd=self._crowd(name) if missed else 0, own_name=own_name_cause(first_line),
            )  # fmt: skip
        return meshes


def _blocked_by_node(
    findings: Iterable[tuple[ReachFinding, tuple[int, ...]]],
) -> dict[str, list[Blocked]]:
    blocked: dict[str, list[Blocked]] = {}
    for finding, ports in findings:
        blocked.setdefault(finding.node, []).append(
            Blocked(finding.kind, ports, finding.peers, finding.tried, finding.cause, finding.back)
        )
    return blocked


# --- The pattern: which node tries which other node in which round.
#
# A round is an offset into the list of the nodes: node ``i`` goes to node ``i + offset``, around
# the end of the list. So in each round every node opens one connection and accepts one, and no
# node gets the connections of all nodes at once.


def ring_and_skips(count: int) -> tuple[int, ...]:
    """The offsets 1, 2, 4, … below ``count``: the ring, and skips that double.

    Every node tries log2(count) peers and is tried by as many, which distinguishes an unreachable
    node from a failing pair: with 10,000 nodes, 14 connections each instead of 9,999. The peers
    are neighbours, in other racks and at other switches.

    >>> ring_and_skips(6)
    (1, 2, 4)
    """
    return tuple(1 << power for power in range(max(0, count - 1).bit_length()))


def full(count: int) -> tuple[int, ...]:
    """The offsets 1 … ``count`` - 1: every node tries every other node."""
    return tuple(range(1, count))


def rounds(names: Sequence[str], offsets: Iterable[int]) -> list[list[tuple[str, str]]]:
    """For each offset the pairs (source, target); each node is a source once and a target once.

    Offsets with the pairs of an earlier offset, or of each node with itself, are left out. Raises
    ValueError for a duplicate name.

    >>> rounds(["a", "b", "c"], [1, 2])
    [[('a', 'b'), ('b', 'c'), ('c', 'a')], [('a', 'c'), ('b', 'a'), ('c', 'b')]]
    """
    count = len(names)
    if len(set(names)) != count:
        raise ValueError("a name is there twice")
    twice = [*names, *names]
    distinct = dict.fromkeys(offset % count for offset in offsets if count and offset % count)
    return [list(zip(names, twice[offset : offset + count], strict=True)) for offset in distinct]


def peers_of(names: Sequence[str], offsets: Iterable[int]) -> dict[str, tuple[str, ...]]:
    """For each node the peers that it tries, in the order of the rounds."""
    peers: dict[str, list[str]] = {name: [] for name in names}
    for pairs in rounds(names, offsets):
        for source, target in pairs:
            peers[source].append(target)
    return {name: tuple(targets) for name, targets in peers.items()}

"""The rounds between the nodes: who tries whom, which ports fail, and who is to blame. Pure.

A node's answers are data: ports that nobody asked for, addresses that are none and times that no
clock shows are dropped.
"""

from __future__ import annotations

import ipaddress
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

from nodeready.node.proofs.mesh import (
    FOREIGN,
    IN_A_ROW,
    OK,
    REFUSED,
    SILENT,
    SKIPPED,
    TIMEOUT,
    UNREACHABLE,
    Listening,
    MeshRound,
    Try,
)
from nodeready.ready import localize
from nodeready.ready.localize import BOTH, PAIR, SOURCE, TARGET, Attempt
from nodeready.subjects.proof.facts import Blocked, Mesh
from nodeready.transport.base import Met

# --- Why a connection failed, in words, from what the connecting node saw.

_DROPPED = "timed out: dropped"
_CAUSES = {
    # Our listener is there: it was not the kernel behind it that refused.
    REFUSED: "refused: rejected on the way",
    TIMEOUT: _DROPPED,
    FOREIGN: "another program answers",
    SILENT: "connected, then silence: another program answers, or the node hangs",
}


def address(text: str) -> str:
    """An address as we write it; "" for what is none."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


def port_cause(one: Try, skipped: bool) -> str:
    """Why this connection was none.

    skipped: others were not tried because the first ones timed out; those stand for all
    """
    if skipped and one.outcome in (TIMEOUT, SKIPPED):
        return f"{_DROPPED}; the first {IN_A_ROW} ports stand for all"
    if one.outcome == UNREACHABLE:
        return f"unreachable: {one.said}"
    return _CAUSES.get(one.outcome) or one.said or "failed"


def known_owners(given: Mapping[str, str], met: Mapping[str, Met]) -> dict[str, str]:
    """Address -> the node that has it, by the inventory, or where this run's connection found the
    node; "": two of its names are one machine's.

    given: address -> the node to which the inventory gives it
    met:   what the connections saw
    """
    found = {address(one): name for one, name in given.items()}
    seen: dict[str, str] = {}
    for name, one in met.items():
        where = address(one.address)
        seen[where] = name if where not in seen else ""
    found.update(seen)
    found.pop("", None)
    return found


def claimed_addresses(claimed: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """Node -> the addresses that it says are its own, as we write them, each once."""
    return {
        name: tuple(dict.fromkeys(filter(None, map(address, own))))
        for name, own in claimed.items()
    }


#: Of the nodes that claim one address, so many are named.
_NAMED = 3


class Owners:
    """Whose each address is.

    claimed: node -> the addresses that it says are its own
    known:   address -> the node at which this run's connection, or the inventory, has it. What
             another node says of such an address does not count.

    Of what several nodes claim and nobody else knows (a container bridge's), nobody is the owner.
    """

    def __init__(self, claimed: Mapping[str, Sequence[str]], known: Mapping[str, str]) -> None:
        self._known = known
        self._claimers: dict[str, list[str]] = {}
        for name, own in claimed.items():
            for one in own:
                self._claimers.setdefault(one, []).append(name)

    def of(self, address: str) -> str:
        """The node that has the address; "": none, or several say that they do."""
        claimers = self._claimers.get(address, [])
        known = self._known.get(address)
        if known is not None:
            return known if known in claimers else ""
        return claimers[0] if len(claimers) == 1 else ""

    def claimers(self, address: str) -> str:
        """The nodes that say that they have it, in words."""
        names = self._claimers.get(address, [])
        more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
        return " and ".join(filter(None, (", ".join(names[:_NAMED]), *more)))


class Resolved(Protocol):
    """What a node says of the way to a target: `Round`, and the smoke test's `Paired`."""

    @property
    def target(self) -> str: ...
    @property
    def resolved(self) -> tuple[str, ...]: ...
    @property
    def error(self) -> str: ...


def name_cause(source: str, seen: Resolved, owners: Owners) -> str:
    """Why the target's name led to no address of its own."""
    target = seen.target
    addresses = [one for one in map(address, seen.resolved) if one]
    if not addresses:
        return f"{target} does not resolve ({seen.error or 'no address'})"
    first = addresses[0]
    whose, claimers = owners.of(first), owners.claimers(first)
    if ipaddress.ip_address(first).is_loopback:
        why = "which is loopback"
    elif whose == source:
        why = f"which is {source}'s own"
    elif whose:
        why = f"which is {whose}'s"
    elif "," in claimers:
        why = f"which several nodes have ({claimers})"
    else:
        why = f"which is not {target}'s"
    return f"{target} resolves to {first}, {why}"


def own_name_cause(seen: Listening) -> str:
    """Why a node's host name leads to no address of its own on the node itself.

    gloo binds to the first address of the name that can be bound, loopback among them, and to
    loopback where there is none (PyTorch, ProcessGroupGloo::createDefaultDevice).
    """
    addresses = [one for one in map(address, seen.resolved) if one]
    own = {*map(address, seen.addresses)}
    loopback = {one for one in addresses if ipaddress.ip_address(one).is_loopback}
    first = next((one for one in addresses if one in own | loopback), "")
    if not seen.host or first in own:
        return ""
    if not addresses:
        return f"{seen.host} does not resolve ({seen.error or 'no address'})"
    why = "which is loopback" if first else "which is not its own"
    return f"{seen.host} resolves to {first or addresses[0]}, {why}"


# --- The results of all rounds, and what follows for each node.

#: More ports of a range than this are not tried: each is a listener and a connection per pair.
MOST_PORTS = 32

_Edge = tuple[str, str]
#: By a node and its direction.
_Count = Counter[tuple[str, str]]
#: What is not asked for any more: node, direction, port; None: the name already led astray.
_Cut = tuple[str, str, int | None]


def chosen_ports(first: int, last: int) -> tuple[int, ...]:
    """The ports of a range that are tried: all, or the first, the last and evenly between."""
    count = last - first + 1
    if count <= MOST_PORTS:
        return tuple(range(first, last + 1))
    return tuple(first + step * (count - 1) // (MOST_PORTS - 1) for step in range(MOST_PORTS))


@dataclass(frozen=True)
class _Pair:
    """One node's attempt at another. name: why the target's name led astray; "": it did not;
    host: why its host name does; "": it does not, or it is that name"""

    passed: tuple[int, ...]
    failing: Mapping[int, str]
    name: str
    host: str


@dataclass
class _Times:
    """The handshakes of one node's own connections, in ms."""

    all: array[float] = field(default_factory=lambda: array("f"))
    worst: float = 0.0
    peer: str = ""

    def add(self, ms: float, peer: str) -> None:
        # A clock that jumps, or a node that makes it up.
        if not math.isfinite(ms) or not 0 <= ms < 60_000:
            return
        self.all.append(ms)
        if ms >= self.worst:
            self.worst, self.peer = ms, peer


#: Connections to a node's listeners that are not worth a word, beside those of its peers.
_CROWD = 1000


def _beside(bad: Iterable[_Edge], edges: Iterable[_Edge]) -> set[_Edge]:
    """The edges that share a node with a bad edge."""
    nodes = {name for edge in bad for name in edge}
    return {edge for edge in edges if edge[0] in nodes or edge[1] in nodes}


class Rounds:
    """The results of the rounds so far.

    total:     how many nodes were to take part
    listening: node -> its first line, of those that take part
    known:     address -> the node that has it, whatever the nodes say; see `Owners`
    """

    def __init__(
        self,
        total: int,
        span: tuple[int, int],
        listening: Mapping[str, Listening],
        known: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.total, self.span = total, span
        wanted = chosen_ports(*span)
        self.ports = {
            name: tuple(port for port in wanted if port in {*one.ports})
            for name, one in listening.items()
        }
        self.busy = {
            name: tuple(busy for busy in one.busy if busy.port in wanted)
            for name, one in listening.items()
        }
        claimed = claimed_addresses({name: one.addresses for name, one in listening.items()})
        self._owners = Owners(claimed, known)
        self._listening = listening
        self.addresses = {
            name: tuple(one for one in own if self._owners.of(one) == name)
            for name, own in claimed.items()
        }
        self.connections = 0
        self._rounds = 0
        self._came: dict[str, int] = {}
        self._pairs: dict[_Edge, _Pair] = {}
        self._times: dict[str, _Times] = {}
        self._cut: set[_Cut] = set()
        self._fresh = False

    def to_ask(self, source: str, target: str) -> tuple[int, ...]:
        """The ports of the target that are worth a connection from here."""
        if {(source, SOURCE, None), (target, TARGET, None)} & self._cut:
            return ()
        return tuple(
            port
            for port in self.ports[target]
            if (source, SOURCE, port) not in self._cut and (target, TARGET, port) not in self._cut
        )

    def add(self, source: str, target: str, asked: tuple[int, ...], seen: MeshRound) -> None:
        """Add the source's account of its attempt at the target."""
        failing: dict[int, str] = {}
        passed = []
        self._rounds = max(self._rounds, seen.number + 1)
        self._came[source] = max(self._came.get(source, 0), seen.came)
        times = self._times.setdefault(source, _Times())
        self.connections += sum(one.outcome != SKIPPED for one in seen.tries)
        skipped = any(one.outcome == SKIPPED for one in seen.tries)
        for one in seen.tries:
            if one.port not in asked:
                continue
            if one.outcome == OK:
                passed.append(one.port)
                times.add(one.ms, target)
            else:
                failing[one.port] = port_cause(one, skipped)
        # Equal on nearly all pairs: kept once.
        ports = self.ports[target] if tuple(passed) == self.ports[target] else tuple(passed)
        name = host = ""
        if seen.address not in self.addresses[target]:
            name = name_cause(source, seen, self._owners)
        own = self._listening[target].host
        led = [*map(address, seen.host_resolved)]
        if own not in ("", target) and not {*led} & {*self.addresses[target]}:
            by_host = replace(seen, target=own, resolved=seen.host_resolved, error=seen.host_error)
            host = name_cause(source, by_host, self._owners)
        self._pairs[source, target] = _Pair(ports, failing, name, host)
        self._fresh = self._fresh or bool(failing or name)

    def _crowd(self, name: str) -> int:
        """Connections that came to a node's listeners, when most were none of ours; else 0.

        Any user of that node can connect to them in a loop, so that no peer comes through: such a
        failure is nobody's but that user's.
        """
        came = self._came.get(name, 0)
        ours = self._rounds * len(self.ports.get(name, ()))
        return came if came > _CROWD + 4 * ours else 0

    def drop(self, name: str) -> None:
        """Forget a node that is gone: failures to reach it prove nothing."""
        self._pairs = {edge: pair for edge, pair in self._pairs.items() if name not in edge}
        self.ports.pop(name, None)

    def cut(self) -> None:
        """Skip from now on what a node is to blame for: each attempt would cost a time-out."""
        if not self._fresh:
            return
        self._fresh = False
        for found, ports in self._findings():
            # Three peers are evidence; where every port fails, each more costs most: two.
            if found.kind != PAIR and (len(found.peers) > 2 or ports in ((), self._all(found))):
                ways = (SOURCE, TARGET) if found.kind == BOTH else (found.kind,)
                self._cut |= {(found.node, way, p) for way in ways for p in ports or (None,)}

    def ways_back(self) -> dict[str, str]:
        """Source -> target of a round that tells for pairs that fail whether the way back works.

        Nobody is in it twice in one direction; what does not fit stays untold.
        """
        back: dict[str, str] = {}
        for found, ports in self._findings():
            source, target = found.peers[0], found.node
            untold = found.kind == PAIR and ports and found.back is None
            free = source not in back and target not in back.values()
            if untold and free and self.to_ask(source, target):
                back[source] = target
        return back

    def _all(self, found: localize.Finding) -> tuple[int, ...]:
        """The ports that could be tried in this direction."""
        if found.kind == TARGET:
            return self.ports[found.node]
        return tuple(sorted({port for peer in found.peers for port in self.ports[peer]}))

    def _columns(self) -> Iterator[tuple[tuple[int, ...], dict[_Edge, str], set[_Edge]]]:
        """Ports on which the same failed: they, what failed with its cause, and what passed with
        the nodes of which something failed: the others are not to blame. The name comes first,
        as no port."""
        bad = {edge: pair.name for edge, pair in self._pairs.items() if pair.name}
        if bad:
            yield (), bad, _beside(bad, self._pairs.keys() - bad.keys())
        failing: dict[int, dict[_Edge, str]] = {}
        for edge, pair in self._pairs.items():
            if pair.failing and self._crowd(edge[1]):
                continue
            for port, cause in pair.failing.items():
                failing.setdefault(port, {})[edge] = cause
        alike: dict[object, tuple[list[int], dict[_Edge, str], set[_Edge]]] = {}
        for port, bad in sorted(failing.items()):
            passed = (edge for edge, pair in self._pairs.items() if port in pair.passed)
            good = _beside(bad, passed)
            key = (frozenset(bad.items()), frozenset(good))
            alike.setdefault(key, ([], bad, good))[0].append(port)
        for ports, bad, good in alike.values():
            yield tuple(ports), bad, good

    def _findings(self) -> list[tuple[localize.Finding, tuple[int, ...]]]:
        """Who is to blame for what, each with its ports."""
        attempts: list[Attempt] = []
        columns: dict[str, tuple[int, ...]] = {}
        for number, (ports, bad, good) in enumerate(self._columns()):
            # In the order of the numbers as text: blame tells them in that order.
            what = f"{number:02}"
            columns[what] = ports
            attempts += [Attempt(*edge, what, False, cause) for edge, cause in bad.items()]
            attempts += [Attempt(*edge, what, True) for edge in good]
        return [
            (found, tuple(sorted(port for what in found.what for port in columns[what])))
            for found in localize.attribute(attempts)
        ]

    def _host_names(self) -> list[localize.Finding]:
        """Who is to blame for host names that lead astray."""
        bad = {edge: pair.host for edge, pair in self._pairs.items() if pair.host}
        attempts = [Attempt(*edge, "", False, cause) for edge, cause in bad.items()]
        good = _beside(bad, self._pairs.keys() - bad.keys())
        return localize.attribute([*attempts, *(Attempt(*edge, "", True) for edge in good)])

    def meshes(self) -> dict[str, Mesh]:
        """What is to be said of each node that took part to the end."""
        blocked: dict[str, list[Blocked]] = {}
        for found, ports in self._findings():
            blocked.setdefault(found.node, []).append(
                Blocked(found.kind, ports, found.peers, found.tried, found.cause, found.back)
            )
        names: dict[str, list[Blocked]] = {}
        for found in self._host_names():
            names.setdefault(found.node, []).append(
                Blocked(found.kind, (), found.peers, found.tried, found.cause, found.back)
            )
        tried, reached = _Count(), _Count()
        for (source, target), pair in self._pairs.items():
            if pair.passed or pair.failing or pair.name:
                tried.update([(source, SOURCE), (target, TARGET)])
            if pair.passed and not pair.failing:
                reached.update([(source, SOURCE), (target, TARGET)])
        return {
            name: replace(
                self._mesh(name, tried, reached, tuple(blocked.get(name, ()))),
                own_name=own_name_cause(self._listening[name]),
                names=tuple(names.get(name, ())),
            )
            for name in self.ports
        }

    def _mesh(
        self, name: str, tried: _Count, reached: _Count, blocked: tuple[Blocked, ...]
    ) -> Mesh:
        times = self._times.get(name)
        median = worst = None
        if times is not None and times.all:
            median, worst = round(statistics.median(times.all), 3), round(times.worst, 3)
        missed = any(pair.failing for (_, to), pair in self._pairs.items() if to == name)
        return Mesh(
            nodes=self.total,
            first=self.span[0],
            last=self.span[1],
            listening=self.ports[name],
            busy=self.busy[name],
            to=tried[name, SOURCE],
            by=tried[name, TARGET],
            reached=reached[name, SOURCE],
            reached_by=reached[name, TARGET],
            blocked=blocked,
            median_ms=median,
            worst_ms=worst,
            worst_peer=times.peer if times and times.all else "",
            crowd=self._crowd(name) if missed else 0,
        )


# --- The pattern: which node tries which, in rounds in which every node has one of each kind.
#
# A round is an offset into the list of the nodes: node ``i`` goes to node ``i + offset``, around
# the end of the list. So in each round every node opens one connection and takes one, however many
# nodes there are: no node is the one that all others hammer.


def ring_and_skips(count: int) -> tuple[int, ...]:
    """The offsets 1, 2, 4, … below ``count``: the ring, and skips that double.

    Every node tries log2(count) others and is tried by as many, which tells a node that nobody
    reaches from a pair that fails, at 10,000 nodes with 14 connections each instead of 9,999; and
    neighbours, other racks and other switches are all among them.
    """
    return tuple(1 << power for power in range(max(0, count - 1).bit_length()))


def full(count: int) -> tuple[int, ...]:
    """The offsets 1 … ``count`` - 1: every node tries every other one."""
    return tuple(range(1, count))


def rounds(names: Sequence[str], offsets: Iterable[int]) -> list[list[tuple[str, str]]]:
    """For each offset the pairs (source, target), one of each per node.

    An offset that leads every node to itself, or where an earlier one led already, is left out:
    of two nodes there is one round. Raises ValueError when a name is there twice, for two nodes
    could not be told apart.
    """
    count = len(names)
    if len(set(names)) != count:
        raise ValueError("a name is there twice")
    turned = [*names, *names]
    different = dict.fromkeys(offset % count for offset in offsets if count and offset % count)
    return [list(zip(names, turned[offset : offset + count], strict=True)) for offset in different]


def peers_of(names: Sequence[str], offsets: Iterable[int]) -> dict[str, tuple[str, ...]]:
    """For each node the others that it tries, in the order of the rounds."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for pairs in rounds(names, offsets):
        for source, target in pairs:
            found[source].append(target)
    return {name: tuple(targets) for name, targets in found.items()}

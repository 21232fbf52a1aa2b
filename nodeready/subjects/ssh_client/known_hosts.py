"""The fleet's known_hosts: each node's lines, from the inventory and from what all nodes showed.

A node may claim its own names and addresses only, by these rules:

- A name of the inventory (the node's name, ``ssh_hostname``, ``ssh_names``) belongs to its node,
  whether this run observed the node or not. A name of two nodes belongs to no node.
- A host name that the node reports counts when it shares its first label with a name that the
  inventory gives to this node alone: ``gpu001`` may be ``gpu001.cluster``, and ``gpu001.cluster``
  is ``gpu001``. Where the inventory has a full name, only that name counts. Another node of the
  run must share the domain, or the inventory must name it: a node ``github`` is not
  ``github.com``. In a run with one node, the lines reach that node alone.
- Of a node's addresses, only the address of this run's connection counts. Another address could be
  a login node's or a gateway's: ``ssh_names`` lists the addresses of further interfaces.
- A node's keys count when the key with which its sshd answered this run is among them.
- Lines about a node that this run did not observe stay: a node keeps such lines of its block, and
  gets none from another node's block.
- A name of the policy's own lines cannot be claimed with another key.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from nodeready.core import own_files
from nodeready.core.base import grouped
from nodeready.subjects.ssh_client import facts

if TYPE_CHECKING:
    from nodeready.subjects.snapshot import Snapshot

#: Separates the nodes' lines from the policy's: a line below it goes when the policy drops it.
FURTHER = "# Further lines, from the policy:"

#: Maximum different large blocks that are fetched, the commonest first.
MAX_FETCHED = 4
#: Maximum nodes that are asked for the same block: a node may not answer.
MAX_ASKED = 3
#: Maximum different sets of lines about unobserved nodes that are kept, the commonest first.
#: Honest nodes have one, or two while a fleet changes.
MAX_KEPT = 8

_BEGIN, _END = own_files.BEGIN.decode(), own_files.END.decode()
#: The shell text that prints a node's block with its marks; it only reads.
READ_BLOCK = f"sed -n '/^{_BEGIN}$/,/^{_END}$/p' {facts.KNOWN_HOSTS}\n"


class Endpoint(NamedTuple):
    """Where a node's sshd is by the inventory, and what this run's connection to it saw."""

    address: str = ""  # ``ssh_hostname``; "": the node's name
    port: int = 22  # ``ssh_port``
    names: tuple[str, ...] = ()  # ``ssh_names``: further names and addresses of the node
    local: bool = False  # it is the control machine, whose names need no witness
    reached: str = ""  # the address at which this run's connection found the node; "": not known
    key: str = ""  # the host key with which sshd answered there, ``type base64``; "": not known


_NOWHERE = Endpoint()


class KnownHostsEntry(NamedTuple):
    """One line: its names (``host`` or ``[host]:port``), and its key, ``type base64``."""

    names: tuple[str, ...]
    key: str


def parse_line(line: str) -> KnownHostsEntry | None:
    """A line in the form that we write; None for any other form (hashed, marked, a pattern)."""
    names, _, key = line.partition(" ")
    words = tuple(names.split(","))
    if not key or facts.clean_key(key) != key:
        return None
    are_clean = all(
        name in (facts.clean_name(name), facts.clean_address(name)) for name in map(_bare, words)
    )
    return KnownHostsEntry(words, key) if are_clean else None


_WITH_PORT = re.compile(r"\[([^]]+)\]:([1-9]\d{0,4})")


def _bare(target: str) -> str:
    """The host of ``host`` or ``[host]:port``."""
    match = _WITH_PORT.fullmatch(target)
    return match[1] if match else target


def _clean(text: str) -> str:
    return facts.clean_name(text) or facts.clean_address(text)


class Names:
    """The names and addresses that an inventory gives to its nodes.

    owners:  name, address, ``[name]:port`` -> the node; "": several nodes have it
    of:      node -> the names and addresses that the inventory gives to this node alone
    domains: of the names that the inventory gives
    """

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self.owners: dict[str, str] = {}
        self.of: dict[str, set[str]] = {}
        self._labels: dict[str, str] = {}
        self._full: set[str] = set()
        self._ports = {node: endpoint.port for node, endpoint in endpoints.items()}
        for node, endpoint in endpoints.items():
            for target in _inventory_names(node, endpoint):
                self.owners[target] = "" if self.owners.get(target, node) != node else node
            for name in filter(None, map(facts.clean_name, (node, endpoint.address))):
                label = name.partition(".")[0]
                self._labels[label] = "" if self._labels.get(label, node) != node else node
                if label != name:
                    self._full.add(label)
        for target, node in self.owners.items():
            self.of.setdefault(node, set()).add(target)
        self.domains = {_domain(_bare(target)) for target in self.owners} - {""}

    def owner(self, target: str) -> str:
        """The node whose name this is; "": no node's, or several nodes'."""
        if target in self.owners:
            return self.owners[target]
        match = _WITH_PORT.fullmatch(target)
        name = facts.clean_name(match[1] if match else target)
        label = name.partition(".")[0]
        node = self._labels.get(label, "")
        if not node or (match and int(match[2]) != self._ports[node]):
            return ""
        return "" if name != label and label in self._full else node

    def claimed(self, node: str, name: str) -> set[str]:
        """The targets of a host name that the node reports; none where the name is not its own."""
        port = self._ports.get(node, 22)
        forms = {name} if port == 22 else {name, f"[{name}]:{port}"}
        return {target for target in forms if self.owner(target) == node}


def _domain(name: str) -> str:
    """The domain of a host name; "": it has none, or is an address."""
    return "" if facts.clean_address(name) else name.partition(".")[2]


def _inventory_names(node: str, endpoint: Endpoint) -> set[str]:
    name, address = _clean(node), _clean(endpoint.address)
    further = set(map(_clean, endpoint.names))
    if endpoint.port == 22:
        return {name, address, *further} - {""}
    # Behind a forwarded port, many nodes may share the address: it counts only with its port.
    plain = {name, *further} - {""}
    return plain | {f"[{target}]:{endpoint.port}" for target in {*plain, address} - {""}}


def _clients(snapshots: Mapping[str, Snapshot]) -> Iterator[tuple[str, facts.SshClient]]:
    for node, snapshot in snapshots.items():
        client = snapshot.subjects.get("ssh_client")
        if isinstance(client, facts.SshClient):
            yield node, client


class FleetHostKeys:
    """The host keys of the fleet, as a run observed them.

    snapshots: name in the inventory -> what that node showed
    extra:     the policy's own lines
    endpoints: every node of the inventory, observed or not

    A node whose connection saw another key than the node tells counts as not observed, like one
    whose keys could not be read.
    """

    def __init__(
        self,
        snapshots: Mapping[str, Snapshot],
        extra: Iterable[str] = (),
        endpoints: Mapping[str, Endpoint] | None = None,
    ) -> None:
        known_endpoints = {**dict.fromkeys(snapshots, _NOWHERE), **(endpoints or {})}
        self._names = Names(known_endpoints)
        self._further = [line for line in extra if line != FURTHER]
        self._reserved = _reserved(self._further)
        self._nodes = {
            node: client
            for node, client in _clients(snapshots)
            if (keys := client.identity.keys) and known_endpoints[node].key in ("", *keys)
        }
        #: Whether the inventory has nodes whose keys this run did not see.
        self.unseen = len(self._nodes) < len(known_endpoints)
        self._domains = self._known_domains()
        self._owners = self._owned(known_endpoints)
        targets = grouped((node, target) for target, node in self._owners.items())
        self._lines = {
            _line(names, key)
            for node, names in targets.items()
            for key in self._nodes[node].identity.keys
        }
        self._made: dict[frozenset[str], tuple[str, ...]] = {}

    def _known_domains(self) -> set[str]:
        counts = Counter[str]()
        for node, client in self._nodes.items():
            names = (name for name in client.identity.names if self._names.owner(name) == node)
            counts.update(set(map(_domain, names)))
        enough = min(2, len(self._nodes))
        common = {domain for domain, count in counts.items() if count >= enough}
        return {*self._names.domains, *common, ""}

    def _owned(self, endpoints: Mapping[str, Endpoint]) -> dict[str, str]:
        """Name -> the observed node that it belongs to."""
        owners = {target: node for node in self._nodes for target in self._names.of.get(node, ())}
        claims = grouped(
            (target, node)
            for node, client in self._nodes.items()
            for target in self._claimed_names(node, client, endpoints[node])
        )
        for target, nodes in claims.items():
            if target in self._names.owners:
                continue
            keys = self._nodes[nodes[0]].identity.keys
            if len(nodes) == 1 and self._may_have(target, keys):
                owners[target] = nodes[0]
        return owners

    def _claimed_names(self, node: str, client: facts.SshClient, endpoint: Endpoint) -> set[str]:
        identity, reached = client.identity, facts.clean_address(endpoint.reached)
        if endpoint.local:
            foreign = {n for n in identity.names if self._names.owner(n) not in ("", node)}
            return {*identity.names, *identity.addresses} - foreign
        names = (name for name in identity.names if _domain(name) in self._domains)
        targets = {target for name in names for target in self._names.claimed(node, name)}
        # Behind a forwarded port, another machine may have the address.
        if endpoint.port == 22 and reached in identity.addresses:
            targets.add(reached)
        return targets

    def _may_have(self, target: str, keys: Iterable[str]) -> bool:
        """Whether the policy's own lines leave the name to these keys."""
        reserved = self._reserved.get(target)
        return reserved is None or not reserved.isdisjoint(keys)

    def retained(self, block: Iterable[str]) -> frozenset[str]:
        """The lines of a node's block that stay: those about nodes not observed."""
        if not self.unseen:
            return frozenset()
        lines: set[str] = set()
        for line in itertools.takewhile(lambda line: line != FURTHER, block):
            if (entry := parse_line(line)) is None:
                continue
            belongs = {self._names.owner(name) for name in entry.names} - {""}
            if len(belongs) != 1 or belongs & self._nodes.keys():
                continue
            (node,) = belongs
            if names := [name for name in entry.names if self._stays(name, node, entry.key)]:
                lines.add(_line(names, entry.key))
        return frozenset(lines)

    def _stays(self, target: str, node: str, key: str) -> bool:
        """Whether a name in an old line is still that of the node, which was not observed."""
        if target in self._names.owners:
            return self._names.owners[target] == node
        if target in self._owners or not self._may_have(target, (key,)):
            return False
        return bool(facts.clean_address(_bare(target))) or self._names.owner(target) == node

    def lines(self, retained: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """The expected lines of a node, sorted; one object for all nodes that retain the same.

        retained: the lines of the node's block that stay, from `FleetHostKeys.retained`
        """
        if retained not in self._made:
            lines = self._lines | retained
            further = sorted({line for line in self._further if line not in lines})
            self._made[retained] = (*sorted(lines), *((FURTHER, *further) if further else ()))
        return self._made[retained]


def fleet_lines(
    snapshots: Mapping[str, Snapshot],
    extra: Iterable[str] = (),
    endpoints: Mapping[str, Endpoint] | None = None,
    block: Iterable[str] = (),
) -> tuple[str, ...]:
    """The known_hosts lines of a node that has this block now; see `FleetHostKeys`."""
    fleet = FleetHostKeys(snapshots, extra, endpoints)
    return fleet.lines(fleet.retained(block))


def lines_of_nodes(
    fleet: FleetHostKeys, snapshots: Mapping[str, Snapshot], blocks: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Node -> its expected lines.

    blocks: digest -> the lines of a block that was too large for the snapshot (see `unsent`)
    """
    # A node may claim any digest for a block that it did not send: hence `sent` in the key.
    kept_of: dict[tuple[bool, str], frozenset[str]] = {}
    retained_of: dict[str, frozenset[str]] = {}
    for name, client in _clients(snapshots):
        held = client.known_hosts
        key = held.sent, held.digest
        if key not in kept_of:
            lines = held.lines if held.sent else blocks.get(held.digest)
            kept_of[key] = fleet.retained(lines or ())
        retained_of[name] = kept_of[key]
    commonest = sorted(
        Counter(retained_of.values()).items(), key=lambda item: (-item[1], sorted(item[0]))
    )
    commonest_sets = {retained for retained, _ in commonest[:MAX_KEPT]}
    lines_of = {
        retained: fleet.lines(retained if retained in commonest_sets else frozenset())
        for retained in {*retained_of.values(), frozenset[str]()}
    }
    return {name: lines_of[retained_of.get(name, frozenset())] for name in snapshots}


def unsent(
    snapshots: Mapping[str, Snapshot], lines: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """Digest -> nodes, for the blocks that must be fetched before other lines may replace them.

    lines: the minimum that every node shall have

    A block must be fetched if it was too large for the snapshot and differs from the block of
    ``lines``: it may hold keys of nodes that this run did not see. READ_BLOCK prints it.
    """
    expected_digest = facts.block_digest("".join(f"{line}\n" for line in lines).encode())
    blocks = ((client.known_hosts, name) for name, client in _clients(snapshots))
    holders = grouped((block.digest, name) for block, name in blocks if not block.sent)
    for ignored in ("", expected_digest):
        holders.pop(ignored, None)
    commonest = sorted(holders.items(), key=lambda item: (-len(item[1]), item[0]))
    return {digest: tuple(nodes[:MAX_ASKED]) for digest, nodes in commonest[:MAX_FETCHED]}


def read_block(text: str, digest: str) -> tuple[str, ...]:
    """The lines of the block that READ_BLOCK printed. Raises ValueError for another digest."""
    inner = own_files.find_block(text.encode("utf-8", "surrogateescape"))
    if inner is None or facts.block_digest(inner) != digest:
        raise ValueError(f"{facts.KNOWN_HOSTS} changed since it was looked at")
    return tuple(inner.decode("utf-8", "surrogateescape").splitlines())


def _line(names: Iterable[str], key: str) -> str:
    # Host names before addresses; of each kind, forms with a port last.
    order = sorted(
        names, key=lambda name: (bool(facts.clean_address(_bare(name))), name[:1] == "[", name)
    )
    return f"{','.join(order)} {key}"


def _reserved(further: Iterable[str]) -> dict[str, set[str]]:
    """Name -> its keys in the policy's own lines."""
    reserved: dict[str, set[str]] = {}
    for line in further:
        if (entry := parse_line(line)) is not None:
            for name in entry.names:
                reserved.setdefault(name, set()).add(entry.key)
    return reserved

"""The variables that the nodes' facts suggest for a job's environment, each with its reason.

Pure: the snapshots of all nodes go in, and the addresses of the nodes
(`nodeready.fleet.inventory.host_data.addresses_of_nodes`).

NCCL_SOCKET_IFNAME  ``=eth1``: exactly this interface; without "=" it is a prefix, and eth1 also
                    means eth10 (NCCL user guide, environment variables)
GLOO_SOCKET_IFNAME  the same interface without "=": Gloo opens each name between commas (PyTorch,
                    ProcessGroupGloo)
NCCL_IB_HCA         the RDMA devices outside the management network: see `ib_hca`
OMPI_MCA_btl_tcp_if_include  the same interface, for Open MPI's messages over TCP
MASTER_ADDR         the address of the first node on that interface: rank 0 runs there
PDSH_RCMD_TYPE      ssh, where pdsh is installed: its own default may be rsh
MASTER_PORT         a port that is free on every node: see `choose`

With ``--debug`` also the variables that make the job debuggable: see
`environment.debug_variables`.

An implausible name of an interface or device in a node's answer is rejected.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, NamedTuple

from nodeready.core.base import Unknown
from nodeready.core.json_types import Name, Names, WholeSecond
from nodeready.core.outcome import NodeGaps
from nodeready.core.policy import Policy
from nodeready.core.result import ALONE, FleetFacts
from nodeready.core.text import join_ranges, range_text
from nodeready.fleet.inventory.nodeset import fold
from nodeready.subjects.nics.facts import Nics, peer_interfaces, socket_interface
from nodeready.subjects.pdsh.facts import Pdsh
from nodeready.subjects.ports import facts as ports_facts
from nodeready.subjects.ports.facts import Ports, Range, overlap, parse_ranges, without
from nodeready.subjects.rdma.facts import Rdma, hcas
from nodeready.subjects.snapshot import Snapshot

# --- NCCL_IB_HCA: the RDMA devices that NCCL should use.
#
# By default NCCL uses every active device, also those of the management network, and a job waits
# for the slowest. A name in NCCL_IB_HCA is a prefix: mlx5_1 also means mlx5_10. With "=" in front
# it is exact (NCCL's documentation, environment variables).


def ib_hca(
    rdma: Rdma, nics: Nics | None, fleet: FleetFacts = ALONE
) -> tuple[tuple[str, ...], str]:
    """The devices, and the reason. nics: None: devices of management may be among them"""
    return hcas(rdma, () if nics is None else _management(nics, fleet))


def hca_value(devices: tuple[str, ...]) -> str:
    """The value of NCCL_IB_HCA that means exactly these devices; "" for none."""
    return f"={','.join(devices)}" if devices else ""


def _management(nics: Nics, fleet: FleetFacts) -> set[str]:
    """The interfaces of routes to other nodes and by default, with those below (bonds' slaves)."""
    routed = {nics.default_interface, *peer_interfaces(nics, fleet)[:1]} - {None}
    members = {
        name
        for name, interface in nics.interfaces.items()
        if interface.master in routed or routed & {*interface.upper}
    }
    return {name for name in routed | members if name}


# --- MASTER_PORT: the first node of a job is not known yet, so the port must be free on all nodes.

_MAX_NOTES = 6  # maximum notes about ports that are not chosen

Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class PortChoice:
    port: int | None  # None: no port is free on all nodes
    reason: str  # why this port, or why none
    notes: tuple[str, ...]  # the nodes that exclude other ports, or may exclude this port later
    unknown: Mapping[str, str]  # node -> why its ports are not known


def _taken(observed: Ports, first: int, last: int) -> dict[str, Ranges]:
    """Reason -> the ports of the range that a job of any user cannot use on this node."""
    held: dict[int, str] = {}
    for socket in (*(observed.listeners or ()), *(observed.connections or ())):
        holder = f"{socket.process or 'a process'} of {socket.user or f'uid {socket.uid}'}"
        listens = socket.state == "listening"
        reason = f"{holder} listens" if listens else f"a connection of {holder}"
        if first <= socket.port <= last:
            held.setdefault(socket.port, reason)
    ports: dict[str, list[Range]] = {}
    for port, reason in held.items():
        ports.setdefault(reason, []).append((port, port))
    taken = {reason: tuple(join_ranges(numbers)) for reason, numbers in ports.items()}
    if observed.privileged_below > 0:
        taken["for root alone"] = overlap(((0, observed.privileged_below - 1),), first, last)
    if observed.firewall.verdict == "drop":
        dropped = parse_ranges(observed.firewall.ports) or ()
        taken["a rule of the packet filter drops it"] = overlap(dropped, first, last)
    return {reason: ranges for reason, ranges in taken.items() if ranges}


def _unseen(observed: Ports | Unknown, first: int, last: int) -> str:
    """Why the used ports of the range are not all known on this node; "": they are."""
    if isinstance(observed, Unknown):
        return observed.reason
    if observed.listeners is None or observed.connections is None:
        return "/proc/net/tcp cannot be read"
    sockets = (*observed.listeners, *observed.connections)
    count = sum(first <= socket.port <= last for socket in sockets)
    is_incomplete = observed.is_cut and count >= ports_facts.MOST_SOCKETS
    return "more sockets in the range than are looked at" if is_incomplete else ""


Objections = dict[tuple[str, Ranges], list[str]]  # (reason, ports) -> those that exclude them


def _objection_lines(groups: Objections, first: int, last: int) -> tuple[str, ...]:
    """``29500-29502 on gpu017: python3 of ada listens``, as far as the ports are in the range."""
    texts = []
    for (reason, ranges), names in groups.items():
        if inside := overlap(ranges, first, last):
            ports = ", ".join(range_text(*part) for part in inside[:4])
            suffix = ", ..." if len(inside) > 4 else ""
            texts.append(f"not {ports}{suffix} on {fold(names)}: {reason}")
    remainder = f"and {len(texts) - _MAX_NOTES} more reasons against ports"
    return (*texts[:_MAX_NOTES], remainder) if len(texts) > _MAX_NOTES else tuple(texts)


def choose(observed: Mapping[str, Ports | Unknown], ranges: Mapping[str, Range]) -> PortChoice:
    """The first port that is free on every node. A port that the kernel may give to an outgoing
    connection is the second choice.

    observed: node -> its ports, probed with its range
    ranges:   node -> the range of its policy; a port must be in all of them

    A free port has no listener, is no connection's local port, is open to any user, and no rule of
    the packet filter drops it by its text. A node without a probe is named, and excludes no port.
    """
    first, last = max(r[0] for r in ranges.values()), min(r[1] for r in ranges.values())
    if first > last:
        by_range: dict[Range, list[str]] = {}
        for name, allowed in ranges.items():
            by_range.setdefault(allowed, []).append(name)
        notes = tuple(f"{range_text(*span)} on {fold(names)}" for span, names in by_range.items())
        reason = "the nodes' policies have no port in common: --ports FIRST-LAST"
        return PortChoice(None, reason, notes[:_MAX_NOTES], {})
    unknown = {
        name: reason
        for name, observation in observed.items()
        if (reason := _unseen(observation, first, last))
    }
    taken: Objections = {}
    may_be_taken: Objections = {}
    for name, observation in observed.items():
        if isinstance(observation, Unknown):
            continue
        for reason, ports in _taken(observation, first, last).items():
            taken.setdefault((reason, ports), []).append(name)
        ephemeral = observation.ephemeral
        sources = without(ephemeral, observation.reserved or ()) if ephemeral else ()
        if inside := overlap(sources, first, last):
            may_be_taken.setdefault(("outgoing connections may get it", inside), []).append(name)
    if len(unknown) == len(observed):
        return PortChoice(None, "no node tells which of its ports are free", (), unknown)
    free = _free(first, last, taken)
    lasting = _free(first, last, {**taken, **may_be_taken})
    span = range_text(first, last)
    if not free:
        reason = f"no port of {span} is free on all nodes"
        return PortChoice(None, reason, _objection_lines(taken, first, last), unknown)
    port = (lasting or free)[0]
    notes = _objection_lines({**taken, **may_be_taken} if lasting else taken, first, port - 1)
    if not lasting:
        nodes = fold(name for names in may_be_taken.values() for name in names)
        notes += (f"outgoing connections may get it on {nodes}: see ports.ephemeral",)
    return PortChoice(port, f"the first of {span} that is free on all nodes", notes, unknown)


def _free(first: int, last: int, against: Objections) -> list[int]:
    """The ports of the range that no objection excludes, ascending."""
    held = {
        port
        for ranges in {ranges for _, ranges in against}
        for low, high in ranges
        for port in range(low, high + 1)
    }
    return [port for port in range(first, last + 1) if port not in held]


# --- The variables, from all nodes' suggestions.

SUBJECTS = ("nics", "rdma", "ports", "pdsh")  # the subjects to probe

# The kernel allows more in names (dev_valid_name), but no driver, udev rule or person uses it,
# and a comma, "=" or "^" would mean something to NCCL.
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(:[0-9]{1,3})?")


class NodesByValue(NamedTuple):
    """Nodes that suggest the same value."""

    value: str | None  # None: these nodes need none
    nodes: Names


class NodesByReason(NamedTuple):
    """Nodes whose value is not known, by the reason."""

    reason: Name
    nodes: Names


@dataclass(frozen=True)
class JobVariable:
    """A variable of a job's environment."""

    name: Annotated[str, {"pattern": "^[A-Z][A-Za-z0-9_]*$"}]
    # the value to export; None: export nothing
    value: Annotated[str | None, {"pattern": "^[A-Za-z0-9=/][A-Za-z0-9_.:,=/%-]*$"}]
    reason: Name  # why this value, or why none
    settled: bool  # no person has to decide: all nodes are known, and none differs
    # the nodes by the value that they suggest, the most common value first
    nodes_by_value: tuple[NodesByValue, ...] = ()
    unknown: tuple[NodesByReason, ...] = ()  # the nodes whose value is not known, by the reason
    notes: tuple[str, ...] = ()  # further lines about it, such as the users of occupied ports


@dataclass(frozen=True)
class Environment:
    """The document of `nodeready env`. Text is one line without control characters."""

    SCHEMA: ClassVar = "env"
    VERSION: ClassVar = 2

    taken: WholeSecond  # when the nodes were probed, UTC
    nodes: Names  # the nodes that were probed
    gaps: NodeGaps  # the nodes that could not be probed
    variables: tuple[JobVariable, ...]


@dataclass(frozen=True)
class _Suggestion:
    """A node's suggestion, and the reason. value: "": the node needs none; None: unknown"""

    value: str | None
    reason: str = field(default="", compare=False)


def _nodes_by_text(texts: Mapping[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """Node -> text, as pairs of a text and its nodes, the most common text first."""
    nodes_by_text: dict[str, list[str]] = {}
    for node, text in texts.items():
        nodes_by_text.setdefault(text, []).append(node)
    ranked = sorted(nodes_by_text.items(), key=lambda item: -len(item[1]))
    return [(text, tuple(nodes)) for text, nodes in ranked]


def nodes_by_reason(reasons: Mapping[str, str]) -> tuple[NodesByReason, ...]:
    """Node -> reason, as reasons with their nodes, the most common reason first."""
    return tuple(NodesByReason(*row) for row in _nodes_by_text(reasons))


def _reason(observation: object, noun: str) -> str:
    return f"{noun}: {observation.reason if isinstance(observation, Unknown) else 'not looked at'}"


def _interface(snapshot: Snapshot, fleet: FleetFacts) -> _Suggestion:
    nics = snapshot.subjects.get("nics")
    if not isinstance(nics, Nics):
        return _Suggestion(None, _reason(nics, "its network"))
    name, reason = socket_interface(nics, fleet)
    if name is not None and not _INTERFACE.fullmatch(name):
        return _Suggestion(None, f"{name!a} is no plausible name of an interface")
    return _Suggestion(name, reason)


def _hca(snapshot: Snapshot, fleet: FleetFacts) -> _Suggestion:
    rdma, nics = snapshot.subjects.get("rdma"), snapshot.subjects.get("nics")
    if not isinstance(rdma, Rdma):
        return _Suggestion(None, _reason(rdma, "its RDMA devices"))
    devices, reason = ib_hca(rdma, nics if isinstance(nics, Nics) else None, fleet)
    if devices and not isinstance(nics, Nics):
        # Some of them may be the management network's.
        return _Suggestion(None, _reason(nics, "its network"))
    if strange := [name for name in devices if not _DEVICE.fullmatch(name)]:
        return _Suggestion(None, f"{strange[0]!a} is no plausible name of an RDMA device")
    return _Suggestion(hca_value(devices), reason)


def _pdsh(snapshot: Snapshot, fleet: FleetFacts) -> _Suggestion:
    pdsh = snapshot.subjects.get("pdsh")
    if not isinstance(pdsh, Pdsh):
        return _Suggestion(None, _reason(pdsh, "pdsh"))
    if not pdsh.installed:
        return _Suggestion("", "pdsh is not installed")
    return _Suggestion("ssh", "pdsh is installed, and its own default may be rsh")


def _variable(
    name: str,
    ask: Callable[[Snapshot, FleetFacts], _Suggestion],
    snapshots: Mapping[str, Snapshot],
    fleet: FleetFacts,
    *,
    harmless: bool = False,
) -> JobVariable:
    """The nodes' suggestion, if they agree. harmless: also where a node needs none"""
    suggestions = {node: ask(snapshot, fleet) for node, snapshot in snapshots.items()}
    node_values = {node: s.value for node, s in suggestions.items() if s.value is not None}
    rows = _nodes_by_text(node_values)
    values = tuple(NodesByValue(text or None, nodes) for text, nodes in rows)
    unknown_reasons = {node: s.reason for node, s in suggestions.items() if s.value is None}
    unknown = nodes_by_reason(unknown_reasons)
    needed = [value or "" for value, _ in values if value or not harmless] or [""]
    if not values:
        return JobVariable(name, None, "no node tells", False, (), unknown)
    if len(needed) > 1:
        return JobVariable(name, None, "the nodes differ", False, values, unknown)
    reasons = Counter(s.reason for s in suggestions.values() if s.value == needed[0])
    reason = reasons.most_common(1)[0][0]
    return JobVariable(name, needed[0] or None, reason, not unknown, values, unknown)


def _sockets(snapshots: Mapping[str, Snapshot], fleet: FleetFacts) -> JobVariable:
    def exact_interface(snapshot: Snapshot, fleet: FleetFacts) -> _Suggestion:
        suggestion = _interface(snapshot, fleet)
        return replace(suggestion, value=suggestion.value and f"={suggestion.value}")

    sockets = _variable("NCCL_SOCKET_IFNAME", exact_interface, snapshots, fleet)
    names = [(value or "")[1:] for value, _ in sockets.nodes_by_value]
    if sockets.value is not None or len(names) < 2:
        return sockets
    # NCCL takes the first interface of a list that exists: the right one, if a node has only one.
    for _, nodes in sockets.nodes_by_value:
        for node in nodes:
            if len({*names} & snapshots[node]["nics"].interfaces.keys()) > 1:
                return sockets
    note = f"={','.join(names)} means the right one on each: no node has two of them"
    return replace(sockets, notes=(note,))


def _master_address(
    snapshots: Mapping[str, Snapshot], policies: Mapping[str, Policy], fleet: FleetFacts
) -> JobVariable:
    """The first node's address, IPv4 first: launchers start rank 0 there."""
    first = next(name for name in policies if name in snapshots)
    name, snapshot = "MASTER_ADDR", snapshots[first]
    suggestion, addresses, reason = _interface(snapshot, fleet), list[str](), ""
    if suggestion.value:
        reason = f"the address of {suggestion.value}"
        listed = snapshot["nics"].interfaces[suggestion.value].addresses
        texts = (text.partition("/")[0] for text in listed or ())
        addresses = sorted(filter(_is_shareable, texts), key=lambda text: ":" in text)
    if not addresses:
        unknown = (NodesByReason(reason or suggestion.reason, (first,)),)
        return JobVariable(name, None, "the first node does not tell", False, (), unknown)
    reason = f"{first}, the first node, on {suggestion.value}; rank 0 must run there"
    values = (NodesByValue(addresses[0], (first,)),)
    return JobVariable(name, addresses[0], reason, True, values)


def _is_shareable(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_link_local or address.is_loopback or address.is_unspecified)


def _port(snapshots: Mapping[str, Snapshot], policies: Mapping[str, Policy]) -> JobVariable:
    observed: dict[str, Ports | Unknown] = {}
    for node, snapshot in snapshots.items():
        ports = snapshot.subjects.get("ports")
        observed[node] = ports if isinstance(ports, (Ports, Unknown)) else Unknown("not looked at")
    choice = choose(observed, {node: policies[node].port_range for node in snapshots})
    value = None if choice.port is None else str(choice.port)
    tested = tuple(node for node in snapshots if node not in choice.unknown)
    is_settled, values = bool(value and not choice.unknown), (NodesByValue(value, tested),)
    further = values if value else (), nodes_by_reason(choice.unknown), choice.notes
    return JobVariable("MASTER_PORT", value, choice.reason, is_settled, *further)


def variables(
    snapshots: Mapping[str, Snapshot], policies: Mapping[str, Policy], fleet: FleetFacts = ALONE
) -> tuple[JobVariable, ...]:
    """The variables, in the order of this module's list, of one snapshot or more."""
    return (
        _sockets(snapshots, fleet),
        _variable("GLOO_SOCKET_IFNAME", _interface, snapshots, fleet),
        _variable("OMPI_MCA_btl_tcp_if_include", _interface, snapshots, fleet),
        _variable("NCCL_IB_HCA", _hca, snapshots, fleet),
        _variable("PDSH_RCMD_TYPE", _pdsh, snapshots, fleet, harmless=True),
        _master_address(snapshots, policies, fleet),
        _port(snapshots, policies),
    )

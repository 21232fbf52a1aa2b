"""The variables that the nodes' facts suggest for a job's environment, each with its reason.

Pure: the snapshots of all nodes go in, completed by the addresses of the other nodes
(`nodeready.audit.run.combined`).

NCCL_SOCKET_IFNAME  ``=eth1``: exactly this interface; without "=" it would be a prefix, so that
                    eth1 meant eth10 as well (NCCL user guide, environment variables)
GLOO_SOCKET_IFNAME  the same interface by its plain name: Gloo opens what stands between commas
                    (PyTorch, ProcessGroupGloo)
NCCL_IB_HCA         the RDMA devices that are not the management's: see `ib_hca`
PDSH_RCMD_TYPE      ssh, where there is pdsh: its own default may be rsh; where ssh is the default
                    already, it changes nothing
MASTER_PORT         a port that is free on every node: see `choose`

What a node says is data: a name that no interface or device has is not taken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from nodeready.inventory.nodeset import fold
from nodeready.policy import Policy
from nodeready.subjects.base import Unknown
from nodeready.subjects.nics.facts import Nics, socket_interface
from nodeready.subjects.pdsh.facts import Pdsh
from nodeready.subjects.ports import facts as ports_facts
from nodeready.subjects.ports.facts import Ports, Range, Socket, parse_ranges
from nodeready.subjects.ports.firewall import shown
from nodeready.subjects.rdma.facts import Rdma, hcas
from nodeready.subjects.snapshot import Snapshot

# --- MASTER_PORT: a port on which a job can rendezvous.
#
# Which node will be the first of a job is not known yet: the port must be free on all of them.

#: At most so many reasons are told why other ports are not taken.
_MOST = 6

Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class Choice:
    """The port for a job, or why there is none.

    port:    None when none is free on all nodes
    reason:  why this port, or why none
    notes:   which nodes stand against other ports, or will against this one
    unknown: node -> why its ports are not known
    """

    port: int | None
    reason: str
    notes: tuple[str, ...]
    unknown: Mapping[str, str]


def _runs(ports: Iterable[int]) -> Ranges:
    runs: list[Range] = []
    for port in sorted({*ports}):
        if runs and runs[-1][1] + 1 == port:
            runs[-1] = (runs[-1][0], port)
        else:
            runs.append((port, port))
    return tuple(runs)


def _within(ranges: Ranges, first: int, last: int) -> Ranges:
    """The parts of ``ranges`` from ``first`` to ``last``."""
    cut = ((max(first, low), min(last, high)) for low, high in ranges)
    return tuple(one for one in cut if one[0] <= one[1])


def _holder(one: Socket) -> str:
    who = f"{one.process or 'a process'} of {one.user or f'uid {one.uid}'}"
    return f"{who} listens" if one.state == "listening" else f"a connection of {who}"


def _taken(seen: Ports, first: int, last: int) -> dict[str, Ranges]:
    """Why -> the ports of the range that a job of any user cannot use on this node."""
    held: dict[int, str] = {}
    for one in (*(seen.listeners or ()), *(seen.connections or ())):
        if first <= one.port <= last:
            held.setdefault(one.port, _holder(one))
    ports: dict[str, list[int]] = {}
    for port, why in held.items():
        ports.setdefault(why, []).append(port)
    found = {why: _runs(some) for why, some in ports.items()}
    if seen.privileged_below > 0:
        found["for root alone"] = _within(((0, seen.privileged_below - 1),), first, last)
    if seen.firewall.verdict == "dropped":
        dropped = parse_ranges(seen.firewall.ports) or ()
        found["the firewall drops it"] = _within(dropped, first, last)
    return {why: ranges for why, ranges in found.items() if ranges}


def _lent(seen: Ports) -> Ranges:
    """The ports that the kernel gives to outgoing connections: ephemeral and not reserved."""
    left = [seen.ephemeral] if seen.ephemeral else []
    for first, last in seen.reserved or ():
        left = [
            part
            for low, high in left
            for part in ((low, min(high, first - 1)), (max(low, last + 1), high))
            if part[0] <= part[1]
        ]
    return tuple(left)


def _unseen(seen: Ports | Unknown, first: int, last: int) -> str:
    """Why nobody knows all ports of the range that are held on this node, or ""."""
    if isinstance(seen, Unknown):
        return seen.reason
    if seen.listeners is None or seen.connections is None:
        return "/proc/net/tcp cannot be read"
    inside = [one for one in (*seen.listeners, *seen.connections) if first <= one.port <= last]
    cut = seen.more and len(inside) >= ports_facts.MOST
    return "more sockets in the range than are looked at" if cut else ""


#: (reason, ports) -> the nodes that stand against these ports.
Objections = dict[tuple[str, Ranges], list[str]]


def _objection_lines(groups: Objections, first: int, last: int) -> tuple[str, ...]:
    """``29500-29502 on gpu017: python3 of ada listens``, as far as the ports are in the range."""
    texts = []
    for (why, ranges), names in groups.items():
        inside = _within(ranges, first, last)
        if inside:
            ports = ", ".join(shown(*one) for one in inside[:4])
            more = ", ..." if len(inside) > 4 else ""
            texts.append(f"not {ports}{more} on {fold(names)}: {why}")
    rest = f"and {len(texts) - _MOST} more reasons against ports"
    return (*texts[:_MOST], rest) if len(texts) > _MOST else tuple(texts)


def choose(seen: Mapping[str, Ports | Unknown], ranges: Mapping[str, Range]) -> Choice:
    """The first port that is free on every node; one that stays free rather than one that the
    kernel may give to an outgoing connection.

    seen:   node -> its ports, looked at with its range
    ranges: node -> the range of its policy; a port must be in all of them

    Free is a port on which nobody listens, which is no connection's local port, which any user
    may take, and which the packet filter does not drop. A node that could not be looked at is
    named, and stands against nothing.
    """
    first, last = max(r[0] for r in ranges.values()), min(r[1] for r in ranges.values())
    if first > last:
        wanted: dict[Range, list[str]] = {}
        for name, span in ranges.items():
            wanted.setdefault(span, []).append(name)
        notes = tuple(f"{shown(*span)} on {fold(names)}" for span, names in wanted.items())
        reason = "the nodes' policies have no port in common: --ports FIRST-LAST"
        return Choice(None, reason, notes[:_MOST], {})
    unknown = {name: why for name, one in seen.items() if (why := _unseen(one, first, last))}
    taken: Objections = {}
    lent: Objections = {}
    for name, one in seen.items():
        if isinstance(one, Unknown):
            continue
        for why, ports in _taken(one, first, last).items():
            taken.setdefault((why, ports), []).append(name)
        if inside := _within(_lent(one), first, last):
            lent.setdefault(("outgoing connections may get it", inside), []).append(name)
    if len(unknown) == len(seen):
        return Choice(None, "no node tells which of its ports are free", (), unknown)
    free = _free(first, last, taken)
    lasting = _free(first, last, {**taken, **lent})
    every = shown(first, last)
    if not free:
        reason = f"no port of {every} is free on all nodes"
        return Choice(None, reason, _objection_lines(taken, first, last), unknown)
    port = (lasting or free)[0]
    notes = _objection_lines({**taken, **lent} if lasting else taken, first, port - 1)
    if not lasting:
        lenders = fold(name for names in lent.values() for name in names)
        notes += (f"outgoing connections may get it on {lenders}: see ports.ephemeral",)
    return Choice(port, f"the first of {every} that is free on all nodes", notes, unknown)


def _free(first: int, last: int, against: Objections) -> list[int]:
    """The ports of the range that none of these stand against, ascending."""
    held = {
        port
        for ranges in {ranges for _, ranges in against}
        for low, high in ranges
        for port in range(low, high + 1)
    }
    return [port for port in range(first, last + 1) if port not in held]


# --- NCCL_SOCKET_IFNAME: the interface of NCCL's sockets.
#
# Left alone, NCCL takes an interface whose name begins with ``ib``, else the first that is neither
# loopback nor Docker's (NVIDIA's NCCL user guide, NCCL_SOCKET_IFNAME): on a node with a management
# network, a virtual bridge or an unused port that is often one that reaches no other node, and the
# job hangs or stops in its first collective.


def socket_ifname(nics: Nics) -> tuple[str | None, str]:
    """The name of the interface, or None, and the reason.

    In this order: the interface whose routes lead to the most of the other nodes (what
    `nodeready.subjects.nics.facts.with_peers` found); the one of the default route; the only one
    that is configured. Never loopback, a bridge or wire of containers or virtual machines, or one
    without a link; a bond rather than its slaves, because it is the bond that has the routes.

    NCCL takes the value as a prefix, so that ``eth1`` also means ``eth10``: write ``=eth1``.
    """
    return socket_interface(nics)


# --- NCCL_IB_HCA: the RDMA devices that NCCL should use.
#
# NCCL takes every active device when nothing tells it otherwise, that of the management too, and
# a job then waits for the slowest. A name in NCCL_IB_HCA is a prefix, so that mlx5_1 means mlx5_10
# as well; with "=" in front it is exact (NCCL's documentation, environment variables).


def ib_hca(rdma: Rdma, nics: Nics | None) -> tuple[tuple[str, ...], str]:
    """The devices, and why those; without the network (None) as far as RDMA alone tells."""
    return hcas(rdma, () if nics is None else _management(nics))


def variable(devices: tuple[str, ...]) -> str:
    """The value of NCCL_IB_HCA that means these devices and no other; "" for none."""
    return f"={','.join(devices)}" if devices else ""


def _management(nics: Nics) -> set[str]:
    """The interfaces of the default route and of the way to the other nodes, with their ports."""
    ends = {nics.default_interface, *nics.peers_via[:1]} - {None}
    below = {
        name for name, one in nics.interfaces.items() if one.master in ends or ends & {*one.upper}
    }
    return {name for name in ends | below if name}


# --- The variables, from all nodes' suggestions.

#: The subjects that have to be looked at.
SUBJECTS = ("nics", "rdma", "ports", "pdsh")

# The kernel allows more in names (dev_valid_name), but no driver, udev rule or person uses it,
# and a comma, "=" or "^" would mean something to NCCL.
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(:[0-9]{1,3})?")

#: Value or reason with the names of the nodes that have it, the most common first.
Groups = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Variable:
    """A variable of a job's environment.

    value:          what to export; None: it is not exported
    reason:         why this value, or why none
    settled:        nobody has to look at it: no node differs, and all are known
    nodes_by_value: which nodes suggest which value; "" of those that need none
    unknown:        reason -> the nodes of which it could not be found out
    notes:          further lines about it
    """

    name: str
    value: str | None
    reason: str
    settled: bool
    nodes_by_value: Groups = ()
    unknown: Groups = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """What `nodeready env` found.

    taken:     when the nodes were looked at, UTC
    nodes:     those that were
    missing:   error -> the nodes that could not be
    """

    taken: str
    nodes: tuple[str, ...]
    missing: Groups
    variables: tuple[Variable, ...]


@dataclass(frozen=True)
class _Suggestion:
    """What one node suggests: a value, "" for none, or None when it cannot be told; and why."""

    value: str | None
    reason: str = field(default="", compare=False)


def grouped(pairs: Mapping[str, str]) -> Groups:
    """Node -> text, as text -> nodes, the most common first."""
    found: dict[str, list[str]] = {}
    for name, text in pairs.items():
        found.setdefault(text, []).append(name)
    ranked = sorted(found.items(), key=lambda item: -len(item[1]))
    return tuple((text, tuple(names)) for text, names in ranked)


def _reason(seen: object, what: str) -> str:
    return f"{what}: {seen.reason if isinstance(seen, Unknown) else 'not looked at'}"


def _interface(snapshot: Snapshot) -> _Suggestion:
    nics = snapshot.subjects.get("nics")
    if not isinstance(nics, Nics):
        return _Suggestion(None, _reason(nics, "its network"))
    name, why = socket_ifname(nics)
    if name is not None and not _INTERFACE.fullmatch(name):
        return _Suggestion(None, f"{name!a} is no plausible name of an interface")
    return _Suggestion(name, why)


def _exactly(snapshot: Snapshot) -> _Suggestion:
    said = _interface(snapshot)
    return _Suggestion(f"={said.value}", said.reason) if said.value else said


def _hca(snapshot: Snapshot) -> _Suggestion:
    rdma, nics = snapshot.subjects.get("rdma"), snapshot.subjects.get("nics")
    if not isinstance(rdma, Rdma):
        return _Suggestion(None, _reason(rdma, "its RDMA devices"))
    devices, why = ib_hca(rdma, nics if isinstance(nics, Nics) else None)
    if devices and not isinstance(nics, Nics):
        # Which of them are the management's is not known.
        return _Suggestion(None, _reason(nics, "its network"))
    strange = [name for name in devices if not _DEVICE.fullmatch(name)]
    if strange:
        return _Suggestion(None, f"{strange[0]!a} is no plausible name of an RDMA device")
    return _Suggestion(variable(devices), why)


def _pdsh(snapshot: Snapshot) -> _Suggestion:
    pdsh = snapshot.subjects.get("pdsh")
    if not isinstance(pdsh, Pdsh):
        return _Suggestion(None, _reason(pdsh, "pdsh"))
    if not pdsh.installed:
        return _Suggestion("", "pdsh is not installed")
    return _Suggestion("ssh", "pdsh is installed, and its own default may be rsh")


def _variable(
    name: str,
    ask: Callable[[Snapshot], _Suggestion],
    snapshots: Mapping[str, Snapshot],
    *,
    harmless: bool = False,
) -> Variable:
    """What the nodes suggest, when they agree.

    harmless: the variable means nothing where a node needs none
    """
    suggestions = {node: ask(snapshot) for node, snapshot in snapshots.items()}
    values = grouped(
        {node: one.value for node, one in suggestions.items() if one.value is not None}
    )
    unknown = grouped({node: one.reason for node, one in suggestions.items() if one.value is None})
    needed = [value for value, _ in values if value or not harmless] or [""]
    if not values:
        return Variable(name, None, "no node tells", False, (), unknown)
    if len(needed) > 1:
        return Variable(name, None, "the nodes differ", False, values, unknown)
    reasons = Counter(one.reason for one in suggestions.values() if one.value == needed[0])
    reason = reasons.most_common(1)[0][0]
    return Variable(name, needed[0] or None, reason, not unknown, values, unknown)


def _sockets(snapshots: Mapping[str, Snapshot]) -> Variable:
    found = _variable("NCCL_SOCKET_IFNAME", _exactly, snapshots)
    names = [value[1:] for value, _ in found.nodes_by_value]
    if found.value is not None or len(names) < 2:
        return found
    # NCCL takes what it finds of a list: where every node has one of them alone, that is the one.
    for _, nodes in found.nodes_by_value:
        for node in nodes:
            if len({*names} & snapshots[node]["nics"].interfaces.keys()) > 1:
                return found
    return replace(
        found, notes=(f"={','.join(names)} means the right one on each: no node has two of them",)
    )


def _port(snapshots: Mapping[str, Snapshot], policies: Mapping[str, Policy]) -> Variable:
    seen: dict[str, Ports | Unknown] = {}
    for node, snapshot in snapshots.items():
        ports = snapshot.subjects.get("ports")
        seen[node] = ports if isinstance(ports, (Ports, Unknown)) else Unknown("not looked at")
    choice = choose(seen, {node: policies[node].port_range for node in snapshots})
    value = None if choice.port is None else str(choice.port)
    known = tuple(node for node in snapshots if node not in choice.unknown)
    return Variable(
        "MASTER_PORT",
        value,
        choice.reason,
        value is not None and not choice.unknown,
        ((value, known),) if value else (),
        grouped(choice.unknown),
        choice.notes,
    )


def variables(
    snapshots: Mapping[str, Snapshot], policies: Mapping[str, Policy]
) -> tuple[Variable, ...]:
    """The variables, in the order of this module's list.

    snapshots: node -> what it showed, at least one
    policies:  node -> its policy
    """
    return (
        _sockets(snapshots),
        _variable("GLOO_SOCKET_IFNAME", _interface, snapshots),
        _variable("NCCL_IB_HCA", _hca, snapshots),
        _variable("PDSH_RCMD_TYPE", _pdsh, snapshots, harmless=True),
        _port(snapshots, policies),
    )

"""MASTER_PORT: a port on which a job can rendezvous. Pure.

The first node of a job is not known yet: the port must be free on all nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nodeready.core.base import Unknown
from nodeready.core.text import join_ranges, range_text
from nodeready.fleet.inventory.nodeset import fold
from nodeready.subjects.ports import facts as ports_facts
from nodeready.subjects.ports.facts import Ports, Socket
from nodeready.subjects.ports.firewall import Range, overlap, parse_ranges, without

#: Maximum notes about ports that are not chosen.
_MAX_NOTES = 6

Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class PortChoice:
    """The port for a job."""

    port: int | None  # None: no port is free on all nodes
    reason: str  # why this port, or why none
    notes: tuple[str, ...]  # the nodes that exclude other ports, or may exclude this port later
    unknown: Mapping[str, str]  # node -> why its ports are not known


def _holder(socket: Socket) -> str:
    holder = f"{socket.process or 'a process'} of {socket.user or f'uid {socket.uid}'}"
    return f"{holder} listens" if socket.state == "listening" else f"a connection of {holder}"


def _taken(observed: Ports, first: int, last: int) -> dict[str, Ranges]:
    """Reason -> the ports of the range that a job of any user cannot use on this node."""
    held: dict[int, str] = {}
    for socket in (*(observed.listeners or ()), *(observed.connections or ())):
        if first <= socket.port <= last:
            held.setdefault(socket.port, _holder(socket))
    ports: dict[str, list[int]] = {}
    for port, reason in held.items():
        ports.setdefault(reason, []).append(port)
    taken = {
        reason: tuple(join_ranges((port, port) for port in numbers))
        for reason, numbers in ports.items()
    }
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


#: (reason, ports) -> the nodes that exclude these ports.
Objections = dict[tuple[str, Ranges], list[str]]


def _objection_lines(groups: Objections, first: int, last: int) -> tuple[str, ...]:
    """``29500-29502 on gpu017: python3 of ada listens``, as far as the ports are in the range."""
    texts = []
    for (reason, ranges), names in groups.items():
        inside = overlap(ranges, first, last)
        if inside:
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
    the packet filter drops it by its text. A node that could not be probed is named, and excludes
    no port.
    """
    first, last = max(r[0] for r in ranges.values()), min(r[1] for r in ranges.values())
    if first > last:
        by_range: dict[Range, list[str]] = {}
        for name, allowed in ranges.items():
            by_range.setdefault(allowed, []).append(name)
        notes = tuple(
            f"{range_text(*allowed)} on {fold(names)}" for allowed, names in by_range.items()
        )
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

"""The port on which a job can rendezvous on every one of its nodes: the value of MASTER_PORT.

Which node will be the first of a job is not known yet, so that a port must be free on all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nodeready.nodesets import fold
from nodeready.probes import sockets
from nodeready.probes.base import Unknown
from nodeready.probes.firewall import shown
from nodeready.probes.ports import Ports, Range, parse_ranges
from nodeready.probes.sockets import Socket

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
    cut = seen.more and len(inside) >= sockets.MOST
    return "more sockets in the range than are looked at" if cut else ""


Groups = dict[tuple[str, Ranges], list[str]]


def _said(groups: Groups, first: int, last: int) -> tuple[str, ...]:
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
    taken: Groups = {}
    lent: Groups = {}
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
        return Choice(None, reason, _said(taken, first, last), unknown)
    port = (lasting or free)[0]
    notes = _said({**taken, **lent} if lasting else taken, first, port - 1)
    if not lasting:
        lenders = fold(name for names in lent.values() for name in names)
        notes += (f"outgoing connections may get it on {lenders}: see ports.ephemeral",)
    return Choice(port, f"the first of {every} that is free on all nodes", notes, unknown)


def _free(first: int, last: int, against: Groups) -> list[int]:
    """The ports of the range that none of these stand against, ascending."""
    held = {
        port
        for ranges in {ranges for _, ranges in against}
        for low, high in ranges
        for port in range(low, high + 1)
    }
    return [port for port in range(first, last + 1) if port not in held]

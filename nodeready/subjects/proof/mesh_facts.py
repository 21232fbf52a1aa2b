"""The job's ports between the nodes, as all nodes together saw them."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.subjects import wire


@dataclass(frozen=True)
class Busy:
    """A port on which the proof could not listen, and the kernel's error."""

    port: wire.Port
    error: wire.Line


@dataclass(frozen=True)
class Blocked:
    """One fault of a node's connections, reported once for all connections that show it.

    kind:  ``target``: peers do not reach the node; ``source``: the node does not reach peers;
           ``both``; ``pair``: the node does not reach one peer, and neither has other trouble
    ports: the ports that fail; (): not tried, because the name resolves to a wrong address
    peers: the peers with which the connections fail
    tried: with how many peers connections were tried, in that direction
    cause: one line
    back:  whether the opposite direction works; None: it was not tried
    """

    kind: str
    ports: tuple[int, ...]
    peers: tuple[str, ...]
    tried: int
    cause: str
    back: bool | None


@dataclass(frozen=True)
class Mesh:
    """The outcome of the connections between a node and its peers on the job's ports.

    nodes:     how many nodes took part; 1: this one alone
    first, last: the range of ports
    listening: the ports of the range on which the proof listened here for a while
    busy:      the ports on which it could not listen
    to:        how many peers this node tried to reach
    by:        how many peers tried to reach this node
    reached:   how many peers this node reached, on all ports that were tried
    reached_by: how many peers reached this node, on all ports that were tried
    blocked:   the faults that this node causes
    median_ms: of the handshakes of this node's own connections; None: there was none
    worst_ms:  the slowest of these handshakes
    worst_peer: the peer of the slowest handshake
    crowd:     the number of connections to this node's listeners, if most were foreign and a peer
               failed to connect; else 0
    own_name:  why the node's host name does not resolve to the node's address on the node; "": it
               does
    names:     the faults of host names between this node and its peers
    """

    nodes: int
    first: int
    last: int
    listening: tuple[int, ...]
    busy: tuple[Busy, ...]
    to: int
    by: int
    reached: int
    reached_by: int
    blocked: tuple[Blocked, ...]
    median_ms: float | None
    worst_ms: float | None
    worst_peer: str
    crowd: int = 0
    own_name: str = ""
    names: tuple[Blocked, ...] = ()

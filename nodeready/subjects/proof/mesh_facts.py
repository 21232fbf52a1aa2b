"""The job's ports between the nodes, as all nodes together saw them."""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.core import wire


@dataclass(frozen=True)
class Busy:
    """A port on which the proof could not listen, and the kernel's error."""

    port: wire.Port
    error: wire.Line


@dataclass(frozen=True)
class Blocked:
    """One fault of a node's connections, reported once for all connections that show it."""

    # ``target``: peers do not reach the node; ``source``: the node does not reach peers; ``both``;
    # ``pair``: the node does not reach one peer, and neither has other trouble
    kind: str
    # the ports that fail; (): not tried, because the name resolves to a wrong address
    ports: tuple[int, ...]
    peers: tuple[str, ...]  # the peers with which the connections fail
    tried: int  # with how many peers connections were tried, in that direction
    cause: str  # one line
    back: bool | None  # whether the opposite direction works; None: it was not tried


@dataclass(frozen=True)
class Mesh:
    """The outcome of the connections between a node and its peers on the job's ports."""

    nodes: int  # how many nodes took part; 1: this one alone
    first: int  # the range of ports
    last: int  # likewise
    # the ports of the range on which the proof listened here for a while
    listening: tuple[int, ...]
    busy: tuple[Busy, ...]  # the ports on which it could not listen
    to: int  # how many peers this node tried to reach
    by: int  # how many peers tried to reach this node
    reached: int  # how many peers this node reached, on all ports that were tried
    reached_by: int  # how many peers reached this node, on all ports that were tried
    blocked: tuple[Blocked, ...]  # the faults that this node causes
    # of the handshakes of this node's own connections; None: there was none
    median_ms: float | None
    worst_ms: float | None  # the slowest of these handshakes
    worst_peer: str  # the peer of the slowest handshake
    # the number of connections to this node's listeners, if most were foreign and a peer failed to
    # connect; else 0
    crowd: int = 0
    # why the node's host name does not resolve to the node's address on the node; "": it does
    own_name: str = ""
    names: tuple[Blocked, ...] = ()  # the faults of host names between this node and its peers

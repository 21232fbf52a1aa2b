"""The job's ports between the nodes, as all nodes together saw them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Busy:
    """A port on which we could not listen, and what the kernel said."""

    port: int
    error: str


@dataclass(frozen=True)
class Blocked:
    """One thing that is wrong with the connections of a node, named once for all of them.

    kind:  ``target``: others do not reach it; ``source``: it does not reach others; ``both``;
           ``pair``: it does not reach one peer, and neither is to blame for more
    ports: on which; (): it came to no connection, for the name already led astray
    peers: the others
    tried: how many others there were attempts with, in that direction
    cause: one line
    back:  whether the other direction works; None: nobody tried
    """

    kind: str
    ports: tuple[int, ...]
    peers: tuple[str, ...]
    tried: int
    cause: str
    back: bool | None


@dataclass(frozen=True)
class Mesh:
    """How a node's connections to others and from others went on the job's ports.

    nodes:     how many nodes took part; 1: it is alone
    first, last: the range
    listening: the ports of the range on which we listened here for a while
    busy:      those that we tried in vain
    to:        how many nodes it tried to reach
    by:        how many tried to reach it
    reached:   how many of the former it reached, on all ports that were tried
    reached_by: by how many of the latter it was
    blocked:   what is wrong, for which this node is to blame
    median_ms: of the handshakes of its own connections; None: none came about
    worst_ms:  the slowest of them
    worst_peer: to this node
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

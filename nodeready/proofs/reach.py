"""The way from a node to others and back, as all nodes together saw it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trouble:
    """One thing that is wrong with the logins of a node, named once for all of them.

    kind:  ``target``: others cannot log in to it; ``source``: it cannot log in to others;
           ``both``; ``pair``: it cannot log in to one peer, and neither is to blame for more
    peers: the others
    tried: how many others there were attempts with, in that direction
    cause: a key of `nodeready.checks.ssh_causes`
    said:  what ssh said, one line
    back:  whether the other direction works; None: nobody tried
    """

    kind: str
    peers: tuple[str, ...]
    tried: int
    cause: str
    said: str
    back: bool | None


@dataclass(frozen=True)
class Missing:
    """A peer that ssh reaches and pdsh does not."""

    name: str
    said: str


@dataclass(frozen=True)
class Reach:
    """How a node reaches others and is reached.

    to:        how many peers it tried to log in to
    by:        how many tried to log in to it
    ssh:       what is wrong with that, for which this node is to blame
    asked:     how many peers pdsh was asked for
    distinct:  how many different answers pdsh brought
    missing:   the peers without an answer of pdsh's
    pdsh_said: what pdsh said when it could do nothing at all, one line
    """

    to: int
    by: int
    ssh: tuple[Trouble, ...]
    asked: int
    distinct: int
    missing: tuple[Missing, ...]
    pdsh_said: str
